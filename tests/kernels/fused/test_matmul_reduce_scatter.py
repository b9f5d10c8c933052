"""Matrix product + reduce-scatter against torch: whole numbers, whose sums are exact in any order."""

import random

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.fused.test_all_gather_matmul import SMALL, whole_numbers
from tests.kernels.support import unsettle
from tilescale_net.kernels.fused.matmul_reduce_scatter import MatmulReduceScatter


def _sums(seed, rows, k, n, dtype, transposed, calls, blocks):
    rank, size = tsn.rank(), tsn.size()
    pace = random.Random(f"{seed} {rank}")
    op = MatmulReduceScatter(rows, k, n, dtype=dtype, out_dtype=torch.float32, tiling=SMALL, threads=64, blocks=blocks)
    weights = [whole_numbers((n, k) if transposed else (k, n), dtype, seed, "w", p) for p in range(size)]
    weights = [w.t() if transposed else w for w in weights]
    w = weights[rank].to(tsn.device())
    for call in range(calls):
        # Products of one or two factors of at most 1 stay whole numbers that bfloat16 holds.
        parts = [whole_numbers((size * rows, k), dtype, seed, call, p).clamp(-1, 1) for p in range(size)]
        unsettle(pace)
        out = op(parts[rank].to(tsn.device()), w)
        tsn.synchronize()
        want = sum(x.float() @ w.float() for x, w in zip(parts, weights))[rank * rows : (rank + 1) * rows]
        assert torch.equal(out.cpu(), want), f"seed {seed}, call {call}, rank {rank}"
    op.free()


# Rows and columns that tiles do not divide; three calls, so that both halves of the buffer are used again.
@pytest.mark.parametrize("size, nodes", [(2, 1), (2, 2)])
def test_equals_torch(size, nodes):
    args = random.randrange(1 << 30), 72, 48, 40, torch.bfloat16, nodes == 2, 3, 4 if nodes == 1 else 2
    ranks.run(size, _sums, *args, env={"VIRTUAL_NODES": str(nodes)}, timeout=200)
