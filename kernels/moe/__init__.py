"""Dispatch and combine of mixture-of-experts layers; users call `AllToAll`."""

from tilescale_net.kernels.moe.all_to_all import AllToAll
from tilescale_net.kernels.moe.buffers import Arena
from tilescale_net.kernels.moe.config import Tuning
from tilescale_net.kernels.moe.handle import Dispatched, Handle, Metadata, Pending, metadata
from tilescale_net.kernels.moe.tiles import Tiles

__all__ = ["AllToAll", "Arena", "Dispatched", "Handle", "Metadata", "Pending", "Tiles", "Tuning", "metadata"]
