"""What stands between an expert's two GEMMs: SwiGLU, and quantisation for GEMMs with scales of blocks; rows by warps."""

import functools
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch

import tilescale_net as tsn

from ..collective import EXPLICIT_SYNC, dtype_name
from ..moe.row_ops import (
    FP8,
    batch_of,
    clear,
    groups_of,
    load_batch,
    store_quantised,
    store_rounded,
)

WIDTH = 8  # elements of 16 bytes
THREADS = 256


@dataclass(frozen=True)
class SwiGLU:
    """`(up + shift) * gate * sigmoid(alpha * gate)` of columns [gate, up]; Shazeer, arXiv:2002.05202.

    Args:
        clamp: the gate is at most this, and up at most this in magnitude; None: as they are.
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
        """By plain torch, computed in float32.

        Args:
            h: [..., 2 * inner].

        Returns:
            [..., inner], of the dtype of `h`.
        """
        gate, up = h.float().chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return ((up + self.shift) * gate * torch.sigmoid(self.alpha * gate)).to(h.dtype)

    def gradient(self, h: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of `h`, in its dtype.

        Args:
            h: as in a call.
            grad: of the result, float32.
        """
        gate, up = h.float().chunk(2, -1)
        of_gate, of_up = gate <= self.limit, up.abs() <= self.limit
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit) + self.shift
        share = torch.sigmoid(self.alpha * gate)
        d_gate = grad * up * share * (1 + self.alpha * gate * (1 - share)) * of_gate
        return torch.cat((d_gate, grad * gate * share * of_up), -1).to(h.dtype)


@tsn.jit(name="swiglu_rows", pass_configs=EXPLICIT_SYNC)
def swiglu_rows(
    inner, words, dtype="bfloat16", gated=True, quantised=True, weighted=False, threads=THREADS, blocks=264
):
    """Kernel `(out, scales, h, weights, end, limit, alpha, shift)`: `out` = SwiGLU of the rows of `h` before end[0].

    Args:
        inner: columns of `out` [capacity, inner]; `h` has twice as many, of `dtype`.
        words: columns of `scales` (float32 [capacity, words]), of which blocks of 128 elements fill the first.
        gated: else `h` has as many columns, and there is no SwiGLU.
        quantised: `out` is float8_e4m3fn and has scales; else of `dtype`.
        weighted: rows are multiplied by `weights` (float32 [capacity]) before they are rounded.
        threads, blocks: launch geometry.

    `end`: int32 [1]. `limit`, `alpha`, `shift`: float32, see `SwiGLU`.
    """
    capacity, units = T.dynamic("capacity"), inner // WIDTH
    batch, warps = batch_of(units, 2), threads // 32

    @T.prim_func
    def main(
        out: T.Tensor((capacity, inner), FP8 if quantised else dtype),
        scales: T.Tensor((capacity, words), "float32"),
        h: T.Tensor((capacity, 2 * inner if gated else inner), dtype),
        weights: T.Tensor((capacity,), "float32"),
        end: T.Tensor((1,), "int32"),
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
            for turn in T.serial(T.ceildiv(end[0], blocks * warps)):
                row = (turn * blocks + block) * warps + thread // 32
                if row < end[0]:
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


@functools.lru_cache(64)
def _one(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor([value], dtype=dtype, device=device)


def _launch(
    h: torch.Tensor, inner: int, end: torch.Tensor | None, weights: torch.Tensor | None, activation: SwiGLU | None,
    quantised: bool, words: int, cleared: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`cleared`: rows that are not computed are zero."""
    rows, device = h.shape[0], h.device
    made = torch.zeros if cleared and end is not None else torch.empty
    out = made((rows, inner), dtype=torch.float8_e4m3fn if quantised else h.dtype, device=device)
    scales = made((rows, words), dtype=torch.float32, device=device) if quantised else _no_scales(rows, device)
    if rows:
        end = _one(rows, torch.int32, device) if end is None else end
        of_rows = _no_scales(rows, device).view(-1) if weights is None else weights
        a = activation or SwiGLU()
        blocks = dict(blocks=2, threads=64) if device.type != "cuda" else {}
        kernel = swiglu_rows(
            inner, words if quantised else 1, dtype_name(h.dtype), activation is not None, quantised, weights is not None,
            **blocks,
        )  # fmt: skip
        kernel(out, scales, h, of_rows, end, a.limit, a.alpha, a.shift)
    return out, scales


def _no_scales(rows: int, device: torch.device) -> torch.Tensor:
    return torch.empty((rows, 1), dtype=torch.float32, device=device)


def _check(name: str, h: Any, columns: int) -> None:
    if not isinstance(h, torch.Tensor) or h.dtype not in (torch.bfloat16, torch.float16) or h.dim() != 2:
        raise TypeError(f"{name}: h must be a tensor [rows, columns] of torch.bfloat16 or torch.float16")
    if not h.is_contiguous() or h.shape[1] % columns or not h.shape[1]:
        raise ValueError(f"{name}: h {list(h.shape)} must be contiguous and have a multiple of {columns} columns")


def swiglu(
    h: torch.Tensor, activation: SwiGLU, *, end: torch.Tensor | None = None, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """SwiGLU of rows, in one kernel.

    Args:
        h: [rows, 2 * inner], bfloat16 or float16; inner a multiple of 8.
        activation: which.
        end: int32 [1], how many rows there are; default all. The others become zero.
        weights: float32 [rows], by which rows are multiplied; default 1.

    Returns:
        [rows, inner] of the dtype of `h`.

    Raises:
        TypeError, ValueError: an `h` that does not fit.
    """
    _check("swiglu", h, 2 * WIDTH)
    return _launch(h, h.shape[1] // 2, end, weights, activation, False, 1)[0]


def swiglu_quantised(
    h: torch.Tensor,
    activation: SwiGLU,
    *,
    end: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    cleared: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `swiglu`, quantised: float8_e4m3fn [rows, inner], and scales as `scaled_matmul` takes them without a copy.

    Args:
        h, activation, end, weights: as there; inner is a multiple of 16.
        cleared: rows from `end` on become zero; else they are not defined.

    Errors are those of `swiglu`.
    """
    _check("swiglu_quantised", h, 4 * WIDTH)
    inner = h.shape[1] // 2
    return _launch(h, inner, end, weights, activation, True, -(-groups_of(inner) // 4) * 4, cleared)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as float8_e4m3fn with a float32 scale per 128 elements, in one kernel; the bits of `kernels.moe.row_ops.quantise`.

    Args:
        x: [rows, k], bfloat16 or float16.

    Errors are those of `swiglu`.
    """
    _check("quantise_rows", x, WIDTH)
    return _launch(x, x.shape[1], None, None, None, True, groups_of(x.shape[1]))
