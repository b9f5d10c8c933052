"""Bandwidth of a GPU's writes to another node through the CPU proxy, next to a CPU that writes without one.

    GPUS=2 VIRTUAL_NODES=2 bash launch.sh benchmark/proxy_write.py
    GPUS=2 VIRTUAL_NODES=2 bash launch.sh benchmark/proxy_write.py --provider tcp --sizes 8M..64M --rails 4 --json run.json

Rank 0 writes to the first PE of another node: ProxySingle and ProxyMulti wait (quiet) after each write, the NBI ones at
the end; Single uses one channel (network endpoint), Multi all of them. The bare writer is the limit: the same library,
provider, pieces and memory, driven by a CPU that needs no queue, no descriptors and no ordering. It takes turns with the
proxy within each size. All written data are verified. A second part times put_signal, one way; with
--ordering a third one counts signals a second behind data, unordered, fenced, and by a proxy that drains at a fence.
"""

import argparse
import os
import random
import sys
from functools import partial
from typing import Any

import tilescale_net as tsn
from benchmark.common import (
    BenchmarkParser,
    Column,
    Report,
    byte_count,
    format_bytes,
    is_rank_zero,
    median,
    medians,
    non_negative_int,
    percentile,
    positive_float,
    positive_int,
    rate,
    size_list,
    us,
)
from benchmark.common.fabric import ProxyBench, SizeColumn
from benchmark.common.measuring import SIMULATED as LABEL
from benchmark.common.measuring import common_seeds, in_turn, raise_if_wrong
from benchmark.common.plot import significant

BENCH = dict(nodes=2, quick="--sizes 8,64K --signal-sizes 8 --repeat 2 --iters 5")  # see common/suite.py

SMALL = "8,64,512,4K,32K,256K,2M"
# Default sizes, bytes of a sample and most writes in it.
SIMULATED = ("8,512,32K,256K,2M", 16 << 20, 20)
STAGED = (f"{SMALL},8M..64M", 128 << 20, 200)  # a GPU, and a network that does not reach its memory
DIRECT = (f"{SMALL},8M..1G", 2 << 30, 200)
SIGNAL_SIZES = "8,64,1K,8K,64K"
MODES = {"": 1, "NBI": 0}  # suffix of a configuration's name, and whether it blocks


def parse() -> argparse.Namespace:
    parser = BenchmarkParser(__doc__.splitlines()[0], warmup=1, repeat=5, check=True)
    text = f"sizes and doubling ranges ({SIMULATED[0]} in the simulator, up to 64M or 1G on GPUs)"
    parser.option("--sizes", size_list, None, text)
    parser.option("--iters", positive_int, None, "writes of one timed run (by size)")
    parser.option("--link-gbps", positive_float, None, "rate of one channel, for BusBW; else measured")
    parser.add_argument("--provider", metavar="NAME", help="libfabric provider (TSN_PROVIDER, else the best one)")
    parser.option("--chunk", byte_count, None, "pieces in which proxy and bare writer post (TSN_PROXY_CHUNK)")
    parser.option("--put", byte_count, None, "bytes of one descriptor (the whole write)")
    text = "channels of the Multi configurations; 0: one for each NIC near the GPU (2 in the simulator)"
    parser.option("--rails", non_negative_int, None, text)
    parser.add_argument("--channels", choices=("both", "single", "multi"), default="both", help="configurations to run")
    text = f"sizes of put_signal ({SIGNAL_SIZES}); 'none' leaves that part out"
    signal = lambda t: [] if t == "none" else size_list(t)  # noqa: E731
    parser.add_argument("--signal-sizes", type=signal, default=signal(SIGNAL_SIZES), metavar="LIST", help=text)
    text = "sizes of the data before each signal, for the cost of ordering (not measured)"
    parser.add_argument("--ordering", type=size_list, default=[], metavar="LIST", help=text)
    text = "the PE that rank 0 writes to writes back at the same time; figures are of rank 0, data are not verified"
    parser.add_argument("-b", "--bidirectional", action="store_true", help=text)
    args = parser.parse_args()
    parser.require_two_ranks("writes need", "GPUS=2 VIRTUAL_NODES=2")
    args.no_check |= args.bidirectional  # both write to the same memory of the bare writers
    if args.provider:
        os.environ["TSN_PROVIDER"] = args.provider
    if args.chunk:
        os.environ["TSN_PROXY_CHUNK"] = str(args.chunk)
    return args


def measure(
    bench: Any, name: str, count: int, writes: int, seeds: random.Random, args: argparse.Namespace
) -> dict[str, list[float]]:
    """Samples in microseconds per write of both modes and of the bare writer, taken in turns. Collective. Raises
    WrongData: on all ranks, if written data are wrong."""
    complaints: list[str | None] = []

    def write(call: Any, buffer: Any) -> float:
        seed = seeds.getrandbits(62)
        if not args.no_check:
            bench.prepare(count, seed)
        spent: float = call()
        if not args.no_check:
            complaints.append(bench.difference(buffer, count, seed))
        return spent

    calls = {name + mode: partial(bench.write, count, args.put, writes, blocking) for mode, blocking in MODES.items()}
    turns = {kind: partial(write, call, bench.dst) for kind, call in calls.items()}
    turns[f"Bare{name[5:]}"] = partial(write, partial(bench.bare_write, count, writes), bench.src)
    samples = in_turn(turns, args.warmup, args.repeat)
    raise_if_wrong(f"{name}, {count} bytes", next(filter(None, complaints), None))
    return samples


