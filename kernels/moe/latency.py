"""Latency mode on the host: buffers, and the launches of its kernels, whole or in phases.

`NodeLatencyMode` is the same where rows cross the network once per node: other buffers and kernels, the same calls.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch

from tilescale_net.kernels.collective import BufferSpecs, dtype_name
from tilescale_net.kernels.moe.checks import ArgumentError
from tilescale_net.kernels.moe.config import FP8, Config
from tilescale_net.kernels.moe.handle import Choices, Dispatched, Empty, Handle, Pending, Plans, ReceivedRows, Vectors
from tilescale_net.kernels.moe.latency_combine import combine_latency, exchange_weights, parts_of
from tilescale_net.kernels.moe.latency_dispatch import dispatch_latency
from tilescale_net.kernels.moe.layout import (
    NO_FAULT,
    Forwarders,
    HeaderLayout,
    LatencyNodePlanOffsets,
    MessageLayout,
    NodeLayout,
    with_room,
)
from tilescale_net.kernels.moe.mode import Launch, Mode, Phase, stream_key
from tilescale_net.kernels.moe.row_ops import groups_of

# What a call gives to a launch, in this order.
DISPATCH = (
    "tokens", "fault", "fault_value", "x", "x_scales", "topk_idx", "topk_weights", "token_slot", "targets", "weights",
    "received", "source_counts", "source_token", "out", "out_scales", "counts",
)  # fmt: skip
COMBINE = ("y", "targets", "weights", "received", "bias_0", "bias_1", "out", "tag", "token_slot", "tokens")
TIMED = ("waited",)  # behind the others
_WEIGHTS = ("topk_weights", "tokens", "token_slot", "received", "weights")


def parts(config: Config, tuning, proxied: bool) -> tuple[int, int]:
    """Parts of a row of combine as they are wanted, and as there are."""
    wanted = 1 if proxied else tuning.parts  # small messages suit memory, large ones a fabric
    return wanted, parts_of(config.hidden, 16 // config.combine_dtype.itemsize, wanted)[0]


def symmetric_buffers(config: Config, tuning, proxied: bool) -> BufferSpecs:
    """Symmetric memory of the mode: "kernel.parameter" -> (shape, dtype)."""
    c, R, M = config, config.ranks, config.max_tokens
    message, header = MessageLayout(c.row_words, c.scale_words, c.top_k), HeaderLayout(c.local_experts)
    G, payload = groups_of(c.hidden), FP8 if c.quantize_combine else c.combine_dtype
    places, stages = 2 * R * M, 2 * R * M if proxied else 1
    ints, floats, words = torch.int32, torch.float32, torch.uint64
    return {
        "dispatch.message": ((2 * M, message.words), ints),
        "dispatch.header_out": ((2 * R, header.words), ints),
        "dispatch.header_in": ((2 * R, header.words), ints),
        "dispatch.arrival": ((places, message.words), ints),
        "dispatch.begun": ((2 * R,), words),
        "dispatch.arrived": ((places,), words),
        "combine.slots": ((places, c.hidden), payload),
        "combine.slot_scales": ((places if c.quantize_combine else 1, G), floats),
        "combine.staged": ((stages, c.hidden), payload),
        "combine.staged_scales": ((stages if c.quantize_combine else 1, G), floats),
        "combine.begun": ((2 * R,), words),
        "combine.arrived": ((places, parts(c, tuning, proxied)[1]), words),
        "weights.weights_out": ((places, c.top_k), floats),
        "weights.weights_in": ((places, c.top_k), floats),
        "weights.sent": ((2 * R,), words),
    }


def _timed(waited: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """What a launch takes behind the rest: what clocks of waiting are added to."""
    return () if waited is None else (waited.view(torch.uint64),)


class LatencyMode(Mode):
    """Few tokens: every multiprocessor sends and receives, and the kernels exist whole and in halves."""

    meets_first = False
    dispatch_takes = DISPATCH

    def __init__(self, base, config: Config, specs: BufferSpecs | None = None):
        super().__init__(base, config, specs or symmetric_buffers(config, base.tuning, base.proxied))
        c, device = config, base.device
        self._proxied, self._quantises = base.proxied, c.dtype == FP8
        self._parts, self._cuts = parts(config, base.tuning, self._proxied)
        shared = {"active": base.active, "status": base.status.tensor}
        dispatch, combine = (
            self._buffers(kernel)
            | {half: base.counters(base.blocks) for half in ("send_calls", "receive_calls")}
            | shared
            for kernel in ("dispatch", "combine")
        )
        message = dispatch["message"]
        self._dispatch_fixed = dispatch | {
            "message_fp8": message.view(FP8), "message_scales": message.view(torch.float32),
        }  # fmt: skip
        self._combine_fixed = combine
        self._weights_fixed = self._buffers("weights") | {"active": base.active, "calls": base.counters(c.ranks)}

        self._new_counts = Vectors(c.local_experts, device)
        experts, *rest = self.output_shape()
        rows = Empty((*rest,), c.dtype, device)
        each = (c.scale_words, rest[0]) if c.column_scales else (rest[0], c.scale_words)
        scales = Empty(each, torch.float32, device) if c.scale_words else None
        self._new_output = lambda: (rows(experts), scales and scales(experts))
        self._plans = self._new_plans()

        # Stand in for tensors without elements, and for those that a kernel does not use.
        self._no_row = torch.zeros((1, c.row_words), dtype=torch.int32, device=device)
        self._no_scales = torch.zeros((1, max(c.scale_words, 1)), dtype=torch.int32, device=device)
        self._no_rows = {
            d: torch.zeros((1, c.hidden), dtype=d, device=device)
            for d in (torch.bfloat16, torch.float16, torch.float32)
        }
        self._no_choice = torch.zeros((1, c.top_k), dtype=torch.int64, device=device)
        self._no_weight = torch.zeros((1, c.top_k), dtype=torch.float32, device=device)

    def _new_plans(self) -> Plans:
        device = self._base.device
        return Plans(ReceivedRows, self._plan_shapes(), device, partial(stream_key, device))

    # -- kernels ----------------------------------------------------------------------------------------------------

    def variants(self, everything: bool) -> list[Callable[[], object]]:
        blocks = self._base.blocks
        if not everything:
            return [
                partial(self._dispatch_of, blocks, Phase.WHOLE, "", "int64"),
                partial(self._combine_of, blocks, Phase.WHOLE, True),
            ]
        sources = ("", "bfloat16", "float16", "float32") if self._c.can_quantise else ("",)
        dispatches = product((Phase.WHOLE, Phase.SEND), sources, ("int64", "int32"))
        return [
            *(partial(self._dispatch_of, blocks, *which) for which in dispatches),
            partial(self._dispatch_of, blocks, Phase.RECEIVE, "", "int64"),
            *(partial(self._combine_of, blocks, *which) for which in product(Phase, (True, False))),
            self._exchange_weights,
        ]

    def _dispatch_of(self, *which) -> Callable[..., None]:
        return self._launch(self._new_dispatch, *which)

    def _fewer(self, blocks: int) -> dict[str, int]:
        """What tells a kernel that it runs on fewer blocks than the tuning has."""
        return {"absent": self._base.blocks - blocks} if blocks != self._base.blocks else {}

    def _new_dispatch(self, blocks: int, phase: Phase, source: str, index_dtype: str, timed: bool = False) -> Launch:
        c, base = self._c, self._base
        kernel = dispatch_latency(
            c.ranks, c.num_experts, c.top_k, c.max_tokens, c.row_words, c.scale_words, source, phase.sends,
            phase.receives, blocks, base.threads, index_dtype, timed=timed, **self._fewer(blocks), **self._on_the_way(),
            **self._order(),
        )  # fmt: skip
        given, forms = self.dispatch_takes + TIMED * timed, self._dispatch_forms(source, index_dtype)
        return Launch(kernel, self._dispatch_fixed, given, base.world, **forms)

    def _on_the_way(self) -> dict[str, int]:
        """What tells kernels of forwarders between nodes."""
        return {}

    def _order(self) -> dict[str, bool]:
        """What tells a dispatch of the order of received scales."""
        return {"column_scales": True} if self._c.column_scales else {}

    def _dispatch_forms(self, source: str, index_dtype: str) -> dict[str, dict]:
        """As what a kernel takes tensors that are given otherwise, see `Launch`."""
        c, scales = self._c, max(self._c.scale_words, 1)
        words = {"x_scales": scales, "out": c.row_words, "out_scales": scales} | ({} if source else {"x": c.row_words})
        words |= {"out_scales": c.ranks * c.max_tokens} if c.column_scales else {}
        nothing = {
            "x": self._no_rows[getattr(torch, source)] if source else self._no_row, "x_scales": self._no_scales,
            "topk_idx": self._no_choice.to(getattr(torch, index_dtype)), "topk_weights": self._no_weight,
            "out_scales": self._no_scales,
        }  # fmt: skip
        return {"words": words, "stand_ins": nothing}

    def _combine_of(
        self, blocks: int, phase: Phase, weighted: bool, biases: int = 0, *timed: bool
    ) -> Callable[..., None]:
        return self._launch(self._new_combine, blocks, phase, weighted, biases, *timed)

    def _new_combine(self, blocks: int, phase: Phase, weighted: bool, biases: int, timed: bool = False) -> Launch:
        c, base = self._c, self._base
        kernel = combine_latency(
            c.ranks, c.top_k, c.max_tokens, c.hidden, dtype_name(c.combine_dtype), weighted, c.quantize_combine,
            self._proxied, phase.sends, phase.receives, self._parts, biases, blocks, base.threads,
            timed=timed, **self._fewer(blocks),
        )  # fmt: skip
        return Launch(kernel, self._combine_fixed, COMBINE + TIMED * timed, base.world, **self._combine_forms())

    def _combine_forms(self) -> dict[str, dict]:
        nothing = dict.fromkeys(("y", "bias_0", "bias_1", "out"), self._no_rows[self._c.combine_dtype])
        return {"columns": {"y": self._c.hidden}, "stand_ins": nothing}

    def _exchange_weights(self, *timed: bool) -> Callable[..., None]:
        return self._launch(self._new_exchange, *timed)

    def _new_exchange(self, timed: bool = False) -> Launch:
        c, base = self._c, self._base
        kernel = exchange_weights(c.ranks, c.top_k, c.max_tokens, base.threads, timed)
        return Launch(kernel, self._weights_fixed, _WEIGHTS + TIMED * timed, base.world)

    # -- dispatch ---------------------------------------------------------------------------------------------------

    def output_shape(self) -> tuple[int, int, int]:
        return self._c.local_experts, self._c.ranks * self._c.max_tokens, self._c.hidden

    def _plan_shapes(self) -> dict:
        """Of what the two halves of a dispatch find out."""
        c = self._c
        return ReceivedRows.shapes(c.ranks, c.max_tokens, c.local_experts, c.top_k)

    def _received_by(self, plan: ReceivedRows) -> tuple:
        """Of a plan, what a dispatch writes."""
        return plan.arguments[:6]

    def _summed_by(self, plan: ReceivedRows) -> tuple:
        """Of a plan, what a combine goes by at the end of its arguments."""
        return plan.arguments[0], plan.tokens

    def _results(self, out) -> tuple[torch.Tensor, torch.Tensor | None, tuple]:
        """Rows and scales for the caller; and these, with counts, as launches take them. After the plan of the call."""
        counts = self._new_counts.next(self._plans.stream)
        if not self._c.column_scales:
            rows, scales = self._new_output() if out is None else out
            return rows, scales, (rows, scales, counts)
        rows, columns = self._new_output() if out is None else (out[0], out[1].transpose(1, 2))
        return rows, columns.transpose(1, 2), (rows, columns, counts)

    def dispatch(
        self, x, scales, choices: Choices | Handle, out, phase: Phase, blocks: int, waited: torch.Tensor | None = None,
        fault: ArgumentError | None = None,
    ) -> Pending:  # fmt: skip
        plan = self._plans.next(x.shape[0])
        rows, row_scales, results = self._results(out)
        self._launch_dispatch(phase, blocks, plan, results, x, scales, choices, fault, waited)
        handle = Handle(self._signature, plan, self._base.membership, choices.dropped)
        row_scales = self._seen_as(scales, row_scales)
        result = Dispatched(rows, row_scales, results[2], None, None, None, None, handle)
        return Pending("dispatch", handle, result, (blocks, plan, results, waited))

    def _launch_dispatch(
        self, phase: Phase, blocks: int, plan: ReceivedRows, results: tuple, x=None, scales=None,
        choices: Choices | None = None, fault: ArgumentError | None = None, waited: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """`x`, `scales` and `choices` are for the half that sends, `waited` for the one that receives."""
        timed = _timed(waited) if phase.receives else ()
        quantises = x is not None and self._quantises and x.dtype != FP8
        topk_idx, topk_weights = (None, None) if choices is None else (choices.topk_idx, choices.topk_weights)
        index_dtype = "int64" if topk_idx is None else dtype_name(topk_idx.dtype)
        self._dispatch_of(blocks, phase, dtype_name(x.dtype) if quantises else "", index_dtype, *(True,) * len(timed))(
            plan.tokens,
            fault.code if fault else NO_FAULT,
            fault.value if fault else 0,
            x,
            scales,
            topk_idx,
            topk_weights,
            *self._received_by(plan),
            *results,
            *timed,
        )

    # -- combine ----------------------------------------------------------------------------------------------------

    def combine(
        self, y, handle: Handle, out, weights, phase: Phase, blocks: int, values=None, bias=(),
        waited: torch.Tensor | None = None, code: int = NO_FAULT,
    ) -> Pending:  # fmt: skip
        c, plan, given = self._c, handle.plan, None
        if isinstance(weights, torch.Tensor):
            given = torch.empty((c.ranks * c.max_tokens, c.top_k), dtype=torch.float32, device=out.device)
            self._launch_weights(weights, plan, given, waited)
        weighted = given is not None or bool(weights)
        self._launch_combine(
            phase, blocks, y, plan, given, out if phase.receives else None, weighted, bias, waited, code
        )
        return Pending("combine", handle, out, (blocks, plan, given, weighted, bias, waited))

    def receive(self, pending: Pending) -> None:
        if pending.kind == "dispatch":
            blocks, plan, results, waited = pending.rest
            self._launch_dispatch(Phase.RECEIVE, blocks, plan, results, waited=waited)
        else:
            blocks, plan, given, weighted, bias, waited = pending.rest
            self._launch_combine(Phase.RECEIVE, blocks, None, plan, given, pending.result, weighted, bias, waited)

    def _launch_weights(self, weights: torch.Tensor, plan: ReceivedRows, received: torch.Tensor, waited=None) -> None:
        """Send the weights of this rank's choices, and fill `received` with those of the others."""
        token_slot, _, _, counts = plan.arguments[:4]
        given = weights if weights.numel() else self._no_weight
        timed = _timed(waited)
        self._exchange_weights(*(True,) * len(timed))(given, plan.tokens, token_slot, counts, received, *timed)

    def _launch_combine(
        self, phase: Phase, blocks: int, y, plan: ReceivedRows, given, out, weighted: bool, bias=(), waited=None,
        code: int = NO_FAULT,
    ) -> None:  # fmt: skip
        """`out`, `bias` and `waited` are used by the half that receives, `y` by the one that sends; `given`: weights other than
        dispatch's."""
        _, targets, weights, counts = plan.arguments[:4]
        bias = bias if phase.receives and plan.tokens else ()
        timed = _timed(waited) if phase.receives else ()
        self._combine_of(blocks, phase, weighted, len(bias), *(True,) * len(timed))(
            y, targets, weights if given is None else given, counts, *bias, *(None,) * (2 - len(bias)), out, code,
            *self._summed_by(plan), *timed,
        )  # fmt: skip


