"""The kernel of all-gather and of all-to-all with equal splits, by puts: every PE puts a part to the same place at every PE.

It does for any PE and any alignment what exchange_mapped.py does for mapped ones.

A call begins by telling every peer that the output may be overwritten, and which one that is, and ends when every peer's
part has arrived, so that calls follow one another without a barrier. Between PEs that give different outputs nothing
moves. Blocks share each part; block b waits for the blocks b of its peers.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N

from .announcement import STATUS_WORDS, TAG_BITS, announce, compare, compare_one
from .partition import slice_elements


@tsn.macro
def await_room(agrees, same: T.Ref, ready, call, tag, status, block, thread, n_pes, runs_ahead=False):
    """Wait, by a thread for each PE, until all have begun the call; agrees[p] = whether PE p makes the same one, which
    thread p has in `same` too.

    `runs_ahead`: a PE may be through with the call before all have looked, as the root of a broadcast, which gets nothing.
    """
    if thread < n_pes:
        word = N.wait(ready[thread], "ge", call << T.uint64(TAG_BITS))
        if runs_ahead:
            compare_one(same, thread, call, tag, word, status, block == 0)
        else:
            compare(same, thread, call, tag, word, status, block == 0)
        agrees[thread] = same
    T.sync_threads()


def exchange(n_pes, dtype, threads, blocks, engine, unroll, ring, least_bytes, *, split, in_place=False):
    """Traced kernel `(out, x, tag, status, calls, ready, arrived)`; afterwards `out[p]` is what PE p has put here.

    Args:
        n_pes: number of PEs, at most `threads`.
        dtype: of `out` [n_pes, count] (symmetric) and `x`; count is taken from the tensors.
        threads, blocks: launch geometry; all blocks must be able to run at once.
        engine, unroll, ring: see `tilescale_net.language.put_block`.
        least_bytes: of a block's slice, see `slice_elements`; the same on all PEs.
        split: `x` is [n_pes, count], and PE p gets `x[p]`; else it is [count], and every PE gets all of it.
        in_place: `x` is `out[my_pe]` already.

    `tag` stands for what must be equal on all PEs, `out` above all; what differs is reported to `status` (int64
    [STATUS_WORDS]), see `announcement`. `calls` [blocks] (any device memory), `ready` [n_pes] and `arrived` [n_pes, blocks]
    (symmetric) are uint64, zero before the first call, and then left alone.
    """
    count = T.dynamic("count", "int64")
    shape = (n_pes, count) if split else (count,)

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((n_pes, count), dtype),
        x: T.Tensor(shape, dtype),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        calls: T.Tensor((blocks,), "uint64"),
        ready: T.Tensor((n_pes,), "uint64"),
        arrived: T.Tensor((n_pes, blocks), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            call = calls[block] + T.uint64(1)
            share = slice_elements(count, blocks, dtype, least_bytes)
            first = share * block
            agrees = T.alloc_shared((n_pes,), "int32")
            # Work before this kernel on the stream is done with `out`, so one block can signal it for all.
            if block == 0 and thread < n_pes:
                announce(ready, me, call, tag, thread)
            if first < count:
                same = T.alloc_var("int32")
                await_room(agrees, same, ready, call, tag, status, block, thread, n_pes)
                for hop in T.serial(1 if in_place else 0, n_pes):
                    pe = (me + hop) % n_pes
                    if agrees[pe] != 0:
                        N.put_block(
                            out[me, first], x[pe, first] if split else x[first], pe, count=T.min(share, count - first),
                            engine=engine, unroll=unroll, ring=ring,
                        )  # fmt: skip
                # One fence for all peers, by a thread each: put_signal would wait for them one after the other.
                T.sync_threads()
                if thread < n_pes:
                    if same != 0:
                        N.signal(arrived[me, block], call, thread, fence=True)
                        N.wait(arrived[thread, block], "ge", call)
                    N.quiet(thread)
            T.sync_threads()
            if thread == 0:
                calls[block] = call

    return main
