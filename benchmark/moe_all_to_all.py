"""How long dispatch and combine of a mixture-of-experts layer take, next to NCCL and, where it is installed, DeepEP.

    GPUS=4 bash launch.sh benchmark/moe_all_to_all.py
    GPUS=4 bash launch.sh benchmark/moe_all_to_all.py --mode latency --tokens 128 --dtype fp8
    GPUS=4 VIRTUAL_NODES=2 bash launch.sh benchmark/moe_all_to_all.py --mode latency --tokens 32 --hidden 512 --experts 16 --topk 4

All implementations get the same inputs and are timed in the same way: the L2 cache is flushed, ranks meet in a barrier on the
device, then the call runs between two events. Host time is hidden behind the flush for `kernel` and part of `whole
call`.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from benchmark.common import (
    Column,
    Report,
    is_rank_zero,
    median,
    percentile,
    positive_int,
    world_size,
)
from benchmark.common.arguments import MOE_TIMING, MoeParser
from benchmark.common.measuring import SIMULATED, DeviceTimer, gather

BENCH = dict(ranks=0, quick="--mode latency --dtype bf16 --warmup 1 --repeat 2")  # see common/suite.py

WAYS = ("tilescale_net", "once per rank")  # systems of our own: as it is, and Tuning(once_per_node=False)


def _tuning(text: str) -> dict[str, int]:
    """argparse type: `blocks=16,threads=256`."""
    import argparse
    import dataclasses

    from tilescale_net.kernels.moe import Tuning

    known = [field.name for field in dataclasses.fields(Tuning)]
    made = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in known or not value.isdigit():
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=NUMBER with a name of {', '.join(known)}")
        made[name] = bool(int(value)) if name == "once_per_node" else int(value)
    return made


def parse() -> argparse.Namespace:
    parser = MoeParser(__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=positive_int, metavar="N", help="refuse to run with another number of ranks")
    parser.add_argument(
        "--tuning",
        type=_tuning,
        default={},
        metavar="NAME=N,…",
        help="choices of tilescale_net.kernels.moe.Tuning, such as blocks=16",
    )
    parser.add_argument(
        "--once-per-rank", action="store_true", help="where nodes have several ranks, also Tuning(once_per_node=False)"
    )
    parser.add_argument("--quantize-combine", action="store_true", help="rows travel back as FP8")
    parser.add_argument("--no-peers", action="store_true", help="leave NCCL and DeepEP out")
    args = parser.parse_args()
    if args.ranks and args.ranks != world_size():
        parser.error(
            f"--ranks is {args.ranks}, but {world_size()} ranks were started; start them with GPUS={args.ranks}"
        )
    return args


def across_ranks(samples: list[float], of: Any = median) -> tuple[float, float]:
    """Median over ranks, and maximum over ranks, of each rank's median (or of another figure of its samples)."""
    medians = gather(of(samples))
    return median(medians), max(medians)


def ours(
    args: argparse.Namespace,
    mode: str,
    layout: str,
    fp8: bool,
    everyone: Any,
    timer: DeviceTimer,
    limit: Any,
    **tuning: Any,
) -> Iterator[tuple[Any, ...]]:
    """Yield (operation, kernel samples, whole-call samples, bytes per token on the network, limit's samples) of AllToAll,
    verified.

    limit: `BareWriterPair` that moves as many bytes after each operation, or None; tuning: beside the user's.
    """
    import torch

    import tilescale_net as tsn
    from benchmark.common.moe import FP8, check_combine, check_dispatch, returned_rows
    from tilescale_net.kernels.moe import AllToAll, Tuning
    from tilescale_net.kernels.moe.row_ops import dequantise

    rank, ranks, mine = tsn.rank(), tsn.size(), everyone[tsn.rank()]
    tokens = len(mine.x)
    options: dict[str, Any] = {"tuning": Tuning(**args.tuning | tuning)}
    if mode == "throughput":
        # Twice the rows of an even spread, not all rows of all ranks.
        options |= {"layout": layout, "capacity": max(2 * tokens * args.topk, ranks * tokens)}
    op = AllToAll(
        args.experts, tokens, args.hidden, args.topk, FP8 if fp8 else torch.bfloat16, mode,
        quantize_combine=args.quantize_combine, **options,
    )  # fmt: skip
    x = mine.x if mode == "latency" or not fp8 else (mine.x_fp8, mine.scales)

    def dispatch(_: Any = None) -> Any:
        return op.dispatch(x, mine.topk_idx, mine.topk_weights)

    received = dispatch()
    y = returned_rows(received)
    out = op.combine(y, received.handle)
    op.check()
    if not args.no_check:
        check_dispatch(received, everyone, args.experts, rank, mode, layout)
        if not args.quantize_combine:
            returned = dequantise(mine.x_fp8, mine.scales).to(y.dtype) if fp8 else mine.x
            weighted = layout == "expert" or mode == "latency"
            check_combine(out, mine, returned, args.experts, ranks, weighted, rank, op.sums_over)
    nothing = lambda: None  # noqa: E731
    out = torch.empty_like(out)
    steps: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [("dispatch", nothing, dispatch)]
    if mode == "throughput":
        handle = received.handle
        steps += [("dispatch, cached layout", nothing, lambda _: op.dispatch(x, handle=handle))]
        steps += [("combine", nothing, lambda _: op.combine(y, handle, out=out))]
    else:
        steps += [("combine", lambda: dispatch().handle, lambda h: op.combine(y, h, out=out))]
        steps += [("dispatch + combine", nothing, lambda _: op.combine(y, dispatch().handle, out=out))]
    for name, prepare, call in steps:
        nbytes = fabric_bytes(prepare, call, tokens)
        bare = [limit.move(round(nbytes * tokens)) for _ in range(timer.warmup + timer.repeat)] if limit else []
        yield name, timer.kernel(prepare, call), timer.whole(prepare, call), nbytes, bare[timer.warmup :]
    op.check()
    tsn.barrier()
    op.free()


