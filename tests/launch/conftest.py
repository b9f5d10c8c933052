"""Runs launch.sh with tiny scripts that import next to nothing."""

import os
import subprocess
import sys
import textwrap
import time

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LAUNCH = os.path.join(ROOT, "launch.sh")


def clean_environment(**changes: str) -> dict[str, str]:
    """The environment without anything that an outer launcher set; simulated ranks; the running interpreter."""
    drop = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "SLURM_", "NODE", "GPUS", "VIRTUAL_NODES", "TSN_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    return {**env, "TSN_PYTHON": sys.executable, "TSN_BUILD": "0", "TSN_DEVICE": "simulator", **changes}


@pytest.fixture
def script(tmp_path):
    """`script(text)`: path of a script whose variable `rank` is its rank; it notes its pid in the folder `pids`."""
    pids = tmp_path / "pids"
    pids.mkdir()

    def write(text: str) -> str:
        head = f"import os, sys, time\nrank = int(os.environ['RANK'])\nopen({str(pids)!r} + f'/{{os.getpid()}}', 'w')\n"
        path = tmp_path / "script.py"
        path.write_text(head + textwrap.dedent(text))
        return str(path)

    write.pids = lambda: [int(name) for name in os.listdir(pids)]
    return write


def start(*arguments: str, **env: str) -> subprocess.Popen:
    return subprocess.Popen(
        ["bash", LAUNCH, *arguments], env=clean_environment(**env), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def launch(*arguments: str, timeout: float = 30, **env: str) -> subprocess.CompletedProcess:
    """Run launch.sh to its end."""
    process = start(*arguments, **env)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"launch.sh did not end within {timeout} s; stderr: {err}") from None
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def alive(pids: list[int]) -> list[int]:
    """The processes that still run (a zombie does not)."""
    running = []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat") as f:
                if f.read().rpartition(")")[2].split()[0] not in "ZX":
                    running.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return running


def wait_until(condition, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()
