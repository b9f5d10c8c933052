"""The proxy over every provider that this machine has: PEs as processes, verified traffic, and a killed one."""

import os
import signal
import subprocess
import time

from tests.fabric.pair import IDS, PROVIDERS
from tests.proxy import programs
from tests.variants import nightly, variants


def start(tmp_path, scenario, pes, library, provider, *arguments):
    program = programs.fabric_test()
    environment = {**os.environ, "TSN_CHAOS": ""}
    return [
        subprocess.Popen(
            [
                str(program), scenario, f"rank={rank}", f"pes={pes}", f"folder={tmp_path}", f"provider={provider}",
                f"library={library}", *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(pes)
    ]  # fmt: skip


def finish(processes, timeout=120):
    """(status, output) of each; none is left running."""
    try:
        results = []
        for process in processes:
            out, err = process.communicate(timeout=timeout)
            results.append((process.returncode, out + err))
        return results
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


# Each provider in one mode in every run, and each mode with some; all of them nightly.
MODES = ("plain", "staging", "chaos", "shared")


@variants(
    3,
    "library, provider, mode",
    [
        nightly(*p[1:], mode, id=f"{name}-{mode}", when=bool((i + k) % len(MODES)))
        for i, (p, name) in enumerate(zip(PROVIDERS, IDS))
        for k, mode in enumerate(MODES)
    ],
)
def test_traffic(tmp_path, library, provider, mode):
    arguments = {
        "plain": ["rails=2"],
        "staging": ["staging=1", "queues=2", "threads=2"],
        "shared": ["rails=2", "threads=2", "peer_threads=2", "shared=1024"],
        "chaos": ["chaos=reorder=0.3,split=0.2,eagain=0.1,delay_us=50", "rounds=15"],
    }[mode]
    for status, output in finish(start(tmp_path, "traffic", 2, library, provider, *arguments)):
        assert status == 0, output


@variants(3, "library, provider", [p[1:] for p in PROVIDERS], ids=IDS)
def test_killed_peer(tmp_path, library, provider):
    """The others report within the deadline which PE is lost; none hangs, and none leaves anything behind."""
    processes = start(tmp_path, "failure", 3, library, provider, "timeout_ms=2000")
    try:
        deadline = time.monotonic() + 30
        while len([f for f in os.listdir(tmp_path) if not f.endswith(".part")]) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        processes[2].send_signal(signal.SIGKILL)
        started = time.monotonic()
        results = finish(processes, timeout=30)
        assert time.monotonic() - started < 15
    finally:
        finish(processes, timeout=1)
    for status, output in results[:2]:
        assert status == 0 and ("PeerLost" in output or "FabricError" in output), output
    assert any("PE 2" in output for _, output in results[:2]), results
    left = [name for name in os.listdir("/dev/shm") if any(f"-{p.pid}-" in name for p in processes)]
    assert not left, "the survivors leave their endpoints open, and the killed one cannot remove its own"
