"""Operators for all-reduce with bias, residual, RMSNorm and FP8 output, by `kernels.all_reduce_norm.AllReduceNorm`."""

from __future__ import annotations

from typing import NamedTuple

import torch

import tilescale_net as tsn
from tilescale_net.kernels.all_reduce_norm import (
    BY_BLOCK,
    FP8_DTYPE,
    GROUP,
    PER_BLOCK,
    PER_TENSOR,
    PER_TOKEN,
    UE8M0,
    UE8M0_PACKED,
    AllReduceNorm,
    ExpertRows,
    scale_strides,
    scales_like,
)
from tilescale_net.ops import arguments, group_objects
from tilescale_net.runtime.launch_args import dense, without_default_device

_ops = torch.ops.tilescale_net

# An operator takes ExpertRows as separate tensors: `x`, then these, all None without ExpertRows.
_Parts = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
_NO_EXPERTS: _Parts = (None, None, None)


class QuantizedNorm(NamedTuple):
    """The result of `all_reduce_norm_quantized`.

    Attributes:
        quantized: the normalised rows divided by their scales, float8_e4m3fn [..., hidden].
        scales: float32 factors of `quantized`: [rows, 1], [rows, hidden / 128], or the `scale` argument.
        total: the rounded sum plus bias and residual, [..., hidden]: the residual of the next layer.
        normed: the normalised rows, [..., hidden]; None without `keep_normed`.
    """

    quantized: torch.Tensor
    scales: torch.Tensor
    total: torch.Tensor
    normed: torch.Tensor | None


def norm_of(objects: group_objects.GroupObjects, hidden: int) -> AllReduceNorm:
    """The object behind the operators for rows of `hidden` elements."""
    return objects.collective(AllReduceNorm, hidden=hidden)


def _called(objects: group_objects.GroupObjects, x: torch.Tensor, name: str = "all_reduce_norm") -> AllReduceNorm:
    if not x.dim():
        raise ValueError(f"{name}: x is a scalar; it must be [..., hidden]")
    objects.calls.note_operator(False, name + " of x of shape {} and {}", x.shape, x.dtype)
    return norm_of(objects, x.shape[-1])


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return x if x is None else dense(x)


def _input(x: torch.Tensor, experts: _Parts) -> torch.Tensor | ExpertRows:
    x = dense(x)
    if experts is _NO_EXPERTS or experts[0] is None:
        return x
    index, weights, shared = map(_contiguous, experts)
    assert index is not None and weights is not None
    return ExpertRows(x, index, weights, shared)


def _shape(x: torch.Tensor, index: torch.Tensor | None) -> tuple[int, ...]:
    """Shape of the result."""
    return tuple(x.shape) if index is None else (*index.shape[:-1], x.shape[-1])


# -- rows in the dtype of x --------------------------------------------------------------------------------------------


@arguments.operator("all_reduce_norm")
def _all_reduce_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None, eps: float, replicated: bool,
    group: str, weight_bias: float = 0.0, index: torch.Tensor | None = None, expert_weights: torch.Tensor | None = None,
    shared: torch.Tensor | None = None, any_rows: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    experts, objects = (index, expert_weights, shared), group_objects.in_order(group)
    if any_rows:  # a server's graphs are captured with other numbers of rows
        norm_of(objects, x.shape[-1]).warm_up(x.dtype)
    return _normalised(objects, x, weight, residual, bias, experts, eps, weight_bias)


def _normalised(objects, x, weight, residual, bias, experts, eps, weight_bias) -> tuple[torch.Tensor, torch.Tensor]:
    norm, shape = _called(objects, x), _shape(x, experts[0])
    out, total = (torch.empty(shape, dtype=x.dtype, device=x.device) for _ in range(2))
    norm(
        out, _input(x, experts), dense(weight), residual=_contiguous(residual), bias=_contiguous(bias), eps=eps,
        weight_bias=weight_bias, total=total,
    )  # fmt: skip
    return out, total