def gbps(count: int, microseconds: float) -> float:
    """Gb/s, 10^9 bits a second."""
    return count * 8 / microseconds / 1e3


def tables(report: Report, kinds: list[str]) -> Any:
    """The tables of bandwidths and of the bare writer."""
    keys = [SizeColumn("bytes", "Size"), Column("count", "Count")]
    columns, limits = [], []
    for mode in MODES:
        for name in (f"Proxy{kind}{mode}" for kind in kinds):
            columns += [rate(name, name, "Gbps"), Column(f"{name}_busbw", "BusBW", unit="%")]
            columns += [us(f"{name}_us", "Lat", series=name)]
    for kind in kinds:
        limits.append(rate(f"Bare{kind}", f"Bare {kind.lower()}", "Gbps"))
        limits += [Column(f"Proxy{kind}{mode}_bare", f"Proxy{kind}{mode} of it", ".1%") for mode in MODES]
    bandwidth, limit = report.table("bandwidth", keys, columns), report.table("bare writer", keys, limits)
    limit.notes += [
        "Bare: a CPU thread that writes the same with libfabric alone, the limit. of it: the proxy's bandwidth over the bare "
        "writer's, median of the turns that both took."
    ]
    return bandwidth, limit


LEGEND = (
    "ProxySingle, ProxyMulti: the kernel waits (quiet) after each write, over one channel (network endpoint) or all of them; "
    "NBI: it waits once, after the last write. Lat: a run's time over its writes. Count: of 4-byte elements."
)


