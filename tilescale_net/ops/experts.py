"""Operators for expert GEMMs that overlap with a layer's dispatch and combine, with gradients.

They need a layer with `tile_rows` (see `kernels.fused.ExpertMatmul`): tiles of rows are multiplied as they arrive, and rows
return as they are ready. In the backward, the dispatch of the sums' gradients overlaps with the GEMM with the transposed
matrices, and gradients of rows return by a combine after their GEMM. Rows without a token are zero in every result.
`kernels.fused.choice` chooses between overlapped and unfused calls.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tilescale_net.kernels.fused.choice import SIMULATED, are_experts_fused, experts_problem
from tilescale_net.kernels.fused.expert_gradient import FEW_ROWS, gradient_of_experts
from tilescale_net.kernels.fused.expert_matmul import ExpertMatmul
from tilescale_net.kernels.fused.gemm import DEFAULT
from tilescale_net.kernels.moe.all_to_all import AllToAll
from tilescale_net.kernels.moe.handle import Dispatched, RoutingPlan
from tilescale_net.kernels.moe.row_ops import weight_rows
from tilescale_net.ops import arguments, moe
from tilescale_net.runtime.launch_args import dense

_ops = torch.ops.tilescale_net


def gemm_of(op: AllToAll, w: torch.Tensor) -> ExpertMatmul:
    """The layer's GEMM with matrices like `w`. Collective on first use."""
    key = (*w.shape[1:], w.dtype)
    if key not in op.products:
        default = DEFAULT if op.device.type == "cuda" else SIMULATED
        rows: Any = op.config.tile_rows  # not None, see `check_matrices`
        tiling = dataclasses.replace(default, tile=(rows, *default.tile[1:]))
        op.products[key] = ExpertMatmul(op, *w.shape[1:], dtype=w.dtype, tiling=tiling)
    return op.products[key]


def arriving(
    op: AllToAll, w: torch.Tensor, fused: bool, *inputs: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, Dispatched]:
    """A dispatch and the GEMMs of its rows, overlapped if `fused`."""
    gemm = gemm_of(op, w)
    if not fused:
        received = op.dispatch(*inputs, **options)
        return gemm(received.x, w, received.handle), received
    pending = op.dispatch_send(*inputs, **options)
    h = gemm.arriving(pending, w)
    return h, op.dispatch_recv(pending)


def is_fused(layer: AllToAll, inner: int, fused: bool | None) -> bool:
    """Whether GEMMs of a layer whose experts have `inner` columns overlap; equal on all ranks, for any tokens."""
    if fused is not None:
        return fused
    c = layer.config
    problem = experts_problem(c.ranks, c.max_tokens, c.top_k, c.hidden, inner, c.dtype)
    return are_experts_fused(problem, layer.device)


def check_matrices(call: str, layer: AllToAll, name: str, w: torch.Tensor, first: int | None, last: int | None) -> str:
    """The layer's key. Raises TypeError or ValueError for matrices that do not match the layer."""
    key, c = moe.layer_key(layer), layer.config
    if c.tile_rows is None:
        raise ValueError(
            f"{call}: the layer counts no tiles; make it with tile_rows=128 (or more), and alignment as large"
        )
    if w.dtype != c.dtype:
        raise TypeError(f"{call}: {name} has dtype {w.dtype}; it must be {c.dtype}, as the layer's rows are")
    # One by one, because torch.compile does not compare symbolic sizes in a tuple as numbers.
    fits = w.dim() == 3 and w.shape[0] == c.local_experts
    fits = fits and (first is None or w.shape[1] == first) and (last is None or w.shape[2] == last)
    if not fits:
        expected = f"[{c.local_experts}, {first or 'k'}, {last or 'n'}]"
        raise ValueError(f"{call}: {name} has shape {list(w.shape)}; it must be {expected}")
    for extent, size in (("k", w.shape[1]), ("n", w.shape[2])):
        if size == 0 or size % 8:
            raise ValueError(f"{call}: {extent} is {size}; it must be a multiple of 8 for {c.dtype}, and not 0")
    return key


