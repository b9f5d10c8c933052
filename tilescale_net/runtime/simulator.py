"""Settings of the simulator: which schedule it runs, when remote writes arrive, what machine it simulates.

One seed makes a different schedule of every launch and every rank, and the same ones again in the next run.
"""

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import settings

VISIBILITIES = ("eager", "late", "random")
_seed: int | None = None
_visibility: str | None = None
_races: bool | None = None
_launches = 0


class KeptLaunch(NamedTuple):
    """A launch that tilescale_net/explore runs later, with the tensors of its arguments."""

    launch: Any  # of _simulator
    tensors: list
    blocks: int
    resident_blocks: int


# Where it is a list, launches are kept there and not run.
kept_launches: list[KeptLaunch] | None = None


class Running:
    """Kernels that run now, which threads of the program have launched: the heap of each, by the thread."""

    def __init__(self) -> None:
        self._heaps: dict[int, int] = {}
        self._ended = threading.Condition()

    @contextlib.contextmanager
    def one(self, heap: int) -> Iterator[None]:
        """Inside of the block this thread runs a kernel of the world that has this heap."""
        me = threading.get_ident()
        outer = self._heaps.get(me)  # where a handler of signals launches one
        with self._ended:
            self._heaps[me] = heap
        try:
            yield
        finally:
            with self._ended:
                if outer is None:
                    del self._heaps[me]
                else:
                    self._heaps[me] = outer
                self._ended.notify_all()

    def wait(self, heap: int) -> None:
        """Until no other thread runs a kernel of that world."""
        me = threading.get_ident()  # a handler of signals may be here, in the middle of a kernel
        with self._ended:
            self._ended.wait_for(lambda: all(h != heap or thread == me for thread, h in self._heaps.items()))


running = Running()


def seed() -> int:
    """The seed in force: that of `schedule`, else TSN_SIM_SEED, else 0."""
    return settings.SIM_SEED.get() if _seed is None else _seed


def visibility() -> str:
    """The visibility in force: that of `schedule`, else TSN_SIM_VISIBILITY, else `random`."""
    return _visibility or settings.SIM_VISIBILITY.get()


def races() -> bool:
    """Whether transfers and signals between ranks are followed and races reported, by `schedule` or TSN_SIM_RACES."""
    return settings.SIM_RACES.get() if _races is None else _races


def multiprocessors() -> int:
    return settings.SIM_SMS.get()


def stall_seconds(timeout: float) -> float:
    """Seconds that a kernel may stand still. `timeout`: deadline of its own waits, which must have come before."""
    return max(settings.SIM_STALL.get(), 2 * timeout)


def stack_bytes() -> int:
    """Bytes of stack of each simulated thread."""
    return settings.SIM_STACK.get()


@contextlib.contextmanager
def schedule(seed: int | None = None, visibility: str | None = None, races: bool | None = None) -> Iterator[None]:
    """Launches inside the block run with this seed and visibility, and report races or not, regardless of the
    environment.

    The count of launches starts at 0 again, so that a block repeats the schedules of an equal block.
    """
    global _seed, _visibility, _races, _launches
    if visibility is not None and visibility not in VISIBILITIES:
        raise ConfigurationError(f"visibility {visibility!r} is not one of {', '.join(VISIBILITIES)}")
    saved = _seed, _visibility, _races, _launches
    _seed = saved[0] if seed is None else seed
    _visibility = visibility or saved[1]
    _races = saved[2] if races is None else races
    _launches = 0
    try:
        yield
    finally:
        _seed, _visibility, _races, _launches = saved


def start_delay(rank: int, ranks: int) -> float:
    """Seconds that this rank begins its next launch later than the first one of an order that all ranks agree on.

    In most launches the ranks begin one after the other, so that no order of their messages is the usual one.
    """
    lot = random.Random(f"{seed()} {_launches}")
    order = lot.sample(range(ranks), ranks)
    return lot.choice((0.0, 1e-3, 2e-3, 2e-3)) * min(order.index(rank), 4)


def next_launch_seed(rank: int) -> int:
    """Seed of one launch: mixes the seed in force, the rank, and the number of the launch in this process."""
    global _launches
    _launches += 1
    mixed = 0
    for part in (seed(), rank, _launches):
        mixed = (mixed ^ part) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019 & (1 << 64) - 1
        mixed ^= mixed >> 29
    return mixed
