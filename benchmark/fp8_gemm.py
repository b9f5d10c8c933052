"""FP8 GEMMs with scales of blocks on one GPU, of one matrix and of experts' rows, next to cuBLAS and DeepGEMM.

    GPUS=1 bash launch.sh benchmark/fp8_gemm.py
    GPUS=1 bash launch.sh benchmark/fp8_gemm.py --tiles 256x4 --clusters 1 --forms block

Scales are one for 1 x 128 elements of x and 128 x 128 of w (`block`), or one for a row of each (`row`). Each row of the
table is a geometry (`default`: of a call that gives none): columns and stages of its tiles, blocks of threads that share a
tile of w, and whether the two warpgroups of a block use the tensor cores in turn. cuBLAS is torch.nn.functional.scaled_mm, of experts torch._scaled_grouped_mm, where
they have the form; DeepGEMM is measured where it is installed. Without a GPU the simulator runs small GEMMs.
"""

import argparse
import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import tilescale_net as tsn
from benchmark.common import compiled
from benchmark.common.arguments import TIMINGS, BenchmarkParser, int_list, on_gpu, one_of
from benchmark.common.gemm import difference, eight_bits
from benchmark.common.measuring import Timer, medians, normal_numbers, raise_if_wrong, repeated
from benchmark.common.modules import torch
from benchmark.common.report import Column, Report, us

BENCH = dict(ranks=1, quick="--repeat 2")  # see common/suite.py
# n and k of DeepSeek-V3's and V4-Pro's layers.
WIDTHS = ((4096, 7168), (7168, 2048), (24576, 1536), (7168, 16384))
GROUPED = ((4096, 7168), (7168, 2048), (6144, 7168), (7168, 3072))
EXPERTS = 32
# Columns x stages (rows are 128), and the default of calls.
TILES = ("default", "256x4", "128x6", "256x3", "128x4", "64x8", "64x4", "32x8")


def parse() -> argparse.Namespace:
    parser = BenchmarkParser(__doc__.splitlines()[0], timing=TIMINGS)
    m = [128, 4096, 8192] if on_gpu() else [72]
    parser.option("--m", int_list(1, 1 << 24), m, "rows of a GEMM of one matrix")
    rows = [128, 512] if on_gpu() else [24]
    parser.option("--rows", int_list(1, 1 << 20), rows, f"rows of each of {EXPERTS if on_gpu() else 2} experts, about")
    tiles = [*TILES[:2]] if on_gpu() else ["64x2"]
    parser.option("--tiles", one_of(*TILES, "64x2"), tiles, "columns and stages of the tiles")
    clusters = [1, 2] if on_gpu() else [1]
    parser.option("--clusters", int_list(1, 4), clusters, "blocks of threads that share a tile of w")
    parser.option("--turns", int_list(0, 1), [0, 1], "whether warpgroups have the tensor cores by turns")
    parser.option("--steps", int_list(1, 6), [1, 4], "in one turn of the loop over the depth")
    parser.option("--low", int_list(0, 1), [0], "whether experts' last tiles of few rows are multiplied by columns")
    parser.option("--forms", one_of("block", "row"), ["block", "row"], "of the scales")
    parser.option("--parts", one_of("plain", "grouped"), ["plain", "grouped"], "what to measure")
    return parser.parse_args()


