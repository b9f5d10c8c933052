"""Bandwidth of the fabric between two CPUs, with perftest's flags, columns and definitions.

    GPUS=2 VIRTUAL_NODES=2 bash launch.sh benchmark/fabric_bw.py --op all -a
    GPUS=2 NODES=2 … bash launch.sh benchmark/fabric_bw.py --op write -s 1M -t 128 -l 16 -b --report-gbits

Rank 0 sends to, writes to or reads from rank 1; with -b both do it at the same time and the sum is shown. Average: bytes of
all messages / (last completion - first post). Peak: bytes / the least time per message over any run of messages. Every
message has its own completion, the only proof of its arrival on networks that reorder.
"""

import argparse
from typing import Any

from benchmark.common import (
    BenchmarkParser,
    Column,
    Report,
    byte_count,
    format_bytes,
    non_negative_int,
    one_of,
    positive_float,
    positive_int,
    rate,
)
from benchmark.common.fabric import FabricJob, SizeColumn, add_fabric_arguments, middle, note_of_cores, run

BENCH = dict(nodes=2, quick="--op write -s 64K -n 100 --repeat 1")  # see common/suite.py

OPERATIONS = ("send", "write", "read")
ALL_SIZES = [1 << n for n in range(1, 24)]  # perftest's -a
MOST_BYTES = 1 << 30  # of one run, without -n
PEAK_ITERATIONS = 20000  # perftest records no stamps beyond
MIB, GIGABIT = 1 << 20, 1e9 / 8


