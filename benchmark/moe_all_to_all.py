"""Time of dispatch and combine of a mixture-of-experts layer, next to NCCL and, if installed, DeepEP.

    GPUS=4 bash launch.sh benchmark/moe_all_to_all.py
    GPUS=4 bash launch.sh benchmark/moe_all_to_all.py --mode latency --tokens 128 --dtype fp8
    GPUS=4 bash launch.sh benchmark/moe_all_to_all.py --mode all --layout rank --dtype bf16 --no-peers --trace-cost
    GPUS=4 VIRTUAL_NODES=2 bash launch.sh benchmark/moe_all_to_all.py --mode latency --tokens 32 --hidden 512 --experts 16 --topk 4

All implementations get the same inputs and the same timing: the L2 cache is flushed, ranks meet in a barrier on the
device, then the call runs between two events. The flush hides host time for `kernel` and part of it for `whole call`.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tilescale_net as tsn
from benchmark.common import (
    Column,
    Report,
    compiled,
    is_rank_zero,
    median,
    percentile,
    positive_int,
    rate,
    us,
    world_size,
)
from benchmark.common import moe as common
from benchmark.common.fabric import BareWriterPair
from benchmark.common.measuring import DeviceTimer, gather
from benchmark.common.modules import moe
from benchmark.common.moe import DeepEP, Exchange, MoeParser, Nccl, row_bytes

BENCH = dict(ranks=0, quick="--mode latency --dtype bf16 --warmup 1 --repeat 2")  # see common/suite.py

WAYS = ("tilescale_net", "once per rank")  # our systems: the default, and Tuning(once_per_node=False)
TRACED = "tilescale_net, traced"
Sample = Sequence[float]


def _tuning(text: str) -> dict[str, int]:
    """argparse type: `blocks=16,threads=256`."""
    known = [field.name for field in dataclasses.fields(moe.Tuning)]
    made = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in known or not value.isdigit():
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=NUMBER with a name of {', '.join(known)}")
        made[name] = bool(int(value)) if name == "once_per_node" else int(value)
    return made


def parse() -> argparse.Namespace:
    parser = MoeParser(__doc__.splitlines()[0])
    parser.option("--ranks", positive_int, None, "refuse to run with another number of ranks")
    parser.option("--tuning", _tuning, {}, "choices of kernels.moe.Tuning, such as blocks=16 (none)", "NAME=N,…")
    parser.flag("--once-per-rank", "where nodes have several ranks, also Tuning(once_per_node=False)")
    parser.flag("--quantize-combine", "rows travel back as FP8")
    parser.flag("--no-peers", "leave NCCL and DeepEP out")
    parser.flag("--trace-cost", "every call of ours once more while TSN_TRACE is set, and by how much that is longer")
    args = parser.parse_args()
    if args.ranks and args.ranks != world_size():
        started = f"{world_size()} ranks were started; start them with GPUS={args.ranks}"
        parser.error(f"--ranks is {args.ranks}, but {started}")
    return args


def across_ranks(samples: Sample, of: Callable[[Sample], float] = median) -> tuple[float, float]:
    """Median over ranks, and maximum over ranks, of each rank's median (or of another figure of its samples)."""
    figures = gather(of(samples))
    return median(figures), max(figures)


def ours(made: Exchange, timer: DeviceTimer, limit: BareWriterPair | None) -> Iterator[tuple[Any, ...]]:
    """Yield (operation, kernel samples, whole-call samples, bytes per token on the network, limit's samples). limit:
    moves as many bytes after each operation."""
    nothing = lambda: None  # noqa: E731
    steps: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [("dispatch", nothing, made.dispatch)]
    if made.throughput:
        steps += [("dispatch, cached layout", nothing, made.cached), ("combine", nothing, made.combine)]
    else:
        steps += [("combine", made.handle_of_dispatch, made.combine), ("dispatch + combine", nothing, made.pair)]
    tokens = len(made.mine.x)
    for name, prepare, call in steps:
        nbytes = fabric_bytes(prepare, call, tokens)
        bare = [limit.move(round(nbytes * tokens)) for _ in range(timer.warmup + timer.repeat)] if limit else []
        yield name, timer.kernel(call, prepare), timer.whole(call, prepare), nbytes, bare[timer.warmup :]
    made.close()


def fabric_bytes(prepare: Callable[[], Any], call: Callable[[Any], Any], tokens: int) -> float:
    """Payload of a call on the network, of all ranks together, per token."""

    def so_far() -> int:
        tsn.synchronize()
        tsn.barrier()
        return sum(gather(tsn.stats().get("bytes_put", 0)))

    prepared = prepare()
    before = so_far()
    call(prepared)
    return (so_far() - before) / (tokens * tsn.size())


