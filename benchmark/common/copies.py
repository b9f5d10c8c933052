"""Copies between ranks 0 and 1 by several implementations, timed and verified alike: flags, job, implementations, table."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tilescale_net as tsn
from benchmark.common.arguments import TIMINGS, BenchmarkParser, byte_count, int_list, one_of, parse_bytes, positive_int
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
    start_together,
)
from benchmark.common.modules import p2p, torch
from benchmark.common.plot import format_bytes
from benchmark.common.report import Column, Report, Table, rate, us

DIRECTIONS = ("push", "pull")
# As in kernels/p2p.py, whose import takes seconds.
PARTITIONS = ("contiguous", "interleaved", "dynamic")
SLACK = 4 << 20  # bytes of the heap beyond the buffers: system area, alignment


@dataclass(frozen=True)
class Geometry:
    """Launch of one copy; the fields are the arguments of kernels/p2p.py. NVSHMEM takes threads and blocks only."""

    threads: int = 128
    blocks: int = 1
    engine: str = "auto"
    unroll: int | None = None
    ring: tuple[int, int] | None = None
    partition: str = "contiguous"
    chunk: int = 1 << 20

    def __str__(self) -> str:
        return f"{self.blocks} x {self.threads} threads, {self.engine}"


def describe(args: argparse.Namespace) -> str:
    """The requested geometries, in one line of a report's header."""
    parts = [f"{name} {'/'.join(map(str, getattr(args, name)))}" for name in ("blocks", "threads", "engine")]
    parts += [f"unroll {args.unroll}"] if args.unroll else []
    parts += [f"ring {args.ring[0]}x{format_bytes(args.ring[1])}"] if args.ring else []
    if max(args.blocks) > 1:
        parts.append(args.partition + (f" {format_bytes(args.chunk)}" if args.partition != "contiguous" else ""))
    return ", ".join(parts)


def ring_shape(text: str) -> tuple[int, int]:
    """argparse type: stages and bytes per stage, such as `8x16K`."""
    stages, _, stage = text.partition("x")
    try:
        return int(stages), parse_bytes(stage)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not stages x bytes per stage, such as 8x16K") from None


def offsets(text: str) -> tuple[int, int]:
    """argparse type: one or two whole numbers from 0 to 255, of a destination and a source; one is for both."""
    values = int_list(0, 255)(text)
    if len(values) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is more than an offset of the destination and one of the source")
    return values[0], values[-1]


def copy_parser(
    description: str, sizes: str, simulated: str | None = None, threads: int = 128, blocks: Sequence[int] = (1,)
) -> BenchmarkParser:
    """A parser with the flags of every comparison of copies, of Geometry among them: lists are measured one by one.
    `sizes`: default of `--sizes`; simulated: the same in the simulator. `threads`, `blocks`: defaults."""
    parser = BenchmarkParser(description, sizes=sizes, simulated=simulated, timing=TIMINGS, check=True)
    parser.option("--threads", int_list(1, 1024), [threads], "threads per block")
    parser.option("--blocks", int_list(1, 1024), list(blocks), "blocks that share a copy")
    parser.option("--engine", one_of("auto", "ldst", "bulk"), ["auto"], "auto, ldst, bulk, or all")
    parser.option("--unroll", positive_int, None, "16-byte accesses that a thread keeps in flight")
    parser.option("--ring", ring_shape, None, "stages and bytes per stage of a bulk copy's ring, such as 8x16K", "SxB")
    parser.add_argument("--partition", choices=PARTITIONS, default=PARTITIONS[0], help="how blocks share the bytes")
    parser.option("--chunk", byte_count, 1 << 20, "bytes of a chunk of such a share (1M)")
    parser.flag("--bidirectional", "both ranks copy at once; rates are per direction")
    text = "bytes by which both ends, or each, begin beyond a multiple of 256 (0)"
    parser.option("--offset", offsets, (0, 0), text, "DST[,SRC]")
    return parser


def geometries(args: argparse.Namespace) -> list[Geometry]:
    """Every combination of the lists."""
    return [
        Geometry(
            threads, blocks, engine, args.unroll, args.ring, args.partition if blocks > 1 else PARTITIONS[0], args.chunk
        )
        for blocks, threads, engine in itertools.product(args.blocks, args.threads, args.engine)
    ]


