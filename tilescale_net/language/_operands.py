"""Operands of primitives as expressions: integers, values to store, memory locations, and copies between them.

A location in memory is a tensor `buf`, an element `buf[i]` (the address of that element), or a region `buf[i, 0:n]`. It
becomes a base pointer plus an offset in elements, computed in 64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from tilelang import tvm
from tvm import tirx

from tilescale_net.compiler.operators import agreed_value
from tilescale_net.compiler.versions import get_buffer_region_from_load, get_let_value, has_let_value, unwrap_expr
from tilescale_net.language._trace import PrimitiveError, settled

# -- arithmetic in 64 bits --------------------------------------------------------------------------------------------

Expr: TypeAlias = tirx.PrimExpr | int


def constant(value: Expr | None) -> int | None:
    """The value of a compile-time integer, else None."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, tirx.IntImm):
        return int(value.value)
    simple = tvm.arith.Analyzer().simplify(value)
    return int(simple.value) if isinstance(simple, tirx.IntImm) else None


_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max)


def _plain(value: tirx.PrimExpr) -> bool:
    """Whether an expression is only arithmetic on variables and constants, so it may be evaluated again."""
    if isinstance(value, _ARITHMETIC):
        return _plain(value.a) and _plain(value.b)
    return isinstance(value, (tirx.Var, tirx.IntImm))


def int64(value: Expr) -> tirx.PrimExpr:
    """`value` computed in 64 bits throughout: a 32-bit product may have overflowed.

    Names that the kernel bound to plain arithmetic are computed again in 64 bits.
    """
    if isinstance(value, int):
        return tirx.IntImm("int64", value)
    if str(value.dtype) == "int64":
        return value
    if isinstance(value, _ARITHMETIC) and str(value.dtype) == "int32":
        return type(value)(int64(value.a), int64(value.b))
    if isinstance(value, tirx.Var) and has_let_value(value):
        bound = get_let_value(value)
        if isinstance(bound, _ARITHMETIC) and _plain(bound):
            return int64(bound)
    return tirx.Cast("int64", value)


def product(values: Iterable[Expr]) -> Expr:
    """Product of extents: a Python int when all are constant, else an int64 expression."""
    values = [constant(v) if constant(v) is not None else int64(v) for v in values]
    result: Expr = math.prod(v for v in values if isinstance(v, int))
    for value in values:
        if not isinstance(value, int):
            result = value if isinstance(result, int) and result == 1 else int64(result) * value
    return result


def add(left: Expr, right: Expr) -> Expr:
    if isinstance(left, int) and isinstance(right, int):
        return left + right
    if isinstance(left, int) and left == 0:
        return right
    if isinstance(right, int) and right == 0:
        return left
    return int64(left) + int64(right)


def provably(condition: Any) -> bool:
    """Whether `condition` holds for every value of its variables."""
    if isinstance(condition, bool):
        return condition
    return bool(tvm.arith.Analyzer().can_prove(condition))


def provably_equal(a: Expr, b: Expr) -> bool:
    ca, cb = constant(a), constant(b)
    if ca is not None or cb is not None:
        return ca == cb
    return provably(int64(a) == int64(b))


# -- numbers ----------------------------------------------------------------------------------------------------------

# Integer operands, and values to store.
Number: TypeAlias = Expr
Scalar: TypeAlias = tirx.PrimExpr | int | float


def describe(value: Any) -> str:
    if isinstance(value, tirx.PrimExpr):
        return f"the expression {value} of type {value.dtype}"
    return f"{value!r} ({type(value).__name__})"


def as_integer(name: str, value: Any, dtype: str, low: int | None = None, high: int | None = None) -> tirx.PrimExpr:
    """An integer operand as an expression of `dtype`.

    Raises:
        PrimitiveError: not an integer, or a constant outside [low, high].
    """
    value = unwrap_expr(value)
    if isinstance(value, bool) or not isinstance(value, (int, tirx.PrimExpr)):
        raise PrimitiveError(f"{name} must be an integer, not {describe(value)}")
    if isinstance(value, tirx.PrimExpr) and not str(value.dtype).startswith(("int", "uint")):
        raise PrimitiveError(f"{name} must be an integer, not {describe(value)}")
    value = settled(name, value)
    known = constant(value)
    if known is not None and ((low is not None and known < low) or (high is not None and known > high)):
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        raise PrimitiveError(f"{name} is {known}; it must be {limits}")
    if known is not None:
        return tirx.const(known, dtype)
    if dtype == "int64":
        return int64(value)
    return value if str(value.dtype) == dtype else tirx.Cast(dtype, value)


