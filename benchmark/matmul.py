"""The fused kernels' GEMM on one GPU, next to cuBLAS; and a rank's share of whole fused calls with prompt peers.

    GPUS=1 bash launch.sh benchmark/matmul.py
    GPUS=1 bash launch.sh benchmark/matmul.py --parts calls --ranks 4 --m 4096,8192,16384

`product` computes x [m, k] @ w [k, n] by itself, with the geometry that `kernels.fused.choice` takes. `calls` times whole
calls of AG+GEMM (k 8192, n 14336 per rank) and GEMM+RS, GEMM+AR (k 7168 per rank, n 8192) as rank 0 of several runs them
when no peer keeps it waiting (see `fake_world`): an upper bound on the overlap, not a measurement of several
GPUs. Without a GPU the simulator runs a small GEMM.
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import tilescale_net as tsn
from benchmark.common.arguments import BenchmarkParser, int_list, on_gpu, one_of, positive_int
from benchmark.common.gemm import difference, eight_bits, gemm_alone, scaled_mm
from benchmark.common.measuring import Timer, medians, normal_numbers, raise_if_wrong, repeated
from benchmark.common.modules import fused_choice, torch
from benchmark.common.report import Column, Report, us

BENCH = dict(ranks=1, quick="--repeat 2 --parts product")  # see common/suite.py
WIDTHS = ((8192, 14336), (8192, 28672), (7168, 8192))  # k and n of layers
KINDS = ("AG+GEMM", "GEMM+RS", "GEMM+AR")
SOON = 1 << 60  # no call has so high a number
HEAP = 4 << 30  # of `calls`: summands and gathered rows of 16384 rows, and as much again for the peers


def parse() -> argparse.Namespace:
    parser = BenchmarkParser(__doc__.splitlines()[0], timing=True)
    parts = ["product", "calls"] if on_gpu() else ["product"]
    m = [512, 1024, 2048, 4096, 8192, 16384] if on_gpu() else [72]
    parser.option("--m", int_list(1, 1 << 24), m, "rows")
    parser.option("--parts", one_of("product", "calls"), parts, "what to measure")
    text = "bf16, next to torch.mm; fp8 (e4m3, scales by row and column), next to torch._scaled_mm"
    parser.option("--dtypes", one_of("bf16", "fp8"), ["bf16", "fp8"] if on_gpu() else ["bf16"], text)
    parser.option("--kinds", one_of(*KINDS), [*KINDS], "of calls")
    parser.option("--ranks", positive_int, 4, "of a call")
    parser.option("--blocks", positive_int, None, "of a call that send")
    args = parser.parse_args()
    if "calls" in args.parts and not on_gpu():
        parser.error("--parts calls needs a GPU")
    return args


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
    """`(calls by name, what is wrong or None, the geometry)` of a GEMM."""
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


def cublas(eight: bool) -> Any:
    """cuBLAS's GEMM of `x`, `w` and, of 8 bits, their scales; `out` is where it goes."""

    def scaled(x: Any, w: Any, of_rows: Any, of_columns: Any, out: Any = None) -> Any:
        return scaled_mm(x, w, of_rows, of_columns)

    return scaled if eight else (lambda x, w, *scales, out=None: torch.mm(x, w, out=out))


def operand(rows: int, columns: int, eight: bool, seed: int) -> Any:
    """Random numbers and a scale for each row, or none."""
    return eight_bits(random(rows, columns, seed=seed)) if eight else (random(rows, columns, seed=seed), None)


def fake_world(world: Any, ranks: int) -> None:
    """Make `world`, of one rank on a GPU, rank 0 of `ranks` whose peers are always ahead of it; before any kernel is launched.

    The peers' heaps are the upper half of its own, which is half as large then, so what it sends crosses this GPU's memory
    instead of NVLink, at about the rate that the blocks that send reach there; what peers would send is never written, and
    their signals are there from the beginning. So this measures what a fused call costs a rank beside its GEMM, not
    what waiting for real peers costs.
    """
    from tilescale_net.kernels.collective import Collective
    from tilescale_net.runtime import context

    memory = world.memory
    half = memory.size // 2
    bases = [memory.base] + [memory.base + half] * (ranks - 1)
    header = context.ContextHeader(
        my_pe=0, n_pes=ranks, node_pe=0, n_node_pes=ranks, n_queues=0, flags=0, heap_base=memory.base, heap_bytes=half,
        abort_word=world.page.address, error=world.page.record_address, timeout_ns=int(world.timeout * 1e9), queues=0,
    )  # fmt: skip
    words = torch.frombuffer(bytearray(context.pack(header, bases)), dtype=torch.int64)
    world.context_tensor.as_strided(words.shape, (1,)).copy_(words)  # the bases lie behind what kernels take
    world.size, world.peer_base = ranks, bases
    # One member of the job: its peers have not left, they were never there.
    Collective.allows_partial_membership = True


