"""Host time of a kernel launch: ours, with its context, against the same tilelang kernel without one.

    GPUS=1 bash launch.sh benchmark/launch_cost.py

Host time is for queueing launches from Python; graph time is per kernel of a replayed CUDA graph, into which every
row's kernel is captured. Needs a GPU; in the simulator a launch is a run.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import tilescale_net as tsn
from benchmark.common import BenchmarkParser, Column, Report, median, positive_int, us
from benchmark.common.measuring import captured, device_us, in_turn, repeated, wall_us
from benchmark.common.modules import p2p, torch

BENCH = dict(ranks=1, quick="--launches 100 --repeat 3", gpu=True)  # see common/suite.py
IN_GRAPH = 100  # kernels


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


def host_cost(launch: Callable[[], object], launches: int) -> float:
    """Microseconds of host time per launch."""
    torch.cuda.synchronize()
    spent = wall_us(partial(repeated(launch), launches))
    torch.cuda.synchronize()
    return spent / launches


def graph_cost(launch: Callable[[], object]) -> float:
    """Microseconds per kernel of a replayed graph."""
    replay = captured(launch, IN_GRAPH)
    replay()
    return device_us(replay) / IN_GRAPH


def main() -> None:
    from tilescale_net.runtime import settings

    parser = BenchmarkParser(__doc__.splitlines()[0], warmup=2, repeat=15)
    parser.option("--launches", positive_int, 1000, "launches of a sample")
    args = parser.parse_args()
    report = Report("launch_cost", args)
    if settings.device_kind() != "cuda":
        report.nothing("it needs a GPU")
    tsn.init("64M")
    report.environment["timing"] = f"median of {args.repeat} x {args.launches} launches, kernels in turn"
    columns = [us("host_us", "Host"), Column("beyond_us", "beyond tilelang", "+.2f", unit="us")]
    table = report.table("launch", [Column("kernel", "Kernel")], [*columns, us("graph_us", "in a graph")])
    runs = launchers()
    # Kernels take turns, so that a change of the host's clock affects all equally.
    costs: dict[tuple[str, str], Callable[[], float]] = {}
    for name, launch in runs.items():
        costs[name, "host_us"] = partial(host_cost, launch, args.launches)
        costs[name, "graph_us"] = partial(graph_cost, launch)
    samples = in_turn(costs, args.warmup, args.repeat)
    base = median(samples["tilelang, 4 tensors", "host_us"])
    for name in runs:
        mine = {what: samples[name, what] for what in ("host_us", "graph_us")}
        host = median(mine["host_us"])
        table.add(
            {"kernel": name, "beyond_us": host - base, "host_us": host, "graph_us": median(mine["graph_us"])}, mine
        )
    report.finish()


if __name__ == "__main__":
    main()
