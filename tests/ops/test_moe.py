"""Gradients through dispatch and combine against a dense layer on one process."""

import copy
import functools
import io
import os

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe.support import without_kernels
from tests.kernels.support import unaligned
from tests.variants import nightly, variants
from tilescale_net import ops
from tilescale_net.kernels.all_gather import AllGather
from tilescale_net.kernels.moe import AllToAll, Dispatched, Handle

EXPERTS, HIDDEN, TOP_K, TOKENS = 4, 16, 2, 6


def _expert(w, rows):
    return torch.tanh(rows @ w)


def _dense(xs, choices, probabilities, w):
    """Sums per token, with nothing but dense operations."""
    sums = []
    for x, idx, p in zip(xs, choices, probabilities):
        every = torch.stack([_expert(w[e], x) for e in range(EXPERTS)], 1)
        chosen = every[torch.arange(len(x))[:, None], idx.clamp(min=0)]
        sums.append((chosen * (p * (idx >= 0))[..., None]).sum(1))
    return sums


def _layer(op, layout, received, w):
    y = torch.zeros_like(received.x)
    for e in range(len(w)):
        begin, count = int(received.offsets[e]), int(received.counts[e])
        index = torch.arange(begin, begin + count, device=y.device)
        if layout == "rank":
            index = received.row_index[index].long()
        part = _expert(w[e], received.x[index])
        y = y.index_add(0, index, part * received.row_weight[begin : begin + count, None] if layout == "rank" else part)
    return ops.moe_combine(op, y, received)


def _other_weights(op, x, chosen, p) -> None:
    """Routers give weights in the dtype of their logits, also by autocast; their gradients are of that dtype."""
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        weights = p.to(dtype).requires_grad_()
        received = ops.moe_dispatch(op, x, chosen, weights)
        assert received.row_weight.dtype == torch.float32
        ops.moe_combine(op, received.x * received.row_weight[:1], received).sum().backward()
        same = weights.detach().float().requires_grad_()
        known = ops.moe_dispatch(op, x, chosen, same)
        ops.moe_combine(op, known.x * known.row_weight[:1], known).sum().backward()
        assert torch.equal(received.row_weight, known.row_weight) and torch.equal(weights.grad, same.grad.to(dtype))
        plain = op.dispatch(x, chosen, weights.detach())
        found = op.combine(
            plain.x, plain.handle, weights=plain.row_weight.to(dtype) if op.config.layout == "expert" else None
        )
        if op.config.layout == "expert":
            wanted = op.combine(plain.x, plain.handle, weights=plain.row_weight.to(dtype).float())
            assert torch.equal(found, wanted)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        weights = torch.softmax((x @ x.new_ones((HIDDEN, TOP_K))), -1)
        ops.moe_dispatch(op, x, chosen, weights.bfloat16())


# What is traced does not depend on the layout; shapes do.
CHECKS = {
    "expert": ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    "rank": ("test_schema", "test_faketensor"),
}


# By default torch first compiles for the numbers it sees, then for any.
@variants(0, "dynamic", [None, nightly(True)])
@ranks.on(timeout=200)
def test_compiled(dynamic):
    """One compiled function for layers with objects of their own, and for numbers of tokens that change."""
    sizes = (EXPERTS, TOKENS, HIDDEN, TOP_K, torch.float32)
    layers = [ops.moe_layer(*sizes, layout=kind) for kind in ("expert", "rank")]
    assert ops.moe_layer(*sizes, group=tsn.world()) is layers[0] and layers[0] is not layers[1]

    def apply(op, x, idx, p):
        received = ops.moe_dispatch(op, x, idx, p)
        return ops.moe_combine(op, received.x * 2, received)

    def checkpointed(op, x, idx, p):
        return checkpoint(apply, op, x, idx, p, use_reentrant=False)

    device = tsn.device()
    idx = torch.tensor([[0, 3], [1, 2], [2, 0], [3, 1], [1, 3]], device=device)
    compiled = torch.compile(apply, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    # A graph or two per object: below the limit of 8. At last one rank has no token, and takes part.
    for tokens in (5, 4, 3, 0 if tsn.rank() else 2):
        for op in layers:
            x = torch.arange(tokens * HIDDEN, dtype=torch.float32, device=device).view(tokens, HIDDEN)
            p = torch.full((tokens, TOP_K), 0.5, device=device)
            wanted = apply(op, x.requires_grad_(), idx[:tokens], p)
            wanted.sum().backward()
            gradient, x.grad = x.grad, None
            for how in (compiled,) if dynamic else (compiled, checkpointed):
                found = how(op, x, idx[:tokens], p)
                found.sum().backward()
                assert torch.equal(found, wanted) and torch.equal(x.grad, gradient)
                x.grad = None


SIZES = (EXPERTS, TOKENS, HIDDEN, TOP_K, torch.float32)  # kernels of test_compiled


class _Doubled(torch.nn.Module):
    """A module that holds a layer, and other objects of all ranks."""

    def __init__(self):
        super().__init__()
        self.layer, self.gather = ops.moe_layer(*SIZES), AllGather(threads=64, blocks=2)
        self.scale = torch.nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x, idx, p):
        received = ops.moe_dispatch(self.layer, x, idx, p)
        return ops.moe_combine(self.layer, received.x * self.scale, received)


