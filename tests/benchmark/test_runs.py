"""Benchmarks as users start them, in the simulator: right data, the columns promised, JSON, exit codes."""

import json
import os

import pytest

from tests import jobs
from tests.launch.conftest import ROOT, clean_environment
from tests.launch.conftest import launch as launch_sh
from tests.variants import variants

ONCE = ("--warmup", "0", "--repeat", "1")
# As tests/conftest.py chooses; a clean environment lacks it.
FLAGS = {name: os.environ[name] for name in ("TSN_SIM_CXXFLAGS",) if name in os.environ}


def launch(name, *arguments, **env):
    path = os.path.join(ROOT, "benchmark", name)
    return jobs.launch(path, *arguments, env=clean_environment(**{"GPUS": "2", **FLAGS, **env}))


def rows_of(path):
    (table,) = json.loads(path.read_text())["tables"]
    return table["rows"]


def run(tmp_path, name, *arguments, **env):
    """The rows of a run that succeeds, and its output."""
    path = tmp_path / "run.json"
    done = launch(name, *arguments, "--json", str(path), **env)
    assert done.returncode == 0, done.stderr
    return rows_of(path), done.stdout


def test_unrolledcp_p2p(tmp_path):
    path = tmp_path / "run.json"
    script = os.path.join(ROOT, "benchmark", "unrolledcp_p2p.py")  # the README's first command, from nothing
    first = launch_sh(script, "--json", str(path), timeout=200, GPUS="2")
    assert first.returncode == 0, first.stderr
    rows = rows_of(path)
    assert [row["bytes"] for row in rows] == [2048 << i for i in range(8)]
    for row in rows:
        for direction in ("push", "pull"):
            time, rate = row[f"tilescale_net_{direction}_us"], row[f"tilescale_net_{direction}_gbps"]
            assert rate == pytest.approx(row["bytes"] / time / 1e3)
    assert "- data: verified" in first.stdout
    assert "simulated: times mean nothing but order" in first.stdout
    assert "NVSHMEM baseline: not measured; it needs" in first.stdout
    assert "Push BW (GB/s)" in first.stdout and "Pull BW (GB/s)" in first.stdout


@pytest.mark.sample(0)
def test_geometries_and_baseline(tmp_path):
    arguments = ["--sizes", "1,3000", "--threads", "32,64", "--bidirectional", "--repeat", "1", "--no-nvshmem"]
    arguments += ["--offset", "0,48"]
    rows, _ = run(tmp_path, "unrolledcp_p2p.py", *arguments)
    assert [(r["threads"], r["bytes"]) for r in rows] == [(32, 1), (32, 3000), (64, 1), (64, 3000)]
    second = launch("unrolledcp_p2p.py", *arguments, "--baseline", str(tmp_path / "run.json"))
    assert second.returncode == 0, second.stderr
    assert second.stdout.count("x base") == 5  # four columns and the note
    assert "- offset: destination 0, source 48 bytes beyond" in second.stdout
    assert "NVSHMEM" not in second.stdout.replace("--no-nvshmem", "")


@pytest.mark.sample(0)
def test_nodes_that_only_talk_through_the_fabric():
    done = launch("unrolledcp_p2p.py", "--sizes", "1,20K", "--repeat", "1", VIRTUAL_NODES="2")
    assert done.returncode == 0, done.stderr
    assert "- path: proxy and fabric" in done.stdout and "- data: verified" in done.stdout


def test_start_up(tmp_path):
    (row,), _ = run(tmp_path, "start_up.py", "--repeat", "1", VIRTUAL_NODES="2")
    assert (row["ranks"], row["nodes"], row["context"]) == (2, 2, 1280)
    assert min(row[key] for key in ("files", "queue", "window", "endpoints")) > 0


