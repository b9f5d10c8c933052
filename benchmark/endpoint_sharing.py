"""The cost of sharing endpoints between threads: random 8-byte reads or writes over endpoints with separate control
blocks.

    GPUS=2 VIRTUAL_NODES=2 bash launch.sh benchmark/endpoint_sharing.py --num-threads 3 --num-endpoints 100
    GPUS=2 VIRTUAL_NODES=2 bash launch.sh benchmark/endpoint_sharing.py --sweep --json run.json

Rank 0's threads access rank 1's memory, whose process only drives progress. Every endpoint has its own domain, address
vector and completion queue. Each thread keeps `window` operations outstanding: it waits for its oldest one at that
one's endpoint, then posts the next to a random endpoint at a random place; every operation has a completion. Shared:
any thread uses any endpoint (FI_THREAD_SAFE). Exclusive: thread t uses endpoints t, t + threads, … (FI_THREAD_DOMAIN).
The method is FaSST's one-sided-sharing (Kalia, Kaminsky, Andersen, OSDI 2016).
"""

import argparse
import os
from typing import Any

from benchmark.common import BenchmarkParser, Column, Report, byte_count, positive_float, positive_int, rate
from benchmark.common.fabric import FabricJob, add_fabric_arguments, middle, run
from benchmark.common.modules import instruments

BENCH = dict(nodes=2, quick="--duration 0.1 --repeat 1 --num-endpoints 6")  # see common/suite.py

MODES = ("shared", "exclusive")
BUFFER = 8 << 20  # bytes of target memory
MOST_THREADS, MOST_ENDPOINTS, MOST_WINDOW = 256, 1024, 512


def parse() -> tuple[BenchmarkParser, argparse.Namespace]:
    parser = BenchmarkParser(__doc__.splitlines()[0], warmup=None, repeat=3)
    parser.option("--num-threads", positive_int, 3, "threads of rank 0")
    parser.option("--num-endpoints", positive_int, 12, "endpoints of each rank")
    parser.option("--window", positive_int, 32, "operations outstanding by thread")
    parser.option("--size", byte_count, 8, "bytes of an operation")
    parser.add_argument("--op", choices=("read", "write"), default="read", help="operation (read)")
    parser.add_argument("--mode", choices=(*MODES, "both"), default="both", help="who uses an endpoint (both)")
    parser.option("--duration", positive_float, 0.5, "seconds of a run")
    parser.flag("--sweep", "threads x endpoints up to the two numbers given")
    add_fabric_arguments(parser)
    args = parser.parse_args()
    for name, most in (("num_threads", MOST_THREADS), ("num_endpoints", MOST_ENDPOINTS), ("window", MOST_WINDOW)):
        if getattr(args, name) > most:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} is more than {most}")
    if not 1 <= args.size <= BUFFER:
        parser.error(f"--size {args.size} is outside 1 to {BUFFER} bytes, the buffer")
    if args.mode != "shared" and not args.sweep and args.num_endpoints < args.num_threads:
        parser.error(
            f"exclusive use of {args.num_endpoints} endpoints leaves some of {args.num_threads} threads without one"
        )
    return parser, args


class Sharing:
    """Runs of one mode and number of endpoints."""

    def __init__(self, job: FabricJob, mode: str, endpoints: int) -> None:
        self.job, self.args, self.mode = job, job.args, mode
        self.bench = instruments.SharingBench(job.options(), endpoints, mode == "shared")
        addresses = job.control.gather("addresses", self.bench.address())
        self.bench.connect(addresses[1 - job.rank])
        self.rounds = 0

    def measure(self, threads: int) -> list[dict[str, Any]]:
        """One dict per repetition on rank 0: operations_per_s and cycles_per_post, a figure for each thread."""
        results = []
        args = self.args
        for _ in range(args.repeat):
            self.rounds += 1
            if self.job.rank == 0:
                options = dict(window=args.window, bytes=args.size, write=args.op == "write", duration_s=args.duration)
                options |= dict(shared=self.mode == "shared", timeout_s=args.timeout)
                results.append(self.bench.run(threads=threads, **options))
                self.bench.end_round(self.rounds, args.timeout)
            else:
                self.bench.serve(self.rounds, args.duration + 2 * args.timeout)
        return results


