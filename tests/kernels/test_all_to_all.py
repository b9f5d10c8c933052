"""all-to-all against plain torch: equal and uneven splits, zero rows, misalignment, repeated calls, wrong splits."""

import random

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.support import Guarded, assert_same, random_tensor, rejected, unsettle
from tests.variants import nightly, variants
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
# Through other memory, see test_all_gather.py.
THROUGH = [(1008, (), torch.float32, 0, 0), (3, (700, 8), torch.bfloat16, 0, 16), (1, (20_001,), torch.float16, 0, 6)]


def _equal(seed, cases, options, calls=2, through=False):
    rank, n = tsn.rank(), tsn.size()
    pace = random.Random(f"{seed} {rank}")
    op = AllToAll(**options)
    for number, (rows, row, dtype, x_offset, out_offset) in enumerate(cases):
        shape = (n * rows, *row)
        x, out, between = (Guarded(shape, dtype, offset) for offset in (x_offset, out_offset, 0))
        for call in range(calls):
            data = [random_tensor(shape, dtype, seed, number, call, p) for p in range(n)]
            x.tensor.copy_(data[rank])
            unsettle(pace)
            op(out.tensor, x.tensor, **({"through": between.tensor} if through and call != 2 else {}))
            x.tensor.copy_(random_tensor(shape, dtype, seed, "later"))
            tsn.synchronize()
            expected = torch.cat([d[rank * rows : (rank + 1) * rows] for d in data])
            assert_same(out.tensor, expected, f"seed {seed}, case {number}, call {call}, rank {rank}")
        for tensor in (x, out, between):
            tensor.check()
            tensor.free()


@variants(2, "size, visibility", [(1, "eager"), (2, "random"), (3, "late"), nightly(4, "random")])
@ranks.on()
def test_equal_splits(size, visibility, seed):
    _equal(seed, EQUAL, dict(threads=64, blocks=3))


@variants(2, "size, visibility, races", [(1, "eager", 0), (2, "late", 1), (3, "random", 0), nightly(4, "late", 1)])
@ranks.on()
def test_through_other_memory(size, visibility, races, seed):
    stores_from = 1 << 40 if tsn.rank() == 2 else 16
    _equal(seed, THROUGH, dict(threads=64, blocks=3, stores_from=stores_from), calls=4, through=True)


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
        label = f"seed {seed}, call {call}, rank {rank}, splits {splits}"
        assert_same(out, expected, label)
        assert_same(out_heap.tensor[sum(receives) :], before[sum(receives) :], label + ", rows behind out")
    x_heap.check()
    out_heap.check()


@variants(1, "size, visibility", [(2, "random"), (3, "late"), nightly(4, "eager")])
@ranks.on()
def test_uneven_splits(size, visibility, seed):
    for row, dtype in (((3,), torch.bfloat16), ((), torch.float32), ((129,), torch.uint8)):
        _uneven(seed, 8, dict(threads=32, blocks=2), row, dtype, dtype == torch.bfloat16)


@ranks.on()
def test_hundreds_of_mixed_calls(seed):
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


@ranks.on()
def test_misuse_is_named():
    op, x, out = AllToAll(threads=32, blocks=1), tsn.zeros((6, 4), torch.float32), tsn.zeros((6, 4), torch.float32)
    split = torch.tensor([3, 3], dtype=torch.int64, device=tsn.device())
    large = torch.zeros((1 << 18, 2), device=tsn.device())  # more than travels in packets
    rejected(
        (lambda: op(out[:5], x[:5]), ValueError, "multiple of the 2 PEs", "[5, 4]"),
        (lambda: op(out.view(8, 3), x), ValueError, "[8, 3]", "[6, 4]"),
        (lambda: op(out, x, [3, 3]), ValueError, "input_splits", "together"),
        (lambda: op(out, x, [3, 3], [3, 2]), ValueError, "input_splits", "[3, 2]", "5 rows", "6"),
        (lambda: op(out, x, [7, -1], [3, 3]), ValueError, "output_splits", "negative"),
        (lambda: op(out, x, [2, 2, 2], [3, 3]), ValueError, "output_splits", "3 numbers"),
        (lambda: op(out, x, split.int(), split), TypeError, "output_splits", "int32", "int64"),
        (lambda: op(out, out), ValueError, "overlap"),
        (lambda: op(out[0, 0], x[0, 0]), ValueError, "rows of one shape"),
        (lambda: op(large.clone(), large), tsn.HeapError, "out", "symmetric"),
        (lambda: op(x.new_zeros(6, 4), x, [3, 3], [3, 3]), tsn.HeapError, "out", "symmetric"),
        (lambda: op(*[(out, x), (out.clone(), x)][tsn.rank()]), tsn.RankMismatch, "heap offset", "outside of the heap"),
    )


@ranks.on()
def test_splits_that_differ_between_ranks():
    """Rank 0 sends 2 rows to rank 1, which expects 3; everything else fits, and moves."""
    rank = tsn.rank()
    op = AllToAll(threads=32, blocks=2)
    x, out = tsn.empty((5, 4), torch.float32), tsn.zeros((6, 4), torch.float32)
    x.fill_(rank + 1)
    sends = ([1, 2], [4, 1])[rank]
    receives = ([1, 4], [3, 1])[rank]
    text = ("0 sends 2 rows to rank 1, which expects 3", "1 expects 3 rows from rank 0, which sends 2")[rank]
    with pytest.raises(tsn.RankMismatch, match=f"rank {text}"):
        op(out[: sum(receives)], x[: sum(sends)], receives, sends)
        op.check()
    assert out[:, 0].tolist() == ([1, 2, 2, 2, 2, 0], [0, 0, 0, 2, 0, 0])[rank], "agreed rows arrive, others do not"
    op(out[:4], x[:4])  # the object still works
    tsn.synchronize()
    assert out[:4, 0].tolist() == [1, 1, 2, 2]


@ranks.on()
def test_wrong_splits_in_device_memory():
    """They do not add up, which the kernel finds; no rank sends, and none hangs."""
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
    with pytest.raises(ValueError if rank else tsn.RankMismatch, match="6" if rank else "(?=.*do not add up).*rank 1"):
        op._uneven_checked()
    assert out.sum().item() == (0 if rank else 2 * 4 * 7), "only rank 0's own rows moved"
