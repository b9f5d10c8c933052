"""ops.all_reduce_norm against torch's sum and rms_norm, with gradients, under torch.compile."""

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.support import assert_same, rejected, unaligned
from tests.kernels.test_all_reduce_norm import _quantised, sum_of_experts
from tests.variants import variants
from tilescale_net import ops
from tilescale_net.kernels.all_reduce_norm import ExpertRows
from tilescale_net.ops import group_objects, norms

HIDDEN, EPS = 64, 1e-5


def _drawn(*key, shape=(5, HIDDEN)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(v * 31**i for i, v in enumerate(key))))


def _reference(xs, weight, residual, bias):
    total = sum(xs)
    for more in (bias, residual):
        total = total if more is None else total + more
    return torch.nn.functional.rms_norm(total, (HIDDEN,), weight, EPS), total


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@ranks.on(timeout=300)
def test_equals_torch(compiled):
    me, n, device = tsn.rank(), tsn.size(), tsn.device()
    call = torch.compile(ops.all_reduce_norm, fullgraph=True, backend="aot_eager") if compiled else ops.all_reduce_norm
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
        options = dict(zip(("residual", "bias"), others[1:]))
        out, new = call(x, others[0], eps=EPS, replicated=True, **options)
        assert torch.allclose(out.cpu(), wanted, rtol=1e-4, atol=1e-5) and torch.allclose(
            new.cpu(), total, rtol=1e-5, atol=1e-6
        )
        ((out * factors[0].to(device)).sum() + (new * factors[1].to(device)).sum()).backward()
        for mine, theirs in zip(leaves, (xs[me], weight, residual, bias)):
            if mine is not None:
                assert torch.allclose(mine.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-4), case
        with torch.no_grad():
            again, _ = ops.all_reduce_norm(x, others[0], eps=EPS, **options)
            assert torch.equal(again, out), "with and without gradients"
            moved, *others = (None if t is None else unaligned(t) for t in (x, *others))
            again, _ = ops.all_reduce_norm(moved, others[0], eps=EPS, **dict(zip(options, others[1:])))
            assert torch.equal(again, out), "of tensors that begin anywhere"


@ranks.on()
def test_gradient_is_summed():
    """Where ranks' losses are added up, the gradient of x is the sum over all ranks."""
    x = _drawn(tsn.rank()).to(tsn.device()).requires_grad_()
    weight = torch.ones(HIDDEN, device=tsn.device())
    _, total = ops.all_reduce_norm(x, weight)
    (total * (tsn.rank() + 1)).sum().backward()
    assert x.grad.eq(sum(range(1, tsn.size() + 1))).all()


@ranks.on()
def test_any_rows():
    """As passes over a server's graphs call the operators: no later number of rows needs another kernel."""
    x, weight = (_drawn(tsn.rank(), k).to(tsn.device()) for k in (1, 2))
    wanted = ops.all_reduce_norm(x, weight[0], eps=EPS)
    found = torch.ops.tilescale_net.all_reduce_norm(x, weight[0], None, None, EPS, True, "", any_rows=True)
    assert all(map(torch.equal, found, wanted))
    wanted = ops.all_reduce_norm_quantized(x, weight[0], by="token", eps=EPS)
    arguments = (x, weight[0], *[None] * 6, "token", "row", False, EPS, 0.0, "")
    quantized, total, scales = torch.ops.tilescale_net.all_reduce_norm_quantized(*arguments, any_rows=True)
    assert torch.equal(quantized.view(torch.uint8), wanted.quantized.view(torch.uint8))
    assert torch.equal(total, wanted.total) and torch.equal(scales, wanted.scales)
    norm = norms.norm_of(group_objects.in_order(""), HIDDEN)
    assert norm._warm == {(x.dtype, ""), (x.dtype, "token")} and norm.shots is None


def _experts_of(rank: int, tokens=6, top_k=3) -> ExpertRows:
    g = torch.Generator().manual_seed(40 + rank)
    index = torch.randint(-2, 11, (tokens, top_k), generator=g, dtype=torch.int32)
    rows, shared = (torch.randn((n, HIDDEN), generator=g) for n in (11, tokens))
    return ExpertRows(rows, index, torch.rand((tokens, top_k), generator=g), shared)


