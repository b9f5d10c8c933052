"""The fabric's benchmarks as users start them: columns, JSON, exit codes."""

import json
import os
import subprocess
import sys

import pytest

from tests import jobs, ranks
from tests.launch.conftest import ROOT, clean_environment
from tests.variants import variants


def launch(name, *arguments, gpus="2", **env):
    path = os.path.join(ROOT, "benchmark", name)
    nodes = "2" if gpus == "2" else "1"
    return jobs.launch(path, *arguments, env=clean_environment(**{"GPUS": gpus, "VIRTUAL_NODES": nodes, **env}))


def alone(name, *arguments, **env):
    """Rank 0 of a job whose other ranks never start: enough for errors that come before ranks meet."""
    env = clean_environment(**{"RANK": "0", "WORLD_SIZE": "2", "PYTHONPATH": os.pathsep.join([ROOT, *sys.path]), **env})
    script = os.path.join(ROOT, "benchmark", name)
    return subprocess.run([sys.executable, script, *arguments], env=env, capture_output=True, text=True, timeout=60)


def tables_of(path):
    return {t["name"]: t["rows"] for t in json.loads(path.read_text())["tables"]}


# What a machine without GPUs shows, on machines with some.
NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
needs_gpus = pytest.mark.skipif(ranks.visible_gpus() == 0, reason="needs a GPU")


def send_recv_with_three_ranks(path, kinds, *more, **env):
    """Output of a run that has measured buffers of these kinds and no others, in this order."""
    arguments = ["--sizes", "8,64K,300001", "--repeat", "3", "--chunk", "32K", "--link-gbps", "100", *more]
    done = launch("send_recv.py", *arguments, "--json", str(path), gpus="3", **env)
    assert done.returncode == 0, done.stderr
    rows = tables_of(path)["send_recv"]
    assert [(r["bytes"], r["count"]) for r in rows] == [(8, 2), (65536, 16384), (300001, 75000)]
    samples = json.loads(path.read_text())["tables"][0]["samples"]
    columns = ["Size", "Count"]
    for kind in kinds:
        for row in rows:
            assert row[f"{kind}_gbps"] == pytest.approx(row["bytes"] * 8 / row[f"{kind}_us"] / 1e3)
            assert row[f"{kind}_bus"] == pytest.approx(row[f"{kind}_gbps"])  # of 100 Gbps
        assert all(row[f"{kind}_p99"] >= row[f"{kind}_us"] * 0.5 for row in rows)
        assert [len(s[f"{kind}_us"]) for s in samples] == [6, 6, 6]  # two pairs
        columns += [f"{kind.capitalize()} (Gbps)", "BusBW (%)", "Lat (us)"]
    assert [c.strip() for c in done.stdout.split("\n\n")[2].splitlines()[0].split("|")[1:-1]] == columns
    assert "- libfabric: " in done.stdout
    return done.stdout


def test_send_recv_with_three_ranks(tmp_path):
    assert "No GPU: host buffers only" in send_recv_with_three_ranks(tmp_path / "run.json", ["host"], **NO_GPUS)


@needs_gpus
@pytest.mark.parametrize("choice,kinds", [((), ["device", "host"]), (("--buffers", "device"), ["device"])])
def test_send_recv_from_gpu_memory(tmp_path, choice, kinds):
    assert "No GPU" not in send_recv_with_three_ranks(tmp_path / "run.json", kinds, *choice)


def test_fabric_bw(tmp_path):
    path = tmp_path / "run.json"
    arguments = ["-s", "4K", "-n", "64", "-l", "8", "-t", "32", "--recv-post-list", "4", "--rails", "2"]
    done = launch("fabric_bw.py", *arguments, "--link-gbps", "100", "--json", str(path))
    assert done.returncode == 0, done.stderr
    tables = tables_of(path)
    assert list(tables) == ["send", "write", "read", "summary"]
    (total,) = tables["summary"]
    for operation in ("send", "write", "read"):
        (row,) = tables[operation]
        assert row["iterations"] == 64 and row["peak"] >= row["average"] * 0.999
        assert row["rate"] == pytest.approx(row["average"] * 2**20 / 4096 / 1e6)
        assert total[f"{operation}_gbps"] == pytest.approx(row["average"] * 2**20 * 8 / 1e9)
        assert total[f"{operation}_mib"] == row["average"]
    assert total["link"] == 100
    assert "BW peak (MiB/s) | BW average (MiB/s) | MsgRate (Mpps)" in done.stdout
    second = launch("fabric_bw.py", *arguments, "--link-gbps", "100", "--baseline", str(path))
    assert second.returncode == 0 and "x base" in second.stdout, second.stderr


