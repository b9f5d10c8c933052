"""Host cost of an eager call without its launches, in empty calls of torch: it must not grow."""

import time
import unittest.mock
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import DeviceContext

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe.support import without_kernels
from tests.kernels.support import nothing_launched
from tilescale_net import ops
from tilescale_net.deep_ep import Buffer
from tilescale_net.kernels.all_gather import AllGather
from tilescale_net.kernels.all_reduce import AllReduce
from tilescale_net.kernels.all_reduce_norm import AllReduceNorm
from tilescale_net.kernels.moe import AllToAll, checks
from tilescale_net.kernels.reduce_scatter import ReduceScatter

# Limit of each call, in multiples of `add_` on 8 numbers: 1.5 times the measured value.
LIMITS = {
    "ops.all_reduce": 5, "ops.all_gather": 6, "ops.reduce_scatter": 7, "ops.all_to_all": 9,
    "ops.all_gather_matmul": 12, "ops.matmul_reduce_scatter": 12, "ops.matmul_all_reduce": 14, "ops.matmul_all_reduce, 8 bits": 20,
    "ops.all_reduce, gradient": 10, "AllReduce": 3, "AllGather": 3, "ReduceScatter": 3,
    "ops.all_reduce_norm": 19, "AllReduceNorm": 7, "AllReduceNorm, FP8": 8,
    "AllToAll, latency": 5, "AllToAll, latency, FP8": 5, "AllToAll, throughput": 5, "deep_ep, low latency": 9,
}  # fmt: skip
CALLS, TURNS = 40, 25


def _pair(op: AllToAll, *choices: torch.Tensor) -> Callable[[], Any]:
    y = torch.zeros(op.dispatch(*choices).x.shape, dtype=torch.bfloat16, device=op.device)
    return lambda: op.combine(y, op.dispatch(*choices).handle)


def _low_latency(buffer: Buffer, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> Callable[[], Any]:
    y = torch.zeros((4, 2 * len(x), x.shape[1]), dtype=torch.bfloat16, device=x.device)
    stats = torch.zeros(4, dtype=torch.int32, device=x.device)

    def both() -> None:
        handle = buffer.low_latency_dispatch(x, idx, len(x), 8, cumulative_local_expert_recv_stats=stats)[2]
        buffer.low_latency_combine(y, idx, weights, handle, out=x)

    return both


def _calls() -> dict[str, Callable[[], Any]]:
    n, device = tsn.size(), tsn.device()
    x, geometry = torch.ones((64, 128), dtype=torch.bfloat16, device=device), dict(threads=64, blocks=4)
    leaf, out, rows = x.clone().requires_grad_(), torch.empty_like(x), tsn.zeros((n, 64, 128), torch.bfloat16)
    reduce, gather, scatter = AllReduce(**geometry), AllGather(**geometry), ReduceScatter(**geometry)
    tokens = x[:16].clone(), torch.rand((16, 8), device=device).topk(4, 1)[1], torch.ones((16, 4), device=device)
    norm, weight, fp8 = AllReduceNorm(128, **geometry), x[0].clone(), torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = norm.new_scales(64)
    a, b = (torch.ones((64, 64), dtype=torch.bfloat16, device=device) for _ in range(2))
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    of_gemm = dict.fromkeys(("x_scales", "w_scales"), torch.ones(64, device=device))
    sizes, buffer = (8, 16, 128, 4, torch.bfloat16), Buffer()
    return {
        "ops.all_reduce": lambda: ops.all_reduce(x),
        "ops.all_gather": lambda: ops.all_gather(x),
        "ops.reduce_scatter": lambda: ops.reduce_scatter(x),
        "ops.all_to_all": lambda: ops.all_to_all(x),
        "ops.all_gather_matmul": lambda: ops.all_gather_matmul(a, b),
        "ops.matmul_reduce_scatter": lambda: ops.matmul_reduce_scatter(a, b),
        "ops.matmul_all_reduce": lambda: ops.matmul_all_reduce(a, b),
        "ops.matmul_all_reduce, 8 bits": lambda: ops.matmul_all_reduce(a8, b8, **of_gemm),
        "ops.all_reduce, gradient": lambda: ops.all_reduce(leaf),
        "AllReduce": lambda: reduce(out, x),
        "AllGather": lambda: gather(rows, x),
        "ReduceScatter": lambda: scatter(out, rows),
        "ops.all_reduce_norm": lambda: ops.all_reduce_norm(x, x[0], residual=out),
        "AllReduceNorm": lambda: norm(out, x, weight, residual=leaf.data),
        "AllReduceNorm, FP8": lambda: norm(None, x, weight, quantized=fp8, scales=scales),
        "AllToAll, latency": _pair(AllToAll(*sizes, "latency"), *tokens),
        "AllToAll, latency, FP8": _pair(AllToAll(*sizes[:-1], torch.float8_e4m3fn, "latency"), *tokens),
        "AllToAll, throughput": _pair(AllToAll(*sizes), *tokens),
        "deep_ep, low latency": _low_latency(buffer, *tokens),
    }


def _cost(call: Callable[[], Any]) -> float:
    start = time.thread_time()
    for _ in range(CALLS):
        call()
    return (time.thread_time() - start) / CALLS


def _under_default_device(calls: dict[str, Callable[[], Any]]) -> dict[str, int]:
    """How many functions of torch each call runs that the mode of torch.set_default_device sees, for 2 to 5 us each."""
    seen = unittest.mock.patch.object(DeviceContext, "__torch_function__", autospec=True)
    found = {}
    with seen as mode:
        mode.side_effect = lambda self, function, types, args=(), kwargs=None: function(*args, **(kwargs or {}))
        torch.set_default_device("meta")
        for name, call in calls.items():
            before = mode.call_count
            call()
            found[name] = mode.call_count - before
        torch.set_default_device(None)
    return found


def _measured() -> tuple[dict[str, float], dict[str, int]]:
    """Least cost of each call, in empty calls of torch's, of the rank that measures; and what `_under_default_device` finds."""
    nothing = torch.zeros(8, device=tsn.device())
    # The simulator alone looks at ids of experts on the host.
    unchecked = unittest.mock.patch.object(checks, "check_experts", lambda *ids: None)
    with nothing_launched(), without_kernels(), unchecked:
        calls = _calls() | {"nothing": lambda: nothing.add_(1)}
        for _ in range(3):  # the memory that operators share grows
            for call in calls.values():
                call()
        seen = _under_default_device(calls)
        tsn.barrier()
        least = dict.fromkeys(calls, float("inf"))
        for _ in range(TURNS if tsn.rank() == 0 else 0):
            for name, call in calls.items():
                least[name] = min(least[name], _cost(call))
        tsn.barrier()
    unit = least.pop("nothing")
    return {name: cost / unit for name, cost in least.items()}, seen


def test_host_cost():
    found, seen = ranks.run(2, _measured, env={"TSN_DEVICE": "simulator"})[0]
    print(", ".join(f"{name} {cost:.1f} of {LIMITS[name]}" for name, cost in found.items()))
    assert not [f"{name}: {cost:.1f}" for name, cost in found.items() if cost > LIMITS[name]]
    # Functions of torch in these calls' own lines.
    own = dict.fromkeys(("nothing", "ops.all_reduce_norm", "AllReduceNorm", "deep_ep, low latency"), 1)
    assert seen == {name: own.get(name, 0) for name in seen}
