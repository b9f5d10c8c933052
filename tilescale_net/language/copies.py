"""put, get and put_signal at block, warp and thread scope, and put_value.

Common to all: `dst` and `src` are tensors, elements (`buf[i]`: from there on) or regions (`buf[i, 0:n]`) of the same
dtype in global memory; the symmetric one is named by its *local* address. `count` is in elements and may be a run-time
value; without it the whole tensor or region is meant, and one element where both are elements. A region may be made of
rows that lie apart, such as a box `m[i:i+8, j:j+32]` or a column `m[0:n, j]`, at one end or both; its extents may be
run-time values, and there is no count then. On the proxy path each row is an operation of its own. The source of a put
may be a tile in shared memory, for PEs whose memory is mapped. Any size and any
alignment is right; 16-byte aligned is fast, and from 32 KiB on fastest where both ends lie alike within a line of 128
bytes. Addresses and sizes are 64-bit.

All raise KernelError, with the author's line, when the kernel is built: tensors of different dtypes or outside global
memory, regions whose rows have more than one pitch, counts that are negative or exceed the tensor, unknown options.
"""

from tilescale_net.compiler.operators import OPERATORS, ring_placeholder
from tilescale_net.language._operands import (
    Number,
    Place,
    Scalar,
    as_integer,
    constant,
    element,
    one_of,
    pe_index,
    scalar,
    signal_word,
)
from tilescale_net.language._trace import PrimitiveError, guarded, primitive, require_converged
from tilescale_net.language.transfer import places, plan, plan_ldst, plan_rows, rows_of, transfer

__all__ = [
    "get_block", "get_thread", "get_warp", "put_block", "put_signal_block", "put_signal_thread", "put_signal_warp",
    "put_thread", "put_value", "put_warp",
]  # fmt: skip

SIGNAL_OPS = ("set", "add")

_OPTIONS = """
    Keyword-only options:
        count: elements to move, which may be known at run time only; by default the whole tensor or region, and one
            element where both `dst` and `src` are elements. At least 0, and no more than either tensor holds from there on.
        unroll: 16-byte accesses that a thread keeps in flight, 1 to 64, known when the kernel is built; the default follows
            the block size.
        engine: "ldst" (unrolled 16-byte loads and stores), "bulk" (cp.async.bulk through a ring of shared memory, block
            scope only) or "auto".
        ring: (stages, bytes per stage) of that ring: 2 to 32 stages, each a multiple of 128 bytes. By default "bulk" takes
            (8, 16384); "auto" at block scope takes 64 KiB for pushes and 96 KiB for pulls of 128 KiB or more (or of
            run-time size) where the kernel's own shared memory leaves room.

    On the proxy path unroll, engine and ring have no effect. Any size and any alignment is right.

    Raises KernelError, with the author's line, when the kernel is built: tensors of different dtypes, in
    memory that a copy does not reach, regions with rows at more than one pitch, extents that differ, a count that is
    negative or exceeds a tensor or region, unknown options. Extents and counts that are known only at run time are compared
    by the simulator; a GPU moves what leaves neither end.
"""


def _with_options(function):
    """Add what all copies have in common to a copy's docstring."""
    function.__doc__ += _OPTIONS
    return function


def _copy(name, scope, dst, src, pe, count, unroll, engine, ring):
    require_converged(scope)
    what = f"N.{name}_{scope}"
    ends = places(dst, src, name == "put")
    rows = rows_of(what, *ends, count)
    if ends[1].is_shared:
        plan_ldst("a source in shared memory", engine, unroll, ring)
        return OPERATORS["put_shared"](scope, *transfer(what, *ends, count, pe))
    if rows is not None:
        pointers = [place.pointer() for place in ends]
        return OPERATORS[f"{name}_rows"](
            scope, plan_rows(engine, unroll, ring), *pointers, *rows.values(), pe_index(pe)
        )
    to, source, nbytes, peer = transfer(what, *ends, count, pe)
    engine, unroll, stages, stage_bytes = plan(scope, engine, unroll, ring, name == "get", constant(nbytes))
    scratch = ring_placeholder(stages * stage_bytes)
    return OPERATORS[name](scope, engine, unroll, stages, stage_bytes, to, source, nbytes, peer, scratch)


def _put_signal(scope, dst, src, pe, sig, value, op, count, unroll, engine, ring):
    require_converged(scope)
    what = f"N.put_signal_{scope}"
    ends = places(dst, src, True)
    rows = rows_of(what, *ends, count)
    word = signal_word(sig).pointer()
    word_value = as_integer("value", value, "uint64", 0, 2**64 - 1)
    one_of("op", op, SIGNAL_OPS)
    if ends[1].is_shared:
        plan_ldst("a source in shared memory", engine, unroll, ring)
        return OPERATORS["put_signal_shared"](scope, op, *transfer(what, *ends, count, pe), word, word_value)
    if rows is not None:
        pointers = [place.pointer() for place in ends]
        return OPERATORS["put_signal_rows"](
            scope, plan_rows(engine, unroll, ring), op, *pointers, *rows.values(), pe_index(pe), word, word_value
        )
    to, source, nbytes, peer = transfer(what, *ends, count, pe)
    engine, unroll, stages, stage_bytes = plan(scope, engine, unroll, ring, False, constant(nbytes))
    return OPERATORS["put_signal"](
        scope, engine, unroll, stages, stage_bytes, op,
        to, source, nbytes, peer, word, word_value, ring_placeholder(stages * stage_bytes),
    )  # fmt: skip


