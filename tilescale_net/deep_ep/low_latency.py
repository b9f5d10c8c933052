"""DeepEP's low-latency mode: few tokens, rows by expert, weights at combine."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilescale_net.deep_ep import scales as scaling
from tilescale_net.deep_ep.objects import Objects
from tilescale_net.kernels.moe import AllToAll, Dispatched


def _column_major(scales: torch.Tensor) -> torch.Tensor:
    """Memory for scales [experts, rows, groups] whose rows are next to one another."""
    experts, rows, groups = scales.shape
    return torch.empty((experts, groups, rows), dtype=scales.dtype, device=scales.device).transpose(1, 2)


def dispatch(
    objects: Objects, x: torch.Tensor, topk_idx: torch.Tensor, max_tokens: int, num_experts: int, stats, use_fp8: bool,
    round_scale: bool, use_ue8m0: bool, in_halves: bool,
):  # fmt: skip
    """(rows or (rows, scales), rows per expert, handle, what ends the call or None)."""
    hidden, top_k = x.shape[1], topk_idx.shape[1]
    if use_ue8m0 and not round_scale:
        raise ValueError("use_ue8m0 goes with round_scale=True")
    if use_fp8 and hidden % (512 if use_ue8m0 else 128):
        raise ValueError(f"hidden is {hidden}; with these scales it must be a multiple of {512 if use_ue8m0 else 128}")
    dtype = torch.float8_e4m3fn if use_fp8 else torch.bfloat16
    op = objects.low_latency(num_experts, max_tokens, hidden, top_k, dtype)
    given = scaling.quantise_rounded(x) if use_fp8 and round_scale else x.contiguous()
    arguments = given, topk_idx.contiguous()
    pending = op.dispatch_send(*arguments) if in_halves else None
    received = pending.result if in_halves else op.dispatch(*arguments)
    plan = received.handle.plan
    layout = torch.empty(plan.source_counts.shape, dtype=torch.int64, device=x.device)
    out_scales = None
    if use_fp8:
        packed = received.scales.new_empty((*received.scales.shape[:2], hidden // 512), dtype=torch.int32)
        out_scales = _column_major(packed if use_ue8m0 else received.scales)

    def finish() -> None:
        counts = plan.source_counts.long()
        layout.copy_((counts.cumsum(1) - counts) << 32 | counts)
        if out_scales is not None:
            out_scales.copy_(scaling.packed(received.scales) if use_ue8m0 else received.scales)
        if stats is not None:
            stats.add_(received.counts)

    def hook() -> None:
        op.dispatch_recv(pending)
        finish()

    if not in_halves:
        finish()
    rows = received.x if out_scales is None else (received.x, out_scales)
    handle = (plan.source_token, layout, max_tokens, hidden, num_experts, (op, received))
    return rows, received.counts, handle, hook if in_halves else None


def combine(
    x: torch.Tensor, topk_weights: torch.Tensor, routing: tuple[AllToAll, Dispatched], out, in_halves: bool
) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """(sums [tokens, hidden], what ends the call or None)."""
    op, received = routing
    given = dict(out=out, weights=topk_weights.float().contiguous())
    if not in_halves:
        return op.combine(x.contiguous(), received.handle, **given), None
    pending = op.combine_send(x.contiguous(), received.handle, **given)

    def hook() -> None:
        op.combine_recv(pending)

    return pending.result, hook
