"""All-reduce fused with neighbouring operators of a transformer's layer: the weighted sum of a token's experts before it;
bias, residual, RMSNorm and quantisation to FP8 after it.

Rows are sent as in all_reduce_push.py, in one shot or two. The block that has summed or received a row keeps it in registers
and normalises it. If PEs are on other nodes, AllReduce sums and the same kernel does the rest. Results are bitwise equal
either way, and a row's bits do not depend on other rows.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.compiler.jit import compile_together
from tilescale_net.runtime import settings
from tilescale_net.runtime.launch_args import tensor_check
from tilescale_net.runtime.profiling import named

from .algorithms import BufferSpecs
from .all_reduce import AllReduce
from .all_reduce_push import AGREEING, DTYPES, add_rows, meet_blocks
from .collective import (
    EXACT_SUMS,
    EXPLICIT_SYNC,
    STATUS_WORDS,
    Collective,
    all_agree,
    count_call,
    dtype_name,
    is_integer,
)
from .launches import FLAT, Launch
from .moe.row_ops import FP8, FP8_MAX, GROUP, SMALLEST_AMAX
from .sums import VECTOR_BYTES, vector_of

FP8_DTYPE = torch.float8_e4m3fn

# Most vectors of summed rows per thread during normalisation.
MOST_VECTORS = 4

# Granularity of FP8 scales: the whole tensor (the caller's scale), a row, or 128 elements of a row.
PER_TENSOR, PER_TOKEN, PER_BLOCK = "tensor", "token", "block"
# Also per block, with scales rounded up to powers of two: as float32, or as exponents (UE8M0), four in an int32.
UE8M0, UE8M0_PACKED = "ue8m0", "ue8m0_packed"
BY_BLOCK = PER_BLOCK, UE8M0, UE8M0_PACKED


# Most blocks that share rows of two shots; each number has its own kernel.
SPREADS = (4, 2, 1)

# Choices of a token, and rows of choices that a thread has in flight at once.
MOST_CHOICES, ROWS_AT_ONCE = 32, 4

# Description of a call in errors, by the presence of residual, bias, total and out.
_DESCRIPTIONS = {
    flags: "with "
    + (", ".join(n for n, present in zip(("residual", "bias", "total", "out"), flags) if present) or "nothing")
    for flags in itertools.product((False, True), repeat=4)
}


@tsn.macro
def load_vector(row, u, elements, at, dtype):
    """row[u] = the vector that begins at element `at`."""
    for v in T.vectorized(vector_of(dtype)):
        row[u, v] = elements[at + v]


@tsn.macro
def add_vector(sums, rows, u, dtype):
    """sums (float32) += rows[u]."""
    for v in T.unroll(vector_of(dtype)):
        sums[v] += T.cast(rows[u, v], "float32")


class Experts(NamedTuple):
    """Inputs of a token's row; see `ExpertRows`. `top_k`: 0 if `x` has the tokens' rows.

    Attributes:
        row_index, weights: [tokens, top_k]. shared: [tokens * hidden]. shares: int32, whether `shared` is used.
    """

    top_k: int
    row_index: Any
    weights: Any
    shared: Any
    shares: Any


@tsn.macro
def load_input(row, u, x, experts, token, i, hidden, dtype):
    """row[u] = vector `i` of a token's row: of `x`, or of the sum of its experts' rows in `x`, rounded."""
    vector, top_k = vector_of(dtype), experts.top_k
    if top_k == 0:
        load_vector(row, u, x, token * hidden + i * vector, dtype)
    else:
        loaded = T.alloc_local((ROWS_AT_ONCE, vector), dtype)
        from_row = T.alloc_local((ROWS_AT_ONCE,), "int32")
        total = T.alloc_local((vector,), "float32")
        T.clear(total)
        for first in T.unroll(-(-top_k // ROWS_AT_ONCE)):
            for g in T.unroll(ROWS_AT_ONCE):
                from_row[g] = -1
                if first * ROWS_AT_ONCE + g < top_k:
                    from_row[g] = experts.row_index[token, first * ROWS_AT_ONCE + g]
            for g in T.unroll(ROWS_AT_ONCE):
                if from_row[g] >= 0:
                    for v in T.vectorized(vector):
                        loaded[g, v] = x[from_row[g], i * vector + v]
            for g in T.unroll(ROWS_AT_ONCE):
                if from_row[g] >= 0:
                    for v in T.unroll(vector):
                        total[v] += experts.weights[token, first * ROWS_AT_ONCE + g] * T.cast(loaded[g, v], "float32")
        if experts.shares != 0:
            load_vector(loaded, 0, experts.shared, token * hidden + i * vector, dtype)
            add_vector(total, loaded, 0, dtype)
        for v in T.vectorized(vector):  # see `narrow`
            row[u, v] = T.cast(total[v], dtype)


def in_pairs(combine: Callable[[Any, Any], Any], values: list[Any]) -> Any:
    """Reduce values pairwise: short dependency chains, in an order that depends only on their number."""
    while len(values) > 1:
        values = [combine(*values[i : i + 2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
    return values[0]


total_of, largest_of = (functools.partial(in_pairs, combine) for combine in (operator.add, T.max))


def squares_of(values: Any, dtype: str) -> list[Any]:
    """Squares of a float32 vector."""
    return [values[v] * values[v] for v in range(vector_of(dtype))]


def magnitudes_of(values: Any, dtype: str) -> list[Any]:
    """Magnitudes of a float32 vector."""
    return [T.abs(values[v]) for v in range(vector_of(dtype))]


def elements_of(values: Any, *index: Any, count: int) -> list[Any]:
    """values[*index, 0 : count], as a list."""
    return [values[at] for at in ((*index, i) for i in range(count))]


def exchanges_of(count: int, lanes: int) -> list[tuple[int, int, bool]]:
    """Steps in which `lanes` lanes reduce as many vectors of `count` numbers: (bit of the lane number in which partners
    differ, numbers that each lane keeps, whether that halves them)."""
    steps, bit = [], lanes // 2
    while bit:
        steps.append((bit, max(1, count // 2), count > 1))
        count, bit = max(1, count // 2), bit // 2
    return steps


@tsn.macro
def reduce_lanes(values, count, lanes, thread, combine):
    """values[0] = values[k] of `lanes` neighbours, reduced; k = thread % lanes // (lanes // count). `values`: float32 [count],
    a power of two of at most `lanes`. `combine`: commutative; bits are those of a butterfly that begins with the farthest
    lanes. Called by whole warps."""
    for bit, left, halves in exchanges_of(count, lanes):
        for k in T.unroll(left):
            if halves:
                upper = (thread & bit) != 0
                local = T.if_then_else(upper, values[k + left], values[k])
                outgoing = T.if_then_else(upper, values[k], values[k + left])
                values[k] = combine([local, T.shfl_xor(outgoing, bit)])
            else:
                values[k] = combine([values[k], T.shfl_xor(values[k], bit)])


@tsn.macro
def widen(wide, rows, u, g, dtype):
    """wide (float32) = rows[u, g]."""
    for v in T.vectorized(vector_of(dtype)):  # converted in pairs
        wide[v] = T.cast(rows[u, g, v], "float32")


@tsn.macro
def narrow(rows, u, g, wide, dtype):
    """rows[u, g] = `wide`, rounded."""
    for v in T.vectorized(vector_of(dtype)):  # in pairs, because single conversions take eight times as long
        rows[u, g, v] = T.cast(wide[v], dtype)


@tsn.macro
def store_fp8(quantized, at, row, h, g, factor, dtype):
    """quantized[at …] = row[h, g] * factor; the conversion saturates at FP8's largest number, and NaN stays NaN."""
    wide = T.alloc_local((vector_of(dtype),), "float32")
    widen(wide, row, h, g, dtype)
    for v in T.unroll(vector_of(dtype)):
        wide[v] *= factor
    for v in T.vectorized(vector_of(dtype)):
        quantized[at + v] = T.cast(wide[v], FP8)


