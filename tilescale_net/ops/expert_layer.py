"""The experts of a layer as one call: dispatch, GEMM, SwiGLU, GEMM, combine; bfloat16 or FP8; with gradients.

Two operators, to SwiGLU and from it on. A layer of float8_e4m3fn quantises tokens before they travel, has GEMMs with scales
of blocks (`kernels.fused.scaled_gemm`), and quantises again after SwiGLU, in the same kernel. Its gradients are computed and
travel in bfloat16, by a second AllToAll with the routing of the first; quantisation counts as the identity.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tilescale_net.kernels.fused import scaled_gemm
from tilescale_net.kernels.fused import swiglu as rows_of
from tilescale_net.kernels.fused.expert_matmul import ScaledExpertMatmul
from tilescale_net.kernels.fused.scaled_gemm import scaled_matmul
from tilescale_net.kernels.fused.swiglu import SwiGLU
from tilescale_net.kernels.moe.all_to_all import AllToAll
from tilescale_net.kernels.moe.checks import beyond_capacity
from tilescale_net.kernels.moe.config import FP8_DTYPE
from tilescale_net.kernels.moe.handle import RoutingPlan
from tilescale_net.kernels.moe.row_ops import groups_of
from tilescale_net.ops import arguments, experts, moe
from tilescale_net.runtime.launch_args import dense

_ops = torch.ops.tilescale_net

WEIGHTED = ("combine", "activation")


def _ends(op: AllToAll, plan: RoutingPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of rows of each expert, and the first row."""
    counts, offsets, _ = plan.counts(op.config.ranks, op.config.local_experts)
    return counts, offsets


# -- FP8 --------------------------------------------------------------------------------------------------------------


def _gradients_of(op: AllToAll) -> AllToAll:
    """The AllToAll for gradients of an FP8 layer. Collective on first use."""
    key = ("gradients",)
    if key not in op.products:
        c = op.config
        op.products[key] = AllToAll(
            c.num_experts, c.max_tokens, c.hidden, c.top_k, torch.bfloat16, layout=c.layout, alignment=c.alignment,
            capacity=c.capacity, tile_rows=c.tile_rows, tuning=op.tuning, active=list(op.active_mask), group=op.world,
        )  # fmt: skip
    return op.products[key]


