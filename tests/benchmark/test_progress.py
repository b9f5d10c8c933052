import io

from benchmark.common.report import progress


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
