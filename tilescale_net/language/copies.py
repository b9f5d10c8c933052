"""put, get and put_signal at block, warp and thread scope, and put_value.

Common to all: `dst` and `src` are tensors, elements (`buf[i]`: from there on) or regions (`buf[i, 0:n]`) of the same
dtype; the *local* tensor names the symmetric one. `count` is in elements and may be a run-time value; the default is the
whole tensor or region, and one element if both are elements. A region may be strided, such as a box `m[i:i+8, j:j+32]` or
a column `m[0:n, j]`, at one end or both; its extents may be run-time values, without a `count`. On the proxy path each row
is a separate operation. The source of a put may be a tile in shared memory, for PEs whose memory is mapped. Any size and
alignment works; 16-byte alignment is fast, and from 32 KiB on both ends at the same offset in a line of 128 bytes are
fastest. Addresses and sizes are 64-bit.

All raise KernelError, with the author's line, when the kernel is built: tensors of different dtypes or in memory that a
copy does not reach, regions whose rows have more than one pitch, counts that are negative or exceed the tensor, unknown options.
"""

from collections.abc import Callable
from typing import Any, ParamSpec

from tvm import tirx

from tilescale_net.compiler.operators import OPERATORS, SHARED_BYTES, ring_placeholder
from tilescale_net.language._operands import (
    Number,
    Operand,
    Place,
    Scalar,
    Transfer,
    as_integer,
    constant,
    element,
    one_of,
    operand,
    pe_index,
    scalar,
    signal_word,
)
from tilescale_net.language._trace import PrimitiveError, block_threads, guarded, primitive, require_converged
from tilescale_net.runtime.context import INLINE_BASES

__all__ = [
    "get_block", "get_thread", "get_warp", "put_block", "put_signal_block", "put_signal_thread", "put_signal_warp",
    "put_thread", "put_value", "put_vector", "put_vectors", "put_warp", "take_vectors",
]  # fmt: skip

P = ParamSpec("P")

SIGNAL_OPS = ("set", "add")

_OPTIONS = """
    Keyword-only options:
        count: elements to move, which may be a run-time value; by default the whole tensor or region, and one element if
            both `dst` and `src` are elements. At least 0, and at most the rest of either tensor.
        unroll: 16-byte accesses that a thread keeps in flight, 1 to 64, a compile-time integer; the default depends on the
            block size.
        engine: "ldst" (unrolled 16-byte loads and stores), "bulk" (cp.async.bulk through a ring of shared memory, block
            scope only) or "auto".
        ring: (stages, bytes per stage) of that ring: 2 to 32 stages, each a multiple of 128 bytes. By default "bulk" takes
            (8, 16384); "auto" at block scope takes 64 KiB for pushes and 96 KiB for pulls of 128 KiB or more (or of
            run-time size) if the kernel's own shared memory leaves room.

    On the proxy path unroll, engine and ring have no effect. Any size and alignment works.

    Raises KernelError, with the author's line, when the kernel is built: tensors of different dtypes, in
    memory that a copy does not reach, regions with rows at more than one pitch, extents that differ, a count that is
    negative or exceeds a tensor or region, unknown options. The simulator compares extents and counts that are known only
    at run time; a GPU moves the elements that are inside both ends.
"""


# -- engine, unroll and ring ------------------------------------------------------------------------------------------

ENGINES = ("auto", "ldst", "bulk")
MAX_UNROLL = 64
# Copies of rows keep two addresses besides each access; with more of these the registers would leave room for few blocks.
MOST_ROW_UNROLL = 16
# Stages and bytes per stage of the shared-memory ring that engine "bulk" stages through by default.
DEFAULT_RING = (8, 16384)
# The smallest ring at which the bulk engine reaches its rate on an H200 (docs/results/copies.md), by direction.
AUTO_PUSH_RING = (4, 16384)
AUTO_PULL_RING = (6, 16384)
# Smaller copies gain too little in bulk for the shared memory that it takes from the kernel; for sizes
# known only at run time device/copy.h and push_bulk.h decide.
BULK_FROM = 128 * 1024
MAX_STAGES = 32


