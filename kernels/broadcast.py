"""Broadcast in one kernel: the root scatters its tensor to the other PEs, which put their parts to one another.

So each link, including the root's, carries the tensor once. Blocks share each part; block b waits only for blocks b of its
peers.
"""

import tilelang.language as T
import torch
from tilelang import tvm

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.runtime.profiling import named

from .collective import (
    MIN_BYTES,
    STATUS_WORDS,
    Collective,
    Nodes,
    all_agree,
    announce,
    as_bytes,
    check_chunk,
    end_call,
    piece_number,
    slice_elements,
)
from .exchange import await_room

# ---------------------------------------------------------------------------------------------------------------------
# Broadcast over nodes of several PEs: each part of the tensor crosses the network once per node.
#
# The root puts a part to every PE of its node. That PE puts it in pieces to the PEs with its index in the other nodes,
# which put a piece to the PEs of their own node while the next one is in flight.


@tsn.jit(name="node_broadcast")
def node_broadcast(
    n_pes, node_size, chunk_bytes, dtype="uint8", threads=512, blocks=16, engine="auto", unroll=None, ring=None, least_bytes=MIN_BYTES
):  # fmt: skip
    """Kernel `(x, root, tag, status, calls, ready, arrived)`: afterwards `x` of all PEs is the `x` of PE `root`.

    Args:
        n_pes: number of PEs, at most `threads`.
        node_size: PEs per node, or a tuple with the size of every node.
        chunk_bytes: bytes of a piece.
        dtype, threads, blocks, engine, unroll, ring, least_bytes: see `broadcast`.

    Other arguments as in `broadcast`, but `arrived` is [PEs of the largest node, blocks], by part.
    """
    count = T.dynamic("count", "int64")
    of = Nodes.of(n_pes, node_size)
    nodes, turns, chunk = len(of.sizes), of.turns, chunk_bytes * 8 // tvm.DataType(dtype).bits
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
        arrived: T.Tensor((of.largest, blocks), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            node, index = of.node_of(me), of.index_of(me)
            first_here, here = me - index, of.size(node)
            home, parts = node == of.node_of(root), of.size(of.node_of(root))
            call = calls[block] + T.uint64(1)
            # This PE forwards the part with its index, or several parts in turn.
            part = slice_elements(count, parts, dtype, least_bytes)
            share = slice_elements(part, blocks, dtype, least_bytes)
            first = T.alloc_var("int64", T.min(share * block, part))
            size = T.alloc_var("int64", T.min(share, part - first))
            pieces = T.alloc_var("int64", T.ceildiv(size, T.int64(chunk)))
            agrees = T.alloc_shared((n_pes,), "int32")
            if block == 0 and thread < n_pes:
                announce(ready, me, call, tag, thread)
            if size > 0:
                same = T.alloc_var("int32", 1)
                await_room(agrees, same, ready, call, tag, status, block, thread, n_pes, runs_ahead=True)
                agreed = T.alloc_var("int32")
                all_agree(agreed, agrees, n_pes)
                pieces = T.if_then_else(agreed != 0, pieces, T.int64(0))
                for piece in T.serial(pieces):
                    offset = first + piece * chunk
                    if me == root:
                        for hop in T.serial(1, parts):
                            to = (index + hop) % parts
                            start = to * part + offset
                            length = T.min(T.min(T.int64(chunk), first + size - offset), count - start)
                            if length > 0:
                                N.put_signal_block(
                                    x[start], x[start], first_here + to, arrived[to, block],
                                    piece_number(call, piece + 1), count=length, **options,
                                )  # fmt: skip
                    for turn in T.serial(turns):
                        i = index + turn * here
                        start = i * part + offset
                        length = T.min(T.min(T.int64(chunk), first + size - offset), count - start)
                        if i < parts and length > 0:
                            if me != root:
                                N.wait_block(arrived[i, block], "ge", piece_number(call, piece + 1))
                            if home:
                                for hop in T.serial(1, nodes):
                                    N.put_signal_block(
                                        x[start], x[start], of.forwarder((node + hop) % nodes, i), arrived[i, block],
                                        piece_number(call, piece + 1), count=length, **options,
                                    )  # fmt: skip
                            for hop in T.serial(1, here):
                                pe = first_here + (index + hop) % here
                                if pe != root:
                                    N.put_block(x[start], x[start], pe, count=length, **options)
                T.sync_threads()
                if thread < here and agreed != 0:
                    pe = first_here + thread
                    for turn in T.serial(turns):
                        if thread != index and pe != root and index + turn * here < parts:
                            N.signal(arrived[index + turn * here, block], piece_number(call, pieces), pe, fence=True)
                    for turn in T.serial(turns):
                        if thread != index and me != root and thread + turn * here < parts:
                            N.wait(arrived[thread + turn * here, block], "ge", piece_number(call, pieces))
                if thread < n_pes:
                    N.quiet(thread)
            end_call(calls, block, call, thread)

    return main


@tsn.jit(name="broadcast")
def broadcast(
    n_pes, dtype="uint8", threads=512, blocks=16, engine="auto", unroll=None, ring=None, least_bytes=MIN_BYTES
):
    """Kernel `(x, root, tag, status, calls, ready, arrived)`: afterwards `x` of all PEs is the `x` of PE `root`.

    Args:
        n_pes: number of PEs, at most `threads`, 2 or more.
        dtype: dtype of `x` [count] (symmetric).
        threads, blocks, engine, unroll, ring, least_bytes: as in `exchange`.

    `tag`, `status`, `calls` [blocks] and the signals `ready` [n_pes] and `arrived` [n_pes, blocks]: see
    `collective.call_word`.
    """
    count = T.dynamic("count", "int64")
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
        arrived: T.Tensor((n_pes, blocks), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            call = calls[block] + T.uint64(1)
            # Part i goes to the i-th PE behind the root.
            part = slice_elements(count, n_pes - 1, dtype, least_bytes)
            share = slice_elements(part, blocks, dtype, least_bytes)
            first = share * block
            agrees = T.alloc_shared((n_pes,), "int32")
            if block == 0 and thread < n_pes:
                announce(ready, me, call, tag, thread)
            if first < part:
                same = T.alloc_var("int32", 1)
                await_room(agrees, same, ready, call, tag, status, block, thread, n_pes, runs_ahead=True)
                agreed = T.alloc_var("int32")
                all_agree(agreed, agrees, n_pes)
                if agreed != 0:
                    if me == root:
                        for hop in T.serial(1, n_pes):
                            start = (hop - 1) * part + first
                            size = T.min(T.min(share, part - first), count - start)
                            if size > 0:
                                N.put_block(x[start], x[start], (root + hop) % n_pes, count=size, **options)
                    else:
                        start = (me - root - 1 + n_pes) % n_pes * part + first
                        size = T.min(T.min(share, part - first), count - start)
                        N.wait_block(arrived[root, block], "ge", call)
                        for hop in T.serial(1, n_pes):
                            pe = (me + hop) % n_pes
                            if pe != root and size > 0:
                                N.put_block(x[start], x[start], pe, count=size, **options)
                T.sync_threads()
                if thread < n_pes and thread != me and agreed != 0:
                    if thread != root:
                        N.signal(arrived[me, block], call, thread, fence=True)
                    if me != root:
                        N.wait(arrived[thread, block], "ge", call)
                    N.quiet(thread)
            end_call(calls, block, call, thread)

    return main


class Broadcast(Collective):
    """Broadcast of tensors of any dtype and size; constructed and called by all ranks.

    Args:
        threads, blocks: see `Collective`.
        engine, unroll, ring: see `put_block`.
        once_per_node, chunk_bytes: as in `AllGather`.
        group: the ranks; see `tilescale_net.world`.

    Raises:
        ValueError: a launch geometry that the kernel or the GPU cannot run.
        RankMismatch: ranks pass different arguments.
    """

    def __init__(
        self, *, threads: int = 512, blocks: int = 16, engine: str = "auto", unroll: int | None = None,
        ring: tuple[int, int] | None = None, once_per_node: bool = True, chunk_bytes: int = 256 * 1024,
        group: "tsn.Group" = None,
    ) -> None:  # fmt: skip
        shown = (
            f"engine={engine}, unroll={unroll}, ring={ring}, once_per_node={once_per_node}, chunk_bytes={chunk_bytes}"
        )
        check_chunk("Broadcast", chunk_bytes)
        super().__init__("Broadcast", shown, threads, blocks, group)
        self._over_nodes = once_per_node and self.has_gateways
        self._chunk_bytes = chunk_bytes
        self._options = dict(
            threads=threads, blocks=blocks, engine=engine, unroll=unroll, ring=ring, least_bytes=self.min_slice_bytes
        )
        self._calls = self.counters(blocks)
        parts = self.node_map.largest if self._over_nodes else self.n_pes
        self._ready, self._arrived = self._signals(self.n_pes), self._signals(parts, blocks)

    @named("tilescale_net.Broadcast")
    def __call__(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
        """`x` of all PEs becomes the `x` of PE `root`; asynchronous on the current stream.

        Args:
            x: symmetric, contiguous, of the same shape and dtype on all ranks.
            root: a rank of the group, the same on all ranks.

        Returns:
            `x`.

        Raises:
            TypeError, ValueError, HeapError: a wrong argument, by name; nothing was sent.
            RankMismatch: ranks pass different arguments: no data move. Raised at once for new arguments, else by the next
                call or `check`.
        """
        self._begin()
        self._check("x", x, symmetric=True)
        if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < self.n_pes:
            raise ValueError(f"{self.name}: root is {root!r}; it must be a rank between 0 and {self.n_pes - 1}")
        tag = self._agree(
            "x of shape {} and {} at heap offset {}, root {}", x.shape, x.dtype, self.heap_offset(x), root
        )
        if x.nbytes and self.n_pes > 1:
            if self._over_nodes:
                kernel = node_broadcast(self.n_pes, self.node_size, self._chunk_bytes, **self._options)
            else:
                kernel = broadcast(self.n_pes, **self._options)
            words = tag, self.status_record, self._calls, self._ready, self._arrived
            self._launch_checked(lambda: kernel(as_bytes(x, x.nbytes), root, *words))
        return x
