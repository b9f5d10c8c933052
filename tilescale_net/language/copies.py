"""put, get and put_signal at block, warp and thread scope, and put_value.

Common to all: `dst` and `src` are tensors, elements (`buf[i]`: from there on) or regions (`buf[i, 0:n]`) of the same
dtype in global memory; the symmetric one is named by its *local* address. `count` is in elements and may be a run-time
value; without it the whole tensor or region is meant, and one element where both are elements. A region may be made of
rows that lie apart, such as a box `m[i:i+8, j:j+32]` or a column `m[0:n, j]`, at one end or both; its extents may be
run-time values, and there is no count then. On the proxy path each row is an operation of its own. Any size and any
alignment is right; 16-byte aligned is fast, and from 32 KiB on fastest where both ends lie alike within a line of 128
bytes. Addresses and sizes are 64-bit.

`engine` is "ldst" (unrolled 16-byte loads and stores), "bulk" (cp.async.bulk through a ring of shared memory, block
scope only) or "auto". `unroll` is the number of 16-byte accesses that a thread keeps in flight, 1 to 64; the default
follows the block size. `ring` is (stages, bytes per stage) of the shared-memory ring; by default "bulk" takes (8, 16384),
and "auto" takes 64 KiB for pushes and 96 KiB for pulls of 128 KiB or more (or of run-time size) where the kernel's own
shared memory leaves room. On the proxy path these three have no effect.

All raise KernelError, with the author's line, when the kernel is built: tensors of different dtypes or outside global
memory, regions whose rows have more than one pitch, counts that are negative or exceed the tensor, unknown options.
"""

from __future__ import annotations

from tilescale_net.compiler.operators import OPERATORS, ring_placeholder
from tilescale_net.language._copies import places, plan, plan_rows, rows_of, transfer
from tilescale_net.language._divergence import require_converged
from tilescale_net.language._operands import operand, signal_word
from tilescale_net.language._primitive import Misuse, guarded, primitive
from tilescale_net.language._values import choice, constant, number, pe_index, scalar

SIGNAL_OPS = ("set", "add")


def _copy(name, scope, dst, src, pe, count, unroll, engine, ring):
    require_converged(scope)
    ends = places(dst, src)
    rows = rows_of(*ends, count)
    if rows is not None:
        pointers = [place.pointer() for place in ends]
        return OPERATORS[f"{name}_rows"](
            scope, plan_rows(engine, unroll, ring), *pointers, *rows.values(), pe_index(pe)
        )
    to, source, nbytes, peer = transfer(*ends, count, pe)
    engine, unroll, stages, stage_bytes = plan(scope, engine, unroll, ring, name == "get", constant(nbytes))
    scratch = ring_placeholder(stages * stage_bytes)
    return OPERATORS[name](scope, engine, unroll, stages, stage_bytes, to, source, nbytes, peer, scratch)


def _put_signal(scope, dst, src, pe, sig, value, op, count, unroll, engine, ring):
    require_converged(scope)
    ends = places(dst, src)
    rows = rows_of(*ends, count)
    word = signal_word(sig).pointer()
    word_value = number("value", value, "uint64", 0, 2**64 - 1)
    choice("op", op, SIGNAL_OPS)
    if rows is not None:
        pointers = [place.pointer() for place in ends]
        return OPERATORS["put_signal_rows"](
            scope, plan_rows(engine, unroll, ring), op, *pointers, *rows.values(), pe_index(pe), word, word_value
        )
    to, source, nbytes, peer = transfer(*ends, count, pe)
    engine, unroll, stages, stage_bytes = plan(scope, engine, unroll, ring, False, constant(nbytes))
    return OPERATORS["put_signal"](
        scope, engine, unroll, stages, stage_bytes, op,
        to, source, nbytes, peer, word, word_value, ring_placeholder(stages * stage_bytes),
    )  # fmt: skip


