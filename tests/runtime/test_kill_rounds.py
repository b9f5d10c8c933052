"""Ranks that are lost at a random moment, with traffic in flight: none hangs or crashes, and the first one is named."""

import contextlib
import errno
import os
import random
import signal
import subprocess
import threading
import time

import pytest
import torch

import tilescale_net as tsn
from tests import hosts, ranks
from tests.fabric.pair import PROVIDERS
from tilescale_net.kernels.all_to_all import AllToAll
from tilescale_net.launch.job import remove_objects_of_ended_processes
from tilescale_net.runtime import settings

SIZE = 3
PARTS = 5  # of the nightly rounds of a fault, each a test
LIMIT = 90  # seconds that a round may take, on a machine with much else to do
ROUND = "TESTS_KILL_ROUND"  # in the environment of what ranks start
FAULTS = ("kill", "stop", "cable", "disk")  # kill -9; SIGSTOP; a host's network goes silent; a rank's disk is full


def _traffic(begun):
    """Collective kernels, heap calls, barriers and checkpoints, for ever; `begun`.RANK is the file of a rank's."""
    op = AllToAll(threads=64, blocks=2)
    x, out = tsn.zeros((3 * 2000,), torch.float32), tsn.zeros((3 * 2000,), torch.float32)
    folder = f"{begun}.{tsn.rank()}"
    while True:
        with open(f"{folder}/next", "wb") as f:
            f.write(bytes(8192))
        os.replace(f"{folder}/next", f"{folder}/checkpoint")  # room stays free until the next one, for others to take
        op(out, x)
        tsn.synchronize()
        tsn.free(tsn.zeros(1000))


@contextlib.contextmanager
def _small_disk(folder):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tests", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def _fill(folder, proc):
    """Take all that is free there, for as long as the process lives."""
    with open(f"{folder}/filler", "wb", buffering=0) as f:
        while proc.is_alive():
            with contextlib.suppress(OSError):
                f.write(bytes(4096))
                continue
            time.sleep(0.001)


def _started_in(begun):
    """Programs that ranks of a round have started (compilers) and that still run."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/environ", "rb") as environ, open(f"/proc/{pid}/cmdline", "rb") as command:
                if f"{ROUND}={begun}".encode() in environ.read().split(b"\0"):
                    found.append(command.read().replace(b"\0", b" ").decode(errors="replace"))
    return found


def _check_outcomes(outcomes, fault: str, lost: int, label: str) -> None:
    """Every rank that lives names the lost one, and a rank whose disk is full reports it."""
    for o in outcomes:
        if o.rank == lost and fault in ("kill", "stop"):
            continue
        assert o.error is not None and o.error[0] not in ("Timeout", "Died"), (label, o)
        kind, said, _ = o.error
        if o.rank != lost:
            assert kind == "PeerLost" and f"rank {lost}" in said.partition(": ")[2], (label, o.rank, kind, said)
        elif fault == "disk":
            assert kind == "OSError" and f"Errno {errno.ENOSPC}" in said, (label, kind, said)
        else:  # it sees all others go
            assert kind == "PeerLost", (label, kind, said)
        if o.rank != lost and fault == "disk":
            assert "OSError" in said, (label, o.rank, said)


def _round(folder, fault, seed):
    """One round: rank `lost` meets the fault at some moment; every other rank names it, and ends."""
    dice = random.Random(f"{fault} {seed}")
    lost, moment = dice.randrange(SIZE), dice.uniform(0, 1.5)
    early = dice.random() < 0.25  # while ranks still meet and compile
    name, library, provider = dice.choice([p for p in PROVIDERS if fault != "cable" or p[2].startswith("tcp")])
    begun = f"{folder}/{fault}-{seed}"
    env = {"TSN_TIMEOUT": "4", "TSN_HEARTBEAT_TIMEOUT": "3", "TSN_LIBFABRIC": library, "TSN_PROVIDER": provider}
    env[ROUND] = begun
    for rank in range(SIZE):
        os.mkdir(f"{begun}.{rank}")

    with contextlib.ExitStack() as stack:
        if fault == "cable":
            network = stack.enter_context(hosts.Hosts(SIZE))
            env.update(network.environment)
        else:
            env["VIRTUAL_NODES"] = dice.choice(["3"] if settings.PROVIDER.get() else ["1", "3"])
        if fault == "disk":
            stack.enter_context(_small_disk(f"{begun}.{lost}"))

        def on_start(procs):
            def body():
                end = time.monotonic() + LIMIT
                while not early and time.monotonic() < end:
                    if all(os.path.exists(f"{begun}.{r}/checkpoint") for r in range(SIZE)):
                        break
                    time.sleep(0.02)
                time.sleep(moment)
                if fault == "cable":
                    network.pull_cable(lost)
                elif fault == "disk":
                    _fill(f"{begun}.{lost}", procs[lost])
                else:
                    os.kill(procs[lost].pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
                for rank, proc in enumerate(procs):
                    if rank != lost or fault in ("cable", "disk"):
                        proc.join(LIMIT)
                procs[lost].kill()
                procs[lost].join(LIMIT)
                # What a launcher does: ranks that lost another may end before their proxy has done it.
                remove_objects_of_ended_processes()

            thread = threading.Thread(target=body, daemon=True)
            thread.start()
            stack.callback(thread.join, 2 * LIMIT)

        outcomes = ranks.launch(SIZE, _traffic, begun, env=env, heap="16M", timeout=2 * LIMIT, on_start=on_start)
    where = name if env.get("VIRTUAL_NODES") != "1" else "one node"
    label = f"{fault} {seed}: rank {lost} after {moment:.2f} s{', early' if early else ''}, {where}"
    _check_outcomes(outcomes, fault, lost, label)
    end = time.monotonic() + 10
    while left := _started_in(begun):
        assert time.monotonic() < end, (label, "left behind", left)
        time.sleep(0.1)


def test_a_round_of_each_fault(tmp_path):
    for fault in FAULTS if hosts.possible() else ("kill", "stop"):
        _round(tmp_path, fault, random.randrange(1 << 20))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("fault", FAULTS)
def test_rounds(tmp_path, fault, part):
    """KILL_ROUNDS changes their number, KILL_SEED where they begin. One that goes wrong does not end them."""
    rounds = -(-int(os.environ.get("KILL_ROUNDS", "50")) // PARTS)
    first = int(os.environ.get("KILL_SEED", random.randrange(1 << 20))) + part * rounds
    wrong = []
    for seed in range(first, first + rounds):
        begin = time.monotonic()
        try:
            _round(tmp_path, fault, seed)
        except AssertionError as err:
            wrong.append(f"{fault} {seed}: {err}")
            print(wrong[-1], flush=True)
        print(f"{fault} {seed}: {time.monotonic() - begin:.1f} s", flush=True)
    assert not wrong, f"{len(wrong)} of {rounds} rounds went wrong:\n" + "\n".join(wrong)
