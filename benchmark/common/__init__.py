"""Shared parts of benchmarks: arguments, tables, JSON, plots, comparison with an earlier run, timing.

A benchmark has this shape:

    parser = BenchmarkParser("What it measures", repeat=20, warmup=5, sizes="2K..4M")
    parser.add_argument("--threads", type=positive_int, default=128)
    args = parser.parse_args()                      # wrong arguments: one message from rank 0, exit code 2

    report = Report("my_benchmark", args)           # prints nothing yet; silent on all ranks but 0
    table = report.table(
        "bandwidth",
        keys=[Column("bytes", "Size", ",d", unit="Bytes")],
        columns=[Column("push", "Push", better="higher", unit="GB/s")],
    )
    for size in report.progress(args.sizes, "sizes"):
        samples = ...                               # one figure per repetition
        table.add({"bytes": size, "push": median(samples)}, samples={"push": samples})  # printed, and kept in --json
    report.finish()                                 # notes, --json, --plot

Exit codes: 0 fine, 1 wrong data or another failure, 2 wrong arguments, 3 nothing was measured (`report.nothing`), 130
interrupted; earlier rows are printed and in the JSON file, whose `complete` is false then.
"""

from benchmark.common.arguments import (
    BenchmarkParser,
    byte_count,
    int_list,
    non_negative_int,
    one_of,
    positive_float,
    positive_int,
    size_list,
)
from benchmark.common.measuring import median, medians, percentile
from benchmark.common.plot import format_bytes
from benchmark.common.report import Column, Report, Table, is_rank_zero, rank, rate, us, world_size

__all__ = [
    "BenchmarkParser", "Column", "Report", "Table", "byte_count", "format_bytes", "int_list", "is_rank_zero", "median",
    "medians", "non_negative_int", "one_of", "percentile", "positive_float", "positive_int", "rank", "rate", "size_list",
    "us", "world_size",
]  # fmt: skip
