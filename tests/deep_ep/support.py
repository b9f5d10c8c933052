"""Tokens of a rank in a group, and the choices of all its ranks."""

import torch
import torch.distributed as dist

import tilescale_net as tsn
from tests.kernels.moe import reference

EXPERTS, HIDDEN, TOP_K = 6, 512, 3


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    if not found.numel():
        return 0.0
    a, b = found.double() + 1, wanted.double() + 1
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def gathered(x: torch.Tensor, group) -> list[torch.Tensor]:
    """The tensor of every rank; they may have different numbers of rows."""
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, x.cpu(), group)
    return found


class Inputs:
    """One rank's tokens: rows that say whose they are, random rows, choices, weights; and all ranks' choices."""

    def __init__(self, group, tokens: int, seed: int):
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        g = torch.Generator().manual_seed(seed + self.rank)
        device = tsn.device(group)
        self.named = torch.full((tokens, HIDDEN), float(self.rank + 1), dtype=torch.bfloat16, device=device)
        self.named[:, -128:] = torch.arange(tokens, device=device)[:, None].to(torch.bfloat16)
        self.random = torch.randn((tokens, HIDDEN), generator=g).to(device, torch.bfloat16)
        scores = torch.rand((tokens, EXPERTS), generator=g)
        self.topk_idx = scores.topk(TOP_K, 1)[1].to(device)
        self.topk_idx[torch.rand((tokens, TOP_K), generator=g).to(device) < 0.15] = -1
        self.weights = torch.rand((tokens, TOP_K), generator=g).to(device)
        self.everyone = gathered(self.topk_idx, group)
        self.routing = reference.route(self.everyone, EXPERTS, self.rank)
        self.counts = [len(rows) for rows in self.routing.order]
        self.origins = [(r, t) for r in range(self.ranks) for t in self.routing.tokens[r]]


def plain_rows(x) -> torch.Tensor:
    """Rows as numbers, of what dispatch gives."""
    return reference.dequantise(x[0].cpu(), x[1].cpu()) if isinstance(x, tuple) else x.float().cpu()