def _held(w: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 matrices [experts, n, k] and their scales; quantises if there are none."""
    return (dense(w), dense(scales)) if scales.numel() else rows_of.quantise_matrices(dense(w))


def _wide(op: AllToAll, w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Matrices [experts, n, k] of 16 bits, for gradients; an FP8 layer's, rounded as its forward multiplies them."""
    if op.config.dtype != FP8_DTYPE:
        return dense(w, in_either_order=True)
    return rows_of.widened(dense(w), dense(scales)) if scales.numel() else rows_of.round_matrices(dense(w))


def _gemm(
    op: AllToAll, plan: RoutingPlan, q: torch.Tensor, of_rows: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor
) -> torch.Tensor:
    """The rows of each expert times its matrix; padding is undefined."""
    (held, of_blocks), (counts, offsets) = _held(w, w_scales), _ends(op, plan)
    return scaled_matmul(q, held, of_rows, of_blocks, counts=counts, offsets=offsets)


def scaled_gemm_of(op: AllToAll, w: torch.Tensor, tells: bool) -> ScaledExpertMatmul:
    """The overlapping GEMM of matrices [experts, n, k] like `w`. Collective on first use.

    Args:
        tells: report complete tiles to a combine.
    """
    n, k = w.shape[1:]
    key = "blocks", k, n, tells
    if key not in op.products:
        usual = scaled_gemm.SIMULATED
        if op.device.type == "cuda":
            usual = scaled_gemm.TELLING if tells else scaled_gemm.DEFAULT
        rows: Any = op.config.tile_rows  # a number, by `_check_scaled`
        tiling = dataclasses.replace(usual, tile=(rows, *usual.tile[1:]))
        op.products[key] = ScaledExpertMatmul(op, k, n, tiling=tiling)
    return op.products[key]


def _can_overlap(layer: AllToAll) -> bool:
    """Whether 8-bit GEMMs can read row scales in the dispatch's output."""
    return layer.config.scale_words % scaled_gemm.SCALES_AT_ONCE == 0


def _kind(limit: float, alpha: float, shift: float) -> SwiGLU:
    return SwiGLU(None if limit == float("inf") else limit, alpha, shift)


@arguments.custom_op("moe_experts_up")
def _up(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor,
    keeps: bool, fused: bool | None, key: str,
) -> list[torch.Tensor]:  # fmt: skip
    """Dispatch and GEMM with `w` [experts, n, k]: products, rows and their scales, weights of rows, other tensors of the plan.

    Padding of products is undefined. `keeps`: a backward may follow; otherwise rows are not returned.
    """
    op = moe.called("moe_experts_up", key)
    choices = topk_idx.contiguous(), topk_weights.contiguous()
    overlaps = experts.is_fused(op, w.shape[1] // 2, fused)
    if op.config.dtype != FP8_DTYPE:
        columns = dense(w.transpose(1, 2), in_either_order=True)
        h, received = experts.arriving(op, columns, overlaps, dense(x), *choices, cleared=True)
    elif overlaps and _can_overlap(op):
        held, of_blocks = _held(w, w_scales)
        h = torch.empty((op.config.capacity, w.shape[1]), dtype=torch.bfloat16, device=w.device)
        pending = op.dispatch_send(rows_of.quantise_rows(dense(x)), *choices, cleared=True)
        scaled_gemm_of(op, held, False).arriving(pending, held.transpose(1, 2), h, w_scales=of_blocks)
        received = op.dispatch_recv(pending)
    else:
        received = op.dispatch(rows_of.quantise_rows(dense(x)), *choices, cleared=True)
        h = _gemm(op, received.handle.plan, received.x, received.scales, w, w_scales)
    plan = received.handle.plan
    *others, weights = plan.tensors()
    rows, scales = received.x, x.new_empty((0, 0)) if received.scales is None else received.scales
    if rows.dtype == FP8_DTYPE:  # as bytes: torch's checks of operators cannot compare FP8 numbers
        rows = rows.view(torch.uint8)
    if not keeps:
        return [h, rows[:0].clone(), scales[:0].clone(), weights, *others]
    rows = moe.without_padding(op, plan, rows)
    return [h, rows, moe.without_padding(op, plan, scales) if scales.numel() else scales, weights, *others]


@arguments.register_fake("moe_experts_up")
def _(x, topk_idx, topk_weights, w, w_scales, keeps, fused, key):
    rows, weights, *others = moe.dispatch_fake(x, topk_idx, topk_weights, key)
    kept, eight = rows.shape[0] if keeps else 0, moe.layer_of(key).config.dtype == FP8_DTYPE
    kept_rows = x.new_empty((kept, x.shape[1]), dtype=torch.uint8 if eight else x.dtype)
    scales = x.new_empty((kept, groups_of(x.shape[1])), dtype=torch.float32) if eight else x.new_empty((0, 0))
    return [x.new_empty((rows.shape[0], w.shape[1])), kept_rows, scales, weights, *others]


@arguments.custom_op("moe_experts_up_backward")
def _up_backward(
    grad: torch.Tensor, of_weights: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, plan: list[torch.Tensor],
    tokens: int, key: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of `x` and `topk_weights`, from the gradients of products and of rows' weights."""
    op = moe.called("backward of moe_experts_up", key)
    wide = _wide(op, w, w_scales)
    handle = moe.handle_of(key, RoutingPlan(tokens, *plan))
    return op.combine_values(experts.gemm_of(op, wide)(dense(grad), wide, handle), of_weights.contiguous(), handle)


@arguments.register_fake("moe_experts_up_backward")
def _(grad, of_weights, w, w_scales, plan, tokens, key):
    c = moe.layer_of(key).config
    return grad.new_empty((tokens, c.hidden)), of_weights.new_empty((tokens, c.top_k))


@arguments.custom_op("moe_widened")
def _widened(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """FP8 rows, held as bytes, as bfloat16."""
    return rows_of.widened(q.contiguous().view(FP8_DTYPE), scales.contiguous())


@torch.library.register_fake("tilescale_net::moe_widened")
def _(q, scales):
    return q.new_empty(q.shape, dtype=torch.bfloat16)


def _up_setup(ctx, inputs, output):
    _, _, _, w, w_scales, _, _, ctx.key = inputs
    ctx.tokens = inputs[0].shape[0]
    h, rows, scales, weights, *others = output
    ctx.save_for_backward(w, w_scales, rows, scales, *others, weights)
    ctx.of_h, ctx.of_weights = h.shape, weights.shape


def _up_gradient(ctx, grads):
    w, w_scales, rows, scales, *plan = ctx.saved_tensors
    dh, of_weights = grads[0], grads[3]
    kind = torch.bfloat16 if scales.numel() else rows.dtype
    of_weights = rows.new_zeros(ctx.of_weights, dtype=torch.float32) if of_weights is None else of_weights
    dh = rows.new_zeros(ctx.of_h, dtype=kind) if dh is None else dh
    x, topk_weights = _ops.moe_experts_up_backward(dh, of_weights, w, w_scales, plan, ctx.tokens, ctx.key)
    of_w = None
    if ctx.needs_input_grad[3]:
        rows = _ops.moe_widened(rows, scales) if scales.numel() else rows
        of_w = experts.gradient_of_matrices(ctx.key, plan, ctx.tokens, rows, dh, w.transpose(1, 2)).transpose(1, 2)
    return x, None, topk_weights, of_w, None, None, None, None


@arguments.custom_op("moe_experts_down")
def _down(
    h: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, weights: torch.Tensor, plan: list[torch.Tensor],
    tokens: int, early: bool, fused: bool | None, limit: float, alpha: float, shift: float, key: str,
) -> torch.Tensor:  # fmt: skip
    """SwiGLU of `h`, GEMM with `w` [experts, n, k] and combine. `weights` of rows are multiplied in SwiGLU (`early`), or by
    the combine."""
    op, plan_ = moe.called("moe_experts_down", key), RoutingPlan(tokens, *plan)
    kind, weights, handle = _kind(limit, alpha, shift), weights.contiguous(), moe.handle_of(key, plan_)
    counts, offsets = _ends(op, plan_)
    options: dict[str, Any] = dict(counts=counts, offsets=offsets, weights=weights if early else None, cleared=False)
    combined: dict[str, Any] = dict(weighted=False) if early else dict(weights=weights)
    overlaps = experts.is_fused(op, w.shape[2], fused)
    if op.config.dtype != FP8_DTYPE:
        inner, columns = rows_of.swiglu(dense(h), kind, **options), dense(w.transpose(1, 2), in_either_order=True)
        product = experts.gemm_of(op, columns)
        if overlaps:
            return product.combined(inner, columns, handle, **combined)
        return op.combine(product(inner, columns, handle), handle=handle, **combined)
    q, scales = rows_of.swiglu_quantised(dense(h), kind, **options)
    if overlaps and _can_overlap(op):
        held, of_blocks = _held(w, w_scales)
        columns = held.transpose(1, 2)
        return scaled_gemm_of(op, held, True).combined(
            q, columns, handle, x_scales=scales, w_scales=of_blocks, **combined
        )
    return op.combine(_gemm(op, plan_, q, scales, w, w_scales), handle=handle, **combined)


@arguments.register_fake("moe_experts_down")
def _(h, w, w_scales, weights, plan, tokens, early, fused, limit, alpha, shift, key):
    return h.new_empty((tokens, w.shape[1]))


@arguments.custom_op("moe_experts_down_backward")
def _down_backward(
    grad: torch.Tensor, h: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, weights: torch.Tensor,
    plan: list[torch.Tensor], tokens: int, fused: bool | None, limit: float, alpha: float, shift: float, keeps: bool, key: str,
) -> list[torch.Tensor]:  # fmt: skip
    """Gradients of `h` and of `weights`; and if it `keeps` them, for the gradient of `w`, SwiGLU's rows times their weights,
    and the rows of `grad`."""
    op, plan_ = moe.called("backward of moe_experts_down", key), RoutingPlan(tokens, *plan)
    handle, wide = moe.handle_of(key, plan_), _wide(op, w, w_scales)
    if op.config.dtype == FP8_DTYPE:
        received = _gradients_of(op).dispatch(dense(grad), handle=handle)
        back = experts.gemm_of(op, wide)(received.x, wide, handle)
    else:
        back, received = experts.arriving(op, wide, experts.is_fused(op, w.shape[2], fused), dense(grad), handle=handle)
    # Weights are a factor of each row, wherever they are multiplied.
    counts, offsets = _ends(op, plan_)
    options: dict[str, Any] = dict(counts=counts, offsets=offsets, weights=weights.contiguous(), keeps=keeps)
    of_h, of_weights, inner = rows_of.swiglu_gradient(dense(h), back, _kind(limit, alpha, shift), **options)
    assert of_weights is not None  # there are weights
    if inner is None:
        return [of_h, of_weights, grad.new_empty((0, 0)), grad.new_empty((0, 0))]
    return [of_h, of_weights, inner, moe.without_padding(op, plan_, received.x)]


@arguments.register_fake("moe_experts_down_backward")
def _(grad, h, w, w_scales, weights, plan, tokens, fused, limit, alpha, shift, keeps, key):
    shapes = ((h.shape[0], w.shape[2]), (h.shape[0], w.shape[1])) if keeps else ((0, 0), (0, 0))
    return [h.new_empty(h.shape), weights.new_empty(weights.shape), *(grad.new_empty(shape) for shape in shapes)]


def _down_setup(ctx, inputs, output):
    h, w, w_scales, weights, plan, ctx.tokens, _, ctx.fused, *kind, ctx.key = inputs
    ctx.kind = kind
    ctx.save_for_backward(h, w, w_scales, weights, *plan)


def _down_gradient(ctx, grad):
    h, w, w_scales, weights, *plan = ctx.saved_tensors
    keeps = ctx.needs_input_grad[1]
    of_h, of_weights, inner, rows = _ops.moe_experts_down_backward(
        grad, h, w, w_scales, weights, plan, ctx.tokens, ctx.fused, *ctx.kind, keeps, ctx.key
    )
    of_w = None
    if keeps:
        columns = w.transpose(1, 2)
        of_w = experts.gradient_of_matrices(ctx.key, plan, ctx.tokens, inner, rows, columns).transpose(1, 2)
    return of_h, of_w, None, of_weights, [None] * len(plan), None, None, None, None, None, None, None


for _name, _gradient, _setup in (
    ("moe_experts_up", _up_gradient, _up_setup),
    ("moe_experts_down", _down_gradient, _down_setup),
):
    torch.library.register_autograd(f"tilescale_net::{_name}", _gradient, setup_context=_setup)


# -- the layer --------------------------------------------------------------------------------------------------------


def _check_scaled(layer: AllToAll, w_up: torch.Tensor, w_down: torch.Tensor, scales) -> tuple[torch.Tensor, ...]:
    """Both matrices as [experts, n, k] with their scales, empty for bfloat16. TypeError, ValueError."""
    call, c = "moe_experts", layer.config
    if c.mode != "throughput" or c.combine_dtype != torch.bfloat16 or c.scale_words != groups_of(c.hidden):
        raise ValueError(
            f"{call}: a layer of {FP8_DTYPE} must be of throughput mode, with scales of 128 elements and a combine of bfloat16"
        )
    if c.tile_rows is None:
        raise ValueError(
            f"{call}: the layer counts no tiles; make it with tile_rows=128 (or more), and alignment as large"
        )
    inner = w_down.shape[1] if w_down.dim() == 3 else -1
    matrices = []
    for i, (what, w, shape) in enumerate(
        (("w_up", w_up, (c.hidden, 2 * inner)), ("w_down", w_down, (inner, c.hidden)))
    ):
        if w.dtype not in (FP8_DTYPE, torch.bfloat16):
            raise TypeError(f"{call}: {what} has dtype {w.dtype}; it must be {FP8_DTYPE} or torch.bfloat16")
        if tuple(w.shape) != (c.local_experts, *shape):
            raise ValueError(f"{call}: {what} has shape {list(w.shape)}; it must be {[c.local_experts, *shape]}")
        if (w.dtype == FP8_DTYPE) != (scales is not None):
            raise TypeError(f"{call}: {what} is of {w.dtype}; matrices of {FP8_DTYPE} need scales, others take none")
        blocks = (c.local_experts, groups_of(shape[1]), groups_of(shape[0]))
        if scales is not None and (tuple(scales[i].shape) != blocks or scales[i].dtype != torch.float32):
            raise ValueError(
                f"{call}: the scales of {what} are {list(scales[i].shape)} of {scales[i].dtype}; they must be {list(blocks)} of "
                "torch.float32, one for each 128 x 128 elements, columns first"
            )
        matrices += [w.transpose(1, 2), w.new_empty((0,), dtype=torch.float32) if scales is None else scales[i]]
    if inner % 16 or not inner:
        raise ValueError(f"{call}: w_down has {inner} rows; they must be a multiple of 16, and not 0")
    return tuple(matrices)


def _check_shared(shared: Any, hidden: int) -> None:
    """Raise TypeError, ValueError unless `shared` is the pair of matrices of a shared expert."""
    call = "moe_experts"
    if not isinstance(shared, tuple) or len(shared) != 2:
        raise TypeError(f"{call}: shared must be a pair of tensors, w_up and w_down")
    up, down = shared
    arguments.check(call, w_up_of_shared=up, w_down_of_shared=down)
    if up.dim() != 2 or down.dim() != 2 or (*up.shape, down.shape[1]) != (hidden, 2 * down.shape[0], hidden):
        shapes = f"{list(up.shape)} and {list(down.shape)}"
        raise ValueError(
            f"{call}: shared has shapes {shapes}; they must be [{hidden}, 2 * inner] and [inner, {hidden}]"
        )
    if up.dtype != down.dtype:
        raise TypeError(f"{call}: shared has dtypes {up.dtype} and {down.dtype}; they must be equal")


def moe_experts(
    layer: AllToAll, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, w_up: torch.Tensor,
    w_down: torch.Tensor, *, activation: SwiGLU | None = None, weights: str = "combine",
    shared: tuple[torch.Tensor, torch.Tensor] | None = None, scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    fused: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """The experts of a layer: each token to its experts, `SwiGLU(x @ w_up) @ w_down` there, and the weighted sums back.

    Args:
        layer: of `moe_layer` or an AllToAll, with `tile_rows`; of bfloat16 or float16, or of float8_e4m3fn: tokens then
            travel, and both GEMMs multiply, in 8 bits with scales of 128 elements (128 x 128 of matrices).
        x: [tokens, hidden], bfloat16 or float16; bfloat16 for a layer of 8 bits.
        topk_idx, topk_weights: as for `moe_dispatch`.
        w_up: [local experts, hidden, 2 * inner], columns of the gates, then the others; its last two axes in either order
            in memory (for 8 bits the transpose of a contiguous tensor is not copied).
        w_down: [local experts, inner, hidden], as `w_up`.
        activation: variant of SwiGLU; default the plain one.
        weights: the step that multiplies rows by their weights: "combine", after the second GEMM in float32, or
            "activation", before it.
        shared: `w_up` [hidden, 2 * inner] and `w_down` [inner, hidden] of an expert for every token, of the dtype of `x`;
            computed by torch.
        scales: of both float8_e4m3fn matrices: float32 [local experts, blocks of columns, blocks of rows], the results of
            `quantise_weights` of `kernels.fused.scaled_gemm` for the transposed matrices. Matrices of bfloat16 are
            quantised in each call, and get gradients.
        fused: as for `moe_dispatch_matmul`; GEMMs of 8 bits overlap if `hidden` is a multiple of 512.

    Returns:
        [tokens, hidden] of the dtype of `x`, with gradients to `x`, `topk_weights`, 16-bit matrices and the shared
        ones. Backward runs on all ranks or on none; for a layer of 8 bits its first run constructs a second AllToAll: run it
        once before you capture a CUDA graph.

    Raises:
        TypeError, ValueError: a wrong argument, by name; the other ranks wait for this one.
    """
    kind, c = activation or SwiGLU(), moe.checked_layer(layer).config
    if not isinstance(kind, SwiGLU):
        raise TypeError(f"moe_experts: activation is {activation!r}; it must be a SwiGLU")
    if weights not in WEIGHTED:
        raise ValueError(f"moe_experts: weights is {weights!r}; it must be one of {', '.join(WEIGHTED)}")
    arguments.check("moe_experts", x=x, topk_idx=topk_idx, topk_weights=topk_weights, w_up=w_up, w_down=w_down)
    early, constants = weights == "activation", (kind.limit, kind.alpha, kind.shift)
    if shared is not None:
        _check_shared(shared, c.hidden)
    rows = x
    if c.dtype == FP8_DTYPE:
        up, of_up, down, of_down = _check_scaled(layer, w_up, w_down, scales)
        key = layer.key
        if fused and not _can_overlap(layer):
            raise ValueError(
                f"moe_experts: hidden is {c.hidden}; GEMMs of {FP8_DTYPE} overlap where it is a multiple of 512"
            )
        if x.dtype != torch.bfloat16:
            raise TypeError(f"moe_experts: x has dtype {x.dtype}; of a layer of {FP8_DTYPE} it must be torch.bfloat16")
    else:
        if scales is not None:
            raise TypeError(f"moe_experts: scales go with a layer of {FP8_DTYPE}; this one is of {c.dtype}")
        if w_up.shape[-1] != 2 * w_down.shape[-2]:
            raise ValueError(
                f"moe_experts: w_up has {w_up.shape[-1]} columns; w_down has {w_down.shape[-2]} rows, so they must be twice as many"
            )
        rows, up, down = arguments.operands(x, w_up, w_down)
        key = experts.check_matrices("moe_experts", layer, "w_up", up, c.hidden, None)
        experts.check_matrices("moe_experts", layer, "w_down", down, None, c.hidden)
        up, down = up.transpose(1, 2), down.transpose(1, 2)
        of_up = of_down = up.new_empty((0,), dtype=torch.float32)
    topk_weights = arguments.as_weights(topk_weights)
    if c.expert_capacity is not None:
        dropped = beyond_capacity(topk_idx, topk_weights.detach(), c.expert_capacity, c.drop)
        topk_idx = topk_idx.masked_fill(dropped, -1)
    keeps = torch.is_grad_enabled() and any(t.requires_grad for t in (rows, topk_weights, up, down))
    h, _, _, of_rows, *others = _ops.moe_experts_up(rows, topk_idx, topk_weights, up, of_up, keeps, fused, key)
    plan = [t.detach() for t in (*others, of_rows)]
    out = _ops.moe_experts_down(h, down, of_down, of_rows, plan, x.shape[0], early, fused, *constants, key)
    if shared is None:
        return out
    up, down = arguments.operands(*shared)
    return out + kind(x.to(up.dtype) @ up) @ down
