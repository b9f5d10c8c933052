"""Every tutorial prints the text of the file beside it, under the commands that are written there."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests import jobs, ranks
from tests.variants import variants

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "tutorials"
PROGRAMS = sorted(FOLDER.glob("[0-9]*.py"))


def expected_runs(program: Path) -> list[tuple[str, str]]:
    """(command, output) pairs of a tutorial's expected file: a line `$ command`, then its output."""
    text = program.with_suffix(".expected.txt").read_text()
    parts = re.split(r"^\$ (.+)\n", text, flags=re.MULTILINE)
    assert parts[0] == "" and len(parts) > 2, "the file begins with a line `$ command`"
    return [(command, output.strip()) for command, output in zip(parts[1::2], parts[2::2])]


RUNS = [(p.stem, *run) for p in PROGRAMS for run in expected_runs(p)]


def test_every_tutorial_is_listed():
    index = (FOLDER / "README.md").read_text()
    assert len(PROGRAMS) == 8
    for program in PROGRAMS:
        assert f"[{program.name}]({program.name})" in index and f"({program.stem}.expected.txt)" in index


@variants(4, "program, command, output", RUNS, ids=[f"{run[0]}-{i}" for i, run in enumerate(RUNS)])
def test_prints_the_promised_output(program, command, output):
    assert f"bash launch.sh docs/tutorials/{program}.py" in command
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "VIRTUAL_NODES")}
    # The interpreter and the build that the suite itself runs with.
    env |= {"TSN_PYTHON": sys.executable, "TSN_BUILD": "0"}
    # What needs more GPUs than there are is simulated, as launch.sh advises; elsewhere GPUs have to print the same.
    if ranks.gpus() < int(re.search(r"\bGPUS=(\d+)", command)[1]):
        env["TSN_DEVICE"] = "simulator"
    if program == PROGRAMS[0].stem:  # from nothing, as the reader
        done = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    else:
        variables, _, words = command.partition("bash launch.sh ")
        env |= dict(pair.split("=", 1) for pair in variables.split())
        done = jobs.launch(*words.split(), env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == output


def test_custom_dispatch_is_short():
    assert len((FOLDER / "03_moe_dispatch.py").read_text().splitlines()) < 80
