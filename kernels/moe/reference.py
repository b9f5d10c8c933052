"""The all-to-all in plain PyTorch, from all ranks' inputs at once: what the kernels must give, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilescale_net.kernels.moe.row_ops import FP8_MAX, GROUP, SMALLEST_AMAX


@dataclass
class Routing:
    """What the routing of all ranks means for one rank.

    Attributes:
        order: for each local expert the (source rank, token, choice) of its rows, in order.
        tokens: for each source rank its tokens that come here, in order.
    """

    order: list[list[tuple[int, int, int]]]
    tokens: list[list[int]]


def route(topk_idx: list[torch.Tensor], experts: int, rank: int, active: list[bool] | None = None) -> Routing:
    """Where the rows of `rank` come from.

    Args:
        topk_idx: of each rank, [tokens, top_k].
        experts: number of experts. active: ranks that take part.
    """
    ranks = len(topk_idx)
    local = experts // ranks
    order: list[list[tuple[int, int, int]]] = [[] for _ in range(local)]
    tokens: list[list[int]] = [[] for _ in range(ranks)]
    for source, choices in enumerate(topk_idx):
        if active is not None and not active[source]:
            continue
        for token, row in enumerate(choices.tolist()):
            for choice, expert in enumerate(row):
                if expert // local == rank and expert >= 0:
                    order[expert % local].append((source, token, choice))
                    if not tokens[source] or tokens[source][-1] != token:
                        tokens[source].append(token)
    return Routing(order, tokens)


def expert_rows(routing: Routing, x: list[torch.Tensor]) -> list[torch.Tensor]:
    """The rows of each local expert; `x` holds the rows of each rank."""
    empty = x[0][:0]
    return [torch.stack([x[s][t] for s, t, _ in rows]) if rows else empty for rows in routing.order]


def combine(
    outputs: list[list[torch.Tensor]], topk_idx: list[torch.Tensor], weights: list[torch.Tensor], experts: int, rank: int,
    dtype: torch.dtype, quantised: bool = False, active: list[bool] | None = None, weighted: bool = True, nodes: int = 1,
) -> torch.Tensor:  # fmt: skip
    """What combine gives on `rank`: sums over an expert's rank first, in float32, then over ranks, see `sum_of_ranks`.

    Args:
        outputs: for each rank, of each local expert, its rows in the order of `route`.
        topk_idx, weights: of each rank. experts: number of experts. dtype: of rows and result.
        quantised: rows travel as FP8. active: ranks that take part. weighted: apply `weights`.
        nodes: where rows cross the network once per node: how many there are.
    """
    ranks = len(topk_idx)
    shape = len(topk_idx[rank]), outputs[0][0].shape[-1]
    parts = [torch.zeros(shape, dtype=torch.float32) for _ in range(ranks)]
    for host in range(ranks):
        if active is not None and not active[host]:
            continue
        partial: dict[int, dict[int, torch.Tensor]] = {}
        for expert, rows in enumerate(route(topk_idx, experts, host, active).order):
            for index, (source, token, choice) in enumerate(rows):
                if source == rank:
                    weight = weights[rank][token, choice] if weighted else 1.0
                    partial.setdefault(token, {})[choice] = weight * outputs[host][expert][index].float()
        for token, terms in partial.items():
            total = torch.zeros(shape[1:], dtype=torch.float32)
            for choice in sorted(terms):
                total = total + terms[choice]
            parts[host][token] = total
    return sum_of_ranks(parts, rank, dtype, quantised, nodes)


def sum_of_ranks(
    parts: list[torch.Tensor], rank: int, dtype: torch.dtype, quantised: bool = False, nodes: int = 1
) -> torch.Tensor:
    """What combine makes on `rank` of what each rank has for its tokens.

    Args:
        parts: of each rank, [tokens, hidden] float32. nodes: where they are summed in other nodes first, else 1.
    """

    def travelled(rows: torch.Tensor) -> torch.Tensor:
        return dequantise(*quantise(rows)) if quantised else rows.to(dtype).float()

    size = len(parts) // nodes
    result = torch.zeros_like(parts[0])
    for node in range(nodes):
        members = parts[node * size : (node + 1) * size]
        if node == rank // size:
            for part in members:
                result += travelled(part)
        else:
            total = torch.zeros_like(result)
            for part in members:
                total += part.to(dtype).float()
            result += travelled(total)
    return result.to(dtype)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as float8_e4m3fn with a float32 scale per 128 elements: x is about q * scale."""
    rows, hidden = x.shape
    groups = -(-hidden // GROUP)
    padded = torch.nn.functional.pad(x.float(), (0, groups * GROUP - hidden)).view(rows, groups, GROUP)
    amax = padded.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_AMAX)
    # On a GPU torch makes a multiplication by the reciprocal, rounded twice, of a division with a Python number in it.
    largest = torch.full_like(amax, FP8_MAX)
    q = (padded * (largest / amax)).to(torch.float8_e4m3fn).view(rows, groups * GROUP)[:, :hidden]
    return q.contiguous(), (amax / largest).squeeze(-1)


def dequantise(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Back to float32."""
    wide = scales.repeat_interleave(GROUP, -1)[:, : q.shape[-1]]
    return q.float() * wide
