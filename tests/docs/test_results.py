"""The tables of docs/results follow from the reports: which side is ahead is not chosen by hand."""

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


def test_all_rows_with_a_faster_peer_are_listed(reports, monkeypatch):
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
    """References may be beaten, bounds never."""
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


def test_two_rows_of_a_size_are_refused(reports, monkeypatch):
    twice = {"tables": [{"rows": [{"bytes": 8, "us": 1.0}, {"bytes": 8, "us": 2.0}]}]}
    monkeypatch.setattr(reports, "run", lambda name: twice)
    with pytest.raises(KeyError, match="2 rows"):
        reports.row("all_gather", bytes=8)


def _column(key: str, title: str, unit: str = "us") -> dict[str, str]:
    return {"key": key, "title": title, "unit": unit, "better": "lower"}


def _report(keys: list[dict[str, str]], *tables: tuple[list[dict[str, str]], list[dict[str, object]]]) -> dict:
    environment = dict(GPUs="4 x NVIDIA H100 80GB HBM3", driver="580", CUDA="13.0", torch="2.11.0", tilelang="0.1.15")
    environment |= {"date": "2026-11-28", "ranks": "4", "tilescale_net": "0123abc", "vLLM": "not everywhere; no module"}
    found = [{"name": "", "keys": keys, "columns": columns, "rows": rows} for columns, rows in tables]
    return {"environment": environment, "command": ["all_reduce.py"], "tables": found}


def test_newer_reports_are_shown_with_every_peer_as_soon_as_they_are_there(reports, monkeypatch):
    """In the page and in the plot, whose panels name the hardware."""
    plots, size, ours = __import__("plots"), _column("bytes", "Size", "Bytes"), _column("us", "Time")
    flashinfer, nccl = _column("flashinfer_us", "FlashInfer one-shot"), _column("nccl_us", "NCCL")
    rows = [
        {"bytes": n, "us": n / 1e3, "nccl_us": 15.5, "flashinfer_us": 7.25, "p99": 99.125} for n in (16384, 1 << 20)
    ]
    peers = [ours, nccl, flashinfer, _column("p99", "p99")], rows
    algorithms = [row | {"algorithm": name} for row in rows for name in ("auto", "fp8")]
    forms = [
        {"rows": n, "form": form, "us": 6.125, "more_us": more, "flashinfer_us": 6.5}
        for n in (1, 128)
        for form, more in (("bf16", 0.0), ("fp8 by 128", 0.375))
    ]
    ways = [{"way": way, "sequence": 1024, "us": 19.25, "nccl_us": 24.0} for way in ("scatter", "gather")]
    found = {
        "all_reduce_four": _report([size], ([ours], rows[:1]), peers),
        "all_reduce_fp8": _report([size, _column("algorithm", "Algorithm", "")], (peers[0], algorithms), peers),
        "all_reduce_norm": _report(
            [_column("rows", "Rows", ""), _column("form", "Form", "")],
            ([ours, _column("more_us", "More than bf16"), flashinfer, nccl], forms),
        ),
        "ulysses": _report([_column("way", "Way", ""), _column("sequence", "Sequence", "")], ([ours, nccl], ways)),
    }
    monkeypatch.setattr(reports, "run", found.__getitem__)
    for module in (reports, plots):
        monkeypatch.setattr(module, "more_collectives", lambda: [*found])
    text = reports.more_sections()
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("#")] == [f"### {reports.heading(name)}" for name in found]
    assert all(reports.heading(name).endswith(", 4 x H100") for name in found)
    assert (
        "| 16 KiB | 16.4 | 15.5 | 7.25 |" in lines
        and "99.1" not in text
        and "vLLM: not everywhere; no module." in lines
    )
    assert "| 1 | 6.13 | 6.50 |" in lines or "| 1 | 6.12 | 6.50 |" in lines or "| 1 | 6.12 | 6.5 |" in lines
    assert "| 128 | +0.38 |" in lines or "| 128 | +0.37 |" in lines
    panels = plots.collectives_more()
    assert [sorted(panel.points) for panel in panels] == [
        ["FlashInfer one-shot", "NCCL", "tilescale_net"],
        ["FlashInfer one-shot", "NCCL", "tilescale_net, auto", "tilescale_net, fp8"],
        ["FlashInfer one-shot", "tilescale_net"],
        ["NCCL", "tilescale_net"],
        ["NCCL", "tilescale_net"],
    ]
    assert all(panel.title.endswith(", 4 x H100") for panel in panels) and ": gather, 4 x H100" in panels[-1].title
