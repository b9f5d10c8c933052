"""Reduce-scatter: the host class, and its kernels by push and by pull.

By push every PE puts the parts of its input to their owners, which sum them in the order of the PEs. Parts are sent in
chunks through a few staging slots per pair of PEs and block, so the staging memory does not grow with the tensors. A chunk
is summed while the next one is in flight. The owner notifies the sender when a slot is free.

The order of additions is fixed, and the same in all kernels (`Collective.node_sum`), so results are bitwise equal in every
run, in any order of arrival, with any kernel.
"""

import functools
from collections.abc import Hashable

import tilelang.language as T
import torch
from tilelang import tvm

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.runtime.profiling import named

from .buffered import MOST_BYTES, MOST_BYTES_PER_RANK, Parted, few_bytes
from .collective import (
    EXPLICIT_SYNC,
    MIN_BYTES,
    STATUS_WORDS,
    TAG_BITS,
    Nodes,
    agree_by_blocks,
    all_agree,
    announce,
    call_word,
    check_chunk,
    compare,
    dtype_name,
    is_aligned,
    piece_number,
    report_other_call,
    slice_elements,
)
from .exchange import TILE_VECTORS, exchange_mapped
from .exchange import UNROLL as UNROLL_OF_STORES
from .launches import VECTORS, Form, Launch
from .sums import VECTOR_BYTES, accumulator, add_part, add_up, batch_of, vector_of

# ---------------------------------------------------------------------------------------------------------------------
# Reduce-scatter by pull: every PE reads its part of all PEs' input and sums in registers.
#
# Without intermediate stores, the links are always busy. The peers' inputs must be mapped, at the same offset in all heaps;
# `reduce_scatter` below supports all others.


