"""all-to-all against plain torch: equal and uneven splits, zero rows, misalignment, repeated calls, wrong splits."""

import random

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.declared import WAIT_ARRIVED, Mutant
from tests.kernels.support import Guarded, assert_same, random_tensor, unsettle
from tilescale_net.kernels.all_to_all import AllToAll

# rows per PE, shape of a row, dtype, misalignment of x and of out in bytes
EQUAL = [
    (1, (), torch.uint8, 1, 2),
    (3, (5,), torch.bfloat16, 2, 0),
    (1, (20_001,), torch.float16, 0, 6),
    (16, (2, 3), torch.complex64, 8, 16),
    (1000, (9,), torch.float32, 4, 4),
    (0, (4,), torch.float32, 0, 0),
]


def _equal(seed, cases, options, calls=2):
    rank, n = tsn.rank(), tsn.size()
    pace = random.Random(f"{seed} {rank}")
    op = AllToAll(**options)
    for number, (rows, row, dtype, x_offset, out_offset) in enumerate(cases):
        shape = (n * rows, *row)
        x, out = Guarded(shape, dtype, x_offset), Guarded(shape, dtype, out_offset)
        for call in range(calls):
            data = [random_tensor(shape, dtype, seed, number, call, p) for p in range(n)]
            x.tensor.copy_(data[rank])
            unsettle(pace)
            op(out.tensor, x.tensor)
            x.tensor.copy_(random_tensor(shape, dtype, seed, "later"))
            tsn.synchronize()
            expected = torch.cat([d[rank * rows : (rank + 1) * rows] for d in data])
            assert_same(out.tensor, expected, f"seed {seed}, case {number}, call {call}, rank {rank}")
        x.check()
        out.check()
        x.free()
        out.free()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.sample(2)
def test_equal_splits(size):
    ranks.run(size, _equal, random.randrange(1 << 30), EQUAL, dict(threads=64, blocks=3))


def random_splits(pace: random.Random, n: int) -> list[list[int]]:
    """rows[src][dst]: uneven, some zero, now and then all to one or none at all."""
    kind = pace.randrange(6)
    if kind == 0:
        return [[pace.choice((0, 50)) if dst == 0 else 0 for dst in range(n)] for _ in range(n)]
    if kind == 1:
        return [[0] * n for _ in range(n)]
    if kind == 2:
        return [[pace.randrange(3) for _ in range(n)] for _ in range(n)]
    return [[pace.choice((0, 1, 7, pace.randrange(300))) for _ in range(n)] for _ in range(n)]


def _uneven(seed, calls, options, row, dtype, as_tensors):
    rank, n = tsn.rank(), tsn.size()
    pace, own = random.Random(seed), random.Random(f"{seed} {rank}")
    op = AllToAll(**options)
    room = 300 * n + 8
    x_heap, out_heap = (Guarded((room, *row), dtype, offset) for offset in (dtype.itemsize, 0))
    for call in range(calls):
        splits = random_splits(pace, n)
        sends, receives = splits[rank], [splits[src][rank] for src in range(n)]
        start = own.randrange(8)
        x = x_heap.tensor[start : start + sum(sends)]
        out = out_heap.tensor[: sum(receives)]
        data = [random_tensor((sum(splits[p]), *row), dtype, seed, call, p) for p in range(n)]
        before = random_tensor(out_heap.tensor.shape, dtype, seed, call, rank, "before")
        out_heap.tensor.copy_(before)
        x.copy_(data[rank])
        unsettle(own)
        if as_tensors:
            lists = [torch.tensor(s, dtype=torch.int64, device=tsn.device()) for s in (receives, sends)]
        else:
            lists = [receives, sends]
        assert op(out, x, *lists) is out
        x_heap.tensor.zero_()
        op.check()
        expected = torch.cat([d.split(splits[p])[rank] for p, d in enumerate(data)])
        what = f"seed {seed}, call {call}, rank {rank}, splits {splits}"
        assert_same(out, expected, what)
        assert_same(out_heap.tensor[sum(receives) :], before[sum(receives) :], what + ", rows behind out")
    x_heap.check()
    out_heap.check()


