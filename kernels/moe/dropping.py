"""Choices that are dropped by the rule of models with a capacity factor: an expert takes so many tokens of a rank."""

import torch

# Which of the choices of an expert are kept:
DROPS = (
    "position",  # those of the first tokens
    "choice",  # all first choices come before all second ones, and so on; then those of the first tokens
    "weight",  # those of the largest weight; then those of the first tokens
)


def beyond_capacity(topk_idx: torch.Tensor, topk_weights: torch.Tensor, capacity: int, drop: str) -> torch.Tensor:
    """Which choices do not fit; some small kernels of torch on the current stream, without a wait for the GPU.

    Args:
        topk_idx: [tokens, top_k] experts; -1: no choice, which is never dropped.
        topk_weights: [tokens, top_k], for "weight".
        capacity: choices of an expert that are kept.
        drop: one of DROPS.

    Returns:
        Bool [tokens, top_k].
    """
    by_choice = drop == "choice"
    flat = (topk_idx.t() if by_choice else topk_idx).reshape(-1)
    order = torch.arange(flat.numel(), dtype=torch.int64, device=flat.device)
    if drop == "weight":
        order = topk_weights.reshape(-1).argsort(stable=True, descending=True)
    expert, by_expert = flat[order].sort(stable=True)
    first = torch.searchsorted(expert, expert)  # of the choices of the same expert
    place = torch.arange(flat.numel(), dtype=torch.int64, device=flat.device) - first
    dropped = torch.zeros_like(flat, dtype=torch.bool)
    dropped[order[by_expert]] = (place >= capacity) & (expert >= 0)
    return dropped.view(topk_idx.t().shape).t().contiguous() if by_choice else dropped.view(topk_idx.shape)
