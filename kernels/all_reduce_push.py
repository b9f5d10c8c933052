"""All-reduce of floats whose data are their own flags, in one step or two: see `N.put_vector`.

One shot: every PE sends all of its vectors to every PE, and each PE sums the vectors that it receives. Two shots: PE p
receives part p of the tensor from all, sums it and sends the sums to all: more latency, fewer bytes. A thread has a few
vectors of each part, and waits only for the same thread of other PEs.

Tensors may be in any memory, without copies. Calls alternate between two halves of the memory: a PE that sends in call
i + 2 has all data of call i + 1, so every PE has finished call i and read its half.
"""

import functools
from collections.abc import Callable
from typing import Any

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.runtime import settings

from .algorithms import Again, Algorithm, BufferSpecs, Call
from .collective import (
    EXPLICIT_SYNC,
    STATUS_WORDS,
    all_agree,
    call_word,
    count_call,
    dtype_name,
    is_aligned,
    report_other_call,
)
from .launches import FLAT, Launch
from .sums import VECTOR_BYTES, accumulator, store_elements, vector_of

# The unit of `N.put_vector`.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@tsn.macro
def load_elements(rows, u, elements, i, count, dtype, aligned):
    """rows[u] = the i-th 16 bytes of `elements` [count], zero beyond its end."""
    vector = vector_of(dtype)
    if aligned:
        if i * vector < count:
            for v in T.vectorized(vector):
                rows[u, v] = elements[i * vector + v]
        else:
            for v in T.vectorized(vector):
                rows[u, v] = T.cast(0, dtype)
    else:
        for v in T.unroll(vector):
            if i * vector + v < count:
                rows[u, v] = elements[i * vector + v]
            else:
                rows[u, v] = T.cast(0, dtype)


@tsn.macro
def add_rows(total, u, rows, first, n_pes, dtype):
    """total[u] = the sum of rows[first : first + n_pes], in their order, rounded once."""
    sums = T.alloc_local((vector_of(dtype),), accumulator(dtype))
    T.clear(sums)
    for p in T.unroll(n_pes):
        for v in T.unroll(vector_of(dtype)):
            sums[v] += T.cast(rows[first + p, v], accumulator(dtype))
    for v in T.vectorized(vector_of(dtype)):
        total[u, v] = T.cast(sums[v], dtype)


# Threads of a block that agree on the call; the other threads move data, and polls would delay them.
AGREEING = 32


@tsn.macro
def meet_blocks(agrees, tags, half, block, call: T.Ref, tag, status, thread, me, n_pes, dtype):
    """Meet the blocks with this index of all PEs: agrees[p] = whether PE p makes the call that this PE makes. By
    AGREEING threads.

    Args:
        agrees: shared int32 [n_pes]. tags: symmetric [2, n_pes, blocks, vector], zero before the first call.
    """
    mine, theirs = T.alloc_local((vector_of(dtype),), dtype), T.alloc_local((vector_of(dtype),), dtype)
    T.clear(mine)
    for byte in T.unroll(3):
        mine[byte] = T.cast((tag >> (8 * byte)) & 255, dtype)
    for turn in T.serial(T.ceildiv(n_pes, AGREEING)):
        pe = turn * AGREEING + thread
        if pe < n_pes:
            N.put_vector(tags[half, me, block, 0 : vector_of(dtype)], mine, pe)
            N.take_vectors(theirs, tags[half, pe, block, 0 : vector_of(dtype)])
            other = T.alloc_var("int32", 0)
            for byte in T.unroll(3):
                other = other | (T.cast(theirs[byte], "int32") << (8 * byte))
            agrees[pe] = T.cast(other == tag, "int32")
            if other != tag:
                report_other_call(status, pe, call, tag, call_word(call, other))