def _uneven_rows(seed):
    for row, dtype in (((3,), torch.bfloat16), ((), torch.float32), ((129,), torch.uint8)):
        _uneven(seed, 8, dict(threads=32, blocks=2), row, dtype, dtype == torch.bfloat16)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.sample(1)
def test_uneven_splits(size):
    ranks.run(size, _uneven_rows, random.randrange(1 << 30), timeout=240)


@pytest.mark.parametrize("visibility", ["eager", "late", "random"])
@pytest.mark.sample(1)
def test_any_schedule(visibility):
    seed = random.randrange(1 << 30)
    env = {"TSN_SIM_SEED": str(seed), "TSN_SIM_VISIBILITY": visibility}
    ranks.run(3, _uneven, seed, 10, dict(threads=32, blocks=3), (40,), torch.float32, False, env=env)


def _mixed(seed):
    """Equal and uneven calls in turn share signals; 300 of them without a barrier."""
    rank, n = tsn.rank(), tsn.size()
    pace, own = random.Random(seed), random.Random(f"{seed} {rank}")
    op = AllToAll(threads=32, blocks=2)
    x, out = tsn.empty(64 * n, torch.int32), tsn.empty(64 * n, torch.int32)
    for call in range(300):
        unsettle(own, 0.02, 0.01)
        if pace.random() < 0.5:
            x.copy_(torch.arange(64 * n) + 1000 * rank + 10_000 * call)
            op(out, x)
            mine = torch.arange(64 * rank, 64 * rank + 64)
            expected = torch.cat([mine + 1000 * p + 10_000 * call for p in range(n)])
            assert torch.equal(out.cpu(), expected.to(torch.int32)), (seed, call)
        else:
            splits = [[pace.randrange(64) for _ in range(n)] for _ in range(n)]
            receives = [splits[p][rank] for p in range(n)]
            x[: sum(splits[rank])] = 1000 * rank + call
            op(out[: sum(receives)], x[: sum(splits[rank])], receives, splits[rank])
            expected = [1000 * p + call for p in range(n) for _ in range(receives[p])]
            assert out[: sum(receives)].tolist() == expected, (seed, call)


def test_hundreds_of_mixed_calls():
    ranks.run(2, _mixed, random.randrange(1 << 30))


def _misuse(case):
    op = AllToAll(threads=32, blocks=1)
    rank, n = tsn.rank(), tsn.size()
    x, out = tsn.zeros((6, 4), torch.float32), tsn.zeros((6, 4), torch.float32)

    def tensor(*numbers):
        return torch.tensor(numbers, dtype=torch.int64, device=tsn.device())

    calls = {
        "rows": lambda: op(out[:5], x[:5]),
        "row shape": lambda: op(out.view(8, 3), x),
        "one split": lambda: op(out, x, [3, 3]),
        "sum": lambda: op(out, x, [3, 3], [3, 2]),
        "negative": lambda: op(out, x, [7, -1], [3, 3]),
        "length": lambda: op(out, x, [2, 2, 2], [3, 3]),
        "split dtype": lambda: op(out, x, tensor(3, 3).to(torch.int32), tensor(3, 3)),
        "overlap": lambda: op(out, out),
        "0 dim": lambda: op(out[0, 0], x[0, 0]),
        "not symmetric": lambda: op(torch.zeros((6, 4), device=tsn.device()), x),
    }
    calls[case]()


@pytest.mark.parametrize(
    "case, error, words",
    [
        ("rows", "ValueError", ["multiple of the 2 PEs", "[5, 4]"]),
        ("row shape", "ValueError", ["[8, 3]", "[6, 4]"]),
        ("one split", "ValueError", ["input_splits", "together"]),
        ("sum", "ValueError", ["input_splits", "[3, 2]", "5 rows", "6"]),
        ("negative", "ValueError", ["output_splits", "negative"]),
        ("length", "ValueError", ["output_splits", "3 numbers"]),
        ("split dtype", "TypeError", ["output_splits", "int32", "int64"]),
        ("overlap", "ValueError", ["overlap"]),
        ("0 dim", "ValueError", ["rows of one shape"]),
        ("not symmetric", "HeapError", ["out", "symmetric"]),
    ],
)
def test_misuse_is_named(case, error, words):
    for outcome in ranks.launch(2, _misuse, case):
        assert outcome.error is not None and outcome.error[0] == error, outcome
        assert all(word in outcome.error[1] for word in words), outcome.error


