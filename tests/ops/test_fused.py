"""The operators of fused products: results and gradients of both ways, what torch.compile demands, and refusals."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tilescale_net as tsn
from tests import ranks
from tests.kernels.support import unaligned
from tilescale_net import ops
from tilescale_net.kernels.all_reduce import AllReduce
from tilescale_net.kernels.fused.all_gather_matmul import PipelinedAllGatherMatmul
from tilescale_net.kernels.fused.choice import usual_options
from tilescale_net.ops import group_objects

operators = torch.ops.tilescale_net
ROWS, K, N = 4, 16, 16  # rows of a rank; equal widths, so that few kernels serve all calls


def _numbers(*shape) -> list[torch.Tensor]:
    """Inputs of each rank: whole numbers, so that sums are exact in any order."""
    g = torch.Generator().manual_seed(sum(shape))
    return [torch.randint(-1, 2, shape, generator=g).bfloat16() for _ in range(tsn.size())]


def _results_and_gradients(fused, names) -> None:
    """Against one product of all ranks' numbers, with the gradients of the sum of all ranks' losses."""
    n, me, device = tsn.size(), tsn.rank(), tsn.device()
    for name in names:
        rows = ROWS if name == "all_gather_matmul" else n * ROWS
        xs, ws = _numbers(rows, K), _numbers(K, N)
        x, w = xs[me].to(device).requires_grad_(), ws[me].to(device).requires_grad_()
        everyone = [(a.detach().float().requires_grad_(), b.detach().float().requires_grad_()) for a, b in zip(xs, ws)]
        out = getattr(ops, name)(x, w, fused=fused)
        if name == "all_gather_matmul":
            results = [torch.cat([a for a, _ in everyone]) @ b for _, b in everyone]
        else:
            total = sum(a @ b for a, b in everyone)
            results = list(total.view(n, ROWS, N)) if name == "matmul_reduce_scatter" else [total] * n
        assert torch.equal(out.cpu().float(), results[me]), (name, fused)
        losses = [g.float() for g in _numbers(*out.shape)]
        if name == names[-1]:  # as torch.nn.Linear holds it; torch copies a gradient in another order
            w = w.detach().t().contiguous().t().requires_grad_()
            out = getattr(ops, name)(x, w, fused=fused)
        in_order: list[bool] = []
        w.register_hook(lambda g, w=w, seen=in_order: seen.append(g.stride() == w.stride()))
        (out * losses[me].to(out)).sum().backward()
        assert in_order == [True], name
        sum((r * g).sum() for r, g in zip(results, losses)).backward()
        mine = everyone[me]
        assert torch.equal(x.grad.cpu().float(), mine[0].grad) and torch.equal(w.grad.cpu().float(), mine[1].grad), name
        with torch.no_grad():
            for weight in (unaligned(w), unaligned(w.t()).t()):
                assert torch.equal(getattr(ops, name)(unaligned(x), weight, fused=fused), out), (name, fused)


def _replicated() -> None:
    n, me, device = tsn.size(), tsn.rank(), tsn.device()
    x, w = _numbers(n, K)[me].to(device).requires_grad_(), _numbers(K, N)[me].to(device)
    ops.matmul_all_reduce(x, w, replicated=True).sum().backward()
    assert torch.equal(x.grad, w.sum(1).expand(n, K))
    y = torch.ones(3, device=device).requires_grad_()
    for replicated in (False, True):
        out = ops.all_reduce(y, replicated=replicated)
        assert out.tolist() == [n] * 3
        (gradient,) = torch.autograd.grad(out.sum(), y)
        assert gradient.tolist() == [1 if replicated else n] * 3


def _compiled() -> None:
    """The two halves of a layer in a graph, with weights as torch.nn.Linear holds them."""
    group, device, me = dist.group.WORLD, tsn.device(), tsn.rank()
    up, down = _numbers(N, K)[me].to(device), _numbers(K, N)[me].to(device)
    x = _numbers(ROWS, K)[me].to(device).requires_grad_()
    for operator, rest in (("all_gather_matmul", ()), ("matmul_reduce_scatter", ()), ("matmul_all_reduce", (False,))):
        rows = x if operator == "all_gather_matmul" else _numbers(tsn.size() * ROWS, K)[me].to(device).requires_grad_()
        arguments = (rows, down if rest else up.t(), *rest, True, group.group_name)
        torch.library.opcheck(getattr(operators, operator), arguments, test_utils=("test_schema", "test_faketensor"))

    def layer(x, up, down):
        return ops.matmul_reduce_scatter(ops.all_gather_matmul(x, up.t(), group).relu(), down.t(), group)

    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, up, down)
    assert torch.equal(found, layer(x, up, down))


def _autocast() -> None:
    """float32 weights in a region of torch.autocast, as torch's own products take them; gradients are float32 again."""
    me, device = tsn.rank(), tsn.device()
    up, down, x = (_numbers(*shape)[me].to(device) for shape in ((K, N), (N, K), (ROWS, K)))

    def layer(x, up, down):
        return ops.matmul_all_reduce(ops.matmul_reduce_scatter(ops.all_gather_matmul(x, up).relu(), down), up)

    wide = [t.float().requires_grad_() for t in (x, up, down)]
    wanted, compiled = layer(x, up, down), torch.compile(layer, fullgraph=True, backend="aot_eager")
    gradients = []
    for way in (layer, compiled):
        with torch.autocast(device.type, torch.bfloat16):
            found = way(*wide)
            assert found.dtype == torch.bfloat16 and torch.equal(found, wanted)
            assert ops.all_gather_matmul(*(t.detach().double() for t in (x, up))).dtype == torch.float64
            gradients.append(torch.autograd.grad(found.float().sum(), wide))
    assert all(g.dtype == torch.float32 and torch.equal(g, h) for g, h in zip(*gradients))


