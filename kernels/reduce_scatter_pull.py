"""Reduce-scatter by pull: every PE reads its part of all PEs' input and adds up in registers.

Nothing is stored on the way, so that the links are busy from the first load to the last. For that the peers' inputs must
be mapped, at the same place of all heaps; reduce_scatter.py has the kernel for all others.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N

from .announcement import STATUS_WORDS, all_agree, announcement, compare
from .moe.row_ops import EXPLICIT_SYNC
from .sum_of_peers import add_up, batch_of, vector_of


@tsn.jit(name="reduce_scatter_pull", pass_configs=EXPLICIT_SYNC)
def reduce_scatter_pull(n_pes, dtype, threads=512, blocks=32):
    """Kernel `(out, x, tag, status, calls, ready, done)`: `out` is the sum over all PEs p of part my_pe of the `x` of PE p.

    Args:
        n_pes: number of PEs, at most `threads`; all of them mapped.
        dtype: of `out` [count, 16 bytes of dtype] and `x` [n_pes * count, 16 bytes], which is symmetric; part p begins at
            row p * count, and `out` may be this PE's own part. Sums are made as in `reduce_scatter`.
        threads, blocks: launch geometry; all blocks must be able to run at once.

    `ready` and `done` (uint64 [n_pes, blocks]) are symmetric, `calls` (uint64 [blocks]) is any device memory; all are zero
    before the first call, and then left alone. `tag` stands for what must be equal on all PEs, `x` above all; where it is
    not, nothing is read, and what differs is reported to `status` (int64 [STATUS_WORDS]), see `announcement`.
    """
    count, rows = T.dynamic("count", "int64"), T.dynamic("rows", "int64")
    vector, batch = vector_of(dtype), batch_of(n_pes)

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((count, vector), dtype),
        x: T.Tensor((rows, vector), dtype),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        calls: T.Tensor((blocks,), "uint64"),
        ready: T.Tensor((n_pes, blocks), "uint64"),
        done: T.Tensor((n_pes, blocks), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            call = T.alloc_var("uint64")
            call = calls[block] + T.uint64(1)
            agrees = T.alloc_shared((n_pes,), "int32")
            share = T.max(T.ceildiv(count, T.int64(blocks)), T.int64(threads))
            first = T.alloc_var("int64")
            first = T.min(share * block, count)
            end = T.alloc_var("int64")
            end = T.min(first + share, count)
            if first < end:
                views = [N.remote(x, p) for p in range(n_pes)]
                # Work before this kernel on the stream is done with `x`, so each block can signal it to the blocks of
                # its number.
                if thread < n_pes:
                    same = T.alloc_var("int32")
                    same = 1
                    if thread != me:
                        N.signal(ready[me, block], announcement(call, tag), thread)
                        word = N.wait(ready[thread, block], "ge", announcement(call, 0))
                        compare(same, thread, call, tag, word, status, True)
                    agrees[thread] = same
                T.sync_threads()
                agreed = T.alloc_var("int32")
                all_agree(agreed, agrees, n_pes)
                last = T.alloc_var("int64")
                last = T.if_then_else(agreed != 0, end, first)
                result = T.alloc_local((batch, vector), dtype)
                part = me * count
                for turn in T.serial(T.ceildiv(last - first, T.int64(threads * batch))):
                    i = first + turn * threads * batch + thread
                    add_up(result, views, dtype, part + i, part + last, threads, batch)
                    for u in T.unroll(batch):
                        if i + u * threads < last:
                            for v in T.vectorized(vector):
                                out[i + u * threads, v] = result[u, v]
                # All have read their parts of `x` before work behind this kernel may write it.
                T.sync_threads()
                if thread < n_pes and thread != me:
                    N.signal(done[me, block], call, thread)
                    N.wait(done[thread, block], "ge", T.cast(call, "int64"))
            T.sync_threads()
            if thread == 0:
                calls[block] = call

    return main
