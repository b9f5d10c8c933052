"""Ranks that are left out, ranks that die, ranks that come late."""

import os
import random
import re
import signal
import time

import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks
from tests.kernels.moe.support import make_inputs, run_round, without_kernels
from tests.shorthand import jitted, u64
from tests.variants import variants
from tilescale_net.kernels.moe import AllToAll

SHAPE = dict(num_experts=6, max_tokens=5, hidden=32, top_k=3)


# Rank 0 keeps the store of the job.
@variants(1, "mode, gone", [("throughput", 0), ("latency", 1)])
@ranks.on(3, timeout=120)
def test_a_rank_that_is_left_out(mode, gone, seed):
    """Rank `gone` takes part in the first rounds and then never again; its process ends long before the others."""
    op = AllToAll(**SHAPE, mode=mode)
    pace = random.Random(f"{seed} {tsn.rank()}")
    everyone = [[make_inputs((seed, turn, r), op.config, 5 - r, "random") for r in range(3)] for turn in range(5)]
    for turn in range(2):
        run_round(op, everyone[turn], pace, f"seed {seed}, all")
    active = [rank != gone for rank in range(3)]
    late = AllToAll(**SHAPE, mode=mode)
    before = op.dispatch(*_arguments(op))
    op.set_active(active)
    if tsn.rank() == gone:
        with pytest.raises(tsn.TileScaleError, match="left this rank out"):
            op.dispatch(*_arguments(op))
        with pytest.raises(tsn.TileScaleError, match="left out"):
            tsn.zeros((4,))
        op.check()
        op.free()
        return
    with pytest.raises(ValueError, match="from before set_active"):
        op.combine(torch.zeros(before.x.shape, dtype=torch.bfloat16, device=tsn.device()), before.handle)
    if mode == "throughput":
        with pytest.raises(ValueError, match="from before set_active"):
            op.dispatch(_arguments(op)[0], handle=before.handle)
    for turn in range(2, 5):
        run_round(op, everyone[turn], pace, f"seed {seed}, two of three", active=active)
    with pytest.raises(ValueError, match=f"brings back ranks \\[{gone}\\]"):
        op.set_active([True] * 3)
    # What the host does is done by those that stay.
    with pytest.raises(tsn.TileScaleError, match="call set_active"):
        late.dispatch(*_arguments(op))
    late.set_active(active)
    new = AllToAll(**SHAPE, mode=mode)
    for thing in (op, late, new):
        out = None if thing is late else thing.empty_output()
        received = thing.dispatch(*_arguments(op), out=out)
        thing.combine(torch.zeros(received.x.shape, dtype=torch.bfloat16, device=tsn.device()), received.handle)
        thing.free()
    assert tsn.zeros((4,)).sum() == 0
    tsn.barrier()


def _arguments(op):
    """Two tokens that go to both experts of rank 0."""
    c, device = op.config, tsn.device()
    return torch.ones((2, c.hidden), dtype=c.dtype, device=device), torch.tensor([[0, 1, -1]] * 2, device=device)


@pytest.mark.sample(0)
@ranks.on(3, timeout=120)
def test_a_rank_that_never_takes_part():
    op = AllToAll(**SHAPE, active=[True, True, False])
    if tsn.rank() == 2:
        with pytest.raises(tsn.TileScaleError, match="left this rank out"):
            op.dispatch(*_arguments(op))
    else:
        everyone = [make_inputs((0, r), op.config, 5, "random") for r in range(3)]
        run_round(op, everyone, random.Random(0), "two of three", active=[True, True, False])
    op.free()


@jitted
def _signal_wait_quiet(
    ctx: N.Context(), flags: u64(2), target: T.int32, word: T.int32, wanted: T.int32, quiet: T.int32
):
    """Three steps of one thread; a target or a number of signals below 0 leaves its step out."""
    with T.Kernel(1, threads=32):
        if T.get_thread_binding() == 0:
            if target >= 0:
                N.signal(flags[word], 1, target)
            if wanted >= 0:
                N.wait(flags[wanted], "ge", 1)
            if quiet != 0:
                N.quiet()