@tsn.jit(name="all_reduce_push", pass_configs=EXPLICIT_SYNC)
def all_reduce_push(n_pes, dtype, capacity, shots, aligned=True, batch=1, threads=288, max_blocks=64, dependent=False):
    """Kernel `(out, x, tag, status, inbox, tags, calls)`: `out` is the sum of all PEs' `x`; `out` may be `x`.

    Args:
        n_pes: number of PEs, all of them mapped.
        dtype: dtype of `out` and `x` [count]: float32, float16 or bfloat16. Sums are as in `reduce_scatter`.
        capacity: most 16-byte vectors of a part in a call, up to max_blocks * batch * (threads - AGREEING).
        shots: 1 or 2; with 2 the tensor has n_pes parts, else one.
        aligned: `out` and `x` begin and end at multiples of 16 bytes.
        batch: vectors of each part that a thread moves.
        threads, max_blocks: launch geometry; only blocks with work are launched, all resident.
        dependent: programmatic dependent launch, of this kernel and of the next one.

    `inbox` [2, shots, n_pes, capacity, 16 bytes of dtype] and `tags` [2, n_pes, max_blocks, 16 bytes of dtype] are symmetric,
    zero before the first call and never reset. `tag`, `status` and `calls` [max_blocks]: see `collective.call_word`.
    """
    count = T.dynamic("count", "int64")
    vector = vector_of(dtype)
    parts, workers = n_pes if shots == 2 else 1, threads - AGREEING

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((count,), dtype),
        x: T.Tensor((count,), dtype),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        inbox: T.Tensor((2, shots, n_pes, capacity, vector), dtype),
        tags: T.Tensor((2, n_pes, max_blocks, vector), dtype),
        calls: T.Tensor((max_blocks,), "uint64"),
    ):
        with T.Kernel(T.ceildiv(count, T.int64(parts * workers * batch * vector)), threads=threads) as block:
            if dependent:
                # First: earlier kernels wrote the inputs, and call i must end before call i + 1 begins.
                T.pdl_sync()
                T.pdl_trigger()
            me = N.my_pe()
            thread = T.get_thread_binding()
            part = T.alloc_var("int64", T.ceildiv(T.ceildiv(count, T.int64(vector)), T.int64(parts)))
            first = block * T.int64(workers * batch) + thread
            total = T.alloc_local((batch, vector), dtype)
            loaded = T.alloc_local((batch * parts, vector), dtype)
            rows = T.alloc_local((batch * n_pes, vector), dtype)
            agrees = T.alloc_shared((n_pes,), "int32")
            agreed = T.alloc_var("int32")
            call = T.alloc_var("uint64", calls[block] + T.uint64(1))
            half = T.cast(call % T.uint64(2), "int32")
            if thread >= workers:
                meet_blocks(agrees, tags, half, block, call, tag, status, thread - workers, me, n_pes, dtype)
            else:
                for u in T.unroll(batch):
                    i = first + u * workers
                    if i < part:
                        for hop in T.unroll(parts):
                            at = (me + hop + 1) % n_pes * part + i if shots == 2 else i
                            load_elements(loaded, u * parts + hop, x, at, count, dtype, aligned)
                for u in T.unroll(batch):
                    i = first + u * workers
                    if i < part:
                        N.put_vectors(
                            inbox[half, 0, me, i, 0:vector], loaded[u * parts : u * parts + parts, 0:vector], n_pes,
                            (me + 1) % n_pes,
                        )  # fmt: skip
                for u in T.unroll(batch):
                    i = first + u * workers
                    if i < part:
                        N.take_vectors(
                            rows[u * n_pes : u * n_pes + n_pes, 0:vector], inbox[half, 0, 0:n_pes, i, 0:vector]
                        )
                        add_rows(total, u, rows, u * n_pes, n_pes, dtype)
                        if shots == 2:
                            N.put_vectors(inbox[half, 1, me, i, 0:vector], total[u, 0:vector], n_pes, (me + 1) % n_pes)
                if shots == 2:
                    for u in T.unroll(batch):
                        i = first + u * workers
                        if i < part:
                            N.take_vectors(
                                rows[u * n_pes : u * n_pes + n_pes, 0:vector], inbox[half, 1, 0:n_pes, i, 0:vector]
                            )
            T.sync_threads()
            all_agree(agreed, agrees, n_pes)
            for u in T.unroll(batch):
                i = first + u * workers
                if thread < workers and i < part and agreed != 0:
                    if shots == 1:
                        store_elements(out, i, total, u, count, dtype, aligned)
                    else:
                        for p in T.unroll(n_pes):
                            if (p * part + i) * vector < count:
                                store_elements(out, p * part + i, rows, u * n_pes + p, count, dtype, aligned)
            count_call(calls, block, call, T.ceildiv(part, T.int64(workers * batch)), thread, threads, max_blocks)

    return main


