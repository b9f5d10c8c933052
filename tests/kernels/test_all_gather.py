"""all-gather against plain torch: shapes, dtypes, misalignment, repeated calls, unsettlers, schedules."""

import os
import random
import time

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.support import Guarded, assert_same, random_tensor, rejected, unsettle
from tests.variants import nightly, variants
from tilescale_net.kernels.all_gather import AllGather

# shape of a part, dtype, misalignment of x and of out in bytes
CASES = [
    ((1,), torch.uint8, 0, 0),
    ((7,), torch.bfloat16, 2, 6),
    ((), torch.float32, 0, 4),
    ((1000,), torch.float32, 4, 12),
    ((3, 5, 7), torch.int64, 8, 0),
    ((33, 65), torch.float16, 0, 0),
    ((129,), torch.bool, 1, 3),
    ((17,), torch.complex64, 8, 8),
    ((40_000,), torch.float8_e4m3fn, 1, 0),
    ((12_345,), torch.bfloat16, 0, 2),
    ((0, 4), torch.float32, 0, 0),
]
# Through other memory: by stores, by stores where `out` begins elsewhere, by puts and a copy, and in packets.
THROUGH = [
    ((1008,), torch.float32, 0, 0),
    ((40_000,), torch.float8_e4m3fn, 0, 16),
    ((12_345,), torch.bfloat16, 0, 2),
    ((33, 64), torch.float16, 4, 0),
    ((3, 4), torch.float32, 0, 0),
]


def _gather(seed, cases, options, calls=2, through=False):
    rank, n = tsn.rank(), tsn.size()
    pace = random.Random(f"{seed} {rank}")
    op = AllGather(**options)
    for number, (shape, dtype, x_offset, out_offset) in enumerate(cases):
        x = Guarded(shape, dtype, x_offset)
        joined = (n * shape[0], *shape[1:]) if shape and number % 2 else (n, *shape)
        out = Guarded(joined, dtype, out_offset)
        between = Guarded(joined, dtype)
        for call in range(calls):
            data = [random_tensor(shape, dtype, seed, number, call, p) for p in range(n)]
            x.tensor.copy_(data[rank])
            unsettle(pace)
            way = {"through": between.tensor} if through and call != 2 else {}
            assert op(out.tensor, x.tensor, **way) is out.tensor
            x.tensor.copy_(random_tensor(shape, dtype, seed, "later"))  # the call is over with x
            expected = torch.stack(data).view(joined)
            tsn.synchronize()
            assert_same(out.tensor, expected, f"seed {seed}, case {number}, call {call}, rank {rank}")
        x.check(f"case {number}")
        out.check(f"case {number}")
        between.check(f"case {number}")
        for tensor in (x, out, between):
            tensor.free()
    op.free()


@variants(2, "size, visibility", [(1, "eager"), (2, "random"), (3, "late"), nightly(4, "random")])
@ranks.on()
def test_equals_stacked_parts(size, visibility, seed):
    _gather(seed, CASES, dict(threads=64, blocks=3))


# Also where some ranks choose puts, and between calls without other memory.
@variants(2, "size, visibility, races", [(1, "eager", 0), (2, "late", 1), (3, "random", 0), nightly(4, "late", 1)])
@ranks.on()
def test_through_other_memory(size, visibility, races, seed):
    stores_from = 1 << 40 if tsn.rank() == 2 else 16
    _gather(seed, THROUGH, dict(threads=64, blocks=3, stores_from=stores_from), calls=4, through=True)


# By stores also where some ranks choose puts.
@pytest.mark.parametrize("stores", [False, True])
@ranks.on(3)
def test_in_place(stores, seed):
    rank, n = tsn.rank(), tsn.size()
    op = AllGather(threads=64, blocks=3, stores_from=16 if stores and rank != 2 else 1 << 40)
    out = Guarded((n, 20_000), torch.bfloat16)
    for call in range(4):
        data = torch.stack([random_tensor((20_000,), torch.bfloat16, seed, call, p) for p in range(n)])
        out.tensor[rank].copy_(data[rank])
        op(out.tensor, out.tensor[rank])
        tsn.synchronize()
        assert_same(out.tensor, data, f"seed {seed}, call {call}")
        tsn.barrier()
    out.check()


