"""What tells arguments apart that Python calls equal: 1, 1.0 and True, 0.0 and -0.0, and what holds such."""

import dataclasses
import struct
from collections.abc import Hashable

_PLAIN = frozenset((int, str, bool, type(None)))


def identities(values: tuple) -> Hashable:
    """As `identity` of the tuple, and quick where nothing in it holds other values."""
    kinds = tuple(map(type, values))
    return kinds, values if _PLAIN.issuperset(kinds) else tuple(map(identity, values))


def identity(value) -> Hashable:
    """A key that two values have in common where they are equal and of the same types at all depths, floats by their bits.

    It looks into tuples, frozensets and dataclasses that are compared by their fields. Raises TypeError for what is not
    hashable.
    """
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, float):
        return kind, struct.pack("<d", value)
    if isinstance(value, complex):
        return kind, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, tuple):
        return (kind, *map(identity, value))
    if isinstance(value, frozenset):
        return kind, frozenset(map(identity, value))
    if kind.__module__ == "numpy" and hasattr(value, "tobytes") and not value.shape:
        return kind, value.dtype.str, value.tobytes()
    hash(value)
    if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.eq:  # type: ignore[attr-defined]
        return (kind, *(identity(getattr(value, field.name)) for field in dataclasses.fields(kind) if field.compare))
    return kind, value
