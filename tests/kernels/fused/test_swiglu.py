"""SwiGLU and quantisation of rows in one kernel, against plain torch."""

import functools

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.support import assert_same
from tilescale_net.kernels.fused.scaled_gemm import dequantise_weights, quantise_weights
from tilescale_net.kernels.fused.swiglu import (
    SwiGLU,
    quantise_matrices,
    quantise_rows,
    round_matrices,
    swiglu,
    swiglu_gradient,
    swiglu_quantised,
    widened,
)
from tilescale_net.kernels.moe.row_ops import dequantise, quantise, weight_rows, zero_padding

# gpt-oss's, and the plain one.
KINDS = SwiGLU(clamp=7.0, alpha=1.702, shift=1.0), SwiGLU()


@ranks.on(1)
def test_equals_torch():
    device, generator = tsn.device(), torch.Generator().manual_seed(3)
    for rows, inner, kind in ((37, 272, KINDS[0]), (5, 48, KINDS[1])):
        h = (4 * torch.randn((rows, 2 * inner), generator=generator)).bfloat16()
        weights, end = torch.rand(rows, generator=generator), torch.tensor([rows - 3], dtype=torch.int32)
        wanted = kind(h.float()) * weights[:, None]
        wanted[rows - 3 :] = 0
        options = dict(counts=end.to(device), weights=weights.to(device))
        found = swiglu(h.to(device), kind, **options).float().cpu()
        assert torch.allclose(found, wanted, rtol=2**-7, atol=1e-5)
        q, scales = (t.cpu() for t in swiglu_quantised(h.to(device), kind, **options))
        assert scales.shape[1] % 4 == 0 and not scales[rows - 3 :].any()
        blocks = -(-inner // 128)
        largest = torch.nn.functional.pad(wanted, (0, blocks * 128 - inner)).view(rows, blocks, 128).abs().amax(-1)
        assert torch.allclose(scales[: rows - 3, :blocks], (largest.clamp(min=1e-4) / 448)[: rows - 3], rtol=1e-5)
        # Three bits of mantissa, and a step below the least normal number.
        close = (dequantise(q, scales) - wanted).abs() <= wanted.abs() / 16 + scales[:, :1].max() * 2**-9
        assert bool(close.all())
        for found, exact in zip(quantise_rows(h.to(device)), quantise(h)):
            assert_same(found.cpu(), exact)
    assert quantise_rows(torch.zeros((0, 64), dtype=torch.bfloat16, device=device))[0].shape == (0, 64)
    with pytest.raises(ValueError, match=r"swiglu: h \[2, 24\] must be contiguous and have a multiple of 16 columns"):
        swiglu(torch.zeros((2, 24), dtype=torch.bfloat16), KINDS[0])
    with pytest.raises(TypeError, match="h must be a tensor"):
        swiglu_quantised(torch.zeros((2, 32)), KINDS[0])


@ranks.on(1)
def test_gradients():
    device, generator = tsn.device(), torch.Generator().manual_seed(5)
    for rows, inner, kind, weighted in ((9, 272, KINDS[0], True), (5, 48, KINDS[1], True), (3, 16, KINDS[0], False)):
        h = (4 * torch.randn((rows, 2 * inner), generator=generator)).bfloat16()
        grad = torch.randn((rows, inner), generator=generator).bfloat16()
        weights = torch.rand(rows, generator=generator)
        end = torch.tensor([rows - 2], dtype=torch.int32)
        exact, p = (t.double().requires_grad_() for t in (h, weights if weighted else torch.ones(rows)))
        gate, up = exact.chunk(2, -1)
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
        wanted = (up + kind.shift) * gate * torch.sigmoid(kind.alpha * gate) * p[:, None]
        wanted[: rows - 2].backward(grad[: rows - 2].double())
        options = dict(counts=end.to(device), weights=weights.to(device) if weighted else None)
        of_h, of_weights, kept = swiglu_gradient(h.to(device), grad.to(device), kind, **options, keeps=weighted)
        assert torch.allclose(of_h.cpu().double(), exact.grad, rtol=2**-7, atol=1e-4)
        assert not of_h[rows - 2 :].any()
        if not weighted:
            assert of_weights is None and kept is None
            continue
        assert torch.allclose(of_weights.cpu().double(), p.grad, rtol=1e-4, atol=1e-3)
        wanted[rows - 2 :] = 0
        assert torch.allclose(kept.cpu().double(), wanted, rtol=2**-7, atol=1e-5)
    with pytest.raises(ValueError, match=r"swiglu_gradient: grad must be contiguous, \[3, 16\] of torch.bfloat16"):
        swiglu_gradient(h.to(device), grad[:2].to(device), kind)


@ranks.on(1)
def test_padding_is_left_out():
    """Rows of experts have the bits that they have by themselves, whatever is in padding; more experts than warps."""
    device, generator, kind = tsn.device(), torch.Generator().manual_seed(9), KINDS[1]
    room = torch.randint(0, 5, (40,), generator=generator)
    counts = (room * torch.rand(40, generator=generator)).round()
    offsets = torch.nn.functional.pad(room.cumsum(0), (1, 0))
    mine = torch.cat([torch.arange(f, f + n) for f, n in zip(offsets.tolist(), counts.int().tolist())]).to(device)
    rows = int(offsets[-1]) + 3
    h, grad = (torch.full((rows, n), float("nan"), dtype=torch.bfloat16, device=device) for n in (1024, 512))
    h[mine], grad[mine] = (torch.randn((len(mine), n), generator=generator).bfloat16().to(device) for n in (1024, 512))
    weights = torch.rand(rows, generator=generator).to(device)
    ends: dict[str, torch.Tensor] = dict(counts=counts.int().to(device), offsets=offsets.int().to(device))
    for of in (swiglu, swiglu_quantised, functools.partial(swiglu_gradient, grad=grad, keeps=True)):
        alone = dict(grad=grad[mine]) if isinstance(of, functools.partial) else {}
        found = of(h, activation=kind, weights=weights, **ends)
        wanted = of(h[mine], activation=kind, weights=weights[mine], **alone)
        for some, exact in zip(*((t,) if isinstance(t, torch.Tensor) else t for t in (found, wanted))):
            assert_same(some[mine].cpu(), exact.cpu())
            some[mine] = 0
            assert not some.float().any()


@ranks.on(1)
def test_matrices():
    device, generator = tsn.device(), torch.Generator().manual_seed(8)
    for shape, dtype in (((2, 200, 272), torch.bfloat16), ((1, 8, 128), torch.float16)):
        w = torch.randn(shape, generator=generator).to(dtype) * 3
        w[0, :8] = 0
        exact = quantise_weights(w)
        for found, wanted in zip(quantise_matrices(w.to(device)), exact):
            assert_same(found.cpu(), wanted)
        assert_same(round_matrices(w.to(device)).cpu(), dequantise_weights(*exact, dtype))
    assert round_matrices(w[:0].to(device)).shape == (0, 8, 128)
    with pytest.raises(ValueError, match=r"w is \[1, 8, 12\] of torch.float16; it must be contiguous"):
        quantise_matrices(w[..., :12])


@ranks.on(1)
def test_widened():
    device, generator = tsn.device(), torch.Generator().manual_seed(7)
    w = torch.randn((3, 200, 272), generator=generator)
    q, scales = quantise_weights(w)
    assert_same(widened(q.to(device), scales.to(device)).cpu(), dequantise_weights(q, scales) + 0)
    q, scales = quantise(w[0])
    padded = torch.nn.functional.pad(scales, (0, 1))
    for of_rows in (scales, padded):
        assert_same(widened(q.to(device), of_rows.to(device)).cpu(), dequantise(q, scales).bfloat16() + 0)
    assert widened(q[:0].to(device), scales[:0].to(device)).shape == (0, 272)
    with pytest.raises(ValueError, match=r"widened: q is \[200, 272\] and scales \[2, 3\]; .* scales \[200, 3\]"):
        widened(q, scales[:2])


@ranks.on(1)
def test_padding_becomes_zero():
    device, generator = tsn.device(), torch.Generator().manual_seed(3)
    for experts, columns, dtype in ((5, 16, torch.bfloat16), (1, 3, torch.float32), (3, 272, torch.uint8)):
        room = torch.randint(0, 9, (experts,), generator=generator, dtype=torch.int32)
        counts = (room * torch.rand(experts, generator=generator)).int()
        offsets = torch.cat((counts[:0].new_zeros(1), room.cumsum(0).int()))
        rows = torch.randint(1, 99, (int(offsets[-1]) + 4, columns), generator=generator).to(dtype)
        wanted = torch.zeros_like(rows)
        for first, count in zip(offsets.tolist(), counts.tolist()):
            wanted[first : first + count] = rows[first : first + count]
        x = rows.to(device)
        ends = counts.to(device), offsets.to(device)
        assert torch.equal(zero_padding(x, *ends, copied=True).cpu(), wanted) and torch.equal(x.cpu(), rows)
        assert zero_padding(x, *ends) is x and torch.equal(x.cpu(), wanted)
    for dtype in (torch.bfloat16, torch.float32):
        rows, y = (torch.randn((len(wanted), 344), generator=generator).to(dtype) for _ in range(2))
        weights, padding = torch.rand(len(rows), generator=generator), (wanted == 0).all(1)
        rows[padding], y[padding], weights[padding] = float("nan"), float("nan"), float("nan")
        out, dots = (t.cpu() for t in weight_rows(rows.to(device), weights.to(device), *ends, y.to(device)))
        exact = torch.where(padding[:, None], 0.0, rows.float() * weights[:, None]).to(dtype)
        assert_same(out, exact)
        assert torch.allclose(dots, torch.where(padding, 0.0, (rows.float() * y.float()).sum(-1)), atol=1e-3)
        alone, none = weight_rows(rows.to(device), weights.to(device), *ends)
        assert_same(alone.cpu(), exact)
        assert none.shape == (0,)
    rows = torch.ones((9, 272), dtype=torch.uint8)
    x = rows.to(device)
    assert torch.equal(zero_padding(x, counts[:1].to(device) * 0 + 2).cpu()[2:], torch.zeros_like(rows[2:]))
    assert torch.equal(x[:2].cpu(), rows[:2]) and zero_padding(x[:0], *ends).shape == (0, 272)


def test_a_clamp_is_positive():
    with pytest.raises(ValueError, match="clamp is 0; it must be a positive number"):
        SwiGLU(clamp=0)
