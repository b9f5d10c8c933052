"""Choices that block-, warp- and thread-scope copies make when their author leaves them open."""

from dataclasses import dataclass

from tvm import tirx

from tilescale_net.compiler.operators import SHARED_BYTES, agreed_value
from tilescale_net.language._operands import (
    Expr,
    Operand,
    as_integer,
    constant,
    int64,
    one_of,
    operand,
    pe_index,
    provably,
    provably_equal,
)
from tilescale_net.language._trace import PrimitiveError, block_threads

ENGINES = ("auto", "ldst", "bulk")
MAX_UNROLL = 64
# Copies of rows keep two addresses besides each access; with more of these the registers would leave room for few blocks.
MOST_ROW_UNROLL = 16
# Stages and bytes per stage of the shared-memory ring that engine "bulk" stages through by default.
DEFAULT_RING = (8, 16384)
# The least shared memory at which the bulk engine reaches its rate on an H200 (docs/results/copies.md), by direction.
AUTO_PUSH_RING = (4, 16384)
AUTO_PULL_RING = (6, 16384)
# Copies below this size gain too little in bulk for the shared memory that they would take from the kernel; for sizes
# known only at run time device/copy.h and push_bulk.h decide.
BULK_FROM = 128 * 1024
MAX_STAGES = 32