def _refusals() -> None:
    device = tsn.device()
    x, w = torch.zeros((4, 12), device=device), torch.zeros((12, 8), device=device)
    assert ops.all_gather_matmul(x, w).shape == (4 * tsn.size(), 8)  # float32: one after the other
    with pytest.raises(ValueError, match="fused=True, but dtype torch.float32"):
        ops.all_gather_matmul(x, w, fused=True)
    with pytest.raises(ValueError, match="fused=True, but k is 12; it must be a multiple of 8"):
        ops.matmul_all_reduce(x.bfloat16(), w.bfloat16(), fused=True)
    with pytest.raises(ValueError, match=r"w \[12, 8\]; they must be \[rows, k\] and \[k, n\]"):
        ops.matmul_all_reduce(x[:, :8], w)
    with pytest.raises(TypeError, match="x has dtype torch.float32 and w torch.bfloat16"):
        ops.matmul_reduce_scatter(x, w.bfloat16())
    with pytest.raises(ValueError, match="x has 3 rows; they must be a multiple of"):
        ops.matmul_reduce_scatter(x[:3], w)
    # Shapes that ranks disagree on: every rank hears of it.
    rows, n = tsn.size() * (2 + tsn.rank()), 8 * (1 + tsn.rank())
    for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        for x, w in ((torch.zeros(rows, 8), torch.zeros(8, 8)), (torch.zeros(8, 8), torch.zeros(8, n))):
            with pytest.raises(tsn.RankMismatch, match="rows=.*, k=8, n="):
                getattr(ops, name)(x.bfloat16().to(device), w.bfloat16().to(device), fused=True)


