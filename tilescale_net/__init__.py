"""Communication primitives for tilelang kernels: NVLink copies, GPU-initiated puts over a fabric, and a simulator.

import tilescale_net as tsn
import tilescale_net.language as N

tsn.init()
x = tsn.zeros((1024,), torch.float32)   # the same heap offset on every rank
kernel(x)                               # a kernel made with @tsn.jit
tsn.barrier()
tsn.finalize()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tilescale_net.errors import (
    ConfigurationError,
    DataRace,
    FabricError,
    HeapError,
    InvalidDescriptor,
    KernelError,
    OutOfBounds,
    PeerLost,
    PeOutOfRange,
    RankMismatch,
    SimulatorDeadlock,
    SimulatorUnsupported,
    TileScaleError,
    WaitTimeout,
)

if TYPE_CHECKING:
    import torch

    from tilescale_net.compiler.jit import compile, jit
    from tilescale_net.runtime.world import World

__version__ = "0.1.0"

__all__ = [
    "ConfigurationError",
    "DataRace",
    "FabricError",
    "HeapError",
    "InvalidDescriptor",
    "KernelError",
    "OutOfBounds",
    "PeOutOfRange",
    "PeerLost",
    "RankMismatch",
    "SimulatorDeadlock",
    "SimulatorUnsupported",
    "TileScaleError",
    "WaitTimeout",
    "barrier",
    "check",
    "compile",
    "device",
    "empty",
    "finalize",
    "free",
    "init",
    "jit",
    "rank",
    "size",
    "stats",
    "synchronize",
    "team",
    "world",
    "zeros",
]


def init(heap_bytes: int | str | None = None) -> World:
    """Join the job: bootstrap over torch.distributed, symmetric heap, peer mapping, proxy.

    Collective. Uses the default process group when there is one, else makes one (gloo) from the variables of launch.sh,
    torchrun, srun or mpirun; without any of them the job has one rank.

    Args:
        heap_bytes: size of the symmetric heap in bytes, or text such as "2G"; default TSN_HEAP_SIZE.

    Returns:
        The `World` of this process.

    Raises:
        ConfigurationError: too few GPUs, heap too large, peers that cannot be mapped, bad environment variables.
        RankMismatch: ranks that disagree on the arguments or the environment.
        PeerLost: a rank did not arrive in time.
    """
    from tilescale_net.runtime import world as _world

    return _world.init(heap_bytes)


def finalize() -> None:
    """Leave the job. Collective; waits for all ranks, then unmaps everything. Raises what is still unreported.

    A CUDA graph that holds kernels of this job must not be replayed afterwards: they use what is unmapped now. Capture it
    again after another init.
    """
    from tilescale_net.runtime import world as _world

    _world.finalize()


def world() -> World:
    """The `World` of this process; raises TileScaleError before init."""
    from tilescale_net.runtime import world as _world

    return _world.current()


def rank() -> int:
    """Index of this PE in team "world"."""
    return world().rank


def size() -> int:
    """Number of PEs in team "world"."""
    return world().size


def team(name: str = "world") -> range:
    """The PEs of a team, ascending.

    Args:
        name: "world" for all PEs, "node" for those of this PE's node (they are direct: mapped memory).
    """
    w = world()
    if name == "world":
        return range(w.size)
    if name == "node":
        return w.topology.node_members
    raise ConfigurationError(f"there is no team {name!r}; teams are 'world' and 'node'")


def device() -> torch.device:
    """The torch device that symmetric tensors live on: this rank's GPU, or the CPU under the simulator."""
    return world().device


def empty(shape: Sequence[int] | int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor in symmetric memory, at the same heap offset on every rank. Collective.

    Args:
        shape: sizes, equal on all ranks.
        dtype: a torch dtype, default torch.float32.

    Returns:
        An uninitialised tensor (NaN patterns under the simulator), aligned to 256 bytes. It stays valid until `free` or
        `finalize`. What refers to it after `finalize` still finds the bytes of then, which no other rank reaches; the
        whole heap is given back to the system with the last such tensor. One without elements takes no memory.

    Raises:
        TypeError: a shape or dtype that is none.
        HeapError: no room left.
        RankMismatch: another rank asked for something else; names both.
    """
    import torch

    return world().heap.allocate(shape, dtype or torch.float32, zero=False)


def zeros(shape: Sequence[int] | int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """As `empty`, filled with zeros on every rank before any rank returns."""
    import torch

    return world().heap.allocate(shape, dtype or torch.float32, zero=True)


def free(tensor: torch.Tensor) -> None:
    """Give a tensor of `empty` or `zeros` back to the heap. Collective; the tensor must not be used afterwards.

    Raises:
        HeapError: not a live tensor of the symmetric heap.
        RankMismatch: ranks free different tensors.
    """
    world().heap.free(tensor)


def barrier() -> None:
    """Wait until every rank's kernels have finished and every rank is here.

    Orders everything that was quiet: a put whose kernel called quiet, or that went to a direct PE, is visible after it.

    Raises:
        WaitTimeout, PeerLost, InvalidDescriptor, FabricError: what a kernel or the proxy met; PeerLost when a rank
            died or did not come within the timeout.
    """
    world().barrier()


def synchronize() -> None:
    """Wait for this rank's kernels and raise what they or the proxy met. Not collective."""
    world().synchronize()


def check() -> None:
    """Raise what kernels, the proxy or lost peers have left behind so far; waits only for the reason of an abort."""
    world().check()


def stats() -> dict[str, Any]:
    """Counters of the proxy (operations, bytes, queue depth, retries, time in each stage); empty without a proxy."""
    w = world()
    return w.proxy.stats() if w.proxy is not None else {}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # The compiler imports tilelang, which takes seconds: only kernels pay for it.
    if name in ("jit", "compile"):
        from tilescale_net.compiler import jit as _jit

        return getattr(_jit, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