@tsn.jit(name="all_reduce_norm", pass_configs=EXPLICIT_SYNC, compile_flags=[EXACT_SUMS])
def all_reduce_norm(
    n_pes, dtype, hidden, capacity, shots, threads=512, max_blocks=64, top_k=0, scaled_by="", dependent=False, spread=1
):
    """Kernel with the parameters below, on rows of `hidden` elements.

    The sum over all PEs of `x` is rounded; bias and residual are added in float32, and the result, rounded, is `total`.
    `out` is `total` divided by the root of the mean of its squares and `eps`, times `weight` + `weight_bias`, rounded once.
    `quantized` is `out` divided by its scale, rounded to FP8.

    Args:
        n_pes: number of PEs, at most `threads`; all of them mapped.
        dtype: dtype of `out`, `x`, `residual`, `total` [rows * hidden], `bias`, `weight` [hidden]; a row is a multiple of 16
            bytes.
        capacity: most rows of a part in a call.
        shots: as in `all_reduce_push`, with parts of whole rows; 0: `x` is a sum already.
        threads, max_blocks: launch geometry; one block per row of a part, at most `max_blocks`, all resident.
        top_k: rows of `x` [any, hidden] summed for a token's row, see `Experts`; 0: `x` has the tokens' rows.
        scaled_by: "", or the granularity of scales: "tensor" (`scales` [1] is read), "token" or "block" (of 128 elements;
            `scales` of row r and block b is written to element r * scale_row + b * scale_column), "ue8m0" (the same with
            powers of two) or "ue8m0_packed" (the exponent, with float32's bias, is written to byte b % 4 of the word r *
            scale_row + b // 4 * scale_column; `scales` is passed as bytes).
        dependent: as in `all_reduce_push`.
        spread: with two shots, blocks that share a row of each part, a divisor of `n_pes`: each sums an equal share of the
            columns, and normalises the rows of an equal share of the parts, so few rows occupy more SMs. 1 if `out` is
            `x`, because only the thread that has read an element may write it.

    `resumes`, `biased`, `keeps`, `norms` and `shares`: whether `residual`, `bias`, `total`, `out` and `shared` are used.
    `inbox` [2, shots, n_pes, capacity * hidden / vector, vector], `tag`, `status`, `tags` and `calls` as in
    `all_reduce_push`; unused without shots.
    """
    tokens, count = T.dynamic("tokens", "int64"), T.dynamic("count", "int64")
    vector = vector_of(dtype)
    width = hidden // vector  # vectors of a row
    workers = threads - AGREEING if shots else threads
    per_thread = -(-width // workers)  # vectors of a row per thread
    parts = n_pes if shots == 2 else 1
    columns = -(-width // spread)  # vectors of a row that a block sums
    summed = -(-columns // workers)  # of these per thread
    # Parts whose rows a block normalises, and rows of a part that all blocks take at once.
    own_parts, rows_at_once = parts // spread, max_blocks // spread
    # Rows that a block normalises at once, one of each part.
    group = next(
        g for g in range(own_parts, 0, -1) if own_parts % g == 0 and (g * per_thread <= MOST_VECTORS or g == 1)
    )
    steps, warps = own_parts // group, workers // 32
    lanes = GROUP // vector  # lanes whose vectors share a block's scale
    # Rows, and vectors of a thread, whose sums or peaks lanes reduce at once.
    many_rows, many_vectors = (1 << (count - 1).bit_length() for count in (group, per_thread * group))

    def flat(name: str, dtype: str = dtype) -> Any:
        return T.Tensor((T.dynamic(f"{name}_count", "int64"),), dtype)

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: flat("out"),
        x: T.Tensor((T.dynamic("expert_rows"), hidden), dtype) if top_k else T.Tensor((count,), dtype),
        row_index: T.Tensor((tokens, top_k), "int32") if top_k else None,
        expert_weights: T.Tensor((tokens, top_k), "float32") if top_k else None,
        shared: flat("shared") if top_k else None,
        residual: flat("residual"),
        total: flat("total"),
        bias: T.Tensor((hidden,), dtype),
        weight: T.Tensor((hidden,), dtype),
        quantized: flat("quantized", FP8) if scaled_by else None,
        scales: flat("scales", "uint8" if scaled_by == UE8M0_PACKED else "float32") if scaled_by else None,
        scale_row: T.int64,
        scale_column: T.int64,
        eps: T.float32,
        weight_bias: T.float32,
        resumes: T.int32,
        biased: T.int32,
        keeps: T.int32,
        norms: T.int32,
        shares: T.int32,
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        inbox: T.Tensor((2, max(shots, 1), n_pes, capacity * width, vector), dtype),
        tags: T.Tensor((2, n_pes, max_blocks, vector), dtype),
        calls: T.Tensor((max_blocks,), "uint64"),
    ):
        with T.Kernel(
            T.min(
                T.ceildiv(tokens if top_k else count, T.int64(parts * (1 if top_k else hidden))), T.int64(rows_at_once)
            )
            * spread,
            threads=threads,
        ) as block:
            if dependent:
                T.pdl_sync()
                T.pdl_trigger()
            me = N.my_pe()
            thread = T.get_thread_binding()
            # One per warp; steps alternate between two halves, so each needs only one barrier. Rows begin at 16 bytes.
            slots, row_peaks = (T.alloc_shared((2, group, (warps + 3) // 4 * 4), "float32") for _ in range(2))
            agrees = T.alloc_shared((n_pes,), "int32")
            got = T.alloc_local((n_pes, vector), dtype)
            own = T.alloc_local((per_thread, vector), dtype)
            row = T.alloc_local((per_thread, group, vector), dtype)
            sums = T.alloc_local((vector,), "float32")
            squares = T.alloc_local((many_rows,), "float32")
            wide_factors = T.alloc_local((vector,), "float32")
            peaks = T.alloc_local((many_rows if scaled_by == PER_TOKEN else many_vectors,), "float32")
            factors = T.alloc_local((per_thread, vector), dtype)
            before = T.alloc_local((per_thread * group, vector), dtype)
            extra = T.alloc_local((1, vector), dtype)
            factor, peak = T.alloc_var("float32"), T.alloc_var("float32")
            step_up = T.alloc_var("int32")
            agreed = T.alloc_var("int32", 1)
            call = T.alloc_var("uint64", calls[block] + T.uint64(1))
            half = T.cast(call % T.uint64(2), "int32")
            rows = T.alloc_var("int64", tokens if top_k else count // T.int64(hidden))
            part = T.alloc_var("int64", T.ceildiv(rows, T.int64(parts)))
            experts = Experts(top_k, row_index, expert_weights, shared, shares)
            piece = T.cast(block % spread, "int32")
            # A thread beyond the workers has no vector.
            lane = T.alloc_var("int32", T.if_then_else(thread < workers, thread, width))
            if scaled_by == PER_TENSOR:
                factor = T.float32(1) / scales[0]
            if shots > 0:
                if thread >= workers:
                    meet_blocks(agrees, tags, half, block, call, tag, status, thread - workers, me, n_pes, dtype)
            if shots < 2:
                for h in T.unroll(per_thread):
                    i = h * workers + lane
                    if i < width:
                        load_vector(factors, h, weight, i * vector, dtype)
            for turn in T.serial(T.ceildiv(part - block // spread, T.int64(rows_at_once))):
                r = block // spread + turn * T.int64(rows_at_once)
                # Clear variables that are set conditionally, so they take no register from turn to turn.
                T.clear(own)
                # Send rows to the PEs that sum them.
                for h in T.unroll(summed):
                    i = piece * columns + h * workers + lane
                    if i < T.min(piece * columns + columns, width):
                        if shots < 2:
                            load_input(own, h, x, experts, r, i, hidden, dtype)
                        if shots == 2 and not top_k:
                            for hop in T.unroll(n_pes):
                                of = (me + hop + 1) % n_pes * part + r
                                for v in T.vectorized(vector):
                                    got[hop, v] = T.cast(0, dtype)
                                if of < rows:
                                    load_input(got, hop, x, experts, of, i, hidden, dtype)
                        if shots > 0 and (shots < 2 or not top_k):
                            N.put_vectors(
                                inbox[half, 0, me, r * width + i, 0:vector],
                                got[0:n_pes, 0:vector] if shots == 2 else own[h, 0:vector], n_pes, (me + 1) % n_pes,
                            )  # fmt: skip
                        if shots == 2 and top_k:  # one after the other, because a sum takes registers
                            for hop in T.serial(n_pes):
                                of = (me + hop + 1) % n_pes * part + r
                                if of < rows:
                                    load_input(own, h, x, experts, of, i, hidden, dtype)
                                N.put_vector(
                                    inbox[half, 0, me, r * width + i, 0:vector], own[h, 0:vector], (me + hop + 1) % n_pes
                                )  # fmt: skip
                if shots < 2 and resumes != 0:
                    for h in T.unroll(per_thread):
                        i = h * workers + lane
                        if i < width:
                            load_vector(before, h, residual, r * hidden + i * vector, dtype)
                # Sum one row and send it to all.
                if shots > 0:
                    for h in T.unroll(summed):
                        i = piece * columns + h * workers + lane
                        if i < T.min(piece * columns + columns, width):
                            N.take_vectors(got, inbox[half, 0, 0:n_pes, r * width + i, 0:vector])
                            add_rows(own, h, got, 0, n_pes, dtype)
                            if shots == 2:
                                N.put_vectors(
                                    inbox[half, 1, me, r * width + i, 0:vector], own[h, 0:vector], n_pes,
                                    (me + 1) % n_pes,
                                )  # fmt: skip
                    if turn == 0:
                        T.sync_threads()
                        all_agree(agreed, agrees, n_pes)
                # Add bias and residual to rows of some parts at once, and normalise them. Missing rows and vectors are also
                # computed, without a branch, but not stored.
                for step in T.serial(steps):
                    first = piece * own_parts + step * group  # part
                    phase = T.cast((turn * steps + step) % T.int64(2), "int32")
                    T.clear(row)
                    if shots == 2:  # before the wait, which hides the latency of loads
                        T.clear(factors)
                        T.clear(before)
                        for h in T.unroll(per_thread):
                            i = h * workers + lane
                            if i < width:
                                load_vector(factors, h, weight, i * vector, dtype)
                                for g in T.unroll(group):
                                    of = (first + g) * part + r
                                    if of < rows and resumes != 0:
                                        load_vector(before, h * group + g, residual, of * hidden + i * vector, dtype)
                    for g in T.unroll(many_rows):
                        squares[g] = T.float32(0)
                    for h in T.unroll(per_thread):
                        i = h * workers + lane
                        if i < width:
                            if shots == 2:
                                N.take_vectors(
                                    row[h, 0:group, 0:vector],
                                    inbox[half, 1, first : first + group, r * width + i, 0:vector],
                                )
                            else:
                                for v in T.unroll(vector):
                                    row[h, 0, v] = own[h, v]
                            if biased != 0:
                                load_vector(extra, 0, bias, i * vector, dtype)
                            for g in T.unroll(group):
                                of = (first + g) * part + r
                                widen(sums, row, h, g, dtype)
                                if biased != 0:
                                    add_vector(sums, extra, 0, dtype)
                                if resumes != 0:
                                    add_vector(sums, before, h * group + g, dtype)
                                narrow(row, h, g, sums, dtype)
                                if of < rows and keeps != 0 and agreed != 0:
                                    for v in T.vectorized(vector):
                                        total[of * hidden + i * vector + v] = row[h, g, v]
                                widen(sums, row, h, g, dtype)
                                squares[g] += total_of(squares_of(sums, dtype))
                    reduce_lanes(squares, many_rows, 32, thread, total_of)
                    g_of_lane = thread % 32 // (32 // many_rows)
                    if thread < workers and thread % (32 // many_rows) == 0 and g_of_lane < group:
                        slots[phase, g_of_lane, thread // 32] = squares[0]
                    T.sync_threads()
                    for g in T.unroll(group):
                        squares[g] = total_of(elements_of(slots, phase, g, count=warps))
                        squares[g] = T.float32(1) / T.sqrt(squares[g] / T.float32(hidden) + eps)
                    for k in T.unroll(many_rows if scaled_by == PER_TOKEN else many_vectors):
                        peaks[k] = T.float32(0)
                    for h in T.unroll(per_thread):
                        i = h * workers + lane
                        for v in T.unroll(vector):
                            wide_factors[v] = T.cast(factors[h, v], "float32") + weight_bias
                        for g in T.unroll(group):
                            of = (first + g) * part + r
                            widen(sums, row, h, g, dtype)
                            for v in T.unroll(vector):
                                sums[v] *= squares[g]
                                sums[v] *= wide_factors[v]
                            # Peaks are rounded later: rounding keeps the order.
                            if scaled_by in BY_BLOCK:
                                peaks[h * group + g] = largest_of(magnitudes_of(sums, dtype))
                            if scaled_by == PER_TOKEN:
                                peak = largest_of(magnitudes_of(sums, dtype))
                                peaks[g] = T.if_then_else(i < width, T.max(peaks[g], peak), peaks[g])
                            narrow(row, h, g, sums, dtype)
                            if norms != 0 and i < width and of < rows and agreed != 0:
                                for v in T.vectorized(vector):
                                    out[of * hidden + i * vector + v] = row[h, g, v]
                    if scaled_by == PER_TOKEN:
                        reduce_lanes(peaks, many_rows, 32, thread, largest_of)
                        if thread < workers and thread % (32 // many_rows) == 0 and g_of_lane < group:
                            row_peaks[phase, g_of_lane, thread // 32] = peaks[0]
                        T.sync_threads()
                    if scaled_by in BY_BLOCK:
                        # Lanes hold peaks of different vectors' blocks: of row g, vector h of the block's lanes.
                        reduce_lanes(peaks, many_vectors, lanes, thread, largest_of)
                        peak = T.max(T.float32(SMALLEST_AMAX), T.cast(T.cast(peaks[0], dtype), "float32"))
                        if scaled_by == PER_BLOCK:
                            factor = T.float32(FP8_MAX) / peak
                        else:
                            # The exponent of the least power of two that is not below the scale.
                            step_up = T.min((T.reinterpret(peak / T.float32(FP8_MAX), "int32") + 0x7FFFFF) >> 23, 254)
                            factor = T.reinterpret((254 - step_up) << 23, "float32")
                        for k in T.unroll(many_vectors):
                            peaks[k] = T.shfl_sync(factor, thread % 32 // lanes * lanes + k * (lanes // many_vectors))
                    if scaled_by != "":
                        for g in T.unroll(group):
                            of = (first + g) * part + r
                            if scaled_by == PER_TOKEN:
                                peak = largest_of(elements_of(row_peaks, phase, g, count=warps))
                                peak = T.max(T.float32(SMALLEST_AMAX), T.cast(T.cast(peak, dtype), "float32"))
                                factor = T.float32(FP8_MAX) / peak
                            for h in T.unroll(per_thread):
                                i = h * workers + lane
                                if scaled_by in BY_BLOCK:
                                    factor = peaks[h * group + g]
                                if i < width and of < rows and agreed != 0:
                                    store_fp8(quantized, of * hidden + i * vector, row, h, g, factor, dtype)
                            if scaled_by == PER_TOKEN:
                                if thread == 0 and of < rows and agreed != 0:
                                    scales[of * scale_row] = peak / T.float32(FP8_MAX)
                    if scaled_by in BY_BLOCK:
                        k = thread % lanes // (lanes // many_vectors)
                        i = k // group * workers + lane
                        of = (first + k % group) * part + r
                        if (
                            thread % (lanes // many_vectors) == 0
                            and k < per_thread * group
                            and i < width
                            and of < rows
                            and agreed != 0
                        ):
                            if scaled_by == UE8M0_PACKED:
                                word = of * scale_row + i // lanes // 4 * scale_column
                                scales[word * 4 + i // lanes % 4] = T.cast(step_up, "uint8")
                            else:
                                scales[of * scale_row + i // lanes * scale_column] = (
                                    peak / T.float32(FP8_MAX)
                                    if scaled_by == PER_BLOCK
                                    else T.reinterpret(step_up << 23, "float32")
                                )
            if shots > 0:
                used = T.min(part, T.int64(rows_at_once)) * spread
                count_call(calls, block, call, used, thread, threads, max_blocks)

    return main


@tsn.jit(name="sum_of_experts", pass_configs=EXPLICIT_SYNC, compile_flags=[EXACT_SUMS])
def sum_of_experts(dtype, hidden, top_k, threads=256):
    """Kernel `(out, x, row_index, expert_weights, shared, shares)`: the token rows that `all_reduce_norm` would sum
    from `Experts`, as input of another sum.

    Args:
        dtype: dtype of `out`, `shared` [tokens * hidden] and `x` [any, hidden]. hidden: elements of a row, a multiple of 16
            bytes. top_k: choices of a token. threads: threads per block; a block computes a row.
    """
    tokens, vector = T.dynamic("tokens", "int64"), vector_of(dtype)
    width = hidden // vector

    def flat(name: str) -> Any:
        return T.Tensor((T.dynamic(f"{name}_count", "int64"),), dtype)

    @T.prim_func
    def main(
        out: flat("out"),
        x: T.Tensor((T.dynamic("expert_rows"), hidden), dtype),
        row_index: T.Tensor((tokens, top_k), "int32"),
        expert_weights: T.Tensor((tokens, top_k), "float32"),
        shared: flat("shared"),
        shares: T.int32,
    ):
        with T.Kernel(tokens, threads=threads) as block:
            thread = T.get_thread_binding()
            experts = Experts(top_k, row_index, expert_weights, shared, shares)
            row = T.alloc_local((1, vector), dtype)
            for turn in T.serial(-(-width // threads)):
                i = turn * threads + thread
                if i < width:
                    load_input(row, 0, x, experts, T.cast(block, "int64"), i, hidden, dtype)
                    for v in T.vectorized(vector):
                        out[T.cast(block, "int64") * hidden + i * vector + v] = row[0, v]

    return main


class ExpertRows(NamedTuple):
    """The end of an MoE layer as input of `AllReduceNorm`: a token's row is the weighted sum of its experts' rows on this
    rank, and of the shared expert's; in float32, choice by choice, the shared one last, rounded once.

    Attributes:
        rows: results of this rank's experts, [any, hidden] of the norm's dtype.
        row_index: int32 [tokens, top_k]: row of each choice in `rows`; below 0: not on this rank.
        weights: float32 [tokens, top_k].
        shared: results of the shared expert, [tokens, hidden], or None.
    """

    rows: torch.Tensor
    row_index: torch.Tensor
    weights: torch.Tensor
    shared: torch.Tensor | None = None


class AllReduceNorm(Collective):
    """All-reduce, bias, residual, RMSNorm and quantisation in one call; constructed and called by all ranks.

    Args:
        hidden: elements of a row; a row is a multiple of 16 bytes, and at most 64 KiB.
        threads, blocks: launch geometry of the `AllReduce` for PEs on other nodes; other kernels derive it from `hidden`.
        group: the ranks; see `tilescale_net.world`.

    Attributes:
        shots: 1 or 2 steps over the links, if all PEs are mapped; None: by the size.
        spread: with 2 shots, blocks that share rows, a divisor of the number of PEs; None: by the size. Always 1 in place.

    Raises:
        ValueError: a launch geometry or a size that the kernels or the GPU cannot run.
        RankMismatch: ranks pass different arguments.
        HeapError: no room for the staging memory.
    """

    DTYPES = DTYPES
    LARGEST_ROW = 64 * 1024
    # Most bytes of one kernel in two shots; larger tensors take several.
    LARGEST_CALL = 8 << 20

    def __init__(self, hidden: int, *, threads: int = 512, blocks: int = 64, group: "tsn.Group" = None) -> None:
        if not is_integer(hidden):
            raise ValueError(f"AllReduceNorm: hidden is {hidden!r}; it must be a positive number of elements")
        super().__init__("AllReduceNorm", f"hidden={hidden}", threads, blocks, group)
        self.hidden = hidden
        self.shots: int | None = None
        self.spread: int | None = None
        self._warm: set[tuple[torch.dtype, str]] = set()
        self._all_reduce: AllReduce | None = None
        self._max_blocks = self.block_limit
        # Most rows for each number of sharing blocks.
        self._spreads = [(self._max_blocks // s * self.n_pes, s) for s in SPREADS if self.n_pes % s == 0]
        # Bytes up to which one shot is faster, measured on two and on four H100; a row at least.
        self._one_shot_bytes = max(self.LARGEST_ROW, (4 << 20) if self.n_pes == 2 else (5 << 20) // self.n_pes)
        if self.needs_symmetric_source:
            self._all_reduce = self._use(AllReduce(threads=threads, blocks=blocks, group=self._world))
        capacity = {1: self._one_shot_bytes, 2: -(-self.LARGEST_CALL // self.n_pes) + self.LARGEST_ROW}
        if self._all_reduce is not None or self.n_pes == 1:
            capacity |= {1: 0, 2: 0}
        # Whole rows of any dtype, so the halves are the same for all.
        widest = hidden * max(dtype.itemsize for dtype in self.DTYPES)
        specs: BufferSpecs = {
            f"inbox{n}": ((2, n, self.n_pes, -(-size // widest) * widest), torch.uint8)
            for n, size in capacity.items()
            if size
        }
        specs |= {"tags": ((2, self.n_pes, self._max_blocks, VECTOR_BYTES), torch.uint8)}
        self._memory = self.allocate(specs)
        self._calls = self.counters(self._max_blocks)
        with torch.inference_mode(False):
            # Placeholder for missing arguments.
            self._nothing = torch.zeros(hidden, dtype=torch.float32, device=self.device)
        # Checks of a tensor against these rows or this number of elements, in C++.
        self._are_rows, self._is_row = {}, {}
        for dtype in (*self.DTYPES, FP8_DTYPE):
            self._are_rows[dtype] = tensor_check((dtype,), self.device, (None, hidden), VECTOR_BYTES)
            self._is_row[dtype] = tensor_check((dtype,), self.device, (hidden,), VECTOR_BYTES)

    @named("tilescale_net.AllReduceNorm")
    def __call__(
        self, out: torch.Tensor | None, x: torch.Tensor | ExpertRows, weight: torch.Tensor, *,
        residual: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-6,
        weight_bias: float = 0.0, total: torch.Tensor | None = None, quantized: torch.Tensor | None = None,
        scales: torch.Tensor | None = None, scale: torch.Tensor | None = None, ue8m0: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """`out` becomes the RMSNorm of the sum over all PEs of `x`, plus bias and residual; asynchronous on the stream.

        Args:
            out, x: contiguous [..., hidden] of one of `DTYPES`, beginning at multiples of 16 bytes; may be the same tensor.
                Any number of rows. `out` may be None with `quantized`; `x` may be `ExpertRows` of as many tokens.
            weight: weight of the norm, [hidden].
            residual: [..., hidden]; added to the rounded sum. Without `total`, the total overwrites it.
            bias: [hidden]; added to the rounded sum first. All PEs pass the same.
            eps: added to the mean of the squares.
            weight_bias: added to `weight`; 1 for Gemma.
            total: [..., hidden]; becomes the sum plus bias and residual, and `residual` stays unchanged; may be `residual`.
            quantized: float8_e4m3fn [..., hidden]; becomes the rounded `out` divided by its scale.
            scales: float32; becomes the factors of `quantized`. [rows, 1]: a scale for each row; [rows, hidden / 128]: for
                each 128 elements. Of any strides: `new_scales` makes the layouts of vLLM's and DeepGEMM's GEMMs. int32
                [rows, ceil(hidden / 512)]: exponents of such scales, see `ue8m0`, four in a word, the lowest byte first, as
                DeepGEMM needs them on newer GPUs; bytes without a block are not written.
            scale: float32, one element, instead of `scales`: the scale of all elements. Quotients beyond 448 become 448.
            ue8m0: scales of 128 elements are rounded up to powers of two; int32 ones always are.

        Returns:
            `out`, or `quantized` without it. Sums have the bits of `AllReduce`; bias, residual and norm are computed in
            float32. The scale of a row or block is its largest absolute value, at least 1e-4, divided by 448.

        Raises:
            TypeError, ValueError: a wrong argument, by name; nothing was sent.
            RankMismatch: ranks pass different arguments. Raised at once for new arguments, else by the next call or `check`.
        """
        self._begin()
        like = out if out is not None else quantized
        if like is None:
            raise ValueError(f"{self.name}: neither out nor quantized is given; nothing would be computed")
        experts, rows_of_x, plain = (x, x.rows, None) if isinstance(x, ExpertRows) else (None, x, x)
        if total is None:
            total = residual
        tensors = {"out": out, "x": plain, "residual": residual, "total": total, "quantized": quantized}
        if experts is not None or not self._are_plain(tensors, weight, bias):
            self._check_all(tensors, experts, rows_of_x, weight, bias)
        for name, value in (("eps", eps), ("weight_bias", weight_bias)):
            if type(value) is not float or not 0 <= value < math.inf:
                self._check_number(name, value, 0 if name == "eps" else -math.inf)
        scaled_by = self._scaled_by(like, quantized, scales, scale, ue8m0)
        written = scales if scale is None else None
        self._check_all_apart(tensors | {"scales": written, "weight": weight, "bias": bias}, experts)
        flags = residual is not None, bias is not None, total is not None, out is not None
        tag = self._agree(
            "{} of shape {} and {}, {}, eps {}, weight_bias {}", "rows" if experts is None else "sums of experts", like.shape,
            rows_of_x.dtype, _DESCRIPTIONS[flags], eps, weight_bias,
        )  # fmt: skip
        rows = like.numel() // self.hidden
        if not rows:
            return like
        if self._all_reduce is not None:
            sums = torch.empty(like.shape, dtype=rows_of_x.dtype, device=self.device) if out is None else out
            if experts is not None:
                self._sum_of_experts(sums, experts)
                self._all_reduce(sums)
            else:
                self._all_reduce(sums, rows_of_x)
            rows_of_x, experts = sums, None
        key = scaled_by, float(eps), float(weight_bias), flags
        shots, most = self._shots_and_rows(rows, rows_of_x.element_size())
        if rows <= most:
            self._launch(
                shots, key, tag, out, rows_of_x, experts, residual, total, bias, weight, quantized, scales, scale
            )
            return like
        for first in range(0, rows, most):

            def piece(tensor, first=first):
                return None if tensor is None else tensor.view(-1, tensor.shape[-1])[first : first + most]

            mine = None if experts is None else ExpertRows(rows_of_x, *map(piece, experts[1:]))
            self._launch(
                shots, key, tag, piece(out), rows_of_x if mine is not None else piece(rows_of_x), mine, piece(residual),
                piece(total), bias, weight, piece(quantized), None if scales is None else scales[first : first + most], scale,
            )  # fmt: skip
        return like

    def compile(self, dtype: torch.dtype, forms: Sequence[tuple[str, int]] = (("", 0),)) -> None:
        """Compile the kernels for rows of a dtype, whatever their number, at the same time; else calls compile one by one.

        Args:
            dtype: one of `DTYPES`.
            forms: for each form of a call, the granularity of its FP8 scales ("tensor", "token" or "block"; "": none),
                and choices of a token in its `ExpertRows` (0: none).
        """
        self._check_alive()
        ways = (0,) if self.n_pes == 1 or self._all_reduce is not None else (1, 2)
        topology = self._world.topology
        calls = [
            functools.partial(self._kernel, shots, spread, dtype, top_k, scaled_by)
            for shots in ways
            for spread in ([spread for _, spread in self._spreads] if shots == 2 else [1])
            for scaled_by, top_k in forms
        ]
        compile_together(calls, self.device, topology.local_rank, topology.node_size)

    def warm_up(self, dtype: torch.dtype, by: str = "") -> None:
        """Make the kernels for rows of a dtype, whatever their number: later calls may be captured into a CUDA graph.

        Collective if it is the first for the dtype and `by`; does nothing while a graph is captured.

        Args:
            dtype: one of `DTYPES`.
            by: "", or the granularity of FP8 scales: "tensor", "token" or "block".
        """
        self._check_alive()
        on_gpu = self._world.device.type == "cuda"
        if (dtype, by) in self._warm or (on_gpu and torch.cuda.is_current_stream_capturing()):
            return
        self._warm.add((dtype, by))
        self.compile(dtype, ((by, 0),))
        x, residual, weight = (torch.zeros(self.hidden, dtype=dtype, device=self.device) for _ in range(3))
        fp8: dict[str, Any] = {}
        if by:
            fp8 = {"quantized": torch.zeros(self.hidden, dtype=FP8_DTYPE, device=self.device)}
            if by == PER_TENSOR:
                fp8["scale"] = torch.ones(1, dtype=torch.float32, device=self.device)
            else:
                fp8["scales"] = self.new_scales(1, by)
        forced = self.shots, self.spread
        try:
            for shots, spread in [(1, None), *((2, spread) for _, spread in self._spreads)]:
                self.shots, self.spread = shots, spread
                self(torch.empty_like(x), x, weight, residual=residual, **fp8)
        finally:
            self.shots, self.spread = forced

    def new_scales(self, rows: int, by: str = "block", layout: str = "row") -> torch.Tensor:
        """Memory for the `scales` of a call.

        Args:
            rows: rows of the call.
            by: "token": a scale for each row; "block" or "ue8m0": for each 128 elements; "ue8m0_packed": the exponents of
                these, four in an int32. All are zero at first.
            layout: "row": contiguous, for vLLM's CUTLASS GEMMs with scales of tokens; "column": the scales of one block of
                all rows are contiguous, for its GEMMs by block; "tma": the same, each column beginning at a multiple of 16
                bytes, for DeepGEMM.

        Returns:
            float32 [rows, 1] or [rows, hidden / 128], or int32 [rows, ceil(hidden / 512)].
        """
        return scales_like(self._nothing, rows, self.hidden, by, layout)

    def _shots_and_rows(self, rows: int, itemsize: int) -> tuple[int, int]:
        """Steps over the links, and rows that one kernel takes."""
        row = self.hidden * itemsize
        if self.n_pes == 1 or self._all_reduce is not None:
            return 0, rows
        if (self.shots or (1 if rows * row <= self._one_shot_bytes else 2)) == 1:
            return 1, self._one_shot_bytes // row
        return 2, self._memory["inbox2"].shape[3] // row * self.n_pes

    def _spread_of(self, rows: int) -> int:
        """Two shots: blocks per row of each part, as many as can run at once."""
        if self.spread:
            return self.spread
        for most, spread in self._spreads:
            if rows <= most:
                return spread
        return 1

    def _launch(
        self, shots: int, key: tuple[str, float, float, tuple[bool, ...]], tag: int, out: torch.Tensor | None,
        x: torch.Tensor, experts: ExpertRows | None, residual: torch.Tensor | None, total: torch.Tensor | None,
        bias: torch.Tensor | None, weight: torch.Tensor, quantized: torch.Tensor | None, scales: torch.Tensor | None,
        scale: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """One kernel, for whole rows."""
        top_k = experts.row_index.shape[-1] if experts is not None else 0
        shares = experts is not None and experts.shared is not None
        spread = 1
        if shots == 2 and (out is None or out.data_ptr() != x.data_ptr()):
            spread = self._spread_of(experts.row_index.numel() // top_k if experts else x.numel() // self.hidden)
        launch = self.prepared(
            (shots, spread, x.dtype, top_k, shares, key),
            lambda: self._prepare(shots, spread, x.dtype, top_k, shares, *key),
        )
        arguments: list[Any] = [tag, x, weight, out, residual, total, bias]
        if experts is not None:
            arguments += [experts.row_index, experts.weights, experts.shared]
        if key[0] == PER_TENSOR:
            arguments += [quantized, scale, 0, 0]
        elif key[0]:
            assert scales is not None
            (rows, columns), (row_stride, column_stride) = scales.shape, scales.stride()
            flat = scales.as_strided(((rows - 1) * row_stride + (columns - 1) * column_stride + 1,), (1,))
            arguments += [quantized, flat, row_stride, column_stride]
        self._launch_checked(launch, *arguments)

    def _kernel(self, shots: int, spread: int, dtype: torch.dtype, top_k: int, scaled_by: str) -> Any:
        width = self.hidden * dtype.itemsize // VECTOR_BYTES
        # As few vectors per thread as possible, then as few threads; the same with and without shots, so squares are
        # summed in the same order.
        workers = -(-width // -(-width // (1024 - AGREEING)) // 32) * 32
        return all_reduce_norm(
            self.n_pes, dtype_name(dtype), self.hidden, self._capacity(shots, dtype), shots, workers + (AGREEING if shots else 0),
            self._max_blocks, top_k, scaled_by, settings.DEPENDENT_LAUNCH.get() and self.device.type == "cuda", spread,
        )  # fmt: skip

    def _capacity(self, shots: int, dtype: torch.dtype) -> int:
        """Most rows of a part in a call."""
        return self._memory[f"inbox{shots}"].shape[3] // (self.hidden * dtype.itemsize) if shots else 0

    def _prepare(
        self, shots: int, spread: int, dtype: torch.dtype, top_k: int, shares: bool, scaled_by: str, eps: float,
        weight_bias: float, flags: tuple[bool, ...],
    ) -> Launch:  # fmt: skip
        vector = VECTOR_BYTES // dtype.itemsize
        width = self.hidden // vector
        capacity, inbox = self._capacity(shots, dtype), self._memory["tags"].view(dtype).view(-1)[:0]
        if shots:
            inbox = self._memory[f"inbox{shots}"].view(-1).view(dtype)
        kernel = self._kernel(shots, spread, dtype, top_k, scaled_by)
        constants: dict[str, object] = dict(
            zip(("resumes", "biased", "keeps", "norms", "shares"), map(int, (*flags, shares)))
        )
        constants |= {
            "eps": eps, "weight_bias": weight_bias, "status": self.status_record, "tags": self._memory["tags"].view(dtype),
            "inbox": inbox.view(2, max(shots, 1), self.n_pes, capacity * width, vector), "calls": self._calls,
        }  # fmt: skip
        none = self._nothing.view(dtype)[: self.hidden]
        parameters: list[str] = ["tag", "x", "weight", "out", "residual", "total", "bias"]
        if top_k:
            parameters += ["row_index", "expert_weights", "shared"]
        if scaled_by:
            parameters += ["quantized", "scales", "scale_row", "scale_column"]
        else:
            constants |= {"scale_row": 0, "scale_column": 0}
        flat = ("x", "out", "residual", "total", "shared", "quantized", "scales")
        forms = {name: FLAT for name in flat if name in parameters}
        if scaled_by == UE8M0_PACKED:
            forms["scales"] = (-1,), torch.uint8
        forms |= {name: ((-1, top_k), None) for name in ("row_index", "expert_weights") if name in parameters}
        if top_k:
            forms["x"] = (-1, self.hidden), None
        missing: dict[str, torch.Tensor] = {
            name: none for name in ("out", "residual", "total", "bias", "shared") if name in parameters
        }
        return Launch(kernel, constants, parameters, self._world, forms=forms, placeholders=missing)

    def _sum_of_experts(self, out: torch.Tensor, experts: ExpertRows) -> None:
        kernel = sum_of_experts(dtype_name(out.dtype), self.hidden, experts.row_index.shape[-1])
        shared = out if experts.shared is None else experts.shared
        tokens = out.numel() // self.hidden
        kernel(
            out.view(-1), experts.rows.view(-1, self.hidden), experts.row_index.view(tokens, -1), experts.weights.view(tokens, -1), shared.view(-1),
            int(experts.shared is not None),
        )  # fmt: skip

    # -- checks -----------------------------------------------------------------------------------------------------

    def _are_plain(
        self, tensors: dict[str, torch.Tensor | None], weight: torch.Tensor, bias: torch.Tensor | None
    ) -> bool:
        """Whether all tensors are matrices with the same number of rows, dtype and device; False if unknown."""
        x = tensors["x"]
        if type(x) is not torch.Tensor or x.dim() != 2 or x.dtype not in self.DTYPES:
            return False
        dtype, is_row = x.dtype, self._is_row[x.dtype]
        rows, row = x.shape[0], self.hidden * dtype.itemsize
        return (
            row % VECTOR_BYTES == 0
            and row <= self.LARGEST_ROW
            and is_row(weight)
            and (bias is None or is_row(bias))
            and all(
                t is None or self._are_rows[FP8_DTYPE if name == "quantized" else dtype](t, rows)
                for name, t in tensors.items()
            )
        )

    def _check_all(
        self, tensors: dict[str, torch.Tensor | None], experts: ExpertRows | None, x: torch.Tensor, weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Raise TypeError or ValueError, which name the argument, for a tensor that does not fit."""
        like, like_name = next((tensors[name], name) for name in ("out", "quantized") if tensors[name] is not None)
        assert like is not None
        self._check(like_name, like)
        shape = (*like.shape[:-1], self.hidden)
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{self.name}: x must be a tensor or ExpertRows, not {type(x).__name__}")
        dtype = like.dtype if like_name == "out" else x.dtype
        for name, tensor in tensors.items():
            if tensor is not None:
                self._check_rows(name, tensor, FP8_DTYPE if name == "quantized" else dtype, shape)
        for name, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None or name == "weight":
                self._check_rows(name, tensor, dtype, (self.hidden,))
        if experts is None:
            return
        self._check_rows("rows", x, dtype, (*x.shape[:-1], self.hidden))
        if experts.shared is not None:
            self._check_rows("shared", experts.shared, dtype, shape)
        self._check("row_index", experts.row_index, torch.int32)
        self._check("weights", experts.weights, torch.float32)
        expected = f"[{', '.join(map(str, shape[:-1]))}{', ' if shape[:-1] else ''}top_k]"
        for name, tensor in (("row_index", experts.row_index), ("weights", experts.weights)):
            if (
                tensor.shape != experts.row_index.shape
                or tensor.shape[:-1] != like.shape[:-1]
                or not 0 < tensor.shape[-1] <= MOST_CHOICES
            ):
                raise ValueError(
                    f"{self.name}: {name} has shape {list(tensor.shape)}; row_index and weights must be {expected} with top_k from 1 to "
                    f"{MOST_CHOICES}"
                )

    def _check_number(self, name: str, value: object, least: float) -> None:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not least <= value < math.inf
            or value == -math.inf
        ):
            bound = " of 0 or more" if least == 0 else ""
            raise ValueError(f"{self.name}: {name} is {value!r}; it must be a finite number{bound}")

    def _scaled_by(
        self, like: torch.Tensor, quantized: torch.Tensor | None, scales: torch.Tensor | None,
        scale: torch.Tensor | None, ue8m0: bool,
    ) -> str:  # fmt: skip
        """Granularity of the scales of `quantized`; "" without it. Raises TypeError or ValueError for scales that do
        not fit."""
        if quantized is None:
            if scales is not None or scale is not None or ue8m0:
                raise ValueError(f"{self.name}: scales are given, but no quantized tensor that they are of")
            return ""
        if (scales is None) == (scale is None):
            raise ValueError(f"{self.name}: pass either scales (written, of rows or blocks) or scale (read, of all)")
        if scale is not None:
            self._check("scale", scale, torch.float32)
            if scale.numel() != 1:
                raise ValueError(f"{self.name}: scale has shape {list(scale.shape)}; it must be one element")
            return PER_TENSOR
        assert scales is not None
        known = torch.float32, torch.int32
        if not isinstance(scales, torch.Tensor) or scales.dtype not in known or scales.device != self.device:
            kind = f"{scales.dtype} on {scales.device}" if isinstance(scales, torch.Tensor) else type(scales).__name__
            raise TypeError(f"{self.name}: scales is {kind}; it must be a float32 or int32 tensor on {self.device}")
        rows, blocks = like.numel() // self.hidden, self.hidden // GROUP if self.hidden % GROUP == 0 else 0
        packed = scales.dtype == torch.int32
        wide = -(-blocks // 4) if packed else blocks
        allowed = {wide} - {0} if packed or ue8m0 else {1, wide} - {0}
        if scales.dim() != 2 or scales.shape[0] != rows or scales.shape[1] not in allowed:
            by_block = f"[{rows}, {wide}] (of 128 elements)" if blocks else "hidden is no multiple of 128"
            by_row = "" if packed or ue8m0 else f"[{rows}, 1] (of rows) or "
            raise ValueError(
                f"{self.name}: scales has shape {list(scales.shape)} and {scales.dtype}; it must be {by_row}{by_block}"
            )
        a, b = sorted(zip(scales.stride(), scales.shape))
        if rows and (a[0] < (a[1] > 1) or (b[1] > 1 and b[0] < a[0] * a[1])):
            raise ValueError(
                f"{self.name}: scales of shape {list(scales.shape)} and strides {list(scales.stride())} overlap"
            )
        if packed:
            return UE8M0_PACKED
        return UE8M0 if ue8m0 else PER_TOKEN if scales.shape[1] == 1 else PER_BLOCK

    def _check_all_apart(self, tensors: dict[str, torch.Tensor | None], experts: ExpertRows | None) -> None:
        """Raise ValueError if a written tensor overlaps another one; `out` may be `x`, and `total` may be `residual`."""
        if experts is not None:
            tensors = tensors | dict(zip(("rows", "row_index", "weights", "shared"), experts))
        spans = {name: (t.data_ptr(), _end(t)) for name, t in tensors.items() if t is not None}
        written = [name for name in ("out", "total", "quantized", "scales") if name in spans]
        for result, source in (("out", "x"), ("total", "residual")):
            if result in spans and spans[result] == spans.get(source):
                del spans[source]
        ends = sorted(spans.values())
        if all(a[1] <= b[0] for a, b in zip(ends, ends[1:])):
            return
        for a in written:
            for b in spans:
                if a != b and max(spans[a][0], spans[b][0]) < min(spans[a][1], spans[b][1]):
                    shown = [
                        "residual" if n == "total" and tensors["total"] is tensors["residual"] else n for n in (a, b)
                    ]
                    raise ValueError(f"{self.name}: {shown[0]} and {shown[1]} overlap in memory")

    def _check_rows(self, name: str, tensor, dtype, shape) -> None:
        self._check(name, tensor, dtype)
        self._check_dtype(tensor, (FP8_DTYPE,) if name == "quantized" else self.DTYPES)
        if tensor.dim() == 0 or tensor.shape != torch.Size(shape):
            raise ValueError(f"{self.name}: {name} has shape {list(tensor.shape)}; it must be {list(shape)}")
        row = self.hidden * tensor.element_size()
        if name != "quantized" and (row % VECTOR_BYTES or row > self.LARGEST_ROW):
            raise ValueError(
                f"{self.name}: a row of {self.hidden} elements of {tensor.dtype} has {row} bytes; it must be a multiple of "
                f"{VECTOR_BYTES}, and at most {self.LARGEST_ROW}"
            )
        if tensor.data_ptr() % VECTOR_BYTES:
            raise ValueError(f"{self.name}: {name} must begin at a multiple of {VECTOR_BYTES} bytes")


def scales_like(x: torch.Tensor, rows: int, hidden: int, by: str, layout: str) -> torch.Tensor:
    """`AllReduceNorm.new_scales` on the device of `x`."""
    blocks, packed = hidden // GROUP, by == UE8M0_PACKED
    columns = 1 if by == PER_TOKEN else -(-blocks // 4) if packed else blocks
    strides = scale_strides(rows, columns, layout)
    scales = x.new_empty_strided((rows, columns), strides, dtype=torch.int32 if packed else torch.float32)
    return scales.zero_() if packed else scales


def scale_strides(rows: int, columns: int, layout: str) -> tuple[int, int]:
    """Shape and strides for `AllReduceNorm.new_scales`. Raises ValueError for another layout."""
    if layout not in ("row", "column", "tma"):
        raise ValueError(f"AllReduceNorm: layout is {layout!r}; it must be row, column or tma")
    if layout == "row":
        return columns, 1
    return 1, (rows + 3) // 4 * 4 if layout == "tma" else rows


def _end(tensor: torch.Tensor) -> int:
    """Address behind the last element."""
    if tensor.is_contiguous():
        return tensor.data_ptr() + tensor.nbytes
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr() + (last + 1) * tensor.element_size() if tensor.numel() else tensor.data_ptr()