# Rank 0 has a node of its own: its proxy waits for answers of the others'.
@pytest.mark.parametrize("quiet", [True, False], ids=["before", "after"])
@ranks.on(3, VIRTUAL_NODES="1+2", TSN_TIMEOUT="20", timeout=80)
def test_a_rank_that_is_left_out_and_quiets(quiet):
    """Rank 2 has ended its last kernel, is left out and finalizes; rank 0, which has signalled to it, has yet to call quiet:
    before it leaves out rank 2, or when that has ended."""
    with without_kernels():
        op = AllToAll(**SHAPE)
    flags, kernel, rank = tsn.zeros((2,), dtype=torch.uint64), _signal_wait_quiet(), tsn.rank()
    kernel(flags, -1, 0, -1, 0)
    tsn.barrier()
    if rank == 1:
        time.sleep(1)
    kernel(flags, *[(2, 0, 1, quiet), (0, 1, -1, 1), (-1, 0, 0, 0)][rank])
    op.set_active([True, True, False])
    if rank != 2:
        time.sleep(0 if quiet else 1)
        kernel(flags, -1, 0, -1, 1)
    op.free()


@ranks.on(4, timeout=100)
def test_ranks_that_leave_out_others():
    with without_kernels():
        op = AllToAll(**dict(SHAPE, num_experts=4))
    if tsn.rank() < 2:
        with pytest.raises(tsn.RankMismatch, match="(?s)\\[0, 1, 2\\].*\\[0, 1, 3\\]|\\[0, 1, 3\\].*\\[0, 1, 2\\]"):
            op.set_active([True, True, tsn.rank() == 0, tsn.rank() == 1])


@ranks.on(TSN_TIMEOUT="20", timeout=60)
def test_a_rank_that_is_late():
    """Rank 1 comes later than the deadline of a wait would bear if it counted from anything but the wait's begin."""
    op = AllToAll(**SHAPE)
    everyone = [make_inputs((turn, r), op.config, 4, "random") for turn, r in ((0, 0), (0, 1))]
    for turn in range(2):
        if tsn.rank() == turn % 2:
            time.sleep(0.7)
        run_round(op, everyone, random.Random(0), f"turn {turn}")


def _endless(mode: str, warm: int) -> None:
    op = AllToAll(**SHAPE, mode=mode)
    everyone = [make_inputs((0, r), op.config, 5, "random") for r in range(2)]
    mine = everyone[tsn.rank()]
    device = tsn.device()
    x, idx, weights = mine.x.to(device), mine.topk_idx.to(device), mine.weights.to(device)
    call = 0
    while True:
        if tsn.rank() == 1 and call == warm:
            os.kill(os.getpid(), signal.SIGKILL)  # the peer is in this call already, or comes to it
        received = op.dispatch(x, idx, weights)
        op.combine(received.x, received.handle)
        tsn.synchronize()
        call += 1


@variants(1, "mode", ["throughput", "latency"])
def test_a_rank_that_dies(mode):
    """The others raise, soon, and nothing is left behind."""
    begin = time.monotonic()
    limit = 240 if ranks.gpus() else 90  # on GPUs the constructor compiles a dozen kernels
    outcomes = ranks.launch(2, _endless, mode, 3, env={"TSN_TIMEOUT": "10"}, timeout=limit + 10)
    kind, text, _ = outcomes[0].error
    assert kind in ("PeerLost", "WaitTimeout"), outcomes[0]
    assert kind != "PeerLost" or "rank 1" in text
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert time.monotonic() - begin < limit


def _silent(mode: str) -> None:
    op = AllToAll(**SHAPE, mode=mode)
    if tsn.rank() == 0:
        x = torch.zeros((1, 32), dtype=torch.bfloat16, device=tsn.device())
        op.dispatch(x, torch.zeros((1, 3), dtype=torch.int64, device=tsn.device()))
        tsn.synchronize()
    else:
        time.sleep(6)  # never calls
        tsn.barrier()


@variants(1, "mode", ["throughput", "latency"])
def test_a_rank_that_never_calls(mode):
    """A wait ends at its deadline, with an error."""
    outcomes = ranks.launch(2, _silent, mode, env={"TSN_TIMEOUT": "2"}, timeout=200)
    assert outcomes[0].error[0] == "WaitTimeout", outcomes[0].error
    assert re.search(r"waited 2 s for \w+ \d+ on the signal", outcomes[0].error[1]), outcomes[0].error[1]
