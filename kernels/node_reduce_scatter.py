"""Reduce-scatter over nodes of several PEs: what a node adds up crosses the network as one sum.

For each other node, a PE adds up what the PEs of its own node have for the PE with its index there, read over mapped
memory, and puts the sum to it, chunk by chunk through a few slots; that PE adds up the nodes' sums. A node's sum is made in
the order of its PEs, in float32 for narrow types, and rounded; the nodes' sums are added in the order of the nodes, and
rounded once more: results are equal bit by bit from run to run, in any order of arrival.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N

from .announcement import STATUS_WORDS, announce, announcement, compare
from .moe.row_ops import EXPLICIT_SYNC
from .partition import piece_number
from .sum_of_peers import VECTOR_BYTES, accumulator, add_up, batch_of, vector_of


@tsn.jit(name="node_reduce_scatter", pass_configs=EXPLICIT_SYNC)
def node_reduce_scatter(
    n_pes, node_size, dtype, threads=512, blocks=32, slots=3, chunk_bytes=64 * 1024, engine="auto", unroll=None, ring=None
):  # fmt: skip
    """Kernel `(out, x, tag, status, staging, outgoing, calls, ready, done, arrived, consumed)`: `out` is the sum over all
    PEs p of part my_pe of the `x` of PE p.

    Args:
        n_pes: number of PEs, at most `threads`.
        node_size: PEs of a node, which divides n_pes.
        dtype: of `out` [count, 16 bytes of dtype] and `x` [n_pes * count, 16 bytes], which is symmetric, at the same place on
            all PEs; part p begins at row p * count, and `out` may be this PE's own part.
        threads, blocks: launch geometry; all blocks must be able to run at once.
        slots: chunks between two PEs that may be under way in each block, 2 or more.
        chunk_bytes: bytes of a chunk.
        engine, unroll, ring: see `tilescale_net.language.put_block`.

    `staging` and `outgoing` are [nodes, blocks, slots, chunk_bytes / 16, 16 bytes of dtype]; `ready` [2 * n_pes] (by
    parity of the call), `done` [node_size, blocks], `arrived` and `consumed` [nodes, blocks] are uint64; all of these are
    symmetric. `calls` (uint64 [blocks]) is any device memory. Signals and `calls` are zero before the first call, and then
    left alone. `tag` stands for what must be equal on all PEs, `x` above all; where it is not, nothing moves, and what
    differs is reported to `status` (int64 [STATUS_WORDS]), see `announcement`.
    """
    count, rows = T.dynamic("count", "int64"), T.dynamic("rows", "int64")
    vector, batch, nodes, chunk = vector_of(dtype), batch_of(node_size), n_pes // node_size, chunk_bytes // VECTOR_BYTES
    total_dtype = accumulator(dtype)

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((count, vector), dtype),
        x: T.Tensor((rows, vector), dtype),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        staging: T.Tensor((nodes, blocks, slots, chunk, vector), dtype),
        outgoing: T.Tensor((nodes, blocks, slots, chunk, vector), dtype),
        calls: T.Tensor((blocks,), "uint64"),
        ready: T.Tensor((2 * n_pes,), "uint64"),
        done: T.Tensor((node_size, blocks), "uint64"),
        arrived: T.Tensor((nodes, blocks), "uint64"),
        consumed: T.Tensor((nodes, blocks), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            node, index = me // node_size, me % node_size
            call = T.alloc_var("uint64")
            call = calls[block] + T.uint64(1)
            agrees = T.alloc_shared((n_pes,), "int32")
            share = T.max(T.ceildiv(count, T.int64(blocks)), T.int64(threads))
            first = T.alloc_var("int64")
            first = T.min(share * block, count)
            end = T.alloc_var("int64")
            end = T.min(first + share, count)
            # A fast peer announces the next call before this one is over, but not the one after that.
            parity = T.cast(call % T.uint64(2), "int32")
            if block == 0 and thread < n_pes:
                announce(ready, parity * n_pes + me, call, tag, thread)
            if first < end:
                views = [N.remote(x, me - index + p) for p in range(node_size)]
                if thread < n_pes:
                    same = T.alloc_var("int32")
                    word = N.wait(ready[parity * n_pes + thread], "ge", announcement(call, 0))
                    compare(same, thread, call, tag, word, status, block == 0)
                    agrees[thread] = same
                T.sync_threads()
                agreed = T.alloc_var("int32")
                agreed = 1
                for p in T.serial(n_pes):
                    agreed = agreed & agrees[p]
                steps = T.alloc_var("int64")
                steps = T.if_then_else(agreed != 0, T.ceildiv(end - first, T.int64(chunk)), T.int64(0))
                result = T.alloc_local((batch, vector), dtype)
                for step in T.serial(steps + 1):
                    if step < steps:
                        start = first + step * chunk
                        size = T.min(T.int64(chunk), end - start)
                        slot = step % slots
                        for hop in T.serial(1, nodes):
                            pe = (me + hop * node_size) % n_pes
                            other = pe // node_size
                            # The slot's last use must be over there; those of earlier calls are, since that PE is ready.
                            if step >= slots:
                                N.wait_block(consumed[other, block], "ge", piece_number(call, step - slots + 1))
                            for turn in T.serial(T.ceildiv(size, T.int64(threads * batch))):
                                i = turn * threads * batch + thread
                                part = pe * count + start
                                add_up(result, views, dtype, part + i, part + size, threads, batch)
                                for u in T.unroll(batch):
                                    if i + u * threads < size:
                                        for v in T.vectorized(vector):
                                            outgoing[other, block, slot, i + u * threads, v] = result[u, v]
                            N.put_signal_block(
                                staging[node, block, slot, 0, 0], outgoing[other, block, slot, 0, 0], pe, arrived[node, block],
                                piece_number(call, step + 1), count=size * vector, engine=engine, unroll=unroll, ring=ring,
                            )  # fmt: skip
                    if step > 0:
                        for hop in T.serial(1, nodes):
                            N.wait_block(arrived[(node + hop) % nodes, block], "ge", piece_number(call, step))
                        start = first + (step - 1) * chunk
                        size = T.min(T.int64(chunk), end - start)
                        slot = (step - 1) % slots
                        totals = T.alloc_local((batch, vector), total_dtype)
                        sums = T.alloc_local((batch, vector), dtype)
                        for turn in T.serial(T.ceildiv(size, T.int64(threads * batch))):
                            i = turn * threads * batch + thread
                            part = me * count + start
                            add_up(result, views, dtype, part + i, part + size, threads, batch)
                            T.clear(totals)
                            for other in T.serial(nodes):
                                for u in T.unroll(batch):
                                    if i + u * threads < size:
                                        for v in T.vectorized(vector):
                                            if other == node:
                                                sums[u, v] = result[u, v]
                                            else:
                                                sums[u, v] = staging[other, block, slot, i + u * threads, v]
                                for u in T.unroll(batch):
                                    for v in T.unroll(vector):
                                        totals[u, v] += T.cast(sums[u, v], total_dtype)
                            for u in T.unroll(batch):
                                if i + u * threads < size:
                                    for v in T.vectorized(vector):
                                        out[start + i + u * threads, v] = T.cast(totals[u, v], dtype)
                        T.sync_threads()
                        if thread < nodes and thread != node:
                            N.signal(consumed[node, block], piece_number(call, step), thread * node_size + index)
                # All have read this PE's `x` before work behind this kernel may write it.
                T.sync_threads()
                if thread < node_size and thread != index and agreed != 0:
                    N.signal(done[index, block], call, me - index + thread)
                    N.wait(done[thread, block], "ge", T.cast(call, "int64"))
            T.sync_threads()
            if thread == 0:
                calls[block] = call

    return main
