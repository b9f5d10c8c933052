"""A search on two ranks with times of our own: all ranks choose alike, calls take it, and files that lie are left alone."""

import dataclasses
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe.support import without_kernels
from tilescale_net import cli, tuning
from tilescale_net.kernels.fused import choice
from tilescale_net.kernels.fused.all_gather_matmul import AllGatherMatmul
from tilescale_net.kernels.moe import AllToAll, Tuning
from tilescale_net.kernels.moe import config as moe_choice
from tilescale_net.launch import run
from tilescale_net.ops import group_objects
from tilescale_net.runtime import tuned

# The shapes of tests/kernels/fused and of tests/kernels/moe/test_misuse.py, whose kernels these are.
ROWS, K, N = 72, 48, 48
MOE = dict(num_experts=4, max_tokens=4, hidden=32, top_k=2)


def _times(asked: list):
    """A clock by which one candidate is fast on one rank alone, and the third on both."""

    def measure(candidate, call) -> float:
        asked.append(candidate)
        call()
        number = len(asked)
        if number == 2 and tsn.rank() == 0:
            return 1.0  # 50.0 on the other
        return {3: 10.0}.get(number, 50.0)

    return measure


def _search() -> None:
    world, asked = tsn.world(), []
    kind = "all_gather_matmul"
    found = tuning.product(kind, ROWS, K, N, most=3, measure=_times(asked))
    assert [t.us for t in found.trials] == [50.0, 50.0, 10.0] and found.best is found.trials[2]
    assert "-> " in found.text() and "10.0 us" in found.text()
    # The next call takes it.
    x, w = (torch.randint(-2, 3, shape).bfloat16().to(world.device) for shape in ((ROWS, K), (K, N)))
    out = tsn.ops.all_gather_matmul(x, w)
    everyone = tsn.ops.all_gather(x)
    assert torch.equal(out, torch.mm(everyone, w))
    made = group_objects.of("")._products
    (op,) = made.values()
    problem = choice.GemmProblem(kind, world.size, ROWS, K, N, torch.bfloat16)
    point = choice.of_choice(tuned.of(world, "test")[choice.key_of(problem)], problem)
    assert isinstance(op, AllGatherMatmul) and point.us == {"fused": 10.0, "unfused": 50.0}
    assert {name: getattr(op, name) for name in ("blocks", "tiling")} | {"engine": "auto"} == point.fused
    # One that needs no communication kernel at all.
    slow = tuning.product(
        kind, ROWS, K, N, most=2, measure=lambda candidate, call: 1.0 if candidate["way"] == "unfused" else 9.0
    )
    assert slow.best.choice == {"way": "unfused"}
    assert torch.equal(tsn.ops.all_gather_matmul(x, w), out) and len(made) == 1
    # A small gain does not count, and what fails on one rank is left out on both.
    trial = tuning.lockstep(
        world, "k", [{"a": n} for n in range(3)], _fails_on_one_rank, lambda c, call: 100.0 - c["a"] / 2
    )
    assert trial.best.choice == {"a": 0} and trial.trials[1].us is None and "not here" in trial.trials[1].why
    with pytest.raises(ValueError, match="no candidate"):
        tuning.lockstep(world, "k", [{"a": 1}], _fails_on_one_rank)
    with pytest.raises(tsn.RankMismatch):
        tuning.lockstep(world, "k", [{"a": tsn.rank()}], _fails_on_one_rank)
    for wrong in (dict(kind="gemm"), dict(most=0), dict(k=7), dict(dtype=torch.float32)):
        with pytest.raises(ValueError, match="tuning"):
            tuning.product(**{**dict(kind=kind, rows=ROWS, k=K, n=N), **wrong})


def _fails_on_one_rank(candidate):
    if candidate["a"] == 1 and tsn.rank() == 1:
        raise ValueError("not here")
    return (lambda: None), (lambda: None)


def _moe() -> None:
    torch.set_default_dtype(torch.bfloat16)  # a user's: nothing that is measured depends on it
    try:
        found = tuning.moe(*MOE.values(), most=1)
    finally:
        torch.set_default_dtype(torch.float32)
    blocks = found.best.choice["blocks"]
    assert found.best.us and found.best is found.trials[0]
    other = found.best.choice | {"blocks": blocks + 2, "dispatch_senders": 3}
    tuned.keep(tsn.world(), "test", found.key, other, 1.0)
    with without_kernels():
        op, explicit = AllToAll(**MOE), AllToAll(**MOE, tuning=Tuning())
        assert {name: getattr(op.tuning, name) for name in other} == other and explicit.tuning.blocks == blocks
        op.free()
        explicit.free()
        # What makes no sense is ignored by all ranks.
        for wrong in ({"chunk": 1}, {"blocks": "many"}, {"blocks": 1}):
            tuned.of(tsn.world(), "test")[found.key] = wrong
            op = AllToAll(**MOE)
            assert op.tuning == explicit.tuning and found.key not in tuned.of(tsn.world(), "test")
            op.free()
    assert found.key == moe_choice.key_of(op.config)
    tuned.keep(tsn.world(), "test", found.key, other, 1.0)


