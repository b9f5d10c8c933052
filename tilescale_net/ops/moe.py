"""Dispatch and combine of mixture-of-experts layers as operators, with gradients.

They are each other's backward: gradients of rows return by combine, gradients of sums by a dispatch with the same
routing, gradients of weights with their rows. Throughput mode, rows that are not FP8.

Backward is made of the same collective calls: all ranks run it, or none. A rank whose inputs need no gradient leaves the
others waiting until TSN_TIMEOUT; let `x` or the weights require one on every rank.
"""

from __future__ import annotations

from typing import Any

import torch

import tilescale_net as tsn
from tilescale_net.kernels.moe.all_to_all import OBJECTS, AllToAll
from tilescale_net.kernels.moe.checks import beyond_capacity
from tilescale_net.kernels.moe.config import FP8_DTYPE, Config, Tuning
from tilescale_net.kernels.moe.handle import Dispatched, Handle, RoutingPlan
from tilescale_net.kernels.moe.layout import PlanOffsets, record_words
from tilescale_net.kernels.moe.row_ops import weight_rows, zero_padding
from tilescale_net.kernels.moe.throughput import output_rows
from tilescale_net.ops import arguments, group_objects
from tilescale_net.runtime.launch_args import dense


def layer_key(op: object) -> str:
    """The operators' key of an AllToAll and its active ranks.

    Text, because the compiler makes a number that changes between calls symbolic. Raises TypeError, ValueError: no AllToAll, or
    one that operators cannot call.
    """
    layer = checked_layer(op)
    c = layer.config
    if c.mode != "throughput" or c.dtype == FP8_DTYPE or c.combine_dtype != c.dtype:
        raise ValueError(
            "moe_dispatch and moe_combine need a layer of throughput mode, of a dtype that is not FP8 and equals combine_dtype"
        )
    return layer.key


def checked_layer(layer: object) -> AllToAll:
    """The layer. Raises TypeError unless it is an AllToAll."""
    if not isinstance(layer, AllToAll):
        raise TypeError(f"layer must be an AllToAll, as ops.moe_layer makes, not {type(layer).__name__}")
    return layer


def plan_of(call: str, layer: AllToAll, received: object) -> RoutingPlan:
    """The plan of a dispatch's result. Raises TypeError or ValueError."""
    if not isinstance(received, Dispatched):
        raise TypeError(f"{call}: received must be the result of the dispatch, not {type(received).__name__}")
    other, own = received.handle.signature, layer.config.signature
    if other != own:
        raise ValueError(f"{call}: received is of a layer of another configuration, {other}; this one is {own}")
    plan: RoutingPlan = received.handle.plan
    return plan


def layer_of(key: str):
    """The AllToAll of a key.

    Raises:
        TileScaleError: a program of torch.export or torch.compile has the key of a layer that is not here.
    """
    identity = key.rsplit(" ", 2)[0]
    op = OBJECTS.get(identity)
    if op is None:
        raise tsn.TileScaleError(
            f"the program was exported or compiled with the layer {identity}, which this process does not have; make it first, "
            "on all of its ranks, by ops.moe_layer or kernels.moe.AllToAll with these arguments"
        )
    return op


def called(operator: str, key: str):
    """The AllToAll of a key, for a communicating operator; logs the call, so ranks can compare their calls."""
    op = layer_of(key)
    calls = op.world.calls.only_track(group_objects.TRACK)
    calls.note(
        operator + " of a layer of {0.num_experts} experts, hidden {0.hidden}, {0.dtype}, layout {0.layout}", op.config
    )
    return op


def handle_of(key: str, plan: RoutingPlan) -> Handle:
    """The handle of a dispatch at the time of `key`."""
    _, era, mask = key.rsplit(" ", 2)
    return Handle(layer_of(key).config.signature, plan, (int(era), tuple(m == "1" for m in mask)))


def without_padding(op: AllToAll, plan: RoutingPlan, rows: torch.Tensor, *, copied: bool = True) -> torch.Tensor:
    """Rows of a dispatch with zeros in padding, see `zero_padding`. The memory of a dispatch is valid until the next one."""
    c = op.config
    counts, offsets, received = plan.counts(c.ranks, c.local_experts)
    if c.layout == "rank":
        return zero_padding(rows, received.view(1), copied=copied)
    return zero_padding(rows, counts, offsets, copied=copied)