def _disagree():
    """Rank 0 sends 2 rows to rank 1, which expects 3; everything else fits, and moves."""
    rank = tsn.rank()
    op = AllToAll(threads=32, blocks=2)
    x, out = tsn.empty((5, 4), torch.float32), tsn.zeros((6, 4), torch.float32)
    x.fill_(rank + 1)
    sends = ([1, 2], [4, 1])[rank]
    receives = ([1, 4], [3, 1])[rank]
    message = None
    try:
        op(out[: sum(receives)], x[: sum(sends)], receives, sends)
        op.check()
    except tsn.RankMismatch as error:
        message = str(error)
    moved = out[:, 0].tolist()
    op(out[:4], x[:4])  # the object still works
    tsn.synchronize()
    return message, moved, out[:4, 0].tolist()


def test_splits_that_differ_between_ranks():
    (first, moved, after), (second, moved_1, after_1) = ranks.run(2, _disagree)
    assert "rank 0 sends 2 rows to rank 1, which expects 3" in first
    assert "rank 1 expects 3 rows from rank 0, which sends 2" in second
    assert moved == [1, 2, 2, 2, 2, 0] and moved_1 == [0, 0, 0, 2, 0, 0], "agreed rows arrive, others do not"
    assert after == after_1 == [1, 1, 2, 2]


def _wrong_in_device_memory():
    """Splits in tensors that do not add up are found by the kernel; no rank sends, and none hangs."""

    rank, n = tsn.rank(), tsn.size()
    op = AllToAll(threads=32, blocks=1)
    x, out = tsn.zeros((4, 4), torch.float32), tsn.zeros((4, 4), torch.float32)
    x.fill_(7)
    sends = torch.tensor([2, 2] if rank == 0 else [3, 3], dtype=torch.int64, device=tsn.device())
    receives = torch.tensor([2, 2], dtype=torch.int64, device=tsn.device())
    # The class looks at splits that are on the CPU, as they are under the simulator, before the kernel can.
    op._uneven_checked = op.check
    op.check = lambda: None
    op._uneven(out, x, receives, sends)
    tsn.synchronize()
    try:
        op._uneven_checked()
    except (ValueError, tsn.RankMismatch) as error:
        return type(error).__name__, str(error), out.sum().item()


def test_wrong_splits_in_device_memory():
    first, second = ranks.run(2, _wrong_in_device_memory)
    assert first[0] == "RankMismatch" and "do not add up" in first[1] and "rank 1" in first[1]
    assert second[0] == "ValueError" and "6" in second[1]
    assert first[2] == 2 * 4 * 7 and second[2] == 0, "only rank 0's own rows moved"


SM_90 = {
    "tilescale_net.kernels.all_to_all.all_to_all": [dict(n_pes=4), dict(n_pes=8, engine="bulk", threads=128)],
    "tilescale_net.kernels.all_to_all.all_to_all_mapped": [dict(n_pes=4)],
    "tilescale_net.kernels.all_to_all.all_to_all_uneven": [dict(n_pes=4)],
}


def short(seed):
    cases = [(2_000, (), torch.float32, 0, 0), (300, (), torch.float32, 4, 4)]
    _equal(seed, cases, dict(threads=32, blocks=2, algorithm="puts"), 24)


def short_uneven(seed):
    _uneven(seed, 24, dict(threads=32, blocks=2), (40,), torch.float32, False)


UNEVEN = ("all_to_all", "all_to_all_uneven")
MUTANTS = {
    "all-to-all without wait for data": Mutant("exchange", "exchange", WAIT_ARRIVED, "short"),
    "uneven without wait for data": Mutant(*UNEVEN, WAIT_ARRIVED, "short_uneven", nightly=True),
    "uneven without fence": Mutant(*UNEVEN, ", fence=True", "short_uneven", ""),
    "uneven without quiet": Mutant(*UNEVEN, "N.quiet(thread)", "short_uneven"),
}