def tiling_of(name: str, cluster: int, in_turn: int, steps: int, low: int) -> Any:
    from tilescale_net.kernels.fused.scaled_gemm import ScaledTiling

    if name == "default":
        return None
    columns, stages = map(int, name.split("x"))
    tile = (128 if on_gpu() else 32, columns, 128)
    return ScaledTiling(
        tile,
        stages,
        columns=min(64, columns // 2),
        cluster=cluster,
        in_turn=bool(in_turn),
        steps=steps,
        low_tiles=bool(low),
    )


def compile_one(form: str, experts: int, n: int, k: int, tiling: Any) -> None:
    from tilescale_net.kernels.fused.scaled_gemm import kernel_of

    kernel_of(experts, n, k, "bfloat16", form, tiling, tsn.device())


class Problem:
    """Operands of a GEMM of `experts` matrices, whose rows begin at multiples of 128, and its implementations. `rows`:
    of each expert; with several experts, between half and one and a half of it."""

    def __init__(self, form: str, experts: int, rows: int, n: int, k: int) -> None:
        from tilescale_net.kernels.fused import scaled_gemm
        from tilescale_net.kernels.moe.row_ops import dequantise, quantise

        self._gemm, self.form, self.experts, self.n, self.k = scaled_gemm, form, experts, n, k
        device, generator = tsn.device(), torch.Generator().manual_seed(rows + n + k)
        spread = torch.randint(rows // 2, rows + rows // 2 + 1, (experts,), generator=generator)
        counts = spread if experts > 1 else torch.tensor([rows])
        ends = (-(-counts // 128) * 128).cumsum(0) if experts > 1 else counts
        self.rows, self.begins, self.of_expert = int(ends[-1]), [0, *ends.tolist()], counts.tolist()
        self.total = sum(self.of_expert)
        self.counts = counts.to(device, torch.int32)
        self.offsets = torch.tensor(self.begins, dtype=torch.int32, device=device)
        x = normal_numbers((self.rows, k), 1, torch.bfloat16, device)
        w = normal_numbers((experts, n, k), 2, torch.bfloat16, device)
        if form == "block":
            (self.x, self.of_x), held = quantise(x), [scaled_gemm.quantise_weights(each) for each in w]
        else:
            (self.x, self.of_x), held = eight_bits(x), [eight_bits(each) for each in w]
        self.w, self.of_w = (torch.stack(each) for each in zip(*held))
        self.out = torch.zeros((self.rows, n), dtype=torch.bfloat16, device=device)
        last = self.begins[experts - 1]
        some = slice(last, last + min(16, self.of_expert[-1]))
        wide = (
            scaled_gemm.dequantise_weights(self.w[-1], self.of_w[-1], torch.float32)
            if form == "block"
            else self.w[-1].float() * self.of_w[-1][:, None]
        )
        exact = dequantise(self.x[some], self.of_x[some]) if form == "block" else self.x[some].float()
        exact = exact if form == "block" else exact * self.of_x[some, None]
        self.some, self.exact = some, exact @ wide.t()

    def ours(self, tiling: Any) -> Callable[[], Any]:
        if self.experts == 1:
            operands = (self.x, self.w[0], self.of_x, self.of_w[0])
            return lambda: self._gemm.scaled_matmul(*operands, out=self.out, tiling=tiling)
        experts = dict(counts=self.counts, offsets=self.offsets)
        operands = (self.x, self.w, self.of_x, self.of_w)
        return lambda: self._gemm.scaled_matmul(*operands, out=self.out, tiling=tiling, **experts)

    def cublas(self) -> Callable[[], Any]:
        """torch's GEMM with such scales. Raises torch's errors if it has none."""
        from torch.nn.functional import ScalingType, scaled_mm

        if self.experts > 1:
            if self.form == "block":
                raise NotImplementedError("torch has no grouped GEMM with such scales")
            given, ends = (self.x, self.w.transpose(1, 2), self.of_x, self.of_w), self.offsets[1:]
            return lambda: torch._scaled_grouped_mm(*given, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True)
        if self.form == "row":
            scales = self.of_x[:, None], self.of_w[0][None]
            return lambda: torch._scaled_mm(self.x, self.w[0].t(), *scales, out_dtype=torch.bfloat16)
        # Rows of the scales of x are next to one another, as cuBLAS takes them.
        of_x, of_w = self.of_x.t().contiguous().t(), self.of_w[0].t()
        recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        return lambda: scaled_mm(self.x, self.w[0].t(), of_x, recipes[0], of_w, recipes[1], output_dtype=torch.bfloat16)

    def deep_gemm(self) -> Callable[[], Any]:
        """DeepGEMM's. Raises ImportError if it is not installed."""
        peer = importlib.import_module("deep_gemm")
        if self.form == "row":
            raise NotImplementedError("DeepGEMM has no GEMM with scales of rows on Hopper")
        out = torch.zeros_like(self.out)
        # Its GEMMs read scales by columns. Callers quantise to that form; with rows, each call would launch another
        # kernel.
        of_x = peer.get_mn_major_tma_aligned_tensor(self.of_x)
        if self.experts == 1:
            return lambda: (peer.fp8_gemm_nt((self.x, of_x), (self.w[0], self.of_w[0]), out), out)[1]
        index = torch.full((self.rows,), -1, dtype=torch.int32, device=self.x.device)
        for e, (begin, count) in enumerate(zip(self.begins, self.of_expert)):
            index[begin : begin + count] = e
        operands = (self.x, of_x), (self.w, self.of_w), out, index
        return lambda: (peer.m_grouped_fp8_gemm_nt_contiguous(*operands), out)[1]


REASONS: set[str] = set()


def if_works(what: str, make: Callable[[], Callable[[], Any]], problem: Problem) -> Callable[[], Any] | None:
    """A peer's call that has run with right results; None, and a line with the reason once, else."""
    if not on_gpu():
        return None
    try:
        call = make()
        found = call()
        torch.cuda.synchronize()
        complaint = difference(found[problem.some], problem.exact, "its first rows", 0.04)
        reason = complaint and f"its result is wrong: {complaint}"
    except Exception as error:
        call, reason = None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if reason and (line := f"{what}, {problem.form}, {'grouped' if problem.experts > 1 else 'plain'}: {reason:.300}"):
        if line not in REASONS:
            REASONS.add(line)
            print(line, flush=True)
        return None
    return call


def measure(report: Report, timer: Timer, args: argparse.Namespace) -> None:
    keys = [Column("part", "Part"), Column("form", "Scales"), *(Column(c, c.upper(), ",d") for c in "mnk")]
    keys += [Column("tile", "Columns x stages"), Column("cluster", "Cluster", ",d"), Column("turns", "By turns", ",d")]
    keys += [Column("steps", "Steps", ",d"), Column("low", "Low tiles", ",d")]
    columns = [us("ours", "Ours"), us("cublas", "cuBLAS"), us("deep_gemm", "DeepGEMM")]
    columns += [Column("over", "x cuBLAS", ".3f"), Column("over_deep_gemm", "x DeepGEMM", ".3f")]
    table = report.table("fp8_gemm", keys, [*columns, Column("tflops", "TFLOP/s", ".0f")])
    table.plotted = False
    shapes: list[tuple[str, int, int, int, int]] = []
    if "plain" in args.parts:
        widths = WIDTHS if timer.on_gpu else ((64, 256),)
        shapes += [("plain", 1, m, n, k) for (n, k), m in itertools.product(widths, args.m)]
    if "grouped" in args.parts:
        widths, experts = (GROUPED, EXPERTS) if timer.on_gpu else (((64, 256),), 2)
        shapes += [("grouped", experts, rows, n, k) for (n, k), rows in itertools.product(widths, args.rows)]
    every = itertools.product(args.tiles, args.clusters, args.turns, args.steps, args.low)
    geometries = [which for which in every if not which[4] or which[1:3] == (1, 0)]  # low tiles go with neither
    by_default = [which for which in geometries if which[0] == "default"]
    geometries = [which for which in geometries if which not in by_default[1:]]
    sizes = dict.fromkeys((form, experts, n, k) for form in args.forms for _, experts, _, n, k in shapes)
    compiled.together(
        [
            functools.partial(compile_one, *size, how)
            for size in sizes
            for which in geometries
            if (how := tiling_of(*which))
        ]
    )
    for form, (part, experts, rows, n, k) in itertools.product(args.forms, shapes):
        problem = Problem(form, experts, rows, n, k)
        peers = {"cublas": problem.cublas, "deep_gemm": problem.deep_gemm}
        found = {name: if_works(name, make, problem) for name, make in peers.items()}
        calls: dict[Any, Callable[[], Any]] = {name: call for name, call in found.items() if call}
        ours = {which: problem.ours(tiling_of(*which)) for which in geometries}
        for geometry, call in ours.items():
            problem.out.fill_(float("nan"))
            call()
            tsn.synchronize()
            label = f"{part}, {form}, {problem.total} rows, n {n}, k {k}, {geometry}"
            raise_if_wrong(label, difference(problem.out[problem.some], problem.exact, "its last rows"))
            if "cublas" in calls:
                raise_if_wrong(label, difference(problem.out, calls["cublas"](), "the GEMM", 0.04))
        launches: dict[Any, Any] = {key: repeated(call) for key, call in {**calls, **ours}.items()}
        samples: dict[Any, list[float]] = timer.interleaved(launches, 5)
        took: dict[Any, float] = medians(samples)
        for which in ours:
            time = took[which]
            row = dict(part=part, form=form, m=problem.total, n=n, k=k, ours=time)
            row |= dict(zip(("tile", "cluster", "turns", "steps", "low"), which))
            row |= {name: took.get(name) for name in peers}
            row |= dict(
                over=time / took["cublas"] if "cublas" in took else None,
                over_deep_gemm=time / took["deep_gemm"] if "deep_gemm" in took else None,
            )
            own = {"ours": samples[which], **{name: samples[name] for name in calls}}
            table.add(row | dict(tflops=2 * problem.total * n * k / time / 1e6), own)


def main() -> None:
    args = parse()
    report = Report("fp8_gemm", args)
    world = tsn.init(64 << 20)
    timer = Timer.of(args, world.device_kind == "cuda")
    report.environment |= {
        "data": "normal random numbers, quantised, verified",
        "timing": f"{timer.mode}, implementations in turn",
    }
    measure(report, timer, args)
    report.finish()


if __name__ == "__main__":
    main()
