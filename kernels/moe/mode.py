"""What AllToAll asks of a mode: launches of dispatch and combine, whole or in halves."""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from tilescale_net.kernels.collective import BufferSpecs
from tilescale_net.kernels.moe.config import Config
from tilescale_net.kernels.moe.handle import Choices, Handle, Pending
from tilescale_net.kernels.moe.launch import Launch
from tilescale_net.kernels.moe.layout import NO_FAULT
from tilescale_net.kernels.moe.status import ArgumentError


class Phase(enum.Enum):
    """What a call launches: all of it, or one half."""

    WHOLE = "whole"
    SEND = "send"
    RECEIVE = "receive"

    __hash__ = object.__hash__  # calls look launches up by it, and that of enum.Enum is Python

    @property
    def sends(self) -> bool:
        return self is not Phase.RECEIVE

    @property
    def receives(self) -> bool:
        return self is not Phase.SEND


class Mode(ABC):
    """Buffers and launches of one AllToAll.

    Args:
        base: the AllToAll, which allocates, checks arguments and keeps the state.
        config: its sizes and dtypes.
        specs: symmetric memory of the mode, "kernel.parameter" -> (shape, dtype); zeroed here.

    Attributes:
        symmetric_output: whether the rows that dispatch gives are in symmetric memory.
        meets_first: whether a call sends nothing before all ranks have begun it.
    """

    symmetric_output = False
    meets_first = True
    sums_over = 1  # nodes whose ranks' rows are summed before they travel

    def __init__(self, base, config: Config, specs: BufferSpecs):
        self._base, self._c = base, config
        self._symmetric = base.allocate(specs)
        self._launches: dict[tuple, Callable[..., None]] = {}
        self._signature = config.signature

    def _launch(self, make: Callable[..., Launch], *which) -> Callable[..., None]:
        """`make(*which)`, the launch of a kernel, made when it is first asked for."""
        key = (make.__name__, *which)
        found = self._launches.get(key)
        if found is None:
            found = self._launches[key] = make(*which).quick()
        return found

    def _buffers(self, kernel: str) -> dict[str, torch.Tensor]:
        """Symmetric buffers of a kernel, by the names of its parameters."""
        start = f"{kernel}."
        return {name.removeprefix(start): t for name, t in self._symmetric.items() if name.startswith(start)}

    def reset(self) -> None:
        """As after construction, also after calls that were given up in the middle; all kernels have ended."""
        for tensor in self._symmetric.values():
            if tensor.dtype == torch.uint64:
                tensor.view(torch.uint8).zero_()

    def regroup(self, mask: tuple[bool, ...]) -> None:  # noqa: B027 (most modes have nothing to do)
        """From now on these ranks take part; collective among them, and nothing is under way."""

    @abstractmethod
    def variants(self, everything: bool) -> list[Callable[[], object]]:
        """Calls that compile a kernel each: those that an ordinary call needs, or every one that a call may need."""

    @abstractmethod
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the rows that dispatch gives."""

    def new_output(self, make=None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows and scales (None unless FP8) of that shape, by `make(shape, dtype)`; default ordinary memory."""
        c, shape, device = self._c, self.output_shape(), self._base.device
        make = make or (lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device))
        rows = make(shape, c.dtype)
        if c.column_scales:
            return rows, make((*shape[:-2], c.scale_words, shape[-2]), torch.float32).transpose(-2, -1)
        return rows, make((*shape[:-1], c.scale_words), torch.float32) if c.scale_words else None

    @staticmethod
    def _seen_as(given: torch.Tensor | None, scales: torch.Tensor | None) -> torch.Tensor | None:
        """Received scales in the dtype of those that this rank has given."""
        return scales if given is None or scales is None else scales.view(given.dtype)

    @abstractmethod
    def dispatch(
        self, x, scales, choices: Choices | Handle, out, phase: Phase, blocks: int, fault: ArgumentError | None = None
    ) -> Pending:
        """Launch a dispatch.

        Args:
            x, scales: rows of this rank, [tokens, hidden], and their scales [tokens, scale_words] of 4 bytes, or None.
            choices: of these rows, or the handle of an earlier dispatch.
            out: (rows, scales) for the result, or None.
            phase: WHOLE, or SEND: what the caller launches before `receive` overlaps with it.
            blocks: of its kernels, those of the tuning or fewer.
            fault: why this rank's call is rejected: the others report it. The arguments are stand-ins then.
        """

    @abstractmethod
    def combine(
        self, y, handle: Handle, out, weights, phase: Phase, blocks: int, values=None, bias=(), code: int = NO_FAULT
    ) -> Pending:
        """Launch a combine.

        Args:
            y: rows in the shape that dispatch gives, of `combine_dtype`, or the first of them, up to the last that holds
                one. out: [tokens, hidden] of the same.
            weights: False: sum rows as they are; True: with the weights of the choices; or float32: `weights` of
                AllToAll.combine.
            phase, blocks: as in dispatch.
            values: None, or (`values` of AllToAll.combine_values, float32 [tokens, top_k] for what comes back).
            bias: up to two tensors like `out`, which are added before the sums are rounded.
            code: of the fault of a rejected call, as `fault` of dispatch.
        """

    @abstractmethod
    def receive(self, pending: Pending) -> None:
        """Launch the second half of what was sent."""

    def start(self, pending: Pending) -> None:
        """Let what follows on the current stream run beside a first half that has tiles; see `AllToAll.alongside`."""
        raise NotImplementedError
