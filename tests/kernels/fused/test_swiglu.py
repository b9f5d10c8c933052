"""SwiGLU and quantisation of rows in one kernel, against plain torch."""

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.support import assert_same
from tilescale_net.kernels.fused.swiglu import SwiGLU, quantise_rows, swiglu, swiglu_quantised
from tilescale_net.kernels.moe.row_ops import dequantise, quantise

# gpt-oss's, and the plain one.
KINDS = SwiGLU(clamp=7.0, alpha=1.702, shift=1.0), SwiGLU()


def _rows() -> None:
    device, generator = tsn.device(), torch.Generator().manual_seed(3)
    for rows, inner, kind in ((37, 272, KINDS[0]), (5, 48, KINDS[1])):
        h = (4 * torch.randn((rows, 2 * inner), generator=generator)).bfloat16()
        weights, end = torch.rand(rows, generator=generator), torch.tensor([rows - 3], dtype=torch.int32)
        wanted = kind(h.float()) * weights[:, None]
        wanted[rows - 3 :] = 0
        given = dict(end=end.to(device), weights=weights.to(device))
        found = swiglu(h.to(device), kind, **given).float().cpu()
        assert torch.allclose(found, wanted, rtol=2**-7, atol=1e-5)
        q, scales = (t.cpu() for t in swiglu_quantised(h.to(device), kind, **given))
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


def test_equals_torch():
    ranks.run(1, _rows)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient(kind):
    h = torch.randn((6, 32), dtype=torch.float64).mul(4).requires_grad_()
    grad = torch.randn((6, 16))
    gate, up = h.chunk(2, -1)
    gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
    ((up + kind.shift) * gate * torch.sigmoid(kind.alpha * gate)).backward(grad.double())
    found = kind.gradient(h.detach().float(), grad)
    assert torch.allclose(found.double(), h.grad, rtol=1e-4, atol=1e-5)


def test_a_clamp_is_positive():
    with pytest.raises(ValueError, match="clamp is 0; it must be a positive number"):
        SwiGLU(clamp=0)
