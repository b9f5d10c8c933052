"""all-reduce against plain torch, bit by bit: the order of additions is part of the contract, whichever kernel runs."""

import random

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.support import Guarded, assert_same, rejected, unsettle
from tests.kernels.test_reduce_scatter import reference, reference_of_nodes, values
from tests.variants import variants
from tilescale_net.kernels.all_reduce import ALGORITHMS, AllReduce
from tilescale_net.kernels.all_reduce_fp8 import rounded_to_fp8, shots_of
from tilescale_net.kernels.reduce_scatter import ReduceScatter

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def random_cases(seed, number: int, largest: int, dtypes=DTYPES) -> list[tuple]:
    """(shape, dtype, misalignment of out and of x in bytes, None: x is out, symmetric tensors or not)."""
    chance = random.Random(f"cases {seed}")
    cases = [((0,), dtypes[0], 0, 0, True)]
    for i in range(number):
        dtype = chance.choice(dtypes)
        count = chance.choice(
            [1, 7, 8, 64, largest, chance.randrange(1, largest), chance.randrange(1, largest) // 8 * 8 + 8]
        )
        shape = (count,) if i % 3 else (2, count // 2 or 1)
        offsets = [chance.choice([0, 0, 0, dtype.itemsize, 16]) for _ in range(2)]
        cases.append((shape, dtype, offsets[0], offsets[1] if i % 4 else None, chance.random() < 0.6))
    return cases


def reference_of(algorithm: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """The algorithm's result for the PEs' tensors, bit by bit."""
    if algorithm != "fp8" or len(parts) == 1:
        return reference(parts)
    total = torch.zeros(parts[0].shape)
    for part in parts:
        total += rounded_to_fp8(part)
    return (rounded_to_fp8(total) if shots_of(len(parts)) == 2 else total).to(parts[0].dtype)


def _tensors(case):
    shape, dtype, out_offset, x_offset, symmetric = case
    if symmetric:
        out = Guarded(shape, dtype, out_offset)
        x = out if x_offset is None else Guarded(shape, dtype, x_offset)
        return out, x, out.tensor, x.tensor
    out = torch.empty(shape, dtype=dtype, device=tsn.device())
    return None, None, out, out if x_offset is None else torch.empty_like(out)


def _reduce(seed, cases, options, calls=2, algorithms=("auto",)):
    """`algorithms`: their names, or "all"."""
    rank, n = tsn.rank(), tsn.size()
    pace = random.Random(f"{seed} {rank}")
    for algorithm in ALGORITHMS if algorithms == "all" else algorithms:
        op = AllReduce(algorithm=algorithm, **options)
        for number, case in enumerate(cases):
            guards = _tensors(case)
            out, x = guards[2:]
            for call in range(calls):
                data = [values(x.shape, x.dtype, seed, number, call, p) for p in range(n)]
                x.copy_(data[rank])
                unsettle(pace, 0.1)
                overwritten = x is not out and call % 2 == 1
                assert (op(out) if x is out else op(out, x, overwrite_x=overwritten)) is out
                if x is not out:
                    tsn.synchronize()
                    if not overwritten:
                        assert_same(x, data[rank], f"x of seed {seed}, case {number}")
                    x.zero_()  # the call is over with x
                tsn.synchronize()
                label = f"{algorithm}, seed {seed}, case {number} {case}, call {call}, rank {rank}"
                by_nodes = tsn.world().topology.sizes if tsn.world().topology.nodes > 1 else ()
                expected = reference_of_nodes(data, by_nodes) if by_nodes else reference_of(algorithm, data)
                assert_same(out, expected, label)
            if guards[0] is not None:
                tsn.barrier()
                guards[0].check()
                guards[1].check()
                guards[0].free()
                if x is not out:
                    guards[1].free()
        op.free()


GEOMETRY = dict(threads=64, blocks=2, staging_bytes=4096)


# PEs, algorithms, dtype: every pair compiles two or three kernels of its own.
RUNS = [
    (1, "eager", ("auto",), torch.bfloat16),
    (2, "random", "all", torch.bfloat16),
    (2, "late", ("packets", "two_shot", "two_shot_pull"), torch.float32),
    (3, "random", ("one_shot", "two_shot_push"), torch.float16),
    (4, "late", ("packets", "two_shot", "two_shot_pull"), torch.bfloat16),
]


@variants(2, "size, visibility, algorithms, dtype", RUNS)
@ranks.on(timeout=400)
def test_equals_sum_in_order(size, visibility, algorithms, dtype, seed):
    _reduce(seed, random_cases(seed, 12, 6000, (dtype,)), GEOMETRY, 2, algorithms)


@variants(1, "size, algorithms", [(4, ("auto", "two_shot")), (2, ("auto",))])
@ranks.on(VIRTUAL_NODES="2", timeout=400)
def test_nodes(size, algorithms, seed):
    cases = random_cases(seed, 5, 3000, (torch.bfloat16,))
    if size == 2:  # nodes of one rank
        cases = [
            ((3000,), torch.float32, 0, 0, True),
            ((1024,), torch.float32, 0, None, True),
            *random_cases(seed, 4, 900),
        ]
    _reduce(seed, cases, GEOMETRY, 2, algorithms)


@variants(1, "nodes", [1, 2])
@ranks.on(timeout=200)
def test_places_that_differ(nodes):
    """A tensor that is symmetric on one rank and not on another."""
    rank, n = tsn.rank(), tsn.size()
    reduce, scatter = AllReduce(**GEOMETRY), ReduceScatter(threads=64, blocks=2)
    shapes = (8000,), (100,), (n, 100)
    all_symmetric = [tsn.zeros(shape) for shape in shapes]
    others = [torch.zeros(shape, device=tsn.device()) for shape in shapes]
    for symmetric in (0, 1, n):
        x, out, parts = all_symmetric if rank == symmetric else others
        if tsn.world().topology.nodes > 1:  # what crosses the network must be symmetric
            parts = all_symmetric[2]
        x.fill_(rank + 1)
        parts.fill_(rank + 1)
        reduce(x)
        scatter(out, parts)
        tsn.synchronize()
        assert x.eq(n * (n + 1) // 2).all() and out.eq(n * (n + 1) // 2).all()
    # Tensors that are copied as a whole, wherever they lie; and a tensor that only one rank lets be overwritten.
    for symmetric, overwritten in ((n, False), (0, False), (1, False), (0, True), (1, True), (n, True)):
        x, total = all_symmetric[0] if rank == symmetric else others[0], torch.empty_like(others[0])
        x.fill_(rank + 1)
        reduce(total, x, overwrite_x=overwritten)
        tsn.synchronize()
        assert total.eq(n * (n + 1) // 2).all()


@pytest.mark.sample(0)
@ranks.on(timeout=400)
def test_calls_of_all_algorithms_in_turn(seed):
    """Calls of all algorithms and of one tensor and another in turn, as layers of a model make them."""
    rank, n = tsn.rank(), tsn.size()
    pace = random.Random(f"{seed} {rank}")
    ops = [AllReduce(**GEOMETRY, algorithm=algorithm) for algorithm in ALGORITHMS]
    tensors = [tsn.empty(c, torch.bfloat16) for c in (8, 1000, 6000)] + [torch.empty(777, dtype=torch.bfloat16)]
    tensors[-1] = tensors[-1].to(tsn.device())
    turns = random.Random(seed)
    for call in range(60):
        x, op = turns.choice(tensors), turns.choice(ops)
        data = [values(x.shape, x.dtype, seed, call, p) for p in range(n)]
        x.copy_(data[rank])
        unsettle(pace, 0.05)
        total = torch.empty_like(x) if turns.random() < 0.3 else x
        op(total, x, overwrite_x=True)
        tsn.synchronize()
        assert_same(total, reference_of(op._algorithm, data), f"seed {seed}, call {call}, {op._algorithm}")


@ranks.on()
def test_misuse_is_named():
    op = AllReduce(threads=64, blocks=1, staging_bytes=4096)
    x, out = torch.zeros(8, device=tsn.device()), torch.zeros(8, device=tsn.device())
    rejected(
        (lambda: AllReduce(algorithm="ring"), ValueError, "algorithm", "'ring'", "two_shot"),
        (lambda: AllReduce(staging_bytes=0), ValueError, "staging_bytes", "0"),
        (lambda: AllReduce(blocks=1 + tsn.rank(), threads=64), tsn.RankMismatch, "blocks=1", "blocks=2"),
        (lambda: op(out.to(torch.uint8)), TypeError, "uint8", "bfloat16"),
        (lambda: op(out, x.double()), TypeError, "x", "float64", "float32"),
        (lambda: op(out, x[:7]), ValueError, "x", "[7]", "[8]"),
        (lambda: op(out[:4], out[2:6]), ValueError, "overlap"),
        (lambda: op(out[::2]), ValueError, "out", "contiguous"),
        (lambda: op(out[: 4 + tsn.rank()]), tsn.RankMismatch, "[4]", "[5]"),
        (lambda: (op.free(), op(out)), tsn.TileScaleError, "free()"),
    )