NODE_COMBINE = (*COMBINE[:-2], "origin_slot", "tokens", "node_plan")


def _forwarding_buffers(config: Config, tuning, at: NodeLayout) -> BufferSpecs:
    """Symmetric memory of what a forwarder forwards, which grows with the sources that it serves."""
    c, rows = config, 2 * at.slots * config.max_tokens
    message = MessageLayout(c.row_words, c.scale_words, c.top_k, True)
    payload, cuts = FP8 if c.quantize_combine else c.combine_dtype, parts(c, tuning, True)[1]
    return {
        "dispatch.to_forward": ((rows, message.words), torch.int32),
        "dispatch.forward_arrived": ((rows,), torch.uint64),
        "combine.staged": ((rows, c.hidden), payload),
        "combine.staged_scales": ((rows if c.quantize_combine else 1, groups_of(c.hidden)), torch.float32),
        "combine.partial_sums": ((rows * at.size, c.hidden), c.combine_dtype),
        "combine.partials_arrived": ((rows * at.size, cuts), torch.uint64),
    }


def node_symmetric_buffers(config: Config, tuning, nodes: int, masks: Sequence[tuple[bool, ...]] = ()) -> BufferSpecs:
    """Symmetric memory of the mode: "kernel.parameter" -> (shape, dtype).

    Args:
        masks: ranks that take part when they are not all, now and later.
    """
    c, R, M, at = config, config.ranks, config.max_tokens, with_room(config.ranks, nodes, masks)
    message, header = MessageLayout(c.row_words, c.scale_words, c.top_k, True), HeaderLayout(c.local_experts, True)
    payload, cuts, back = (
        FP8 if c.quantize_combine else c.combine_dtype,
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
        | _forwarding_buffers(c, tuning, at)
    )