def parse() -> tuple[BenchmarkParser, argparse.Namespace]:
    parser = BenchmarkParser(__doc__.splitlines()[0], warmup=None, repeat=3)
    parser.option("--op", one_of(*OPERATIONS), list(OPERATIONS), "send, write, read, or all (all)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("-a", "--all", action="store_true", help="sizes of 2, 4, … bytes up to 8M")
    which.add_argument("-s", "--size", type=byte_count, default=65536, metavar="SIZE", help="bytes of a message (64K)")
    length = parser.add_mutually_exclusive_group()
    text = "messages of a size (1000; fewer where they would exceed 1G)"
    length.add_argument("-n", "--iters", type=positive_int, metavar="N", help=text)
    length.add_argument("-D", "--duration", type=positive_float, metavar="S", help="seconds of a size, instead of -n")
    numbers = (
        ("-t", "--tx-depth", 128, "messages outstanding (128)"),
        ("-r", "--rx-depth", 512, "receives posted (512)"),
        ("-l", "--post-list", 1, "messages posted behind one doorbell (1)"),
    )
    for short, name, default, text in numbers:
        parser.add_argument(short, name, type=positive_int, default=default, metavar="N", help=text)
    parser.option("--recv-post-list", positive_int, 1, "receives posted at once")
    parser.add_argument("-b", "--bidirectional", action="store_true", help="both ranks at once; shows the sum")
    parser.flag("--report-gbits", "10^9 bits a second instead of MiB/s")
    parser.option("--warmup", non_negative_int, None, "untimed messages before those of a size (one queue full)")
    text = "speed of the link in 10^9 bits a second, for the summary (as the NIC tells)"
    parser.option("--link-gbps", positive_float, None, text)
    text = "network endpoints that carry the messages in turn (one for each NIC near the GPU)"
    parser.add_argument("--rails", type=positive_int, default=0, metavar="N", help=text)
    add_fabric_arguments(parser)
    args = parser.parse_args()
    if args.iters and args.iters % args.post_list:
        parser.error(f"-n {args.iters} is not a multiple of -l {args.post_list}")
    if args.post_list > args.tx_depth:
        parser.error(f"-l {args.post_list} does not fit into -t {args.tx_depth} outstanding messages")
    if args.recv_post_list > args.rx_depth:
        parser.error(f"--recv-post-list {args.recv_post_list} does not fit into -r {args.rx_depth} posted receives")
    args.sizes = ALL_SIZES if args.all else [args.size]
    return parser, args


def iterations_of(args: argparse.Namespace, size: int) -> int:
    """Messages of one run of a size, a multiple of the list length."""
    if args.iters:
        return args.iters
    wanted = min(1000, max(16, MOST_BYTES // size))
    return -(-wanted // args.post_list) * args.post_list


class Bandwidth:
    """Runs of one operation between ranks 0 and 1, over one session. `sizes`: as far as the provider takes them."""

    def __init__(self, job: FabricJob, operation: str) -> None:
        self.job, self.args, self.operation = job, job.args, operation
        # Receives are left to the benchmark for sends; otherwise none are needed.
        buffers = 0 if operation == "send" else 16
        depth = max(self.args.tx_depth, self.args.rx_depth)
        fields = {"message_buffers": buffers, "depth": depth, "delivery_complete": False}
        self._check_limits(job.properties(**fields))
        if not self.sizes:
            return
        self.session = job.session(2 * max(*self.sizes, 4096), **fields)
        self.properties = self.session.properties()

    def _check_limits(self, properties: dict[str, Any]) -> None:
        provider, error = properties["provider"], self.job.parser.error
        limit = properties["max_send" if self.operation == "send" else "max_write"]
        self.sizes = [size for size in self.args.sizes if size <= limit]
        self.excess = f"the largest message of provider {provider} has {limit} bytes"
        if not self.sizes and len(self.args.op) == 1:
            error(
                f"{self.operation}: {min(self.args.sizes)} bytes exceed the largest message of provider {provider}, {limit}"
            )
        slots = properties["depth"] * properties["rails"]
        if self.args.post_list > slots:
            error(f"-l {self.args.post_list} exceeds the {slots} operations that provider {provider} holds")

    def run(self, size: int, iterations: int, stamps: bool, duration: float = 0.0) -> dict[str, Any]:
        """One run; times are this rank's."""
        return self.session.bandwidth(
            1 - self.job.rank,
            self.operation,
            size,
            iterations=iterations,
            duration_s=duration,
            tx_depth=self.args.tx_depth,
            rx_depth=self.args.rx_depth,
            post_list=self.args.post_list,
            recv_post_list=self.args.recv_post_list,
            initiator=self.job.rank == 0 or self.args.bidirectional,
            stamps=stamps,
        )

    def measure(self, size: int) -> dict[str, Any]:
        """The row of one size (on rank 0), with the run of median average: iterations and bytes a second."""
        args = self.args
        iterations = iterations_of(args, size)
        seed = size
        self.session.fill(size, seed)
        warmup = min(args.tx_depth, iterations) if args.warmup is None else args.warmup
        if warmup:
            self.run(size, -(-warmup // args.post_list) * args.post_list, False)
        runs = []
        for _ in range(args.repeat):
            stamps = iterations <= PEAK_ITERATIONS
            mine = self.run(size, iterations, stamps, args.duration or 0.0)
            both = [r for r in self.job.control.gather("results", mine) if r["iterations"]]
            average = sum(r["iterations"] * size / r["seconds"] for r in both)
            peak = sum(size / r["least_s_per_message"] for r in both)  # NaN without stamps
            runs.append({"iterations": sum(r["iterations"] for r in both), "average": average, "peak": peak})
        self._verify(size, seed)
        return {**middle(runs, lambda run: run["average"]), "samples": [r["average"] for r in runs]}

    def _verify(self, size: int, seed: int) -> None:
        reader = self.job.rank == (0 if self.operation == "read" else 1)
        good = not (reader or self.args.bidirectional) or self.session.holds(size, seed)
        wrong = [r for r, ok in enumerate(self.job.control.gather("data", good)) if not ok]
        if wrong:
            from tilescale_net.errors import FabricError

            raise FabricError(f"{self.operation} of {size} bytes: wrong data arrived at rank {wrong[0]}")


def table_of(report: Report, args: argparse.Namespace, operation: str) -> Any:
    unit = "Gb/s" if args.report_gbits else "MiB/s"
    mark = " sum of both ways" if args.bidirectional else ""
    columns = [
        Column("iterations", "iterations", "d"),
        rate("peak", f"BW peak{mark}", unit, series="peak"),
        rate("average", f"BW average{mark}", unit, series="average"),
        rate("rate", f"MsgRate{mark}", "Mpps", series=operation),
    ]
    return report.table(operation, [Column("bytes", "bytes", "d")], columns)


def summary_of(report: Report, args: argparse.Namespace) -> Any:
    mark = ", both ways" if args.bidirectional else ""
    rates = [
        rate(f"{op}_{key}", f"{op}{mark}", unit, series=op, plotted=key == "gbps")
        for key, unit in (("mib", "MiB/s"), ("gbps", "Gbps"))
        for op in args.op
    ]
    keys = [SizeColumn("bytes", "Data Size", unit="B")]
    return report.table("summary", keys, [*rates, Column("link", "Peak", unit="Gbps")])


def main() -> None:
    parser, args = parse()
    job = FabricJob(parser, args, ranks=2)
    report = Report("fabric_bw", args)
    scale = GIGABIT if args.report_gbits else MIB
    rows = {size: {"bytes": size} for size in args.sizes}
    for operation in args.op:
        bench = Bandwidth(job, operation)
        if len(bench.sizes) < len(args.sizes):
            report.notes.append(f"{operation}: larger messages are left out; {bench.excess}.")
        if not bench.sizes:
            continue
        report.environment.update(job.header(bench.properties))
        table = table_of(report, args, operation)
        link = args.link_gbps or bench.properties["link_gbps"]
        for size in report.progress(bench.sizes, f"{operation}, sizes", format_bytes):
            got = bench.measure(size)
            row = {"bytes": size, "iterations": got["iterations"], "average": got["average"] / scale}
            row["rate"] = got["average"] / size / 1e6
            row["peak"] = got["peak"] / scale if got["peak"] == got["peak"] else None
            table.add(row, samples={"average": [s / scale for s in got["samples"]]})
            rows[size] |= {f"{operation}_mib": got["average"] / MIB, f"{operation}_gbps": got["average"] / GIGABIT}
            rows[size]["link"] = link * (2 if args.bidirectional else 1) or None
        del bench
    if len(args.op) > 1:
        for table in report.tables:
            table.plotted = False  # the summary has the averages of all
        summary = summary_of(report, args)
        for row in rows.values():
            if "link" in row:  # measured by any operation
                summary.add(row)
        summary.notes.append("MiB/s are 2^20 bytes a second, Gbps are 10^9 bits a second.")
    if args.bidirectional:
        report.notes.append("Both ranks sent at once: every figure, the link's included, is the sum of the two ways.")
    if cores := note_of_cores(2, "the two ranks") if not job.multi_host else None:
        report.notes.append(cores)
    report.finish()


if __name__ == "__main__":
    run(main)
