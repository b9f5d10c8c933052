"""DeepEP's low-latency mode: few tokens, rows by expert, weights at combine; scales that are powers of two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tilescale_net.deep_ep.objects import Objects, check_dimensions
from tilescale_net.kernels.moe import AllToAll, Dispatched, Handle
from tilescale_net.kernels.moe.handle import Pending, ReceivedRows, Rows
from tilescale_net.kernels.moe.row_ops import FP8_MAX, GROUP, SMALLEST_AMAX
from tilescale_net.runtime.world import World

MANTISSA = 23  # bits of a float32


def quantise_rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as float8_e4m3fn with a scale per 128 elements, the smallest power of two that holds them.

    Args:
        x: [tokens, hidden], hidden a multiple of 128.

    Returns:
        [tokens, hidden] float8_e4m3fn and [tokens, hidden / 128] float32.
    """
    groups = x.float().view(len(x), x.shape[1] // GROUP, GROUP)  # also if there are no rows
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_AMAX)
    bits = (amax / FP8_MAX).view(torch.int32)
    scale = ((bits + (1 << MANTISSA) - 1) >> MANTISSA << MANTISSA).view(torch.float32)
    return (groups / scale).to(torch.float8_e4m3fn).view(x.shape), scale.squeeze(-1)


def packed(scales: torch.Tensor) -> torch.Tensor:
    """Exponents of scales that are powers of two (UE8M0), four to an int32: [..., groups / 4]."""
    exponents = (scales.contiguous().view(torch.int32) >> MANTISSA).to(torch.uint8)
    return exponents.view(torch.int32)


_SIZES = "{} experts, {} tokens of a rank at most, hidden {}, top_k {}, {}"
_DISPATCH, _COMBINE = f"low_latency_dispatch: {_SIZES}", f"low_latency_combine: {_SIZES}"


class LowLatencyHandle(tuple):
    """DeepEP's handle of a low-latency dispatch: source tokens, ranges of ranks, largest number of tokens, hidden, experts.

    The first two parts are created on first access, after the dispatch has ended: their tensors then belong to the caller,
    and otherwise serve a later dispatch.

    Attributes:
        sizes: as for `Objects.low_latency`. received: the dispatch's result.
        members: the active ranks; None: no rank, the dispatch is void. See `Masks.members`.
        world: of the Buffer.
        op: the object of the dispatch, for its combines as long as it can make them; None: none.
    """

    sizes: tuple
    received: Dispatched
    members: list[int] | None
    world: World
    op: AllToAll | None
    _buffer: torch.Tensor | None = None

    @property
    def combine_buffer(self) -> torch.Tensor:
        """Rows in the shape of the dispatch's, for the caller to fill; created on first use."""
        if self._buffer is None:
            x = self.received.x
            self._buffer = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
        return self._buffer

    def __getitem__(self, at: Any) -> Any:
        return tuple(self)[at] if isinstance(at, slice) or at in (0, 1, -5, -4) else super().__getitem__(at)

    def __iter__(self) -> Iterator[Any]:
        plan = self.received.handle.plan
        yield plan.source_token
        yield _ranges(plan.source_counts)
        yield from list(super().__iter__())[2:]


def checked(handle: object) -> LowLatencyHandle:
    """A handle of a dispatch. Raises TypeError unless it is one."""
    if not isinstance(handle, LowLatencyHandle):
        raise TypeError(
            f"handle is a {type(handle).__name__}; give the result of low_latency_dispatch, not a copy of its parts"
        )
    return handle


def _contiguous(x: Any) -> Any:
    """The same, contiguous; AllToAll rejects other values."""
    return x.contiguous() if isinstance(x, torch.Tensor) else x


def _ranges(counts: torch.Tensor) -> torch.Tensor:
    counts = counts.long()
    return (counts.cumsum(1) - counts) << 32 | counts