@arguments.custom_op("moe_dispatch_matmul")
def _dispatch_matmul(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, w: torch.Tensor, fused: bool | None, key: str
) -> list[torch.Tensor]:
    """Results of the GEMM, rows, weights of rows, then the other tensors of the plan."""
    op, w = moe.called("moe_dispatch_matmul", key), dense(w, in_either_order=True)
    inputs = dense(x), topk_idx.contiguous(), topk_weights.contiguous()
    h, received = arriving(op, w, is_fused(op, w.shape[2] // 2, fused), *inputs, cleared=True)
    plan = received.handle.plan
    *others, weights = plan.tensors()
    h, rows = moe.without_padding(op, plan, h, copied=False), moe.without_padding(op, plan, received.x)
    return [h, rows, weights, *others]


@arguments.register_fake("moe_dispatch_matmul")
def _(x, topk_idx, topk_weights, w, fused, key):
    rows, *others = moe.dispatch_fake(x, topk_idx, topk_weights, key)
    return [x.new_empty((rows.shape[0], w.shape[2])), rows, *others]


@arguments.custom_op("moe_matmul_combine")
def _matmul_combine(
    h: torch.Tensor, w: torch.Tensor, weights: torch.Tensor, plan: list[torch.Tensor], tokens: int, fused: bool | None,
    key: str,
) -> torch.Tensor:  # fmt: skip
    """Sums of the GEMM's results times `weights` (empty: all 1) per token."""
    op, w = moe.called("moe_matmul_combine", key), dense(w, in_either_order=True)
    handle = moe.handle_of(key, RoutingPlan(tokens, *plan))
    options = dict(weights=weights.contiguous()) if weights.numel() else dict(weighted=False)
    gemm = gemm_of(op, w)
    if is_fused(op, w.shape[1], fused):
        return gemm.combined(dense(h), w, handle, **options)
    return op.combine(gemm(dense(h), w, handle), handle=handle, **options)


@arguments.register_fake("moe_matmul_combine")
def _(h, w, weights, plan, tokens, fused, key):
    return h.new_empty((tokens, w.shape[2]))


@arguments.custom_op("moe_matmul_combine_backward")
def _combine_backward(
    grad: torch.Tensor, h: torch.Tensor, w: torch.Tensor, weights: torch.Tensor, plan: list[torch.Tensor], tokens: int,
    fused: bool | None, key: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of the sums as rows, and of `h`, both times `weights`; gradients of `weights` (empty if `weights` is)."""
    op, w = moe.called("backward of moe_matmul_combine", key), dense(w.transpose(1, 2), in_either_order=True)
    routing = RoutingPlan(tokens, *plan)
    overlaps = is_fused(op, w.shape[2], fused)
    back, received = arriving(op, w, overlaps, dense(grad), handle=moe.handle_of(key, routing))
    if not weights.numel():
        rows = moe.without_padding(op, routing, received.x)
        return rows, moe.without_padding(op, routing, back, copied=False), torch.empty_like(weights)
    counts, offsets, _ = routing.counts(op.config.ranks, op.config.local_experts)
    dh, grad_weights = weight_rows(back, weights.contiguous(), counts, offsets, dense(h))
    return weight_rows(received.x, weights.contiguous(), counts, offsets)[0], dh, grad_weights


@arguments.register_fake("moe_matmul_combine_backward")
def _(grad, h, w, weights, plan, tokens, fused, key):
    return grad.new_empty((h.shape[0], grad.shape[1])), h.new_empty(h.shape), weights.new_empty(weights.shape)


@arguments.custom_op("expert_matmul")
def _expert_matmul(x: torch.Tensor, w: torch.Tensor, plan: list[torch.Tensor], tokens: int, key: str) -> torch.Tensor:
    """Rows of each expert times its matrix."""
    op, w = moe.layer_of(key), dense(w, in_either_order=True)
    routing = RoutingPlan(tokens, *plan)
    return moe.without_padding(op, routing, gemm_of(op, w)(dense(x), w, moe.handle_of(key, routing)), copied=False)


@arguments.register_fake("expert_matmul")
def _(x, w, plan, tokens, key):
    return x.new_empty((x.shape[0], w.shape[2]))


@arguments.custom_op("moe_zeroed")
def _zeroed(rows: torch.Tensor, plan: list[torch.Tensor], tokens: int, key: str) -> torch.Tensor:
    """A copy of expert-major rows, zero in padding."""
    return moe.without_padding(moe.layer_of(key), RoutingPlan(tokens, *plan), dense(rows))


@arguments.register_fake("moe_zeroed")
def _(rows, plan, tokens, key):
    return rows.new_empty(rows.shape)


@arguments.custom_op("moe_matrix_gradient")
def _matrix_gradient(
    left: torch.Tensor, right: torch.Tensor, plan: list[torch.Tensor], tokens: int, key: str
) -> torch.Tensor:
    """Each expert's rows of `left` [capacity, m], transposed, times its rows of `right` [capacity, n]."""
    c = moe.layer_of(key).config
    counts, offsets, _ = RoutingPlan(tokens, *plan).counts(c.ranks, c.local_experts)
    if left.dtype == torch.bfloat16 and hasattr(torch, "_grouped_mm"):
        # One H200, 96 experts of [7168, 6144]: 128 rows of an expert 3,151 us, torch 3,827; 512 rows 10,711, torch 7,741.
        if c.ranks * c.max_tokens * c.top_k > FEW_ROWS * c.num_experts:
            return torch._grouped_mm(left.t(), right, offs=offsets[1:].contiguous())
    return gradient_of_experts(dense(left), dense(right), counts, offsets)


@arguments.register_fake("moe_matrix_gradient")
def _(left, right, plan, tokens, key):
    return left.new_empty((moe.layer_of(key).config.local_experts, left.shape[1], right.shape[1]))


def gradient_of_matrices(
    key: str, plan: list[torch.Tensor], tokens: int, rows: torch.Tensor, grads: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    """Gradients of the experts' matrices `w` [experts, k, n]: each expert's rows, transposed, times gradients of its results.

    In the memory order of `w`, because torch copies a gradient whose strides differ from its parameter's.

    Args:
        rows, grads: [capacity, k] and [capacity, n], zero in padding.
    """
    if w.stride(1) < w.stride(2):
        return _ops.moe_matrix_gradient(grads, rows, plan, tokens, key).transpose(1, 2)
    return _ops.moe_matrix_gradient(rows, grads, plan, tokens, key)


def _dispatch_setup(ctx, inputs, output):
    x, _, _, w, _, ctx.key = inputs
    ctx.tokens = x.shape[0]
    h, rows, weights, *others = output
    ctx.save_for_backward(w, rows, *others, weights)
    ctx.h_shape, ctx.weights_shape = h.shape, weights.shape


def _dispatch_gradient(ctx, grads):
    w, rows, *plan = ctx.saved_tensors
    dh, grad_rows, grad_weights = grads[:3]
    grad_weights = rows.new_zeros(ctx.weights_shape, dtype=torch.float32) if grad_weights is None else grad_weights
    dh = rows.new_zeros(ctx.h_shape) if dh is None else dh
    back = _ops.expert_matmul(dh, w.transpose(1, 2), plan, ctx.tokens, ctx.key)
    back = back if grad_rows is None else back + grad_rows
    x, topk_weights = _ops.moe_dispatch_backward(back, grad_weights, plan, ctx.tokens, ctx.key)
    dh = _ops.moe_zeroed(dh, plan, ctx.tokens, ctx.key)
    return x, None, topk_weights, gradient_of_matrices(ctx.key, plan, ctx.tokens, rows, dh, w), None, None


def _combine_setup(ctx, inputs, output):
    h, w, weights, plan, ctx.tokens, ctx.fused, ctx.key = inputs
    ctx.save_for_backward(h, w, weights, *plan)


def _combine_gradient(ctx, grad):
    h, w, weights, *plan = ctx.saved_tensors
    rows, dh, grad_weights = _ops.moe_matmul_combine_backward(grad, h, w, weights, plan, ctx.tokens, ctx.fused, ctx.key)
    h = _ops.moe_zeroed(h, plan, ctx.tokens, ctx.key)
    dw = gradient_of_matrices(ctx.key, plan, ctx.tokens, h, rows, w)
    return dh, dw, grad_weights if weights.numel() else None, [None] * len(plan), None, None, None


def _matmul_setup(ctx, inputs, output):
    x, w, plan, ctx.tokens, ctx.key = inputs
    ctx.save_for_backward(x, w, *plan)


def _matmul_gradient(ctx, grad):
    x, w, *plan = ctx.saved_tensors
    back = _ops.expert_matmul(grad, w.transpose(1, 2), plan, ctx.tokens, ctx.key)
    x, grad = (_ops.moe_zeroed(t, plan, ctx.tokens, ctx.key) for t in (x, grad))
    dw = gradient_of_matrices(ctx.key, plan, ctx.tokens, x, grad, w)
    return back, dw, [None] * len(plan), None, None


for _name, _gradient, _setup in (
    ("moe_dispatch_matmul", _dispatch_gradient, _dispatch_setup),
    ("moe_matmul_combine", _combine_gradient, _combine_setup),
    ("expert_matmul", _matmul_gradient, _matmul_setup),
):
    torch.library.register_autograd(f"tilescale_net::{_name}", _gradient, setup_context=_setup)


def moe_dispatch_matmul(
    layer: AllToAll, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, w: torch.Tensor, *,
    fused: bool | None = None,
) -> tuple[torch.Tensor, Dispatched]:  # fmt: skip
    """`moe_dispatch`, overlapped with the GEMMs of the rows with their experts' matrices.

    Args:
        layer: a result of `moe_layer` or an AllToAll, with `tile_rows`; bfloat16 or float16.
        x, topk_idx, topk_weights: as for `moe_dispatch`.
        w: [local experts, hidden, n], its last two axes in either order in memory. The first call of a shape constructs
            an object, collectively. In a region of torch.autocast, `x` and `w` are cast as for torch.mm.
        fused: whether GEMMs and communication overlap; None: if that was measured to be faster with `max_tokens` of the
            layer, see `kernels.fused.choice`.

    Returns:
        The results of the GEMMs, [capacity, n], with gradients of `x` and `w`; and the result of `moe_dispatch`.

    Raises:
        TypeError, ValueError: a wrong argument, by name; the other ranks wait for this one.
    """
    c = moe.checked_layer(layer).config
    arguments.check("moe_dispatch_matmul", x=x, topk_idx=topk_idx, topk_weights=topk_weights, w=w)
    x, w, topk_weights = *arguments.operands(x, w), arguments.as_weights(topk_weights)
    key = check_matrices("moe_dispatch_matmul", layer, "w", w, c.hidden, None)
    topk_idx, dropped = moe.within_capacity(c, topk_idx, topk_weights)
    h, rows, *tensors = _ops.moe_dispatch_matmul(x, topk_idx, topk_weights, w, fused, key)
    return h, moe.dispatched(layer, x.shape[0], rows, tensors, dropped)


def moe_matmul_combine(
    layer: AllToAll, h: torch.Tensor, w: torch.Tensor, received: Dispatched, weighted: bool = True, *,
    fused: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """`moe_combine` of the GEMMs of rows with their experts' matrices; each row is sent when its GEMMs are done.

    Args:
        layer, received, weighted: as for `moe_combine`; the layer has `tile_rows`.
        h: [capacity, k], expert-major rows.
        w: [local experts, k, hidden], its last two axes in either order in memory.
        fused: as for `moe_dispatch_matmul`.

    Returns:
        [tokens, hidden], with gradients of `h`, `w` and, if weighted, `received.row_weight`.

    Errors as for `moe_dispatch_matmul`.
    """
    c = moe.checked_layer(layer).config
    arguments.check("moe_matmul_combine", h=h, w=w)
    h, w = arguments.operands(h, w)
    key = check_matrices("moe_matmul_combine", layer, "w", w, None, c.hidden)
    plan = moe.plan_of("moe_matmul_combine", layer, received)
    weights = arguments.as_weights(received.row_weight) if weighted else h.new_empty((0,), dtype=torch.float32)
    tensors = [t.detach() for t in plan.tensors()]
    return _ops.moe_matmul_combine(h, w, weights, tensors, plan.tokens, fused, key)


def expert_matmul(layer: AllToAll, x: torch.Tensor, w: torch.Tensor, received: Dispatched) -> torch.Tensor:
    """GEMMs of expert-major rows, all arrived, with their experts' matrices, such as a gate's.

    Args:
        layer, received: as for `moe_matmul_combine`.
        x: [capacity, k].
        w: [local experts, k, n], its last two axes in either order in memory.

    Returns:
        [capacity, n], with gradients of `x` and `w`.

    Errors as for `moe_dispatch_matmul`.
    """
    arguments.check("expert_matmul", x=x, w=w)
    x, w = arguments.operands(x, w)
    key = check_matrices("expert_matmul", layer, "w", w, x.shape[-1], None)
    plan = moe.plan_of("expert_matmul", layer, received)
    return _ops.expert_matmul(x, w, [t.detach() for t in plan.tensors()], plan.tokens, key)
