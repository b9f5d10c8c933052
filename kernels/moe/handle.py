"""The handle of a dispatch, the reuse of its tensors, and the metadata of received rows."""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import torch

from tilescale_net.kernels.moe.layout import PlanOffsets
from tilescale_net.kernels.moe.tiles import Tiles
from tilescale_net.runtime.launch_args import constant, empty_factory, native_available

# Rows, or FP8 rows with their scales.
Rows: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def former_name(owner: str, old: str, new: str) -> property:
    """A deprecated alias of an attribute."""

    def get(self: Any) -> Any:
        warnings.warn(f"{owner}.{old} is called {new} now", DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return property(get, doc=f"Former name of `{new}`.")


class _Filled:
    """Base of plans that a dispatch fills. Only `in_flight` changes; it is no field, so a copy is not in flight."""

    in_flight = False

    def set_in_flight(self, in_flight: bool) -> None:
        """Record that the dispatch that fills it has been sent, or received."""
        object.__setattr__(self, "in_flight", in_flight)


@dataclass(frozen=True)
class RoutingPlan(_Filled):
    """Source and target of every row, in throughput mode; ordinary device memory, as long as it is referenced.

    The fields have the names of the kernels' parameters.

    Attributes:
        in_flight: whether the dispatch that fills it has been sent and not yet received.
        tokens: tokens of this rank.
        node_plan: if rows cross the network once per node: see `layout.NodePlanOffsets`; otherwise empty.
        send_token: [ranks, max_tokens] token of each row sent to a rank. int32, as all others but `row_weight`.
        send_row: [ranks, max_tokens] its first row in the expert-major order at that rank.
        token_slot: [tokens or more, ranks] its index among the rows to that rank, or -1.
        records: [ranks, max_tokens, …] of each row received from a rank: its expert-major rows, their weights, and its
            token there.
        totals: see `layout.PlanOffsets`.
        row_index: [index capacity] of each expert-major row: its row in rank-major order.
        row_weight: [index capacity] its weight (float32).
    """

    tokens: int
    node_plan: torch.Tensor
    send_token: torch.Tensor
    send_row: torch.Tensor
    token_slot: torch.Tensor
    records: torch.Tensor
    totals: torch.Tensor
    row_index: torch.Tensor
    row_weight: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """All fields but `tokens`, in order; written out, as Dynamo of torch 2.11 cannot trace `vars` of a dataclass."""
        rows = [self.send_token, self.send_row, self.token_slot, self.records]
        return [self.node_plan, *rows, self.totals, self.row_index, self.row_weight]

    @property
    def arguments(self) -> tuple:
        """The same fields as launch arguments."""
        return tuple(self.tensors())

    def counts(self, ranks: int, local_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """int32 [local_experts] rows per expert, [local_experts + 1] their offsets, and [] the rank-major rows; views."""
        at, t = PlanOffsets(ranks, local_experts), self.totals
        end = at.received_base + ranks
        return t[at.counts : at.counts + local_experts], t[at.offsets : at.offsets + local_experts + 1], t[end]

    def rejected(self, ranks: int, local_experts: int) -> torch.Tensor:
        """int32 [], not 0 if the dispatch was rejected; a view."""
        return self.totals[PlanOffsets(ranks, local_experts).rejected]


@dataclass(frozen=True)
class ReceivedRows(_Filled):
    """Source of every received row, in latency mode; ordinary device memory.

    Attributes:
        in_flight: as in `RoutingPlan`.
        tokens: tokens of this rank.
        token_slot: [tokens or more, ranks] index of a token among the rows to a rank, or -1 (int32).
        targets, weights: [ranks * max_tokens, top_k] of each row received: its rows in `x`, or -1, and their weights.
        counts: [ranks] rows received from each rank (int32).
        source_counts: [local experts, ranks] rows of each expert from each rank (int32).
        source_token: [local experts, ranks * max_tokens] of each row of `x` its token at the source rank (int32).
        origin_slot, node_plan: if rows cross the network once per node: [tokens or more, origins] index of a token
            among the rows that return from an origin (see `layout.py`), or -1, and `layout.LatencyNodePlanOffsets`;
            else empty.
    """

    tokens: int
    token_slot: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    source_counts: torch.Tensor
    source_token: torch.Tensor
    origin_slot: torch.Tensor
    node_plan: torch.Tensor

    @property
    def arguments(self) -> tuple:
        """All fields but `tokens`, in order, as launches take them."""
        received = self.token_slot, self.targets, self.weights, self.counts, self.source_counts, self.source_token
        return *received, self.origin_slot, self.node_plan

    @staticmethod
    def shapes(
        ranks: int, max_tokens: int, local_experts: int, top_k: int
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each field but `tokens`, if rows do not cross the network once per node."""
        rows, ints = ranks * max_tokens, torch.int32
        return {
            "token_slot": ((max_tokens, ranks), ints),
            "targets": ((rows, top_k), ints),
            "weights": ((rows, top_k), torch.float32),
            "counts": ((ranks,), ints),
            "source_counts": ((local_experts, ranks), ints),
            "source_token": ((local_experts, rows), ints),
            "origin_slot": ((1, 1), ints),
            "node_plan": ((1,), ints),
        }

    @classmethod
    def empty(cls, tokens: int, *sizes: int, device: torch.device) -> ReceivedRows:
        """A dispatch of `tokens` tokens without received rows; `sizes` as for `shapes`."""
        shapes = cls.shapes(*sizes)
        return cls(tokens, **{name: torch.zeros(shape, dtype=t, device=device) for name, (shape, t) in shapes.items()})


@dataclass
class Handle:
    """The handle of one dispatch, for any number of its combines, or for dispatches with the same choices.

    Attributes:
        signature: sizes that a call with this handle must share; see `Config.signature`.
        plan: RoutingPlan or ReceivedRows, of the mode.
        membership: the ranks of the dispatch; see `Participant`.
        dropped: see `Dispatched`.
        max_tokens: the argument of the dispatch; equal on all ranks.
    """

    signature: tuple
    plan: Any
    membership: tuple
    dropped: torch.Tensor | None = None
    max_tokens: int | None = field(default=None, init=False, repr=False, compare=False)
    _rows: list[int] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def tokens(self) -> int:
        """Tokens of this rank."""
        return self.plan.tokens

    def rows(self, layout: str) -> int:
        """Number of rows that this rank has received, throughput mode; the first call waits for the GPU.

        Args:
            layout: "rank", or "expert": up to the end of the last expert, gaps of the alignment included.
        """
        if self._rows is None:
            ranks, experts = self.signature[:2]
            _, offsets, rows = self.plan.counts(ranks, experts // ranks)
            self._rows = torch.stack([rows, offsets[-1]]).tolist()
        return self._rows[layout != "rank"]


@dataclass(slots=True)
class Choices:
    """The choices of a dispatch's tokens. `topk_idx`: [tokens, top_k] experts, int64 or int32. topk_weights:
    [tokens, top_k] float32. `cleared`: whether to zero places of the plan without a row. `dropped`: bool
    [tokens, top_k], the choices dropped for an `expert_capacity`, now -1; None without it."""

    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    cleared: bool = False
    dropped: torch.Tensor | None = None


@dataclass
class Pending:
    """A dispatch or combine between its send and receive phases.

    Attributes:
        kind: "dispatch" or "combine".
        handle: of the dispatch.
        result: result of the receive phase.
        rest: the mode's data for the receive phase.
        tiles: of its rows, which the phase completes or waits for, see `AllToAll.alongside`.
        sums: launches the sums, for a combine with tiles.
    """

    kind: str
    handle: Handle
    result: Any
    rest: Any = None
    tiles: Tiles | None = None
    sums: Callable[[], None] | None = None


@dataclass
class Dispatched:
    """The result of a dispatch. Counts stay on the device; nothing here waits for the GPU.

    Attributes:
        x: the rows.
            Throughput, layout "expert": [capacity, hidden]; expert e has rows offsets[e] … offsets[e] + counts[e] - 1,
            ordered by source rank and token; rows between the experts are not written. Throughput, layout "rank": [ranks *
            max_tokens or capacity, the smaller, hidden]; one row per token with an expert on this rank, ordered by source
            rank and token. Latency: [local experts, ranks * max_tokens, hidden]; expert e has rows 0 … counts[e] - 1.
        scales: [rows, scale_words] for FP8 rows, of the dtype of the passed scales (float32), with the leading dimensions
            of `x`; else None.
        counts: [local experts] rows of each expert (int32).
        offsets: [local experts + 1] first row of each expert, a multiple of `alignment`, and the end (int32); None in
            latency mode.
        row_index: layout "rank": of each expert-major row its row in `x` (int32); else None.
        row_weight: weight of each expert-major row (float32); None in latency mode.
        num_rows: layout "rank": rows in `x`, a scalar (int32); else None.
        handle: for combine, or for dispatch with the same choices.
        rejected: throughput mode: a scalar (int32), not 0 if the dispatch was rejected and has no rows, for example because
            the capacity is too small: for later kernels of a CUDA graph; None in latency mode.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    offsets: torch.Tensor | None
    row_index: torch.Tensor | None
    row_weight: torch.Tensor | None
    num_rows: torch.Tensor | None
    handle: Handle = field(repr=False)
    rejected: torch.Tensor | None = None

    @property
    def dropped(self) -> torch.Tensor | None:
        """The dropped choices of this rank's tokens: bool [tokens, top_k]; None without an `expert_capacity`."""
        return self.handle.dropped

    refused = former_name("Dispatched", "refused", "rejected")


class DispatchedByPlan(Dispatched):
    """Result of a dispatch whose numbers are parts of the plan, looked up on access. `by_rank`: the layout is
    "rank"."""

    def __init__(self, x: torch.Tensor, scales: torch.Tensor | None, handle: Handle, by_rank: bool):
        self.x, self.scales, self.handle, self._by_rank = x, scales, handle, by_rank

    @functools.cached_property
    def _numbers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ranks, experts = self.handle.signature[:2]
        return self.handle.plan.counts(ranks, experts // ranks)

    counts = property(lambda self: self._numbers[0])
    offsets = property(lambda self: self._numbers[1])
    num_rows = property(lambda self: self._numbers[2] if self._by_rank else None)
    row_index = property(lambda self: self.handle.plan.row_index if self._by_rank else None)
    row_weight = property(lambda self: self.handle.plan.row_weight)

    @functools.cached_property
    def rejected(self) -> torch.Tensor:  # type: ignore[override]
        ranks, experts = self.handle.signature[:2]
        return self.handle.plan.rejected(ranks, experts // ranks)


# Vectors made at a time.
POOL_SIZE = 64


class LikeFactory:
    """Makes tensors [rows, *tail]. `by_column`: the last two axes are transposed in memory."""

    def __init__(self, tail: tuple[int, ...], dtype: torch.dtype, device: torch.device, by_column: bool = False):
        self._tail, self._by_column = tail, by_column
        with torch.inference_mode(False):
            self._one = torch.empty(1, dtype=dtype, device=device)
        self._makers: dict[int, Callable[[], torch.Tensor]] = {}

    def __call__(self, rows: int) -> torch.Tensor:
        return (self._makers.get(rows) or self.of(rows))()

    def of(self, rows: int) -> Callable[[], torch.Tensor]:
        """The function that makes tensors of this many rows."""
        with torch.inference_mode(False):
            sample = self._one.expand(rows, *self._tail)  # takes no memory
            maker = self._makers[rows] = empty_factory(sample, self._by_column)
        return maker


class TensorPool:
    """Allocates short int32 vectors, many at a time: parts of one tensor, each returned once."""

    def __init__(self, length: int, device: torch.device):
        self._length, self._device = length, device
        self._left: dict[Hashable, list[torch.Tensor]] = {}

    def next(self, stream: Hashable) -> torch.Tensor:
        """A vector for work of a stream; None: the stream is captured into a CUDA graph."""
        if stream is None or self._length % 4:  # others would not begin at a multiple of 16 bytes
            return torch.empty(self._length, dtype=torch.int32, device=self._device)
        left = self._left.get(stream)
        if not left:
            left = self._left[stream] = []
            with torch.inference_mode(False):
                left.extend(torch.empty((POOL_SIZE, self._length), dtype=torch.int32, device=self._device).unbind(0))
        return left.pop()


# Cached plans of a stream; further live plans are new ones.
CACHED_PLANS = 4


class _Tensors:
    """The tensors of a plan, by the names of its fields; `arguments`: the same as launch arguments. `shapes`: field
    -> shape and dtype."""

    __slots__ = ("_device", "_shapes", "taken", "_tensors", "arguments", "user")

    user: weakref.ref  # to the plan that has them

    def __init__(self, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device):
        self._shapes, self._device = shapes, device
        self._tensors: dict[str, torch.Tensor] = {}
        self.taken = list(shapes)
        self.renew()

    def take(self, name: str) -> torch.Tensor:
        """A tensor that the caller may keep."""
        self.taken.append(name)
        return self._tensors[name]

    def renew(self) -> None:
        """Replace the tensors that were taken."""
        with torch.inference_mode(False):
            for name in set(self.taken):
                shape, dtype = self._shapes[name]
                self._tensors[name] = torch.empty(shape, dtype=dtype, device=self._device)
        self.taken.clear()
        tensors = tuple([self._tensors[name] for name in self._shapes])
        self.arguments = tensors if native_available() else tuple(map(constant, tensors))


class _CachedPlan:
    """Mixin of a cached plan: a field's tensor is made on first access, and belongs to the caller from then on."""

    _of: _Tensors
    tokens: int
    arguments: tuple = ()  # no property, unlike the plan's class

    def __init__(self, tokens: int, tensors: _Tensors):
        own = self.__dict__
        own["tokens"], own["_of"], own["arguments"] = tokens, tensors, tensors.arguments

    def __copy__(self) -> _CachedPlan:
        return self  # its fields do not change, and a reference keeps the tensors from reuse

    def __deepcopy__(self, memo: dict) -> RoutingPlan | ReceivedRows:
        return self._apart(clone=True)

    def __reduce__(self) -> tuple:
        return copy.copy, (self._apart(clone=False),)

    def _apart(self, clone: bool) -> RoutingPlan | ReceivedRows:
        """A plan of the same kind, whose tensors belong to no AllToAll."""
        kind: Any = next(k for k in (RoutingPlan, ReceivedRows) if isinstance(self, k))
        tensors = {name: getattr(self, name) for name in self._of._shapes}
        return kind(self.tokens, **{name: t.clone() if clone else t for name, t in tensors.items()})


class _Taken:
    """A field of a cached plan: a descriptor, which the tensor replaces on first access."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, plan: _CachedPlan | None, kind: type) -> Any:
        if plan is None:
            return self
        return plan.__dict__.setdefault(self._name, plan._of.take(self._name))


def _cached(kind: type) -> type:
    """The class of cached plans of RoutingPlan or ReceivedRows."""
    return type(
        f"_Cached{kind.__name__}", (_CachedPlan, kind), {f.name: _Taken() for f in fields(kind) if f.name != "tokens"}
    )


_CACHED: dict[type, Any] = {kind: _cached(kind) for kind in (RoutingPlan, ReceivedRows)}


class Plans:
    """The plans of one AllToAll. Callers may hold them for any time, and their tensors longer.

    A plan is reused on the stream on which it was created, as torch reuses memory; none is reused in a CUDA graph that is
    being captured.

    Args:
        kind: RoutingPlan or ReceivedRows. shapes: shapes and dtypes of its fields but `tokens`.
        stream: returns a key of the current stream, or None if no plan may be reused.

    Attributes:
        stream: key of the stream of the last plan.
    """

    def __init__(
        self, kind: type, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device,
        stream: Callable[[], Hashable],
    ):  # fmt: skip
        assert [f.name for f in fields(kind)] == ["tokens", *shapes]
        self._make = _CACHED[kind]
        self._shapes, self._device, self._stream_now = shapes, device, stream
        self.stream: Hashable = None
        self._cached: dict[Hashable, list[_Tensors]] = {}

    def next(self, tokens: int) -> Any:
        """A free plan for this many tokens."""
        stream = self.stream = self._stream_now()
        if stream is None:
            return self._make(tokens, _Tensors(self._shapes, self._device))
        cached = self._cached.get(stream)
        if cached is None:
            cached = self._cached[stream] = []
        for tensors in cached:
            if tensors.user() is None:
                if tensors.taken:
                    tensors.renew()
                break
        else:
            tensors = _Tensors(self._shapes, self._device)
            cached.append(tensors)
            del cached[:-CACHED_PLANS]
        plan = self._make(tokens, tensors)
        tensors.user = weakref.ref(plan)
        return plan


@dataclass(frozen=True)
class Metadata:
    """Metadata of received rows; entries without a row are -1, or 0 for weights. Nothing waits for the GPU.

    Throughput mode: of the rows of layout "rank", in objects of any layout; `rows` is ranks * max_tokens.

    Attributes:
        source_counts: [local experts, ranks] rows of each expert from each rank (int32).
        source_token: [rows], or in latency mode [local experts, ranks * max_tokens]: token at the source (int32).
        source_rank: in the same shape: source rank (int32).
        topk_idx: [rows, top_k] local expert of each choice, -1 for one of another rank (int64); None in latency mode.
        topk_weights: [rows, top_k] float32, 0 where `topk_idx` is -1; None in latency mode.
        expert_rows: [rows, top_k] expert-major row of each choice, -1 for one of another rank (int32); None in latency mode.
    """

    source_counts: torch.Tensor
    source_token: torch.Tensor
    source_rank: torch.Tensor
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    expert_rows: torch.Tensor | None = None


def metadata(handle: Handle) -> Metadata:
    """The metadata of a dispatch's rows, from its handle; some small kernels on the current stream.

    Args:
        handle: `Dispatched.handle`.
    """
    ranks, experts, max_tokens, top_k = handle.signature[:4]
    if isinstance(handle.plan, ReceivedRows):
        return _of_experts(handle.plan)
    plan, at = handle.plan, PlanOffsets(ranks, experts // ranks)
    device, totals = plan.totals.device, plan.totals
    bases = totals[at.received_base : at.received_base + ranks + 1]
    # Row i is number i - bases[r] from rank r, the last rank whose rows begin at or before i.
    index = torch.arange(ranks * max_tokens, dtype=torch.int32, device=device)
    source = torch.searchsorted(bases[1:].contiguous(), index, right=True).clamp(max=ranks - 1)
    exists = index < bases[-1]
    index_in_source = torch.where(exists, index - bases[source], 0)
    records = plan.records[source, index_in_source.long()]
    landing, offsets = records[:, :top_k], totals[at.offsets + 1 : at.offsets + 1 + experts // ranks]
    here = exists[:, None] & (landing >= 0)
    # An expert without rows begins where the next one does.
    expert = torch.searchsorted(offsets.contiguous(), landing.contiguous(), right=True)
    weights = records[:, top_k : 2 * top_k].contiguous().view(torch.float32)
    return Metadata(
        totals[at.by_source : at.sent_before].view(experts // ranks, ranks),
        torch.where(exists, records[:, 2 * top_k], -1), torch.where(exists, source, -1).to(torch.int32),
        torch.where(here, expert, -1), torch.where(here, weights, 0.0), torch.where(here, landing, -1),
    )  # fmt: skip


def _of_experts(received: ReceivedRows) -> Metadata:
    ends = received.source_counts.cumsum(1)
    rows = received.source_token.shape[1]
    index = torch.arange(rows, device=ends.device).expand(len(ends), rows).contiguous()
    source = torch.searchsorted(ends, index, right=True)
    exists = index < ends[:, -1:]
    return Metadata(
        received.source_counts,
        torch.where(exists, received.source_token, -1),
        torch.where(exists, source, -1).to(torch.int32),
    )
