"""The operators of collectives: results, gradients, what torch.compile demands, groups, and refusals."""

import sys

import pytest
import torch
import torch.distributed as dist

import tilescale_net as tsn
from tests import ranks
from tests.kernels.support import nothing_launched
from tilescale_net import ops
from tilescale_net.ops import group_objects

operators = torch.ops.tilescale_net


def _parts(shape, dtype=torch.float32) -> list[torch.Tensor]:
    """Inputs of each rank."""
    g = torch.Generator().manual_seed(3)
    return [torch.randint(-8, 8, shape, generator=g).to(dtype) for _ in range(tsn.size())]


def _results(group) -> None:
    n, me, device = tsn.size(), tsn.rank(), tsn.device()
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        for shape in ((3, 5), (0, 4), (), (700, 3)):
            parts = _parts(shape, dtype)
            wanted = torch.cat(parts) if shape else torch.stack(parts)
            assert torch.equal(ops.all_gather(parts[me].to(device), group).cpu(), wanted)
    one = torch.arange(4.0, device=device)[me::2][:1]  # contiguous, with a stride
    assert one.stride() == (2,) and ops.all_gather(one, group).tolist() == list(range(n))
    parts = _parts((n * 3, 4))
    assert torch.equal(ops.reduce_scatter(parts[me].to(device), group).cpu(), sum(parts)[me * 3 : me * 3 + 3])
    wanted = torch.cat([p[me * 3 : me * 3 + 3] for p in parts])
    assert torch.equal(ops.all_to_all(parts[me].to(device), group=group).cpu(), wanted)
    splits = [[(a + 2 * b) % 4 for b in range(n)] for a in range(n)]  # rank a sends splits[a][b] rows to rank b
    uneven = [torch.arange(sum(s) * 2).view(-1, 2) + 100 * a for a, s in enumerate(splits)]
    receives = [splits[a][me] for a in range(n)]
    wanted = torch.cat([uneven[a].split(splits[a])[me] for a in range(n)])
    for bound in (None, 3 * n):
        found = ops.all_to_all(uneven[me].to(device), receives, splits[me], group, max_rows=bound)
        assert torch.equal(found.cpu(), wanted)
    ops.check(group)


def _gradients() -> None:
    """The gradient of sum(f(x) * w) is the transpose of f, applied to w."""
    n, me, device = tsn.size(), tsn.rank(), tsn.device()
    xs = [p.to(device) for p in _parts((n * 2, 4))]
    weights = [p.to(device) for p in _parts((n * n * 2, 4))]
    x, w = xs[me].clone().requires_grad_(), weights[me]
    (ops.all_gather(x) * w).sum().backward()
    assert torch.equal(x.grad, sum(weights)[me * n * 2 : (me + 1) * n * 2])
    x.grad = None
    (ops.reduce_scatter(x) * w[:2]).sum().backward()
    assert torch.equal(x.grad, torch.cat([v[:2] for v in weights]))
    x.grad = None
    splits = [[1 + (a == b) for b in range(n)] for a in range(n)]
    receives = [splits[a][me] for a in range(n)]
    (ops.all_to_all(x[: n + 1], receives, splits[me]) * w[: n + 1]).sum().backward()
    places = [sum(splits[a][b] for a in range(me)) for b in range(n)]  # of this rank's rows at rank b
    wanted = [weights[b][at : at + splits[me][b]] for b, at in enumerate(places)]
    assert torch.equal(x.grad, torch.cat([*wanted, torch.zeros_like(x[n + 1 :])]))


def _compiled() -> None:
    n, device = tsn.size(), tsn.device()
    group = dist.group.WORLD
    x = _parts((n * 2, 4))[tsn.rank()].to(device)
    name, even = group.group_name, [2] * n
    for operator, arguments in (
        (operators.all_gather, (name,)), (operators.reduce_scatter, (name,)),
        (operators.all_to_all, (None, None, -1, name)), (operators.all_to_all, (even, even, 9, "")),
    ):  # fmt: skip
        torch.library.opcheck(operator, (x.clone().requires_grad_(), *arguments))

    def step(x, splits, group):
        a = ops.all_gather(x * 2, group)
        b = ops.all_to_all(ops.reduce_scatter(a, group), group=group)
        return ops.all_to_all(b, splits, splits, group, max_rows=64).sin()

    for dynamic in (True, None):
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for rows in (2, 3):
            for which in (group, None):
                x = torch.arange(n * rows * 4.0, device=device).view(-1, 4).requires_grad_()
                wanted = step(x, [rows] * n, which)
                wanted.sum().backward()
                gradient, x.grad = x.grad, None
                found = compiled(x, [rows] * n, which)
                found.sum().backward()
                assert torch.equal(found, wanted) and torch.equal(x.grad, gradient)


