"""The calls of primitives in kernels for GPUs, by the numbers that kernels write into the trace."""

from dataclasses import dataclass, replace

# Operations in which a thread may wait for other ranks: kernels note when they begin, too, for the report of a hang.
WAITING = ("wait", "barrier", "barrier_grid", "quiet", "flush")


@dataclass(frozen=True)
class CallSite:
    """A call in a kernel.

    Attributes:
        name: of the primitive, such as "N.put_block", or of the range that begins, or of the kernel.
        operation: one of context.OPERATIONS, or "range_begin", "range_end" and "kernel".
        compare: of a wait, one of context.COMPARISONS, or "".
        line: of the author, such as "file.py:12", or "".
    """

    name: str
    operation: str
    compare: str
    line: str

    def without_line(self) -> "CallSite":
        return replace(self, line="")


@dataclass(frozen=True)
class KernelSites:
    """The calls of a kernel by number. `identity`: 16 bits, not 0, by which the trace knows the kernel."""

    identity: int
    name: str
    calls: tuple[CallSite, ...]


_known: dict[int, KernelSites] = {}


def know(kernel: KernelSites) -> None:
    """Note the calls of a kernel that this process may launch."""
    _known[kernel.identity] = kernel


def of_number(site: int) -> tuple[str, CallSite] | None:
    """Name of the kernel, and its call, that the number in an event stands for; None for one that is not known."""
    kernel, index = _known.get(site >> 16), site & 0xFFFF
    return (kernel.name, kernel.calls[index]) if kernel is not None and index < len(kernel.calls) else None
