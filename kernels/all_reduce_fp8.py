"""All-reduce with FP8 data: half the bytes of BF16, with an error, so it is chosen only by name.

Elements are sent in blocks of 128 as float8_e4m3fn with one power of two per block; every PE pushes part p of its tensor to
PE p, which sums in float32, quantises the sum and pushes it to all. Two PEs instead send each other the whole tensor, and
each sums on its own: as many bytes, one exchange and one rounding fewer.

Data are their own flags, see `N.put_vector`; there is no signal and no fence between the steps. A warp processes chunks of
ROWS units of 16 elements per lane, 2 KiB of FP8; the exponents of a chunk are one more vector. It pushes all of its chunks
of `x`, then sums arriving chunks, and stores arriving sums a few turns later; it waits only for the same warp of other PEs.
So links are busy while it loads and sums. Calls alternate between two halves of the memory, as in all_reduce_push.py.

Error. Q(v), the received value of an element v of a block whose largest magnitude is A, 2^a <= A < 2^(a + 1), is v / 2^(a - 7)
rounded to the nearest float8_e4m3fn and multiplied back; scaling by a power of two is exact. Three bits of mantissa leave an
error of half a unit in the last place, at most |v| / 16; below 2^-6, where the type is subnormal, it is at most half of 2^-9,
2^(a - 17) after scaling. So

    |Q(v) - v| <= max(|v| / 16, A / 2^17)

(blocks with A < 2^-119 are scaled as if A were 2^-119). The result is the rounded sum over the PEs p of Q(x_p), on two PEs, and
Q of it on more. With E = sum over p of the bound for x_p, it is within E of the exact sum s on two PEs, and within
E + (|s| + E) / 16 on more, or E + B / 2^17 if that is more, where B is the largest magnitude among the block's 128 sums; both
plus float32's rounding of the additions, and that to the dtype: none of bfloat16 and float32 on more than two PEs, as four
bits of mantissa fit. Errors of the PEs are independent of each other; for normal numbers the root of the mean square is
about 1 / 38 of the values' own from quantisation once, and about 1 / 26 after both.

An infinity stays one, and the other elements of its block are scaled as beside 2^127. A NaN stays where it is.
"""

import functools
from collections.abc import Callable

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.runtime import settings

from .algorithms import Again, Algorithm, BufferSpecs, Call
from .all_reduce_push import AGREEING, load_elements, meet_blocks
from .collective import EXPLICIT_SYNC, STATUS_WORDS, all_agree, count_call, dtype_name, is_aligned
from .launches import FLAT, Launch
from .sums import VECTOR_BYTES, store_elements, vector_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8, FP8_MAX = "float8_e4m3fn", 448.0
BLOCK = 128  # elements with one exponent
UNIT = 16  # elements of a lane: 16 bytes of FP8
LANES = BLOCK // UNIT
# Units of a lane in a chunk: then the exponents of a warp's blocks are one vector.
ROWS = 4
CHUNK_UNITS = 32 * ROWS
CHUNK = CHUNK_UNITS * UNIT
# A block is scaled to below 2^8; exponents have float32's bias.
SHIFT, LEAST, MOST = 7, 8, 254


@tsn.macro
def quantise(q, u, packed: T.Ref, values):
    """q[u] = values[u] in FP8; byte u of `packed` = the exponent of the block of LANES lanes, with float32's bias; the scale
    is 2^(exponent - SHIFT). Called by whole warps.
    """
    largest = T.alloc_var("float32", T.float32(0))
    for v in T.unroll(UNIT):
        largest = T.max(largest, T.abs(values[v]))
    for shift in T.unroll(3):
        largest = T.max(largest, T.shfl_xor(largest, 1 << shift))
    exponent = T.alloc_var("int32", T.min(T.max(T.reinterpret(largest, "int32") >> 23, LEAST), MOST))
    packed = packed | (exponent << (8 * u))
    inverse = T.alloc_var("float32", T.reinterpret((2 * 127 + SHIFT - exponent) << 23, "float32"))
    for v in T.vectorized(UNIT):
        q[u, v] = T.cast(values[v] * inverse, FP8)


@tsn.macro
def gather_exponents(words, packed):
    """words [4] = the exponents of a warp's chunk; word g belongs to the g-th LANES lanes. Called by whole warps."""
    for g in T.unroll(4):
        words[g] = T.reinterpret(T.shfl_sync(packed, g * LANES), "float32")


