"""A layer's experts from tokens to tokens, against a dense layer in plain torch on one process; values and gradients."""

import functools

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe.support import without_kernels
from tests.variants import nightly, variants
from tilescale_net import ops
from tilescale_net.kernels.fused.scaled_gemm import dequantise_weights, quantise_weights
from tilescale_net.kernels.moe import AllToAll, Tuning
from tilescale_net.kernels.moe.row_ops import dequantise, quantise

EXPERTS, INNER, TOP_K, TOKENS = 4, 64, 2, 7
HIDDEN = 512  # scales of eight bits by fours, so that GEMMs overlap
ROWS = 128 if ranks.gpus() else 32  # tensor cores of GPUs take rows by 128
MOE = dict(tile_rows=ROWS, alignment=ROWS, capacity=4 * ROWS, tuning=Tuning(once_per_node=False))
FP8 = torch.float8_e4m3fn
CLAMPED = ops.SwiGLU(clamp=1.0, alpha=1.702, shift=1.0)


def _as_if(exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Rounded numbers with the gradients of the exact ones."""
    return exact + (rounded - exact).detach()


def _rows(x: torch.Tensor) -> torch.Tensor:
    return _as_if(x, dequantise(*quantise(x.detach().reshape(-1, x.shape[-1]))).view(x.shape))


def _matrices(w: torch.Tensor) -> torch.Tensor:
    transposed = w.detach().transpose(-1, -2)
    return _as_if(w, dequantise_weights(*quantise_weights(transposed), torch.float32).transpose(-1, -2))


def _as_bf16(h: torch.Tensor) -> torch.Tensor:
    """Near a clamp, rounding decides which elements have a gradient."""
    return _as_if(h, h.bfloat16().float())


def _shared(x, up, down, kind):
    return kind(_as_bf16(x @ up)) @ down


def _dense(x, idx, p, up, down, shared, kind, eight):
    rows, matrices = (_rows, _matrices) if eight else (lambda t: t, lambda t: t)
    h = _as_bf16(torch.einsum("th,ehi->tei", rows(x), matrices(up)))
    every = torch.einsum("tei,eih->teh", rows(kind(h)), matrices(down))
    chosen = every[torch.arange(len(x))[:, None], idx.clamp(min=0)]
    return (chosen * (p * (idx >= 0))[..., None]).sum(1) + _shared(x, *shared, kind)


def _data(seed: int, size: int):
    """A rank without tokens in every second case, and a choice that is none."""
    g = torch.Generator().manual_seed(seed)
    tokens = [TOKENS - 2 * r if r + 1 < size else 0 for r in range(size)] if seed % 2 else [TOKENS] * size
    numbers = lambda *shape: torch.randn(shape, generator=g).bfloat16().float().requires_grad_()  # noqa: E731
    xs, upstream = [numbers(n, HIDDEN) for n in tokens], [numbers(n, HIDDEN) for n in tokens]
    choices = [torch.rand((n, EXPERTS), generator=g).topk(TOP_K, 1)[1] for n in tokens]
    choices[0][1, 0] = -1
    weights = [torch.rand((n, TOP_K), generator=g).requires_grad_() for n in tokens]
    shapes = (EXPERTS, HIDDEN, 2 * INNER), (EXPERTS, INNER, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN)
    matrices = [(numbers(*shape).detach() / shape[-2] ** 0.5).bfloat16().float().requires_grad_() for shape in shapes]
    return xs, choices, weights, matrices, upstream


def _close(found, wanted, label, rounding=0.02):
    """By the norm: a number of eight bits near the middle of two may go to the other one."""
    error = (found.detach().float().cpu() - wanted.detach()).norm()
    assert error <= rounding * wanted.detach().norm() + 1e-6, (label, float(error), float(wanted.norm()))


def _in_a_graph(layer, *inputs) -> None:
    """On GPUs: captured, and replayed with other tokens."""
    if layer.device.type != "cuda":
        return
    x, *others = (t.detach().clone() for t in inputs)
    with torch.no_grad():
        ops.moe_experts(layer, x, *others)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = ops.moe_experts(layer, x, *others)
        x.mul_(-1.5)
        graph.replay()
        assert torch.equal(out, ops.moe_experts(layer, x, *others))


def _given_in_eight_bits(layer, x, idx, p, w_up, w_down) -> None:
    """Matrices that were quantised before: the same bits, and gradients of all but them."""
    with torch.no_grad():
        quantised = [quantise_weights(w.transpose(1, 2)) for w in (w_up, w_down)]
    matrices = [w.transpose(1, 2) for w, _ in quantised]
    wanted = ops.moe_experts(layer, x, idx, p, w_up, w_down)
    gradients = torch.autograd.grad(wanted.float().sum(), (x, p))
    found = ops.moe_experts(layer, x, idx, p, *matrices, scales=tuple(scales for _, scales in quantised))
    again = torch.autograd.grad(found.float().sum(), (x, p))
    assert torch.equal(found, wanted) and all(map(torch.equal, again, gradients))
    with torch.no_grad():
        assert torch.equal(ops.moe_experts(layer, x, idx, p, w_up, w_down), wanted)


def _operators(layer, x, idx, p, w_up, w_down) -> None:
    operators = torch.ops.tilescale_net
    check = functools.partial(
        torch.library.opcheck, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )
    none = w_up.new_empty((0,), dtype=torch.float32).detach()
    up, down = (w.detach().transpose(1, 2).requires_grad_() for w in (w_up, w_down))
    check(operators.moe_experts_up, (x, idx, p, up, none, True, False, layer.key))
    h, _, _, weights, *others = operators.moe_experts_up(x, idx, p, up, none, True, False, layer.key)
    plan, h = [t.detach() for t in (*others, weights)], h.detach().requires_grad_()
    constants, of_rows = (float("inf"), 1.0, 0.0), weights.detach().requires_grad_()
    check(
        operators.moe_experts_down,
        (h, down, none, of_rows, plan, len(x), False, False, *constants, layer.key),
    )
    h, of_rows, up, down = (t.detach() for t in (h, of_rows, up, down))
    check(operators.moe_experts_up_backward, (h, of_rows, up, none, plan, len(x), layer.key))
    for keeps in (False, True):
        arguments = x.detach(), h, down, none, of_rows, plan, len(x), False, *constants, keeps, layer.key
        check(operators.moe_experts_down_backward, arguments)
    check(operators.moe_widened, (torch.ones((3, HIDDEN), dtype=torch.uint8), torch.ones((3, HIDDEN // 128))))


@variants(
    0,
    "dtype, size, nodes, compiles",
    [(FP8, 2, 1, True), (torch.bfloat16, 2, 2, False), nightly(FP8, 4, 2, False), nightly(torch.bfloat16, 4, 1, True)],
)
@ranks.on(timeout=280)
def test_equals_torch(dtype, size, nodes, compiles):
    size, rank, device, eight = tsn.size(), tsn.rank(), tsn.device(), dtype == FP8
    layer = ops.moe_layer(EXPERTS, TOKENS, HIDDEN, TOP_K, dtype, **MOE)
    local = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
    plain = ops.moe_experts
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    for seed, (kind, weights) in enumerate(((ops.SwiGLU(), "combine"), (CLAMPED, "activation"))):
        xs, choices, chances, matrices, upstream = _data(seed, size)
        *of_experts, up, down = matrices
        wanted = [_dense(x, i, p, *of_experts, (up, down), kind, eight) for x, i, p in zip(xs, choices, chances)]
        sum((s * u).sum() for s, u in zip(wanted, upstream)).backward()
        shared_grads = [torch.autograd.grad(
            (_shared(xs[rank].detach(), up, down, kind) * upstream[rank]).sum(), m, retain_graph=True
        )[0] for m in (up, down)]  # fmt: skip
        here = xs[rank], *(w[local] for w in of_experts), up, down
        x, w_up, w_down, *shared = (t.detach().to(device, torch.bfloat16, copy=True).requires_grad_() for t in here)
        p = chances[rank].detach().to(device, copy=True).requires_grad_()
        if seed:  # as torch.nn.Linear holds them; torch copies a gradient in another order than its parameter's
            w_up, w_down = (w.detach().mT.contiguous().mT.requires_grad_() for w in (w_up, w_down))
        in_order: list[bool] = []
        for w in (w_up, w_down):
            w.register_hook(lambda g, w=w, seen=in_order: seen.append(g.stride() == w.stride()))
        idx = choices[rank].to(device)
        for how in (plain, compiled) if compiles and not seed else (plain,):
            out = how(layer, x, idx, p, w_up, w_down, activation=kind, weights=weights, shared=tuple(shared))
            (out * upstream[rank].to(device, torch.bfloat16)).sum().backward()
            _close(out, wanted[rank], "sums")
            _close(x.grad, xs[rank].grad, "x")
            _close(p.grad, chances[rank].grad * (choices[rank] >= 0), "weights", 0.05)
            _close(w_up.grad, of_experts[0].grad[local], "w_up")
            _close(w_down.grad, of_experts[1].grad[local], "w_down", 0.05 if eight else 0.02)
            for found, exact in zip(shared, shared_grads):
                _close(found.grad, exact, "shared")
            for t in (x, p, w_up, w_down, *shared):
                t.grad = None
        assert in_order and all(in_order)
    _in_a_graph(layer, x, idx, p, w_up, w_down)
    if eight:
        _given_in_eight_bits(layer, x, idx, p, w_up, w_down)
    _operators(layer, x, idx, p, w_up, w_down)
    layer.free()


@ranks.on(1)
def test_misuse():
    x, idx = torch.zeros((1, HIDDEN), dtype=torch.bfloat16), torch.zeros((1, TOP_K), dtype=torch.int64)
    inputs = x, idx, torch.ones((1, TOP_K))
    up = torch.zeros((EXPERTS, HIDDEN, 2 * INNER), dtype=torch.bfloat16)
    down = torch.zeros((EXPERTS, INNER, HIDDEN), dtype=torch.bfloat16)
    with without_kernels():
        plain = AllToAll(EXPERTS, TOKENS, HIDDEN, TOP_K, **MOE)
        layer = AllToAll(EXPERTS, TOKENS, HIDDEN, TOP_K, FP8, **MOE)
        other = AllToAll(EXPERTS, TOKENS, HIDDEN, TOP_K, FP8, scale_words=2, **MOE)
        odd = AllToAll(EXPERTS, TOKENS, 128, TOP_K, FP8, **MOE)
    scales = torch.ones((EXPERTS, 1, 1)), torch.ones((EXPERTS, 1, 1))
    for of, matrices, options, error, words in (
        (plain, (up, down), dict(scales=scales), TypeError, "scales go with a layer of torch.float8_e4m3fn"),
        (plain, (up[..., :INNER], down), {}, ValueError, "w_up has 64 columns; w_down has 64 rows, so they must be twice"),
        (plain, (up, down), dict(weights="early"), ValueError, "weights is 'early'; it must be one of combine, activation"),
        (plain, (up, down), dict(activation="silu"), TypeError, "activation is 'silu'; it must be a SwiGLU"),
        (plain, (up, down), dict(shared=(up, down)), ValueError, r"shared has shapes .* they must be \[512, 2 \* inner\]"),
        (plain, (up, down), dict(shared=up), TypeError, "shared must be a pair of tensors"),
        (None, (up, down), {}, TypeError, "layer must be an AllToAll"),
        (other, (up, down), {}, ValueError, "must be of throughput mode, with scales of 128 elements"),
        (layer, (up, down), dict(scales=scales), TypeError, "w_up is of torch.bfloat16; matrices of torch.float8_e4m3fn"),
        (layer, (up.float(), down), {}, TypeError, "w_up has dtype torch.float32"),
        (odd, (up[:, :128], down[..., :128]), dict(fused=True), ValueError, "hidden is 128; GEMMs of .* multiple of 512"),
        (layer, (up, down[:, :3]), {}, ValueError, r"w_up has shape .* it must be \[4, 512, 6\]"),
        (layer, (up.to(FP8), down.to(FP8)), dict(scales=(scales[0][:2], scales[1])), ValueError, "the scales of w_up are"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            ops.moe_experts(of, *inputs, *matrices, **options)
    with pytest.raises(TypeError, match="x has dtype torch.float32; for a layer of torch.float8_e4m3fn it must be"):
        ops.moe_experts(layer, x.float(), *inputs[1:], up, down)
