"""How copies are compared: flags, joining the job, NVSHMEM where it can run."""

import argparse

from benchmark.common.arguments import BenchmarkParser, offsets
from benchmark.common.environment import world_size
from benchmark.common.geometry import add_geometry_arguments, describe
from benchmark.common.measuring import GUARD, Timer, add_timing_arguments, gather
from benchmark.common.report import Report

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
