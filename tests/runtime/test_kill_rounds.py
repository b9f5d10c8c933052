"""Ranks that die or stop at a random moment, with traffic in flight: nobody hangs or crashes, and the first one is named."""

import os
import random
import signal
import threading
import time

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tilescale_net.kernels.all_to_all import AllToAll

SIZE = 3
LIMIT = 90  # seconds that a round may take, on a machine with much else to do


def _traffic(begun):
    """Collective kernels, heap calls and barriers, for ever; `begun` is a file for each rank that has begun."""
    op = AllToAll(threads=64, blocks=2)
    x, out = tsn.zeros((3 * 2000,), torch.float32), tsn.zeros((3 * 2000,), torch.float32)
    with open(f"{begun}.{tsn.rank()}", "w"):
        pass
    while True:
        op(out, x)
        tsn.synchronize()
        tsn.free(tsn.zeros(1000))


def _round(folder, seed):
    """One round: who is lost, how, and how every other rank ended."""
    dice = random.Random(seed)
    lost, how, moment = dice.randrange(SIZE), dice.choice([signal.SIGKILL, signal.SIGSTOP]), dice.uniform(0, 1.5)
    early = dice.random() < 0.25  # while ranks still meet and compile
    begun = f"{folder}/{seed}"

    def on_start(procs):
        def body():
            end = time.monotonic() + LIMIT
            while not early and time.monotonic() < end:
                if all(os.path.exists(f"{begun}.{r}") for r in range(SIZE)):
                    break
                time.sleep(0.02)
            time.sleep(moment)
            os.kill(procs[lost].pid, how)
            for rank, proc in enumerate(procs):
                if rank != lost:
                    proc.join(LIMIT)
            procs[lost].kill()

        threading.Thread(target=body, daemon=True).start()

    env = {"TSN_TIMEOUT": "4", "TSN_HEARTBEAT_TIMEOUT": "3", "VIRTUAL_NODES": dice.choice(["1", "3"])}
    outcomes = ranks.launch(SIZE, _traffic, begun, env=env, heap="16M", timeout=2 * LIMIT, on_start=on_start)
    what = f"seed {seed}: rank {lost} {how.name} after {moment:.2f} s{', early' if early else ''}, {env['VIRTUAL_NODES']} nodes"
    for o in outcomes:
        if o.rank != lost:
            assert o.error is not None and o.error[0] not in ("Timeout", "Died"), (what, o)
            kind, said, _ = o.error
            assert kind == "PeerLost" and f"rank {lost}" in said.partition(": ")[2], (what, o.rank, kind, said)


def test_three_rounds(tmp_path):
    first = random.randrange(1 << 20)
    for seed in range(first, first + 3):
        _round(tmp_path, seed)


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_two_hundred_rounds(tmp_path):
    for seed in range(200):
        _round(tmp_path, seed)
