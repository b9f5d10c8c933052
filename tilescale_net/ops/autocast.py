"""What torch.autocast asks of matrix products, for operators that torch does not know."""

from __future__ import annotations

import torch


def operands(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The operands of a product: in the dtype of the region of torch.autocast of their device, as torch.mm takes them there
    (docs.pytorch.org/docs/stable/amp.html: all floating numbers but float64); as they are outside of one, and where one of
    them is of 8 bits and comes with scales.
    """
    kind = given[0].device.type
    if not torch.is_autocast_enabled(kind) or any(x.dtype == torch.float8_e4m3fn for x in given):
        return given
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in given)
