"""The all-to-all in plain PyTorch, from all ranks' inputs at once: the kernels' results must have the same bits."""

from dataclasses import dataclass

import torch

from tilescale_net.kernels.moe.row_ops import dequantise, quantise, sum_of_ranks

__all__ = ["Routing", "combine", "dequantise", "expert_rows", "quantise", "route", "sum_of_ranks"]


@dataclass
class Routing:
    """The routing of all ranks, from the view of one rank.

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
    dtype: torch.dtype, quantised: bool = False, active: list[bool] | None = None, weighted: bool = True, nodes: int | tuple[int, ...] = 1,
) -> torch.Tensor:  # fmt: skip
    """The result of combine on `rank`: sums on an expert's rank first, in float32, then over ranks, see `sum_of_ranks`.

    Args:
        outputs: for each rank, of each local expert, its rows in the order of `route`.
        topk_idx, weights: of each rank. experts: number of experts. dtype: of rows and result.
        quantised: rows travel as FP8. active: ranks that take part. weighted: apply `weights`.
        nodes: where rows cross the network once per node: how many there are, or the ranks of each.
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
