"""The two calls of an expert-parallel layer: dispatch tokens to the ranks of their experts, combine the returned rows."""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

import tilescale_net as tsn
from tilescale_net.compiler.jit import compile_together
from tilescale_net.errors import TileScaleError
from tilescale_net.kernels.collective import BufferSpecs, Collective
from tilescale_net.kernels.moe.buffers import Arena, arena_bytes, divide, heap_bytes, make, world_with_room
from tilescale_net.kernels.moe.checks import ArgumentChecks, ArgumentError, CombineCall, DispatchCall, Phase, Status
from tilescale_net.kernels.moe.config import Tuning, chosen, configure, reject_slower_combine
from tilescale_net.kernels.moe.handle import Choices, Dispatched, Handle, Pending, Rows, former_name
from tilescale_net.kernels.moe.layout import NodeSizes, as_argument
from tilescale_net.kernels.moe.tiles import Tiles
from tilescale_net.runtime import groups, tuned
from tilescale_net.runtime.profiling import named

if TYPE_CHECKING:
    from tilescale_net.runtime.world import World


class State(enum.Enum):
    """State of an AllToAll on this rank."""

    IDLE = "idle"
    DISPATCHING = "dispatching"
    COMBINING = "combining"
    BOTH = "both"
    OUTDATED = "outdated"
    LEFT_OUT = "left out"
    FREED = "freed"


_LIVE = {State.IDLE, State.DISPATCHING, State.COMBINING, State.BOTH}

# The states in which a call is accepted; in all others it raises, and changes nothing.
ALLOWED: dict[str, set[State]] = {
    "dispatch": {State.IDLE, State.COMBINING},
    "dispatch_send": {State.IDLE, State.COMBINING},
    "dispatch_recv": {State.DISPATCHING, State.BOTH},
    "combine": {State.IDLE, State.DISPATCHING},
    "combine_values": {State.IDLE, State.DISPATCHING},
    "combine_send": {State.IDLE, State.DISPATCHING},
    "combine_recv": {State.COMBINING, State.BOTH},
    "set_active": {State.IDLE, State.OUTDATED},
    "empty_output": _LIVE,
    "check": {*_LIVE, State.OUTDATED, State.LEFT_OUT},
    "free": {State.IDLE, State.OUTDATED, State.LEFT_OUT},
}


class Machine:
    """The state of one AllToAll and its phases in flight. `pending`: the phases sent and not yet received, by
    "dispatch" and "combine". `outdated`, `left_out`, `freed`: see docs/states.md."""

    def __init__(self) -> None:
        self.pending: dict[str, Pending] = {}
        self.outdated = self.left_out = self.freed = False

    @property
    def state(self) -> State:
        """The current state; the most final one wins."""
        if self.freed:
            return State.FREED
        if self.left_out:
            return State.LEFT_OUT
        if self.outdated:
            return State.OUTDATED
        if not self.pending:
            return State.IDLE
        if len(self.pending) == 2:
            return State.BOTH
        return State.DISPATCHING if "dispatch" in self.pending else State.COMBINING

    def check(self, call: str) -> None:
        """Raise unless `call` is accepted in this state. TileScaleError: the object or this rank has left, or the ranks
        of the job differ from the object's. ValueError: a phase is missing."""
        # Fast path: four field reads.
        if not (self.pending or self.outdated or self.left_out or self.freed) and not call.endswith("_recv"):
            return
        state = self.state
        if state not in ALLOWED[call]:
            raise self._error(call, state)

    def _error(self, call: str, state: State) -> Exception:
        name = f"AllToAll.{call}"
        if state is State.FREED:
            return TileScaleError(f"{name}: used after free() or finalize()")
        if state is State.LEFT_OUT:
            return TileScaleError(f"{name}: set_active has left this rank out; it makes no calls but check and free")
        if state is State.OUTDATED:
            return TileScaleError(
                f"{name}: ranks have left the job, by another object's set_active or tilescale_net.shrink; call set_active with "
                "the ranks that stay, or free"
            )
        if call.endswith("_recv"):
            kind = call.removesuffix("_recv")
            return ValueError(
                f"{name}: this is not the {kind} that was sent last and not yet received; each is received once, by its hook "
                "in deep_ep"
            )
        kind = call.split("_")[0]
        kind = kind if kind in self.pending else next(iter(self.pending))
        return ValueError(
            f"{name}: the {kind} sent before has not been received; call {kind}_recv, or its hook of deep_ep, first"
        )

    def sent(self, kind: str, pending: Pending) -> Pending:
        """Record a phase as in flight."""
        self.pending[kind] = pending
        if kind == "dispatch":
            pending.handle.plan.set_in_flight(True)
        return pending

    def received(self, kind: str, pending: Pending) -> None:
        """Record a phase as received. Raises ValueError if the phase is not in flight."""
        if self.pending.get(kind) is not pending:
            raise self._error(f"{kind}_recv", State.IDLE)
        del self.pending[kind]
        if kind == "dispatch":
            pending.handle.plan.set_in_flight(False)


_NO_TILES = {"dispatch": "the object was made without tile_rows", "combine": "combine_send got no tiles"}


# Objects by the first part of their keys.
OBJECTS: weakref.WeakValueDictionary[str, AllToAll] = weakref.WeakValueDictionary()
# Texts of the call log, which waiting ranks compare; a phase is logged as its whole call.
_LAYER = "{0.num_experts} experts, {0.max_tokens} tokens of a rank at most, hidden {0.hidden}, top_k {0.top_k}, {0.dtype}, {0.mode}"
_DISPATCH, _DISPATCH_AGAIN = f"dispatch: {_LAYER}", f"dispatch with a handle: {_LAYER}"
_COMBINES = {call: f"{call}: {_LAYER}" for call in ("combine", "combine_values", "combine with weights")}
_BAD_HANDLE = "{}; rejected: its handle is invalid"


