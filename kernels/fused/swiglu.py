"""Kernels between an expert's two GEMMs: SwiGLU, its gradient, quantisation for GEMMs with scales of blocks, and its
reverse; a warp processes a row."""

import functools
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch

import tilescale_net as tsn

from ..collective import EXPLICIT_SYNC, dtype_name
from ..moe.row_ops import (
    FP8,
    FP8_MAX,
    SMALLEST_AMAX,
    add_dequantised,
    batch_of,
    clear,
    ends_of,
    find_expert,
    groups_of,
    int_vars,
    load_batch,
    rows_of_expert,
    store_quantised,
    store_rounded,
)

WIDTH = 8  # elements of 16 bytes
THREADS = 256
BLOCKS = 528  # of a GPU, four for each SM: two H200s, 8192 tokens of V4-Pro's shape, 408 us; with 264 blocks 485


@dataclass(frozen=True)
class SwiGLU:
    """`(up + shift) * gate * sigmoid(alpha * gate)` of columns [gate, up]; Shazeer, arXiv:2002.05202.

    Args:
        clamp: upper limit of the gate, and of the magnitude of up; None: no limit.
        alpha: of the sigmoid. shift: of up. gpt-oss has clamp 7, alpha 1.702 and shift 1.
    """

    clamp: float | None = None
    alpha: float = 1.0
    shift: float = 0.0

    def __post_init__(self) -> None:
        if self.clamp is not None and not self.clamp > 0:
            raise ValueError(f"SwiGLU: clamp is {self.clamp!r}; it must be a positive number or None")

    @property
    def limit(self) -> float:
        """`clamp`, or what no number exceeds."""
        return float("inf") if self.clamp is None else float(self.clamp)

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """In plain torch, computed in float32.

        Args:
            h: [..., 2 * inner].

        Returns:
            [..., inner], of the dtype of `h`.
        """
        gate, up = h.float().chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return ((up + self.shift) * gate * torch.sigmoid(self.alpha * gate)).to(h.dtype)


