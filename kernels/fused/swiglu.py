"""Kernels between an expert's two GEMMs: SwiGLU, its gradient, block quantisation and dequantisation; one warp per row."""

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
    all_rows,
    batch_of,
    clear,
    find_expert,
    float_vars,
    groups_of,
    int_vars,
    launch_geometry,
    load_batch,
    local_vectors,
    rows_of_expert,
    store_quantised,
    store_rounded,
)

WIDTH = 8  # elements in 16 bytes
THREADS = 256
BLOCKS = 528  # four per SM of a GPU: two H200s, 8192 tokens of V4-Pro's shape, 408 us; with 264 blocks 485


@dataclass(frozen=True)
class SwiGLU:
    """`(up + shift) * gate * sigmoid(alpha * gate)` of columns [gate, up]; Shazeer, arXiv:2002.05202.

    Args:
        clamp: upper limit of the gate, and of the magnitude of up; None: no limit.
        alpha: factor in the sigmoid. shift: added to up. gpt-oss uses clamp 7, alpha 1.702 and shift 1.
    """

    clamp: float | None = None
    alpha: float = 1.0
    shift: float = 0.0

    def __post_init__(self) -> None:
        if self.clamp is not None and not self.clamp > 0:
            raise ValueError(f"SwiGLU: clamp is {self.clamp!r}; it must be a positive number or None")

    @property
    def limit(self) -> float:
        """`clamp`, or infinity."""
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
        words: columns of `scales` (float32 [capacity, words]); the first ones hold the scales, one per 128 elements.
        gated: if False, `h` has as many columns as `out`, and there is no SwiGLU.
        quantised: `out` is float8_e4m3fn with scales instead of `dtype`.
        weighted: multiply rows by `weights` (float32 [capacity]) before rounding.
        threads, blocks: launch geometry.

    `counts`: int32 [experts]; `offsets`: int32 [experts + 1]. `limit`, `alpha`, `shift`: float32, see `SwiGLU`. Warps skip
    padding, so it does not cost time.
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
            gates, ups = local_vectors(2, batch * WIDTH, dtype)
            acc = T.alloc_local((batch * WIDTH,), "float32")
            gate, up, weight = float_vars(3)
            expert, first_of, end_of = int_vars(3)
            expert = 0
            first_of = 0  # index of this expert's first row, without padding
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
    """Kernel `(grad_h, grad_weights, result, h, grad, weights, counts, offsets, limit, alpha, shift)`: gradients of
    `swiglu_rows`.

    Args:
        inner: columns of `grad` [capacity, inner]; `h` and `grad_h` have twice as many, all of `dtype`.
        weighted: rows were multiplied by `weights` (float32 [capacity]); also compute the gradients `grad_weights`.
        keeps: also write the result of `swiglu_rows` to `result` [capacity, inner].
        threads, blocks: launch geometry.

    Padding rows become zero. `counts`, `offsets`, `limit`, `alpha`, `shift`: see `swiglu_rows`.
    """
    capacity, experts, ends = (T.dynamic(name) for name in ("capacity", "experts", "ends"))
    units = inner // WIDTH
    batch, warps = batch_of(units, 2), threads // 32

    @T.prim_func
    def main(
        grad_h: T.Tensor((capacity, 2 * inner), dtype),
        grad_weights: T.Tensor((capacity,), "float32"),
        result: T.Tensor((capacity, inner), dtype),
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
            gates, ups, grads = local_vectors(3, batch * WIDTH, dtype)
            grad_gates, grad_ups, acc = local_vectors(3, batch * WIDTH, "float32")
            gate, up, sigmoid, grad_row, weight, total = float_vars(6)
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
                                grad_row = T.cast(grads[i], "float32")
                                sigmoid = T.float32(1) / (T.float32(1) + T.exp(-alpha * gate))
                                acc[i] = up * gate * sigmoid
                                if weighted:
                                    total = total + grad_row * acc[i]
                                    grad_row = grad_row * weight
                                grad_ups[i] = grad_row * gate * sigmoid
                                grad_gates[i] = (
                                    grad_row * up * sigmoid * (T.float32(1) + alpha * gate * (T.float32(1) - sigmoid))
                                )
                                if T.cast(gates[i], "float32") > limit:
                                    grad_gates[i] = T.float32(0)
                                if T.abs(T.cast(ups[i], "float32")) > limit:
                                    grad_ups[i] = T.float32(0)
                                acc[i] = acc[i] * weight
                        else:
                            clear(grad_gates, batch * WIDTH)
                            clear(grad_ups, batch * WIDTH)
                            clear(acc, batch * WIDTH)
                        store_rounded(grad_h, row, grad_gates, first, lane, units, WIDTH, batch, dtype)
                        store_rounded(grad_h, row, grad_ups, units + first, lane, 2 * units, WIDTH, batch, dtype)
                        if keeps:
                            store_rounded(result, row, acc, first, lane, units, WIDTH, batch, dtype)
                    if weighted:
                        for step in T.unroll(5):
                            total = total + T.shfl_xor(total, 1 << step)
                        if lane == 0:
                            grad_weights[row] = total

    return main


@tsn.jit(name="quantised_blocks", pass_configs=EXPLICIT_SYNC)
def quantised_blocks(n, k, dtype="bfloat16", rounded=False):
    """Kernel `(out, scales, w)`: matrices of `dtype` as float8_e4m3fn with a scale for each block of 128 x 128 elements.

    Args:
        n, k: of `out` and `w` [count, n, k]; k is a multiple of 8. `scales` is float32 [count, ceil(n / 128), ceil(k / 128)].
        rounded: write the dequantised values, of `dtype`, to `out`, and no scales.
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
        words: columns of `scales` (float32); the first ones hold the scales, one per 128 elements.
        n: rows of a matrix, 128 of which sigmoid a row of `scales`; 1: each row has its own.
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


def _launch(
    h: torch.Tensor, inner: int, ends: tuple[torch.Tensor | None, torch.Tensor | None], weights: torch.Tensor | None,
    activation: SwiGLU | None, quantised: bool, words: int, cleared: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`cleared`: padding rows are zero."""
    rows, device = h.shape[0], h.device
    new = torch.zeros if cleared and ends[0] is not None else torch.empty
    out = new((rows, inner), dtype=torch.float8_e4m3fn if quantised else h.dtype, device=device)
    scales = new((rows, words), dtype=torch.float32, device=device) if quantised else _no_scales(rows, device)
    if rows:
        factors = _no_scales(rows, device).view(-1) if weights is None else weights
        a = activation or SwiGLU()
        geometry = launch_geometry(device) or dict(blocks=BLOCKS)
        kernel = swiglu_rows(
            inner, words if quantised else 1, dtype_name(h.dtype), activation is not None, quantised, weights is not None,
            **geometry,
        )  # fmt: skip
        kernel(out, scales, h, factors, *_ends(h, *ends), a.limit, a.alpha, a.shift)
    return out, scales


def _ends(h: torch.Tensor, counts: torch.Tensor | None, offsets: torch.Tensor | None) -> list[torch.Tensor]:
    """Counts and offsets; default: a single expert with all rows."""
    default = all_rows(h.shape[0], h.device)
    return [value if tensor is None else tensor for tensor, value in zip((counts, offsets), default)]


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
        counts, offsets: int32, rows [experts] and first rows [experts + 1] of each expert, from a dispatch; default: a
            single expert with all rows.
        weights: float32 [rows], factors of the rows; default 1.
        cleared: padding rows become zero; otherwise they are undefined.

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
        keeps: also return the result of `swiglu`.

    Returns:
        Gradients of `h` and of `weights` (None without weights), and the result (None without `keeps`); zero in padding.

    Errors as for `swiglu`.
    """
    _check("swiglu_gradient", h, 2 * WIDTH)
    (rows, columns), device = h.shape, h.device
    inner = columns // 2
    if tuple(grad.shape) != (rows, inner) or grad.dtype != h.dtype or not grad.is_contiguous():
        raise ValueError(f"swiglu_gradient: grad must be contiguous, [{rows}, {inner}] of {h.dtype}")
    grad_h, grad_weights = torch.empty_like(h), _no_scales(rows, device).view(-1)
    result = torch.empty_like(grad) if keeps else grad
    if rows:
        kernel = swiglu_gradient_rows(inner, dtype_name(h.dtype), weights is not None, keeps, **launch_geometry(device))
        factors, ends, a = grad_weights if weights is None else weights, _ends(h, counts, offsets), activation
        kernel(grad_h, grad_weights, result, h, grad, factors, *ends, a.limit, a.alpha, a.shift)
    return grad_h, None if weights is None else grad_weights, result if keeps else None


def swiglu_quantised(
    h: torch.Tensor, activation: SwiGLU, *, counts: torch.Tensor | None = None, offsets: torch.Tensor | None = None,
    weights: torch.Tensor | None = None, cleared: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `swiglu`, quantised: float8_e4m3fn [rows, inner], and scales that `scaled_matmul` takes without a copy.

    Args:
        h, activation, counts, offsets, weights, cleared: as in `swiglu`; inner is a multiple of 16.

    Errors as for `swiglu`.
    """
    _check("swiglu_quantised", h, 4 * WIDTH)
    inner = h.shape[1] // 2
    return _launch(h, inner, (counts, offsets), weights, activation, True, -(-groups_of(inner) // 4) * 4, cleared)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to float8_e4m3fn with a float32 scale per 128 elements, in one kernel; bitwise equal to
    `kernels.moe.row_ops.quantise`.

    Args:
        x: [rows, k], bfloat16 or float16.

    Errors as for `swiglu`.
    """
    _check("quantise_rows", x, WIDTH)
    return _launch(x, x.shape[1], (None, None), None, None, True, groups_of(x.shape[1]))


def widened(q: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Dequantise float8_e4m3fn rows or matrices, in one kernel; bitwise equal to `row_ops.dequantise`, rounded, and
    `scaled_gemm.dequantise_weights`.

    Args:
        q: [rows, k], or matrices [count, n, k]; contiguous, k a multiple of 8.
        scales: float32 [rows, ceil(k / 128) or more], or [count, ceil(n / 128), ceil(k / 128)]; contiguous.
        dtype: dtype of the result, torch.bfloat16 or torch.float16.

    Raises:
        ValueError: a wrong argument.
    """
    *head, n, k = q.shape
    rows = q.numel() // k if k else 0
    expected = [*head, groups_of(n) if head else n, groups_of(k)]
    fits = list(scales.shape[:-1]) == expected[:-1] and scales.shape[-1] >= expected[-1]
    if not fits or not q.is_contiguous() or not scales.is_contiguous() or k % WIDTH or not k:
        raise ValueError(
            f"widened: q is {list(q.shape)} and scales {list(scales.shape)}; both must be contiguous, k a multiple of {WIDTH}, "
            f"and scales {expected}"
        )
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    if rows:
        words = scales.shape[-1]
        kernel = widened_rows(k, words, n if head else 1, dtype_name(dtype), **launch_geometry(q.device))
        kernel(out.view(rows, k), q.view(rows, k), scales.view(-1, words))
    return out


def quantise_matrices(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `scaled_gemm.quantise_weights`, bitwise equal, in one kernel.

    Args:
        w: [count, n, k], contiguous, torch.bfloat16 or torch.float16; k a multiple of 8.

    Raises:
        ValueError: a wrong `w`.
    """
    out = torch.empty(w.shape, dtype=torch.float8_e4m3fn, device=w.device)
    return out, _quantise_blocks(w, out)


def round_matrices(w: torch.Tensor) -> torch.Tensor:
    """The dequantised result of `quantise_matrices`, in the dtype of `w`; in one kernel.

    Args:
        w: as for `quantise_matrices`.

    Raises:
        ValueError: a wrong `w`.
    """
    out = torch.empty_like(w)
    _quantise_blocks(w, out)
    return out


def _quantise_blocks(w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
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
