"""Choices beyond an expert's capacity: which are dropped; all else goes on as if they had not been made."""

import random

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe.test_misuse import SHAPE, raises
from tests.kernels.support import assert_same
from tilescale_net import ops
from tilescale_net.kernels.moe import AllToAll
from tilescale_net.kernels.moe.checks import beyond_capacity
from tilescale_net.kernels.moe.config import DROPS, configure


def _by_hand(idx, weights, capacity, drop) -> torch.Tensor:
    tokens, top_k = idx.shape
    places = [(t, k) for t in range(tokens) for k in range(top_k)]
    if drop == "choice":
        places = [(t, k) for k in range(top_k) for t in range(tokens)]
    elif drop == "weight":
        places.sort(key=lambda p: -float(weights[p]))
    dropped, taken = torch.zeros(idx.shape, dtype=torch.bool), {}
    for place in places:
        expert = int(idx[place])
        taken[expert] = taken.get(expert, 0) + 1
        dropped[place] = expert >= 0 and taken[expert] > capacity
    return dropped


@pytest.mark.parametrize("drop", DROPS)
def test_the_rules(drop):
    pace = random.Random(random.randrange(1 << 30))
    for tokens, top_k, capacity in ((0, 2, 1), (1, 1, 1), (13, 3, 2), (20, 2, 7), (9, 4, 100)):
        idx = torch.tensor([[pace.randrange(-1, 5) for _ in range(top_k)] for _ in range(tokens)]).view(tokens, top_k)
        weights = torch.tensor([pace.randrange(4) / 4 for _ in range(tokens * top_k)]).view(tokens, top_k)
        for kind in (torch.int64, torch.int32):
            found = beyond_capacity(idx.to(kind), weights, capacity, drop)
            assert torch.equal(found, _by_hand(idx, weights, capacity, drop)), (tokens, top_k, capacity)


def test_capacity_follows():
    sizes = dict(ranks=8, num_experts=64, max_tokens=1024, hidden=128, top_k=8)
    assert configure(**sizes, expert_capacity=160, alignment=128).capacity == 8 * 8 * 160
    assert configure(**sizes, expert_capacity=10000).capacity == configure(**sizes).capacity
    assert configure(**sizes, expert_capacity=160, capacity=99).capacity == 99
    for wrong in (0, True, 1.5):
        with raises(ValueError, "expert_capacity"):
            configure(**sizes, expert_capacity=wrong)
    with raises(ValueError, "drop is 'last'"):
        configure(**sizes, expert_capacity=1, drop="last")


@ranks.on(timeout=120)
def test_dropping():
    device, rank, torch_rank = tsn.device(), tsn.rank(), torch.Generator().manual_seed(tsn.rank())
    idx = torch.tensor([[0, 1], [0, 2], [0, 3], [2, 0]] if rank else [[3, 1], [3, 1], [1, 3], [2, 3]], device=device)
    x = torch.randn((4, 32), generator=torch_rank).to(device, torch.bfloat16)
    weights = torch.rand((4, 2), generator=torch_rank).to(device)
    for mode in ("throughput", "latency"):
        plain = AllToAll(**SHAPE, mode=mode)
        for drop in DROPS if mode == "throughput" else DROPS[:1]:
            op = AllToAll(**SHAPE, mode=mode, expert_capacity=2, drop=drop, capacity=plain.config.capacity)
            received = op.dispatch(x, idx, weights)
            dropped = _by_hand(idx.cpu(), weights.cpu(), 2, drop)
            assert dropped.any() and torch.equal(received.dropped.cpu(), dropped)
            assert int(received.counts.max()) <= 2 * 2 and int(received.counts.sum()) < 8
            wanted = plain.dispatch(x, idx.masked_fill(received.dropped, -1), weights)
            assert wanted.dropped is None and torch.equal(received.counts, wanted.counts)
            sums = op.combine(received.x, received.handle)
            assert_same(sums.cpu(), plain.combine(wanted.x, wanted.handle).cpu(), f"{mode}, {drop}")
            if mode == "throughput":  # the routing comes from the handle
                again = op.dispatch(2 * x, handle=received.handle)
                assert torch.equal(again.dropped, received.dropped) and torch.equal(again.counts, received.counts)
                traced = ops.moe_dispatch(op, x, idx, weights)
                assert torch.equal(traced.dropped, received.dropped) and torch.equal(traced.counts, received.counts)
            op.free()
        plain.free()
    op = AllToAll(**dict(SHAPE, expert_capacity=1), layout="rank", capacity=16)
    with raises(ValueError, "expert_capacity" if rank else "mask"):
        op.dispatch(
            x, **(dict(mask=torch.ones((4, 2), dtype=torch.bool, device=device)) if rank else dict(topk_idx=idx))
        )
        op.check()
