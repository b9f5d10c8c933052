"""Numbers as primitives accept them: arithmetic in 64 bits, and checks of integers, values and choices."""

import math
from typing import TypeAlias

from tilelang import tvm
from tilelang.language.eager.builder import unwrap_expr
from tilelang.language.frame import get_let_value, has_let_value
from tvm import tirx

from tilescale_net.language._primitive import PrimitiveError
from tilescale_net.language._results import settled

Expr: TypeAlias = tirx.PrimExpr | int
# What a primitive takes as an integer, and as a value to store.
Number: TypeAlias = Expr
Scalar: TypeAlias = tirx.PrimExpr | int | float


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
