"""Throughput mode on the host: buffers, and the launches of its kernels."""

from __future__ import annotations

import torch

from tilescale_net.kernels.collective import Plan
from tilescale_net.kernels.moe.combine_throughput import combine_throughput
from tilescale_net.kernels.moe.config import FP8, Config, as_words, name_of
from tilescale_net.kernels.moe.dispatch_throughput import dispatch_throughput
from tilescale_net.kernels.moe.faults import Fault
from tilescale_net.kernels.moe.handle import Choices, Dispatched, Handle, Layout, Pending, counts_of
from tilescale_net.kernels.moe.layout import layout as layout_kernel
from tilescale_net.kernels.moe.refusal import refuse_throughput
from tilescale_net.kernels.moe.rows import groups_of
from tilescale_net.kernels.moe.sizes import NO_FAULT, Counts, Totals, output_tag, record_words
from tilescale_net.kernels.moe.streams import DeferredStream, SideStream


def placement_of(config: Config) -> str:
    """See dispatch_throughput."""
    return "rank" if config.layout == "rank" else "expert" if config.zero_copy else "arrival"


def output_rows(config: Config) -> int:
    """Rows that dispatch gives."""
    return config.ranks * config.max_tokens if config.layout == "rank" else config.capacity


def plan(config: Config, tuning, proxied: bool) -> Plan:
    """Symmetric memory of the mode: name -> (shape, dtype)."""
    c, R, M = config, config.ranks, config.max_tokens
    counts, W, placement = Counts(c.num_experts, R), record_words(c.top_k), placement_of(c)
    row, scales, G = c.row_words, max(c.scale_words, 1), groups_of(c.hidden)
    payload, chunks = FP8 if c.quantize_combine else c.combine_dtype, -(-M // tuning.chunk)
    far = R * M if proxied else 1
    arrivals = R * M if placement == "arrival" or (proxied and placement == "expert") else 1
    own = output_rows(c) if placement != "arrival" else 1
    ints, floats, words = torch.int32, torch.float32, torch.uint64

    def scaled(rows: int) -> int:
        return rows if c.scale_words else 1

    def quantised(rows: int) -> int:
        return rows if c.quantize_combine else 1

    return {
        # Layout.
        "counts_out": ((counts.words,), ints),
        "counts_in": ((R, counts.words), ints),
        "records_out": ((R, M, W), ints),
        "records_in": ((R, M, W), ints),
        "counts_ready": ((R,), words),
        "records_ready": ((R,), words),
        "met": ((1,), words),
        # Dispatch.
        "out": ((own, c.hidden), c.dtype),
        "out_scales": ((scaled(own), scales), floats),
        "arrival": ((arrivals, row), ints),
        "arrival_scales": ((scaled(arrivals), scales), ints),
        "staged": ((far, row), ints),
        "staged_scales": ((scaled(far), scales), ints),
        "dispatch_ready": ((R,), words),
        "dispatch_arrived": ((R, chunks), words),
        "dispatch_done": ((R,), words),
        # Combine.
        "slots": ((R * M, c.hidden), payload),
        "slot_scales": ((quantised(R * M), G), floats),
        "slot_values": ((R * M, c.top_k), floats),
        "combine_staged": ((far, c.hidden), payload),
        "combine_staged_scales": ((quantised(far), G), floats),
        "combine_staged_values": ((far, c.top_k), floats),
        "combine_ready": ((R,), words),
        "combine_arrived": ((R, chunks), words),
        "combine_done": ((R,), words),
    }


class Throughput:
    """Buffers and launches; `base` is the AllToAll, which allocates, checks arguments and keeps the state."""

    def __init__(self, base, config: Config):
        self._base, self._c, self._tuning = base, config, base.tuning
        R, c, tuning, device = config.ranks, config, base.tuning, base.device
        self._proxied = base.proxied
        self._b = base.allocate(plan(config, tuning, self._proxied))
        self._stream = SideStream(device) if device.type == "cuda" else DeferredStream()
        self._launch = self._stream.launch
        self._kernels: dict = {}
        self.placement, self.out_rows = placement_of(c), output_rows(c)
        self.senders = base.blocks if self.placement == "rank" else tuning.dispatch_senders
        self._chunks = -(-c.max_tokens // tuning.chunk)
        self._own_tag = 0 if self.placement == "arrival" else output_tag(base.place(self._b.out))

        # Words of this rank alone.
        counts = Counts(c.num_experts, R)
        self._partial = torch.zeros((base.blocks, counts.words), dtype=torch.int32, device=device)
        self._layout_epochs, self._dispatch_epochs, self._combine_epochs = (
            base.counters(base.blocks) for _ in range(3)
        )
        self._dispatch_tickets, self._combine_tickets = (
            torch.zeros((2, 2), dtype=torch.int32, device=device) for _ in range(2)
        )
        # Stand in for tensors without elements, and for those that a kernel does not use.
        self._nothing = torch.zeros((1, max(c.row_words, c.scale_words, 1)), dtype=torch.int32, device=device)
        self._no_row = torch.zeros((1, c.hidden), dtype=c.combine_dtype, device=device)
        self._no_values = torch.zeros((1, c.top_k), dtype=torch.float32, device=device)

    # -- kernels ----------------------------------------------------------------------------------------------------

    def compile(self, everything: bool) -> None:
        """Compile what an ordinary call needs, or every variant that a call may need."""
        by_rank = self._c.layout == "rank"
        self._layout_of("int64")
        self._dispatch()
        self._combine_of("" if by_rank else "choices", False)
        if everything:
            self._layout_of("int32")
            self._combine_of("", True)
            for weighted in () if by_rank else ("", "rows"):
                self._combine_of(weighted, False)
            self._refusal(self.senders)
            self._refusal(self._tuning.combine_senders)

    def _kernel(self, key, make):
        found = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = make()
        return found

    def _layout_of(self, index_dtype: str):
        c, base = self._c, self._base
        return self._kernel(
            index_dtype,
            lambda: layout_kernel(
                c.ranks, c.num_experts, c.top_k, c.max_tokens, c.capacity, c.alignment, base.blocks, base.threads, index_dtype
            ),
        )  # fmt: skip

    def _dispatch(self):
        c, base, t = self._c, self._base, self._tuning
        return self._kernel(
            "dispatch",
            lambda: dispatch_throughput(
                c.ranks, c.num_experts, c.top_k, c.max_tokens, c.row_words, c.scale_words, self.placement, self._proxied,
                t.chunk, self._far_chunk(c.row_bytes), self.senders, base.blocks - self.senders, base.threads,
            ),
        )  # fmt: skip

    def _combine_of(self, weighted: str, valued: bool):
        c, base, t = self._c, self._base, self._tuning
        payload = FP8 if c.quantize_combine else c.combine_dtype
        return self._kernel(
            (weighted, valued),
            lambda: combine_throughput(
                c.ranks, c.num_experts, c.top_k, c.max_tokens, c.hidden, name_of(c.combine_dtype), c.layout == "rank",
                weighted, c.quantize_combine, valued, self._proxied, t.chunk, self._far_chunk(c.hidden * payload.itemsize),
                t.combine_senders, base.blocks - t.combine_senders, t.combine_threads,
            ),
        )  # fmt: skip

    def _refusal(self, senders: int):
        base = self._base
        return refuse_throughput(self._c.ranks, self._chunks, senders, base.blocks, base.threads)

    def _far_chunk(self, row_bytes: int) -> int:
        """Rows of a message to another node: large enough for a fabric to reach its rate, small enough to overlap."""
        t = self._tuning
        return max(t.chunk, min(t.far_bytes // row_bytes, -(-self._c.max_tokens // 4)))

    # -- outputs ----------------------------------------------------------------------------------------------------

    def output_shape(self) -> tuple[int, int]:
        """Shape of the rows that dispatch gives."""
        return self.out_rows, self._c.hidden

    @property
    def symmetric_output(self) -> bool:
        """Whether outputs of dispatch lie in symmetric memory."""
        return self.placement != "arrival"

    def own_output(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows and scales that dispatch fills when the caller brings none."""
        if self.placement == "arrival":
            return self._base.new_output()
        return self._b.out, self._b.out_scales if self._c.scale_words else None

    # -- dispatch ---------------------------------------------------------------------------------------------------

    def dispatch(self, x, scales, choices: Choices | Handle, out, aside: bool) -> Pending:
        """Launch a dispatch.

        Args:
            x, scales: rows of this rank. choices: of these rows, or the handle of an earlier dispatch.
            out: (rows, scales) for the result, or None. aside: let it run beside what the caller launches next.
        """
        if not aside:
            return self._dispatched(x, scales, choices, out)
        tensors = [x, scales, *(() if isinstance(choices, Handle) else (choices.topk_idx, choices.topk_weights))]
        with self._stream.aside([t for t in tensors if t is not None]) as event:
            pending = self._dispatched(x, scales, choices, out)
        pending.rest = event
        return pending

    def receive_dispatch(self, pending: Pending) -> None:
        """Let the current stream wait for a dispatch that runs aside."""
        self._stream.wait(pending.rest)

    def _dispatched(self, x, scales, choices, out) -> Pending:
        c = self._c
        if isinstance(choices, Handle):
            layout, handle = choices.layout, choices.again()
        else:
            layout = self.make_layout(choices.topk_idx, choices.topk_weights, len(x), cleared=choices.cleared)
            handle = Handle(c.signature, layout, self._base.mask)
        tag = self._own_tag if out is None or not self.symmetric_output else output_tag(self._base.place(out[0]))
        rows, row_scales = self.own_output() if out is None else out
        self._move(x, scales, layout, rows, row_scales, tag)
        counts, offsets, num_rows = counts_of(layout, c.ranks, c.local_experts)
        by_rank = c.layout == "rank"
        index, number = (layout.row_index, num_rows) if by_rank else (None, None)
        result = Dispatched(rows, row_scales, counts, offsets, index, layout.row_weight, number, handle)
        return Pending("dispatch", handle, result)

    def refuse_dispatch(self, fault: Fault, known: bool) -> None:
        """Take part in a dispatch that this rank cannot make. known: it was to use the layout of an earlier one."""
        if known:
            self._refuse(fault, self.senders, "dispatch", self._dispatch_tickets, self._dispatch_epochs)
            return
        none = torch.zeros((1, self._c.top_k), dtype=torch.int64, device=self._base.device)
        empty = self.make_layout(none, none.float(), 0, fault.code, fault.value)
        self._move(None, None, empty, *self.own_output(), fault.code)

    def make_layout(
        self, topk_idx, topk_weights, tokens: int, fault: int = NO_FAULT, value: int = 0, cleared: bool = False
    ) -> Layout:
        """Agree with all ranks on the layout of a dispatch; a fault makes them all refuse it.

        Args:
            topk_idx, topk_weights: [rows >= tokens, top_k].
            cleared: fill the places of rows that do not exist with zeros.
        """
        c, b, device = self._c, self._b, self._base.device

        def ints(*shape):
            return (torch.zeros if cleared else torch.empty)(shape, dtype=torch.int32, device=device)

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
        self._launch(
            self._layout_of(name_of(topk_idx.dtype)), topk_idx, topk_weights, tokens, fault, value, self._base.active,
            b.counts_out, b.counts_in, b.records_out, b.records_in, b.counts_ready, b.records_ready, b.met,
            self._layout_epochs, self._partial, self._base.status.tensor, *made.tensors(),
        )  # fmt: skip
        return made

    def _move(self, x, scales, layout: Layout, out, out_scales, tag: int) -> None:
        """Launch the kernel that moves rows; `out` and `out_scales` are what the caller gets."""
        c, b = self._c, self._b

        def rows(tensor, words):
            empty = tensor is None or not tensor.numel()
            return self._nothing[:, :words] if empty else as_words(tensor, words)

        words, scale_words = c.row_words, max(c.scale_words, 1)
        self._launch(
            self._dispatch(), rows(x, words), rows(scales, scale_words), rows(out, words), rows(out_scales, scale_words),
            b.arrival, b.arrival_scales, b.staged, b.staged_scales, layout.send_token, layout.send_row, layout.records,
            layout.totals, self._base.active, b.dispatch_ready, b.dispatch_arrived, b.dispatch_done,
            self._dispatch_tickets, self._dispatch_epochs, tag, self._base.status.tensor,
        )  # fmt: skip

    # -- combine ----------------------------------------------------------------------------------------------------

    def combine(self, y, handle: Handle, out, weighted, values=None, out_values=None, aside: bool = False) -> Pending:
        """Launch a combine into `out`.

        Args:
            weighted: False: sum rows as they are; True: with the weights of the choices; or a tensor: with the weight of
                each expert-major row.
            values, out_values: None, or numbers of expert-major rows and where they go.
            aside: let it run beside what the caller launches next.
        """
        pending = Pending("combine", handle, out)
        if not aside:
            self._sum(y, handle.layout, out, weighted, values, out_values)
            return pending
        tensors = [y, *([weighted] if isinstance(weighted, torch.Tensor) else [])]  # what the caller may drop
        with self._stream.aside(tensors) as pending.rest:
            self._sum(y, handle.layout, out, weighted, values, out_values)
        return pending

    def receive_combine(self, pending: Pending) -> None:
        """Let the current stream wait for a combine that runs aside."""
        self._stream.wait(pending.rest)

    def refuse_combine(self, fault: Fault) -> None:
        """Take part in a combine that this rank cannot make."""
        self._refuse(fault, self._tuning.combine_senders, "combine", self._combine_tickets, self._combine_epochs)

    def _sum(self, y, layout: Layout, out, weighted, values, out_values) -> None:
        b, by_row = self._b, isinstance(weighted, torch.Tensor)
        kind = "rows" if by_row else "choices" if weighted and self._c.layout == "expert" else ""
        some = layout.row_weight  # stands in for what is not used
        no_values = out_values is None or not out_values.numel()
        self._launch(
            self._combine_of(kind, values is not None), y, weighted if by_row else some, some if values is None else values,
            out if out.numel() else self._no_row, self._no_values if no_values else out_values, layout.tokens, b.slots,
            b.slot_scales, b.slot_values, b.combine_staged, b.combine_staged_scales, b.combine_staged_values,
            layout.token_slot, layout.records, layout.totals, self._base.active, b.combine_ready, b.combine_arrived,
            b.combine_done, self._combine_tickets, self._combine_epochs, 0, self._base.status.tensor,
        )  # fmt: skip

    def _refuse(self, fault: Fault, senders: int, kind: str, tickets, epochs) -> None:
        ready, arrived, done = (getattr(self._b, f"{kind}_{name}") for name in ("ready", "arrived", "done"))
        self._launch(self._refusal(senders), fault.code, self._base.active, ready, arrived, done, tickets, epochs)