@arguments.operator("moe_dispatch")
def _dispatch(x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, key: str) -> list[torch.Tensor]:
    """Rows, their weights, then the other tensors of the plan."""
    op = called("moe_dispatch", key)
    # Padding is zero, so results can be compared.
    received = op.dispatch(dense(x), topk_idx.contiguous(), topk_weights.contiguous(), cleared=True)
    *others, weights = received.handle.plan.tensors()
    return [without_padding(op, received.handle.plan, received.x), weights, *others]


@arguments.register_fake("moe_dispatch")
def dispatch_fake(x, topk_idx, topk_weights, key):
    c = layer_of(key).config
    R, M = c.ranks, c.max_tokens

    def ints(*shape):
        return x.new_empty(shape, dtype=torch.int32)

    return [
        x.new_empty((output_rows(c), c.hidden)),
        x.new_empty((c.capacity,), dtype=torch.float32), ints(layer_of(key).node_plan_words), ints(R, M), ints(R, M),
        ints(torch.sym_max(x.shape[0], 1), R), ints(R, M, record_words(c.top_k)), ints(PlanOffsets(R, c.local_experts).words), ints(c.capacity),
    ]  # fmt: skip


@arguments.operator("moe_combine")
def _combine(y: torch.Tensor, weights: torch.Tensor, plan: list[torch.Tensor], tokens: int, key: str) -> torch.Tensor:
    """Sums of rows times `weights` (empty: all 1) per token."""
    op = called("moe_combine", key)
    handle = handle_of(key, RoutingPlan(tokens, *plan))
    weighted = weights.numel() > 0
    return op.combine(dense(y), handle, weighted=False, weights=weights.contiguous() if weighted else None)


@arguments.register_fake("moe_combine")
def _(y, weights, plan, tokens, key):
    return y.new_empty((tokens, y.shape[1]))


