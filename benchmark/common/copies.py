"""Copies between ranks 0 and 1 by several implementations, timed and verified alike: flags, job, implementations, table."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmark.common.arguments import (
    BenchmarkParser,
    byte_count,
    int_list,
    offsets,
    one_of,
    parse_bytes,
    positive_int,
)
from benchmark.common.measuring import (
    GUARD,
    Timer,
    add_timing_arguments,
    common_seeds,
    difference,
    gather,
    gigabytes_per_second,
    median,
    prepare,
    raise_if_wrong,
)
from benchmark.common.plot import format_bytes
from benchmark.common.report import Column, Report, Table, world_size

if TYPE_CHECKING:  # arguments are checked before torch, which takes seconds, is imported
    import torch


# Those of kernels/p2p.py, which is not imported here because that takes seconds.
PARTITIONS = ("contiguous", "interleaved", "dynamic")


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
    """The geometries asked for, in one line of a report's header."""
    parts = [f"blocks {_list(args.blocks)}", f"threads {_list(args.threads)}", f"engine {_list(args.engine)}"]
    parts += [f"unroll {args.unroll}"] if args.unroll else []
    parts += [f"ring {args.ring[0]}x{format_bytes(args.ring[1])}"] if args.ring else []
    if max(args.blocks) > 1:
        parts.append(args.partition + (f" {format_bytes(args.chunk)}" if args.partition != "contiguous" else ""))
    return ", ".join(parts)


def _list(values: list[Any]) -> str:
    return "/".join(map(str, values))


def ring_shape(text: str) -> tuple[int, int]:
    """argparse type: stages and bytes per stage, such as `8x16K`."""
    stages, _, stage = text.partition("x")
    try:
        return int(stages), parse_bytes(stage)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not stages x bytes per stage, such as 8x16K") from None


def add_geometry_arguments(
    parser: BenchmarkParser, threads: str = "128", blocks: str = "1", engine: str = "auto"
) -> None:
    """Add the flags of Geometry. `--threads`, `--blocks` and `--engine` take lists, which are measured one by one."""
    add = parser.add_argument
    number = int_list(1, 1024)
    add("--threads", type=number, default=number(threads), metavar="LIST", help=f"threads per block ({threads})")
    number = int_list(1, 1024)
    add("--blocks", type=number, default=number(blocks), metavar="LIST", help=f"blocks that share a copy ({blocks})")
    way = one_of("auto", "ldst", "bulk")
    add("--engine", type=way, default=way(engine), metavar="LIST", help=f"auto, ldst, bulk, or all ({engine})")
    add("--unroll", type=positive_int, metavar="N", help="16-byte accesses that a thread keeps in flight")
    add(
        "--ring", type=ring_shape, metavar="SxB", help="stages and bytes per stage of a bulk copy's ring, such as 8x16K"
    )
    add("--partition", choices=PARTITIONS, default=PARTITIONS[0], help="how blocks share the bytes")
    add("--chunk", type=byte_count, default=1 << 20, metavar="BYTES", help="bytes of a chunk of such a share (1M)")


def geometries(args: argparse.Namespace) -> list[Geometry]:
    """Every combination of the lists."""
    combinations = itertools.product(args.blocks, args.threads, args.engine)
    return [
        Geometry(
            threads, blocks, engine, args.unroll, args.ring, args.partition if blocks > 1 else PARTITIONS[0], args.chunk
        )
        for blocks, threads, engine in combinations
    ]


def varying_columns(args: argparse.Namespace) -> list[Column]:
    """Key columns for the lists that hold more than one value."""
    titles = {"blocks": "Blocks", "threads": "Threads", "engine": "Engine"}
    return [Column(name, title) for name, title in titles.items() if len(getattr(args, name)) > 1]


SLACK = 4 << 20  # bytes of the heap beyond the buffers: system area, alignment


def copy_parser(description: str, sizes: str, simulated: str | None = None, **geometry: str) -> BenchmarkParser:
    """A parser with the flags of every comparison of copies.

    Args:
        sizes: default of `--sizes`; simulated: the same in the simulator.
        geometry: defaults of `--threads`, `--blocks`, `--engine`.
    """
    parser = BenchmarkParser(description, warmup=None, repeat=None, sizes=sizes, simulated=simulated)
    add_timing_arguments(parser)
    add_geometry_arguments(parser, **geometry)
    parser.add_argument("--bidirectional", action="store_true", help="both ranks copy at once; rates are per direction")
    parser.add_argument("--no-check", action="store_true", help="do not verify the data")
    parser.add_argument(
        "--offset",
        type=offsets,
        default=(0, 0),
        metavar="DST[,SRC]",
        help="bytes by which both ends, or each, begin beyond a multiple of 256 (0)",
    )
    return parser


def require_two_ranks(parser: BenchmarkParser) -> None:
    """Refuse (exit code 2) a launch with one rank."""
    if world_size() < 2:
        parser.error("copies need two ranks; start it with GPUS=2 bash launch.sh …")


def join(report: Report, args: argparse.Namespace) -> Timer:
    """Initialise tilescale_net with a heap for a source and a destination, and make the timer. Collective.

    Args:
        args: from `copy_parser`.
    """
    import tilescale_net as tsn

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


def nvshmem(report: Report) -> Any:
    """NVSHMEM, started; or None and a note in the report that names in one line what it needs. Collective.

    Every rank must be able to run it, on one node.
    """
    import tilescale_net as tsn
    from benchmark import nvshmem as baseline

    reason = baseline.missing()
    if reason is None and tsn.world().topology.nodes > 1:
        reason = "NVSHMEM baseline: not measured; it is compared on one node only"
    reason = next((r for r in gather(reason) if r), None)
    if reason:
        report.notes.append(reason)
        return None
    library = baseline.Nvshmem()
    report.environment["NVSHMEM"] = library.version
    return library


def finish(report: Report, library: Any = None) -> None:
    """End the report, NVSHMEM (from `nvshmem`) and the job. Collective."""
    import tilescale_net as tsn

    report.finish()
    if library:
        library.finalize()
    tsn.finalize()


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

    def __init__(self, capacity: int, offset: tuple[int, int] = (0, 0)) -> None:
        import torch

        import tilescale_net as tsn

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


class Nvshmem(Implementation):
    """NVSHMEM's block-scope put and get."""

    name = "NVSHMEM"

    def __init__(self, capacity: int, library: Any, offset: tuple[int, int] = (0, 0)) -> None:
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

    def __init__(self, ours: TilescaleNet) -> None:
        self.dst, self.src = ours.dst, ours.src

    def launcher(self, direction: str, count: int, pe: int, geometry: Geometry) -> Callable[[int], None]:
        import torch
        from cuda.bindings import driver

        import tilescale_net as tsn

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
    import tilescale_net as tsn
    from tilescale_net.kernels import p2p

    rank = tsn.rank()
    seeds = common_seeds(2)  # of the data of ranks 0 and 1
    active = rank == 0 or (bidirectional and rank == 1)
    receives = rank < 2 and (bidirectional or rank == (1 if direction == "push" else 0))
    if check and rank < 2:
        prepare(implementation.src, implementation.dst, count, seeds[rank])
    launch = implementation.launcher(direction, count, 1 - rank, geometry) if rank < 2 else lambda times: None
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
    known: dict[tuple[Any, ...], list[float]] = {}
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
