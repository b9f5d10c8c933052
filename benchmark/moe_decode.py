"""A decode loop of mixture-of-experts layers in a CUDA graph, tokens a second next to the same loop on NCCL.

    GPUS=4 bash launch.sh benchmark/moe_decode.py
    GPUS=4 bash launch.sh benchmark/moe_decode.py --tokens 8 --layers 8 --blocks 24,48

A step takes every token through `--layers` layers: RMSNorm, a router, FP8 experts with scales of blocks, residual. The
shape is DeepSeek-V4-Flash's: 256 experts, top-6, hidden 4096, inner 2048. `ours` is `ops.moe_experts`, sequential and
overlapped. The loop on NCCL gathers the tokens of all ranks, applies each rank's experts with the same GEMMs, and
reduces and scatters the sums: a graph capture needs fixed sizes, which an exchange of routed rows by NCCL does not
have. Attention is left out; all ways have the same router. Without a GPU the simulator runs ours on small shapes.
"""

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import tilescale_net as tsn
from benchmark.common.arguments import on_gpu, positive_int
from benchmark.common.collectives import nccl_group
from benchmark.common.measuring import Timer, gather, medians, normal_numbers, raise_if_wrong
from benchmark.common.modules import dist, moe, torch
from benchmark.common.moe import LayerParser, begin_layers
from benchmark.common.report import Column, Report, us, world_size

BENCH = dict(ranks=0, quick="--repeat 2")  # see common/suite.py

ON_GPU = dict(tokens=[8, 128], hidden=4096, inner=2048, experts=256, topk=6, layers=4)
SIMULATED = dict(tokens=[3], hidden=512, inner=64, experts=4, topk=2, layers=2)


def parse() -> argparse.Namespace:
    shape: dict[str, Any] = ON_GPU if on_gpu() else SIMULATED
    parser = LayerParser(__doc__.splitlines()[0], shape, [24], {"hidden": "elements of a row, a multiple of 512"})
    parser.option("--layers", positive_int, shape["layers"], "of a step, which share nothing but memory for rows")
    parser.flag("--no-nccl", "leave NCCL out")
    args = parser.parse_args()
    if args.hidden % 512:
        parser.error(f"--hidden is {args.hidden}; it must be a multiple of 512")
    return args


