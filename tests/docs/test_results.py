"""The tables of docs/results hold what the reports hold: which side is ahead is not chosen by hand."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "results"


@pytest.fixture
def reports(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield __import__("reports")
    sys.modules.pop("reports", None)


def test_rows_where_others_are_ahead_are_all_told(reports, monkeypatch):
    report = "put_signal"
    found = [
        reports.Row(report, "slower", "8 B", 2.0, 1.0, "NCCL", "us"),
        reports.Row(report, "slower", "8 KiB", 1.0, 1.0, "NCCL", "us"),
        reports.Row(report, "as fast", "8 B", 1.004, 1.0, "NCCL", "us"),
        reports.Row(report, "lower rate", "8 B", 1.0, 1.25, "NVSHMEM", "GB/s"),
        reports.Row(report, "higher rate", "8 B", 2.0, 1.0, "NVSHMEM", "GB/s"),
    ]
    monkeypatch.setattr(reports, "SUBJECTS", {"all": lambda: found})
    lines = reports.others_ahead().splitlines()[2:]
    assert [[cell.strip() for cell in line.split("|")[1:4]] for line in lines] == [
        ["slower", "8 B", "0.50 x"],
        ["lower rate", "8 B", "0.80 x"],
    ]


def test_every_comparison_of_every_size_is_looked_at(reports):
    rows = [r for make in reports.SUBJECTS.values() for r in make()]
    sizes = {name: len([r for r in rows if r.report == name]) for name in reports.COLLECTIVES}
    assert sizes == {name: len(reports.run(name)["tables"][0]["rows"]) for name in reports.COLLECTIVES}
    # Bounds of products are cuBLAS and those of one block the best of what else was tried, which ours may pass by little.
    assert all(r.ours >= 0.9 * r.bound for r in rows if r.bound and r.unit == "us")
    assert all(r.ours <= 1.01 * r.bound for r in rows if r.bound and r.unit != "us")


def test_two_rows_of_a_size_are_refused(reports, monkeypatch):
    twice = {"tables": [{"rows": [{"bytes": 8, "us": 1.0}, {"bytes": 8, "us": 2.0}]}]}
    monkeypatch.setattr(reports, "run", lambda name: twice)
    with pytest.raises(KeyError, match="2 rows"):
        reports.row("all_gather", bytes=8)
