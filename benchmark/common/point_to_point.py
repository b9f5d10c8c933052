"""Copies between ranks 0 and 1 by different implementations ("sides"), timed alike and verified alike."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import torch
import torch.distributed as dist

import tilescale_net as tsn
from benchmark.common.geometry import Geometry
from benchmark.common.statistics import median
from benchmark.common.timing import Timer
from benchmark.common.verify import GUARD, WrongData, difference, prepare

DIRECTIONS = ("push", "pull")


class Side:
    """An implementation of push and pull.

    Attributes:
        name: in columns and messages.
        dst, src: symmetric uint8 tensors of capacity + GUARD bytes.
    """

    name = ""
    dst: torch.Tensor
    src: torch.Tensor

    def place(self, empty: Callable[[int], torch.Tensor], capacity: int, offset: tuple[int, int]) -> None:
        """Make `dst` and `src`, which begin that many bytes beyond a multiple of 256, from tensors that do not."""
        self.dst, self.src = (empty(at + capacity + GUARD)[at:] for at in offset)

    def launcher(self, direction: str, count: int, pe: int, geometry: Geometry) -> Callable[[int], None]:
        """`launch(n)`: start one kernel that copies `count` bytes to or from `pe`, `n` times."""
        raise NotImplementedError

    def relevant(self, geometry: Geometry) -> object:
        """What this side takes from a geometry: copies that agree in it are measured once."""
        return geometry


class Ours(Side):
    """The kernels of kernels/p2p.py."""

    name = "tilescale_net"

    def __init__(self, capacity: int, offset: tuple[int, int] = (0, 0)):
        self._capacity = capacity + GUARD
        self.place(lambda count: tsn.empty(count, torch.uint8), capacity, offset)
        self._work = torch.zeros(2, dtype=torch.int32, device=tsn.device())  # counters of the dynamic partition

    def launcher(self, direction: str, count: int, pe: int, geometry: Geometry) -> Callable[[int], None]:
        from tilescale_net.kernels import p2p

        factory = {"push": p2p.push, "pull": p2p.pull}[direction]
        kernel = factory(self._capacity, **vars(geometry))
        if geometry.partition == "dynamic":
            return lambda loops: kernel(self.dst, self.src, self._work, count, pe, loops)
        return lambda loops: kernel(self.dst, self.src, count, pe, loops)


class Nvshmem(Side):
    """NVSHMEM's block-scope put and get."""

    name = "NVSHMEM"

    def __init__(self, capacity: int, library, offset: tuple[int, int] = (0, 0)):
        self._library = library
        self.place(library.empty, capacity, offset)

    def launcher(self, direction: str, count: int, pe: int, geometry: Geometry) -> Callable[[int], None]:
        launch = {"push": self._library.put, "pull": self._library.get}[direction]
        blocks, threads = geometry.blocks, geometry.threads
        return lambda loops: launch(self.dst, self.src, count, pe, loops=loops, blocks=blocks, threads=threads)

    def relevant(self, geometry: Geometry) -> object:
        return geometry.blocks, geometry.threads


class CopyEngine(Side):
    """The GPU's copy engine, between the same mapped buffers as ours."""

    name = "copy engine"

    def __init__(self, ours: Ours):
        self.dst, self.src = ours.dst, ours.src

    def launcher(self, direction: str, count: int, pe: int, geometry: Geometry) -> Callable[[int], None]:
        from cuda.bindings import driver

        world = tsn.world()
        distance = world.peer_base[pe] - world.peer_base[world.rank]
        dst = self.dst.data_ptr() + (distance if direction == "push" else 0)
        src = self.src.data_ptr() + (distance if direction == "pull" else 0)

        def launch(times: int) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for _ in range(times):
                (status,) = driver.cuMemcpyDtoDAsync(dst, src, count, stream)
                if status != driver.CUresult.CUDA_SUCCESS:
                    raise RuntimeError(f"cuMemcpyDtoDAsync of {count} bytes {direction} failed: {status.name}")

        return launch

    def relevant(self, geometry: Geometry) -> object:
        return None


def batch_for(count: int) -> int:
    """Operations of one sample: 20 up to 4 MiB, fewer beyond, so that samples stay short."""
    return max(1, min(20, 20 * (4 << 20) // count))


def measure(
    side: Side, direction: str, count: int, geometry: Geometry, timer: Timer, *, bidirectional: bool, check: bool
) -> list[float]:
    """Samples in microseconds per copy. Collective; ranks above 1 only take part in the barriers.

    Rank 0 copies to or from rank 1; with `bidirectional` rank 1 does the same with rank 0 at once, and the samples are
    those of the slower rank.

    Raises:
        WrongData: on all ranks, when the timed copies did not deliver exactly what was sent.
    """
    rank = tsn.rank()
    seeds = [secrets.randbits(62), secrets.randbits(62)]  # of the data of ranks 0 and 1
    dist.broadcast_object_list(seeds, src=0)
    active = rank == 0 or (bidirectional and rank == 1)
    receives = rank < 2 and (bidirectional or rank == (1 if direction == "push" else 0))
    if check and rank < 2:
        prepare(side.src, side.dst, count, seeds[rank])
    launch = side.launcher(direction, count, 1 - rank, geometry) if rank < 2 else None
    # Two ranks that start together on the device: the hosts leave a barrier too far apart for small copies.
    together = _meet() if bidirectional and tsn.size() == 2 and timer.on_gpu else None
    tsn.barrier()
    samples = timer.measure(launch, batch_for(count), together) if active else []
    tsn.barrier()
    wrong = difference(side.dst, count, seeds[1 - rank]) if check and receives else None
    everyone: list = [None] * tsn.size()
    dist.all_gather_object(everyone, (samples, wrong))
    for other, (_, text) in enumerate(everyone):
        if text:
            raise WrongData(f"{side.name} {direction} of {count} bytes ({geometry}): on rank {other}, {text}")
    return max((s for s, _ in everyone if s), key=median)


def _meet() -> Callable[[], None]:
    from tilescale_net.kernels import p2p

    return p2p.meet()