@variants(0, "name", ["all_gather_matmul.py", "matmul_reduce_scatter.py", "matmul_all_reduce.py"])
def test_fused_gemms(tmp_path, name):
    (row,), said = run(tmp_path, name, "--m", "72", "--k", "40", "--n", "48", "--blocks", "2", *ONCE)
    assert row["m"] == 72 and row["ours"] > 0 and row["over"] == pytest.approx(row["ours"] / row["matmul"])
    assert "normal random data, verified" in said


def test_gemm_ways(tmp_path):
    """The ways of one call, and the table that is written from them."""
    table = tmp_path / "table.json"
    shape = ["--kinds", "matmul_reduce_scatter", "--m", "64", *ONCE, "--limit", "1000"]
    (row,), _ = run(tmp_path, "gemm_ways.py", *shape, "--table", str(table))
    assert row["fused"] > 0 < row["unfused"] and row["takes"] in ("fused", "unfused")
    group = json.loads(table.read_text())["groups"][-1]
    assert (group["operator"], group["gpu"], group["ranks"]) == ("matmul_reduce_scatter", "simulator", 2)
    assert group["points"] == [[64, round(row["fused"], 1), None, round(row["unfused"], 1), None, None]]


@pytest.mark.nightly
def test_all_reduce_norm(tmp_path):
    rows, said = run(tmp_path, "all_reduce_norm.py", "--rows", "3", *ONCE)
    assert {row["form"] for row in rows} >= {"bf16", "fp8 by token", "fp8 by 128, tma", "MoE, fp8 by 128"}
    base = next(row["us"] for row in rows if row["form"] == "bf16")
    assert all(row["more_us"] == pytest.approx(row["us"] - base) for row in rows)
    assert "- data: verified" in said


@pytest.mark.nightly
def test_gemm_alone(tmp_path):
    (row,), _ = run(tmp_path, "matmul.py", "--m", "72", *ONCE, GPUS="1")
    assert row["m"] == 72 and row["over"] == pytest.approx(row["ours"] / row["matmul"])


@pytest.mark.nightly
def test_fp8_gemm(tmp_path):
    rows, _ = run(tmp_path, "fp8_gemm.py", "--turns", "0", "--steps", "1", *ONCE, GPUS="1")
    assert [(row["form"], row["part"]) for row in rows] == [
        (form, part) for form in ("block", "row") for part in ("plain", "grouped")
    ]
    assert all(row["ours"] > 0 and row["cublas"] is None for row in rows)


@pytest.mark.nightly
def test_moe_layer(tmp_path):
    rows, said = run(tmp_path, "moe_layer.py", *ONCE)
    parts = ["dispatch, product", *("product, combine",) * 3, *("layer",) * 3]
    assert [row["part"] for row in rows] == parts and [row["late"] for row in rows] == [0, 0, 50, 75, 0, 50, 75]
    for row in rows:
        assert row["over"] == pytest.approx(row["ours"] / row["sequence"]) and row["matmul"] > 0 < row["communication"]
    assert "normal random data, verified" in said
    refused = launch("moe_layer.py", "--experts", "3")
    assert refused.returncode == 2 and "--experts is 3; it must be a multiple of the 2 ranks" in refused.stderr


@pytest.mark.nightly
def test_moe_experts(tmp_path):
    rows, _ = run(tmp_path, "moe_experts.py", "--training", *ONCE)
    assert [row["dtype"] for row in rows] == ["fp8", "bf16"]
    assert all(row["ours_backward"] > 0 < row["fused_backward"] for row in rows) and rows[1]["torch_layer_backward"] > 0
    assert all(row["over"] == pytest.approx(row["fused"] / row["ours"]) for row in rows)


@pytest.mark.nightly
def test_moe_decode(tmp_path):
    rows, _ = run(tmp_path, "moe_decode.py", *ONCE)
    assert all(row["ours_rate"] == pytest.approx(6e6 / row["ours"]) for row in rows)  # tokens of two ranks


