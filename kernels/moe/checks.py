"""Checks of a call's arguments, and the record through which kernels report faults.

Every fault that the host finds is an ArgumentError, which all ranks report.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor

import tilescale_net as tsn
from tilescale_net.kernels.collective import StatusRecord
from tilescale_net.kernels.moe.config import COMBINE_DTYPES, FP8_DTYPE, Config, most_tokens
from tilescale_net.kernels.moe.handle import Choices, Handle, LikeFactory
from tilescale_net.kernels.moe.handshake import RECEIVES, SENDS
from tilescale_net.kernels.moe.layout import BAD_EXPERT, CODE_BITS, CROWDED, HOST_FAULT, NO_FAULT, NO_ROOM, OTHER_OUTPUT
from tilescale_net.kernels.moe.tiles import Tiles
from tilescale_net.runtime import launch_args
from tilescale_net.runtime.heap import Heap
from tilescale_net.runtime.launch_args import unresolved

# Arguments whose faults the host finds; the code of a fault is HOST_FAULT + index.
ARGUMENTS = (
    "x", "scales", "topk_idx", "topk_weights", "out", "y", "weights", "values", "handle", "bias", "mask", "blocks",
    "waited",
    "totals",
)  # fmt: skip


assert HOST_FAULT + len(ARGUMENTS) <= 1 << CODE_BITS, "codes must fit into CODE_BITS"


class ArgumentError(Exception):
    """A wrong argument of a call, and the error to raise."""

    def __init__(self, argument: str, error: Exception, value: int = 0):
        super().__init__(str(error))
        self.argument, self.error, self.value = argument, error, value

    @property
    def code(self) -> int:
        return HOST_FAULT + ARGUMENTS.index(self.argument)


class Status(StatusRecord):
    """The record to which the kernels of dispatch and combine report."""

    def error(self, name: str, experts: int, capacity: int) -> Exception | None:
        """Take the fault as an exception; None without a fault."""
        code, rank, value = self.take()
        if code == 0:
            return None
        if code == BAD_EXPERT:
            return ValueError(
                f"{name}: topk_idx of rank {rank} holds expert {value}; ids are 0 to {experts - 1}, or -1 for a choice "
                "to be skipped"
            )
        if code == NO_ROOM:
            return tsn.HeapError(
                f"{name}: rank {rank} would receive {value} rows, but capacity is {capacity}; nothing was sent; give a "
                "larger capacity"
            )
        if code == CROWDED:
            return ValueError(
                f"{name}: topk_idx of rank {rank} names expert {value} more often than max_tokens; in latency mode an expert "
                "has room for each token once, so tokens may name it twice only if there are fewer of them"
            )
        if code == OTHER_OUTPUT:
            return ValueError(
                f"{name}: rank {rank} passed another out than this rank; out must be the same symmetric tensor on all ranks, "
                "or none; the contents of both are undefined"
            )
        return ValueError(
            f"{name}: rank {rank} was called with a wrong {ARGUMENTS[code - HOST_FAULT]}; results are undefined"
        )


class Phase(enum.Enum):
    """The part of a call to launch: the whole, or one phase."""

    WHOLE = "whole"
    SEND = "send"
    RECEIVE = "receive"

    __hash__ = object.__hash__  # calls look launches up by hash; enum.Enum's is slow (Python)

    @property
    def bits(self) -> int:
        """As kernels of latency mode take it."""
        return _PHASES[self]


_PHASES = {Phase.WHOLE: SENDS | RECEIVES, Phase.SEND: SENDS, Phase.RECEIVE: RECEIVES}


@dataclass(slots=True)
class DispatchCall:
    """Arguments of `AllToAll.dispatch`; `ArgumentChecks.dispatch` replaces them by the kernels' arguments.

    Attributes:
        phase: WHOLE or SEND.
        x: rows, or rows and scales; then [tokens, hidden]. scales: [tokens, scale_words] of 4 bytes, or None.
        choices: choices of the rows, or the handle of an earlier dispatch.
        out: (rows, scales) for the result, or None.
        blocks: blocks of its kernels, at most the tuning's.
        fault: the fault of a rejected call, whose arguments are placeholders; the other ranks report it.
        The others: see `AllToAll.dispatch`.
    """

    phase: Phase
    x: Any
    topk_idx: Any = None
    topk_weights: Any = None
    mask: Any = None
    handle: Any = None
    out: Any = None
    cleared: bool = False
    blocks: Any = None
    waited: torch.Tensor | None = None
    max_tokens: int | None = None
    totals: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    choices: Any = None
    fault: ArgumentError | None = None


@dataclass(slots=True)
class CombineCall:
    """A combine, as `DispatchCall`.

    Attributes:
        name: "combine" or "combine_values".
        y: rows of `combine_dtype` in the shape of dispatch's output, which may end after the last row.
        out: [tokens, hidden] of `combine_dtype`.
        weights: False: no weights; True: the weights of the choices; or float32, see `AllToAll.combine`.
        bias: up to two tensors like `out`, added before the sums are rounded.
        values, out_values: arguments of combine_values, and float32 [tokens, top_k] for the returned values.
        phase, blocks, fault: as in `DispatchCall`. The others: see `AllToAll.combine_send`.
    """

    name: str
    phase: Phase
    y: Any
    handle: Any
    out: Any = None
    weighted: Any = True
    weights: Any = None
    bias: Any = ()
    blocks: Any = None
    values: Any = None
    tiles: Tiles | None = None
    waited: torch.Tensor | None = None
    out_values: torch.Tensor | None = None
    fault: ArgumentError | None = None

    @property
    def code(self) -> int:
        """Code of the fault, which kernels send to the other ranks."""
        return NO_FAULT if self.fault is None else self.fault.code


SCALE_DTYPES = (torch.float32, torch.int32)  # scale words: their contents are up to the caller
INDEX_DTYPES, FLOATS = (torch.int64, torch.int32), (torch.float32,)
WEIGHTS = (*FLOATS, torch.bfloat16, torch.float16, torch.float64)  # kernels take the first


class ArgumentChecks:
    """The checks of one AllToAll. `output_shape`: shape of dispatched rows. `symmetric`: whether they are in symmetric
    memory. `blocks`: default blocks of a call."""

    def __init__(
        self, config: Config, device: torch.device, heap: Heap, output_shape: tuple[int, ...], symmetric: bool, blocks: int
    ):  # fmt: skip
        self._c, self._device, self._heap, self._blocks = config, device, heap, blocks
        self._on_cpu = device.type == "cpu"
        self._shape, self._symmetric = output_shape, symmetric
        self._capabilities, self._signature = config.capabilities, config.signature
        self._row_dtypes = (config.dtype,)
        self._source_dtypes = (config.dtype, *COMBINE_DTYPES) if config.can_quantise else (config.dtype,)
        self._sum_dtypes = (config.combine_dtype,)
        self._row = (None, config.hidden)
        self._ones: torch.Tensor | None = None  # of the last call: a view of the tensor for max_tokens
        self._most_ones: torch.Tensor | None = None
        self._new_sums = LikeFactory((config.hidden,), config.combine_dtype, device)
        # C++ accepts valid tensors; Python finds and names the faults of others.
        choices, scales = (None, config.top_k), (None, config.scale_words)
        unscaled = tuple(d for d in self._source_dtypes if d != FP8_DTYPE)
        several = [(unscaled, self._row, 16), (INDEX_DTYPES, choices, 1), (FLOATS, choices, 1)]
        most = config.max_tokens if config.expert_capacity is None else -1  # none: choices are dropped first
        self._usual_rows = launch_args.rows_check(several, device, most)
        self._is_unscaled = launch_args.tensor_check(unscaled, device, self._row, 16)
        self._is_scaled = launch_args.tensor_check(
            (FP8_DTYPE,) if config.dtype == FP8_DTYPE else (), device, self._row, 16
        )
        self._are_scales = launch_args.tensor_check(SCALE_DTYPES, device, scales, 4)
        self._fit_totals = launch_args.tensor_check((torch.int32,), device, (config.local_experts,), 4)
        self._are_choices = launch_args.tensor_check(INDEX_DTYPES, device, choices, 1)
        self._are_weights = launch_args.tensor_check(FLOATS, device, choices, 1)
        self._are_choice_weights = launch_args.tensor_check(FLOATS, device, choices, 4)
        self._are_sums = launch_args.tensor_check(self._sum_dtypes, device, self._row, 16)
        self._are_outputs = launch_args.tensor_check(self._sum_dtypes, device, output_shape, 16)

    def usual_dispatch(self, x: Any, topk_idx: Any, topk_weights: Any, totals: Any = None) -> int:
        """The number of tokens of a dispatch with valid arguments and no others; -1: `dispatch` must check them.
        `topk_weights` and `totals` may be None."""
        if totals is not None and not self.are_totals(totals):
            return -1
        tokens = -1 if topk_idx is None else self._usual_rows(x, topk_idx, topk_weights)
        if self._on_cpu and tokens >= 0:
            try:
                check_experts(topk_idx, self._c.num_experts)
            except ArgumentError:
                return -1
        return tokens

    def usual_combine(self, y: Any, handle: Any, out: Any, weights: Any, membership: tuple) -> torch.Tensor | None:
        """The output of a combine with valid arguments and no others; None: `combine` must check them. No dispatch is in
        flight."""
        if type(handle) is not Handle or handle.signature is not self._signature or handle.membership is not membership:
            return None
        tokens = handle.plan.tokens
        if not self._are_outputs(y):
            return None
        if weights is not None and not (
            self._capabilities.weighs_choices and self._are_choice_weights(weights, tokens)
        ):
            return None
        if out is None:
            return self._new_sums(tokens)
        return out if self._are_sums(out, tokens) else None

    def dispatch(self, call: DispatchCall, membership: tuple) -> None:
        """Check a dispatch, and fill in its rows, choices, output and blocks. `membership`: current membership."""
        handle = call.handle
        if handle is not None and not self._capabilities.reuses_plan:
            raise ArgumentError("handle", TypeError(f"{self._c.mode} mode takes topk_idx, and no handle"))
        call.x, call.scales = self._rows(call.x)
        tokens = call.x.shape[0]
        if call.max_tokens is not None and tokens > call.max_tokens:
            raise ArgumentError("x", ValueError(f"x has {tokens} tokens; max_tokens of the call is {call.max_tokens}"))
        if handle is not None:
            call.choices = self.handle(handle, membership)
            if tokens != handle.tokens:
                raise ArgumentError("x", ValueError(f"x has {tokens} tokens; the handle is for {handle.tokens}"))
        else:
            topk_idx = call.topk_idx if call.mask is None else self._choices_of_mask(tokens, call.mask)
            weights = self._weights(tokens, topk_idx, call.topk_weights)
            call.choices = self._within_capacity(topk_idx, weights, call.cleared, call.mask)
        if call.out is not None:
            call.out = self._output(call.out)
        self._check_launch(call)
        if call.totals is not None and not self.are_totals(call.totals):
            if self._capabilities.reuses_plan:
                raise ArgumentError("totals", TypeError("totals goes with latency mode"))
            check_tensor("totals", call.totals, self._device, (torch.int32,), (self._c.local_experts,), alignment=4)

    def are_totals(self, totals: Any) -> bool:
        """Whether `totals` is int32 [local experts], to which counts can be added."""
        return not self._capabilities.reuses_plan and self._fit_totals(totals)

    def combine(self, call: CombineCall, membership: tuple) -> None:
        """Check a combine, and fill in its output, weights and blocks; arguments as in `dispatch`."""
        c, y, weights, bias = self._c, call.y, call.weights, call.bias
        handle = self.handle(call.handle, membership)
        shape = (handle.plan.tokens, c.hidden)
        self._check_combined_rows(y, handle)
        if not isinstance(call.weighted, bool):
            text = f"weighted must be True or False, not {type(call.weighted).__name__}; tensors go to weights"
            raise ArgumentError("weights", TypeError(text))
        if weights is None:
            call.weights = call.weighted
        else:
            if c.layout != "expert":
                raise ArgumentError("weights", ValueError('weights belong to layout "expert"'))
            by_choice = self._capabilities.weighs_choices
            if not (by_choice and self._are_choice_weights(weights, shape[0])):
                each = (handle.tokens, c.top_k) if by_choice else (c.capacity,)
                check_tensor("weights", weights, self._device, WEIGHTS, each, alignment=4)
                call.weights = weights.float()
        if not isinstance(bias, list | tuple):
            raise ArgumentError("bias", TypeError(f"bias must be a list of tensors, not {type(bias).__name__}"))
        if len(bias) > 2:
            raise ArgumentError("bias", ValueError(f"bias holds {len(bias)} tensors; there may be one or two"))
        for tensor in bias:
            check_tensor("bias", tensor, self._device, self._sum_dtypes, shape)
        if call.out is None:
            call.out = self._new_sums(handle.plan.tokens)
        elif not self._are_sums(call.out, shape[0]):
            check_tensor("out", call.out, self._device, self._sum_dtypes, shape)
        if call.name == "combine_values":
            self._check_values(call.values, y)
        self._check_launch(call)

    def _rows(self, x: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`x` of dispatch as (rows, scales or None)."""
        c = self._c
        if type(x) is tuple and len(x) == 2:
            if self._is_scaled(x[0]) and (tokens := x[0].shape[0]) <= c.max_tokens and self._are_scales(x[1], tokens):
                return x
        elif self._is_unscaled(x) and x.shape[0] <= c.max_tokens:
            return x, None
        x, scales = x if isinstance(x, tuple) and len(x) == 2 else (x, None)
        check_tensor("x", x, self._device, self._source_dtypes if scales is None else self._row_dtypes, self._row)
        tokens = x.shape[0]
        if tokens > c.max_tokens:
            raise ArgumentError("x", ValueError(f"x has {tokens} tokens; max_tokens is {c.max_tokens}"))
        if x.dtype == FP8_DTYPE:
            if scales is None:
                raise ArgumentError("scales", TypeError("x is FP8, so x must be a pair (x, scales)"))
            check_tensor("scales", scales, self._device, SCALE_DTYPES, (tokens, c.scale_words), alignment=4)
        elif scales is not None:
            raise ArgumentError(
                "scales", TypeError(f"scales were passed with x of dtype {x.dtype}; they belong to FP8 rows")
            )
        return x, scales

    def _weights(self, tokens: int, topk_idx: Any, topk_weights: Any) -> torch.Tensor:
        """Check the choices of `tokens` tokens; returns their weights."""
        c = self._c
        shape = (tokens, c.top_k)
        # Kernels read these element by element: they may begin anywhere.
        if not self._are_choices(topk_idx, tokens):
            check_tensor("topk_idx", topk_idx, self._device, INDEX_DTYPES, shape, alignment=1)
        if self._on_cpu:
            check_experts(topk_idx, c.num_experts)
        if topk_weights is None:
            return self.weights_of_one(tokens)
        if self._are_weights(topk_weights, tokens):
            return topk_weights
        check_tensor("topk_weights", topk_weights, self._device, WEIGHTS, shape, alignment=1)
        return topk_weights.float()

    def weights_of_one(self, tokens: int) -> torch.Tensor:
        """Weights 1, [tokens, top_k]; cached, because memory of a call in flight on another stream must not be freed."""
        if self._ones is not None and self._ones.shape[0] == tokens:
            return self._ones
        with torch.inference_mode(False):
            most = self._most_ones
            if most is None:
                most = torch.ones((self._c.max_tokens, self._c.top_k), dtype=torch.float32, device=self._device)
                if self._device.type != "cpu" and torch.cuda.is_current_stream_capturing():
                    return most[:tokens]  # the graph's
                self._most_ones = most
            self._ones = most[:tokens]
        return self._ones

    def _check_launch(self, call: DispatchCall | CombineCall) -> None:
        """Check `waited` and `blocks`, and fill in the default."""
        if call.blocks is None:
            call.blocks = self._blocks
        else:
            self._check_blocks(call.blocks)
        if call.waited is not None:
            if self._capabilities.reuses_plan:
                raise ArgumentError("waited", TypeError("waited goes with latency mode"))
            check_tensor("waited", call.waited, self._device, (torch.int64,), (self._c.ranks,), alignment=8)

    def _check_blocks(self, blocks: Any) -> None:
        most = self._blocks
        least = 2 if self._capabilities.reuses_plan else 1
        if type(blocks) is not int or not least <= blocks <= most:
            text = f"blocks is {blocks!r}; it must be an integer from {least} to {most}, that of the object's Tuning"
            raise ArgumentError("blocks", ValueError(text))
        if self._capabilities.reuses_plan and self._c.max_tokens > (tokens := most_tokens(self._c, blocks)):
            text = (
                f"blocks is {blocks}, whose shared memory has room for the choices of {tokens} tokens; max_tokens is "
            )
            raise ArgumentError("blocks", ValueError(f"{text}{self._c.max_tokens}: give more blocks"))

    def _choices_of_mask(self, tokens: int, mask: Any) -> torch.Tensor:
        """Choices that send each token to the ranks in its row of `mask`: the first expert of each rank."""
        c = self._c
        if c.layout != "rank":
            raise ArgumentError("mask", ValueError('a mask names no experts; it belongs to layout "rank"'))
        if c.top_k < c.ranks:
            text = f"a mask may name all {c.ranks} ranks; top_k is {c.top_k}, make the object with {c.ranks} or more"
            raise ArgumentError("mask", ValueError(text))
        check_tensor("mask", mask, self._device, (torch.bool,), (tokens, c.ranks), alignment=1)
        first = torch.arange(0, c.num_experts, c.local_experts, dtype=torch.int64, device=self._device)
        choices = torch.full((tokens, c.top_k), -1, dtype=torch.int64, device=self._device)
        choices[:, : c.ranks] = torch.where(mask, first, -1)
        return choices

    def _within_capacity(self, topk_idx: torch.Tensor, topk_weights: torch.Tensor, cleared: bool, mask: Any) -> Choices:
        """The choices within `expert_capacity`."""
        c = self._c
        if c.expert_capacity is None:
            return Choices(topk_idx, topk_weights, cleared)
        if mask is not None:
            raise ArgumentError("mask", ValueError("a mask names no experts; the object has an expert_capacity"))
        dropped = beyond_capacity(topk_idx, topk_weights, c.expert_capacity, c.drop)
        return Choices(topk_idx.masked_fill(dropped, -1), topk_weights, cleared, dropped)

    def _output(self, out: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`out` of dispatch as (rows, scales or None)."""
        c = self._c
        rows, scales = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
        named: list[tuple] = [(rows, (c.dtype,), self._shape)]
        if c.dtype == FP8_DTYPE:
            named.append((self._in_memory(scales), SCALE_DTYPES, (*self._shape[:-2], *self._scales_shape)))
        for tensor, dtypes, shape in named:
            check_tensor("out", tensor, self._device, dtypes, shape)
            if self._symmetric and not 0 <= tensor.data_ptr() - self._heap.base <= self._heap.size - tensor.nbytes:
                raise ArgumentError(
                    "out",
                    tsn.HeapError(
                        f"out of shape {list(tensor.shape)} is not in the symmetric heap; make it with empty_output"
                    ),
                )
        return rows, scales

    @property
    def _scales_shape(self) -> tuple[int, int]:
        """Last dimensions of an output's scales in memory."""
        shape = self._shape[-2], self._c.scale_words
        return shape[::-1] if self._c.column_scales else shape

    def _in_memory(self, scales: Any) -> Any:
        """Scales in their memory order: column-major if the object has `column_scales`."""
        by_column = self._c.column_scales and isinstance(scales, torch.Tensor) and scales.dim() > 1
        return scales.transpose(-2, -1) if by_column else scales

    def handle(self, handle: Any, membership: tuple) -> Handle:
        """Check a handle. `membership`: current membership."""
        if not isinstance(handle, Handle):
            raise ArgumentError("handle", TypeError(f"handle must be the handle of a dispatch, not {handle!r}"))
        if handle.signature is not self._signature and handle.signature != self._signature:
            raise ArgumentError(
                "handle",
                ValueError(
                    f"handle belongs to another configuration {handle.signature}; this one is {self._signature} (ranks, "
                    "num_experts, max_tokens, top_k, mode, alignment, capacity)"
                ),
            )
        if handle.membership != membership:
            raise ArgumentError(
                "handle", ValueError("handle is from before set_active or a loss of ranks; dispatch again")
            )
        if handle.plan.in_flight:  # of this object, or of another one whose handles it takes
            text = (
                "handle is of a dispatch that has not been received; call dispatch_recv, or its hook of deep_ep, first"
            )
            raise ArgumentError("handle", ValueError(text))
        return handle

    def _check_combined_rows(self, y: Any, handle: Handle) -> None:
        """Rows in the shape of dispatch's output; throughput mode: they may end after the last row."""
        c = self._c
        if self._are_outputs(y):
            return
        if self._capabilities.reuses_plan:
            check_tensor("y", y, self._device, self._sum_dtypes, self._row)
            rows_of_y = y.shape[0]
            enough = self._shape[0] if handle.max_tokens is None else c.most_rows(handle.max_tokens)
            if rows_of_y < enough and rows_of_y < (rows := handle.rows(c.layout)):
                text = f"y has shape {list(y.shape)}; this rank has received {rows} rows"
                raise ArgumentError("y", ValueError(text))
        else:
            check_tensor("y", y, self._device, self._sum_dtypes, self._shape)

    def _check_values(self, values: Any, y: torch.Tensor) -> None:
        """Check values that return with the rows `y`."""
        c = self._c
        if not c.capabilities.weighs_rows:
            raise ArgumentError("values", ValueError("values belong to throughput mode"))
        by_choice = c.layout == "rank" and isinstance(values, torch.Tensor) and values.dim() == 2
        shape = (len(y), c.top_k) if by_choice else (c.capacity,)
        check_tensor("values", values, self._device, (torch.float32,), shape, alignment=4)


_ORDINARY = (torch.Tensor, torch.nn.Parameter)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor has memory (torch's FakeTensor has none)."""
    if isinstance(tensor, FakeTensor):
        return False
    try:
        return not tensor.numel() or tensor.data_ptr() != 0
    except RuntimeError:  # raised by other subclasses
        return False


def check_tensor(
    argument: str, tensor: Any, device: torch.device, dtypes: Sequence[torch.dtype], shape: Sequence[int | None], alignment: int = 16
) -> None:  # fmt: skip
    """Raise ArgumentError unless `tensor` is a contiguous tensor of one of `dtypes` on `device`. `shape`: the first extent
    may be None: any. `alignment`: in bytes."""
    if type(tensor) not in _ORDINARY and isinstance(tensor, torch.Tensor) and not _has_memory(tensor):
        text = f"{argument} is a {type(tensor).__name__}, which has no memory that kernels could reach"
        raise ArgumentError(argument, TypeError(text))
    if isinstance(tensor, torch.Tensor) and tensor.dtype in dtypes and tensor.device == device:
        got = tensor.shape
        fits = got == shape if shape[0] is not None else len(got) == len(shape) and got[1:] == shape[1:]
        # Fast path; faults are named below.
        dense = fits and tensor.is_contiguous() and not tensor.is_neg()
        if dense and (alignment == 1 or tensor.data_ptr() % alignment == 0):
            return

    def fault(kind: type[Exception], text: str) -> NoReturn:
        raise ArgumentError(argument, kind(f"{argument} {text}"))

    if not isinstance(tensor, torch.Tensor):
        fault(TypeError, f"must be a tensor, not {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        fault(TypeError, f"has dtype {tensor.dtype}; it must be {' or '.join(str(d) for d in dtypes)}")
    if tensor.device != device:
        fault(ValueError, f"is on {tensor.device}; this rank's kernels run on {device}")
    if tensor.dim() != len(shape) or any(want is not None and want != got for want, got in zip(shape, tensor.shape)):
        expected = ", ".join("tokens" if s is None else str(s) for s in shape)
        fault(ValueError, f"has shape {list(tensor.shape)}; it must be [{expected}]")
    if not tensor.is_contiguous():
        fault(ValueError, f"has strides {list(tensor.stride())}; it must be contiguous")
    if lazy := unresolved(tensor):
        fault(ValueError, lazy)
    if tensor.numel() and tensor.data_ptr() % alignment:
        fault(ValueError, f"does not begin at a multiple of {alignment} bytes")


def check_experts(topk_idx: torch.Tensor, experts: int) -> None:
    """Raise ArgumentError for ids out of range in a tensor that the host can read without waiting."""
    if topk_idx.numel() and topk_idx.device.type == "cpu":
        low, high = int(topk_idx.min()), int(topk_idx.max())
        if low < -1 or high >= experts:
            bad = low if low < -1 else high
            text = f"topk_idx holds expert {bad}; ids are 0 to {experts - 1}, or -1 for a choice to be skipped"
            raise ArgumentError("topk_idx", ValueError(text), bad)


def beyond_capacity(topk_idx: torch.Tensor, topk_weights: torch.Tensor, capacity: int, drop: str) -> torch.Tensor:
    """Mask of choices beyond the capacity, bool [tokens, top_k], by some small torch kernels on the current stream.
    `topk_idx`: [tokens, top_k] experts; -1: no choice, which is never dropped. `topk_weights`: [tokens, top_k], for
    "weight". `capacity`: choices per expert. `drop`: one of DROPS."""
    by_choice = drop == "choice"
    flat = (topk_idx.t() if by_choice else topk_idx).reshape(-1)
    order = torch.arange(flat.numel(), dtype=torch.int64, device=flat.device)
    if drop == "weight":
        order = topk_weights.reshape(-1).argsort(stable=True, descending=True)
    expert, by_expert = flat[order].sort(stable=True)
    first = torch.searchsorted(expert, expert)  # of the choices of the same expert
    position = torch.arange(flat.numel(), dtype=torch.int64, device=flat.device) - first
    dropped = torch.zeros_like(flat, dtype=torch.bool)
    dropped[order[by_expert]] = (position >= capacity) & (expert >= 0)
    return dropped.view(topk_idx.t().shape).t().contiguous() if by_choice else dropped.view(topk_idx.shape)
