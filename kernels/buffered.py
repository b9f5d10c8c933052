"""Collectives of few bytes over the network in one hop: all-gather, all-to-all, reduce-scatter and all-reduce.

Between nodes, announcing that the output may be overwritten and waiting for the network's completion take longer than
sending few bytes. So every PE puts its parts from an outbox into its inbox at each peer without waiting; the peer copies
them out. Inbox and outbox are double-buffered: a PE that sends in call i + 2 has received call i + 1 from all PEs, which had
read call i by then. No call waits for space or completion, and `x` may be overwritten after the call. Between mapped PEs
packets.py does the same without fences.
"""

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import tilelang.language as T
import torch
from tilelang import tvm

import tilescale_net as tsn
import tilescale_net.language as N

from .algorithms import BufferSpecs
from .collective import (
    ALIGN_BYTES,
    MIN_BYTES,
    STATUS_WORDS,
    TAG_BITS,
    Collective,
    Nodes,
    all_agree,
    announce,
    check_tag_or_newer,
    dtype_name,
    end_call,
    is_aligned,
    slice_elements,
)
from .launches import Form, Launch
from .packets import Packets
from .sums import VECTOR_BYTES, accumulator, add_part

# Limits of all PEs' bytes, and of PEs, for sending a part to every PE separately.
MOST_BYTES, MOST_PES = 1 << 20, 8
# Limit of a part's bytes if nodes have several PEs, where it could cross the network once per node instead.
MOST_BYTES_PER_RANK = 32 * 1024
UNROLL = 4  # vectors that a thread has in flight


