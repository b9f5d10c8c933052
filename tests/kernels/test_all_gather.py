"""all-gather against plain torch: shapes, dtypes, misalignment, repeated calls, unsettlers, schedules."""

import os
import random
import time

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.declared import NO_WAIT, WAIT_ARRIVED, WAIT_READY, Mutant
from tests.kernels.support import Guarded, assert_same, random_tensor, unsettle
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


def _gather(seed, cases, options, calls=2):
    rank, n = tsn.rank(), tsn.size()
    pace = random.Random(f"{seed} {rank}")
    op = AllGather(**options)
    for number, (shape, dtype, x_offset, out_offset) in enumerate(cases):
        x = Guarded(shape, dtype, x_offset)
        joined = (n * shape[0], *shape[1:]) if shape and number % 2 else (n, *shape)
        out = Guarded(joined, dtype, out_offset)
        for call in range(calls):
            data = [random_tensor(shape, dtype, seed, number, call, p) for p in range(n)]
            x.tensor.copy_(data[rank])
            unsettle(pace)
            assert op(out.tensor, x.tensor) is out.tensor
            x.tensor.copy_(random_tensor(shape, dtype, seed, "later"))  # the call is over with x
            expected = torch.stack(data).view(joined)
            tsn.synchronize()
            assert_same(out.tensor, expected, f"seed {seed}, case {number}, call {call}, rank {rank}")
        x.check(f"case {number}")
        out.check(f"case {number}")
        x.free()
        out.free()
    op.free()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.sample(2)
def test_equals_stacked_parts(size):
    ranks.run(size, _gather, random.randrange(1 << 30), CASES, dict(threads=64, blocks=3))


@pytest.mark.parametrize("visibility", ["eager", "late", "random"])
@pytest.mark.sample(1)
def test_any_schedule(visibility):
    seed = random.randrange(1 << 30)
    env = {"TSN_SIM_SEED": str(seed), "TSN_SIM_VISIBILITY": visibility}
    ranks.run(3, _gather, seed, CASES[:6], dict(threads=32, blocks=2), 4, env=env)


def _in_place(seed):
    rank, n = tsn.rank(), tsn.size()
    op = AllGather(threads=64, blocks=2)
    out = Guarded((n, 20_000), torch.bfloat16)
    for call in range(4):
        data = torch.stack([random_tensor((20_000,), torch.bfloat16, seed, call, p) for p in range(n)])
        out.tensor[rank].copy_(data[rank])
        op(out.tensor, out.tensor[rank])
        tsn.synchronize()
        assert_same(out.tensor, data, f"seed {seed}, call {call}")
    out.check()


def test_in_place():
    ranks.run(3, _in_place, random.randrange(1 << 30))


def _many_calls(seed, calls):
    rank, n = tsn.rank(), tsn.size()
    pace = random.Random(f"{seed} {rank}")
    op = AllGather(threads=32, blocks=2)
    x, out = tsn.empty(64, torch.int64), tsn.empty((n, 64), torch.int64)
    ramp = torch.arange(64, device=tsn.device())
    for call in range(calls):
        x.copy_(ramp + 1_000_000 * call + 1_000 * rank)
        unsettle(pace, 0.02, 0.01)
        op(out, x)
        expected = ramp + 1_000_000 * call + 1_000 * torch.arange(n, device=tsn.device())[:, None]
        assert torch.equal(out, expected), (seed, call)


def test_thousand_calls_without_a_barrier():
    ranks.run(2, _many_calls, random.randrange(1 << 30), 1000)


def _two_of_them(seed):
    """Two objects, used in turn, do not disturb each other, and freed memory is used again."""
    for turn in range(3):
        a, b = AllGather(threads=32, blocks=1), AllGather(threads=64, blocks=2)
        x, out = tsn.zeros(100, torch.int32), tsn.zeros((tsn.size(), 100), torch.int32)
        for call in range(3):
            for op in (a, b):
                x.fill_(tsn.rank() + 10 * call + 100 * turn)
                op(out, x)
                tsn.synchronize()
                assert out[:, 0].tolist() == [p + 10 * call + 100 * turn for p in range(tsn.size())], seed
        for tensor in (x, out):
            tsn.free(tensor)
        a.free()
        b.free()


def test_objects_are_independent():
    ranks.run(2, _two_of_them, 0)


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


