"""Helpers of the examples on the host."""

import torch


def same_on_all(seed: int) -> torch.Generator:
    """Random numbers that are the same on every rank."""
    return torch.Generator().manual_seed(seed)


def check(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(got, expected), f"{int((got != expected).sum())} of {got.numel()} differ"
