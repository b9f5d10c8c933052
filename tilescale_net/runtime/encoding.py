"""Values that ranks send each other, as JSON: reading what came from outside makes data and nothing else."""

import base64
import binascii
import json
import reprlib

_BYTES = "\0bytes"  # the one key of an object that stands for bytes


def encode(value: object) -> bytes:
    """Bytes of None, a bool, int, float, str, bytes, list, tuple or dict with str keys, nested at will.

    Raises:
        TypeError: a value of another type.
    """
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def decode(data: bytes) -> object:
    """The value that `encode` was given, tuples as lists. Raises ValueError for anything else."""
    return parsed(data, _object)


def parsed(data: bytes | str, object_hook=None):
    """The value of JSON that came from outside. Raises ValueError for invalid text, however deep it nests."""
    try:
        return json.loads(data.decode() if isinstance(data, bytes) else data, object_hook=object_hook)
    except (UnicodeDecodeError, RecursionError) as err:
        raise ValueError(f"not a value that a rank has sent: {err}") from None


def printable(text: str) -> str:
    """What another process has said, without what would steer a terminal; lines and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def _plain(value):
    if isinstance(value, bytes | bytearray):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key == _BYTES:
                raise TypeError(f"a dict with the key {key!r} cannot be sent to other ranks")
        return {k: _plain(v) for k, v in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be sent to other ranks")


def _object(fields: dict):
    if list(fields) != [_BYTES]:
        return fields
    try:
        return base64.b64decode(fields[_BYTES], validate=True)
    except (TypeError, binascii.Error) as err:
        raise ValueError(f"not bytes that a rank has sent: {err}") from None


def check_alike(mine: object, theirs: object) -> None:
    """Raise ValueError unless a value of another rank has the types of this rank's own, and numbers of 64 bits."""
    if isinstance(mine, list | tuple):
        if not isinstance(theirs, list) or len(theirs) != len(mine):
            raise ValueError(f"{reprlib.repr(theirs)} in the place of {len(mine)} values")
        for a, b in zip(mine, theirs):
            check_alike(a, b)
    elif type(mine) is not type(theirs):
        raise ValueError(f"a {type(theirs).__name__} in the place of a {type(mine).__name__}")
    elif isinstance(theirs, int) and not -(1 << 63) <= theirs < 1 << 64:
        raise ValueError("a number of more than 64 bits")
