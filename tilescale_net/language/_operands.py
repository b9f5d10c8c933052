"""What primitives accept, as expressions: integers and values to store, tensors, elements and regions.

A place in memory is a tensor `buf`, an element `buf[i]` (the address of that element), or a region `buf[i, 0:n]`. It
becomes a base pointer plus an offset in elements, computed in 64 bits.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

from tilelang import tvm
from tilelang.language.eager.builder import unwrap_expr
from tilelang.language.frame import get_let_value, has_let_value
from tilelang.language.utils import get_buffer_region_from_load
from tvm import tirx

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
    """Whether an expression is arithmetic on variables and constants only, so that it may be evaluated again."""
    if isinstance(value, _ARITHMETIC):
        return _plain(value.a) and _plain(value.b)
    return isinstance(value, (tirx.Var, tirx.IntImm))


def int64(value: Expr) -> tirx.PrimExpr:
    """`value` computed in 64 bits throughout: not the 64-bit copy of a 32-bit product that has overflowed.

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


def product(values) -> Expr:
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


def provably(condition) -> bool:
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

# What a primitive takes as an integer, and as a value to store.
Number: TypeAlias = Expr
Scalar: TypeAlias = tirx.PrimExpr | int | float


def describe(value) -> str:
    if isinstance(value, tirx.PrimExpr):
        return f"the expression {value} of type {value.dtype}"
    return f"{value!r} ({type(value).__name__})"


def as_integer(name: str, value, dtype: str, low: int | None = None, high: int | None = None) -> tirx.PrimExpr:
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


def scalar(name: str, value, dtype: str) -> tirx.PrimExpr:
    """A value to store, converted to `dtype`. Raises PrimitiveError when it is no number or of a kind that would lose sense."""
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


def one_of(name: str, value, allowed) -> str:
    """One of `allowed`; raises PrimitiveError that lists them."""
    if value not in allowed:
        raise PrimitiveError(f"{name} is {value!r}; it must be one of {', '.join(repr(a) for a in allowed)}")
    return value


def pe_index(pe) -> tirx.PrimExpr:
    """A PE as an int32 expression; constants must not be negative."""
    return as_integer("pe", pe, "int32", 0, 2**31 - 1)


# -- places in memory -------------------------------------------------------------------------------------------------

# What a primitive takes as a place in memory: a tensor, an element buf[i], a region buf[i, 0:n].
Place = tirx.Buffer | tirx.BufferLoad | tirx.BufferRegion

_SCOPES = {"shared.dyn": "shared", "local.fragment": "fragment", "local.var": "a register"}


_READ, _WRITE = 1, 2  # access masks of tvm_access_ptr


def scope_of(buffer: tirx.Buffer) -> str:
    """Where a tensor lives, in an author's words: global, shared, fragment, …"""
    return _SCOPES.get(buffer.scope(), buffer.scope())


@dataclass(frozen=True)
class Operand:
    """A place in memory.

    Attributes:
        buffer: the tensor.
        offset: elements from the buffer's data pointer; int or int64 expression.
        extent: elements that the operand names; 1 for an element.
        rows: how many contiguous rows it is made of; 1 where all of it is contiguous.
        row: elements of a row.
        pitch: elements from the beginning of a row to that of the next.
        room: elements from the offset to the end of the tensor; int or int64 expression.
        is_element: whether it was written `buf[i]`, so that `count` alone gives the size.
        inside: condition that its indices are inside the tensor, or None when nothing is to be checked.
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

    def pointer(self) -> tirx.PrimExpr:
        """The address, as an expression that passes neither guard nor mark read-only.

        Of shared memory it states how much is read, from which tilelang derives where barriers must be.
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
    """Rows, elements of a row and pitch of a box of `extents` inside a tensor; None where one pitch is not enough."""
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


def _box_of(name: str, value) -> tuple[tirx.Buffer, list, list, bool]:
    """The tensor that `value` names, the first index and the extent on each axis, and whether it is an element."""
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


def operand(name: str, value, is_guarded: bool = False, in_rows: bool = False, in_shared: bool = False) -> Operand:
    """Resolve what an author passed as `name`.

    Args:
        is_guarded: the condition `inside` will be used.
        in_rows: it may be made of rows that lie apart.
        in_shared: it may lie in shared memory.

    Raises:
        PrimitiveError: not a tensor, element or region; not in global memory; not contiguous; outside its tensor; an element
            type without whole bytes.
    """
    buffer, mins, extents, is_element = _box_of(name, value)
    # An index stands in the guard and in the address, and must be the same in both.
    mins = [settled("index", index, loads=is_guarded) for index in mins]
    # An extent is compared with that of the other end, and is the size.
    extents = [settled("extent", extent, loads=in_rows) for extent in extents]
    scope = scope_of(buffer)
    if scope != "global" and not (in_shared and scope == "shared"):
        raise PrimitiveError(
            f"{name} ({buffer.name}) lives in {scope}; it must be in global {'or shared ' if in_shared else ''}memory, so T.copy it "
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


def _require_inside(name: str, buffer: tirx.Buffer, mins: list, extents: list) -> None:
    """Raise PrimitiveError for a box that leaves its tensor on one axis, where its other rows would still be inside."""
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


def _text(mins, extents) -> str:
    return "[" + ", ".join(f"{m}:{m}+{e}" if constant(e) != 1 else f"{m}" for m, e in zip(mins, extents)) + "]"


def signal_word(sig) -> Operand:
    """A signal: one 64-bit integer word in global memory."""
    word = operand("sig", sig)
    if word.dtype not in ("uint64", "int64"):
        raise PrimitiveError(f"sig ({word.buffer.name}) has dtype {word.dtype}; signals are uint64 or int64 words")
    return _one("sig", word, "words")


def element(name: str, value) -> Operand:
    """A place that one access reads or writes, under its condition `inside`. Raises PrimitiveError as `operand`, and for more
    than one element."""
    return _one(name, operand(name, value, is_guarded=True), "elements")


def _one(name: str, place: Operand, what: str) -> Operand:
    if not place.is_element and constant(place.extent) != 1:
        raise PrimitiveError(
            f"{name} names {place.extent} {what} of {place.buffer.name}; name one, such as {place.buffer.name}[0]"
        )
    return place
