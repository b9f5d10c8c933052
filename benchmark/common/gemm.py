"""Shared parts of fused GEMM benchmarks: flags, implementations measured in turn, the table."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tilescale_net as tsn
from benchmark.common.arguments import TIMINGS, BenchmarkParser, int_list, on_gpu, positive_int
from benchmark.common.collectives import nccl_group
from benchmark.common.measuring import Timer, medians, normal_numbers, raise_if_wrong
from benchmark.common.modules import fused_choice, torch
from benchmark.common.report import Column, Report, us, world_size

if TYPE_CHECKING:
    from tilescale_net.kernels.fused.gemm import FusedMatmul


@dataclass
class Implementations:
    """The ways to one result, on the same data.

    Attributes:
        given: this rank's arguments of the operator.
        op: the fused call's object.
        calls: by the name of the column; "ours" is one of them, "operator" none, "pipelined" of some.
        wrong: returns the error of our result, or None; called after our call.
        free: frees the implementations' memory.
    """

    given: Operands
    op: FusedMatmul
    calls: dict[str, Callable[[], object]]
    wrong: Callable[[], str | None]
    free: Callable[[], None]


TITLES = {
    "ours": "Ours", "pipelined": "Pipelined", "unfused": "Unfused", "operator": "Operator", "matmul": "cuBLAS alone",
    "tilelang": "tilelang alone", "communication": "NCCL alone", "sequence": "cuBLAS + NCCL",
    "torch": "torch symm_mem",
}  # fmt: skip


def parse(description: str, k: int, n: int) -> argparse.Namespace:
    """The arguments of a fused GEMM's benchmark. `k`, `n`: defaults for a rank of four; exits with 2 when wrong."""
    parser = BenchmarkParser(description, timing=TIMINGS)
    simulated = not on_gpu()
    m, k, n = ([256], 64, 128) if simulated else ([4096, 8192, 16384], k, n)
    stages, panel, columns = (2, 2, 16) if simulated else (4, 8, 128)
    parser.option("--m", int_list(1, 1 << 24), m, "rows of all ranks")
    parser.option("--k", positive_int, k, "depth of a rank's GEMM")
    parser.option("--n", positive_int, n, "columns of a rank's GEMM")
    parser.option("--blocks", int_list(1, 132), [None], "blocks that send (those of the operators)")
    text = "of the GEMM (the operators', with --stages, --panel and --columns)"
    parser.option("--tile", int_list(16, 512), None, text, "M,N,K")
    parser.option("--stages", positive_int, stages, "of operands")
    parser.option("--panel", positive_int, panel, "rows of tiles walked together")
    parser.option("--columns", positive_int, columns, "columns of a tile that leave at once")
    text = "of the operands (bf16); fp8 on GPUs only"
    parser.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16", help=text)
    text = "of the communication that overlaps with the GEMM, see the classes of kernels.fused (auto)"
    parser.add_argument("--engine", choices=("auto", "ldst", "bulk"), default="auto", help=text)
    parser.flag("--no-nccl", "leave NCCL and torch's symmetric memory out")
    parser.option("--peak", positive_int, None, "TFLOP/s of the bound (989; fp8: 1979)")
    parser.option("--link", positive_int, 450, "GB/s of the bound")
    args = parser.parse_args()
    if args.tile is not None and len(args.tile) != 3:
        parser.error("--tile takes three numbers")
    if simulated and args.dtype == "fp8":
        parser.error("--dtype fp8 is compared with torch._scaled_mm, which needs a GPU")
    parser.require_two_ranks("a fused GEMM needs")
    if any(m % world_size() for m in args.m):
        parser.error(f"--m must be a multiple of the number of ranks ({world_size()})")
    return args


@dataclass(frozen=True)
class Operands:
    """A rank's `x` [m, k] and `w` [k, n]; of 8 bits with scales of rows and columns, float32 [m] and [n]."""

    x: torch.Tensor
    w: torch.Tensor
    x_scales: torch.Tensor | None = None
    w_scales: torch.Tensor | None = None

    @property
    def scales(self) -> dict[str, torch.Tensor]:
        """Arguments of a fused call."""
        if self.x_scales is None or self.w_scales is None:
            return {}
        return {"x_scales": self.x_scales, "w_scales": self.w_scales}

    def matmul(self, out: torch.Tensor) -> torch.Tensor:
        """`x @ w` by cuBLAS; in `out`, or with 8 bits in a new tensor."""
        if self.x_scales is None or self.w_scales is None:
            return torch.mm(self.x, self.w, out=out)
        return scaled_mm(self.x, self.w, self.x_scales, self.w_scales)

    def exact(self, rows: slice = slice(None)) -> torch.Tensor:
        """Some rows of `x @ w`, in float32."""
        exact = self.x[rows].float() @ self.w.float()
        if self.x_scales is None or self.w_scales is None:
            return exact
        return exact * self.x_scales[rows, None] * self.w_scales


