"""Writes through the proxy as users measure them: the report's columns, figures that agree, data that was looked at."""

import json

import pytest

from benchmark import proxy_write
from benchmark.common import BenchmarkParser, Report
from tests.benchmark.test_runs import launch
from tests.variants import variants

NAMES = ["ProxySingle", "ProxyMulti", "ProxySingleNBI", "ProxyMultiNBI"]


def run(*arguments, **env):
    return launch("proxy_write.py", *arguments, **{"VIRTUAL_NODES": "2", **env})


def test_four_configurations_next_to_the_bare_writer(tmp_path):
    path = tmp_path / "run.json"
    arguments = ["--sizes", "8,3000,1M", "--signal-sizes", "8", "--repeat", "2", "--rails", "3", "--iters", "5"]
    arguments += ["--ordering", "64"]
    done = run(*arguments, "--link-gbps", "10", "--chunk", "64K", "--json", str(path))
    assert done.returncode == 0, done.stderr
    content = json.loads(path.read_text())
    bandwidth, limit, signal, ordering = content["tables"]
    assert [row["bytes"] for row in bandwidth["rows"]] == [8, 3000, 1 << 20]
    for row, samples in zip(bandwidth["rows"], bandwidth["samples"]):
        assert row["count"] == row["bytes"] // 4
        for name in NAMES:
            assert len(samples[f"{name}_us"]) == 2
            assert row[name] == pytest.approx(row["bytes"] * 8 / row[f"{name}_us"] / 1e3)
            assert row[f"{name}_busbw"] == pytest.approx(100 * row[name] / (30 if "Multi" in name else 10))
    assert all(row[f"{name}_bare"] > 0 and row["BareMulti"] > 0 for row in limit["rows"] for name in NAMES)
    (row,) = signal["rows"]
    assert row["bytes"] == 8 and row["signal_p99"] >= row["signal"] > 0 and row["bare_p99"] >= row["bare"] > 0
    (row,), (rates,) = ordering["rows"], ordering["samples"]
    assert row["bytes"] == 64 and row["destinations"] == 1 and all(row[name] > 0 for name in proxy_write.ORDERINGS)
    assert row["of_drained"] == pytest.approx(sum(f / d for f, d in zip(rates["fenced"], rates["drained"])) / 2)
    assert content["environment"]["channels"] == "Single 1, Multi 3"
    assert content["environment"]["chunk"] == "64K"
    assert "- data: verified" in done.stdout and " 1M |" in done.stdout
    titles = [c.strip() for c in next(line for line in done.stdout.splitlines() if "ProxySingle (" in line).split("|")]
    assert [t.removesuffix(" (Gbps)") for t in titles[3:-1:3]] == NAMES


@pytest.mark.sample(0)
def test_both_ways_at_once():
    done = run(
        "--sizes", "64K", "--signal-sizes", "none", "--channels", "single", "-b", "--iters", "3", "--repeat", "1"
    )
    assert done.returncode == 0, done.stderr
    assert "- direction: both ways at once" in done.stdout and "- data: not verified" in done.stdout


# Runs the benchmark with a proxy or a bare writer that does nothing.
IDLE = """
import sys
from benchmark import proxy_write
from benchmark.common.fabric import ProxyBench
setattr(ProxyBench, sys.argv.pop(1), lambda *arguments: 1.0)
proxy_write.main()
"""


@variants(1, "method", ["write", "bare_write"])
def test_writes_that_do_not_arrive_are_noticed(tmp_path, method):
    script = tmp_path / "idle.py"
    script.write_text(IDLE)
    arguments = ["--sizes", "1000", "--signal-sizes", "none", "--channels", "single"]
    done = launch(str(script), method, *arguments, VIRTUAL_NODES="2")
    assert done.returncode != 0
    assert "wrong data" in done.stderr and "ProxySingle, 1000 bytes" in done.stderr and "was not written" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "arguments, env, code, said",
    [
        ([], {"GPUS": "1", "VIRTUAL_NODES": "1"}, 2, "writes need two ranks"),
        ([], {"VIRTUAL_NODES": "1"}, 2, "every PE is mapped"),
        (["--link-gbps", "0"], {}, 2, "0 is not a number above 0"),
        (["--sizes", "4", "--provider", "carrier-pigeon"], {}, 1, "carrier-pigeon"),
    ],
)
def test_unmeasurable_cases_are_reported(arguments, env, code, said):
    done = run(*arguments, **env)
    assert done.returncode == code, done.stderr
    assert said in done.stderr and done.stdout == ""


def filled(link: float | None):
    report = Report("proxy_write", BenchmarkParser("", sizes="8").parse_args([]))
    bandwidth, limit = proxy_write.tables(report, ["Single"])
    samples = {
        1000: {"ProxySingle": [4.0, 8.0, 2.0], "ProxySingleNBI": [2.0, 1.0, 9.0], "BareSingle": [1.0, 1.0, 1.5]},
        2000: {"ProxySingle": [8.0], "ProxySingleNBI": [4.0], "BareSingle": [4.0]},
    }
    proxy_write.fill(bandwidth, limit, samples, {"Single": 1}, link)
    return bandwidth, limit


def test_figures_of_the_tables():
    bandwidth, limit = filled(None)
    first, second = bandwidth.rows
    assert first["ProxySingle_us"] == 4.0 and first["ProxySingle"] == pytest.approx(2.0)
    assert first["ProxySingleNBI"] == pytest.approx(4.0)
    assert second["ProxySingleNBI_busbw"] == pytest.approx(50.0)  # of the bare writer's best, at 1000 bytes
    assert limit.rows[0]["BareSingle"] == pytest.approx(8.0)
    # Ratios are taken turn by turn, so a slow moment of the machine that both met does not count.
    assert limit.rows[0]["ProxySingle_bare"] == pytest.approx(0.25)
    assert limit.rows[0]["ProxySingleNBI_bare"] == pytest.approx(0.5)
    bandwidth, _ = filled(40.0)
    assert bandwidth.rows[0]["ProxySingleNBI_busbw"] == pytest.approx(10.0)