def preset_signals(*signals: Any) -> None:
    """All that peers could signal has been signalled."""
    for words in signals:
        words.view(torch.int64).fill_(SOON)


def call_of(kind: str, args: argparse.Namespace, m: int, eight: bool) -> Any:
    """`(call, cuBLAS's, what is wrong or None, free)` of a fused call on a rank with prompt peers."""
    from tilescale_net.kernels.fused.all_gather_matmul import AllGatherMatmul
    from tilescale_net.kernels.fused.matmul_all_reduce import MatmulAllReduce
    from tilescale_net.kernels.fused.matmul_reduce_scatter import MatmulReduceScatter

    op: Any
    rows = m // args.ranks
    k, n = (8192, 14336) if kind == "AG+GEMM" else (7168, 8192)
    name = {"AG+GEMM": "all_gather_matmul", "GEMM+RS": "matmul_reduce_scatter", "GEMM+AR": "matmul_all_reduce"}[kind]
    dtype, mm = torch.float8_e4m3fn if eight else torch.bfloat16, cublas(eight)
    problem = fused_choice.GemmProblem(name, args.ranks, rows if kind == "AG+GEMM" else m, k, n, dtype)
    options = fused_choice.usual_options(problem, tsn.device())
    options |= {"blocks": args.blocks} if args.blocks else {}
    (held, of_columns), whole = operand(n, k, eight, 2), random(m, n)
    w = held.t() if eight else held.t().contiguous()
    everyone, of_rows = operand(m, k, eight, 1)
    scales = (of_rows, of_columns) if eight else ()
    if kind == "AG+GEMM":
        op, x, out = AllGatherMatmul(rows, k, n, dtype=dtype, **options), everyone[:rows].clone(), random(m, n)
        preset_signals(op.memory["ready"], op.memory["arrived"])
        for half in range(2):
            gathered = op.memory["gathered"][half]
            gathered.view(torch.uint8).copy_(everyone.view(gathered.shape).view(torch.uint8))
            if eight:
                op.memory["scales"][half].copy_(of_rows.view(args.ranks, rows))
        wanted = lambda: mm(everyone, w, *scales)  # noqa: E731
    else:
        make = MatmulReduceScatter if kind == "GEMM+RS" else MatmulAllReduce
        op = make(rows if kind == "GEMM+RS" else m, k, n, dtype=dtype, **options)
        x, out = everyone, random(rows if kind == "GEMM+RS" else m, n)
        first = (of_rows[:rows], of_columns) if eight else ()
        preset_signals(*(op.memory[name] for name in ("ready", "arrived", "shared")))
        for name in ("summands", "sums"):
            op.memory[name].normal_()
            op.memory[name][-1].copy_(op.memory[name][0])
        own = lambda: mm(x[:rows], w, *first).float() + op.memory["summands"][0, 1:].float().sum(0)  # noqa: E731
        others = (lambda: [*op.memory["sums"][0, 1:]]) if kind == "GEMM+AR" else (lambda: [])
        wanted = lambda: torch.cat([own(), *(part.float() for part in others())])  # noqa: E731
    theirs = lambda: mm(everyone, w, *scales, out=whole)  # noqa: E731
    own_scales = dict(x_scales=of_rows[: len(x)].clone(), w_scales=of_columns) if eight else {}
    return lambda: op(x, w, out, **own_scales), theirs, lambda: difference(out, wanted(), kind), op.free


def calls(report: Report, timer: Timer, args: argparse.Namespace) -> None:
    keys = [Column("kind", "Call"), Column("dtype", "Dtype"), Column("ranks", "Ranks", ",d"), Column("m", "M", ",d")]
    columns = [us("ours", "Ours"), us("matmul", "cuBLAS alone"), Column("over", "x cuBLAS", ".3f")]
    table = report.table("calls", keys, columns)
    table.plotted = False
    for dtype, kind, m in itertools.product(args.dtypes, args.kinds, args.m):
        if m % args.ranks:
            continue
        ours, theirs, wrong, free = call_of(kind, args, m, dtype == "fp8")
        took, samples = times(timer, {"ours": ours, "matmul": theirs}, wrong, f"{dtype} {kind}, m {m}")
        table.add(dict(kind=kind, dtype=dtype, ranks=args.ranks, m=m, **took), samples)
        free()


def main() -> None:
    args = parse()
    report = Report("matmul", args)
    world = tsn.init(HEAP if "calls" in args.parts else 64 << 20)
    timer = Timer.of(args, world.device_kind == "cuda")
    report.environment |= {
        "data": "normal random numbers, verified",
        "timing": f"{timer.mode}, implementations in turn",
    }
    if "product" in args.parts:
        gemms(report, timer, args)
    if "calls" in args.parts:
        text = "of one rank, whose peers are this GPU's memory and always ahead; not of several GPUs"
        report.environment["calls"] = text
        fake_world(world, args.ranks)
        calls(report, timer, args)
    report.finish()
    tsn.finalize()


if __name__ == "__main__":
    main()
