"""The experts of a layer as one call: dispatch, GEMM, SwiGLU, GEMM, combine; bfloat16 or FP8; with gradients.

There are two operators, before and after SwiGLU. A float8_e4m3fn layer quantises tokens before the dispatch, runs GEMMs with
block scales (`kernels.fused.scaled_gemm`), and quantises again in the SwiGLU kernel. Its gradients are computed and sent in
bfloat16, by a second AllToAll with the routing of the first; quantisation has the gradient of the identity.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tilescale_net.kernels.fused import scaled_gemm
from tilescale_net.kernels.fused import swiglu as row_kernels
from tilescale_net.kernels.fused.expert_matmul import ScaledExpertMatmul
from tilescale_net.kernels.fused.scaled_gemm import scaled_matmul
from tilescale_net.kernels.fused.swiglu import SwiGLU
from tilescale_net.kernels.moe.all_to_all import AllToAll
from tilescale_net.kernels.moe.config import FP8_DTYPE
from tilescale_net.kernels.moe.handle import RoutingPlan
from tilescale_net.kernels.moe.row_ops import groups_of
from tilescale_net.ops import arguments, experts, moe
from tilescale_net.runtime.launch_args import dense

_ops = torch.ops.tilescale_net

WEIGHTED = ("combine", "activation")


def _ends(op: AllToAll, plan: RoutingPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of rows and first row of each expert."""
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


