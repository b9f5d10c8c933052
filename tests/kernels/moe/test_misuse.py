"""Wrong arguments and ranks that disagree: errors that name the argument, on every rank, before anything is sent."""

import random
import unittest.mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe.support import FP8, make_inputs, run_round
from tests.variants import nightly, variants
from tilescale_net.kernels.moe import AllToAll, Tuning

SHAPE = dict(num_experts=4, max_tokens=4, hidden=32, top_k=2)


def raises(kind, *words):
    """`pytest.raises` that wants all of `words` in the message."""
    pattern = "".join(f"(?=.*{w})" for w in words)
    return pytest.raises(kind, match=f"(?s){pattern}")


def fake(tensor: torch.Tensor) -> torch.Tensor:
    """The stand-in that torch uses where it asks for shapes alone."""
    return FakeTensorMode().from_tensor(tensor)


def _arguments(device):
    x = torch.ones((3, 32), dtype=torch.bfloat16, device=device)
    idx = torch.tensor([[0, 1], [2, 3], [1, 2]], device=device)
    return x, idx, torch.ones((3, 2), device=device)


def _one_is_wrong(op, inputs: tuple, mistakes: list) -> None:
    """Each call is made wrongly by rank 1 alone, whole or in halves: rank 0's fails with it, and the calls after it are right."""
    for turn, (argument, kind, word, wrong, right) in enumerate(mistakes):
        received = op.dispatch(*inputs)
        torch.set_default_dtype(torch.float64)  # which stand-ins of a rejected call do not take
        if tsn.rank() == 1:
            with raises(kind, "rank 1", argument, word):
                wrong(received)
                op.check()  # a GPU finds out about the contents of tensors when the kernel runs
        else:
            with raises(ValueError, "rank 1" if word else "rank 1 was called with a wrong", argument):
                right(received)
                op.check()
        torch.set_default_dtype(torch.float32)
        everyone = [make_inputs((turn, r), op.config, 3, "random") for r in range(2)]
        run_round(op, everyone, random.Random(turn + tsn.rank()), f"after rank 1's wrong {argument}: {word}")


def _wrong_combines(op, x, weights) -> list:
    """Calls that nothing announces."""
    out = torch.empty((2, 32), dtype=torch.bfloat16, device=tsn.device())
    elsewhere = torch.empty(op.empty_output().shape, dtype=torch.bfloat16, device=tsn.device())

    def whole(r):
        op.combine(r.x, r.handle)

    def halves(r):
        op.combine_recv(op.combine_send(r.x, r.handle))

    def values(r):
        op.combine_values(r.x, r.row_weight, r.handle)

    def again(r):
        op.dispatch(x, handle=r.handle)

    mistakes = [
        ("y", TypeError, "", lambda r: op.combine(r.x.float(), r.handle), whole),
        ("y", TypeError, "", lambda r: op.combine(fake(r.x), r.handle), whole),
        ("out", ValueError, "", lambda r: op.combine(r.x, r.handle, out=out), halves),
        ("y", ValueError, "", lambda r: op.combine_send(r.x[:1], r.handle), whole),
        ("bias", TypeError, "", lambda r: op.combine(r.x, r.handle, bias=None), whole),
        ("weight", TypeError, "", lambda r: op.combine(r.x, r.handle, weighted=weights), whole),
        ("values", TypeError, "", lambda r: op.combine_values(r.x, None, r.handle), values),
        ("x", ValueError, "", lambda r: op.dispatch(x[:2], handle=r.handle), again),
        ("out", tsn.HeapError, "", lambda r: op.dispatch(x, handle=r.handle, out=elsewhere), again),
    ]
    if op.config.mode == "throughput":
        return mistakes

    def weighted(r, rows):
        op.combine(rows, r.handle, weights=weights.float())

    return [*mistakes[:6], ("y", TypeError, "", lambda r: weighted(r, r.x.float()), lambda r: weighted(r, r.x))]


