"""FP8 rows with scales that are powers of two, and scales packed as exponents, for low-latency dispatch."""

import torch

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
