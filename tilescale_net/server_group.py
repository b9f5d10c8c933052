"""A server's group of tensor parallelism: its world, and the preparation of its all-reduces for CUDA graphs."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from tilescale_net import ops
from tilescale_net.deep_ep.groups import join, leave
from tilescale_net.errors import PeerUnreachable, TileScaleError
from tilescale_net.kernels.all_reduce import AllReduce
from tilescale_net.kernels.all_reduce_norm import AllReduceNorm
from tilescale_net.ops import group_objects, norms
from tilescale_net.runtime.world import World

# Room for the staging memory of both kernels and for the largest batch of most models; larger tensors are summed in pieces.
HEAP_BYTES = 256 << 20
# Sizes whose kernels the first call makes: later calls may be captured into a CUDA graph.
WARM_UP = [1 << shift for shift in range(10, 24)]


class ServerGroup:
    """A group of ranks that map each other's memory. See `make`."""

    def __init__(self, name: str, world: World, cpu_group: dist.ProcessGroup) -> None:
        self.name, self.world = name, world
        self.torch_name = group_objects.name_of(cpu_group)
        self._warm: set[torch.dtype] = set()

    @classmethod
    def make(cls, name: str, cpu_group: dist.ProcessGroup, log: logging.Logger, variable: str) -> ServerGroup | None:
        """The group; None, on all ranks and with a warning, if a rank cannot map another one's memory. Collective.

        Args:
            name: the server's.
            cpu_group: its ranks.
            log: for the warning. variable: the one that requests it.

        Raises:
            TileScaleError: the world cannot be made for another reason.
        """
        world, failed, why = None, None, None
        try:
            world = join(cpu_group, HEAP_BYTES)
            if 0 in world.peer_base:
                why = "its ranks are on several nodes"
        except TileScaleError as err:
            failed = err
            why = str(err) if isinstance(err, PeerUnreachable) else None
        found: list = [None] * dist.get_world_size(cpu_group)
        dist.all_gather_object(found, why, cpu_group)
        reasons = [reason for reason in found if reason is not None]
        if reasons:
            if world is not None:
                leave(world)
            log.warning("%s: group %s keeps the server's own all-reduce: %s", variable, name, reasons[0])
            return None
        if failed is not None:
            raise failed
        assert world is not None
        return cls(name, world, cpu_group)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        """The sum over the group's ranks, a new tensor; None if this package does not sum such tensors."""
        if x.dtype not in AllReduce.DTYPES or x.device != self.world.device:
            return None
        if x.dtype not in self._warm and not self._is_capturing():
            self._warm.add(x.dtype)
            for nbytes in WARM_UP:
                ops.all_reduce(x.new_zeros(nbytes // x.element_size()), self.world)
        return ops.all_reduce(x, self.world)

    def all_reduce_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The RMSNorm of the sum of `x` plus `residual`, and that sum; None unless `takes_rows` and dtypes are
        equal."""
        if x.device != self.world.device or {residual.dtype, weight.dtype} != {x.dtype} or not takes_rows(x):
            return None
        norms.norm_of(group_objects.in_order(self.world), x.shape[-1]).warm_up(x.dtype)
        return ops.all_reduce_norm(x, weight, residual=residual, eps=eps, group=self.world, replicated=True)

    def close(self) -> None:
        """Free everything; collective."""
        leave(self.world)

    def _is_capturing(self) -> bool:
        return self.world.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def takes_rows(x: torch.Tensor) -> bool:
    """Whether `AllReduceNorm` takes the rows of `x`, whose number may be symbolic."""
    hidden = x.shape[-1] if x.dim() else 0
    nbytes = hidden * x.element_size() if isinstance(hidden, int) else 0
    return x.dtype in AllReduceNorm.DTYPES and nbytes % 16 == 0 and 0 < nbytes <= AllReduceNorm.LARGEST_ROW
