"""All-reduce, bias, residual and RMSNorm as one operator, made of `kernels.all_reduce_norm.AllReduceNorm`."""

from __future__ import annotations

import torch

import tilescale_net as tsn
from tilescale_net.kernels.all_reduce_norm import AllReduceNorm
from tilescale_net.ops import arguments, group_objects

_ops = torch.ops.tilescale_net


@arguments.operator("all_reduce_norm")
def _all_reduce_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    replicated: bool,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _normalised(group_objects.in_order(group), x, weight, residual, bias, eps)


def norm_of(objects: group_objects.GroupObjects, hidden: int) -> AllReduceNorm:
    """The object behind the operators for rows of `hidden` elements."""
    return objects.made(
        ("all_reduce_norm", hidden),
        lambda: AllReduceNorm(hidden, group=objects.world, **objects.geometry).tracked_by(objects.calls),
    )


def _normalised(objects, x, weight, residual, bias, eps) -> tuple[torch.Tensor, torch.Tensor]:
    # What is added to a sum of zeros is the sum as it is rounded.
    total = x.new_zeros(x.shape) if residual is None else residual.clone(memory_format=torch.contiguous_format)
    return _normalised_in_place(objects, x, weight, total, bias, eps), total


def _normalised_in_place(objects, x, weight, residual, bias, eps) -> torch.Tensor:
    objects.calls.note_operator(False, "all_reduce_norm of x of shape {} and {}", x.shape, x.dtype)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return norm_of(objects, x.shape[-1] if x.dim() else 1)(
        out,
        x.contiguous(),
        weight.contiguous(),
        residual=residual,
        bias=bias if bias is None else bias.contiguous(),
        eps=eps,
    )


@arguments.operator("all_reduce_norm_", mutates=("residual",))
def _all_reduce_norm_(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, eps: float, group: str
) -> torch.Tensor:
    """For passes over graphs, which know that nothing else reads `residual`: no copy of it, and no gradient."""
    objects, dense = group_objects.in_order(group), residual.contiguous()
    norm_of(objects, x.shape[-1]).warm_up(x.dtype)
    out = _normalised_in_place(objects, x, weight, dense, None, eps)
    if dense is not residual:
        residual.copy_(dense)
    return out


@arguments.register_fake("all_reduce_norm_")
def _(x, weight, residual, eps, group):
    return x.new_empty(x.shape)


@arguments.register_fake("all_reduce_norm")
def _(x, weight, residual, bias, eps, replicated, group):
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _setup(ctx, inputs, output):
    _, weight, residual, bias, ctx.eps, ctx.replicated, ctx.group = inputs
    ctx.with_residual, ctx.with_bias = residual is not None, bias is not None
    ctx.save_for_backward(weight, output[1])


def _gradient(ctx, grad, grad_total):
    """Of y = t * r * w with r = 1 / sqrt(mean(t * t) + eps): t gets r * w * g - t * r**3 * mean(t * w * g)."""
    weight, total = ctx.saved_tensors
    t, g = total.float(), grad.float()
    r = torch.rsqrt(t.square().mean(-1, keepdim=True) + ctx.eps)
    scaled = g * weight.float()
    of_total = r * scaled - t * r.pow(3) * (t * scaled).mean(-1, keepdim=True)
    if grad_total is not None:
        of_total = of_total + grad_total.float()
    rows = range(t.dim() - 1)
    of_weight = (g * t * r).sum(tuple(rows)) if t.dim() > 1 else g * t * r
    of_bias = (of_total.sum(tuple(rows)) if t.dim() > 1 else of_total).to(total.dtype) if ctx.with_bias else None
    of_total = of_total.to(total.dtype)
    of_x = of_total if ctx.replicated else _ops.all_reduce(of_total, False, ctx.group, True)
    return of_x, of_weight.to(weight.dtype), of_total if ctx.with_residual else None, of_bias, None, None, None


torch.library.register_autograd("tilescale_net::all_reduce_norm", _gradient, setup_context=_setup)


def all_reduce_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    group: tsn.Group = None,
    replicated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The RMSNorm of the sum of `x` over all ranks of the group, plus bias and residual: the end of a tensor-parallel layer.

    Args:
        x: [..., hidden], float32, float16 or bfloat16, of one shape on all ranks; a row is a multiple of 16 bytes, at most
            64 KiB.
        weight: of the norm, [hidden]. residual: [..., hidden]. bias: [hidden]. All of x's dtype, and the same on all ranks.
        eps: added to the mean of the squares.
        group: see `tilescale_net.ops`.
        replicated: as that of `all_reduce`: all ranks compute the same from the results. Without it the gradient of `x` is summed
            over the ranks; those of the others are this rank's own.

    Returns:
        (normalised, total), each [..., hidden]: `total` is the rounded sum plus bias and residual, rounded, which the next layer
        takes as its residual. A row's bits do not depend on the other rows.

    Raises:
        TypeError, ValueError: a dtype, shape or device that does not fit; nothing was sent.
        RankMismatch: ranks that pass different shapes or dtypes; seen when a shape is used for the first time.
    """
    given = [t for t in (x, weight, residual, bias) if t is not None]
    if all(arguments.is_eager(t) and not arguments.needs_gradient(t) for t in given):
        return _normalised(group_objects.in_order(group), x, weight, residual, bias, eps)
    named = dict(zip(("x", "weight", "residual", "bias"), (x, weight, residual, bias)))
    arguments.check("all_reduce_norm", **{name: t for name, t in named.items() if t is not None})
    return _ops.all_reduce_norm(x, weight, residual, bias, float(eps), replicated, group_objects.name_of(group))
