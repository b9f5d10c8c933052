"""Data of the mixture-of-experts benchmark: made from a seed, so that every rank can make every rank's, and checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilescale_net.kernels.moe.reference import quantise
from tilescale_net.kernels.moe.row_ops import groups_of

FP8 = torch.float8_e4m3fn


@dataclass
class Inputs:
    """One rank's inputs: rows (bfloat16), their FP8 form with scales (or None), choices and weights."""

    x: torch.Tensor
    x_fp8: torch.Tensor | None
    scales: torch.Tensor | None
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


def make(rank: int, tokens: int, hidden: int, experts: int, top_k: int, fp8: bool, seed: int, device) -> Inputs:
    """Random rows and distinct random choices; weights are multiples of 1/16, so that sums are exact in float32."""
    g = torch.Generator(device=device).manual_seed(seed * 1009 + rank)
    x = torch.randn((tokens, hidden), generator=g, device=device).to(torch.bfloat16)
    idx = torch.rand((tokens, experts), generator=g, device=device).topk(top_k, 1)[1]
    weights = torch.randint(1, 17, (tokens, top_k), generator=g, device=device) / 16
    q, scales = quantise(x) if fp8 else (None, None)
    return Inputs(x, q, scales, idx, weights)


@dataclass
class Traffic:
    """Rows (one per token and rank) that a rank receives in dispatch and sends in combine.

    Attributes:
        rows: all; remote: from other ranks; far: from other nodes.
    """

    rows: int
    remote: int
    far: int


def traffic(indices: list[torch.Tensor], experts: int, rank: int, far: list[bool]) -> Traffic:
    """Count them from all ranks' choices. `far`: which ranks are on other nodes."""
    local = experts // len(indices)
    here = [int((idx // local == rank).any(1).sum()) for idx in indices]
    return Traffic(sum(here), sum(here) - here[rank], sum(n for n, other in zip(here, far) if other))


def row_bytes(hidden: int, fp8: bool) -> int:
    """Bytes of a row with its scales."""
    return hidden + 4 * groups_of(hidden) if fp8 else 2 * hidden


class Wrong(Exception):
    """A rank received something else than it should have."""


def check_dispatch(received, everyone: list[Inputs], experts: int, rank: int, mode: str, layout: str) -> None:
    """Raise Wrong unless `received` (tilescale_net.kernels.moe.Dispatched) holds exactly the rows of `everyone`."""
    ranks, local = len(everyone), experts // len(everyone)
    fp8 = received.x.dtype == FP8
    tokens = [len(e.topk_idx) for e in everyone]
    flat = torch.cat([e.topk_idx.flatten() for e in everyone])
    token = torch.cat(
        [torch.arange(n, device=flat.device).repeat_interleave(e.topk_idx.shape[1]) for n, e in zip(tokens, everyone)]
    )
    source = torch.cat([torch.full((e.topk_idx.numel(),), s, device=flat.device) for s, e in enumerate(everyone)])
    begins = torch.tensor([sum(tokens[:s]) for s in range(ranks)], device=flat.device)
    mine = (flat // local == rank) & (flat >= 0)
    expert, order = torch.sort(flat[mine] - rank * local, stable=True)
    wanted = (begins[source] + token)[mine][order]
    counts = torch.bincount(expert, minlength=local)
    if not torch.equal(counts, received.counts.long()):
        raise Wrong("dispatch: the rows per expert differ")
    start = counts.cumsum(0) - counts
    inside = torch.arange(len(expert), device=flat.device) - start[expert]
    if mode == "latency":
        places = expert * received.x.shape[1] + inside
    else:
        places = received.offsets.long()[expert] + inside
        if layout == "rank":
            places = received.row_index.long()[places]
    for name, have, want in (
        ("rows", received.x, [e.x_fp8 if fp8 else e.x for e in everyone]),
        ("scales", received.scales, [e.scales for e in everyone] if fp8 else None),
    ):
        if want is None:
            continue
        have = have.reshape(-1, have.shape[-1])
        if fp8 and name == "rows":
            have, want = have.view(torch.uint8), [w.view(torch.uint8) for w in want]
        if not torch.equal(have[places], torch.cat(want)[wanted]):
            raise Wrong(f"dispatch: {name} differ")


def check_combine(
    out: torch.Tensor, mine: Inputs, rows: torch.Tensor, experts: int, ranks: int, weighted: bool
) -> None:
    """Raise Wrong unless `out` is what combine makes of experts that return what they get.

    Args:
        rows: of this rank, [tokens, hidden], as the experts returned them (bfloat16).
    """
    local = experts // ranks
    total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    for rank in range(ranks):
        here = (mine.topk_idx // local == rank) & (mine.topk_idx >= 0)
        factor = (mine.topk_weights * here).sum(1) if weighted else here.any(1).float()
        total += (factor[:, None] * rows.float()).to(torch.bfloat16).float()
    if not torch.equal(out, total.to(torch.bfloat16)):
        raise Wrong("combine: sums differ")
