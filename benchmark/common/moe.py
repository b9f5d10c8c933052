"""Mixture of experts: flags, data that every rank can make for every rank, their check, and peers of our kernels."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tilescale_net as tsn
from benchmark.common.arguments import TIMINGS, BenchmarkParser, int_list, on_gpu, one_of, positive_int
from benchmark.common.measuring import DeviceTimer, Timer, leave_default_stream
from benchmark.common.modules import dist, moe, row_ops, torch
from benchmark.common.peers import nccl_over_nodes
from benchmark.common.report import Report, WrongData, world_size

# (warmup, repeat) of kernels on a GPU; and default shapes: tokens of a rank by mode, ….
TIMING = (10, 30)
ON_GPU = {"throughput": 4096, "latency": 128, "hidden": 7168, "topk": 8, "experts": 256}
SIMULATED = {"throughput": 32, "latency": 16, "hidden": 512, "topk": 4, "experts": 16}


class MoeParser(BenchmarkParser):
    """With the flags of dispatch and combine: modes, layouts, dtypes, the shape, and whether data are verified.
    `parse_args` fills in the shape, and `tokens_of`: tokens of a rank by mode."""

    def __init__(self, description: str) -> None:
        super().__init__(description, warmup=None, repeat=None, check=True)
        choices = {
            "mode": (("throughput", "latency"), "throughput, latency, or all (all)"),
            "layout": (("rank", "expert"), "of throughput mode: rank, expert, or all (all)"),
            "dtype": (("bf16", "fp8"), "of dispatch: bf16, fp8, or all (all)"),
        }
        for name, (values, text) in choices.items():
            self.option(f"--{name}", one_of(*values), list(values), text)
        numbers = {
            "tokens": "per rank (4096; in latency mode 128; simulator 32, 16)",
            "hidden": "elements of a row (7168; simulator 512)",
            "topk": "choices per token (8; simulator 4)",
            "experts": "of all ranks (256; simulator 16)",
            "warmup": f"untimed calls ({TIMING[0]})",
            "repeat": f"timed calls, whose median is shown ({TIMING[1]})",
        }
        for name, text in numbers.items():
            self.option(f"--{name}", positive_int, None, text)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        parsed = super().parse_args(args, namespace)
        shape = ON_GPU if on_gpu() else SIMULATED
        for name in ("hidden", "topk", "experts"):
            setattr(parsed, name, getattr(parsed, name) or shape[name])
        parsed.tokens_of = {mode: parsed.tokens or shape[mode] for mode in parsed.mode}
        return check_experts(self, parsed)


class LayerParser(BenchmarkParser):
    """With the flags of whole layers: `--tokens`, their shape and `--blocks`.

    Args:
        shape: defaults of tokens, hidden, inner, experts and topk.
        blocks: on a GPU.
        texts: help by flag, of flags that a benchmark words differently.
    """

    def __init__(
        self, description: str, shape: dict[str, Any], blocks: list[int], texts: Mapping[str, str] = {}
    ) -> None:
        super().__init__(description, timing=TIMINGS)
        numbers = {
            "hidden": "elements of a row", "inner": "columns of an expert's gate", "experts": "of all ranks", "topk": "choices of a token",
        }  # fmt: skip
        self.option("--tokens", int_list(1, 1 << 20), shape["tokens"], "per rank")
        for name, text in numbers.items():
            self.option(f"--{name}", positive_int, shape[name], texts.get(name, text))
        text = texts.get("blocks", "of a dispatch and of a combine")
        self.option("--blocks", int_list(2, 132), blocks if on_gpu() else [2], text)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        return check_experts(self, super().parse_args(args, namespace))


def check_experts(parser: BenchmarkParser, args: argparse.Namespace) -> argparse.Namespace:
    """The arguments; exits with 2 if ranks would have unequal numbers of experts."""
    if args.experts % world_size():
        parser.error(f"--experts is {args.experts}; it must be a multiple of the {world_size()} ranks")
    return args


def begin_layers(args: argparse.Namespace, report: Report, heap: int, what: str, batch: int) -> Timer:
    """Join the world with room for `heap` bytes, and the timer of a layer's benchmark. `what`: the report's text behind
    the shape. `batch`: see `Timer.label`. Collective."""
    timer = Timer.of(args, tsn.init(heap + (64 << 20)).device_kind == "cuda")
    shape = f"hidden {args.hidden}, inner {args.inner}, top {args.topk} of {args.experts} experts"
    report.environment |= {
        "shape": f"{shape}, {what}, verified",
        "timing": f"{timer.label(batch)}, implementations in turn, slowest rank",
    }
    return timer


def join(args: argparse.Namespace) -> Any:
    """Join the job with room for one AllToAll at a time; collective. Returns the world."""
    most = 64 << 20
    for mode, tokens in args.tokens_of.items():
        row = 2 * args.hidden + 4 * (args.hidden // 128 + 1) + 16 * args.topk
        rows = world_size() * tokens * (5 if mode == "throughput" else 8) + 2 * tokens * args.topk
        most = max(most, rows * row * 5 // 4 + (256 << 20 if args.hidden > 2048 else 32 << 20))
    world = tsn.init(most)
    leave_default_stream(world)
    return world


def start(name: str, args: argparse.Namespace, data: str) -> tuple[Report, DeviceTimer]:
    """`join`; the report with its header, and the timer."""
    report = Report(name, args)
    timer = DeviceTimer(args, join(args).device_kind == "cuda", TIMING)
    report.environment["shape"] = f"hidden {args.hidden}, top-{args.topk} of {args.experts} experts"
    report.environment |= {"data": "not verified" if args.no_check else data, "timing": timer.label()}
    return report, timer


@dataclass
class Inputs:
    """One rank's inputs: rows (bfloat16), their FP8 form with scales (or None), choices and weights."""

    x: torch.Tensor
    x_fp8: Any
    scales: Any
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


