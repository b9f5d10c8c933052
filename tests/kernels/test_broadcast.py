"""Broadcast and the all-to-all that transposes, against plain torch, bit by bit, on one node and on two."""

import contextlib
import itertools
import random

import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.support import GUARD, Guarded, assert_same, random_tensor, rejected, unsettle, zeroed
from tests.variants import nightly, variants
from tilescale_net.kernels import all_to_all_transposed
from tilescale_net.kernels.all_to_all_transposed import AllToAllTransposed
from tilescale_net.kernels.broadcast import Broadcast
from tilescale_net.kernels.launches import VECTORS, Launch

GEOMETRY = dict(threads=64, blocks=2)
DTYPES = (torch.bfloat16, torch.float32, torch.uint8)


def _broadcast(seed, cases=8):
    rank, n = tsn.rank(), tsn.size()
    pace, turns = random.Random(f"{seed} {rank}"), random.Random(seed)
    op = Broadcast(**GEOMETRY, chunk_bytes=4096)
    for case in range(cases):
        dtype = turns.choice(DTYPES)
        x = Guarded(turns.choice([(0,), (1,), (5, 7), (turns.randrange(1, 40_000),)]), dtype, turns.choice([0, 4, 16]))
        for call in range(3):
            root = turns.randrange(n)
            x.tensor.copy_(random_tensor(x.tensor.shape, dtype, seed, case, call, rank))
            unsettle(pace, 0.1)
            assert op(x.tensor, root) is x.tensor
            tsn.synchronize()
            expected = random_tensor(x.tensor.shape, dtype, seed, case, call, root)
            assert_same(x.tensor, expected, f"seed {seed}, case {case}, call {call}, root {root}, rank {rank}")
        tsn.barrier()
        x.check()
        x.free()
    op.free()


@contextlib.contextmanager
def in_pieces(wanted: bool):
    """Small results are sent in pieces, too, or not; of calls that are the first of their kind."""
    before = all_to_all_transposed.PIECE_BYTES
    all_to_all_transposed.PIECE_BYTES = 64 if wanted else 1 << 60
    try:
        yield
    finally:
        all_to_all_transposed.PIECE_BYTES = before