def total(result: dict[str, Any]) -> float:
    return sum(result["operations_per_s"]) / 1e6


def cycles(result: dict[str, Any]) -> float:
    """Cycles per post, weighted by the operations of each thread."""
    rates = result["operations_per_s"]
    return sum(r * c for r, c in zip(rates, result["cycles_per_post"])) / sum(rates)


def powers_up_to(most: int) -> list[int]:
    return sorted({1 << n for n in range(most.bit_length()) if 1 << n <= most} | {most})


def measure_threads(report: Report, job: FabricJob, modes: list[str]) -> None:
    """Per-thread and total figures of one configuration."""
    args = job.args
    keys = [Column("mode", "Mode"), Column("thread", "Thread")]
    columns = [rate("mops", "Rate", "Mops"), Column("cycles", "Cost", ".0f", better="lower", unit="cycles/post")]
    table = report.table("threads", keys, columns)
    for mode in report.progress(modes, "modes"):
        sharing = Sharing(job, mode, args.num_endpoints)
        report.environment["provider"] = sharing.bench.provider()
        results = sharing.measure(args.num_threads)
        del sharing
        if job.rank:
            continue
        result = middle(results, total)
        for thread, (speed, cost) in enumerate(zip(result["operations_per_s"], result["cycles_per_post"])):
            table.add({"mode": mode, "thread": str(thread), "mops": speed / 1e6, "cycles": cost})
        row = {"mode": mode, "thread": "total", "mops": total(result), "cycles": cycles(result)}
        table.add(row, samples={"mops": [total(r) for r in results]})


def sweep(report: Report, job: FabricJob, modes: list[str]) -> None:
    """Threads x endpoints, and the cost of sharing relative to exclusive use."""
    args = job.args
    columns = []
    for mode in modes:
        columns += [
            rate(f"{mode}_mops", mode, "Mops"),
            Column(f"{mode}_cycles", mode, better="lower", unit="cycles/post"),
        ]
    if len(modes) == 2:
        columns.append(Column("cost", "shared / exclusive", ".2f"))
    table = report.table("sweep", [Column("threads", "Threads", "d"), Column("endpoints", "Endpoints", "d")], columns)
    threads_list = powers_up_to(args.num_threads)
    for endpoints in report.progress(powers_up_to(args.num_endpoints), "endpoints"):
        rows: dict[int, dict[str, Any]] = {}
        samples: dict[int, dict[str, Any]] = {}
        for mode in modes:
            sharing = Sharing(job, mode, endpoints)
            report.environment["provider"] = sharing.bench.provider()
            for threads in threads_list:
                if mode == "exclusive" and endpoints < threads:
                    continue
                results = sharing.measure(threads)
                if job.rank:
                    continue
                row = rows.setdefault(threads, {"threads": threads, "endpoints": endpoints})
                row |= {f"{mode}_mops": total(middle(results, total)), f"{mode}_cycles": cycles(middle(results, total))}
                samples.setdefault(threads, {})[f"{mode}_mops"] = [total(r) for r in results]
            del sharing
        for threads, row in rows.items():
            if "shared_mops" in row and "exclusive_mops" in row:
                row["cost"] = row["shared_mops"] / row["exclusive_mops"]
            table.add(row, samples=samples[threads])


def main() -> None:
    parser, args = parse()
    job = FabricJob(parser, args, ranks=2)
    report = Report("endpoint_sharing", args)
    report.environment["libfabric"] = job.library["version"]
    modes = list(MODES) if args.mode == "both" else [args.mode]
    (sweep if args.sweep else measure_threads)(report, job, modes)
    cores = len(os.sched_getaffinity(0))
    busy = args.num_threads + (0 if job.multi_host else 1)
    if cores < busy:
        where = "" if job.multi_host else " and the target's"
        report.notes.append(
            f"This host has {cores} cores for {args.num_threads} threads{where}: they wait for the processor, not for "
            "each other's locks, and the cost of sharing cannot be told from these figures."
        )
    report.notes.append("Cycles are of the time stamp counter, within the posting call alone.")
    report.finish()


if __name__ == "__main__":
    run(main)
