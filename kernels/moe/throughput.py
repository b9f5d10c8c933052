"""Throughput mode on the host: buffers, and the launches of its three kernels."""

from __future__ import annotations

import torch

from tilescale_net.kernels.moe.combine_throughput import combine_throughput
from tilescale_net.kernels.moe.config import FP8, Config, as_words, name_of
from tilescale_net.kernels.moe.dispatch_throughput import dispatch_throughput
from tilescale_net.kernels.moe.handle import Handle, Layout
from tilescale_net.kernels.moe.layout import layout as layout_kernel
from tilescale_net.kernels.moe.rows import groups_of
from tilescale_net.kernels.moe.sizes import NO_FAULT, Counts, Totals, record_words


class Throughput:
    """Buffers and launches; `base` is the AllToAll, which allocates, checks arguments and keeps the state."""

    def __init__(self, base, config: Config):
        self._base, self._c, self._tuning = base, config, base.tuning
        R, M, c, tuning = config.ranks, config.max_tokens, config, base.tuning
        world, device = base._world, base._device
        self._proxied = 0 in world.peer_base
        counts, W = Counts(c.num_experts, R), record_words(c.top_k)
        far_rows = max(R * M if self._proxied else 1, 1)
        symmetric, signals = base._symmetric, base._signals

        # Layout.
        self._counts_out = symmetric((counts.words,), torch.int32)
        self._counts_in = symmetric((R, counts.words), torch.int32)
        self._records_out = symmetric((R, M, W), torch.int32)
        self._records_in = symmetric((R, M, W), torch.int32)
        self._counts_ready, self._records_ready, self._met = signals(R), signals(R), signals(1)
        self._partial = torch.zeros((base.blocks, counts.words), dtype=torch.int32, device=device)
        self._layout_epochs = base._counters(base.blocks)

        # Dispatch.
        self.placement = "rank" if c.layout == "rank" else "expert" if c.zero_copy else "arrival"
        self.out_rows = R * M if c.layout == "rank" else c.capacity
        row, scales = c.row_words, max(c.scale_words, 1)
        arrivals = R * M if self.placement == "arrival" or (self._proxied and self.placement == "expert") else 1
        own = self.out_rows if self.placement != "arrival" else 1
        self._out = symmetric((own, c.hidden), c.dtype)
        self._out_scales = symmetric((own if c.scale_words else 1, scales), torch.float32)
        self._arrival = symmetric((arrivals, row), torch.int32)
        self._arrival_scales = symmetric((arrivals if c.scale_words else 1, scales), torch.int32)
        self._staged = symmetric((far_rows, row), torch.int32)
        self._staged_scales = symmetric((far_rows if c.scale_words else 1, scales), torch.int32)
        far = self._far_chunk(c.row_bytes)
        chunks = -(-M // tuning.chunk)
        self._dispatch_ready, self._dispatch_arrived, self._dispatch_done = signals(R), signals(R, chunks), signals(R)
        self._dispatch_epochs = base._counters(base.blocks)
        self._dispatch_tickets, self._combine_tickets = (
            torch.zeros((2, 2), dtype=torch.int32, device=device) for _ in range(2)
        )
        senders = base.blocks if self.placement == "rank" else tuning.dispatch_senders
        self._dispatch = dispatch_throughput(
            R, c.num_experts, c.top_k, M, row, c.scale_words, self.placement, self._proxied, tuning.chunk, far, senders,
            base.blocks - senders, base.threads,
        )  # fmt: skip

        # Combine.
        G = groups_of(c.hidden)
        payload = FP8 if c.quantize_combine else c.combine_dtype
        self._slots = symmetric((R * M, c.hidden), payload)
        self._slot_scales = symmetric((R * M if c.quantize_combine else 1, G), torch.float32)
        self._slot_values = symmetric((R * M, c.top_k), torch.float32)
        self._combine_staged = symmetric((far_rows, c.hidden), payload)
        self._combine_staged_scales = symmetric((far_rows if c.quantize_combine else 1, G), torch.float32)
        self._combine_staged_values = symmetric((far_rows, c.top_k), torch.float32)
        self._combine_ready, self._combine_arrived, self._combine_done = signals(R), signals(R, chunks), signals(R)
        self._combine_epochs = base._counters(base.blocks)
        self._combine_far = self._far_chunk(c.hidden * payload.itemsize)
        # Stand in for tensors without elements, and for those that a kernel does not use.
        self._nothing = torch.zeros((1, max(row, scales)), dtype=torch.int32, device=device)
        self._no_row = torch.zeros((1, c.hidden), dtype=c.combine_dtype, device=device)
        self._no_values = torch.zeros((1, c.top_k), dtype=torch.float32, device=device)

    def _far_chunk(self, row_bytes: int) -> int:
        """Rows of a message to another node: large enough for a fabric to reach its rate, small enough to overlap."""
        t = self._tuning
        return max(t.chunk, min(t.far_bytes // row_bytes, -(-self._c.max_tokens // 4)))

    def output_shape(self) -> tuple[int, int]:
        """Shape of the rows that dispatch gives."""
        return self.out_rows, self._c.hidden

    def own_output(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The symmetric rows and scales that dispatch fills when the caller brings none; None for ordinary outputs."""
        if self.placement == "arrival":
            return None, None
        return self._out, self._out_scales if self._c.scale_words else None

    # -- layout -----------------------------------------------------------------------------------------------------

    def make_layout(self, topk_idx, topk_weights, tokens: int, fault: int = NO_FAULT, value: int = 0) -> Layout:
        """Agree with all ranks on the layout of a dispatch; a fault makes them all refuse it."""
        c, device = self._c, self._base._device

        def ints(*shape):
            return torch.empty(shape, dtype=torch.int32, device=device)

        R, M = c.ranks, c.max_tokens
        made = Layout(
            tokens,
            ints(R, M),
            ints(R, M),
            ints(max(tokens, 1), R),
            ints(R, M, record_words(c.top_k)),
            ints(Totals(R, c.local_experts).words),
            ints(c.capacity),
            torch.empty((c.capacity,), dtype=torch.float32, device=device),
        )
        kernel = layout_kernel(
            R,
            c.num_experts,
            c.top_k,
            M,
            c.capacity,
            c.alignment,
            self._base.blocks,
            self._base.threads,
            name_of(topk_idx.dtype),
        )
        kernel(
            topk_idx, topk_weights, tokens, fault, value, self._base.active, self._counts_out, self._counts_in,
            self._records_out, self._records_in, self._counts_ready, self._records_ready, self._met, self._layout_epochs,
            self._partial, self._base.status.tensor, *made.tensors(),
        )  # fmt: skip
        return made

    # -- dispatch and combine ---------------------------------------------------------------------------------------

    def dispatch(self, x, scales, layout: Layout, out, out_scales) -> None:
        """Move rows; `out` and `out_scales` are what the caller gets."""
        c = self._c

        def rows(tensor, words):
            empty = tensor is None or not tensor.numel()
            return self._nothing[:, :words] if empty else as_words(tensor, words)

        words, scale_words = c.row_words, max(c.scale_words, 1)
        self._dispatch(
            rows(x, words), rows(scales, scale_words), rows(out, words), rows(out_scales, scale_words), self._arrival,
            self._arrival_scales, self._staged, self._staged_scales, layout.send_token, layout.send_row, layout.records,
            layout.totals, self._base.active, self._dispatch_ready, self._dispatch_arrived, self._dispatch_done,
            self._dispatch_tickets, self._dispatch_epochs,
        )  # fmt: skip

    def combine(self, y, handle: Handle, out, weights, values, out_values) -> None:
        """Sum rows into `out`.

        Args:
            weights: None: all one; True: those of the choices; a tensor: of each expert-major row.
            values, out_values: None, or numbers of expert-major rows and where they go.
        """
        c, layout, base, t = self._c, handle.layout, self._base, self._tuning
        weighted = "" if weights is None else "choices" if weights is True else "rows"
        kernel = combine_throughput(
            c.ranks, c.num_experts, c.top_k, c.max_tokens, c.hidden, name_of(c.combine_dtype), c.layout == "rank", weighted,
            c.quantize_combine, values is not None, self._proxied, t.chunk, self._combine_far, t.combine_senders,
            base.blocks - t.combine_senders, t.combine_threads,
        )  # fmt: skip
        some = layout.row_weight  # stands in for what is not used
        no_values = out_values is None or not out_values.numel()
        kernel(
            y, weights if weighted == "rows" else some, some if values is None else values,
            out if out.numel() else self._no_row, self._no_values if no_values else out_values, layout.tokens, self._slots,
            self._slot_scales, self._slot_values, self._combine_staged, self._combine_staged_scales,
            self._combine_staged_values, layout.token_slot, layout.records, layout.totals, base.active,
            self._combine_ready, self._combine_arrived, self._combine_done, self._combine_tickets, self._combine_epochs,
        )  # fmt: skip