def options_of(args: argparse.Namespace, tokens: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the AllToAll: room for all choices of all ranks, as a decode loop needs, and for the gaps."""
    rows, local = 128 if on_gpu() else 32, args.experts // world_size()
    most = world_size() * tokens * min(args.topk, local)
    capacity = (-(-most // rows) + min(local, most)) * rows
    sizes = args.experts, tokens, args.hidden, args.topk, torch.float8_e4m3fn
    return sizes, dict(alignment=rows, tile_rows=rows, capacity=capacity)


class Layer:
    """A router, which all ranks have, and this rank's experts of eight bits."""

    def __init__(self, args: argparse.Namespace, number: int) -> None:
        from tilescale_net.kernels.fused.scaled_gemm import quantise_weights

        device, local = tsn.device(), args.experts // tsn.size()
        self.router = normal_numbers((args.hidden, args.experts), number, torch.bfloat16, device).div_(args.hidden**0.5)
        self.held, self.scales = [], []
        for which, (n, k) in enumerate(((2 * args.inner, args.hidden), (args.hidden, args.inner))):
            made = []
            for e in range(local):
                seed = (number * args.experts + tsn.rank() * local + e) * 2 + which
                made.append(quantise_weights(normal_numbers((n, k), seed, torch.bfloat16, device).div_(k**0.5)))
            w, scales = (torch.stack(each) for each in zip(*made))
            self.held.append(w)
            self.scales.append(scales)

    def routed(self, x: Any, top_k: int) -> tuple[Any, Any, Any]:
        """Normalised rows, their experts, and weights."""
        rows = torch.nn.functional.rms_norm(x, (x.shape[1],))
        scores, chosen = torch.sigmoid((rows @ self.router).float()).topk(top_k)
        return rows, chosen, scores / scores.sum(1, keepdim=True)


class Loop:
    """A step of decoding: `x` through all layers.

    Args:
        tokens: of each rank.

    Attributes:
        routed: last choices of `ours`, by layer: each token's experts and their weights.
    """

    def __init__(self, args: argparse.Namespace, tokens: int, layers: list[Layer], exchange: Any) -> None:
        self._args, self._layers, self._exchange = args, layers, exchange
        self.routed: list[tuple[Any, Any]] = []
        self.x = normal_numbers((tokens, args.hidden), 1000 + tsn.rank(), torch.bfloat16, tsn.device())

    def ours(self, fused: bool) -> Any:
        from tilescale_net import ops

        x = self.x
        self.routed.clear()
        with torch.no_grad():
            for layer in self._layers:
                rows, chosen, weights = layer.routed(x, self._args.topk)
                self.routed.append((chosen, weights))
                matrices = [w.transpose(1, 2) for w in layer.held]
                x = x + ops.moe_experts(
                    self._exchange,
                    rows,
                    chosen,
                    weights,
                    *matrices,
                    scales=(layer.scales[0], layer.scales[1]),
                    fused=fused,
                )
        return x

    def nccl(self, group: Any, routed: list[tuple[Any, Any]] | None = None) -> Any:
        """All tokens to all ranks, each of which sums over its experts; then sums of all ranks to their tokens.

        Args:
            routed: each layer's experts and weights, instead of the layer's own choice. Differently rounded sums change
                the choice if scores are close.
        """
        from tilescale_net.kernels.fused.scaled_gemm import scaled_matmul
        from tilescale_net.kernels.fused.swiglu import SwiGLU, quantise_rows, swiglu_quantised

        x, ranks, top_k, kind = self.x, tsn.size(), self._args.topk, SwiGLU()
        local = self._args.experts // ranks
        with torch.no_grad():
            experts = torch.arange(local, device=x.device)
            for number, layer in enumerate(self._layers):
                rows, chosen, weights = layer.routed(x, top_k)
                if routed is not None:
                    chosen, weights = routed[number]
                count = len(rows) * ranks
                every = rows.new_empty((count, rows.shape[1]))
                choices, shares = chosen.new_empty((count, top_k)), weights.new_empty((count, top_k))
                for mine, all_of_them in ((rows, every), (chosen, choices), (weights, shares)):
                    dist.all_gather_into_tensor(all_of_them, mine.contiguous(), group=group)
                expert = choices.flatten() - tsn.rank() * local
                expert = torch.where((expert >= 0) & (expert < local), expert, local)  # other ranks' choices come last
                order = expert.argsort(stable=True)
                counts = (expert[None] == experts[:, None]).sum(1, dtype=torch.int32)
                offsets = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
                ends: dict[str, Any] = dict(counts=counts, offsets=offsets)
                token = order // top_k
                q, scales = quantise_rows(every[token])
                h = scaled_matmul(q, layer.held[0], scales, layer.scales[0], **ends)
                q, scales = swiglu_quantised(h, kind, **ends)
                y = torch.zeros((len(q), rows.shape[1]), dtype=torch.bfloat16, device=x.device)
                scaled_matmul(q, layer.held[1], scales, layer.scales[1], out=y, **ends)
                sums = torch.zeros((count, rows.shape[1]), device=x.device)
                sums.index_add_(0, token, y.float() * shares.flatten()[order][:, None])
                out = torch.empty_like(rows)
                dist.reduce_scatter_tensor(out, sums.to(out.dtype), group=group)
                x = x + out
        return x


def wrong(found: Any, wanted: Any) -> str | None:
    """The error of tokens from another way through the layers: FP8 of rows that differ by a rounding of BF16."""
    error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    return None if error < 0.05 else f"tokens differ by {error:.3f} of their norm"


def measure(
    args: argparse.Namespace, tokens: int, blocks: int, layers: list[Layer], group: Any, timer: Timer, table: Any
) -> None:
    """A row. Collective."""
    sizes, options = options_of(args, tokens)
    exchange = moe.AllToAll(*sizes, **options, tuning=moe.Tuning(blocks=blocks), warm_up=False)
    loop = Loop(args, tokens, layers, exchange)
    ways: dict[str, Callable[[], Any]] = {
        name: functools.partial(loop.ours, name == "fused") for name in ("ours", "fused")
    }
    if group is not None:
        ways["nccl"] = functools.partial(loop.nccl, group)
    results = {name: ways[name]() for name in ("ours", "fused")}
    if group is not None:
        results["nccl"] = loop.nccl(group, loop.routed)
    tsn.synchronize()
    label = f"moe_decode, {tokens} tokens"
    raise_if_wrong(
        label, None if torch.equal(results["fused"], results["ours"]) else "overlapped calls choose other tokens"
    )
    if "nccl" in results:
        raise_if_wrong(label, wrong(results["nccl"], results["ours"]))

    slowest = timer.slowest(ways, 5)
    times = medians(slowest)
    total = tokens * len(gather(0))
    row: dict[str, Any] = dict(tokens=tokens, blocks=blocks, **times)
    row |= {f"{name}_rate": total / time * 1e6 for name, time in times.items()}
    row |= dict(over=times["nccl"] / min(times["ours"], times["fused"]) if "nccl" in times else None)
    table.add(row, slowest)
    exchange.check()
    exchange.free()


def main() -> None:
    args = parse()
    report = Report("moe_decode", args)
    need = 0
    for tokens in args.tokens:
        sizes, options = options_of(args, tokens)
        need = max(need, moe.AllToAll.heap_bytes(*sizes, ranks=world_size(), **options))
    timer = begin_layers(args, report, need, f"{args.layers} layers, FP8", 5)
    group = nccl_group(report, args)
    titles = {"ours": "ours", "fused": "ours overlapped"} | ({"nccl": "NCCL"} if group is not None else {})
    columns = [us(name, f"step, {title}") for name, title in titles.items()]
    columns += [Column(f"{name}_rate", title, ",.0f", unit="tokens/s", plotted=False) for name, title in titles.items()]
    columns += [Column("over", "x NCCL", ".2f")] if group is not None else []
    keys = [Column("tokens", "Tokens", ",d"), Column("blocks", "Blocks", ",d", plotted=False)]
    table = report.table("moe_decode", keys, columns)
    layers = [Layer(args, number) for number in range(args.layers)]
    for tokens, blocks in itertools.product(args.tokens, args.blocks):
        measure(args, tokens, blocks, layers, group, timer, table)
    report.finish()


if __name__ == "__main__":
    main()