def fill(
    bandwidth: Any, limit: Any, results: dict[int, dict[str, list[float]]], rails: dict[str, int], link: float | None
) -> None:
    """Rows from samples by size and configuration. `link`: rate of one channel in Gb/s, or None to use the bare best."""
    rails = {k: n for k, n in rails.items() if any(f"Bare{k}" in s for s in results.values())}
    best = {k: max(gbps(n, median(s[f"Bare{k}"])) for n, s in results.items() if f"Bare{k}" in s) for k in rails}
    whole = {k: link * rails[k] if link else best[k] for k in rails}
    limits = []
    for count, samples in results.items():
        shown: dict[str, float] = {}
        against: dict[str, float] = {}
        for kind in rails:
            if f"Bare{kind}" not in samples:
                continue  # interrupted before
            bare = samples[f"Bare{kind}"]
            against[f"Bare{kind}"] = gbps(count, median(bare))
            for mode in MODES:
                name = f"Proxy{kind}{mode}"
                spent = median(samples[name])
                shown |= {name: gbps(count, spent), f"{name}_us": spent}
                shown[f"{name}_busbw"] = 100 * shown[name] / whole[kind]
                against[f"{name}_bare"] = median([b / p for b, p in zip(bare, samples[name])])
        keys = {"bytes": count, "count": count // 4}
        bandwidth.add(keys | shown, {f"{name}_us": values for name, values in samples.items()})
        limits.append(keys | against)
    for row in limits:
        limit.add(row)
    text = ", ".join(f"{k} {v:.2f}" for k, v in whole.items())
    of = "the link" if link else "the bare writer's best"
    bandwidth.notes += [LEGEND, f"BusBW: bandwidth in percent of {of} (Gbps: {text})."]


def signals(bench: ProxyBench, table: Any, args: argparse.Namespace) -> None:
    """Rows of put_signal's one-way times."""
    trips = 500 if bench.on_gpu else 20
    for count in args.signal_sizes:
        turns = {"signal": partial(bench.one_way, count, trips), "bare": partial(bench.bare_one_way, count, trips)}
        found = in_turn(turns, args.warmup, args.repeat)
        if tsn.rank() == 0:
            row = medians(found) | {f"{name}_p99": percentile(samples, 99) for name, samples in found.items()}
            beyond = median([a - b for a, b in zip(found["signal"], found["bare"])])
            table.add({"bytes": count, **row, "beyond": beyond}, found)


ORDERINGS = {"unordered": 0, "fenced": 1, "drained": 2}  # of kernels/proxy_write.py's signals


def orderings(bench: ProxyBench, table: Any, args: argparse.Namespace) -> None:
    """Rows of the cost of ordering: to one PE of another node, and to all of the first one's node."""
    turns = 2000 if bench.on_gpu else 50
    for count in args.ordering:
        for destinations in sorted({1, bench.world.topology.node_size}):
            calls = {name: partial(bench.ordered, count, destinations, turns, how) for name, how in ORDERINGS.items()}
            found = in_turn(calls, args.warmup, args.repeat)
            if tsn.rank() == 0:
                rates = {name: [1e3 / us for us in samples] for name, samples in found.items()}
                row = medians(rates)
                for other in ("unordered", "drained"):
                    row[f"of_{other}"] = median([f / o for f, o in zip(rates["fenced"], rates[other])])
                table.add({"bytes": count, "destinations": destinations, **row}, rates)


def main() -> None:
    args = parse()
    from tilescale_net.runtime import settings

    on_gpu = settings.device_kind() == "cuda"
    report = Report("proxy_write", args)
    kinds = {"both": ["Single", "Multi"], "single": ["Single"], "multi": ["Multi"]}[args.channels]
    bandwidth, limit = tables(report, kinds)
    columns = [us("bare", "Bare"), us("bare_p99", "p99", plotted=False), us("signal", "put_signal")]
    columns += [us("signal_p99", "p99", plotted=False), Column("beyond", "beyond bare", unit="us")]
    signal = report.table("put_signal, one way", [SizeColumn("bytes", "Size")], columns)
    signal.notes += [
        "Bare: two bare writers, until the target's CPU has seen the data. put_signal: from a kernel's call until the waiting "
        "kernel has seen the signal.",
        "p99: of the samples, each of which is a mean over the round trips of a launch.",
        "beyond bare: the median of the differences of turns, not the difference of the row's medians.",
    ]

    ordering = None
    if args.ordering:
        keys = [SizeColumn("bytes", "Size"), Column("destinations", "PEs")]
        columns = [rate(name, name, "k/s") for name in ORDERINGS]
        columns += [Column(f"of_{other}", f"fenced / {other}", ".2f") for other in ("unordered", "drained")]
        ordering = report.table("cost of ordering, signals a second and destination", keys, columns)
        ordering.notes += [
            "One thread puts `Size` bytes and a signal to each destination in turn. unordered: put_signal, behind its own data "
            "alone. fenced: put, fence, signal: behind all earlier puts to that PE. drained: put, quiet, signal, as where a "
            "proxy waits at a fence until all that it has sent is confirmed."
        ]

    results: dict[int, dict[str, list[float]]] = {}
    rails: dict[str, int] = {}
    try:
        measure_all(report, args, kinds, signal, ordering, results, rails, on_gpu)
    except KeyboardInterrupt:
        if results and is_rank_zero():
            fill(bandwidth, limit, results, rails, args.link_gbps)
        raise
    if is_rank_zero():
        fill(bandwidth, limit, results, rails, args.link_gbps)
    report.environment |= {
        "channels": ", ".join(f"{k} {n}" for k, n in rails.items()),
        "data": "not verified" if args.no_check else "verified",
        "direction": "both ways at once" if args.bidirectional else "one way",
        "timing": f"median of {args.repeat} runs of writes in one kernel, launch included",
    }
    if not on_gpu:
        report.environment["timing"] += f"; kernels {LABEL}, proxy, network and bare writer are real"
    report.finish()


def measure_all(
    report: Report,
    args: argparse.Namespace,
    kinds: list[str],
    signal: Any,
    ordering: Any,
    results: dict[int, dict[str, list[float]]],
    rails: dict[str, int],
    on_gpu: bool,
) -> None:
    """Fill `results` (samples by size and configuration) and `rails`, and the tables of signals. Collective."""
    for kind in kinds:
        wanted = 1 if kind == "Single" else (0 if on_gpu else 2) if args.rails is None else args.rails
        largest = max(
            [*(args.sizes or size_list((DIRECT if on_gpu else SIMULATED)[0])), *args.signal_sizes, *args.ordering]
        )
        bench = ProxyBench(wanted, largest, args.bidirectional)
        profile = SIMULATED if not on_gpu else STAGED if bench.properties["staged"] else DIRECT
        args.sizes = args.sizes or size_list(profile[0])
        bench.open_bare()
        rails[kind] = bench.rails
        p = bench.properties
        report.environment |= {
            "provider": f"{p['provider']}, libfabric {p['version']}, {p['interface'].split(',')[0]}",
            "chunk": format_bytes(p["chunk_bytes"]),
            "memory": "staged through pinned host memory" if p["staged"] else "the network reaches the heap",
        }
        seeds = random.Random(common_seeds(1)[0])
        for count in report.progress(args.sizes, f"{kind.lower()} channel, sizes", format_bytes):
            writes = args.iters or max(2, min(profile[2], profile[1] // count))
            samples = measure(bench, f"Proxy{kind}", count, writes, seeds, args)
            results.setdefault(count, {}).update(samples)
            if is_rank_zero():
                rates = ", ".join(f"{name} {significant(gbps(count, median(s)))} Gbps" for name, s in samples.items())
                print(f"{format_bytes(count)}: {rates}", file=sys.stderr, flush=True)
        if kind == kinds[0]:
            signals(bench, signal, args)
            if ordering is not None:
                orderings(bench, ordering, args)
        bench.close()


if __name__ == "__main__":
    main()
