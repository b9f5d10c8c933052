"""One environment variable: its name, how its text is read, and its errors."""

import difflib
import math
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tilescale_net.errors import ConfigurationError

T = TypeVar("T")
_CPUS = 1 << 16  # more than any machine has
MOST_BYTES = 1 << 60  # more than any memory holds
SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Setting(Generic[T]):
    """A row of the table of settings.

    Attributes:
        name: of the environment variable.
        parse: (text, name) -> value; raises ConfigurationError that names the variable.
        default: the value where the variable is absent or empty.
        meaning: one line of markdown for docs/settings.md.
        shown: the default as the page shows it.
    """

    name: str
    parse: Callable[[str, str], T]
    default: T
    meaning: str
    shown: str = ""

    def get(self) -> T:
        """The value in force. Raises ConfigurationError when the variable's text is not one of its values."""
        text = os.environ.get(self.name, "").strip()
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            raise ConfigurationError(f"{self.name}={text!r} is not text in UTF-8")
        return self.parse(text, self.name) if text else self.default


def size_of(text: str) -> float:
    """Bytes from text such as `4096`, `64M` or `1.5GiB` (powers of two). Raises ValueError for what is no size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a size; write bytes with an optional K, M, G or T, e.g. 512M")
    return float(match.group(1)) * SUFFIXES[match.group(2).upper()]


def parse_bytes(text: str, name: str) -> int:
    """Bytes from text such as `4096`, `64M` or `1.5G` (powers of two). Raises ConfigurationError that names `name`."""
    try:
        found = size_of(text)
    except ValueError as err:
        raise ConfigurationError(f"{name}={err}") from None
    if found > MOST_BYTES:
        raise ConfigurationError(f"{name}={text!r} is more than any memory holds")
    return int(found)


def text(value: str, name: str) -> str:
    """Any text."""
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


# Of libfabric 1.17 to 2.x. A utility provider stands behind the one that it builds on: `tcp;ofi_rxm`.
PROVIDERS = (
    *("bgq", "cxi", "efa", "efa-direct", "gni", "lnx", "lpp", "net", "opx", "psm", "psm2", "psm3", "rstream", "shm"),
    *("sm2", "sockets", "tcp", "ucx", "udp", "usnic", "verbs"),
    *("ofi_rxm", "ofi_rxd", "ofi_mrail"),
)


# Transports that are not libfabric's, by the names that csrc/fabric/factory.cpp has for them.
OWN_TRANSPORTS: tuple[str, ...] = ()


def provider(value: str, name: str) -> str:
    """Name of a libfabric provider, or of a transport of our own.

    Whether the libfabric at hand offers it is seen when a network is requested.

    Any name is taken where FI_PROVIDER_PATH gives libfabric further ones.
    """
    for part in value.split(";"):
        if part.lower() not in (*PROVIDERS, *OWN_TRANSPORTS) and not os.environ.get("FI_PROVIDER_PATH"):
            near = difflib.get_close_matches(part.lower(), PROVIDERS, n=1)
            advice = f"; did you mean {near[0]}?" if near else ""
            raise ConfigurationError(f"{name}={value!r}: libfabric has no provider {part!r}{advice}")
    return value


def cpus(value: str, name: str) -> str | list[int]:
    """CPUs such as `2,3` or `4-7`, or the word `node`."""
    if value == "node":
        return value
    return cpu_list(value, name)


def cpu_list(value: str, name: str) -> list[int]:
    """CPUs as Linux writes them: `2,3`, `4-7`."""
    found: list[int] = []
    try:
        for part in value.split(","):
            first, _, last = part.partition("-")
            some = range(int(first), int(last or first) + 1)
            if not some or some[-1] >= _CPUS:
                raise ValueError
            found += some
    except ValueError:
        raise ConfigurationError(f"{name}={value!r} is not a list such as 2,3 or 4-7") from None
    return found
