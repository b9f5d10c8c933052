"""One environment variable, and sizes in bytes, which several modules read as settings do."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tilescale_net.errors import ConfigurationError

T = TypeVar("T")
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
