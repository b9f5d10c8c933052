"""What calls of AllToAll cost the host: Python and torch between the caller and the launches of kernels.

    GPUS=1 bash launch.sh benchmark/moe_host.py

Launches are left out: their arguments are converted and given to a function that does nothing. On a GPU, further columns
are of the same calls with their launches. One rank is enough, for what others do is no work of this host.
"""

import argparse
import contextlib
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from benchmark.common import BenchmarkParser, Column, Report, median, positive_int

# Calls between two synchronisations: a host too far ahead of a GPU waits for room in its queue.
AT_A_TIME = 50
BENCH = dict(ranks=1, quick="--calls 50 --repeat 3", gpu=False)  # see common/suite.py


def parse() -> argparse.Namespace:
    parser = BenchmarkParser(__doc__.splitlines()[0], warmup=2, repeat=None)
    text = "timed runs, whose median is shown (15; 5 in the simulator)"
    parser.add_argument("--repeat", type=positive_int, metavar="N", help=text)
    parser.add_argument("--calls", type=positive_int, default=200, metavar="N", help="calls of a sample (200)")
    parser.add_argument("--tokens", type=positive_int, default=16, metavar="N", help="tokens of a call (16)")
    parser.add_argument("--hidden", type=positive_int, default=128, metavar="N", help="elements of a row (128)")
    parser.add_argument("--experts", type=positive_int, default=8, metavar="N", help="experts of the layer (8)")
    parser.add_argument("--top-k", type=positive_int, default=4, metavar="N", help="choices per token (4)")
    return parser.parse_args()


def objects(args: argparse.Namespace) -> dict[str, Any]:
    """Name of each row and its AllToAll."""
    import torch

    from tilescale_net.kernels.moe import AllToAll

    sizes = (args.experts, args.tokens, args.hidden, args.top_k)
    fp8 = torch.float8_e4m3fn
    return {
        "latency, BF16": AllToAll(*sizes, torch.bfloat16, "latency"),
        "latency, FP8": AllToAll(*sizes, fp8, "latency"),
        "throughput, by rank": AllToAll(*sizes, torch.bfloat16, layout="rank"),
        "throughput, by expert": AllToAll(*sizes, torch.bfloat16),
    }


def inputs(args: argparse.Namespace, device: Any) -> tuple[Any, ...]:
    """Rows, choices and weights."""
    import torch

    x = torch.randn((args.tokens, args.hidden), device=device).to(torch.bfloat16)
    chosen = torch.rand((args.tokens, args.experts), device=device).topk(args.top_k, 1)[1]
    return x, chosen, torch.rand((args.tokens, args.top_k), device=device)


def calls_of(op: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Name of each column and a function that makes its calls."""
    import torch

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
    """The same of low-latency calls in DeepEP's words, which bring weights at combine."""
    import torch

    import tilescale_net as tsn
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
    """Microseconds that the calling thread works per call: what else the processors do does not count."""
    spent = 0.0
    for first in range(0, calls, AT_A_TIME):
        start = time.thread_time()
        for _ in range(first, min(calls, first + AT_A_TIME)):
            call()
        spent += time.thread_time() - start
        synchronize()
    return spent * 1e6 / calls


def timed_calls(args: argparse.Namespace, suffix: str) -> dict[tuple[str, str], Any]:
    """What is timed, by row and column; each has been called, so that nothing is left to be made."""
    rows = {name: calls_of(op, args) for name, op in objects(args).items()}
    rows |= {f"deep_ep, low latency, {dtype}": calls_of_deep_ep(args, dtype == "FP8") for dtype in ("BF16", "FP8")}
    runs = {}
    for name, calls in rows.items():
        for what, call in calls.items():
            call()
            runs[name, f"{what}{suffix}_us"] = call
    return runs


def without_launches(made: Any) -> Any:
    """`made()`; kernels that are launched first inside call a function that does nothing in the place of their own."""
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
    import tilescale_net as tsn

    report = Report("moe_host", args)
    tsn.init()
    on_gpu = tsn.device().type == "cuda"
    args.repeat = args.repeat or (15 if on_gpu else 5)
    report.environment["timing"] = f"median of {args.repeat} x {args.calls} calls, {AT_A_TIME} at a time, in turn"
    names = ("dispatch", "cached", "combine", "both")
    columns = [Column(f"{name}_us", name, better="lower", unit="us") for name in names]
    if on_gpu:
        columns += [Column(f"{name}_all_us", f"{name}, launched", better="lower", unit="us") for name in names]
    table = report.table("calls", [Column("what", "AllToAll")], columns)

    runs = without_launches(lambda: timed_calls(args, ""))
    runs |= timed_calls(args, "_all") if on_gpu else {}
    samples: dict[tuple[Any, ...], list[float]] = {key: [] for key in runs}
    for turn in report.progress(range(args.warmup + args.repeat), "turns"):
        for key, call in runs.items():
            spent = cost(call, args.calls, tsn.synchronize)
            if turn >= args.warmup:
                samples[key].append(spent)
    for name in dict.fromkeys(row for row, _ in runs):
        mine = {what: values for (row, what), values in samples.items() if row == name}
        table.add({"what": name, **{what: median(values) for what, values in mine.items()}}, mine)
    report.finish()
    tsn.finalize()


if __name__ == "__main__":
    main()