@tsn.macro
def put_chunk(data, exponents, q, words, half, shot, chunk, me, lane, pe):
    """Put a chunk to `pe`. Called by a warp."""
    for u in T.unroll(ROWS):
        N.put_vector(data[half, shot, chunk, me * ROWS + u, lane, 0:UNIT], q[u, 0:UNIT], pe)
    if lane == 0:
        N.put_vector(exponents[half, shot, chunk, me, 0:4], words[0:4], pe)


@tsn.macro
def take_exponents(words, exponents, half, shot, chunk, first, pes, lane):
    """words [4] of lane p = the exponents of a chunk of PE first + p, for `pes` PEs, at most 32. Called by a warp."""
    T.clear(words)
    if lane < pes:
        N.take_vectors(words, exponents[half, shot, chunk, first + lane, 0:4])


@tsn.macro
def take_rows(rows, scales_of, words, data, half, shot, chunk, first, p, pes, lane):
    """Take a chunk from each of the `pes` PEs from first + p on: rows[i * ROWS + u] = the units, byte u of scales_of[i] =
    the exponent of this lane's block. Called by a warp.
    """
    for i in T.unroll(pes):
        for g in T.unroll(4):
            word = T.alloc_var("int32", T.shfl_sync(T.reinterpret(words[g], "int32"), p + i))
            if lane // LANES == g:
                scales_of[i] = word
    N.take_vectors(
        rows[0 : pes * ROWS, 0:UNIT],
        data[half, shot, chunk, (first + p) * ROWS : (first + p + pes) * ROWS, lane, 0:UNIT],
    )


@tsn.macro
def widen(wide, scale: T.Ref, rows, scales_of, p, u):
    """wide [UNIT] times `scale` is the value of rows[p * ROWS + u]."""
    scale = T.reinterpret((((scales_of[p] >> (8 * u)) & 255) - SHIFT) << 23, "float32")
    for v in T.vectorized(UNIT):  # converted in pairs
        wide[v] = T.cast(rows[p * ROWS + u, v], "float32")


