"""Arguments of launches in the form that is passed quickest."""

import torch

from tilescale_net.runtime import quick_calls


def constant(value):
    """An argument of many launches: tensors of a GPU are converted once, others stay what they are.

    A launch takes its stream from the torch tensors among its arguments, so one of a GPU must stay one.
    """
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    import tvm_ffi

    try:
        return tvm_ffi.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError):  # a dtype that this torch does not exchange
        return value


def unresolved(tensor: torch.Tensor) -> str | None:
    """What is wrong with a view of torch whose bytes are not its values (`x.conj()`, `x.conj().imag`), and what to do; None
    for other tensors.
    """
    if tensor.is_neg():
        return "is a view that stands for the negative of its memory; give its resolve_neg()"
    if tensor.is_conj():
        return "is a view that stands for the conjugate of its memory; give its resolve_conj()"
    return None


def kept(value):
    """As `constant`, for what a call gives: launches of `quick_calls` take tensors as they are."""
    return value if quick_calls.are_there() else constant(value)
