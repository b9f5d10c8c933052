"""All-gather + matrix product against torch: whole numbers, whose sums are exact in any order."""

import dataclasses
import random

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.support import unsettle, zeroed
from tests.variants import nightly, variants
from tilescale_net.kernels.fused.all_gather_matmul import AllGatherMatmul, PipelinedAllGatherMatmul
from tilescale_net.kernels.fused.gemm import Tiling

# As small as can be: tensor cores of GPUs take rows by 128, and summands of so many rows need depth and columns.
SMALL = Tiling(tile=(128, 64, 64) if ranks.gpus() else (32, 32, 16), stages=2, panel=2, columns=16)
SCALED = torch.float8_e4m3fn
SMALL_SCALED = dataclasses.replace(SMALL, tile=(*SMALL.tile[:2], 2 * SMALL.tile[2]))


def whole_numbers(shape, dtype, *key) -> torch.Tensor:
    generator = torch.Generator().manual_seed(random.Random(repr(key)).getrandbits(60))
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def powers_of_two(count, *key) -> torch.Tensor:
    """Scales with which sums stay exact."""
    return 2.0 ** whole_numbers((count,), torch.float32, *key)


def _products(seed, rows, k, n, dtype, transposed, calls, blocks):
    """By the kernels of `blocks`, or by torch's product with copies beside it (None)."""
    rank, size, device = tsn.rank(), tsn.size(), tsn.device()
    pace = random.Random(f"{seed} {rank}")
    scaled = dtype == SCALED
    tiling = SMALL_SCALED if scaled else SMALL
    if blocks is None:
        with pytest.raises(TypeError, match="out_dtype is torch.float32|out_dtype torch.float32 is not one of"):
            PipelinedAllGatherMatmul(rows, k, n, dtype=dtype, out_dtype=torch.float32)
        op = PipelinedAllGatherMatmul(rows, k, n, dtype=dtype, threads=64)
    else:
        op = AllGatherMatmul(rows, k, n, dtype=dtype, tiling=tiling, threads=64, blocks=blocks)
    w = whole_numbers((n, k) if transposed else (k, n), dtype, seed, "w", rank).to(device)
    w = w.t() if transposed else w
    w.requires_grad_(blocks is None and not scaled)  # as a weight of a layer, outside of torch.no_grad()
    x, x_scales, w_scales = tsn.empty((rows, k), dtype), tsn.empty(rows), powers_of_two(n, seed, rank).to(device)
    if scaled:
        _refusals(op, x, w, x_scales, w_scales)
    for call in range(calls):
        parts = [whole_numbers((rows, k), dtype, seed, call, p) for p in range(size)]
        scales = [powers_of_two(rows, seed, call, p) for p in range(size)]
        x.copy_(parts[rank])
        x_scales.copy_(scales[rank])
        unsettle(pace)
        out = op(x, w, **(dict(x_scales=x_scales, w_scales=w_scales) if scaled else {}))
        if blocks is None:
            zeroed(x.nbytes)(x.view(torch.uint8).view(-1))
        x.fill_(float("nan"))  # the call is over with x
        x_scales.fill_(float("nan"))
        tsn.synchronize()
        want = torch.cat(parts).float() @ w.detach().cpu().float()
        want = want * torch.cat(scales)[:, None] * w_scales.cpu() if scaled else want
        assert torch.equal(out.cpu(), want.to(out.dtype)), f"seed {seed}, call {call}, rank {rank}"
    tsn.free(x)
    tsn.free(x_scales)
    op.free()


def _refusals(op, x, w, x_scales, w_scales):
    """Errors of torch.float8_e4m3fn; nothing is sent."""
    k, n = w.shape
    scales = dict(x_scales=x_scales, w_scales=w_scales)
    with pytest.raises(ValueError, match="w of torch.float8_e4m3fn has strides.*w.t\\(\\).contiguous\\(\\).t\\(\\)"):
        op(x, w.contiguous(), **scales)
    with pytest.raises(TypeError, match=f"w_scales is None; torch.float8_e4m3fn takes a float32 tensor \\[{n}\\]"):
        op(x, w, x_scales=x_scales)
    with pytest.raises(TypeError, match="x_scales has dtype torch.bfloat16; it must be torch.float32"):
        op(x, w, x_scales=x_scales.bfloat16(), w_scales=w_scales)
    with pytest.raises(ValueError, match=f"w_scales has shape \\[1\\]; it must be \\[{n}\\] or \\[1, {n}\\]"):
        op(x, w, x_scales=x_scales, w_scales=w_scales[:1])
    with pytest.raises(TypeError, match="out_dtype torch.float32 is not one of torch.bfloat16, torch.float16"):
        AllGatherMatmul(len(x), k, n, dtype=SCALED, out_dtype=torch.float32)
    with pytest.raises(ValueError, match="must have a depth that is a multiple of 32"):
        AllGatherMatmul(len(x), k, n, dtype=SCALED, tiling=dataclasses.replace(SMALL, tile=(*SMALL.tile[:2], 16)))
    with pytest.raises(ValueError, match="k is 40; it must be a multiple of 16 for torch.float8_e4m3fn"):
        AllGatherMatmul(len(x), 40, n, dtype=SCALED)


@variants(1, "size, nodes, dtype", [(4, 1, torch.bfloat16), (2, 2, SCALED), (1, 1, torch.float16)])
@ranks.on(timeout=200)
def test_pipelined_equals_torch(size, nodes, dtype, seed):
    n, transposed = (48, True) if dtype == SCALED else (40, size == 1)
    _products(seed, 72, 48, n, dtype, transposed, 3, None)


NIGHTLY = nightly(2, 1, SCALED)


# Rows and columns that tiles do not divide; three calls, so that both halves of the buffer are used again.
@variants(1, "size, nodes, dtype", [(4, 1, torch.bfloat16), (2, 2, torch.bfloat16), (2, 2, SCALED), NIGHTLY])
@ranks.on(timeout=200)
def test_equals_torch(size, nodes, dtype, seed):
    n, transposed = (48, True) if dtype == SCALED else (40, nodes == 2)
    _products(seed, 72, 48, n, dtype, transposed, 3, 4 if nodes == 1 else 2)