def fabric_bytes(prepare: Callable[[], Any], call: Callable[..., Any], tokens: int) -> float:
    """Payload that a call gives to the network, of all ranks together, per token."""
    import tilescale_net as tsn

    def so_far() -> int:
        tsn.synchronize()
        tsn.barrier()
        return sum(gather(tsn.stats().get("bytes_put", 0)))

    given = prepare()
    before = so_far()
    call(given)
    return (so_far() - before) / (tokens * tsn.size())


def peers(
    args: argparse.Namespace, mode: str, fp8: bool, everyone: Any, timer: DeviceTimer, report: Report
) -> Iterator[tuple[Any, ...]]:
    """Yield (system, operation, kernel samples, whole-call samples) of the others."""
    import tilescale_net as tsn
    from benchmark.common.moe import DeepEP, Nccl, row_bytes

    rank, mine = tsn.rank(), everyone[tsn.rank()]
    makers: dict[str, Callable[[], Any]] = {
        "NCCL": lambda: Nccl(everyone, args.experts, rank, row_bytes(args.hidden, fp8) // 4, tsn.device()),
        "DeepEP": lambda: DeepEP(mode, mine, len(mine.x), args.experts, fp8),
    }
    for system, maker in makers.items():
        peer: Any
        reason: str | None
        try:
            peer, reason = maker(), None
        except Exception as error:  # what keeps a peer from running is a note, not a failure
            peer, reason = None, f"{type(error).__name__}: {error}".splitlines()[0]
        reason = next((r for r in gather(reason) if r), None)
        if reason is not None:
            note = f"{system}: not measured ({reason})"
            if note not in report.notes:
                report.notes.append(note)
            continue
        names = (
            ("dispatch", "combine") if system == "NCCL" or mode == "latency" else ("dispatch, cached layout", "combine")
        )
        for name, call in zip(names, (peer.dispatch, peer.combine)):
            if system == "NCCL" and fp8 and name == "combine":
                continue  # combine moves bfloat16 rows; its figure stands with that dtype
            yield (
                system,
                name,
                timer.kernel(lambda: None, lambda _, c=call: c()),
                timer.whole(lambda: None, lambda _, c=call: c()),
            )


class Results:
    """The table, and how a row of it comes from samples."""

    def __init__(self, report: Report, on_gpu: bool, over_nodes: bool) -> None:
        text = {"mode": "mode", "tokens": "tokens", "dtype": "dtype", "layout": "layout", "operation": "operation"}
        keys = [Column(k, t, ",d" if k == "tokens" else "") for k, t in text.items()] + [Column("system", "system")]
        columns = [
            Column("kernel", "kernel", better="lower", unit="us"),
            Column("p99", "kernel p99", better="lower", unit="us", plotted=False),
            Column("kernel_max", "slowest rank", better="lower", unit="us", plotted=False),
            Column("whole", "whole call", better="lower", unit="us"),
            Column("logical", "logical", better="higher", unit="GB/s"),
            Column("remote", "remote", better="higher", unit="GB/s"),
        ]
        if over_nodes:
            columns += [
                Column("fabric", "fabric", ",.0f", better="lower", unit="B/token"),
                Column("per_rank", "once per rank", ",.0f", unit="B/token", plotted=False),
                Column("bare", "bare writers", better="lower", unit="us", plotted=False),
                Column("of_bare", "of bare writers", ".0f", better="higher", unit="%", plotted=False),
            ]
        self._on_gpu, self._over_nodes = on_gpu, over_nodes
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
        rows: Any,
        kernel: Any,
        whole: Any,
        fabric: Any = 0.0,
        bare: Any = (),
    ) -> None:
        """Collective. `case`: key columns; nbytes: of a row of traffic; rows: `Traffic`; then the samples.

        fabric: bytes per token on the network; bare: samples of bare writers that move as many.
        """
        middle, slowest = across_ranks(kernel)
        late, _ = across_ranks(kernel, lambda samples: percentile(samples, 99))
        called, _ = across_ranks(whole)
        limit = across_ranks(bare)[0] if bare else None
        proxied = sum(gather(rows.proxied)) / (case["tokens"] * world_size())
        if not is_rank_zero():
            return
        values = {"kernel": middle, "p99": late, "kernel_max": slowest, "whole": called if self._on_gpu else None}
        rates = {"logical": rows.rows * nbytes / middle / 1e3, "remote": rows.remote * nbytes / middle / 1e3}
        row = {**case, "operation": operation, "system": system, **values, **rates}
        if self._over_nodes and system in WAYS:
            row |= {"fabric": fabric, "per_rank": proxied * nbytes}
            row |= {"bare": limit, "of_bare": 100 * limit / middle} if limit else {}
        self._table.add(row, {"kernel": kernel, "whole": whole})


