"""The experts of a layer as one call: dispatch, GEMM, SwiGLU, GEMM, combine; bfloat16 or FP8; with gradients.

A layer of bfloat16 or float16 calls the operators of `experts`, which decide whether to overlap. A layer of
float8_e4m3fn quantises tokens before they travel, has GEMMs with scales of blocks (`kernels.fused.scaled_gemm`), and
quantises again after SwiGLU, in the same kernel. Its gradients are computed and travel in bfloat16, by a second AllToAll
with the routing of the first; quantisation counts as the identity.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tilescale_net.kernels.fused import scaled_gemm
from tilescale_net.kernels.fused import swiglu as rows_of
from tilescale_net.kernels.fused.expert_matmul import ScaledExpertMatmul
from tilescale_net.kernels.fused.scaled_gemm import quantise_weights, scaled_matmul
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
    """Rows of each expert and where they begin."""
    counts, offsets, _ = plan.counts(op.config.ranks, op.config.local_experts)
    return counts, offsets


# -- SwiGLU -----------------------------------------------------------------------------------------------------------


@arguments.custom_op("swiglu")
def _swiglu(
    h: torch.Tensor, weights: torch.Tensor, end: torch.Tensor, limit: float, alpha: float, shift: float
) -> torch.Tensor:
    """SwiGLU of the rows before end[0] (an empty tensor: all) times `weights` (an empty tensor: 1)."""
    kind = SwiGLU(None if limit == float("inf") else limit, alpha, shift)
    given = weights.contiguous() if weights.numel() else None
    return rows_of.swiglu(dense(h), kind, end=end if end.numel() else None, weights=given)


@torch.library.register_fake("tilescale_net::swiglu")
def _(h, weights, end, limit, alpha, shift):
    return h.new_empty((h.shape[0], h.shape[1] // 2))


def _swiglu_setup(ctx, inputs, output):
    h, weights, end, *ctx.kind = inputs
    ctx.save_for_backward(h, weights, end)


@arguments.custom_op("swiglu_backward")
def _swiglu_backward(
    grad: torch.Tensor, h: torch.Tensor, weights: torch.Tensor, end: torch.Tensor, limit: float, alpha: float,
    shift: float, keeps: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of `h` and of `weights` (empty where they are), and the rows times `weights` if it `keeps` them."""
    given = dict(end=end if end.numel() else None, weights=weights.contiguous() if weights.numel() else None)
    kind = SwiGLU(None if limit == float("inf") else limit, alpha, shift)
    of_h, of_weights, kept = rows_of.swiglu_gradient(dense(h), dense(grad), kind, **given, keeps=keeps)
    none = grad.new_empty((0,))
    return of_h, none.float() if of_weights is None else of_weights, none if kept is None else kept


@torch.library.register_fake("tilescale_net::swiglu_backward")
def _(grad, h, weights, end, limit, alpha, shift, keeps):
    kept = grad.new_empty(grad.shape) if keeps else grad.new_empty((0,))
    return h.new_empty(h.shape), weights.new_empty(weights.shape, dtype=torch.float32), kept


def _swiglu_gradient(ctx, grad):
    h, weights, end = ctx.saved_tensors
    of_h, of_weights, _ = _ops.swiglu_backward(grad, h, weights, end, *ctx.kind, False)
    return of_h, of_weights if weights.numel() else None, None, None, None, None


torch.library.register_autograd("tilescale_net::swiglu", _swiglu_gradient, setup_context=_swiglu_setup)


# -- eight bits -------------------------------------------------------------------------------------------------------


def _gradients_of(op: AllToAll) -> AllToAll:
    """The AllToAll that brings gradients of a layer of eight bits; made when first needed, by all ranks together."""
    key = ("gradients",)
    if key not in op.products:
        c = op.config
        op.products[key] = AllToAll(
            c.num_experts, c.max_tokens, c.hidden, c.top_k, torch.bfloat16, layout=c.layout, alignment=c.alignment,
            capacity=c.capacity, tile_rows=c.tile_rows, tuning=op.tuning, active=list(op.active_mask), group=op.world,
        )  # fmt: skip
    return op.products[key]


