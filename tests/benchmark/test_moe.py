"""The benchmarks of the MoE all-to-all: their rows, on one node and on two, with the fabric's limit beside them."""

import json

import pytest

from tests.benchmark.test_runs import launch

SMALL = ["--tokens", "8", "--hidden", "128", "--experts", "4", "--topk", "2", "--dtype", "bf16", "--repeat", "1"]
SMALL += ["--warmup", "1"]


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_rows(tmp_path, nodes):
    path = tmp_path / "run.json"
    done = launch("moe_all_to_all.py", *SMALL, "--mode", "latency", "--json", str(path), VIRTUAL_NODES=nodes)
    assert done.returncode == 0, done.stderr
    (table,) = json.loads(path.read_text())["tables"]
    rows = {(row["system"], row["operation"]): row for row in table["rows"]}
    ours = {("tilescale_net", name) for name in ("dispatch", "combine", "dispatch + combine")}
    assert set(rows) == ours
    for row in rows.values():
        assert row["kernel"] > 0
        assert all((key in row) == (nodes == "2") for key in ("fabric", "bare", "of_bare"))
        if nodes == "2":
            assert row["of_bare"] == pytest.approx(100 * row["bare"] / row["kernel"]) and row["bare"] > 0
    assert "verified, every byte" in done.stdout


def test_calls(tmp_path):
    path = tmp_path / "run.json"
    done = launch("moe_calls.py", *SMALL, "--layout", "expert", "--blocks", "2", "--json", str(path))
    assert done.returncode == 0, done.stderr
    (table,) = json.loads(path.read_text())["tables"]
    assert [(row["mode"], row["layout"], row["blocks"]) for row in table["rows"]] == [
        ("throughput", "expert", 2), ("latency", "expert", 0),
    ]  # fmt: skip
    fast, slow = table["rows"]
    assert fast["agreeing"] == fast["dispatch"] - fast["cached"] and slow["combine"] > 0 and "cached" not in slow
    assert "verified, every byte" in done.stdout
