"""Host time of AllToAll calls: Python and torch between the caller and the launches of kernels.

    GPUS=1 bash launch.sh benchmark/moe_host.py

Launches are left out: their arguments are converted and passed to a function that does nothing. On a GPU, further
columns show the same calls with their launches. One rank is enough: other ranks' work does not count.
"""

import argparse
import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import tilescale_net as tsn
from benchmark.common import BenchmarkParser, Column, Report, medians, positive_int, us
from benchmark.common.measuring import in_turn
from benchmark.common.modules import moe, torch

# Calls between two synchronisations: a host too far ahead of a GPU waits for room in its queue.
AT_A_TIME = 50
BENCH = dict(ranks=1, quick="--calls 50 --repeat 3", gpu=False)  # see common/suite.py


def parse() -> argparse.Namespace:
    parser = BenchmarkParser(__doc__.splitlines()[0], warmup=2, repeat=None)
    parser.option("--repeat", positive_int, None, "timed runs, whose median is shown (15; 5 in the simulator)")
    parser.option("--calls", positive_int, 200, "calls of a sample")
    parser.option("--tokens", positive_int, 16, "tokens of a call")
    parser.option("--hidden", positive_int, 128, "elements of a row")
    parser.option("--experts", positive_int, 8, "experts of the layer")
    parser.option("--top-k", positive_int, 4, "choices per token")
    return parser.parse_args()


def objects(args: argparse.Namespace) -> dict[str, Any]:
    """Name of each row and its AllToAll."""
    sizes = (args.experts, args.tokens, args.hidden, args.top_k)
    fp8 = torch.float8_e4m3fn
    return {
        "latency, BF16": moe.AllToAll(*sizes, torch.bfloat16, "latency"),
        "latency, FP8": moe.AllToAll(*sizes, fp8, "latency"),
        "throughput, by rank": moe.AllToAll(*sizes, torch.bfloat16, layout="rank"),
        "throughput, by expert": moe.AllToAll(*sizes, torch.bfloat16),
    }


def inputs(args: argparse.Namespace, device: Any) -> tuple[Any, ...]:
    """Rows, choices and weights."""
    x = torch.randn((args.tokens, args.hidden), device=device).to(torch.bfloat16)
    chosen = torch.rand((args.tokens, args.experts), device=device).topk(args.top_k, 1)[1]
    return x, chosen, torch.rand((args.tokens, args.top_k), device=device)


def calls_of(op: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Name of each column and a function that makes its calls."""
    device = op.device
    x, chosen, weights = inputs(args, device)
    received = op.dispatch(x, chosen, weights)
    y, handle = torch.zeros(received.x.shape, dtype=torch.bfloat16, device=device), received.handle

    def both() -> None:
        op.combine(y, op.dispatch(x, chosen, weights).handle)

    calls = {
        "dispatch": lambda: op.dispatch(x, chosen, weights),
        "combine": lambda: op.combine(y, handle),
        "both": both,
    }
    if op.config.mode == "throughput":
        calls["cached"] = lambda: op.dispatch(x, handle=handle)
    return calls


def calls_of_deep_ep(args: argparse.Namespace, fp8: bool) -> dict[str, Any]:
    """The same for DeepEP's low-latency calls, which pass weights to combine."""
    from tilescale_net.deep_ep import Buffer

    buffer, (x, chosen, weights) = Buffer(), inputs(args, tsn.device())

    def dispatch() -> Any:
        return buffer.low_latency_dispatch(x, chosen, args.tokens, args.experts, use_fp8=fp8)

    rows, _, handle, *_ = dispatch()
    y = torch.zeros((rows[0] if fp8 else rows).shape, dtype=torch.bfloat16, device=x.device)

    def combine(handle: Any = handle) -> None:
        buffer.low_latency_combine(y, chosen, weights, handle)

    return {"dispatch": dispatch, "combine": combine, "both": lambda: combine(dispatch()[2])}


def cost(call: Callable[..., Any], calls: int, synchronize: Callable[[], None]) -> float:
    """Microseconds of the calling thread per call, without other threads' work."""
    spent = 0.0
    for first in range(0, calls, AT_A_TIME):
        start = time.thread_time()
        for _ in range(first, min(calls, first + AT_A_TIME)):
            call()
        spent += time.thread_time() - start
        synchronize()
    return spent * 1e6 / calls


def timed_calls(args: argparse.Namespace, suffix: str) -> dict[tuple[str, str], Any]:
    """The timed calls, by row and column; each has been called before, so everything is made."""
    rows = {name: calls_of(op, args) for name, op in objects(args).items()}
    rows |= {f"deep_ep, low latency, {dtype}": calls_of_deep_ep(args, dtype == "FP8") for dtype in ("BF16", "FP8")}
    runs = {}
    for name, calls in rows.items():
        for what, call in calls.items():
            call()
            runs[name, f"{what}{suffix}_us"] = call
    return runs


def without_launches(made: Any) -> Any:
    """`made()`; kernels first launched inside call an empty function instead of their own."""
    import tvm_ffi

    from tilescale_net.compiler.kernel import CudaKernel
    from tilescale_net.compiler.simulator.kernel import SimulatedKernel

    nothing = tvm_ffi.get_global_func("testing.nop")
    with contextlib.ExitStack() as patches:
        for kind in (CudaKernel, SimulatedKernel):
            patches.enter_context(mock.patch.object(kind, "_function", lambda self: nothing))
        return made()


def main() -> None:
    args = parse()
    report = Report("moe_host", args)
    tsn.init()
    on_gpu = tsn.device().type == "cuda"
    args.repeat = args.repeat or (15 if on_gpu else 5)
    report.environment["timing"] = f"median of {args.repeat} x {args.calls} calls, {AT_A_TIME} at a time, in turn"
    names = ("dispatch", "cached", "combine", "both")
    columns = [us(f"{name}_us", name) for name in names]
    columns += [us(f"{name}_all_us", f"{name}, launched") for name in names] if on_gpu else []
    table = report.table("calls", [Column("what", "AllToAll")], columns)
    runs = without_launches(lambda: timed_calls(args, ""))
    runs |= timed_calls(args, "_all") if on_gpu else {}
    turns = {key: partial(cost, call, args.calls, tsn.synchronize) for key, call in runs.items()}
    samples = in_turn(turns, args.warmup, args.repeat)
    for name in dict.fromkeys(row for row, _ in runs):
        mine = {what: values for (row, what), values in samples.items() if row == name}
        table.add({"what": name, **medians(mine)}, mine)
    report.finish()


if __name__ == "__main__":
    main()