# Threads of a block that move data.
WORKERS = 256
# Vectors of each part per thread of a large call, by number of PEs: as many as registers hold.
LARGE_BATCH = {2: 4, 3: 2, 4: 2}


def _geometry(op) -> tuple[int, int, int]:
    """Most threads and blocks of a call, and vectors of a part per thread. Two blocks fit on an SM."""
    if op.device.type == "cuda":
        return WORKERS + AGREEING, 2 * op.block_limit, LARGE_BATCH.get(op.n_pes, 1)
    return max(op.threads, 2 * AGREEING), op.block_limit, 2


def _vectors(op) -> int:
    """Most vectors of a part in a call."""
    threads, blocks, batch = _geometry(op)
    return (threads - AGREEING) * blocks * batch


def _one_shot_bytes(op) -> int:
    """Bytes up to which one shot is faster than two; measured on two and on four H100."""
    most = (1 << 20) // (1 if op.n_pes == 2 else op.n_pes if op.n_pes <= 4 else 2 * op.n_pes)
    return min(most, _vectors(op) * VECTOR_BYTES) // VECTOR_BYTES * VECTOR_BYTES


def _launch(shots: int, op, memory: dict[str, torch.Tensor], call: Call) -> Again:
    inbox, dtype, aligned = memory["inbox"], call.out.dtype, is_aligned(VECTOR_BYTES, call.out, call.x)
    part = -(-call.out.nbytes // (VECTOR_BYTES * (op.n_pes if shots == 2 else 1)))
    threads, blocks, most = _geometry(op)
    batch = min(most, 1 << (-(-part // ((threads - AGREEING) * blocks)) - 1).bit_length())

    def make() -> Launch:
        dependent = settings.DEPENDENT_LAUNCH.get() and op.device.type == "cuda"
        kernel = all_reduce_push(
            op.n_pes, dtype_name(dtype), inbox.shape[3], shots, aligned, batch, threads, blocks, dependent
        )
        constants = {
            "status": op.status_record, "inbox": inbox.view(dtype), "tags": memory["tags"].view(dtype),
            "calls": memory["calls"],
        }  # fmt: skip
        return Launch(kernel, constants, ("tag", "out", "x"), op.world, forms={"out": FLAT, "x": FLAT})

    again = functools.partial(op.prepared(("push", shots, dtype, aligned, batch), make), call.tag)
    again(call.out, call.x)
    return again


def _row(name: str, shots: int, capacity: Callable[[Any], int], auto_up_to: Callable[[Any], int]) -> Algorithm:
    """A row of `algorithms.ALGORITHMS`; `capacity` is in bytes of the tensor."""

    def buffers(op) -> BufferSpecs:
        vectors = -(-capacity(op) // (VECTOR_BYTES * (op.n_pes if shots == 2 else 1)))
        return {
            "inbox": ((2, shots, op.n_pes, vectors, VECTOR_BYTES), torch.uint8),
            "tags": ((2, op.n_pes, _geometry(op)[1], VECTOR_BYTES), torch.uint8),
        }

    return Algorithm(
        name, functools.partial(_launch, shots), capacity, buffers, lambda op: {"calls": _geometry(op)[1]}, auto_up_to,
        dtypes=DTYPES,
    )  # fmt: skip


ONE_SHOT = _row("one_shot", 1, _one_shot_bytes, _one_shot_bytes)


def _two_shot_bytes(op) -> int:
    """Bytes of the largest tensor of one launch. A larger tensor goes in pieces, which are slower than `two_shot`."""
    return min(2 * op.staging_bytes, _vectors(op) * VECTOR_BYTES * op.n_pes)


TWO_SHOT_PUSH = _row("two_shot_push", 2, _two_shot_bytes, lambda op: min(8 << 20, _two_shot_bytes(op)))
