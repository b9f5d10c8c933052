"""Ranks that die or fall silent with traffic in flight: the others go on, in the same processes and with the same objects."""

import os
import random
import signal
import threading

import pytest
import torch
import torch.distributed as dist

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe.support import make_inputs, run_round
from tests.kernels.moe.test_rounds import SMALL
from tilescale_net import ops
from tilescale_net.kernels.all_gather import AllGather
from tilescale_net.kernels.moe import AllToAll

RANKS, TURNS = 4, 2
TWO_NODES = {"VIRTUAL_NODES": "2"}
# The kernels are those of test_rounds.py.
OPTIONS = [(dict(alignment=4), dict()), (dict(mode="latency", dtype=torch.float32), dict(halves=True))]


def _traffic(op, inputs, halves: bool) -> None:
    """A call in flight, and one after the other."""
    device = tsn.device()
    given = [t.to(device) for t in (inputs.x, inputs.topk_idx, inputs.weights)]
    received = op.dispatch_recv(op.dispatch_send(*given)) if halves else op.dispatch(*given)
    y = received.x.to(op.config.combine_dtype)
    op.combine_recv(op.combine_send(y, received.handle)) if halves else op.combine(y, received.handle)


def _until_lost(layers, everyone, how: signal.Signals, after: float | None) -> list[int]:
    """Calls until one fails; how far each rank has come."""
    if after is not None:
        threading.Timer(after, os.kill, (os.getpid(), how)).start()
    step = 0
    try:
        while True:
            for op, (_, kind), inputs in zip(layers, OPTIONS, everyone):
                _traffic(op, inputs[tsn.rank()], bool(kind))
                tsn.synchronize()
                step += 1
    except tsn.TileScaleError as err:
        assert isinstance(err, tsn.PeerLost | tsn.WaitTimeout), err
        with pytest.raises(type(err)):  # everything fails until they have agreed
            tsn.barrier()
    done = tsn.shrink(step, timeout=60)  # nobody is late on purpose
    assert max(done.steps) - min(done.steps) <= len(layers) and len(done.steps) == len(done.ranks), done
    return done.ranks


def _lose(seed: int, losses: list[tuple[signal.Signals, int]]) -> None:
    pace, shared = random.Random(f"{seed} {tsn.rank()}"), random.Random(seed)
    layers = [AllToAll(**SMALL, **options) for options, _ in OPTIONS]
    everyone = [[make_inputs((seed, r), op.config, 7, "random") for r in range(RANKS)] for op in layers]
    kept = tsn.zeros((5,)).fill_(tsn.rank())
    active = [True] * RANKS
    for how, gone in losses:
        after: float | None = 0.4 * shared.random()
        while gone in (left := _until_lost(layers, everyone, how, after if tsn.rank() == gone else None)):
            for op in layers:  # a machine so busy that all were late, and nobody is lost
                op.set_active()
        active[gone] = False
        assert left == [r for r in range(RANKS) if active[r]]
        received = None
        for op, (_, kind) in zip(layers, OPTIONS):
            with pytest.raises(tsn.TileScaleError, match="call set_active"):
                op.dispatch(None, None)
            op.set_active()
            assert not op.under_way and list(op.mask) == active
            for turn in range(TURNS):
                inputs = [make_inputs((seed, turn, r), op.config, 5 - r, "random") for r in range(RANKS)]
                received = run_round(op, inputs, pace, f"seed {seed}, turn {turn}", active=active, **kind)
        assert torch.equal(kept.cpu(), torch.full((5,), float(tsn.rank())))
        # What the host does together is done by those that are left.
        new = AllToAll(**SMALL, **OPTIONS[0][0])
        run_round(new, everyone[0], pace, f"seed {seed}, new object", active=active)
        new.free()
        tsn.free(tsn.zeros((100,)))
        tsn.barrier()
        assert received is not None
    with pytest.raises(tsn.TileScaleError, match="works with all of them only"):
        AllGather(threads=32)
    _collectives_among([r for r in range(RANKS) if active[r]])
    for op in layers:
        op.free()
    tsn.free(kept)


def _collectives_among(left: list[int]) -> None:
    """Those that are left make a world of their own beside the one that has lost ranks."""
    group = dist.new_group(left, use_local_synchronization=True)
    world = tsn.init("8M", group=group)
    mine = torch.tensor([float(tsn.rank())] * 3, device=tsn.device())
    wanted = torch.tensor(left, dtype=torch.float32).repeat_interleave(3)
    assert torch.equal(ops.all_gather(mine, group=group).cpu(), wanted)
    tsn.finalize(world)


def _check(losses, **env) -> None:
    seed = random.randrange(1 << 30)
    outcomes = ranks.launch(RANKS, _lose, seed, losses, env={"TSN_TIMEOUT": "8", **env}, timeout=250)
    gone = [rank for _, rank in losses]
    for outcome in outcomes:
        if outcome.rank in gone:  # also one that was only stopped
            assert outcome.exitcode == -signal.SIGKILL, outcome
        else:
            assert outcome.ok, (seed, outcome.error)


def test_two_ranks_are_lost():
    """One dies, then another is stopped."""
    _check([(signal.SIGKILL, 2), (signal.SIGSTOP, 1)])


def test_a_node_is_lost_rank_by_rank():
    """One of its two ranks, which is a gateway of the other node's, then the last one."""
    _check([(signal.SIGKILL, 2), (signal.SIGSTOP, 3)], **TWO_NODES)


@pytest.mark.nightly
@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("turn", range(20))
def test_ranks_are_lost_at_any_moment(turn, nodes):
    order = random.sample([1, 2, 3], 2)
    _check([(random.choice([signal.SIGKILL, signal.SIGSTOP]), rank) for rank in order], VIRTUAL_NODES=str(nodes))