def _for_exponents(scales: torch.Tensor) -> torch.Tensor:
    """Memory for scales of [experts, rows, groups], four to an int32, with adjacent rows."""
    experts, rows, groups = scales.shape
    if groups == 4:  # one column, of a stride with which it can be viewed as bytes
        return torch.empty((experts, rows, 1), dtype=torch.int32, device=scales.device)
    return torch.empty((experts, groups // 4, rows), dtype=torch.int32, device=scales.device).transpose(1, 2)


def _nothing(ranks: int, tokens: int, sizes: tuple, device: torch.device) -> Dispatched:
    """The result of a dispatch that was in flight when ranks were lost: no rows."""
    experts, max_tokens, hidden, top_k, dtype = sizes
    local, rows = experts // ranks, ranks * max_tokens
    plan = ReceivedRows.empty(tokens, ranks, max_tokens, local, top_k, device=device)
    x = torch.zeros((local, rows, hidden), dtype=dtype, device=device)
    fp8, groups = dtype == torch.float8_e4m3fn, hidden // GROUP
    scales = x.new_zeros((local, groups, rows), dtype=torch.float32).transpose(1, 2) if fp8 else None
    counts = x.new_zeros(local, dtype=torch.int32)
    return Dispatched(x, scales, counts, None, None, None, None, Handle((), plan, ()))


def _clear(received: Dispatched) -> None:
    for tensor in (received.x, received.scales, received.counts, received.handle.plan.source_counts):
        if tensor is not None:
            tensor.zero_()


def _check_scales(hidden: int, use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> None:
    if use_ue8m0 and not round_scale:
        raise ValueError("use_ue8m0 goes with round_scale=True")
    width = 4 * GROUP if use_ue8m0 else GROUP
    if use_fp8 and hidden % width:
        raise ValueError(f"hidden is {hidden}; with these scales it must be a multiple of {width}")


def dispatch(
    objects: Objects, x: torch.Tensor, topk_idx: torch.Tensor, max_tokens: int, num_experts: int,
    stats: torch.Tensor | None, use_fp8: bool, round_scale: bool, use_ue8m0: bool, in_phases: bool,
    waited: torch.Tensor | None = None,
) -> tuple[Rows, torch.Tensor, LowLatencyHandle, Callable[[], None] | None]:  # fmt: skip
    """(rows or (rows, scales), rows per expert, handle, the hook or None)."""
    masks = objects.masks
    try:
        (_, hidden), (_, top_k) = x.shape, topk_idx.shape
    except (AttributeError, ValueError):
        with objects.rejecting("Buffer.low_latency_dispatch"):
            check_dimensions("x", x, 2)
            check_dimensions("topk_idx", topk_idx, 2)
        raise
    if use_ue8m0 or (use_fp8 and hidden % GROUP):
        with objects.rejecting("Buffer.low_latency_dispatch"):
            _check_scales(hidden, use_fp8, round_scale, use_ue8m0)
    dtype = torch.float8_e4m3fn if use_fp8 else torch.bfloat16
    sizes = num_experts, max_tokens, hidden, top_k, dtype
    objects.calls.note(_DISPATCH, *sizes)
    op = members = pending = None
    received: Any = None
    totals = stats  # the kernel adds the counts to it
    if not masks.begin_dispatch():
        try:
            masks.leave_out()
            op = objects.low_latency("dispatch", sizes)
            if waited is None and not (use_fp8 and round_scale):
                if in_phases:
                    pending = op.usual_dispatch_send(x, topk_idx, totals)
                else:
                    received = op.usual_dispatch(x, topk_idx, totals)
            if received is None and pending is None:
                x = x.contiguous()
                sent: Rows = quantise_rounded(x) if use_fp8 and round_scale else x
                if isinstance(stats, torch.Tensor) and stats.shape == (op.config.local_experts,):
                    totals = stats if op.adds_to(stats) else None
                arguments: dict[str, Any] = dict(waited=waited, totals=totals)
                if in_phases:
                    pending = op.dispatch_send(sent, topk_idx.contiguous(), **arguments)
                else:
                    received = op.dispatch(sent, topk_idx.contiguous(), **arguments)
            members = masks.members
        except masks.losses:
            masks.go_on()
            op = pending = received = None
    if pending is not None:
        received = pending.result
    elif received is None:
        received = _nothing(objects.world.size, len(x), sizes, x.device)
    packs = _for_exponents(received.scales) if use_fp8 and use_ue8m0 else None
    late = stats if totals is None else None  # the counts are added to it after their arrival
    scales = received.scales if packs is None else packs
    handle = LowLatencyHandle((None, None, max_tokens, hidden, num_experts))
    handle.sizes, handle.received, handle.members, handle.op = sizes, received, members, op
    handle.world = objects.world
    hook = None
    if in_phases:
        hook = partial(_end_dispatch, objects, handle, pending, packs, late)
    elif packs is not None or late is not None:
        _finish(received, packs, late)
    return received.x if scales is None else (received.x, scales), received.counts, handle, hook


def _finish(received: Any, packs: torch.Tensor | None, late: torch.Tensor | None) -> None:
    """Work after the kernels: `packs` gets the exponents of the scales, and `late` the counts."""
    if packs is not None:
        packs.copy_(packed(received.scales))
    if late is not None:
        late.add_(received.counts)


def _end_dispatch(
    objects: Objects, handle: LowLatencyHandle, pending: Pending | None, packs: torch.Tensor | None, late: torch.Tensor | None
) -> None:  # fmt: skip
    """The hook of a dispatch; the last two as in `_finish`."""
    masks, received = objects.masks, handle.received
    objects.order.follow()
    try:
        if handle.op is not None and pending is not None:
            if masks.members is handle.members:
                handle.op.dispatch_recv(pending)
            else:
                _clear(received)
    except masks.losses:
        masks.go_on()
        _clear(received)
    _finish(received, packs, late)


def combine(
    objects: Objects, x: torch.Tensor, topk_weights: torch.Tensor, handle: tuple, out: torch.Tensor | None,
    zero_copy: bool, in_phases: bool, waited: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Callable[[], None] | None]:  # fmt: skip
    """(sums [tokens, hidden], the hook or None)."""
    if not isinstance(handle, LowLatencyHandle) or handle.world is not objects.world or topk_weights is None:
        with objects.rejecting("Buffer.low_latency_combine"):
            objects.check_world(checked(handle).world)
            raise TypeError("topk_weights must be a tensor, not NoneType")
    masks, rows, op, pending, result = objects.masks, handle.received.handle, handle.op, None, None
    x = handle.combine_buffer if zero_copy else x
    objects.calls.note(_COMBINE, *handle.sizes)
    try:
        masks.leave_out()
        if masks.members is handle.members:
            if op is None or not op.is_idle:
                op = objects.low_latency("combine", handle.sizes)
            if waited is None:
                if in_phases:
                    pending = op.usual_combine_send(x, rows, out, topk_weights)
                else:
                    result = op.usual_combine(x, rows, out, topk_weights)
            if result is None and pending is None:
                arguments: dict[str, Any] = dict(out=out, weights=_contiguous(topk_weights), waited=waited)
                if in_phases:
                    pending = op.combine_send(_contiguous(x), rows, **arguments)
                else:
                    result = op.combine(_contiguous(x), rows, **arguments)
    except masks.losses:
        masks.go_on()
        pending = result = None
    if pending is not None:
        result = pending.result
    elif result is None:
        objects.order.follow()
        result = x.new_zeros((rows.tokens, x.shape[-1])) if out is None else out.zero_()
    return result, partial(_end_combine, objects, handle, op, pending, result) if in_phases else None


def _end_combine(
    objects: Objects, handle: LowLatencyHandle, op: AllToAll | None, pending: Pending | None, result: torch.Tensor
) -> None:
    """The hook of a combine that `op` has sent; None: nothing was sent."""
    masks = objects.masks
    objects.order.follow()
    if op is None or pending is None:
        return
    try:
        if masks.members is handle.members:
            op.combine_recv(pending)
        else:
            result.zero_()
    except masks.losses:
        masks.go_on()
        result.zero_()
