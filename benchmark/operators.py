"""Time of eager operators on ordinary tensors, the host's part and the whole, next to eager NCCL.

    GPUS=2 bash launch.sh benchmark/operators.py
    GPUS=4 bash launch.sh benchmark/operators.py --operators all_reduce,all_gather --sizes 16K..64M --calls 20

Each is called in a row from Python: host is the time to issue a call, without waiting, wall the time per call until all
have ended. NCCL is called in both of torch's ways, into existing tensors (all_reduce in place) and as functions, which
make their results as ours do; its figure is the lower one. Size: of the larger tensor, in bytes per rank. Our sums are
compared bit by bit with a sum in the order of the ranks, NCCL's roughly. Without a GPU, gloo replaces NCCL.
"""

from __future__ import annotations  # of torch, which is loaded late

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import tilescale_net as tsn
from benchmark.common import BenchmarkParser, Column, Report, format_bytes, median, one_of, positive_int, us
from benchmark.common.arguments import IN_SIMULATOR, ON_GPU, byte_count, non_negative_int, on_gpu
from benchmark.common.collectives import DTYPES, nccl_group, wrong_sums
from benchmark.common.measuring import (
    SIMULATED,
    common_seeds,
    host_and_wall,
    leave_default_stream,
    normal_numbers,
    raise_if_wrong,
    slowest_ranks,
)
from benchmark.common.modules import dist, torch

BENCH = dict(ranks=0, quick="--sizes 16K,1M --calls 10 --repeat 2")  # see common/suite.py

OPERATORS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
COLUMNS = 512  # elements of a row
OURS = "ours"