def _held(w: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices [experts, n, k] of eight bits and their scales; quantised if there are none."""
    return (dense(w), dense(scales)) if scales.numel() else quantise_weights(w)


def _wide(w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The same as bfloat16, for gradients."""
    return rows_of.widened(*_held(w, scales))


def _gemm(
    op: AllToAll, plan: RoutingPlan, q: torch.Tensor, of_rows: torch.Tensor, w, w_scales, cleared: bool
) -> torch.Tensor:
    """The rows of each expert times its matrix. `cleared`: the others are zero."""
    counts, offsets = _ends(op, plan)
    held, of_blocks = _held(w, w_scales)
    made = torch.zeros if cleared else torch.empty
    out = made((q.shape[0], w.shape[1]), dtype=torch.bfloat16, device=q.device)
    return scaled_matmul(q, held, of_rows, of_blocks, out=out, counts=counts, offsets=offsets)


def scaled_gemm_of(op: AllToAll, w: torch.Tensor, tells: bool) -> ScaledExpertMatmul:
    """The GEMM that overlaps, of matrices [experts, n, k] like `w`; made on first use, by all ranks together.

    Args:
        tells: a combine, of which tiles are done.
    """
    n, k = w.shape[1:]
    key = "blocks", k, n, tells
    if key not in op.products:
        usual = scaled_gemm.SIMULATED
        if op.device.type == "cuda":
            usual = scaled_gemm.TELLING if tells else scaled_gemm.DEFAULT
        rows: Any = op.config.tile_rows  # a number: `_check_scaled` has seen to it
        tiling = dataclasses.replace(usual, tile=(rows, *usual.tile[1:]))
        op.products[key] = ScaledExpertMatmul(op, k, n, tiling=tiling)
    return op.products[key]


def _can_overlap(layer: AllToAll) -> bool:
    """Whether GEMMs of eight bits can read scales of rows where a dispatch leaves them."""
    return layer.config.scale_words % scaled_gemm.SCALES_AT_ONCE == 0


@arguments.custom_op("moe_scaled_dispatch_matmul")
def _scaled_dispatch_matmul(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor,
    keeps: bool, fused: bool | None, key: str,
) -> list[torch.Tensor]:  # fmt: skip
    """GEMMs, rows and their scales, weights of rows, then the other tensors of the plan.

    `keeps`: there may be a backward. Without it there are no rows, and GEMMs of rows that belong to no token are not defined,
    which saves a pass over each.
    """
    op = moe.called("moe_scaled_dispatch_matmul", key)
    given = rows_of.quantise_rows(dense(x))
    choices = topk_idx.contiguous(), topk_weights.contiguous()
    if _can_overlap(op) and experts.is_fused(op, w.shape[1] // 2, fused):
        held, of_blocks = _held(w, w_scales)
        made = torch.zeros if keeps else torch.empty
        h = made((op.config.capacity, w.shape[1]), dtype=torch.bfloat16, device=w.device)
        gemm = scaled_gemm_of(op, held, False)
        pending = op.dispatch_send(given, *choices, cleared=True)
        gemm.arriving(pending, held.transpose(1, 2), h, w_scales=of_blocks)
        received = op.dispatch_recv(pending)
        plan = received.handle.plan
    else:
        received = op.dispatch(given, *choices, cleared=True)
        plan = received.handle.plan
        h = _gemm(op, plan, received.x, received.scales, w, w_scales, keeps)
    *others, weights = plan.tensors()
    valid = moe.valid_rows(op, plan.totals, False)
    # As bytes: torch's checks of operators cannot compare eight-bit floats.
    rows = received.x.view(torch.uint8)
    q, scales = rows[:0].clone(), received.scales[:0].clone()
    if keeps:
        q = moe.zero_where_not(valid, rows)
        scales = moe.zero_where_not(valid, received.scales)
    return [h, q, scales, torch.where(valid, weights, 0.0), *others]


@arguments.register_fake("moe_scaled_dispatch_matmul")
def _(x, topk_idx, topk_weights, w, w_scales, keeps, fused, key):
    rows, weights, *others = moe.dispatch_fake(x, topk_idx, topk_weights, key)
    kept = rows.shape[0] if keeps else 0
    q = x.new_empty((kept, x.shape[1]), dtype=torch.uint8)
    scales = x.new_empty((kept, groups_of(x.shape[1])), dtype=torch.float32)
    return [x.new_empty((rows.shape[0], w.shape[1])), q, scales, weights, *others]


@arguments.custom_op("moe_scaled_matmul_backward")
def _scaled_matmul_backward(
    grad: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, plan: list[torch.Tensor], tokens: int, key: str
) -> torch.Tensor:
    """Gradients of each expert's products, zero where no row is, times its matrix."""
    op, wide = moe.layer_of(key), _wide(w, w_scales)
    # Zero where no row is: tiles of zeros are products of zeros, and rows beyond the last tile are not written.
    out = grad.new_zeros((grad.shape[0], w.shape[2]))
    return experts.gemm_of(op, wide)(dense(grad), wide, moe.handle_of(key, RoutingPlan(tokens, *plan)), out)


@arguments.register_fake("moe_scaled_matmul_backward")
def _(grad, w, w_scales, plan, tokens, key):
    return grad.new_empty((grad.shape[0], w.shape[2]))


@arguments.custom_op("moe_widened")
def _widened(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows of eight bits, held as bytes, as bfloat16."""
    return rows_of.widened(q.contiguous().view(FP8_DTYPE), scales.contiguous())


@torch.library.register_fake("tilescale_net::moe_widened")
def _(q, scales):
    return q.new_empty(q.shape, dtype=torch.bfloat16)


def _dispatch_setup(ctx, inputs, output):
    x, _, _, w, w_scales, _, _, ctx.key = inputs
    ctx.tokens = x.shape[0]
    h, q, scales, weights, *others = output
    ctx.save_for_backward(w, w_scales, q, scales, *others, weights)
    ctx.of_h, ctx.of_weights = h.shape, weights.shape


def _dispatch_gradient(ctx, grads):
    w, w_scales, q, scales, *plan = ctx.saved_tensors
    dh, of_weights = grads[0], grads[3]
    of_weights = scales.new_zeros(ctx.of_weights) if of_weights is None else of_weights
    dh = scales.new_zeros(ctx.of_h, dtype=torch.bfloat16) if dh is None else dh
    back = _ops.moe_scaled_matmul_backward(dh, w, w_scales, plan, ctx.tokens, ctx.key)
    x, topk_weights = _ops.moe_dispatch_backward(back, of_weights, plan, ctx.tokens, ctx.key)
    of_w = None
    if ctx.needs_input_grad[3]:
        rows, held = _ops.moe_widened(q, scales), RoutingPlan(ctx.tokens, *plan)
        of_w = experts.gradient_of_matrices(ctx.key, held, rows, dh, zeroed=True).transpose(1, 2)
    return x, None, topk_weights, of_w, None, None, None, None


@arguments.custom_op("moe_scaled_matmul_combine")
def _scaled_matmul_combine(
    h: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, weights: torch.Tensor, plan: list[torch.Tensor],
    tokens: int, early: bool, fused: bool | None, limit: float, alpha: float, shift: float, key: str,
) -> torch.Tensor:  # fmt: skip
    """Sums per token of SwiGLU's GEMMs times `weights`, which are multiplied at once (`early`) or by the combine."""
    op, plan_ = moe.called("moe_scaled_matmul_combine", key), RoutingPlan(tokens, *plan)
    kind, weights = SwiGLU(None if limit == float("inf") else limit, alpha, shift), weights.contiguous()
    end = _ends(op, plan_)[1][-1:]
    early_weights = weights if early else None
    q, scales = rows_of.swiglu_quantised(dense(h), kind, end=end, weights=early_weights, cleared=False)
    given: dict[str, Any] = dict(weighted=False) if early else dict(weights=weights)
    handle = moe.handle_of(key, plan_)
    if _can_overlap(op) and experts.is_fused(op, w.shape[2], fused):
        held, of_blocks = _held(w, w_scales)
        columns = held.transpose(1, 2)
        return scaled_gemm_of(op, held, True).combined(q, columns, handle, x_scales=scales, w_scales=of_blocks, **given)
    return op.combine(_gemm(op, plan_, q, scales, w, w_scales, False), handle=handle, **given)


@arguments.register_fake("moe_scaled_matmul_combine")
def _(h, w, w_scales, weights, plan, tokens, early, fused, limit, alpha, shift, key):
    return h.new_empty((tokens, w.shape[1]))


@arguments.custom_op("moe_scaled_combine_backward")
def _scaled_combine_backward(grad: torch.Tensor, plan: list[torch.Tensor], tokens: int, key: str) -> torch.Tensor:
    """Gradients of sums, as rows."""
    op, plan_ = moe.called("backward of moe_scaled_matmul_combine", key), RoutingPlan(tokens, *plan)
    received = _gradients_of(op).dispatch(dense(grad), handle=moe.handle_of(key, plan_))
    return moe.zero_where_not(moe.valid_rows(op, plan_.totals, False), received.x)


@arguments.register_fake("moe_scaled_combine_backward")
def _(grad, plan, tokens, key):
    c = moe.layer_of(key).config
    return grad.new_empty((c.capacity, c.hidden))


def _combine_setup(ctx, inputs, output):
    h, w, w_scales, weights, plan, ctx.tokens, _, _, *kind, ctx.key = inputs
    ctx.kind = kind
    ctx.save_for_backward(h, w, w_scales, weights, *plan)


def _combine_gradient(ctx, grad):
    h, w, w_scales, weights, *plan = ctx.saved_tensors
    rows = _ops.moe_scaled_combine_backward(grad, plan, ctx.tokens, ctx.key)
    back = _ops.moe_scaled_matmul_backward(rows, w, w_scales, plan, ctx.tokens, ctx.key)
    held, keeps = RoutingPlan(ctx.tokens, *plan), ctx.needs_input_grad[1]
    op = moe.layer_of(ctx.key)
    # Weights are a factor of each row, wherever they are multiplied.
    of_h, of_weights, inner = _ops.swiglu_backward(back, h, weights, _ends(op, held)[1][-1:], *ctx.kind, keeps)
    of_w = None
    if keeps:
        of_w = experts.gradient_of_matrices(ctx.key, held, inner, rows, zeroed=True).transpose(1, 2)
    return of_h, of_w, None, of_weights, [None] * len(plan), None, None, None, None, None, None, None


for _name, _gradient, _setup in (
    ("moe_scaled_dispatch_matmul", _dispatch_gradient, _dispatch_setup),
    ("moe_scaled_matmul_combine", _combine_gradient, _combine_setup),
):
    torch.library.register_autograd(f"tilescale_net::{_name}", _gradient, setup_context=_setup)


# -- the layer --------------------------------------------------------------------------------------------------------


def _check_scaled(layer: AllToAll, w_up: torch.Tensor, w_down: torch.Tensor, scales) -> tuple[torch.Tensor, ...]:
    """Both matrices as [experts, n, k] with their scales, which are empty for those of bfloat16. TypeError, ValueError."""
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
    held = []
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
        held += [w.transpose(1, 2), w.new_empty((0,), dtype=torch.float32) if scales is None else scales[i]]
    if inner % 16 or not inner:
        raise ValueError(f"{call}: w_down has {inner} rows; they must be a multiple of 16, and not 0")
    return tuple(held)


def _check_shared(shared: Any, hidden: int) -> None:
    """Raise TypeError, ValueError for what is no pair of matrices of an expert that every token goes to."""
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
    if c.dtype == FP8_DTYPE:
        held = _check_scaled(layer, w_up, w_down, scales)
        if fused and not _can_overlap(layer):
            raise ValueError(
                f"moe_experts: hidden is {c.hidden}; GEMMs of {FP8_DTYPE} overlap where it is a multiple of 512"
            )
        out = _scaled(layer, x, topk_idx, topk_weights, held, early, constants, fused)
    else:
        if scales is not None:
            raise TypeError(f"moe_experts: scales go with a layer of {FP8_DTYPE}; this one is of {c.dtype}")
        if w_up.shape[-1] != 2 * w_down.shape[-2]:
            raise ValueError(
                f"moe_experts: w_up has {w_up.shape[-1]} columns; w_down has {w_down.shape[-2]} rows, so they must be twice as many"
            )
        h, received = experts.moe_dispatch_matmul(layer, x, topk_idx, topk_weights, w_up, fused=fused)
        end = received.handle.plan.counts(c.ranks, c.local_experts)[1][-1:]
        given = received.row_weight if early else h.new_empty((0,), dtype=torch.float32)
        inner = _ops.swiglu(h, given, end.detach(), *constants)
        out = experts.moe_matmul_combine(layer, inner, w_down, received, weighted=not early, fused=fused)
    if shared is None:
        return out
    up, down = arguments.operands(*shared)
    return out + kind(x.to(up.dtype) @ up) @ down


def _scaled(layer, x, topk_idx, topk_weights, held, early: bool, constants, fused: bool | None) -> torch.Tensor:
    """`moe_experts` of a layer of eight bits."""
    if x.dtype != torch.bfloat16:
        raise TypeError(f"moe_experts: x has dtype {x.dtype}; of a layer of {FP8_DTYPE} it must be torch.bfloat16")
    c, topk_weights = layer.config, arguments.as_weights(topk_weights)
    if c.expert_capacity is not None:
        dropped = beyond_capacity(topk_idx, topk_weights.detach(), c.expert_capacity, c.drop)
        topk_idx = topk_idx.masked_fill(dropped, -1)
    up, of_up, down, of_down = held
    keeps = torch.is_grad_enabled() and any(t.requires_grad for t in (x, topk_weights, up, down))
    h, _, _, weights, *others = _ops.moe_scaled_dispatch_matmul(
        x, topk_idx, topk_weights, up, of_up, keeps, fused, layer.key
    )
    plan = [t.detach() for t in (*others, weights)]
    tokens = x.shape[0]
    return _ops.moe_scaled_matmul_combine(h, down, of_down, weights, plan, tokens, early, fused, *constants, layer.key)
