"""The interface of a mode, and launches with fixed arguments and streams of send phases, which the modes share."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tilescale_net.kernels.collective import BufferSpecs
from tilescale_net.kernels.launches import Launch
from tilescale_net.kernels.moe.checks import CombineCall, DispatchCall, Phase
from tilescale_net.kernels.moe.config import Config, Tuning
from tilescale_net.kernels.moe.handle import Choices, Dispatched, Handle, Pending, Plans
from tilescale_net.kernels.moe.layout import Forwarders, NodeLayout, NodeSizes, with_room

if TYPE_CHECKING:
    from tilescale_net.kernels.moe.all_to_all import AllToAll


def stream_key(device: torch.device) -> Callable[[], Hashable]:
    """A function that returns a key of the current stream; None while it is captured into a CUDA graph."""
    if device.type != "cuda":
        return int  # 0
    index = device.index

    def key() -> Hashable:
        if torch._C._cuda_isCurrentStreamCapturing():
            return None
        return torch._C._cuda_getCurrentRawStream(index)  # a tenth of current_stream's time

    return key


class SideStream:
    """A CUDA stream of high priority beside the caller's. `in_order`: launches on the caller's stream wait for those
    made on the side before."""

    def __init__(self, device: torch.device, in_order: bool = False):
        self._device, self._in_order = device, in_order
        self._on_side = False
        self._last: torch.cuda.Event | None = None
        self._stream = torch.cuda.Stream(device, priority=-1)
        self.key = stream_key(device)

    def launch(self, kernel: Callable[..., None], *arguments: Any) -> None:
        """Launch a kernel on the current stream."""
        if self._in_order and self._last is not None and not self._on_side:
            self.wait(self._last)
        kernel(*arguments)

    @contextlib.contextmanager
    def on_side(self, tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
        """Run launches on this stream, behind the current stream's work; yields the argument of `wait`. `tensors`: of
        the caller, which the launches use."""
        event = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in tensors:
            tensor.record_stream(self._stream)
        self._on_side = True
        try:
            with torch.cuda.stream(self._stream):
                yield event
                event.record(self._stream)
        finally:
            self._on_side = False
        self._last = event

    def forget(self) -> None:
        """Nothing is queued: all launches have ended."""
        self._last = None

    def wait(self, event: torch.cuda.Event) -> None:
        """Let the current stream wait for the launches of `on_side`."""
        if event is self._last:
            self._last = None
        torch.cuda.current_stream(self._device).wait_event(event)


class DeferredStream:
    """The simulator's version: launches on the side run when they are waited for, as late as on a GPU, so a change of
    their arguments or of shared memory in between shows in the data. `in_order`: see SideStream."""

    def __init__(self, in_order: bool = False):
        self._on_side, self._in_order = False, in_order
        self._queue: list[tuple] = []
        self._sent = self._done = 0

    def launch(self, kernel: Callable[..., None], *arguments: Any) -> None:
        """Launch a kernel, or queue it."""
        if self._on_side:
            self._queue.append((kernel, arguments))
            self._sent += 1
        else:
            if self._in_order:
                self.wait([self._sent])
            kernel(*arguments)

    def key(self) -> Hashable:
        """See `stream_key`."""
        return self._on_side

    @contextlib.contextmanager
    def on_side(self, tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
        """Queue the launches made inside; yields the argument of `wait`."""
        self._on_side = True
        marks: list[int] = []
        try:
            yield marks
        finally:
            self._on_side = False
            marks.append(self._sent)

    def forget(self) -> None:
        """Drop the queued launches."""
        self._queue.clear()
        self._done = self._sent

    def wait(self, marks: list[int]) -> None:
        """Run queued launches in order, through the next `on_side`'s."""
        while self._done < marks[0]:
            kernel, arguments = self._queue.pop(0)
            self._done += 1
            kernel(*arguments)