@variants(1, "mode", ["throughput", "latency"])
@ranks.on()
def test_wrong_calls(mode):
    op = AllToAll(**SHAPE, mode=mode)
    # Of another configuration; in throughput mode one with most of the same kernels, which take long to compile.
    other = AllToAll(**(dict(SHAPE, alignment=2) if mode == "throughput" else dict(SHAPE, top_k=1)), mode=mode)
    device = tsn.device()
    x, idx, weights = _arguments(device)
    mistakes = [
        ("topk_idx", ValueError, "expert 4", (x, torch.where(idx == 3, 4, idx), weights)),
        ("topk_idx", ValueError, "expert -2", (x, torch.where(idx == 3, -2, idx), weights)),
        ("topk_idx", TypeError, "int16", (x, idx.to(torch.int16), weights)),
        ("topk_idx", ValueError, "shape", (x, idx[:2], weights)),
        ("topk_weights", TypeError, "int64", (x, idx, weights.long())),
        ("topk_weights", ValueError, "strides", (x, idx, weights.t().contiguous().t())),
        ("x", ValueError, "max_tokens is 4", (x.repeat(2, 1), idx.repeat(2, 1), weights.repeat(2, 1))),
        ("x", TypeError, "float32", (x.float(), idx, weights)),
        ("x", ValueError, "resolve_neg", (torch._neg_view(x), idx, weights)),
        ("x", ValueError, "shape", (x[:, :16].contiguous(), idx, weights)),
        ("x", TypeError, "tensor", ("rows", idx, weights)),
        ("x", TypeError, "FakeTensor", (fake(x), idx, weights)),
        ("topk_idx", TypeError, "FakeTensor", (x, fake(idx), weights)),
    ]
    right = x, idx, weights
    calls = [(*m, lambda r, wrong=wrong: op.dispatch(*wrong), lambda r: op.dispatch(*right)) for *m, wrong in mistakes]
    local = torch.zeros(2, dtype=torch.int32, device=device)
    wrong_totals = [("int64", local.long()), ("shape", local[:1])] if mode == "latency" else [("latency mode", local)]
    for word, totals in wrong_totals:
        kind = ValueError if word == "shape" else TypeError
        calls.append(
            ("totals", kind, word, lambda r, t=totals: op.dispatch(*right, totals=t), lambda r: op.dispatch(*right))
        )
    _one_is_wrong(op, right, calls)
    received = op.dispatch(x, idx, weights)
    with raises(TypeError, "y", "float32"):
        op.combine(received.x.float(), received.handle)
    with raises(ValueError, "y", "shape"):
        op.combine(received.x[:1], received.handle)
    with raises(ValueError, "handle", "another configuration"):
        other.combine(received.x, received.handle)
    with raises(TypeError, "handle"):
        op.combine(received.x, None)
    with raises(ValueError, "out", "shape"):
        op.combine(received.x, received.handle, out=torch.empty((2, 32), dtype=torch.bfloat16, device=device))
    op.combine(received.x, received.handle)
    op.combine(received.x, received.handle)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        narrow = weights.to(dtype)
        rounds = [op.dispatch(x, idx, kind) for kind in (narrow, narrow.float())]
        found, wanted = (op.combine(r.x.clone(), r.handle).clone() for r in rounds)
        assert torch.equal(found, wanted), dtype

    _one_is_wrong(op, right, _wrong_combines(op, x, weights))
    pending = op.dispatch_send(x, idx, weights)
    with raises(ValueError, "dispatch", "not been received"):
        op.dispatch_send(x, idx, weights)
    with raises(ValueError, "not the combine"):
        op.combine_recv(pending)
    twin = AllToAll(**SHAPE, mode=mode)  # takes handles of the other one
    with raises(ValueError, "handle", "not been received"):
        twin.combine(received.x, pending.handle)
    twin.free()
    op.dispatch_recv(pending)
    with raises(ValueError, "not the dispatch"):
        op.dispatch_recv(pending)
    if mode == "throughput":
        with raises(TypeError, "either", "handle"):
            op.dispatch(x)
        with raises(ValueError, "x", "2 tokens", "3"):
            op.dispatch(x[:2], handle=received.handle)
        with raises(tsn.HeapError, "out", "symmetric"):
            op.dispatch(x, handle=received.handle, out=torch.empty_like(received.x))
    else:
        with raises(TypeError, "topk_idx"):
            op.dispatch(x, handle=received.handle)
    op.free()
    with raises(tsn.TileScaleError, "free"):
        op.dispatch(x, idx, weights)


@variants(1, "mode, call", [("throughput", "combine"), ("throughput", "dispatch"), ("latency", "combine")])
@ranks.fails("RankMismatch", "rejected: its handle is invalid", timeout=120)
def test_a_wrong_handle_of_one_rank(mode, call):
    """Rank 1 cannot take part in a call whose handle it does not have; it alone knows why, and the other learns of it."""
    op = AllToAll(**SHAPE, mode=mode)
    x, idx, weights = _arguments(tsn.device())
    received = op.dispatch(x, idx, weights)
    if tsn.rank() == 1:
        with raises(TypeError, "rank 1", "handle"):
            op.combine(received.x, {}) if call == "combine" else op.dispatch(x, handle={})
        tsn.barrier()
    else:
        op.combine(received.x, received.handle) if call == "combine" else op.dispatch(x, handle=received.handle)
        op.check()


@ranks.on()
def test_no_room():
    """A dispatch that does not fit on one rank is rejected on all, and only it."""
    op = AllToAll(**SHAPE, capacity=12)
    x, idx, weights = _arguments(tsn.device())
    crowd = torch.tensor([[2, 3]] * 4, device=tsn.device())
    four = torch.ones((4, 32), dtype=torch.bfloat16, device=tsn.device())
    for _ in range(2):
        with raises(tsn.HeapError, "rank 1", "16 rows", "capacity is 12"):
            op.dispatch(four, crowd, torch.ones((4, 2), device=tsn.device()))
            op.check()
        pending = op.dispatch_send(four, crowd)
        with raises(tsn.HeapError, "capacity is 12"):
            op.dispatch_recv(pending)
            op.check()
        assert pending.result.rejected.item() != 0
        received = op.dispatch(x, idx, weights)
        op.check()
        assert received.rejected.item() == 0


