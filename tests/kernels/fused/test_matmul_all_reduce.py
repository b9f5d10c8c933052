"""Matrix product + all-reduce against torch: whole numbers, whose sums are exact in any order; then equal bits of any."""

import random

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.fused.test_all_gather_matmul import SCALED, SMALL, SMALL_SCALED, powers_of_two, whole_numbers
from tests.kernels.support import unsettle
from tests.variants import nightly, variants
from tilescale_net.kernels.fused.gemm import Tiling
from tilescale_net.kernels.fused.matmul_all_reduce import MatmulAllReduce


@variants(0, "nodes", [1, nightly(2)])
@ranks.on(timeout=200)
def test_fp8_products(nodes, seed):
    rank, size, device, rows, k, n, blocks = tsn.rank(), tsn.size(), tsn.device(), 144, 48, 48, 4 if nodes == 1 else 2
    op = MatmulAllReduce(rows, k, n, dtype=SCALED, tiling=SMALL_SCALED, threads=64, blocks=blocks)
    xs, ws = ([whole_numbers(shape, SCALED, seed, p) for p in range(size)] for shape in ((rows, k), (n, k)))
    row_scales, column_scales = (
        [powers_of_two(extent, seed, p).clamp(0.5, 2) for p in range(size)] for extent in (rows, n)
    )
    scales = dict(x_scales=row_scales[rank][:, None].to(device), w_scales=column_scales[rank][None].to(device))
    out = op(xs[rank].to(device), ws[rank].to(device).t(), **scales)
    tsn.synchronize()
    every = zip(xs, ws, row_scales, column_scales)
    # Summands are rounded before they travel; a rank's own rows are not.
    products = [x.float() @ w.float().t() * r[:, None] * c for x, w, r, c in every]
    for owner, part in enumerate(out.cpu().chunk(size)):
        mine = slice(owner * len(part), (owner + 1) * len(part))
        want = sum(p[mine] if i == owner else p[mine].bfloat16().float() for i, p in enumerate(products))
        assert torch.equal(part, want.bfloat16()), (seed, owner)
    op.free()


def _sums(seed, rows, k, n, transposed, calls, blocks):
    rank, size, dtype = tsn.rank(), tsn.size(), torch.bfloat16
    pace = random.Random(f"{seed} {rank}")
    with pytest.raises(ValueError, match=f"rows is {rows + 1}; it must be a positive multiple of the {size} ranks"):
        MatmulAllReduce(rows + 1, k, n)
    with pytest.raises(ValueError, match="columns, a multiple of 8, must divide those of the tile"):
        Tiling(tile=(32, 32, 32), columns=24)
    with pytest.raises(ValueError, match="a tile's rows must be at most twice the summands in its depth"):
        MatmulAllReduce(rows, k, n, tiling=Tiling(tile=(128, 32, 16), columns=16), threads=64, blocks=blocks)
    op = MatmulAllReduce(rows, k, n, dtype=dtype, tiling=SMALL, threads=64, blocks=blocks)
    weights = [whole_numbers((n, k) if transposed else (k, n), dtype, seed, "w", p) for p in range(size)]
    weights = [w.t() if transposed else w for w in weights]
    w = weights[rank].to(tsn.device())
    for call in range(calls):
        parts = [whole_numbers((rows, k), dtype, seed, call, p).clamp(-1, 1) for p in range(size)]
        unsettle(pace)
        out = op(parts[rank].to(tsn.device()), w)
        tsn.synchronize()
        want = sum(x.float() @ w.float() for x, w in zip(parts, weights)).to(dtype)
        assert torch.equal(out.cpu(), want), f"seed {seed}, call {call}, rank {rank}"
    any_numbers = torch.randn((rows, k), generator=torch.Generator().manual_seed(rank)).to(dtype).to(tsn.device())
    out = op(any_numbers, w).clone()
    again = op(any_numbers, w, torch.full_like(out, torch.nan))
    tsn.synchronize()
    assert torch.equal(out, again)
    op.free()
    return out.cpu().view(torch.uint8).numpy().tobytes()


# Rows and columns that tiles do not divide; calls enough that both halves of the buffers are used again.
@variants(1, "size, nodes", [(4, 1), (2, 2)])
@ranks.on(timeout=200)
def test_equals_torch_and_is_equal_on_all_ranks(size, nodes, seed):
    found = _sums(seed, 72 * size, 48, 40, nodes == 2, 3, 4 if nodes == 1 else 2)
    assert len(set(tsn.world().control.gather("sums", found))) == 1