def varying_columns(args: argparse.Namespace) -> list[Column]:
    """Key columns for the lists that hold more than one value."""
    return [Column(name, name.capitalize()) for name in ("blocks", "threads", "engine") if len(getattr(args, name)) > 1]


def join(report: Report, args: argparse.Namespace) -> Timer:
    """Initialise tilescale_net with a heap for a source and a destination, and make the timer. Collective. `args`: from
    `copy_parser`."""
    world = tsn.init(2 * (max(args.sizes) + GUARD) + SLACK)
    timer = Timer.of(args, world.device_kind == "cuda")
    report.environment["geometry"] = describe(args)
    if any(args.offset):
        report.environment["offset"] = "destination {}, source {} bytes beyond a multiple of 256".format(*args.offset)
    report.environment |= {
        "direction": "both ways at once, rates per direction" if args.bidirectional else "one way",
        "path": "mapped memory" if world.topology.is_direct(1) else "proxy and fabric",
        "data": "not verified" if args.no_check else "verified",
        "timing": timer.label(),
    }
    return timer


def _started(report: Report, title: str, reason: str | None, start: Callable[[], Any]) -> Any:
    """Result of `start` unless a rank has a reason against it, with its version in the report; else None and a note.
    Collective."""
    reason = next((r for r in gather(reason) if r), None)
    if reason:
        report.notes.append(reason)
        return None
    library = start()
    report.environment[title] = library.version
    return library


def nvshmem(report: Report) -> Any:
    """NVSHMEM, started; or None and a note in the report with its missing requirement. Collective. Every rank
    must be able to run it, on one node."""
    from benchmark import nvshmem as baseline

    reason = baseline.missing()
    if reason is None and tsn.world().topology.nodes > 1:
        reason = "NVSHMEM baseline: not measured; it is compared on one node only"
    return _started(report, "NVSHMEM", reason, baseline.Nvshmem)


def gin(report: Report) -> Any:
    """NCCL's GIN, started; or None and a note as above. Collective. Only between nodes."""
    from benchmark import gin as baseline

    return None if tsn.world().topology.nodes == 1 else _started(report, "NCCL GIN", baseline.missing(), baseline.Gin)


class Implementation:
    """An implementation of push and pull. `name`: in columns and messages. `dst`, `src`: symmetric uint8 tensors of
    capacity + GUARD bytes, which begin `offset` bytes beyond a multiple of 256. `empty`: makes a symmetric tensor of
    that many bytes."""

    name = ""
    dst: torch.Tensor
    src: torch.Tensor

    def __init__(self, empty: Callable[[int], torch.Tensor], capacity: int, offset: tuple[int, int] = (0, 0)) -> None:
        self.dst, self.src = (empty(at + capacity + GUARD)[at:] for at in offset)

    def launcher(self, direction: str, count: int, pe: int, geometry: Geometry) -> Callable[[int], None]:
        """`launch(n)`: start one kernel that copies `count` bytes to or from `pe`, `n` times."""
        raise NotImplementedError

    def relevant(self, geometry: Geometry) -> object:
        """The part of a geometry that this implementation uses: copies that agree in it are measured once."""
        return geometry


class TilescaleNet(Implementation):
    """The kernels of kernels/p2p.py."""

    name = "tilescale_net"

    def __init__(self, capacity: int, offset: tuple[int, int] = (0, 0)) -> None:
        super().__init__(lambda count: tsn.empty(count, torch.uint8), capacity, offset)
        self._capacity = capacity + GUARD
        self._work = torch.zeros(2, dtype=torch.int32, device=tsn.device())  # counters of the dynamic partition

    def launcher(self, direction: str, count: int, pe: int, geometry: Geometry) -> Callable[[int], None]:
        kernel = getattr(p2p, direction)(self._capacity, **vars(geometry))
        work = (self._work,) if geometry.partition == "dynamic" else ()
        return partial(kernel, self.dst, self.src, *work, count, pe)


class Nvshmem(Implementation):
    """NVSHMEM's block-scope put and get."""

    name = "NVSHMEM"

    def __init__(self, capacity: int, library: Any, offset: tuple[int, int] = (0, 0)) -> None:
        super().__init__(library.empty, capacity, offset)
        self._library = library

    def launcher(self, direction: str, count: int, pe: int, geometry: Geometry) -> Callable[[int], None]:
        copy = {"push": self._library.put, "pull": self._library.get}[direction]
        return partial(copy, self.dst, self.src, count, pe, blocks=geometry.blocks, threads=geometry.threads)

    def relevant(self, geometry: Geometry) -> object:
        return geometry.blocks, geometry.threads


