"""The benchmark of the device queue: it counts every push, and its name does no harm."""

import ctypes
import json
import os
import subprocess
import sys

import pytest

import tilescale_net as tsn
from benchmark.common.queue import Probe, QueueBench
from tests import ranks
from tests.benchmark.test_runs import launch
from tests.launch.conftest import ROOT
from tests.variants import variants


def test_every_part(tmp_path):
    path = tmp_path / "run.json"
    arguments = ["--repeat", "1", "--trips", "10", "--capacity", "256", "--provider", "tcp;ofi_rxm"]
    # With launch.sh's own number of ranks: the second one has nothing to do.
    done = launch("device_queue.py", *arguments, "--json", str(path), GPUS="2")
    assert done.returncode == 0, done.stderr
    pushes, places, trips, dispatch, stages = json.loads(path.read_text())["tables"]
    shapes = [(r["blocks"], r["warps"], r["lanes"]) for r in pushes["rows"]]
    assert shapes[:4] == [(1, 1, 1), (1, 1, 8), (1, 1, 32), (1, 4, 32)]
    assert sorted({r["queues"] for r in pushes["rows"]}) == [1, 2, 4]
    assert all(r[c] > 0 for r in pushes["rows"] for c in ("published", "batch", "sustained"))
    assert [r["what"] for r in places["rows"]] == ["each published", "behind one fence"]
    assert all(0 < r["slowest"] <= r["mean"] <= r["fastest"] for r in places["rows"])
    assert len(trips["rows"]) == 2 and all(r["flag"] > 0 and r["queue_p99"] >= r["queue"] > 0 for r in trips["rows"])
    assert len(dispatch["rows"]) == 3 and all(r["rate"] > 0.1 for r in dispatch["rows"])
    times = {r["stage"]: r["us"] for r in stages["rows"]}
    parts = ["fence", "push", "flag to the CPU, or back", "poll and pop", "post", "completion", "flush", "network"]
    assert list(times) == [*parts, "remote visibility", "put_signal to remote wait"]
    assert all(times[p] > 0 for p in parts)
    assert "device simulated: times mean nothing but order" in done.stdout


@variants(
    1,
    "arguments, env, said",
    [
        (["--capacity", "100"], {"GPUS": "1"}, "must be a power of two"),
        (["--parts", "push,pull"], {"GPUS": "1"}, "'pull' is not one of"),
    ],
)
def test_wrong_arguments(arguments, env, said):
    done = launch("device_queue.py", *arguments, **env)
    assert done.returncode == 2 and done.stderr.count(said) == 1 and done.stdout == ""


def test_without_a_fabric_the_rest_is_measured(tmp_path):
    env = {"GPUS": "1", "TSN_LIBFABRIC": "/nonexistent/libfabric.so"}
    done = launch("device_queue.py", "--repeat", "1", "--capacity", "256", "--parts", "dispatch,stages", **env)
    assert done.returncode == 0, done.stderr
    assert "- stages: not measured: " in done.stdout and "put of 64 B" in done.stdout
    done = launch("device_queue.py", "--parts", "stages", "--json", str(tmp_path / "run.json"), **env)
    assert done.returncode == 3 and "not measured; stages need a fabric" in done.stdout, done
    assert json.loads((tmp_path / "run.json").read_text())["tables"] == []


@pytest.mark.parametrize("how", ["script", "path"])
def test_the_standard_librarys_queue_is_still_found(tmp_path, how):
    """Scripts of the folder, torch among their imports, would otherwise get the benchmark."""
    folder = os.path.join(ROOT, "benchmark")
    link = tmp_path / "benchmark"
    link.symlink_to(folder)
    path = str(link) if how == "script" else folder
    code = f"import sys; sys.path.insert(0, {path!r}); import queue; print(queue.Queue.__module__, queue.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    module, file = done.stdout.split()
    assert module == "queue" and not os.path.realpath(file).startswith(folder)


@ranks.on(1)
def test_probes_push_as_documented():
    bench = QueueBench(tsn.world(), -1)
    with bench.null(64, queues=2) as proxies:
        proxies.run(Probe.PUSH, 5, pes=2, lanes=3, warps=2, blocks=4)  # 120 puts through rings of 64
        proxies.run(Probe.PUSH_PUBLISHED, 7, pes=2, lanes=32, blocks=2)  # 448
        proxies.run(Probe.PUSH, 11, pes=2, blocks=8, only=5)  # one thread's
        proxies.drain(2)
        one = proxies.stats()
    with bench.null(16) as proxies:
        proxies.run(Probe.QUEUE_TRIP, 40)
        proxies.run(Probe.QUEUE_TRIP_PUBLISHED, 9)
        two = proxies.stats()
    with bench.pair("tcp;ofi_rxm", 64) as proxies:
        proxies.run(Probe.ONE_WAY, 6, bytes=256, out=proxies.signal, into=proxies.there, first=10)
        proxies.drain()
        three = proxies.stats()
        word = ctypes.c_uint64.from_address(proxies.there).value if not bench.on_gpu else 16
        same = bool((bench.heaps[0][65536:65792] == bench.heaps[1][65536:65792]).all())
    names = ("puts", "put_signals", "flushes", "bytes_put")
    one, two, three = ({n: s[n] for n in names} for s in (one, two, three))
    assert one == {"puts": 579, "put_signals": 0, "flushes": 2, "bytes_put": 579 * 64}
    assert two == {"puts": 9, "put_signals": 0, "flushes": 49, "bytes_put": 9 * 64}
    assert three == {"puts": 0, "put_signals": 6, "flushes": 1, "bytes_put": 6 * 256}
    assert word == 16 and same


@ranks.fails("WaitTimeout", "for 1 on the signal", "last seen 0", size=1, TSN_TIMEOUT="0.5")
def test_a_flag_that_nobody_answers_ends_in_an_error():
    bench = QueueBench(tsn.world(), -1)
    with bench.null(16) as proxies:
        proxies.run(Probe.FLAG_TRIP, 1, out=proxies.signal, into=proxies.signal + 8)  # no proxy answers
