"""Numbers as primitives accept them: checks of integers, values and choices."""

from typing import TypeAlias

from tilelang import tvm
from tilelang.language.eager.builder import unwrap_expr
from tvm import tirx

from tilescale_net.language._arithmetic import Expr, constant, int64
from tilescale_net.language._primitive import PrimitiveError
from tilescale_net.language._results import settled

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
