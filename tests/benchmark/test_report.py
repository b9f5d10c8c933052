"""Output and files of a run, and its comparison with an earlier run."""

import io
import json
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark.common import BenchmarkParser, Column, Report, Table
from benchmark.common.plot import Panel, draw
from benchmark.common.report import ROOT, Layout, hardware, panels_of, progress, ratio, read_json


def test_prints_header_and_table(filled, capsys):
    report = filled("--repeat", "3", before=lambda report: report.environment.update(provider="tcp"))
    report.environment["late"] = "known at the end"
    report.notes.append("A note.")
    report.finish()
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("# demo\n")
    assert out.index("- late: known at the end") > out.index("4,096")
    for line in ("- date: ", "- cores: ", "- GPUs: ", "- torch: ", "- provider: tcp", "A note."):
        assert line in out
    assert "--repeat 3" in out
    assert "|        2,048 |" in out and out.count("Size (Bytes)") == 1
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
    content = read_json(path)
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
    assert [c.strip() for c in lines[2].strip("|").split("|")] == ["2,048", "4.000", "2.000", "2.500", "2.000", "ldst"]
    assert "baseline: date" in out
    # The ratios are shown, not recorded.
    assert all("/baseline" not in key for row in report.content()["tables"][0]["rows"] for key in row)


def test_baseline_of_other_rows_or_tables(filled, tmp_path, capsys):
    path = str(tmp_path / "run.json")
    filled("--json", path).finish()
    other = filled("--baseline", path)
    other.tables[0].rows[:] = [{"bytes": 1, "push": 1.0}]
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
        read_json(str(path))


def test_ratio():
    higher, lower = Column("a", "A", better="higher"), Column("a", "A", better="lower")
    assert ratio(higher, 3.0, 2.0) == 1.5
    assert ratio(lower, 2.0, 3.0) == 1.5
    assert ratio(higher, 3.0, None) is None
    assert ratio(higher, 3.0, 0.0) is None
    assert ratio(lower, 0.0, 3.0) is None


def test_failed_write_keeps_the_earlier_file(filled, tmp_path, monkeypatch, capsys):
    path = tmp_path / "run.json"
    report = filled("--json", str(path))
    path.write_text("earlier")

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
    report = filled("--plot", str(path))
    report.finish()
    text = path.read_text()
    title = (
        "demo, commit" if "tilescale_net" in report.content()["environment"] else "demo, 2"
    )  # a copy of a checkout has none
    for words in ("Bandwidth (GB/s)", "Time (us)", "2K", title, "simulator, 1 ranks"):
        assert words in text
    assert "2.00" in text  # two sizes are bars, with their figures


