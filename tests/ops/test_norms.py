"""ops.all_reduce_norm against torch's sum and rms_norm, with gradients, under torch.compile."""

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tilescale_net import ops

HIDDEN, EPS = 64, 1e-5


def _drawn(*key, shape=(5, HIDDEN)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(v * 31**i for i, v in enumerate(key))))


def _reference(xs, weight, residual, bias):
    total = sum(xs)
    for more in (bias, residual):
        total = total if more is None else total + more
    return torch.nn.functional.rms_norm(total, (HIDDEN,), weight, EPS), total


def _against_torch(compiled: bool) -> None:
    me, n, device = tsn.rank(), tsn.size(), tsn.device()
    call = torch.compile(ops.all_reduce_norm, fullgraph=True) if compiled else ops.all_reduce_norm
    for case, (with_residual, with_bias) in enumerate([(True, True), (False, False), (True, False)]):
        xs = [_drawn(case, p).requires_grad_() for p in range(n)]
        weight = _drawn(case, 97, shape=(HIDDEN,)).requires_grad_()
        residual = _drawn(case, 98).requires_grad_() if with_residual else None
        bias = _drawn(case, 99, shape=(HIDDEN,)).requires_grad_() if with_bias else None
        wanted, total = _reference(xs, weight, residual, bias)
        factors = _drawn(case, 96), _drawn(case, 95)
        ((wanted * factors[0]).sum() + (total * factors[1]).sum()).backward()
        leaves = [
            None if t is None else t.detach().to(device).requires_grad_() for t in (xs[me], weight, residual, bias)
        ]
        x, *others = leaves
        given = dict(zip(("residual", "bias"), others[1:]))
        out, new = call(x, others[0], eps=EPS, replicated=True, **given)
        assert torch.allclose(out.cpu(), wanted, rtol=1e-4, atol=1e-5) and torch.allclose(
            new.cpu(), total, rtol=1e-5, atol=1e-6
        )
        ((out * factors[0].to(device)).sum() + (new * factors[1].to(device)).sum()).backward()
        for mine, theirs in zip(leaves, (xs[me], weight, residual, bias)):
            if mine is not None:
                assert torch.allclose(mine.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-4), case
        with torch.no_grad():
            again, _ = ops.all_reduce_norm(x, others[0], eps=EPS, **given)
        assert torch.equal(again, out), "with and without gradients"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_equals_torch(compiled):
    ranks.run(2, _against_torch, compiled, timeout=300)


def _gradient_is_summed() -> None:
    """Where ranks' losses are added up, the gradient of x is the sum of those of all."""
    x = _drawn(tsn.rank()).to(tsn.device()).requires_grad_()
    weight = torch.ones(HIDDEN, device=tsn.device())
    _, total = ops.all_reduce_norm(x, weight)
    (total * (tsn.rank() + 1)).sum().backward()
    assert x.grad.eq(sum(range(1, tsn.size() + 1))).all()


def test_gradient_is_summed():
    ranks.run(2, _gradient_is_summed)


def _in_place() -> None:
    """The operator for passes has the bits of the other, and writes the residual, however it lies."""
    x, weight = (_drawn(tsn.rank(), k).to(tsn.device()) for k in (1, 2))
    residual = _drawn(3, shape=(HIDDEN, 5)).to(tsn.device()).T
    out, total = ops.all_reduce_norm(x, weight[0], residual=residual, eps=EPS)
    for given in (residual.clone(memory_format=torch.contiguous_format), residual):
        found = torch.ops.tilescale_net.all_reduce_norm_(x, weight[0], given, EPS, "")
        assert torch.equal(found, out) and torch.equal(given, total)
    torch.library.opcheck(
        torch.ops.tilescale_net.all_reduce_norm_.default, (x, weight[0], residual, EPS, ""), test_utils=("test_schema",)
    )


def test_in_place():
    ranks.run(2, _in_place)
