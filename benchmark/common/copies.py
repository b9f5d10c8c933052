"""Copies between ranks 0 and 1 by several implementations: timed alike, verified alike, set next to each other in a table."""

import argparse
from collections.abc import Callable, Sequence

import torch

import tilescale_net as tsn
from benchmark.common.arguments import format_bytes
from benchmark.common.geometry import Geometry, geometries, varying_columns
from benchmark.common.measuring import (
    GUARD,
    Timer,
    common_seeds,
    difference,
    gather,
    gigabytes_per_second,
    median,
    prepare,
    raise_if_wrong,
)
from benchmark.common.report import Report
from benchmark.common.table import Column, Table
from tilescale_net.kernels import p2p

DIRECTIONS = ("push", "pull")


class Implementation:
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
        """What this implementation takes from a geometry: copies that agree in it are measured once."""
        return geometry


class TilescaleNet(Implementation):
    """The kernels of kernels/p2p.py."""

    name = "tilescale_net"

    def __init__(self, capacity: int, offset: tuple[int, int] = (0, 0)):
        self._capacity = capacity + GUARD
        self.place(lambda count: tsn.empty(count, torch.uint8), capacity, offset)
        self._work = torch.zeros(2, dtype=torch.int32, device=tsn.device())  # counters of the dynamic partition

    def launcher(self, direction: str, count: int, pe: int, geometry: Geometry) -> Callable[[int], None]:
        factory = {"push": p2p.push, "pull": p2p.pull}[direction]
        kernel = factory(self._capacity, **vars(geometry))
        if geometry.partition == "dynamic":
            return lambda loops: kernel(self.dst, self.src, self._work, count, pe, loops)
        return lambda loops: kernel(self.dst, self.src, count, pe, loops)


class Nvshmem(Implementation):
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


class CopyEngine(Implementation):
    """The GPU's copy engine, between the same mapped buffers as ours."""

    name = "copy engine"

    def __init__(self, ours: TilescaleNet):
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
    implementation: Implementation,
    direction: str,
    count: int,
    geometry: Geometry,
    timer: Timer,
    *,
    bidirectional: bool,
    check: bool,
) -> list[float]:
    """Samples in microseconds per copy. Collective; ranks above 1 only take part in the barriers.

    Rank 0 copies to or from rank 1; with `bidirectional` rank 1 does the same with rank 0 at once, and the samples are
    those of the slower rank.

    Raises:
        WrongData: on all ranks, when the timed copies did not deliver exactly what was sent.
    """
    rank = tsn.rank()
    seeds = common_seeds(2)  # of the data of ranks 0 and 1
    active = rank == 0 or (bidirectional and rank == 1)
    receives = rank < 2 and (bidirectional or rank == (1 if direction == "push" else 0))
    if check and rank < 2:
        prepare(implementation.src, implementation.dst, count, seeds[rank])
    launch = implementation.launcher(direction, count, 1 - rank, geometry) if rank < 2 else None
    # Two ranks that start together on the device: the hosts leave a barrier too far apart for small copies.
    together = p2p.meet() if bidirectional and tsn.size() == 2 and timer.on_gpu else None
    tsn.barrier()
    samples = timer.measure(launch, batch_for(count), together) if active else []
    tsn.barrier()
    wrong = difference(implementation.dst, count, seeds[1 - rank]) if check and receives else None
    raise_if_wrong(f"{implementation.name} {direction} of {count} bytes ({geometry})", wrong)
    return max((s for s in gather(samples) if s), key=median)


def _key(implementation: Implementation, direction: str, what: str) -> str:
    return f"{implementation.name} {direction} {what}".lower().replace(" ", "_")


def columns_of(implementations: Sequence[Implementation], reference: str | None, percent: bool) -> list[Column]:
    """Bandwidth of every implementation, ratios to the reference implementation, then times."""
    named = len(implementations) > 1
    bandwidth, ratios, times = [], [], []
    for implementation in implementations:
        for direction in DIRECTIONS:
            title = f"{implementation.name} {direction.capitalize()}" if named else direction.capitalize()
            bandwidth.append(
                Column(_key(implementation, direction, "gbps"), f"{title} BW", better="higher", unit="GB/s")
            )
            times.append(Column(_key(implementation, direction, "us"), f"{title}", better="lower", unit="us"))
            if reference and implementation.name != reference:
                shown = f"{title} of {reference}" if percent else f"{title} x {reference}"
                ratios.append(Column(_key(implementation, direction, "ratio"), shown, ".1%" if percent else ".2f"))
    return bandwidth + ratios + times


def compare(
    report: Report,
    args: argparse.Namespace,
    implementations: Sequence[Implementation],
    timer: Timer,
    *,
    reference: str | None = None,
    percent: bool = False,
) -> Table:
    """Measure every implementation and add one table, `bandwidth`, to the report. Collective.

    Args:
        args: with `sizes`, `bidirectional`, `no_check` and the flags of Geometry.
        implementations: columns, in this order.
        reference: name of the implementation that the others are divided by; ignored when it was not measured.
        percent: show those ratios as percentages.
    """
    if reference not in [implementation.name for implementation in implementations]:
        reference = None
    size = Column("bytes", "Size", ",d", unit="Bytes")
    table = report.table("bandwidth", [*varying_columns(args), size], columns_of(implementations, reference, percent))
    known: dict[tuple, list[float]] = {}
    steps = [(geometry, count) for geometry in geometries(args) for count in args.sizes]
    for geometry, count in report.progress(steps, "copies", lambda s: f"{format_bytes(s[1])}, {s[0]}"):
        row = {"bytes": count, "threads": geometry.threads, "blocks": geometry.blocks, "engine": geometry.engine}
        samples = {}
        for implementation in implementations:
            for direction in DIRECTIONS:
                key = (implementation.name, direction, count, implementation.relevant(geometry))
                if key not in known:
                    known[key] = measure(
                        implementation, direction, count, geometry, timer,
                        bidirectional=args.bidirectional, check=not args.no_check,
                    )  # fmt: skip
                samples[_key(implementation, direction, "us")] = known[key]
                row[_key(implementation, direction, "us")] = median(known[key])
                row[_key(implementation, direction, "gbps")] = gigabytes_per_second(count, median(known[key]))
        for implementation in implementations if reference else ():
            for direction in DIRECTIONS:
                base = row[_key(next(s for s in implementations if s.name == reference), direction, "gbps")]
                row[_key(implementation, direction, "ratio")] = row[_key(implementation, direction, "gbps")] / base
        table.add(row, samples)
    return table
