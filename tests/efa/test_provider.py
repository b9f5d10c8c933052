"""libfabric's own efa provider, without a device: standin.cpp takes the place of EFA's libraries."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import jobs
from tests.efa.standin import HERE, WAYS, environment, library
from tests.native.builder import ROOT
from tests.proxy.test_fabric import finish, start
from tests.variants import nightly, variants

NIGHTLY = pytest.mark.nightly
KILL_ROUNDS, PARTS = "tests/runtime/test_kill_rounds.py", 5
every_way = pytest.mark.parametrize("way", WAYS)
CHAOS = "chaos=reorder=0.3,split=0.2,eagain=0.1,delay_us=50"


def programs(monkeypatch, tmp_path, way: str, scenario: str, pes: int, *arguments: str, **options: object):
    """The proxy's program as a process for each PE."""
    env = environment(way, **options)
    for name, value in env.items():
        if not name.startswith("TSN_"):
            monkeypatch.setenv(name, value)
    return start(tmp_path, scenario, pes, env["TSN_LIBFABRIC"], env["TSN_PROVIDER"], *arguments)


@variants(
    1,
    "script, way",
    [
        ("01_put_signal", "1.17-efa-p4d"),
        ("01_put_signal", "2.x-efa-direct-p5en"),
        *(nightly("08_collectives", way) for way in WAYS),
    ],
)
def test_tutorials(script, way):
    env = {**os.environ, "TSN_DEVICE": "simulator", "GPUS": "2", "VIRTUAL_NODES": "2", **environment(way)}
    done = jobs.launch(f"docs/tutorials/{script}.py", env=env)
    assert done.returncode == 0, done.stderr
    # Debian 12's libfabric 1.17 emulates writes: the target copies from messages, and raises the immediates.
    assert ("provider efa emulates RDMA writes" in done.stderr) == ("1.17" in way)


def test_answers_of_the_provider_are_recorded(tmp_path):
    """The strict device of tests/native answers from this table; tests/efa/record.sh writes it anew."""
    command = [HERE / "record.sh", tmp_path / "answers.h", library("system"), library("bundled")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "answers.h").read_text() == (ROOT / "tests/native/efa_answers.h").read_text()


MODES = {
    "plain": [],
    "staging": ["staging=1", "queues=2", "threads=2"],
    "shared": ["rails=2", "threads=2", "peer_threads=2", "shared=1024"],
}
# With every change each mode runs one way, and each way in one mode; the tutorials and the chaos below are plain too.
ORDINARY = dict(zip(WAYS, ("staging", "shared", "plain")))


@pytest.mark.parametrize(
    "way, mode",
    [nightly(way, mode, id=f"{way}-{mode}", when=ORDINARY[way] != mode) for way in WAYS for mode in MODES],
)
def test_traffic(monkeypatch, tmp_path, way, mode):
    rounds = "rounds=5" if "1.17" in way else "rounds=10"
    processes = programs(monkeypatch, tmp_path, way, "traffic", 2, rounds, *MODES[mode])
    for status, output in finish(processes):
        assert status == 0, output


@pytest.mark.parametrize("first, count", [(1, 1), pytest.param(2, 200, marks=[NIGHTLY, pytest.mark.timeout(7200)])])
@every_way
@pytest.mark.sample(2)
def test_chaos(monkeypatch, tmp_path, way, first, count):
    """Seeds of the stand-in's order and of the chaos in front of it."""
    for seed in range(first, first + count):
        folder = tmp_path / str(seed)
        folder.mkdir()
        options = {"seed": seed, "window": 64, "rnr_us": 500}
        arguments = ["rounds=5", CHAOS, f"seeds={seed}:{seed + 1}", "largest=9000"]
        for status, output in finish(programs(monkeypatch, folder, way, "traffic", 2, *arguments, **options)):
            assert status == 0, (seed, output)


def _have_met(folder: Path) -> bool:
    """Whether three PEs have written their addresses."""
    return len([name for name in os.listdir(folder) if not name.endswith(".part")]) >= 3


def test_killed_peer(monkeypatch, tmp_path):
    """The others report within the deadline which PE is lost; none hangs, and nothing is left in /dev/shm. All ways at once:
    most of it is waiting."""
    before = set(os.listdir("/dev/shm"))
    jobs_of = {}
    for way in WAYS:
        folder = tmp_path / way
        folder.mkdir()
        jobs_of[way] = folder, programs(monkeypatch, folder, way, "failure", 3, "timeout_ms=2000", timeout_ms=1000)
    try:
        deadline = time.monotonic() + 60
        while not all(map(_have_met, (folder for folder, _ in jobs_of.values()))) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        during = set(os.listdir("/dev/shm")) - before
        assert not [name for name in during if name.startswith("fe80")], "the provider's own objects of shared memory"
        for _, processes in jobs_of.values():
            processes[2].send_signal(signal.SIGKILL)
        results = {way: finish(processes, timeout=30) for way, (_, processes) in jobs_of.items()}
    finally:
        for _, processes in jobs_of.values():
            finish(processes, timeout=1)
    for way, ended in results.items():
        for status, output in ended[:2]:
            # A provider that tries again for itself takes nothing more for a peer that is gone: the network's failure, by then.
            assert status == 0 and ("PeerLost" in output or "FabricError" in output), (way, output)
            assert "PE -1" not in output and "does not name" not in output, (way, output)
        assert any("PE 2" in output for _, output in ended[:2]), (way, ended)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("fe80")]


@pytest.mark.parametrize(
    "way, fault, rounds",
    [pytest.param(w, f, 20, marks=[NIGHTLY, pytest.mark.timeout(3600)]) for w in WAYS for f in ("kill", "stop")],
)
def test_kill_rounds(way, fault, rounds):
    """Ranks with kernels and proxies, of which one is killed or stopped at a random moment. A process that has looked for
    providers before the stand-in was there does not find its one: a run of its own. With every change: `test_killed_peer`."""
    parts = [f"{KILL_ROUNDS}::test_rounds[{fault}-{part}]" for part in range(min(rounds, PARTS))]
    env = {**os.environ, **environment(way, timeout_ms=2000), "KILL_ROUNDS": str(max(rounds, PARTS))}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", "nightly", *parts]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("fe80")]


def test_sends_that_a_provider_does_not_take_are_left_out():
    env = {
        **os.environ,
        "TSN_DEVICE": "simulator",
        "GPUS": "2",
        "VIRTUAL_NODES": "2",
        **environment("2.x-efa-direct-p5en"),
    }
    done = jobs.launch("benchmark/fabric_bw.py", "-n", "20", "--repeat", "1", env=env)
    assert done.returncode == 0, done.stderr
    assert (
        "send: larger messages are left out; the largest message of provider efa-direct has 8928 bytes." in done.stdout
    )
