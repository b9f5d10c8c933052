"""reduce-scatter against plain torch, bit by bit: the order of additions is part of the contract."""

import itertools
import random

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.support import Guarded, assert_same, rejected, unsettle
from tests.variants import nightly, variants
from tilescale_net.kernels.reduce_scatter import ReduceScatter

# shape of a part, dtype, misalignment of x and of out in bytes
CASES = [
    ((1,), torch.float32, 0, 0),
    ((8, 16), torch.bfloat16, 0, 0),
    ((7, 3), torch.bfloat16, 2, 6),
    ((1000,), torch.float16, 0, 0),
    ((5001,), torch.int32, 4, 0),
    ((514,), torch.float64, 0, 0),
    ((20_000,), torch.bfloat16, 0, 0),
    ((3000,), torch.bfloat16, 0, 2),
    ((0,), torch.float32, 0, 0),
]
PUSH = dict(algorithm="push")  # also of what could be pulled


def values(shape, dtype, *key) -> torch.Tensor:
    """Numbers whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(random.Random(repr(key)).getrandbits(60))
    if not dtype.is_floating_point:
        return torch.randint(-(2**30), 2**30, shape, dtype=dtype, generator=generator)
    scale = torch.randint(-8, 9, shape, generator=generator).to(torch.float64)
    return (torch.randn(shape, dtype=torch.float64, generator=generator) * 2.0**scale).to(dtype)


def reference(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum in the order of the PEs, in float32 for narrow types, rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = torch.zeros(parts[0].shape, dtype=wide)
    for part in parts:
        total += part.to(wide)
    return total.to(dtype)


def reference_of_nodes(parts: list[torch.Tensor], nodes: int | tuple[int, ...]) -> torch.Tensor:
    """The sums of the nodes, each rounded, in the order of the nodes; on one node, and where each PE is one, `reference`.

    `nodes`: PEs of a node, or of every node.
    """
    sizes = nodes if isinstance(nodes, tuple) else (nodes,) * (len(parts) // nodes)
    rest = iter(parts)
    return reference([reference(list(itertools.islice(rest, size))) for size in sizes])


def _reduce(seed, cases, options, calls=2, through=False):
    rank, n, sizes = tsn.rank(), tsn.size(), tsn.world().topology.sizes
    pace = random.Random(f"{seed} {rank}")
    op = ReduceScatter(**options)
    for number, (shape, dtype, x_offset, out_offset) in enumerate(cases):
        whole = (n * shape[0], *shape[1:]) if number % 2 else (n, *shape)
        x, out, between = Guarded(whole, dtype, x_offset), Guarded(shape, dtype, out_offset), Guarded(whole, dtype)
        for call in range(calls):
            data = [values((n, *shape), dtype, seed, number, call, p) for p in range(n)]
            x.tensor.copy_(data[rank].view(whole))
            unsettle(pace)
            way = {"through": between.tensor} if through and call != 2 else {}
            assert op(out.tensor, x.tensor, **way) is out.tensor
            x.tensor.zero_()  # the call is over with x
            tsn.synchronize()
            label = f"seed {seed}, case {number}, call {call}, rank {rank}"
            parts = [d[rank] for d in data]
            assert_same(out.tensor, reference_of_nodes(parts, sizes), label)
        for tensor in (x, out, between):
            tensor.check()
            tensor.free()
    op.free()


# The number of PEs and the dtype are compiled in: every case is tried with two.
@variants(1, "size, visibility", [(1, "eager"), (2, "random"), nightly(3, "late"), (4, "eager")])
@ranks.on()
def test_equals_sum_in_order(size, visibility, seed):
    _reduce(seed, CASES if size == 2 else CASES[1:3], dict(threads=64, blocks=2, chunk_bytes=4096, **PUSH))


@pytest.mark.parametrize("size, visibility", [(1, "late"), (2, "random")])
@ranks.on(timeout=400)
def test_pull_equals_sum_in_order(size, visibility, seed):
    """Some cases cannot be pulled, and are pushed."""
    cases = [CASES[1], CASES[8], ((20_000,), torch.bfloat16, 0, 0), ((8,), torch.bfloat16, 0, 16)]
    _reduce(seed, cases, dict(threads=64, blocks=2, chunk_bytes=4096))


@variants(1, "size, visibility, races", [(1, "eager", 0), (2, "late", 1), nightly(4, "random", 0)])
@ranks.on(timeout=400)
def test_through_other_memory(size, visibility, races, seed):
    """By stores, wherever tensors begin, and in packets; between calls that pull."""
    places = (20_000, 0, 0), (20_000, 4, 16), (20_000, 0, 2), (8, 0, 16)
    cases = [((count,), torch.bfloat16, *offsets) for count, *offsets in places]
    _reduce(seed, cases, dict(threads=64, blocks=2, chunk_bytes=4096), calls=4, through=True)


@variants(1, "visibility, slots", [("late", 2), ("random", 3)])
@ranks.on(3)
def test_slots_are_used_again(visibility, slots, seed):
    cases = [CASES[1], CASES[1], ((9_000,), torch.bfloat16, 0, 0)]
    for algorithm in ("push", "pull") if slots == 2 else ("push",):
        options = dict(threads=32, blocks=2, slots=slots, chunk_bytes=1024, algorithm=algorithm)
        _reduce(seed, cases, options, 3)


@variants(1, "algorithm", ["push", "pull"])
@ranks.on()
def test_in_place_hundreds_of_calls(algorithm, seed):
    rank, n = tsn.rank(), tsn.size()
    pace = random.Random(f"{seed} {rank}")
    op = ReduceScatter(threads=32, blocks=1, chunk_bytes=512, algorithm=algorithm)
    x = tsn.empty((n, 300), torch.float32)
    for call in range(300):
        data = [values((n, 300), torch.float32, seed, call, p) for p in range(n)]
        x.copy_(data[rank])
        unsettle(pace, 0.02, 0.01)
        op(x[rank], x)
        tsn.synchronize()
        assert_same(x[rank], reference([d[rank] for d in data]), f"seed {seed}, call {call}")
        assert_same(x[(rank + 1) % n], data[rank][(rank + 1) % n])


@ranks.on()
def test_misuse_is_named():
    op = ReduceScatter(threads=32, blocks=1, chunk_bytes=1024)
    x, out = tsn.zeros((2, 8), torch.float32), tsn.zeros(8, torch.float32)
    pull = ReduceScatter(blocks=1, threads=32, algorithm="pull")
    differing = dict(blocks=1, chunk_bytes=128 * (1 + tsn.rank()))
    rejected(
        (lambda: ReduceScatter(slots=1), ValueError, "slots", "1"),
        (lambda: ReduceScatter(algorithm="tree"), ValueError, "algorithm", "'tree'"),
        (lambda: ReduceScatter(chunk_bytes=100), ValueError, "chunk_bytes", "100"),
        (lambda: ReduceScatter(**differing), tsn.RankMismatch, "chunk_bytes=128", "chunk_bytes=256"),
        (lambda: op(out.to(torch.uint8), x.to(torch.uint8)), TypeError, "uint8", "bfloat16"),
        (lambda: op(out[:7], x), ValueError, "x", "[2, 7]", "[2, 8]"),
        (lambda: op(out, x.to(torch.float64)), TypeError, "x", "float64", "float32"),
        (lambda: op(x.view(-1)[4:12], x), ValueError, "overlap"),
        (lambda: pull(out, torch.zeros_like(x)), ValueError, "x", "symmetric", "push"),
    )
