"""All-reduce with bias, residual and RMSNorm against plain torch; the new residual bit by bit."""

import random

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.support import assert_same, rejected, unsettle
from tests.kernels.test_reduce_scatter import reference_of_nodes, values
from tilescale_net.kernels.all_reduce_norm import AllReduceNorm

EPS = 1e-5


def expected(sums, bias, residual, weight):
    """The new residual, and its norm in float64."""
    total = sums.float()
    for more in (bias, residual):
        total = total if more is None else total + more.float()
    rounded = total.to(sums.dtype)
    wide = rounded.double()
    return rounded, wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()


def _layers(seed, dtype, hidden, calls=12):
    rank, n = tsn.rank(), tsn.size()
    pace = random.Random(f"{seed} {rank}")
    turns = random.Random(seed)
    op = AllReduceNorm(hidden, threads=64, blocks=2)
    weight = values((hidden,), dtype, seed, "weight").to(tsn.device())
    bits = []
    many = 70 if hidden < 1024 else 3  # more rows than blocks
    for call in range(calls):
        shape = turns.choice([(1, hidden), (5, hidden), (2, 4, hidden), (0, hidden), (hidden,), (many, hidden)])
        bias = values((hidden,), dtype, seed, call, "bias") if call % 3 == 0 else None
        residual = values(shape, dtype, seed, call, "residual") if call % 2 == 0 else None
        data = [values(shape, dtype, seed, call, p) for p in range(n)]
        x = data[rank].to(tsn.device(), copy=True)
        out = x if call % 4 == 0 else torch.empty_like(x)
        op.shots = [None, 1, 2][(call + call // 3) % 3]
        given = {k: v.to(tsn.device(), copy=True) for k, v in (("bias", bias), ("residual", residual)) if v is not None}
        unsettle(pace, 0.1)
        assert op(out, x, weight, eps=EPS, **given) is out
        tsn.synchronize()
        sums = reference_of_nodes(data, tsn.world().topology.node_size)
        total, norm = expected(sums, bias, residual, weight.cpu())
        what = f"seed {seed}, call {call}, {shape}, rank {rank}"
        if residual is not None:
            assert_same(given["residual"].cpu(), total, what)
        tolerance = {torch.bfloat16: 1e-2, torch.float32: 1e-5}[dtype]
        assert torch.allclose(out.cpu().double(), norm, rtol=tolerance, atol=1e-6), what
        bits.append(out.cpu().view(torch.uint8).tolist())
    op.free()
    return bits


@pytest.mark.parametrize("size, dtype, hidden", [(2, torch.bfloat16, 520), (3, torch.float32, 96)])
@pytest.mark.sample(1)
def test_equals_torch(size, dtype, hidden, seed):
    found = ranks.run(size, _layers, seed, dtype, hidden, timeout=400)
    assert all(bits == found[0] for bits in found), "ranks have results with different bits"


@ranks.on()
def test_misuse_is_named():
    op, narrow = AllReduceNorm(64, threads=64, blocks=1), AllReduceNorm(20, threads=64, blocks=1)
    x, few = (torch.zeros((3, hidden), dtype=torch.bfloat16, device=tsn.device()) for hidden in (64, 20))
    out, weight = torch.zeros_like(x), x[0].clone()
    residual = torch.zeros_like(x) if tsn.rank() else None
    rejected(
        (lambda: AllReduceNorm(0), ValueError, "hidden", "0"),
        (lambda: narrow(torch.zeros_like(few), few, few[0].clone()), ValueError, "40 bytes", "16"),
        (lambda: op(out, x, weight[:32]), ValueError, "weight", "[32]", "[64]"),
        (lambda: op(out.to(torch.int32), x, weight), TypeError, "int32", "bfloat16"),
        (lambda: op(out, x, weight, residual=out), ValueError, "residual", "out", "overlap"),
        (lambda: op(out, x, weight, bias=weight.float()), TypeError, "bias", "float32"),
        (lambda: op(out, x, weight, residual=residual), tsn.RankMismatch, "neither", "residual"),
    )
