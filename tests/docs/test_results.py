"""The tables of docs/results hold what the reports hold: which side is ahead is not chosen by hand."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "results"


@pytest.fixture
def reports(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield __import__("reports")
    for name in ("reports", "plots", "render"):
        sys.modules.pop(name, None)


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


def test_nothing_beats_a_bound(reports):
    """What may be beaten is a reference."""
    rows = [r for make in reports.SUBJECTS.values() for r in make() if r.bound]
    assert len(rows) > 50 and all(r.unit == "us" and min(r.ours, r.peer) >= r.bound for r in rows)


def test_every_peer_of_a_table_is_in_its_plot(reports):
    """Also the hardware, in the title of each panel."""
    plots = __import__("plots")
    for subject, make in reports.SUBJECTS.items():
        panels = [panel for name in plots.PLOTS if name.startswith(subject) for panel in plots.PLOTS[name][1]()]
        names = " ".join(name for panel in panels for name in panel.points)
        for row in make():
            if row.report == "matmul":  # GEMMs alone stand in a table of their own
                continue
            words = {"a CPU thread with libfabric alone": "bare writer", "NCCL, rows only": "NCCL, the same rows only"}
            assert words.get(row.peer_name, row.peer_name.split(" with ")[0]) in names, (subject, row.peer_name)
        assert all(panel.title.endswith(("x H100", "x H200")) for panel in panels)


def test_reports_of_changed_checkouts_are_rejected(reports, monkeypatch, capsys):
    render = __import__("render")
    dirty = reports.run("put_signal")
    monkeypatch.setitem(dirty["environment"], "tilescale_net", "0123abc-dirty")
    monkeypatch.setattr(sys, "argv", ["render.py"])
    assert render.main() == 2  # before it writes anything
    assert capsys.readouterr().out.startswith(
        "rejected: put_signal.json was made from a checkout with uncommitted changes"
    )
    monkeypatch.setattr(sys, "argv", ["render.py", "--check"])
    assert render.main() == 1
    monkeypatch.setitem(reports.run("moe_calls")["environment"], "tilescale_net", "0123abc")
    assert any("take it out of MADE_WITH_CHANGES" in reason for reason in reports.rejected())


def test_two_rows_of_a_size_are_refused(reports, monkeypatch):
    twice = {"tables": [{"rows": [{"bytes": 8, "us": 1.0}, {"bytes": 8, "us": 2.0}]}]}
    monkeypatch.setattr(reports, "run", lambda name: twice)
    with pytest.raises(KeyError, match="2 rows"):
        reports.row("all_gather", bytes=8)
