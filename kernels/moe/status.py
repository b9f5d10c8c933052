"""What is wrong with a call: the error of this rank's host, and the record through which kernels report a fault."""

import tilescale_net as tsn
from tilescale_net.kernels.announcement import StatusRecord
from tilescale_net.kernels.moe.layout import BAD_EXPERT, CODE_BITS, CROWDED, HOST_FAULT, NO_ROOM, OTHER_OUTPUT

# Arguments whose faults the host finds; the code of a fault is HOST_FAULT + index.
ARGUMENTS = (
    "x",
    "scales",
    "topk_idx",
    "topk_weights",
    "out",
    "y",
    "weights",
    "values",
    "handle",
    "bias",
    "mask",
    "blocks",
    "waited",
)


assert HOST_FAULT + len(ARGUMENTS) <= 1 << CODE_BITS, "a code that does not fit is read as another one"


class ArgumentError(Exception):
    """An argument of a call is wrong: which one, and the error to raise."""

    def __init__(self, argument: str, error: Exception, value: int = 0):
        super().__init__(str(error))
        self.argument, self.error, self.value = argument, error, value

    @property
    def code(self) -> int:
        return HOST_FAULT + ARGUMENTS.index(self.argument)


class Status(StatusRecord):
    """The record to which the kernels of dispatch and combine report."""

    def error(self, name: str, experts: int, capacity: int) -> Exception | None:
        """The refusal as an exception, once; None when there is none."""
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