def scalar(name: str, value: Any, dtype: str) -> tirx.PrimExpr:
    """A value to store, converted to `dtype`. Raises PrimitiveError if it is no number, or of a kind that `dtype`
    cannot represent."""
    value = unwrap_expr(value)
    if not isinstance(value, (bool, int, float, tirx.PrimExpr)):
        raise PrimitiveError(f"{name} must be a number, not {describe(value)}")
    integral = dtype.startswith(("int", "uint"))
    given_float = isinstance(value, float) or (
        isinstance(value, tirx.PrimExpr) and not str(value.dtype).startswith(("int", "uint", "bool"))
    )
    if isinstance(value, tirx.PrimExpr) and str(value.dtype) == "handle":
        raise PrimitiveError(f"{name} must be a number, not {describe(value)}")
    if integral and given_float:
        raise PrimitiveError(f"{name} has a floating-point type, but the tensor holds {dtype}; cast it with T.cast")
    value = settled(name, value)
    if integral and (known := constant(value)) is not None:
        bits = tvm.DataType(dtype).bits
        low, high = (0, 2**bits - 1) if dtype.startswith("uint") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        if not low <= known <= high:
            raise PrimitiveError(f"{name} is {known}, which {dtype} cannot hold")
        return tirx.const(known, dtype)
    if not isinstance(value, tirx.PrimExpr):
        return tirx.const(value, dtype)
    return value if str(value.dtype) == dtype else tirx.Cast(dtype, value)


def one_of(name: str, value: Any, allowed: Sequence[str]) -> str:
    """One of `allowed`; raises PrimitiveError that lists them."""
    if value not in allowed:
        raise PrimitiveError(f"{name} is {value!r}; it must be one of {', '.join(repr(a) for a in allowed)}")
    return value


def pe_index(pe: Any) -> tirx.PrimExpr:
    """A PE as an int32 expression; constants must not be negative."""
    return as_integer("pe", pe, "int32", 0, 2**31 - 1)


# -- locations in memory -------------------------------------------------------------------------------------------------

# Operands in memory: a tensor, an element buf[i], a region buf[i, 0:n].
Place: TypeAlias = tirx.Buffer | tirx.BufferLoad | tirx.BufferRegion

_SCOPES = {"shared.dyn": "shared", "local.fragment": "fragment", "local.var": "a register"}


_READ, _WRITE = 1, 2  # access masks of tvm_access_ptr


def scope_of(buffer: tirx.Buffer) -> str:
    """A tensor's memory, in the author's terms: global, shared, fragment, …"""
    return _SCOPES.get(buffer.scope(), buffer.scope())


@dataclass(frozen=True)
class Operand:
    """A location in memory.

    Attributes:
        buffer: the tensor.
        offset: elements from the buffer's data pointer; int or int64 expression.
        extent: elements of the operand; 1 for an element.
        rows: number of contiguous rows; 1 if the whole operand is contiguous.
        row: elements of a row.
        pitch: elements between the beginnings of two rows.
        room: elements from the offset to the end of the tensor; int or int64 expression.
        is_element: whether it was written `buf[i]`, so that `count` alone gives the size.
        inside: condition that its indices are inside the tensor, or None without a check.
        axes: its first index and the tensor's extent, for each axis.
    """

    buffer: tirx.Buffer
    offset: Expr
    extent: Expr
    room: Expr
    is_element: bool
    rows: Expr
    row: Expr
    pitch: Expr
    inside: tirx.PrimExpr | None
    axes: list[tuple[Expr, Expr]]

    @property
    def dtype(self) -> str:
        return str(self.buffer.dtype)

    @property
    def element_bytes(self) -> int:
        return tvm.DataType(self.dtype).bits * tvm.DataType(self.dtype).lanes // 8

    @property
    def is_shared(self) -> bool:
        """Whether it lies in shared memory."""
        return scope_of(self.buffer) == "shared"

    @property
    def limit(self) -> Expr:
        """Elements that a count may reach at most: a region's own extent, else the rest of the tensor."""
        return self.room if self.is_element else self.extent

    def pointer(self) -> tirx.PrimExpr:
        """The address, as an expression that no pass guards or marks read-only.

        For shared memory it states the number of bytes read, from which tilelang derives barriers.
        """
        extent, mask = (int64(self.room), _READ) if self.is_shared else (tirx.IntImm("int32", 1), _READ | _WRITE)
        return tirx.call_intrin(
            "handle",
            "tirx.tvm_access_ptr",
            tirx.type_annotation(self.buffer.dtype),
            self.buffer.data,
            int64(self.offset),
            extent,
            tirx.IntImm("int32", mask),
        )


