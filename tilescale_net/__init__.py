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

import builtins
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

from tilescale_net.errors import (
    ConfigurationError,
    DataRace,
    FabricError,
    HeapError,
    InvalidDescriptor,
    KernelError,
    OutOfBounds,
    PeerLost,
    PeerUnreachable,
    PeOutOfRange,
    RankMismatch,
    SimulatorDeadlock,
    SimulatorUnsupported,
    TileScaleError,
    WaitTimeout,
)

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from tilescale_net.compiler.jit import compile, jit, macro
    from tilescale_net.runtime.groups import StoreGroup
    from tilescale_net.runtime.world import Survivors, World

    # None: the world of all ranks of the job, or the only one.
    Group: TypeAlias = ProcessGroup | DeviceMesh | StoreGroup | World | str | None

__version__ = "0.2.0"

_FOLDER = os.path.dirname(os.path.abspath(__file__))
if not os.path.isdir(os.path.join(_FOLDER, "kernels")):  # a link that unpacking the checkout did not create
    __path__.append(os.path.dirname(_FOLDER))
if "tilelang" not in sys.modules and not os.access(os.path.expanduser("~"), os.W_OK | os.X_OK):
    # tilelang's import makes a folder in the home, and fails if it cannot.
    from tilescale_net.runtime import private_folder as _private_folder

    os.environ.update(_private_folder.for_tilelang())

__all__ = [
    "ConfigurationError", "DataRace", "FabricError", "HeapError", "InvalidDescriptor", "KernelError", "OutOfBounds",
    "PeOutOfRange", "PeerLost", "PeerUnreachable", "RankMismatch", "SimulatorDeadlock", "SimulatorUnsupported", "StoreGroup",
    "TileScaleError", "WaitTimeout", "barrier", "check", "compile", "device", "empty", "finalize", "free", "init",
    "jit", "macro", "range", "rank", "shrink", "size", "stats", "synchronize", "team", "world", "zeros",
]  # fmt: skip


def init(
    heap_bytes: int | str | None = None, *, group: ProcessGroup | DeviceMesh | StoreGroup | str | None = None
) -> World:
    """Join the job, or a group of its ranks: bootstrap over torch.distributed, symmetric heap, peer mapping, proxy.

    Collective over the ranks of the group; other ranks do nothing. Without a group it uses the default process group,
    or makes one (gloo) from the variables of launch.sh, torchrun, srun or mpirun; without any of them the job has one
    rank. A process may be in several worlds, one for each group; see docs/groups.md.

    Args:
        heap_bytes: size of the symmetric heap in bytes, or text such as "2G"; default TSN_HEAP_SIZE. A full heap grows to
            TSN_HEAP_LIMIT.
        group: the ranks of the world: a ProcessGroup of any backend, a DeviceMesh of one dimension, the name of a group,
            or a StoreGroup, of processes that share only a store. PE numbers are ranks of the group. Default: all ranks
            of the job.

    Returns:
        The `World` of this process in the group.

    Raises:
        ConfigurationError: too few GPUs, heap too large, peers that cannot be mapped (PeerUnreachable), bad environment
            variables, a group that torch.distributed does not know or that does not contain this process.
        RankMismatch: ranks disagree on the arguments or the environment.
        PeerLost: a rank did not arrive in time.
        TileScaleError: a second call for this group without `finalize`.
    """
    from tilescale_net.runtime import worlds
    from tilescale_net.runtime.world import WorldHooks
    from tilescale_net.trace import recorder, reporter

    def device_code() -> str:  # imported after the rendezvous: ranks learn of a failure
        from tilescale_net.compiler import toolchain

        return toolchain.sources_hash()

    hooks = WorldHooks(device_code, reporter.of_world, recorder.start, reporter.report_on_signal)
    try:
        return worlds.init(heap_bytes, group, hooks)
    except TileScaleError as error:
        # The message is complete; the traceback has only frames of this package.
        raise error.with_traceback(None) from None


def finalize(group: Group = None) -> None:
    """Leave the world of a group; without one, all worlds of this process.

    Collective; waits for all ranks of the world, then unmaps everything. Raises pending errors. Group: see `world`.

    Do not replay a CUDA graph with kernels of this world afterwards: they would access unmapped memory. Capture it again
    after another init.
    """
    from tilescale_net.runtime import worlds

    worlds.finalize(group)


def world(group: Group = None) -> World:
    """The `World` of a group.

    Args:
        group: the argument of `init`, or another group of the same ranks. Default: the world of all ranks of the job, or
            else the only one. The same holds for `group` everywhere.

    Raises:
        TileScaleError: no earlier `init` for the group; no group given, but several worlds.
        ConfigurationError: not a group, or a group without this process.
    """
    from tilescale_net.runtime import worlds

    return worlds.get(group)


def rank(group: Group = None) -> int:
    """Index of this PE in team "world" of the group, see `world`."""
    return world(group).rank


def size(group: Group = None) -> int:
    """Number of PEs in team "world" of the group, see `world`."""
    return world(group).size


def team(name: str = "world", group: Group = None) -> builtins.range:
    """The PEs of a team, ascending.

    Args:
        name: "world" for all PEs of the group, "node" for the PEs of this PE's node, whose memory is mapped (direct).
        group: see `world`.
    """
    w = world(group)
    if name == "world":
        return builtins.range(w.size)
    if name == "node":
        return w.topology.node_members
    raise ConfigurationError(f"there is no team {name!r}; teams are 'world' and 'node'")