class AllToAll(Collective):
    """Dispatch and combine of an expert-parallel layer; rank r hosts experts [r * E / ranks, (r + 1) * E / ranks).

    All ranks construct it with the same arguments, which compiles its kernels, and then make the same calls in the same
    order. No call waits for the GPU on the host, so a CUDA graph can capture calls. Calls on different streams run one
    after the other, in the host's order. Results do not depend on timing: equal inputs give equal bits.

    Args:
        num_experts: experts of the layer, a multiple of the number of ranks.
        max_tokens: the most tokens of a rank in a call.
        hidden: elements of a row; a row of `dtype` and of `combine_dtype` is a multiple of 16 bytes.
        top_k: choices per token.
        dtype: of dispatched rows: bfloat16, float16, float32, or float8_e4m3fn with a float32 scale per 128 elements.
        mode: "throughput" (few SMs, thousands of tokens) or "latency" (all SMs, up to 1024).
        layout: throughput mode: "expert": the rows of each expert are contiguous, ready for a grouped GEMM; "rank": each
            token once per rank, with an index of the rows of each expert.
        alignment: throughput mode: the first row of each expert is a multiple of it.
        capacity: throughput mode: expert-major rows that a rank can receive, including the gaps; default the worst case.
            A dispatch that exceeds it on some rank sends nothing and raises on all ranks. With it, symmetric memory grows
            with the number of nodes if rows cross the network once per node (see Tuning), else not with ranks, except some
            words per token.
        combine_dtype: of `y` and of combine's result; default `dtype`, or bfloat16 if `dtype` is FP8.
        quantize_combine: rows return as FP8 with a scale per 128 elements: half the bytes, for a network. Throughput mode
            rejects it between GPUs connected by NVLink, where it was measured to be slower; "always" forces it.
        zero_copy: throughput mode: outputs are in symmetric memory (of `empty_output`, or of this object) and most rows
            arrive in place. False: outputs are ordinary tensors, the caller's or new ones, and rows are copied once more;
            layout "rank" copies all slots.
        scale_words: 4-byte words of scales of an FP8 row; default a float32 per 128 elements. Others are scales per token
            (1) or packed exponents, for rows that are passed with their scales.
        column_scales: FP8: the result's scales, and those of `out`, are column-major, as many grouped GEMMs need them;
            their shape is the same. Throughput mode: an extra kernel transposes them, into new memory without `out`.
        expert_capacity: the most rows of an expert from each rank, for models with a capacity factor: excess choices are
            dropped at their source and count as none; `Dispatched.dropped` marks them. The default of `capacity` is then
            the largest possible number of rows.
        tile_rows: throughput mode, layout "expert": GEMMs of tiles of this many rows can overlap with a dispatch and a
            combine; see `alongside` and `kernels.fused.ExpertMatmul`. `alignment` is a multiple of it.
        drop: choices to keep: "position": of the first tokens; "choice": first all tokens' first choices, then their second
            choices; "weight": of the largest weights.
        active: for each rank whether it is active; see `set_active`. Default: the active ranks of the job.
        warm_up: compile the kernels of all possible calls, not only of ordinary ones, so no rank waits in a call for a rank
            that compiles. Default: on a GPU.
        tuning: launch geometry and message sizes. Default: the result of `tilescale_net.tuning` on this machine, else the
            fastest on H200s.
        grow: if the symmetric heap is full at its limit, make another one, in a new world of the same ranks, which `free`
            ends; `world` is the object's world. Call `tilescale_net.shrink` for it too.
        arena: symmetric memory for its rows, shared with other objects; see `Arena`.
        group: the ranks, rank r is the group's r-th; see `tilescale_net.world`.

    Attributes:
        active_mask: for each rank whether it is active. active: the same as int32, for kernels.
        membership: the mask, and the number of earlier losses; handles of another membership are rejected.
        status: record of faults that kernels found.
        identity: its arguments and group as text. key: see tilescale_net.ops.

    docs/states.md lists the calls that each state accepts. Any other call raises ValueError or TileScaleError and changes
    nothing: the other ranks wait until this rank makes the right call.

    Raises:
        ValueError, TypeError: an invalid argument, which is named.
        RankMismatch: ranks disagree on an argument.
        HeapError: the symmetric heap has no room for the buffers, see `heap_bytes`; nothing stays allocated. With `grow`,
            ConfigurationError if the device has no room.
    """

    allows_partial_membership = True
    _arena: Arena | None = None
    _given: tuple[tuple, dict]  # arguments of the constructor

    def __init__(
        self, num_experts: int, max_tokens: int, hidden: int, top_k: int, dtype: torch.dtype = torch.bfloat16,
        mode: str = "throughput", *, layout: str = "expert", alignment: int = 1, capacity: int | None = None,
        combine_dtype: torch.dtype | None = None, quantize_combine: bool | str = False, zero_copy: bool = True,
        scale_words: int | None = None, expert_capacity: int | None = None, drop: str = "position",
        tile_rows: int | None = None, active: list[bool] | None = None, warm_up: bool | None = None, tuning: Tuning | None = None,
        column_scales: bool = False, grow: bool = False, arena: Arena | None = None, group: tsn.Group = None,
    ):  # fmt: skip
        world = tsn.world(group if arena is None or group is not None else arena.world)
        if arena is not None and (grow or arena.world is not world):
            raise ValueError("AllToAll: an arena has its own memory and group; give neither grow nor another group")
        self.config = config = configure(
            world.size, num_experts, max_tokens, hidden, top_k, dtype, mode, layout=layout, alignment=alignment,
            capacity=capacity, combine_dtype=combine_dtype, quantize_combine=quantize_combine, zero_copy=zero_copy,
            scale_words=scale_words, expert_capacity=expert_capacity, drop=drop, tile_rows=tile_rows, column_scales=column_scales,
        )  # fmt: skip
        if quantize_combine is True and world.device_kind == "cuda" and 0 not in world.peer_base:
            reject_slower_combine(config)
        if not isinstance(tuning, Tuning | None):
            raise TypeError(f"AllToAll: tuning must be a Tuning, not {type(tuning).__name__}")
        tuned.of(world, "AllToAll")  # all ranks meet here the first time, with any arguments
        self.tuning = tuning = (tuning or chosen(config, world)).resolved(config, world.device)
        members = None if active is None else self.checked_list(active, world.size)
        first, world = world, world_with_room(world, config, tuning, members) if grow else world
        self._own_world = None if world is first else world
        try:
            self._construct(world, members, arena, world.device.type == "cuda" if warm_up is None else warm_up)
        except Exception:  # on all ranks alike
            self._end_own_world()
            raise

    def _construct(self, world: World, active: tuple[bool, ...] | None, arena: Arena | None, warm_up: bool) -> None:
        config, tuning = self.config, self.tuning
        threads, blocks = tuning.threads, tuning.blocks
        assert threads and blocks
        text = f"{config.describe()}, {tuning}, active={active}, arena={arena and arena.number}"
        super().__init__("AllToAll", text, threads, blocks, world)
        self._arena = arena
        self.identity, self._machine = self._identity(), Machine()
        self.products: dict = {}  # of the operators, see ops/experts.py
        with torch.inference_mode(False):
            self._name_members(tuple(r in self._members for r in range(self.n_pes)))
            self.active = torch.tensor(self.active_mask, dtype=torch.int32, device=self.device)
            self.status = Status(self._world)
        OBJECTS[self.identity] = self
        if arena is not None:
            # Another object's call on another stream would overwrite the memory that a phase reads.
            self.ordered_by(arena.order)
        self._simulated = self.device.type == "cpu"
        self.proxied, self.nodes = 0 in world.peer_base, as_argument(world.topology.sizes)
        with torch.inference_mode(False):
            self._mode = make(self, config, active)
        shape, symmetric = self._mode.output_shape(), self._mode.symmetric_output
        self._checks = ArgumentChecks(config, self.device, world.heap, shape, symmetric, self.blocks)
        self._compile(warm_up)
        if arena is not None:
            arena.join(self)
        if active is not None:
            self.set_active(active)

    def _identity(self) -> str:
        """A text that identifies this object in every process: its arguments and group, and a number if living objects
        share these."""
        signature = inspect.signature(type(self))
        args, named = self._given
        arguments = signature.bind(*args, **named).arguments
        usual = {name: parameter.default for name, parameter in signature.parameters.items()}
        shown = [f"{n}={v!r}" for n, v in arguments.items() if n not in ("group", "arena", "warm_up") and v != usual[n]]
        shown += [f"arena={self._arena.number}"] if self._arena is not None else []
        world = self._made_in
        name = groups.name_of(world.group)
        group = f"group {name!r} of ranks {groups.named(world.job_ranks)}" if name else f"{world.size} ranks"
        alike = (
            f"AllToAll({', '.join(shown)}) of {group}{f', number {n}' if n > 1 else ''}" for n in itertools.count(1)
        )
        return next(text for text in alike if text not in OBJECTS or not OBJECTS[text].alive)

    # -- queries and memory -----------------------------------------------------------------------------------------

    heap_bytes, arena_bytes = staticmethod(heap_bytes), staticmethod(arena_bytes)

    @property
    def node_plan_words(self) -> int:
        """Throughput mode: elements of `RoutingPlan.node_plan`."""
        return self._mode.node_plan_words

    @property
    def sums_over(self) -> NodeSizes:
        """Number of nodes by which combine sums, or the ranks of each node if sizes differ; see
        `row_ops.sum_of_ranks`."""
        return self._mode.sums_over

    def empty_output(self) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Memory for `out` of dispatch: rows, or rows and scales for FP8. Collective if it is symmetric."""
        self._begin("empty_output")
        symmetric = functools.partial(tsn.empty, group=self._world)
        rows, scales = self._mode.new_output(symmetric if self._mode.symmetric_output else None)
        return rows if scales is None else (rows, scales)

    def check(self) -> None:
        """Wait for this rank's kernels and raise their faults; see `dispatch`."""
        self._machine_check("check")
        self._world.synchronize()
        self._raise_fault()

    def free(self) -> None:
        """Free the symmetric memory. Collective; do not call the object afterwards."""
        self._machine_check("free")
        if self._world.control.excluded:
            self._owned, self._own_world = [], None  # the other ranks do not free with a rank that is left out
        else:
            for product in self.products.values():
                product.free()
        self._release()

    def _end_own_world(self) -> None:
        own, self._own_world = self._own_world, None
        if own is not None and not own.closed:
            tsn.finalize(own)

    # -- dispatch ---------------------------------------------------------------------------------------------------

    @named("tilescale_net.moe.dispatch")
    def dispatch(
        self, x: Rows, topk_idx: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None, *,
        mask: torch.Tensor | None = None, handle: Handle | None = None, out: Rows | None = None, cleared: bool = False,
        after: torch.Event | None = None, blocks: int | None = None, waited: torch.Tensor | None = None,
        max_tokens: int | None = None, totals: torch.Tensor | None = None,
    ) -> Dispatched:  # fmt: skip
        """Send each token to the ranks of its experts.

        Args:
            x: [tokens, hidden] of `dtype`; for FP8 a pair (x, scales) with scales [tokens, scale_words] float32 or int32,
                or, in latency mode, unquantised rows, which the call quantises (the first call with float16 or float32
                compiles). 0 to max_tokens tokens.
            topk_idx: [tokens, top_k] expert of each choice, int64 or int32; -1: no choice.
            topk_weights: [tokens, top_k] float32, or another floating dtype, which is copied to float32; default 1.
            mask: layout "rank", instead of choices: [tokens, ranks] bool, the target ranks of each token; top_k is at least
                the number of ranks. Counts of experts then have no meaning.
            handle: throughput mode, instead of choices: reuse the choices of an earlier dispatch without another exchange.
            out: memory for the rows, from `empty_output` (rows, or rows and scales), the same on all ranks; with
                `zero_copy=False` and in latency mode any tensor of that shape. Default: symmetric memory of this object,
                valid until the next dispatch, or a new tensor if outputs are not symmetric.
            after: an event for which the call waits on the GPU, in addition to the current stream.
            blocks: number of blocks, at most the tuning's; may differ between ranks. The first call with a number compiles.
            waited: latency mode: int64 [ranks], to which the call adds the clocks (simulator: nanoseconds) of waiting for
                each rank.
            max_tokens: the most tokens of a rank in this call, equal on all ranks: `combine` then takes the largest
                possible number of rows without waiting for the GPU. The hosts agree on the first call with a number.
                Default: the object's.
            totals: latency mode: int32 [local experts], to which the call adds the counts.
            cleared: throughput mode: zero the parts of the handle's tensors without a row.

        Returns:
            Dispatched.

        Raises:
            TypeError, ValueError, HeapError: a wrong argument, different `out` on ranks, or a capacity that is too small.
                All ranks raise, and later calls work; a wrong `handle` ends the world, see docs/states.md. The next call or
                `check` raises errors that only the GPU detects (expert ids, capacity, arguments of other ranks); until then
                a dispatch with wrong choices counts as empty (latency mode: without the choices that are out of range), and
                one with a handle or another `out` is undefined.
            TileScaleError: an earlier kernel or a peer has failed.
        """
        self._begin("dispatch", after)
        if max_tokens is None and self._is_usual_dispatch(mask, handle, out, cleared, blocks, waited):
            received = self._usual_dispatch(x, topk_idx, topk_weights, totals)
            if received is not None:
                return received
        if max_tokens is not None:
            self._agree("dispatch with max_tokens={}", max_tokens)
        call = DispatchCall(
            Phase.WHOLE, x, topk_idx, topk_weights, mask, handle, out, cleared, blocks, waited, max_tokens, totals
        )  # fmt: skip
        pending = self._dispatch(call)
        if max_tokens is not None and handle is None:
            pending.handle.max_tokens = max_tokens
        self._raise_fault_if_simulated()
        return pending.result

    @named("tilescale_net.moe.dispatch_send")
    def dispatch_send(
        self, x: Rows, topk_idx: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None, *,
        mask: torch.Tensor | None = None, handle: Handle | None = None, out: Rows | None = None, cleared: bool = False,
        after: torch.Event | None = None, blocks: int | None = None, waited: torch.Tensor | None = None,
        totals: torch.Tensor | None = None,
    ) -> Pending:  # fmt: skip
        """Send phase of `dispatch`, with its arguments; kernels launched before `dispatch_recv` overlap with it.

        Throughput mode runs on another stream with high priority. Do not change `x` and `out` before `dispatch_recv`;
        `totals` has the counts after it.
        """
        self._begin("dispatch_send", after)
        pending = None
        if self._is_usual_dispatch(mask, handle, out, cleared, blocks, waited):
            pending = self._usual_dispatch_send(x, topk_idx, topk_weights, totals)
        if pending is None:
            call = DispatchCall(
                Phase.SEND, x, topk_idx, topk_weights, mask, handle, out, cleared, blocks, waited, None, totals
            )
            pending = self._machine.sent("dispatch", self._dispatch(call))
        return pending

    def usual_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, totals: torch.Tensor | None = None
    ) -> Dispatched | None:
        """Fast path of `dispatch` for calls with these arguments alone; None, with nothing launched, if `dispatch` must
        check the call."""
        self._begin("dispatch")
        return self._usual_dispatch(x, topk_idx, None, totals)

    def usual_dispatch_send(
        self, x: torch.Tensor, topk_idx: torch.Tensor, totals: torch.Tensor | None = None
    ) -> Pending | None:
        """Fast path of `dispatch_send`."""
        self._begin("dispatch_send")
        return self._usual_dispatch_send(x, topk_idx, None, totals)

    def _usual_dispatch(self, x: Any, topk_idx: Any, topk_weights: Any, totals: Any) -> Dispatched | None:
        tokens, weights = self._usual_choices(x, topk_idx, topk_weights, totals)
        if weights is None:
            return None
        received = self._mode.usual_dispatch(tokens, x, topk_idx, weights, totals)
        if self._simulated:
            self._raise_fault_if_simulated()
        return received

    def _usual_dispatch_send(self, x: Any, topk_idx: Any, topk_weights: Any, totals: Any) -> Pending | None:
        tokens, weights = self._usual_choices(x, topk_idx, topk_weights, totals)
        if weights is None:
            return None
        pending = self._mode.usual_dispatch_send(tokens, x, topk_idx, weights, totals)
        return self._machine.sent("dispatch", pending)

    def _usual_choices(self, x: Any, topk_idx: Any, topk_weights: Any, totals: Any) -> tuple[int, torch.Tensor | None]:
        """The number of tokens and their weights of a dispatch that the fast path takes and logs; None: `dispatch` must
        check it."""
        tokens = -1 if self._machine.pending else self._checks.usual_dispatch(x, topk_idx, topk_weights, totals)
        if tokens < 0:
            return tokens, None
        self._call_track.note(_DISPATCH, self.config)
        return tokens, self._checks.weights_of_one(tokens) if topk_weights is None else topk_weights

    @named("tilescale_net.moe.dispatch_recv")
    def dispatch_recv(self, pending: Pending) -> Dispatched:
        """Receive phase of dispatch: later launches may read the rows.

        Args:
            pending: the result of `dispatch_send`.
        """
        return self._receive("dispatch", pending)

    @staticmethod
    def _is_usual_dispatch(mask: Any, handle: Any, out: Any, cleared: bool, blocks: Any, waited: Any) -> bool:
        nothing = mask is None and handle is None and out is None and blocks is None and waited is None
        return nothing and not cleared

    def _receive(self, kind: str, pending: Pending) -> Any:
        self._machine_check(f"{kind}_recv")
        self._machine.received(kind, pending)
        self._order.follow()
        self._mode.receive(pending)
        self._raise_fault_if_simulated()
        return pending.result

    def _dispatch(self, call: DispatchCall) -> Pending:
        may_reuse = self.config.capabilities.reuses_plan
        reuses = may_reuse and call.handle is not None
        if may_reuse and reuses + (call.topk_idx is not None) + (call.mask is not None) != 1:
            raise TypeError("AllToAll.dispatch: give either topk_idx, or a mask, or the handle of an earlier dispatch")
        noted = _DISPATCH_AGAIN if reuses else _DISPATCH
        try:
            self._checks.dispatch(call, self.membership)
        except ArgumentError as error:
            self._join_rejected_dispatch(error, noted, call.handle if reuses else None)
            raise self._named("dispatch", error) from None
        self._call_track.note(noted, self.config)
        return self._mode.dispatch(call)

    # -- rejected calls ---------------------------------------------------------------------------------------------

    def _join_rejected_dispatch(self, error: ArgumentError, noted: str, handle: Handle | None) -> None:
        """Take part, with placeholders, in a dispatch whose arguments are wrong here: the other ranks' calls end and
        report the fault."""
        if handle is not None and not self._can_join(noted, handle):
            return
        c, tokens = self.config, 0 if handle is None else handle.tokens
        new = functools.partial(torch.zeros, device=self.device)
        scales = new((tokens, c.scale_words), dtype=torch.float32) if c.scale_words else None
        choices = handle or Choices(new((0, c.top_k), dtype=torch.int64), self._checks.weights_of_one(0))
        self._call_track.note(noted, c)
        call = DispatchCall(Phase.WHOLE, new((tokens, c.hidden), dtype=c.dtype), blocks=self.blocks, fault=error)
        call.scales, call.choices = scales, choices
        self._mode.dispatch(call)
        self._discard_fault()

    def _join_rejected_combine(self, error: ArgumentError, noted: str, handle: Handle, travels: bool) -> None:
        """As `_join_rejected_dispatch`, for a combine; `travels`: weights are exchanged first."""
        if not self._can_join(noted, handle):
            return
        c, device = self.config, self.device
        y = torch.zeros(self._mode.output_shape(), dtype=c.combine_dtype, device=device)
        out = torch.empty((handle.tokens, c.hidden), dtype=c.combine_dtype, device=device)
        weights = torch.zeros((handle.tokens, c.top_k), dtype=torch.float32, device=device) if travels else True
        self._call_track.note(noted, c)
        call = CombineCall("combine", Phase.WHOLE, y, handle, out, weights=weights, blocks=self.blocks, fault=error)
        self._mode.combine(call)

    def _can_join(self, noted: str, handle: Handle) -> bool:
        """Whether a rejected call can be launched: only the handle tells which rows the others wait for. Without it the
        call log tells the other ranks that this call differs."""
        try:
            self._checks.handle(handle, self.membership)
        except ArgumentError:
            self._call_track.note(_BAD_HANDLE.format(noted), self.config)
            return False
        return True

    # -- combine ----------------------------------------------------------------------------------------------------

    @named("tilescale_net.moe.combine")
    def combine(
        self, y: torch.Tensor, handle: Handle, *, out: torch.Tensor | None = None, weighted: bool = True,
        weights: torch.Tensor | None = None, bias: Sequence[torch.Tensor] = (), after: torch.Event | None = None,
        blocks: int | None = None, waited: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return rows to their tokens and sum them in float32.

        Args:
            y: rows of `combine_dtype`, in the shape and order of the dispatch's `x`. Throughput mode: `y` may end after the
                last row; to check that, the first such call waits for the GPU (see `Handle.rows`).
            handle: of that dispatch, for any number of combines.
            out: [tokens, hidden] of `combine_dtype`; default a new tensor. Tokens without a choice get zeros.
            weighted: multiply each row by the weight of its choice. Layout "rank" sums rows without weights.
            weights: layout "expert": weights that replace the dispatch's, of the dtypes of `topk_weights`. Throughput mode:
                [capacity], of each row; latency mode: [tokens, top_k], which an extra kernel sends to the ranks of the
                rows. On all ranks or on none.
            bias: up to two tensors [tokens, hidden] of `combine_dtype`, added to the sums before rounding. The first such
                call compiles.
            after, blocks, waited: as in `dispatch`.

        Each rank sums over its experts first and rounds to `combine_dtype` once, then the token's rank sums over ranks.

        Raises:
            TypeError, ValueError: a wrong argument. As in `dispatch` all ranks raise, those with right arguments in the
                next call or `check`.
            TileScaleError: an earlier kernel or a peer has failed.
        """
        self._begin("combine", after)
        if self._is_usual_combine(weighted, bias, blocks, waited):
            sums = self._usual_combine(y, handle, out, weights)
            if sums is not None:
                return sums
        call = CombineCall("combine", Phase.WHOLE, y, handle, out, weighted, weights, bias, blocks, None, None, waited)
        pending = self._combine(call)
        self._raise_fault_if_simulated()
        return pending.result

    @named("tilescale_net.moe.combine_send")
    def combine_send(
        self, y: torch.Tensor, handle: Handle, *, out: torch.Tensor | None = None, weighted: bool = True,
        weights: torch.Tensor | None = None, bias: Sequence[torch.Tensor] = (), after: torch.Event | None = None,
        blocks: int | None = None, tiles: Tiles | None = None, waited: torch.Tensor | None = None,
    ) -> Pending:  # fmt: skip
        """Send phase of `combine`, with its arguments; kernels launched before `combine_recv` overlap with it.

        Do not change `y`, `weights`, `bias` and `out` before `combine_recv`. Latency mode: with `weights` it waits on the
        GPU for the weights of the other ranks. With `tiles`, of an object with `tile_rows`, a kernel launched after
        `alongside` stores `y`: each row is read when its tiles are complete, the last expert's first. All `blocks` send
        then; `combine_recv` launches the sums.

        Args:
            tiles: see `kernels.moe.Tiles`; of this object.
        """
        if tiles is not None:
            self._check_tiles(tiles)
        self._begin("combine_send", after)
        pending = None
        if tiles is None and self._is_usual_combine(weighted, bias, blocks, waited):
            pending = self._usual_combine_send(y, handle, out, weights)
        if pending is None:
            call = CombineCall(
                "combine", Phase.SEND, y, handle, out, weighted, weights, bias, blocks, None, tiles, waited
            )
            pending = self._machine.sent("combine", self._combine(call))
        return pending

    def usual_combine(
        self, y: torch.Tensor, handle: Handle, out: torch.Tensor | None, weights: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Fast path of `combine`."""
        self._begin("combine")
        return self._usual_combine(y, handle, out, weights)

    def usual_combine_send(
        self, y: torch.Tensor, handle: Handle, out: torch.Tensor | None, weights: torch.Tensor | None
    ) -> Pending | None:
        """Fast path of `combine_send`."""
        self._begin("combine_send")
        return self._usual_combine_send(y, handle, out, weights)

    def _usual_combine(self, y: Any, handle: Any, out: Any, weights: Any) -> torch.Tensor | None:
        sums = self._usual_sums(y, handle, out, weights)
        if sums is not None:
            self._mode.usual_combine(y, handle, sums, weights)
            if self._simulated:
                self._raise_fault_if_simulated()
        return sums

    def _usual_combine_send(self, y: Any, handle: Any, out: Any, weights: Any) -> Pending | None:
        sums = self._usual_sums(y, handle, out, weights)
        if sums is None:
            return None
        return self._machine.sent("combine", self._mode.usual_combine_send(y, handle, sums, weights))

    def _usual_sums(self, y: Any, handle: Any, out: Any, weights: Any) -> torch.Tensor | None:
        """The output of a combine that the fast path takes and logs; None: `combine` must check it."""
        if self._machine.pending:
            return None
        sums = self._checks.usual_combine(y, handle, out, weights, self.membership)
        if sums is not None:
            self._call_track.note(_COMBINES["combine" if weights is None else "combine with weights"], self.config)
        return sums

    @named("tilescale_net.moe.combine_recv")
    def combine_recv(self, pending: Pending) -> torch.Tensor:
        """Receive phase of combine: later launches may read the sums.

        Args:
            pending: the result of `combine_send`.
        """
        return self._receive("combine", pending)

    @named("tilescale_net.moe.combine_values")
    def combine_values(
        self, y: torch.Tensor, values: torch.Tensor, handle: Handle, *, out: torch.Tensor | None = None,
        bias: Sequence[torch.Tensor] = (), after: torch.Event | None = None, blocks: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Throughput mode: combine without weights that also returns numbers.

        Args:
            y, handle, out, bias, after, blocks: as in `combine`.
            values: float32: one for each expert-major row, [capacity]; or, layout "rank", one for each choice of each row,
                [rows of y, top_k].

        Returns:
            The sums, [tokens, hidden], and the numbers, [tokens, top_k]: numbers of expert-major rows at their choices, 0
            elsewhere; numbers of choices summed over the ranks that have a row of the token.

        Errors as for `combine`.
        """
        self._begin("combine_values", after)
        pending = self._combine(
            CombineCall("combine_values", Phase.WHOLE, y, handle, out, False, None, bias, blocks, values)
        )
        self._raise_fault_if_simulated()
        return pending.result

    @staticmethod
    def _is_usual_combine(weighted: Any, bias: Any, blocks: Any, waited: Any) -> bool:
        return blocks is None and waited is None and weighted is True and type(bias) is tuple and not bias

    def _combine(self, call: CombineCall) -> Pending:
        travels = call.weights is not None and self.config.mode == "latency"  # ahead of the rows
        noted = _COMBINES["combine with weights" if travels else call.name]
        try:
            self._checks.combine(call, self.membership)
        except ArgumentError as error:
            self._join_rejected_combine(error, noted, call.handle, travels)
            raise self._named(call.name, error) from None
        self._call_track.note(noted, self.config)
        if call.values is None:
            return self._mode.combine(call)
        call.out_values = torch.empty((call.handle.tokens, self.config.top_k), dtype=torch.float32, device=self.device)
        pending = self._mode.combine(call)
        pending.result = call.out, call.out_values
        return pending

    # -- the part that is the same for every mode --------------------------------------------------------------------

    def allocate(self, specs: BufferSpecs) -> dict[str, torch.Tensor]:
        """Allocate all buffers, zeroed except for rows in an arena; HeapError before anything is allocated."""
        if self._arena is None:
            return super().allocate(specs)
        shared, own = divide(specs)
        placed = self._arena.place(shared)
        return super().allocate(own) | placed

    @property
    def all_blocks(self) -> int:
        """The number of blocks that run at once."""
        return self.block_limit if self.device.type == "cuda" else self.blocks

    def _release(self) -> None:
        super()._release()
        self.status.close()
        self.__dict__.pop("_mode", None)  # refers to this object, and holds all of its tensors
        self._end_own_world()

    def adds_to(self, totals: torch.Tensor) -> bool:
        """Whether `dispatch` takes this tensor as `totals`."""
        return self._checks.are_totals(totals)

    @property
    def in_flight(self) -> tuple[str, ...]:
        """The pending phases of this rank: "dispatch", "combine", both or none."""
        pending = self._machine.pending
        return tuple(pending) if pending else ()

    def takes(self, kind: str) -> bool:
        """Whether a "dispatch" or "combine" may be sent now: none is in flight, and the job's ranks are unchanged."""
        return kind not in self._machine.pending and self._members is self._world.control.members

    @property
    def is_idle(self) -> bool:
        """Whether the object is alive and idle, with the ranks of the job."""
        return not self._machine.pending and self._members is self._world.control.members and bool(self._owned)

    under_way = former_name("AllToAll", "under_way", "in_flight")
    mask = former_name("AllToAll", "mask", "active_mask")

    @property
    def meets_first(self) -> bool:
        """Whether a call sends nothing before all ranks have begun it."""
        return self._mode.meets_first

    @property
    def outdated(self) -> bool:
        """Whether ranks have left the job since, so that `set_active` must come before any other call."""
        return self._members is not self._world.control.members

    def _name_members(self, mask: tuple[bool, ...]) -> None:
        """From now on these ranks take part."""
        control = self._world.control
        self.active_mask, self._members, self._generation = mask, control.members, control.generation
        self.membership = (self._generation, mask)
        # Operators take tensors, numbers and text.
        self.key = f"{self.identity} {self._generation} {''.join('01'[m] for m in mask)}"

    @staticmethod
    def checked_list(active: Iterable[bool], ranks: int) -> tuple[bool, ...]:
        active = tuple(bool(a) for a in active)
        if len(active) != ranks:
            raise ValueError(f"AllToAll: active has {len(active)} entries; there are {ranks} ranks")
        if not any(active):
            raise ValueError("AllToAll: active leaves out every rank")
        return active

    def set_active(self, active: Sequence[bool] | None = None) -> None:
        """Exclude ranks from the next call on: they get nothing, and no rank waits for them.

        Collective over the remaining ranks, with the same list (default: the active ranks of the job, see
        `tilescale_net.shrink`); nothing may be in flight, unless ranks were lost. From then on they make collective host
        calls (memory, barriers, new objects, `free`) without the others, and earlier handles are rejected. Earlier objects
        accept no calls until their `set_active` is called too. An excluded rank need not call; it may then only `check`,
        `free` and finalize, and cannot return. If it calls, its finalize waits at most TSN_TIMEOUT until the others have
        called, because their last kernels still need it.

        Raises:
            ValueError: a list of another length, or one that includes an excluded rank.
            RankMismatch: another rank passed another list.
            PeerLost: a remaining rank did not call.
        """
        self._machine_check("set_active")
        control = self._world.control
        void = self._generation != control.generation  # phases in flight when ranks were lost
        if void:
            self._discard_fault()
        self._begin("set_active")
        active = [r in control.members for r in range(self.n_pes)] if active is None else active
        active = self.checked_list(active, self.n_pes)
        if self._machine.pending and not void:
            raise ValueError("AllToAll.set_active: a phase was in flight here when ranks left; free this object")
        back = [r for r in range(self.n_pes) if active[r] and not (self.active_mask[r] and r in control.members)]
        if back:
            raise ValueError(f"AllToAll: active brings back ranks {back}; make a new job instead")
        if not active[self.rank]:
            control.leave([r for r in range(self.n_pes) if active[r]])
            return
        self._world.synchronize()
        control.shrink_to([r for r in range(self.n_pes) if active[r]], "AllToAll.set_active")
        if void:
            self._reset()
        self._machine.outdated = False
        self._name_members(active)
        self._mode.regroup(self.active_mask)
        self.active.copy_(torch.tensor(active, dtype=torch.int32, device="cpu"), non_blocking=True)

    def _reset(self) -> None:
        """Reset after abandoned calls. All ranks are here, and their kernels have ended."""
        with torch.inference_mode(False):
            for counter in self._counters:
                counter.view(torch.uint8).zero_()
            self._mode.reset()
            if self._arena is not None:
                self._arena.reset()
        self._machine.pending.clear()
        memory = self._world.memory
        assert memory is not None
        memory.synchronize()
        self._world.control.agree("AllToAll.set_active", "begins anew")

    def _compile(self, everything: bool) -> None:
        """Compile on all ranks before any continues; an error of one is an error of all."""
        error, topology = None, self._world.topology
        try:
            compile_together(self._mode.variants(everything), self.device, topology.local_rank, topology.node_size)
        except Exception as raised:
            error = raised
        errors = self._world.control.gather("AllToAll: kernels compiled", str(error or ""))
        failed = [i for i, text in enumerate(errors) if text]
        if failed:
            self._release()
            raise error or tsn.KernelError(f"AllToAll: rank {self._members[failed[0]]} has failed: {errors[failed[0]]}")

    # -- tiles ------------------------------------------------------------------------------------------------------

    @property
    def blocks_beside_gemm(self) -> int:
        """Enough blocks for a combine beside a GEMM: at most 8 on one node; more of them slow the GEMM down by more
        than the combine gains.

        Two H200s, FP8 layers of 8192 tokens: 10,189 us with 8, 10,614 with 16, 10,687 with 24; GEMM and combine in BF16:
        4,040, 4,315 and 4,739.
        """
        return self.blocks if self._world.proxy is not None else min(self.blocks, 8)

    def kernels_of_tiles(self, blocks: int | None = None, weighted: str = "choices") -> list[Callable[[], object]]:
        """Calls that compile a kernel each, of a dispatch and a combine beside GEMMs and of a combine behind them; none without
        `tile_rows`. See `ExpertMatmul.kernels`.

        Args:
            blocks: that `dispatch_send` and `combine_send` get; default those of the object, and `blocks_beside_gemm`.
            weighted: the combine's factors of rows: "choices", their weights in the dispatch; "rows", `weights` of the
                call; "", nothing.
        """
        mode: Any = self._mode  # only throughput mode counts tiles
        both = blocks or self.blocks, blocks or self.blocks_beside_gemm
        return list(mode.variants_of_tiles(*both, weighted)) if self.config.tiles else []

    def alongside(self, pending: Pending) -> Tiles:
        """Let the next launches on the current stream overlap with a pending phase that has tiles.

        The phase is a dispatch of an object with `tile_rows`, or a combine with `tiles`, and has its SMs. Later kernels may
        wait for tiles of the dispatch (`Dispatched.x` is `pending.result.x`), or complete the tiles of the combine.

        Args:
            pending: the phase, the result of `dispatch_send` or `combine_send`.

        Returns:
            The tiles. Tile t is complete when a wait for `words[t]`, "ge", `calls[0] * growth` ends; TMA copies of its rows
            need `proxy="async"`.

        Raises:
            ValueError: not a pending phase, or one without tiles.
        """
        self._world.check()
        if not isinstance(pending, Pending) or self._machine.pending.get(pending.kind) is not pending:
            raise ValueError(
                "AllToAll.alongside: this phase is not in flight; pass the result of dispatch_send or combine_send"
            )
        if pending.tiles is None:
            raise ValueError(f"AllToAll.alongside: {_NO_TILES[pending.kind]}")
        self._mode.start(pending)
        return pending.tiles

    def _check_tiles(self, tiles: Tiles) -> None:
        """Raise TypeError or ValueError for tiles of `y` that this object's combine cannot wait for."""
        if not isinstance(tiles, Tiles):
            raise TypeError(f"AllToAll.combine_send: tiles must be Tiles, not {type(tiles).__name__}")
        mine = self.config.tile_rows, self.config.tiles, self.blocks
        if (tiles.rows, tiles.count, tiles.begins) != mine:
            raise ValueError(
                f"AllToAll.combine_send: tiles are {tiles.count} of {tiles.rows} rows, begun by {tiles.begins} blocks; those of "
                f"this object are {mine[1]} of {mine[0]} rows, begun by {mine[2]} blocks"
            )

    # -- states and faults --------------------------------------------------------------------------------------------

    def _machine_check(self, call: str) -> None:
        machine = self._machine
        machine.freed = not self.alive
        if machine.freed:
            self._world.check()
        machine.outdated = self.outdated
        machine.left_out = self._world.control.excluded
        machine.check(call)

    def _begin(self, call: str = "", after: torch.Event | None = None) -> None:
        """First step of every call that sends: check the state, then raise earlier faults.

        Raises:
            TypeError: `after` is no event; the other ranks wait until this one makes the right call.
        """
        if after is not None and not isinstance(after, torch.Event | torch.cuda.Event):
            raise TypeError(f"AllToAll.{call}: after must be an event of torch, not {type(after).__name__}")
        world = self._world
        if self._machine.pending or not self._owned or self._members is not world.control.members:
            self._machine_check(call)
        world.check()
        if self.status.written():
            self._raise_fault()
        self._order.follow()
        if after is not None and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).wait_event(after)
        if self._arena is not None and call not in ("set_active", "empty_output"):
            self._arena.enter(self, call)

    def _named(self, call: str, error: ArgumentError) -> Exception:
        return type(error.error)(f"AllToAll.{call} on rank {self.rank}: {error.error}")

    def _raise_fault(self) -> None:
        """Raise faults that kernels have reported."""
        error = self.status.error("AllToAll", self.config.num_experts, self.config.capacity)
        if error is not None:
            raise error

    def _raise_fault_if_simulated(self) -> None:
        """If a launch returns after its kernels (simulator), a fault is known at once."""
        if self._simulated and self.status.written():
            self._raise_fault()

    def _discard_fault(self) -> None:
        """Discard the faults of this rank's kernels: another error names them, or their calls were abandoned."""
        self._world.synchronize()
        self.status.take()