@pytest.mark.nightly
def test_moe_host(tmp_path):
    rows, _ = run(tmp_path, "moe_host.py", "--calls", "2", *ONCE, GPUS="1")
    assert len(rows) == 6 and all(row["both_us"] > 0 for row in rows)


@pytest.mark.nightly
def test_first_calls(tmp_path):
    sizes = "--tokens 8 --few 8 --local-experts 8 --rows 8 --hidden 128".split()
    rows, _ = run(tmp_path, "first_calls.py", *sizes)
    assert len(rows) == 8 and all(row["empty"] > 0 < row["cached"] for row in rows)


@pytest.mark.sample(0)
def test_large_copy(tmp_path):
    arguments = "--sizes 300001 --blocks 2,3 --threads 64 --partition interleaved --chunk 8K".split()
    rows, _ = run(tmp_path, "large_copy.py", *arguments, "--repeat", "1")
    assert [r["blocks"] for r in rows] == [2, 3]


def test_put_signal(tmp_path):
    arguments = ["--sizes", "8,1K", "--threads", "32", "--repeat", "2", "--engine", "auto,ldst"]
    rows, _ = run(tmp_path, "put_signal.py", *arguments)
    assert [r["bytes"] for r in rows] == [8, 1024]
    assert all(r["auto_p99"] >= r["auto"] > 0 and r["ldst"] > 0 for r in rows)
    assert rows[0]["line"] > 0 and rows[1].get("line") is None


def test_benchmarks_without_their_gpu_end_with_one_line(tmp_path):
    done = launch("launch_cost.py", "--json", str(tmp_path / "run.json"))
    assert done.returncode == 3, done.stderr
    assert done.stdout.count("\n") == 1 and "not measured; it needs" in done.stdout and "failed" not in done.stderr
    assert json.loads((tmp_path / "run.json").read_text())["tables"] == []


@pytest.mark.parametrize(
    "arguments, env, said",
    [
        (["--threads", "0"], {}, "0 is not within 1 and 1024"),
        (["--sizes", "4K..2K"], {}, "ends before it starts"),
        (["--engine", "magic"], {}, "'magic' is not one of auto, ldst, bulk"),
        (["--timing", "sundial"], {}, "invalid choice: 'sundial'"),
        ([], {"GPUS": "1"}, "copies need two ranks"),
    ],
)
def test_wrong_arguments_are_reported_once(arguments, env, said):
    done = launch("unrolledcp_p2p.py", *arguments, **env)
    assert done.returncode == 2
    assert done.stderr.count(said) == 1
    assert done.stdout == ""


SMALL = ["--tokens", "8", "--hidden", "128", "--experts", "4", "--topk", "2", "--dtype", "bf16", "--repeat", "1"]
SMALL += ["--warmup", "1"]


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_rows(tmp_path, nodes):
    found, output = run(tmp_path, "moe_all_to_all.py", *SMALL, "--mode", "latency", VIRTUAL_NODES=nodes)
    rows = {(row["system"], row["operation"]): row for row in found}
    assert set(rows) == {("tilescale_net", name) for name in ("dispatch", "combine", "dispatch + combine")}
    for row in rows.values():
        assert row["kernel"] > 0
        assert all((key in row) == (nodes == "2") for key in ("fabric", "bare", "of_bare"))
        if nodes == "2":
            assert row["of_bare"] == pytest.approx(100 * row["bare"] / row["kernel"]) and row["bare"] > 0
    assert "verified, every byte" in output


def test_calls(tmp_path):
    (fast, slow), output = run(tmp_path, "moe_calls.py", *SMALL, "--layout", "expert", "--blocks", "2")
    calls = [(row["mode"], row["layout"], row["blocks"]) for row in (fast, slow)]
    assert calls == [("throughput", "expert", 2), ("latency", "expert", 0)]
    assert fast["agreeing"] == fast["dispatch"] - fast["cached"] and slow["combine"] > 0 and "cached" not in slow
    assert "verified, every byte" in output
