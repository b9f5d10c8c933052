"""Operators for GEMMs with a collective before or after, fused or unfused.

All ways have the results of torch.matmul and a collective of torch.distributed. Steps of a call:

1. the public function calls the operator: past torch's dispatcher if possible (`_is_plain`), else after checks of devices
   and gradients, which torch.compile must trace;
2. the operator checks shapes, dtypes and scales, and once per kind of call (`_known`) chooses its way with `_decided`;
3. `_decided` calls `kernels.fused.choice.choose`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

import tilescale_net as tsn
from tilescale_net.kernels.fused.all_gather_matmul import AllGatherMatmul, PipelinedAllGatherMatmul
from tilescale_net.kernels.fused.choice import GemmProblem, choose, fits, usual_options
from tilescale_net.kernels.fused.gemm import (
    SCALED,
    FusedMatmul,
    check_columns,
    check_scales,
    torch_gemm,
)
from tilescale_net.kernels.fused.matmul_all_reduce import MatmulAllReduce
from tilescale_net.kernels.fused.matmul_reduce_scatter import MatmulReduceScatter
from tilescale_net.ops import arguments, group_objects
from tilescale_net.ops.group_objects import GroupObjects
from tilescale_net.runtime.launch_args import dense, without_default_device

_ops = torch.ops.tilescale_net
CLASSES: dict[str, type[FusedMatmul]] = {
    "all_gather_matmul": AllGatherMatmul,
    "matmul_reduce_scatter": MatmulReduceScatter,
    "matmul_all_reduce": MatmulAllReduce,
}


def make(objects: GroupObjects, problem: GemmProblem, way: str, options: dict[str, Any]) -> Any:
    """The object for calls like `problem`; collective. `way`: "fused", with `options` of its class, or "copy_engines"."""
    p = problem
    if way == "copy_engines":
        return PipelinedAllGatherMatmul(p.rows, p.k, p.n, dtype=p.dtype, group=objects.world)
    maker: Any = CLASSES[p.kind]
    rows = p.rows // p.ranks if p.kind == "matmul_reduce_scatter" else p.rows
    return maker(rows, p.k, p.n, dtype=p.dtype, group=objects.world, **objects.geometry | options)


@dataclass(frozen=True)
class Known:
    """Data shared by all calls of one kind.

    Attributes:
        noted: arguments of `Track.note_operator`.
        problem, way, options: see `make`. key: key of its object; None for an unfused call.
    """

    noted: tuple[Any, ...]
    problem: GemmProblem
    way: str
    options: dict[str, Any]
    key: str | None


def _decided(objects: GroupObjects, problem: GemmProblem, fused: bool | None) -> tuple[str, dict[str, Any]]:
    """The way of a call, and the options of its fused call."""
    obstacle = fits(problem)
    if fused and obstacle:
        raise ValueError(f"{problem.kind}: fused=True, but {obstacle}")
    if obstacle or fused is False:
        return "unfused", {}
    way, options = choose(problem, objects.world, not objects.needs_symmetric_source)
    return ("fused", usual_options(problem, objects.world.device)) if fused and way == "unfused" else (way, options)


def _known(
    objects: GroupObjects, kind: str, x: torch.Tensor, w: torch.Tensor, x_scales, w_scales, fused: bool | None, gradient: bool
) -> Known:  # fmt: skip
    """Check a call of a new kind, log it, and choose its way."""
    ranks, is_gather = objects.world.size, kind == "all_gather_matmul"
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(
            f"{kind}: x has shape {list(x.shape)} and w {list(w.shape)}; they must be [rows, k] and [k, n]"
        )
    (rows, k), n = x.shape, w.shape[1]
    check_scales(kind, x.dtype, x_scales, w_scales, rows, n)
    if x.dtype != w.dtype:
        raise TypeError(f"{kind}: x has dtype {x.dtype} and w {w.dtype}; they must be equal")
    if kind == "matmul_reduce_scatter" and rows % ranks:
        raise ValueError(f"{kind}: x has {rows} rows; they must be a multiple of {ranks} ranks")
    check_columns(kind, w)
    text = f"{kind} of {'x' if is_gather else 'sums'} of shape {{}} and {{}}"
    noted = gradient, text, (rows, k if is_gather else n), x.dtype
    objects.calls.note_operator(*noted)
    problem = GemmProblem(kind, ranks, rows, k, n, x.dtype)
    way, options = _decided(objects, problem, fused)
    key = None if way == "unfused" else f"{way} {problem} {options}"  # text, whose hash is made once
    return Known(noted, problem, way, options, key)


def _checked(
    kind: str, x: torch.Tensor, w: torch.Tensor, x_scales, w_scales, fused: bool | None, group: str, gradient: bool
) -> tuple[GroupObjects, torch.Tensor, dict[str, torch.Tensor], Any]:
    """The group's objects, `x` and scales as kernels take them, and the object of a call; None for an unfused call."""
    objects, x = group_objects.in_order(group), dense(x)
    scales = tuple((s.shape, s.dtype) if isinstance(s, torch.Tensor) else s for s in (x_scales, w_scales))
    call = kind, fused, gradient, x.shape, x.dtype, w.shape, w.dtype, w.stride(), scales
    known = objects.known_gemms.get(call)
    if known is None:
        if len(objects.known_gemms) >= group_objects.MOST_VIEWS:
            objects.known_gemms.clear()
        known = objects.known_gemms[call] = _known(objects, kind, x, w, x_scales, w_scales, fused, gradient)
    else:
        objects.calls.note_operator(*known.noted)
    flat_scales = {}
    if x.dtype == SCALED:
        flat_scales = dict(x_scales=x_scales.contiguous().view(-1), w_scales=w_scales.contiguous().view(-1))
    op = None
    if known.key is not None:
        try:
            op = objects.product(known.key, lambda: make(objects, known.problem, known.way, known.options))
        except tsn.HeapError:  # on all ranks alike
            if fused:
                raise
            objects.known_gemms[call] = replace(known, key=None)
    return objects, x, flat_scales, op


