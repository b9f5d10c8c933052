"""Mixture-of-experts dispatch and combine: `from tilescale_net.moe import AllToAll`."""

from kernels.moe import AllToAll, Dispatched, Handle, Pending, Tuning

__all__ = ["AllToAll", "Dispatched", "Handle", "Pending", "Tuning"]
