"""All-gather by push: every PE puts its part to the same offset of the output of every PE."""

import tilelang.language as T
import torch
from tilelang import tvm

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.runtime.profiling import named

from .buffered import MOST_BYTES, MOST_BYTES_PER_RANK
from .collective import (
    EXPLICIT_SYNC,
    MIN_BYTES,
    STATUS_WORDS,
    Nodes,
    announce,
    check_chunk,
    end_call,
    piece_number,
    slice_elements,
)
from .exchange import STORES_FROM, UNROLL, Exchange, await_room, exchange, exchange_mapped
from .launches import VECTORS, Launch

# ---------------------------------------------------------------------------------------------------------------------
# All-gather over nodes of several PEs: a part crosses the network once per node, and is forwarded there.
#
# Every PE puts its part in pieces to the PEs with its index in the other nodes (`Nodes.forwarder`), which put a piece to
# the PEs of their own node while the next one is in flight. Blocks share each part; block b waits only for blocks b of its
# peers. Calls need no barrier between them. No data move between PEs that make different calls, as in exchange.py: a PE
# that receives a part makes the same call as its source and as its forwarder, so these two also agree.


@tsn.jit(name="node_all_gather")
def node_all_gather(
    n_pes, node_size, chunk_bytes, dtype="uint8", threads=512, blocks=16, in_place=False, engine="auto", unroll=None,
    ring=None, least_bytes=MIN_BYTES,
):  # fmt: skip
    """Kernel `(out, x, tag, status, calls, ready, arrived)`: afterwards `out[p]` is the `x` of PE p, for all p.

    Args:
        n_pes: number of PEs, at most `threads`.
        node_size: PEs per node, or a tuple with the size of every node.
        chunk_bytes: bytes of a piece.
        dtype: dtype of `out` [n_pes, count] and `x` [count], both symmetric.
        threads, blocks, in_place, engine, unroll, ring, least_bytes: as in `exchange`.

    Other arguments: as in `exchange`. Calls of the two kernels must not share signals.
    """
    count = T.dynamic("count", "int64")
    of = Nodes.of(n_pes, node_size)
    nodes, turns, chunk = len(of.sizes), of.turns, chunk_bytes * 8 // tvm.DataType(dtype).bits
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
            node, index = of.node_of(me), of.index_of(me)
            home, size = me - index, of.size(node)
            call = calls[block] + T.uint64(1)
            share = slice_elements(count, blocks, dtype, least_bytes)
            first = T.alloc_var("int64", T.min(share * block, count))
            end = T.alloc_var("int64", T.min(first + share, count))
            pieces = T.alloc_var("int64", T.ceildiv(end - first, T.int64(chunk)))
            agrees = T.alloc_shared((n_pes,), "int32")
            if block == 0 and thread < n_pes:
                announce(ready, me, call, tag, thread)
            if first < end:
                same = T.alloc_var("int32")
                await_room(agrees, same, ready, call, tag, status, block, thread, n_pes)
                for piece in T.serial(pieces):
                    start = first + piece * chunk
                    for hop in T.serial(1, nodes):
                        pe = of.forwarder((node + hop) % nodes, index)
                        if agrees[pe] != 0:
                            N.put_signal_block(
                                out[me, start], x[start], pe, arrived[me, block], piece_number(call, piece + 1),
                                count=T.min(T.int64(chunk), end - start), **options,
                            )  # fmt: skip
                for hop in T.serial(1 if in_place else 0, size):
                    pe = home + (index + hop) % size
                    if agrees[pe] != 0:
                        N.put_block(out[me, first], x[first], pe, count=end - first, **options)
                for piece in T.serial(pieces):
                    start = first + piece * chunk
                    for back in T.serial(1, nodes):
                        other = (node + nodes - back) % nodes
                        for turn in T.serial(turns):
                            source = of.first(other) + index + turn * size
                            if index + turn * size < of.size(other):
                                if agrees[source] != 0:
                                    N.wait_block(arrived[source, block], "ge", piece_number(call, piece + 1))
                                    for hop in T.serial(1, size):
                                        pe = home + (index + hop) % size
                                        if agrees[pe] != 0:
                                            N.put_block(
                                                out[source, start], out[source, start], pe,
                                                count=T.min(T.int64(chunk), end - start), **options,
                                            )  # fmt: skip
                T.sync_threads()
                if thread < n_pes:
                    if of.node_of(thread) == node and same != 0:
                        # One fence for this PE's part and for forwarded ones.
                        N.fence(thread)
                        for other in T.serial(nodes):
                            for turn in T.serial(turns):
                                source = of.first(other) + index + turn * size
                                if index + turn * size < T.if_then_else(other == node, index + 1, of.size(other)):
                                    if agrees[source] != 0 and (thread != me or other == node):
                                        N.signal(arrived[source, block], piece_number(call, pieces), thread)
                    if same != 0 and agrees[of.forwarder(node, of.index_of(thread))] != 0:
                        N.wait(arrived[thread, block], "ge", piece_number(call, pieces))
                    N.quiet(thread)
            end_call(calls, block, call, thread)

    return main