def _refusals() -> None:
    n, me, device = tsn.size(), tsn.rank(), tsn.device()
    x = torch.zeros((n * 2 + 1, 4), device=device)
    with pytest.raises(ValueError, match="rows must be a multiple of"):
        ops.reduce_scatter(x)
    with pytest.raises(ValueError, match="given together"):
        ops.all_to_all(x, output_splits=[1] * n)
    with pytest.raises(ValueError, match="more than max_rows"):
        ops.all_to_all(x[: 2 * n], [2] * n, [2] * n, max_rows=2)
    with pytest.raises(ValueError, match="max_rows is -5; it must be 0 or more"):
        ops.all_to_all(x[: 2 * n], [2] * n, [2] * n, max_rows=-5)
    calls = (ops.all_gather, ops.reduce_scatter, ops.all_reduce, ops.all_to_all, lambda t: ops.send(t, 1 - me))
    calls += (
        lambda t: ops.recv(t, 1 - me),
        lambda t: ops.all_gather_matmul(x, t),
        lambda t: ops.matmul_all_reduce(t, x.t()),
    )
    for call in calls:  # quantized tensors crashed torch
        for wrong, words in (
            (x.to_sparse(), "is a sparse_coo tensor; it must be a dense one"),
            (torch.quantize_per_tensor(x, 1.0, 0, torch.qint8), "is a quantized tensor; it must be a dense one"),
            ([1.0], "tensor, not list"),
        ):
            with pytest.raises(TypeError, match=words):
                call(wrong)
    with pytest.raises(TypeError, match="group is of type int; give a ProcessGroup"):
        ops.all_gather(x, group=5)
    with pytest.raises(tsn.RankMismatch, match="rank 0 sends 2 rows to rank 1, which expects 1"):
        ops.all_to_all(x[: 2 * n], [2 - me] * n, [2] * n)
    with pytest.raises(
        tsn.RankMismatch, match="rank 1 gives 2 output_splits and 1 input_splits for 2 ranks; nothing was"
    ):
        ops.all_to_all(x[: 2 * n], [2] * n, [2] * (n - me))
    assert tsn.world().control.exchange("the test", [10 * me + b for b in range(n)]) == [me, 10 + me]
    with pytest.raises(tsn.ConfigurationError, match="has the name 'nobody'"):
        ops.all_gather(x, "nobody")
    # What a profiler calls them.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ops.all_gather(x)
    names = {event.key for event in profile.key_averages()}
    assert {"tilescale_net::all_gather", "tilescale_net.AllGather"} <= names, names


def _quantized() -> None:
    """An all-reduce of what float8_e4m3fn holds exactly; its gradient is not quantised."""
    n, device = tsn.size(), tsn.device()
    x = torch.arange(300.0, device=device).remainder(8).requires_grad_()
    w = torch.randn(300, generator=torch.Generator().manual_seed(tsn.rank())).to(device)
    found = ops.all_reduce(x, quantize="fp8")
    (found * w).sum().backward()
    assert torch.equal(found, n * x) and torch.equal(x.grad, ops.all_reduce(w))
    third = torch.full((300,), 1 / 3, device=device)
    compiled = torch.compile(lambda x: ops.all_reduce(x, quantize="fp8"), fullgraph=True, backend="aot_eager")
    assert compiled(third).eq(n * 0.34375).all()  # 1.375 / 4
    with pytest.raises(ValueError, match="quantize is 'int3'; it must be 'fp8' or None"):
        ops.all_reduce(x, quantize="int3")
    with pytest.raises(TypeError, match="int32"):
        ops.all_reduce(x.detach().int(), quantize="fp8")


def _results_with_defaults() -> None:
    x = torch.full((4,), tsn.rank(), dtype=torch.float32, device=tsn.device())
    assert ops.all_gather(x).tolist() == [r for r in range(tsn.size()) for _ in range(4)]
    assert ops.reduce_scatter(ops.all_gather(x)).tolist() == [tsn.rank() * tsn.size()] * 4


@ranks.on(timeout=280)
def test_collectives():
    _results(dist.group.WORLD.group_name)
    _results(tsn.world())
    _results(dist.device_mesh.init_device_mesh(tsn.device().type, (tsn.size(),)))
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    with torch.inference_mode():
        _results_with_defaults()
    torch.set_default_dtype(torch.float32)
    torch.set_default_device("cpu")
    _gradients()
    _quantized()
    _compiled()
    _refusals()


