"""Dispatch, the experts' GEMMs and combine of a mixture-of-experts layer, overlapped and sequential.

    GPUS=4 bash launch.sh benchmark/moe_layer.py
    GPUS=4 bash launch.sh benchmark/moe_layer.py --tokens 4096,8192 --blocks 8,16,24 --late 0,50,75

Experts are two matrices, hidden to inner and back; the activation between them, the same on all implementations, is
left out. Rows compare dispatch and first GEMM, second GEMM and combine, and all four; `late` is the share of the second
GEMM after which the combine begins. Without a GPU the simulator runs the same kernels on small shapes; one rank on a
GPU shows the overlap with copies in its own memory.
"""

import argparse
import functools
from typing import Any

import tilescale_net as tsn
from benchmark.common import compiled
from benchmark.common.arguments import int_list, on_gpu, positive_int
from benchmark.common.gemm import difference, if_works
from benchmark.common.measuring import Timer, gather, medians, normal_numbers, raise_if_wrong
from benchmark.common.modules import moe, p2p, torch
from benchmark.common.moe import LayerParser, all_inputs, begin_layers, traffic
from benchmark.common.report import Column, Report, us, world_size

BENCH = dict(ranks=0, quick="--repeat 2")  # see common/suite.py

ON_GPU = dict(tokens=[1024, 2048, 4096, 8192], hidden=7168, inner=2048, experts=256, topk=8)
SIMULATED = dict(tokens=[40], hidden=48, inner=40, experts=4, topk=2)
TITLES = {
    "ours": "overlapped", "sequence": "sequential", "matmul": "GEMMs alone", "torch": "torch grouped_mm alone",
    "communication": "communication alone",
}  # fmt: skip


def parse() -> argparse.Namespace:
    shape: dict[str, Any] = ON_GPU if on_gpu() else SIMULATED
    blocks = "of a dispatch and of a combine beside a GEMM; elsewhere they take those of Tuning"
    texts = {"inner": "columns of an expert's first matrix", "blocks": blocks}
    parser = LayerParser(__doc__.splitlines()[0], shape, [8, 24], texts)
    parser.option(
        "--late", int_list(0, 99), [0, 50, 75], "percent of a GEMM's tiles before the combine beside it begins"
    )
    tile = [128, 256, 64] if on_gpu() else [32, 32, 16]
    parser.option("--tile", int_list(16, 512), tile, "of a GEMM", "M,N,K")
    parser.option("--peak", positive_int, 989, "TFLOP/s of the bound")
    parser.option("--link", positive_int, 450, "GB/s of the bound")
    args = parser.parse_args()
    args.stages, args.panel, args.columns = (4, 8, 128) if on_gpu() else (2, 2, 16)
    if len(args.tile) != 3:
        parser.error("--tile takes three numbers")
    args.tile = tuple(args.tile)
    return args