@ranks.on()
def test_thousand_calls_without_a_barrier(seed):
    rank, n = tsn.rank(), tsn.size()
    pace = random.Random(f"{seed} {rank}")
    op = AllGather(threads=32, blocks=2)
    x, out = tsn.empty(64, torch.int64), tsn.empty((n, 64), torch.int64)
    ramp = torch.arange(64, device=tsn.device())
    for call in range(1000):
        x.copy_(ramp + 1_000_000 * call + 1_000 * rank)
        unsettle(pace, 0.02, 0.01)
        op(out, x)
        expected = ramp + 1_000_000 * call + 1_000 * torch.arange(n, device=tsn.device())[:, None]
        assert torch.equal(out, expected), (seed, call)


@ranks.on()
def test_objects_are_independent():
    """Two objects, used in turn, do not disturb each other, and freed memory is used again."""
    for turn in range(3):
        a, b = AllGather(threads=32, blocks=1), AllGather(threads=64, blocks=2)
        x, out = tsn.zeros(100, torch.int32), tsn.zeros((tsn.size(), 100), torch.int32)
        for call in range(3):
            for op in (a, b):
                x.fill_(tsn.rank() + 10 * call + 100 * turn)
                op(out, x)
                tsn.synchronize()
                assert out[:, 0].tolist() == [p + 10 * call + 100 * turn for p in range(tsn.size())]
        for thing in (a, b):
            thing.free()
        for tensor in (x, out):
            tsn.free(tensor)


def _die_in_the_middle():
    op = AllGather(threads=32, blocks=1)
    x, out = tsn.zeros(1000), tsn.zeros((tsn.size(), 1000))
    for call in range(5):
        if call == 3 and tsn.rank() == 1:
            os._exit(7)
        op(out, x)
        tsn.synchronize()


def test_the_death_of_a_rank_ends_the_others():
    start = time.monotonic()
    first, second, third = ranks.launch(3, _die_in_the_middle, env={"TSN_TIMEOUT": "20"})
    assert second.exitcode == 7
    for outcome in (first, third):
        assert outcome.error is not None and outcome.error[0] == "PeerLost", outcome
        assert "rank 1" in outcome.error[1]
    assert time.monotonic() - start < 30


@ranks.on()
def test_misuse_is_named():
    op, n = AllGather(threads=32, blocks=1), tsn.size()
    x, out = tsn.zeros(8, torch.float32), tsn.zeros((n, 8), torch.float32)
    # Sizes that differ between ranks, which the heap itself would refuse: views of equal ones.
    count = 4 + tsn.rank()
    large = torch.zeros(1 << 18, device=tsn.device())  # more than travels in packets
    few = tsn.zeros(n * 8, torch.float32)[: n * count].view(n, count), tsn.zeros(8, torch.float32)[:count]
    rejected(
        (lambda: op(out, x.to(torch.float64)), TypeError, "x", "float64", "float32"),
        (lambda: op(large.new_zeros(n, len(large)), large), tsn.HeapError, "out", "symmetric"),
        (lambda: op(*[(out, x), (out.clone(), x)][tsn.rank()]), tsn.RankMismatch, "heap offset", "outside of the heap"),
        (lambda: op(out, x[:7]), ValueError, "out", "[2, 8]", "[2, 7]"),
        (lambda: op(out.clone(), x, through=out.clone()), tsn.HeapError, "through", "symmetric"),
        (lambda: op(out.clone(), x, through=out.view(-1)), ValueError, "through", "[16]", "[2, 8]"),
        (lambda: op(out, x, through=out), ValueError, "through and out overlap"),
        (lambda: op(out.t(), x), ValueError, "out", "contiguous"),
        (lambda: op(out, torch._neg_view(x)), ValueError, "x", "resolve_neg"),
        (lambda: op(tsn.zeros((n, 8), torch.complex64), torch.complex(x, x).conj()), ValueError, "x", "resolve_conj"),
        (lambda: op(out, [1.0] * 8), TypeError, "x", "list"),
        (lambda: op(out, out.view(-1)[4:12]), ValueError, "overlap"),
        (lambda: op(out, x.to("meta")), ValueError, "x", "meta"),
        (lambda: op(*few), tsn.RankMismatch, "[4]", "[5]"),
        (lambda: AllGather(threads=33), ValueError, "threads", "33"),
        (lambda: AllGather(blocks=100_000), ValueError, "blocks", "100000"),
        (lambda: AllGather(threads=32, blocks=1 + tsn.rank()), tsn.RankMismatch, "blocks=1", "blocks=2"),
        (lambda: (op.free(), op(out, x)), tsn.TileScaleError, "free"),
    )
