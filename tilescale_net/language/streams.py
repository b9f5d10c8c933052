"""Streams with credits: messages go through a few slots, and the sender waits for a slot until the receiver has read it.

The slots are symmetric memory of the receiver, `ring[slot, ...]`. Two signal words count from 0: `arrived`, at the
receiver, counts the arrived messages, and `credit`, at the sender, counts the messages whose slots are free again. Message
i uses slot i % slots; one sender and one receiver number the messages of a stream 0, 1, 2, …, over all launches.

    # sender                                                      # receiver
    slot = N.take_slot_block(credit[0], i, slots)                 slot = N.wait_slot_block(arrived[0], i, slots)
    N.put_signal_block(ring[slot, 0], x, pe, arrived[0], i + 1)   use(ring[slot, :])
                                                                  N.return_credit_block(credit[0], i, pe)

A message of several puts ends with `N.signal_block(arrived[0], i + 1, pe)`. After the credit for message i the sender may
overwrite its source. Each call has a form for a block, a warp and a thread.
"""

from tvm import tirx

from tilescale_net.compiler.operators import OPERATORS
from tilescale_net.compiler.versions import unwrap_expr
from tilescale_net.language._operands import Number, Place, as_integer, constant, pe_index, signal_word
from tilescale_net.language._trace import PrimitiveError, evaluate, primitive, require_converged, settled

__all__ = [
    "return_credit", "return_credit_block", "return_credit_warp", "take_slot", "take_slot_block", "take_slot_warp",
    "wait_slot", "wait_slot_block", "wait_slot_warp",
]  # fmt: skip


def _wait(scope: str, word: Place, index: Number, behind: int) -> None:
    """Wait until the word has counted message `index - behind`."""
    require_converged(scope)
    needed = as_integer("index", index, "int64", 0) + as_integer("slots", 1 - behind, "int64")
    evaluate(OPERATORS["wait"](scope, "ge", 0, signal_word(word).pointer(), needed))


def _slot(index: Number, slots: int) -> tirx.PrimExpr:
    number = as_integer("index", index, "int64", 0) if isinstance(index, int) or constant(index) is not None else index
    return tirx.truncmod(number, tirx.const(slots, number.dtype))


def _slots(slots: int) -> int:
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
        raise PrimitiveError(f"slots is {slots!r}; it must be a compile-time integer of at least 1")
    return slots


def _take(scope: str, credit: Place, index: Number, slots: int) -> tirx.PrimExpr:
    index = settled("index", unwrap_expr(index))  # the wait and the slot both use it
    _wait(scope, credit, index, _slots(slots))
    return _slot(index, slots)


def _arrive(scope: str, arrived: Place, index: Number, slots: int) -> tirx.PrimExpr:
    index = settled("index", unwrap_expr(index))
    _slots(slots)
    _wait(scope, arrived, index, 0)
    return _slot(index, slots)


def _return(scope: str, credit: Place, index: Number, pe: Number) -> tirx.Call:
    require_converged(scope)
    amount = tirx.Cast("uint64", as_integer("index", index, "int64", 0) + tirx.const(1, "int64"))
    return OPERATORS["signal"](scope, "set", 0, signal_word(credit).pointer(), amount, pe_index(pe))


@primitive
def take_slot(credit: Place, index: Number, slots: int) -> tirx.PrimExpr:
    """As `take_slot_block`, called by one thread; orders that thread.

    Example: slot = N.take_slot(flag[0], call, 2)
    """
    return _take("thread", credit, index, slots)


@primitive
def take_slot_warp(credit: Place, index: Number, slots: int) -> tirx.PrimExpr:
    """As `take_slot_block`, called by all 32 lanes of a warp.

    Example: slot = N.take_slot_warp(flag[0], call, 2)
    """
    return _take("warp", credit, index, slots)


@primitive
def take_slot_block(credit: Place, index: Number, slots: int) -> tirx.PrimExpr:
    """Wait, as the sender of message `index`, until its slot is free; called by all threads of the block.

    Args:
        credit: the signal word of this PE that the receiver's `return_credit` sets.
        index: number of the message, from 0.
        slots: number of slots, a compile-time integer.

    Returns:
        The slot, index % slots.

    Example: slot = N.take_slot_block(flag[0], call, 2)
    """
    return _take("block", credit, index, slots)


@primitive
def wait_slot(arrived: Place, index: Number, slots: int) -> tirx.PrimExpr:
    """As `wait_slot_block`, called by one thread; orders that thread.

    Example: slot = N.wait_slot(flag[0], call, 2)
    """
    return _arrive("thread", arrived, index, slots)


@primitive
def wait_slot_warp(arrived: Place, index: Number, slots: int) -> tirx.PrimExpr:
    """As `wait_slot_block`, called by all 32 lanes of a warp.

    Example: slot = N.wait_slot_warp(flag[0], call, 2)
    """
    return _arrive("warp", arrived, index, slots)


@primitive
def wait_slot_block(arrived: Place, index: Number, slots: int) -> tirx.PrimExpr:
    """Wait, as the receiver, until message `index` is in its slot; called by all threads of the block.

    Args:
        arrived: the signal word of this PE that the sender sets to index + 1 behind the data.
        index, slots: as in `take_slot_block`.

    Returns:
        The slot, index % slots, readable by the block.

    Example: slot = N.wait_slot_block(flag[0], call, 2)
    """
    return _arrive("block", arrived, index, slots)


@primitive
def return_credit(credit: Place, index: Number, pe: Number) -> None:
    """As `return_credit_block`, called by one thread after all readers of the slot.

    Example: N.return_credit(flag[0], call, pe)
    """
    return _return("thread", credit, index, pe)


@primitive
def return_credit_warp(credit: Place, index: Number, pe: Number) -> None:
    """As `return_credit_block`, called by all 32 lanes of a warp.

    Example: N.return_credit_warp(flag[0], call, pe)
    """
    return _return("warp", credit, index, pe)


@primitive
def return_credit_block(credit: Place, index: Number, pe: Number) -> None:
    """Return the slot of message `index` to its sender; called by all threads of the block after they have read it.

    Args:
        credit: the sender's signal word, by its local address.
        index: number of the message, from 0.
        pe: the sender.

    Example: N.return_credit_block(flag[0], call, pe)
    """
    return _return("block", credit, index, pe)