@ranks.on()
def test_ranks_that_disagree():
    for field, values in (
        ("hidden", [32, 64]), ("top_k", [2, 1]), ("alignment", [1, 8]), ("mode", ["latency", "throughput"])
    ):  # fmt: skip
        with raises(tsn.RankMismatch, f"{field}={values[0]}", f"{field}={values[1]}"):
            AllToAll(**SHAPE | {field: values[tsn.rank()]})


WRONG = [
    (dict(num_experts=3), ValueError, "num_experts", "multiple"),
    (dict(num_experts=0), ValueError, "num_experts", "0"),
    (dict(top_k=5), ValueError, "top_k is 5", "num_experts, 4"),
    (dict(max_tokens=2.5), ValueError, "max_tokens", "2.5"),
    *((dict([(name, "4")]), ValueError, f"{name} is '4'; it must be a positive integer") for name in SHAPE),
    (dict(tuning="fast"), TypeError, "tuning must be a Tuning, not str"),
    (dict(hidden=33), ValueError, "hidden", "16 bytes"),
    (dict(quantize_combine="never"), ValueError, "quantize_combine", "never"),
    (dict(hidden=24, dtype=FP8), ValueError, "hidden", "24 bytes of dtype"),
    (dict(dtype=torch.int8), TypeError, "dtype", "int8"),
    (dict(combine_dtype=FP8), TypeError, "combine_dtype", "float8"),
    (dict(mode="fast"), ValueError, "mode", "fast"),
    (dict(layout="token"), ValueError, "layout", "token"),
    (dict(mode="latency", max_tokens=1025), ValueError, "max_tokens", "1025"),
    (dict(scale_words=1), ValueError, "scale_words", "1", "not given for others"),
    (dict(dtype=FP8, scale_words=0), ValueError, "scale_words", "0"),
    (dict(mode="latency", layout="rank"), ValueError, "layout", "throughput"),
    (dict(alignment=0), ValueError, "alignment", "0"),
    (dict(tuning=Tuning(blocks=1)), ValueError, "blocks", "1"),
    (dict(tuning=Tuning(blocks=4, combine_senders=4)), ValueError, "combine_senders", "4"),
    (dict(tuning=Tuning(threads=48)), ValueError, "threads", "48"),
    (dict(tuning=Tuning(combine_threads=16)), ValueError, "combine_threads", "16"),
    (dict(tuning=Tuning(combine_threads=48)), ValueError, "combine_threads", "48"),
    (dict(tuning=Tuning(chunk=2.5)), ValueError, "chunk", "2.5"),
    (dict(max_tokens=1 << 17, tuning=Tuning(blocks=4)), ValueError, "max_tokens", "4 blocks", "at most", "more blocks"),
    (dict(active=[True]), ValueError, "active", "1 entries"),
    (dict(active=[False, False]), ValueError, "active", "rank"),
]


@ranks.on(heap="128M")  # on GPUs the defaults have more blocks, and more counters
def test_wrong_constructions():
    for options, kind, *words in WRONG:
        with raises(kind, *words):
            AllToAll(**{**SHAPE, **options}, warm_up=False)
    # As on GPUs that NVLink connects.
    with unittest.mock.patch.object(tsn.world(), "device_kind", "cuda"):
        for layout, took in (("rank", "507"), ("expert", "990")):
            with raises(ValueError, "quantize_combine", layout, took, "always"):
                AllToAll(**SHAPE, layout=layout, quantize_combine=True)


@variants(0, "top_k, choices", [nightly(2, [[0, 0]] * 3 + [[1, -1]]), (4, [[0, 1, 2, 0]] * 4)])
@ranks.on()
def test_crowded_expert(top_k, choices):
    """Rank 1 names an expert more often than there is room for: all ranks learn of it, nothing runs out of bounds."""
    op = AllToAll(4, 4, 32, top_k, mode="latency")
    device, rank = tsn.device(), tsn.rank()
    x = torch.ones((4, 32), dtype=torch.bfloat16, device=device)
    wrong = torch.tensor(choices, device=device)
    right = torch.tensor([[e % 4 for e in range(top_k)]] * 4, device=device)
    for turn in range(2):
        with raises(ValueError, "rank 1", "expert 0 more often than max_tokens"):
            op.dispatch(x, wrong if rank == 1 else right, torch.ones(4, top_k, device=device))
            op.check()
        pending = op.dispatch_send(x, wrong if rank == 1 else right)
        with raises(ValueError, "rank 1", "expert 0 more often than max_tokens"):
            op.dispatch_recv(pending)
            op.check()
        assert int(pending.result.counts.max()) <= 8, pending.result.counts
        everyone = [make_inputs((turn, r), op.config, 4, "masked") for r in range(2)]
        run_round(op, everyone, random.Random(0), "after a crowd")