class NodeLatencyMode(LatencyMode):
    """As its base, with forwarders between nodes; see layout.py."""

    dispatch_takes = (*DISPATCH[:-3], "origin_slot", "node_plan", *DISPATCH[-3:])

    def __init__(self, base, config: Config, masks: Sequence[tuple[bool, ...]]):
        self._at = with_room(config.ranks, base.nodes, masks)
        super().__init__(base, config, node_symmetric_buffers(config, base.tuning, base.nodes, masks))
        self._use_map(base.mask)

    @property
    def sums_over(self) -> int:
        return self._at.nodes

    def _use_map(self, mask: tuple[bool, ...]) -> None:
        """Let the kernels go by the map of these members."""
        words = Forwarders(mask, self._at.nodes).words(self._base.rank, self._at.slots)
        node_map = torch.tensor(words, dtype=torch.int32, device=self._base.device)
        for fixed in (self._dispatch_fixed, self._combine_fixed):
            fixed["node_map"] = node_map

    def regroup(self, mask: tuple[bool, ...]) -> None:
        """A forwarder that is left out is replaced, by one that may then serve more sources than there was room for."""
        at = with_room(self._c.ranks, self._at.nodes, [mask])
        if at.slots > self._at.slots:
            self._at = at
            with torch.inference_mode(False):
                grown = self._base.replace(self._symmetric, _forwarding_buffers(self._c, self._base.tuning, at))
            self._symmetric.update(grown)
            self._dispatch_fixed.update(self._buffers("dispatch"))
            self._combine_fixed.update(self._buffers("combine"))
            self._plans = self._new_plans()
        self._use_map(mask)
        self._launches.clear()

    # -- kernels ----------------------------------------------------------------------------------------------------

    def _on_the_way(self) -> dict[str, int]:
        return {"nodes": self._at.nodes, "slots": self._at.slots}

    def _new_combine(self, blocks: int, phase: Phase, weighted: bool, biases: int, timed: bool = False) -> Launch:
        c, base, at = self._c, self._base, self._at
        kernel = combine_latency(
            c.ranks, c.top_k, c.max_tokens, c.hidden, dtype_name(c.combine_dtype), weighted, c.quantize_combine, True,
            phase.sends, phase.receives, self._parts, biases, blocks, base.threads, timed=timed, nodes=at.nodes,
            forwarder_slots=at.slots, **self._fewer(blocks),
        )  # fmt: skip
        return Launch(kernel, self._combine_fixed, NODE_COMBINE + TIMED * timed, base.world, **self._combine_forms())

    # -- calls ------------------------------------------------------------------------------------------------------

    def _plan_shapes(self) -> dict:
        c, at = self._c, self._at
        words = LatencyNodePlanOffsets(at, c.max_tokens, c.top_k).words
        return super()._plan_shapes() | {
            "origin_slot": ((c.max_tokens, at.origins), torch.int32),
            "node_plan": ((words,), torch.int32),
        }

    def _received_by(self, plan: ReceivedRows) -> tuple:
        return plan.arguments

    def _summed_by(self, plan: ReceivedRows) -> tuple:
        origin_slot, node_plan = plan.arguments[6:]
        return origin_slot, plan.tokens, node_plan