def _transposed(seed, cases=8, largest=5):
    rank, n = tsn.rank(), tsn.size()
    pace, turns = random.Random(f"{seed} {rank}"), random.Random(seed)
    op = AllToAllTransposed(**GEOMETRY)
    for case in range(cases):
        dtype = turns.choice(DTYPES)
        middle = (n * turns.randrange(1, largest + 1) for _ in range(2))
        shape = [turns.randrange(1, 4), *middle, turns.choice([1, 3, 16])]
        cut, join = turns.sample(range(1, 3) if case < cases - 3 else [1, 2, 3], 2)
        shape[cut] = -(-shape[cut] // n) * n
        made = list(shape)
        made[cut], made[join] = made[cut] // n, made[join] * n
        out, x = Guarded(made, dtype, turns.choice([0, 4])), Guarded(shape, dtype)
        for call in range(2):
            data = [random_tensor(shape, dtype, seed, case, call, p) for p in range(n)]
            x.tensor.copy_(data[rank])
            unsettle(pace, 0.1)
            assert op(out.tensor, x.tensor, cut - 4 if call else cut, join) is out.tensor
            expected = torch.cat([d.chunk(n, cut)[rank] for d in data], join).contiguous()
            label = f"seed {seed}, {shape}"
            tsn.synchronize()
            assert_same(out.tensor, expected, f"{label}, cut {cut}, join {join}, rank {rank}")
            # To a tensor of this rank's own, by turns in pieces as large ones are and in one as small ones are.
            with in_pieces(case % 2 == 1):
                result = torch.empty(made, dtype=dtype, device=tsn.device())
                assert op(out.tensor, x.tensor, cut, join, result=result) is result
            x.tensor.zero_()  # the call is over with x
            tsn.synchronize()
            assert_same(result, expected, f"{label}, cut {cut}, join {join}, rank {rank}, copied")
        tsn.barrier()
        out.check()
        for tensor in (out, x):
            tensor.free()
    op.free()


def _uneven(seed, cases=6):
    """Parts of the earlier axis of any lengths, and chunks of the later one, there and back."""
    rank, n = tsn.rank(), tsn.size()
    pace, turns = random.Random(f"{seed} {rank}"), random.Random(seed)
    op = AllToAllTransposed(**GEOMETRY)
    for case in range(cases):
        dtype, count = turns.choice(DTYPES), turns.choice([1, 2, 3])
        lengths = [turns.choice([0, 1, 3, 8]) for _ in range(n)]
        lengths[turns.randrange(n)] += 1
        batch, own, dim = turns.choice([1, 3]), count * turns.choice([1, 2]), turns.choice([1, 3, 16])
        ends = [0, *itertools.accumulate(lengths)]
        mine, most = slice(ends[rank], ends[rank + 1]), batch * max(lengths) * own * n * dim
        part, chunk = (batch, lengths[rank], own * n, dim), (batch, ends[-1], own // count, dim)
        x, back = (Guarded((most,), dtype) for _ in range(2))
        y = Guarded((count, *chunk), dtype)
        copies = [torch.zeros(s, dtype=dtype, device=tsn.device()) for s in ((batch, ends[-1], own, dim), part)]
        source, result = (t.tensor[: torch.Size(part).numel()].view(part) for t in (x, back))
        for call in range(2):
            whole = random_tensor((batch, ends[-1], own * n, dim), dtype, seed, case, call)
            source.copy_(whole[:, mine])
            for c in range(count):
                unsettle(pace, 0.1)
                op(y.tensor[c], source, 2, 1, lengths=lengths, chunk=(c, count))
            for c in reversed(range(count)):
                op(result, y.tensor[c], 1, 2, lengths=lengths, chunk=(c, count))
            if count == 1:
                with in_pieces(case % 2 == 0):
                    op(y.tensor[0], source, 2, 1, lengths=lengths, result=copies[0])
                    y.tensor[0].copy_(copies[0])
                    op(result, y.tensor[0], 1, 2, lengths=lengths, result=copies[1])
            tsn.synchronize()
            if count == 1:
                assert_same(copies[0], whole.chunk(n, 2)[rank].contiguous(), "copied")
                assert_same(copies[1], whole[:, mine].contiguous(), "copied back")
            label = f"seed {seed}, {part}, lengths {lengths}, {count} chunks, rank {rank}"
            assert_same(torch.cat(list(y.tensor.cpu()), 2), whole.chunk(n, 2)[rank].contiguous(), label)
            assert_same(result, whole[:, mine].contiguous(), label)
            tsn.barrier()
        beyond = back.tensor[result.numel() :].contiguous().view(torch.uint8)
        assert bool((beyond == GUARD).all()), f"{label}: rows of longer ranks were written here"
        for tensor in (x, y, back):
            tensor.check()
            tensor.free()
    op.free()


@variants(1, "size, nodes", [(2, 1), (1, 1), nightly(4, 1), (4, 2)])
@ranks.on(timeout=400)
def test_equals_torch(size, nodes, seed):
    _broadcast(seed)
    _transposed(seed)
    _uneven(seed)


def test_rows_that_are_no_multiple_of_a_word_are_taken_as_vectors():
    x = torch.arange(48, dtype=torch.int16).view(2, 8, 3)
    assert torch.equal(Launch._converted(x, (*VECTORS, None, False)).view(-1).view(torch.int16), x.view(-1))


@ranks.on()
def test_misuse_is_named():
    op, transposed = Broadcast(**GEOMETRY), AllToAllTransposed(**GEOMETRY)
    x, out = tsn.zeros((4, 6), torch.float32), tsn.zeros((8, 3), torch.float32)
    plain = torch.zeros((4, 6), device=tsn.device())
    rejected(
        (lambda: op(x, 2), ValueError, "root", "2", "between 0 and 1"),
        (lambda: op(x, tsn.rank()), tsn.RankMismatch, "root 0", "root 1"),
        (lambda: op(plain), tsn.HeapError, "x", "symmetric"),
        (lambda: transposed(out, x, 2, 0), ValueError, "cut", "2"),
        (lambda: transposed(out, x, 1, -1), ValueError, "cut", "join"),
        (lambda: transposed(out, x[:3], 0, 1), ValueError, "[3, 6]", "2 PEs"),
        (lambda: transposed(out[:7], x, 1, 0), ValueError, "out"),
        (lambda: transposed(out, x, 1, 0, lengths=[4]), ValueError, "lengths", "2 PEs"),
        (lambda: transposed(out, x, 1, 0, lengths=[4, -1]), ValueError, "lengths", "0 or more"),
        (lambda: transposed(out, x, 1, 0, lengths=[3, 3]), ValueError, "lengths [3, 3]", "must have 3 on rank"),
        (lambda: transposed(out, x, 1, 0, lengths="ab"), TypeError, "lengths", "whole numbers"),
        (lambda: transposed(out, x, 1, 0, chunk=(2, 2)), ValueError, "chunk", "(2, 2)"),
        (lambda: transposed(out, x, 1, 0, chunk=(0, 2)), ValueError, "axis 1", "2 PEs in 2 chunks"),
        (lambda: transposed(plain.view(8, 3), x, 1, 0), tsn.HeapError, "out", "symmetric"),
        (lambda: transposed(x.view(8, 3), x, 1, 0), ValueError, "overlap"),
        (lambda: transposed(out, x, 1, 0, result=out), ValueError, "result", "overlap"),
        (lambda: transposed(out, x, 1, 0, result=plain), ValueError, "result", "shape"),
        (lambda: transposed(out, x, 1, 0, result=out.int()), TypeError, "result", "int32"),
    )


def small_run(seed):
    """Behind some calls, a kernel writes the root's tensor, which they have sent from."""
    op, x, clear = Broadcast(**GEOMETRY, chunk_bytes=4096), tsn.zeros(40_000, torch.uint8), zeroed(40_000)
    for call in (1, 2, 3):
        x.fill_(call if tsn.rank() == 0 else 0)
        op(x, 0)
        if tsn.rank() == 0:
            clear(x)
        tsn.synchronize()
        assert tsn.rank() == 0 or x.eq(call).all()
    op.free()
    _broadcast(seed)
