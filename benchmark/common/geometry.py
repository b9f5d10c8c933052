"""Geometries of launches that copy: their flags, combinations and columns."""

import argparse
import itertools
from dataclasses import dataclass

from benchmark.common.arguments import (
    BenchmarkParser,
    byte_count,
    format_bytes,
    int_list,
    one_of,
    parse_bytes,
    positive_int,
)
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
