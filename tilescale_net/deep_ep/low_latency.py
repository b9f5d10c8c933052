"""DeepEP's low-latency mode: few tokens, rows by expert, weights at combine; scales that are powers of two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tilescale_net.deep_ep.objects import Objects
from tilescale_net.kernels.moe import AllToAll, Dispatched, Handle
from tilescale_net.kernels.moe.handle import ReceivedRows, Rows
from tilescale_net.kernels.moe.row_ops import FP8_MAX, GROUP, SMALLEST_AMAX

MANTISSA = 23  # bits of a float32


def quantise_rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as float8_e4m3fn with a scale per 128 elements, the smallest power of two that holds them.

    Args:
        x: [tokens, hidden], hidden a multiple of 128.

    Returns:
        [tokens, hidden] float8_e4m3fn and [tokens, hidden / 128] float32.
    """
    groups = x.float().view(len(x), x.shape[1] // GROUP, GROUP)  # also where there are no rows
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


@dataclass
class Routing:
    """What the handle of a dispatch stands for.

    Attributes:
        sizes: the arguments of `Objects.low_latency`. received: what the dispatch gives.
        members: the ranks that took part; None: no rank, the dispatch gave nothing. See `Masks.members`.
        op: what made the dispatch, for its combines while it can make them; None: nothing did.
    """

    sizes: tuple
    received: Dispatched
    members: list[int] | None
    op: AllToAll | None = None
    _buffer: torch.Tensor | None = None

    @property
    def combine_buffer(self) -> torch.Tensor:
        """Rows in the shape of the dispatch's, for the caller to fill; made on first use."""
        if self._buffer is None:
            x = self.received.x
            self._buffer = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
        return self._buffer


class LowLatencyHandle(tuple):
    """DeepEP's handle of a low-latency dispatch: source tokens, ranges of ranks, largest number of tokens, hidden, experts.

    Few callers look at its first two parts, which are made when one does, after the dispatch has ended: the tensors that hold
    them are the caller's then, and else serve a later dispatch.

    Attributes:
        routing: what calls here need of the dispatch.
    """

    routing: Routing

    @classmethod
    def of(cls, routing: Routing) -> LowLatencyHandle:
        """The handle of a dispatch."""
        experts, max_tokens, hidden, *_ = routing.sizes
        handle = cls((None, None, max_tokens, hidden, experts))
        handle.routing = routing
        return handle

    def __getitem__(self, at: Any) -> Any:
        return tuple(self)[at] if isinstance(at, slice) or at in (0, 1, -5, -4) else super().__getitem__(at)

    def __iter__(self) -> Iterator[Any]:
        plan = self.routing.received.handle.plan
        yield plan.source_token
        yield _ranges(plan.source_counts)
        yield from list(super().__iter__())[2:]


def routing_of(handle: object) -> Routing:
    """What a dispatch has left for its combines. Raises TypeError for what is not its handle."""
    if not isinstance(handle, LowLatencyHandle):
        raise TypeError(
            f"handle is a {type(handle).__name__}; give what low_latency_dispatch has returned, not a copy of its parts"
        )
    return handle.routing


def _ranges(counts: torch.Tensor) -> torch.Tensor:
    counts = counts.long()
    return (counts.cumsum(1) - counts) << 32 | counts


def _for_exponents(scales: torch.Tensor) -> torch.Tensor:
    """Memory for four scales of [experts, rows, groups] to an int32, whose rows are next to one another."""
    experts, rows, groups = scales.shape
    if groups == 4:  # one column, of a stride with which it can be viewed as bytes
        return torch.empty((experts, rows, 1), dtype=torch.int32, device=scales.device)
    return torch.empty((experts, groups // 4, rows), dtype=torch.int32, device=scales.device).transpose(1, 2)


def _nothing(ranks: int, tokens: int, sizes: tuple, device: torch.device) -> Dispatched:
    """What a dispatch gives that was in flight when ranks were lost: no rows."""
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


def dispatch(
    objects: Objects, x: torch.Tensor, topk_idx: torch.Tensor, max_tokens: int, num_experts: int,
    stats: torch.Tensor | None, use_fp8: bool, round_scale: bool, use_ue8m0: bool, in_phases: bool,
    waited: torch.Tensor | None = None,
) -> tuple[Rows, torch.Tensor, LowLatencyHandle, Callable[[], None] | None]:  # fmt: skip
    """(rows or (rows, scales), rows per expert, handle, what ends the call or None)."""
    hidden, masks = x.shape[1], objects.masks
    objects.order.follow()
    if use_ue8m0 and not round_scale:
        raise ValueError("use_ue8m0 goes with round_scale=True")
    if use_fp8 and hidden % (512 if use_ue8m0 else 128):
        raise ValueError(f"hidden is {hidden}; with these scales it must be a multiple of {512 if use_ue8m0 else 128}")
    dtype = torch.float8_e4m3fn if use_fp8 else torch.bfloat16
    sizes = num_experts, max_tokens, hidden, topk_idx.shape[1], dtype
    objects.calls.note(_DISPATCH, *sizes)
    void = masks.begin_dispatch()
    totals = None  # where the kernel adds the counts

    def send() -> tuple[Any, ...]:
        nonlocal totals
        op = objects.low_latency("dispatch", *sizes)
        given: Rows = quantise_rounded(x) if use_fp8 and round_scale else x.contiguous()
        totals = stats if stats is not None and op.adds_to(stats) else None
        arguments: dict[str, Any] = dict(waited=waited, totals=totals)
        if not in_phases:
            return op, None, op.dispatch(given, topk_idx.contiguous(), **arguments), masks.members
        pending = op.dispatch_send(given, topk_idx.contiguous(), **arguments)
        return op, pending, pending.result, masks.members

    def nothing() -> tuple[Any, ...]:
        return None, None, _nothing(objects.world.size, len(x), sizes, x.device), None

    op, pending, received, members = nothing() if void else masks.survive(send, nothing)
    packs = use_fp8 and use_ue8m0
    out_scales = _for_exponents(received.scales) if packs else received.scales

    def finish() -> None:
        if packs:
            out_scales.copy_(packed(received.scales))
        if stats is not None and totals is None:
            stats.add_(received.counts)

    def receive() -> None:
        if masks.members is members:
            op.dispatch_recv(pending)
        elif members is not None:
            _clear(received)

    def hook() -> None:
        objects.order.follow()
        masks.survive(receive, lambda: _clear(received), begins=False)
        finish()

    if not in_phases:
        finish()
    rows = received.x if out_scales is None else (received.x, out_scales)
    handle = LowLatencyHandle.of(Routing(sizes, received, members, op))
    return rows, received.counts, handle, hook if in_phases else None


def combine(
    objects: Objects,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    routing: Routing,
    out: torch.Tensor | None,
    in_phases: bool,
    waited: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """(sums [tokens, hidden], what ends the call or None)."""
    received, masks, members = routing.received, objects.masks, routing.members
    objects.order.follow()
    objects.calls.note(_COMBINE, *routing.sizes)

    def send() -> tuple[Any, ...]:
        if masks.members is not members:
            return nothing()
        op = routing.op
        if op is None or op.in_flight or op.outdated:
            op = objects.low_latency("combine", *routing.sizes)
        arguments: dict[str, Any] = dict(out=out, weights=topk_weights.float().contiguous(), waited=waited)
        if not in_phases:
            return op, None, op.combine(x.contiguous(), received.handle, **arguments)
        pending = op.combine_send(x.contiguous(), received.handle, **arguments)
        return op, pending, pending.result

    def nothing() -> tuple[Any, ...]:
        shape = received.handle.plan.tokens, x.shape[-1]
        return None, None, x.new_zeros(shape) if out is None else out.zero_()

    op, pending, result = masks.survive(send, nothing)

    def receive() -> None:
        if masks.members is members:
            op.combine_recv(pending)
        else:
            result.zero_()

    def hook() -> None:
        objects.order.follow()
        if op is not None:
            masks.survive(receive, result.zero_, begins=False)

    return result, hook if in_phases else None
