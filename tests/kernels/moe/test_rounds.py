"""Dispatch and combine against plain PyTorch, bit by bit: modes, layouts, dtypes, adversarial choices, uneven ranks."""

import contextlib
import random
import time

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe.reference import expert_rows, route
from tests.kernels.moe.support import FP8, ROUTES, make_inputs, run_round, without_kernels
from tests.kernels.support import assert_same, unsettle
from tests.variants import nightly, variants
from tilescale_net.kernels.moe import AllToAll, Tuning

SMALL = dict(num_experts=8, max_tokens=9, hidden=64, top_k=3)
# hidden sizes that are no multiple of a warp's pieces, and that leave a group of scales unfinished
ODD = dict(num_experts=12, max_tokens=17, hidden=1304, top_k=5)
ODD_FP8 = dict(ODD, hidden=1296)


def rounds(seed: int, shape: dict, options: dict, how: dict, kinds=ROUTES) -> None:
    """One AllToAll, one round for each kind of choices; tokens per rank are uneven, now and then none."""
    pace = random.Random(f"{seed} {tsn.rank()}")
    # Kernels of ordinary calls are compiled ahead; these calls are others.
    others = how.get("halves") or how.get("quantise_inside") or "index" in how
    with without_kernels() if others else contextlib.nullcontext():
        op = AllToAll(**shape, **options)
    shared = random.Random(seed)
    for number, kind in enumerate(kinds):
        tokens = [
            shared.choice((0, 1, shared.randrange(op.config.max_tokens + 1), op.config.max_tokens))
            for _ in range(tsn.size())
        ]
        if kind == "twice" and op.config.mode == "latency":
            tokens = [n // 2 for n in tokens]  # an expert has room for max_tokens rows of a rank
        everyone = [make_inputs((seed, number, r), op.config, n, kind) for r, n in enumerate(tokens)]
        received = run_round(op, everyone, pace, f"seed {seed}, {kind}, tokens {tokens}, rank {tsn.rank()}", **how)
        if how.get("again"):  # the same choices with other rows
            for turn in range(2):
                other = [make_inputs((seed, number, r, turn), op.config, n, kind) for r, n in enumerate(tokens)]
                for have, want in zip(other, everyone):
                    have.topk_idx, have.weights = want.topk_idx, want.weights
                received = run_round(op, other, pace, f"seed {seed}, {kind}, handle", **how, handle=received.handle)
    op.free()


CASES = {
    "expert-major in place": (4, SMALL, dict(alignment=4), dict(again=True)),
    "expert-major elsewhere": (2, ODD, dict(zero_copy=False, dtype=torch.float16, quantize_combine="always"), dict(index=torch.int32)),
    "rank-major": (4, SMALL, dict(layout="rank", dtype=torch.float32), dict(again=True, halves=False)),
    "fp8, expert-major": (3, ODD_FP8, dict(dtype=FP8, column_scales=True, alignment=16, tuning=Tuning(blocks=5, dispatch_senders=2, threads=96, chunk=3)), dict(halves=True)),
    "one rank": (1, SMALL, dict(), dict(again=True)),
    "latency in halves": (4, SMALL, dict(mode="latency", dtype=torch.float32), dict(halves=True, index=torch.int32)),
    "latency, quantised inside": (3, ODD_FP8, dict(mode="latency", dtype=FP8, quantize_combine="always"), dict(quantise_inside=True)),
    "latency, fp8 with scales": (2, SMALL, dict(mode="latency", dtype=FP8), dict()),
}  # fmt: skip


# Rows that cross the network once per node: ranks of two nodes.
SHAPE = dict(num_experts=8, max_tokens=20, hidden=64, top_k=3)
KINDS = ("random", "masked", "one rank")
LATENCY = dict(mode="latency")
NODES = {
    "nodes": (dict(alignment=2), dict(again=True), ROUTES),
    "nodes, by rank": (dict(layout="rank", dtype=FP8, quantize_combine="always"), dict(again=True, halves=True), KINDS),
    "nodes, elsewhere": (dict(zero_copy=False, dtype=FP8, column_scales=True, quantize_combine="always"), dict(halves=True, index=torch.int32), KINDS),
    "nodes, latency": (LATENCY, dict(), (*KINDS, "twice", "none")),
    "nodes, latency, fp8": (dict(LATENCY, dtype=FP8, quantize_combine="always"), dict(quantise_inside=True, halves=True), ("random", "masked")),
    "nodes, latency, fp8 with scales": (dict(LATENCY, dtype=FP8), dict(halves=True, index=torch.int32), (*KINDS, "twice", "none")),
}  # fmt: skip


# Their like is elsewhere: FP8 by rank in test_nodes.py, latency mode in bfloat16 in test_misuse.py.
LONG = {
    "latency": (4, SMALL, dict(mode="latency"), dict()),
    "latency in halves, float32": (2, ODD, dict(mode="latency", dtype=torch.float32), dict(halves=True, index=torch.int32)),
    "fp8, rank-major": (2, ODD_FP8, dict(layout="rank", dtype=FP8, quantize_combine="always"), dict()),
}  # fmt: skip


@variants(2, "case", [*CASES, *(nightly(case) for case in LONG)])
def test_rounds(case, seed):
    size, shape, options, how = (CASES | LONG)[case]
    ranks.run(size, rounds, seed, shape, options, how, timeout=180)


@variants(
    1,
    "case",
    [nightly(case, when=case.endswith(("elsewhere", "scales"))) for case in NODES],
)
@ranks.on(4, VIRTUAL_NODES="2", timeout=280)
def test_rounds_once_per_node(case, seed):
    rounds(seed, SHAPE, *NODES[case])


def in_a_row(seed: int, shape: dict, options: dict) -> None:
    """Dispatches with one layout and no combine between: a fast rank must not overwrite what a slow one still reads."""
    pace = random.Random(f"{seed} {tsn.rank()}")
    op = AllToAll(**shape, **options)
    everyone = [make_inputs((seed, r), op.config, op.config.max_tokens, "random") for r in range(tsn.size())]
    mine, device = everyone[tsn.rank()], tsn.device()
    received = op.dispatch(mine.x.to(device), mine.topk_idx.to(device), mine.weights.to(device))
    routing = route([e.topk_idx for e in everyone], op.config.num_experts, tsn.rank())
    for turn in range(8):
        x = mine.x.to(device) + turn
        received = op.dispatch(x, handle=received.handle)
        tsn.synchronize()
        time.sleep(0.03 * pace.random())
        wanted = expert_rows(routing, [e.x + turn for e in everyone])
        for e, rows in enumerate(wanted):
            begin = int(received.offsets[e])
            assert_same(received.x[begin : begin + len(rows)].cpu(), rows, f"seed {seed}, turn {turn}, expert {e}")
    op.free()


def weights_at_combine(seed: int, shape: dict, options: dict, kinds=("random",)) -> None:
    """Latency mode: weights given to combine do what weights given to dispatch do, call after call."""
    op, device = AllToAll(**shape, **options), tsn.device()
    for number, kind in enumerate(kinds):
        mine = make_inputs((seed, number, tsn.rank()), op.config, op.config.max_tokens // 2, kind)
        x, idx, weights = mine.x.to(device), mine.topk_idx.to(device), mine.weights.to(device)
        received = op.dispatch(x, idx, weights)
        wanted = op.combine(received.x, received.handle)
        found = op.combine(received.x, op.dispatch(x, idx).handle, weights=weights)
        assert_same(found.cpu(), wanted.cpu(), f"seed {seed}, {kind}")
    op.free()


def _reject(op, call, wrong: bool, rank: int, pace) -> None:
    unsettle(pace)
    with pytest.raises(TypeError if wrong else ValueError, match=f"rank {rank}"):
        call(call.__defaults__[0].float()) if wrong else call()
        op.check()


def rejected(seed: int, shape: dict, options: dict) -> None:
    """Calls that one rank's host rejects, each rank in turn: the others' end with them, and those that follow are right."""
    op, rank, pace = AllToAll(**shape, **options), tsn.rank(), random.Random(f"{seed} {tsn.rank()}")
    for number in range(3):
        everyone = [
            make_inputs((seed, number, r), op.config, op.config.max_tokens, "random") for r in range(tsn.size())
        ]
        x, idx, weights = (
            t.to(tsn.device()) for t in (everyone[rank].x, everyone[rank].topk_idx, everyone[rank].weights)
        )
        wrong = rank == number % tsn.size()
        label = f"seed {seed}, after the rejected calls of rank {number % tsn.size()}"
        received = op.dispatch(x, idx, weights)
        calls = [lambda x=x: op.dispatch(x, idx, weights)]
        if op.config.mode == "throughput":
            calls.append(lambda x=x, handle=received.handle: op.dispatch(x, handle=handle))
        for call in calls:
            _reject(op, call, wrong, number % tsn.size(), pace)
        # No dispatch comes between these, which would wait for all ranks.
        received = op.dispatch(x, idx, weights)
        wanted = op.combine(received.x, received.handle).cpu()
        for _ in range(2):
            _reject(op, lambda x=received.x: op.combine(x, received.handle), wrong, number % tsn.size(), pace)
        assert_same(op.combine(received.x, received.handle).cpu(), wanted, label)
        run_round(op, everyone, pace, label)
    op.free()


@ranks.on(timeout=120)
def test_dispatches_in_a_row(seed):
    # The shape of test_failures.py and test_states.py, whose kernels these are.
    in_a_row(seed, dict(num_experts=6, max_tokens=5, hidden=32, top_k=3), dict())


@pytest.mark.parametrize("calls", [300, nightly(3000)])
@variants(1, "options", [dict(), dict(mode="latency")], ids=["throughput", "latency"])
@ranks.on(timeout=180)
def test_hundreds_of_calls(options, calls, seed):
    """No call may leave anything that a later one trips over; results of equal inputs are equal bits."""
    pace = random.Random(f"{seed} {tsn.rank()}")
    op = AllToAll(4, 7, 64, 3, tuning=Tuning(blocks=2, threads=32, combine_threads=32, chunk=2), **options)
    prepared = []
    for number in range(3):
        everyone = [make_inputs((seed, number, r), op.config, (number + r) % 4, "masked") for r in range(tsn.size())]
        run_round(op, everyone, pace, f"seed {seed}")
        mine = everyone[tsn.rank()]
        device = tsn.device()
        x, idx, weights = mine.x.to(device), mine.topk_idx.to(device), mine.weights.to(device)
        received = op.dispatch(x, idx, weights)
        prepared.append((x, idx, weights, op.combine(received.x, received.handle)))
    for call in range(calls):
        x, idx, weights, expected = prepared[pace.randrange(3) if tsn.size() == 1 else (call * 7 + call // 5) % 3]
        received = op.dispatch(x, idx, weights)
        out = op.combine(received.x, received.handle)
        if not torch.equal(out, expected):
            raise AssertionError(f"seed {seed}: call {call} gave other bits than the first")
