"""Slow modules, loaded on first use, after wrong arguments are reported."""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["dist", "fabric", "fused_choice", "instruments", "moe", "p2p", "row_ops", "symmetric_memory", "torch"]

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric_memory

    from benchmark import instruments
    from tilescale_net.kernels import moe, p2p
    from tilescale_net.kernels.fused import choice as fused_choice
    from tilescale_net.kernels.moe import row_ops
    from tilescale_net.runtime import fabric
else:

    class Lazy:
        """A module by its name."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(importlib.import_module(self._name), attribute)

    torch, dist, symmetric_memory = map(Lazy, ("torch", "torch.distributed", "torch.distributed._symmetric_memory"))
    instruments, fabric = Lazy("benchmark.instruments"), Lazy("tilescale_net.runtime.fabric")
    moe, p2p = Lazy("tilescale_net.kernels.moe"), Lazy("tilescale_net.kernels.p2p")
    fused_choice, row_ops = Lazy("tilescale_net.kernels.fused.choice"), Lazy("tilescale_net.kernels.moe.row_ops")
