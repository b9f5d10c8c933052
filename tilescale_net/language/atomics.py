"""Atomics on a peer's memory; one whose index is outside its tensor changes nothing, and gives 0."""

from tvm import tirx

from tilescale_net.compiler.operators import OPERATORS
from tilescale_net.language._operands import Place, element
from tilescale_net.language._primitive import PrimitiveError, guarded, primitive
from tilescale_net.language._values import Number, Scalar, pe_index, scalar

__all__ = [
    "atomic_add", "atomic_and", "atomic_cas", "atomic_exch", "atomic_max", "atomic_min", "atomic_or", "atomic_xor",
]  # fmt: skip

_INTEGERS: tuple[str, ...] = ("int32", "uint32", "int64", "uint64")
# dtypes that the hardware's system-scope atomics take, by operation.
ATOMIC_DTYPES = dict.fromkeys(("and", "or", "xor", "min", "max", "cas"), _INTEGERS) | dict.fromkeys(
    ("add", "exch"), (*_INTEGERS, "float32", "float64")
)


def _target(op, dst):
    to = element("dst", dst)
    if to.dtype not in ATOMIC_DTYPES[op]:
        raise PrimitiveError(
            f"dst ({to.buffer.name}) has dtype {to.dtype}; atomic_{op} takes {', '.join(ATOMIC_DTYPES[op])}"
        )
    return to


def _atomic(op, dst, value, pe):
    to = _target(op, dst)
    call = OPERATORS["atomic"](op, to.pointer(), scalar("value", value, to.dtype), pe_index(pe), dtype=to.dtype)
    return guarded(to, call)


@primitive
def atomic_add(dst: Place, value: Scalar, pe: Number) -> tirx.PrimExpr:
    """Add to an element of `pe`'s memory, relaxed at system scope; called by one thread.

    Args:
        dst: element of symmetric memory, by its local address; int32, uint32, int64, uint64, float32 or float64.
        value: converted to dst's dtype.
        pe: index in team "world".

    Returns:
        The old value. Direct path only; for PEs of other nodes use `signal(op="add")`.
    """
    return _atomic("add", dst, value, pe)


@primitive
def atomic_and(dst: Place, value: Scalar, pe: Number) -> tirx.PrimExpr:
    """Bitwise and; integers only, otherwise as `atomic_add`."""
    return _atomic("and", dst, value, pe)


@primitive
def atomic_or(dst: Place, value: Scalar, pe: Number) -> tirx.PrimExpr:
    """Bitwise or; integers only, otherwise as `atomic_add`."""
    return _atomic("or", dst, value, pe)


@primitive
def atomic_xor(dst: Place, value: Scalar, pe: Number) -> tirx.PrimExpr:
    """Bitwise exclusive or; integers only, otherwise as `atomic_add`."""
    return _atomic("xor", dst, value, pe)


@primitive
def atomic_min(dst: Place, value: Scalar, pe: Number) -> tirx.PrimExpr:
    """Minimum; integers only, otherwise as `atomic_add`."""
    return _atomic("min", dst, value, pe)


@primitive
def atomic_max(dst: Place, value: Scalar, pe: Number) -> tirx.PrimExpr:
    """Maximum; integers only, otherwise as `atomic_add`."""
    return _atomic("max", dst, value, pe)


@primitive
def atomic_exch(dst: Place, value: Scalar, pe: Number) -> tirx.PrimExpr:
    """Exchange, otherwise as `atomic_add`."""
    return _atomic("exch", dst, value, pe)


@primitive
def atomic_cas(dst: Place, compare: Scalar, value: Scalar, pe: Number) -> tirx.PrimExpr:
    """Store `value` if the element equals `compare`; integers only, otherwise as `atomic_add`."""
    to = _target("cas", dst)
    expected, desired = scalar("compare", compare, to.dtype), scalar("value", value, to.dtype)
    call = OPERATORS["atomic_cas"](to.pointer(), expected, desired, pe_index(pe), dtype=to.dtype)
    return guarded(to, call)