def run(
    args: argparse.Namespace, mode: str, dtype: str, tokens: int, timer: DeviceTimer, results: Results, report: Report
) -> None:
    """All layouts and all peers for one mode and dtype."""
    import tilescale_net as tsn
    from benchmark.common.fabric import BareWriterPair
    from benchmark.common.moe import make, row_bytes, traffic

    fp8 = dtype == "fp8"
    shape = (tokens, args.hidden, args.experts, args.topk, fp8, 7, tsn.device())
    everyone = [make(r, *shape) for r in range(tsn.size())]
    proxied = [not tsn.world().topology.is_direct(r) for r in range(tsn.size())]
    rows = traffic([e.topk_idx for e in everyone], args.experts, tsn.rank(), proxied)
    there, back = row_bytes(args.hidden, fp8), row_bytes(args.hidden, args.quantize_combine)
    nbytes = {"combine": back, "dispatch + combine": there + back}
    limit = BareWriterPair() if tsn.world().proxy is not None else None
    several = tsn.world().topology.node_size > 1
    ways: dict[str, dict[str, bool]] = {"tilescale_net": {}} | (
        {WAYS[1]: {"once_per_node": False}} if args.once_per_rank and several else {}
    )
    for layout in args.layout if mode == "throughput" else ["expert"]:
        case = {"mode": mode, "tokens": tokens, "dtype": dtype, "layout": layout}
        for system, tuning in ways.items():
            for operation, *measured in ours(args, mode, layout, fp8, everyone, timer, limit, **tuning):
                results.add(case, system, operation, nbytes.get(operation, there), rows, *measured)
    if limit:
        limit.close()
    if timer.on_gpu and not args.no_peers:
        case = {"mode": mode, "tokens": tokens, "dtype": dtype, "layout": "rank" if mode == "throughput" else "expert"}
        nbytes["combine"] = row_bytes(args.hidden, False)
        for system, operation, *samples in peers(args, mode, fp8, everyone, timer, report):
            results.add(case, system, operation, nbytes.get(operation, there), rows, *samples)


def main() -> None:
    args = parse()
    import tilescale_net as tsn

    report = Report("moe_all_to_all", args)
    world = tsn.init(heap_bytes(args, args.tokens_of))
    timer = DeviceTimer(args, world.device_kind == "cuda", MOE_TIMING)
    report.environment |= {
        "shape": f"hidden {args.hidden}, top-{args.topk} of {args.experts} experts",
        "nodes": str(world.topology.nodes),
        "data": "not verified" if args.no_check else "verified, every byte",
        "timing": f"median of {timer.repeat}" + ("" if timer.on_gpu else f"; {SIMULATED}"),
    }
    results = Results(report, timer.on_gpu, world.proxy is not None)
    for mode in args.mode:
        for dtype in args.dtype:
            run(args, mode, dtype, args.tokens_of[mode], timer, results, report)
    report.finish()
    tsn.finalize()


def heap_bytes(args: argparse.Namespace, tokens_of: dict[str, int]) -> int:
    """Symmetric memory for one AllToAll at a time, with room to spare."""
    most = 64 << 20
    for mode, tokens in tokens_of.items():
        row = 2 * args.hidden + 4 * (args.hidden // 128 + 1) + 16 * args.topk
        rows = world_size() * tokens * (5 if mode == "throughput" else 8) + 2 * tokens * args.topk
        most = max(most, rows * row * 5 // 4 + (256 << 20 if args.hidden > 2048 else 32 << 20))
    return most


if __name__ == "__main__":
    main()
