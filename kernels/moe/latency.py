"""Latency mode on the host: buffers, and the launches of its kernels, whole or in halves."""

from __future__ import annotations

import torch

from tilescale_net.kernels.collective import Plan
from tilescale_net.kernels.moe.combine_latency import combine_latency, parts_of
from tilescale_net.kernels.moe.config import FP8, Config, as_words, name_of
from tilescale_net.kernels.moe.dispatch_latency import dispatch_latency
from tilescale_net.kernels.moe.faults import Fault
from tilescale_net.kernels.moe.handle import Choices, Dispatched, Handle, Pending, Received
from tilescale_net.kernels.moe.refusal import refuse_latency
from tilescale_net.kernels.moe.rows import groups_of
from tilescale_net.kernels.moe.sizes import NO_FAULT, Header, Message


def _parts(config: Config, tuning, proxied: bool) -> tuple[int, int]:
    """Parts of a row of combine as they are wanted, and as there are."""
    wanted = 1 if proxied else tuning.parts  # small messages suit memory, large ones a fabric
    return wanted, parts_of(config.hidden, 16 // config.combine_dtype.itemsize, wanted)[0]


def plan(config: Config, tuning, proxied: bool) -> Plan:
    """Symmetric memory of the mode: name -> (shape, dtype)."""
    c, R, M = config, config.ranks, config.max_tokens
    message, header = Message(c.row_words, c.scale_words, c.top_k), Header(c.local_experts)
    G, payload = groups_of(c.hidden), FP8 if c.quantize_combine else c.combine_dtype
    places, stages = 2 * R * M, 2 * R * M if proxied else 1
    ints, floats, words = torch.int32, torch.float32, torch.uint64
    return {
        "message": ((2 * M, message.words), ints),
        "header_out": ((2 * R, header.words), ints),
        "header_in": ((2 * R, header.words), ints),
        "arrival": ((places, message.words), ints),
        "begun": ((2 * R,), words),
        "arrived": ((places,), words),
        "slots": ((places, c.hidden), payload),
        "slot_scales": ((places if c.quantize_combine else 1, G), floats),
        "staged": ((stages, c.hidden), payload),
        "staged_scales": ((stages if c.quantize_combine else 1, G), floats),
        "combine_begun": ((2 * R,), words),
        "combine_arrived": ((places, _parts(c, tuning, proxied)[1]), words),
    }


class Latency:
    """Buffers and launches; `base` is the AllToAll, which allocates, checks arguments and keeps the state."""

    def __init__(self, base, config: Config):
        self._base, self._c = base, config
        c, R, device = config, config.ranks, base.device
        self._proxied = base.proxied
        self._b = base.allocate(plan(config, base.tuning, self._proxied))
        self._parts, self._cuts = _parts(config, base.tuning, self._proxied)
        self._kernels: dict = {}
        self._epochs, self._combine_epochs = ([base.counters(base.blocks) for _ in range(2)] for _ in range(2))

        # Stand in for tensors without elements, and for those that a kernel does not use.
        width = max(c.row_words, c.scale_words, 1)
        self._no_words = torch.zeros((1, width), dtype=torch.int32, device=device)
        self._no_rows = {
            d: torch.zeros((1, c.hidden), dtype=d, device=device)
            for d in (torch.bfloat16, torch.float16, torch.float32)
        }
        self._no_choice = torch.zeros((1, c.top_k), dtype=torch.int64, device=device)
        self._no_weight = torch.zeros((1, c.top_k), dtype=torch.float32, device=device)
        self._no_slot = torch.zeros((1, R), dtype=torch.int32, device=device)
        self._no_floats = torch.zeros((1, c.hidden), dtype=torch.float32, device=device)

    # -- kernels ----------------------------------------------------------------------------------------------------

    def compile(self, everything: bool) -> None:
        """Compile what an ordinary call needs, or every variant that a call may need."""
        c = self._c
        sources = ("", "bfloat16", "float16", "float32") if everything and c.dtype == FP8 else ("",)
        for source in sources:
            for index in ("int64", "int32") if everything else ("int64",):
                for phase in ("both", "send") if everything else ("both",):
                    self._dispatch_of(phase, source, index)
        if everything:
            self._dispatch_of("receive", "", "int64")
        for weighted in (True, False) if everything else (True,):
            for phase in ("both", "send", "receive") if everything else ("both",):
                self._combine_of(phase, weighted)
        if everything:
            self._refusal()

    def _kernel(self, key, make):
        found = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = make()
        return found

    def _dispatch_of(self, phase: str, source: str, index_dtype: str):
        c, base = self._c, self._base
        return self._kernel(
            (phase, source, index_dtype),
            lambda: dispatch_latency(
                c.ranks, c.num_experts, c.top_k, c.max_tokens, c.row_words, c.scale_words, source, phase != "receive",
                phase != "send", base.blocks, base.threads, index_dtype,
            ),
        )  # fmt: skip

    def _combine_of(self, phase: str, weighted: bool):
        c, base = self._c, self._base
        return self._kernel(
            (phase, weighted),
            lambda: combine_latency(
                c.ranks, c.top_k, c.max_tokens, c.hidden, name_of(c.combine_dtype), weighted, c.quantize_combine,
                self._proxied, phase != "receive", phase != "send", self._parts, base.blocks, base.threads,
            ),
        )  # fmt: skip

    def _refusal(self):
        return refuse_latency(self._c.ranks, self._c.max_tokens * self._cuts, self._base.blocks, self._base.threads)

    # -- outputs ----------------------------------------------------------------------------------------------------

    def output_shape(self) -> tuple[int, int, int]:
        """Shape of the rows that dispatch gives."""
        return self._c.local_experts, self._c.ranks * self._c.max_tokens, self._c.hidden

    symmetric_output = False  # outputs of dispatch are ordinary tensors

    def own_output(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows and scales that dispatch fills when the caller brings none."""
        return self._base.new_output()

    def make_received(self, tokens: int) -> Received:
        """Room for what the two halves of a dispatch find out."""
        c, device = self._c, self._base.device

        def made(dtype, *shape):
            return torch.empty(shape, dtype=dtype, device=device)

        rows = c.ranks * c.max_tokens
        return Received(
            tokens,
            made(torch.int32, max(tokens, 1), c.ranks),
            made(torch.int32, rows, c.top_k),
            made(torch.float32, rows, c.top_k),
            made(torch.int32, c.ranks),
        )

    # -- dispatch ---------------------------------------------------------------------------------------------------

    def dispatch(self, x, scales, choices: Choices, out, aside: bool) -> Pending:
        """Launch a dispatch; `aside`: only its half that sends. Arguments as in Throughput.dispatch."""
        c = self._c
        received = self.make_received(len(x))
        rows, row_scales = self.own_output() if out is None else out
        counts = torch.empty((c.local_experts,), dtype=torch.int32, device=self._base.device)
        rest = (received, rows, row_scales, counts)
        self._move("send" if aside else "both", *rest, x, scales, choices)
        handle = Handle(c.signature, received, self._base.mask)
        result = Dispatched(rows, row_scales, counts, None, None, None, None, handle)
        return Pending("dispatch", handle, result, rest)

    def receive_dispatch(self, pending: Pending) -> None:
        """Launch the half that receives."""
        self._move("receive", *pending.rest)

    def refuse_dispatch(self, fault: Fault, known: bool) -> None:
        """Take part in a dispatch that this rank cannot make."""
        counts = torch.empty((self._c.local_experts,), dtype=torch.int32, device=self._base.device)
        self._move("both", self.make_received(0), *self.own_output(), counts, fault=fault.code, value=fault.value)

    def _move(
        self, phase: str, received: Received, out, out_scales, counts, x=None, scales=None, choices: Choices | None = None,
        fault: int = NO_FAULT, value: int = 0,
    ) -> None:  # fmt: skip
        """Launch "send", "receive" or "both"; `x`, `scales` and `choices` are for the half that sends."""
        c, b, base = self._c, self._b, self._base
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
        scale_words, message = max(c.scale_words, 1), b.message
        self._dispatch_of(phase, source, name_of(topk_idx.dtype))(
            x, words(scales, scale_words), topk_idx, topk_weights, received.tokens, fault, value, base.active, message,
            message.view(FP8), message.view(torch.float32), b.header_out, b.header_in, b.arrival, b.begun, b.arrived,
            *self._epochs, base.status.tensor, received.token_slot, as_words(out, c.row_words),
            words(out_scales, scale_words), counts, received.targets, received.weights, received.received,
        )  # fmt: skip

    # -- combine ----------------------------------------------------------------------------------------------------

    def combine(self, y, handle: Handle, out, weighted, values=None, out_values=None, aside: bool = False) -> Pending:
        """Launch a combine into `out`; `aside`: only its half that sends. weighted: multiply rows by their weights."""
        self._sum("send" if aside else "both", y, handle, None if aside else out, weighted)
        return Pending("combine", handle, out, weighted)

    def receive_combine(self, pending: Pending) -> None:
        """Launch the half that receives."""
        self._sum("receive", None, pending.handle, pending.result, pending.rest)

    def refuse_combine(self, fault: Fault) -> None:
        """Take part in a combine that this rank cannot make."""
        b, R = self._b, self._c.ranks
        self._refusal()(
            fault.code, self._base.active, b.combine_begun, b.combine_arrived.view(2 * R, -1), *self._combine_epochs
        )

    def _sum(self, phase: str, y, handle: Handle, out, weighted: bool) -> None:
        """Launch "send", "receive" or "both"; `out` is used by the half that receives, `y` by the one that sends."""
        c, b, base, r = self._c, self._b, self._base, handle.layout
        nothing = self._no_rows[c.combine_dtype]
        self._combine_of(phase, weighted)(
            nothing if y is None else y.view(-1, c.hidden), r.targets, r.weights, r.received,
            nothing if out is None or not out.numel() else out, r.token_slot, r.tokens, base.active, b.slots, b.slot_scales,
            b.staged, b.staged_scales, b.combine_begun, b.combine_arrived, *self._combine_epochs, base.status.tensor,
        )  # fmt: skip
