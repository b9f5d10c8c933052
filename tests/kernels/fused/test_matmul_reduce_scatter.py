"""Matrix product + reduce-scatter against torch: whole numbers, whose sums are exact in any order."""

import random

import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.fused.test_all_gather_matmul import SCALED, SMALL, SMALL_SCALED, powers_of_two, whole_numbers
from tests.kernels.support import unsettle
from tests.variants import variants
from tilescale_net.kernels.fused.matmul_reduce_scatter import MatmulReduceScatter


def _sums(seed, rows, k, n, dtype, transposed, calls, blocks):
    rank, size = tsn.rank(), tsn.size()
    pace = random.Random(f"{seed} {rank}")
    scaled = dtype == SCALED
    options = dict(tiling=SMALL_SCALED if scaled else SMALL, threads=64, blocks=blocks)
    op = MatmulReduceScatter(rows, k, n, dtype=dtype, out_dtype=None if scaled else torch.float32, **options)
    weights = [whole_numbers((n, k) if transposed else (k, n), dtype, seed, "w", p) for p in range(size)]
    weights = [w.t() if transposed else w for w in weights]
    w = weights[rank].to(tsn.device())
    w_scales = [powers_of_two(n, seed, p).clamp(0.5, 2) for p in range(size)]
    for call in range(calls):
        # Products of one or two factors of at most 1 stay whole numbers that bfloat16 holds.
        parts = [whole_numbers((size * rows, k), torch.float32, seed, call, p).clamp(-1, 1) for p in range(size)]
        parts = [x.to(dtype) for x in parts]
        unsettle(pace)
        x_scales = [powers_of_two(size * rows, seed, call, p).clamp(0.5, 2) for p in range(size)]
        scales = dict(x_scales=x_scales[rank].to(tsn.device()), w_scales=w_scales[rank].to(tsn.device()))
        out = op(parts[rank].to(tsn.device()), w, **(scales if scaled else {}))
        tsn.synchronize()
        summands = [x.float() @ w.float() for x, w in zip(parts, weights)]
        if scaled:
            summands = [s * x[:, None] * w for s, x, w in zip(summands, x_scales, w_scales)]
        want = sum(summands)[rank * rows : (rank + 1) * rows]
        assert torch.equal(out.cpu(), want.to(op.out_dtype)), f"seed {seed}, call {call}, rank {rank}"
    op.free()


# Rows and columns that tiles do not divide; three calls, so that both halves of the buffer are used again.
@variants(1, "size, nodes, dtype", [(4, 1, torch.bfloat16), (2, 2, torch.bfloat16), (2, 1, SCALED)])
@ranks.on(timeout=200)
def test_equals_torch(size, nodes, dtype, seed):
    n, transposed = (48, True) if dtype == SCALED else (40, nodes == 2)
    _sums(seed, 72, 48, n, dtype, transposed, 3, 4 if nodes == 1 else 2)
