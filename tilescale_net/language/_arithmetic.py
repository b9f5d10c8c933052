"""Arithmetic in 64 bits on integers, be they constants or expressions, and what can be proved of them."""

import math
from typing import TypeAlias

from tilelang import tvm
from tilelang.language.frame import get_let_value, has_let_value
from tvm import tirx

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
