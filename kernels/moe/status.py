"""What is wrong with a call: the error of this rank's host, and the record through which kernels report a fault."""

from __future__ import annotations

import ctypes

import torch

import tilescale_net as tsn
from tilescale_net.kernels.moe.wire_layout import BAD_EXPERT, CROWDED, HOST_FAULT, NO_ROOM, OTHER_OUTPUT, STATUS_WORDS

# Arguments whose faults the host finds; the code of a fault is HOST_FAULT + index.
ARGUMENTS = ("x", "scales", "topk_idx", "topk_weights", "out", "y", "weights", "values", "handle", "bias", "mask")


class ArgumentError(Exception):
    """An argument of a call is wrong: which one, and the error to raise."""

    def __init__(self, argument: str, error: Exception, value: int = 0):
        super().__init__(str(error))
        self.argument, self.error, self.value = argument, error, value

    @property
    def code(self) -> int:
        return HOST_FAULT + ARGUMENTS.index(self.argument)


class Status:
    """A record in host memory that kernels write when they refuse a call; reading it does not wait for the GPU."""

    def __init__(self, world):
        nbytes = STATUS_WORDS * 8
        self._address = world.memory.pinned(nbytes)
        raw = (ctypes.c_char * nbytes).from_address(self._address)
        if world.device.type == "cuda":
            from tilescale_net.runtime.cuda_memory import tensor_at

            self.tensor = tensor_at(self._address, nbytes, world.device).view(torch.int64)
        else:
            self.tensor = torch.frombuffer(raw, dtype=torch.int64)
        self._words = (ctypes.c_int64 * STATUS_WORDS).from_address(self._address)

    def error(self, name: str, experts: int, capacity: int) -> Exception | None:
        """The refusal as an exception, once; None when there is none."""
        code, rank, value = self._words[0], self._words[1], self._words[2]
        if code == 0:
            return None
        self._words[0] = 0
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
                "has room for each token once, so tokens may name it twice only where there are fewer of them"
            )
        if code == OTHER_OUTPUT:
            return ValueError(
                f"{name}: rank {rank} gave another out than this rank; out must be the same symmetric tensor on all ranks, "
                "or none; what both tensors hold is undefined"
            )
        return ValueError(
            f"{name}: rank {rank} was called with a wrong {ARGUMENTS[code - HOST_FAULT]}; results are undefined"
        )
