"""DeepEP's high-throughput mode: layouts, dispatch and combine of any number of tokens."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from tilescale_net import ops
from tilescale_net.deep_ep.objects import Objects, check_dimensions
from tilescale_net.errors import HeapError
from tilescale_net.kernels.collective import is_integer
from tilescale_net.kernels.moe import AllToAll, Dispatched, Handle, metadata
from tilescale_net.kernels.moe.handle import Rows
from tilescale_net.kernels.moe.layout import PlanOffsets
from tilescale_net.runtime.world import World

# Biases of combine: one or two tensors; of two, one may be missing.
Bias: TypeAlias = torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None


@dataclass(frozen=True)
class Routing:
    """The routing behind the handle of a dispatch.

    Attributes:
        world: of the buffer. op: the object that made it. handle: its handle. top_k: of the caller; the object's may be more.
        worst: fixed number of rows of results (num_worst_tokens), or 0.
    """

    world: World
    op: AllToAll
    handle: Handle
    top_k: int
    worst: int

    @property
    def rows(self) -> int:
        """Rows of results; the first time it waits for the GPU, unless they are fixed."""
        return self.worst or self.handle.rows("rank")


def routing_of(objects: Objects, handle: object) -> Routing:
    """The routing of a handle. Raises TypeError unless it is one, ValueError for one of another group."""
    routing = handle[-1] if isinstance(handle, tuple) and handle else None
    if not isinstance(routing, Routing):
        raise TypeError(f"handle is {_shown(handle)}; give the result of dispatch")
    objects.check_world(routing.world)
    return routing


def _shown(x: object) -> str:
    return f"a {type(x).__name__} of {len(x)}" if isinstance(x, tuple) else f"a {type(x).__name__}"


def check_rows(x: Rows) -> None:
    """Raise TypeError or ValueError for rows that `parts` does not accept."""
    rows, scales = x if isinstance(x, tuple) and len(x) == 2 else (x, None)
    check_dimensions("x", rows, 2)
    if scales is not None:
        check_dimensions("scales of x", scales, 1, 2)


def check_routing(in_rank: object, per_expert: object, topk_idx: Any, topk_weights: Any, alignment: object) -> None:
    """Raise TypeError or ValueError for arguments of a new routing that kernels do not check."""
    if in_rank is None or per_expert is None:
        raise ValueError("give is_token_in_rank and num_tokens_per_expert, or a handle")
    check_dimensions("is_token_in_rank", in_rank, 2)
    check_dimensions("num_tokens_per_expert", per_expert, 1)
    for name, x in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        if x is not None:
            check_dimensions(name, x, 2)
    if topk_weights is not None and (topk_idx is None or topk_idx.shape[1] != topk_weights.shape[1]):
        described = "missing" if topk_idx is None else f"of shape {list(topk_idx.shape)}"
        raise ValueError(f"topk_weights has shape {list(topk_weights.shape)}, but topk_idx is {described}")
    if not is_integer(alignment):
        raise ValueError(f"expert_alignment is {alignment!r}; it must be a positive integer")


def check_combined(routing: Routing, x: object, topk_weights: Any) -> None:
    """As `check_routing`, for a combine."""
    check_dimensions("x", x, 2)
    if topk_weights is None:
        return
    check_dimensions("topk_weights", topk_weights, 2)
    if topk_weights.shape[1] != routing.top_k:
        text = (
            f"topk_weights has shape {list(topk_weights.shape)}; tokens of this dispatch have {routing.top_k} choices"
        )
        raise ValueError(text)


def layout(topk_idx: torch.Tensor, num_experts: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens per rank [ranks] and per expert [num_experts] (int32), and whether each goes to each rank [tokens, ranks].

    Ids beyond the experts count for nothing here, as -1 does; the dispatch rejects them by name, on all ranks.
    """
    check_dimensions("topk_idx", topk_idx, 2)
    if not isinstance(num_experts, int) or num_experts < 1 or num_experts % ranks:
        raise ValueError(f"num_experts is {num_experts!r}; it must be a positive multiple of {ranks} ranks")
    device, chosen = topk_idx.device, topk_idx.long()
    none = (chosen < 0) | (chosen >= num_experts)
    host = torch.where(none, ranks, chosen // (num_experts // ranks))
    in_rank = torch.zeros((len(chosen), ranks + 1), dtype=torch.bool, device=device).scatter_(1, host, True)[:, :ranks]
    expert = torch.where(none, num_experts, chosen).flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    counts.scatter_add_(0, expert, torch.ones_like(expert, dtype=torch.int32))
    return in_rank.sum(0, dtype=torch.int32), counts[:num_experts].clone(), in_rank.contiguous()


def _widened(tensor: torch.Tensor, width: int, fill: float) -> torch.Tensor:
    """Columns up to `width`, missing ones of `fill`."""
    missing = width - tensor.shape[1]
    return torch.nn.functional.pad(tensor, (0, missing), value=fill) if missing else tensor.contiguous()


def parts(x: Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows and scales, [tokens, words of scales] or None, as kernels take them."""
    rows, scales = x if isinstance(x, tuple) else (x, None)
    if scales is not None:
        scales = scales[:, None] if scales.dim() == 1 else scales
    return rows.contiguous(), None if scales is None else scales.contiguous()


def _object(
    objects: Objects, experts: int, max_tokens: int, rows: torch.Tensor, scales: torch.Tensor | None, top_k: int, num_sms: int
) -> AllToAll:  # fmt: skip
    words = None if scales is None else scales.shape[-1]
    return objects.high_throughput(experts, max_tokens, rows.shape[1], top_k, rows.dtype, num_sms, words)


def joined(rows: torch.Tensor, scales: torch.Tensor | None) -> Rows:
    return rows if scales is None else (rows, scales)


def fresh(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The first rows as a new tensor, padded with undefined rows if there are fewer."""
    if rows <= len(tensor):
        return tensor[:rows].clone()
    out = tensor.new_empty((rows, *tensor.shape[1:]))
    out[: len(tensor)].copy_(tensor)
    return out


def _results(x: Rows, received: Dispatched, rows: int) -> Rows:
    """Rows, and scales in the dimensions of x's."""
    if received.scales is None:
        return fresh(received.x, rows)
    scales = fresh(received.scales, rows)
    return fresh(received.x, rows), scales[:, 0] if x[1].dim() == 1 else scales


def dispatch_again(objects: Objects, x: Rows, routing: Routing, num_sms: int) -> Rows:
    """Other rows with a known routing."""
    objects.order.follow()
    rows, scales = parts(x)
    c = routing.op.config
    objects.calls.note("dispatch with a handle: hidden {}, {}", rows.shape[1], rows.dtype)
    op = _object(objects, c.num_experts, c.max_tokens, rows, scales, c.top_k, num_sms)
    received = op.dispatch(joined(rows, scales), handle=routing.handle, blocks=objects.blocks(op, num_sms))
    return _results(x, received, routing.rows)


def dispatch(
    objects: Objects, x: Rows, topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None, in_rank: torch.Tensor,
    per_expert: torch.Tensor, alignment: int, worst: int, num_sms: int,
) -> tuple:  # fmt: skip
    """Rows with a new routing: (rows, topk_idx, topk_weights, rows per expert, rank prefix matrix, Routing)."""
    objects.order.follow()
    rows, scales = parts(x)
    ranks, experts, tokens = objects.world.size, len(per_expert), len(rows)
    objects.calls.note("dispatch: {} experts, hidden {}, {}", experts, rows.shape[1], rows.dtype)
    top_k = 0 if topk_idx is None else topk_idx.shape[1]
    # Calls without choices use the object of those with.
    objects.top_k = max(top_k, ranks, objects.top_k)
    width = max(top_k, min(objects.top_k, experts))
    choice: dict[str, Any]
    if topk_idx is not None:
        choices = _widened(topk_idx, width, -1)
        weights = None if topk_weights is None else _widened(topk_weights, width, 0.0)
        choice = dict(topk_idx=choices, topk_weights=weights)
    else:
        choice = dict(mask=in_rank.contiguous())
    if not worst and not objects.max_tokens:
        objects.grow(tokens)
    while True:
        room = -(-worst // ranks) or objects.max_tokens
        op = _object(objects, experts, room, rows, scales, width, num_sms)
        try:
            received = op.dispatch(joined(rows, scales), **choice, blocks=objects.blocks(op, num_sms))
            if not worst:
                op.check()
            break
        except (ValueError, TypeError, HeapError):
            # All ranks are here: check raises one rank's error on all.
            if worst or not objects.grow(tokens):
                raise
    routing = Routing(objects.world, op, received.handle, top_k, worst)
    counts = [] if worst else _counts(objects, received, per_expert, topk_idx is not None, alignment)
    recv_idx = recv_weights = None
    if topk_idx is not None:
        meta: Any = metadata(received.handle)
        recv_idx = _padded(meta.topk_idx[:, :top_k], routing.rows, -1)
        recv_weights = _padded(meta.topk_weights[:, :top_k], routing.rows, 0.0)
        recv_weights = None if topk_weights is None else recv_weights
    return _results(x, received, routing.rows), recv_idx, recv_weights, counts, _prefix(objects.world, routing), routing


def _padded(tensor: torch.Tensor, rows: int, fill: float) -> torch.Tensor:
    missing = rows - len(tensor)
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing), value=fill) if missing > 0 else tensor[:rows].clone()


def _counts(
    objects: Objects, received: Dispatched, per_expert: torch.Tensor, by_choice: bool, alignment: int
) -> list[int]:
    """Rows per local expert, up to the next multiple of the alignment. A mask has no experts: ranks add up."""
    world, control = objects.world, objects.world.control
    if by_choice:
        counts = received.counts.tolist()
    elif len(control.members) == world.size:
        counts = ops.reduce_scatter(per_expert.to(torch.int32), world).tolist()
    else:  # collectives work with all ranks only
        local = len(per_expert) // world.size
        here = per_expert.view(world.size, local).tolist()
        gathered = control.gather("deep_ep.Buffer.dispatch: rows per expert", here)
        counts = [sum(of_expert) for of_expert in zip(*(of_rank[world.rank] for of_rank in gathered))]
    return [-(-n // alignment) * alignment for n in counts]


def _prefix(world: World, routing: Routing) -> torch.Tensor:
    """[ranks, ranks]: in this rank's column, rows from all ranks up to each; -1 in the others, unknown here."""
    c = routing.op.config
    at = PlanOffsets(c.ranks, c.local_experts).received_base + 1
    matrix = torch.full((c.ranks, c.ranks), -1, dtype=torch.int32, device=world.device)
    matrix[:, world.rank] = routing.handle.plan.totals[at : at + c.ranks]
    return matrix


def biases_of(bias: Bias) -> tuple[torch.Tensor, ...]:
    """None, a tensor, or a tuple of two of which one may be None, as for combine."""
    biases = (bias,) if bias is None or isinstance(bias, torch.Tensor) else bias
    return tuple(b.contiguous() for b in biases if b is not None)


def combine(
    objects: Objects, x: torch.Tensor, routing: Routing, topk_weights: torch.Tensor | None, bias: Bias, num_sms: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(sums over ranks [tokens, hidden], sums of weights [tokens, top_k] or None)."""
    objects.order.follow()
    op, handle = routing.op, routing.handle
    objects.check_alive(op)
    objects.calls.note("combine{}: hidden {}", "" if topk_weights is None else " with weights", x.shape[-1])
    how: dict[str, Any] = dict(bias=biases_of(bias), blocks=objects.blocks(op, num_sms))
    if topk_weights is None:
        return op.combine(x.contiguous(), handle, weighted=False, **how), None
    values = _widened(topk_weights, op.config.top_k, 0.0)
    out, weights = op.combine_values(x.contiguous(), values, handle, **how)
    return out, weights[:, : topk_weights.shape[1]].contiguous()
