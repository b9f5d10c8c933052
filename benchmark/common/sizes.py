"""Sizes in bytes: `64K`, `1.5M`, lists and ranges of them."""

from __future__ import annotations

import re

_SUFFIX = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str) -> int:
    """Bytes from `4096`, `64K`, `1.5M`, `2GiB` (powers of two).

    Raises:
        ValueError: not a size, or not a whole number of bytes.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?\s*", text, re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a size; write bytes with an optional K, M, G or T, such as 64K")
    value = float(match.group(1)) * _SUFFIX[match.group(2).upper()]
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(value)


def parse_sizes(text: str) -> list[int]:
    """Sizes from a comma-separated list of sizes and doubling ranges: `2K..4M`, `8,64,1K..16K`.

    A range starts at its first size and doubles up to and including its last one. Order is kept.

    Raises:
        ValueError: an empty list, a malformed or zero size, a range that ends before it starts or starts at zero.
    """
    sizes: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        size = parse_bytes(first)
        end = parse_bytes(last) if dots else size
        if size == 0:
            raise ValueError(f"{part!r} holds a size of zero bytes; the smallest size is 1")
        if end < size:
            raise ValueError(f"{part!r} ends before it starts; write the smaller size first")
        while size <= end:
            sizes.append(size)
            size *= 2
    return sizes


def format_bytes(count: int) -> str:
    """The shortest exact form: 2048 is `2K`, 1048576 is `1M`, 1000 is `1000`."""
    for suffix in ("T", "G", "M", "K"):
        unit = _SUFFIX[suffix]
        if count and count % unit == 0:
            return f"{count // unit}{suffix}"
    return str(count)
