"""Operators of context parallelism against torch, with gradients, under torch.compile."""

import itertools

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.support import rejected
from tests.kernels.test_attention_merge import merged, partial_of
from tests.variants import nightly
from tilescale_net import ops


@ranks.on(timeout=300)
def test_merge_equals_one_rank():
    me, n = tsn.rank(), tsn.size()
    calls = ops.merge_attention, torch.compile(ops.merge_attention, fullgraph=True, backend="aot_eager")
    for call, (all_heads, base_2), turn in itertools.product(calls, ((False, True), (True, False)), range(2)):
        partials = [partial_of((3, 2 * n, 32), torch.bfloat16, base_2, turn, p) for p in range(n)]
        x, lse = (t.to(tsn.device()) for t in partials[me])
        # Tensors that are not contiguous, as slices of a padded batch are.
        out, total = call(x.transpose(0, 1).contiguous().transpose(0, 1), lse, all_heads=all_heads, base_2=base_2)
        own = slice(None) if all_heads else slice(2 * me, 2 * me + 2)
        wanted, wanted_lse = (t[:, own] for t in merged(partials, base_2))
        assert out.shape == wanted.shape and torch.allclose(out.cpu().double(), wanted, rtol=1e-2, atol=1e-2)
        assert torch.allclose(total.cpu().double(), wanted_lse, rtol=1e-5, atol=1e-5)


@ranks.on()
def test_merge_has_no_gradient():
    x, lse = torch.zeros((1, 2, 8), device=tsn.device(), requires_grad=True), torch.zeros((1, 2), device=tsn.device())
    with pytest.raises(RuntimeError, match="no_grad"):
        ops.merge_attention(x, lse)
    with torch.no_grad():
        assert ops.merge_attention(x, lse)[0].eq(0).all()
    with pytest.raises(ValueError, match="batch, heads, dim"):
        ops.merge_attention(x[0].detach(), lse)


# -- heads and sequence -----------------------------------------------------------------------------------------------


def _numbers(*key, shape) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(v * 31**i for i, v in enumerate(key))))


def _starts(lengths):
    return [0, *itertools.accumulate(lengths)]


def _there_and_back(call) -> None:
    me, n = tsn.rank(), tsn.size()
    for case, (lengths, batch) in enumerate(
        [(None, (2,)), ([3 + 2 * p for p in range(n)], ()), ([5, *[0] * (n - 1)], (3,))]
    ):
        parts = lengths or [4] * n
        whole = _numbers(case, shape=(*batch, sum(parts), 2 * n, 8))
        own = slice(_starts(parts)[me], _starts(parts)[me + 1])
        x = whole[..., own, :, :].to(tsn.device()).requires_grad_()
        heads, back = call(x, lengths)
        assert torch.equal(heads.detach().cpu(), whole.chunk(n, -2)[me])
        assert torch.equal(back.detach().cpu(), 2 * whole[..., own, :, :])
        factor = _numbers(case, 1, shape=whole.shape)
        (back * factor[..., own, :, :].to(tsn.device())).sum().backward()
        assert torch.equal(x.grad.cpu(), 2 * factor[..., own, :, :])
        with torch.no_grad():
            assert torch.equal(_two_ways(x, lengths)[1], back), "with and without gradients"


def _two_ways(x, lengths):
    heads = ops.scatter_heads(x, lengths=lengths)
    return heads, ops.gather_heads(2 * heads, lengths=lengths)


def _attend(q, k, v):
    """Shapes are [..., sequence, heads, dim]; a group of heads of q shares one head of k and v."""
    k, v = (x.repeat_interleave(q.shape[-2] // x.shape[-2], -2) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(*(x.transpose(-3, -2) for x in (q, k, v))).transpose(-3, -2)


def _by_heads() -> None:
    me, n = tsn.rank(), tsn.size()
    for case, (lengths, chunks) in enumerate([(None, 2), ([5, *[3] * (n - 1)], 1), ([0, *[6] * (n - 1)], 2)]):
        parts = lengths or [4] * n
        own = slice(_starts(parts)[me], _starts(parts)[me + 1])
        heads = 2 * n * chunks, n * chunks, n * chunks
        whole = [_numbers(case, i, shape=(2, sum(parts), h, 8)).requires_grad_() for i, h in enumerate(heads)]
        wanted, factor = _attend(*whole), _numbers(case, 7, shape=(2, sum(parts), heads[0], 8))
        (wanted * factor).sum().backward()
        mine = [x.detach()[:, own].to(tsn.device()).requires_grad_() for x in whole]
        for turn in range(2):
            with torch.no_grad():
                found = ops.attention_by_heads(_attend, *mine, lengths=lengths, chunks=chunks)
            assert torch.allclose(found.cpu(), wanted.detach()[:, own], rtol=1e-4, atol=1e-5), (case, turn)
        out = ops.attention_by_heads(_attend, *mine, lengths=lengths, chunks=chunks)
        assert torch.allclose(out.detach(), found, rtol=1e-6, atol=1e-6)
        (out * factor[:, own].to(tsn.device())).sum().backward()
        for x, reference in zip(mine, whole):
            assert torch.allclose(x.grad.cpu(), reference.grad[:, own], rtol=1e-3, atol=1e-4), case


@pytest.mark.parametrize("size, nodes", [(2, 1), (2, 2), nightly(4, 2)])
@ranks.on(timeout=300)
def test_heads_for_sequence_and_back(size, nodes):
    _there_and_back(_two_ways)
    if tsn.world().topology.nodes == 1:
        _there_and_back(torch.compile(_two_ways, fullgraph=True, backend="aot_eager"))
    _by_heads()


@ranks.on()
def test_misuse_of_exchanges_is_named():
    x = torch.zeros((4, 4, 8), device=tsn.device())
    few = torch.zeros((4, 3, 8), device=tsn.device())
    attend = _attend
    rejected(
        (lambda: ops.scatter_heads(x[0]), ValueError, "scatter_heads", "[..., sequence, heads, dim]"),
        (lambda: ops.scatter_heads(few), ValueError, "axis 1", "2 PEs"),
        (lambda: ops.scatter_heads(x, lengths=[4]), ValueError, "lengths", "2 PEs"),
        (lambda: ops.scatter_heads(x, lengths=[4, -1]), ValueError, "lengths", "0 or more"),
        (lambda: ops.gather_heads(x, lengths=[3, 2]), ValueError, "lengths [3, 2]", "must have 5"),
        (lambda: ops.gather_heads(x[:3]), ValueError, "axis 0", "2 PEs"),
        (lambda: ops.attention_by_heads(attend, x, x, few), ValueError, "v has shape", "2 ranks * 2 chunks"),
        (lambda: ops.attention_by_heads(attend, x, x, x, chunks=0), ValueError, "chunks", "0"),
        (lambda: ops.attention_by_heads(lambda q, k, v: q[:1], x, x, x), ValueError, "attend returned", "[8, 1, 8]"),
        (lambda: ops.scatter_heads(x, lengths=[4, 4 + tsn.rank()] if tsn.rank() == 0 else [5, 4]), tsn.RankMismatch, "lengths"),
    )  # fmt: skip
    assert ops.scatter_heads(x).shape == (8, 2, 8)
