"""How serving and training frameworks call deep_ep: stand-ins of their MoE layers, with experts that multiply by a number.

Written from what vLLM's deepep_ht and deepep_ll prepare and finalize, SGLang's DeepEP dispatcher and Megatron-LM's fused_a2a
call, in which order, with which arguments, and how they use the results.
"""

import threading

import deep_ep
import torch
from deep_ep.utils import EventHandle, EventOverlap

from tests.deep_ep.support import EXPERTS, HIDDEN
from tests.kernels.moe import reference


def factor(expert: torch.Tensor) -> torch.Tensor:
    """Factors of experts; exact in bfloat16."""
    return (expert * 7 % 13 - 6) / 4


def layer(x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The layer's output for rows, in plain torch."""
    return x.float() * torch.where(topk_idx < 0, 0.0, weights * factor(topk_idx)).sum(1, keepdim=True)


def unpacked(scales: torch.Tensor) -> torch.Tensor:
    """float32 scales [..., 4 n] of four exponents to an int32 [..., n]."""
    exponents = scales.reshape(-1).view(torch.uint8).to(torch.int32)
    return (exponents << 23).view(torch.float32).view(*scales.shape[:-1], 4 * scales.shape[-1])


def plain(x) -> torch.Tensor:
    """Rows in bfloat16, of what dispatch gives: with scales per token, per 128 elements, or packed exponents."""
    if not isinstance(x, tuple):
        return x
    rows, scales = x
    scales = unpacked(scales) if scales.dtype == torch.int32 else scales
    scales = scales[:, None] if scales.dim() == 1 else scales
    if scales.shape[-1] == 1:
        return (rows.float() * scales).to(torch.bfloat16)
    flat = reference.dequantise(rows.reshape(-1, HIDDEN).cpu(), scales.reshape(-1, scales.shape[-1]).cpu())
    return flat.view(rows.shape).to(rows.device, torch.bfloat16)


# -- vLLM -----------------------------------------------------------------------------------------------------------


class VllmHighThroughput:
    """Prepare and finalize of deepep_ht; one handle for each of two micro-batches."""

    def __init__(self, buffer, rank: int, ranks: int):
        self.buffer, self.ranks, self.offset = buffer, ranks, rank * (EXPERTS // ranks)
        self.handles = [None, None]

    def prepare(self, which: int, x, topk_idx, weights, asynchronous: bool):
        previous = self.buffer.capture() if asynchronous else None
        per_rank, per_rdma_rank, per_expert, in_rank, event = self.buffer.get_dispatch_layout(
            topk_idx=topk_idx, num_experts=EXPERTS, previous_event=previous, async_finish=False,
            allocate_on_comm_stream=False,
        )  # fmt: skip
        rows, ids, row_weights, counts, self.handles[which], event = self.buffer.dispatch(
            x=x, handle=None, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=topk_idx, topk_weights=weights,
            expert_alignment=1, config=deep_ep.Buffer.get_dispatch_config(self.ranks), previous_event=previous,
            async_finish=asynchronous, allocate_on_comm_stream=False,
        )  # fmt: skip

        def receive():
            if event.event is not None:
                event.current_stream_wait()
            # No id may be -1: choices of other ranks get an expert that is not here.
            elsewhere = EXPERTS - 1 if self.offset == 0 else 0
            return rows, torch.where(ids == -1, elsewhere, ids + self.offset), row_weights, counts

        return receive

    def experts(self, rows, ids, weights) -> torch.Tensor:
        local = (ids >= self.offset) & (ids < self.offset + EXPERTS // self.ranks)
        return (plain(rows) * torch.where(local, weights * factor(ids), 0.0).sum(1, keepdim=True)).to(torch.bfloat16)

    def finalize(self, which: int, output, y, asynchronous: bool):
        previous = self.buffer.capture() if asynchronous else None
        combined, _, event = self.buffer.combine(
            x=y, handle=self.handles[which], topk_weights=None, config=deep_ep.Buffer.get_combine_config(self.ranks),
            previous_event=previous, async_finish=asynchronous, allocate_on_comm_stream=False,
        )  # fmt: skip
        if asynchronous:
            event.current_stream_wait()
        output.copy_(combined, non_blocking=True)


class MicroBatches:
    """Two threads of which one runs at a time, as in dual-batch overlap: what one has sent, the other receives."""

    def __init__(self):
        self._turn = [threading.Semaphore(0), threading.Semaphore(0)]
        self._hooks: list = [None, None]
        self._errors: list[BaseException] = []

    def hand_over(self, which: int, hook) -> None:
        """Leave the end of a call to the other thread, and let it run."""
        self._hooks[1 - which] = hook
        self._turn[1 - which].release()
        self._turn[which].acquire()

    def receive(self, which: int) -> None:
        hook, self._hooks[which] = self._hooks[which], None
        if hook is not None:
            hook()

    def run(self, body) -> None:
        def one(which: int) -> None:
            self._turn[which].acquire()
            try:
                body(which)
                self.receive(which)
            except BaseException as err:
                self._errors.append(err)
            self._turn[1 - which].release()

        threads = [threading.Thread(target=one, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        self._turn[0].release()
        for thread in threads:
            thread.join()
        for error in self._errors:
            raise error


class VllmLowLatency:
    """Prepare and finalize of deepep_ll."""

    def __init__(self, buffer, rank: int, ranks: int, most: int, use_fp8: bool):
        self.buffer, self.most, self.use_fp8 = buffer, most, use_fp8
        first = rank * (EXPERTS // ranks)
        self.factors = factor(torch.arange(first, first + EXPERTS // ranks))
        self.handles = [None, None]

    def prepare(self, which: int, x, topk_idx):
        rows, counts, self.handles[which], _, hook = self.buffer.low_latency_dispatch(
            x, topk_idx, self.most, EXPERTS, use_fp8=self.use_fp8, round_scale=False, use_ue8m0=False,
            async_finish=False, return_recv_hook=True,
        )  # fmt: skip
        return hook, lambda: (rows, counts)

    def experts(self, rows, counts) -> torch.Tensor:
        """Rows of each expert; what follows the last is undefined."""
        y = torch.full((*counts.shape, counts.numel() and self._rows(rows), HIDDEN), float("nan"), dtype=torch.bfloat16)
        y, values = y.to(counts.device), plain(rows)
        for e, count in enumerate(counts.tolist()):
            y[e, :count] = values[e, :count] * self.factors[e]
        return y

    @staticmethod
    def _rows(rows) -> int:
        return (rows[0] if isinstance(rows, tuple) else rows).shape[1]

    def finalize(self, which: int, output, y, topk_idx, weights, in_halves: bool):
        _, _, hook = self.buffer.low_latency_combine(
            y, topk_idx, weights, self.handles[which], async_finish=False, zero_copy=False, return_recv_hook=in_halves,
            out=output,
        )  # fmt: skip
        return hook

    def run(self, x, topk_idx, weights) -> torch.Tensor:
        output = torch.empty_like(x)
        hook, receive = self.prepare(0, x, topk_idx)
        hook()
        assert self.finalize(0, output, self.experts(*receive()), topk_idx, weights, False) is None
        return output

    def run_in_two(self, x, topk_idx, weights) -> torch.Tensor:
        """The batch in two halves that overlap."""
        output, at, batches = torch.empty_like(x), len(x) // 2, MicroBatches()

        def body(which: int) -> None:
            part = slice(0, at) if which == 0 else slice(at, None)
            batches.receive(which)
            hook, receive = self.prepare(which, x[part], topk_idx[part])
            batches.hand_over(which, hook)
            y = self.experts(*receive())
            batches.receive(which)
            hook = self.finalize(which, output[part], y, topk_idx[part], weights[part], True)
            batches.hand_over(which, hook)

        batches.run(body)
        return output


# -- SGLang ---------------------------------------------------------------------------------------------------------


class SglangNormal:
    """The dispatcher of mode "normal", in its four steps."""

    def __init__(self, buffer, group_rank: int, ranks: int, asynchronous: bool):
        self.buffer, self.asynchronous, self.local = buffer, asynchronous, EXPERTS // ranks
        self.first, self.handle = group_rank * self.local, None

    def dispatch_a(self, x, topk_idx, weights):
        return x, topk_idx.to(torch.int64), weights, deep_ep.Buffer.capture() if self.asynchronous else None

    def dispatch_b(self, x, topk_idx, weights, previous):
        per_rank, per_rdma_rank, per_expert, in_rank, previous = self.buffer.get_dispatch_layout(
            topk_idx, EXPERTS, previous_event=previous, async_finish=self.asynchronous,
            allocate_on_comm_stream=previous is not None,
        )  # fmt: skip
        rows, ids, row_weights, counts, self.handle, event = self.buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=weights, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
            previous_event=previous, async_finish=self.asynchronous,
            allocate_on_comm_stream=previous is not None and self.asynchronous, expert_alignment=128, config=None,
        )  # fmt: skip
        if self.asynchronous:
            event.current_stream_wait()
        return rows, ids, row_weights, counts

    def experts(self, rows, ids, weights, counts) -> torch.Tensor:
        """As a grouped GEMM does: rows are sorted by expert, counts are multiples of 128."""
        assert all(n % 128 == 0 for n in counts)
        assert [-(-int((ids == e).sum()) // 128) * 128 for e in range(self.local)] == counts
        return layer(plain(rows), torch.where(ids < 0, -1, ids + self.first), weights).to(torch.bfloat16)

    def combine_a(self, y):
        return y, deep_ep.Buffer.capture() if self.asynchronous else None

    def combine_b(self, y, previous):
        out, _, event = self.buffer.combine(
            y, self.handle, async_finish=self.asynchronous, previous_event=previous,
            allocate_on_comm_stream=previous is not None, config=None,
        )  # fmt: skip
        if self.asynchronous:
            event.current_stream_wait()
        self.handle = None
        return out


class SglangLowLatency:
    """The dispatcher of mode "low_latency"; two of them share a buffer in two-batch overlap."""

    def __init__(self, buffer, rank: int, ranks: int, most: int, hooks: bool, scales: dict):
        self.buffer, self.most, self.hooks, self.scales = buffer, most, hooks, scales
        first = rank * (EXPERTS // ranks)
        self.factors = factor(torch.arange(first, first + EXPERTS // ranks))

    def dispatch_a(self, x, topk_idx):
        rows, self.counts, self.handle, event, hook = self.buffer.low_latency_dispatch(
            x, topk_idx.to(torch.int64), self.most, EXPERTS, async_finish=not self.hooks, return_recv_hook=self.hooks,
            **self.scales,
        )  # fmt: skip
        return rows, event, hook

    def dispatch_b(self, rows, event, hook):
        hook() if self.hooks else event.current_stream_wait()
        return rows

    def experts(self, rows) -> torch.Tensor:
        return (plain(rows) * self.factors.to(self.counts.device)[:, None, None]).to(torch.bfloat16)

    def combine_a(self, y, topk_idx, weights):
        out, event, hook = self.buffer.low_latency_combine(
            x=y, topk_idx=topk_idx, topk_weights=weights, handle=self.handle, async_finish=not self.hooks,
            return_recv_hook=self.hooks,
        )  # fmt: skip
        self.handle = None
        return out, event, hook

    def combine_b(self, out, event, hook):
        hook() if self.hooks else event.current_stream_wait()
        return out


# -- Megatron-LM ----------------------------------------------------------------------------------------------------


class Megatron:
    """Its buffer, which grows with the rows, and the layer: dispatch and combine, each with a backward pass."""

    def __init__(self, group):
        self.group, self.rank, self.ranks, self.buffer = group, group.rank(), group.size(), None

    def buffer_for(self, x: torch.Tensor):
        hidden_bytes = x.size(1) * max(x.element_size(), 2)
        configs = deep_ep.Buffer.get_dispatch_config(self.ranks), deep_ep.Buffer.get_combine_config(self.ranks)
        nvl = max(c.get_nvl_buffer_size_hint(hidden_bytes, self.ranks) for c in configs)
        rdma = max(c.get_rdma_buffer_size_hint(hidden_bytes, self.ranks) for c in configs)
        old = self.buffer
        if old is None or old.group != self.group or old.num_nvl_bytes < nvl or old.num_rdma_bytes < rdma:
            self.buffer = deep_ep.Buffer(self.group, nvl, rdma)
        return self.buffer

    def layer(self, x, topk_idx, probs, asynchronous: bool) -> torch.Tensor:
        rows, ids, row_probs, counts, handle = FusedDispatch.apply(x, topk_idx, probs, self, asynchronous)
        assert counts.tolist() == [int((ids == e).sum()) for e in range(EXPERTS // self.ranks)]
        first = self.rank * (EXPERTS // self.ranks)
        y = layer(rows, torch.where(ids < 0, -1, ids + first), row_probs).to(torch.bfloat16)
        return FusedCombine.apply(y, handle, self, asynchronous)


def _now(asynchronous: bool):
    return EventOverlap(EventHandle()) if asynchronous else None


class FusedDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, topk_idx, probs, model, asynchronous):
        buffer = model.buffer_for(x)
        per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(
            topk_idx, EXPERTS, previous_event=_now(asynchronous), async_finish=asynchronous,
            allocate_on_comm_stream=asynchronous,
        )  # fmt: skip
        rows, ids, row_probs, counts, handle, after = buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=probs, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
            previous_event=event, async_finish=asynchronous, allocate_on_comm_stream=asynchronous,
        )  # fmt: skip
        if asynchronous:
            after.current_stream_wait()
        ctx.handle, ctx.model, ctx.asynchronous = handle, model, asynchronous
        return rows, ids, row_probs, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx, grad_rows, _ids, grad_probs, _counts, _handle):
        buffer = ctx.model.buffer_for(grad_rows)
        grad_x, grad_probs, after = buffer.combine(
            grad_rows.contiguous(), ctx.handle, topk_weights=grad_probs.float(), previous_event=_now(ctx.asynchronous),
            async_finish=ctx.asynchronous, allocate_on_comm_stream=ctx.asynchronous,
        )  # fmt: skip
        if ctx.asynchronous:
            after.current_stream_wait()
        return grad_x, None, grad_probs, None, None


class FusedCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, handle, model, asynchronous):
        out, _, after = model.buffer_for(y).combine(
            y, handle=handle, async_finish=asynchronous, previous_event=_now(asynchronous),
            allocate_on_comm_stream=asynchronous,
        )  # fmt: skip
        if asynchronous:
            after.current_stream_wait()
        ctx.handle, ctx.model, ctx.asynchronous = handle, model, asynchronous
        return out

    @staticmethod
    def backward(ctx, grad_out):
        grad_y, _, _, _, _, after = ctx.model.buffer_for(grad_out).dispatch(
            grad_out.contiguous(), handle=ctx.handle, previous_event=_now(ctx.asynchronous),
            async_finish=ctx.asynchronous, allocate_on_comm_stream=ctx.asynchronous,
        )  # fmt: skip
        if ctx.asynchronous:
            after.current_stream_wait()
        return grad_y, None, None, None
