"""All-gather + matrix product against torch: whole numbers, whose sums are exact in any order."""

import random

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.support import unsettle
from tilescale_net.kernels.fused.all_gather_matmul import AllGatherMatmul
from tilescale_net.kernels.fused.matmul import Tiling

SMALL = Tiling(tile=(32, 32, 16), stages=2, panel=2, columns=16)


def whole_numbers(shape, dtype, *key) -> torch.Tensor:
    generator = torch.Generator().manual_seed(random.Random(repr(key)).getrandbits(60))
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def _products(seed, rows, k, n, dtype, transposed, calls, blocks):
    rank, size = tsn.rank(), tsn.size()
    pace = random.Random(f"{seed} {rank}")
    op = AllGatherMatmul(rows, k, n, dtype=dtype, tiling=SMALL, threads=64, blocks=blocks)
    w = whole_numbers((n, k) if transposed else (k, n), dtype, seed, "w", rank).to(tsn.device())
    w = w.t() if transposed else w
    x = tsn.empty((rows, k), dtype)
    for call in range(calls):
        parts = [whole_numbers((rows, k), dtype, seed, call, p) for p in range(size)]
        x.copy_(parts[rank])
        unsettle(pace)
        out = op(x, w)
        x.fill_(float("nan"))  # the call is over with x
        tsn.synchronize()
        want = (torch.cat(parts).float() @ w.cpu().float()).to(dtype)
        assert torch.equal(out.cpu(), want), f"seed {seed}, call {call}, rank {rank}"
    tsn.free(x)
    op.free()


# Rows and columns that tiles do not divide; three calls, so that both halves of the buffer are used again.
@pytest.mark.parametrize("size, nodes", [(2, 1), (2, 2)])
def test_equals_torch(size, nodes):
    args = random.randrange(1 << 30), 72, 48, 40, torch.bfloat16, nodes == 2, 3, 4 if nodes == 1 else 2
    ranks.run(size, _products, *args, env={"VIRTUAL_NODES": str(nodes)}, timeout=200)