@arguments.custom_op("moe_dispatch_backward")
def _dispatch_backward(
    rows: torch.Tensor, weights: torch.Tensor, plan: list[torch.Tensor], tokens: int, key: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and of topk_weights from the gradients of rows and row weights."""
    op = called("backward of moe_dispatch", key)
    return op.combine_values(dense(rows), weights.contiguous(), handle_of(key, RoutingPlan(tokens, *plan)))


@arguments.register_fake("moe_dispatch_backward")
def _(rows, weights, plan, tokens, key):
    c = layer_of(key).config
    return rows.new_empty((tokens, c.hidden)), weights.new_empty((tokens, c.top_k))


@arguments.custom_op("moe_combine_backward")
def _combine_backward(
    out: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, plan: list[torch.Tensor], tokens: int, key: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of rows, from those of sums, and of `weights` (empty where they are)."""
    op, plan_ = called("backward of moe_combine", key), RoutingPlan(tokens, *plan)
    rows = op.dispatch(dense(out), handle=handle_of(key, plan_)).x
    if not weights.numel():
        return without_padding(op, plan_, rows), torch.empty_like(weights)
    counts, offsets, _ = plan_.counts(op.config.ranks, op.config.local_experts)
    return weight_rows(rows, weights.contiguous(), counts, offsets, dense(y))


@arguments.register_fake("moe_combine_backward")
def _(out, y, weights, plan, tokens, key):
    return y.new_empty(y.shape), weights.new_empty(weights.shape)


def _dispatch_setup(ctx, inputs, output):
    ctx.tokens, ctx.key = inputs[0].shape[0], inputs[3]
    ctx.save_for_backward(*output[2:], output[1])
    ctx.shapes = output[0], output[1]


def _dispatch_gradient(ctx, grads):
    plan = list(ctx.saved_tensors)
    rows, weights = (g if g is not None else torch.zeros_like(s) for g, s in zip(grads[:2], ctx.shapes))
    x, topk_weights = torch.ops.tilescale_net.moe_dispatch_backward(rows, weights, plan, ctx.tokens, ctx.key)
    return x, None, topk_weights, None


def _combine_setup(ctx, inputs, output):
    y, weights, plan, ctx.tokens, ctx.key = inputs
    ctx.save_for_backward(y, weights, *plan)


def _combine_gradient(ctx, grad):
    y, weights, *plan = ctx.saved_tensors
    rows, dw = torch.ops.tilescale_net.moe_combine_backward(grad, y, weights, plan, ctx.tokens, ctx.key)
    return rows, dw if weights.numel() else None, [None] * len(plan), None, None


torch.library.register_autograd("tilescale_net::moe_dispatch", _dispatch_gradient, setup_context=_dispatch_setup)
torch.library.register_autograd("tilescale_net::moe_combine", _combine_gradient, setup_context=_combine_setup)


def moe_layer(
    num_experts: int, max_tokens: int, hidden: int, top_k: int, dtype: torch.dtype = torch.bfloat16, *,
    layout: str = "expert", alignment: int = 1, capacity: int | None = None, tuning: Tuning | None = None,
    expert_capacity: int | None = None, drop: str = "position", tile_rows: int | None = None, grow: bool = False,
    group: tsn.Group = None,
) -> AllToAll:  # fmt: skip
    """The `AllToAll` for layers of this shape: one object for all calls of a group with equal arguments.

    Layers that do not run at the same time share its memory, and a function compiled for one serves them all. Collective
    the first time. Arguments and errors are as for `moe.AllToAll`.
    """
    sizes = num_experts, max_tokens, hidden, top_k, dtype
    options: dict[str, Any] = dict(
        layout=layout, alignment=alignment, capacity=capacity, tuning=tuning, expert_capacity=expert_capacity, drop=drop,
        tile_rows=tile_rows, grow=grow,
    )  # fmt: skip
    key = ("moe", *sizes, *options.values())
    objects = group_objects.of(group_objects.name_of(group))
    op = objects.cached(key, lambda: AllToAll(*sizes, **options, group=objects.world))
    op.factory = moe_layer  # a loaded module also has one for all layers
    return op


def within_capacity(
    config: Config, topk_idx: torch.Tensor, topk_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Choices without those beyond the layer's `expert_capacity`, and the mask of dropped choices, None without capacity."""
    if config.expert_capacity is None:
        return topk_idx, None
    dropped = beyond_capacity(topk_idx, topk_weights.detach(), config.expert_capacity, config.drop)
    return topk_idx.masked_fill(dropped, -1), dropped


def dispatched(
    layer: AllToAll, tokens: int, rows: torch.Tensor, tensors: list[torch.Tensor], dropped: torch.Tensor | None
) -> Dispatched:
    """The result of a dispatch. `tensors`: weights of rows, then the other tensors of the plan."""
    c, (weights, *others) = layer.config, tensors
    plan = RoutingPlan(tokens, *[*others, weights])
    counts, offsets, num_rows = plan.counts(c.ranks, c.local_experts)
    by_rank, rejected = c.layout == "rank", plan.rejected(c.ranks, c.local_experts)
    handle, index = Handle(c.signature, plan, layer.membership, dropped), plan.row_index if by_rank else None
    return Dispatched(rows, None, counts, offsets, index, weights, num_rows if by_rank else None, handle, rejected)


def moe_dispatch(layer: AllToAll, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Dispatched:
    """As `AllToAll.dispatch`; `x` and `row_weight` of the result carry gradients to `x` and `topk_weights`.

    Args:
        layer: a result of `moe_layer`, or an AllToAll of throughput mode.

    Returns:
        Dispatched. Its tensors are new; rows without a token are zero.
    """
    key = layer_key(layer)
    arguments.check("moe_dispatch", x=x, topk_idx=topk_idx, topk_weights=topk_weights)
    topk_weights = arguments.as_weights(topk_weights)
    topk_idx, dropped = within_capacity(layer.config, topk_idx, topk_weights)
    rows, *tensors = torch.ops.tilescale_net.moe_dispatch(x, topk_idx, topk_weights, key)
    return dispatched(layer, x.shape[0], rows, tensors, dropped)


def moe_combine(layer: AllToAll, y: torch.Tensor, received: Dispatched, weighted: bool = True) -> torch.Tensor:
    """As `AllToAll.combine`, with gradients to `y` and, if weighted, to `received.row_weight`.

    Layout "rank" sums rows without weights.

    Args:
        layer: as for `moe_dispatch`.
        received: the result of `moe_dispatch`.
    """
    key = layer_key(layer)
    arguments.check("moe_combine", y=y)
    plan = plan_of("moe_combine", layer, received)
    weights = (
        arguments.as_weights(received.row_weight)
        if weighted and layer.config.layout == "expert"
        else y.new_empty((0,), dtype=torch.float32)
    )
    tensors = [t.detach() for t in plan.tensors()]
    return torch.ops.tilescale_net.moe_combine(y, weights, tensors, plan.tokens, key)
