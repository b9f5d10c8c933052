"""Products of experts beside the dispatch and the combine of their rows, against torch: whole numbers, exact in any order."""

import random

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.fused.test_all_gather_matmul import SMALL, whole_numbers
from tests.kernels.moe.support import make_inputs
from tests.kernels.support import assert_same, unsettle
from tilescale_net.kernels.fused.expert_matmul import ExpertMatmul
from tilescale_net.kernels.moe import AllToAll, Tuning, reference

MOE = dict(num_experts=6, max_tokens=40, hidden=48, top_k=3, tile_rows=32, alignment=32)
TUNING = Tuning(blocks=2, threads=64, combine_threads=64, chunk=3)
KINDS = ("random", "one expert", "masked", "none", "twice")
INNER = 40  # columns, which tiles do not divide


def _weights(seed, rank, local, transposed):
    """Both matrices of each expert of a rank."""
    shapes = ("up", (local, MOE["hidden"], INNER)), ("down", (local, INNER, MOE["hidden"]))
    return [whole_numbers(shape, torch.bfloat16, seed, name, rank) for name, shape in shapes]


def _everyone(seed, call, config, kind):
    shared = random.Random(f"{seed} {call}")
    tokens = [shared.choice((1, shared.randrange(41), 40)) for _ in range(tsn.size())]
    everyone = [make_inputs((seed, call, r), config, n, kind) for r, n in enumerate(tokens)]
    for r, one in enumerate(everyone):
        one.x = whole_numbers(one.x.shape, torch.bfloat16, seed, call, r)
    return everyone


def _product(rows, w):
    return (rows.float() @ w.float()).to(torch.bfloat16)


def _check(moe, everyone, matrices, received, h, out, what):
    """Everything against torch: rows, first products, sums."""
    c, rank = moe.config, moe.rank
    choices, outputs = [e.topk_idx for e in everyone], []
    for host in range(c.ranks):
        rows = reference.expert_rows(reference.route(choices, c.num_experts, host), [e.x for e in everyone])
        up, down = matrices[host]
        inner = [_product(r, up[e]) for e, r in enumerate(rows)]
        outputs.append([_product(r, down[e]) for e, r in enumerate(inner)])
        if host == rank:
            assert received.counts.tolist() == [len(r) for r in rows], what
            for e, begin in enumerate(received.offsets.tolist()[:-1]):
                assert_same(received.x[begin : begin + len(rows[e])].cpu(), rows[e], f"{what}: rows of expert {e}")
                assert_same(h[begin : begin + len(rows[e])].cpu(), inner[e], f"{what}: products of expert {e}")
    weights = [e.weights for e in everyone]
    expected = reference.combine(outputs, choices, weights, c.num_experts, rank, c.combine_dtype, False, None, True, 1)
    assert_same(out.cpu(), expected, f"{what}: sums")


def layers(seed, options, transposed, kinds=KINDS):
    """Dispatch, two products and combine, in one go and one after the other, by turns."""
    moe = AllToAll(**MOE, **options)
    pace, device, c = random.Random(f"{seed} {moe.rank}"), moe.device, moe.config
    up = ExpertMatmul(moe, MOE["hidden"], INNER, tiling=SMALL)
    down = ExpertMatmul(moe, INNER, MOE["hidden"], tiling=SMALL)
    matrices = [_weights(seed, r, c.local_experts, transposed) for r in range(c.ranks)]
    w_up, w_down = (w.to(device) for w in matrices[moe.rank])
    if transposed:
        w_up, w_down = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w_up, w_down))
    for call, kind in enumerate(kinds):
        everyone = _everyone(seed, call, c, kind)
        mine, what = everyone[moe.rank], f"seed {seed}, call {call}, {kind}, rank {moe.rank}"
        choices = mine.x.to(device), mine.topk_idx.to(device), mine.weights.to(device)
        unsettle(pace)
        pending = moe.dispatch_send(*choices)
        h = up.arriving(pending, w_up)
        received = moe.dispatch_recv(pending)
        unsettle(pace)
        out = down.combined(h, w_down, received.handle, blocks=2)
        moe.check()
        _check(moe, everyone, matrices, received, h, out, what)
        # The same, one after the other; with the choices of before, and with them.
        received = moe.dispatch(choices[0], handle=received.handle) if call % 2 else moe.dispatch(*choices)
        h = up(received.x, w_up, received.handle)
        out = moe.combine(down(h, w_down, received.handle), received.handle)
        moe.check()
        _check(moe, everyone, matrices, received, h, out, f"{what}, one after the other")
    up.free()
    down.free()
    moe.free()


@pytest.mark.parametrize("size, nodes, transposed", [(2, 1, False), (2, 2, True)])
def test_equals_torch(size, nodes, transposed):
    args = random.randrange(1 << 30), dict(tuning=TUNING), transposed
    ranks.run(size, layers, *args, env={"VIRTUAL_NODES": str(nodes)}, timeout=300)
