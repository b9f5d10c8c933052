"""All-reduce by FP8: equal bits to its rounding in torch, within its stated bound, the same on every rank."""

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.support import assert_same, rejected
from tests.kernels.test_all_reduce import _reduce, reference_of
from tests.kernels.test_reduce_scatter import values
from tests.variants import variants
from tilescale_net.kernels.all_reduce import AllReduce
from tilescale_net.kernels.all_reduce_fp8 import BLOCK, CHUNK, LANES, TURNS, rounded_to_fp8, shots_of

# One block of two warps, one of which moves data: large tensors are cut in pieces.
GEOMETRY = dict(threads=64, blocks=1)


def large(ranks: int) -> int:
    """Elements that take two launches, the second of which has another number of chunks, and end within a block of 128."""
    return (1 if ranks == 2 else ranks) * CHUNK * (TURNS + 3) - 77


def magnitudes(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each element's block, but for those that are scaled as if it were 2^-119."""
    blocks = torch.nn.functional.pad(x.abs().view(-1), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    return blocks.amax(1).clamp(min=2.0**-119).repeat_interleave(BLOCK)[: x.numel()].view(x.shape)


def bound(x: torch.Tensor) -> torch.Tensor:
    """The bound of |Q(x) - x| that the module states; float64."""
    x = x.double()
    return torch.maximum(x.abs() / 16, magnitudes(x) / 2**17)


def bound_of_sum(parts: list[torch.Tensor], found: torch.Tensor) -> torch.Tensor:
    """The bound of |found - the exact sum| that the module states."""
    once = sum(bound(part) for part in parts)
    total = sum(part.double() for part in parts)
    eps = torch.finfo(torch.float32).eps
    once = once + len(parts) * eps * sum(part.double().abs() + bound(part) for part in parts)
    error = once
    if shots_of(len(parts)) == 2:
        error = once + torch.maximum((total.abs() + once) / 16, magnitudes(total.abs() + once) / 2**17)
    last = torch.finfo(found.dtype)
    return error + (total.abs() + error) * last.eps / 2 + last.smallest_normal * last.eps


@pytest.mark.parametrize("exponents", [(0, 0), (-130, -110), (-20, 20), (100, 120)])
def test_rounding_is_within_its_bound(exponents):
    generator = torch.Generator().manual_seed(exponents[0])
    x = torch.randn(64 * BLOCK + 5, generator=generator)
    x *= 2.0 ** torch.randint(exponents[0], exponents[1] + 1, x.shape, generator=generator)
    x[:BLOCK] = 0
    wrong = (rounded_to_fp8(x).double() - x.double()).abs() > bound(x)
    assert not wrong.any(), x[wrong][:4]
    # The bound is not far above what happens: an error of half of it and more.
    assert ((rounded_to_fp8(x).double() - x.double()).abs() > bound(x) / 2).any()


def test_infinities_and_nan_show():
    x = torch.ones(3 * BLOCK)
    x[3], x[BLOCK + 1] = float("inf"), float("nan")
    found = rounded_to_fp8(x)
    assert found[3] == torch.inf and found[BLOCK + 1].isnan()
    assert found[2 * BLOCK :].eq(1).all() and found[BLOCK + 2 : 2 * BLOCK].eq(1).all()


def _within_bound(seed, dtype):
    rank, n = tsn.rank(), tsn.size()
    op = AllReduce(algorithm="fp8", **GEOMETRY)
    for call in range(2):
        parts = [values((large(n),), dtype, seed, call, p) for p in range(n)]
        out = parts[rank].clone().to(tsn.device())
        op(out)
        tsn.synchronize()
        assert_same(out, reference_of("fp8", parts), f"call {call}")
        error = (out.cpu().double() - sum(part.double() for part in parts)).abs()
        wrong = error > bound_of_sum(parts, out)
        assert not wrong.any(), (call, wrong.nonzero()[:4], error[wrong][:4])


@variants(2, "size, dtype", [(2, torch.bfloat16), (3, torch.float32), (4, torch.float16)])
@ranks.on(timeout=200)
def test_sums_are_within_the_bound(size, dtype, seed):
    _within_bound(seed, dtype)


@pytest.mark.parametrize("size", [3])
@ranks.on(TSN_SIM_RACES="1", timeout=200)
def test_memory_is_not_written_before_it_is_read(size, seed):
    cases = [((large(size),), torch.bfloat16, 0, 0, False), ((1000,), torch.bfloat16, 2, None, False)]
    _reduce(seed, cases, GEOMETRY, 2, ("fp8",))


@ranks.on()
def test_rows_do_not_depend_on_the_batch(seed):
    """A row that is whole blocks has the same bits wherever it stands."""
    rank, n = tsn.rank(), tsn.size()
    op, row = AllReduce(algorithm="fp8", **GEOMETRY), values((2 * BLOCK,), torch.bfloat16, seed, tsn.rank())
    expected = op(row.clone().to(tsn.device()))
    for rows in (3, 40):
        x = values((rows, row.numel()), torch.bfloat16, seed, rows, rank)
        x[rows // 2] = row
        found = op(x.to(tsn.device()))
        tsn.synchronize()
        assert_same(found[rows // 2], expected, f"{rows} rows of {n} ranks")


@pytest.mark.parametrize("size", [4])
@ranks.on(VIRTUAL_NODES="2")
def test_nodes_are_rejected(size):
    rejected((lambda: AllReduce(algorithm="fp8"), ValueError, "'fp8'", "mapped", "2 nodes", "one node"))


@ranks.on()
def test_dtypes_are_rejected():
    op = AllReduce(algorithm="fp8", **GEOMETRY)
    rejected((lambda: op(torch.zeros(8, dtype=torch.int32, device=tsn.device())), TypeError, "fp8", "int32"))
    assert op.n_pes * LANES  # the object is as it was
    x = torch.ones(300, dtype=torch.bfloat16, device=tsn.device())
    assert op(x).eq(tsn.size()).all()
