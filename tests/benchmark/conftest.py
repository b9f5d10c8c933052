"""A parser, a report and a JSON file to compare with."""

import pytest

from benchmark.common import BenchmarkParser, Column, Report

KEYS = [Column("bytes", "Size", ",d", unit="Bytes")]
COLUMNS = [
    Column("push", "Push BW", better="higher", unit="GB/s"),
    Column("us", "Push", better="lower", unit="us"),
    Column("engine", "Engine"),
]


@pytest.fixture(autouse=True)
def rank_zero(monkeypatch):
    """No test depends on the variables of a launcher that the suite itself may run under."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def filled():
    """`filled(*arguments, scale=1)`: a report of two rows; bandwidths and times scale against each other.

    `before`: called with the report before the first row.
    """

    def make(*arguments, scale=1.0, before=lambda report: None) -> Report:
        report = Report("demo", BenchmarkParser("demo", sizes="2K..4K").parse_args(arguments))
        before(report)
        table = report.table("bandwidth", KEYS, COLUMNS)
        for size in (2048, 4096):
            figure = size / 1024 * scale
            row = {"bytes": size, "push": figure, "us": 10 / figure, "engine": "ldst"}
            table.add(row, {"push": [figure - 1, figure, figure + 1], "us": [10 / figure]})
        return report

    return make