def test_search(tmp_path):
    ranks.run(2, _search_and_read, str(tmp_path), timeout=240)


def _search_and_read(folder: str) -> None:
    """Each rank has a folder of its own: the choices of rank 0 count."""
    own = Path(folder) / f"rank{tsn.rank()}"
    usual = tuned.path_of
    tuned.path_of = lambda place: own / usual(place).name  # in this process, which is forked
    _search()
    _moe()
    world = tsn.world()
    path = tuned.path_of(tuned.place_of(world))
    assert path.exists() == (tsn.rank() == 0)
    kept = dict(tuned.of(world, "test"))
    assert len(kept) == 2
    if tsn.rank() == 1:  # another choice on this rank's disk
        path.parent.mkdir(mode=0o700, parents=True)
        place = tuned.place_of(world)
        wrong = {"schema": 1, "place": place, "choices": {key: {"choice": {"fused": True}, "us": 1.0} for key in kept}}
        path.write_text(json.dumps(wrong))
    tuned._tables.clear()
    assert tuned.of(world, "test") == kept
    # Wrong entries of a file of rank 0 are ignored by all.
    problem = choice.GemmProblem("all_gather_matmul", 2, ROWS, K, N, torch.bfloat16)
    tuned.of(world, "test")[choice.key_of(problem)] = {"fused": True}
    assert choice.choose(problem, world)[0] == "fused" and choice.key_of(problem) not in tuned.of(world, "test")


PLACE = {"gpu": "NVIDIA H200", "ranks": 4, "nodes": 1, "package": "0.1.0"}


@pytest.mark.parametrize(
    "text, why",
    [
        ("{", "Expecting"),
        ("[]", "another place"),
        (json.dumps({"schema": 1, "place": PLACE | {"ranks": 8}, "choices": {}}), "another place"),
        (json.dumps({"schema": 2, "place": PLACE, "choices": {}}), "another place"),
        (json.dumps({"schema": 1, "place": PLACE, "choices": {"k": {"choice": 3, "us": 1.0}}}), "no choice"),
        (json.dumps({"schema": 1, "place": PLACE, "choices": []}), "not used"),
        ("[" * 100000, "not used"),
        (" " * (2 << 20), "more than"),
    ],
)
def test_files_that_lie(tmp_path, monkeypatch, caplog, text, why):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tuned.path_of(PLACE)
    path.parent.mkdir(mode=0o700, parents=True)
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert tuned.read_choices(PLACE) == {}
    assert why in caplog.text and str(path) in caplog.text


def test_a_file_that_others_may_write(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tuned.path_of(PLACE)
    path.parent.mkdir(mode=0o700, parents=True)
    good = {"schema": 1, "place": PLACE, "choices": {"k": {"choice": {"a": 1}, "us": 2.0}}}
    path.write_text(json.dumps(good))
    assert tuned.read_choices(PLACE) == {"k": {"a": 1}}
    path.chmod(0o666)
    with caplog.at_level(logging.WARNING):
        assert tuned.read_choices(PLACE) == {}
    assert "others" in caplog.text


def test_order_of_trials(monkeypatch):
    """On a GPU: one after the other, the usual fused call, copy engines where they reach, then one option after the other."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    gpu, problem = torch.device("cuda", 0), choice.GemmProblem("matmul_all_reduce", 4, 4096, 7168, 8192, torch.bfloat16)
    found = tuning.product_candidates(problem, gpu, 100)
    usual = {
        "way": "fused",
        "blocks": 4,
        "engine": "auto",
        "tile": [128, 256, 64],
        "stages": 4,
        "panel": 8,
        "columns": 128,
    }
    assert found[:2] == [{"way": "unfused"}, usual] and len(found) == 1 + 3 * 3 * 2
    changed = [sum(one[name] != usual[name] for name in ("tile", "blocks", "engine")) for one in found[1:]]
    assert changed == sorted(changed) and len({json.dumps(c) for c in found}) == len(found)
    for one in found[1:]:
        options = {name: value for name, value in one.items() if name != "way"}
        assert choice.options_as_choice(choice.options_of(options, problem)) == options
    gather = dataclasses.replace(problem, kind="all_gather_matmul")
    by_engines = {"way": "copy_engines"}
    assert tuning.product_candidates(gather, gpu, 3)[2] == by_engines
    assert by_engines not in tuning.product_candidates(gather, gpu, 100, is_mapped=False)


def test_the_command(monkeypatch):
    started: list = []
    monkeypatch.setattr(run, "start", lambda arguments: started.append(arguments) or 0)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GPUS", "8")
    monkeypatch.setenv("TSN_DEVICE", "simulator")
    words = ["moe", "--rows", "64", "128", "--ranks", "3"]
    assert cli.main(["tune", *words]) == 0 and started == [["-m", "tilescale_net", "tune", *words]]
    with pytest.raises(SystemExit):
        cli.main(["tune", "gemm"])