@tsn.jit(name="buffered")
def buffered(
    n_pes, capacity, dtype="uint8", vector=1, threads=512, blocks=16, split=False, sums=False, node_size=None,
    engine="auto", unroll=None, ring=None, least_bytes=MIN_BYTES,
):  # fmt: skip
    """Kernel `(out, x, tag, status, calls, ready, arrived, inbox, outbox)`: `out` gets all PEs' parts for this PE.

    Args:
        n_pes: number of PEs, at most `threads`.
        capacity: most bytes of a part, a multiple of 16.
        dtype: dtype of the data; a part has `count * vector` elements.
        vector: elements per load, 16 bytes or 1 element; above 1, `x` and `out` are aligned to as many. PEs may differ in it
            if the part is a multiple of 16 bytes.
        split: `x` is [n_pes, count, vector], and PE p gets `x[p]`; otherwise it is [count, vector], and every PE gets all.
        sums: `out` [count, vector] is the sum of the parts of all PEs, as in `reduce_scatter`; otherwise it is [n_pes,
            count, vector], and `out[p]` is the part of PE p.
        node_size: see `reduce_scatter`.
        threads, blocks, engine, unroll, ring, least_bytes: as in `exchange`.

    `inbox` [2, n_pes, capacity] and `outbox` [2, n_pes or 1, capacity], in bytes, are symmetric. `tag`, `status`, `calls`
    [blocks] and the signals `ready` [n_pes] and `arrived` [n_pes, blocks]: see `collective.call_word`.
    """
    count = T.dynamic("count", "int64")
    rows = capacity * 8 // (vector * tvm.DataType(dtype).bits)
    total_dtype, nodes = accumulator(dtype), node_size and Nodes.of(n_pes, node_size)
    in_shape = (n_pes, count, vector) if split else (count, vector)
    out_shape = (count, vector) if sums else (n_pes, count, vector)
    sources = n_pes if split else 1

    @T.macro
    def put_in_outbox(x, outbox, half, first, size, thread):
        """Copy this block's slice of every part to the outbox."""
        loaded = T.alloc_local((UNROLL, vector), dtype)
        for source in T.serial(sources):
            for turn in T.serial(T.ceildiv(size, T.int64(threads * UNROLL))):
                i = turn * (threads * UNROLL) + thread
                for u in T.unroll(UNROLL):
                    if i + u * threads < size:
                        for v in T.vectorized(vector):
                            if split:
                                loaded[u, v] = x[source, first + i + u * threads, v]
                            else:
                                loaded[u, v] = x[first + i + u * threads, v]
                for u in T.unroll(UNROLL):
                    if i + u * threads < size:
                        for v in T.vectorized(vector):
                            outbox[half, source, first + i + u * threads, v] = loaded[u, v]

    @T.macro
    def take_out(out, inbox, outbox, agrees, me, half, first, size, thread):
        """Copy this block's slice of every received part, and of this PE's own part, to `out`."""
        loaded = T.alloc_local((UNROLL, vector), dtype)
        for p in T.serial(n_pes):
            if agrees[p] != 0:
                for turn in T.serial(T.ceildiv(size, T.int64(threads * UNROLL))):
                    i = turn * (threads * UNROLL) + thread
                    for u in T.unroll(UNROLL):
                        if i + u * threads < size:
                            for v in T.vectorized(vector):
                                if p == me:
                                    loaded[u, v] = outbox[half, me if split else 0, first + i + u * threads, v]
                                else:
                                    loaded[u, v] = inbox[half, p, first + i + u * threads, v]
                    for u in T.unroll(UNROLL):
                        if i + u * threads < size:
                            for v in T.vectorized(vector):
                                out[p, first + i + u * threads, v] = loaded[u, v]

    @T.macro
    def add_up(out, inbox, outbox, me, half, first, size, thread):
        """Sum this block's slice over all PEs, in their order."""
        for turn in T.serial(T.ceildiv(size, T.int64(threads * UNROLL))):
            i = turn * (threads * UNROLL) + thread
            totals = T.alloc_local((UNROLL, vector), total_dtype)
            part = T.alloc_local((UNROLL, vector), dtype)
            T.clear(totals)
            of_nodes = T.alloc_local((UNROLL, vector), total_dtype) if nodes is not None else None
            if nodes is not None:
                T.clear(of_nodes)
            for p in T.serial(n_pes):
                for u in T.unroll(UNROLL):
                    if i + u * threads < size:
                        for v in T.vectorized(vector):
                            if p == me:
                                part[u, v] = outbox[half, me if split else 0, first + i + u * threads, v]
                            else:
                                part[u, v] = inbox[half, p, first + i + u * threads, v]
                add_part(totals, of_nodes, part, p, nodes)
            for u in T.unroll(UNROLL):
                if i + u * threads < size:
                    for v in T.vectorized(vector):
                        out[first + i + u * threads, v] = T.cast(
                            of_nodes[u, v] if nodes is not None else totals[u, v], dtype
                        )

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor(out_shape, dtype),
        x: T.Tensor(in_shape, dtype),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        calls: T.Tensor((blocks,), "uint64"),
        ready: T.Tensor((n_pes,), "uint64"),
        arrived: T.Tensor((n_pes, blocks), "uint64"),
        inbox: T.Tensor((2, n_pes, rows, vector), dtype),
        outbox: T.Tensor((2, sources, rows, vector), dtype),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            call = calls[block] + T.uint64(1)
            half = T.cast(call % T.uint64(2), "int32")
            share = T.ceildiv(slice_elements(count * vector, blocks, dtype, least_bytes), T.int64(vector))
            first = T.alloc_var("int64", T.min(share * block, count))
            size = T.alloc_var("int64", T.min(share, count - first))
            agrees = T.alloc_shared((n_pes,), "int32")
            if block == 0 and thread < n_pes:
                announce(ready, me, call, tag, thread)
            if size > 0:
                put_in_outbox(x, outbox, half, first, size, thread)
                T.sync_threads()
                for hop in T.serial(1, n_pes):
                    pe = (me + hop) % n_pes
                    N.put_signal_block(
                        inbox[half, me, first, 0], outbox[half, pe if split else 0, first, 0], pe, arrived[me, block], call,
                        count=size * vector, engine=engine, unroll=unroll, ring=ring,
                    )  # fmt: skip
                if thread < n_pes:
                    same = T.alloc_var("int32", 1)
                    if thread != me:
                        word = N.wait(ready[thread], "ge", call << T.uint64(TAG_BITS))
                        check_tag_or_newer(same, thread, call, tag, word, status, block == 0)
                        if same != 0:
                            N.wait(arrived[thread, block], "ge", call)
                    agrees[thread] = same
                T.sync_threads()
                if sums:
                    agreed = T.alloc_var("int32")
                    all_agree(agreed, agrees, n_pes)
                    if agreed != 0:
                        add_up(out, inbox, outbox, me, half, first, size, thread)
                else:
                    take_out(out, inbox, outbox, agrees, me, half, first, size, thread)
            end_call(calls, block, call, thread)

    return main


def few_bytes(
    op: Collective, split: bool, most_bytes: int = MOST_BYTES, calls: torch.Tensor | None = None,
    ready: torch.Tensor | None = None, **options: Any,
) -> "Buffers | Packets":  # fmt: skip
    """The transport of a collective's small calls: packets between mapped PEs, else `Buffers`, which documents the
    arguments."""
    if op.needs_symmetric_source or op.n_pes == 1 or not most_bytes:
        return Buffers(op, split, most_bytes, calls, ready, **options)
    return Packets(op, split, most_bytes, calls, ready)


