"""The fused kernels' GEMM on one GPU, next to cuBLAS.

    GPUS=1 bash launch.sh benchmark/matmul.py

It computes x [m, k] @ w [k, n] alone, with the geometry of `kernels.fused.choice`. Without a GPU the
simulator runs a small GEMM.
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import tilescale_net as tsn
from benchmark.common.arguments import TIMINGS, BenchmarkParser, int_list, on_gpu, one_of
from benchmark.common.gemm import difference, eight_bits, gemm_alone, scaled_mm
from benchmark.common.measuring import Timer, medians, normal_numbers, raise_if_wrong, repeated
from benchmark.common.modules import fused_choice, torch
from benchmark.common.report import Column, Report, us

BENCH = dict(ranks=1, quick="--repeat 2")  # see common/suite.py
WIDTHS = ((8192, 14336), (8192, 28672), (7168, 8192))  # k and n of layers


def parse() -> argparse.Namespace:
    parser = BenchmarkParser(__doc__.splitlines()[0], timing=TIMINGS)
    m = [512, 1024, 2048, 4096, 8192, 16384] if on_gpu() else [72]
    parser.option("--m", int_list(1, 1 << 24), m, "rows")
    text = "bf16, next to torch.mm; fp8 (e4m3, scales by row and column), next to torch._scaled_mm"
    parser.option("--dtypes", one_of("bf16", "fp8"), ["bf16", "fp8"] if on_gpu() else ["bf16"], text)
    return parser.parse_args()


def random(*shape: int, seed: int = 0) -> Any:
    return normal_numbers(shape, sum(shape) + seed, torch.bfloat16, tsn.device())


def times(
    timer: Timer, calls: dict[str, Callable[[], object]], wrong: Callable[[], str | None], what: str
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Median us of every implementation, and the samples; raises WrongData when `wrong()` returns an error."""
    samples = timer.interleaved({key: repeated(call) for key, call in calls.items()}, 5)
    calls["ours"]()
    tsn.synchronize()
    raise_if_wrong(what, wrong())
    took: dict[str, Any] = medians(samples)
    return took | {"over": took["ours"] / took["matmul"]}, samples


def gemm_of(m: int, k: int, n: int, eight: bool) -> Any:
    """`(calls by name, the error or None, the geometry)` of a GEMM."""
    out, theirs = (random(m, n) for _ in range(2))
    if eight:
        (x, of_rows), (held, of_columns) = eight_bits(random(m, k, seed=1)), eight_bits(random(n, k, seed=2))
        w = held.t()
        matmul = lambda: scaled_mm(x, w, of_rows, of_columns)  # noqa: E731
        reference = lambda: theirs.copy_(matmul())  # noqa: E731
    else:
        x, w = random(m, k), random(k, n)
        matmul = reference = lambda: torch.mm(x, w, out=theirs)
    problem = fused_choice.GemmProblem("all_gather_matmul", 1, m, k, n, x.dtype)
    tiling = fused_choice.usual_options(problem, tsn.device())["tiling"]
    calls = {"ours": gemm_alone(tiling, x, w, out, (of_rows, of_columns) if eight else None), "matmul": matmul}

    def wrong() -> str | None:
        reference()
        exact = x[:16].float() @ w.float()
        exact = exact * of_rows[:16, None] * of_columns if eight else exact
        return difference(out, theirs, "the GEMM") or difference(out[:16], exact, "its first rows")

    return calls, wrong, "x".join(map(str, tiling.tile))


def gemms(report: Report, timer: Timer, args: argparse.Namespace) -> None:
    keys = [Column("dtype", "Dtype"), *(Column(name, name.upper(), ",d") for name in "knm")]
    columns = [us("ours", "Ours"), us("matmul", "cuBLAS"), Column("over", "x cuBLAS", ".3f")]
    table = report.table("product", keys, [*columns, Column("tflops", "TFLOP/s", ".0f"), Column("tile", "Tile")])
    widths = WIDTHS if timer.on_gpu else ((64, 128),)
    for dtype, (k, n), m in itertools.product(args.dtypes, widths, args.m):
        if dtype == "fp8" and not timer.on_gpu:
            continue
        calls, wrong, tile = gemm_of(m, k, n, dtype == "fp8")
        took, samples = times(timer, calls, wrong, f"{dtype}, m {m}, k {k}, n {n}")
        row = dict(dtype=dtype, k=k, n=n, m=m, **took, tflops=2 * m * n * k / took["ours"] / 1e6, tile=tile)
        table.add(row, samples)


def main() -> None:
    args = parse()
    report = Report("matmul", args)
    world = tsn.init(64 << 20)
    timer = Timer.of(args, world.device_kind == "cuda")
    report.environment |= {
        "data": "normal random numbers, verified",
        "timing": f"{timer.mode}, implementations in turn",
    }
    gemms(report, timer, args)
    report.finish()


if __name__ == "__main__":
    main()
