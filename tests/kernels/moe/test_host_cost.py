"""The host's cost of calls: how often they call torch; plans that are used again belong to nobody else."""

import contextlib
import copy
import pickle
import random
import unittest.mock
from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import ranks
from tests.kernels.moe.support import make_inputs
from tests.kernels.moe.test_metadata import SHAPE
from tests.kernels.support import nothing_launched
from tilescale_net.kernels.launches import Launch
from tilescale_net.kernels.moe import AllToAll, metadata
from tilescale_net.kernels.moe.handle import CACHED_PLANS, Plans, ReceivedRows
from tilescale_net.kernels.moe.mode import DeferredStream

# Of a dispatch and a combine of BF16 rows. Allocated: rows, sums and counts in latency mode (counts of a multiple of
# four experts many at a time); sums in throughput mode, and, where outputs are no symmetric memory, rows.
MADE = "_empty_strided_cpu"  # what compiled code of torch calls, and no operator
CALLS = {
    "latency": (dict(mode="latency"), {MADE: 2, "aten.empty.memory_format": 1}),
    "throughput": (dict(), {MADE: 1}),
}
CHECKS = {"aten.min.default", "aten.max.default", "aten._local_scalar_dense.default"}  # of ids, on the CPU alone
PART_OF_A_VIEW = "aten.detach.default"


class _Calls(TorchDispatchMode):
    """Counts operators of torch."""

    def __enter__(self):
        self.found: dict[str, int] = {}
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if name not in CHECKS and name != PART_OF_A_VIEW:
            self.found[name] = self.found.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def counting(found: dict[str, int]) -> Iterator[None]:
    """Calls of MADE by objects that are made inside are counted in `found`."""
    make = getattr(torch._C._dynamo.guards, MADE)

    def counted(*args):
        found[MADE] = found.get(MADE, 0) + 1
        return make(*args)

    with unittest.mock.patch.object(torch._C._dynamo.guards, MADE, counted):
        yield


def count(options: dict, wanted: dict, shape=SHAPE) -> None:
    with nothing_launched():
        _count(options, wanted, shape)


def _count(options: dict, wanted: dict, shape) -> None:
    made: dict[str, int] = {}
    with counting(made):
        op = AllToAll(**shape, **options)
        _count_of(op, made, wanted)


def _count_of(op: AllToAll, made: dict[str, int], wanted: dict[str, int]) -> None:
    x = torch.ones((5, op.config.hidden), dtype=torch.bfloat16, device=op.device)
    idx = torch.arange(op.config.top_k, device=op.device).repeat(5, 1)
    weights = torch.ones((5, op.config.top_k), device=op.device)
    received = op.dispatch(x, idx, weights)
    y = received.x
    op.combine(y, received.handle)
    del received
    for _ in range(2):
        made.clear()
        with _Calls() as calls:
            op.combine(y, op.dispatch(x, idx, weights).handle)
        assert calls.found | made == wanted, (calls.found, made)


@pytest.mark.parametrize("mode", CALLS)
def test_calls_of_torch(mode):
    ranks.run(2, count, *CALLS[mode])


def hold(seed: int, options: dict, shape=SHAPE, calls: int = 6 * CACHED_PLANS) -> None:
    """Handles and parts of plans are held at random; what they tell never changes, and they combine as at first."""
    op = AllToAll(**shape, **options)
    pace = random.Random(seed)  # the same on all ranks
    handles, numbers = [], []
    for call in range(calls):
        mine = make_inputs((seed, call, op.rank), op.config, pace.randrange(op.config.max_tokens + 1), "random")
        received = op.dispatch(mine.x.to(op.device), mine.topk_idx.to(op.device), mine.weights.to(op.device))
        out = op.combine(received.x, received.handle)
        if pace.random() < 0.6:
            handles.append((received.handle, received.x.clone(), out, metadata(received.handle).source_token.clone()))
        if pace.random() < 0.3:
            part = received.handle.plan.token_slot
            numbers.append((part, part.clone()))
        del received
        while len(handles) > pace.choice([0, 2, 2 * CACHED_PLANS]):
            handle, x, expected, source = handles.pop(pace.randrange(len(handles)))
            assert torch.equal(op.combine(x, handle), expected)
            assert torch.equal(metadata(handle).source_token, source)
    assert all(torch.equal(part, before) for part, before in numbers)


@pytest.mark.parametrize("options", [dict(), dict(mode="latency")], ids=["throughput", "latency"])
def test_held_plans(options):
    ranks.run(2, hold, random.randrange(1 << 30), options)


def test_plans():
    stream: list = ["a"]
    names = ("token_slot", "targets", "weights", "counts", "source_counts", "source_token", "origin_slot", "node_plan")
    shapes = {name: ((4,), torch.int32) for name in names}
    plans = Plans(ReceivedRows, shapes, torch.device("cpu"), lambda: stream[0])

    def places(plan) -> list[int]:
        return [tensor.data_ptr() for tensor in plan.arguments]

    first = plans.next(1)
    mine = places(first)
    assert isinstance(first, ReceivedRows) and not set(places(plans.next(1))) & set(mine)
    with pytest.raises(AttributeError):
        _ = first.other
    kept = first.targets  # and so it is the caller's
    assert kept is first.targets and first.arguments[1] is kept
    del first
    again = plans.next(2)
    assert again.tokens == 2 and [a == b for a, b in zip(places(again), mine)] == [True, False, *[True] * 6]
    del again
    stream[0] = "b"
    assert not set(places(plans.next(1))) & set(mine)  # of another stream
    stream[0] = None
    captured = plans.next(1)
    stream[0] = "a"
    alive = [plans.next(1) for _ in range(3 * CACHED_PLANS)] + [captured]
    assert len({place for plan in alive for place in places(plan)}) == len(alive) * len(names)
    with torch.inference_mode():
        inference = plans.next(1).counts
    assert not inference.is_inference()


def test_copies_of_plans():
    """An owner of a handle holds the plan, or has its own tensors."""
    names = [f.name for f in fields(ReceivedRows)][1:]
    plans = Plans(ReceivedRows, {name: ((4,), torch.int32) for name in names}, torch.device("cpu"), lambda: "a")
    for duplicate in (copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))):
        plan = plans.next(3)
        for name in names:
            getattr(plan, name).fill_(7)
        other = duplicate(plan)
        del plan
        for _ in range(2 * CACHED_PLANS):
            for tensor in plans.next(5).arguments:
                tensor.fill_(1)
        assert isinstance(other, ReceivedRows) and other.tokens == 3
        assert all(bool((getattr(other, name) == 7).all()) for name in names), duplicate
        assert len(other.arguments) == len(names)


@pytest.mark.parametrize("in_order", [False, True])
def test_order_of_streams(in_order):
    stream, seen = DeferredStream(in_order), []
    with stream.on_side(()) as first:
        stream.launch(seen.append, "first half")
    stream.launch(seen.append, "whole call")
    assert seen == (["first half", "whole call"] if in_order else ["whole call"])
    stream.wait(first)
    assert sorted(seen) == ["first half", "whole call"]


def test_launches_take_the_other_arguments():
    class Twice:
        name, parameters = "twice", ("a", "b", "c")
        launcher = staticmethod(lambda world: lambda *args: seen.append(args))

    seen: list = []
    Launch(Twice, {"b": 2, "other": 3}, ("c", "a"), None)(30, 10)
    assert seen == [(10, 2, 30)]
    for wrong in (("a",), ("a", "c", "d"), ("a", "b", "c"), ("a", "a", "c")):
        with pytest.raises(TypeError, match="takes a, c"):
            Launch(Twice, {"b": 2}, wrong, None)
