"""Operators of context parallelism against torch, with gradients, under torch.compile."""

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.test_attention_merge import merged, partial_of
from tilescale_net import ops


def _merged(compiled: bool) -> None:
    me, n = tsn.rank(), tsn.size()
    call = torch.compile(ops.merge_attention, fullgraph=True) if compiled else ops.merge_attention
    for all_heads, base_2 in ((False, True), (True, False)):
        for turn in range(2):
            partials = [partial_of((3, 2 * n, 32), torch.bfloat16, base_2, turn, p) for p in range(n)]
            x, lse = (t.to(tsn.device()) for t in partials[me])
            # Tensors that are not contiguous, as slices of a padded batch are.
            out, total = call(x.transpose(0, 1).contiguous().transpose(0, 1), lse, all_heads=all_heads, base_2=base_2)
            own = slice(None) if all_heads else slice(2 * me, 2 * me + 2)
            wanted, wanted_lse = (t[:, own] for t in merged(partials, base_2))
            assert out.shape == wanted.shape and torch.allclose(out.cpu().double(), wanted, rtol=1e-2, atol=1e-2)
            assert torch.allclose(total.cpu().double(), wanted_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_merge_equals_one_rank(compiled):
    ranks.run(2, _merged, compiled, timeout=300)


@ranks.on()
def test_merge_has_no_gradient():
    x, lse = torch.zeros((1, 2, 8), device=tsn.device(), requires_grad=True), torch.zeros((1, 2), device=tsn.device())
    with pytest.raises(RuntimeError, match="no_grad"):
        ops.merge_attention(x, lse)
    with torch.no_grad():
        assert ops.merge_attention(x, lse)[0].eq(0).all()
    with pytest.raises(ValueError, match="batch, heads, dim"):
        ops.merge_attention(x[0].detach(), lse)