def _quantised_matrices(w: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 matrices [experts, n, k] and their scales; quantises matrices without scales."""
    return (dense(w), dense(scales)) if scales.numel() else row_kernels.quantise_matrices(dense(w))


def _wide(op: AllToAll, w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Matrices [experts, n, k] in 16 bits, for gradients; of an FP8 layer, rounded as in its forward."""
    if op.config.dtype != FP8_DTYPE:
        return dense(w, in_either_order=True)
    return row_kernels.widened(dense(w), dense(scales)) if scales.numel() else row_kernels.round_matrices(dense(w))


def _gemm(
    op: AllToAll, plan: RoutingPlan, q: torch.Tensor, row_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor
) -> torch.Tensor:
    """The rows of each expert times its matrix; padding is undefined."""
    (matrices, block_scales), (counts, offsets) = _quantised_matrices(w, w_scales), _ends(op, plan)
    return scaled_matmul(q, matrices, row_scales, block_scales, counts=counts, offsets=offsets)


def scaled_gemm_of(op: AllToAll, w: torch.Tensor, tells: bool) -> ScaledExpertMatmul:
    """The overlapping GEMM of matrices [experts, n, k] like `w`. Collective on first use.

    Args:
        tells: announce complete tiles to a combine.
    """
    n, k = w.shape[1:]
    key = "blocks", k, n, tells
    if key not in op.products:
        default = scaled_gemm.SIMULATED
        if op.device.type == "cuda":
            default = scaled_gemm.TELLING if tells else scaled_gemm.DEFAULT
        rows: Any = op.config.tile_rows  # not None, see `_check_scaled`
        tiling = dataclasses.replace(default, tile=(rows, *default.tile[1:]))
        op.products[key] = ScaledExpertMatmul(op, k, n, tiling=tiling)
    return op.products[key]


def _can_overlap(layer: AllToAll) -> bool:
    """Whether FP8 GEMMs can read row scales in the dispatch's output."""
    return layer.config.scale_words % scaled_gemm.SCALES_AT_ONCE == 0


def _activation(limit: float, alpha: float, shift: float) -> SwiGLU:
    return SwiGLU(None if limit == float("inf") else limit, alpha, shift)


@arguments.custom_op("moe_experts_up")
def _up(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor,
    keeps: bool, fused: bool | None, key: str,
) -> list[torch.Tensor]:  # fmt: skip
    """Dispatch and GEMM with `w` [experts, n, k]; returns results of the GEMM (undefined in padding), rows and their scales,
    weights of rows, and the other tensors of the plan. `keeps`: return rows, for the backward.
    """
    op = moe.called("moe_experts_up", key)
    choices = topk_idx.contiguous(), topk_weights.contiguous()
    overlaps = experts.is_fused(op, w.shape[1] // 2, fused)
    if op.config.dtype != FP8_DTYPE:
        columns = dense(w.transpose(1, 2), in_either_order=True)
        h, received = experts.arriving(op, columns, overlaps, dense(x), *choices, cleared=True)
    elif overlaps and _can_overlap(op):
        matrices, block_scales = _quantised_matrices(w, w_scales)
        h = torch.empty((op.config.capacity, w.shape[1]), dtype=torch.bfloat16, device=w.device)
        pending = op.dispatch_send(row_kernels.quantise_rows(dense(x)), *choices, cleared=True)
        scaled_gemm_of(op, matrices, False).arriving(pending, matrices.transpose(1, 2), h, w_scales=block_scales)
        received = op.dispatch_recv(pending)
    else:
        received = op.dispatch(row_kernels.quantise_rows(dense(x)), *choices, cleared=True)
        h = _gemm(op, received.handle.plan, received.x, received.scales, w, w_scales)
    plan = received.handle.plan
    *others, weights = plan.tensors()
    rows, scales = received.x, x.new_empty((0, 0)) if received.scales is None else received.scales
    if rows.dtype == FP8_DTYPE:  # as bytes, because torch's checks of operators cannot compare FP8 tensors
        rows = rows.view(torch.uint8)
    if not keeps:
        return [h, rows[:0].clone(), scales[:0].clone(), weights, *others]
    rows = moe.without_padding(op, plan, rows)
    return [h, rows, moe.without_padding(op, plan, scales) if scales.numel() else scales, weights, *others]


@arguments.register_fake("moe_experts_up")
def _(x, topk_idx, topk_weights, w, w_scales, keeps, fused, key):
    rows, weights, *others = moe.dispatch_fake(x, topk_idx, topk_weights, key)
    count, fp8 = rows.shape[0] if keeps else 0, moe.layer_of(key).config.dtype == FP8_DTYPE
    received = x.new_empty((count, x.shape[1]), dtype=torch.uint8 if fp8 else x.dtype)
    scales = x.new_empty((count, groups_of(x.shape[1])), dtype=torch.float32) if fp8 else x.new_empty((0, 0))
    return [x.new_empty((rows.shape[0], w.shape[1])), received, scales, weights, *others]


@arguments.custom_op("moe_experts_up_backward")
def _up_backward(
    grad: torch.Tensor, grad_weights: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, plan: list[torch.Tensor],
    tokens: int, key: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of `x` and `topk_weights`, from the gradients of the GEMM's results and of the rows' weights."""
    op = moe.called("backward of moe_experts_up", key)
    wide = _wide(op, w, w_scales)
    handle = moe.handle_of(key, RoutingPlan(tokens, *plan))
    return op.combine_values(experts.gemm_of(op, wide)(dense(grad), wide, handle), grad_weights.contiguous(), handle)


@arguments.register_fake("moe_experts_up_backward")
def _(grad, grad_weights, w, w_scales, plan, tokens, key):
    c = moe.layer_of(key).config
    return grad.new_empty((tokens, c.hidden)), grad_weights.new_empty((tokens, c.top_k))


@arguments.custom_op("moe_widened")
def _widened(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantise FP8 rows, passed as bytes, to bfloat16."""
    return row_kernels.widened(q.contiguous().view(FP8_DTYPE), scales.contiguous())


@torch.library.register_fake("tilescale_net::moe_widened")
def _(q, scales):
    return q.new_empty(q.shape, dtype=torch.bfloat16)


def _up_setup(ctx, inputs, output):
    _, _, _, w, w_scales, _, _, ctx.key = inputs
    ctx.tokens = inputs[0].shape[0]
    h, rows, scales, weights, *others = output
    ctx.save_for_backward(w, w_scales, rows, scales, *others, weights)
    ctx.h_shape, ctx.weights_shape = h.shape, weights.shape


def _up_gradient(ctx, grads):
    w, w_scales, rows, scales, *plan = ctx.saved_tensors
    dh, grad_weights = grads[0], grads[3]
    dtype = torch.bfloat16 if scales.numel() else rows.dtype
    grad_weights = rows.new_zeros(ctx.weights_shape, dtype=torch.float32) if grad_weights is None else grad_weights
    dh = rows.new_zeros(ctx.h_shape, dtype=dtype) if dh is None else dh
    x, topk_weights = _ops.moe_experts_up_backward(dh, grad_weights, w, w_scales, plan, ctx.tokens, ctx.key)
    dw = None
    if ctx.needs_input_grad[3]:
        rows = _ops.moe_widened(rows, scales) if scales.numel() else rows
        dw = experts.gradient_of_matrices(ctx.key, plan, ctx.tokens, rows, dh, w.transpose(1, 2)).transpose(1, 2)
    return x, None, topk_weights, dw, None, None, None, None


@arguments.custom_op("moe_experts_down")
def _down(
    h: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, weights: torch.Tensor, plan: list[torch.Tensor],
    tokens: int, early: bool, fused: bool | None, limit: float, alpha: float, shift: float, key: str,
) -> torch.Tensor:  # fmt: skip
    """SwiGLU of `h`, GEMM with `w` [experts, n, k] and combine. SwiGLU (`early`) or the combine multiplies rows by
    `weights`."""
    op, routing = moe.called("moe_experts_down", key), RoutingPlan(tokens, *plan)
    activation, weights = _activation(limit, alpha, shift), weights.contiguous()
    handle, (counts, offsets) = moe.handle_of(key, routing), _ends(op, routing)
    options: dict[str, Any] = dict(counts=counts, offsets=offsets, weights=weights if early else None, cleared=False)
    combined: dict[str, Any] = dict(weighted=False) if early else dict(weights=weights)
    overlaps = experts.is_fused(op, w.shape[2], fused)
    if op.config.dtype != FP8_DTYPE:
        inner, columns = (
            row_kernels.swiglu(dense(h), activation, **options),
            dense(w.transpose(1, 2), in_either_order=True),
        )
        gemm = experts.gemm_of(op, columns)
        if overlaps:
            return gemm.combined(inner, columns, handle, **combined)
        return op.combine(gemm(inner, columns, handle), handle=handle, **combined)
    q, scales = row_kernels.swiglu_quantised(dense(h), activation, **options)
    if overlaps and _can_overlap(op):
        matrices, block_scales = _quantised_matrices(w, w_scales)
        columns = matrices.transpose(1, 2)
        return scaled_gemm_of(op, matrices, True).combined(
            q, columns, handle, x_scales=scales, w_scales=block_scales, **combined
        )
    return op.combine(_gemm(op, routing, q, scales, w, w_scales), handle=handle, **combined)


@arguments.register_fake("moe_experts_down")
def _(h, w, w_scales, weights, plan, tokens, early, fused, limit, alpha, shift, key):
    return h.new_empty((tokens, w.shape[1]))


@arguments.custom_op("moe_experts_down_backward")
def _down_backward(
    grad: torch.Tensor, h: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, weights: torch.Tensor,
    plan: list[torch.Tensor], tokens: int, fused: bool | None, limit: float, alpha: float, shift: float, keeps: bool, key: str,
) -> list[torch.Tensor]:  # fmt: skip
    """Gradients of `h` and of `weights`; with `keeps`, also SwiGLU's rows times their weights and the rows of `grad`, for the
    gradient of `w`."""
    op, routing = moe.called("backward of moe_experts_down", key), RoutingPlan(tokens, *plan)
    handle, wide = moe.handle_of(key, routing), _wide(op, w, w_scales)
    if op.config.dtype == FP8_DTYPE:
        received = _gradients_of(op).dispatch(dense(grad), handle=handle)
        back = experts.gemm_of(op, wide)(received.x, wide, handle)
    else:
        back, received = experts.arriving(op, wide, experts.is_fused(op, w.shape[2], fused), dense(grad), handle=handle)
    # The weight is a factor of the row in both cases.
    counts, offsets = _ends(op, routing)
    options: dict[str, Any] = dict(counts=counts, offsets=offsets, weights=weights.contiguous(), keeps=keeps)
    dh, grad_weights, inner = row_kernels.swiglu_gradient(dense(h), back, _activation(limit, alpha, shift), **options)
    assert grad_weights is not None
    if inner is None:
        return [dh, grad_weights, grad.new_empty((0, 0)), grad.new_empty((0, 0))]
    return [dh, grad_weights, inner, moe.without_padding(op, routing, received.x)]


@arguments.register_fake("moe_experts_down_backward")
def _(grad, h, w, w_scales, weights, plan, tokens, fused, limit, alpha, shift, keeps, key):
    shapes = ((h.shape[0], w.shape[2]), (h.shape[0], w.shape[1])) if keeps else ((0, 0), (0, 0))
    return [h.new_empty(h.shape), weights.new_empty(weights.shape), *(grad.new_empty(shape) for shape in shapes)]


def _down_setup(ctx, inputs, output):
    h, w, w_scales, weights, plan, ctx.tokens, _, ctx.fused, *ctx.activation, ctx.key = inputs
    ctx.save_for_backward(h, w, w_scales, weights, *plan)


def _down_gradient(ctx, grad):
    h, w, w_scales, weights, *plan = ctx.saved_tensors
    keeps = ctx.needs_input_grad[1]
    dh, grad_weights, inner, rows = _ops.moe_experts_down_backward(
        grad, h, w, w_scales, weights, plan, ctx.tokens, ctx.fused, *ctx.activation, keeps, ctx.key
    )
    dw = None
    if keeps:
        columns = w.transpose(1, 2)
        dw = experts.gradient_of_matrices(ctx.key, plan, ctx.tokens, inner, rows, columns).transpose(1, 2)
    return dh, dw, None, grad_weights, [None] * len(plan), None, None, None, None, None, None, None


for _name, _gradient, _setup in (
    ("moe_experts_up", _up_gradient, _up_setup),
    ("moe_experts_down", _down_gradient, _down_setup),
):
    torch.library.register_autograd(f"tilescale_net::{_name}", _gradient, setup_context=_setup)


# -- the layer --------------------------------------------------------------------------------------------------------


def _check_scaled(layer: AllToAll, w_up: torch.Tensor, w_down: torch.Tensor, scales) -> tuple[torch.Tensor, ...]:
    """Both matrices as [experts, n, k], and their scales, empty for bfloat16. Raises TypeError or ValueError."""
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
    for i, (name, w, shape) in enumerate(
        (("w_up", w_up, (c.hidden, 2 * inner)), ("w_down", w_down, (inner, c.hidden)))
    ):
        if w.dtype not in (FP8_DTYPE, torch.bfloat16):
            raise TypeError(f"{call}: {name} has dtype {w.dtype}; it must be {FP8_DTYPE} or torch.bfloat16")
        if tuple(w.shape) != (c.local_experts, *shape):
            raise ValueError(f"{call}: {name} has shape {list(w.shape)}; it must be {[c.local_experts, *shape]}")
        if (w.dtype == FP8_DTYPE) != (scales is not None):
            raise TypeError(f"{call}: {name} is of {w.dtype}; matrices of {FP8_DTYPE} need scales, others take none")
        blocks = (c.local_experts, groups_of(shape[1]), groups_of(shape[0]))
        if scales is not None and (tuple(scales[i].shape) != blocks or scales[i].dtype != torch.float32):
            raise ValueError(
                f"{call}: the scales of {name} are {list(scales[i].shape)} of {scales[i].dtype}; they must be {list(blocks)} of "
                "torch.float32, one for each 128 x 128 elements, columns first"
            )
        matrices += [w.transpose(1, 2), w.new_empty((0,), dtype=torch.float32) if scales is None else scales[i]]
    if inner % 16 or not inner:
        raise ValueError(f"{call}: w_down has {inner} rows; they must be a multiple of 16, and not 0")
    return tuple(matrices)


def _check_shared(shared: Any, hidden: int) -> None:
    """Raise TypeError or ValueError unless `shared` is the pair of matrices of a shared expert."""
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
    """The experts of a layer: dispatch, `SwiGLU(x @ w_up) @ w_down` of each expert, and combine.

    Args:
        layer: a result of `moe_layer` or an AllToAll, with `tile_rows`; of bfloat16 or float16, or of float8_e4m3fn: then
            tokens are sent and both GEMMs run in FP8, with scales of 128 elements (128 x 128 of matrices).
        x: [tokens, hidden], bfloat16 or float16; bfloat16 for an FP8 layer.
        topk_idx, topk_weights: as for `moe_dispatch`.
        w_up: [local experts, hidden, 2 * inner], the columns of gate, then of up; its last two axes in either memory order
            (for FP8 the transpose of a contiguous tensor is not copied).
        w_down: [local experts, inner, hidden], as `w_up`.
        activation: variant of SwiGLU; default: plain SwiGLU.
        weights: the step that multiplies rows by their weights: "combine", after the second GEMM in float32, or
            "activation", before it.
        shared: `w_up` [hidden, 2 * inner] and `w_down` [inner, hidden] of an expert for every token, of the dtype of `x`;
            computed by torch.
        scales: scales of both float8_e4m3fn matrices, float32 [local experts, blocks of columns, blocks of rows]: results
            of `kernels.fused.scaled_gemm.quantise_weights` for the transposed matrices. bfloat16 matrices are quantised in
            each call, and get gradients.
        fused: as for `moe_dispatch_matmul`; FP8 GEMMs overlap if `hidden` is a multiple of 512.

    Returns:
        [tokens, hidden] of the dtype of `x`, with gradients of `x`, `topk_weights`, 16-bit and shared matrices. Backward
        runs on all ranks or on none; for an FP8 layer its first run constructs a second AllToAll: run it once before you
        capture a CUDA graph.

    Raises:
        TypeError, ValueError: a wrong argument, by name; the other ranks wait for this one.
    """
    variant, c = activation or SwiGLU(), moe.checked_layer(layer).config
    if not isinstance(variant, SwiGLU):
        raise TypeError(f"moe_experts: activation is {activation!r}; it must be a SwiGLU")
    if weights not in WEIGHTED:
        raise ValueError(f"moe_experts: weights is {weights!r}; it must be one of {', '.join(WEIGHTED)}")
    arguments.check("moe_experts", x=x, topk_idx=topk_idx, topk_weights=topk_weights, w_up=w_up, w_down=w_down)
    early, constants = weights == "activation", (variant.limit, variant.alpha, variant.shift)
    if shared is not None:
        _check_shared(shared, c.hidden)
    rows = x
    if c.dtype == FP8_DTYPE:
        up, up_scales, down, down_scales = _check_scaled(layer, w_up, w_down, scales)
        key = layer.key
        if fused and not _can_overlap(layer):
            raise ValueError(
                f"moe_experts: hidden is {c.hidden}; GEMMs of {FP8_DTYPE} overlap if it is a multiple of 512"
            )
        if x.dtype != torch.bfloat16:
            raise TypeError(f"moe_experts: x has dtype {x.dtype}; for a layer of {FP8_DTYPE} it must be torch.bfloat16")
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
        up_scales = down_scales = up.new_empty((0,), dtype=torch.float32)
    topk_weights = arguments.as_weights(topk_weights)
    topk_idx, _ = moe.within_capacity(c, topk_idx, topk_weights)
    keeps = torch.is_grad_enabled() and any(t.requires_grad for t in (rows, topk_weights, up, down))
    h, _, _, row_weights, *others = _ops.moe_experts_up(rows, topk_idx, topk_weights, up, up_scales, keeps, fused, key)
    plan = [t.detach() for t in (*others, row_weights)]
    out = _ops.moe_experts_down(h, down, down_scales, row_weights, plan, x.shape[0], early, fused, *constants, key)
    if shared is None:
        return out
    up, down = arguments.operands(*shared)
    return out + variant(x.to(up.dtype) @ up) @ down
