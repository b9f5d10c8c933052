"""What the benchmarks of fused matrix products share: flags, sides measured by turns, the table."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from benchmark.common.arguments import BenchmarkParser, int_list, on_gpu, positive_int
from benchmark.common.collectives import nccl_group
from benchmark.common.environment import world_size
from benchmark.common.measuring import Timer, add_timing_arguments, gather, median, raise_if_wrong
from benchmark.common.report import Report
from benchmark.common.table import Column


@dataclass
class Sides:
    """The ways to one result, on the same data.

    Attributes:
        calls: by the name of the column; "ours" is one of them.
        plain: names of those that cannot be captured in a CUDA graph.
        wrong: what is wrong with our result, or None; called after ours has run.
        free: gives back what the sides hold.
    """

    calls: dict[str, Callable[[], object]]
    plain: set[str]
    wrong: Callable[[], str | None]
    free: Callable[[], None]


TITLES = {
    "ours": "Ours",
    "matmul": "cuBLAS alone",
    "tilelang": "tilelang alone",
    "communication": "NCCL alone",
    "sequence": "cuBLAS + NCCL",
    "torch": "torch symm_mem",
}


def parse(description: str, k: int, n: int) -> argparse.Namespace:
    """The arguments of a fused product's benchmark. `k`, `n`: defaults for a rank of four; exits with 2 when wrong."""
    parser = BenchmarkParser(description, warmup=None, repeat=None)
    add_timing_arguments(parser)
    simulated = not on_gpu()
    m, k, n = ([256], 64, 128) if simulated else ([4096, 8192, 16384], k, n)
    parser.add_argument("--m", type=int_list(1, 1 << 24), default=m, metavar="LIST", help=f"rows of all ranks {m}")
    parser.add_argument("--k", type=positive_int, default=k, metavar="K", help=f"depth of a rank's product ({k})")
    parser.add_argument("--n", type=positive_int, default=n, metavar="N", help=f"columns of a rank's product ({n})")
    parser.add_argument("--blocks", type=int_list(1, 132), default=[8], metavar="LIST", help="blocks that send (8)")
    tile = "32,32,32" if simulated else "128,256,64"
    parser.add_argument("--tile", type=int_list(16, 512), default=None, metavar="M,N,K", help=f"of a product ({tile})")
    stages, panel, columns = (2, 2, 16) if simulated else (4, 8, 128)
    parser.add_argument("--stages", type=positive_int, default=stages, metavar="N", help=f"of operands ({stages})")
    text = f"rows of tiles walked together ({panel})"
    parser.add_argument("--panel", type=positive_int, default=panel, metavar="N", help=text)
    text = f"columns of a tile that leave at once ({columns})"
    parser.add_argument("--columns", type=positive_int, default=columns, metavar="N", help=text)
    parser.add_argument("--no-nccl", action="store_true", help="leave NCCL and torch's symmetric memory out")
    args = parser.parse_args()
    args.tile = tuple(args.tile or (int(x) for x in tile.split(",")))
    if len(args.tile) != 3:
        parser.error("--tile takes three numbers")
    if world_size() < 2:
        parser.error("a fused product needs two ranks or more; start it with GPUS=2 bash launch.sh …")
    if any(m % world_size() for m in args.m):
        parser.error(f"--m must be a multiple of the number of ranks ({world_size()})")
    return args


def tiling_of(args: argparse.Namespace):
    """The geometry of a product that the arguments ask for."""
    from tilescale_net.kernels.fused.matmul import Tiling

    return Tiling(args.tile, args.stages, args.panel, args.columns)


def product_alone(tiling, x, w, out, scales=None) -> Callable[[], None]:
    """A call of the fused kernels' product without communication: `out = x @ w`.

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
        scaled=scales is not None,
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


def run(name: str, args: argparse.Namespace, heap: int, sides_of: Callable[[int, int, object], Sides]) -> None:
    """Measure all sides at every number of rows; print the report.

    Args:
        heap: symmetric bytes that the largest case takes.
        sides_of: `(m, blocks, nccl group or None)`; collective.
    """
    import tilescale_net as tsn

    report = Report(name, args)
    world = tsn.init(heap + (96 << 20))
    timer = Timer.of(args, world.device_kind == "cuda")
    group = nccl_group(report, args)
    together = None
    if timer.on_gpu:
        from tilescale_net.kernels import p2p

        together = p2p.meet()
    report.environment |= {"shape": f"k {args.k}, n {args.n} per rank, bfloat16, normal random data, verified"}
    report.environment["timing"] = f"{timer.mode} (torch: launch), sides by turns, slowest rank"
    keys = [Column("m", "M", ",d"), Column("blocks", "Blocks", ",d", plotted=False)]
    columns = [Column(key, title, better="lower", unit="us") for key, title in TITLES.items()]
    columns += [Column("over", "x cuBLAS", ".3f"), Column("tflops", "TFLOP/s", ".0f")]
    table = report.table(name, keys, columns)
    for m in args.m:
        for blocks in args.blocks:
            sides = sides_of(m, blocks, group)
            sides.calls["ours"]()
            tsn.synchronize()
            tsn.barrier()
            launches = {
                key: (lambda times, call=call: [call() for _ in range(times)] and None)
                for key, call in sides.calls.items()
            }
            samples = timer.interleaved(launches, 5, together, sides.plain)
            sides.calls["ours"]()
            tsn.synchronize()
            raise_if_wrong(f"{name}, m {m}", sides.wrong())
            everyone = gather(samples)
            slowest = {key: max((s[key] for s in everyone), key=median) for key in samples}
            times = {key: median(values) for key, values in slowest.items()}
            flops = 2 * m * args.k * args.n
            row = {"m": m, "blocks": blocks, **{key: times.get(key) for key in TITLES}}
            row |= {"over": times["ours"] / times["matmul"], "tflops": flops / times["ours"] / 1e6}
            table.add(row, slowest)
            sides.free()
    report.finish()
    tsn.finalize()


def difference(found, wanted, what: str) -> str | None:
    """What is wrong with a result, next to torch's in float32; None where it is within rounding."""
    error = (found.float() - wanted.float()).abs()
    limit = 0.02 * wanted.float().abs() + 0.02 * wanted.float().abs().mean()
    count = int((~(error <= limit)).sum())
    return (
        f"{count} of {found.numel()} elements of {what} are wrong, by up to {float(error.max()):.3g}" if count else None
    )