class Buffers:
    """Inbox, outbox and signals of a collective's small calls.

    Args:
        op: the collective, which owns the memory.
        split: whether the PEs' parts differ.
        most_bytes: largest part; 0: none.
        calls, ready: counters and signals shared with calls of another kernel; default: not shared.
        options: options of puts, see `put_block`.

    Attributes:
        capacity: bytes of a part; 0: unused.
    """

    def __init__(
        self, op: Collective, split: bool, most_bytes: int = MOST_BYTES, calls: torch.Tensor | None = None,
        ready: torch.Tensor | None = None, **options: Any,
    ):  # fmt: skip
        # A weak reference: a freed object must not wait for the cycle collector.
        self._op: Collective = weakref.proxy(op)
        self._split, self.capacity = split, 0
        if not op.needs_symmetric_source or op.n_pes > MOST_PES or not most_bytes:
            return
        n_pes, sources = op.n_pes, op.n_pes if split else 1
        self.capacity = min(most_bytes, MOST_BYTES // n_pes) // ALIGN_BYTES * ALIGN_BYTES
        specs: BufferSpecs = {} if ready is not None else {"ready": ((n_pes,), torch.uint64)}
        specs["arrived"] = (n_pes, op.blocks), torch.uint64
        specs["inbox"] = (2, n_pes, self.capacity), torch.uint8
        specs["outbox"] = (2, sources, self.capacity), torch.uint8
        counters = {"calls": op.counters(op.blocks) if calls is None else calls}
        self._memory = op.allocate(specs) | counters | ({} if ready is None else {"ready": ready})
        self._options = dict(threads=op.threads, blocks=op.blocks, least_bytes=op.min_slice_bytes, **options)

    def holds(self, nbytes: int) -> bool:
        """Whether parts of this many bytes are sent this way."""
        return 0 < nbytes <= self.capacity

    def launch(self, out: torch.Tensor, x: torch.Tensor, dtype: torch.dtype | None = None) -> Callable[..., None]:
        """The launch of a call `(tag, out, x)` with tensors like these. `dtype`: dtype of the sum; default: no sum."""
        kind = dtype or torch.uint8
        part = x.nbytes // self._op.n_pes if self._split else x.nbytes
        aligned = part % VECTOR_BYTES == 0 and is_aligned(VECTOR_BYTES, out, x)
        vector = VECTOR_BYTES // kind.itemsize if aligned else 1
        return self._op.prepared(("buffers", dtype, vector), lambda: self._new_launch(kind, vector, dtype is not None))

    def _new_launch(self, kind: torch.dtype, vector: int, sums: bool) -> Launch:
        op = self._op
        kernel = buffered(
            op.n_pes, self.capacity, dtype_name(kind), vector, split=self._split, sums=sums,
            node_size=op.node_sum if sums else None, **self._options,
        )  # fmt: skip
        constants = dict(self._memory, status=op.status_record)
        for name in ("inbox", "outbox"):
            memory = self._memory[name].view(kind)
            constants[name] = memory.view(*memory.shape[:2], -1, vector)
        whole: Form = (-1, vector), kind
        apart: Form = (op.n_pes, -1, vector), kind
        forms = {"out": whole if sums else apart, "x": apart if self._split else whole}
        return Launch(kernel, constants, ("tag", "out", "x"), op.world, forms=forms)


class Parted(Collective):
    """Base of collectives with a part per PE: small parts are sent by `few_bytes`, others through symmetric memory.

    Attributes:
        one_launch_up_to: bytes of the larger tensor up to which one kernel also copies between ordinary and symmetric
            memory; beyond them torch copies, on all SMs.
    """

    one_launch_up_to = 64 << 20
    _buffers: Buffers | Packets

    def takes_any_memory(self, nbytes: int) -> bool:
        """Whether parts of this many bytes need no symmetric tensors."""
        return not self.needs_symmetric_source and self._buffers.holds(nbytes)

    def _key_through(self, out: torch.Tensor, x: torch.Tensor, through: torch.Tensor | None) -> Hashable:
        """As `_key`, for a call through `through`."""
        if through is None:
            return self._key(out, x)
        if type(through) is not torch.Tensor:
            return None
        return self._key(out, x, through.data_ptr(), through.shape, through.dtype, through.is_contiguous())

    def _check_through(self, through: torch.Tensor, name: str, like: torch.Tensor) -> None:
        """Raise an error if `through` cannot replace the tensor `like`, called `name`."""
        self._check(name, like)
        self._check("through", through, like.dtype, symmetric=True)
        if through.shape != like.shape:
            raise ValueError(
                f"{self.name}: through has shape {list(through.shape)}; it must be that of {name}, {list(like.shape)}"
            )
        self._check_apart("through", through, name, like)