@tsn.jit(name="all_reduce_fp8", pass_configs=EXPLICIT_SYNC)
def all_reduce_fp8(n_pes, dtype, capacity, aligned=True, threads=288, max_blocks=128, lag=2, dependent=False):
    """Kernel `(out, x, tag, status, data, exponents, tags, calls)`: `out` is the sum of all PEs' `x`; `out` may be `x`.

    Args:
        n_pes: number of PEs, all of them mapped.
        dtype: dtype of `out` and `x` [count]: bfloat16, float16 or float32.
        capacity: most chunks of a part in a call.
        aligned: `out` and `x` begin and end at multiples of 16 bytes.
        threads, max_blocks: launch geometry; one block per chunk of a part, at most max_blocks, all resident.
        lag: turns between a warp's sum and its store of all PEs' sums.
        dependent: as in `all_reduce_push`.

    `data` (FP8 [2, shots, capacity, n_pes * ROWS, 32, UNIT]), `exponents` (float32 [2, shots, capacity, n_pes, 4], a byte per
    block) and `tags` (float32 [2, n_pes, max_blocks, 4]), with `shots_of(n_pes)` shots, are symmetric, zero before the first
    call and never reset. `tag`, `status` and `calls` [max_blocks]: see `collective.call_word`.
    """
    count = T.dynamic("count", "int64")
    shots = shots_of(n_pes)
    parts, warps = n_pes if shots == 2 else 1, (threads - AGREEING) // 32
    vector = vector_of(dtype)
    width = UNIT // vector  # vectors of 16 bytes of `x` per UNIT
    # PEs whose exponents, and whose data, a warp takes at once; unrolling all exceeds an SM's instruction cache.
    groups = [(first, min(32, n_pes - first)) for first in range(0, n_pes, 32)]
    at_once = 2 if n_pes % 2 == 0 else 1

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((count,), dtype),
        x: T.Tensor((count,), dtype),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        data: T.Tensor((2, shots, capacity, n_pes * ROWS, 32, UNIT), FP8),
        exponents: T.Tensor((2, shots, capacity, n_pes, 4), "float32"),
        tags: T.Tensor((2, n_pes, max_blocks, 4), "float32"),
        calls: T.Tensor((max_blocks,), "uint64"),
    ):
        with T.Kernel(T.min(T.ceildiv(count, T.int64(parts * CHUNK)), T.int64(max_blocks)), threads=threads) as block:
            if dependent:
                T.pdl_sync()
                T.pdl_trigger()
            thread = T.get_thread_binding()
            me = N.my_pe()
            warp, lane = thread // 32, thread % 32
            agrees = T.alloc_shared((n_pes,), "int32")
            call = T.alloc_var("uint64", calls[block] + T.uint64(1))
            half = T.cast(call % T.uint64(2), "int32")
            # Parts are whole chunks.
            chunks = T.alloc_var("int32", T.cast(T.ceildiv(count, T.int64(parts * CHUNK)), "int32"))
            used = T.alloc_var("int32", T.min(chunks, max_blocks))
            turns = T.alloc_var("int32", T.ceildiv(chunks, used * warps))
            loaded = T.alloc_local((ROWS * width, vector), dtype)
            wide = T.alloc_local((UNIT,), "float32")
            totals = T.alloc_local((ROWS, UNIT), "float32")
            rounded = T.alloc_local((width, vector), dtype)
            q = T.alloc_local((ROWS, UNIT), FP8)
            words = T.alloc_local((4,), "float32")
            rows = T.alloc_local((at_once * ROWS, UNIT), FP8)
            scales_of = T.alloc_local((at_once,), "int32")
            packed = T.alloc_var("int32")
            scale = T.alloc_var("float32")
            if warp == warps:
                meet_blocks(agrees, tags, half, block, call, tag, status, lane, me, n_pes, "float32")
            else:
                for turn in T.serial(turns):
                    # Neighbouring chunks go to different blocks, so a small tensor uses many SMs.
                    chunk = block + used * (turn * warps + warp)
                    if chunk < chunks:
                        for hop in T.serial(parts):
                            goes_to = (me + hop + 1) % n_pes
                            begin = (
                                T.cast(goes_to if shots == 2 else 0, "int64") * chunks + chunk
                            ) * CHUNK_UNITS + lane
                            for u in T.unroll(ROWS):
                                for w in T.unroll(width):
                                    load_elements(
                                        loaded, u * width + w, x, (begin + u * 32) * width + w, count, dtype, aligned
                                    )
                            packed = 0
                            for u in T.unroll(ROWS):
                                for w in T.unroll(width):
                                    for v in T.unroll(vector):
                                        wide[w * vector + v] = T.cast(loaded[u * width + w, v], "float32")
                                quantise(q, u, packed, wide)
                            gather_exponents(words, packed)
                            for other in T.serial(1 if shots == 2 else n_pes):
                                put_chunk(
                                    data, exponents, q, words, half, 0, chunk, me, lane, (goes_to + other) % n_pes
                                )
            T.sync_threads()
            agreed = T.alloc_var("int32")
            all_agree(agreed, agrees, n_pes)
            if warp < warps and agreed != 0:
                for turn in T.serial(turns + lag if shots == 2 else turns):
                    chunk = block + used * (turn * warps + warp)
                    if turn < turns and chunk < chunks:
                        T.clear(totals)
                        for first, pes in groups:
                            take_exponents(words, exponents, half, 0, chunk, first, pes, lane)
                            for turn_of_pes in T.serial(pes // at_once):
                                p = turn_of_pes * at_once
                                take_rows(rows, scales_of, words, data, half, 0, chunk, first, p, at_once, lane)
                                for u in T.unroll(ROWS):
                                    for i in T.unroll(at_once):
                                        widen(wide, scale, rows, scales_of, i, u)
                                        for v in T.unroll(UNIT):
                                            totals[u, v] += scale * wide[v]
                        packed = 0
                        for u in T.unroll(ROWS):
                            for v in T.unroll(UNIT):
                                wide[v] = totals[u, v]
                            if shots == 2:
                                quantise(q, u, packed, wide)
                            else:
                                unit = T.cast(chunk, "int64") * CHUNK_UNITS + u * 32 + lane
                                store_unit(out, unit, rounded, wide, count, dtype, aligned)
                        if shots == 2:
                            gather_exponents(words, packed)
                            for hop in T.serial(n_pes):
                                put_chunk(data, exponents, q, words, half, 1, chunk, me, lane, (me + hop + 1) % n_pes)
                    if shots == 2:
                        # Store the sums of an earlier turn while the links carry this turn's.
                        chunk_of_sums = chunk - used * lag * warps
                        if turn >= lag and chunk_of_sums < chunks:
                            for first, pes in groups:
                                take_exponents(words, exponents, half, 1, chunk_of_sums, first, pes, lane)
                                for turn_of_pes in T.serial(pes // at_once):
                                    p = turn_of_pes * at_once
                                    take_rows(
                                        rows, scales_of, words, data, half, 1, chunk_of_sums, first, p, at_once, lane
                                    )
                                    for i in T.unroll(at_once):
                                        start = (
                                            T.cast(first + p + i, "int64") * chunks + chunk_of_sums
                                        ) * CHUNK_UNITS + lane
                                        for u in T.unroll(ROWS):
                                            widen(wide, scale, rows, scales_of, i, u)
                                            for v in T.unroll(UNIT):
                                                wide[v] = scale * wide[v]
                                            store_unit(out, start + u * 32, rounded, wide, count, dtype, aligned)
            T.sync_threads()
            count_call(calls, block, call, T.cast(used, "int64"), thread, threads, max_blocks)

    return main


@tsn.macro
def store_unit(out, unit, rounded, values, count, dtype, aligned):
    """Unit `unit` of `out`, up to its end, = `values`, rounded; `rounded` is scratch."""
    vector = vector_of(dtype)
    for w in T.unroll(UNIT // vector):
        for v in T.vectorized(vector):
            rounded[w, v] = T.cast(values[w * vector + v], dtype)
        if (unit * (UNIT // vector) + w) * vector < count:
            store_elements(out, unit * (UNIT // vector) + w, rounded, w, count, dtype, aligned)


def shots_of(n_pes: int) -> int:
    """Number of exchanges per call."""
    return 1 if n_pes == 2 else 2


def rounded_to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Q of the module's docstring: float32 in the shape of `x`, bitwise as the kernel rounds."""
    blocks = torch.nn.functional.pad(x.float().view(-1), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(1, keepdim=True)
    exponent = (largest.view(torch.int32) >> 23).clamp(LEAST, MOST)
    inverse = ((2 * 127 + SHIFT - exponent) << 23).view(torch.float32)
    scale = ((exponent - SHIFT) << 23).view(torch.float32)
    q = (blocks * inverse).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return (q.float() * scale).view(-1)[: x.numel()].view(x.shape)


# Warps of a block that move data, and most chunks of a part per warp.
WARPS, TURNS = 8, 8
# FP8 bytes per rank and launch, as a multiple of `staging_bytes`.
STAGED = 8
# See `all_reduce_fp8`; with TURNS all sums are stored last.
LAG = 2


def _geometry(op) -> tuple[int, int]:
    """Most threads and blocks of a call."""
    if op.device.type == "cuda":
        return 32 * WARPS + AGREEING, op.block_limit
    return max(op.threads, 2 * AGREEING), op.blocks


def _chunks(op) -> int:
    """Most chunks of a part in a call."""
    threads, blocks = _geometry(op)
    chunks = STAGED * op.staging_bytes // ((op.n_pes if shots_of(op.n_pes) == 2 else 1) * CHUNK)
    return max(1, min(chunks, (threads - AGREEING) // 32 * blocks * TURNS))


def _capacity(op) -> int:
    """Bytes of bfloat16 that a launch takes; of other types, fewer elements."""
    return _chunks(op) * (op.n_pes if shots_of(op.n_pes) == 2 else 1) * CHUNK * torch.bfloat16.itemsize


def _buffers(op) -> BufferSpecs:
    shots, n = shots_of(op.n_pes), op.n_pes
    return {
        "data": ((2, shots, _chunks(op), n * ROWS, 32, UNIT), torch.uint8),
        "exponents": ((2, shots, _chunks(op), n, 4), torch.float32),
        "tags": ((2, n, _geometry(op)[1], 4), torch.float32),
    }


def _launch(op, memory: dict[str, torch.Tensor], call: Call) -> Again:
    dtype, aligned = call.out.dtype, is_aligned(VECTOR_BYTES, call.out, call.x)

    def make() -> Launch:
        dependent = settings.DEPENDENT_LAUNCH.get() and op.device.type == "cuda"
        kernel = all_reduce_fp8(op.n_pes, dtype_name(dtype), _chunks(op), aligned, *_geometry(op), LAG, dependent)
        constants = memory | {"data": memory["data"].view(torch.float8_e4m3fn), "status": op.status_record}
        return Launch(kernel, constants, ("tag", "out", "x"), op.world, forms={"out": FLAT, "x": FLAT})

    again: Callable[[torch.Tensor, torch.Tensor], None]
    again = functools.partial(op.prepared(("fp8", dtype, aligned), make), call.tag)
    again(call.out, call.x)
    return again


ALL_REDUCE_FP8 = Algorithm(
    "fp8",
    _launch,
    capacity=_capacity,
    buffers=_buffers,
    counters=lambda op: {"calls": _geometry(op)[1]},
    dtypes=DTYPES,
    is_exact=False,
)