class CopyEngine(Implementation):
    """The GPU's copy engine, between the same mapped buffers as ours."""

    name = "copy engine"

    def __init__(self, ours: TilescaleNet) -> None:
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
    """Samples in microseconds per copy. Collective; ranks above 1 only take part in the barriers. Rank 0 copies to or
    from rank 1; with `bidirectional` rank 1 does the same with rank 0 at once, and the samples are of the slower
    rank. Raises WrongData: on all ranks, if the timed copies delivered wrong data."""
    rank = tsn.rank()
    seeds = common_seeds(2)  # of the data of ranks 0 and 1
    active = rank == 0 or (bidirectional and rank == 1)
    receives = rank < 2 and (bidirectional or rank == (1 if direction == "push" else 0))
    if check and rank < 2:
        prepare(implementation.src, implementation.dst, count, seeds[rank])
    launch = implementation.launcher(direction, count, 1 - rank, geometry) if rank < 2 else lambda times: None
    together = start_together(bidirectional and tsn.size() == 2 and timer.on_gpu)
    tsn.barrier()
    samples = timer.measure(launch, batch_for(count), together) if active else []
    tsn.barrier()
    wrong = difference(implementation.dst, count, seeds[1 - rank]) if check and receives else None
    raise_if_wrong(f"{implementation.name} {direction} of {count} bytes ({geometry})", wrong)
    return max((s for s in gather(samples) if s), key=median)


def _key(name: str, direction: str, what: str) -> str:
    return f"{name} {direction} {what}".lower().replace(" ", "_")


def columns_of(names: Sequence[str], reference: str | None, percent: bool) -> list[Column]:
    """Bandwidth of every implementation, ratios to the reference, then times."""
    bandwidth, ratios, times = [], [], []
    for name, direction in itertools.product(names, DIRECTIONS):
        title = f"{name} {direction.capitalize()}" if len(names) > 1 else direction.capitalize()
        bandwidth.append(rate(_key(name, direction, "gbps"), f"{title} BW", "GB/s"))
        times.append(us(_key(name, direction, "us"), title))
        if reference and name != reference:
            shown = f"{title} of {reference}" if percent else f"{title} x {reference}"
            ratios.append(Column(_key(name, direction, "ratio"), shown, ".1%" if percent else ".2f"))
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
    """Measure every implementation and add one table, `bandwidth`, to the report. Collective. `args`: from
    `copy_parser`. `implementations`: columns, in this order. `reference`: name of the implementation that the others
    are divided by; ignored when it was not measured. `percent`: show those ratios as percentages."""
    names = [implementation.name for implementation in implementations]
    reference = reference if reference in names else None
    size = Column("bytes", "Size", ",d", unit="Bytes")
    table = report.table("bandwidth", [*varying_columns(args), size], columns_of(names, reference, percent))
    known: dict[tuple[Any, ...], list[float]] = {}
    steps = [(geometry, count) for geometry in geometries(args) for count in args.sizes]
    for geometry, count in report.progress(steps, "copies", lambda s: f"{format_bytes(s[1])}, {s[0]}"):
        row = {"bytes": count, "threads": geometry.threads, "blocks": geometry.blocks, "engine": geometry.engine}
        samples = {}
        for implementation, direction in itertools.product(implementations, DIRECTIONS):
            key = (implementation.name, direction, count, implementation.relevant(geometry))
            if key not in known:
                known[key] = measure(
                    implementation, direction, count, geometry, timer,
                    bidirectional=args.bidirectional, check=not args.no_check,
                )  # fmt: skip
            time = median(known[key])
            samples[_key(implementation.name, direction, "us")] = known[key]
            row[_key(implementation.name, direction, "us")] = time
            row[_key(implementation.name, direction, "gbps")] = gigabytes_per_second(count, time)
        for name, direction in itertools.product(names, DIRECTIONS) if reference else ():
            base = row[_key(str(reference), direction, "gbps")]
            row[_key(name, direction, "ratio")] = row[_key(name, direction, "gbps")] / base
        table.add(row, samples)
    return table
