"""Dispatch and combine of mixture-of-experts layers; `AllToAll` is the face, the four kernels lie beside it."""

from kernels.moe.all_to_all import AllToAll, Pending
from kernels.moe.handle import Dispatched, Handle
from kernels.moe.tuning import Tuning

__all__ = ["AllToAll", "Dispatched", "Handle", "Pending", "Tuning"]