class Mode(ABC):
    """Buffers and launches of one AllToAll.

    Args:
        base: the AllToAll, which allocates, checks arguments and keeps the state.
        config: its sizes and dtypes.
        specs: symmetric memory of the mode, "kernel.parameter" -> (shape, dtype); zeroed here.

    Attributes:
        symmetric_output: whether dispatch's output is in symmetric memory.
        meets_first: whether a call sends nothing before all ranks have begun it.
    """

    symmetric_output = False
    meets_first = True

    @property
    def sums_over(self) -> NodeSizes:
        """Nodes whose ranks' rows are summed before they travel, see `nodes_of`."""
        return 1

    _base: AllToAll
    _constants: dict[str, dict]  # arguments of each kernel that never change
    _plans: Plans

    def __init__(self, base: AllToAll, config: Config, specs: BufferSpecs):
        self._base, self._c = base, config
        self._symmetric = base.allocate(specs)
        self._launches: dict[tuple, Callable[..., None]] = {}
        self._usual: dict[Hashable, Any] = {}  # launches of usual calls, by their options
        self._signature = config.signature

    def _launch(self, make: Callable[..., Launch], *which: Any) -> Callable[..., None]:
        """`make(*which)`, the launch of a kernel, made when it is first asked for."""
        key = (make.__name__, *which)
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = make(*which).quick()
        return launch

    def _buffers(self, kernel: str) -> dict[str, torch.Tensor]:
        """Symmetric buffers of a kernel, by parameter name."""
        start = f"{kernel}."
        return {name.removeprefix(start): t for name, t in self._symmetric.items() if name.startswith(start)}

    def _rows_of(self, kernel: str) -> dict[str, torch.Tensor]:
        """Buffers of a kernel that are parts of others, by parameter name."""
        return {}

    @property
    def node_plan_words(self) -> int:
        """Elements of `RoutingPlan.node_plan`."""
        return 0

    @abstractmethod
    def _new_plans(self) -> Plans:
        """Plans of the sizes that the mode has now."""

    def reset(self) -> None:
        """Reset to the state after construction, also after abandoned calls; all kernels have ended."""
        for tensor in self._symmetric.values():
            if tensor.dtype == torch.uint64:
                tensor.view(torch.uint8).zero_()

    def regroup(self, mask: tuple[bool, ...]) -> None:  # noqa: B027 (most modes have nothing to do)
        """Set the active ranks; collective among them, and nothing is in flight."""

    @abstractmethod
    def variants(self, everything: bool) -> list[Callable[[], object]]:
        """Calls that compile one kernel each: the kernels of ordinary calls, or of all possible calls."""

    @abstractmethod
    def output_shape(self) -> tuple[int, ...]:
        """Shape of dispatch's output rows."""

    def new_output(self, make: Callable[..., torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows and scales (None unless FP8) of that shape, by `make(shape, dtype)`; default ordinary memory."""
        c, shape, device = self._c, self.output_shape(), self._base.device
        make = make or (lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device))
        rows = make(shape, c.dtype)
        if c.column_scales:
            return rows, make((*shape[:-2], c.scale_words, shape[-2]), torch.float32).transpose(-2, -1)
        return rows, make((*shape[:-1], c.scale_words), torch.float32) if c.scale_words else None

    @staticmethod
    def _seen_as(like: torch.Tensor | None, scales: torch.Tensor | None) -> torch.Tensor | None:
        """Received scales in the dtype of this rank's own."""
        return scales if like is None or scales is None else scales.view(like.dtype)

    @abstractmethod
    def dispatch(self, call: DispatchCall) -> Pending:
        """Launch a dispatch: phase WHOLE, or SEND, which overlaps with the caller's launches before `receive`."""

    @abstractmethod
    def combine(self, call: CombineCall) -> Pending:
        """Launch a combine, as `dispatch`."""

    def usual_dispatch(self, tokens: int, x: Any, topk_idx: Any, topk_weights: Any, totals: Any = None) -> Dispatched:
        """Fast path of `dispatch`: a whole call with these arguments alone, on all blocks."""
        result: Dispatched = self._dispatch_usual(Phase.WHOLE, x, Choices(topk_idx, topk_weights), totals).result
        return result

    def usual_dispatch_send(self, tokens: int, x: Any, topk_idx: Any, topk_weights: Any, totals: Any = None) -> Pending:
        """As `usual_dispatch`, the send phase."""
        return self._dispatch_usual(Phase.SEND, x, Choices(topk_idx, topk_weights), totals)

    def _dispatch_usual(self, phase: Phase, x: Any, choices: Choices, totals: Any) -> Pending:
        return self.dispatch(DispatchCall(phase, x, blocks=self._base.blocks, choices=choices, totals=totals))

    @abstractmethod
    def usual_combine(self, y: torch.Tensor, handle: Handle, out: torch.Tensor, weights: torch.Tensor | None) -> None:
        """Fast path of `combine`; `weights`: of the choices, instead of dispatch's."""

    def usual_combine_send(
        self, y: torch.Tensor, handle: Handle, out: torch.Tensor, weights: torch.Tensor | None
    ) -> Pending:
        """As `usual_combine`, the send phase."""
        weighting = True if weights is None else weights
        return self.combine(
            CombineCall("combine", Phase.SEND, y, handle, out, weights=weighting, blocks=self._base.blocks)
        )

    @abstractmethod
    def receive(self, pending: Pending) -> None:
        """Launch the receive phase."""

    def start(self, pending: Pending) -> None:
        """Let later launches overlap with a send phase that has tiles; see `AllToAll.alongside`."""
        raise NotImplementedError


class OverNodes(Mode):
    """Mixin of modes whose rows cross the network once per node, the first of the bases: forwarders, see layout.py."""

    @staticmethod
    @abstractmethod
    def node_buffers(
        config: Config, tuning: Tuning, nodes: NodeSizes, masks: Sequence[tuple[bool, ...]] = ()
    ) -> BufferSpecs:
        """Symmetric memory of the mode: "kernel.parameter" -> (shape, dtype). `masks`: ranks that take part when they
        are not all, now and later."""

    @staticmethod
    @abstractmethod
    def carried(config: Config, tuning: Tuning, at: NodeLayout) -> BufferSpecs:
        """The part that grows with the sources of a forwarder."""

    def __init__(self, base: AllToAll, config: Config, masks: Sequence[tuple[bool, ...]]):
        self._at = with_room(config.ranks, base.nodes, masks)
        super().__init__(base, config, self.node_buffers(config, base.tuning, base.nodes, masks))
        self._use_map(base.active_mask)

    @property
    def sums_over(self) -> NodeSizes:
        return self._at.node_sizes

    def _use_map(self, mask: tuple[bool, ...]) -> None:
        """Set the kernels' map to these members."""
        words = Forwarders(mask, self._at.node_sizes).words(self._base.rank, self._at.slots)
        node_map = torch.tensor(words, dtype=torch.int32, device=self._base.device)
        for constants in self._constants.values():
            constants["node_map"] = node_map

    def regroup(self, mask: tuple[bool, ...]) -> None:
        """Another rank replaces an excluded forwarder, and may then serve more sources than it had slots for."""
        at = with_room(self._c.ranks, self._at.node_sizes, [mask])
        if at.slots > self._at.slots:
            self._at = at
            with torch.inference_mode(False):
                grown = self._base.replace(self._symmetric, self.carried(self._c, self._base.tuning, at))
            self._symmetric.update(grown)
            for kernel, constants in self._constants.items():
                constants.update(self._buffers(kernel) | self._rows_of(kernel))
            self._plans = self._new_plans()
        self._use_map(mask)
        self._launches.clear()
        self._usual.clear()