@arguments.register_fake("all_reduce_norm")
def _(
    x, weight, residual, bias, eps, replicated, group, weight_bias=0.0, index=None, expert_weights=None, shared=None,
    any_rows=False,
):  # fmt: skip
    return x.new_empty(_shape(x, index)), x.new_empty(_shape(x, index))


def _setup(ctx, inputs, output):
    _, weight, residual, bias, ctx.eps, ctx.replicated, ctx.group, ctx.weight_bias, *_ = inputs
    ctx.with_residual, ctx.with_bias = residual is not None, bias is not None
    ctx.save_for_backward(weight, output[1])


def _gradient(ctx, grad, grad_total):
    """For y = t * r * w with r = 1 / sqrt(mean(t * t) + eps), dt = r * w * g - t * r**3 * mean(t * w * g)."""
    weight, total = ctx.saved_tensors
    t, g = total.float(), grad.float()
    r = torch.rsqrt(t.square().mean(-1, keepdim=True) + ctx.eps)
    scaled = g * (weight.float() + ctx.weight_bias)
    grad_sum = r * scaled - t * r.pow(3) * (t * scaled).mean(-1, keepdim=True)
    if grad_total is not None:
        grad_sum = grad_sum + grad_total.float()
    rows = range(t.dim() - 1)
    grad_weight = (g * t * r).sum(tuple(rows)) if t.dim() > 1 else g * t * r
    grad_bias = (grad_sum.sum(tuple(rows)) if t.dim() > 1 else grad_sum).to(total.dtype) if ctx.with_bias else None
    grad_sum = grad_sum.to(total.dtype)
    grad_x = grad_sum if ctx.replicated else _ops.all_reduce(grad_sum, False, ctx.group, True)
    return grad_x, grad_weight.to(weight.dtype), grad_sum if ctx.with_residual else None, grad_bias, *[None] * 8


torch.library.register_autograd("tilescale_net::all_reduce_norm", _gradient, setup_context=_setup)


def _sum_of_experts(experts: ExpertRows) -> torch.Tensor:
    """The sum of experts' rows in torch, for its gradients."""
    index, hidden = experts.row_index, experts.rows.shape[-1]
    total = torch.zeros((*index.shape[:-1], hidden), dtype=torch.float32, device=experts.rows.device)
    for k in range(index.shape[-1]):
        here = index[..., k, None] >= 0
        chosen = experts.rows[index[..., k].clamp(min=0).long()].float()
        total = total + torch.where(here, chosen * experts.weights[..., k, None].float(), 0.0)
    if experts.shared is not None:
        total = total + experts.shared.float()
    return total.to(experts.rows.dtype)


def _taken_apart(
    call: str, x: torch.Tensor | ExpertRows, **others: torch.Tensor | None
) -> tuple[torch.Tensor, _Parts, dict[str, torch.Tensor]]:
    """Return `x`, the other tensors of `ExpertRows`, and all tensors by name."""
    experts = _NO_EXPERTS
    if isinstance(x, ExpertRows):
        weights = x.weights
        if isinstance(weights, torch.Tensor):
            weights = arguments.as_weights(weights)
        rows, experts = x.rows, (x.row_index, weights, x.shared)
        named = {"rows": rows, **dict(zip(("row_index", "weights", "shared"), experts)), **others}
        if x.row_index is None or x.weights is None:
            raise TypeError(f"{call}: ExpertRows needs row_index and weights")
    else:
        rows, named = x, {"x": x, **others}
    # Missing required arguments remain, and `arguments.check` names them.
    tensors: dict = {name: t for name, t in named.items() if t is not None or name in ("x", "rows", "weight")}
    return rows, experts, tensors