def device(group: Group = None) -> torch.device:
    """The torch device of symmetric tensors: this rank's GPU, or the CPU in the simulator. Group: see `world`."""
    return world(group).device


def empty(shape: Sequence[int] | int, dtype: torch.dtype | None = None, *, group: Group = None) -> torch.Tensor:
    """A tensor in symmetric memory, at the same heap offset on every rank of the group. Collective over them.

    Args:
        shape: sizes, equal on all ranks.
        dtype: a torch dtype, default torch.float32, not torch's default dtype.
        group: see `world`.

    Returns:
        An uninitialised tensor (NaN patterns in the simulator), aligned to 256 bytes, valid until `free` or `finalize`.
        After `finalize` it keeps its bytes, which no other rank can access; the last such tensor releases the heap's
        memory. A tensor without elements takes no memory.

    Raises:
        TypeError: an invalid shape or dtype.
        HeapError: the heap is full at TSN_HEAP_LIMIT, or a rank has no memory for more.
        RankMismatch: another rank requested something else; names both requests.
    """
    import torch

    return world(group).heap.allocate(shape, dtype or torch.float32, zero=False)


def zeros(shape: Sequence[int] | int, dtype: torch.dtype | None = None, *, group: Group = None) -> torch.Tensor:
    """As `empty`, filled with zeros on every rank before any rank returns."""
    import torch

    return world(group).heap.allocate(shape, dtype or torch.float32, zero=True)


def free(tensor: torch.Tensor, *, group: Group = None) -> None:
    """Return a tensor of `empty` or `zeros` to the heap. Collective; do not use the tensor afterwards.

    Args:
        tensor: the tensor itself, not a view of it.
        group: the group of its heap; by default the tensor determines it, or see `world` if the tensor has no elements.

    Raises:
        HeapError: not a live tensor of the symmetric heap.
        RankMismatch: ranks free different tensors.
    """
    from tilescale_net.runtime import worlds

    (worlds.get(group) if group is not None else worlds.of_tensor(tensor)).heap.free(tensor)


def barrier(group: Group = None) -> None:
    """Wait until the kernels of every rank of the group have finished and every rank has called it.

    Puts whose kernel called quiet, and puts to direct PEs, are visible after it. Group: see `world`.

    Raises:
        WaitTimeout, PeerLost, InvalidDescriptor, FabricError: errors of a kernel or the proxy; PeerLost if a rank died or
            did not arrive within the timeout.
    """
    world(group).barrier()


def shrink(step: int = 0, *, timeout: float | None = None, group: Group = None) -> Survivors:
    """Continue without the lost ranks, in the same processes and with the same objects.

    Collective over the remaining ranks, each of which has raised `PeerLost`, `WaitTimeout` or `FabricError`, or will in its
    next call. It ends the kernels of this rank, waits for the ranks that still respond, and clears the failure. Collective
    host calls (memory, barriers, new objects, `finalize`) then involve only those ranks. Memory, tensors and PE numbers
    stay. Calls in flight are void on all ranks: an `AllToAll` continues after its `set_active()`; free other objects and
    construct new ones.

    Args:
        step: a number of the caller, such as the failed step; ranks may be a call apart when one is lost.
        timeout: seconds to wait for ranks that are alive; default TSN_TIMEOUT. A rank that does not arrive is lost, and its
            process is killed (SIGKILL), because its kernels might write into memory of the others.
        group: see `world`.

    Returns:
        Survivors: `ranks`, the remaining PEs, and `steps`, the argument of each.

    Raises:
        PeerLost: the others have continued without this rank, the process that hosts the job's store is gone, or another
            rank was lost meanwhile; in the last case call it again.
        FabricError, ConfigurationError: the network between nodes could not be set up again.
        TileScaleError: this rank caused the failure; raises that error.
    """
    return world(group).shrink(step, timeout)


def synchronize(group: Group = None) -> None:
    """Wait for this rank's kernels and raise their errors and the proxy's, in the group (see `world`). Not collective."""
    world(group).synchronize()


def check(group: Group = None) -> None:
    """Raise pending errors of kernels, the proxy or lost peers; waits only for the reason of an abort. Group: see `world`."""
    world(group).check()


def stats(group: Group = None) -> dict[str, Any]:
    """Counters of the proxy (operations, bytes, queue depth, retries, time in each stage); empty without a proxy. Group: see `world`."""
    w = world(group)
    return w.proxy.stats() if w.proxy is not None else {}


def range(name: str) -> AbstractContextManager[None]:
    """Show the `with` block on this rank's host track of the timeline, under `name`; see TSN_TRACE.

    Without TSN_TRACE it costs next to nothing.

    Args:
        name: shown in the timeline.
    """
    from tilescale_net.trace import recorder

    return recorder.user_range(name)


def __dir__() -> list[str]:
    # For completion: public names and imported modules of the package, not this file's imports.
    modules = (n for n, value in globals().items() if getattr(value, "__name__", "") == f"{__name__}.{n}")
    return sorted({*__all__, *modules, *(n for n in globals() if n.startswith("__"))})


def __getattr__(name: str) -> Any:
    # The compiler imports tilelang, which takes seconds: only kernels pay for it.
    if name in ("jit", "compile", "macro"):
        from tilescale_net.compiler import jit as _jit

        return getattr(_jit, name)
    if name == "StoreGroup":
        from tilescale_net.runtime.groups import StoreGroup as _StoreGroup

        return _StoreGroup
    if name in ("_native", "_simulator"):
        from tilescale_net.runtime import this_host

        return this_host.load_native(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
