"""How copies are compared: flags, geometries of launches, joining the job, NVSHMEM where it can run."""

import argparse
import itertools
from dataclasses import dataclass

from benchmark.common.arguments import (
    BenchmarkParser,
    byte_count,
    format_bytes,
    int_list,
    offsets,
    one_of,
    parse_bytes,
    positive_int,
)
from benchmark.common.environment import world_size
from benchmark.common.measuring import GUARD, Timer, add_timing_arguments, gather
from benchmark.common.report import Report
from benchmark.common.table import Column

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


def _list(values: list) -> str:
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


def nvshmem(report: Report):
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


def finish(report: Report, library=None) -> None:
    """End the report, NVSHMEM (from `nvshmem`) and the job. Collective."""
    import tilescale_net as tsn

    report.finish()
    if library:
        library.finalize()
    tsn.finalize()
