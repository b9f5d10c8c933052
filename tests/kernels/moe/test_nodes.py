"""The same kernels on two virtual nodes, whose ranks only talk through the fabric, also one that misbehaves."""

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe.support import FP8
from tests.kernels.moe.test_rounds import rounds
from tests.variants import nightly
from tilescale_net.compiler.jit import KernelFactory
from tilescale_net.kernels.all_gather import AllGather
from tilescale_net.kernels.moe import AllToAll, Tuning
from tilescale_net.kernels.moe.buffers import crosses_once
from tilescale_net.kernels.moe.config import configure

SHAPE = dict(num_experts=8, max_tokens=20, hidden=64, top_k=3)
KINDS = ("random", "masked", "one rank")


@pytest.mark.sample(0)
@ranks.on(VIRTUAL_NODES="2", timeout=280)
def test_rows_by_rank(seed):
    """Where each node has one rank, rows that cross once per node take the kernels of those that cross once per rank."""
    used: dict[bool, set] = {}
    call = KernelFactory.__call__
    for once in (False, True):

        def recorded(factory, *args, once=once, **kwargs):
            used.setdefault(once, set()).add((factory.__module__, factory.__name__, args, tuple(kwargs.items())))
            return call(factory, *args, **kwargs)

        KernelFactory.__call__ = recorded
        try:
            options = dict(
                layout="rank", dtype=FP8, column_scales=True, quantize_combine="always",
                tuning=Tuning(once_per_node=once),
            )  # fmt: skip
            rounds(seed, SHAPE, options, dict(), KINDS if once else KINDS[:1])
            parts = tsn.zeros((tsn.size(), 64), torch.uint8)
            AllGather(threads=32, blocks=1, once_per_node=once)(parts, parts[tsn.rank()])
            assert not crosses_once(configure(tsn.size(), *SHAPE.values(), mode="latency"), Tuning(), tsn.size())
        finally:
            KernelFactory.__call__ = call
    assert used[True] == used[False] and len(used[True]) > 3
    assert not any("nodes" in dict(kernel[3]) for kernel in used[True])


# Halves across nodes are in every run in test_metadata.py and tests/deep_ep.
@pytest.mark.parametrize("halves", [False, nightly(True)])
@ranks.on(4, VIRTUAL_NODES="2", timeout=280)
def test_four_ranks_on_two_nodes(halves, seed):
    rounds(seed, SHAPE, dict(alignment=2, tuning=Tuning(once_per_node=False)), dict(again=True), KINDS)
    rounds(seed, SHAPE, dict(mode="latency", quantize_combine="always"), dict(halves=halves), KINDS)


@pytest.mark.sample(0)
@ranks.on(4, VIRTUAL_NODES="2", timeout=280)
def test_calls_in_turns(seed):
    """Dispatches are sent while the combine before is made."""
    for once in (False, True):  # once per rank they share memory
        _turn(seed, AllToAll(**SHAPE, alignment=2, capacity=32, tuning=Tuning(once_per_node=once)))


def _turn(seed: int, op: AllToAll) -> None:
    g = torch.Generator().manual_seed(seed + op.rank)
    c, expected, previous = op.config, None, None
    for call in range(6):
        tokens = 6 - (op.rank + call) % 3
        x = torch.randint(-8, 9, (tokens, c.hidden), generator=g).to(torch.bfloat16)
        first = torch.arange(tokens) + call
        idx = torch.stack([(first + k * 3) % c.num_experts for k in range(c.top_k)], 1)
        pending = op.dispatch_send(x.to(op.device), idx.to(op.device))
        if previous is not None:
            y, handle = previous
            assert torch.equal(op.combine(y, handle, weighted=False).cpu(), expected)
        received = op.dispatch_recv(pending)
        previous, expected = (received.x.clone(), received.handle), c.top_k * x
    op.free()
