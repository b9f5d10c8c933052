"""What a receiver may want to know of its rows: from which rank and token they come, and for which experts and weights."""

from dataclasses import dataclass

import torch

from tilescale_net.kernels.moe.handle import Handle, ReceivedRows
from tilescale_net.kernels.moe.layout import PlanOffsets


@dataclass(frozen=True)
class Metadata:
    """Of the rows that a rank has received; what stands for no row is -1, or 0 for weights. Nothing waits for the GPU.

    Throughput mode: of the rows of layout "rank", in objects of any layout; `rows` is ranks * max_tokens.

    Attributes:
        source_counts: [local experts, ranks] rows of each expert from each rank (int32).
        source_token: [rows], or in latency mode [local experts, ranks * max_tokens]: token at the source (int32).
        source_rank: in the same shape: rank it comes from (int32).
        topk_idx: [rows, top_k] local expert of each choice, -1 for one of another rank (int64); None in latency mode.
        topk_weights: [rows, top_k] float32, 0 where `topk_idx` is -1; None in latency mode.
        expert_rows: [rows, top_k] expert-major row of each choice, -1 for one of another rank (int32); None in latency mode.
    """

    source_counts: torch.Tensor
    source_token: torch.Tensor
    source_rank: torch.Tensor
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    expert_rows: torch.Tensor | None = None


def metadata(handle: Handle) -> Metadata:
    """The metadata of a dispatch's rows, by its handle; some small kernels on the current stream."""
    ranks, experts, max_tokens, top_k = handle.signature[:4]
    if isinstance(handle.plan, ReceivedRows):
        return _of_experts(handle.plan)
    plan, at = handle.plan, PlanOffsets(ranks, experts // ranks)
    device, totals = plan.totals.device, plan.totals
    bases = totals[at.received_base : at.received_base + ranks + 1]
    # Row i is the (i - bases[r])-th from rank r, the last one whose rows begin at i or before.
    index = torch.arange(ranks * max_tokens, dtype=torch.int32, device=device)
    source = torch.searchsorted(bases[1:].contiguous(), index, right=True).clamp(max=ranks - 1)
    there = index < bases[-1]
    place = torch.where(there, index - bases[source], 0)
    records = plan.records[source, place.long()]
    landing, offsets = records[:, :top_k], totals[at.offsets + 1 : at.offsets + 1 + experts // ranks]
    here = there[:, None] & (landing >= 0)
    # An expert without rows begins where the next one does.
    expert = torch.searchsorted(offsets.contiguous(), landing.contiguous(), right=True)
    weights = records[:, top_k : 2 * top_k].contiguous().view(torch.float32)
    return Metadata(
        totals[at.by_source : at.sent_before].view(experts // ranks, ranks),
        torch.where(there, records[:, 2 * top_k], -1),
        torch.where(there, source, -1).to(torch.int32),
        torch.where(here, expert, -1),
        torch.where(here, weights, 0.0),
        torch.where(here, landing, -1),
    )


def _of_experts(received: ReceivedRows) -> Metadata:
    ends = received.source_counts.cumsum(1)
    rows = received.source_token.shape[1]
    index = torch.arange(rows, device=ends.device).expand(len(ends), rows).contiguous()
    source = torch.searchsorted(ends, index, right=True)
    there = index < ends[:, -1:]
    return Metadata(
        received.source_counts,
        torch.where(there, received.source_token, -1),
        torch.where(there, source, -1).to(torch.int32),
    )