@pytest.mark.sample(0)
@ranks.on(1, timeout=280)
def test_the_default_backend_keeps_the_order_of_calls():
    """By the default backend, of operators alone, so that nothing is compiled; left alone it begins with the largest."""
    device, calls = tsn.device(), group_objects.of("").calls

    def step(x, y):
        return ops.all_gather(x), ops.reduce_scatter(ops.all_gather(y)), ops.all_gather(y[:1])

    for rows in ((2, 512), (512, 2)):
        x, y = (torch.ones((n, 16), device=device) for n in rows)
        torch._dynamo.reset()
        orders = []
        torch._inductor.config.force_disable_caches = True  # which know nothing of this package
        for how in (step, torch.compile(step, fullgraph=True, dynamic=False)):
            first = calls.count
            results = how(x, y)
            orders.append([calls.text(n) for n in range(first + 1, calls.count + 1)])
        assert len(orders[0]) == 4 and orders[1] == orders[0], orders
        assert all(torch.equal(a, b) for a, b in zip(results, step(x, y)))


@ranks.fails("RankMismatch", "all_gather of x", "moe_dispatch of a layer of 4 experts", timeout=50, TSN_TIMEOUT="60")
def test_ranks_whose_operators_differ():
    """They wait for each other in different kernels, and learn in which calls they differ long before these give up."""
    layer = ops.moe_layer(4, 8, 16, 2, torch.float32)
    x, idx = torch.ones((2, 16), device=tsn.device()), torch.zeros((2, 2), dtype=torch.int64, device=tsn.device())
    ops.all_gather(x)
    ops.moe_dispatch(layer, x, idx, torch.ones((2, 2), device=tsn.device()))
    ops.moe_dispatch(layer, x, idx, torch.ones((2, 2), device=tsn.device())) if tsn.rank() else ops.all_gather(x)
    ops.check()


@pytest.mark.sample(0)
@ranks.on(3, VIRTUAL_NODES="3", timeout=280)
def test_on_several_nodes():
    _results(None)
    _gradients()
    with pytest.raises(ValueError, match="'fp8' needs PEs that are all mapped"):
        ops.all_reduce(torch.ones(4, device=tsn.device()), quantize="fp8")


@ranks.on()
def test_views():
    """Views of torch whose bytes are not their values, and parameters, are taken as the values that they stand for."""
    n, me, device = tsn.size(), tsn.rank(), tsn.device()
    for _ in range(2):
        parts = [torch.complex(a, b).to(device) for a, b in zip(_parts((4, 2)), _parts((4, 2))[::-1])]
        x = parts[me]
        assert torch.equal(ops.all_gather(x.conj()), torch.cat(parts).conj().resolve_conj())
        assert torch.equal(ops.all_reduce(x.conj().imag), -sum(p.imag for p in parts))
        assert torch.equal(ops.all_reduce(x.real), sum(p.real for p in parts))  # of other strides
        zeros = torch._efficientzerotensor((4, 2), device=device)
        assert not ops.all_reduce(zeros).any() and not ops.reduce_scatter(zeros).any()
    weight = torch.nn.Parameter(x.real.contiguous())
    found = ops.all_reduce(weight)
    assert type(found) is torch.Tensor and found.requires_grad
    with torch.no_grad():
        assert not ops.all_reduce(weight).requires_grad


@ranks.on()
def test_a_call_is_one_launch():
    """With 1 MiB, past packets: neither torch nor another kernel copies a collective's input or output."""
    x = torch.ones((1 << 20) // 4, device=tsn.device())
    calls = {"AllGather": lambda: ops.all_gather(x[: len(x) // 2]), "AllToAll": lambda: ops.all_to_all(x)}
    calls["ReduceScatter"] = lambda: ops.reduce_scatter(x)
    with nothing_launched():
        for name, call in calls.items():
            for _ in range(2):
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                    call()
            counts = {event.key: event.count for event in profile.key_averages()}
            assert counts[f"tilescale_net.{name}"] == 1 and not {"aten::copy_", "aten::clone"} & counts.keys(), counts


@ranks.on(1)
def test_eager_calls_import_no_compiler():
    """Dynamo takes a second of a processor."""
    ops.all_reduce(torch.ones(8, device=tsn.device(), requires_grad=True)).sum().backward()
    assert "torch._dynamo" not in sys.modules
