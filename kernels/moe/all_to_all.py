"""The two verbs of an expert-parallel layer: dispatch tokens to the ranks of their experts, combine what comes back."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

import tilescale_net as tsn
from tilescale_net.kernels.collective import Collective
from tilescale_net.kernels.moe.config import COMBINE_DTYPES, FP8, Config, default_capacity
from tilescale_net.kernels.moe.faults import Fault, Status, check_experts, check_tensor
from tilescale_net.kernels.moe.handle import Dispatched, Handle, counts_of
from tilescale_net.kernels.moe.latency import Latency
from tilescale_net.kernels.moe.rows import groups_of
from tilescale_net.kernels.moe.throughput import Throughput
from tilescale_net.kernels.moe.tuning import Tuning


@dataclass
class Pending:
    """A dispatch or combine that has been sent and not yet received."""

    kind: str
    handle: Handle
    result: object
    arguments: tuple = ()
    event: object = None


class AllToAll(Collective):
    """Dispatch and combine of an expert-parallel layer; rank r hosts experts [r * E / ranks, (r + 1) * E / ranks).

    Constructed by all ranks with the same arguments. All ranks then make the same calls in the same order, on one
    stream each; nothing waits for the GPU on the host, so calls can be captured in a CUDA graph. Results do not depend
    on timing: equal inputs give equal bits.

    Args:
        num_experts: experts of the layer, a multiple of the number of ranks.
        max_tokens: tokens that a rank dispatches at most in a call.
        hidden: elements of a row; a row of `dtype` and of `combine_dtype` is a multiple of 16 bytes.
        top_k: choices per token.
        dtype: of dispatched rows: bfloat16, float16, float32, or float8_e4m3fn with a float32 scale per 128 elements.
        mode: "throughput" (few multiprocessors, any number of tokens) or "latency" (all multiprocessors, up to 512).
        layout: throughput mode: "expert" gives the rows of each expert in one piece, ready for a grouped GEMM; "rank"
            gives each token once per rank, with an index of the rows of each expert.
        alignment: throughput mode: the first row of each expert is a multiple of it.
        capacity: throughput mode: expert-major rows that a rank can receive, including the gaps; default the worst case.
            A dispatch that does not fit on some rank sends nothing and raises on all of them.
        combine_dtype: of `y` and of combine's result; default `dtype`, or bfloat16 where `dtype` is FP8.
        quantize_combine: rows travel back as FP8 with a scale per 128 elements.
        zero_copy: throughput mode, layout "expert": outputs lie in symmetric memory (`empty_output`, or the one that this
            object owns) and most rows land in place. False: outputs are ordinary tensors, and rows are copied once more.
        active: for each rank whether it takes part; see `set_active`.
        tuning: launch geometry and message sizes.

    Raises:
        ValueError, TypeError: an argument that makes no sense; it is named.
        RankMismatch: ranks that disagree on an argument.
        HeapError: the symmetric heap has no room for the buffers.
    """

    def __init__(
        self, num_experts: int, max_tokens: int, hidden: int, top_k: int, dtype: torch.dtype = torch.bfloat16,
        mode: str = "throughput", *, layout: str = "expert", alignment: int = 1, capacity: int | None = None,
        combine_dtype: torch.dtype | None = None, quantize_combine: bool = False, zero_copy: bool = True,
        active: list[bool] | None = None, tuning: Tuning | None = None,
    ):  # fmt: skip
        world = tsn.world()
        if combine_dtype is None:
            combine_dtype = torch.bfloat16 if dtype == FP8 else dtype
        if capacity is None:
            capacity = default_capacity(world.size, num_experts, max_tokens, top_k, alignment)
        self.config = config = Config(
            world.size, num_experts, max_tokens, hidden, top_k, dtype, mode, layout, alignment, capacity, combine_dtype,
            quantize_combine, zero_copy,
        )  # fmt: skip
        on_gpu = world.device.type == "cuda"
        count = torch.cuda.get_device_properties(world.device).multi_processor_count if on_gpu else 0
        self.tuning = tuning = (tuning or Tuning()).resolved(config, on_gpu, count)
        active = [True] * world.size if active is None else [bool(a) for a in active]
        super().__init__("AllToAll", f"active={active}, {config.describe()}, {tuning}", tuning.threads, tuning.blocks)
        self.active = torch.ones((world.size,), dtype=torch.int32, device=self._device)
        self._mask = [True] * world.size
        self.status = Status(world)
        self._outstanding: dict[str, Pending] = {}
        self._stream = torch.cuda.Stream(self._device, priority=-1) if on_gpu and mode == "throughput" else None
        self._mode = Latency(self, config) if mode == "latency" else Throughput(self, config)
        self.set_active(active)

    # -- what the caller may ask ------------------------------------------------------------------------------------

    def empty_output(self) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Memory for `out` of dispatch: rows, or rows and scales for FP8. Collective where it is symmetric."""
        c = self.config
        shape = self._mode.output_shape()
        symmetric = c.mode == "throughput" and (c.layout == "rank" or c.zero_copy)

        def make(shape, dtype):
            return tsn.empty(shape, dtype) if symmetric else torch.empty(shape, dtype=dtype, device=self._device)

        rows = make(shape, c.dtype)
        return (rows, make((*shape[:-1], groups_of(c.hidden)), torch.float32)) if c.dtype == FP8 else rows

    def set_active(self, active: list[bool]) -> None:
        """Leave ranks out from the next call on: they get nothing, and nobody waits for them.

        The ranks that stay call this with the same list. A rank that was left out makes no further calls and cannot come
        back; make a new AllToAll for that.

        Raises:
            ValueError: a list of another length, one without this rank, or one that brings a rank back.
        """
        active = [bool(a) for a in active]
        if len(active) != self.n_pes:
            raise ValueError(f"AllToAll: active has {len(active)} entries; there are {self.n_pes} ranks")
        if not active[self.rank]:
            raise ValueError(
                f"AllToAll: active leaves out rank {self.rank} itself; a rank left out makes no further calls"
            )
        back = [r for r in range(self.n_pes) if active[r] and not self._mask[r]]
        if back:
            raise ValueError(f"AllToAll: active brings back ranks {back}; make a new AllToAll instead")
        self._mask = active
        self.active.copy_(torch.tensor(active, dtype=torch.int32), non_blocking=True)

    def check(self) -> None:
        """Wait for this rank's kernels and raise what they refused; see `dispatch`."""
        tsn.synchronize()
        self._raise_refusal()

    # -- dispatch ---------------------------------------------------------------------------------------------------

    def dispatch(self, x, topk_idx=None, topk_weights=None, *, handle: Handle | None = None, out=None) -> Dispatched:
        """Send each token to the ranks of its experts.

        Args:
            x: [tokens, hidden] of `dtype`; for FP8 a pair (x, scales) with scales [tokens, ceil(hidden / 128)] float32, or,
                in latency mode, unquantised rows that are quantised on the way. 0 to max_tokens tokens.
            topk_idx: [tokens, top_k] expert of each choice, int64 or int32; -1: no choice.
            topk_weights: [tokens, top_k] float32; default 1.
            handle: throughput mode, instead of choices: use those of an earlier dispatch, without exchanging them again.
            out: where the rows go, from `empty_output` (rows, or rows and scales); with `zero_copy=False` and in latency
                mode any tensor of that shape. Default: in symmetric memory of this object, valid until the next
                dispatch, or a new tensor where outputs are not symmetric.

        Returns:
            Dispatched.

        Raises:
            TypeError, ValueError, HeapError: an argument is wrong, or capacity is too small. All ranks raise, nothing was
                sent. What only the GPU sees (expert ids, capacity) is raised by the next call or by `check`; until then
                the dispatch counts as empty (latency mode: without the choices that are out of range).
            TileScaleError: an earlier kernel or a peer has failed.
        """
        if self.config.mode == "throughput":
            return self._throughput_dispatch(x, topk_idx, topk_weights, handle, out)
        self._must_be_free("dispatch")
        pending = self._latency_dispatch("both", x, topk_idx, topk_weights, handle, out)
        self._raise_refusal_if_simulated()
        return pending.result

    def dispatch_send(self, x, topk_idx=None, topk_weights=None, *, handle: Handle | None = None, out=None) -> Pending:
        """First half of dispatch; work that the caller launches before `dispatch_recv` overlaps with it.

        Throughput mode runs on a stream of its own with high priority. `x` and `out` belong to the call until then.
        """
        self._must_be_free("dispatch")
        if self.config.mode == "latency":
            pending = self._latency_dispatch("send", x, topk_idx, topk_weights, handle, out)
        else:
            tensors = [t for t in (*(x if isinstance(x, tuple) else (x,)), topk_idx, topk_weights) if t is not None]
            with self._aside(tensors) as event:
                result = self._throughput_dispatch(x, topk_idx, topk_weights, handle, out)
            pending = Pending("dispatch", result.handle, result, event=event)
        self._outstanding["dispatch"] = pending
        return pending

    def dispatch_recv(self, pending: Pending) -> Dispatched:
        """Second half of dispatch: the rows are there for what the caller launches next."""
        self._must_be_outstanding("dispatch", pending)
        if self.config.mode == "latency":
            self._mode.dispatch("receive", *pending.arguments)
            self._raise_refusal_if_simulated()
        elif pending.event is not None:
            torch.cuda.current_stream(self._device).wait_event(pending.event)
        return pending.result

    # -- combine ----------------------------------------------------------------------------------------------------

    def combine(self, y, handle: Handle, *, out=None, weighted: bool = True, weights=None) -> torch.Tensor:
        """Bring rows back to their tokens and sum them in float32.

        Args:
            y: rows of `combine_dtype`, in the shape and order of the dispatch's `x`.
            handle: of that dispatch; each dispatch is combined once.
            out: [tokens, hidden] of `combine_dtype`; default a new tensor. Tokens without a choice get zeros.
            weighted: multiply each row by the weight of its choice. Layout "rank": rows are summed as they are.
            weights: throughput mode, layout "expert": [capacity] float32 to use instead of the weights of the choices.

        Each rank sums over its experts first and rounds to `combine_dtype` once, then the token's rank sums over ranks.

        Raises:
            TypeError, ValueError: an argument is wrong, or the handle was combined already.
            TileScaleError: an earlier kernel or a peer has failed.
        """
        out = self._combine_arguments(y, handle, out, weights)
        if self.config.mode == "latency":
            self._must_be_free("combine")
            self._mode.combine("both", y, handle, out, weighted)
        else:
            self._mode.combine(y, handle, out, self._weights(weighted, weights), None, None)
        handle.combined = True
        return out

    def combine_send(self, y, handle: Handle, *, out=None, weighted: bool = True, weights=None) -> Pending:
        """First half of combine; work that the caller launches before `combine_recv` overlaps with it."""
        self._must_be_free("combine")
        out = self._combine_arguments(y, handle, out, weights)
        pending = Pending("combine", handle, out, (weighted,))
        if self.config.mode == "latency":
            self._mode.combine("send", y, handle, None, weighted)
        else:
            with self._aside([t for t in (y, out, weights) if t is not None]) as pending.event:
                self._mode.combine(y, handle, out, self._weights(weighted, weights), None, None)
        handle.combined = True
        self._outstanding["combine"] = pending
        return pending

    def combine_recv(self, pending: Pending) -> torch.Tensor:
        """Second half of combine: the sums are there for what the caller launches next."""
        self._must_be_outstanding("combine", pending)
        if self.config.mode == "latency":
            self._mode.combine("receive", None, pending.handle, pending.result, *pending.arguments)
        elif pending.event is not None:
            torch.cuda.current_stream(self._device).wait_event(pending.event)
        return pending.result

    def combine_values(self, y, values, handle: Handle) -> tuple[torch.Tensor, torch.Tensor]:
        """Throughput mode: combine without weights that also brings one number per expert-major row back.

        Args:
            y: as in `combine`. values: [capacity] float32. handle: of the dispatch.

        Returns:
            The sums, [tokens, hidden], and the numbers at the choices that they belong to, [tokens, top_k]; 0 elsewhere.
        """
        out = self._combine_arguments(y, handle, None, None)
        c = self.config
        try:
            check_tensor("values", values, self._device, (torch.float32,), (c.capacity,))
        except Fault as fault:
            raise self._named("combine_values", fault) from None
        out_values = torch.empty((handle.tokens, c.top_k), dtype=torch.float32, device=self._device)
        self._mode.combine(y, handle, out, None, values, out_values)
        handle.combined = True
        return out, out_values

    # -- the modes --------------------------------------------------------------------------------------------------

    def _throughput_dispatch(self, x, topk_idx, topk_weights, handle, out) -> Dispatched:
        self._begin()
        c, mode = self.config, self._mode
        if (handle is None) == (topk_idx is None):
            raise TypeError("AllToAll.dispatch: give either topk_idx or the handle of an earlier dispatch")
        try:
            x, scales = self._check_rows(x)
            if handle is None:
                topk_weights = self._check_choices(x, topk_idx, topk_weights)
            else:
                self._check_handle(handle)
                if len(x) != handle.tokens:
                    raise Fault("x", ValueError(f"x has {len(x)} tokens; the handle is for {handle.tokens}"), len(x))
            out, out_scales = self._check_output(out)
        except Fault as fault:
            if handle is None:
                none = torch.zeros((1, c.top_k), dtype=torch.int64, device=self._device)
                empty = mode.make_layout(none, none.float(), 0, fault.code, fault.value)
                mode.dispatch(None, None, empty, *self._spare_output())
                self._forget_own_refusal()
            raise self._named("dispatch", fault) from None
        layout = mode.make_layout(topk_idx, topk_weights, len(x)) if handle is None else handle.layout
        mode.dispatch(x, scales, layout, out, out_scales)
        self._raise_refusal_if_simulated()
        by_rank = c.layout == "rank"
        counts, offsets, rows = counts_of(layout, c.ranks, c.local_experts)
        handle = Handle(c.signature, layout) if handle is None else handle.again()
        return Dispatched(
            out, out_scales, counts, offsets, layout.row_index if by_rank else None, layout.row_weight,
            rows if by_rank else None, handle,
        )  # fmt: skip

    def _latency_dispatch(self, halves, x, topk_idx, topk_weights, handle, out) -> Pending:
        self._begin()
        c, mode = self.config, self._mode
        if handle is not None or topk_idx is None:
            raise TypeError("AllToAll.dispatch: latency mode takes topk_idx, and no handle")
        counts = torch.empty((c.local_experts,), dtype=torch.int32, device=self._device)
        try:
            x, scales = self._check_rows(x)
            topk_weights = self._check_choices(x, topk_idx, topk_weights)
            out, out_scales = self._check_output(out)
        except Fault as fault:
            spare = (mode.make_received(0), None, None, None, None, *self._spare_output(), counts)
            mode.dispatch("both", *spare, fault.code, fault.value)
            self._forget_own_refusal()
            raise self._named("dispatch", fault) from None
        received = mode.make_received(len(x))
        mode.dispatch(halves, received, x, scales, topk_idx, topk_weights, out, out_scales, counts)
        handle = Handle(c.signature, received)
        result = Dispatched(out, out_scales, counts, None, None, None, None, handle)
        return Pending("dispatch", handle, result, (received, None, None, None, None, out, out_scales, counts))

    # -- checks -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._check_alive()
        tsn.check()
        self._raise_refusal()

    def _named(self, call: str, fault: Fault) -> Exception:
        return type(fault.error)(f"AllToAll.{call} on rank {self.rank}: {fault.error}")

    def _refusal(self) -> Exception | None:
        """What kernels refused since the last look."""
        return self.status.error("AllToAll.dispatch", self.config.num_experts, self.config.capacity)

    def _raise_refusal(self) -> None:
        error = self._refusal()
        if error is not None:
            raise error

    def _raise_refusal_if_simulated(self) -> None:
        """Where kernels have ended when their launch returns, a refusal is known at once."""
        if self._device.type == "cpu":
            self._raise_refusal()

    def _forget_own_refusal(self) -> None:
        """This rank is about to say itself what was wrong; the refusal that its kernels spread is for the others."""
        tsn.synchronize()
        self._refusal()

    def _check_rows(self, x) -> tuple[torch.Tensor, torch.Tensor | None]:
        c = self.config
        x, scales = x if isinstance(x, tuple) and len(x) == 2 else (x, None)
        dtypes = (c.dtype, *COMBINE_DTYPES) if c.mode == "latency" and c.dtype == FP8 and scales is None else (c.dtype,)
        check_tensor("x", x, self._device, dtypes, (None, c.hidden))
        if len(x) > c.max_tokens:
            raise Fault("x", ValueError(f"x has {len(x)} tokens; max_tokens is {c.max_tokens}"), len(x))
        if x.dtype == FP8:
            if scales is None:
                raise Fault("scales", TypeError("x is FP8, so x must be a pair (x, scales)"))
            check_tensor("scales", scales, self._device, (torch.float32,), (len(x), groups_of(c.hidden)))
        elif scales is not None:
            raise Fault("scales", TypeError(f"scales were given with x of dtype {x.dtype}; they belong to FP8 rows"))
        return x, scales

    def _check_choices(self, x, topk_idx, topk_weights) -> torch.Tensor:
        c = self.config
        check_tensor("topk_idx", topk_idx, self._device, (torch.int64, torch.int32), (len(x), c.top_k))
        check_experts(topk_idx, c.num_experts)
        if topk_weights is None:
            return torch.ones((len(x), c.top_k), dtype=torch.float32, device=self._device)
        check_tensor("topk_weights", topk_weights, self._device, (torch.float32,), (len(x), c.top_k))
        return topk_weights

    def _spare_output(self):
        own = self._mode.own_output()
        return own if own[0] is not None else self._new_output()

    def _new_output(self):
        made = self.empty_output()
        return made if isinstance(made, tuple) else (made, None)

    def _check_output(self, out) -> tuple[torch.Tensor, torch.Tensor | None]:
        c = self.config
        if out is None:
            return self._spare_output()
        rows, scales = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
        shape = self._mode.output_shape()
        symmetric = self._mode.own_output()[0] is not None
        named = [("out", rows, c.dtype, shape)]
        if c.dtype == FP8:
            named.append(("out", scales, torch.float32, (*shape[:-1], groups_of(c.hidden))))
        for name, tensor, dtype, wanted in named:
            check_tensor(name, tensor, self._device, (dtype,), wanted)
            if symmetric:
                try:
                    self._check(name, tensor, symmetric=True)
                except tsn.HeapError as error:
                    raise Fault("out", error) from None
                self._agree(f"out at heap offset {self._world.heap.offset_of(tensor)}")
        return rows, scales

    def _check_handle(self, handle) -> None:
        if not isinstance(handle, Handle):
            raise TypeError(f"AllToAll on rank {self.rank}: handle must be the handle of a dispatch, not {handle!r}")
        if handle.signature != self.config.signature:
            raise ValueError(
                f"AllToAll on rank {self.rank}: handle belongs to another configuration {handle.signature}; this one is "
                f"{self.config.signature} (ranks, num_experts, max_tokens, top_k, mode, alignment, capacity)"
            )

    def _combine_arguments(self, y, handle, out, weights) -> torch.Tensor:
        self._begin()
        c = self.config
        self._check_handle(handle)
        if handle.combined:
            raise ValueError(f"AllToAll.combine on rank {self.rank}: handle was combined already; dispatch again first")
        try:
            check_tensor("y", y, self._device, (c.combine_dtype,), self._mode.output_shape())
            if weights is not None:
                if c.mode != "throughput" or c.layout != "expert":
                    raise Fault("weights", ValueError('weights belong to throughput mode with layout "expert"'))
                check_tensor("weights", weights, self._device, (torch.float32,), (c.capacity,))
            if out is None:
                return torch.empty((handle.tokens, c.hidden), dtype=c.combine_dtype, device=self._device)
            check_tensor("out", out, self._device, (c.combine_dtype,), (handle.tokens, c.hidden))
        except Fault as fault:
            raise self._named("combine", fault) from None
        return out

    def _weights(self, weighted: bool, weights):
        return weights if weights is not None else True if weighted and self.config.layout == "expert" else None

    def _must_be_free(self, kind: str) -> None:
        if kind in self._outstanding:
            raise ValueError(f"AllToAll.{kind}: the {kind} sent before has not been received; call {kind}_recv first")

    def _must_be_outstanding(self, kind: str, pending) -> None:
        if self._outstanding.get(kind) is not pending or pending is None:
            raise ValueError(f"AllToAll.{kind}_recv: this is not the {kind} that was sent last and not yet received")
        del self._outstanding[kind]

    @contextlib.contextmanager
    def _aside(self, tensors):
        """Run launches on this object's own stream, after what the current stream holds; yields the event of their end."""
        if self._stream is None:
            yield None
            return
        event = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in tensors:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield event
            event.record(self._stream)