@tsn.jit(name="reduce_scatter_pull", pass_configs=EXPLICIT_SYNC)
def reduce_scatter_pull(n_pes, dtype, threads=512, blocks=32):
    """Kernel `(out, x, tag, status, calls, ready, done)`: `out` is the sum over all PEs p of part my_pe of the `x` of PE p.

    Args:
        n_pes: number of PEs, at most `threads`; all of them mapped.
        dtype: dtype of `out` [count, 16 bytes of dtype] and `x` [n_pes * count, 16 bytes], which is symmetric; part p begins
            at row p * count, and `out` may be this PE's part. Sums are as in `reduce_scatter`.
        threads, blocks: launch geometry; all blocks must be able to run at once.

    `tag`, `status`, `calls` [blocks] and the signals `ready` and `done` [n_pes, blocks]: see `collective.call_word`.
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
            call = T.alloc_var("uint64", calls[block] + T.uint64(1))
            agrees = T.alloc_shared((n_pes,), "int32")
            share = T.max(T.ceildiv(count, T.int64(blocks)), T.int64(threads))
            first = T.alloc_var("int64", T.min(share * block, count))
            end = T.alloc_var("int64", T.min(first + share, count))
            if first < end:
                views = [N.remote(x, p) for p in range(n_pes)]
                # Earlier work on the stream no longer uses `x`, so each block signals the blocks with its index.
                agree_by_blocks(agrees, ready, block, call, tag, status, thread, me, n_pes)
                agreed = T.alloc_var("int32")
                all_agree(agreed, agrees, n_pes)
                last = T.alloc_var("int64", T.if_then_else(agreed != 0, end, first))
                result = T.alloc_local((batch, vector), dtype)
                part = me * count
                for turn in T.serial(T.ceildiv(last - first, T.int64(threads * batch))):
                    i = first + turn * threads * batch + thread
                    add_up(result, views, dtype, part + i, part + last, threads, batch)
                    for u in T.unroll(batch):
                        if i + u * threads < last:
                            for v in T.vectorized(vector):
                                out[i + u * threads, v] = result[u, v]
                # All PEs have read their parts of `x` before later work may overwrite it.
                T.sync_threads()
                if thread < n_pes and thread != me:
                    N.signal(done[me, block], call, thread)
                    N.wait(done[thread, block], "ge", T.cast(call, "int64"))
            T.sync_threads()
            if thread == 0:
                calls[block] = call

    return main


@tsn.jit(name="reduce_scatter_through", pass_configs=EXPLICIT_SYNC)
def reduce_scatter_through(n_pes, dtype, threads=512, blocks=64, unroll=UNROLL_OF_STORES):
    """Kernel `(out, x, tag, status, calls, ready, arrived, through, parts)`, for an `x` that peers cannot read: stores its
    parts to their owners' `through`; see `exchange.exchange_mapped`."""
    return exchange_mapped(n_pes, threads, blocks, unroll, split=True, sums=dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Reduce-scatter over nodes of several PEs: a node's sum crosses the network once.
#
# For each other node, a PE sums its own node's parts for the PE with its index there, read over mapped memory, and puts the
# sum to that PE in chunks through a few slots; that PE adds the nodes' sums. A node's sum is made in the order of its PEs,
# in float32 for narrow types, and rounded; the nodes' sums are added in the order of the nodes, and rounded once more.


@tsn.jit(name="node_reduce_scatter", pass_configs=EXPLICIT_SYNC)
def node_reduce_scatter(
    n_pes, node_size, dtype, threads=512, blocks=32, slots=3, chunk_bytes=64 * 1024, engine="auto", unroll=None, ring=None,
    here=None,
):  # fmt: skip
    """Kernel `(out, x, tag, status, staging, outgoing, calls, ready, done, arrived, consumed)`: `out` is the sum over all
    PEs p of part my_pe of the `x` of PE p.

    Args:
        n_pes: number of PEs, at most `threads`.
        node_size: PEs per node, or a tuple with the size of every node.
        here: PEs of this PE's node; default `node_size`.
        dtype: as in `reduce_scatter_pull`; `x` is at the same offset on all PEs.
        threads, blocks, slots, chunk_bytes, engine, unroll, ring: as in `reduce_scatter`.

    `staging` is [nodes, blocks, slots, chunk_bytes / 16, 16 bytes of dtype], and `outgoing` the same with `Nodes.turns` times
    as many nodes, both symmetric. `tag`, `status`, `calls` [blocks] and the signals `ready` [2 * n_pes] (by parity of the
    call), `done` [PEs of the largest node, blocks], `arrived` [nodes, blocks] and `consumed` [nodes * turns, blocks]: see
    `collective.call_word`.
    """
    count, rows = T.dynamic("count", "int64"), T.dynamic("rows", "int64")
    of, here = Nodes.of(n_pes, node_size), here or node_size
    vector, batch, chunk = vector_of(dtype), batch_of(here), chunk_bytes // VECTOR_BYTES
    nodes, turns, total_dtype = len(of.sizes), of.turns, accumulator(dtype)

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((count, vector), dtype),
        x: T.Tensor((rows, vector), dtype),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        staging: T.Tensor((nodes, blocks, slots, chunk, vector), dtype),
        outgoing: T.Tensor((nodes * turns, blocks, slots, chunk, vector), dtype),
        calls: T.Tensor((blocks,), "uint64"),
        ready: T.Tensor((2 * n_pes,), "uint64"),
        done: T.Tensor((of.largest, blocks), "uint64"),
        arrived: T.Tensor((nodes, blocks), "uint64"),
        consumed: T.Tensor((nodes * turns, blocks), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            node, index = of.node_of(me), of.index_of(me)
            call = T.alloc_var("uint64", calls[block] + T.uint64(1))
            agrees = T.alloc_shared((n_pes,), "int32")
            share = T.max(T.ceildiv(count, T.int64(blocks)), T.int64(threads))
            first = T.alloc_var("int64", T.min(share * block, count))
            end = T.alloc_var("int64", T.min(first + share, count))
            # A fast peer announces the next call before this one is over, but not the one after that.
            parity = T.cast(call % T.uint64(2), "int32")
            if block == 0 and thread < n_pes:
                announce(ready, parity * n_pes + me, call, tag, thread)
            if first < end:
                views = [N.remote(x, me - index + p) for p in range(here)]
                if thread < n_pes:
                    same = T.alloc_var("int32")
                    word = N.wait(ready[parity * n_pes + thread], "ge", call_word(call, 0))
                    compare(same, thread, call, tag, word, status, block == 0)
                    agrees[thread] = same
                T.sync_threads()
                agreed = T.alloc_var("int32", 1)
                for p in T.serial(n_pes):
                    agreed = agreed & agrees[p]
                steps = T.alloc_var(
                    "int64", T.if_then_else(agreed != 0, T.ceildiv(end - first, T.int64(chunk)), T.int64(0))
                )
                result = T.alloc_local((batch, vector), dtype)
                for step in T.serial(steps + 1):
                    if step < steps:
                        start = first + step * chunk
                        size = T.min(T.int64(chunk), end - start)
                        slot = step % slots
                        for hop in T.serial(1, nodes):
                            other = (node + hop) % nodes
                            for served in T.serial(turns):
                                pe, way = of.first(other) + index + served * here, other * turns + served
                                if index + served * here < of.size(other):
                                    # The PE must have read the slot; since it is ready, it has read those of earlier calls.
                                    if step >= slots:
                                        N.wait_block(consumed[way, block], "ge", piece_number(call, step - slots + 1))
                                    for turn in T.serial(T.ceildiv(size, T.int64(threads * batch))):
                                        i = turn * threads * batch + thread
                                        part = pe * count + start
                                        add_up(result, views, dtype, part + i, part + size, threads, batch)
                                        for u in T.unroll(batch):
                                            if i + u * threads < size:
                                                for v in T.vectorized(vector):
                                                    outgoing[way, block, slot, i + u * threads, v] = result[u, v]
                                    N.put_signal_block(
                                        staging[node, block, slot, 0, 0], outgoing[way, block, slot, 0, 0], pe,
                                        arrived[node, block], piece_number(call, step + 1), count=size * vector,
                                        engine=engine, unroll=unroll, ring=ring,
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
                            way = node * turns + T.floordiv(index, of.size(thread))
                            N.signal(consumed[way, block], piece_number(call, step), of.forwarder(thread, index))
                # All PEs have read this PE's `x` before later work may overwrite it.
                T.sync_threads()
                if thread < here and thread != index and agreed != 0:
                    N.signal(done[index, block], call, me - index + thread)
                    N.wait(done[thread, block], "ge", T.cast(call, "int64"))
            T.sync_threads()
            if thread == 0:
                calls[block] = call

    return main


ALGORITHMS = ("auto", "push", "pull")

UNROLL = 4  # vectors that a thread adds up at a time, with as many loads per PE in flight


@tsn.jit(name="reduce_scatter")
def reduce_scatter(
    n_pes, dtype, vector=1, threads=512, blocks=32, slots=3, chunk_bytes=64 * 1024, engine="auto", unroll=None, ring=None,
    least_bytes=MIN_BYTES, node_size=None,
):  # fmt: skip
    """Kernel `(out, x, tag, status, staging, calls, chunks, ready, arrived, consumed)`: `out` is the sum over all PEs p of
    `x[my_pe]` of PE p.

    Args:
        n_pes: number of PEs, at most `threads`.
        dtype: dtype of `out` [count, vector] and `x` [n_pes, count, vector]. Sums are in float32 (see `accumulator`), in
            the order of the PEs, and rounded once.
        node_size: number of PEs whose sum is rounded before it is added, as in `node_reduce_scatter`; default all.
        vector: elements per load; above 1, `x` and `out` must be aligned to as many.
        threads, blocks: launch geometry; all blocks must be able to run at once.
        slots: chunks between two PEs that may be in flight in each block, 2 or more.
        chunk_bytes: bytes of a chunk.
        engine, unroll, ring: see `tilescale_net.language.put_block`.
        least_bytes: minimum of a block's slice, see `slice_elements`; equal on all PEs.

    `staging` is [n_pes, blocks, slots, chunk_bytes / bytes of a vector, vector] of dtype, symmetric. `chunks` (uint64
    [blocks]) counts chunks as `calls` [blocks] counts calls; `tag`, `status` and the signals `arrived` and `consumed` [n_pes,
    blocks] and `ready` [2 * n_pes] (by parity of the call): see `collective.call_word`. If tags differ, the call may not
    end.
    """
    count = T.dynamic("count", "int64")
    total_dtype, nodes = accumulator(dtype), node_size and Nodes.of(n_pes, node_size)
    chunk = chunk_bytes // (vector * tvm.DataType(dtype).bits // 8)

    @T.macro
    def add_up(out, x, staging, me, block, slot, start, size, thread):
        """out[start:start + size] from x and a chunk of each peer."""
        for turn in T.serial(T.ceildiv(size, threads * UNROLL)):
            totals = T.alloc_local((UNROLL, vector), total_dtype)
            part = T.alloc_local((UNROLL, vector), dtype)
            T.clear(totals)
            of_nodes = T.alloc_local((UNROLL, vector), total_dtype) if nodes is not None else None
            if nodes is not None:
                T.clear(of_nodes)
            for p in T.serial(n_pes):
                for u in T.unroll(UNROLL):
                    i = (turn * UNROLL + u) * threads + thread
                    if i < size:
                        for v in T.vectorized(vector):
                            if p == me:
                                part[u, v] = x[me, start + i, v]
                            else:
                                part[u, v] = staging[p, block, slot, i, v]
                add_part(totals, of_nodes, part, p, nodes)
            for u in T.unroll(UNROLL):
                i = (turn * UNROLL + u) * threads + thread
                if i < size:
                    for v in T.vectorized(vector):
                        out[start + i, v] = T.cast(of_nodes[u, v] if nodes is not None else totals[u, v], dtype)

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((count, vector), dtype),
        x: T.Tensor((n_pes, count, vector), dtype),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        staging: T.Tensor((n_pes, blocks, slots, chunk, vector), dtype),
        calls: T.Tensor((blocks,), "uint64"),
        chunks: T.Tensor((blocks,), "uint64"),
        ready: T.Tensor((2 * n_pes,), "uint64"),
        arrived: T.Tensor((n_pes, blocks), "uint64"),
        consumed: T.Tensor((n_pes, blocks), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            done = T.cast(chunks[block], "int64")  # chunks of earlier calls
            share = T.ceildiv(slice_elements(count * vector, blocks, dtype, least_bytes), T.int64(vector))
            first = T.min(share * block, count)
            end = T.min(first + share, count)
            steps = T.ceildiv(end - first, T.int64(chunk))
            # A fast peer announces the next call before this one is over, but not the one after that.
            call = calls[block] + T.uint64(1)
            parity = T.cast(call % T.uint64(2), "int32")
            if block == 0 and thread < n_pes:
                announce(ready, parity * n_pes + me, call, tag, thread)
            for step in T.serial(steps + 1):
                if step < steps:
                    # The peer must have read the slot.
                    if thread < n_pes and thread != me:
                        N.take_slot(consumed[thread, block], done + step, slots)
                    T.sync_threads()
                    for hop in T.serial(1, n_pes):
                        pe = (me + hop) % n_pes
                        start = first + step * chunk
                        N.put_block(
                            staging[me, block, (done + step) % slots, 0, 0], x[pe, start, 0], pe,
                            count=T.min(T.int64(chunk), end - start) * vector, engine=engine, unroll=unroll, ring=ring,
                        )  # fmt: skip
                if step > 0:
                    if step == 1 and block == 0 and thread < n_pes:
                        word = N.wait(ready[parity * n_pes + thread], "ge", call << T.uint64(TAG_BITS))
                        if word != call_word(call, tag):
                            report_other_call(status, thread, call, tag, word)
                    if thread < n_pes and thread != me:
                        N.wait_slot(arrived[thread, block], done + step - 1, slots)
                    T.sync_threads()
                    start = first + (step - 1) * chunk
                    size = T.min(T.int64(chunk), end - start)
                    add_up(out, x, staging, me, block, (done + step - 1) % slots, start, size, thread)
                # By now most of the chunk has arrived, so the fence waits little.
                T.sync_threads()
                if thread < n_pes and thread != me:
                    if step < steps:
                        N.signal(arrived[me, block], done + step + 1, thread, fence=True)
                    if step > 0:
                        N.return_credit(consumed[me, block], done + step - 1, thread)
            if thread < n_pes and thread != me:
                N.quiet(thread)
            T.sync_threads()
            if thread == 0:
                chunks[block] = T.cast(done + steps, "uint64")
                calls[block] = call

    return main


class ReduceScatter(Parted):
    """Sum of tensors over all PEs, of which each PE gets its part; constructed and called by all ranks.

    Args:
        threads, blocks: see `Collective`.
        slots: chunks between two PEs that may be in flight in each block, 2 or more. The staging memory takes n_pes * blocks *
            slots * chunk_bytes bytes of the symmetric heap; if nodes have several ranks, twice as much with nodes instead
            of PEs, and the rest when a tensor is first pushed.
        chunk_bytes: bytes of a chunk.
        engine, unroll, ring: see `put_block`.
        algorithm: "pull" if `x` has the same offset in all heaps and parts are whole multiples of 16 bytes: over mapped
            memory, and if nodes have several ranks, a node's sum crosses the network; "push" for all tensors: a rank's part
            crosses the network; "auto": few bytes by packets (packets.py; buffered.py between nodes), others by pull where
            that is possible.
        group: the ranks; see `tilescale_net.world`.

    Raises:
        ValueError: a launch geometry or a chunk that the kernel or the GPU cannot run.
        RankMismatch: ranks pass different arguments.
        HeapError: no room for the staging memory.
    """

    DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)

    def __init__(
        self, *, threads: int = 512, blocks: int = 32, slots: int = 3, chunk_bytes: int = 64 * 1024,
        engine: str = "auto", unroll: int | None = None, ring: tuple[int, int] | None = None, algorithm: str = "auto",
        group: "tsn.Group" = None,
    ):  # fmt: skip
        if algorithm not in ALGORITHMS:
            raise ValueError(f"ReduceScatter: algorithm is {algorithm!r}; it must be {', '.join(ALGORITHMS)}")
        if slots < 2:
            raise ValueError(f"ReduceScatter: slots is {slots}; it must be 2 or more")
        check_chunk("ReduceScatter", chunk_bytes)
        options: dict = dict(slots=slots, chunk_bytes=chunk_bytes, engine=engine, unroll=unroll, ring=ring)
        shown = options | dict(algorithm=algorithm)
        super().__init__("ReduceScatter", ", ".join(f"{k}={v}" for k, v in shown.items()), threads, blocks, group)
        self._algorithm = algorithm
        self._options = dict(threads=threads, blocks=blocks, **options)
        self._can_pull = self.has_gateways or not self.needs_symmetric_source
        self._staging: torch.Tensor | None = None
        if self.has_gateways and algorithm != "push":
            nodes, ways = len(self.node_map.sizes), len(self.node_map.sizes) * self.node_map.turns
            self._node_slots = [
                self._symmetric((count, blocks, slots, chunk_bytes), torch.uint8) for count in (nodes, ways)
            ]
            self._node_words = (
                self.counters(blocks), self._signals(2 * self.n_pes), self._signals(self.node_map.largest, blocks),
                self._signals(nodes, blocks), self._signals(ways, blocks),
            )  # fmt: skip
        else:
            self._allocate_staging()
        self._calls, self._chunks = self.counters(blocks), self.counters(blocks)
        self._ready = self._signals(2 * self.n_pes)
        self._arrived, self._consumed = self._signals(self.n_pes, blocks), self._signals(self.n_pes, blocks)
        most = MOST_BYTES_PER_RANK if self.has_gateways else MOST_BYTES
        self._buffers = few_bytes(
            self, True, most if algorithm == "auto" else 0, engine=engine, unroll=unroll, ring=ring
        )
        self._pull_words = self.counters(blocks), self._signals(self.n_pes, blocks), self._signals(self.n_pes, blocks)
        # More blocks store fast than pull.
        self._store_blocks = min(2 * blocks, self.block_limit) if self._can_pull and not self.has_gateways else 0
        if self._store_blocks and algorithm == "auto":
            many = self._store_blocks
            self._store_words = self.counters(many), self._signals(self.n_pes), self._signals(self.n_pes, many)

    @named("tilescale_net.ReduceScatter")
    def __call__(self, out: torch.Tensor, x: torch.Tensor, *, through: torch.Tensor | None = None) -> torch.Tensor:
        """`out` becomes the sum over all PEs of their `x[my_pe]`; asynchronous on the current stream.

        Args:
            out: contiguous, one of `DTYPES`; may be this PE's own part of `x`.
            x: contiguous, of out's dtype, [n_pes, *out.shape] or [n_pes * out.shape[0], *out.shape[1:]]. Symmetric if some
                PEs are on other nodes. Fastest if the parts begin at multiples of 16 bytes.
            through: symmetric scratch memory of x's shape and dtype, apart from both, at the same offset in all heaps: an
                ordinary `x` goes through it, in the same kernel if PEs are mapped. On all ranks or on none.

        Returns:
            `out`; sums are in float32 (float64 and integers in their own type), in the order of the PEs, and rounded once;
            if nodes have several PEs each, a node's sum is rounded too. Bits do not depend on the algorithm or on other
            elements. Later work on the stream may overwrite `x`.

        Raises:
            TypeError, ValueError, HeapError: a wrong argument, by name; nothing was sent.
            RankMismatch: ranks pass different shapes or dtypes, or symmetric `x` that no longer match on all ranks. Raised
                at once for new arguments, else by the next call or `check`: `out` and later results are undefined then;
                free the object.
        """
        self._begin()
        key = self._key_through(out, x, through)
        if self._made_again(key, *((out, x) if through is None else (out, x, through))):
            return out
        self._check("out", out)
        self._check("x", x, out.dtype, symmetric=self.needs_symmetric_source and through is None)
        self._check_dtype(out, self.DTYPES)
        self._check_parts("x", x, "out", out)
        if out.data_ptr() != x.data_ptr() + self.rank * out.nbytes:
            self._check_apart("out", out, "x", x)
        if through is not None:
            return self._through(out, x, through, key)
        # The address of `out` may differ between ranks; the algorithm may not.
        offset = self.aligned_offset(x) if out.nbytes % VECTOR_BYTES == 0 and self._can_pull else None
        mapped, tag, noted = self._agree_on_offsets("out of shape {} and {}", out.shape, out.dtype, offsets=[offset])
        if self._algorithm == "pull" and not mapped:
            raise ValueError(
                f"{self.name}: x of shape {list(x.shape)} cannot be pulled on all ranks: it must be symmetric, at the same "
                "offset in all heaps and mapped, and its parts aligned to 16 bytes; or choose algorithm push"
            )
        if out.numel() == 0:
            return out
        if self._buffers.holds(out.nbytes):
            again = functools.partial(self._buffers.launch(out, x, out.dtype), tag)
            self._launch_and_remember(key, noted, again, out, x)
        elif mapped and self._algorithm != "push":
            again = functools.partial(self.prepared(out.dtype, lambda: self._new_pull(out.dtype)), tag)
            result = out if is_aligned(VECTOR_BYTES, out) else torch.empty_like(out)
            self._launch_and_remember(key if result is out else None, noted, again, result, x)
            if result is not out:
                out.copy_(result)
        else:
            self._push(out, x, tag)
        return out

    def _through(self, out: torch.Tensor, x: torch.Tensor, through: torch.Tensor, key: Hashable) -> torch.Tensor:
        """A call whose `x` goes through `through` unless it can be sent in place."""
        self._check_through(through, "x", x)
        self._check_apart("through", through, "out", out)
        if self.takes_any_memory(out.nbytes):
            return self(out, x)
        # Equal on all ranks: a step that one rank skips would hang the others.
        stores = self._store_blocks and self._algorithm == "auto" and 0 < x.nbytes <= self.one_launch_up_to
        if not stores or out.nbytes % VECTOR_BYTES or not is_aligned(VECTOR_BYTES, through):
            return self(out, through.copy_(x))
        noted = (
            "out of shape {} and {}, through memory at heap offset {}", out.shape, out.dtype, self.heap_offset(through),
        )  # fmt: skip
        launch, tag = self.prepared(("through", out.dtype), lambda: self._new_stores(out.dtype)), self._agree(*noted)
        again = lambda out, x, through: launch(tag, out, x, through, through)  # noqa: E731
        source = x if is_aligned(VECTOR_BYTES, x) else x.clone()
        result = out if is_aligned(VECTOR_BYTES, out) else torch.empty_like(out)
        in_place = result is out and source is x
        self._launch_and_remember(key if in_place else None, noted, again, result, source, through)
        if result is not out:
            out.copy_(result)
        return out

    def _new_stores(self, dtype: torch.dtype) -> Launch:
        options = dict(
            threads=self.threads, blocks=self._store_blocks, unroll=min(UNROLL_OF_STORES, TILE_VECTORS // self.threads)
        )
        kernel = reduce_scatter_through(self.n_pes, dtype_name(dtype), **options)
        constants = dict(zip(("calls", "ready", "arrived"), self._store_words, strict=True), status=self.status_record)
        rows: Form = (-1, VECTOR_BYTES // dtype.itemsize), None
        forms = {"out": rows, "x": VECTORS, "through": VECTORS, "parts": rows}
        return Launch(kernel, constants, ("tag", *forms), self._world, forms=forms)

    def _new_pull(self, dtype: torch.dtype) -> Launch:
        shape = -1, VECTOR_BYTES // dtype.itemsize
        if self.has_gateways:
            here = None if self.node_map.is_even else self.node_map.size(self.node_map.node_of(self.rank))
            kernel = node_reduce_scatter(self.n_pes, self.node_size, dtype_name(dtype), **self._options, here=here)
            slots = [memory.view(dtype).view(*memory.shape[:3], *shape) for memory in self._node_slots]
            words = *slots, *self._node_words
        else:
            kernel = reduce_scatter_pull(self.n_pes, dtype_name(dtype), self.threads, self.blocks)
            words = self._pull_words
        names = [name for name in kernel.parameters if name not in ("out", "x", "tag", "status")]
        constants = dict(zip(names, words, strict=True), status=self.status_record)
        return Launch(
            kernel, constants, ("tag", "out", "x"), self._world, forms=dict.fromkeys(("out", "x"), (shape, None))
        )

    def _allocate_staging(self) -> torch.Tensor:
        shape = self.n_pes, self.blocks, self._options["slots"], self._options["chunk_bytes"]
        self._staging = self.allocate({"staging": (shape, torch.uint8)})["staging"]
        return self._staging

    def _push(self, out: torch.Tensor, x: torch.Tensor, tag: int) -> None:
        # Ranks may differ in this, because the layout of slices, chunks and staging does not depend on the vector.
        aligned = (out.data_ptr() | x.data_ptr() | out.nbytes) % VECTOR_BYTES == 0
        vector = VECTOR_BYTES // out.element_size() if aligned else 1
        kernel = reduce_scatter(
            self.n_pes, dtype_name(out.dtype), vector, **self._options, least_bytes=self.min_slice_bytes,
            node_size=self.node_sum,
        )  # fmt: skip
        # Over nodes, all ranks allocate in the same call; most objects never do.
        staging = self._staging if self._staging is not None else self._allocate_staging()
        staging = staging.view(out.dtype).view(self.n_pes, self.blocks, self._options["slots"], -1, vector)
        words = self._calls, self._chunks, self._ready, self._arrived, self._consumed
        self._launch_checked(
            lambda: kernel(
                out.view(-1, vector), x.view(self.n_pes, -1, vector), tag, self.status_record, staging, *words
            )
        )

    def _raise_mismatch(self) -> None:
        """As in the base class, and again in every later call: ranks may have sent different numbers of chunks."""
        self._mismatch = self._agreement.error() or self._mismatch
        if self._mismatch is not None:
            self._call_track.settle()
            raise self._mismatch
