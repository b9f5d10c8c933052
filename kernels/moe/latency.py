"""Latency mode on the host: buffers, and the launches of its kernels, whole or in halves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from tilescale_net.kernels.collective import BufferSpecs
from tilescale_net.kernels.moe.combine_latency import combine_latency, parts_of
from tilescale_net.kernels.moe.config import FP8, Config, as_words, name_of
from tilescale_net.kernels.moe.dispatch_latency import dispatch_latency
from tilescale_net.kernels.moe.exchange_weights import exchange_weights
from tilescale_net.kernels.moe.handle import Choices, Dispatched, Handle, Pending, ReceivedRows
from tilescale_net.kernels.moe.mode import Launch, Mode, Phase
from tilescale_net.kernels.moe.refusal import refuse_latency
from tilescale_net.kernels.moe.row_ops import groups_of
from tilescale_net.kernels.moe.status import ArgumentError
from tilescale_net.kernels.moe.wire_layout import NO_FAULT, Header, Message


def _parts(config: Config, tuning, proxied: bool) -> tuple[int, int]:
    """Parts of a row of combine as they are wanted, and as there are."""
    wanted = 1 if proxied else tuning.parts  # small messages suit memory, large ones a fabric
    return wanted, parts_of(config.hidden, 16 // config.combine_dtype.itemsize, wanted)[0]


def symmetric_buffers(config: Config, tuning, proxied: bool) -> BufferSpecs:
    """Symmetric memory of the mode: "kernel.parameter" -> (shape, dtype)."""
    c, R, M = config, config.ranks, config.max_tokens
    message, header = Message(c.row_words, c.scale_words, c.top_k), Header(c.local_experts)
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
        "combine.arrived": ((places, _parts(c, tuning, proxied)[1]), words),
        "weights.weights_out": ((places, c.top_k), floats),
        "weights.weights_in": ((places, c.top_k), floats),
        "weights.sent": ((2 * R,), words),
    }


class LatencyMode(Mode):
    """Few tokens: every multiprocessor sends and receives, and the kernels exist whole and in halves."""

    def __init__(self, base, config: Config):
        super().__init__(base, config, symmetric_buffers(config, base.tuning, base.proxied))
        c, device = config, base.device
        self._proxied = base.proxied
        self._parts, self._cuts = _parts(config, base.tuning, self._proxied)
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

        # Stand in for tensors without elements, and for those that a kernel does not use.
        width = max(c.row_words, c.scale_words, 1)
        self._no_words = torch.zeros((1, width), dtype=torch.int32, device=device)
        self._no_rows = {
            d: torch.zeros((1, c.hidden), dtype=d, device=device)
            for d in (torch.bfloat16, torch.float16, torch.float32)
        }
        self._no_choice = torch.zeros((1, c.top_k), dtype=torch.int64, device=device)
        self._no_weight = torch.zeros((1, c.top_k), dtype=torch.float32, device=device)

    # -- kernels ----------------------------------------------------------------------------------------------------

    def variants(self, everything: bool) -> list[Callable[[], Launch]]:
        if not everything:
            return [
                partial(self._dispatch_of, Phase.WHOLE, "", "int64"),
                partial(self._combine_of, Phase.WHOLE, True),
            ]
        sources = ("", "bfloat16", "float16", "float32") if self._c.can_quantise else ("",)
        dispatches = product((Phase.WHOLE, Phase.SEND), sources, ("int64", "int32"))
        return [
            *(partial(self._dispatch_of, *which) for which in dispatches),
            partial(self._dispatch_of, Phase.RECEIVE, "", "int64"),
            *(partial(self._combine_of, *which) for which in product(Phase, (True, False))),
            self._refusal,
            self._exchange_weights,
        ]

    def _dispatch_of(self, phase: Phase, source: str, index_dtype: str) -> Launch:
        c, base = self._c, self._base

        def make() -> Launch:
            kernel = dispatch_latency(
                c.ranks, c.num_experts, c.top_k, c.max_tokens, c.row_words, c.scale_words, source, phase.sends,
                phase.receives, base.blocks, base.threads, index_dtype,
            )  # fmt: skip
            return Launch(kernel, self._dispatch_fixed)

        return self._launch(("dispatch", phase, source, index_dtype), make)

    def _combine_of(self, phase: Phase, weighted: bool) -> Launch:
        c, base = self._c, self._base

        def make() -> Launch:
            kernel = combine_latency(
                c.ranks, c.top_k, c.max_tokens, c.hidden, name_of(c.combine_dtype), weighted, c.quantize_combine,
                self._proxied, phase.sends, phase.receives, self._parts, base.blocks, base.threads,
            )  # fmt: skip
            return Launch(kernel, self._combine_fixed)

        return self._launch(("combine", phase, weighted), make)

    def _refusal(self) -> Launch:
        c, base, fixed = self._c, self._base, self._combine_fixed
        arrived = fixed["arrived"].view(2 * c.ranks, -1)
        return self._launch(
            "refusal",
            lambda: Launch(
                refuse_latency(c.ranks, c.max_tokens * self._cuts, base.blocks, base.threads),
                fixed | {"arrived": arrived},
            ),
        )

    def _exchange_weights(self) -> Launch:
        c, base = self._c, self._base
        return self._launch(
            "weights",
            lambda: Launch(exchange_weights(c.ranks, c.top_k, c.max_tokens, base.threads), self._weights_fixed),
        )

    # -- dispatch ---------------------------------------------------------------------------------------------------

    def output_shape(self) -> tuple[int, int, int]:
        return self._c.local_experts, self._c.ranks * self._c.max_tokens, self._c.hidden

    def _received_rows(self, tokens: int) -> ReceivedRows:
        """Room for what the two halves of a dispatch find out."""
        c, device = self._c, self._base.device

        def made(dtype, *shape):
            return torch.empty(shape, dtype=dtype, device=device)

        rows = c.ranks * c.max_tokens
        return ReceivedRows(
            tokens,
            made(torch.int32, max(tokens, 1), c.ranks),
            made(torch.int32, rows, c.top_k),
            made(torch.float32, rows, c.top_k),
            made(torch.int32, c.ranks),
            made(torch.int32, c.local_experts, c.ranks),
            made(torch.int32, c.local_experts, rows),
        )

    def dispatch(self, x, scales, choices: Choices | Handle, out, phase: Phase) -> Pending:
        c = self._c
        received = self._received_rows(len(x))
        rows, row_scales = self.new_output() if out is None else out
        counts = torch.empty((c.local_experts,), dtype=torch.int32, device=self._base.device)
        rest = (received, rows, row_scales, counts)
        self._launch_dispatch(phase, *rest, x, scales, choices)
        handle = Handle(c.signature, received, self._base.membership)
        row_scales = self._seen_as(scales, row_scales)
        result = Dispatched(rows, row_scales, counts, None, None, None, None, handle)
        return Pending("dispatch", handle, result, rest)

    def refuse_dispatch(self, error: ArgumentError, reuses_plan: bool, phase: Phase) -> None:
        counts = torch.empty((self._c.local_experts,), dtype=torch.int32, device=self._base.device)
        received, output = self._received_rows(0), self.new_output()
        self._launch_dispatch(Phase.WHOLE, received, *output, counts, fault=error.code, fault_value=error.value)

    def _launch_dispatch(
        self, phase: Phase, received: ReceivedRows, out, out_scales, counts, x=None, scales=None,
        choices: Choices | None = None, fault: int = NO_FAULT, fault_value: int = 0,
    ) -> None:  # fmt: skip
        """`x`, `scales` and `choices` are for the half that sends."""
        c = self._c
        quantise = x is not None and c.dtype == FP8 and x.dtype != FP8
        source = name_of(x.dtype) if quantise else ""
        if x is None or not x.numel():
            x = self._no_rows[x.dtype] if quantise else self._no_words[:, : c.row_words]
        elif not quantise:
            x = as_words(x, c.row_words)

        def words(tensor, count):
            empty = tensor is None or not tensor.numel()
            return self._no_words[:, :count] if empty else as_words(tensor, count)

        topk_idx, topk_weights = self._no_choice, self._no_weight
        if choices is not None and choices.topk_idx.numel():
            topk_idx, topk_weights = choices.topk_idx, choices.topk_weights
        scale_words = max(c.scale_words, 1)
        self._dispatch_of(phase, source, name_of(topk_idx.dtype))(
            x=x, x_scales=words(scales, scale_words), topk_idx=topk_idx, topk_weights=topk_weights, tokens=received.tokens,
            fault=fault, fault_value=fault_value, token_slot=received.token_slot, out=as_words(out, c.row_words),
            out_scales=words(out_scales, scale_words), counts=counts, targets=received.targets, weights=received.weights,
            received=received.counts, source_counts=received.source_counts, source_token=received.source_token.view(-1),
        )  # fmt: skip

    # -- combine ----------------------------------------------------------------------------------------------------

    def combine(self, y, handle: Handle, out, weights, phase: Phase, values=None, bias=()) -> Pending:
        received = handle.plan
        if isinstance(weights, torch.Tensor):
            received = replace(received, weights=torch.empty_like(received.weights))
            self._launch_weights(weights, received)
            weights = True
        self._launch_combine(phase, y, received, out if phase.receives else None, weights)
        return Pending("combine", handle, out, (received, weights))

    def receive(self, pending: Pending) -> None:
        if pending.kind == "dispatch":
            self._launch_dispatch(Phase.RECEIVE, *pending.rest)
        else:
            received, weighted = pending.rest
            self._launch_combine(Phase.RECEIVE, None, received, pending.result, weighted)

    def refuse_combine(self, error: ArgumentError, phase: Phase, weights_given: bool) -> None:
        if weights_given:
            nothing = self._received_rows(0)
            nothing.counts.zero_()
            self._launch_weights(self._no_weight, nothing)
        self._refusal()(code=error.code)

    def _launch_weights(self, weights: torch.Tensor, received: ReceivedRows) -> None:
        """Send the weights of this rank's choices, and fill `received.weights` with those of the others."""
        self._exchange_weights()(
            topk_weights=weights if weights.numel() else self._no_weight, tokens=received.tokens,
            token_slot=received.token_slot, received=received.counts, weights=received.weights,
        )  # fmt: skip

    def _launch_combine(self, phase: Phase, y, r: ReceivedRows, out, weighted: bool) -> None:
        """`out` is used by the half that receives, `y` by the one that sends."""
        c = self._c
        nothing = self._no_rows[c.combine_dtype]
        self._combine_of(phase, weighted)(
            y=nothing if y is None else y.view(-1, c.hidden), targets=r.targets, weights=r.weights, received=r.counts,
            out=nothing if out is None or not out.numel() else out, token_slot=r.token_slot, tokens=r.tokens,
        )  # fmt: skip