def peers(
    args: argparse.Namespace, mode: str, fp8: bool, everyone: Any, timer: DeviceTimer, report: Report
) -> Iterator[tuple[Any, ...]]:
    """Yield (system, operation, kernel samples, whole-call samples) of the others."""
    rank, mine = tsn.rank(), everyone[tsn.rank()]
    makers: dict[str, Callable[[], Nccl | DeepEP]] = {
        "NCCL": lambda: Nccl(everyone, args.experts, rank, row_bytes(args.hidden, fp8) // 4, tsn.device()),
        "DeepEP": lambda: DeepEP(mode, mine, len(mine.x), args.experts, fp8),
    }
    for system, maker in makers.items():
        reason = None
        try:
            peer = maker()
        except Exception as error:  # a peer that cannot run is a note, not a failure
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        reason = next((r for r in gather(reason) if r), None)
        if reason is not None:
            note = f"{system}: not measured ({reason})"
            report.notes += [] if note in report.notes else [note]
            continue
        first = "dispatch" if system == "NCCL" or mode == "latency" else "dispatch, cached layout"
        calls = {first: lambda _, peer=peer: peer.dispatch()}
        if not (system == "NCCL" and fp8):  # combine moves bfloat16 rows; its figure is shown with that dtype
            calls["combine"] = lambda _, peer=peer: peer.combine()
        for name, call in calls.items():
            yield system, name, timer.kernel(call), timer.whole(call)


class Results:
    """The table, and the computation of a row from samples."""

    def __init__(self, report: Report, on_gpu: bool, over_nodes: bool) -> None:
        names = ("mode", "tokens", "dtype", "layout", "operation", "system")
        keys = [Column(name, name, ",d" if name == "tokens" else "") for name in names]
        columns = [us("kernel", "kernel"), us("p99", "kernel p99", plotted=False)]
        columns += [us("kernel_max", "slowest rank", plotted=False), us("whole", "whole call")]
        columns += [rate("logical", "logical", "GB/s"), rate("remote", "remote", "GB/s")]
        if over_nodes:
            columns += [
                Column("fabric", "fabric", ",.0f", better="lower", unit="B/token"),
                Column("per_rank", "once per rank", ",.0f", unit="B/token", plotted=False),
                us("bare", "bare writers", plotted=False),
                rate("of_bare", "of bare writers", "%", format=".0f", plotted=False),
            ]
        self._on_gpu, self._over_nodes = on_gpu, over_nodes
        self._rows: list[tuple[dict[str, Any], str, dict[str, float]]] = []
        self._table = report.table("MoE all-to-all", keys, columns)
        self._table.notes.append(
            "Traffic counts a token once for each rank it goes to, however many experts it has there, with its scales: "
            "logical counts all that a rank receives (in combine: sends back), remote what comes from other ranks. "
            "kernel: time on the device, median over ranks (p99: of each rank's 99th percentile)."
        )
        if over_nodes:
            self._table.notes.append(
                "fabric: payload that crosses to another node in a call, routing and weights included, as the proxies count "
                "it, per token of all ranks; once per rank: rows, where each goes to every rank that needs it. bare writers: "
                "as many threads of each rank that move as many bytes to another node, both ways at once, in the same pieces and "
                "from and to the same kind of memory, without kernels; of bare writers: their time over the kernel's."
            )

    def add(
        self,
        case: dict[str, Any],
        system: str,
        operation: str,
        nbytes: int,
        rows: common.Traffic,
        kernel: list[float],
        whole: list[float],
        fabric: float = 0.0,
        bare: Sample = (),
    ) -> None:
        """Collective. `case`: key columns; nbytes: of a row of traffic; then the samples. fabric: bytes per token on
        the network; bare: samples of bare writers that move as many."""
        middle, slowest = across_ranks(kernel)
        late, _ = across_ranks(kernel, lambda samples: percentile(samples, 99))
        called, _ = across_ranks(whole)
        limit = across_ranks(bare)[0] if bare else None
        proxied = sum(gather(rows.proxied)) / (case["tokens"] * world_size())
        if not is_rank_zero():
            return
        row = {**case, "operation": operation, "system": system, "kernel": middle, "p99": late, "kernel_max": slowest}
        row |= {"whole": called if self._on_gpu else None}
        row |= {name: getattr(rows, name) * nbytes / middle / 1e3 for name in ("logical", "remote")}
        if self._over_nodes and system in WAYS:
            row |= {"fabric": fabric, "per_rank": proxied * nbytes}
            row |= {"bare": limit, "of_bare": 100 * limit / middle} if limit else {}
        self._table.add(row, {"kernel": kernel, "whole": whole})
        self._rows.append(({**case, "operation": operation}, system, {"kernel": middle, "whole": called}))

    def compare_traced(self, report: Report) -> None:
        """Cost of a trace per call, of rank 0; in a separate table."""
        if not is_rank_zero():
            return
        names = ("mode", "tokens", "dtype", "layout", "operation")
        keys = [Column(name, name, ",d" if name == "tokens" else "") for name in names]
        columns = [us("plain", "kernel"), us("traced", "traced")]
        columns += [rate("cost", "more", "%", format=".1f", plotted=False)]
        table = report.table("What a trace costs", keys, columns)
        for case, system, figures in self._rows:
            with_trace = next((f for c, s, f in self._rows if (c, s) == (case, TRACED)), None)
            if system == WAYS[0] and with_trace is not None:
                plain, traced = figures["kernel"], with_trace["kernel"]
                table.add({**case, "plain": plain, "traced": traced, "cost": 100 * (traced / plain - 1)})


def run(
    args: argparse.Namespace, mode: str, dtype: str, tokens: int, timer: DeviceTimer, results: Results, report: Report,
    ours_is: str,
) -> None:  # fmt: skip
    """All layouts and all peers for one mode and dtype; `ours_is`: the name of our own system."""
    world, fp8 = tsn.world(), dtype == "fp8"
    everyone = common.all_inputs(args, tokens, fp8)
    proxied = [not world.topology.is_direct(r) for r in range(tsn.size())]
    rows = common.traffic([e.topk_idx for e in everyone], args.experts, tsn.rank(), proxied)
    there, back = row_bytes(args.hidden, fp8), row_bytes(args.hidden, args.quantize_combine)
    nbytes = {"combine": back, "dispatch + combine": there + back}
    limit = BareWriterPair() if world.proxy is not None else None
    ways: dict[str, dict[str, Any]] = {ours_is: {}}
    if args.once_per_rank and len(world.topology.sizes) < tsn.size():
        ways[WAYS[1]] = {"once_per_node": False}
    case = {"mode": mode, "tokens": tokens, "dtype": dtype}
    for layout in args.layout if mode == "throughput" else ["expert"]:
        for system, choices in ways.items():
            tuning = moe.Tuning(**args.tuning | choices)
            back_as = "fp8" if args.quantize_combine else "bf16"
            made = Exchange(args, everyone, mode, layout, dtype, back_as, tuning=tuning)
            for operation, *measured in ours(made, timer, limit):
                results.add(case | {"layout": layout}, system, operation, nbytes.get(operation, there), rows, *measured)
    if limit:
        limit.close()
    if timer.on_gpu and not args.no_peers and ours_is == WAYS[0]:
        case["layout"] = "rank" if mode == "throughput" else "expert"
        nbytes["combine"] = row_bytes(args.hidden, False)
        for system, operation, *samples in peers(args, mode, fp8, everyone, timer, report):
            results.add(case, system, operation, nbytes.get(operation, there), rows, *samples)


def join_traced(args: argparse.Namespace) -> None:
    """Restart the job with TSN_TRACE; kernels are compiled for a trace."""
    tsn.finalize()
    compiled.forget()
    folder = Path(tempfile.gettempdir()) / f"tilescale_net_trace_cost-{os.getppid()}"  # ranks of a host have one parent
    folder.mkdir(exist_ok=True)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["TSN_TRACE"] = str(folder / "trace.json")
    common.join(args)


def main() -> None:
    args = parse()
    report, timer = common.start("moe_all_to_all", args, "verified, every byte")
    sizes = tsn.world().topology.sizes
    report.environment["nodes"] = str(len(sizes)) if len(set(sizes)) == 1 else "+".join(map(str, sizes))
    results = Results(report, timer.on_gpu, tsn.world().proxy is not None)
    for ours_is in (WAYS[0], TRACED) if args.trace_cost else WAYS[:1]:
        if ours_is == TRACED:
            join_traced(args)
        for mode, dtype in itertools.product(args.mode, args.dtype):
            run(args, mode, dtype, args.tokens_of[mode], timer, results, report, ours_is)
    if args.trace_cost:
        results.compare_traced(report)
    report.finish()


if __name__ == "__main__":
    main()
