"""Low-latency calls that go on when ranks are lost (DeepEP's enable_shrink), and the mask of the lost ones.

DeepEP's kernels mask a silent rank one by one; here the survivors agree. What was under way on any of them when a rank was
lost gives no rows and zeros on all of them, so that they are at the same call afterwards.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tilescale_net.errors import FabricError, PeerLost, TileScaleError, WaitTimeout
from tilescale_net.runtime import settings

LOST = (PeerLost, WaitTimeout, FabricError)


@dataclass
class _Dispatches:
    """Low-latency dispatches of this rank in a world, by all of its Buffers: how many have begun, and up to which they are void."""

    begun: int = 0
    void: int = 0


_dispatches: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by world


def _for_good(ranks: list[int]) -> str:
    return f"ranks {ranks} cannot come back; make a Buffer of a new group"


class Masks:
    """The ranks of a Buffer that are masked.

    Args:
        world: of the Buffer.
        shrinks: whether calls go on when ranks are lost, instead of raising.

    Attributes:
        shrinks: the same.
    """

    def __init__(self, world, shrinks: bool):
        self._world, self.shrinks = world, shrinks
        self._asked: set[int] = set()  # to be left out from the next call on
        self._warned_of: list[int] = []
        self._dispatches = _dispatches.setdefault(world, _Dispatches())

    @property
    def members(self) -> list[int]:
        """The ranks that take part; another list whenever they change."""
        return self._world.control.members

    def update(self, rank: int, masked: bool) -> None:
        """Mask a rank from the next call on, on all ranks that stay; or take that back before then."""
        self._world.control.refuse()
        if not 0 <= rank < self._world.size:
            raise ValueError(f"low_latency_update_mask_buffer: there is no rank {rank} among {self._world.size}")
        if masked and rank == self._world.rank:
            self._world.control.leave()
        elif masked and rank in self.members:
            self._asked.add(rank)
        elif not masked and rank in self._asked:
            self._asked.remove(rank)
        elif not masked and rank not in self.members:
            raise TileScaleError(f"deep_ep.Buffer.low_latency_update_mask_buffer: {_for_good([rank])}")

    def query(self, status: torch.Tensor) -> None:
        """Fill `status` [ranks] with 1 for ranks that are masked and 0 for others."""
        self.learn()
        masked = [int(r in self._asked or r not in self.members) for r in range(self._world.size)]
        status.copy_(torch.tensor(masked, dtype=status.dtype, device="cpu"))

    def clean(self) -> None:
        """Mask only the ranks that have been left out, which cannot come back: a warning names them."""
        self.learn()
        self._asked.clear()
        gone = sorted(set(range(self._world.size)) - set(self.members))
        if gone and gone != self._warned_of:
            self._warned_of = gone
            settings.log.warning("deep_ep.Buffer.low_latency_clean_mask_buffer: %s; they stay masked", _for_good(gone))

    def learn(self) -> None:
        """Go on without ranks of whose loss the host has heard."""
        self._world.control.refuse()
        if self.shrinks:
            try:
                self._world.check()
            except LOST:
                self._go_on()

    def begin_dispatch(self) -> bool:
        """Count a dispatch; whether it gives nothing, because another rank was there already when a rank was lost."""
        self._dispatches.begun += 1
        return self._dispatches.begun <= self._dispatches.void

    def survive(self, call: Callable, nothing: Callable):
        """The result of `call()`; where ranks are lost before it ends, the others go on and it is that of `nothing()`."""
        if not self.shrinks:
            self._leave_out()
            return call()
        try:
            self._leave_out()
            return call()
        except LOST:
            self._go_on()
            return nothing()

    def _leave_out(self) -> None:
        if self._asked:
            kept = [r for r in self.members if r not in self._asked]
            self._world.control.shrink_to(kept, "low_latency_update_mask_buffer")
            self._asked.clear()

    def _go_on(self) -> None:
        for attempt in range(self._world.size):
            try:
                self._dispatches.void = max(self._dispatches.void, *self._world.shrink(self._dispatches.begun).steps)
                return
            except PeerLost:  # another one is lost meanwhile; or this one was
                if attempt == self._world.size - 1:
                    raise
