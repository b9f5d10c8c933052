"""The table of ways that is written from measurements, and the run of all tables: limits, failures, and kept results."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmark import eight, gemm_ways
from benchmark.common.suite import TOO_LONG, execute
from tilescale_net.kernels.fused import choice

ROOT = Path(__file__).parents[2]
GPU = "NVIDIA H100 80GB HBM3"


def _problem(m: int, ranks: int = 4) -> choice.GemmProblem:
    return choice.GemmProblem("matmul_reduce_scatter", ranks, m, 7168, 8192, torch.bfloat16)


@pytest.fixture(autouse=True)
def earlier(monkeypatch):
    """A table that new measurements do not change."""
    monkeypatch.setattr(choice, "MEASURED", ROOT / "tests/kernels/fused/ways.json")
    choice.measured.cache_clear()
    yield
    choice.measured.cache_clear()


def test_points_take_the_place_of_earlier_ones(tmp_path):
    path, shipped = tmp_path / "table.json", json.loads(choice.MEASURED.read_text())
    took = {"fused": 300.04, "unfused": 400.0, "nccl": 410.0}
    table = gemm_ways.table_with(path, GPU, [(_problem(2048), took), (_problem(64, ranks=8), took)])
    path.write_text(gemm_ways.text_of(table))
    assert json.loads(path.read_text()) == table
    assert table["gpus"] == shipped["gpus"] and len(table["groups"]) == len(shipped["groups"]) + 1
    changed = [g for g, before in zip(table["groups"], shipped["groups"]) if g != before]
    assert [(g["operator"], g["ranks"], g["dtype"]) for g in changed] == [("matmul_reduce_scatter", 4, "bfloat16")]
    points = {row[0]: row for row in changed[0]["points"]}
    assert points[2048] == [2048, 300.0, None, 400.0, 410.0, None] and points[512][1:] == [156, None, 112]
    assert table["groups"][-1]["ranks"] == 8 and table["groups"][-1]["points"] == [
        [64, 300.0, None, 400.0, 410.0, None]
    ]
    # A file that is there goes on.
    more = gemm_ways.table_with(path, "NVIDIA B200", [(_problem(512), took)])
    assert more["gpus"][-1] == "NVIDIA B200" and len(more["groups"]) == len(table["groups"]) + 1


def test_torchs_ways_are_not_taken(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    path.write_text(gemm_ways.text_of(gemm_ways.table_with(path, GPU, [(_problem(64), {"unfused": 9.0, "nccl": 1.0})])))
    monkeypatch.setattr(choice, "MEASURED", path)
    choice.measured.cache_clear()
    (point,) = [p for p in choice.measured("matmul_reduce_scatter", 4, "bfloat16", GPU) if p.m == 64]
    assert point.us == {"unfused": 9.0} and point.best == "unfused"


def test_a_command_that_takes_too_long_is_ended(monkeypatch):
    assert execute([sys.executable, "-c", "import time; time.sleep(60)"], limit=0.3) == TOO_LONG
    assert execute([sys.executable, "-c", "raise SystemExit(3)"], limit=60) == 3


def _content(name: str) -> dict:
    table = {"name": name, "keys": [], "columns": [{"key": "a", "title": "A"}], "rows": [{"a": 41}], "notes": []}
    return {"schema": 1, "command": [f"{name}.py"], "environment": {}, "notes": [], "tables": [table]}


def _main(monkeypatch, page: Path, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["eight.py", "--output", str(page), "--ranks", "2", *arguments])
    monkeypatch.setenv("TSN_DEVICE", "simulator")
    return eight.main()


def test_every_step_has_a_place_on_the_page(tmp_path, monkeypatch):
    page, started = tmp_path / "eight.md", []

    def execute(command, nodes, limit):
        started.append((nodes, limit))
        if "--json" not in command:
            return 0
        path = Path(command[command.index("--json") + 1])
        path.write_text(json.dumps(_content(path.stem)))
        return {"all_gather": 1, "all_to_all": TOO_LONG}.get(path.stem, 0)

    monkeypatch.setattr(eight, "execute", execute)
    assert _main(monkeypatch, page, "--part", "1") == 1
    assert all(limit <= 570 for _, limit in started) and [limit for _, limit in started][:2] == [60, 45]
    text = page.read_text()
    assert (
        "failed with exit code 1" in text and "ended after 0 s; rows up to then" in text and "moe_latency" not in text
    )
    assert _main(monkeypatch, page, "--part", "2") == 0
    text = page.read_text()
    assert (
        "(#all_reduce) | measured |" in text and "(#moe_two_nodes) | measured |" in text and "(#tests) | passed" in text
    )
    assert "(#deep_ep_intranode) | not started; give --deep-ep |" in text and 2 in [nodes for nodes, _ in started]
    assert _main(monkeypatch, page, "--part", "2", "--seconds", "1", "--only", "moe_latency") == 0
    assert "(#moe_latency) | not started; 1 s were over |" in page.read_text()
    with pytest.raises(SystemExit):
        _main(monkeypatch, page, "--only", "moe")
