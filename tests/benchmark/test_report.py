"""What a run prints and writes, and its comparison with an earlier run."""

import json

import pytest

from benchmark.common import Column, Report
from benchmark.common.baseline import load, ratio


def test_prints_header_and_table(filled, capsys):
    report = filled("--repeat", "3")
    report.environment["provider"] = "tcp"
    report.notes.append("A note.")
    report.finish()
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("# demo\n")
    for line in ("- date: ", "- cores: ", "- GPUs: ", "- torch: ", "- provider: tcp", "A note."):
        assert line in out
    assert "--repeat 3" in out
    assert "|        2,048 |" in out
    assert "x base" not in out


def test_header_names_no_host(filled):
    import os
    import socket

    report = filled()
    report.finish()
    text = json.dumps(report.content())
    assert socket.gethostname() not in text
    assert os.path.expanduser("~") not in text


def test_other_ranks_are_silent(filled, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "1")
    filled("--json", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.png")).finish()
    assert capsys.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


def test_json_round_trip(filled, tmp_path, capsys):
    path = str(tmp_path / "run.json")
    report = filled("--json", path, "--repeat", "3")
    report.environment["provider"] = "tcp"
    report.finish()
    content = load(path)
    assert content["benchmark"] == "demo"
    assert content["settings"] == {"warmup": 5, "repeat": 3, "sizes": [2048, 4096]}
    assert content["environment"]["provider"] == "tcp"
    assert "date" in content["environment"]
    (table,) = content["tables"]
    assert table["rows"] == report.tables[0].rows
    assert table["samples"][0] == {"push": [1.0, 2.0, 3.0], "us": [5.0]}
    assert [c["key"] for c in table["keys"]] == ["bytes"]
    assert list(tmp_path.iterdir()) == [tmp_path / "run.json"]


def test_baseline_ratios(filled, tmp_path, capsys):
    path = str(tmp_path / "run.json")
    filled("--json", path).finish()
    capsys.readouterr()
    report = filled("--baseline", path, scale=2.0)
    report.finish()
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert [c.strip() for c in lines[0].strip("|").split("|")] == [
        "Size (Bytes)", "Push BW (GB/s)", "x base", "Push (us)", "x base", "Engine",
    ]  # fmt: skip
    # Twice the bandwidth and half the time are both twice as good.
    assert [c.strip() for c in lines[2].strip("|").split("|")] == ["2,048", "4.00", "2.000", "2.50", "2.000", "ldst"]
    assert "baseline: date" in out
    # The ratios are shown, not recorded.
    assert all("/baseline" not in key for row in report.content()["tables"][0]["rows"] for key in row)


def test_baseline_of_other_rows_or_tables(filled, tmp_path, capsys):
    path = str(tmp_path / "run.json")
    filled("--json", path).finish()
    other = filled("--baseline", path)
    other.tables[0].rows = [{"bytes": 1, "push": 1.0}]
    other.finish()
    assert "holds none of these rows" in capsys.readouterr().out
    renamed = filled("--baseline", path)
    renamed.tables[0].name = "latency"
    renamed.finish()
    assert "holds no table of this name" in capsys.readouterr().out


def test_baseline_of_another_benchmark_is_refused(filled, tmp_path, capsys):
    path = str(tmp_path / "run.json")
    filled("--json", path).finish()
    args = filled("--baseline", path).args
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        Report("another", args)
    assert ended.value.code == 2
    assert "the baseline is of benchmark demo" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, said", [("{", "not JSON"), ("[]", "not written by --json"), ('{"schema": 99}', "not written by --json")]
)
def test_bad_baseline(text, said, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        load(str(path))


def test_ratio():
    higher, lower = Column("a", "A", better="higher"), Column("a", "A", better="lower")
    assert ratio(higher, 3.0, 2.0) == 1.5
    assert ratio(lower, 2.0, 3.0) == 1.5
    assert ratio(higher, 3.0, None) is None
    assert ratio(higher, 3.0, 0.0) is None
    assert ratio(lower, 0.0, 3.0) is None


def test_failed_write_keeps_the_earlier_file(filled, tmp_path, monkeypatch, capsys):
    path = tmp_path / "run.json"
    path.write_text("earlier")
    report = filled("--json", str(path))

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("json.dump", fail)
    with pytest.raises(SystemExit) as ended:
        report.finish()
    assert "No space left on device" in str(ended.value.code)
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_plot(filled, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.svg"
    filled("--plot", str(path)).finish()
    text = path.read_text()
    for words in ("Push BW", "GB/s", "us", "2K", "demo"):
        assert f"<!-- {words}" in text  # matplotlib keeps each text as a comment before its glyphs


def test_plot_errors(filled, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as ended:
        filled("--plot", str(tmp_path / "run.nonsense")).finish()
    assert "--plot" in str(ended.value.code)
    empty = filled("--plot", str(tmp_path / "run.png"))
    empty.tables[0].rows = []
    with pytest.raises(SystemExit) as ended:
        empty.finish()
    assert "nothing was measured" in str(ended.value.code)


def test_tables_are_told_apart(filled, capsys):
    report = filled()
    with pytest.raises(ValueError, match="already has a table"):
        report.table("bandwidth", [], [])
    second = report.table("latency", [Column("n", "N", "d")], [Column("us", "us", ".1f", better="lower")])
    second.add({"n": 1, "us": 2.0})
    report.finish()
    out = capsys.readouterr().out
    assert "## bandwidth" in out and "## latency" in out
