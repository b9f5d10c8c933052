"""One-way latency from a PE's put_signal to the other's wait, next to NVSHMEM and NCCL's GIN.

    GPUS=2 bash launch.sh benchmark/put_signal.py
    GPUS=2 bash launch.sh benchmark/put_signal.py --threads 32,128,1024 --sizes 8,1K,8K,64K
    GPUS=2 VIRTUAL_NODES=2 LD_PRELOAD=…/libnccl.so.2 bash launch.sh benchmark/put_signal.py

Ranks 0 and 1 answer each other inside one kernel, one block each; a sample is a launch's time over twice its round trips.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import tilescale_net as tsn
from benchmark.common import (
    BenchmarkParser,
    Column,
    Report,
    format_bytes,
    int_list,
    medians,
    one_of,
    percentile,
    positive_int,
    us,
)
from benchmark.common.arguments import on_gpu
from benchmark.common.copies import SLACK, gin, nvshmem
from benchmark.common.measuring import GUARD, SIMULATED, common_seeds, difference, prepare, raise_if_wrong
from benchmark.common.modules import p2p, torch

BENCH = dict(quick="--sizes 8,8K --threads 128 --repeat 3")  # see common/suite.py


def parse() -> argparse.Namespace:
    parser = BenchmarkParser(
        __doc__.splitlines()[0], warmup=2, repeat=20, sizes="8,64,1K,8K,64K", simulated="8,1K,8K", check=True
    )
    parser.option("--threads", int_list(1, 1024), None, "of the block (32,128,1024; simulator 32,128)")
    parser.option("--engine", one_of("auto", "ldst", "bulk"), ["auto"], "of the copy: auto, ldst, bulk, or all")
    parser.option("--unroll", positive_int, None, "16-byte accesses that a thread keeps in flight")
    parser.option("--trips", positive_int, None, "round trips a launch (1000; in the simulator 5)")
    parser.flag("--no-nvshmem", "leave NVSHMEM out even where it can run")
    parser.flag("--no-gin", "leave NCCL's GIN out, between nodes, even where it can run")
    args = parser.parse_args()
    args.threads = args.threads or ([32, 128, 1024] if on_gpu() else [32, 128])
    parser.require_two_ranks("copies need")
    return args


class TilescaleNet:
    """Round trips of N.put_signal_block."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity + GUARD
        self.dst, self.src = (tsn.empty(self._capacity, torch.uint8) for _ in range(2))
        self._flag = tsn.zeros((1,), torch.uint64)
        self._base = 0

    def launch(self, count: int, threads: int, engine: str, unroll: int | None, trips: int) -> None:
        kernel = p2p.ping_pong(self._capacity, threads, engine, unroll)
        starts = int(tsn.rank() == 0)
        kernel(self.dst, self.src, self._flag, count, 1 - tsn.rank(), self._base, starts, trips)
        self._base += trips


class InOneLine(TilescaleNet):
    """The same with 8 bytes of data and their signal word in one aligned 16-byte line, which travels in one store."""

    SIZE = 8

    def __init__(self) -> None:
        line = tsn.zeros((2,), torch.uint64)
        self._capacity = self.SIZE
        self.dst, self._flag = line.view(torch.uint8)[: self.SIZE], line[1:]
        self.src = tsn.empty(self.SIZE, torch.uint8)
        self._base = 0


class Nvshmem:
    """Round trips of nvshmemx_putmem_signal_block."""

    def __init__(self, capacity: int, library: Any) -> None:
        self._library = library
        self.dst, self.src = (library.empty(capacity + GUARD) for _ in range(2))
        self._flag = library.empty(8).view(torch.int64).zero_()
        self._base = 0

    def launch(self, count: int, threads: int, engine: str, unroll: int | None, trips: int) -> None:
        me = tsn.rank()
        self._library.ping_pong(
            self.dst, self.src, count, self._flag, self._base, 1 - me, me == 0, loops=trips, threads=threads
        )
        self._base += trips


class Gin:
    """Round trips of ncclGin::put with a signal, by a block."""

    def __init__(self, capacity: int, library: Any) -> None:
        self._library = library
        (self.dst, self._to), (self.src, self._from) = (library.empty(capacity + GUARD) for _ in range(2))
        self._before = 0

    def launch(self, count: int, threads: int, engine: str, unroll: int | None, trips: int) -> None:
        me = tsn.rank()
        where = self._to, self._from, count, self._before
        self._library.ping_pong(*where, 1 - me, me == 0, loops=trips, threads=threads)
        self._before += trips


