"""Products of experts beside dispatch and combine, as operators: gradients against a dense layer on one process."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe.support import without_kernels
from tests.variants import nightly, variants
from tilescale_net import ops
from tilescale_net.kernels.moe import AllToAll

EXPERTS, HIDDEN, INNER, TOP_K, TOKENS = 4, 48, 48, 2, 7
ROWS = 128 if ranks.gpus() else 32  # tensor cores of GPUs take rows by 128
MOE = dict(tile_rows=ROWS, alignment=ROWS, capacity=4 * ROWS)
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def _layer(layer, x, idx, p, w_gate, w_up, w_down, fused=None):
    up, received = ops.moe_dispatch_matmul(layer, x, idx, p, w_up, fused=fused)
    gate = ops.expert_matmul(layer, received.x, w_gate, received)
    return ops.moe_matmul_combine(layer, torch.relu(gate) * up, w_down, received, fused=fused)


def _dense(x, idx, p, w_gate, w_up, w_down):
    every = torch.einsum("tei,eih->teh", torch.relu(torch.einsum("th,ehi->tei", x, w_gate))
                         * torch.einsum("th,ehi->tei", x, w_up), w_down)  # fmt: skip
    chosen = every[torch.arange(len(x))[:, None], idx.clamp(min=0)]
    return (chosen * (p * (idx >= 0))[..., None]).sum(1)


def _data(seed: int, size: int, dtype):
    """Whole numbers, whose sums 16 bits hold; a rank without tokens, and choices that are none."""
    g = torch.Generator().manual_seed(seed)
    tokens = [TOKENS - 2 * r if r + 1 < size else 0 for r in range(size)] if seed % 2 else [TOKENS] * size
    numbers = lambda *shape: torch.randint(-1, 2, shape, generator=g).float().requires_grad_()  # noqa: E731
    xs = [numbers(n, HIDDEN) for n in tokens]
    choices = [torch.rand((n, EXPERTS), generator=g).topk(TOP_K, 1)[1] for n in tokens]
    choices[0][1, 0] = -1
    weights = [torch.randint(1, 3, (n, TOP_K), generator=g).float().requires_grad_() for n in tokens]
    sparse = lambda *shape: (numbers(*shape) * (torch.rand(shape, generator=g) < 0.1)).detach().requires_grad_()  # noqa: E731
    matrices = sparse(EXPERTS, HIDDEN, INNER), sparse(EXPERTS, HIDDEN, INNER), sparse(EXPERTS, INNER, HIDDEN)
    upstream = [torch.randint(-1, 2, (n, HIDDEN), generator=g).float() for n in tokens]
    return xs, choices, weights, matrices, upstream


def _in_other_surroundings(layer, *tensors) -> None:
    """Computed again in backward, in inference mode, under another default device and in another thread: the same."""
    inputs = [t for t in tensors if t.requires_grad]
    wanted = _layer(layer, *tensors)
    gradients = torch.autograd.grad(wanted.float().sum(), inputs)
    one_after_the_other = functools.partial(_layer, fused=False)
    for again in (checkpoint(_layer, layer, *tensors, use_reentrant=False), one_after_the_other(layer, *tensors)):
        found = torch.autograd.grad(again.float().sum(), inputs)
        assert torch.equal(again, wanted) and all(map(torch.equal, found, gradients))

    def elsewhere() -> torch.Tensor:
        with torch.inference_mode(), torch.device("meta"):
            return _layer(layer, *tensors)

    with torch.autocast(layer.device.type, layer.config.dtype):
        found = _layer(layer, *(t.float() if t.is_floating_point() else t for t in tensors))
    assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(elsewhere).result(), wanted)


def _operators(layer, x, idx, p, matrices) -> None:
    operators, check = torch.ops.tilescale_net, functools.partial(torch.library.opcheck, test_utils=CHECKS[:3])
    torch.library.opcheck(operators.moe_dispatch_matmul, (x, idx, p, matrices[1], True, layer.key), test_utils=CHECKS)
    outputs = operators.moe_dispatch_matmul(x, idx, p, matrices[1], True, layer.key)
    h, rows, weights, *others = (t.detach() for t in outputs)
    plan, n = [*others, weights], len(x)
    check(operators.expert_matmul, (rows.requires_grad_(), matrices[0], plan, n, layer.key))
    check(operators.moe_matmul_combine, (h.requires_grad_(), matrices[2], weights, plan, n, True, layer.key))
    for arguments in (weights, weights[:0]):
        arguments = x.detach(), h.detach(), matrices[2].detach(), arguments, plan, n, True, layer.key
        check(operators.moe_matmul_combine_backward, arguments)


@variants(0, "dtype", [torch.bfloat16, nightly(torch.float16)])
@ranks.on(timeout=250)
def test_gradients(dtype):
    size, rank, device = tsn.size(), tsn.rank(), tsn.device()
    layer = ops.moe_layer(EXPERTS, TOKENS, HIDDEN, TOP_K, dtype, **MOE)
    local = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
    compiled = torch.compile(_layer, fullgraph=True, dynamic=dtype == torch.bfloat16 or None, backend="aot_eager")
    for seed in (0, 1):
        xs, choices, weights, matrices, upstream = _data(seed, size, dtype)
        wanted = [_dense(x, idx, p, *matrices) for x, idx, p in zip(xs, choices, weights)]
        sum((s * u).sum() for s, u in zip(wanted, upstream)).backward()
        here = xs[rank], weights[rank], *(w[local] for w in matrices)
        kinds = dtype, torch.float32, dtype, dtype, dtype
        x, p, *mine = (t.detach().to(device, k, copy=True).requires_grad_() for t, k in zip(here, kinds))
        idx = choices[rank].to(device)
        # Each number of tokens is compiled, which takes longest.
        for how in (_layer,) if seed and dtype == torch.bfloat16 else (_layer, compiled):
            out = how(layer, x, idx, p, *mine)
            (out * upstream[rank].to(device, dtype)).sum().backward()
            close = functools.partial(torch.testing.assert_close, atol=1e-2, rtol=1e-2)
            close(out.float().cpu(), wanted[rank])
            close(x.grad.float().cpu(), xs[rank].grad)
            close(p.grad.cpu(), weights[rank].grad * (choices[rank] >= 0))
            for found, whole in zip(mine, matrices):
                close(found.grad.float().cpu(), whole.grad[local])
            for t in (x, p, *mine):
                t.grad = None
    _in_other_surroundings(layer, x, idx, p, *mine)
    _operators(layer, x, idx, p, mine)
    layer.free()


@ranks.on(1)
def test_refusals():
    x, idx = torch.zeros((1, HIDDEN), dtype=torch.bfloat16), torch.zeros((1, TOP_K), dtype=torch.int64)
    inputs = x, idx, torch.ones((1, TOP_K))
    w = torch.zeros((EXPERTS, HIDDEN, INNER), dtype=torch.bfloat16)
    with without_kernels():
        plain = AllToAll(EXPERTS, TOKENS, HIDDEN, TOP_K)
        layer = AllToAll(EXPERTS, TOKENS, HIDDEN, TOP_K, **MOE)
    with pytest.raises(ValueError, match="make it with tile_rows"):
        ops.moe_dispatch_matmul(plain, *inputs, w)
    for wrong, error, words in (
        (w[1:], ValueError, r"w has shape \[3, 48, 48\]; it must be \[4, 48, n\]"),
        (w.float(), TypeError, "w has dtype torch.float32; it must be torch.bfloat16"),
        (w[..., :3], ValueError, "n is 3; it must be a multiple of 8"),
        (w.to("meta"), ValueError, "w is on meta, but x on"),
        (w.tolist(), TypeError, "w must be a tensor, not list"),
    ):
        with pytest.raises(error, match=words):
            ops.moe_dispatch_matmul(layer, *inputs, wrong)