def default_unroll(threads: int) -> int:
    """16-byte accesses that each thread keeps in flight, 64 KiB a block.

    That covers the latency of the link (about 1 us at 50 GB/s for one block) and leaves registers for the kernel.
    """
    return min(max(4096 // threads, 4), 32)


def default_ring(scope: str, engine: str, pull: bool, nbytes: int | None) -> tuple[int, int] | None:
    """The ring of a copy whose author named none.

    Args:
        pull: whether the copy reads the peer's memory; a pull needs more bytes in flight than a push.
        nbytes: the copy's size where it is known when the kernel is built.

    Engine "auto" gets one unless the copy is known to be too small for it. The choice between the engines is made at
    run time, from figures in device/copy.h; passes/__init__.py takes the ring away again where shared memory has no room.
    """
    if engine == "bulk":
        return DEFAULT_RING
    if engine != "auto" or scope != "block" or (nbytes is not None and nbytes < BULK_FROM):
        return None
    return AUTO_PULL_RING if pull else AUTO_PUSH_RING


def plan(scope: str, engine: str, unroll, ring, pull: bool, nbytes: int | None) -> tuple[str, int, int, int]:
    """Check the options of a copy; the last two as for `default_ring`.

    Returns:
        engine, unroll, stages, bytes per stage; the last two are 0 for a copy without shared memory.

    Raises:
        PrimitiveError: an unknown engine, an unroll outside 1..64, a ring that shared memory cannot hold, or a ring at warp or
            thread scope.
    """
    one_of("engine", engine, ENGINES)
    if unroll is None:
        unroll = default_unroll(block_threads())
    elif isinstance(unroll, bool) or not isinstance(unroll, int) or not 1 <= unroll <= MAX_UNROLL:
        raise PrimitiveError(f"unroll is {unroll!r}; it must be a compile-time integer from 1 to {MAX_UNROLL}")
    if scope != "block" and (engine == "bulk" or ring is not None):
        raise PrimitiveError(
            f"bulk copies need shared memory of their own, which only block scope has; use engine='ldst' at {scope} "
            "scope, or the block-scope primitive"
        )
    if ring is not None and engine == "ldst":
        raise PrimitiveError("ring= belongs to engine='bulk' or 'auto'; engine='ldst' does not use shared memory")
    ring = ring if ring is not None else default_ring(scope, engine, pull, nbytes)
    if ring is None:
        return engine, unroll, 0, 0
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
    return engine, unroll, stages, stage_bytes


def places(dst, src, pushes: bool) -> tuple[Operand, Operand]:
    """The two ends of a copy, which may be made of rows; the source of a push may lie in shared memory.

    Raises:
        PrimitiveError: mismatched types, and all that `operand` refuses.
    """
    to, source = operand("dst", dst, in_rows=True), operand("src", src, in_rows=True, in_shared=pushes)
    if to.dtype != source.dtype:
        raise PrimitiveError(
            f"dst ({to.buffer.name}) has dtype {to.dtype}, src ({source.buffer.name}) has {source.dtype}"
        )
    return to, source


def transfer(what: str, to: Operand, source: Operand, count, pe):
    """Check the operands of a copy between contiguous places, by the primitive `what`.

    Returns:
        destination pointer, source pointer, bytes (int64), pe (int32).

    Raises:
        PrimitiveError: a count or extents that the tensors cannot hold.
    """
    elements = _count(what, to, source, count)
    size, known = to.element_bytes, constant(elements)
    nbytes = as_integer("count", known * size if known is not None else elements * size, "int64")
    return to.pointer(), source.pointer(), nbytes, pe_index(pe)


@dataclass(frozen=True)
class Rows:
    """Rows of a copy: their number, and their bytes and pitches in bytes, as int64 expressions."""

    count: tirx.PrimExpr
    nbytes: tirx.PrimExpr
    to_pitch: tirx.PrimExpr
    from_pitch: tirx.PrimExpr

    def values(self) -> tuple[tirx.PrimExpr, ...]:
        return self.count, self.nbytes, self.to_pitch, self.from_pitch


def plan_ldst(what: str, engine: str, unroll, ring) -> int:
    """Check the options of a copy that only the ldst engine carries out; its unroll.

    Raises:
        PrimitiveError: as `plan`, and where the copy is to go in bulk; `what` names it.
    """
    if engine == "bulk" or ring is not None:
        raise PrimitiveError(f"{what} is not copied in bulk; use engine='auto' or 'ldst', without ring=")
    return plan("thread", engine, unroll, None, False, None)[1]


def plan_rows(engine: str, unroll, ring) -> int:
    """Check the options of a copy of rows; its unroll. Raises PrimitiveError as `plan_ldst`."""
    planned = plan_ldst("a region of rows that lie apart", engine, unroll, ring)
    return planned if unroll is not None else min(planned, MOST_ROW_UNROLL)


def rows_of(what: str, to: Operand, source: Operand, count) -> Rows | None:
    """How a copy between two places goes row by row, by the primitive `what`; None when both are contiguous.

    Raises:
        PrimitiveError: a count besides, or places that differ in their rows.
    """
    apart = [place for place in (to, source) if constant(place.rows) != 1]
    if not apart:
        return None
    box = apart[0]
    if source.is_shared:
        raise PrimitiveError(f"src ({source.buffer.name}) lies in shared memory; put it row by row, from rows to rows")
    if count is not None:
        raise PrimitiveError(
            f"count= belongs to contiguous memory; {box.buffer.name} is named by rows, which say how much"
        )
    rows, row = box.rows, box.row
    if len(apart) == 2:
        if any(_differ(*pair) for pair in ((to.rows, source.rows), (to.row, source.row))):
            raise PrimitiveError(
                f"dst has {to.rows} rows of {to.row} elements, src {source.rows} of {source.row}; make them equal"
            )
        rows = _agreed(what, "has {} rows", to, source, to.rows, source.rows)
        row = _agreed(what, "has rows of {} elements", to, source, to.row, source.row)
    else:
        rows = _rows_within(what, box, source if box is to else to, to, source)

    def nbytes(elements) -> tirx.PrimExpr:
        known = constant(elements)
        return as_integer("rows", int64(elements if known is None else known) * box.element_bytes, "int64")

    pitches = [nbytes(box.row if constant(place.rows) == 1 else place.pitch) for place in (to, source)]
    return Rows(as_integer("rows", rows, "int64"), nbytes(row), *pitches)


def _rows_within(what: str, box: Operand, flat: Operand, to: Operand, source: Operand) -> Expr:
    """Rows of `box` that are copied from or to `flat`, which is contiguous: all, where both name as many elements."""
    known, limit = constant(box.extent), constant(_limit(flat))
    if known is not None and limit is not None and (known > limit or (known < limit and not flat.is_element)):
        name = "dst" if flat is to else "src"
        raise PrimitiveError(
            f"{name} ({flat.buffer.name}) spans {limit} elements, the other end {known}; make them equal"
        )
    if flat.is_element or provably_equal(flat.extent, box.extent):
        return box.rows
    fitting = tirx.truncdiv(int64(flat.extent), tirx.max(int64(box.row), int64(1)))
    smallest = tirx.min(int64(box.rows), fitting)
    return _agreed(what, "spans {} elements", to, source, to.extent, source.extent, (int64(box.rows), smallest))


def _limit(place: Operand):
    """Elements that a count may reach at most: a region's own extent, else the rest of the tensor."""
    return place.room if place.is_element else place.extent


def _differ(a: Expr, b: Expr) -> bool:
    """Whether two extents are known to differ when the kernel is built."""
    if constant(a) is not None and constant(b) is not None:
        return constant(a) != constant(b)
    return provably(int64(a) != int64(b))


def _agreed(
    what: str, extent: str, to: Operand, source: Operand, left: Expr, right: Expr,
    values: tuple[tirx.PrimExpr, tirx.PrimExpr] | None = None,
) -> Expr:  # fmt: skip
    """The extent of both ends of a copy: where they may differ at run time, the simulator reports it, and GPUs move what
    leaves neither region.

    Args:
        extent: what is compared, with {} for the number.
        left, right: it, of `to` and of `source`.
        values: what to copy where both are equal, and where they may not be; by default `left`, and the smaller one.
    """
    if provably_equal(left, right):
        return left
    one, other = (as_integer("extent", end, "int64") for end in (left, right))
    value, smallest = values or (one, tirx.min(one, other))
    text = f"{what}: dst ({to.buffer.name}) {extent}, src ({source.buffer.name}) {{}}; make them equal"
    return agreed_value(value, smallest, one == other, text, one, other)


def _count(what: str, to: Operand, source: Operand, count) -> tirx.PrimExpr:
    if count is None:
        whole = [place for place in (source, to) if not place.is_element]
        if len(whole) == 2:
            if _differ(to.extent, source.extent):
                raise PrimitiveError(
                    f"dst ({to.buffer.name}) spans {to.extent} elements, src ({source.buffer.name}) {source.extent}; "
                    "make them equal or give count="
                )
            return as_integer(
                "count", _agreed(what, "spans {} elements", to, source, to.extent, source.extent), "int64", 0
            )
        count = whole[0].extent if whole else 1
    result = wanted = as_integer("count", count, "int64", 0)
    for name, place in (("dst", to), ("src", source)):
        known, limit = constant(wanted), constant(_limit(place))
        if known is not None and limit is not None and known > limit:
            raise PrimitiveError(
                f"count is {known}, but {name} ({place.buffer.name}) holds {limit} elements from there on"
            )
        room = as_integer("room", _limit(place), "int64")
        if (known is None or limit is None) and provably(wanted > room):
            raise PrimitiveError(f"count is {count}, but {name} ({place.buffer.name}) holds {_limit(place)} elements")
        if not place.is_element and not provably(wanted <= room):
            text = f"{what}: count is {{}}, but {name} ({place.buffer.name}) holds {{}} elements"
            result = agreed_value(result, tirx.min(result, room), wanted <= room, text, wanted, room)
    return result