@_with_options
@primitive
def put_block(
    dst: Place, src: Place, pe: Number, *, count: Number | None = None, unroll: int | None = None, engine: str = "auto",
    ring: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Push `src` to `dst` on `pe`; called by all threads of the block with equal arguments.

    Args:
        dst: where, by its local address in symmetric memory: a tensor, an element (buf[i]) or a region (buf[i, 0:n]).
        src: what, in global or shared memory, of the same dtype; symmetric memory where `pe` may be on another node.
        pe: index in team "world", integer.

    The data are visible at the target only after a signal, fence and signal, or quiet and barrier; `src` may be written
    again only after `quiet` or `flush_wait`.
    """
    return _copy("put", "block", dst, src, pe, count, unroll, engine, ring)


@_with_options
@primitive
def put_warp(
    dst: Place, src: Place, pe: Number, *, count: Number | None = None, unroll: int | None = None, engine: str = "auto",
    ring: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """As `put_block`, called by all 32 lanes of a warp with equal arguments."""
    return _copy("put", "warp", dst, src, pe, count, unroll, engine, ring)


@_with_options
@primitive
def put_thread(
    dst: Place, src: Place, pe: Number, *, count: Number | None = None, unroll: int | None = None, engine: str = "auto",
    ring: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """As `put_block`, called by one thread, each with its own arguments."""
    return _copy("put", "thread", dst, src, pe, count, unroll, engine, ring)


@_with_options
@primitive
def get_block(
    dst: Place, src: Place, pe: Number, *, count: Number | None = None, unroll: int | None = None, engine: str = "auto",
    ring: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Pull `src` of `pe` into local `dst`; returns with the data readable by the whole block.

    Args:
        dst: where to, local global memory (symmetric where `pe` may be on another node): a tensor, an element (buf[i]) or
            a region (buf[i, 0:n]).
        src: what, of the same dtype, by its local address in symmetric memory.
        pe: index in team "world", integer.
    """
    return _copy("get", "block", dst, src, pe, count, unroll, engine, ring)


@_with_options
@primitive
def get_warp(
    dst: Place, src: Place, pe: Number, *, count: Number | None = None, unroll: int | None = None, engine: str = "auto",
    ring: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """As `get_block`, called by all 32 lanes of a warp with equal arguments; the data are readable by the warp."""
    return _copy("get", "warp", dst, src, pe, count, unroll, engine, ring)


@_with_options
@primitive
def get_thread(
    dst: Place, src: Place, pe: Number, *, count: Number | None = None, unroll: int | None = None, engine: str = "auto",
    ring: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """As `get_block`, called by one thread; the data are readable by that thread."""
    return _copy("get", "thread", dst, src, pe, count, unroll, engine, ring)


@_with_options
@primitive
def put_signal_block(
    dst: Place, src: Place, pe: Number, sig: Place, value: Number, op: str = "set", *, count: Number | None = None,
    unroll: int | None = None, engine: str = "auto", ring: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Push `src` to `dst` on `pe`, then signal there; called by all threads of the block with equal arguments.

    A thread at `pe` that sees the signal by `wait` or `test` sees all of the data too. `src` may be written again only
    after `quiet` or `flush_wait`.

    Args:
        dst: where, by its local address in symmetric memory: a tensor, an element (buf[i]) or a region (buf[i, 0:n]).
        src: what, in global or shared memory, of the same dtype; symmetric memory where `pe` may be on another node.
        pe: index in team "world", integer.
        sig: one uint64 or int64 word of symmetric memory, by its local address, such as flags[0].
        value: unsigned 64-bit integer to store or to add.
        op: "set" or "add"; one word is changed by one of the two only.
    """
    return _put_signal("block", dst, src, pe, sig, value, op, count, unroll, engine, ring)


@_with_options
@primitive
def put_signal_warp(
    dst: Place, src: Place, pe: Number, sig: Place, value: Number, op: str = "set", *, count: Number | None = None,
    unroll: int | None = None, engine: str = "auto", ring: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """As `put_signal_block`, called by all 32 lanes of a warp, whose data come before the signal."""
    return _put_signal("warp", dst, src, pe, sig, value, op, count, unroll, engine, ring)


@_with_options
@primitive
def put_signal_thread(
    dst: Place, src: Place, pe: Number, sig: Place, value: Number, op: str = "set", *, count: Number | None = None,
    unroll: int | None = None, engine: str = "auto", ring: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """As `put_signal_block`, called by one thread, whose data come before the signal."""
    return _put_signal("thread", dst, src, pe, sig, value, op, count, unroll, engine, ring)


@primitive
def put_value(dst: Place, value: Scalar, pe: Number) -> None:
    """Store one value of up to 8 bytes at `dst` on `pe`; called by one thread. Needs no source buffer.

    Args:
        dst: element of symmetric memory, by its local address.
        value: converted to dst's dtype.
        pe: index in team "world".

    As in tilelang, a store whose index is outside its tensor vanishes.
    """
    to = element("dst", dst)
    if to.element_bytes > 8:
        raise PrimitiveError(f"dst ({to.buffer.name}) has dtype {to.dtype}; put_value carries up to 8 bytes")
    call = OPERATORS["put_value"](to.pointer(), scalar("value", value, to.dtype), pe_index(pe))
    return guarded(to, call)  # type: ignore[return-value] # it is for the tracer alone
