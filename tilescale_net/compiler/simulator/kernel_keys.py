"""What identifies a kernel of this package for the files that keep it: hashes of what it is traced from."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tilescale_net.compiler import toolchain
from tilescale_net.compiler.simulator.lowered_cache import versions

_KERNELS = "tilescale_net.kernels"
# A file that is younger may not be the one that this process has imported.
_IMPORTED = time.time()


def key(function: Callable, args: tuple, kwargs: dict, options: dict) -> str | None:
    """What identifies a kernel; None for one that is not to be kept.

    Args:
        function: the factory, with its arguments.
        options: of `tsn.jit`.
    """
    if not (function.__module__ or "").startswith(_KERNELS + "."):
        return None
    if not _unchanged(function):
        return None
    try:
        values = _written([args, sorted(kwargs.items()), sorted(options.items())])
    except TypeError:
        return None
    parts = [sources(), *versions(), function.__module__, function.__qualname__, values]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


@functools.cache
def _folders() -> tuple[Path, ...]:
    """Where the package's files lie, under the names by which they are imported."""
    names = ("tilescale_net", _KERNELS)
    return tuple(Path(next(iter(importlib.util.find_spec(n).submodule_search_locations))).absolute() for n in names)


@functools.cache
def sources() -> str:
    """Hash of the package's Python files, where they lie, and of what `toolchain.sources_hash` covers."""
    digest = hashlib.sha256(toolchain.sources_hash().encode())
    for folder in _folders():
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _unchanged(function: Callable) -> bool:
    """Whether the package's modules are what its files hold: a test may have put others in their places, an author may have
    edited them since this process began."""
    files = [function.__code__.co_filename]
    files += [getattr(m, "__file__", None) for name, m in [*sys.modules.items()] if name.startswith("tilescale_net.")]
    ours = tuple(f"{folder}{os.sep}" for folder in _folders())
    try:
        return all(os.path.abspath(f).startswith(ours) and os.stat(f).st_mtime < _IMPORTED for f in files if f)
    except OSError:
        return False


def _written(value) -> str:
    """An argument as a text that no other one has. Raises TypeError where there is no such text."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return f"{_name(value)} {value!r}"
    if isinstance(value, (tuple, list)):
        return f"{_name(value)}({', '.join(map(_written, value))})"
    if isinstance(value, dict):
        return _written(sorted((str(getattr(k, "value", k)), v) for k, v in value.items()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return f"{_name(value)}{_written(fields)}"
    raise TypeError(f"{value!r} has no text")


def _name(value) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