def test_fabric_bw_both_ways_in_gigabits(tmp_path):
    path = tmp_path / "run.json"
    done = launch(
        "fabric_bw.py", "--op", "write", "-s", "100", "-b", "-D", "0.2", "--report-gbits", "--json", str(path)
    )
    assert done.returncode == 0, done.stderr
    (row,) = tables_of(path)["write"]
    assert row["peak"] is None and row["rate"] == pytest.approx(row["average"] * 1e9 / 800 / 1e6)
    assert "BW average sum of both ways (Gb/s)" in done.stdout and "sum of the two ways" in done.stdout


def test_endpoint_sharing(tmp_path):
    path = tmp_path / "run.json"
    arguments = ["--num-threads", "2", "--num-endpoints", "3", "--duration", "0.1", "--repeat", "1", "--window", "4"]
    done = launch("endpoint_sharing.py", *arguments, "--op", "write", "--json", str(path))
    assert done.returncode == 0, done.stderr
    rows = tables_of(path)["threads"]
    assert [(r["mode"], r["thread"]) for r in rows] == [
        (m, t) for m in ("shared", "exclusive") for t in ("0", "1", "total")
    ]
    for first, second, total in (rows[:3], rows[3:]):
        assert total["mops"] == pytest.approx(first["mops"] + second["mops"]) and total["cycles"] > 0
        assert first["mops"] > 0 and second["mops"] > 0
    sweep = launch("endpoint_sharing.py", *arguments, "--sweep", "--json", str(path))
    assert sweep.returncode == 0, sweep.stderr
    rows = tables_of(path)["sweep"]
    assert [(r["threads"], r["endpoints"]) for r in rows] == [(t, e) for e in (1, 2, 3) for t in (1, 2)]
    for row in rows:
        assert ("exclusive_mops" in row) == (row["endpoints"] >= row["threads"])
        if "cost" in row:
            assert row["cost"] == pytest.approx(row["shared_mops"] / row["exclusive_mops"])
    if len(os.sched_getaffinity(0)) < 3:
        assert "cannot be told from these figures" in sweep.stdout


@variants(
    2,
    "name,arguments,words",
    [
        ("fabric_bw.py", ["-n", "7", "-l", "2"], "-n 7 is not a multiple of -l 2"),
        ("fabric_bw.py", ["-l", "256"], "-l 256 does not fit into -t 128"),
        ("fabric_bw.py", ["--recv-post-list", "600"], "does not fit into -r 512"),
        ("fabric_bw.py", ["-s", "0"], "-s"),
        ("fabric_bw.py", ["-a", "-s", "8"], "not allowed with"),
        ("fabric_bw.py", ["--op", "atomic"], "'atomic' is not one of send, write, read"),
        ("fabric_bw.py", ["--provider", "nonsuch"], "--provider 'nonsuch' is not one of"),
        ("fabric_bw.py", ["-d", "nonsuch0"], "--domain 'nonsuch0' is not one of"),
        ("send_recv.py", ["--sizes", "0"], "zero"),
        ("endpoint_sharing.py", ["--num-threads", "4", "--num-endpoints", "2"], "leaves some of 4 threads without one"),
        ("endpoint_sharing.py", ["--size", "9M"], "outside 1 to 8388608"),
        ("endpoint_sharing.py", ["--num-endpoints", "5000"], "5000 is more than 1024"),
    ],
)
def test_wrong_arguments_end_with_code_2(name, arguments, words):
    done = alone(name, *arguments)
    assert done.returncode == 2 and words in done.stderr, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr and not done.stdout


@pytest.mark.parametrize("name,ranks", [("fabric_bw.py", "3"), ("endpoint_sharing.py", "4"), ("send_recv.py", "1")])
def test_wrong_numbers_of_ranks_end_with_code_2(name, ranks):
    done = alone(name, WORLD_SIZE=ranks)
    assert done.returncode == 2 and "start it with GPUS=2" in done.stderr, done.stderr


def test_errors_that_only_the_job_finds_end_with_code_2():
    done = launch("fabric_bw.py", "--op", "write", "-s", "8K", TSN_CHAOS="max_write=4096")
    assert done.returncode == 2 and "write: 8192 bytes exceed the largest message of provider chaos+" in done.stderr
    done = launch("send_recv.py", "--buffers", "device", **NO_GPUS)
    assert done.returncode == 2 and "--buffers device needs a GPU on every rank" in done.stderr
