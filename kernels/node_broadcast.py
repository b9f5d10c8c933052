"""Broadcast over nodes of several PEs: each part of the tensor crosses the network once per node.

The root deals a part to every PE of its node; that PE puts it to the PEs with its index in the other nodes, piece by piece,
and each PE that gets a piece so puts it to the PEs of its own node while the next one is under way. Blocks share each part;
block b waits for the blocks b of its peers alone.
"""

import tilelang.language as T
from tilelang import tvm

import tilescale_net as tsn
import tilescale_net.language as N

from .announcement import STATUS_WORDS, all_agree, announce
from .exchange import await_room
from .partition import MIN_BYTES, piece_number, slice_elements


@tsn.jit(name="node_broadcast")
def node_broadcast(
    n_pes, node_size, chunk_bytes, dtype="uint8", threads=512, blocks=16, engine="auto", unroll=None, ring=None, least_bytes=MIN_BYTES
):  # fmt: skip
    """Kernel `(x, root, tag, status, calls, ready, arrived)`: afterwards `x` of all PEs is the `x` of PE `root`.

    Args:
        n_pes: number of PEs, at most `threads`.
        node_size: PEs of a node, which divides n_pes.
        chunk_bytes: bytes of a piece.
        dtype, threads, blocks, engine, unroll, ring, least_bytes: see `broadcast`.

    `calls` [blocks] (any device memory), `ready` [n_pes] and `arrived` [node_size, blocks] (by part; symmetric) are uint64,
    zero before the first call, and then left alone. `tag` and `status` as in `broadcast`.
    """
    count = T.dynamic("count", "int64")
    nodes, chunk = n_pes // node_size, chunk_bytes * 8 // tvm.DataType(dtype).bits
    options = dict(engine=engine, unroll=unroll, ring=ring)

    @T.prim_func
    def main(
        ctx: N.Context(),
        x: T.Tensor((count,), dtype),
        root: T.int32,
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        calls: T.Tensor((blocks,), "uint64"),
        ready: T.Tensor((n_pes,), "uint64"),
        arrived: T.Tensor((node_size, blocks), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            index, home = me % node_size, me // node_size == root // node_size
            call = calls[block] + T.uint64(1)
            # This PE passes on the part of its index, whose pieces reach it before those of any other part.
            part = slice_elements(count, node_size, dtype, least_bytes)
            share = slice_elements(part, blocks, dtype, least_bytes)
            first = T.alloc_var("int64")
            first = T.min(share * block, part)
            size = T.alloc_var("int64")
            size = T.min(share, part - first)
            pieces = T.alloc_var("int64")
            pieces = T.ceildiv(size, T.int64(chunk))
            agrees = T.alloc_shared((n_pes,), "int32")
            if block == 0 and thread < n_pes:
                announce(ready, me, call, tag, thread)
            if size > 0:
                same = T.alloc_var("int32")
                same = 1
                await_room(agrees, same, ready, call, tag, status, block, thread, n_pes, runs_ahead=True)
                agreed = T.alloc_var("int32")
                all_agree(agreed, agrees, n_pes)
                pieces = T.if_then_else(agreed != 0, pieces, T.int64(0))
                for piece in T.serial(pieces):
                    offset = first + piece * chunk
                    if me == root:
                        for hop in T.serial(1, node_size):
                            to = (index + hop) % node_size
                            start = to * part + offset
                            length = T.min(T.min(T.int64(chunk), first + size - offset), count - start)
                            if length > 0:
                                N.put_signal_block(
                                    x[start], x[start], me - index + to, arrived[to, block],
                                    piece_number(call, piece + 1), count=length, **options,
                                )  # fmt: skip
                    start = index * part + offset
                    length = T.min(T.min(T.int64(chunk), first + size - offset), count - start)
                    if length > 0:
                        if me != root:
                            N.wait_block(arrived[index, block], "ge", piece_number(call, piece + 1))
                        if home:
                            for hop in T.serial(1, nodes):
                                N.put_signal_block(
                                    x[start], x[start], (me + hop * node_size) % n_pes, arrived[index, block],
                                    piece_number(call, piece + 1), count=length, **options,
                                )  # fmt: skip
                        for hop in T.serial(1, node_size):
                            pe = me - index + (index + hop) % node_size
                            if pe != root:
                                N.put_block(x[start], x[start], pe, count=length, **options)
                T.sync_threads()
                if thread < node_size and agreed != 0:
                    pe = me - index + thread
                    if thread != index and pe != root:
                        N.signal(arrived[index, block], piece_number(call, pieces), pe, fence=True)
                    if thread != index and me != root:
                        N.wait(arrived[thread, block], "ge", piece_number(call, pieces))
                if thread < n_pes:
                    N.quiet(thread)
            T.sync_threads()
            if thread == 0:
                calls[block] = call

    return main
