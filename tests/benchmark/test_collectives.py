"""Benchmarks of collectives: as users start them, and the proof that wrong data is found."""

import argparse
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import tilescale_net as tsn
from benchmark import operators
from benchmark.all_gather import AllGatherCase
from benchmark.all_reduce import PEERS, AllReduceCase
from benchmark.all_to_all import AllToAllCase
from benchmark.common.collectives import _of_peers, measure
from benchmark.common.measuring import Timer
from benchmark.common.peers import Made, Peer
from benchmark.decode_context import MergeCase
from benchmark.reduce_scatter import ReduceScatterCase
from benchmark.ulysses import WAYS, UlyssesCase
from tests import ranks
from tests.benchmark.test_runs import launch, run
from tests.variants import variants

QUICK = ("--threads", "64", "--repeat", "1", "--warmup", "0")


@variants(
    2,
    "name, arguments, env",
    [
        ("all_gather", ["--blocks", "1,2"], {}),
        ("all_to_all", ["--uneven"], {"GPUS": "3"}),
        ("all_to_all", [], {"VIRTUAL_NODES": "2"}),
        ("reduce_scatter", ["--dtype", "float32"], {}),
        ("all_reduce", ["--dtype", "float16", "--staged", "--algorithm", "auto,fp8"], {}),
    ],
)
def test_runs(tmp_path, name, arguments, env):
    rows, said = run(tmp_path, f"{name}.py", *QUICK, "--sizes", "16K,64K", *arguments, **env)
    assert "- data: verified" in said and "Bus BW (GB/s)" in said
    assert "NCCL" not in said
    size = int(env.get("GPUS", 2))
    assert len(rows) == (4 if "1,2" in arguments or "auto,fp8" in arguments else 2)
    for row in rows:
        assert row["algbw"] == pytest.approx(row["bytes"] / row["us"] / 1e3)
        assert row["busbw"] == pytest.approx(row["algbw"] * (size - 1) / size * (2 if name == "all_reduce" else 1))
        assert row["p99"] >= row["us"]


def test_operators(tmp_path):
    """Eager operators, beside gloo in NCCL's place."""
    rows, said = run(tmp_path, "operators.py", *QUICK[2:], "--calls", "1", "--sizes", "4K")
    assert "- data: verified" in said and "x gloo, host" in said
    assert [row["operator"] for row in rows] == ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    for row in rows:
        assert row["bytes"] == 4096 and row["us"] >= row["host"] > 0
        assert row["ratio"] == pytest.approx(row["nccl_us"] / row["us"])
        assert row["host_ratio"] == pytest.approx(row["nccl_host"] / row["host"])


@ranks.on()
def test_wrong_results_of_operators_are_found():
    for name in operators.OPERATORS:
        case = operators.Case(name, 4096, torch.bfloat16, seed=5)
        for peer in case.peers(torch.distributed.group.WORLD).values():
            found = peer()
            assert case.difference(found, exact=False) is None
            found[-1, -1] += 1
            assert "wrong" in case.difference(found, exact=False)


def test_decode_context(tmp_path):
    shape = ("--batch", "1,3", "--heads", "4", "--dim", "16", "--threads", "64", "--blocks", "1,2")
    rows, said = run(tmp_path, "decode_context.py", *QUICK[2:], *shape)
    assert "- data: verified" in said and "NCCL" not in said
    assert [(row["batch"], row["blocks"]) for row in rows] == [(1, 1), (1, 2), (3, 1), (3, 2)]


@variants(1, "env", [{}, {"VIRTUAL_NODES": "2"}], ids=["even", "uneven"])
def test_ulysses(tmp_path, env):
    uneven = ("--uneven", "--batch", "2") if env else ()
    rows, said = run(tmp_path, "ulysses.py", *QUICK[2:], "--sequence", "18", *uneven, **env)
    assert "- data: verified" in said and "NCCL" not in said
    assert [row["way"] for row in rows] == ["scatter", "gather", "attention"]


@ranks.on()
def test_peers_of_ulysses():
    """Torch's way, through gloo, which is compared as ours is."""
    for uneven, batch, way in itertools.product((False, True), (1, 2), WAYS):
        args = argparse.Namespace(uneven=uneven, batch=batch, heads=4, dim=8, dtype="float32", chunks=1)
        case = UlyssesCase(args, way, 12)
        measure(case, case.torchs(None), Timer("launch", 0, 1, on_gpu=False), None, True, f"torch, {way}")
        case.free()


@ranks.on()
def test_peers_of_decode_context():
    """The peer's calls, through gloo, which are compared as ours are."""
    for all_heads in (False, True):
        case = MergeCase(argparse.Namespace(dtype="float32", heads=4, dim=16, all_heads=all_heads), 3)
        sequence, calls = case.nccl(None)
        measure(case, sequence, Timer("launch", 0, 1, on_gpu=False), None, True, "the peer", alone=all_heads)
        with pytest.raises(Exception, match="outputs or lse are wrong"):
            measure(case, calls, Timer("launch", 0, 1, on_gpu=False), None, True, "the calls alone", alone=True)


def test_wrong_arguments():
    done = launch("all_gather.py", "--timing", "loop")
    assert done.returncode == 2 and "--timing: invalid choice: 'loop'" in done.stderr
    done = launch("all_gather.py", GPUS="1")
    assert done.returncode == 2 and "two ranks" in done.stderr


@variants(2, "words", ["all_gather", "all_to_all", "uneven", "reduce_scatter"])
@ranks.fails("WrongData", "wrong")
def test_wrong_data_is_found(words):
    name = words
    case = {
        "all_gather": lambda: AllGatherCase(4096),
        "all_to_all": lambda: AllToAllCase(4096, False),
        "uneven": lambda: AllToAllCase(8192, True),
        "reduce_scatter": lambda: ReduceScatterCase(4096, "bfloat16"),
    }[name]()
    call, _ = case.ours(dict(threads=32, blocks=1))

    def spoil():
        call()
        tsn.synchronize()
        case._out.view(-1)[-1] += 3

    timer = Timer("launch", 0, 1, on_gpu=case._out.is_cuda)
    measure(case, call, timer, None, True, name)
    measure(case, spoil, timer, None, True, name)


@ranks.on()
def test_peers_that_are_missing_or_wrong_have_no_figure():
    case, report = AllReduceCase(65536, "float32", True), SimpleNamespace(environment={})
    timer = Timer("launch", 0, 1, on_gpu=case._out.is_cuda)

    def in_place(call):
        return Made(lambda: dist.all_reduce(call.out, group=call.group), call.out, call.out)

    wrong = Peer("wrong_us", "copies", lambda call: Made(lambda: call.out.copy_(call.x)))
    case.peers = [PEERS["flashinfer_one"], wrong, Peer("right_us", "gloo", in_place)]
    group = dist.new_group(backend="gloo")
    found = _of_peers(
        case, group, lambda call, label: measure(case, call, timer, lambda: None, True, label, alone=True), report
    )
    assert list(found) == ["right_us"] and len(found["right_us"]) == 1
    environment = report.environment
    assert (
        "flashinfer" in environment["FlashInfer one-shot"]
        and "sums are wrong" in environment["copies"]
        and "gloo" not in environment
    )