def measure(implementation: Any, count: int, threads: int, engine: str, args: argparse.Namespace) -> list[float]:
    """Samples in microseconds, one way; on rank 0, elsewhere empty. Collective. Raises WrongData on all ranks."""
    rank = tsn.rank()
    seeds = common_seeds(2)
    if rank < 2 and not args.no_check:
        prepare(implementation.src, implementation.dst, count, seeds[rank])
    tsn.barrier()
    launch = lambda: implementation.launch(count, threads, engine, args.unroll, args.trips)  # noqa: E731
    times = _stamps(launch, args) if rank < 2 else []
    tsn.barrier()
    wrong = difference(implementation.dst, count, seeds[1 - rank]) if rank < 2 and not args.no_check else None
    raise_if_wrong(f"put_signal of {count} bytes, {threads} threads, engine {engine}", wrong)
    return [t / (2 * args.trips) for t in times[args.warmup :]]


def _stamps(launch: Callable[..., Any], args: argparse.Namespace) -> list[float]:
    """Microseconds of each of warmup + repeat launches, queued back to back so that the ranks stay in step."""
    turns = args.warmup + args.repeat
    if not torch.cuda.is_available():
        stamps = [time.perf_counter()]
        for _ in range(turns):
            launch()
            stamps.append(time.perf_counter())
        return [(b - a) * 1e6 for a, b in zip(stamps, stamps[1:])]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(turns + 1)]
    events[0].record()
    for event in events[1:]:
        launch()
        event.record()
    events[-1].synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in zip(events, events[1:])]


def main() -> None:
    args = parse()
    report = Report("put_signal", args)
    world = tsn.init(2 * max(args.sizes) + SLACK)
    on_gpu = world.device_kind == "cuda"
    args.trips = args.trips or (1000 if on_gpu else 5)
    timing = f"median of {args.repeat} launches of {args.trips} round trips"
    report.environment["path"] = "mapped memory" if world.topology.is_direct(1) else "proxy and fabric"
    report.environment["data"] = "not verified" if args.no_check else "verified"
    report.environment["timing"] = timing if on_gpu else f"{timing}; {SIMULATED}"
    library = None if args.no_nvshmem else nvshmem(report)
    capacity = max(args.sizes)
    ours, theirs = TilescaleNet(capacity), Nvshmem(capacity, library) if library else None
    over_sockets = None if args.no_gin else gin(report)
    gins = Gin(capacity, over_sockets) if over_sockets else None
    in_line = InOneLine()

    columns = []
    for engine in args.engine:
        columns.append(us(engine, "put_signal" if len(args.engine) == 1 else f"put_signal, {engine}"))
        columns.append(us(f"{engine}_p99", "p99", plotted=False))
    columns += [us("line", "in one line"), us("nvshmem", "NVSHMEM"), Column("ratio", "x NVSHMEM", ".2f")]
    if gins:
        columns += [us("gin", "NCCL GIN"), Column("gin_ratio", "x GIN", ".2f")]
    keys = [Column("threads", "Threads"), Column("bytes", "Size", ",d", unit="Bytes")]
    table = report.table("one way", keys, columns)
    table.notes.append("in one line: 8 bytes and their signal word in one aligned 16-byte line, sent in one store.")
    table.notes.append("p99: of the samples, each of which is a mean over the round trips of a launch.")
    steps = itertools.product(args.threads, args.sizes)
    for threads, count in report.progress(steps, "latencies", lambda s: f"{format_bytes(s[1])}, {s[0]} threads"):
        samples = {engine: measure(ours, count, threads, engine, args) for engine in args.engine}
        if count == InOneLine.SIZE:
            samples["line"] = measure(in_line, count, threads, args.engine[0], args)
        if theirs:
            samples["nvshmem"] = measure(theirs, count, threads, "auto", args)
        if gins:
            samples["gin"] = measure(gins, count, threads, "auto", args)
        if tsn.rank() == 0:
            row = medians(samples)
            row |= {f"{engine}_p99": percentile(samples[engine], 99) for engine in args.engine}
            if theirs:
                row["ratio"] = row["nvshmem"] / min(row[engine] for engine in args.engine)
            if gins:
                row["gin_ratio"] = row["gin"] / min(row[engine] for engine in args.engine)
            table.add({"threads": threads, "bytes": count, **row}, samples)
    report.finish(library, over_sockets)


if __name__ == "__main__":
    main()