def _strides(buffer: tirx.Buffer) -> list[Expr]:
    if len(buffer.strides) == len(buffer.shape) and len(buffer.strides):
        return [constant(s) if constant(s) is not None else s for s in buffer.strides]
    return [product(buffer.shape[axis + 1 :]) for axis in range(len(buffer.shape))]


def _rows_of(strides: list[Expr], extents: list[Expr]) -> tuple[Expr, Expr, Expr] | None:
    """Rows, elements of a row and pitch of a box of `extents` inside a tensor; None if one pitch is not enough."""
    run: Expr = 1  # elements of a row
    rows: Expr = 1
    pitch: Expr | None = None
    for extent, stride in reversed(list(zip(extents, strides))):
        if constant(extent) == 1:
            continue
        if pitch is None and provably_equal(stride, run):
            run = product([run, extent])
        elif pitch is None:
            rows, pitch = extent, stride
        elif provably_equal(stride, product([rows, pitch])):
            rows = product([rows, extent])
        else:
            return None
    return rows, run, run if pitch is None else pitch


def _box_of(name: str, value: Any) -> tuple[tirx.Buffer, list[Any], list[Any], bool]:
    """The tensor of `value`, the first index and the extent on each axis, and whether it is an element."""
    if isinstance(value, tirx.Var) and has_let_value(value):
        value = get_let_value(value)
    if isinstance(value, tirx.Buffer):
        return value, [0] * len(value.shape), list(value.shape), False
    region = get_buffer_region_from_load(value) if isinstance(value, tirx.BufferLoad) else value
    if isinstance(region, tirx.BufferRegion):
        return region.buffer, [r.min for r in region.region], [r.extent for r in region.region], False
    if isinstance(value, tirx.BufferLoad):
        return value.buffer, list(value.indices), [1] * len(value.indices), True
    raise PrimitiveError(
        f"{name} must be a tensor, an element such as buf[i] or a region such as buf[i, 0:n], not {describe(value)}"
    )


def operand(
    name: str,
    value: Any,
    is_guarded: bool = False,
    in_rows: bool = False,
    in_shared: bool = False,
    scope: str = "global",
) -> Operand:
    """Resolve the value that an author passed as `name`.

    Args:
        is_guarded: the caller uses the condition `inside`.
        in_rows: it may have rows that are not adjacent.
        in_shared: it may lie in shared memory.
        scope: its memory otherwise; "local" is an array of T.alloc_local.

    Raises:
        PrimitiveError: not a tensor, element or region; not in that memory; not contiguous; outside its tensor; an element
            type without whole bytes.
    """
    buffer, mins, extents, is_element = _box_of(name, value)
    # The guard and the address share an index, which must be the same in both.
    mins = [settled("index", index, loads=is_guarded) for index in mins]
    # The extents of both ends are compared, and give the size.
    extents = [settled("extent", extent, loads=in_rows) for extent in extents]
    actual = scope_of(buffer)
    if scope == "local" and actual != scope:
        raise PrimitiveError(f"{name} ({buffer.name}) lives in {actual}; it must be an array of T.alloc_local")
    if actual != scope and not (in_shared and actual == "shared"):
        raise PrimitiveError(
            f"{name} ({buffer.name}) lives in {actual}; it must be in global {'or shared ' if in_shared else ''}memory, so T.copy it "
            f"to a {'tile in shared memory or a ' if in_shared else ''}symmetric tensor first"
        )
    dtype = tvm.DataType(str(buffer.dtype))
    if dtype.bits * dtype.lanes % 8:
        raise PrimitiveError(f"{name} ({buffer.name}) has dtype {buffer.dtype}, whose elements are not whole bytes")
    for index, size in zip(mins, buffer.shape):
        low, top = constant(index), constant(size)
        if low is not None and (low < 0 or (top is not None and low >= top)):
            raise PrimitiveError(f"{name}: index {low} is outside {buffer.name}, whose extent there is {size}")
    strides = _strides(buffer)
    shape = _rows_of(strides, extents)
    if shape is None or not (in_rows or constant(shape[0]) == 1):
        remedy = "it has rows at more than one pitch; move it in parts" if in_rows else "move it row by row"
        raise PrimitiveError(f"{name} ({buffer.name}{_text(mins, extents)}) is not contiguous in memory; {remedy}")
    rows, row, pitch = shape
    if constant(rows) != 1:
        _require_inside(name, buffer, mins, extents)
    start: Expr = 0
    end: Expr = 1  # one beyond the tensor's last element
    for index, size, stride in zip(mins, buffer.shape, strides):
        start = add(start, product([index, stride]))
        last = constant(size)
        end = add(end, product([last - 1 if last is not None else int64(size) - int64(1), stride]))
    room = constant(int64(end) - int64(start))
    room = room if room is not None else int64(end) - int64(start)
    span = product(extents)
    if isinstance(span, int) and isinstance(room, int) and span > room:
        raise PrimitiveError(f"{name} spans {span} elements, but {buffer.name} holds {room} from there on")
    offset = add(start, 0 if constant(buffer.elem_offset) == 0 else buffer.elem_offset)
    axes = list(zip(mins, buffer.shape))
    return Operand(buffer, offset, span, room, is_element, rows, row, pitch, _inside(axes), axes)


