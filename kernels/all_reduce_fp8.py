"""All-reduce whose data travel as FP8: half the bytes of BF16, and an error that callers ask for by name.

Elements travel in blocks of 128 as float8_e4m3fn with one power of two per block; every PE pushes part p of its tensor to PE p,
which adds up in float32, quantises the sum and pushes it to all. Two PEs send each other the whole tensor instead, and
each adds up for itself: as many bytes, one exchange and one rounding fewer.

A block of threads works through its slice in chunks, three of which are in work at once: it quantises and pushes one, adds up
an earlier one and stores the sums of a still earlier one. So links are busy all the time, nothing passes through HBM
but `x` and `out`, and a chunk's slot is free again, as the peer's later signal shows, when its turn comes: no signal
of its own says so.

Error. Q(v), what becomes of an element v of a block whose largest magnitude is A, 2^a <= A < 2^(a + 1), is v / 2^(a - 7)
rounded to the nearest float8_e4m3fn and multiplied back; scaling by a power of two is exact. Three bits of mantissa leave an
error of half a unit in the last place, at most |v| / 16; below 2^-6, where the type is subnormal, it is at most half of 2^-9,
2^(a - 17) after scaling. So

    |Q(v) - v| <= max(|v| / 16, A / 2^17)

(blocks with A < 2^-119 are scaled as if A were 2^-119). The result is the rounded sum over the PEs p of Q(x_p), on two PEs, and
Q of it on more. With E = sum over p of the bound for x_p, it is within E of the exact sum s on two PEs, and within
E + (|s| + E) / 16 on more, or E + B / 2^17 if that is more, where B is the largest magnitude among the block's 128 sums; both
plus float32's rounding of the additions, and that to the dtype: none of bfloat16 and float32 on more than two PEs, as four
bits of mantissa fit. Errors of the PEs are independent of each other; for normal numbers the root of the mean square is
about 1 / 36 of the values' own from quantisation once, and about 1 / 28 after both.

An infinity makes its whole block useless: other elements become 0 or infinite. A NaN stays where it is.
"""

import functools
from collections.abc import Callable

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N

from .algorithms import Again, Algorithm, Call
from .all_reduce_push import load_elements
from .collective import (
    EXPLICIT_SYNC,
    PIECE_BITS,
    STATUS_WORDS,
    agree_by_blocks,
    all_agree,
    dtype_name,
    is_aligned,
    piece_number,
)
from .launches import FLAT, Launch
from .sums import VECTOR_BYTES, store_elements, vector_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8, FP8_MAX = "float8_e4m3fn", 448.0
BLOCK = 128  # elements with one exponent
UNIT = 16  # elements of a thread: 16 bytes of FP8
LANES = BLOCK // UNIT
# Steps between the push of a chunk and the use of what peers have pushed.
LAG = 2
# Of chunks. A PE that pushes chunk c has been signalled by all others in step c - LAG or later, when they were through with
# chunk c - 2 * LAG.
SLOTS = 2 * LAG
# A block is scaled to below 2^8; the exponents are those of float32, with its bias.
SHIFT, LEAST = 7, 8


@tsn.macro
def quantise(q, exponent: T.Ref, values):
    """q [UNIT] = values [UNIT] in FP8, for the scale of the block of LANES lanes: 2^(exponent - SHIFT), with float32's bias.

    By whole warps.
    """
    largest = T.alloc_var("float32")
    largest = T.float32(0)
    for v in T.unroll(UNIT):
        largest = T.max(largest, T.abs(values[v]))
    for shift in T.unroll(3):
        largest = T.max(largest, T.shfl_xor(largest, 1 << shift))
    exponent = T.max(T.reinterpret(largest, "int32") >> 23, LEAST)
    inverse = T.alloc_var("float32")
    inverse = T.reinterpret((2 * 127 + SHIFT - exponent) << 23, "float32")
    for v in T.vectorized(UNIT):
        q[v] = T.cast(values[v] * inverse, FP8)


