"""Sums and 8-bit rows in plain PyTorch: what the kernels must give, bit by bit."""

import torch

from tilescale_net.kernels.moe.row_ops import FP8_MAX, GROUP, SMALLEST_AMAX


def sum_of_ranks(
    parts: list[torch.Tensor], rank: int, dtype: torch.dtype, quantised: bool = False, nodes: int = 1
) -> torch.Tensor:
    """What combine makes on `rank` of what each rank has for its tokens.

    Args:
        parts: of each rank, [tokens, hidden] float32. nodes: where they are summed in other nodes first, else 1.
    """

    def travelled(rows: torch.Tensor) -> torch.Tensor:
        return dequantise(*quantise(rows)) if quantised else rows.to(dtype).float()

    size = len(parts) // nodes
    result = torch.zeros_like(parts[0])
    for node in range(nodes):
        members = parts[node * size : (node + 1) * size]
        if node == rank // size:
            for part in members:
                result += travelled(part)
        else:
            total = torch.zeros_like(result)
            for part in members:
                total += part.to(dtype).float()
            result += travelled(total)
    return result.to(dtype)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as float8_e4m3fn with a float32 scale per 128 elements: x is about q * scale."""
    rows, hidden = x.shape
    groups = -(-hidden // GROUP)
    padded = torch.nn.functional.pad(x.float(), (0, groups * GROUP - hidden)).view(rows, groups, GROUP)
    amax = padded.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_AMAX)
    # On a GPU torch makes a multiplication by the reciprocal, rounded twice, of a division with a Python number in it.
    largest = torch.full_like(amax, FP8_MAX)
    q = (padded * (largest / amax)).to(torch.float8_e4m3fn).view(rows, groups * GROUP)[:, :hidden]
    return q.contiguous(), (amax / largest).squeeze(-1)


def dequantise(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Back to float32."""
    wide = scales.repeat_interleave(GROUP, -1)[:, : q.shape[-1]]
    return q.float() * wide
