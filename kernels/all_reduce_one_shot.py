"""All-reduce in one step: every PE reads what all others hold and adds it up itself.

A call copies its input into symmetric memory, signals all PEs, and reads. One exchange of signals is all: calls take
two halves of that memory in turn, and a PE that writes in call i + 2 has seen the signals of call i + 1 of all PEs,
whose call i was over by then.
"""

import functools

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N

from .algorithms import Again, Algorithm, Call
from .collective import EXPLICIT_SYNC, STATUS_WORDS, agree_by_blocks, all_agree, dtype_name, is_aligned
from .launches import FLAT, Launch
from .sums import VECTOR_BYTES, add_up, batch_of, pack, store_elements, vector_of


@tsn.jit(name="all_reduce_one_shot", pass_configs=EXPLICIT_SYNC)
def all_reduce_one_shot(n_pes, dtype, capacity, aligned=True, threads=512, blocks=64):
    """Kernel `(out, x, tag, status, inbox, arrived, calls)`: `out` is the sum of all PEs' `x`; `out` may be `x`.

    Args:
        n_pes: number of PEs, at most `threads`; all of them mapped.
        dtype: of `out` and `x` [count]. Sums are made as in `reduce_scatter`.
        capacity: vectors of 16 bytes that a call has at most.
        aligned: `out` and `x` begin and end at multiples of 16 bytes.
        threads, blocks: launch geometry; all blocks must be able to run at once.

    `inbox` [2 * capacity, 16 bytes of dtype] and `arrived` (uint64 [n_pes, blocks]) are symmetric, `calls` (uint64
    [blocks]) is any device memory; signals and `calls` are zero before the first call, and then left alone. `tag` stands for
    what must be equal on all PEs; where it is not, `out` is left alone, and what differs is reported to `status` (int64
    [STATUS_WORDS]), see `collective.call_word`.
    """
    count = T.dynamic("count", "int64")
    vector, batch = vector_of(dtype), batch_of(n_pes)

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((count,), dtype),
        x: T.Tensor((count,), dtype),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        inbox: T.Tensor((2 * capacity, vector), dtype),
        arrived: T.Tensor((n_pes, blocks), "uint64"),
        calls: T.Tensor((blocks,), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            call = T.alloc_var("uint64")
            call = calls[block] + T.uint64(1)
            half = T.cast(call % T.uint64(2), "int64") * capacity
            agrees = T.alloc_shared((n_pes,), "int32")
            vectors = T.ceildiv(count, T.int64(vector))
            share = T.max(T.ceildiv(vectors, T.int64(blocks)), T.int64(threads))
            first = T.alloc_var("int64")
            first = T.min(share * block, vectors)
            end = T.alloc_var("int64")
            end = T.min(first + share, vectors)
            if first < end:
                views = [N.remote(inbox, p) for p in range(n_pes)]
                pack(inbox, half, x, first, end, thread, threads, count, dtype, aligned)
                T.sync_threads()
                agree_by_blocks(agrees, arrived, block, call, tag, status, thread, me, n_pes, runs_ahead=True)
                agreed = T.alloc_var("int32")
                all_agree(agreed, agrees, n_pes)
                last = T.alloc_var("int64")
                last = T.if_then_else(agreed != 0, end, first)
                result = T.alloc_local((batch, vector), dtype)
                for turn in T.serial(T.ceildiv(last - first, T.int64(threads * batch))):
                    i = first + turn * threads * batch + thread
                    add_up(result, views, dtype, half + i, half + last, threads, batch)
                    for u in T.unroll(batch):
                        if i + u * threads < last:
                            store_elements(out, i + u * threads, result, u, count, dtype, aligned)
            T.sync_threads()
            if thread == 0:
                calls[block] = call

    return main


# One shot spares an exchange, but more bytes travel; measured on two H200.
EXCHANGE_US, US_PER_MIB = 1.4, 3.0
LARGEST = 2 << 20


def one_shot_up_to(n_pes: int) -> int:
    """Bytes up to which one shot is faster than two, a multiple of 16."""
    more = (n_pes - 1) * (1 - 2 / n_pes)  # tensors that each PE reads beyond what two shots move
    if more <= 0:
        return LARGEST
    return min(LARGEST, int(EXCHANGE_US / US_PER_MIB / more * 2**20) // VECTOR_BYTES * VECTOR_BYTES)


def _launch(op, memory: dict[str, torch.Tensor], call: Call) -> Again:
    inbox, dtype, aligned = memory["inbox"], call.out.dtype, is_aligned(VECTOR_BYTES, call.out, call.x)

    def make() -> Launch:
        kernel = all_reduce_one_shot(op.n_pes, dtype_name(dtype), len(inbox) // 2, aligned, op.threads, op.blocks)
        fixed = {**memory, "status": op.status_record, "inbox": inbox.view(dtype)}
        return Launch(kernel, fixed, ("tag", "out", "x"), op.world, forms={"out": FLAT, "x": FLAT})

    again = functools.partial(op.prepared(("one_shot", dtype, aligned), make), call.tag)
    again(call.out, call.x)
    return again


ONE_SHOT = Algorithm(
    "one_shot",
    _launch,
    capacity=lambda op: one_shot_up_to(op.n_pes),
    buffers=lambda op: {
        "inbox": ((2 * one_shot_up_to(op.n_pes) // VECTOR_BYTES, VECTOR_BYTES), torch.uint8),
        "arrived": ((op.n_pes, op.blocks), torch.uint64),
    },
    counters=lambda op: {"calls": op.blocks},
    auto_up_to=lambda op: one_shot_up_to(op.n_pes),
)
