"""All-reduce of few bytes in one hop: data travel in packets that carry their own flag.

A packet is 16 aligned bytes, 8 of data and 8 of flag, and arrives as a whole (see "Messages of one packet" in
docs/memory-model.md): no fence and no second message stand between data and flag. Every PE sends its packets to every
other, so twice the bytes travel; that is cheaper than another hop while there are few.
"""

import functools

import tilelang.language as T
import torch
from tilelang import tvm

import tilescale_net as tsn
import tilescale_net.language as N

from .algorithms import Again, Algorithm, Call
from .collective import EXPLICIT_SYNC, STATUS_WORDS, call_word, compare, count_call, dtype_name, is_aligned
from .launches import FLAT, Launch
from .sums import accumulator

DATA_BYTES, PACKET_BYTES = 8, 16


@tsn.jit(name="all_reduce_packets", pass_configs=EXPLICIT_SYNC)
def all_reduce_packets(n_pes, dtype, capacity, aligned=True, threads=512, max_blocks=64):
    """Kernel `(out, x, tag, status, values, flags, calls)`: `out` is the sum of all PEs' `x`; `out` may be `x`.

    Args:
        n_pes: number of PEs, at most `threads`.
        dtype: of `out` and `x` [count], at most capacity * 8 bytes of them. Sums are made as in `reduce_scatter`.
        capacity: packets of a call, at most max_blocks * (threads // n_pes).
        aligned: `out` and `x` begin and end at multiples of 8 bytes.
        threads, max_blocks: launch geometry; as many blocks run as there is work for.

    `values` and `flags` are views of one symmetric tensor of 16-byte packets: [2, n_pes, capacity, 16 bytes of dtype] and
    uint64 [2, n_pes, capacity, 2]. `calls` (uint64 [max_blocks]) counts calls in any device memory. All are zero before
    the first call, and then left alone. Calls take the two halves of the packets in turn: a PE that sends in call i + 2
    has seen packets of call i + 1 from all PEs, whose call i was over by then. Flags hold `tag` too, which stands for
    what must be equal on all PEs; where it is not, `out` is left alone, and what differs is reported to `status` (int64
    [STATUS_WORDS]), see `collective.call_word`.
    """
    count = T.dynamic("count", "int64")
    width = DATA_BYTES * 8 // tvm.DataType(dtype).bits
    total_dtype = accumulator(dtype)
    share = threads // n_pes  # packets of a block

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((count,), dtype),
        x: T.Tensor((count,), dtype),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        values: T.Tensor((2, n_pes, capacity, 2 * width), dtype),
        flags: T.Tensor((2, n_pes, capacity, 2), "uint64"),
        calls: T.Tensor((max_blocks,), "uint64"),
    ):
        with T.Kernel(T.ceildiv(count, T.int64(share * width)), threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            # Thread (pe, i) sends packet i to the PE and receives that PE's: all packets are in flight at once.
            pe = thread // share
            i = block * T.int64(share) + thread % share
            first = i * width
            packet = T.alloc_shared((n_pes, share, width), dtype)
            agrees = T.alloc_shared((n_pes, share), "int32")
            call = T.alloc_var("uint64")
            call = calls[block] + T.uint64(1)
            half = T.cast(call % T.uint64(2), "int32")
            if pe < n_pes and first < count:
                same = T.alloc_var("int32")
                same = 1
                if aligned:
                    for v in T.vectorized(width):
                        packet[pe, thread % share, v] = x[first + v]
                else:
                    for v in T.unroll(width):
                        if first + v < count:
                            packet[pe, thread % share, v] = x[first + v]
                        else:
                            packet[pe, thread % share, v] = T.cast(0, dtype)
                if pe != me:
                    N.put_signal_thread(
                        values[half, me, i, 0:width],
                        packet[pe, thread % share, 0:width],
                        pe,
                        flags[half, me, i, 1],
                        call_word(call, tag),
                    )
                    word = N.wait(flags[half, pe, i, 1], "ge", call_word(call, 0))
                    compare(same, pe, call, tag, word, status, True)
                    for v in T.vectorized(width):
                        packet[pe, thread % share, v] = values[half, pe, i, v]
                agrees[pe, thread % share] = same
            T.sync_threads()
            if thread < share and first < count:
                agreed = T.alloc_var("int32")
                agreed = 1
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


# Bytes, times the number of PEs, up to which packets are chosen: twice the bytes travel to every PE.
UP_TO = 512 * 1024
MOST_BLOCKS = 128


def _blocks(op) -> int:
    return min(MOST_BLOCKS, op.block_limit)


def _packets(op) -> int:
    """Of a call at most."""
    return min(_blocks(op) * (op.threads // op.n_pes), UP_TO // op.n_pes // DATA_BYTES)


def _launch(op, memory: dict[str, torch.Tensor], call: Call) -> Again:
    packets, dtype, aligned = memory["packets"], call.out.dtype, is_aligned(DATA_BYTES, call.out, call.x)

    def make() -> Launch:
        kernel = all_reduce_packets(op.n_pes, dtype_name(dtype), packets.shape[2], aligned, op.threads, _blocks(op))
        fixed = {
            "status": op.status_record, "values": packets.view(dtype), "flags": packets.view(torch.uint64),
            "calls": memory["calls"],
        }  # fmt: skip
        return Launch(kernel, fixed, ("tag", "out", "x"), op.world, forms={"out": FLAT, "x": FLAT})

    again = functools.partial(op.prepared(("packets", dtype, aligned), make), call.tag)
    again(call.out, call.x)
    return again


PACKETS = Algorithm(
    "packets",
    _launch,
    capacity=lambda op: _packets(op) * DATA_BYTES,
    buffers=lambda op: {"packets": ((2, op.n_pes, _packets(op), PACKET_BYTES), torch.uint8)},
    counters=lambda op: {"calls": _blocks(op)},
    auto_up_to=lambda op: _packets(op) * DATA_BYTES,
)
