"""Ranks of a job that live in one process, one behind the other: their worlds and collective calls, without other processes."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from tilescale_net import _simulator
from tilescale_net.errors import ConfigurationError, TileScaleError
from tilescale_net.runtime import context
from tilescale_net.runtime.context import Records
from tilescale_net.runtime.control import CallLog
from tilescale_net.runtime.heap import Heap
from tilescale_net.runtime.placement import Topology
from tilescale_net.runtime.simulator import SharedMemory, SimulatorMemory
from tilescale_net.runtime.world import World

TIMEOUT = 30.0  # of waits, whose time stands still


class SameCalls:
    """The collective calls of ranks that run one behind the other: each must make the same as the first one. No rank
    learns anything from another: a call that gathers values gives a rank its own one for all."""

    def __init__(self, rank: int, size: int, made: list[tuple[str, object]]):
        self.rank, self.size, self.job_ranks = rank, size, list(range(size))
        self.members, self.excluded, self.generation, self.lost = list(range(size)), False, 0, set[int]()
        self.on_collective_begin, self.on_collective_done = (lambda: None), (lambda: None)
        self._made, self._at = made, 0

    def agree(self, call: str, arguments: str = "", described_as: str | None = None) -> None:
        self._compare(call, arguments)

    def gather(self, what: str, value: object) -> list:
        self._compare(what, value)
        return [value] * self.size

    def broadcast(self, what: str, value: str) -> str:
        self._compare(
            what, value if self.rank == 0 else self._made[self._at][1] if self._at < len(self._made) else value
        )
        return str(self._made[self._at - 1][1])

    def keep(self, members: list[int], call: str) -> None:
        self._compare(call, members)

    def _compare(self, call: str, value: object) -> None:
        if self.rank == 0:
            self._made.append((call, value))
        elif self._at >= len(self._made) or self._made[self._at] != (call, value):
            other = self._made[self._at] if self._at < len(self._made) else "nothing more"
            raise ConfigurationError(
                f"rank {self.rank} calls {call} with {value!r}, where rank 0 called {other}: in a check ranks are set up one "
                "after the other, so they must make equal calls, and cannot learn anything from each other before the kernels run"
            )
        self._at += 1


class RankWorld(World):
    """A World of a rank whose peers are in the same process."""

    def __init__(self, rank: int, size: int, heap_bytes: int, made: list[tuple[str, object]]):
        self.timeout, self.proxy, self.recorder, self.closed = TIMEOUT, None, None, False
        control: Any = SameCalls(rank, size, made)  # in the place of a Control
        self.control = control
        self.calls = CallLog(self.control)
        self.group, self.job_ranks, self.rank, self.size = None, tuple(range(size)), rank, size
        self.topology = Topology(rank, size, rank, 0, 1, rank, size, True)
        self.memory = SimulatorMemory(heap_bytes)
        self.device_kind, self.device = self.memory.device_kind, self.memory.device
        self.page = context.AbortPage()
        self.page.address = self.memory.pinned(context.ABORT_PAGE_BYTES)
        self.records = Records(self.memory.pinned)
        self.heap = Heap(self.memory, self.control.agree, rank)
        self.races = SharedMemory(_simulator.race_memory_bytes(heap_bytes))

    def connect(self, worlds: list[RankWorld]) -> None:
        """Make the context, when all ranks are there."""
        self.peer_base = [w.memory.base for w in worlds]
        pages = [w.races.base for w in worlds]
        _simulator.attach_race_memory(self.rank, self.memory.base, self.memory.size, pages, self.peer_base)
        self._make_context()

    @property
    def failure(self) -> None:
        """None: what fails is raised at once."""
        return None

    def check(self) -> None:
        """Nothing runs before the check does."""

    def synchronize(self) -> None:
        """Nothing runs."""

    def barrier(self) -> None:
        self.control.agree("tilescale_net.barrier")

    def fail(self, error: TileScaleError) -> NoReturn:
        raise error

    def error(self) -> str:
        """What a kernel left behind when it gave up; "" where none did."""
        record = self.page.record()
        if record is None:
            return ""
        base, name_of = self.memory.base, self.heap.describe
        return str(context.describe_error(record, self.rank, self.size, base, self.timeout, name_of) or "")

    def used(self) -> list[tuple[int, int]]:
        """Address and bytes of what a launch may change besides its tensors: the heap's used part, context and page."""
        end = max([context.SYSTEM_BYTES, *(at + size for at, size in self.heap.live.items())])
        return [(self.memory.base, end), *self.unseen()]

    def unseen(self) -> list[tuple[int, int]]:
        """Address and bytes of what kernels use to give up."""
        bytes_of_context: torch.Tensor = self._context_bytes
        return [(self.page.address, context.ABORT_PAGE_BYTES), (bytes_of_context.data_ptr(), bytes_of_context.numel())]

    def close(self, described_as: str | None = None) -> None:
        self.closed = True
        self.page.close()
        self.memory.close()
        self.races.close()


def make(size: int, heap_bytes: int) -> list[RankWorld]:
    """The worlds of all ranks of a job."""
    made: list[tuple[str, object]] = []
    worlds = [RankWorld(rank, size, heap_bytes, made) for rank in range(size)]
    for world in worlds:
        world.connect(worlds)
    return worlds