class Case:
    """One operator at one size: the data of all ranks, the calls, and their expected results. `seed`: equal on all
    ranks."""

    def __init__(self, operator: str, size: int, dtype: torch.dtype, seed: int) -> None:
        self._operator, self._n, self._rank = operator, tsn.size(), tsn.rank()
        rows = max(1, size // (COLUMNS * dtype.itemsize * self._n)) * self._n
        self.nbytes = rows * COLUMNS * dtype.itemsize
        shape = (rows // self._n if operator == "all_gather" else rows, COLUMNS)
        self._data = [normal_numbers(shape, seed + rank, dtype, tsn.device()) for rank in range(self._n)]
        self._x = self._data[self._rank]

    def ours(self) -> Callable[[], torch.Tensor]:
        from tilescale_net import ops

        return partial(getattr(ops, self._operator), self._x)

    def peers(self, group: Any) -> dict[str, Callable[[], torch.Tensor]]:
        """The same of a process group, in both of torch's ways."""
        x, n, name, functional = self._x, self._n, group.group_name, torch.ops._c10d_functional
        arguments: dict[str, tuple[Any, ...]] = {
            "all_reduce": (functional.all_reduce, "sum"),
            "all_gather": (functional.all_gather_into_tensor, n),
            "reduce_scatter": (functional.reduce_scatter_tensor, "sum", n),
            "all_to_all": (functional.all_to_all_single, *[[len(x) // n] * n] * 2),
        }
        function, *rest = arguments[self._operator]

        def as_function() -> torch.Tensor:
            return functional.wait_tensor(function(x, *rest, name))

        out = as_function()
        into: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(out, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(out, x, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, x, group=group),
            "all_to_all": lambda: dist.all_to_all_single(out, x, group=group),
        }
        call = into[self._operator]
        out.copy_(x) if self._operator == "all_reduce" else out.zero_()

        def in_place() -> torch.Tensor:
            call()
            return out

        return {"in place": in_place, "as a function": as_function}

    def difference(self, found: torch.Tensor, exact: bool) -> str | None:
        """The error of a result, or None. `exact`: sums are compared bit by bit."""
        data = self._data
        if self._operator in ("reduce_scatter", "all_to_all"):
            data = [x.chunk(self._n)[self._rank] for x in data]
        if self._operator in ("reduce_scatter", "all_reduce"):
            return wrong_sums(found, data, exact)
        wanted = torch.cat(data)
        wrong = int((found != wanted).sum()) if found.shape == wanted.shape else wanted.numel()
        return f"{wrong} of {wanted.numel()} elements are wrong" if wrong else None


def parse() -> argparse.Namespace:
    sizes = "16K,64K,256K,1M,4M,16M"
    parser = BenchmarkParser(
        __doc__.splitlines()[0], warmup=None, repeat=None, sizes=sizes, simulated="16K,64K", check=True
    )
    parser.option("--operators", one_of(*OPERATORS), list(OPERATORS), "of these")
    parser.option("--calls", positive_int, 50 if on_gpu() else 2, "in a row, of a sample")
    parser.option("--warmup", non_negative_int, (ON_GPU if on_gpu() else IN_SIMULATOR)[0], "untimed samples first")
    parser.option("--repeat", positive_int, (ON_GPU if on_gpu() else IN_SIMULATOR)[1], "timed samples")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the tensors (bfloat16)")
    text = "bytes up to which one kernel also copies between ordinary and symmetric memory; 1: torch does"
    parser.option("--one-launch-up-to", byte_count, None, f"{text} (what the kernels have)")
    parser.flag("--no-nccl", "leave NCCL, or gloo, out")
    args = parser.parse_args()
    parser.require_two_ranks("operators between ranks need")
    return args


def measure(calls: dict[str, Callable[[], Any]], args: argparse.Namespace) -> dict[tuple[str, str], list[float]]:
    """Samples of the slowest rank by call and "host" or "wall"; the calls take turns. Collective."""
    samples: dict[Any, list[float]] = {(name, what): [] for name in calls for what in ("host", "wall")}
    for turn in range(args.warmup + args.repeat):
        for name, call in calls.items():
            for what, figure in zip(("host", "wall"), host_and_wall(call, args.calls)):
                if turn >= args.warmup:
                    samples[name, what].append(figure)
    return slowest_ranks(samples)


def samples_of(case: Case, group: Any, args: argparse.Namespace, what: str) -> dict[str, list[float]]:
    """Figures of a row, by column: every call is verified before its timing, and ours again afterwards. Collective."""
    calls = {OURS: case.ours(), **(case.peers(group) if group is not None else {})}

    def verify(name: str) -> None:
        found = calls[name]()
        raise_if_wrong(f"{what}, {name}", None if args.no_check else case.difference(found, exact=name == OURS))

    for name in calls:
        verify(name)
    found = measure(calls, args)
    verify(OURS)
    samples = {"host": found[OURS, "host"], "us": found[OURS, "wall"]}
    for key, kind in (("nccl_host", "host"), ("nccl_us", "wall")) if group is not None else ():
        samples[key] = min((found[name, kind] for name in calls if name != OURS), key=median)
    return samples


def main() -> None:
    args = parse()
    if args.one_launch_up_to is not None:
        from tilescale_net.kernels.buffered import Parted

        Parted.one_launch_up_to = args.one_launch_up_to
    report = Report("operators", args)
    # Operators pass outputs, and between nodes inputs, through memory that grows by powers of two.
    world = tsn.init(8 * max(args.sizes) + (96 << 20))
    leave_default_stream(world)
    group = nccl_group(report, args)
    peer = "NCCL"
    if group is None and world.device_kind != "cuda" and not args.no_nccl:
        group, peer = dist.group.WORLD, "gloo"
    report.environment |= {
        "rows": f"{COLUMNS} elements of {args.dtype}",
        "data": "not verified" if args.no_check else "verified",
        "timing": f"eager: median of {args.repeat} x {args.calls} calls in a row, in turn, slowest rank"
        + ("" if world.device_kind == "cuda" else f"; {SIMULATED}"),
    }
    columns = [us("host", "tilescale_net, host", plotted=False), us("us", "tilescale_net")]
    if group is not None:
        columns += [us("nccl_host", f"{peer}, host", plotted=False), us("nccl_us", peer)]
        columns += [Column("host_ratio", f"x {peer}, host", ".2f"), Column("ratio", f"x {peer}", ".2f")]
    keys = [Column("operator", "Operator"), Column("bytes", "Size", ",d", unit="Bytes")]
    table = report.table("operators", keys, columns)
    cases = [(operator, size) for operator in args.operators for size in args.sizes]
    for operator, size in report.progress(cases, "rows", lambda row: f"{row[0]} of {format_bytes(row[1])}"):
        (seed,) = common_seeds(1)
        case = Case(operator, size, getattr(torch, args.dtype), seed)
        samples = samples_of(case, group, args, f"{operator} of {case.nbytes} bytes")
        row: dict[str, Any] = {key: median(values) for key, values in samples.items()}
        if group is not None:
            row |= {"ratio": row["nccl_us"] / row["us"], "host_ratio": row["nccl_host"] / row["host"]}
        table.add({"operator": operator, "bytes": case.nbytes, **row}, samples)
    report.finish()


if __name__ == "__main__":
    main()
