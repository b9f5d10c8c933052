"""Latency mode on the host: buffers, and the launches of its kernels, whole or in phases.

`NodeLatencyMode` is for rows that cross the network once per node: other buffers and kernels, the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from tilescale_net.kernels.collective import BufferSpecs, dtype_name
from tilescale_net.kernels.moe.checks import CombineCall, DispatchCall, Phase
from tilescale_net.kernels.moe.config import FP8_DTYPE, Config, Tuning
from tilescale_net.kernels.moe.handle import Dispatched, Handle, LikeFactory, Pending, Plans, ReceivedRows, TensorPool
from tilescale_net.kernels.moe.latency_combine import combine_latency, exchange_weights, parts_of
from tilescale_net.kernels.moe.latency_dispatch import dispatch_latency
from tilescale_net.kernels.moe.layout import (
    NO_FAULT,
    HeaderLayout,
    LatencyNodePlanOffsets,
    MessageLayout,
    NodeLayout,
    NodeSizes,
    with_room,
)
from tilescale_net.kernels.moe.mode import Launch, Mode, OverNodes, stream_key
from tilescale_net.kernels.moe.row_ops import groups_of

# The arguments of a call to a launch, in this order.
DISPATCH = (
    "tokens", "fault", "fault_value", "phases", "x", "x_scales", "topk_idx", "topk_weights", "token_slot", "targets", "weights",
    "received", "source_counts", "source_token", "out", "out_scales", "counts", "totals",
)  # fmt: skip

if TYPE_CHECKING:
    from tilescale_net.kernels.moe.all_to_all import AllToAll
WHOLE, SEND, RECEIVE = Phase.WHOLE.bits, Phase.SEND.bits, Phase.RECEIVE.bits
COMBINE = ("y", "targets", "weights", "received", "bias_0", "bias_1", "out", "tag", "phases", "token_slot", "tokens")
TIMED = ("waited",)  # behind the others
_WEIGHTS = ("topk_weights", "tokens", "token_slot", "received")


def parts(config: Config, tuning: Tuning, proxied: bool) -> tuple[int, int]:
    """Requested and actual parts of a combine's row."""
    requested = 1 if proxied else tuning.parts  # small messages are faster over memory, large ones over a fabric
    return requested, parts_of(config.hidden, 16 // config.combine_dtype.itemsize, requested)[0]


def symmetric_buffers(config: Config, tuning: Tuning, proxied: bool) -> BufferSpecs:
    """Symmetric memory of the mode: "kernel.parameter" -> (shape, dtype)."""
    c, R, M = config, config.ranks, config.max_tokens
    message, header = MessageLayout(c.row_words, c.scale_words, c.top_k), HeaderLayout(c.local_experts)
    G, payload = groups_of(c.hidden), FP8_DTYPE if c.quantize_combine else c.combine_dtype
    rows, stages = 2 * R * M, 2 * R * M if proxied else 1
    ints, floats, words = torch.int32, torch.float32, torch.uint64
    return {
        "dispatch.message": ((2 * M, message.words), ints),
        "dispatch.header_out": ((2 * R, header.words), ints),
        "dispatch.header_in": ((2 * R, header.words), ints),
        "dispatch.arrival": ((rows, message.words), ints),
        "dispatch.begun": ((2 * R,), words),
        "dispatch.arrived": ((rows,), words),
        "combine.slots": ((rows, c.hidden), payload),
        "combine.slot_scales": ((rows if c.quantize_combine else 1, G), floats),
        "combine.staged": ((stages, c.hidden), payload),
        "combine.staged_scales": ((stages if c.quantize_combine else 1, G), floats),
        "combine.begun": ((2 * R,), words),
        "combine.arrived": ((rows, parts(c, tuning, proxied)[1]), words),
        "weights.weights_out": ((rows, c.top_k), floats),
        "weights.weights_in": ((rows, c.top_k), floats),
        "weights.sent": ((2 * R,), words),
    }


def _timed(waited: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """The last launch argument: the tensor to which clocks of waiting are added."""
    return () if waited is None else (waited.view(torch.uint64),)


class LatencyMode(Mode):
    """Few tokens: every SM sends and receives, and the kernels exist whole and in phases."""

    meets_first = False
    dispatch_takes: tuple[str, ...] = DISPATCH
    combine_takes: tuple[str, ...] = COMBINE
    _written = slice(6)  # the plan's arguments that a dispatch writes

    def __init__(self, base: AllToAll, config: Config, specs: BufferSpecs | None = None):
        super().__init__(base, config, specs or symmetric_buffers(config, base.tuning, base.proxied))
        c, device = config, base.device
        self._proxied, self._quantises = base.proxied, c.dtype == FP8_DTYPE
        self._parts, _ = parts(config, base.tuning, self._proxied)
        shared = {"active": base.active, "status": base.status.tensor}
        self._constants = {
            kernel: self._buffers(kernel)
            | shared
            | {f"{p}_calls": base.counters(base.blocks) for p in ("send", "receive")}
            for kernel in ("dispatch", "combine")
        }
        message = self._constants["dispatch"]["message"]
        self._constants["dispatch"] |= {
            "message_fp8": message.view(FP8_DTYPE),
            "message_scales": message.view(torch.float32),
        }
        # A combine's own weights of the received rows; combines run one after the other.
        self._weights = torch.empty((c.ranks * c.max_tokens, c.top_k), dtype=torch.float32, device=device)
        own = {"active": base.active, "calls": base.counters(c.ranks), "weights": self._weights}
        self._constants["weights"] = self._buffers("weights") | own

        self._new_counts = TensorPool(c.local_experts, device)
        experts, *rest = self.output_shape()
        self._new_rows = LikeFactory((*rest,), c.dtype, device).of(experts)
        self._new_scales: Callable[[], Any] = (
            LikeFactory((rest[0], c.scale_words), torch.float32, device, c.column_scales).of(experts)
            if c.scale_words
            else lambda: None
        )
        self._plans = self._new_plans()

        # Placeholders for empty and unused tensors.
        self._no_row = torch.zeros((1, c.row_words), dtype=torch.int32, device=device)
        self._no_scales = torch.zeros((1, max(c.scale_words, 1)), dtype=torch.int32, device=device)
        self._no_rows = {
            d: torch.zeros((1, c.hidden), dtype=d, device=device)
            for d in (torch.bfloat16, torch.float16, torch.float32)
        }
        self._no_choice = torch.zeros((1, c.top_k), dtype=torch.int64, device=device)
        self._no_weight = torch.zeros((1, c.top_k), dtype=torch.float32, device=device)
        self._no_totals = torch.zeros(c.local_experts, dtype=torch.int32, device=device)  # added to, never read

    def _new_plans(self) -> Plans:
        device = self._base.device
        return Plans(ReceivedRows, self._plan_shapes(), device, stream_key(device))

    # -- kernels ----------------------------------------------------------------------------------------------------

    def variants(self, everything: bool) -> list[Callable[[], object]]:
        blocks = self._base.blocks
        if not everything:
            return [
                partial(self._dispatch_of, blocks, "bfloat16" if self._c.can_quantise else "", "int64"),
                partial(self._combine_of, blocks, True),
                # deep_ep's combines pass weights. The simulator compiles kernels in turn.
                *([self._exchange_weights] if self._base.device.type != "cpu" else []),
            ]
        # Quantised rows of other dtypes are rare, and their kernels take the longest to compile.
        sources = ("", "bfloat16") if self._c.can_quantise else ("",)
        return [
            *(partial(self._dispatch_of, blocks, *which) for which in product(sources, ("int64", "int32"))),
            *(partial(self._combine_of, blocks, weighted) for weighted in (True, False)),
            self._exchange_weights,
        ]

    def _dispatch_of(self, *which: Any) -> Callable[..., None]:
        return self._launch(self._new_dispatch, *which)

    def _fewer(self, blocks: int) -> dict[str, int]:
        """Options of a kernel on fewer blocks than the tuning's."""
        return {"absent": self._base.blocks - blocks} if blocks != self._base.blocks else {}

    def _new_dispatch(self, blocks: int, source: str, index_dtype: str, timed: bool = False) -> Launch:
        c, base = self._c, self._base
        kernel = dispatch_latency(
            c.ranks, c.num_experts, c.top_k, c.max_tokens, c.row_words, c.scale_words, source, blocks, base.threads,
            index_dtype, timed=timed, **self._fewer(blocks), **self._route("dispatch"), **self._order(),
        )  # fmt: skip
        varying, forms = self.dispatch_takes + TIMED * timed, self._dispatch_forms(source, index_dtype)
        return Launch(kernel, self._constants["dispatch"], varying, base.world, **forms)

    def _route(self, kernel: str) -> dict[str, Any]:
        """Options of a kernel with forwarders between nodes."""
        return {}

    def _order(self) -> dict[str, bool]:
        """Options of a dispatch for the order of received scales."""
        return {"column_scales": True} if self._c.column_scales else {}

    def _dispatch_forms(self, source: str, index_dtype: str) -> dict[str, Any]:
        """Conversions of tensors for a kernel, see `Launch`."""
        c, scales = self._c, max(self._c.scale_words, 1)
        words = {"x_scales": scales, "out": c.row_words, "out_scales": scales} | ({} if source else {"x": c.row_words})
        words |= {"out_scales": c.ranks * c.max_tokens} if c.column_scales else {}
        nothing = {
            "x": self._no_rows[getattr(torch, source)] if source else self._no_row, "x_scales": self._no_scales,
            "topk_idx": self._no_choice.to(getattr(torch, index_dtype)), "topk_weights": self._no_weight,
            "out_scales": self._no_scales, "totals": self._no_totals,
        }  # fmt: skip
        return {"words": words, "placeholders": nothing, "transposed": ("out_scales",) if c.column_scales else ()}

    def _combine_of(self, blocks: int, weighted: bool, biases: int = 0, *timed: bool) -> Callable[..., None]:
        return self._launch(self._new_combine, blocks, weighted, biases, *timed)

    def _new_combine(self, blocks: int, weighted: bool, biases: int, timed: bool = False) -> Launch:
        c, base = self._c, self._base
        kernel = combine_latency(
            c.ranks, c.top_k, c.max_tokens, c.hidden, dtype_name(c.combine_dtype), weighted, c.quantize_combine,
            self._proxied, self._parts, biases, blocks, base.threads,
            timed=timed, **self._fewer(blocks), **self._route("combine"),
        )  # fmt: skip
        parameters = self.combine_takes + TIMED * timed
        return Launch(kernel, self._constants["combine"], parameters, base.world, **self._combine_forms())

    def _combine_forms(self) -> dict[str, Any]:
        nothing = dict.fromkeys(("y", "bias_0", "bias_1", "out"), self._no_rows[self._c.combine_dtype])
        return {"columns": {"y": self._c.hidden}, "placeholders": nothing}

    def _exchange_weights(self, *timed: bool) -> Callable[..., None]:
        return self._launch(self._new_exchange, *timed)

    def _new_exchange(self, timed: bool = False) -> Launch:
        c, base = self._c, self._base
        kernel = exchange_weights(c.ranks, c.top_k, c.max_tokens, base.threads, timed)
        return Launch(kernel, self._constants["weights"], _WEIGHTS + TIMED * timed, base.world)

    # -- dispatch ---------------------------------------------------------------------------------------------------

    def output_shape(self) -> tuple[int, int, int]:
        return self._c.local_experts, self._c.ranks * self._c.max_tokens, self._c.hidden

    def _plan_shapes(self) -> dict:
        """Shapes and dtypes of a plan's tensors."""
        c = self._c
        return ReceivedRows.shapes(c.ranks, c.max_tokens, c.local_experts, c.top_k)

    def _summed_by(self, plan: ReceivedRows) -> tuple:
        """The plan's tensors that end a combine's arguments."""
        return plan.arguments[0], plan.tokens

    def _results(self, out: Any) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Rows, scales and counts for the caller. After the plan of the call."""
        counts = self._new_counts.next(self._plans.stream)
        return *((self._new_rows(), self._new_scales()) if out is None else out), counts

    def dispatch(self, call: DispatchCall) -> Pending:
        plan = self._plans.next(call.x.shape[0])
        rows, row_scales, counts = results = self._results(call.out)
        source = dtype_name(call.x.dtype) if self._quantises and call.x.dtype != FP8_DTYPE else ""
        timed = () if call.waited is None else (True,)
        launch = self._dispatch_of(call.blocks, source, dtype_name(call.choices.topk_idx.dtype), *timed)
        self._launch_dispatch(call.phase, call, plan, results, launch)
        handle = Handle(self._signature, plan, self._base.membership, call.choices.dropped)
        row_scales = self._seen_as(call.scales, row_scales)
        result = Dispatched(rows, row_scales, counts, None, None, None, None, handle)
        call.x = call.scales = call.choices = None  # the receive phase does not need them
        receive = partial(self._launch_dispatch, Phase.RECEIVE, call, plan, results, launch)
        return Pending("dispatch", handle, result, receive)

    def _launch_dispatch(
        self, phase: Phase, call: DispatchCall, plan: ReceivedRows, results: tuple, launch: Callable[..., None]
    ) -> None:
        choices, fault = call.choices, call.fault
        topk_idx, topk_weights = (None, None) if choices is None else (choices.topk_idx, choices.topk_weights)
        launch(
            plan.tokens, NO_FAULT if fault is None else fault.code, 0 if fault is None else fault.value, phase.bits, call.x,
            call.scales, topk_idx, topk_weights, *plan.arguments[self._written], *results, call.totals, *_timed(call.waited),
        )  # fmt: skip

    def usual_dispatch(self, tokens: int, x: Any, topk_idx: Any, topk_weights: Any, totals: Any = None) -> Dispatched:
        return self._usual_dispatch(WHOLE, tokens, x, topk_idx, topk_weights, totals)[0]

    def usual_dispatch_send(
        self, tokens: int, x: Any, topk_idx: Any, topk_weights: Any, totals: Any = None
    ) -> Pending:  # fmt: skip
        result, launch, received = self._usual_dispatch(SEND, tokens, x, topk_idx, topk_weights, totals)
        receive = partial(launch, tokens, NO_FAULT, 0, RECEIVE, None, None, None, None, *received)
        return Pending("dispatch", result.handle, result, receive)

    def _usual_dispatch(
        self, phase: int, tokens: int, x: Any, topk_idx: Any, topk_weights: Any, totals: Any
    ) -> tuple[Dispatched, Callable[..., None], tuple]:
        """The result, and for the receive phase the launch and the arguments that both phases take."""
        key = x.dtype, topk_idx.dtype
        launch = self._usual.get(key)
        if launch is None:
            source = dtype_name(x.dtype) if self._quantises else ""
            launch = self._usual[key] = self._dispatch_of(self._base.blocks, source, dtype_name(topk_idx.dtype))
        plan = self._plans.next(tokens)
        rows, scales, counts = self._new_rows(), self._new_scales(), self._new_counts.next(self._plans.stream)
        received = *plan.arguments[self._written], rows, scales, counts, totals
        launch(tokens, NO_FAULT, 0, phase, x, None, topk_idx, topk_weights, *received)
        handle = Handle(self._signature, plan, self._base.membership)
        return Dispatched(rows, scales, counts, None, None, None, None, handle), launch, received

    # -- combine ----------------------------------------------------------------------------------------------------

    def combine(self, call: CombineCall) -> Pending:
        weights = None
        if isinstance(call.weights, torch.Tensor):
            weights = self._weights
            self._launch_weights(call.weights, call.handle.plan, call.waited)
        self._launch_combine(call.phase, call, weights)
        call.y = None  # the receive phase does not need it
        receive = partial(self._launch_combine, Phase.RECEIVE, call, weights)
        return Pending("combine", call.handle, call.out, receive)

    def receive(self, pending: Pending) -> None:
        pending.rest()

    def usual_combine(self, y: torch.Tensor, handle: Handle, out: torch.Tensor, weights: torch.Tensor | None) -> None:
        self._usual_combine(WHOLE, y, handle, out, weights)

    def usual_combine_send(
        self, y: torch.Tensor, handle: Handle, out: torch.Tensor, weights: torch.Tensor | None
    ) -> Pending:
        launch, received = self._usual_combine(SEND, y, handle, out, weights)
        return Pending("combine", handle, out, partial(launch, None, *received, RECEIVE, *self._summed_by(handle.plan)))

    def _usual_combine(
        self, phase: int, y: torch.Tensor, handle: Handle, out: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[Callable[..., None], tuple]:
        """For the receive phase, the launch and the arguments that both phases take."""
        plan, launch = handle.plan, self._usual.get("combine")
        if launch is None:
            launch = self._usual["combine"] = self._combine_of(self._base.blocks, True)
        token_slot, targets, arrived_weights, counts = plan.arguments[:4]
        if weights is not None:
            exchange = self._usual.get("weights")
            if exchange is None:
                exchange = self._usual["weights"] = self._exchange_weights()
            arrived_weights = self._weights
            exchange(weights if plan.tokens else self._no_weight, plan.tokens, token_slot, counts)
        received = targets, arrived_weights, counts, None, None, out, NO_FAULT
        launch(y, *received, phase, *self._summed_by(plan))
        return launch, received

    def _launch_weights(self, weights: torch.Tensor, plan: ReceivedRows, waited: torch.Tensor | None) -> None:
        """Send the weights of this rank's choices, and receive the others' into `_weights`."""
        token_slot, _, _, counts = plan.arguments[:4]
        own_weights = weights if weights.numel() else self._no_weight
        timed = _timed(waited)
        self._exchange_weights(*(True,) * len(timed))(own_weights, plan.tokens, token_slot, counts, *timed)

    def _launch_combine(self, phase: Phase, call: CombineCall, received_weights: torch.Tensor | None) -> None:
        """`received_weights`: weights of the received rows instead of the dispatch's."""
        plan = call.handle.plan
        _, targets, weights, counts = plan.arguments[:4]
        weighted = received_weights is not None or bool(call.weights)
        bias = call.bias if plan.tokens else ()
        timed = _timed(call.waited)
        self._combine_of(call.blocks, weighted, len(bias), *(True,) * len(timed))(
            call.y, targets, weights if received_weights is None else received_weights, counts, *bias, *(None,) * (2 - len(bias)),
            call.out, call.code, phase.bits, *self._summed_by(plan), *timed,
        )  # fmt: skip


class NodeLatencyMode(OverNodes, LatencyMode):
    """Latency mode for rows that cross the network once per node."""

    dispatch_takes = (*DISPATCH[:-4], "origin_slot", "node_plan", *DISPATCH[-4:])
    combine_takes = (*COMBINE[:-2], "origin_slot", "tokens", "node_plan")
    _written = slice(8)

    @staticmethod
    def carried(config: Config, tuning: Tuning, at: NodeLayout) -> BufferSpecs:
        c, rows = config, 2 * at.slots * config.max_tokens
        message = MessageLayout(c.row_words, c.scale_words, c.top_k, True)
        payload, cuts = FP8_DTYPE if c.quantize_combine else c.combine_dtype, parts(c, tuning, True)[1]
        return {
            "dispatch.to_forward": ((rows, message.words), torch.int32),
            "dispatch.forward_arrived": ((rows,), torch.uint64),
            "combine.staged": ((rows, c.hidden), payload),
            "combine.staged_scales": ((rows if c.quantize_combine else 1, groups_of(c.hidden)), torch.float32),
            "combine.partial_sums": ((rows * at.size, c.hidden), c.combine_dtype),
            "combine.partials_arrived": ((rows * at.size, cuts), torch.uint64),
        }

    @staticmethod
    def node_buffers(
        config: Config, tuning: Tuning, nodes: NodeSizes, masks: Sequence[tuple[bool, ...]] = ()
    ) -> BufferSpecs:
        c, R, M, at = config, config.ranks, config.max_tokens, with_room(config.ranks, nodes, masks)
        message, header = MessageLayout(c.row_words, c.scale_words, c.top_k, True), HeaderLayout(c.local_experts, True)
        payload, cuts, back = (
            FP8_DTYPE if c.quantize_combine else c.combine_dtype,
            parts(c, tuning, True)[1],
            2 * at.origins * M,
        )
        return (
            symmetric_buffers(c, tuning, proxied=True)
            | {
                "dispatch.message": ((2 * M, message.words), torch.int32),
                "dispatch.header_out": ((2 * R, header.words), torch.int32),
                "dispatch.header_in": ((2 * R, header.words), torch.int32),
                "dispatch.arrival": ((2 * R * M, message.words), torch.int32),
                "combine.slots": ((back, c.hidden), payload),
                "combine.slot_scales": ((back if c.quantize_combine else 1, groups_of(c.hidden)), torch.float32),
                "combine.arrived": ((back, cuts), torch.uint64),
            }
            | NodeLatencyMode.carried(c, tuning, at)
        )

    def _route(self, kernel: str) -> dict[str, Any]:
        slots = "slots" if kernel == "dispatch" else "forwarder_slots"
        return {"nodes": self._at.node_sizes, slots: self._at.slots}

    def _plan_shapes(self) -> dict:
        c, at = self._c, self._at
        words = LatencyNodePlanOffsets(at, c.max_tokens, c.top_k).words
        return super()._plan_shapes() | {
            "origin_slot": ((c.max_tokens, at.origins), torch.int32),
            "node_plan": ((words,), torch.int32),
        }

    def _summed_by(self, plan: ReceivedRows) -> tuple:
        origin_slot, node_plan = plan.arguments[6:]
        return origin_slot, plan.tokens, node_plan
