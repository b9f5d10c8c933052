"""Single accesses: loads and stores with order and scope, atomics on a peer's memory, views of mapped memory.

As in tilelang, an access whose index is outside its tensor vanishes: it stores nothing, and a load or an atomic returns 0.
"""

import tilelang.language as T
from tvm import tirx

from tilescale_net.compiler.operators import OPERATORS
from tilescale_net.language._operands import (
    Number,
    Operand,
    Place,
    Scalar,
    element,
    int64,
    one_of,
    operand,
    pe_index,
    product,
    scalar,
)
from tilescale_net.language._trace import PrimitiveError, as_typed, guarded, primitive

__all__ = [
    "atomic_add", "atomic_and", "atomic_cas", "atomic_exch", "atomic_max", "atomic_min", "atomic_or", "atomic_xor",
    "benign_race", "ld", "remote", "st",
]  # fmt: skip

LOAD_ORDERS = ("weak", "relaxed", "acquire", "volatile")
STORE_ORDERS = ("weak", "relaxed", "release", "volatile")
MEMORY_SCOPES = ("cta", "gpu", "sys")


@primitive
def remote(buf: tirx.Buffer, pe: Number) -> tirx.Buffer:
    """A tensor view of `buf` on `pe`, for T.copy, T.Parallel and plain indexing. Direct path only.

    Args:
        buf: a symmetric tensor (whole; not an element or region).
        pe: a PE whose memory is mapped; for any other the host raises KernelError.

    Returns:
        A tensor of buf's shape, dtype and strides. Writes through it are ordered like puts.

    Example: T.copy(N.remote(x, pe)[row, 0], shared)  # loads over NVLink
    """
    if not isinstance(buf, tirx.Buffer):
        raise PrimitiveError(f"buf must be a whole tensor; index the view instead of {operand('buf', buf).buffer.name}")
    # Its first element: a whole tensor with a pitch is no contiguous place with an address.
    place = operand("buf", tirx.BufferLoad(buf, [0] * len(buf.shape)) if len(buf.shape) else buf)
    address = as_typed(OPERATORS["remote"](place.pointer(), pe_index(pe)))
    strides = tuple(place.buffer.strides) or None
    return T.make_tensor_from_addr(address, tuple(place.buffer.shape), place.dtype, strides)


def _accessible(name: str, value: Place) -> Operand:
    place = element(name, value)
    if place.element_bytes not in (1, 2, 4, 8):
        raise PrimitiveError(
            f"{name} ({place.buffer.name}) has dtype {place.dtype}; one access moves 1, 2, 4 or 8 bytes"
        )
    return place


@primitive
def ld(src: Place, sem: str = "relaxed", scope: str = "sys") -> tirx.PrimExpr:
    """Load one element with explicit order and scope.

    Args:
        src: element of a tensor in global memory (also of a `remote` view).
        sem: "weak", "relaxed", "acquire" or "volatile".
        scope: "cta", "gpu" or "sys": the threads to which the order applies.

    Returns:
        The value, of src's dtype. The load never uses the non-coherent cache and is never merged with another load.

    Example: value = N.ld(flag[0], sem="acquire", scope="gpu")
    """
    place = _accessible("src", src)
    order = one_of("sem", sem, LOAD_ORDERS)
    call = OPERATORS["ld"](order, one_of("scope", scope, MEMORY_SCOPES), place.pointer(), dtype=place.dtype)
    return guarded(place, call)


@primitive
def st(dst: Place, value: Scalar, sem: str = "relaxed", scope: str = "sys") -> None:
    """Store one element with explicit order and scope.

    Args:
        dst: element of a tensor in global memory (also of a `remote` view).
        value: converted to dst's dtype.
        sem: "weak", "relaxed", "release" or "volatile".
        scope: "cta", "gpu" or "sys".

    Example: N.st(flag[0], call, sem="release")
    """
    place = _accessible("dst", dst)
    order = one_of("sem", sem, STORE_ORDERS)
    memory_scope = one_of("scope", scope, MEMORY_SCOPES)
    call = OPERATORS["st"](order, memory_scope, place.pointer(), scalar("value", value, place.dtype))
    return guarded(place, call)  # type: ignore[return-value] # it is for the tracer alone