def _misuse(case):
    op = AllGather(threads=32, blocks=1)
    n = tsn.size()
    x, out = tsn.zeros(8, torch.float32), tsn.zeros((n, 8), torch.float32)
    calls = {
        "dtype": lambda: op(out, x.to(torch.float64)),
        "not symmetric": lambda: op(torch.zeros((n, 8), device=tsn.device()), x),
        "shape": lambda: op(out, x[:7]),
        "strides": lambda: op(out.t(), x),
        "negative": lambda: op(out, torch._neg_view(x)),
        "conjugate": lambda: op(tsn.zeros((n, 8), torch.complex64), torch.complex(x, x).conj()),
        "no tensor": lambda: op(out, [1.0] * 8),
        "overlap": lambda: op(out, out.view(-1)[4:12]),
        "device": lambda: op(out, x.to("meta")),
        "ranks differ": lambda: op(*_of(4 + tsn.rank())),
        "freed": lambda: (op.free(), op(out, x)),
        "threads": lambda: AllGather(threads=33),
        "blocks": lambda: AllGather(blocks=100_000),
        "geometry differs": lambda: AllGather(threads=32, blocks=1 + tsn.rank()),
    }
    calls[case]()


def _of(count):
    """Tensors whose sizes differ between ranks, which the heap itself would refuse: views of equal ones."""
    n = tsn.size()
    return tsn.zeros(n * 8, torch.float32)[: n * count].view(n, count), tsn.zeros(8, torch.float32)[:count]


@pytest.mark.parametrize(
    "case, error, words",
    [
        ("dtype", "TypeError", ["x", "float64", "float32"]),
        ("not symmetric", "HeapError", ["out", "symmetric"]),
        ("shape", "ValueError", ["out", "[2, 8]", "[2, 7]"]),
        ("strides", "ValueError", ["out", "contiguous"]),
        ("negative", "ValueError", ["x", "resolve_neg"]),
        ("conjugate", "ValueError", ["x", "resolve_conj"]),
        ("no tensor", "TypeError", ["x", "list"]),
        ("overlap", "ValueError", ["overlap"]),
        ("device", "ValueError", ["x", "meta"]),
        ("ranks differ", "RankMismatch", ["[4]", "[5]"]),
        ("freed", "TileScaleError", ["free"]),
        ("threads", "ValueError", ["threads", "33"]),
        ("blocks", "ValueError", ["blocks", "100000"]),
        ("geometry differs", "RankMismatch", ["blocks=1", "blocks=2"]),
    ],
)
def test_misuse_is_named(case, error, words):
    for outcome in ranks.launch(2, _misuse, case):
        assert outcome.error is not None and outcome.error[0] == error, outcome
        assert all(word in outcome.error[1] for word in words), outcome.error


SM_90 = {
    "tilescale_net.kernels.all_gather.all_gather": [
        dict(n_pes=4),
        dict(n_pes=8, in_place=True, engine="bulk", threads=128),
    ],
    "tilescale_net.kernels.all_gather.all_gather_mapped": [dict(n_pes=4), dict(n_pes=8, in_place=True)],
}


def short(seed, algorithm="puts"):
    cases = [((2_000,), torch.float32, 0, 0), ((300,), torch.float32, 4, 4)]
    _gather(seed, cases, dict(threads=32, blocks=2, algorithm=algorithm), 24)


def short_by_stores(seed):
    short(seed, "stores")


# A fence too few of kernels by stores shows in no data of the simulator, whose plain stores arrive at once.
MUTANTS = {
    "gather without wait for room": Mutant("exchange", "await_room", WAIT_READY, "short", NO_WAIT),
    "gather without wait for data": Mutant("exchange", "exchange", WAIT_ARRIVED, "short", nightly=True),
    "gather without fence": Mutant("exchange", "exchange", ", fence=True", "short", "", nightly=True),
    "gather without quiet": Mutant("exchange", "exchange", "N.quiet(thread)", "short", nightly=True),
    "gather that does not count its calls": Mutant("exchange", "exchange", "calls[block] = call", "short"),
    "stores without wait for room": Mutant(
        "exchange", "await_room", WAIT_READY, "short_by_stores", NO_WAIT, nightly=True
    ),
    "stores without wait for data": Mutant("exchange", "exchange_mapped", WAIT_ARRIVED, "short_by_stores"),
}
