"""Settings of the simulator: which schedule it runs, when remote writes arrive, what machine it stands for.

| variable | meaning | default |
| --- | --- | --- |
| TSN_SIM_SEED | seed of the schedule and of the order in which remote writes arrive | 0 |
| TSN_SIM_VISIBILITY | remote writes arrive at once (`eager`), as late as the memory model allows (`late`), or by lot (`random`) | random |
| TSN_SIM_SMS | multiprocessors of the simulated GPU; with them, how many blocks run at a time | 132 |
| TSN_SIM_STALL | seconds without any progress after which a kernel counts as hanging; at least twice TSN_TIMEOUT | 60 |
| TSN_SIM_STACK | bytes of stack per simulated thread | 256K |
| TSN_SIM_CXXFLAGS | further flags of the host compiler, e.g. `-g -O0` for a debugger | |
| CXX | the host compiler | g++, clang++ or c++ |

One seed makes a different schedule of every launch and every rank, and the same ones again in the next run.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import settings

VISIBILITIES = ("eager", "late", "random")
_seed: int | None = None
_visibility: str | None = None
_launches = 0


def seed() -> int:
    """The seed in force: that of `schedule`, else TSN_SIM_SEED, else 0."""
    return settings.integer("TSN_SIM_SEED", 0) if _seed is None else _seed


def visibility() -> str:
    """The visibility in force: that of `schedule`, else TSN_SIM_VISIBILITY, else `random`."""
    name = _visibility or os.environ.get("TSN_SIM_VISIBILITY") or "random"
    if name not in VISIBILITIES:
        raise ConfigurationError(f"visibility {name!r} (TSN_SIM_VISIBILITY) is not one of {', '.join(VISIBILITIES)}")
    return name


def multiprocessors() -> int:
    return settings.integer("TSN_SIM_SMS", 132, 1)


def stall_seconds(timeout: float) -> float:
    """Seconds that a kernel may stand still. `timeout`: deadline of its own waits, which must have come before."""
    return max(settings.number("TSN_SIM_STALL", 60.0, 0.1), 2 * timeout)


def stack_bytes() -> int:
    """Bytes of stack of each simulated thread."""
    return settings.parse_bytes(os.environ.get("TSN_SIM_STACK") or "256K", "TSN_SIM_STACK")


@contextlib.contextmanager
def schedule(seed: int | None = None, visibility: str | None = None) -> Iterator[None]:
    """Launches inside the block run with this seed and visibility, whatever the environment says.

    The count of launches starts at 0 again, so that a block repeats the schedules of an equal block.
    """
    global _seed, _visibility, _launches
    if visibility is not None and visibility not in VISIBILITIES:
        raise ConfigurationError(f"visibility {visibility!r} is not one of {', '.join(VISIBILITIES)}")
    saved = _seed, _visibility, _launches
    _seed = saved[0] if seed is None else seed
    _visibility = visibility or saved[1]
    _launches = 0
    try:
        yield
    finally:
        _seed, _visibility, _launches = saved


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