@primitive
def benign_race(place: Place) -> None:
    """Declare that accesses to a location race on purpose; called by any threads, before the accesses.

    Args:
        place: a tensor, an element or a region of symmetric memory.

    Until the kernel ends, the simulator reports no `DataRace` there, at this PE or at the same offset of others. It orders
    nothing, and is no instruction on a GPU.

    Example: N.benign_race(counter)
    """
    location = operand("place", place)
    return OPERATORS["benign_race"](location.pointer(), int64(product([location.extent, location.element_bytes])))


# -- atomics ----------------------------------------------------------------------------------------------------------

_INTEGERS: tuple[str, ...] = ("int32", "uint32", "int64", "uint64")
# dtypes of the hardware's system-scope atomics, by operation.
ATOMIC_DTYPES = dict.fromkeys(("and", "or", "xor", "min", "max", "cas"), _INTEGERS) | dict.fromkeys(
    ("add", "exch"), (*_INTEGERS, "float32", "float64")
)


def _target(op: str, dst: Place) -> Operand:
    to = element("dst", dst)
    if to.dtype not in ATOMIC_DTYPES[op]:
        raise PrimitiveError(
            f"dst ({to.buffer.name}) has dtype {to.dtype}; atomic_{op} takes {', '.join(ATOMIC_DTYPES[op])}"
        )
    return to


def _atomic(op: str, dst: Place, value: Scalar, pe: Number) -> tirx.PrimExpr:
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

    Example: old = N.atomic_add(counter[0], 1, pe)
    """
    return _atomic("add", dst, value, pe)


@primitive
def atomic_and(dst: Place, value: Scalar, pe: Number) -> tirx.PrimExpr:
    """Bitwise and; integers only, otherwise as `atomic_add`.

    Example: old = N.atomic_and(counter[0], 7, pe)
    """
    return _atomic("and", dst, value, pe)


@primitive
def atomic_or(dst: Place, value: Scalar, pe: Number) -> tirx.PrimExpr:
    """Bitwise or; integers only, otherwise as `atomic_add`.

    Example: old = N.atomic_or(counter[0], 1, pe)
    """
    return _atomic("or", dst, value, pe)


@primitive
def atomic_xor(dst: Place, value: Scalar, pe: Number) -> tirx.PrimExpr:
    """Bitwise exclusive or; integers only, otherwise as `atomic_add`.

    Example: old = N.atomic_xor(counter[0], 1, pe)
    """
    return _atomic("xor", dst, value, pe)


@primitive
def atomic_min(dst: Place, value: Scalar, pe: Number) -> tirx.PrimExpr:
    """Minimum; integers only, otherwise as `atomic_add`.

    Example: old = N.atomic_min(counter[0], 3, pe)
    """
    return _atomic("min", dst, value, pe)


@primitive
def atomic_max(dst: Place, value: Scalar, pe: Number) -> tirx.PrimExpr:
    """Maximum; integers only, otherwise as `atomic_add`.

    Example: old = N.atomic_max(counter[0], 3, pe)
    """
    return _atomic("max", dst, value, pe)


@primitive
def atomic_exch(dst: Place, value: Scalar, pe: Number) -> tirx.PrimExpr:
    """Exchange, otherwise as `atomic_add`.

    Example: old = N.atomic_exch(counter[0], 0, pe)
    """
    return _atomic("exch", dst, value, pe)


@primitive
def atomic_cas(dst: Place, compare: Scalar, value: Scalar, pe: Number) -> tirx.PrimExpr:
    """Store `value` if the element equals `compare`; integers only, otherwise as `atomic_add`.

    Args:
        compare: converted to dst's dtype.

    Example: old = N.atomic_cas(counter[0], 0, 1, pe)  # 0 becomes 1
    """
    to = _target("cas", dst)
    expected, desired = scalar("compare", compare, to.dtype), scalar("value", value, to.dtype)
    call = OPERATORS["atomic_cas"](to.pointer(), expected, desired, pe_index(pe), dtype=to.dtype)
    return guarded(to, call)
