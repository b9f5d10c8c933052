"""Order and completion: fence, quiet, flush tickets, barriers."""

from tvm import tirx

from tilescale_net.compiler.operators import OPERATORS
from tilescale_net.language._operands import Number, as_integer, one_of, pe_index
from tilescale_net.language._trace import primitive, require_converged

__all__ = [
    "barrier_all", "barrier_grid", "barrier_node", "fence", "fence_block", "fence_warp", "flush_async", "flush_wait",
    "quiet", "quiet_block", "quiet_warp",
]  # fmt: skip


def _peer_or_all(pe: Number | None) -> tirx.PrimExpr:
    return as_integer("pe", -1, "int32") if pe is None else pe_index(pe)


def _by_scope(operator: str, scope: str, pe: Number | None) -> tirx.Call:
    require_converged(scope)
    return OPERATORS[operator](scope, _peer_or_all(pe))


@primitive
def fence(pe: Number | None = None) -> None:
    """Order all puts before it ahead of the signals after it, to `pe`, or to each PE if it is None.

    Called by one thread. It covers this thread's earlier puts, and puts of other threads that come before it, for example
    by a barrier. It costs no round trip and drains nothing.

    Args:
        pe: index in team "world", integer; None: every PE.

    Example: N.fence(pe)
    """
    return _by_scope("fence", "thread", pe)


@primitive
def fence_warp(pe: Number | None = None) -> None:
    """As `fence_block`, called by all 32 lanes of a warp.

    Example: N.fence_warp(pe)
    """
    return _by_scope("fence", "warp", pe)


@primitive
def fence_block(pe: Number | None = None) -> None:
    """As `fence`, called by all threads of the block: orders the block's puts before it ahead of later signals of any of
    its threads. Before a single signal, use `signal_block` instead.

    Example: N.fence_block()  # then signals to several PEs
    """
    return _by_scope("fence", "block", pe)


@primitive
def quiet(pe: Number | None = None) -> None:
    """Wait until all puts before it to `pe` (all PEs if None) are complete at their target.

    Called by one thread. It covers this thread's earlier puts, and puts of other threads that come before it, for example
    by a barrier. Afterwards their sources may be written again.

    Args:
        pe: as in `fence`.

    Example: N.quiet(pe)
    """
    return _by_scope("quiet", "thread", pe)


@primitive
def quiet_warp(pe: Number | None = None) -> None:
    """As `quiet_block`, called by all 32 lanes of a warp.

    Example: N.quiet_warp()
    """
    return _by_scope("quiet", "warp", pe)


@primitive
def quiet_block(pe: Number | None = None) -> None:
    """As `quiet`, called by all threads of the block: when it returns, the block's puts before it are complete, and any
    of its threads may write their sources again.

    Example: N.quiet_block(pe)  # now x may be written again
    """
    return _by_scope("quiet", "block", pe)


@primitive
def flush_async(pe: Number | None = None) -> tirx.PrimExpr:
    """Request completion of all puts before it to `pe` (all PEs if None) without waiting; called by one thread.

    Args:
        pe: as in `fence`.

    Returns:
        A ticket (uint64) for `flush_wait`.

    Example: ticket = N.flush_async(pe)
    """
    return OPERATORS["flush_async"](_peer_or_all(pe))


@primitive
def flush_wait(ticket: Number) -> None:
    """Wait until the puts that a ticket of `flush_async` covers are complete; their sources may be written again.

    Args:
        ticket: the result of `flush_async`, uint64.

    Example: N.flush_wait(N.flush_async())
    """
    return OPERATORS["flush_wait"](as_integer("ticket", ticket, "uint64", 0, 2**64 - 1))


def _barrier(operator: str, scope: str) -> tirx.Call:
    require_converged("block")
    return OPERATORS[operator](one_of("scope", scope, ("block", "grid")))


@primitive
def barrier_all(scope: str = "block") -> None:
    """Barrier of team "world": returns when every PE's call has begun.

    It completes nothing: puts are visible after it if a `quiet` came before it, see docs/memory-model.md.

    Args:
        scope: "block": called by all threads of one block per PE, without the other blocks. "grid": called by all threads
            of all blocks, which synchronise as well; they must be able to run at the same time, as for `barrier_grid`.

    Example: N.barrier_all(scope="grid")
    """
    return _barrier("barrier_all", scope)


@primitive
def barrier_node(scope: str = "block") -> None:
    """As `barrier_all`, among the PEs of this node.

    Example: N.barrier_node()
    """
    return _barrier("barrier_node", scope)


@primitive
def barrier_grid() -> None:
    """Barrier of all blocks of this PE's launch; called by all their threads, any number of times.

    Everything that any thread did before it, waits and puts included, comes before everything that any thread does after
    it. All blocks must be able to run at the same time: a larger grid ends in WaitTimeout.

    Example: N.barrier_grid()
    """
    require_converged("block")
    return OPERATORS["barrier_grid"]()