def _eight_bits() -> None:
    """Products of torch.float8_e4m3fn with scales, both ways; the arguments they refuse."""
    n, me, device, group = tsn.size(), tsn.rank(), tsn.device(), dist.group.WORLD.group_name
    eight = torch.float8_e4m3fn
    for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        rows = ROWS if name == "all_gather_matmul" else n * ROWS
        xs, ws = _numbers(rows, K), _numbers(N, K)
        row_scales, column_scales = ([2 ** s[:, 0].float() for s in _numbers(extent, 3)] for extent in (rows, N))
        x, w = xs[me].to(device, eight), ws[me].to(device, eight).t()
        scales = dict(x_scales=row_scales[me][:, None].to(device), w_scales=column_scales[me].to(device))
        left = [a.float() * r[:, None] for a, r in zip(xs, row_scales)]
        right = [b.float().t() * c for b, c in zip(ws, column_scales)]
        if name == "all_gather_matmul":
            want = torch.cat(left) @ right[me]
        else:
            want = sum(a @ b for a, b in zip(left, right))
            want = want.view(n, ROWS, N)[me] if name == "matmul_reduce_scatter" else want
        call = getattr(ops, name)
        for fused in (True, False):
            assert torch.equal(call(x, w, fused=fused, **scales).cpu(), want.bfloat16()), (name, fused)
        rest = (False, True) if name == "matmul_all_reduce" else (True,)
        arguments = (x, w, *rest, group, *scales.values())
        # test_schema compares arguments by torch.allclose, which CPUs lack for eight bits.
        torch.library.opcheck(getattr(operators, name), arguments, test_utils="test_faketensor")
        with pytest.raises(TypeError, match=f"{name}: w_scales is None; torch.float8_e4m3fn takes a float32 tensor"):
            call(x, w, x_scales=scales["x_scales"])
        with pytest.raises(
            ValueError, match=r"pass the transpose of a contiguous \[n, k\]: w.t\(\).contiguous\(\).t\(\)"
        ):
            call(x, w.contiguous(), fused=False, **scales)
        with pytest.raises(TypeError, match="x_scales goes with torch.float8_e4m3fn; x and w are torch.bfloat16"):
            call(x.bfloat16(), w.bfloat16(), **scales)
        with pytest.raises(TypeError, match=f"{name}: w must be a tensor, not NoneType"):
            call(x, None)
        with pytest.raises(ValueError, match=f"{name}: w_scales is on meta, but x on"):
            call(x, w, x_scales=scales["x_scales"], w_scales=scales["w_scales"].to("meta"))
        with pytest.raises(RuntimeError, match="for inference and have no gradients"):
            call(x, w, x_scales=scales["x_scales"].requires_grad_(), w_scales=scales["w_scales"])


def _few_are_kept() -> None:
    """With more shapes the oldest product is freed, and made again; one that a CUDA graph of any rank holds stays."""
    device, objects = tsn.device(), group_objects.of("")
    kept = objects._products, objects._captured
    objects._products, objects._captured = {}, set()
    w = torch.ones((K, N), dtype=torch.bfloat16, device=device)

    def call(name: str) -> object:
        rows = ROWS if name == "all_gather_matmul" else tsn.size() * ROWS
        out = getattr(ops, name)(torch.ones((rows, K), dtype=torch.bfloat16, device=device), w, fused=True)
        assert out.eq(K * (1 if name == "all_gather_matmul" else tsn.size())).all()
        return list(objects._products.values())[-1]

    with mock.patch.object(group_objects, "MOST_GEMMS", 2):
        first, second = call("all_gather_matmul"), call("matmul_reduce_scatter")
        assert call("all_gather_matmul") is first
        third = call("matmul_all_reduce")
        assert first.alive and third.alive and not second.alive
        if tsn.rank():
            objects._captured = {key for key, product in objects._products.items() if product is first}
        again = call("matmul_reduce_scatter")  # the first one is the oldest
        assert first.alive and again.alive and not third.alive and call("all_gather_matmul") is first
    gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"), rank=tsn.rank())
    with (
        mock.patch.object(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True, create=True),
        mock.patch.object(objects, "_on_gpu", True),
        mock.patch.object(objects, "world", gpu),
    ):
        key = next(iter(objects._products))
        assert objects.product(key, None) is again and key in objects._captured
        with pytest.raises(tsn.TileScaleError, match="while a CUDA graph is captured; call it once just before"):
            objects.product("another", None)
        with pytest.raises(tsn.TileScaleError, match="while a CUDA graph is captured; call them once just before"):
            objects.symmetric(((objects._memory.numel() + 1,), torch.uint8))
        (handed_out,) = objects.symmetric(((16,), torch.uint8))
    for product in objects._products.values():
        product.free()
    objects._products, objects._captured = kept
    # Memory of operators that a graph of one rank holds stays when more is needed; without a graph it is given back.
    assert objects._memory_in_graph
    objects._memory_in_graph, memory = tsn.rank() == 1, objects._memory
    for grown in (2, 4):
        objects.symmetric(((grown * memory.numel(),), torch.uint8))
        assert objects._of_graphs[-1] is memory and len(objects._of_graphs) == 1 and not objects._memory_in_graph
    assert handed_out.data_ptr() == memory.data_ptr()
    tsn.free(objects._of_graphs.pop())  # as of memory that is live