def shape_of(args: argparse.Namespace, tokens: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the AllToAlls: room for twice the rows of an even spread."""
    local, rows = args.experts // world_size(), args.tile[0]
    even = tokens * min(args.topk, args.experts)
    capacity = -(-(2 * even + local * rows) // rows) * rows
    return (args.experts, tokens, args.hidden, args.topk), dict(alignment=rows, capacity=capacity)


class Layer:
    """One rank's part of a layer: inputs, matrices, and the ways to its results. `tokens`: of each rank. `blocks`: of
    dispatch and combine beside GEMMs."""

    def __init__(self, args: argparse.Namespace, tokens: int, blocks: int) -> None:
        from tilescale_net.kernels.fused.expert_matmul import ExpertMatmul
        from tilescale_net.kernels.fused.gemm import Tiling

        rank, ranks, device = tsn.rank(), tsn.size(), tsn.device()
        sizes, options = shape_of(args, tokens)
        options |= {"warm_up": False}  # each side is called before it is timed
        self.overlapping = moe.AllToAll(*sizes, **options, tile_rows=args.tile[0])
        self.plain = moe.AllToAll(*sizes, **options)
        tiling = Tiling(args.tile, args.stages, args.panel, args.columns)
        self.up = ExpertMatmul(self.overlapping, args.hidden, args.inner, tiling=tiling)
        self.down = ExpertMatmul(self.overlapping, args.inner, args.hidden, tiling=tiling)
        everyone = all_inputs(args, tokens, False)
        mine, indices = everyone[rank], [e.topk_idx for e in everyone]
        self.choices, self.blocks = (mine.x, mine.topk_idx, mine.topk_weights), blocks
        self.remote = traffic(indices, args.experts, rank, [False] * ranks).remote
        local = args.experts // ranks
        self.rows = sum(int((idx // local == rank).sum()) for idx in indices)
        shape = local, args.inner, args.hidden
        self.held = [normal_numbers(shape, 2 * rank + i, torch.bfloat16, device) for i in range(2)]
        for held in self.held:
            held.div_(args.hidden**0.5)
        # Columns of the first and rows of the second are contiguous.
        self.w_up, self.w_down = self.held[0].transpose(1, 2), self.held[1]
        gemms = self.up.kernels(self.w_up, ["alone", "arriving"]) + self.down.kernels(
            self.w_down, ["alone", "combined"]
        )
        compiled.together([*gemms, *self.overlapping.kernels_of_tiles(blocks), p2p.meet])
        self.received = self.plain.dispatch(*self.choices)
        self.rows_in = self.received.x.clone()
        self.handle = self.received.handle
        self.h = self.up(self.rows_in, self.w_up, self.handle)
        self.y = self.down(self.h, self.w_down, self.handle)
        self.tokens_out = self.plain.combine(self.y, self.handle)

    def first(self) -> Any:
        pending = self.overlapping.dispatch_send(*self.choices, blocks=self.blocks)
        h = self.up.arriving(pending, self.w_up)
        return h, self.overlapping.dispatch_recv(pending).handle

    def first_in_turn(self) -> Any:
        received = self.plain.dispatch(*self.choices)
        return self.up(received.x, self.w_up, received.handle), received.handle

    def second(self, h: Any, handle: Any, late: int) -> Any:
        return self.down.combined(h, self.w_down, handle, blocks=self.blocks, late=late / 100)

    def whole(self, late: int) -> Any:
        h, handle = self.first()
        return self.second(h, handle, late)

    def second_in_turn(self, h: Any, handle: Any) -> Any:
        return self.plain.combine(self.down(h, self.w_down, handle), handle)

    def implementations(self, lates: list[int]) -> dict[str, dict[str, Any]]:
        """Calls by part of the layer and by the name of the column; overlapped ones begin with "ours", followed by when combines begin."""
        h, handle, rows_in = self.h, self.handle, self.rows_in
        up, down = (lambda: self.up(rows_in, self.w_up, handle)), (lambda: self.down(h, self.w_down, handle))
        dispatch, combine = ((lambda: self.plain.dispatch(*self.choices)), (lambda: self.plain.combine(self.y, handle)))
        parts: dict[str, dict[str, Any]] = {
            "dispatch, GEMM": dict(
                ours0=self.first, sequence=self.first_in_turn, matmul=up, communication=dispatch
            ),
            "GEMM, combine": dict(
                sequence=lambda: self.second_in_turn(h, handle), matmul=down,
                communication=combine,
            ),
            "layer": dict(
                sequence=lambda: self.second_in_turn(*self.first_in_turn()),
                matmul=lambda: (up(), down()), communication=lambda: (dispatch(), combine()),
            ),
        }  # fmt: skip
        for late in lates:
            parts["GEMM, combine"][f"ours{late}"] = functools.partial(self.second, h, handle, late)
            parts["layer"][f"ours{late}"] = functools.partial(self.whole, late)
        for part, call in zip(parts, self.torchs()):
            parts[part]["torch"] = call
        return parts

    def torchs(self) -> list[Any]:
        """torch's own grouped GEMM of each part, if it works."""
        assert self.received.offsets is not None
        ends = self.received.offsets[1:].clone()
        up = lambda: torch._grouped_mm(self.rows_in, self.w_up, offs=ends)  # noqa: E731
        down = lambda: torch._grouped_mm(self.h, self.w_down, offs=ends)  # noqa: E731
        if self.rows_in.device.type != "cuda" or not if_works("torch's grouped GEMM", lambda: lambda: (up(), down())):
            return []
        return [up, down, lambda: (up(), down())]

    def wrong(self) -> str | None:
        """The error of our results: GEMMs against torch, the others against the sequential way."""
        assert self.received.offsets is not None
        h, handle = self.first()
        self.second(h, handle, 50)  # the first one is never late
        out, begins = self.second(h, handle, 50), self.received.offsets.tolist()
        self.overlapping.check()
        for e, count in enumerate(self.received.counts.tolist()):
            here = slice(begins[e], begins[e] + count)
            if not torch.equal(h[here], self.h[here]):
                return f"GEMMs of expert {e} differ from those that wait for all rows"
            if count and e < 4:
                wanted = self.rows_in[here].float() @ self.w_up[e].float()
                if complaint := difference(h[here], wanted, f"the GEMM of expert {e}"):
                    return complaint
        return None if torch.equal(out, self.tokens_out) else "sums of overlapped and sequential calls differ"

    def free(self) -> None:
        for thing in (self.up, self.down, self.overlapping, self.plain):
            thing.free()


def measure(args: argparse.Namespace, tokens: int, blocks: int, timer: Timer, table: Any) -> None:
    """The rows of one shape. Collective."""
    layer = Layer(args, tokens, blocks)
    raise_if_wrong(f"moe_layer, {tokens} tokens", layer.wrong())
    most = max(gather(layer.rows))
    flops, moved = 2 * most * args.hidden * args.inner, 2 * max(gather(layer.remote)) * args.hidden
    for part, calls in layer.implementations(args.late).items():
        slowest = timer.slowest(calls, 5)
        times = medians(slowest)
        both = 2 if part == "layer" else 1
        bound = both * max(flops / args.peak / 1e6, moved / args.link / 1e3)
        for name in (key for key in calls if key.startswith("ours")):
            late = int(name.removeprefix("ours"))
            row = {"part": part, "tokens": tokens, "blocks": blocks, "late": late}
            row |= {key: times.get(name if key == "ours" else key) for key in TITLES}
            row |= {"over": times[name] / times["sequence"], "share": 100 * bound / times[name]}
            table.add(row, {key: slowest[name if key == "ours" else key] for key in TITLES if row[key] is not None})
    raise_if_wrong(f"moe_layer, {tokens} tokens, afterwards", layer.wrong())
    layer.free()


def main() -> None:
    args = parse()
    report = Report("moe_layer", args)
    sizes, options = shape_of(args, max(args.tokens))
    more: list[dict[str, Any]] = [{}, {"tile_rows": args.tile[0]}]
    need = sum(moe.AllToAll.heap_bytes(*sizes, ranks=world_size(), **options, **these) for these in more)
    timer = begin_layers(args, report, need, "bfloat16, normal random data", 5)
    report.environment["bound"] = f"{args.peak} TFLOP/s or {args.link} GB/s from other ranks, the rank with most of it"
    keys = [Column("part", "Part"), Column("tokens", "Tokens", ",d"), Column("blocks", "Blocks", ",d", plotted=False)]
    keys.append(Column("late", "Combine begins at", ",d", unit="%", plotted=False))
    columns = [us(key, title) for key, title in TITLES.items()]
    columns += [Column("over", "x sequential", ".3f"), Column("share", "share of the bound", ".0f", unit="%")]
    table = report.table("moe_layer", keys, columns)
    for tokens in args.tokens:
        for blocks in args.blocks:
            measure(args, tokens, blocks, timer, table)
    report.finish()


if __name__ == "__main__":
    main()