def _end_of_moe_layer(compiled: bool) -> None:
    """The sum of experts by the kernel and, where there are gradients, by torch: equal bits."""
    me, n, device = tsn.rank(), tsn.size(), tsn.device()
    call = torch.compile(ops.all_reduce_norm, fullgraph=True, backend="aot_eager") if compiled else ops.all_reduce_norm
    weight = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(3))
    everyone = [_experts_of(p) for p in range(n)]
    parts = [t.clone().requires_grad_(t.is_floating_point()) for t in everyone[me]]
    sums = [sum_of_experts(e) for e in everyone]
    sums[me] = sum_of_experts(ExpertRows(*parts))
    wanted, total = _reference(sums, weight + 1, None, None)
    (wanted * _drawn(1, shape=wanted.shape)).sum().backward()
    tensors = [t.detach().to(device).requires_grad_(t.is_floating_point()) for t in parts]
    out, new = call(ExpertRows(*tensors), weight.to(device), eps=EPS, weight_bias=1.0, replicated=True)
    assert torch.allclose(out.cpu(), wanted, rtol=1e-4, atol=1e-5)
    assert torch.allclose(new.cpu(), total, rtol=1e-5, atol=1e-6)
    (out * _drawn(1, shape=wanted.shape).to(device)).sum().backward()
    for mine, theirs in zip(tensors, parts):
        if theirs.grad is not None:
            assert torch.allclose(mine.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        again, _ = call(ExpertRows(*tensors), weight.to(device), eps=EPS, weight_bias=1.0)
    assert_same(again.cpu(), out.detach().cpu())


def _fp8(compiled: bool) -> None:
    me, device, hidden = tsn.rank(), tsn.device(), 256
    call = (
        torch.compile(ops.all_reduce_norm_quantized, fullgraph=True, backend="aot_eager")
        if compiled
        else ops.all_reduce_norm_quantized
    )
    x, residual = (_drawn(5, k, shape=(2, 3, hidden)).to(device, torch.bfloat16) for k in (me, 9))
    weight, scale = torch.ones(hidden, dtype=torch.bfloat16, device=device), torch.full((1,), 0.25, device=device)
    out, total = ops.all_reduce_norm(x, weight, residual=residual)
    for by, layout in (
        ("tensor", "row"),
        ("token", "row"),
        ("block", "row"),
        ("block", "tma"),
        ("ue8m0", "row"),
        ("ue8m0_packed", "tma"),
    ):
        found = call(
            x, weight, by=by, layout=layout, residual=residual, scale=scale if by == "tensor" else None,
            keep_normed=by == "token",
        )  # fmt: skip
        wanted, scales = _quantised(out.cpu().view(6, hidden), by, scale.cpu())
        assert_same(found.quantized.cpu().view(6, hidden), wanted, by)
        assert_same(found.scales.cpu().clone(memory_format=torch.contiguous_format), scales, by)
        assert_same(found.total.cpu(), total.cpu(), by)
        assert found.scales.stride() == {"row": scales.stride(), "tma": (1, 8)}[layout]
        assert by != "token" or torch.equal(found.normed, out)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@variants(1, "body", [_end_of_moe_layer, _fp8], ids=lambda f: f.__name__[1:])
def test_forms(body, compiled):
    ranks.run(2, body, compiled, timeout=300)


@ranks.on(1)
def test_misuse_of_fp8_is_named():
    x, weight = torch.zeros((2, 64), device=tsn.device()), torch.zeros(64, device=tsn.device())
    one, call = torch.ones(1, device=tsn.device()), ops.all_reduce_norm_quantized
    rejected(
        (lambda: call(x, weight), ValueError, "64", "128"),
        (lambda: call(x, weight, by="row"), ValueError, "'row'", "token"),
        (lambda: call(x, weight, by="tensor"), ValueError, "scale", "missing"),
        (lambda: call(x, weight, by="token", scale=one), ValueError, "scale", "passed"),
        (lambda: call(x, weight, by="token", layout="tile"), ValueError, "'tile'", "column"),
        (lambda: call(x.requires_grad_(), weight, by="token"), TypeError, "gradient", "all_reduce_norm"),
    )
