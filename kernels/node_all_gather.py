"""All-gather over nodes of several PEs: a part crosses the network once per node, and is passed on there.

Every PE puts its part to the PEs with its index in the other nodes, piece by piece, and each of those puts a piece to the
PEs of its own node while the next one is under way. Blocks share each part; block b waits for the blocks b of its peers
alone. Calls follow one another without a barrier, and PEs that make another call are left out, as in exchange.py: a PE
that gets a part makes the same call as its source and as the PE that passes it on, so these two make the same one, too.
"""

import tilelang.language as T
from tilelang import tvm

import tilescale_net as tsn
import tilescale_net.language as N

from .announcement import STATUS_WORDS, announce
from .exchange import await_room
from .partition import MIN_BYTES, piece_number, slice_elements


@tsn.jit(name="node_all_gather")
def node_all_gather(
    n_pes, node_size, chunk_bytes, dtype="uint8", threads=512, blocks=16, in_place=False, engine="auto", unroll=None,
    ring=None, least_bytes=MIN_BYTES,
):  # fmt: skip
    """Kernel `(out, x, tag, status, calls, ready, arrived)`: afterwards `out[p]` is the `x` of PE p, for all p.

    Args:
        n_pes: number of PEs, at most `threads`.
        node_size: PEs of a node, which divides n_pes.
        chunk_bytes: bytes of a piece.
        dtype: of `out` [n_pes, count] and `x` [count], both symmetric; count is taken from the tensors.
        threads, blocks: launch geometry; all blocks must be able to run at once.
        in_place: `x` is `out[my_pe]` already.
        engine, unroll, ring: see `tilescale_net.language.put_block`.
        least_bytes: of a block's slice, see `slice_elements`; the same on all PEs.

    The other arguments are those of `exchange`, whose calls may not be mixed with this kernel's on the same signals.
    """
    count = T.dynamic("count", "int64")
    nodes, chunk = n_pes // node_size, chunk_bytes * 8 // tvm.DataType(dtype).bits
    options = dict(engine=engine, unroll=unroll, ring=ring)

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((n_pes, count), dtype),
        x: T.Tensor((count,), dtype),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        calls: T.Tensor((blocks,), "uint64"),
        ready: T.Tensor((n_pes,), "uint64"),
        arrived: T.Tensor((n_pes, blocks), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            index = me % node_size
            call = calls[block] + T.uint64(1)
            share = slice_elements(count, blocks, dtype, least_bytes)
            first = T.alloc_var("int64")
            first = T.min(share * block, count)
            end = T.alloc_var("int64")
            end = T.min(first + share, count)
            pieces = T.alloc_var("int64")
            pieces = T.ceildiv(end - first, T.int64(chunk))
            agrees = T.alloc_shared((n_pes,), "int32")
            if block == 0 and thread < n_pes:
                announce(ready, me, call, tag, thread)
            if first < end:
                same = T.alloc_var("int32")
                await_room(agrees, same, ready, call, tag, status, block, thread, n_pes)
                for piece in T.serial(pieces):
                    start = first + piece * chunk
                    for hop in T.serial(1, nodes):
                        pe = (me + hop * node_size) % n_pes
                        if agrees[pe] != 0:
                            N.put_signal_block(
                                out[me, start], x[start], pe, arrived[me, block], piece_number(call, piece + 1),
                                count=T.min(T.int64(chunk), end - start), **options,
                            )  # fmt: skip
                for hop in T.serial(1 if in_place else 0, node_size):
                    pe = me - index + (index + hop) % node_size
                    if agrees[pe] != 0:
                        N.put_block(out[me, first], x[first], pe, count=end - first, **options)
                for piece in T.serial(pieces):
                    start = first + piece * chunk
                    for back in T.serial(1, nodes):
                        source = (me + n_pes - back * node_size) % n_pes
                        if agrees[source] != 0:
                            N.wait_block(arrived[source, block], "ge", piece_number(call, piece + 1))
                            for hop in T.serial(1, node_size):
                                pe = me - index + (index + hop) % node_size
                                if agrees[pe] != 0:
                                    N.put_block(
                                        out[source, start], out[source, start], pe,
                                        count=T.min(T.int64(chunk), end - start), **options,
                                    )  # fmt: skip
                T.sync_threads()
                if thread < n_pes:
                    if thread // node_size == me // node_size and same != 0:
                        # One fence for this PE's part and for those that it passes on.
                        N.fence(thread)
                        for node in T.serial(nodes):
                            if agrees[node * node_size + index] != 0 and (thread != me or node == me // node_size):
                                N.signal(arrived[node * node_size + index, block], piece_number(call, pieces), thread)
                    if same != 0 and agrees[me - index + thread % node_size] != 0:
                        N.wait(arrived[thread, block], "ge", piece_number(call, pieces))
                    N.quiet(thread)
            T.sync_threads()
            if thread == 0:
                calls[block] = call

    return main
