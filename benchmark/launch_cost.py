"""What launching a kernel costs the host: ours, with its context, against the same tilelang kernel without one.

    GPUS=1 bash launch.sh benchmark/launch_cost.py

Host time is that of queueing launches from Python; graph time is per kernel of a replayed CUDA graph, into which every
row's kernel is captured. Needs a GPU; in the simulator a launch is a run.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

from benchmark.common import BenchmarkParser, Column, Report, median, positive_int

BENCH = dict(ranks=1, quick="--launches 100 --repeat 3", gpu=True)  # see common/suite.py


def parse() -> argparse.Namespace:
    parser = BenchmarkParser(__doc__.splitlines()[0], warmup=2, repeat=15)
    parser.add_argument("--launches", type=positive_int, default=1000, metavar="N", help="launches of a sample (1000)")
    return parser.parse_args()


def plain_kernel() -> Any:
    """The kernel of four tensors, by tilelang alone."""
    import tilelang
    import tilelang.language as T

    @tilelang.jit
    def factory(n: int) -> Any:
        @T.prim_func
        def plain(
            a: T.Tensor((n,), "float32"),
            b: T.Tensor((n,), "float32"),
            c: T.Tensor((8,), "int64"),
            d: T.Tensor((64,), "int32"),
        ):
            with T.Kernel(1, threads=128):
                for i in T.Parallel(128):
                    b[i] = a[i] + 1.0
                d[0] = T.cast(c[0], "int32")

        return plain

    return factory(512)


def context_kernel() -> Any:
    """The same kernel with the context, which it uses."""
    import tilelang.language as T

    import tilescale_net as tsn
    import tilescale_net.language as N

    @tsn.jit
    def factory(n: int) -> Any:
        @T.prim_func
        def with_context(
            ctx: N.Context(),
            a: T.Tensor((n,), "float32"),
            b: T.Tensor((n,), "float32"),
            c: T.Tensor((8,), "int64"),
            d: T.Tensor((64,), "int32"),
        ):
            with T.Kernel(1, threads=128):
                for i in T.Parallel(128):
                    b[i] = a[i] + 1.0
                d[0] = T.cast(c[0], "int32") + N.my_pe()

        return with_context

    return factory(512)


def launchers() -> dict[str, Any]:
    """Name of each row and a function that launches its kernel once."""
    import torch

    import tilescale_net as tsn
    from tilescale_net.kernels import p2p

    a = torch.randn(512, device=tsn.device())
    b = torch.empty_like(a)
    c = torch.zeros(8, dtype=torch.int64, device=tsn.device())
    d = torch.zeros(64, dtype=torch.int32, device=tsn.device())
    dst, src = (tsn.zeros((4096,), torch.uint8) for _ in range(2))
    plain, ours, push = plain_kernel(), context_kernel(), p2p.push(4096)
    peer = (tsn.rank() + 1) % tsn.size()
    return {
        "torch.add": lambda: torch.add(a, 1.0, out=b),
        "tilelang, 4 tensors": lambda: plain(a, b, c, d),
        "ours, the same and the context": lambda: ours(a, b, c, d),
        "ours, push of 2 KiB (5 arguments)": lambda: push(dst, src, 2048, peer, 1),
    }


def host_cost(launch: Callable[..., Any], launches: int) -> float:
    """Microseconds of host time per launch."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(launches):
        launch()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent * 1e6 / launches


def graph_cost(launch: Callable[..., Any], kernels: int = 100) -> float:
    """Microseconds per kernel of a replayed graph."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(kernels):
            launch()
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    before.record()
    graph.replay()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) * 1e3 / kernels


def main() -> None:
    args = parse()
    import tilescale_net as tsn
    from tilescale_net.runtime import settings

    report = Report("launch_cost", args)
    if settings.device_kind() != "cuda":
        report.nothing("it needs a GPU")
    tsn.init("64M")
    report.environment["timing"] = f"median of {args.repeat} x {args.launches} launches, kernels in turn"
    columns = [
        Column("host_us", "Host", better="lower", unit="us"),
        Column("beyond_us", "beyond tilelang", "+.2f", unit="us"),
        Column("graph_us", "in a graph", better="lower", unit="us"),
    ]
    table = report.table("launch", [Column("kernel", "Kernel")], columns)
    runs = launchers()
    host: dict[str, list[float]] = {name: [] for name in runs}
    graph: dict[str, list[float]] = {name: [] for name in runs}
    # Kernels take turns, so that a change of the host's clock touches all alike.
    for turn in report.progress(range(args.warmup + args.repeat), "turns"):
        for name, launch in runs.items():
            cost, replay = host_cost(launch, args.launches), graph_cost(launch)
            if turn >= args.warmup:
                host[name].append(cost)
                graph[name].append(replay)
    base = median(host["tilelang, 4 tensors"])
    for name in runs:
        figures = {"host_us": median(host[name]), "graph_us": median(graph[name])}
        samples = {"host_us": host[name], "graph_us": graph[name]}
        table.add({"kernel": name, "beyond_us": figures["host_us"] - base, **figures}, samples)
    report.finish()
    tsn.finalize()


if __name__ == "__main__":
    main()
