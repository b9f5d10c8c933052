"""Values that settings take: how the text of an environment variable becomes one of them, and its errors."""

import math
import os
import shlex
from collections.abc import Callable

from tilescale_net.errors import ConfigurationError, FabricError


def text(value: str, name: str) -> str:
    """Any text."""
    return value


def chaos(value: str, name: str) -> str:
    """What csrc/fabric/chaos_options.cpp takes; any text where the native part is not built, and so no network either."""
    try:
        from tilescale_net import _native
    except ImportError:
        return value
    try:
        if value != "off":
            _native.parse_chaos(value)
    except FabricError as err:
        raise ConfigurationError(f"{name}={value!r}: {str(err).removeprefix('chaos: ')}") from None
    return value


def new_file(value: str, name: str) -> str:
    """Path of a file that can be written."""
    folder = os.path.dirname(os.path.abspath(value))
    if not os.path.isdir(folder):
        raise ConfigurationError(f"{name}={value}: there is no folder {folder}")
    if os.path.isdir(value) or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(f"{name}={value}: no file can be written there")
    return value


def words(value: str, name: str) -> list[str]:
    """Words as a shell splits them."""
    try:
        return shlex.split(value)
    except ValueError as err:
        raise ConfigurationError(f"{name}={value!r} cannot be split into words ({err})") from None


def number(minimum: float, maximum: float = 1e9) -> Callable[[str, str], float]:
    """A number within limits."""

    def parse(value: str, name: str) -> float:
        try:
            found = float(value)
        except ValueError:
            raise ConfigurationError(f"{name}={value!r} is not a number") from None
        if not math.isfinite(found):
            raise ConfigurationError(f"{name}={value!r} is not a finite number")
        if found < minimum:
            raise ConfigurationError(f"{name}={value} is below the minimum of {minimum:g}")
        if found > maximum:
            raise ConfigurationError(f"{name}={value} is above the maximum of {maximum:g}")
        return found

    return parse


def whole(minimum: int, maximum: int = 1 << 53) -> Callable[[str, str], int]:
    """A whole number within limits."""
    within = number(minimum, maximum)

    def parse(value: str, name: str) -> int:
        try:
            found = int(value)
        except ValueError:
            raise ConfigurationError(f"{name}={value!r} is not a whole number") from None
        within(value, name)
        return found

    return parse


def power_of_two(minimum: int) -> Callable[[str, str], int]:
    """A power of two."""
    at_least = whole(minimum)

    def parse(value: str, name: str) -> int:
        found = at_least(value, name)
        if found & (found - 1):
            raise ConfigurationError(
                f"{name}={value} is not a power of two; write {1 << found.bit_length()} for example"
            )
        return found

    return parse


def one_of(*names: str) -> Callable[[str, str], str]:
    """One of some words, in either case."""

    def parse(value: str, name: str) -> str:
        if value.lower() not in names:
            raise ConfigurationError(f"{name}={value!r} is not one of {', '.join(names)}")
        return value.lower()

    return parse


def flag(value: str, name: str) -> bool:
    """0 or 1."""
    if value not in ("0", "1"):
        raise ConfigurationError(f"{name}={value!r} is neither 0 nor 1")
    return value == "1"