def test_plot_errors(filled, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for name in ("run.nonsense", "run"):
        with pytest.raises(SystemExit) as ended:
            filled("--plot", str(tmp_path / name))
        assert ended.value.code == 2 and "does not end with .png, .svg or .pdf" in capsys.readouterr().err
    empty = filled("--plot", str(tmp_path / "run.png"))
    empty.tables[0].rows = []
    with pytest.raises(SystemExit) as ended:
        empty.finish()
    assert "nothing was measured" in str(ended.value.code)


def test_tables_are_distinguished(filled, capsys):
    report = filled()
    with pytest.raises(ValueError, match="already has a table"):
        report.table("bandwidth", [], [])
    second = report.table("latency", [Column("n", "N", "d")], [Column("us", "Time", better="lower", unit="us")])
    second.add({"n": 1, "us": 2.0})
    report.finish()
    out = capsys.readouterr().out
    assert "## latency" in out and out.count("| ") > 4


def test_rows_are_printed_and_kept_as_they_come(filled, tmp_path, capsys):
    path = tmp_path / "run.json"
    report = filled("--json", str(path))
    out = capsys.readouterr().out
    assert "# demo" in out and "|        2,048 |" in out and "|        4,096 |" in out
    content = json.loads(path.read_text())
    assert content["complete"] is False and len(content["tables"][0]["rows"]) == 2 and "date" in content["environment"]
    report.finish()
    assert json.loads(path.read_text())["complete"] is True
    assert "4,096" not in capsys.readouterr().out


def test_columns_that_come_later_get_a_heading(capsys):
    report = Report("demo", BenchmarkParser("demo").parse_args([]))
    table = report.table("t", [Column("n", "N", "d")], [Column("a", "A"), Column("b", "B")])
    table.add({"n": 1, "a": 1.0})
    table.add({"n": 2, "a": 2.0, "b": 3.0})
    table.add({"n": 3, "a": 4.0})
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["N", "A"] and cells[3] == ["N", "A", "B"]
    assert cells[5:] == [["2", "2.000", "3.000"], ["3", "4.000", "-"]]


def test_nothing_measured(tmp_path, capsys):
    path = tmp_path / "run.json"
    report = Report("demo", BenchmarkParser("demo").parse_args(["--json", str(path)]))
    with pytest.raises(SystemExit) as ended:
        report.nothing("it needs a GPU")
    assert ended.value.code == 3
    assert capsys.readouterr().out == "demo: not measured; it needs a GPU\n"
    assert read_json(str(path))["tables"] == []


@pytest.mark.parametrize(
    "end, said, code", [("KeyboardInterrupt", "interrupted", -2), ("WrongData('byte 3')", "byte 3", 1)]
)
def test_an_ended_run_says_why_in_one_line(tmp_path, end, said, code):
    program = f"""
from benchmark.common import BenchmarkParser, Column, Report
from benchmark.common.measuring import WrongData
report = Report("demo", BenchmarkParser("demo").parse_args(["--json", "run.json"]))
report.table("t", [Column("n", "N")], [Column("a", "A")]).add({{"n": 1, "a": 2.0}})
raise {end}
"""
    env = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr.count("\n") == 1 and said in done.stderr and "2.000" in done.stdout
    content = read_json(str(tmp_path / "run.json"))
    assert content["tables"][0]["rows"] == [{"n": 1, "a": 2.0}] and content["complete"] is False


def measured(sizes=1) -> Table:
    keys = [Column("bytes", "Size"), Column("engine", "Engine")]
    columns = [
        Column("us", "kernel", better="lower", unit="us"),
        Column("gbs", "rate", better="higher", unit="GB/s"),
        Column("p99", "p99", better="lower", unit="us", plotted=False),
        Column("ratio", "x NCCL"),
    ]
    rows = [
        {"bytes": 64 << i, "engine": e, "us": 1.0, "gbs": 2.0, "p99": 3.0, "ratio": 4.0}
        for i in range(sizes)
        for e in ("ldst", "bulk")
    ]
    return Table("t", keys, columns, rows=rows)


def test_one_panel_holds_one_quantity():
    where = hardware({"ranks": "2", "GPUs": "2 x NVIDIA H100 80GB HBM3"})
    time, rate = panels_of(measured(8), where)
    assert time.title == "t, 2 x H100, 2 ranks" and (time.quantity, rate.quantity) == ("Time (us)", "Bandwidth (GB/s)")
    assert set(rate.points) == {"rate, ldst", "rate, bulk"} and rate.keys == [64 << i for i in range(8)]
    (words, _) = panels_of(measured(1), where)
    assert words.points == {"kernel": {"ldst": 1.0, "bulk": 1.0}}


def test_many_choices_are_words_beside_bars_that_leave_room_for_them():
    table = measured(8)
    for i, row in enumerate(table.rows):
        row["tokens"] = row["bytes"]
        row["engine"] = f"engine {i} with a name of several lines"
    table.keys = [Column("tokens", "Tokens"), table.keys[1]]
    time, _ = panels_of(table, "2 x H100")
    assert list(time.points) == ["kernel"] and len(time.keys) == 16 and not time.as_lines
    assert time.height > 16 * 3 * 0.12  # three lines of 9 points each


def test_few_sizes_are_bars_and_panels_are_as_wide_as_a_phone(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    few, many = (panels_of(measured(n), "2 x H100")[0] for n in (5, 6))
    assert many.as_lines and not few.as_lines
    draw([few, many, Panel("one", "Time (us)", "", {"a": {"x": 1.0}})], str(tmp_path / "x.png"), "all of them")
    height, width = image.imread(tmp_path / "x.png").shape[:2]
    assert width == 780 and height > 900


def table() -> Table:
    made = Table(
        "t", [Column("bytes", "Size", ",d", unit="Bytes")], [Column("bw", "BW", unit="GB/s"), Column("how", "How")]
    )
    made.add({"bytes": 2048, "bw": 3.14159, "how": "ldst"})
    made.add({"bytes": 4194304, "bw": None, "how": "bulk copy"})
    return made


def lines_of(t: Table) -> list[str]:
    layout = Layout([*t.keys, *t.columns], t.rows)
    return [*layout.head(), *map(layout.row, t.rows)]


def test_lines():
    assert lines_of(table()) == [
        "| Size (Bytes) | BW (GB/s) | How       |",
        "|-------------:|----------:|:----------|",
        "|        2,048 |     3.142 | ldst      |",
        "|    4,194,304 |         - | bulk copy |",
    ]


def test_rows_need_their_keys():
    with pytest.raises(ValueError, match="'bytes'"):
        table().add({"bw": 1.0})


def test_direction_is_checked():
    with pytest.raises(ValueError, match="better"):
        Column("a", "A", better="more")


@settings(deadline=None)  # a machine may have other work
@given(st.lists(st.tuples(st.integers(0, 2**40), st.floats(0, 1e9)), min_size=1, max_size=8))
def test_lines_are_as_wide_as_each_other_and_hold_every_value(rows):
    made = Table("t", [Column("n", "N", ",d")], [Column("x", "X", ".3f")])
    for n, x in rows:
        made.add({"n": n, "x": x})
    lines = lines_of(made)
    assert len(lines) == len(rows) + 2
    assert len({len(line) for line in lines}) == 1
    for (n, x), line in zip(rows, lines[2:]):
        assert re.findall(r"[\d,.]+", line) == [f"{n:,d}", f"{x:.3f}"]


@pytest.mark.parametrize(
    "value, shown",
    [
        (0.0, "0"),
        (0.00123456, "0.001235"),
        (1.0, "1.000"),
        (12.3456, "12.35"),
        (123456.7, "123,457"),
        (-3.14159, "-3.142"),
    ],
)
def test_significant_digits(value, shown):
    assert Column("a", "A").show(value) == shown


def test_whole_numbers_and_formats_are_shown_as_they_are():
    assert Column("a", "A").show(12345) == "12345"
    assert Column("a", "A", ".1%").show(0.5) == "50.0%"
    assert Column("a", "A", unit="us").heading == "A (us)"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_short_runs_say_nothing_in_a_file():
    stream = io.StringIO()
    assert list(progress(range(100), "rows", stream=stream)) == list(range(100))
    assert stream.getvalue() == ""


def test_long_runs_say_a_line_now_and_then(monkeypatch):
    clock = iter(float(t) for t in range(1000))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    list(progress(range(20), "rows", stream=stream))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4 and lines[0].startswith("rows: 4/20, now 4, ")


def test_terminal_line_is_removed_at_the_end():
    stream = Terminal()
    list(progress(["a"], "rows", stream=stream))
    assert "rows: 0/1, now a" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_other_ranks_say_nothing(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    stream = Terminal()
    list(progress(["a"], "rows", stream=stream))
    assert stream.getvalue() == ""