def default_unroll(threads: int) -> int:
    """16-byte accesses that each thread keeps in flight, 64 KiB a block.

    That covers the latency of the link (about 1 us at 50 GB/s for one block) and leaves registers for the kernel.
    """
    return min(max(4096 // threads, 4), 32)


# Sources that only the ldst engine copies, by the form of a Transfer.
LDST_ONLY = {"shared": "a source in shared memory", "rows": "a strided region"}


def options(
    transfer: Transfer, scope: str, engine: str, unroll: int | None, ring: tuple[int, int] | None, pull: bool
) -> tuple[Any, ...]:
    """Check the options of a copy, and choose defaults.

    Engine "auto" gets a ring unless the copy is known to be too small for it. The choice between the engines is made at
    run time, from figures in device/copy.h; passes/__init__.py removes the ring if shared memory has no room.

    Args:
        pull: whether the copy reads the peer's memory; a pull needs more bytes in flight than a push.

    Returns:
        The operator's template arguments behind the scope: engine, unroll, stages and bytes per stage (0 without shared
        memory); only the unroll for rows, none for a source in shared memory.

    Raises:
        PrimitiveError: an unknown engine, or "bulk" where only "ldst" copies; an unroll outside 1..64; a ring that shared
            memory cannot hold, or at warp or thread scope.
    """
    form = LDST_ONLY.get(transfer.form)
    if form and (engine == "bulk" or ring is not None):
        raise PrimitiveError(f"{form} is not copied in bulk; use engine='auto' or 'ldst', without ring=")
    one_of("engine", engine, ENGINES)
    if unroll is not None and (
        isinstance(unroll, bool) or not isinstance(unroll, int) or not 1 <= unroll <= MAX_UNROLL
    ):
        raise PrimitiveError(f"unroll is {unroll!r}; it must be a compile-time integer from 1 to {MAX_UNROLL}")
    chosen = unroll if unroll is not None else default_unroll(block_threads())
    if form:
        return (chosen if unroll is not None else min(chosen, MOST_ROW_UNROLL),) if transfer.form == "rows" else ()
    if scope != "block" and (engine == "bulk" or ring is not None):
        raise PrimitiveError(
            f"bulk copies need shared memory of their own, which only block scope has; use engine='ldst' at {scope} "
            "scope, or the block-scope primitive"
        )
    if ring is not None and engine == "ldst":
        raise PrimitiveError("ring= belongs to engine='bulk' or 'auto'; engine='ldst' does not use shared memory")
    if ring is None and engine == "bulk":
        ring = DEFAULT_RING
    elif ring is None:
        too_small = transfer.nbytes is not None and transfer.nbytes < BULK_FROM
        if engine == "ldst" or scope != "block" or too_small:
            return engine, chosen, 0, 0
        ring = AUTO_PULL_RING if pull else AUTO_PUSH_RING
    if not (isinstance(ring, tuple) and len(ring) == 2 and all(type(x) is int for x in ring)):
        raise PrimitiveError(f"ring is {ring!r}; it must be a pair (stages, bytes per stage) of integers")
    stages, stage_bytes = ring
    if not 2 <= stages <= MAX_STAGES or stage_bytes < 128 or stage_bytes % 128:
        raise PrimitiveError(
            f"ring is {ring}; it takes 2 to {MAX_STAGES} stages, each a positive multiple of 128 bytes"
        )
    if stages * stage_bytes > SHARED_BYTES:
        raise PrimitiveError(
            f"ring {ring} takes {stages * stage_bytes} bytes; shared memory leaves room for {SHARED_BYTES}"
        )
    return engine, chosen, stages, stage_bytes


# -- primitives -------------------------------------------------------------------------------------------------------


def _copy_primitive(function: Callable[P, None]) -> Callable[P, None]:
    """A primitive whose docstring ends with the common options of all copies."""
    function.__doc__ = f"{function.__doc__}{_OPTIONS}"
    return primitive(function)


def _copy(
    name: str, scope: str, dst: Place, src: Place, pe: Number, count: Number | None, unroll: int | None, engine: str,
    ring: tuple[int, int] | None, *signal: Any,
) -> tirx.Call:  # fmt: skip
    """Trace the copy `name`; `signal` is the word, value and operation of a put with signal."""
    require_converged(scope)
    transfer = Transfer.of(f"N.{name}_{scope}", dst, src, pe, count, pushes=name != "get")
    operation: tuple[Any, ...] = ()
    if signal:
        sig, value, op = signal
        signal = (signal_word(sig).pointer(), as_integer("value", value, "uint64", 0, 2**64 - 1))
        operation = (one_of("op", op, SIGNAL_OPS),)
    chosen = options(transfer, scope, engine, unroll, ring, name == "get")
    if transfer.form:
        name = f"{name}_{transfer.form}"
    else:  # engine, unroll, stages, bytes per stage
        signal = (*signal, ring_placeholder(chosen[2] * chosen[3]))
    return OPERATORS[name](scope, *chosen, *operation, *transfer.arguments, *signal)


@_copy_primitive
def put_block(
    dst: Place, src: Place, pe: Number, *, count: Number | None = None, unroll: int | None = None, engine: str = "auto",
    ring: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Push `src` to `dst` on `pe`; called by all threads of the block with equal arguments.

    Args:
        dst: target, by its local address in symmetric memory: a tensor, an element (buf[i]) or a region (buf[i, 0:n]).
        src: source in global or shared memory, of the same dtype; symmetric memory if `pe` may be on another node.
        pe: index in team "world", integer.

    The data are visible at the target only after a signal, fence and signal, or quiet and barrier; `src` may be written
    again only after `quiet` or `flush_wait`.

    Example: N.put_block(y[row, 0:n], x[row, 0:n], pe)
    """
    return _copy("put", "block", dst, src, pe, count, unroll, engine, ring)


@_copy_primitive
def put_warp(
    dst: Place, src: Place, pe: Number, *, count: Number | None = None, unroll: int | None = None, engine: str = "auto",
    ring: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """As `put_block`, called by all 32 lanes of a warp with equal arguments.

    Example: N.put_warp(y[row, 0:n], x[row, 0:n], pe)  # each warp a row
    """
    return _copy("put", "warp", dst, src, pe, count, unroll, engine, ring)


@_copy_primitive
def put_thread(
    dst: Place, src: Place, pe: Number, *, count: Number | None = None, unroll: int | None = None, engine: str = "auto",
    ring: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """As `put_block`, called by one thread, each with its own arguments.

    Example: N.put_thread(y[row, tx], x[row, tx], pe)  # one element
    """
    return _copy("put", "thread", dst, src, pe, count, unroll, engine, ring)


@_copy_primitive
def get_block(
    dst: Place, src: Place, pe: Number, *, count: Number | None = None, unroll: int | None = None, engine: str = "auto",
    ring: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Pull `src` of `pe` into local `dst`; returns with the data readable by the whole block.

    Args:
        dst: target in this PE's global memory (symmetric if `pe` may be on another node): a tensor, an element (buf[i]) or
            a region (buf[i, 0:n]).
        src: source of the same dtype, by its local address in symmetric memory.
        pe: index in team "world", integer.

    Example: N.get_block(x, y, pe, count=n)
    """
    return _copy("get", "block", dst, src, pe, count, unroll, engine, ring)


@_copy_primitive
def get_warp(
    dst: Place, src: Place, pe: Number, *, count: Number | None = None, unroll: int | None = None, engine: str = "auto",
    ring: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """As `get_block`, called by all 32 lanes of a warp with equal arguments; the data are readable by the warp.

    Example: N.get_warp(x[row, 0:n], y[row, 0:n], pe)
    """
    return _copy("get", "warp", dst, src, pe, count, unroll, engine, ring)


@_copy_primitive
def get_thread(
    dst: Place, src: Place, pe: Number, *, count: Number | None = None, unroll: int | None = None, engine: str = "auto",
    ring: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """As `get_block`, called by one thread; the data are readable by that thread.

    Example: N.get_thread(x[row, tx], y[row, tx], pe)  # one element
    """
    return _copy("get", "thread", dst, src, pe, count, unroll, engine, ring)


@_copy_primitive
def put_signal_block(
    dst: Place, src: Place, pe: Number, sig: Place, value: Number, op: str = "set", *, count: Number | None = None,
    unroll: int | None = None, engine: str = "auto", ring: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Push `src` to `dst` on `pe`, then signal there; called by all threads of the block with equal arguments.

    A thread of `pe` that sees the signal by `wait` or `test` sees all of the data too. `src` may be written again only
    after `quiet` or `flush_wait`.

    Args:
        dst, src, pe: as in `put_block`.
        sig: one uint64 or int64 word of symmetric memory, by its local address, such as flags[0].
        value: unsigned 64-bit integer to store or to add.
        op: "set" or "add"; do not mix the two on one word.

    Example: N.put_signal_block(y, x, pe, flag[0], call)  # the receiver: N.wait_block(flag[0], "ge", call)
    """
    return _copy("put_signal", "block", dst, src, pe, count, unroll, engine, ring, sig, value, op)


@_copy_primitive
def put_signal_warp(
    dst: Place, src: Place, pe: Number, sig: Place, value: Number, op: str = "set", *, count: Number | None = None,
    unroll: int | None = None, engine: str = "auto", ring: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """As `put_signal_block`, called by all 32 lanes of a warp, whose data come before the signal.

    Example: N.put_signal_warp(y[row, 0:n], x[row, 0:n], pe, flag[0], 1, "add")
    """
    return _copy("put_signal", "warp", dst, src, pe, count, unroll, engine, ring, sig, value, op)


@_copy_primitive
def put_signal_thread(
    dst: Place, src: Place, pe: Number, sig: Place, value: Number, op: str = "set", *, count: Number | None = None,
    unroll: int | None = None, engine: str = "auto", ring: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """As `put_signal_block`, called by one thread, whose data come before the signal.

    Example: N.put_signal_thread(y[row, tx], x[row, tx], pe, flag[0], 1, "add")
    """
    return _copy("put_signal", "thread", dst, src, pe, count, unroll, engine, ring, sig, value, op)


@primitive
def put_value(dst: Place, value: Scalar, pe: Number) -> None:
    """Store one value of up to 8 bytes at `dst` on `pe`; called by one thread. Needs no source buffer.

    Args:
        dst: element of symmetric memory, by its local address.
        value: converted to dst's dtype.
        pe: index in team "world".

    As in tilelang, a store whose index is outside its tensor vanishes.

    Example: N.put_value(y[row, tx], 2.5, pe)
    """
    to = element("dst", dst)
    if to.element_bytes > 8:
        raise PrimitiveError(f"dst ({to.buffer.name}) has dtype {to.dtype}; put_value carries up to 8 bytes")
    call = OPERATORS["put_value"](to.pointer(), scalar("value", value, to.dtype), pe_index(pe))
    return guarded(to, call)  # type: ignore[return-value] # it is for the tracer alone


# -- vectors that carry their own arrival -----------------------------------------------------------------------------

VECTOR_BYTES = 16
# Types that a receiver can distinguish from empty memory; see device/vector.h.
VECTOR_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn")


def _vectors(name: str, place: Place, scope: str = "global") -> tuple[Operand, int]:
    """A run of vectors (in registers) or rows of one vector, and their number."""
    vectors = operand(name, place, in_rows=scope == "global", scope=scope)
    if vectors.dtype not in VECTOR_DTYPES:
        raise PrimitiveError(
            f"{name} ({vectors.buffer.name}) has dtype {vectors.dtype}; it must be one of {', '.join(VECTOR_DTYPES)}"
        )
    row, rows = constant(vectors.row), constant(vectors.rows)
    if scope == "local" or rows == 1:
        row, rows = VECTOR_BYTES // vectors.element_bytes, constant(vectors.extent)
        rows = rows and (rows // row if rows % row == 0 else None)
    if rows is None or row is None or row * vectors.element_bytes != VECTOR_BYTES:
        raise PrimitiveError(
            f"{name} ({vectors.buffer.name}) has {vectors.rows} rows of {vectors.row} elements; name whole vectors of {VECTOR_BYTES} bytes, "
            "whose number is known when the kernel is built"
        )
    return vectors, rows


@primitive
def put_vector(dst: Place, src: Place, pe: Number) -> None:
    """Write 16 bytes of registers to `pe`, for `take_vectors` there; called by one thread. Direct path only.

    The data are their own flag: nothing else travels, and nothing is ordered. Put a vector again only after the receiver
    has taken the one before.

    Args:
        dst: region of 16 bytes of symmetric memory, by its local address, at a multiple of 16; zero before its first use.
            float32, float16, bfloat16 or float8_e4m3fn. Values arrive unchanged, with two exceptions: a NaN whose bits are
            all ones arrives as another NaN; of four adjacent such NaNs of float8_e4m3fn, which no conversion on a GPU makes,
            one arrives as -448.
        src: region of 16 bytes of an array of `T.alloc_local`, of dst's dtype.
        pe: index in team "world"; also this PE.

    Example:
        mine = T.alloc_local((4,), "float32")
        N.put_vector(y[row, 0:4], mine, pe)
    """
    to, source, _ = _sent_vectors(dst, src, 1)
    size = as_integer("bytes", VECTOR_BYTES, "int64")
    return OPERATORS["put_vector"](to.pointer(), source.pointer(), size, pe_index(pe))


@primitive
def put_vectors(dst: Place, src: Place, n_pes: int, first: Number) -> None:
    """`put_vector` to `n_pes` PEs, without a wait between them; called by one thread. Direct path only.

    Args:
        dst: as in `put_vector`, at the same local address on all of them.
        src: region of an array of `T.alloc_local`, of dst's dtype: one vector for all PEs, or `n_pes` vectors; vector i goes
            to PE (first + i) % n_pes.
        n_pes: PEs 0 to n_pes - 1 of team "world", this PE included, get one. A compile-time integer, at most 128.
        first: first PE, 0 to n_pes - 1; if each PE begins with another one, no link carries all vectors at once.

    Example:
        mine = T.alloc_local((4,), "float32")
        N.put_vectors(y[N.my_pe(), 0:4], mine, 8, (N.my_pe() + 1) % 8)
    """
    if not isinstance(n_pes, int) or not 1 <= n_pes <= INLINE_BASES:
        raise PrimitiveError(
            f"n_pes must be an integer from 1 to {INLINE_BASES}, known when the kernel is built, not {n_pes!r}"
        )
    to, source, rows = _sent_vectors(dst, src, n_pes)
    size = as_integer("bytes", VECTOR_BYTES, "int64")
    return OPERATORS["put_vectors"](
        n_pes, rows, to.pointer(), source.pointer(), size, as_integer("first", first, "int32", 0, n_pes - 1)
    )


def _sent_vectors(dst: Place, src: Place, n_pes: int) -> tuple[Operand, Operand, int]:
    """Both ends of puts of vectors to `n_pes` PEs, and the number of vectors in src: 1 or n_pes."""
    (to, n), (source, m) = _vectors("dst", dst), _vectors("src", src, "local")
    if to.dtype != source.dtype:
        raise PrimitiveError(
            f"dst ({to.buffer.name}) has dtype {to.dtype}, src ({source.buffer.name}) has {source.dtype}"
        )
    for name, place, vectors, allowed in (("dst", to, n, (1,)), ("src", source, m, (1, n_pes))):
        if vectors not in allowed:
            raise PrimitiveError(
                f"{name} ({place.buffer.name}) spans {vectors} vectors of {VECTOR_BYTES} bytes; name one"
                + (f" or {n_pes}" if allowed[-1] > 1 else "")
            )
    return to, source, m


@primitive
def take_vectors(dst: Place, src: Place) -> None:
    """Wait until vectors have been put to this PE, move them to registers and clear their memory; called by one thread.

    It orders nothing else: other writes of the sender need a signal. It polls all vectors together.

    Args:
        dst: array of `T.alloc_local`, or a region of one, with room for the vectors of `src`, one after the other.
        src: region of this PE's symmetric memory, the target of `put_vector`: one vector of 16 bytes or rows of one vector,
            such as `inbox[0:8, 3, 0:4]`, a compile-time number of them.

    If a vector does not arrive in time, the host raises WaitTimeout or PeerLost.

    Example:
        theirs = T.alloc_local((8, 4), "float32")
        N.take_vectors(theirs, y[0:8, 0:4])
    """
    (to, n), (source, m) = _vectors("dst", dst, "local"), _vectors("src", src)
    if to.dtype != source.dtype:
        raise PrimitiveError(
            f"dst ({to.buffer.name}) has dtype {to.dtype}, src ({source.buffer.name}) has {source.dtype}"
        )
    if n != m:
        raise PrimitiveError(
            f"dst ({to.buffer.name}) holds {n} vectors, src ({source.buffer.name}) {m}; make them equal"
        )
    pitch = VECTOR_BYTES if constant(source.rows) == 1 else source.pitch * source.element_bytes
    return OPERATORS["take_vectors"](n, to.pointer(), source.pointer(), as_integer("pitch", pitch, "int64"))