def travelling(
    objects: GroupObjects, x: torch.Tensor, w: torch.Tensor, scales: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The arguments of an all-gather with GEMM, rows and their scales in symmetric memory if some ranks are on other
    nodes."""
    if not objects.needs_symmetric_source:
        return x, w, scales
    parts = [x, *([scales["x_scales"]] if scales else [])]
    targets = objects.symmetric(*((tuple(part.shape), part.dtype) for part in parts))
    x, *row_scales = (target.copy_(part) for target, part in zip(targets, parts))
    return x, w, scales | ({"x_scales": row_scales[0]} if scales else {})


def _result_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if x.dtype == SCALED else x.dtype


def _check_together(kind: str, x: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise as `arguments.check`, and RuntimeError for an FP8 GEMM that would need gradients."""
    arguments.check(kind, x=x, **{name: t for name, t in others.items() if t is not None or name == "w"})
    tensors = [x, *others.values()]
    needed = torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)
    if needed and x.dtype == SCALED:
        raise RuntimeError(
            f"{kind}: GEMMs of {SCALED} are for inference and have no gradients, but an argument requires one; call it "
            "under torch.no_grad(), or detach the argument"
        )


def _is_plain(x: torch.Tensor, w: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether torch need not see a call with these tensors: `arguments.is_eager`, on one device, and without torch.autocast."""
    return (
        arguments.is_eager(x)
        and arguments.is_eager(w)
        and w.device == x.device
        and all(other is None or (arguments.is_eager(other) and other.device == x.device) for other in others)
        and not torch.is_autocast_enabled(x.device.type)
    )


def _needs_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.others = inputs[2:-3]  # up to the scales, which have no gradients


def _gradient_of_matrix(x: torch.Tensor, grad: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`x.t() @ grad` in the memory order of `w`, as torch.mm does: a gradient in another order than its parameter is copied."""
    return torch.mm(grad.t(), x).t() if w.stride(0) < w.stride(1) else torch.mm(x.t(), grad)


# -- all-gather, then GEMM --------------------------------------------------------------------------------------------


@arguments.operator("all_gather_matmul")
def _all_gather_matmul(
    x: torch.Tensor, w: torch.Tensor, fused: bool | None, group: str, x_scales: torch.Tensor | None = None,
    w_scales: torch.Tensor | None = None, gradient: bool = False,
) -> torch.Tensor:  # fmt: skip
    options = x_scales, w_scales, fused, group, gradient
    objects, x, scales, op = _checked("all_gather_matmul", x, w, *options)
    if op is not None:
        x, w, scales = travelling(objects, x, dense(w, in_either_order=True), scales)
        return op(x, w, **scales)
    if not scales:
        (rows,) = objects.gathered(x)
        return torch_gemm(rows.view(-1, x.shape[1]), w)
    rows, row_scales = objects.gathered(x, scales["x_scales"])
    return torch_gemm(rows.view(-1, x.shape[1]), w, row_scales, scales["w_scales"])


@arguments.register_fake("all_gather_matmul")
def _(x, w, fused, group, x_scales=None, w_scales=None, gradient=False):
    return x.new_empty((group_objects.world_of(group).size * x.shape[0], w.shape[1]), dtype=_result_dtype(x))


def _all_gather_matmul_gradient(ctx, grad):
    (x, w), (fused, group) = ctx.saved_tensors, ctx.others
    dx = _ops.matmul_reduce_scatter(grad, w.t(), fused, group, gradient=True) if ctx.needs_input_grad[0] else None
    dw = _gradient_of_matrix(_ops.all_gather(x, group, True), grad, w) if ctx.needs_input_grad[1] else None
    return dx, dw, None, None, None, None, None


_all_gather_matmul_differentiably = arguments.differentiable(_all_gather_matmul, _setup, _all_gather_matmul_gradient)


@without_default_device
def all_gather_matmul(
    x: torch.Tensor, w: torch.Tensor, group: tsn.Group = None, *, fused: bool | None = None,
    x_scales: torch.Tensor | None = None, w_scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The rows of all ranks of the group times this rank's `w`: `torch.mm(all_gather(x), w)`, the column-parallel layer.

    Args:
        x: [rows, k], of one shape on all ranks. In a region of torch.autocast, `x` and `w` are cast as for torch.mm.
        w: [k, n] of the same dtype, contiguous or the transpose of a contiguous tensor (others are copied); n is the
            same on all ranks.
        group: see `tilescale_net.ops`.
        fused: whether GEMM and communication overlap; None: if that was faster at the nearest measured shape
            (`kernels/fused/measured.json`, and `tilescale_net.tuning` on this machine), and the symmetric heap has room for
            the shape's buffers.
        x_scales, w_scales: only for `x` and `w` of torch.float8_e4m3fn: float32 [rows] or [rows, 1], and [n] or [1, n],
            scales of the result's rows and columns, as in torch._scaled_mm. `w` must then be the transpose of a contiguous
            tensor, and k and n multiples of 16 for a fused call; the result is bfloat16, without gradients.

    Returns:
        [ranks * rows, n]. Gradients: of `x` by `matmul_reduce_scatter`, of `w` with an all_gather of `x`; both are
        collective calls, so all ranks need a gradient of an argument or none does.

    Raises:
        TypeError, ValueError: wrong arguments, by name; nothing was sent.
        RuntimeError: an argument of a GEMM of torch.float8_e4m3fn requires a gradient.
        HeapError: the symmetric heap has no room for the request; the 32 most recent shapes keep the buffers of their
            fused calls (see `tilescale_net.ops`).
        RankMismatch: ranks pass different shapes or dtypes; raised at the first use of a shape.
    """
    if _is_plain(x, w, x_scales, w_scales):
        if not _needs_gradient(x, w, x_scales, w_scales):
            return _all_gather_matmul(x, w, fused, group, x_scales, w_scales)
        if x.dtype != SCALED:
            return _all_gather_matmul_differentiably(
                x, w, fused, group_objects.name_of(group), x_scales, w_scales, False
            )
    _check_together("all_gather_matmul", x, w=w, x_scales=x_scales, w_scales=w_scales)
    x, w = arguments.operands(x, w)
    return _ops.all_gather_matmul(x, w, fused, group_objects.name_of(group), x_scales, w_scales)


# -- GEMM, then reduce-scatter ----------------------------------------------------------------------------------------


@arguments.operator("matmul_reduce_scatter")
def _matmul_reduce_scatter(
    x: torch.Tensor, w: torch.Tensor, fused: bool | None, group: str, x_scales: torch.Tensor | None = None,
    w_scales: torch.Tensor | None = None, gradient: bool = False,
) -> torch.Tensor:  # fmt: skip
    options = x_scales, w_scales, fused, group, gradient
    objects, x, scales, op = _checked("matmul_reduce_scatter", x, w, *options)
    if op is not None:
        return op(x, dense(w, in_either_order=True), **scales)
    target = objects.source((x.shape[0], w.shape[1]), _result_dtype(x), x.device)
    if target is None:
        return _ops.reduce_scatter(torch_gemm(x, w, **scales), group_objects.name_of(group), gradient)
    part = objects.empty((x.shape[0] // objects.world.size, w.shape[1]), target.dtype)
    return objects.reduce_scatter(part, torch_gemm(x, w, **scales, out=target))


@arguments.register_fake("matmul_reduce_scatter")
def _(x, w, fused, group, x_scales=None, w_scales=None, gradient=False):
    return x.new_empty((x.shape[0] // group_objects.world_of(group).size, w.shape[1]), dtype=_result_dtype(x))


def _matmul_reduce_scatter_gradient(ctx, grad):
    (x, w), (fused, group) = ctx.saved_tensors, ctx.others
    dx = _ops.all_gather_matmul(grad, w.t(), fused, group, gradient=True) if ctx.needs_input_grad[0] else None
    dw = _gradient_of_matrix(x, _ops.all_gather(grad, group, True), w) if ctx.needs_input_grad[1] else None
    return dx, dw, None, None, None, None, None


_matmul_reduce_scatter_differentiably = arguments.differentiable(
    _matmul_reduce_scatter, _setup, _matmul_reduce_scatter_gradient
)


@without_default_device
def matmul_reduce_scatter(
    x: torch.Tensor, w: torch.Tensor, group: tsn.Group = None, *, fused: bool | None = None,
    x_scales: torch.Tensor | None = None, w_scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """This rank's rows of the sum of all ranks' `x @ w`: `reduce_scatter(torch.mm(x, w))`, the row-parallel layer.

    Args:
        x: [ranks * rows, k], of one shape on all ranks.
        w, group, fused, x_scales, w_scales: as in `all_gather_matmul`; `x_scales` for all rows of `x`.

    Returns:
        [rows, n]; GEMM results are rounded to the dtype before they are sent, and summed in float32 in a fixed order. The
        gradient of `x` is `all_gather_matmul` of the result's gradient; the gradient of `w` needs an all_gather of it.

    Raises:
        TypeError, ValueError, HeapError, RankMismatch: as `all_gather_matmul`.
    """
    if _is_plain(x, w, x_scales, w_scales):
        if not _needs_gradient(x, w, x_scales, w_scales):
            return _matmul_reduce_scatter(x, w, fused, group, x_scales, w_scales)
        if x.dtype != SCALED:
            return _matmul_reduce_scatter_differentiably(
                x, w, fused, group_objects.name_of(group), x_scales, w_scales, False
            )
    _check_together("matmul_reduce_scatter", x, w=w, x_scales=x_scales, w_scales=w_scales)
    x, w = arguments.operands(x, w)
    return _ops.matmul_reduce_scatter(x, w, fused, group_objects.name_of(group), x_scales, w_scales)


# -- GEMM, then all-reduce --------------------------------------------------------------------------------------------


@arguments.operator("matmul_all_reduce")
def _matmul_all_reduce(
    x: torch.Tensor, w: torch.Tensor, replicated: bool, fused: bool | None, group: str, x_scales: torch.Tensor | None = None,
    w_scales: torch.Tensor | None = None, gradient: bool = False,
) -> torch.Tensor:  # fmt: skip
    options = x_scales, w_scales, fused, group, gradient
    objects, x, scales, op = _checked("matmul_all_reduce", x, w, *options)
    if op is not None:
        return op(x, dense(w, in_either_order=True), **scales)
    shape, dtype = (x.shape[0], w.shape[1]), _result_dtype(x)
    if objects.all_reduce.is_faster_overwritten(math.prod(shape) * dtype.itemsize):
        target = objects.source(shape, dtype, x.device)
        if target is not None:
            torch_gemm(x, w, **scales, out=target)
            return objects.all_reduce(torch.empty_like(target), target, overwrite_x=True)
    return _ops.all_reduce(torch_gemm(x, w, **scales), replicated, group_objects.name_of(group), gradient)


@arguments.register_fake("matmul_all_reduce")
def _(x, w, replicated, fused, group, x_scales=None, w_scales=None, gradient=False):
    return x.new_empty((x.shape[0], w.shape[1]), dtype=_result_dtype(x))


def _matmul_all_reduce_gradient(ctx, grad):
    (x, w), (replicated, _, group) = ctx.saved_tensors, ctx.others
    grad = grad if replicated else _ops.all_reduce(grad, False, group, True)
    dx = torch.mm(grad, w.t()) if ctx.needs_input_grad[0] else None
    dw = _gradient_of_matrix(x, grad, w) if ctx.needs_input_grad[1] else None
    return dx, dw, None, None, None, None, None, None


_matmul_all_reduce_differentiably = arguments.differentiable(_matmul_all_reduce, _setup, _matmul_all_reduce_gradient)


@without_default_device
def matmul_all_reduce(
    x: torch.Tensor, w: torch.Tensor, group: tsn.Group = None, *, replicated: bool = False, fused: bool | None = None,
    x_scales: torch.Tensor | None = None, w_scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The sum of all ranks' `x @ w`, on every rank: `all_reduce(torch.mm(x, w))`, the row-parallel layer.

    Args:
        x: [rows, k], of one shape on all ranks.
        w, group, fused, x_scales, w_scales: as in `all_gather_matmul`.
        replicated: as in `all_reduce`; True for tensor parallelism that computes the same loss on all ranks.

    Returns:
        [rows, n], bitwise equal on all ranks and in every run; GEMM results are rounded to the dtype before they are sent,
        and summed in float32 in a fixed order.

    Raises:
        TypeError, ValueError, HeapError, RankMismatch: as `all_gather_matmul`.
    """
    if _is_plain(x, w, x_scales, w_scales):
        if not _needs_gradient(x, w, x_scales, w_scales):
            return _matmul_all_reduce(x, w, replicated, fused, group, x_scales, w_scales)
        if x.dtype != SCALED:
            return _matmul_all_reduce_differentiably(
                x, w, replicated, fused, group_objects.name_of(group), x_scales, w_scales, False
            )
    _check_together("matmul_all_reduce", x, w=w, x_scales=x_scales, w_scales=w_scales)
    x, w = arguments.operands(x, w)
    return _ops.matmul_all_reduce(x, w, replicated, fused, group_objects.name_of(group), x_scales, w_scales)