@primitive
def put_block(dst, src, pe, count=None, unroll=None, engine="auto", ring=None):
    """Push `src` to `dst` on `pe`; called by all threads of the block with equal arguments.

    Args:
        dst: where, by its local address in symmetric memory.
        src: what; symmetric memory too where `pe` may be on another node.
        pe: index in team "world", integer.
        count, unroll, engine, ring: see the module.

    The data are visible at the target only after a signal, fence and signal, or quiet and barrier; `src` may be written
    again only after `quiet` or `flush_wait`.
    """
    return _copy("put", "block", dst, src, pe, count, unroll, engine, ring)


@primitive
def put_warp(dst, src, pe, count=None, unroll=None, engine="auto", ring=None):
    """As `put_block`, called by all 32 lanes of a warp with equal arguments."""
    return _copy("put", "warp", dst, src, pe, count, unroll, engine, ring)


@primitive
def put_thread(dst, src, pe, count=None, unroll=None, engine="auto", ring=None):
    """As `put_block`, called by one thread, each with its own arguments."""
    return _copy("put", "thread", dst, src, pe, count, unroll, engine, ring)


@primitive
def get_block(dst, src, pe, count=None, unroll=None, engine="auto", ring=None):
    """Pull `src` of `pe` into local `dst`; returns with the data readable by the whole block.

    Args:
        dst: where to, local global memory (symmetric where `pe` may be on another node).
        src: what, by its local address in symmetric memory.
        pe, count, unroll, engine, ring: as in `put_block`.
    """
    return _copy("get", "block", dst, src, pe, count, unroll, engine, ring)


@primitive
def get_warp(dst, src, pe, count=None, unroll=None, engine="auto", ring=None):
    """As `get_block`, called by all lanes of a warp; the data are readable by the warp."""
    return _copy("get", "warp", dst, src, pe, count, unroll, engine, ring)


@primitive
def get_thread(dst, src, pe, count=None, unroll=None, engine="auto", ring=None):
    """As `get_block`, called by one thread; the data are readable by that thread."""
    return _copy("get", "thread", dst, src, pe, count, unroll, engine, ring)


@primitive
def put_signal_block(dst, src, pe, sig, value, op="set", count=None, unroll=None, engine="auto", ring=None):
    """As `put_block`, then the signal: whoever at `pe` sees it by `wait` or `test` sees all of the data too.

    Args:
        sig: one uint64 or int64 word of symmetric memory, by its local address, such as flags[0].
        value: unsigned 64-bit integer to store or to add.
        op: "set" or "add"; one word is changed by one of the two only.
    """
    return _put_signal("block", dst, src, pe, sig, value, op, count, unroll, engine, ring)


@primitive
def put_signal_warp(dst, src, pe, sig, value, op="set", count=None, unroll=None, engine="auto", ring=None):
    """As `put_signal_block`, called by all lanes of a warp; orders the warp's data before its signal."""
    return _put_signal("warp", dst, src, pe, sig, value, op, count, unroll, engine, ring)


@primitive
def put_signal_thread(dst, src, pe, sig, value, op="set", count=None, unroll=None, engine="auto", ring=None):
    """As `put_signal_block`, called by one thread; orders that thread's data before its signal."""
    return _put_signal("thread", dst, src, pe, sig, value, op, count, unroll, engine, ring)


@primitive
def put_value(dst, value, pe):
    """Store one value of up to 8 bytes at `dst` on `pe`; called by one thread. Needs no source buffer.

    Args:
        dst: element of symmetric memory, by its local address.
        value: converted to dst's dtype.
        pe: index in team "world".

    As in tilelang, a store whose index is outside its tensor vanishes.
    """
    to = operand("dst", dst, is_guarded=True)
    if to.element_bytes > 8:
        raise Misuse(f"dst ({to.buffer.name}) has dtype {to.dtype}; put_value carries up to 8 bytes")
    return guarded(to.inside, OPERATORS["put_value"](to.pointer(), scalar("value", value, to.dtype), pe_index(pe)))