@tsn.jit(name="swiglu_rows", pass_configs=EXPLICIT_SYNC)
def swiglu_rows(
    inner, words, dtype="bfloat16", gated=True, quantised=True, weighted=False, threads=THREADS, blocks=264
):
    """Kernel `(out, scales, h, weights, counts, offsets, limit, alpha, shift)`: `out` = SwiGLU of the experts' rows of `h`.

    Args:
        inner: columns of `out` [capacity, inner]; `h` has twice as many, of `dtype`.
        words: columns of `scales` (float32 [capacity, words]), of which blocks of 128 elements fill the first.
        gated: else `h` has as many columns, and there is no SwiGLU.
        quantised: `out` is float8_e4m3fn and has scales; else of `dtype`.
        weighted: rows are multiplied by `weights` (float32 [capacity]) before they are rounded.
        threads, blocks: launch geometry.

    `counts`: int32 [experts]; `offsets`: int32 [experts + 1]. `limit`, `alpha`, `shift`: float32, see `SwiGLU`. Warps count the
    experts' rows alone, so that few rows between much padding take as long as few rows.
    """
    capacity, experts, ends = (T.dynamic(name) for name in ("capacity", "experts", "ends"))
    units = inner // WIDTH
    batch, warps = batch_of(units, 2), threads // 32

    @T.prim_func
    def main(
        out: T.Tensor((capacity, inner), FP8 if quantised else dtype),
        scales: T.Tensor((capacity, words), "float32"),
        h: T.Tensor((capacity, 2 * inner if gated else inner), dtype),
        weights: T.Tensor((capacity,), "float32"),
        counts: T.Tensor((experts,), "int32"),
        offsets: T.Tensor((ends,), "int32"),
        limit: T.float32,
        alpha: T.float32,
        shift: T.float32,
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            gates = T.alloc_local((batch * WIDTH,), dtype)
            ups = T.alloc_local((batch * WIDTH,), dtype)
            acc = T.alloc_local((batch * WIDTH,), "float32")
            gate = T.alloc_var("float32")
            up = T.alloc_var("float32")
            weight = T.alloc_var("float32")
            expert, first_of, end_of = int_vars(3)
            expert = 0
            first_of = 0  # of the experts' rows, that of this expert
            end_of = rows_of_expert(counts, offsets, 0)
            for turn in T.serial(T.ceildiv(offsets[experts], blocks * warps)):
                number = (turn * blocks + block) * warps + thread // 32
                while T.And(number >= end_of, expert < experts):
                    expert = expert + 1
                    first_of = end_of
                    if expert < experts:
                        end_of = end_of + rows_of_expert(counts, offsets, expert)
                if expert < experts:
                    row = offsets[expert] + number - first_of
                    weight = T.float32(1)
                    if weighted:
                        weight = weights[row]
                    for b in T.serial(-(-units // (32 * batch))):
                        first = b * 32 * batch
                        load_batch(gates, h, row, first, lane, units, WIDTH, batch)
                        if gated:
                            if first + lane < units:
                                load_batch(ups, h, row, units + first, lane, 2 * units, WIDTH, batch)
                            else:
                                clear(ups, batch * WIDTH)
                        for i in T.unroll(batch * WIDTH):
                            gate = T.cast(gates[i], "float32")
                            if gated:
                                gate = T.min(gate, limit)
                                up = T.max(T.min(T.cast(ups[i], "float32"), limit), -limit) + shift
                                gate = up * (gate / (T.float32(1) + T.exp(-alpha * gate)))
                            acc[i] = gate * weight
                        if quantised:
                            store_quantised(out, scales, row, acc, first, lane, units, WIDTH, batch)
                        else:
                            store_rounded(out, row, acc, first, lane, units, WIDTH, batch, dtype)

    return main


@tsn.jit(name="swiglu_gradient_rows", pass_configs=EXPLICIT_SYNC)
def swiglu_gradient_rows(inner, dtype="bfloat16", weighted=False, keeps=False, threads=THREADS, blocks=264):
    """Kernel `(of_h, of_weights, kept, h, grad, weights, counts, offsets, limit, alpha, shift)`: gradients of `swiglu_rows`.

    Args:
        inner: columns of `grad` [capacity, inner]; `h` and `of_h` have twice as many, all of `dtype`.
        weighted: rows were multiplied by `weights` (float32 [capacity]), whose gradients are `of_weights`.
        keeps: `kept` [capacity, inner] = the rows that `swiglu_rows` gave.
        threads, blocks: launch geometry.

    Rows that are no expert's become zero. `counts`, `offsets`, `limit`, `alpha`, `shift`: see `swiglu_rows`.
    """
    capacity, experts, ends = (T.dynamic(name) for name in ("capacity", "experts", "ends"))
    units = inner // WIDTH
    batch, warps = batch_of(units, 2), threads // 32

    @T.prim_func
    def main(
        of_h: T.Tensor((capacity, 2 * inner), dtype),
        of_weights: T.Tensor((capacity,), "float32"),
        kept: T.Tensor((capacity, inner), dtype),
        h: T.Tensor((capacity, 2 * inner), dtype),
        grad: T.Tensor((capacity, inner), dtype),
        weights: T.Tensor((capacity,), "float32"),
        counts: T.Tensor((experts,), "int32"),
        offsets: T.Tensor((ends,), "int32"),
        limit: T.float32,
        alpha: T.float32,
        shift: T.float32,
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            gates = T.alloc_local((batch * WIDTH,), dtype)
            ups = T.alloc_local((batch * WIDTH,), dtype)
            grads = T.alloc_local((batch * WIDTH,), dtype)
            of_gates = T.alloc_local((batch * WIDTH,), "float32")
            of_ups = T.alloc_local((batch * WIDTH,), "float32")
            acc = T.alloc_local((batch * WIDTH,), "float32")
            gate = T.alloc_var("float32")
            up = T.alloc_var("float32")
            share = T.alloc_var("float32")
            of_row = T.alloc_var("float32")
            weight = T.alloc_var("float32")
            total = T.alloc_var("float32")
            expert, end_of = int_vars(2)
            expert = 0
            for turn in T.serial(T.ceildiv(capacity, blocks * warps)):
                row = (turn * blocks + block) * warps + thread // 32
                if row < capacity:
                    find_expert(expert, end_of, row, counts, offsets, experts)
                    weight = T.float32(1)
                    if weighted:
                        weight = weights[row]
                    total = T.float32(0)
                    for b in T.serial(-(-units // (32 * batch))):
                        first = b * 32 * batch
                        if row < end_of:
                            load_batch(gates, h, row, first, lane, units, WIDTH, batch)
                            load_batch(ups, h, row, units + first, lane, 2 * units, WIDTH, batch)
                            load_batch(grads, grad, row, first, lane, units, WIDTH, batch)
                            for i in T.unroll(batch * WIDTH):
                                gate = T.min(T.cast(gates[i], "float32"), limit)
                                up = T.max(T.min(T.cast(ups[i], "float32"), limit), -limit) + shift
                                of_row = T.cast(grads[i], "float32")
                                share = T.float32(1) / (T.float32(1) + T.exp(-alpha * gate))
                                acc[i] = up * gate * share
                                if weighted:
                                    total = total + of_row * acc[i]
                                    of_row = of_row * weight
                                of_ups[i] = of_row * gate * share
                                of_gates[i] = (
                                    of_row * up * share * (T.float32(1) + alpha * gate * (T.float32(1) - share))
                                )
                                if T.cast(gates[i], "float32") > limit:
                                    of_gates[i] = T.float32(0)
                                if T.abs(T.cast(ups[i], "float32")) > limit:
                                    of_ups[i] = T.float32(0)
                                acc[i] = acc[i] * weight
                        else:
                            clear(of_gates, batch * WIDTH)
                            clear(of_ups, batch * WIDTH)
                            clear(acc, batch * WIDTH)
                        store_rounded(of_h, row, of_gates, first, lane, units, WIDTH, batch, dtype)
                        store_rounded(of_h, row, of_ups, units + first, lane, 2 * units, WIDTH, batch, dtype)
                        if keeps:
                            store_rounded(kept, row, acc, first, lane, units, WIDTH, batch, dtype)
                    if weighted:
                        for step in T.unroll(5):
                            total = total + T.shfl_xor(total, 1 << step)
                        if lane == 0:
                            of_weights[row] = total

    return main


@tsn.jit(name="quantised_blocks", pass_configs=EXPLICIT_SYNC)
def quantised_blocks(n, k, dtype="bfloat16", rounded=False):
    """Kernel `(out, scales, w)`: matrices of `dtype` as float8_e4m3fn with a scale for each block of 128 x 128 elements.

    Args:
        n, k: of `out` and `w` [count, n, k]; k is a multiple of 8. `scales` is float32 [count, ceil(n / 128), ceil(k / 128)].
        rounded: `out` is of `dtype`: what is quantised times its scale; `scales` is not written.
    """
    count, across, down = T.dynamic("count"), groups_of(k), groups_of(n)
    warps, passes = THREADS // 32, 128 * 128 // WIDTH // THREADS

    @T.prim_func
    def main(
        out: T.Tensor((count, n, k), dtype if rounded else FP8),
        scales: T.Tensor((count, down, across), "float32"),
        w: T.Tensor((count, n, k), dtype),
    ):
        with T.Kernel(across, down, count, threads=THREADS) as (x, y, matrix):
            thread = T.get_thread_binding()
            loaded = T.alloc_local((passes * WIDTH,), dtype)
            largest = T.alloc_shared((warps,), "float32")
            amax = T.alloc_var("float32")
            column = x * 128 + thread % 16 * WIDTH
            amax = T.float32(SMALLEST_AMAX)
            for p in T.unroll(passes):
                row = y * 128 + p * (THREADS // 16) + thread // 16
                for v in T.vectorized(WIDTH):
                    loaded[p * WIDTH + v] = T.cast(0, dtype)
                if T.And(row < n, column < k):
                    for v in T.vectorized(WIDTH):
                        loaded[p * WIDTH + v] = w[matrix, row, column + v]
                for v in T.unroll(WIDTH):
                    amax = T.max(amax, T.abs(T.cast(loaded[p * WIDTH + v], "float32")))
            for step in T.unroll(5):
                amax = T.max(amax, T.shfl_xor(amax, 1 << step))
            if thread % 32 == 0:
                largest[thread // 32] = amax
            T.sync_threads()
            for i in T.unroll(warps):
                amax = T.max(amax, largest[i])
            factor = T.float32(FP8_MAX) / amax
            scale = amax / T.float32(FP8_MAX)
            for p in T.unroll(passes):
                row = y * 128 + p * (THREADS // 16) + thread // 16
                if T.And(row < n, column < k):
                    for v in T.vectorized(WIDTH):
                        quantised = T.cast(T.cast(loaded[p * WIDTH + v], "float32") * factor, FP8)
                        if rounded:
                            out[matrix, row, column + v] = T.cast(T.cast(quantised, "float32") * scale, dtype)
                        else:
                            out[matrix, row, column + v] = quantised
            if T.And(thread == 0, T.bool(not rounded)):
                scales[matrix, y, x] = scale

    return main


@tsn.jit(name="widened_rows", pass_configs=EXPLICIT_SYNC)
def widened_rows(k, words, n=1, dtype="bfloat16", threads=THREADS, blocks=528):
    """Kernel `(out, q, scales)`: rows of float8_e4m3fn as `dtype`.

    Args:
        k: columns of `out` and `q` [rows, k].
        words: columns of `scales` (float32), of which blocks of 128 elements fill the first.
        n: rows of a matrix, each 128 of which have a row of `scales` in common; 1: each row has its own.
        threads, blocks: launch geometry.
    """
    rows, of_scales, units = T.dynamic("rows"), T.dynamic("of_scales"), k // WIDTH
    batch, warps = batch_of(units, 4), threads // 32

    @T.prim_func
    def main(
        out: T.Tensor((rows, k), dtype), q: T.Tensor((rows, k), FP8), scales: T.Tensor((of_scales, words), "float32")
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            loaded = T.alloc_local((batch * WIDTH,), FP8)
            acc = T.alloc_local((batch * WIDTH,), "float32")
            for turn in T.serial(T.ceildiv(rows, blocks * warps)):
                row = (turn * blocks + block) * warps + thread // 32
                if row < rows:
                    scale = row // n * groups_of(n) + row % n // 128
                    for b in T.serial(-(-units // (32 * batch))):
                        first = b * 32 * batch
                        load_batch(loaded, q, row, first, lane, units, WIDTH, batch)
                        clear(acc, batch * WIDTH)
                        add_dequantised(acc, loaded, scales, scale, first, lane, units, WIDTH, batch)
                        store_rounded(out, row, acc, first, lane, units, WIDTH, batch, dtype)

    return main


@functools.lru_cache(64)
def _one(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor([value], dtype=dtype, device=device)


def _launch(
    h: torch.Tensor, inner: int, ends: tuple[torch.Tensor | None, torch.Tensor | None], weights: torch.Tensor | None,
    activation: SwiGLU | None, quantised: bool, words: int, cleared: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`cleared`: rows that are not computed are zero."""
    rows, device = h.shape[0], h.device
    made = torch.zeros if cleared and ends[0] is not None else torch.empty
    out = made((rows, inner), dtype=torch.float8_e4m3fn if quantised else h.dtype, device=device)
    scales = made((rows, words), dtype=torch.float32, device=device) if quantised else _no_scales(rows, device)
    if rows:
        of_rows = _no_scales(rows, device).view(-1) if weights is None else weights
        a = activation or SwiGLU()
        geometry = _geometry(device) or dict(blocks=BLOCKS)
        kernel = swiglu_rows(
            inner, words if quantised else 1, dtype_name(h.dtype), activation is not None, quantised, weights is not None,
            **geometry,
        )  # fmt: skip
        kernel(out, scales, h, of_rows, *_all_of(h, *ends), a.limit, a.alpha, a.shift)
    return out, scales


def _all_of(
    h: torch.Tensor, counts: torch.Tensor | None, offsets: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same; where they are not given, of one expert that has all rows."""
    rows, device = h.shape[0], h.device
    counts = _one(rows, torch.int32, device) if counts is None else counts
    return counts, ends_of(rows, device) if offsets is None else offsets


def _geometry(device: torch.device) -> dict[str, int]:
    return {} if device.type == "cuda" else dict(blocks=2, threads=64)


def _no_scales(rows: int, device: torch.device) -> torch.Tensor:
    return torch.empty((rows, 1), dtype=torch.float32, device=device)


def _check(name: str, h: Any, columns: int) -> None:
    if not isinstance(h, torch.Tensor) or h.dtype not in (torch.bfloat16, torch.float16) or h.dim() != 2:
        raise TypeError(f"{name}: h must be a tensor [rows, columns] of torch.bfloat16 or torch.float16")
    if not h.is_contiguous() or h.shape[1] % columns or not h.shape[1]:
        raise ValueError(f"{name}: h {list(h.shape)} must be contiguous and have a multiple of {columns} columns")


def swiglu(
    h: torch.Tensor, activation: SwiGLU, *, counts: torch.Tensor | None = None, offsets: torch.Tensor | None = None,
    weights: torch.Tensor | None = None, cleared: bool = True,
) -> torch.Tensor:  # fmt: skip
    """SwiGLU of rows, in one kernel.

    Args:
        h: [rows, 2 * inner], bfloat16 or float16; inner a multiple of 8.
        activation: the variant.
        counts, offsets: int32, [experts] rows of each expert and [experts + 1] their first rows, of a dispatch; default one
            expert, whose rows begin at 0, and all rows.
        weights: float32 [rows], factors of the rows; default 1.
        cleared: rows that are no expert's become zero; else they are undefined.

    Returns:
        [rows, inner] of the dtype of `h`.

    Raises:
        TypeError, ValueError: a wrong `h`.
    """
    _check("swiglu", h, 2 * WIDTH)
    return _launch(h, h.shape[1] // 2, (counts, offsets), weights, activation, False, 1, cleared)[0]


def swiglu_gradient(
    h: torch.Tensor, grad: torch.Tensor, activation: SwiGLU, *, counts: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None, weights: torch.Tensor | None = None, keeps: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Gradients of `swiglu`, in one kernel.

    Args:
        h, activation, counts, offsets, weights: as in `swiglu`.
        grad: gradient of the result: [rows, inner], contiguous, of the dtype of `h`.
        keeps: return the result again, too.

    Returns:
        Gradients of `h` and of `weights` (None without weights), and the result (None without `keeps`); all zero in rows that
        are no expert's.

    Errors as for `swiglu`.
    """
    _check("swiglu_gradient", h, 2 * WIDTH)
    (rows, columns), device = h.shape, h.device
    inner = columns // 2
    if tuple(grad.shape) != (rows, inner) or grad.dtype != h.dtype or not grad.is_contiguous():
        raise ValueError(f"swiglu_gradient: grad must be contiguous, [{rows}, {inner}] of {h.dtype}")
    of_h, of_weights = torch.empty_like(h), _no_scales(rows, device).view(-1)
    kept = torch.empty_like(grad) if keeps else grad
    if rows:
        weighted, ends = weights is not None, _all_of(h, counts, offsets)
        kernel = swiglu_gradient_rows(inner, dtype_name(h.dtype), weighted, keeps, **_geometry(device))
        given = of_weights if weights is None else weights
        kernel(of_h, of_weights, kept, h, grad, given, *ends, activation.limit, activation.alpha, activation.shift)
    return of_h, None if weights is None else of_weights, kept if keeps else None


def swiglu_quantised(
    h: torch.Tensor, activation: SwiGLU, *, counts: torch.Tensor | None = None, offsets: torch.Tensor | None = None,
    weights: torch.Tensor | None = None, cleared: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `swiglu`, quantised: float8_e4m3fn [rows, inner], and scales for `scaled_matmul`, which needs no copy of them.

    Args:
        h, activation, counts, offsets, weights, cleared: as in `swiglu`; inner is a multiple of 16.

    Errors as for `swiglu`.
    """
    _check("swiglu_quantised", h, 4 * WIDTH)
    inner = h.shape[1] // 2
    return _launch(h, inner, (counts, offsets), weights, activation, True, -(-groups_of(inner) // 4) * 4, cleared)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as float8_e4m3fn with a float32 scale per 128 elements, in one kernel; the bits of `kernels.moe.row_ops.quantise`.

    Args:
        x: [rows, k], bfloat16 or float16.

    Errors as for `swiglu`.
    """
    _check("quantise_rows", x, WIDTH)
    return _launch(x, x.shape[1], (None, None), None, None, True, groups_of(x.shape[1]))


def widened(q: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows or matrices of float8_e4m3fn times their scales, in one kernel; the bits of `row_ops.dequantise` and of
    `scaled_gemm.dequantise_weights`, rounded.

    Args:
        q: [rows, k], or matrices [count, n, k]; contiguous, k a multiple of 8.
        scales: float32 [rows, ceil(k / 128) or more], or [count, ceil(n / 128), ceil(k / 128)]; contiguous.
        dtype: of the result, torch.bfloat16 or torch.float16.

    Raises:
        ValueError: a wrong argument.
    """
    *head, n, k = q.shape
    rows = q.numel() // k if k else 0
    of_matrices = bool(head)
    wanted = [*head, groups_of(n) if of_matrices else n, groups_of(k)]
    fits = list(scales.shape[:-1]) == wanted[:-1] and scales.shape[-1] >= wanted[-1]
    if not fits or not q.is_contiguous() or not scales.is_contiguous() or k % WIDTH or not k:
        raise ValueError(
            f"widened: q is {list(q.shape)} and scales {list(scales.shape)}; both must be contiguous, k a multiple of {WIDTH}, "
            f"and scales {wanted}"
        )
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    if rows:
        words = scales.shape[-1]
        kernel = widened_rows(k, words, n if of_matrices else 1, dtype_name(dtype), **_geometry(q.device))
        kernel(out.view(rows, k), q.view(rows, k), scales.view(-1, words))
    return out


def quantise_matrices(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `scaled_gemm.quantise_weights`, with the same bits, in one kernel.

    Args:
        w: [count, n, k], contiguous, torch.bfloat16 or torch.float16; k a multiple of 8.

    Raises:
        ValueError: a wrong `w`.
    """
    out = torch.empty(w.shape, dtype=torch.float8_e4m3fn, device=w.device)
    return out, _of_blocks(w, out)


def round_matrices(w: torch.Tensor) -> torch.Tensor:
    """What a GEMM with the results of `quantise_matrices` multiplies, in the dtype of `w`; in one kernel.

    Args:
        w: as for `quantise_matrices`.

    Raises:
        ValueError: a wrong `w`.
    """
    out = torch.empty_like(w)
    _of_blocks(w, out)
    return out


def _of_blocks(w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if w.dim() != 3 or not w.is_contiguous() or w.shape[2] % WIDTH or w.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"w is {list(w.shape)} of {w.dtype}; it must be contiguous, [count, n, k] of torch.bfloat16 or torch.float16, k a "
            f"multiple of {WIDTH}"
        )
    count, n, k = w.shape
    scales = torch.empty((count, groups_of(n), groups_of(k)), dtype=torch.float32, device=w.device)
    if w.numel():
        quantised_blocks(n, k, dtype_name(w.dtype), out.dtype == w.dtype)(out, scales, w)
    return scales
