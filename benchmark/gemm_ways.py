"""Every way of a GEMM with its communication, next to torch's, and the table by which the operators choose.

    GPUS=4 bash launch.sh benchmark/gemm_ways.py --table measured.json

The ways of `kernels.fused.choice`: the fused kernels; copy engines beside cuBLAS; the GEMM and this package's
collective one after the other. torch's are cuBLAS and NCCL one after the other, and its symmetric memory. Shapes are of
a layer of Llama 70B between four ranks. `--table` writes these points to `kernels/fused/measured.json`, replacing
points of the same GPU, ranks, operator, dtype and widths (an existing file is continued). Kernels are compiled ahead,
all at once.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tilescale_net as tsn
from benchmark import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from benchmark.common import compiled
from benchmark.common.arguments import TIMINGS, BenchmarkParser, int_list, on_gpu, one_of, positive_int
from benchmark.common.collectives import nccl_group
from benchmark.common.gemm import Operands, difference, if_works, operands, operator
from benchmark.common.measuring import Timer, gather, medians, raise_if_wrong
from benchmark.common.modules import dist, fused_choice, torch
from benchmark.common.report import Column, Report, us
from tilescale_net.cli.arguments import writable_file

BENCH = dict(ranks=0, quick="--repeat 1")  # see common/suite.py
KINDS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
PEERS = {"nccl": "cuBLAS + NCCL", "torch": "torch symm_mem"}
TITLES = {"fused": "Fused", "copy_engines": "Copy engines", "unfused": "Unfused"} | PEERS


def parse() -> argparse.Namespace:
    parser = BenchmarkParser(__doc__.splitlines()[0], timing=TIMINGS)
    simulated = not on_gpu()
    parser.option("--kinds", one_of(*KINDS), [*KINDS], f"of {', '.join(KINDS)} (all)")
    parser.option("--dtypes", one_of("bf16", "fp8"), ["bf16"] if simulated else ["bf16", "fp8"], "of bf16 and fp8")
    m = [64] if simulated else [512, 1024, 2048, 4096, 8192, 16384]
    parser.option("--m", int_list(1, 1 << 24), m, "rows of all ranks")
    parser.option("--k", positive_int, None, "depth of a rank's GEMM (8192 of an all-gather, 7168; simulator 32)")
    parser.option("--n", positive_int, None, "columns of a rank's GEMM (14336 of an all-gather, 8192; simulator 64)")
    parser.option("--limit", positive_int, None, "seconds after which no further case begins; the largest come first")
    parser.option("--table", writable_file, None, "write the table to FILE", "FILE")
    parser.flag("--no-nccl", "leave torch's ways out")
    args = parser.parse_args()
    parser.require_two_ranks("a GEMM with communication needs")
    return args


class Case:
    """One call: its ways, and their measurement. `problem`: as `kernels.fused.choice` has it."""

    def __init__(self, args: argparse.Namespace, kind: str, dtype: str, m: int) -> None:
        widths = (32, 64) if not on_gpu() else (8192, 14336) if kind == KINDS[0] else (7168, 8192)
        self._k, self._n = args.k or widths[0], args.n or widths[1]
        self._rows = m // tsn.size() if kind == KINDS[0] else m
        number = torch.bfloat16 if dtype == "bf16" else torch.float8_e4m3fn
        self.problem = fused_choice.GemmProblem(kind, tsn.size(), self._rows, self._k, self._n, number)
        self._args = argparse.Namespace(dtype=dtype, k=self._k, n=self._n)

    def __str__(self) -> str:
        return f"{self.problem.kind} {self._args.dtype} m {self.problem.m}"

    def _made(self, way: str) -> Any:
        from tilescale_net.ops import fused, group_objects

        options = fused_choice.usual_options(self.problem, tsn.device()) if way == "fused" else {}
        return fused.make(group_objects.of(""), self.problem, way, options)

    def kernels(self) -> list[functools.partial[Any]]:
        """Of the fused call. Collective."""
        op = self._made("fused")
        found = [*op.kernels(self._args.dtype == "fp8").values()]
        op.free()
        return found

    def measure(self, timer: Timer, group: Any) -> dict[str, list[float]]:
        """Samples of each way on the slowest rank, in us; results of our ways are compared. Collective. Raises
        WrongData: of two ways that give different results."""
        problem = operands(self._args, self._rows)
        # Between nodes rows are sent from symmetric memory.
        x = tsn.empty(problem.x.shape, problem.x.dtype)
        x.copy_(problem.x)
        ways = ["fused", "copy_engines"] if self.problem.kind == KINDS[0] else ["fused"]
        ops = {way: self._made(way) for way in ways}
        calls: dict[str, Any] = {way: functools.partial(op, x, problem.w, **problem.scales) for way, op in ops.items()}
        calls["unfused"] = operator(self.problem.kind, problem, fused=False)
        if group is not None:
            calls["nccl"] = self._nccl(problem, group)
            calls |= if_works(f"torch's way of {self}", lambda: self._torchs(problem, group))
        found = {name: call() for name, call in calls.items()}
        tsn.synchronize()
        for name in ways:
            wrong = difference(found[name], found["unfused"], f"the {name} way", 0.04 if problem.scales else 0.02)
            raise_if_wrong(f"{self}", wrong)
        del found
        tsn.barrier()
        samples = timer.slowest(calls, 5, {"torch"})  # which cannot be captured in a CUDA graph
        for op in ops.values():
            op.free()
        tsn.free(x)
        return samples

    def _nccl(self, given: Operands, group: Any) -> Callable[[], torch.Tensor]:
        p, dtype = self.problem, torch.bfloat16
        result = torch.empty((p.m, p.n), dtype=dtype, device=given.x.device)
        if p.kind == KINDS[1]:
            part = torch.empty((p.m // p.ranks, p.n), dtype=dtype, device=given.x.device)
            return lambda: (dist.reduce_scatter_tensor(part, given.matmul(result), group=group), part)[1]
        if p.kind == KINDS[2]:

            def reduced() -> torch.Tensor:
                gemm = given.matmul(result)
                dist.all_reduce(gemm, group=group)
                return gemm

            return reduced
        rows = torch.empty((p.m, p.k), dtype=given.x.dtype, device=given.x.device)
        of_rows = () if given.x_scales is None else (torch.empty(p.m, device=given.x.device), given.w_scales)
        everyone = Operands(rows, given.w, *of_rows)

        def gathered() -> torch.Tensor:
            dist.all_gather_into_tensor(rows.view(torch.uint8), given.x.view(torch.uint8), group=group)
            if everyone.x_scales is not None:
                dist.all_gather_into_tensor(everyone.x_scales, given.x_scales, group=group)
            return everyone.matmul(result)

        return gathered

    def _torchs(self, given: Operands, group: Any) -> Callable[[], object]:
        if self.problem.kind == KINDS[0]:
            return all_gather_matmul.torchs(given, group)
        if self.problem.kind == KINDS[1]:
            return matmul_reduce_scatter.torchs(given, group)
        return matmul_all_reduce.torchs(given, self._n, group)


def table_with(
    path: Path, gpu: str, points: list[tuple[Any, dict[str, float]]], script: str = "gemm_ways"
) -> dict[str, Any]:
    """The table of `path`, or else of the package, with these points (problem, us by way) of a GPU replacing earlier
    ones."""
    table = json.loads((path if path.exists() and path.stat().st_size else fused_choice.MEASURED).read_text())
    table["gpus"] += [] if gpu in table["gpus"] else [gpu]
    table["columns"] = ["m", *fused_choice.WAYS, *PEERS]
    for problem, took in points:
        group = {"operator": problem.kind, "gpu": gpu, "ranks": problem.ranks, "dtype": problem.dtype_name}
        group |= {"k": problem.k, "n": problem.n}
        found = next((g for g in table["groups"] if group.items() <= g.items()), None)
        if found is None:
            table["groups"].append(found := group | {"source": "", "points": []})
        found["source"] = (
            f"{problem.ranks} x {gpu.removeprefix('NVIDIA ').split()[0]}, CUDA graphs, benchmark/{script}.py"
        )
        row = [problem.m, *(round(took[name], 1) if name in took else None for name in table["columns"][1:])]
        found["points"] = sorted([p for p in found["points"] if p[0] != problem.m] + [row])
    return table


def text_of(table: dict[str, Any]) -> str:
    """A table as its file has it: a line for each point."""
    groups = []
    for group in table["groups"]:
        lines = [f'"{key}": {json.dumps(value)}' for key, value in group.items() if key != "points"]
        points = ",\n    ".join(map(json.dumps, group["points"]))
        groups.append(
            "  {\n   " + ", ".join(lines[:-1]) + f',\n   {lines[-1]},\n   "points": [\n    {points}\n   ]\n  }}'
        )
    head = [f' "{key}": {json.dumps(value)}' for key, value in table.items() if key != "groups"]
    return "{\n" + ",\n".join(head) + ',\n "groups": [\n' + ",\n".join(groups) + "\n ]\n}\n"


def main() -> None:
    args, start = parse(), time.monotonic()
    report = Report("gemm_ways", args)
    world = tsn.init((8 << 30) if on_gpu() else (64 << 20))
    timer = Timer.of(args, world.device_kind == "cuda")
    group = nccl_group(report, args)
    report.environment["timing"] = f"{timer.mode} (torch: launch), ways in turn, slowest rank, results compared"
    keys = [Column("kind", "Operator"), Column("dtype", "Dtype"), Column("m", "M", ",d")]
    columns = [us(name, title) for name, title in TITLES.items()]
    columns += [Column("takes", "Takes"), Column("share", "x best of torch", ".3f")]
    table = report.table("gemm_ways", keys, columns)
    table.plotted = False
    # The largest first: then shared symmetric memory need not grow.
    order = itertools.product(sorted(args.m, reverse=True), args.kinds, args.dtypes)
    cases = [Case(args, kind, dtype, m) for m, kind, dtype in order if m % tsn.size() == 0]
    compiled.together([kernel for case in cases for kernel in case.kernels()])
    points: list[tuple[Any, dict[str, float]]] = []
    for number, case in enumerate(cases):
        late = gather(args.limit is not None and time.monotonic() - start > args.limit)[0]
        if late:
            report.notes.append(f"after {args.limit} s, not measured: {', '.join(map(str, cases[number:]))}")
            break
        samples = case.measure(timer, group)
        took = medians(samples)
        points.append((case.problem, took))
        taken = fused_choice.Point(0, 0, 0, {way: t for way, t in took.items() if way in fused_choice.WAYS}).best
        best = min((took[name] for name in PEERS if name in took), default=None)
        row = {"kind": case.problem.kind, "dtype": case.problem.dtype_name, "m": case.problem.m, "takes": taken}
        table.add(row | took | {"share": best and took[taken] / best}, samples)
        if args.table and tsn.rank() == 0:
            gpu = torch.cuda.get_device_name() if timer.on_gpu else "simulator"
            Path(args.table).write_text(text_of(table_with(Path(args.table), gpu, points)))
    report.finish()


if __name__ == "__main__":
    main()
