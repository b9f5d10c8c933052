"""Rows that a dispatch counts by tiles, on a rank that counts them for another one.

The simulator runs no two kernels of a rank at once, so that a product beside a dispatch of its own rank never finds rows
missing.
"""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests.kernels.fused.test_all_gather_matmul import whole_numbers
from tests.kernels.support import assert_same
from tilescale_net.kernels.collective import EXPLICIT_SYNC
from tilescale_net.kernels.moe.tiles import count_rows


@tsn.jit(pass_configs=EXPLICIT_SYNC)
def count(k, tile_rows):
    """Kernel `(x, source, records, words, out)`: a warp copies the 32 rows of `source` to `x` and counts their tiles at the
    other PE, which gets them when they are there."""

    @T.prim_func
    def main(
        ctx: N.Context(), x: T.Tensor((32, k), "float32"), source: T.Tensor((32, k), "float32"),
        records: T.Tensor((1, 32, 1), "int32"), words: T.Tensor((32 // tile_rows + 1,), "uint64"),
        out: T.Tensor((32, k), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            lane = T.get_thread_binding()
            peer = T.alloc_var("int32")
            first = T.alloc_var("int32", init=0)
            n = T.alloc_var("int32", init=32)
            peer = N.my_pe() ^ 1
            for r in T.serial(32):
                x[r, lane] = source[r, lane]
            count_rows(words, records, first, 0, n, 1, tile_rows, peer, lane)
            for t in T.serial(32 // tile_rows):
                N.wait_warp(words[t], "ge", tile_rows)
                N.get_warp(out[t * tile_rows, 0], x[t * tile_rows, 0], peer, count=tile_rows * k)

    return main


def counted(seed):
    """Rows are counted when the whole warp has copied them."""
    x, words = tsn.zeros((32, 32)), tsn.zeros((5,), torch.uint64)
    source = whole_numbers((32, 32), torch.float32, seed, tsn.rank()).to(tsn.device())
    records = torch.arange(32, dtype=torch.int32, device=tsn.device()).view(1, 32, 1)
    out = tsn.zeros((32, 32))  # what comes from another node can go nowhere else
    tsn.barrier()
    count(32, 8)(x, source, records, words, out)
    tsn.synchronize()
    assert_same(out.cpu(), whole_numbers((32, 32), torch.float32, seed, tsn.rank() ^ 1), f"seed {seed}")
    tsn.barrier()
    for tensor in (x, words, out):
        tsn.free(tensor)
