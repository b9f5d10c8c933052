"""Throughput mode on the host: buffers, and the launches of its kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tilescale_net.kernels.collective import BufferSpecs, dtype_name
from tilescale_net.kernels.moe.combine_throughput import combine_throughput
from tilescale_net.kernels.moe.config import FP8, Config, as_words
from tilescale_net.kernels.moe.dispatch_throughput import dispatch_throughput
from tilescale_net.kernels.moe.handle import Choices, DispatchedByPlan, Handle, Pending, RoutingPlan
from tilescale_net.kernels.moe.mode import Launch, Mode, Phase
from tilescale_net.kernels.moe.plans import Plans
from tilescale_net.kernels.moe.refusal import refuse_throughput
from tilescale_net.kernels.moe.routing import plan_routing
from tilescale_net.kernels.moe.row_ops import groups_of
from tilescale_net.kernels.moe.status import ArgumentError
from tilescale_net.kernels.moe.streams import DeferredStream, SideStream
from tilescale_net.kernels.moe.wire_layout import NO_FAULT, Counts, Totals, most_sent, output_tag, record_words
from tilescale_net.runtime.launch_arguments import constant


def placement_of(config: Config) -> str:
    """See dispatch_throughput."""
    return "rank" if config.layout == "rank" else "expert" if config.zero_copy else "arrival"


def output_rows(config: Config) -> int:
    """Rows that dispatch gives. A rank has an expert-major row at least for each rank-major one."""
    return rows_received(config) if config.layout == "rank" else config.capacity


def rows_received(config: Config) -> int:
    """Rank-major rows that a rank receives at most."""
    return min(config.ranks * config.max_tokens, config.capacity)


def shared_rows(config: Config, proxied: bool) -> dict[str, tuple[str, int, int, torch.dtype]]:
    """Buffers of rows: "kernel.parameter" -> (the memory that it lies in, rows, columns, dtype).

    Between nodes a dispatch and a combine share memory, each as many rows as a rank sends, and as it receives. A call
    fills them when all ranks have begun it, and so have ended the one before.
    """
    c, placement = config, placement_of(config)
    sent, received = most_sent(c.ranks, c.max_tokens, c.top_k), rows_received(c)
    payload = FP8 if c.quantize_combine else c.combine_dtype
    arrivals = placement == "arrival" or (proxied and placement == "expert")
    return {
        "dispatch.arrival": ("received", received if arrivals else 1, c.row_words, torch.int32),
        "dispatch.staged": ("sent", sent if proxied else 1, c.row_words, torch.int32),
        "combine.slots": ("sent", sent, c.hidden, payload),
        "combine.staged": ("received", received if proxied else 1, c.hidden, payload),
    }


def symmetric_buffers(config: Config, tuning, proxied: bool) -> BufferSpecs:
    """Symmetric memory of the mode: "kernel.parameter" -> (shape, dtype)."""
    c, R, M = config, config.ranks, config.max_tokens
    counts, W, placement = Counts(c.num_experts, R), record_words(c.top_k), placement_of(c)
    scales, G, chunks = max(c.scale_words, 1), groups_of(c.hidden), -(-M // tuning.chunk)
    own = output_rows(c) if placement != "arrival" else 1
    ints, floats, words = torch.int32, torch.float32, torch.uint64
    shared = shared_rows(config, proxied)
    rows = {name: count for name, (_, count, _, _) in shared.items()}
    memory = {"sent": 0, "received": 0}
    for where, count, columns, dtype in shared.values():
        memory[where] = max(memory[where], count * columns * dtype.itemsize // 4)

    def scaled(rows: int) -> int:
        return rows if c.scale_words else 1

    def quantised(rows: int) -> int:
        return rows if c.quantize_combine else 1

    return {
        "routing.counts_out": ((counts.words,), ints),
        "routing.counts_in": ((R, counts.words), ints),
        "routing.records_out": ((R, M, W), ints),
        "routing.records_in": ((R, M, W), ints),
        "routing.counts_ready": ((R,), words),
        "routing.records_ready": ((R,), words),
        "routing.blocks_ready": ((1,), words),
        "output.rows": ((own, c.hidden), c.dtype),
        "output.scales": ((scaled(own), scales), floats),
        "rows.sent": ((memory["sent"],), ints),
        "rows.received": ((memory["received"],), ints),
        "dispatch.arrival_scales": ((scaled(rows["dispatch.arrival"]), scales), ints),
        "dispatch.staged_scales": ((scaled(rows["dispatch.staged"]), scales), ints),
        "dispatch.ready": ((R,), words),
        "dispatch.arrived": ((R, chunks), words),
        "dispatch.done": ((R,), words),
        "combine.slot_scales": ((quantised(rows["combine.slots"]), G), floats),
        "combine.slot_values": ((rows["combine.slots"], c.top_k), floats),
        "combine.staged_scales": ((quantised(rows["combine.staged"]), G), floats),
        "combine.staged_values": ((rows["combine.staged"], c.top_k), floats),
        "combine.ready": ((R,), words),
        "combine.arrived": ((R, chunks), words),
        "combine.done": ((R,), words),
    }


# What a call gives to a launch, in this order; the fields of RoutingPlan but node_plan last.
_PLAN = ("send_token", "send_row", "token_slot", "records", "totals", "row_index", "row_weight")
_ROUTING = ("topk_idx", "topk_weights", "tokens", "fault", "fault_value", *_PLAN)
DISPATCH = ("x", "x_scales", "out", "out_scales", "tag", "send_token", "send_row", "records", "totals")
COMBINE = (
    "y", "row_weight", "row_values", "bias_0", "bias_1", "out", "out_values", "tokens", "token_slot", "records", "totals"
)  # fmt: skip


class ThroughputMode(Mode):
    """Many tokens: a routing plan is agreed before rows move; first halves run on a stream of their own."""

    node_plan_words = 0  # of a plan, see node_throughput.py

    def __init__(self, base, config: Config, specs: BufferSpecs | None = None):
        super().__init__(base, config, specs or symmetric_buffers(config, base.tuning, base.proxied))
        R, c, tuning, device = config.ranks, config, base.tuning, base.device
        self._tuning, self._proxied = tuning, base.proxied
        # Calls that share memory may not overtake one another.
        ordered = self._shares_rows
        self._stream = SideStream(device, ordered) if device.type == "cuda" else DeferredStream(ordered)
        self.placement = placement_of(c)
        self._in_place = self.placement != "arrival"  # rows land where they are given, or are copied from there
        self.symmetric_output = config.zero_copy
        output = self._buffers("output")
        self._output = output["rows"], output["scales"] if c.scale_words else None
        self._landing = tuple(constant(as_words(output[name], 0)) for name in ("rows", "scales"))
        self._own_tag = output_tag(base.place(output["rows"])) if self._in_place else 0
        self._senders = base.blocks if self.placement == "rank" else tuning.dispatch_senders
        self._chunks = -(-c.max_tokens // tuning.chunk)

        # Words of this rank alone.
        shared = {"active": base.active, "status": base.status.tensor}
        partial = torch.zeros((base.blocks, Counts(c.num_experts, R).words), dtype=torch.int32, device=device)
        self._fixed = {"routing": self._buffers("routing") | shared | {"partial": partial}}
        self._tickets = torch.zeros((2, 2, 2), dtype=torch.int32, device=device)
        for kernel, tickets in zip(("dispatch", "combine"), self._tickets):
            self._fixed[kernel] = self._buffers(kernel) | self._rows_of(kernel) | shared | {"tickets": tickets}
        for fixed in self._fixed.values():
            fixed["calls"] = base.counters(base.blocks)
        self._plans = self._new_plans()
        # Stand in for tensors without elements, and for those that a kernel does not use.
        self._no_words = torch.zeros((1, c.row_words), dtype=torch.int32, device=device)
        self._no_scales = torch.zeros((1, max(c.scale_words, 1)), dtype=torch.int32, device=device)
        self._no_row = torch.zeros((1, c.hidden), dtype=c.combine_dtype, device=device)
        self._no_values = torch.zeros((1, c.top_k), dtype=torch.float32, device=device)

    @property
    def _shares_rows(self) -> bool:  # by dispatch and combine, see shared_rows
        return self._proxied

    def _rows_of(self, kernel: str) -> dict[str, torch.Tensor]:
        """The buffers of rows of a kernel, by the names of its parameters."""
        found = {}
        for name, (where, rows, columns, dtype) in shared_rows(self._c, self._proxied).items():
            words = self._symmetric[f"rows.{where}"][: rows * columns * dtype.itemsize // 4]
            if name.startswith(f"{kernel}."):
                found[name.removeprefix(f"{kernel}.")] = words.view(dtype).view(rows, columns)
        return found

    def reset(self) -> None:
        super().reset()
        self._tickets.zero_()
        self._stream.forget()

    # -- kernels ----------------------------------------------------------------------------------------------------

    def variants(self, everything: bool) -> list[Callable[[], Launch]]:
        by_rank = self._c.layout == "rank"
        ordinary = [
            partial(self._routing_of, "int64"),
            self._dispatch_launch,
            partial(self._combine_of, "" if by_rank else "choices"),
        ]
        if not everything:
            return ordinary
        return [
            *ordinary,
            partial(self._routing_of, "int32"),
            partial(self._combine_of, "", "rows"),
            *([partial(self._combine_of, "", "choices")] if by_rank else []),
            *(partial(self._combine_of, weighted) for weighted in (() if by_rank else ("", "rows"))),
            partial(self._refusal, "dispatch"),
            partial(self._refusal, "combine"),
        ]

    def _routing_of(self, index_dtype: str) -> Launch:
        return self._launch(self._new_routing, index_dtype)

    def _new_routing(self, index_dtype: str) -> Launch:
        c, base = self._c, self._base
        kernel = plan_routing(
            c.ranks, c.num_experts, c.top_k, c.max_tokens, c.capacity, c.alignment, base.blocks, base.threads, index_dtype
        )  # fmt: skip
        return Launch(kernel, self._fixed["routing"], _ROUTING, base.world)

    def _dispatch_launch(self) -> Launch:
        return self._launch(self._new_dispatch)

    def _new_dispatch(self) -> Launch:
        c, base, t, senders = self._c, self._base, self._tuning, self._senders
        kernel = dispatch_throughput(
            c.ranks, c.num_experts, c.top_k, c.max_tokens, c.row_words, c.scale_words, self.placement, self._proxied,
            t.chunk, self._proxied_chunk(c.row_bytes), senders, base.blocks - senders, base.threads,
        )  # fmt: skip
        return Launch(kernel, self._fixed["dispatch"], DISPATCH, base.world)

    def _combine_of(self, weighted: str, valued: str = "", biases: int = 0) -> Launch:
        return self._launch(self._new_combine, weighted, valued, biases)

    def _new_combine(self, weighted: str, valued: str, biases: int) -> Launch:
        c, base, t = self._c, self._base, self._tuning
        payload = FP8 if c.quantize_combine else c.combine_dtype
        kernel = combine_throughput(
            c.ranks, c.num_experts, c.top_k, c.max_tokens, c.hidden, dtype_name(c.combine_dtype), c.layout == "rank",
            weighted, c.quantize_combine, valued, biases, self._proxied, t.chunk,
            self._proxied_chunk(c.hidden * payload.itemsize), t.combine_senders, base.blocks - t.combine_senders,
            t.combine_threads,
        )  # fmt: skip
        return Launch(kernel, self._fixed["combine"] | {"tag": 0}, COMBINE, base.world)

    def _refusal(self, kernel: str) -> Launch:
        return self._launch(self._new_refusal, kernel)

    def _new_refusal(self, kernel: str) -> Launch:
        c, base = self._c, self._base
        senders = self._senders if kernel == "dispatch" else self._tuning.combine_senders
        refuse = refuse_throughput(c.ranks, self._chunks, senders, base.blocks, base.threads)
        return Launch(refuse, self._fixed[kernel], ("code",), base.world)

    def _proxied_chunk(self, row_bytes: int) -> int:
        """Rows of a message to another node: large enough for a fabric to reach its rate, small enough to overlap."""
        t = self._tuning
        return max(t.chunk, min(t.proxied_bytes // row_bytes, -(-self._c.max_tokens // 4)))

    # -- dispatch ---------------------------------------------------------------------------------------------------

    def output_shape(self) -> tuple[int, int]:
        return output_rows(self._c), self._c.hidden

    def _default_output(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows and scales that dispatch fills when the caller brings none."""
        return self._output if self.symmetric_output else self.new_output()

    def dispatch(self, x, scales, choices: Choices | Handle, out, phase: Phase) -> Pending:
        if phase is Phase.WHOLE:
            return self._dispatch(x, scales, choices, out)
        tensors = [x, scales, *(() if isinstance(choices, Handle) else (choices.topk_idx, choices.topk_weights))]
        with self._stream.on_side([t for t in tensors if t is not None]) as event:
            pending = self._dispatch(x, scales, choices, out)
        pending.rest = event
        return pending

    def _dispatch(self, x, scales, choices, out) -> Pending:
        c = self._c
        if isinstance(choices, Handle):
            plan, handle = choices.plan, choices
        else:
            plan = self._plan_routing(choices.topk_idx, choices.topk_weights, x.shape[0], cleared=choices.cleared)
            handle = Handle(self._signature, plan, self._base.membership, choices.dropped)
        tag = self._own_tag if out is None or not self.symmetric_output else output_tag(self._base.place(out[0]))
        rows, row_scales = self._default_output() if out is None else out
        copied = self._in_place and not self.symmetric_output
        if copied or rows is self._output[0]:
            landing = self._landing
        else:
            landing = self._words(rows, row_scales)
        self._move_rows(x, scales, plan, landing, tag)
        if copied:
            self._stream.launch(_copy, (rows, row_scales), self._output)
        result = DispatchedByPlan(rows, self._seen_as(scales, row_scales), handle, c.layout == "rank")
        return Pending("dispatch", handle, result)

    def receive(self, pending: Pending) -> None:
        self._stream.wait(pending.rest)

    def refuse_dispatch(self, error: ArgumentError, reuses_plan: bool, phase: Phase) -> None:
        if phase is Phase.SEND:
            with self._stream.on_side(()) as event:
                self.refuse_dispatch(error, reuses_plan, Phase.WHOLE)
            self._stream.wait(event)
        elif reuses_plan:
            self._stream.launch(self._refusal("dispatch"), error.code)
        else:
            none = torch.zeros((1, self._c.top_k), dtype=torch.int64, device=self._base.device)
            empty = self._plan_routing(none, none.float(), 0, error.code, error.value)
            landing = self._landing if self._in_place else self._words(*self.new_output())
            self._move_rows(None, None, empty, landing, error.code)

    def _new_plans(self) -> Plans:
        return Plans(RoutingPlan, self._plan_shapes(), self._base.device, self._stream.key)

    def _plan_shapes(self) -> dict:
        c, ints = self._c, torch.int32
        R, M = c.ranks, c.max_tokens
        return {
            "node_plan": ((self.node_plan_words,), ints),
            "send_token": ((R, M), ints),
            "send_row": ((R, M), ints),
            "token_slot": ((M, R), ints),
            "records": ((R, M, record_words(c.top_k)), ints),
            "totals": ((Totals(R, c.local_experts).words,), ints),
            "row_index": ((c.capacity,), ints),
            "row_weight": ((c.capacity,), torch.float32),
        }

    def _plan_routing(
        self, topk_idx, topk_weights, tokens: int, fault: int = NO_FAULT, fault_value: int = 0, cleared: bool = False
    ) -> RoutingPlan:
        """Agree with all ranks on the routing of a dispatch; a fault makes them all refuse it.

        Args:
            topk_idx, topk_weights: [rows >= tokens, top_k].
            cleared: a new plan of exactly these tokens, with zeros in the places of rows that do not exist.
        """
        if cleared:
            shapes = self._plan_shapes() | {"token_slot": ((max(tokens, 1), self._c.ranks), torch.int32)}
            device = self._base.device
            made = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes.values()]
            plan = RoutingPlan(tokens, *made)
        else:
            plan = self._plans.next(tokens)
        routing = self._routing_of(dtype_name(topk_idx.dtype))
        _, *places = plan.arguments
        self._stream.launch(routing, topk_idx, topk_weights, tokens, fault, fault_value, *places)
        return plan

    def _words(self, rows: torch.Tensor, scales: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and scales as the kernel takes them."""
        c = self._c
        empty = scales is None or not scales.numel()
        return as_words(rows, c.row_words), self._no_scales if empty else as_words(scales, c.scale_words)

    def _move_rows(self, x, scales, plan: RoutingPlan, landing: tuple, tag: int) -> None:
        """Launch the kernel that moves rows to `landing`, rows and scales as words."""
        given = (self._no_words, self._no_scales) if x is None or not x.numel() else self._words(x, scales)
        self._stream.launch(self._dispatch_launch(), *given, *landing, tag, *self._moved_by(plan))

    def _moved_by(self, plan: RoutingPlan) -> tuple:
        """What the kernel that moves rows takes of a plan."""
        _, send_token, send_row, _, records, totals, _, _ = plan.arguments
        return send_token, send_row, records, totals

    # -- combine ----------------------------------------------------------------------------------------------------

    def combine(self, y, handle: Handle, out, weights, phase: Phase, values=None, bias=()) -> Pending:
        pending = Pending("combine", handle, out)
        if phase is Phase.WHOLE:
            self._combine(y, handle.plan, out, weights, values, bias)
            return pending
        tensors = [y, *bias, *([weights] if isinstance(weights, torch.Tensor) else [])]  # what the caller may drop
        with self._stream.on_side(tensors) as pending.rest:
            self._combine(y, handle.plan, out, weights, values, bias)
        return pending

    def refuse_combine(self, error: ArgumentError, phase: Phase, weights_given: bool) -> None:
        if phase is Phase.SEND:
            with self._stream.on_side(()) as event:
                self.refuse_combine(error, Phase.WHOLE, weights_given)
            self._stream.wait(event)
        else:
            self._stream.launch(self._refusal("combine"), error.code)

    def _combine(self, y, plan: RoutingPlan, out, weights, values, bias) -> None:
        by_row = isinstance(weights, torch.Tensor)
        weighted = "rows" if by_row else "choices" if weights and self._c.layout == "expert" else ""
        unused = plan.arguments[-1]  # stands in for what the kernel does not use
        valued, row_values, out_values = "", unused, self._no_values
        if values is not None:
            row_values, out_values = values
            valued = "rows" if row_values.dim() == 1 else "choices"
            row_values = (row_values if row_values.numel() else self._no_values).view(-1)
        bias_0, bias_1 = ([b if b.numel() else self._no_row for b in bias] + [self._no_row] * 2)[:2]
        self._stream.launch(
            self._combine_of(weighted, valued, len(bias)), y if y.numel() else self._no_row, weights if by_row else unused,
            row_values, bias_0, bias_1, out if out.numel() else self._no_row,
            out_values if out_values.numel() else self._no_values, plan.tokens, *self._summed_by(plan),
        )  # fmt: skip

    def _summed_by(self, plan: RoutingPlan) -> tuple:
        """What the kernel that sums takes of a plan."""
        return plan.arguments[3:6]  # token_slot, records, totals


def _copy(targets, sources) -> None:
    for target, source in zip(targets, sources):
        if target is not None:
            target.copy_(source)
