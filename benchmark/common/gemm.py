"""What the benchmarks of fused GEMMs share: flags, implementations measured in turn, the table."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmark.common.arguments import BenchmarkParser, int_list, on_gpu, positive_int
from benchmark.common.collectives import nccl_group
from benchmark.common.measuring import Timer, add_timing_arguments, gather, median, raise_if_wrong, repeated
from benchmark.common.report import Column, Report, world_size

if TYPE_CHECKING:  # arguments are checked before torch, which takes seconds, is imported
    import torch

    from tilescale_net.kernels.fused.gemm import FusedMatmul


@dataclass
class Implementations:
    """The ways to one result, on the same data.

    Attributes:
        given: of this rank, as a call of the operator takes them.
        calls: by the name of the column; "ours" is one of them, "operator" none, "pipelined" of some.
        plain: names of calls that cannot be captured in a CUDA graph.
        wrong: what is wrong with our result, or None; called after ours has run.
        free: gives back what the implementations hold.
        op: the fused call's object.
    """

    given: Operands
    calls: dict[str, Callable[[], object]]
    plain: set[str]
    wrong: Callable[[], str | None]
    free: Callable[[], None]
    op: FusedMatmul

    @property
    def tile(self) -> str:
        return "x".join(map(str, self.op.tiling.tile))


TITLES = {
    "ours": "Ours",
    "pipelined": "Pipelined",
    "operator": "Operator",
    "matmul": "cuBLAS alone",
    "tilelang": "tilelang alone",
    "communication": "NCCL alone",
    "sequence": "cuBLAS + NCCL",
    "torch": "torch symm_mem",
}


def parse(description: str, k: int, n: int) -> argparse.Namespace:
    """The arguments of a fused GEMM's benchmark. `k`, `n`: defaults for a rank of four; exits with 2 when wrong."""
    parser = BenchmarkParser(description, warmup=None, repeat=None)
    add_timing_arguments(parser)
    simulated = not on_gpu()
    m, k, n = ([256], 64, 128) if simulated else ([4096, 8192, 16384], k, n)
    parser.add_argument("--m", type=int_list(1, 1 << 24), default=m, metavar="LIST", help=f"rows of all ranks {m}")
    parser.add_argument("--k", type=positive_int, default=k, metavar="K", help=f"depth of a rank's GEMM ({k})")
    parser.add_argument("--n", type=positive_int, default=n, metavar="N", help=f"columns of a rank's GEMM ({n})")
    text = "blocks that send (those of the operators)"
    parser.add_argument("--blocks", type=int_list(1, 132), default=[None], metavar="LIST", help=text)
    text = "of the GEMM (the operators', with --stages, --panel and --columns)"
    parser.add_argument("--tile", type=int_list(16, 512), default=None, metavar="M,N,K", help=text)
    stages, panel, columns = (2, 2, 16) if simulated else (4, 8, 128)
    parser.add_argument("--stages", type=positive_int, default=stages, metavar="N", help=f"of operands ({stages})")
    text = f"rows of tiles walked together ({panel})"
    parser.add_argument("--panel", type=positive_int, default=panel, metavar="N", help=text)
    text = f"columns of a tile that leave at once ({columns})"
    parser.add_argument("--columns", type=positive_int, default=columns, metavar="N", help=text)
    parser.add_argument(
        "--dtype", choices=("bf16", "fp8"), default="bf16", help="of the operands (bf16); fp8 on GPUs only"
    )
    text = "of the communication that overlaps with the GEMM, see the classes of kernels.fused (auto)"
    parser.add_argument("--engine", choices=("auto", "ldst", "bulk"), default="auto", help=text)
    parser.add_argument("--no-nccl", action="store_true", help="leave NCCL and torch's symmetric memory out")
    text = "TFLOP/s of the bound (989; fp8: 1979)"
    parser.add_argument("--peak", type=positive_int, default=None, metavar="N", help=text)
    parser.add_argument("--link", type=positive_int, default=450, metavar="N", help="GB/s of the bound (450)")
    args = parser.parse_args()
    if args.tile is not None and len(args.tile) != 3:
        parser.error("--tile takes three numbers")
    if simulated and args.dtype == "fp8":
        parser.error("--dtype fp8 is compared with torch._scaled_mm, which needs a GPU")
    if world_size() < 2:
        parser.error("a fused GEMM needs two ranks or more; start it with GPUS=2 bash launch.sh …")
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
        import torch

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
    import torch

    scales = of_rows.view(-1, 1), of_columns[None]
    return torch._scaled_mm(x, w, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def operands(args: argparse.Namespace, rows: int) -> Operands:
    """This rank's operands of a GEMM of `rows` rows: normal random numbers."""
    import torch

    import tilescale_net as tsn

    generator = torch.Generator(device=tsn.device()).manual_seed(tsn.rank())

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=tsn.device()).normal_(generator=generator)

    if args.dtype == "bf16":
        return Operands(random(rows, args.k), random(args.k, args.n))
    (x, x_scales), (w, w_scales) = (eight_bits(random(size, args.k)) for size in (rows, args.n))
    return Operands(x, w.t(), x_scales, w_scales)