def _require_inside(name: str, buffer: tirx.Buffer, mins: list[Any], extents: list[Any]) -> None:
    """Raise PrimitiveError for a box that leaves its tensor on one axis, even if its rows stay within the memory."""
    for index, extent, size in zip(mins, extents, buffer.shape):
        first, length, room = (constant(v) for v in (index, extent, size))
        if first is not None and length is not None and room is not None and first + length > room:
            raise PrimitiveError(
                f"{name} ({buffer.name}{_text(mins, extents)}) ends at {first + length} on an axis of {size}"
            )


def _inside(axes: list[tuple[Expr, Expr]]) -> tirx.PrimExpr | None:
    conditions = []
    for index, size in axes:
        if constant(index) is None or constant(size) is None:
            conditions += [int64(index) >= int64(0), int64(index) < int64(size)]
    return tirx.all(*conditions) if conditions else None


def _text(mins: list[Expr], extents: list[Expr]) -> str:
    return "[" + ", ".join(f"{m}:{m}+{e}" if constant(e) != 1 else f"{m}" for m, e in zip(mins, extents)) + "]"


def signal_word(sig: Place) -> Operand:
    """A signal: one 64-bit integer word in global memory."""
    word = operand("sig", sig)
    if word.dtype not in ("uint64", "int64"):
        raise PrimitiveError(f"sig ({word.buffer.name}) has dtype {word.dtype}; signals are uint64 or int64 words")
    return _one("sig", word, "words")


def element(name: str, value: Any) -> Operand:
    """A location that one access reads or writes, under its condition `inside`. Raises PrimitiveError as `operand`, and for more
    than one element."""
    return _one(name, operand(name, value, is_guarded=True), "elements")


def _one(name: str, place: Operand, unit: str) -> Operand:
    if not place.is_element and constant(place.extent) != 1:
        raise PrimitiveError(
            f"{name} names {place.extent} {unit} of {place.buffer.name}; name one, such as {place.buffer.name}[0]"
        )
    return place


