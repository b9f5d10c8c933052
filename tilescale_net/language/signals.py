"""Signals: 64-bit words in symmetric memory that PEs set, add to and wait for, with release and acquire."""

from tvm import tirx

from tilescale_net.compiler.operators import CHOICES, OPERATORS
from tilescale_net.language._operands import Number, Place, as_integer, one_of, pe_index, signal_word
from tilescale_net.language._trace import PrimitiveError, primitive, require_converged

__all__ = ["signal", "signal_block", "signal_warp", "test", "wait", "wait_block", "wait_warp"]


def _comparison(sig: Place, cmp: str, value: Number) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
    one_of("cmp", cmp, tuple(CHOICES["Compare"]))
    if cmp in ("eq", "ne") and isinstance(value, int) and 2**63 <= value < 2**64:
        value -= 2**64  # only the bits matter here
    return signal_word(sig).pointer(), as_integer("value", value, "int64", -(2**63), 2**63 - 1)


def _wait(scope: str, sig: Place, cmp: str, value: Number, proxy: str) -> tirx.Call:
    require_converged(scope)
    word, target = _comparison(sig, cmp, value)
    one_of("proxy", proxy, ("generic", "async"))
    return OPERATORS["wait" if proxy == "generic" else "wait_async"](scope, cmp, 1, word, target)


def _signal(scope: str, sig: Place, value: Number, pe: Number, op: str, fence: bool) -> tirx.Call:
    require_converged(scope)
    word = signal_word(sig).pointer()
    amount = as_integer("value", value, "uint64", 0, 2**64 - 1)
    if not isinstance(fence, bool):
        raise PrimitiveError(f"fence is {fence!r}; it must be True or False")
    return OPERATORS["signal"](scope, one_of("op", op, ("set", "add")), int(fence), word, amount, pe_index(pe))


@primitive
def signal(sig: Place, value: Number, pe: Number, op: str = "set", *, fence: bool = False) -> None:
    """Set or add to a signal word of `pe`; called by one thread.

    Args:
        sig: one uint64 or int64 word of symmetric memory, by its local address.
        value: unsigned 64-bit integer.
        pe: index in team "world".
        op: "set" or "add"; do not mix the two on one word.
        fence: include a `fence(pe)`, at a lower cost: a thread that sees the signal sees all earlier puts to `pe`.

    Example: N.signal(flag[0], 1, pe, "add", fence=True)
    """
    return _signal("thread", sig, value, pe, op, fence)


@primitive
def signal_warp(sig: Place, value: Number, pe: Number, op: str = "set", *, fence: bool = True) -> None:
    """As `signal_block`, called by all 32 lanes of a warp; orders their earlier puts and writes.

    Example: N.signal_warp(flag[0], call, pe)
    """
    return _signal("warp", sig, value, pe, op, fence)


@primitive
def signal_block(sig: Place, value: Number, pe: Number, op: str = "set", *, fence: bool = True) -> None:
    """Send one signal after the work of all threads of the block; called by all of them with equal arguments.

    The block synchronises, then one thread sends the signal. It replaces `T.sync_threads()` and `if tx == 0: N.fence(pe);
    N.signal(...)`. The block does not synchronise again afterwards.

    Args:
        sig, value, pe, op: as in `signal`.
        fence: a thread that sees the signal sees all earlier puts to `pe` of this block or synchronised with it. False
            if there are none to order, as in a reply after reads.

    Example: N.signal_block(flag[0], call, pe)  # after the block's puts
    """
    return _signal("block", sig, value, pe, op, fence)


@primitive
def wait(sig: Place, cmp: str, value: Number, *, proxy: str = "generic") -> tirx.PrimExpr:
    """Wait until the local signal word compares to `value`; orders the calling thread (acquire, system scope).

    Args:
        sig: one uint64 or int64 word of this PE's symmetric memory.
        cmp: "eq", "ne", "ge", "gt", "le" or "lt", comparing the word with `value` as signed 64-bit integers.
        value: signed integer of any width, such as `i - 1`: for a word that counts from 0, "ge" and "gt" of a negative
            value return at once. "eq" and "ne" also take constants up to 2**64 - 1.
        proxy: "generic" orders loads and stores. "async" orders TMA and bulk copies as well, at the cost of a fence; a
            kernel with such a wait may read peers' data by TMA, and T.copy does so where tilelang expects a gain. One such
            wait makes all waits of the kernel "async".

    Returns:
        The word's value that ended the wait, uint64.

    If the word does not change in time, the host raises WaitTimeout or PeerLost.

    Example: N.wait(flag[0], "ge", call)
    """
    return _wait("thread", sig, cmp, value, proxy)


@primitive
def wait_warp(sig: Place, cmp: str, value: Number, *, proxy: str = "generic") -> tirx.PrimExpr:
    """As `wait`, called by all lanes of a warp: one lane polls; the wait orders all lanes, and all get the value.

    Example: N.wait_warp(flag[0], "ge", call)
    """
    return _wait("warp", sig, cmp, value, proxy)


@primitive
def wait_block(sig: Place, cmp: str, value: Number, *, proxy: str = "generic") -> tirx.PrimExpr:
    """As `wait`, called by all threads of the block: one thread polls; the wait orders all threads, and all get the value.

    Example: N.wait_block(flag[0], "ge", call)  # as many signals as calls
    """
    return _wait("block", sig, cmp, value, proxy)


@primitive
def test(sig: Place, cmp: str, value: Number) -> tirx.PrimExpr:
    """Compare once, without waiting; acquires when true.

    Args:
        sig, cmp, value: as in `wait`.

    Returns:
        A boolean expression.

    Example: ready = N.test(flag[0], "ge", call)
    """
    word, target = _comparison(sig, cmp, value)
    return OPERATORS["test"](cmp, word, target)
