"""What every operator asks of its tensors before torch looks at them."""

from __future__ import annotations

import torch


def as_weights(x: torch.Tensor) -> torch.Tensor:
    """Weights of a router, of a floating dtype, in float32 as kernels take them; their gradients are of the given dtype."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16, torch.float64) else x


def check(call: str, **tensors: torch.Tensor) -> None:
    """Raise TypeError, by name, for what is no tensor or one whose elements do not lie in memory by strides; ValueError for
    tensors on several devices, which on "meta" torch would take for a question of shapes alone.
    """
    first = None
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{call}: {name} must be a tensor, not {type(x).__name__}")
        if x.layout != torch.strided or x.is_quantized or x.is_nested:
            kind = "quantized" if x.is_quantized else "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
            raise TypeError(
                f"{call}: {name} is a {kind} tensor; it must be a dense one, as to_dense() or dequantize() give"
            )
        if first is None:
            first = name
        elif x.device != tensors[first].device:
            raise ValueError(f"{call}: {name} is on {x.device}, but {first} on {tensors[first].device}")