# -- copies -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """A checked copy between two locations.

    Attributes:
        form: "" between contiguous locations in global memory, "shared" from a tile, "rows" between rows that are not
            adjacent.
        arguments: destination and source pointer; its bytes, or rows, bytes of a row and both pitches (int64); PE (int32).
        nbytes: its size, if known when the kernel is built.
    """

    form: str
    arguments: tuple[tirx.PrimExpr, ...]
    nbytes: int | None

    @classmethod
    def of(cls, primitive: str, dst: Place, src: Place, pe: Number, count: Number | None, pushes: bool) -> Transfer:
        """The copy of `primitive`; the source of a push may lie in shared memory.

        Raises:
            PrimitiveError: mismatched types, a count or extents that the tensors cannot hold, a count besides rows,
                locations that differ in their rows, and errors of `operand`.
        """
        to, source = operand("dst", dst, in_rows=True), operand("src", src, in_rows=True, in_shared=pushes)
        if to.dtype != source.dtype:
            raise PrimitiveError(
                f"dst ({to.buffer.name}) has dtype {to.dtype}, src ({source.buffer.name}) has {source.dtype}"
            )
        ends = _Ends(primitive, to, source)
        boxes = [place for place in (to, source) if constant(place.rows) != 1]
        sizes = ends.rows(boxes, count) if boxes else (ends.nbytes(ends.elements(count), "count"),)
        form = "rows" if boxes else "shared" if source.is_shared else ""
        arguments = (to.pointer(), source.pointer(), *sizes, pe_index(pe))
        return cls(form, arguments, None if boxes else constant(sizes[0]))


class _Ends(NamedTuple):
    """The two ends of a copy by `primitive`, and their common size."""

    primitive: str
    to: Operand
    source: Operand

    def nbytes(self, elements: Expr, name: str) -> tirx.PrimExpr:
        known = constant(elements)
        elements = known if known is not None else int64(elements)
        return as_integer(name, elements * self.to.element_bytes, "int64")

    def agreed(
        self, extent: str, left: Expr, right: Expr, values: tuple[tirx.PrimExpr, tirx.PrimExpr] | None = None
    ) -> Expr:
        """The extent of both ends: if they may differ at run time, the simulator reports a difference, and GPUs move
        the elements inside both.

        Args:
            extent: the compared quantity, with {} for the number.
            left, right: its values for `to` and `source`.
            values: sizes to copy if both are equal, and if they may not be; default `left`, and the smaller one.
        """
        if provably_equal(left, right):
            return left
        one, other = (as_integer("extent", end, "int64") for end in (left, right))
        value, smallest = values or (one, tirx.min(one, other))
        dst, src = self.to.buffer.name, self.source.buffer.name
        text = f"{self.primitive}: dst ({dst}) {extent}, src ({src}) {{}}; make them equal"
        return agreed_value(value, smallest, one == other, text, one, other)

    def elements(self, count: Number | None) -> Expr:
        """Number of elements to copy between contiguous locations."""
        to, source = self.to, self.source
        if count is None:
            whole = [place for place in (source, to) if not place.is_element]
            if len(whole) == 2:
                if _differ(to.extent, source.extent):
                    raise PrimitiveError(
                        f"dst ({to.buffer.name}) spans {to.extent} elements, src ({source.buffer.name}) {source.extent}; "
                        "make them equal or give count="
                    )
                return as_integer("count", self.agreed("spans {} elements", to.extent, source.extent), "int64", 0)
            count = whole[0].extent if whole else 1
        result = length = as_integer("count", count, "int64", 0)
        for name, place in (("dst", to), ("src", source)):
            known, limit = constant(length), constant(place.limit)
            if known is not None and limit is not None and known > limit:
                raise PrimitiveError(
                    f"count is {known}, but {name} ({place.buffer.name}) holds {limit} elements from there on"
                )
            room = as_integer("room", place.limit, "int64")
            if (known is None or limit is None) and provably(length > room):
                raise PrimitiveError(f"count is {count}, but {name} ({place.buffer.name}) holds {place.limit} elements")
            if not place.is_element and not provably(length <= room):
                text = f"{self.primitive}: count is {{}}, but {name} ({place.buffer.name}) holds {{}} elements"
                result = agreed_value(result, tirx.min(result, room), length <= room, text, length, room)
        return result

    def rows(self, boxes: list[Operand], count: Number | None) -> tuple[tirx.PrimExpr, ...]:
        """Number of rows, bytes of a row, and pitch at each end in bytes, if at least one end has rows."""
        to, source, box = self.to, self.source, boxes[0]
        if source.is_shared:
            raise PrimitiveError(f"src ({source.buffer.name}) is in shared memory; put it row by row")
        if count is not None:
            raise PrimitiveError(
                f"count= belongs to contiguous memory; {box.buffer.name} is a strided region, which determines the size"
            )
        rows, row = box.rows, box.row
        if len(boxes) == 1:
            rows = self._rows_beside(box, source if box is to else to)
        elif _differ(to.rows, source.rows) or _differ(to.row, source.row):
            raise PrimitiveError(
                f"dst has {to.rows} rows of {to.row} elements, src {source.rows} of {source.row}; make them equal"
            )
        else:
            rows = self.agreed("has {} rows", to.rows, source.rows)
            row = self.agreed("has rows of {} elements", to.row, source.row)
        pitches = [box.row if constant(place.rows) == 1 else place.pitch for place in (to, source)]
        return as_integer("rows", rows, "int64"), *(self.nbytes(elements, "rows") for elements in (row, *pitches))

    def _rows_beside(self, box: Operand, flat: Operand) -> Expr:
        """Rows of `box` copied from or to the contiguous `flat`: all, if both have as many elements."""
        known, limit = constant(box.extent), constant(flat.limit)
        if known is not None and limit is not None and (known > limit or (known < limit and not flat.is_element)):
            name = "dst" if flat is self.to else "src"
            raise PrimitiveError(
                f"{name} ({flat.buffer.name}) spans {limit} elements, the other end {known}; make them equal"
            )
        if flat.is_element or provably_equal(flat.extent, box.extent):
            return box.rows
        fitting = tirx.truncdiv(int64(flat.extent), tirx.max(int64(box.row), int64(1)))
        values = int64(box.rows), tirx.min(int64(box.rows), fitting)
        return self.agreed("spans {} elements", self.to.extent, self.source.extent, values)


def _differ(a: Expr, b: Expr) -> bool:
    """Whether two extents are known to differ when the kernel is built."""
    if constant(a) is not None and constant(b) is not None:
        return constant(a) != constant(b)
    return provably(int64(a) != int64(b))