def eight_bits(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers as float8_e4m3fn, and the scale (float32) of each row."""
    import torch

    scales = numbers.abs().amax(1).float() / torch.finfo(torch.float8_e4m3fn).max
    return (numbers / scales[:, None]).to(torch.float8_e4m3fn), scales


def options_of(args: argparse.Namespace, kind: str, rows: int, blocks: int | None) -> dict[str, Any]:
    """Options of a fused GEMM's class, of `rows` rows on a rank: what the arguments ask for, else the operators'."""
    import torch

    import tilescale_net as tsn
    from tilescale_net.kernels.fused.choice import GemmProblem, blocks_for, tiling_for
    from tilescale_net.kernels.fused.gemm import Tiling

    dtype = torch.float8_e4m3fn if args.dtype == "fp8" else torch.bfloat16
    product = GemmProblem(kind, tsn.size(), rows, args.k, args.n, dtype)
    chosen = {"dtype": dtype, "engine": args.engine, "tiling": tiling_for(tsn.device(), product)}
    chosen |= blocks_for(tsn.device(), product)
    if args.tile is not None:
        chosen["tiling"] = Tiling(tuple(args.tile), args.stages, args.panel, args.columns)
    return chosen if blocks is None else chosen | {"blocks": blocks}


def gemm_alone(tiling: Any, x: Any, w: Any, out: Any, scales: Any = None) -> Callable[[], None]:
    """A call of the fused kernels' GEMM without communication: `out = x @ w`.

    Args:
        scales: of rows and of columns, for 8 bits; `w` is the transpose of a contiguous tensor then.
    """
    import torch

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
    held = w.t() if transposed else w

    def call() -> None:
        calls.add_(1)
        kernel(out.view(1, m, n), x, x.view(1, 1, m, k), held, calls, flags, tickets, of_rows, none, of_columns)

    return call


def if_works(what: str, make: Callable[[], Callable[[], object]]) -> dict[str, Callable[[], object]]:
    """The call that `make` makes, under the key "torch", once it has run; nothing, and a line with the reason, else."""
    import torch

    try:
        call = make()
        call()
        torch.cuda.synchronize()
    except Exception as error:  # what torch has of this is private to it, and not on all machines
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


def operator(name: str, given: Operands) -> Callable[[], torch.Tensor]:
    """The call as users make it: the operator chooses whether it is fused."""
    from tilescale_net import ops

    return lambda: getattr(ops, name)(given.x, given.w, **given.scales)


def run(
    name: str,
    args: argparse.Namespace,
    heap: int,
    implementations_of: Callable[[int, int | None, object], Implementations],
) -> None:
    """Measure all implementations at every number of rows; print the report.

    Args:
        heap: symmetric bytes that the largest case takes.
        implementations_of: `(m, blocks, nccl group or None)`; collective.
    """
    import tilescale_net as tsn

    report = Report(name, args)
    world = tsn.init(3 * heap + (96 << 20))  # the operator has its own
    timer = Timer.of(args, world.device_kind == "cuda")
    group = nccl_group(report, args)
    together: Callable[[], None] = lambda: None  # noqa: E731
    if timer.on_gpu:
        from tilescale_net.kernels import p2p

        together = p2p.meet()
    report.environment |= {"shape": f"k {args.k}, n {args.n} per rank, {args.dtype}, normal random data, verified"}
    report.environment["timing"] = f"{timer.mode} (torch: launch), implementations in turn, slowest rank"
    keys = [
        Column("m", "M", ",d"),
        Column("tile", "Tile", plotted=False),
        Column("blocks", "Blocks", ",d", plotted=False),
    ]
    columns = [Column(key, title, better="lower", unit="us") for key, title in TITLES.items()]
    columns += [
        Column("exposed", "Exposed", better="lower", unit="us"),
        Column("over", "x cuBLAS", ".3f"),
        Column("tflops", "TFLOP/s", ".0f"),
        Column("share", "% of bound", ".0f"),
    ]
    table = report.table(name, keys, columns)
    for m in args.m:
        for blocks in args.blocks:
            these = implementations_of(m, blocks, group)
            these.calls["operator"] = operator(name, these.given)
            these.calls["ours"]()
            these.calls["operator"]()
            tsn.synchronize()
            tsn.barrier()
            launches = {key: repeated(call) for key, call in these.calls.items()}
            samples = timer.interleaved(launches, 5, together, these.plain)
            these.calls["ours"]()
            tsn.synchronize()
            raise_if_wrong(f"{name}, m {m}", these.wrong())
            everyone = gather(samples)
            slowest = {key: max((s[key] for s in everyone), key=median) for key in samples}
            times = {key: median(values) for key, values in slowest.items()}
            flops = 2 * m * args.k * args.n
            # Of the communication, what the GEMM does not hide; and max(FLOPs, bytes) of what any way has to do.
            exposed = max(0.0, times["ours"] - times["matmul"])
            bound = max(flops / peak_flops(args) * 1e6, moved_bytes(name, args, m) / args.link / 1e3)
            row = {"m": m, "tile": these.tile, "blocks": these.op.blocks, **{key: times.get(key) for key in TITLES}}
            row |= {"over": times["ours"] / times["matmul"], "tflops": flops / times["ours"] / 1e6}
            row |= {"exposed": exposed, "share": 100 * bound / times["ours"]}
            table.add(row, slowest)
            these.free()
    report.finish()
    tsn.finalize()


def difference(found: Any, wanted: Any, what: str, rounding: float = 0.02) -> str | None:
    """What is wrong with a result, next to torch's in float32; None where it is within rounding.

    Args:
        rounding: of an element, and of the mean of all. Tensor cores cut off what they add up of 8 bits, and torch's
            GEMM with fast accumulation, to which they are compared elsewhere, does so too; next to exact sums they need
            twice as much.
    """
    error = (found.float() - wanted.float()).abs()
    limit = rounding * (wanted.float().abs() + wanted.float().abs().mean())
    count = int((~(error <= limit)).sum())
    return (
        f"{count} of {found.numel()} elements of {what} are wrong, by up to {float(error.max()):.3g}" if count else None
    )
