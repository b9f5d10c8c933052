"""Latency mode on the host: buffers, and the launches of its two kernels, whole or in halves."""

from __future__ import annotations

import torch

from tilescale_net.kernels.moe.combine_latency import combine_latency, parts_of
from tilescale_net.kernels.moe.config import FP8, Config, as_words, name_of
from tilescale_net.kernels.moe.dispatch_latency import dispatch_latency
from tilescale_net.kernels.moe.handle import Handle, Received
from tilescale_net.kernels.moe.rows import groups_of
from tilescale_net.kernels.moe.sizes import NO_FAULT, Header, Message


class Latency:
    """Buffers and launches; `base` is the AllToAll, which allocates, checks arguments and keeps the state."""

    def __init__(self, base, config: Config):
        self._base, self._c = base, config
        c, R, M = config, config.ranks, config.max_tokens
        device, symmetric, signals = base._device, base._symmetric, base._signals
        self._proxied = 0 in base._world.peer_base
        message, header = Message(c.row_words, c.scale_words, c.top_k), Header(c.local_experts)

        self._message = symmetric((2 * M, message.words), torch.int32)
        self._header_out = symmetric((2 * R, header.words), torch.int32)
        self._header_in = symmetric((2 * R, header.words), torch.int32)
        self._arrival = symmetric((2 * R * M, message.words), torch.int32)
        self._begun, self._arrived = signals(2 * R), signals(2 * R * M)
        self._epochs = [base._counters(base.blocks) for _ in range(2)]

        # Small messages suit memory, large ones a fabric.
        self._parts = 1 if self._proxied else base.tuning.parts
        width = 16 // c.combine_dtype.itemsize
        cuts, _ = parts_of(c.hidden, width, self._parts)
        G, payload = groups_of(c.hidden), FP8 if c.quantize_combine else c.combine_dtype
        stages = 2 * R * M if self._proxied else 1
        self._slots = symmetric((2 * R * M, c.hidden), payload)
        self._slot_scales = symmetric((2 * R * M if c.quantize_combine else 1, G), torch.float32)
        self._staged = symmetric((stages, c.hidden), payload)
        self._staged_scales = symmetric((stages if c.quantize_combine else 1, G), torch.float32)
        self._combine_begun, self._combine_arrived = signals(2 * R), signals(2 * R * M, cuts)
        self._combine_epochs = [base._counters(base.blocks) for _ in range(2)]

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

    def output_shape(self) -> tuple[int, int, int]:
        """Shape of the rows that dispatch gives."""
        return self._c.local_experts, self._c.ranks * self._c.max_tokens, self._c.hidden

    def own_output(self) -> tuple[None, None]:
        """Outputs are ordinary tensors."""
        return None, None

    def make_received(self, tokens: int) -> Received:
        """Room for what the two halves of a dispatch find out."""
        c, device = self._c, self._base._device

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

    def dispatch(
        self, halves: str, received: Received, x, scales, topk_idx, topk_weights, out, out_scales, counts,
        fault: int = NO_FAULT, value: int = 0,
    ) -> None:  # fmt: skip
        """Launch "send", "receive" or "both"; `x`, `scales`, `topk_idx`, `topk_weights` are for the half that sends."""
        c, base = self._c, self._base
        quantise = x is not None and c.dtype == FP8 and x.dtype != FP8
        source = name_of(x.dtype) if quantise else ""
        if x is None or not x.numel():
            x = self._no_rows[x.dtype] if quantise else self._no_words[:, : c.row_words]
        elif not quantise:
            x = as_words(x, c.row_words)

        def words(tensor, count):
            empty = tensor is None or not tensor.numel()
            return self._no_words[:, :count] if empty else as_words(tensor, count)

        if topk_idx is None or not topk_idx.numel():
            kind = torch.int64 if topk_idx is None else topk_idx.dtype
            topk_idx, topk_weights = self._no_choice.to(kind), self._no_weight
        kernel = dispatch_latency(
            c.ranks, c.num_experts, c.top_k, c.max_tokens, c.row_words, c.scale_words, source, halves != "receive",
            halves != "send", base.blocks, base.threads, name_of(topk_idx.dtype),
        )  # fmt: skip
        message = self._message
        kernel(
            x, words(scales, max(c.scale_words, 1)), topk_idx, topk_weights, received.tokens, fault, value, base.active,
            message, message.view(FP8), message.view(torch.float32), self._header_out, self._header_in, self._arrival,
            self._begun, self._arrived, *self._epochs, base.status.tensor, received.token_slot,
            as_words(out, c.row_words), words(out_scales, max(c.scale_words, 1)), counts, received.targets, received.weights, received.received,
        )  # fmt: skip

    def combine(self, halves: str, y, handle: Handle, out, weighted: bool) -> None:
        """Launch "send", "receive" or "both"; `out` is used by the half that receives, `y` by the one that sends."""
        c, base, r = self._c, self._base, handle.layout
        kernel = combine_latency(
            c.ranks, c.top_k, c.max_tokens, c.hidden, name_of(c.combine_dtype), weighted, c.quantize_combine, self._proxied,
            halves != "receive", halves != "send", self._parts, base.blocks, base.threads,
        )  # fmt: skip
        nothing = self._no_rows[c.combine_dtype]
        kernel(
            nothing if y is None else y.view(-1, c.hidden), r.targets, r.weights, r.received,
            nothing if out is None or not out.numel() else out, r.token_slot, r.tokens, base.active, self._slots,
            self._slot_scales, self._staged, self._staged_scales, self._combine_begun, self._combine_arrived,
            *self._combine_epochs,
        )  # fmt: skip