@without_default_device
def all_reduce_norm(
    x: torch.Tensor | ExpertRows, weight: torch.Tensor, *, residual: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-6, weight_bias: float = 0.0, group: tsn.Group = None, replicated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The RMSNorm of the sum of `x` over all ranks of the group, plus bias and residual: the end of a tensor-parallel layer.

    Args:
        x: [..., hidden], float32, float16 or bfloat16, of one shape on all ranks; a row is a multiple of 16 bytes, at most
            64 KiB. Or `kernels.all_reduce_norm.ExpertRows`: the weighted sum of a token's experts, the end of an MoE layer.
        weight: weight of the norm, [hidden]. residual: [..., hidden]. bias: [hidden]. All of x's dtype, and equal on all
            ranks.
        eps: added to the mean of the squares.
        weight_bias: added to `weight`; 1 for Gemma.
        group: see `tilescale_net.ops`.
        replicated: as in `all_reduce`: all ranks compute the same from the results. Otherwise the gradient of `x` is summed
            over the ranks; gradients of the other arguments are always this rank's.

    Returns:
        (normalised, total), each [..., hidden]: `total` is the rounded sum plus bias and residual, rounded: the residual of the
        next layer. A row's bits do not depend on the other rows.

    Raises:
        TypeError, ValueError: a wrong dtype, shape or device; nothing was sent.
        RankMismatch: ranks pass different shapes or dtypes; raised at the first use of a shape.
    """
    unseen = arguments.is_unseen
    if isinstance(x, torch.Tensor) and unseen(x) and unseen(weight):
        if (residual is None or unseen(residual)) and (bias is None or unseen(bias)):
            objects = group_objects.in_order(group)
            return _normalised(objects, x, weight, residual, bias, _NO_EXPERTS, eps, weight_bias)
    rows, experts, named = _taken_apart("all_reduce_norm", x, weight=weight, residual=residual, bias=bias)
    if all(map(unseen, named.values())):
        objects = group_objects.in_order(group)
        return _normalised(objects, rows, weight, residual, bias, experts, eps, weight_bias)
    arguments.check("all_reduce_norm", **named)
    if isinstance(x, ExpertRows) and any(map(arguments.needs_gradient, named.values())):
        rows, experts = _sum_of_experts(x), _NO_EXPERTS
    name = group_objects.name_of(group)
    return _ops.all_reduce_norm(
        rows, weight, residual, bias, float(eps), replicated, name, float(weight_bias), *experts
    )


# -- FP8 output --------------------------------------------------------------------------------------------------------


@arguments.operator("all_reduce_norm_quantized")
def _all_reduce_norm_quantized(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None, index: torch.Tensor | None,
    expert_weights: torch.Tensor | None, shared: torch.Tensor | None, scale: torch.Tensor | None, by: str, layout: str,
    keep_normed: bool, eps: float, weight_bias: float, group: str, any_rows: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    experts = index, expert_weights, shared
    objects = group_objects.in_order(group)
    if any_rows:
        norm_of(objects, x.shape[-1]).warm_up(x.dtype, by)
    return _quantised(objects, x, weight, residual, bias, experts, scale, by, layout, keep_normed, eps, weight_bias)


def _quantised(objects, x, weight, residual, bias, experts, scale, by, layout, keep_normed, eps, weight_bias):
    """Return `quantized`, `total`, then `scales` and `normed` if computed."""
    norm, shape = _called(objects, x, "all_reduce_norm_quantized"), _shape(x, experts[0])
    results = _results(x, shape, by, layout, keep_normed)
    scales = None if by == PER_TENSOR else results[2]
    norm(
        results[-1] if keep_normed else None, _input(x, experts), dense(weight), residual=_contiguous(residual),
        bias=_contiguous(bias), eps=eps, weight_bias=weight_bias, total=results[1], quantized=results[0], scales=scales, scale=scale,
        ue8m0=by in (UE8M0, UE8M0_PACKED),
    )  # fmt: skip
    return results


def _results(x, shape, by: str, layout: str, keep_normed: bool) -> list[torch.Tensor]:
    results = [x.new_empty(shape, dtype=FP8_DTYPE), x.new_empty(shape)]
    if by != PER_TENSOR:
        rows = 1
        for extent in shape[:-1]:
            rows = rows * extent
        results.append(scales_like(x, rows, shape[-1], by, layout))
    return [*results, x.new_empty(shape)] if keep_normed else results


@arguments.register_fake("all_reduce_norm_quantized")
def _(
    x, weight, residual, bias, index, expert_weights, shared, scale, by, layout, keep_normed, eps, weight_bias, group,
    any_rows=False,
):  # fmt: skip
    return _results(x, _shape(x, index), by, layout, keep_normed)


@without_default_device
def all_reduce_norm_quantized(
    x: torch.Tensor | ExpertRows, weight: torch.Tensor, *, by: str = PER_BLOCK, scale: torch.Tensor | None = None, layout: str = "row",
    keep_normed: bool = False, residual: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-6,
    weight_bias: float = 0.0, group: tsn.Group = None,
) -> QuantizedNorm:  # fmt: skip
    """As `all_reduce_norm`, with the normalised rows in FP8 for a GEMM. For inference: it has no gradient.

    Args:
        x, weight, residual, bias, eps, weight_bias, group: as in `all_reduce_norm`.
        by: elements that share a scale: "tensor" (needs `scale`), "token" (a row), or "block" (128 elements of a row);
            "ue8m0": blocks, scales rounded up to powers of two; "ue8m0_packed": their exponents, four in an int32.
        scale: float32, one element, for `by="tensor"`: divides all elements; quotients beyond 448 become 448.
        layout: layout of the scales, see `AllReduceNorm.new_scales`: "row", "column" or "tma".
        keep_normed: also return the normalised rows, in the dtype of `x`.

    Returns:
        A `QuantizedNorm`. The scale of a row or block is its largest absolute value, at least 1e-4, divided by 448; the
        quantised rows are those that `all_reduce_norm` rounds.

    Raises:
        TypeError, ValueError: a wrong argument, or a tensor that requires a gradient; nothing was sent.
        RankMismatch: ranks pass different shapes or dtypes; raised at the first use of a shape.
    """
    call = "all_reduce_norm_quantized"
    rows, experts, named = _taken_apart(call, x, weight=weight, residual=residual, bias=bias, scale=scale)
    if by not in (PER_TENSOR, PER_TOKEN, *BY_BLOCK):
        raise ValueError(f"{call}: by is {by!r}; it must be tensor, token, {', '.join(BY_BLOCK)}")
    if (by == PER_TENSOR) != (scale is not None):
        raise ValueError(
            f"{call}: scale is {'missing' if scale is None else 'passed'}; by={by!r} {'takes' if scale is None else 'computes'} it"
        )
    scale_strides(1, 1, layout)
    if by in BY_BLOCK and isinstance(rows, torch.Tensor) and (not rows.dim() or rows.shape[-1] % GROUP):
        raise ValueError(
            f"{call}: x has shape {list(rows.shape)}; by block its rows must be multiples of {GROUP} elements"
        )
    arguments.check(call, **named)
    if any(map(arguments.needs_gradient, named.values())):
        raise TypeError(f"{call}: FP8 results have no gradient; call it under torch.no_grad, or all_reduce_norm")
    options = by, layout, keep_normed, float(eps), float(weight_bias)
    if all(map(arguments.is_eager, named.values())):
        objects = group_objects.in_order(group)
        results = _quantised(objects, rows, weight, residual, bias, experts, scale, *options)
    else:
        name = group_objects.name_of(group)
        results = _ops.all_reduce_norm_quantized(rows, weight, residual, bias, *experts, scale, *options, name)
    scales = results[2] if scale is None else scale
    return QuantizedNorm(results[0], scales, results[1], results[-1] if keep_normed else None)
