"""The kernels of all-gather and of all-to-all with equal splits: every PE puts a part to the same place at every PE.

There are two that do the same, one by puts, for any PE, and one by stores through registers, for large parts of mapped
PEs: it loads what goes to all of them once, and sends to all at the same time.

A call begins by telling every peer that the output may be overwritten, and which one that is, and ends when every peer's
part has arrived, so that calls follow one another without a barrier. Between PEs that give different outputs nothing
moves. Blocks share each part; block b waits for the blocks b of its peers.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.announcement import STATUS_WORDS, TAG_BITS, announce, compare
from tilescale_net.kernels.partition import slice_elements
from tilescale_net.kernels.sum_of_peers import VECTOR_BYTES, batch_of

# Bytes of a part from which stores are faster than puts: a block's puts go to one PE after the other.
STORES_FROM = 256 * 1024
WORDS = VECTOR_BYTES // 4


@tsn.macro
def await_room(agrees, same: T.Ref, ready, call, tag, status, block, thread, n_pes):
    """Wait, by a thread for each PE, until all have begun the call; agrees[p] = whether PE p makes the same one, which
    thread p has in `same` too."""
    if thread < n_pes:
        word = N.wait(ready[thread], "ge", call << T.uint64(TAG_BITS))
        compare(same, thread, call, tag, word, status, block == 0)
        agrees[thread] = same
    T.sync_threads()


def exchange(n_pes, dtype, threads, blocks, engine, unroll, ring, *, split, in_place=False):
    """Traced kernel `(out, x, tag, status, calls, ready, arrived)`; afterwards `out[p]` is what PE p has put here.

    Args:
        n_pes: number of PEs, at most `threads`.
        dtype: of `out` [n_pes, count] (symmetric) and `x`; count is taken from the tensors.
        threads, blocks: launch geometry; all blocks must be able to run at once.
        engine, unroll, ring: see `tilescale_net.language.put_block`.
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
            share = slice_elements(count, blocks, dtype)
            first = share * block
            agrees = T.alloc_shared((n_pes,), "int32")
            # Work before this kernel on the stream is done with `out`, so one block can say so for all.
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


def exchange_by_stores(n_pes, threads, blocks, *, split, in_place=False):
    """As `exchange`, for PEs that are all mapped: `out` and `x` are vectors of 16 bytes, [n_pes * count, 4] and [n_pes *
    count, 4] (`split`) or [count, 4] of int32.

    PEs may call one kernel or the other: blocks share a part in the same way, and tell each other the same.
    """
    rows, x_rows = T.dynamic("rows", "int64"), T.dynamic("x_rows", "int64")
    sources = n_pes if split else 1
    batch = batch_of(sources) if split else 4

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((rows, WORDS), "int32"),
        x: T.Tensor((x_rows, WORDS), "int32"),
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
            count = rows // n_pes
            share = T.alloc_var("int64")
            share = slice_elements(count * VECTOR_BYTES, blocks, "uint8") // VECTOR_BYTES
            first = T.alloc_var("int64")
            first = share * block
            end = T.alloc_var("int64")
            end = T.min(first + share, count)
            agrees = T.alloc_shared((n_pes,), "int32")
            if block == 0 and thread < n_pes:
                announce(ready, me, call, tag, thread)
            if first < count:
                targets = [N.remote(out, (me + hop) % n_pes) for hop in range(n_pes)]
                same = T.alloc_var("int32")
                await_room(agrees, same, ready, call, tag, status, block, thread, n_pes)
                part = T.alloc_local((sources, batch, WORDS), "int32")
                for turn in T.serial(T.ceildiv(end - first, T.int64(threads * batch))):
                    i = first + turn * threads * batch + thread
                    for source in list(range(sources)):
                        start = (me + source) % n_pes * count if split else T.int64(0)
                        for u in T.unroll(batch):
                            if i + u * threads < end:
                                for v in T.vectorized(WORDS):
                                    part[source, u, v] = x[start + i + u * threads, v]
                    for hop, target in enumerate(targets):
                        if (hop > 0 or not in_place) and agrees[(me + hop) % n_pes] != 0:
                            for u in T.unroll(batch):
                                if i + u * threads < end:
                                    for v in T.vectorized(WORDS):
                                        target[me * count + i + u * threads, v] = part[hop if split else 0, u, v]
                T.sync_threads()
                if thread < n_pes and same != 0:
                    N.signal(arrived[me, block], call, thread, fence=True)
                    N.wait(arrived[thread, block], "ge", call)
            T.sync_threads()
            if thread == 0:
                calls[block] = call

    return main