@tsn.macro
def load_block(q, scales, at, data, exponents, row, slot, pe, block, index):
    """q[at] and scales[at] = what PE `pe` has put to `index` of a chunk's slot."""
    for v in T.vectorized(UNIT):
        q[at, v] = data[row, slot, pe, block, index, v]
    scales[at] = T.reinterpret(
        (T.cast(exponents[row, slot, pe, block, index // LANES], "int32") - SHIFT) << 23, "float32"
    )


@tsn.jit(name="all_reduce_fp8", pass_configs=EXPLICIT_SYNC)
def all_reduce_fp8(n_pes, dtype, aligned=True, batch=1, threads=512, blocks=64):
    """Kernel `(out, x, tag, status, data, exponents, ready, arrived, calls)`: `out` is the sum of all PEs' `x`; `out` may be
    `x`.

    Args:
        n_pes: number of PEs, at most `threads`; all of them mapped.
        dtype: of `out` and `x` [count]: bfloat16, float16 or float32.
        aligned: `out` and `x` begin and end at multiples of 16 bytes.
        batch: of a chunk, UNITs of each part that a thread moves.
        threads, blocks: launch geometry; all blocks must be able to run at once.

    With shots = 1 for two PEs and else 2, and chunk = threads * batch, `data` (FP8 [shots, SLOTS, n_pes, blocks, chunk, UNIT]),
    `exponents` (uint8 [shots, SLOTS, n_pes, blocks, chunk / LANES]), `ready` and `arrived` (uint64 [n_pes, blocks]) are
    symmetric, `calls` (uint64 [blocks]) is any device memory; signals and `calls` are zero before the first call, and then
    left alone. `tag` stands for what must be equal on all PEs; where it is not, nothing moves, and what differs is reported to
    `status` (int64 [STATUS_WORDS]), see `collective.call_word`.
    """
    count = T.dynamic("count", "int64")
    shots = shots_of(n_pes)
    parts, chunk = n_pes if shots == 2 else 1, threads * batch
    vector = vector_of(dtype)
    width = UNIT // vector  # vectors of 16 bytes of x that are a UNIT
    word = 16 if chunk // LANES % 16 == 0 else 4  # exponents of a store

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((count,), dtype),
        x: T.Tensor((count,), dtype),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        data: T.Tensor((shots, SLOTS, n_pes, blocks, chunk, UNIT), FP8),
        exponents: T.Tensor((shots, SLOTS, n_pes, blocks, chunk // LANES), "uint8"),
        ready: T.Tensor((n_pes, blocks), "uint64"),
        arrived: T.Tensor((n_pes, blocks), "uint64"),
        calls: T.Tensor((blocks,), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            call = T.alloc_var("uint64")
            call = calls[block] + T.uint64(1)
            # Exponents of what is sent in a step: of every part of x, and of a part of the sum.
            sent = T.alloc_shared((parts, chunk // LANES), "uint8")
            summed = T.alloc_shared((chunk // LANES,), "uint8")
            agrees = T.alloc_shared((n_pes,), "int32")
            # Parts and slices are whole blocks of 128 elements, counted in UNITs.
            part = T.alloc_var("int64")
            part = T.ceildiv(T.ceildiv(count, T.int64(parts * UNIT)), T.int64(LANES)) * LANES
            share = T.max(T.ceildiv(T.ceildiv(part, T.int64(blocks)), T.int64(LANES)) * LANES, T.int64(threads))
            first = T.alloc_var("int64")
            first = T.min(share * block, part)
            end = T.alloc_var("int64")
            end = T.min(first + share, part)
            if first < end:
                targets = [N.remote(data, (me + hop + 1) % n_pes) for hop in range(n_pes)]
                agree_by_blocks(agrees, ready, block, call, tag, status, thread, me, n_pes)
                agreed = T.alloc_var("int32")
                all_agree(agreed, agrees, n_pes)
                chunks = T.alloc_var("int32")
                chunks = T.cast(T.ceildiv(end - first, T.int64(chunk)), "int32")
                steps = T.alloc_var("int32")
                steps = T.if_then_else(agreed != 0, chunks + shots * LAG, 0)
                given = T.alloc_local((batch * parts * width, vector), dtype)
                wide = T.alloc_local((UNIT,), "float32")
                total = T.alloc_local((UNIT,), "float32")
                rounded = T.alloc_local((width, vector), dtype)
                q = T.alloc_local((UNIT,), FP8)
                rows = T.alloc_local((batch * n_pes, UNIT), FP8)
                scales = T.alloc_local((batch * n_pes,), "float32")
                exponent = T.alloc_var("int32")
                for step in T.serial(steps):
                    if step < chunks:
                        slot = step % SLOTS
                        at = first + T.cast(step, "int64") * chunk + thread
                        for u in T.unroll(batch):
                            if at + u * threads < end:
                                for hop in T.unroll(parts):
                                    for w in T.unroll(width):
                                        load_elements(
                                            given, (u * parts + hop) * width + w, x,
                                            ((me + hop + 1) % parts * part + at + u * threads) * width + w,
                                            count, dtype, aligned,
                                        )  # fmt: skip
                        for u in T.unroll(batch):
                            for hop, goes_to in enumerate(targets[:parts]):
                                for w in T.unroll(width):
                                    for v in T.unroll(vector):
                                        wide[w * vector + v] = T.cast(
                                            given[(u * parts + hop) * width + w, v], "float32"
                                        )
                                quantise(q, exponent, wide)
                                if at + u * threads < end:
                                    for target in [goes_to] if shots == 2 else targets:
                                        for v in T.vectorized(UNIT):
                                            target[0, slot, me, block, u * threads + thread, v] = q[v]
                                if thread % LANES == 0:
                                    sent[(me + hop + 1) % parts, (u * threads + thread) // LANES] = T.cast(
                                        exponent, "uint8"
                                    )
                    if step >= LAG and step < chunks + LAG:
                        slot = (step - LAG) % SLOTS
                        at = first + T.cast(step - LAG, "int64") * chunk + thread
                        for u in T.unroll(batch):
                            if at + u * threads < end:
                                for p in T.unroll(n_pes):
                                    load_block(
                                        rows, scales, u * n_pes + p, data, exponents, 0, slot, p, block,
                                        u * threads + thread,
                                    )  # fmt: skip
                        for u in T.unroll(batch):
                            T.clear(total)
                            for p in T.unroll(n_pes):
                                for v in T.vectorized(UNIT):  # converted in pairs
                                    wide[v] = T.cast(rows[u * n_pes + p, v], "float32")
                                for v in T.unroll(UNIT):
                                    total[v] += scales[u * n_pes + p] * wide[v]
                            if shots == 2:
                                quantise(q, exponent, total)
                                if at + u * threads < end:
                                    for target in targets:
                                        for v in T.vectorized(UNIT):
                                            target[1, slot, me, block, u * threads + thread, v] = q[v]
                                if thread % LANES == 0:
                                    summed[(u * threads + thread) // LANES] = T.cast(exponent, "uint8")
                            elif at + u * threads < end:
                                store_unit(out, at + u * threads, rounded, total, count, dtype, aligned)
                    if shots == 2:
                        if step >= 2 * LAG:
                            slot = (step - 2 * LAG) % SLOTS
                            at = first + T.cast(step - 2 * LAG, "int64") * chunk + thread
                            for u in T.unroll(batch):
                                if at + u * threads < end:
                                    for p in T.unroll(n_pes):
                                        load_block(
                                            rows, scales, u * n_pes + p, data, exponents, 1, slot, p, block,
                                            u * threads + thread,
                                        )  # fmt: skip
                            for u in T.unroll(batch):
                                if at + u * threads < end:
                                    for p in T.unroll(n_pes):
                                        for v in T.vectorized(UNIT):
                                            wide[v] = T.cast(rows[u * n_pes + p, v], "float32")
                                        for v in T.unroll(UNIT):
                                            wide[v] = scales[u * n_pes + p] * wide[v]
                                        store_unit(
                                            out, p * part + at + u * threads, rounded, wide, count, dtype, aligned
                                        )
                    T.sync_threads()
                    if thread < n_pes:
                        theirs = N.remote(exponents, thread)
                        if step < chunks:
                            for w in T.unroll(chunk // LANES // word):
                                for v in T.vectorized(word):
                                    theirs[0, step % SLOTS, me, block, w * word + v] = sent[
                                        thread if shots == 2 else 0, w * word + v
                                    ]
                        if shots == 2:
                            if step >= LAG and step < chunks + LAG:
                                for w in T.unroll(chunk // LANES // word):
                                    for v in T.vectorized(word):
                                        theirs[1, (step - LAG) % SLOTS, me, block, w * word + v] = summed[w * word + v]
                        if thread != me:
                            if step < chunks + (shots - 1) * LAG:
                                N.signal(arrived[me, block], piece_number(call, step + 1), thread, fence=True)
                            if step >= LAG - 1 and step < steps - 1:  # what the next step uses
                                N.wait(arrived[thread, block], "ge", piece_number(call, step + 2 - LAG))
                    T.sync_threads()
            T.sync_threads()
            if thread == 0:
                calls[block] = call

    return main


@tsn.macro
def store_unit(out, unit, rounded, values, count, dtype, aligned):
    """The UNIT elements of `out` with this number become `values`, rounded, as far as `out` goes; `rounded` is scratch."""
    vector = vector_of(dtype)
    for w in T.unroll(UNIT // vector):
        for v in T.vectorized(vector):
            rounded[w, v] = T.cast(values[w * vector + v], dtype)
        if (unit * (UNIT // vector) + w) * vector < count:
            store_elements(out, unit * (UNIT // vector) + w, rounded, w, count, dtype, aligned)


def shots_of(n_pes: int) -> int:
    """Exchanges of a call."""
    return 1 if n_pes == 2 else 2


def rounded_to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Q of the module's docstring: float32 of the shape of `x`, as the kernel rounds it, bit by bit."""
    blocks = torch.nn.functional.pad(x.float().view(-1), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(1, keepdim=True)
    exponent = (largest.view(torch.int32) >> 23).clamp(min=LEAST)
    inverse = ((2 * 127 + SHIFT - exponent) << 23).view(torch.float32)
    scale = ((exponent - SHIFT) << 23).view(torch.float32)
    q = (blocks * inverse).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return (q.float() * scale).view(-1)[: x.numel()].view(x.shape)


def _batch(op) -> int:
    return max(1, 4 // op.n_pes)


def _capacity(op) -> int:
    """Bytes whose steps PIECE_BITS count."""
    steps = (1 << PIECE_BITS) - 2 * SLOTS
    return steps * op.threads * _batch(op) * UNIT * torch.bfloat16.itemsize


def _launch(op, memory: dict[str, torch.Tensor], call: Call) -> Again:
    dtype, aligned = call.out.dtype, is_aligned(VECTOR_BYTES, call.out, call.x)

    def make() -> Launch:
        kernel = all_reduce_fp8(op.n_pes, dtype_name(dtype), aligned, _batch(op), op.threads, op.blocks)
        fixed = memory | {"data": memory["data"].view(torch.float8_e4m3fn), "status": op.status_record}
        return Launch(kernel, fixed, ("tag", "out", "x"), op.world, forms={"out": FLAT, "x": FLAT})

    again: Callable[[torch.Tensor, torch.Tensor], None]
    again = functools.partial(op.prepared(("fp8", dtype, aligned), make), call.tag)
    again(call.out, call.x)
    return again


ALL_REDUCE_FP8 = Algorithm(
    "fp8",
    _launch,
    capacity=_capacity,
    buffers=lambda op: {
        "data": ((shots_of(op.n_pes), SLOTS, op.n_pes, op.blocks, op.threads * _batch(op), UNIT), torch.uint8),
        "exponents": ((shots_of(op.n_pes), SLOTS, op.n_pes, op.blocks, op.threads * _batch(op) // LANES), torch.uint8),
        "ready": ((op.n_pes, op.blocks), torch.uint64),
        "arrived": ((op.n_pes, op.blocks), torch.uint64),
    },
    counters=lambda op: {"calls": op.blocks},
    dtypes=DTYPES,
    is_exact=False,
)