def _inputs() -> tuple[torch.Tensor, ...]:
    x = torch.arange(2.0 * HIDDEN).view(2, HIDDEN)
    return x, torch.tensor([[0, 3], [1, 2]]), torch.full((2, TOP_K), 0.5)


def _saved() -> tuple[bytes, bytes]:
    module, inputs = _Doubled().to(tsn.device()), [t.to(tsn.device()) for t in _inputs()]
    copied = copy.deepcopy(module)
    assert copied.layer is module.layer and copied.gather is module.gather and copied.scale is not module.scale
    whole, program = io.BytesIO(), io.BytesIO()
    torch.save(module, whole)
    whole.seek(0)
    loaded = torch.load(whole, weights_only=False)
    assert loaded.layer is module.layer and loaded.gather is module.gather  # which are alive
    torch.export.save(torch.export.export(module, tuple(inputs)), program)
    module.gather.free()
    with pytest.raises(tsn.TileScaleError, match=r"AllGather: saved after free\(\)"):
        torch.save(module, io.BytesIO())
    return whole.getvalue(), program.getvalue()


def _loaded(saved: list[tuple[bytes, bytes]]) -> None:
    whole, program = map(io.BytesIO, saved[int(os.environ["RANK"])])
    with pytest.raises(
        tsn.TileScaleError, match="saved with objects of the ranks 0, 1, for which tilescale_net is not init"
    ):
        torch.load(whole, weights_only=False)
    tsn.init()
    inputs = [t.to(tsn.device()) for t in _inputs()]
    alike = ops.moe_layer(*SIZES, layout="rank"), AllToAll(EXPERTS, TOKENS, HIDDEN, TOP_K + 1, torch.float32)
    run = torch.export.load(program).module()
    with pytest.raises(
        tsn.TileScaleError, match=r"with the layer AllToAll\(num_experts=4, max_tokens=6, .* of 2 ranks, which"
    ):
        run(*inputs)
    whole.seek(0)
    module = torch.load(whole, weights_only=False)
    assert module.layer is ops.moe_layer(*SIZES) and module.layer not in alike and module.gather.alive
    for found in (module(*inputs), run(*inputs)):
        torch.testing.assert_close(found, 2 * inputs[0])


@pytest.mark.sample(1)
def test_modules_and_programs_in_another_process():
    saved = ranks.run(2, _saved, timeout=200)
    ranks.run(2, _loaded, saved, init=False, timeout=200)