def _no_room() -> None:
    """A shape that the heap has no room for runs one after the other, on all ranks, unless it is to be fused."""
    device, ballast = tsn.device(), []
    ops.reduce_scatter(torch.zeros((tsn.size(), 8), dtype=torch.bfloat16, device=device))  # has its room
    for nbytes in (4 << 20, 1 << 18):
        with contextlib.suppress(tsn.HeapError):
            while True:
                ballast.append(tsn.empty(nbytes, torch.uint8))
    x = torch.ones((tsn.size() * 256, 8), dtype=torch.bfloat16, device=device)
    w = torch.ones((8, 256), dtype=torch.bfloat16, device=device)
    with pytest.raises(tsn.HeapError, match="MatmulReduceScatter on rank"):
        ops.matmul_reduce_scatter(x, w, fused=True)
    for _ in range(2):
        assert ops.matmul_reduce_scatter(x, w).eq(8 * tsn.size()).all()
    for tensor in ballast:
        tsn.free(tensor)


def _larger_than_a_piece() -> None:
    """Sums that would be copied piece by piece are added up where the product is written, or where `x` is copied to."""
    device, me = tsn.device(), tsn.rank()
    objects = group_objects.of("")
    usual = objects.all_reduce
    for algorithm, piece, columns in ("two_shot", 1024, 40), ("auto", 1 << 16, 1000):
        small = AllReduce(staging_bytes=1024, algorithm=algorithm, threads=64, blocks=2)
        objects.all_reduce = small.tracked_by(objects.calls)
        assert [small.is_copied_in_pieces(n) for n in (piece, 2 * piece, 2 * piece + 8)] == [False, True, False]
        try:
            sizes = (
                (torch.float32, columns),
                (torch.bfloat16, columns),
                (torch.bfloat16, columns + 1),
                (torch.bfloat16, 8),
            )
            for dtype, n in sizes:
                xs, ws = ([p.to(dtype) for p in _numbers(*shape)] for shape in ((36, K), (n, K)))
                wanted = sum(x.float() @ w.float().t() for x, w in zip(xs, ws)).to(dtype)
                found = ops.matmul_all_reduce(xs[me].to(device), ws[me].t().to(device), fused=False)
                again = ops.all_reduce((xs[me] @ ws[me].t()).to(device))
                assert torch.equal(found.cpu(), wanted) and torch.equal(again.cpu(), wanted), (dtype, n)
        finally:
            objects.all_reduce = usual
            small.free()


def _pipelined() -> None:
    """By copies beside torch's product, where that was the fastest."""
    objects = group_objects.of("")
    objects.known_gemms.clear()

    def choose(problem, world, *_):
        way = "copy_engines" if problem.kind == "all_gather_matmul" else "fused"
        return way, usual_options(problem, world.device)

    with mock.patch.object(tsn.ops.fused, "choose", choose):
        _results_and_gradients(None, ["all_gather_matmul"])
        assert any(isinstance(product, PipelinedAllGatherMatmul) for product in objects._products.values())
    objects.known_gemms.clear()


@pytest.mark.timeout(600)  # compiles many kernels
@pytest.mark.sample(0)
@ranks.on(TSN_HEAP_LIMIT="0", timeout=580)
def test_products():
    names = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
    _results_and_gradients(True, names)
    _results_and_gradients(False, names)
    _pipelined()
    _replicated()
    _compiled()
    _autocast()
    _refusals()
    _eight_bits()
    _larger_than_a_piece()
    _few_are_kept()
    _no_room()
