"""The bits of a row of a sum depend neither on the other rows nor on their number, the algorithm, or the memory they lie in.

Every call takes rows of one pool, any number of them in any order: each must have the bits that it has in every other call.
"""

import random
from collections.abc import Iterator

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe.support import choose, without_kernels
from tests.kernels.moe.support import expert as expert_of
from tests.kernels.support import assert_same
from tests.kernels.test_reduce_scatter import reference_of_nodes, values
from tests.variants import nightly, variants
from tilescale_net.kernels.all_reduce import ALGORITHMS, AllReduce
from tilescale_net.kernels.all_reduce_norm import AllReduceNorm
from tilescale_net.kernels.moe import AllToAll
from tilescale_net.kernels.moe.config import MODES
from tilescale_net.kernels.reduce_scatter import ReduceScatter

POOL, FEW, MANY = 40, (1, 3, 40, 130), (1, 2, 7, 64, 500, 2048, 8192)
SMALL = dict(threads=64, blocks=2)


def _rows(pool: torch.Tensor, index: torch.Tensor, symmetric: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """These rows of it on this rank's device, and tensors to free."""
    picked = pool[index]
    if not symmetric:
        return picked.to(tsn.device()), []
    there = tsn.empty(picked.shape, picked.dtype)
    there.copy_(picked)
    return there, [there]


def _calls(seed, counts: tuple[int, ...], rows: int = POOL) -> Iterator[tuple[torch.Tensor, bool, str]]:
    """Indices of rows, whether they lie in symmetric memory, and words for a message; the same on all ranks."""
    chance = random.Random(seed)
    for count in counts:
        index = torch.tensor([chance.randrange(rows) for _ in range(count)])
        for symmetric in (True, False):
            yield index, symmetric, f"seed {seed}, {count} rows, symmetric {symmetric}, rank {tsn.rank()}"


def _all_reduce(seed, dtype, hidden, counts) -> None:
    rank, n, node_size = tsn.rank(), tsn.size(), tsn.world().topology.node_size
    pools = [values((POOL, hidden), dtype, seed, p) for p in range(n)]
    expected = reference_of_nodes(pools, node_size)
    options = dict(SMALL, staging_bytes=8192 * hidden // 64)
    ops = [AllReduce(**options), AllReduce(**options, once_per_node=False)]
    if tsn.world().topology.nodes == 1:
        ops += [AllReduce(**options, algorithm=name) for name, row in ALGORITHMS.items() if row.is_exact]
    for index, symmetric, label in _calls(seed, counts):
        x, made = _rows(pools[rank], index, symmetric)
        for op in ops:
            assert_same(op(torch.empty_like(x), x).cpu(), expected[index], f"{op._algorithm}, {label}")
        if made:  # in place
            assert_same(ops[0](x).cpu(), expected[index], label)
        tsn.barrier()
        for tensor in made:
            tsn.free(tensor)
    for op in ops:
        op.free()


def _fp8(seed, dtype, hidden, counts) -> None:
    """Data that travel as FP8, in rows of whole blocks of 128 elements."""
    rank = tsn.rank()
    pool = values((POOL, hidden), dtype, seed, rank)
    op = AllReduce(**SMALL, algorithm="fp8")
    x = pool.to(tsn.device())
    expected = op(torch.empty_like(x), x).cpu()
    for index, symmetric, label in _calls(seed, counts):
        x, made = _rows(pool, index, symmetric)
        assert_same(op(torch.empty_like(x), x).cpu(), expected[index], label)
        tsn.barrier()
        for tensor in made:
            tsn.free(tensor)
    op.free()


def _reduce_scatter(seed, dtype, hidden, counts) -> None:
    rank, n, node_size = tsn.rank(), tsn.size(), tsn.world().topology.node_size
    pools = [values((POOL, hidden), dtype, seed, p) for p in range(n)]
    expected = reference_of_nodes(pools, node_size)
    ops = [ReduceScatter(**SMALL, chunk_bytes=2048, algorithm=way) for way in ("auto", "push")]
    nodes = tsn.world().topology.nodes
    for index, symmetric, label in _calls(seed, counts):
        x, made = _rows(pools[rank], torch.cat([index.roll(r) for r in range(n)]), symmetric or nodes > 1)
        for op in ops:
            out = torch.empty((len(index), hidden), dtype=dtype, device=tsn.device())
            assert_same(op(out, x).cpu(), expected[index.roll(rank)], f"{op._algorithm}, {label}")
        for tensor in made:
            tsn.barrier()
            tsn.free(tensor)
    for op in ops:
        op.free()


def _norm(seed, dtype, hidden, counts) -> None:
    rank, n, device = tsn.rank(), tsn.size(), tsn.device()
    pools = [values((POOL, hidden), dtype, seed, p) for p in range(n)]
    residuals = values((POOL, hidden), dtype, seed, "residual")
    weight = values((hidden,), dtype, seed, "weight").to(device)
    op = AllReduceNorm(hidden, **SMALL)

    def normed(index, symmetric):
        x, made = _rows(pools[rank], index, symmetric)
        residual = residuals[index].to(device)
        out = op(torch.empty_like(x), x, weight, residual=residual).cpu()
        tsn.barrier()
        for tensor in made:
            tsn.free(tensor)
        return out, residual.cpu()

    expected = normed(torch.arange(POOL), False)
    for index, symmetric, label in _calls(seed, counts):
        # Of many rows a call takes the simulator long.
        for op.shots in (None, 1, 2) if len(index) < 1000 else (1,) if symmetric else (2,):
            for found, all_rows in zip(normed(index, symmetric), expected):
                assert_same(found, all_rows[index], f"shots {op.shots}, {label}")
    op.free()


def _combine(seed, dtype, hidden, counts) -> None:
    """A token's sum in any batch, in both modes, whatever tokens the other ranks have."""
    rank, n, device = tsn.rank(), tsn.size(), tsn.device()
    experts, top_k = 4 * n, 3
    g = torch.Generator().manual_seed(random.Random(repr(seed)).getrandbits(60))
    x = torch.randn((POOL, hidden), generator=g).to(dtype)
    choices = choose("masked", random.Random(seed), POOL, top_k, experts, n)
    weights = torch.rand((POOL, top_k), generator=g)
    local, expected = experts // n, None
    for mode, limits in MODES.items():
        batches = tuple(count for count in counts if count <= (limits.max_tokens or count))
        with without_kernels():
            op = AllToAll(experts, max(*batches, POOL), hidden, top_k, dtype=dtype, mode=mode)

        def combined(index):
            received = op.dispatch(x[index].to(device), choices[index].to(device), weights[index].to(device))
            y = torch.empty_like(received.x)
            for e in range(local):
                first, count = (0, 0) if mode == "latency" else (int(received.offsets[e]), int(received.counts[e]))
                rows = e if mode == "latency" else slice(first, first + count)
                y[rows] = expert_of(rank * local + e, received.x[rows], dtype)
            return op.combine(y, received.handle).cpu()

        if expected is None:
            expected = combined(torch.arange(POOL))
        for index, _, label in _calls(f"{seed} {rank}", batches):
            assert_same(combined(index), expected[index], f"{mode}, {label}")
        op.free()


CALLS = {"all-reduce": _all_reduce, "reduce-scatter": _reduce_scatter, "norm": _norm, "combine": _combine, "fp8": _fp8}


# With 66 elements of 16 bits some numbers of rows are whole vectors and some are not, so that algorithms change.
@variants(
    2, "call, size, nodes, hidden",
    [("all-reduce", 3, 1, 64), ("all-reduce", 4, 2, 64), ("reduce-scatter", 4, 2, 66), ("norm", 3, 1, 64), ("combine", 2, 1, 64),
     nightly("fp8", 3, 1, 128)],
)  # fmt: skip
@ranks.on(timeout=400)
def test_rows_do_not_see_each_other(call, size, nodes, hidden, seed):
    CALLS[call](seed, torch.bfloat16, hidden, FEW)


PLACES = [(size, 1) for size in range(2, 9)] + [(2, 2), (4, 2), (6, 3), (8, 2)]
# Data travel as FP8 within a node alone.
CASES = [(call, *place) for call in CALLS for place in PLACES if call != "fp8" or place[1] == 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("call, size, nodes", CASES)
@pytest.mark.nightly
@ranks.on(heap="64M", timeout=1200)
def test_up_to_8192_rows(call, size, nodes, dtype, seed):
    """Across all thresholds between algorithms, and calls in several pieces."""
    hidden = {"norm": 64, "combine": 64, "fp8": 128}.get(call, 66)
    CALLS[call](seed, dtype, hidden, MANY[:6] if call == "combine" else MANY)