@variants(1, "layout", ["expert", "rank"])
@ranks.on(timeout=120)
def test_gradients(layout):
    ranks_, rank = tsn.size(), tsn.rank()
    op = AllToAll(EXPERTS, TOKENS, HIDDEN, TOP_K, torch.float32, layout=layout, alignment=4)
    g = torch.Generator().manual_seed(11)
    w = (torch.randn((EXPERTS, HIDDEN, HIDDEN), generator=g) / 4).requires_grad_()
    xs = [torch.randn((TOKENS - r, HIDDEN), generator=g).requires_grad_() for r in range(ranks_)]
    choices = [torch.rand((len(x), EXPERTS), generator=g).topk(TOP_K, 1)[1] for x in xs]
    choices[0][1, 0] = -1
    choices[1][2] = -1
    probabilities = [torch.rand((len(x), TOP_K), generator=g).requires_grad_() for x in xs]
    upstream = [torch.randn((len(x), HIDDEN), generator=g) for x in xs]
    expected = _dense(xs, choices, probabilities, w)
    sum((s * u).sum() for s, u in zip(expected, upstream)).backward()

    local = slice(rank * EXPERTS // ranks_, (rank + 1) * EXPERTS // ranks_)
    device = tsn.device()
    here = (xs[rank], probabilities[rank], w[local])
    x, p, mine = (t.detach().to(device, copy=True).requires_grad_() for t in here)
    chosen, upstream = choices[rank].to(device), upstream[rank].to(device)
    with pytest.raises(ValueError, match="moe_dispatch: topk_weights is on meta, but x on"):
        ops.moe_dispatch(op, x, chosen, p.to("meta"))
    for _ in range(2):
        received = ops.moe_dispatch(op, x, chosen, p)
        assert received.rejected.shape == () and not received.rejected
        moved = ops.moe_dispatch(op, unaligned(x.detach()), chosen, p.detach())
        assert torch.equal(moved.x, received.x)
        assert torch.equal(*(ops.moe_combine(op, y, moved) for y in (moved.x, unaligned(moved.x))))
        out = _layer(op, layout, received, mine)
        torch.testing.assert_close(out.cpu(), expected[rank], atol=1e-5, rtol=1e-5)
        x.grad = p.grad = mine.grad = None
        (out * upstream).sum().backward()
        torch.testing.assert_close(x.grad.cpu(), xs[rank].grad, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(p.grad.cpu(), probabilities[rank].grad * (choices[rank] >= 0), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.grad.cpu(), w.grad[local], atol=1e-4, rtol=1e-4)
    _other_weights(op, x.detach(), chosen, p.detach())
    # Fake results must have the shapes and types of the operators' results, and equal calls equal results.
    operators, key = torch.ops.tilescale_net, op.key
    check = functools.partial(torch.library.opcheck, test_utils=CHECKS[layout])
    x, p = x.detach().requires_grad_(), p.detach().requires_grad_()
    check(operators.moe_dispatch, (x, chosen, p, key))
    dispatched = operators.moe_dispatch(x.detach(), chosen, p.detach(), key)
    rows, weights, tensors = dispatched[0], dispatched[1], [*dispatched[2:], dispatched[1]]
    some = weights if layout == "expert" else weights[:0]
    check(operators.moe_combine, (rows, some, tensors, len(x), key))
    check(operators.moe_dispatch_backward, (rows, weights, tensors, len(x), key))
    for dispatched in (some, weights[:0]):
        check(operators.moe_combine_backward, (x.detach(), rows.detach(), dispatched.detach(), tensors, len(x), key))


@ranks.on(1)
def test_latency_mode_has_no_gradients():
    with without_kernels():
        op = AllToAll(EXPERTS, TOKENS, HIDDEN, TOP_K, mode="latency")
        layer = AllToAll(EXPERTS, TOKENS, HIDDEN, TOP_K)
    x, idx = torch.zeros((1, HIDDEN), dtype=torch.bfloat16), torch.zeros((1, TOP_K), dtype=torch.int64)
    with pytest.raises(ValueError, match="throughput mode"):
        ops.moe_dispatch(op, x, idx, torch.ones((1, TOP_K)))
    with pytest.raises(TypeError, match="layer must be an AllToAll, as ops.moe_layer makes, not NoneType"):
        ops.moe_dispatch(None, x, idx, torch.ones((1, TOP_K)))
    handle = Handle((1, 2), None, ())
    for received, error, words in (
        (handle, TypeError, "received must be the result of the dispatch, not Handle"),
        (Dispatched(x, *[None] * 6, handle), ValueError, "received is of a layer of another configuration"),
    ):
        with pytest.raises(error, match=f"moe_combine: {words}"):
            ops.moe_combine(layer, x, received)
