"""Collectives of few bytes in one hop between mapped PEs: data travel in packets that carry their own flag.

A packet is 16 aligned bytes, 8 of data and 8 of flag, and arrives as a whole (see "Messages of one packet" in
docs/memory-model.md), without a fence or a second message between data and flag. Packets arrive in their own memory, so no
PE waits until an output may be overwritten. Twice the bytes are sent, and in an all-reduce every PE sends all data to every
other PE; for few bytes that is cheaper than another hop.
"""

import functools
import weakref
from collections.abc import Callable

import tilelang.language as T
import torch
from tilelang import tvm

import tilescale_net as tsn
import tilescale_net.language as N

from .algorithms import Again, Algorithm, BufferSpecs, Call
from .collective import (
    EXPLICIT_SYNC,
    STATUS_WORDS,
    TAG_BITS,
    Collective,
    announce,
    call_word,
    check_tag_or_newer,
    compare,
    count_call,
    dtype_name,
    is_aligned,
)  # fmt: skip
from .launches import Form, Launch
from .sums import accumulator

DATA_BYTES, PACKET_BYTES = 8, 16


@tsn.jit(name="packets", pass_configs=EXPLICIT_SYNC)
def packets(
    n_pes, dtype, capacity, aligned=True, threads=512, max_blocks=64, split=False, sums=True, in_place=False, announces=False
):  # fmt: skip
    """Kernel `(out, x, tag, status, values, flags, calls, ready)`: `out` gets all PEs' parts for this PE.

    Args:
        n_pes: number of PEs, at most `threads`.
        dtype: dtype of `out` and `x`; a part has at most capacity * 8 bytes.
        capacity: packets of a part, at most max_blocks * (threads // n_pes).
        aligned: `out`, `x` and parts begin at multiples of 8 bytes. PEs may differ in it.
        threads, max_blocks: launch geometry; only blocks with work are launched.
        split: `x` is [n_pes, count], and PE p gets `x[p]`; otherwise it is [count], and every PE gets all of it.
        sums: `out` [count] is the sum of the parts of all PEs, as in `reduce_scatter`, and may be `x`; otherwise it is
            [n_pes, count], and `out[p]` is the part of PE p.
        in_place: `x` is `out[my_pe]`.
        announces: PEs may pass different numbers of elements, or make this call by another kernel with the same `calls` and
            `ready` [n_pes]: each PE announces its tag, and waits only for packets of PEs with the same tag. Otherwise there
            is no `ready`, and such calls do not end.

    `values` and `flags` are views of one symmetric tensor of 16-byte packets: [2, n_pes, capacity, 16 bytes of dtype] and
    uint64 [2, n_pes, capacity, 2]. Calls alternate between the two halves: a PE that sends in call i + 2 has received
    packets of call i + 1 from all PEs, which had ended call i by then. `tag` (also in the flags), `status`, `calls`
    [max_blocks] and `ready`: see `collective.call_word`.
    """
    count = T.dynamic("count", "int64")
    width = DATA_BYTES * 8 // tvm.DataType(dtype).bits
    total_dtype = accumulator(dtype)
    share = threads // n_pes  # packets of a block
    apart = (n_pes, count)  # tilelang does not know that rows are aligned, so elements are accessed one by one

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((count,) if sums else apart, dtype),
        x: T.Tensor(apart if split else (count,), dtype),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        values: T.Tensor((2, n_pes, capacity, 2 * width), dtype),
        flags: T.Tensor((2, n_pes, capacity, 2), "uint64"),
        calls: T.Tensor((max_blocks,), "uint64"),
        ready: T.Tensor((n_pes,), "uint64") if announces else None,
    ):
        with T.Kernel(T.ceildiv(count, T.int64(share * width)), threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            # Thread (pe, i) sends packet i to the PE and receives that PE's packet, so all packets are in flight at once.
            pe = thread // share
            i = block * T.int64(share) + thread % share
            first = i * width
            packet = T.alloc_shared((n_pes, share, width), dtype)
            if sums:
                agrees = T.alloc_shared((n_pes, share), "int32")
            if announces:
                joins = T.alloc_shared((n_pes,), "int32")
            call = T.alloc_var("uint64", calls[block] + T.uint64(1))
            half = T.cast(call % T.uint64(2), "int32")
            if announces:
                if block == 0 and thread < n_pes:
                    announce(ready, me, call, tag, thread)
            same = T.alloc_var("int32", 1)
            if pe < n_pes and first < count:
                if aligned:
                    for v in T.serial(width) if split else T.vectorized(width):
                        packet[pe, thread % share, v] = x[pe, first + v] if split else x[first + v]
                else:
                    for v in T.unroll(width):
                        if first + v < count:
                            packet[pe, thread % share, v] = x[pe, first + v] if split else x[first + v]
                        else:
                            packet[pe, thread % share, v] = T.cast(0, dtype)
                if pe != me:
                    N.put_signal_thread(
                        values[half, me, i, 0:width], packet[pe, thread % share, 0:width], pe, flags[half, me, i, 1],
                        call_word(call, tag),
                    )  # fmt: skip
            if announces:
                if thread < n_pes:
                    joins[thread] = 1
                    if thread != me:
                        word = N.wait(ready[thread], "ge", call << T.uint64(TAG_BITS))
                        check_tag_or_newer(same, thread, call, tag, word, status, block == 0)
                        joins[thread] = same
                T.sync_threads()
                same = joins[T.min(pe, n_pes - 1)]
            if pe < n_pes and first < count:
                if pe != me and same != 0:
                    word = N.wait(flags[half, pe, i, 1], "ge", call_word(call, 0))
                    compare(same, pe, call, tag, word, status, True)
                    for v in T.vectorized(width):
                        packet[pe, thread % share, v] = values[half, pe, i, v]
                if sums:
                    agrees[pe, thread % share] = same
                elif same != 0 and (not in_place or pe != me):
                    if aligned:
                        for v in T.serial(width):
                            out[pe, first + v] = packet[pe, thread % share, v]
                    else:
                        for v in T.unroll(width):
                            if first + v < count:
                                out[pe, first + v] = packet[pe, thread % share, v]
            T.sync_threads()
            if sums:
                if thread < share and first < count:
                    agreed = T.alloc_var("int32", 1)
                    for p in T.unroll(n_pes):
                        agreed = agreed & agrees[p, thread]
                    totals = T.alloc_local((width,), total_dtype)
                    for v in T.unroll(width):
                        totals[v] = T.cast(0, total_dtype)
                    for p in T.unroll(n_pes):
                        for v in T.unroll(width):
                            totals[v] += T.cast(packet[p, thread, v], total_dtype)
                    if agreed != 0:
                        if aligned:
                            for v in T.vectorized(width):
                                out[first + v] = T.cast(totals[v], dtype)
                        else:
                            for v in T.unroll(width):
                                if first + v < count:
                                    out[first + v] = T.cast(totals[v], dtype)
            count_call(calls, block, call, T.ceildiv(count, T.int64(share * width)), thread, threads, max_blocks)

    return main


# Bytes of all PEs' parts up to which packets are chosen.
UP_TO = 512 * 1024
MOST_BLOCKS = 128


def _packets(op, blocks: int) -> int:
    """Most packets of a part."""
    return min(blocks * (op.threads // op.n_pes), UP_TO // op.n_pes // DATA_BYTES)


def _specs(op, blocks: int) -> BufferSpecs:
    return {"packets": ((2, op.n_pes, _packets(op, blocks), PACKET_BYTES), torch.uint8)}


def _prepared(
    op, memory: dict[str, torch.Tensor], out: torch.Tensor, x: torch.Tensor, dtype: torch.dtype, split: bool, sums: bool
) -> Callable[..., None]:
    """The launch of a call `(tag, out, x)` with tensors like these. `memory`: "packets", "calls" and, if PEs announce their
    calls, "ready"."""
    part = x.nbytes // op.n_pes if split else x.nbytes
    aligned = part % DATA_BYTES == 0 and is_aligned(DATA_BYTES, out, x)
    in_place = not split and not sums and x.data_ptr() == out.data_ptr() + op.rank * part

    def make() -> Launch:
        words = memory["packets"]
        kernel = packets(
            op.n_pes, dtype_name(dtype), words.shape[2], aligned, op.threads, len(memory["calls"]), split, sums, in_place,
            "ready" in memory,
        )  # fmt: skip
        constants = {
            **memory, "status": op.status_record, "values": words.view(dtype), "flags": words.view(torch.uint64),
        }  # fmt: skip
        whole: Form = (-1,), dtype
        apart: Form = (op.n_pes, -1), dtype
        forms = {"out": whole if sums else apart, "x": apart if split else whole}
        return Launch(kernel, constants, ("tag", "out", "x"), op.world, forms=forms)

    return op.prepared(("packets", dtype, aligned, in_place), make)


class Packets:
    """Packets of a collective's calls between mapped PEs.

    Args:
        op, split, most_bytes, calls, ready, capacity: as in `buffered.Buffers`.
    """

    def __init__(
        self, op: Collective, split: bool, most_bytes: int, calls: torch.Tensor | None = None, ready: torch.Tensor | None = None
    ):  # fmt: skip
        self._op: Collective = weakref.proxy(op)  # a freed object must not wait for the cycle collector
        blocks = _blocks(op) if calls is None else op.blocks
        self._split, self.capacity = split, min(most_bytes, _packets(op, blocks) * DATA_BYTES)
        specs = _specs(op, blocks) | ({} if ready is not None else {"ready": ((op.n_pes,), torch.uint64)})
        counters = {"calls": op.counters(blocks) if calls is None else calls}
        self._memory = op.allocate(specs) | counters | ({} if ready is None else {"ready": ready})

    def holds(self, nbytes: int) -> bool:
        """Whether parts of this many bytes go as packets."""
        return 0 < nbytes <= self.capacity

    def launch(self, out: torch.Tensor, x: torch.Tensor, dtype: torch.dtype | None = None) -> Callable[..., None]:
        """The launch of a call `(tag, out, x)` with tensors like these. `dtype`: dtype of the sum; default: no sum."""
        kind, sums = dtype or torch.uint8, dtype is not None
        return _prepared(self._op, self._memory, out, x, kind, self._split, sums)


def _blocks(op) -> int:
    return min(MOST_BLOCKS, op.block_limit)


def _launch(op, memory: dict[str, torch.Tensor], call: Call) -> Again:
    launch = _prepared(op, memory, call.out, call.x, call.out.dtype, False, True)
    again = functools.partial(launch, call.tag)
    again(call.out, call.x)
    return again


PACKETS = Algorithm(
    "packets",
    _launch,
    capacity=lambda op: _packets(op, _blocks(op)) * DATA_BYTES,
    buffers=lambda op: _specs(op, _blocks(op)),
    counters=lambda op: {"calls": _blocks(op)},
    auto_up_to=lambda op: _packets(op, _blocks(op)) * DATA_BYTES,
)