@tsn.jit(name="all_gather")
def all_gather(
    n_pes, dtype="uint8", threads=512, blocks=16, in_place=False, engine="auto", unroll=None, ring=None,
    least_bytes=MIN_BYTES,
):  # fmt: skip
    """Kernel `(out, x, tag, status, calls, ready, arrived)`: afterwards `out[p]` is the `x` of PE p, for all p; see `exchange`."""
    return exchange(n_pes, dtype, threads, blocks, engine, unroll, ring, least_bytes, split=False, in_place=in_place)


@tsn.jit(name="all_gather_mapped", pass_configs=EXPLICIT_SYNC)
def all_gather_mapped(n_pes, threads=512, blocks=16, unroll=UNROLL, in_place=False, staged=False):
    """Kernel `(out, x, tag, status, calls, ready, arrived[, through])`; see `exchange.exchange_mapped`."""
    return exchange_mapped(n_pes, threads, blocks, unroll, split=False, in_place=in_place, staged=staged)


class AllGather(Exchange):
    """All-gather of tensors of any dtype and size; constructed and called by all ranks.

    Args:
        threads: see `Collective`.
        blocks: blocks per launch; default 64, in the simulator 16.
        engine, unroll, ring: options of puts, see `put_block`.
        stores_from: minimum bytes of `x` for stores, see `algorithm`.
        algorithm: "stores": by stores to mapped PEs if `x`, `out` and its parts are aligned to 16 bytes, else by puts;
            "puts": always by puts; "auto": few bytes by packets (packets.py; buffered.py between nodes), others by puts
            and, from `stores_from` bytes of `x`, by stores.
        once_per_node: if nodes have several ranks, a part crosses the network once per node; otherwise once per rank.
        chunk_bytes: bytes of a part that are forwarded within a node while the next bytes are in flight.
        group: the ranks; see `tilescale_net.world`.

    Raises:
        ValueError: a launch geometry that the kernel or the GPU cannot run.
        RankMismatch: ranks pass different arguments.
    """

    def __init__(
        self, *, threads: int = 512, blocks: int | None = None, engine: str = "auto", unroll: int | None = None,
        ring: tuple[int, int] | None = None, stores_from: int = STORES_FROM, algorithm: str = "auto",
        once_per_node: bool = True, chunk_bytes: int = 256 * 1024, group: "tsn.Group" = None,
    ) -> None:  # fmt: skip
        check_chunk("AllGather", chunk_bytes)
        shown = f", once_per_node={once_per_node}, chunk_bytes={chunk_bytes}"
        options = threads, blocks, engine, unroll, ring, stores_from, algorithm, group
        sizes = tsn.world(group).topology.sizes
        self._over_nodes = once_per_node and 1 < len(sizes) < sum(sizes)
        most = MOST_BYTES_PER_RANK if self._over_nodes else MOST_BYTES
        super().__init__("AllGather", shown, *options, split=False, most_bytes=most)
        self._chunk_bytes = chunk_bytes

    @named("tilescale_net.AllGather")
    def __call__(self, out: torch.Tensor, x: torch.Tensor, *, through: torch.Tensor | None = None) -> torch.Tensor:
        """`out[p]` becomes the `x` of PE p; asynchronous on the current stream.

        Args:
            out: symmetric, contiguous, [n_pes, *x.shape] or [n_pes * x.shape[0], *x.shape[1:]]. If `takes_any_memory` of
                x's bytes, it may be in ordinary memory, on all ranks or on none.
            x: contiguous, of out's dtype, of the same shape on all ranks; may be this PE's own part of `out`. Symmetric if
                some PEs are on other nodes.
            through: symmetric scratch memory of out's shape and dtype, at the same offset in all heaps, for an `out` in
                ordinary memory on all ranks. `x` may be this PE's own part of it. One kernel fills both if PEs are mapped
                and all tensors are aligned to 16 bytes.

        Returns:
            `out`. Later work on the stream may overwrite `x`.

        Raises:
            TypeError, ValueError, HeapError: a wrong argument, by name; nothing was sent.
            RankMismatch: ranks pass different shapes, dtypes or offsets of `out` in the heap. No data move between such
                ranks. Raised at once for new arguments, else by the next call or `check`.
        """
        self._begin()
        key = self._key_through(out, x, through)
        if self._made_again(key, *((out, x) if through is None else (out, x, through))):
            return out
        self._check("out", out)
        self._check("x", x, out.dtype, symmetric=self.needs_symmetric_source)
        self._check_parts("out", out, "x", x)
        if through is not None and self._copied(self, out, x, through, x.nbytes):
            return out
        shared = out if through is None else through  # the tensor that peers write to
        in_place = x.data_ptr() == shared.data_ptr() + self.rank * x.nbytes
        if not in_place:
            self._check_apart("out" if through is None else "through", shared, "x", x)
        self._send(key, out, x, through, x.nbytes, in_place=in_place)
        return out

    def _new_launch(self, *, by_vectors: bool, in_place: bool, staged: bool) -> Launch:
        if by_vectors:
            kernel = all_gather_mapped(
                self.n_pes, **self._mapped_options, in_place=in_place and not staged, staged=staged
            )
            return self._launch_of(kernel, VECTORS, VECTORS, staged)
        if self._over_nodes:
            geometry = self.node_size, self._chunk_bytes
            kernel = node_all_gather(self.n_pes, *geometry, in_place=in_place, **self._options)
        else:
            kernel = all_gather(self.n_pes, in_place=in_place, **self._options)
        return self._launch_of(kernel, ((self.n_pes, -1), torch.uint8), ((-1,), torch.uint8))
