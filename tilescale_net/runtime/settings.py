"""Environment variables of the package, read in one place.

| variable | meaning | default |
| --- | --- | --- |
| TSN_DEVICE | `cuda`, `simulator`, or `auto`: CUDA where a GPU is visible | auto |
| TSN_HEAP_SIZE | bytes of the symmetric heap; K, M, G suffixes | 256M (simulator), 1G (GPU) |
| TSN_TIMEOUT | seconds that a device-side wait or a collective call may take | 20 |
| TSN_HEARTBEAT_TIMEOUT | seconds without a heartbeat after which a rank of another host counts as lost | 15 |
| VIRTUAL_NODES | split the ranks of a host into this many nodes that talk only through the fabric | 1 |
"""

from __future__ import annotations

import os
import re

from tilescale_net.errors import ConfigurationError

_SUFFIX = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str, name: str) -> int:
    """Bytes from text such as `4096`, `64M` or `1.5G` (powers of two). Raises ConfigurationError that names `name`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if not match:
        raise ConfigurationError(f"{name}={text!r} is not a size; write bytes with an optional K, M, G or T, e.g. 512M")
    return int(float(match.group(1)) * _SUFFIX[match.group(2).upper()])


def number(name: str, default: float, minimum: float = 0.0) -> float:
    """A number from the environment; raises ConfigurationError when it is none or below `minimum`."""
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise ConfigurationError(f"{name}={text!r} is not a number") from None
    if value < minimum:
        raise ConfigurationError(f"{name}={text} is below the minimum of {minimum:g}")
    return value


def integer(name: str, default: int, minimum: int = 0) -> int:
    """A whole number from the environment; same errors as `number`."""
    value = number(name, default, minimum)
    if value != int(value):
        raise ConfigurationError(f"{name}={value} is not a whole number")
    return int(value)


def power_of_two(name: str, default: int, minimum: int = 1) -> int:
    """A power of two from the environment; same errors as `number`."""
    value = integer(name, default, minimum)
    if value & (value - 1):
        raise ConfigurationError(f"{name}={value} is not a power of two; write {1 << value.bit_length()} for example")
    return value


def timeout_seconds() -> float:
    return number("TSN_TIMEOUT", 20.0, 0.01)


def heartbeat_timeout_seconds() -> float:
    return number("TSN_HEARTBEAT_TIMEOUT", 15.0, 1.0)


def heap_bytes(explicit: int | str | None, on_gpu: bool) -> int:
    """Size of the symmetric heap in bytes: the argument, else TSN_HEAP_SIZE, else the default; whole 2 MiB pages."""
    name = "heap_bytes"
    if explicit is None:
        name, explicit = "TSN_HEAP_SIZE", os.environ.get("TSN_HEAP_SIZE") or ("1G" if on_gpu else "256M")
    if not isinstance(explicit, int | str) or isinstance(explicit, bool):
        raise ConfigurationError(f'{name}={explicit!r} is neither a number of bytes nor text such as "512M"')
    size = parse_bytes(explicit, name) if isinstance(explicit, str) else explicit
    page = 2 << 20
    if size < page:
        raise ConfigurationError(f"{name}: a heap of {size} bytes is too small; the minimum is {page} (2M)")
    return (size + page - 1) // page * page


def load_kernels_early() -> None:
    """Where ranks may be on several nodes, have CUDA load the kernels of libraries when it starts; call before it does.

    Otherwise it loads each of them at its first launch, and keeps copies between host and GPU waiting until the kernels
    that run by then have ended. One that waits for data from another node, which the proxy copies, would not end.
    """
    ranks = integer("WORLD_SIZE", 1)
    if integer("VIRTUAL_NODES", 1, 1) > 1 or integer("LOCAL_WORLD_SIZE", ranks) < ranks:
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def device_kind() -> str:
    """`cuda` or `simulator`."""
    kind = os.environ.get("TSN_DEVICE", "auto").lower()
    if kind not in ("auto", "cuda", "simulator"):
        raise ConfigurationError(f"TSN_DEVICE={kind!r} is not one of auto, cuda, simulator")
    if kind != "auto":
        return kind
    import torch

    return "cuda" if torch.cuda.is_available() else "simulator"