def scaled_mm(x: torch.Tensor, w: torch.Tensor, of_rows: torch.Tensor, of_columns: torch.Tensor) -> torch.Tensor:
    """cuBLAS's `x @ w` of 8 bits with scales of rows and of columns, in bfloat16."""
    scales = of_rows.view(-1, 1), of_columns[None]
    return torch._scaled_mm(x, w, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def operands(args: argparse.Namespace, rows: int) -> Operands:
    """This rank's operands of a GEMM of `rows` rows: normal random numbers."""
    shapes = ((rows, args.k), (args.k, args.n) if args.dtype == "bf16" else (args.n, args.k))
    seeds = 2 * tsn.rank(), 2 * tsn.rank() + 1
    x, w = (normal_numbers(shape, seed, torch.bfloat16, tsn.device()) for shape, seed in zip(shapes, seeds))
    if args.dtype == "bf16":
        return Operands(x, w)
    (x, x_scales), (w, w_scales) = eight_bits(x), eight_bits(w)
    return Operands(x, w.t(), x_scales, w_scales)


def eight_bits(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers as float8_e4m3fn, and the scale (float32) of each row."""
    scales = numbers.abs().amax(1).float() / torch.finfo(torch.float8_e4m3fn).max
    return (numbers / scales[:, None]).to(torch.float8_e4m3fn), scales


def options_of(args: argparse.Namespace, kind: str, rows: int, blocks: int | None) -> dict[str, Any]:
    """Options of a fused GEMM's class, of `rows` rows on a rank: from the arguments, else the operators'."""
    from tilescale_net.kernels.fused.gemm import Tiling

    dtype = torch.float8_e4m3fn if args.dtype == "fp8" else torch.bfloat16
    problem = fused_choice.GemmProblem(kind, tsn.size(), rows, args.k, args.n, dtype)
    chosen = {"dtype": dtype, "engine": args.engine} | fused_choice.usual_options(problem, tsn.device())
    if args.tile is not None:
        chosen["tiling"] = Tiling(tuple(args.tile), args.stages, args.panel, args.columns)
    return chosen if blocks is None else chosen | {"blocks": blocks}


def gemm_alone(tiling: Any, x: Any, w: Any, out: Any, scales: Any = None) -> Callable[[], None]:
    """A call of the fused kernels' GEMM without communication: `out = x @ w`. `scales`: of rows and of columns, for 8
    bits; `w` is the transpose of a contiguous tensor then."""
    from tilescale_net.kernels.collective import dtype_name
    from tilescale_net.kernels.fused.all_gather_matmul import matmul_arriving

    (m, k), n, transposed = x.shape, w.shape[1], not w.is_contiguous()
    workers = tiling.workers(x.device, 1, m, n)
    kernel = matmul_arriving(
        1, m, n, k, dtype_name(x.dtype), dtype_name(out.dtype), transposed, **vars(tiling), workers=workers, peers=False,
        scaled=bool(scales),
    )  # fmt: skip
    calls = torch.zeros(1, dtype=torch.int64, device=x.device)
    flags = torch.zeros((1, -(-m // tiling.tile[0])), dtype=torch.uint64, device=x.device)
    tickets = torch.zeros(1, dtype=torch.uint64, device=x.device)
    none = torch.zeros(1, device=x.device)
    of_rows, of_columns = scales or (none, none)
    matrix = w.t() if transposed else w

    def call() -> None:
        calls.add_(1)
        kernel(out.view(1, m, n), x, x.view(1, 1, m, k), matrix, calls, flags, tickets, of_rows, none, of_columns)

    return call


def if_works(what: str, make: Callable[[], Callable[[], object]]) -> dict[str, Callable[[], object]]:
    """The call that `make` makes, under the key "torch", once it has run; nothing, and a line with the reason, else."""
    try:
        call = make()
        call()
        torch.cuda.synchronize()
    except Exception as error:  # torch's version is private, and not on all machines
        print(f"{what} does not work here: {error!r:.200}", flush=True)
        return {}
    return {"torch": call}


def peak_flops(args: argparse.Namespace) -> float:
    """FLOP/s of the bound: `--peak`, or those of an H100's or H200's tensor cores without sparsity (NVIDIA's data sheet)."""
    return 1e12 * (args.peak or (1979 if args.dtype == "fp8" else 989))


def moved_bytes(name: str, args: argparse.Namespace, m: int) -> float:
    """Bytes that a rank must send, and receive, for a GEMM of `m` rows of all ranks; sums travel as bfloat16."""
    ranks = world_size()
    part = (ranks - 1) / ranks * m
    if name == "all_gather_matmul":
        return part * args.k * (1 if args.dtype == "fp8" else 2)
    return part * args.n * 2 * (2 if name == "matmul_all_reduce" else 1)


def operator(name: str, given: Operands, fused: bool | None = None) -> Callable[[], torch.Tensor]:
    """The call as users make it: the operator chooses whether to fuse, or `fused` decides."""
    from tilescale_net import ops

    return lambda: getattr(ops, name)(given.x, given.w, fused=fused, **given.scales)


def run(
    name: str,
    args: argparse.Namespace,
    heap: int,
    implementations_of: Callable[[argparse.Namespace, int, int | None, Any], Implementations],
) -> None:
    """Measure all implementations at every number of rows; print the report. `heap`: symmetric bytes that the largest
    case takes. `implementations_of`: `(args, m, blocks, nccl group or None)`; collective."""
    report = Report(name, args)
    world = tsn.init(3 * heap + (96 << 20))  # the operator has its own
    timer = Timer.of(args, world.device_kind == "cuda")
    group = nccl_group(report, args)
    report.environment |= {"shape": f"k {args.k}, n {args.n} per rank, {args.dtype}, normal random data, verified"}
    report.environment["timing"] = f"{timer.mode} (torch: launch), implementations in turn, slowest rank"
    keys = [Column("m", "M", ",d"), Column("tile", "Tile", plotted=False)]
    columns = [*(us(key, title) for key, title in TITLES.items()), us("exposed", "Exposed")]
    columns += [
        Column("over", "x cuBLAS", ".3f"),
        Column("tflops", "TFLOP/s", ".0f"),
        Column("share", "% of bound", ".0f"),
    ]
    table = report.table(name, [*keys, Column("blocks", "Blocks", ",d", plotted=False)], columns)
    for m, blocks in itertools.product(args.m, args.blocks):
        these = implementations_of(args, m, blocks, group)
        these.calls["operator"] = operator(name, these.given)
        these.calls["unfused"] = operator(name, these.given, fused=False)
        these.calls["ours"]()
        these.calls["operator"]()
        these.calls["unfused"]()
        tsn.synchronize()
        tsn.barrier()
        slowest = timer.slowest(these.calls, 5, {"torch"})  # which cannot be captured in a CUDA graph
        these.calls["ours"]()
        tsn.synchronize()
        raise_if_wrong(f"{name}, m {m}", these.wrong())
        times = medians(slowest)
        flops = 2 * m * args.k * args.n
        # Communication that the GEMM does not hide; and the bound of any way, max(FLOPs, bytes).
        exposed = max(0.0, times["ours"] - times["matmul"])
        bound = max(flops / peak_flops(args) * 1e6, moved_bytes(name, args, m) / args.link / 1e3)
        row = {"m": m, "tile": "x".join(map(str, these.op.tiling.tile)), "blocks": these.op.blocks, "exposed": exposed}
        row |= {key: times.get(key) for key in TITLES} | {"over": times["ours"] / times["matmul"]}
        table.add(row | {"tflops": flops / times["ours"] / 1e6, "share": 100 * bound / times["ours"]}, slowest)
        these.free()
    report.finish()


def difference(found: Any, wanted: Any, what: str, rounding: float = 0.02) -> str | None:
    """The error of a result against torch's in float32; None within rounding. `rounding`: of an element, and of the
    mean of all. Tensor cores truncate 8-bit accumulation, as torch's GEMM with fast accumulation, the usual reference,
    does too; against exact sums they need twice the tolerance."""
    error = (found.float() - wanted.float()).abs()
    limit = rounding * (wanted.float().abs() + wanted.float().abs().mean())
    count = int((~(error <= limit)).sum())
    return (
        f"{count} of {found.numel()} elements of {what} are wrong, by up to {float(error.max()):.3g}" if count else None
    )
