"""Mixture of experts: data that every rank can make for every rank, their check, and what our kernels are compared with."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmark.common.report import WrongData
from tilescale_net.kernels.moe.row_ops import dequantise, groups_of, quantise, sum_of_ranks

FP8 = torch.float8_e4m3fn


@dataclass
class Inputs:
    """One rank's inputs: rows (bfloat16), their FP8 form with scales (or None), choices and weights."""

    x: torch.Tensor
    x_fp8: torch.Tensor | None
    scales: torch.Tensor | None
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


def make(rank: int, tokens: int, hidden: int, experts: int, top_k: int, fp8: bool, seed: int, device: Any) -> Inputs:
    """Random rows and distinct random choices; weights are multiples of 1/16, so that sums are exact in float32."""
    g = torch.Generator(device=device).manual_seed(seed * 1009 + rank)
    x = torch.randn((tokens, hidden), generator=g, device=device).to(torch.bfloat16)
    idx = torch.rand((tokens, experts), generator=g, device=device).topk(top_k, 1)[1]
    weights = torch.randint(1, 17, (tokens, top_k), generator=g, device=device) / 16
    q, scales = quantise(x) if fp8 else (None, None)
    return Inputs(x, q, scales, idx, weights)


@dataclass
class Traffic:
    """Rows (one per token and rank) that a rank receives in dispatch and sends in combine.

    Attributes:
        rows: all; remote: from other ranks; proxied: from other nodes.
    """

    rows: int
    remote: int
    proxied: int


def traffic(indices: list[torch.Tensor], experts: int, rank: int, proxied: list[bool]) -> Traffic:
    """Count them from all ranks' choices. `proxied`: which ranks are on other nodes."""
    local = experts // len(indices)
    here = [int((idx // local == rank).any(1).sum()) for idx in indices]
    return Traffic(sum(here), sum(here) - here[rank], sum(n for n, other in zip(here, proxied) if other))


def row_bytes(hidden: int, fp8: bool) -> int:
    """Bytes of a row with its scales."""
    return hidden + 4 * groups_of(hidden) if fp8 else 2 * hidden


def check_dispatch(received: Any, everyone: list[Inputs], experts: int, rank: int, mode: str, layout: str) -> None:
    """Raise WrongData unless `received` (tilescale_net.kernels.moe.Dispatched) holds exactly the rows of `everyone`."""
    ranks, local = len(everyone), experts // len(everyone)
    fp8 = received.x.dtype == FP8
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
    """What experts send back that return what they get: `received.x`, in bfloat16."""
    flat = received.x.reshape(-1, received.x.shape[-1])
    rows = torch.zeros(received.x.shape, dtype=torch.bfloat16, device=received.x.device)
    for begin in range(0, len(flat), 4096):
        part = slice(begin, begin + 4096)
        found = flat[part]
        if received.scales is not None:
            found = dequantise(found, received.scales.reshape(-1, received.scales.shape[-1])[part])
        rows.view(-1, rows.shape[-1])[part] = found.to(rows.dtype)
    return rows


def check_combine(
    out: torch.Tensor, mine: Inputs, rows: torch.Tensor, experts: int, ranks: int, weighted: bool, rank: int, nodes: int
) -> None:
    """Raise WrongData unless `out` is what combine makes of experts that return what they get.

    Args:
        rows: of this rank, [tokens, hidden], as the experts returned them (bfloat16).
        nodes: `AllToAll.sums_over`.
    """
    local, parts = experts // ranks, []
    for host in range(ranks):
        here = (mine.topk_idx // local == host) & (mine.topk_idx >= 0)
        factor = (mine.topk_weights * here).sum(1) if weighted else here.any(1).float()
        parts.append(factor[:, None] * rows.float())
    if not torch.equal(out, sum_of_ranks(parts, rank, torch.bfloat16, nodes=nodes)):
        raise WrongData("combine: sums differ")


_groups: dict[str, Any] = {}


def nccl_group() -> Any:
    """A process group over NCCL, made once. Collective."""
    if "nccl" not in _groups:
        _groups["nccl"] = dist.new_group(backend="nccl")
    return _groups["nccl"]


class Nccl:
    """all_to_all_single of the rows, one per token and rank: no permutation before, no sum after.

    Args:
        everyone: all ranks' inputs; words: 4-byte words of a row with its scales.
    """

    name = "NCCL"

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
    """DeepEP in its normal mode with a cached layout, or in its low-latency mode over NVLink.

    Raises the package's exceptions when it cannot run here.
    """

    name = "DeepEP"

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
