"""Time of an object's first call with an empty cache of kernels, and with all kernels cached.

    GPUS=4 bash launch.sh benchmark/first_calls.py

From the constructor to the end of the first call, by the slowest rank. "empty": with an empty cache of kernels;
"cached": as in another process that finds them on disk: this process forgets its kernels. Then the stages of each
compiled kernel, the longest of a name: `trace` and `prepare` are Python, `lower` is tilelang, `nvcc` the device code,
`link` its library with the launch.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tilescale_net as tsn
from benchmark.common import BenchmarkParser, Column, Report, compiled, is_rank_zero, positive_int
from benchmark.common.measuring import gather, wall_us
from benchmark.common.modules import moe, torch

BENCH = dict(gpu=True, ranks=0, quick="--hidden 1024 --tokens 256 --local-experts 8")  # see common/suite.py


# The ranks of a host have one parent.
FOLDER = Path(tempfile.gettempdir()) / f"tilescale_net_first_calls-{os.getppid()}"


def forget(number: int) -> None:
    """Search kernels on the disk again, in folder `number`."""
    os.environ["TILELANG_CACHE_DIR"] = str(FOLDER / str(number))
    compiled.forget()


def first_calls(args: Any) -> dict[str, Callable[[], None]]:
    """Name and timed function of each row."""
    from tilescale_net.deep_ep import Buffer
    from tilescale_net.kernels.fused.all_gather_matmul import AllGatherMatmul
    from tilescale_net.kernels.fused.matmul_all_reduce import MatmulAllReduce
    from tilescale_net.kernels.fused.matmul_reduce_scatter import MatmulReduceScatter

    device, n = tsn.device(), tsn.size()
    experts, few, rows = args.local_experts * n, args.few, args.rows
    x = torch.randn((args.tokens, args.hidden), device=device).to(torch.bfloat16)
    chosen = torch.rand((args.tokens, experts), device=device).topk(8, 1)[1]
    weights = torch.rand((args.tokens, 8), device=device)

    def layer(tokens: int, dtype: Any, mode: str) -> Callable[[], None]:
        def call() -> None:
            op = moe.AllToAll(experts, tokens, args.hidden, 8, dtype, mode, grow=True)
            rows: Any = x[:tokens]
            if dtype == torch.float8_e4m3fn and mode == "throughput":
                rows = rows.to(dtype), torch.ones((tokens, args.hidden // 128), device=device)
            received = op.dispatch(rows, chosen[:tokens], weights[:tokens])
            y = torch.zeros(received.x.shape, dtype=torch.bfloat16, device=device)
            op.combine(y, received.handle)
            op.check()
            op.free()

        return call

    def deep_ep() -> None:
        buffer = Buffer()
        rows, _, handle, *_ = buffer.low_latency_dispatch(x[:few], chosen[:few], few, experts, use_fp8=True)
        y = torch.zeros(rows[0].shape, dtype=torch.bfloat16, device=device)
        buffer.low_latency_combine(y, chosen[:few], weights[:few], handle)
        tsn.synchronize()
        buffer.destroy()

    def fused_gemm(kind: Any, rows: int, gathers: bool) -> Callable[[], None]:
        def call() -> None:
            op = kind(rows, args.hidden, args.hidden)
            a = torch.zeros((rows if gathers or kind is MatmulAllReduce else n * rows, args.hidden), device=device)
            op(a.to(torch.bfloat16), torch.zeros((args.hidden, args.hidden), dtype=torch.bfloat16, device=device))
            tsn.synchronize()
            op.free()

        return call

    fp8 = torch.float8_e4m3fn
    return {
        "AllToAll, latency, BF16": layer(few, torch.bfloat16, "latency"),
        "AllToAll, latency, FP8": layer(few, fp8, "latency"),
        "AllToAll, throughput, BF16": layer(args.tokens, torch.bfloat16, "throughput"),
        "AllToAll, throughput, FP8": layer(args.tokens, fp8, "throughput"),
        "deep_ep, low latency, FP8": deep_ep,
        "AllGatherMatmul": fused_gemm(AllGatherMatmul, rows, True),
        "MatmulReduceScatter": fused_gemm(MatmulReduceScatter, rows, False),
        "MatmulAllReduce": fused_gemm(MatmulAllReduce, rows * n, False),
    }


def add_stages(report: Report, found: list[dict[str, dict[str, float]]]) -> None:
    """The table of stages; `found`: by rank, see `compiled.Stages`."""
    if not is_rank_zero():
        return
    columns = [Column(name, name, ".2f", better="lower", unit="s") for name in (*compiled.Stages.NAMES, "all")]
    table = report.table("Stages", [Column("kernel", "kernel")], columns)
    for kernel in sorted({name for of_rank in found for name in of_rank}):
        rows = [of_rank[kernel] for of_rank in found if kernel in of_rank]
        longest = max(rows, key=lambda stages: sum(stages.values()))
        table.add({"kernel": kernel, **longest, "all": sum(longest.values())})


def main() -> None:
    parser = BenchmarkParser(__doc__.splitlines()[0], warmup=None, repeat=None)
    parser.option("--tokens", positive_int, 4096, "tokens of a rank in throughput mode")
    parser.option("--few", positive_int, 128, "the same in latency mode")
    parser.option("--local-experts", positive_int, 64, "experts of a rank")
    parser.option("--rows", positive_int, 512, "of a rank, of fused GEMMs")
    parser.option("--hidden", positive_int, 7168, "elements of a row")
    parser.option("--only", str, None, "objects whose name holds this text (all)", "TEXT")
    args = parser.parse_args()
    report = Report("first_calls", args)
    tsn.init(2 << 30)
    columns = [
        Column(key, title, ",.1f", better="lower", unit="s")
        for key, title in (("empty", "empty"), ("cached", "cached"))
    ]
    table = report.table("First calls", [Column("what", "object")], columns)
    stages = compiled.Stages()
    for number, (what, call) in enumerate(first_calls(args).items()):
        if (args.only or "") not in what:
            continue
        row: dict[str, Any] = {"what": what}
        for key in ("empty", "cached"):
            forget(number)
            tsn.barrier()
            with stages.watching():
                seconds = wall_us(call) / 1e6
            row[key] = max(found["seconds"] for found in gather(dict(seconds=seconds)))
        if is_rank_zero():
            table.add(row)
    add_stages(report, gather(stages.of_kernel))
    tsn.barrier()
    shutil.rmtree(FOLDER, ignore_errors=True)
    report.finish()


if __name__ == "__main__":
    main()