def make(rank: int, tokens: int, hidden: int, experts: int, top_k: int, fp8: bool, seed: int, device: Any) -> Inputs:
    """Random rows and distinct random choices; weights are multiples of 1/16, so that sums are exact in float32."""
    g = torch.Generator(device=device).manual_seed(seed * 1009 + rank)
    x = torch.randn((tokens, hidden), generator=g, device=device).to(torch.bfloat16)
    idx = torch.rand((tokens, experts), generator=g, device=device).topk(top_k, 1)[1]
    weights = torch.randint(1, 17, (tokens, top_k), generator=g, device=device) / 16
    q, scales = row_ops.quantise(x) if fp8 else (None, None)
    return Inputs(x, q, scales, idx, weights)


def all_inputs(args: argparse.Namespace, tokens: int, fp8: bool) -> list[Inputs]:
    """Of every rank."""
    shape = (tokens, args.hidden, args.experts, args.topk, fp8, 7, tsn.device())
    return [make(rank, *shape) for rank in range(tsn.size())]


@dataclass
class Traffic:
    """Rows (one per token and rank) that a rank receives in dispatch and sends in combine. `logical`: all; remote: from
    other ranks; proxied: from other nodes."""

    logical: int
    remote: int
    proxied: int


def traffic(indices: list[torch.Tensor], experts: int, rank: int, proxied: list[bool]) -> Traffic:
    """Count them from all ranks' choices. `proxied`: which ranks are on other nodes."""
    local = experts // len(indices)
    here = [int((idx // local == rank).any(1).sum()) for idx in indices]
    return Traffic(sum(here), sum(here) - here[rank], sum(n for n, other in zip(here, proxied) if other))


def row_bytes(hidden: int, fp8: bool) -> int:
    """Bytes of a row with its scales."""
    return hidden + 4 * row_ops.groups_of(hidden) if fp8 else 2 * hidden


def check_dispatch(received: Any, everyone: list[Inputs], experts: int, rank: int, mode: str, layout: str) -> None:
    """Raise WrongData unless `received` (tilescale_net.kernels.moe.Dispatched) holds exactly the rows of `everyone`."""
    ranks, local = len(everyone), experts // len(everyone)
    fp8 = received.x.dtype == torch.float8_e4m3fn
    tokens = [len(e.topk_idx) for e in everyone]
    flat = torch.cat([e.topk_idx.flatten() for e in everyone])
    token = torch.cat(
        [torch.arange(n, device=flat.device).repeat_interleave(e.topk_idx.shape[1]) for n, e in zip(tokens, everyone)]
    )
    source = torch.cat([torch.full((e.topk_idx.numel(),), s, device=flat.device) for s, e in enumerate(everyone)])
    begins = torch.tensor([sum(tokens[:s]) for s in range(ranks)], device=flat.device)
    mine = (flat // local == rank) & (flat >= 0)
    expert, order = torch.sort(flat[mine] - rank * local, stable=True)
    wanted = (begins[source] + token)[mine][order]
    counts = torch.bincount(expert, minlength=local)
    if not torch.equal(counts, received.counts.long()):
        raise WrongData("dispatch: the rows per expert differ")
    start = counts.cumsum(0) - counts
    inside = torch.arange(len(expert), device=flat.device) - start[expert]
    if mode == "latency":
        places = expert * received.x.shape[1] + inside
    else:
        places = received.offsets.long()[expert] + inside
        if layout == "rank":
            places = received.row_index.long()[places]
    compared: list[tuple[str, torch.Tensor, list[Any] | None]] = [
        ("rows", received.x, [e.x_fp8 if fp8 else e.x for e in everyone]),
        ("scales", received.scales, [e.scales for e in everyone] if fp8 else None),
    ]
    for name, have, want in compared:
        if want is None:
            continue
        have = have.reshape(-1, have.shape[-1])
        if fp8 and name == "rows":
            have, want = have.view(torch.uint8), [w.view(torch.uint8) for w in want]
        if not torch.equal(have[places], torch.cat(want)[wanted]):
            raise WrongData(f"dispatch: {name} differ")


def returned_rows(received: Any) -> torch.Tensor:
    """The rows of experts that return their input: `received.x`, in bfloat16."""
    flat = received.x.reshape(-1, received.x.shape[-1])
    rows = torch.zeros(received.x.shape, dtype=torch.bfloat16, device=received.x.device)
    for begin in range(0, len(flat), 4096):
        part = slice(begin, begin + 4096)
        found = flat[part]
        if received.scales is not None:
            found = row_ops.dequantise(found, received.scales.reshape(-1, received.scales.shape[-1])[part])
        rows.view(-1, rows.shape[-1])[part] = found.to(rows.dtype)
    return rows


def check_combine(
    out: torch.Tensor,
    mine: Inputs,
    rows: torch.Tensor,
    experts: int,
    ranks: int,
    weighted: bool,
    rank: int,
    nodes: int | tuple[int, ...],
) -> None:
    """Raise WrongData unless `out` is the combine of experts that return their input. `rows`: of this rank,
    [tokens, hidden], as the experts returned them (bfloat16). `nodes`: `AllToAll.sums_over`."""
    local, parts = experts // ranks, []
    for host in range(ranks):
        here = (mine.topk_idx // local == host) & (mine.topk_idx >= 0)
        factor = (mine.topk_weights * here).sum(1) if weighted else here.any(1).float()
        parts.append(factor[:, None] * rows.float())
    if not torch.equal(out, row_ops.sum_of_ranks(parts, rank, torch.bfloat16, nodes=nodes)):
        raise WrongData("combine: sums differ")


class Exchange:
    """An AllToAll with this rank's inputs, whose dispatch and combine have been verified; and calls of it. Collective.
    `everyone`: all ranks' inputs. `back`: dtype of returned rows."""

    def __init__(
        self,
        args: argparse.Namespace,
        everyone: list[Inputs],
        mode: str,
        layout: str,
        dtype: str,
        back: str = "bf16",
        **options: Any,
    ) -> None:
        rank, ranks = tsn.rank(), tsn.size()
        self.mine, fp8 = everyone[rank], dtype == "fp8"
        tokens, self.throughput = len(self.mine.x), mode == "throughput"
        if self.throughput:  # twice the rows of an even spread, not all rows of all ranks
            options |= {"layout": layout, "capacity": max(2 * tokens * args.topk, ranks * tokens)}
        self.op = moe.AllToAll(
            args.experts, tokens, args.hidden, args.topk, torch.float8_e4m3fn if fp8 else torch.bfloat16, mode,
            quantize_combine="always" if back == "fp8" else False, **options,
        )  # fmt: skip
        self._x = (self.mine.x_fp8, self.mine.scales) if fp8 and self.throughput else self.mine.x
        received = self.dispatch()
        self.y, self.handle = returned_rows(received), received.handle
        out = self.op.combine(self.y, self.handle)
        self.op.check()
        if not args.no_check:
            check_dispatch(received, everyone, args.experts, rank, mode, layout)
            if back == "bf16":
                rows = row_ops.dequantise(self.mine.x_fp8, self.mine.scales).to(self.y.dtype) if fp8 else self.mine.x
                weighted = layout == "expert" or mode == "latency"
                check_combine(out, self.mine, rows, args.experts, ranks, weighted, rank, self.op.sums_over)
        self.out = torch.empty_like(out)

    def dispatch(self, _: Any = None) -> Any:
        return self.op.dispatch(self._x, self.mine.topk_idx, self.mine.topk_weights)

    def cached(self, _: Any = None) -> Any:
        return self.op.dispatch(self._x, handle=self.handle)

    def combine(self, handle: Any = None) -> Any:
        return self.op.combine(self.y, handle or self.handle, out=self.out)

    def pair(self, _: Any = None) -> Any:
        return self.combine(self.dispatch().handle)

    def handle_of_dispatch(self) -> Any:
        """For the combine of latency mode, which takes the previous dispatch's handle."""
        return self.dispatch().handle

    def close(self) -> None:
        self.op.check()
        tsn.barrier()
        self.op.free()


@functools.cache
def nccl_group() -> Any:
    """A process group over NCCL, made once. Collective."""
    nccl_over_nodes()
    return dist.new_group(backend="nccl")


class Nccl:
    """all_to_all_single of the rows, one per token and rank: no permutation before, no sum after. `everyone`: all
    ranks' inputs; words: 4-byte words of a row with its scales."""

    def __init__(self, everyone: list[Inputs], experts: int, rank: int, words: int, device: Any) -> None:
        ranks, local = len(everyone), experts // len(everyone)
        self._group = nccl_group()
        sends = [int((everyone[rank].topk_idx // local == d).any(1).sum()) for d in range(ranks)]
        receives = [int((e.topk_idx // local == rank).any(1).sum()) for e in everyone]
        self._sends, self._receives = sends, receives
        self._x = torch.zeros((sum(sends), words), dtype=torch.int32, device=device)
        self._y = torch.zeros((sum(receives), words), dtype=torch.int32, device=device)

    def dispatch(self) -> None:
        dist.all_to_all_single(self._y, self._x, self._receives, self._sends, group=self._group)

    def combine(self) -> None:
        dist.all_to_all_single(self._x, self._y, self._sends, self._receives, group=self._group)


class DeepEP:
    """DeepEP in its normal mode with a cached layout, or in its low-latency mode over NVLink. Raises the package's
    exceptions if it cannot run here."""

    def __init__(self, mode: str, mine: Inputs, max_tokens: int, experts: int, fp8: bool) -> None:
        import deep_ep

        group = nccl_group()
        self._mode, self._fp8, self._experts, self._tokens = mode, fp8, experts, max_tokens
        self._idx, self._weights, self._x = mine.topk_idx, mine.topk_weights.float(), mine.x
        hidden = mine.x.shape[1]
        if mode == "latency":
            size = deep_ep.Buffer.get_low_latency_rdma_size_hint(max_tokens, hidden, group.size(), experts)
            self._buffer = deep_ep.Buffer(
                group, 0, size, low_latency_mode=True, num_qps_per_rank=experts // group.size(),
                allow_nvlink_for_low_latency_mode=True,
            )  # fmt: skip
            self._y = None
            self.dispatch()
            shape = (experts // group.size(), max_tokens * group.size(), hidden)
            self._y = torch.zeros(shape, dtype=torch.bfloat16, device=mine.x.device)
            return
        self._buffer = deep_ep.Buffer(group, int(2e9), 0)
        layout = self._buffer.get_dispatch_layout(self._idx, experts)
        ranks, _, per_expert, in_rank = layout[0], layout[1], layout[2], layout[3]
        payload = (mine.x_fp8, mine.scales) if fp8 else mine.x
        received, _, _, _, self._handle, _ = self._buffer.dispatch(
            payload, num_tokens_per_rank=ranks, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
            topk_idx=self._idx, topk_weights=self._weights,
        )  # fmt: skip
        self._payload = payload
        rows = received[0] if isinstance(received, tuple) else received
        self._y = torch.zeros(rows.shape, dtype=torch.bfloat16, device=rows.device)

    def dispatch(self) -> None:
        if self._mode == "latency":
            _, _, self._handle, _, _ = self._buffer.low_latency_dispatch(
                self._x, self._idx, self._tokens, self._experts, use_fp8=self._fp8
            )
        else:
            self._buffer.dispatch(self._payload, handle=self._handle)

    def combine(self) -> None:
        if self._mode == "latency":
            self._buffer.low_latency_combine(self._y, self._idx, self._weights, self._handle)
        else:
            self._buffer.combine(self._y, self._handle)
