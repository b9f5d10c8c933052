"""Dispatch and combine of mixture-of-experts layers; users call `AllToAll`."""

from tilescale_net.kernels.moe.all_to_all import AllToAll
from tilescale_net.kernels.moe.arena import Arena
from tilescale_net.kernels.moe.handle import Dispatched, Handle, Pending
from tilescale_net.kernels.moe.row_metadata import Metadata, metadata
from tilescale_net.kernels.moe.tiles import Tiles
from tilescale_net.kernels.moe.tuning import Tuning

__all__ = ["AllToAll", "Arena", "Dispatched", "Handle", "Metadata", "Pending", "Tiles", "Tuning", "metadata"]
