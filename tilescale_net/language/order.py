"""Order and completion: fence, quiet, flush tickets, barriers."""

from __future__ import annotations

from tvm import tirx

from tilescale_net.compiler.operators import OPERATORS
from tilescale_net.language._divergence import require_converged
from tilescale_net.language._primitive import primitive
from tilescale_net.language._values import Number, number, pe_index


def _peer_or_all(pe):
    return number("pe", -1, "int32") if pe is None else pe_index(pe)


@primitive
def fence(pe: Number | None = None) -> None:
    """Order this thread's earlier puts before its later signals to `pe`, or to each PE when none is given.

    Called by one thread. Costs no round trip and drains nothing.
    """
    return OPERATORS["fence"](_peer_or_all(pe))


@primitive
def quiet(pe: Number | None = None) -> None:
    """Wait until this thread's earlier puts to `pe` (all PEs when None) are complete at their target.

    Afterwards their sources may be written again. Called by one thread.
    """
    return OPERATORS["quiet"](_peer_or_all(pe))


@primitive
def flush_async(pe: Number | None = None) -> tirx.PrimExpr:
    """Ask for completion of this thread's earlier puts to `pe` (all PEs when None) without waiting for it.

    Returns:
        A ticket (uint64) for `flush_wait`.
    """
    return OPERATORS["flush_async"](_peer_or_all(pe))


@primitive
def flush_wait(ticket: Number) -> None:
    """Wait until the puts that a ticket of `flush_async` covers are complete; their sources may be written again."""
    return OPERATORS["flush_wait"](number("ticket", ticket, "uint64", 0, 2**64 - 1))


@primitive
def barrier_all() -> None:
    """Barrier of team "world": returns when every PE's call has begun. Called by all threads of one block per PE.

    It completes nothing: puts are visible after it where a `quiet` came before it, as docs/memory-model.md says.
    """
    require_converged("block")
    return OPERATORS["barrier_all"]()


@primitive
def barrier_node() -> None:
    """As `barrier_all`, among the PEs of this node."""
    require_converged("block")
    return OPERATORS["barrier_node"]()
