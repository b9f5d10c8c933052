"""Kernels of `tilescale_net.kernels` for GPUs, cached by their inputs, so that they are not traced again.

tilelang caches kernels too, but by the traced kernel: each rank traces and prepares each kernel to find it, which takes
0.1 to 0.3 s. Here ranks that want the same kernel know its key beforehand: one compiles it, the others wait for the
file.

A file holds the kernel's library, see shipped.py, and its other data, see `kernel.GpuKernel`. Files lie beside
tilelang's own; TSN_KERNELS, which `python -m tilescale_net precompile` fills and any user reads, is searched first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tilescale_net.compiler.kernel import GpuKernel
from tilescale_net.compiler.simulator import cache
from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import job_store, settings

SUFFIX = ".so"
_LENGTH = 8  # bytes of the length of the preceding text
_written_to: Path | None = None  # see `writing_to`


def folder() -> Path:
    """Where files are written."""
    from tilelang import env

    return _written_to or Path(env.TILELANG_CACHE_DIR) / "tilescale_net"


def is_enabled() -> bool:
    """Whether kernels are cached: not if tilelang's cache is off, nor in a trace, whose kernels have source lines."""
    from tilelang import env

    return bool(env.is_cache_enabled()) and not settings.TRACE.get()


@contextlib.contextmanager
def writing_to(place: Path) -> Iterator[None]:
    """Read and write kernels in `place` alone, readable for everybody. Raises ConfigurationError: it
    cannot be made, or other users may write there."""
    global _written_to
    try:
        place.mkdir(parents=True, exist_ok=True)
        is_own = place.stat().st_uid == os.getuid()
        if is_own:
            place.chmod(0o700)
        if not is_own or not _is_trusted(place):  # root's, too, could be read, but not written
            raise ConfigurationError(
                f"{place} belongs to another user or may be written by others: kernels from there would not be loaded; name "
                "a folder of your own"
            )
    except OSError as err:
        raise ConfigurationError(f"kernels cannot be written to {place}: {err.strerror}") from err
    before, _written_to = _written_to, place
    try:
        yield
    finally:
        _written_to = before
        for lock in place.glob("lock-*"):
            lock.unlink(missing_ok=True)
        place.chmod(0o755)
        for path in place.glob(f"*{SUFFIX}"):
            path.chmod(0o644)


def get_or_compile(
    name: str, key: str, compile: Callable[[Path], GpuKernel], made_by: Sequence[Any] = ()
) -> tuple[GpuKernel, Path] | None:
    """A kernel and its library, found or made now; None if nothing can be cached.

    Args:
        name, key: of the file; `key` is of `cache.kernel_key`.
        compile: called if the file is missing, writes the library to a path; other ranks and threads that want the same
            kernel wait meanwhile.
        made_by: see `made_by`.

    Raises:
        Any exception of `compile`; then nothing is cached.
    """
    if _written_to is None and (shipped := _shipped(f"{name[:60]}-{key}{SUFFIX}")) is not None:
        return shipped

    made = False

    def make(work: Path) -> Path:
        nonlocal made
        path = work / f"kernel{SUFFIX}"
        fields = dataclasses.asdict(compile(path))
        made = True
        try:
            text = json.dumps(fields | {"made_by": made_by}).encode()
        except TypeError:  # arguments other than numbers and text
            text = json.dumps(fields | {"made_by": []}).encode()
        with open(path, "ab") as file:
            file.write(text + len(text).to_bytes(_LENGTH, "little"))
        return path

    while True:
        try:
            path = cache.get_or_build(name, key, SUFFIX, make, folder(), f"lock-{key[:4]}")
        except ConfigurationError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            return None  # the folder cannot be written
        if made and _written_to is None:
            cache.prune(path.parent)
        try:
            return read(path), path
        except (OSError, ValueError, KeyError, TypeError):  # another program has removed or damaged it
            cache.discard(path)


def read(path: Path) -> GpuKernel:
    """From a file of this cache. Raises OSError, ValueError, KeyError or TypeError for other files."""
    fields = _fields(path)
    del fields["made_by"]
    fields["names"] = tuple(fields["names"])
    fields["integers"] = tuple((place, low, high) for place, low, high in fields["integers"])
    return GpuKernel(**fields)


def made_by(path: Path) -> tuple[str, tuple[Any, ...], dict[str, Any]] | None:
    """Factory ("module:name") and arguments of the kernel of a file; None for arguments other than numbers and text.
    Raises as `read`."""

    def as_given(value: Any) -> Any:
        return tuple(map(as_given, value)) if isinstance(value, list) else value

    found = _fields(path)["made_by"]
    if not found:
        return None
    factory, args, kwargs = found
    return str(factory), as_given(args), {name: as_given(value) for name, value in kwargs.items()}


def _fields(path: Path) -> dict[str, Any]:
    content = cache.unseal(path.read_bytes())
    length = int.from_bytes(content[-_LENGTH:], "little")
    fields = job_store.parse_json(content[-_LENGTH - length : -_LENGTH].decode())
    if not isinstance(fields, dict):
        raise TypeError("it is no kernel")
    return fields


def _shipped(file: str) -> tuple[GpuKernel, Path] | None:
    """A kernel of TSN_KERNELS."""
    place = settings.KERNELS.get()
    path = Path(place) / file
    if not place or not path.exists():
        return None
    if not (_is_trusted(Path(place)) and _is_trusted(path)):
        _warn(f"TSN_KERNELS: {place} belongs to another user than root or you, or may be written by others; not used")
        return None
    try:
        return read(path), path
    except (OSError, ValueError, KeyError, TypeError):
        _warn(f"TSN_KERNELS: {path} is damaged; not used")
        return None


def _is_trusted(path: Path) -> bool:
    """Whether code may be loaded from a file or folder: it is root's or this user's, and no other may write it."""
    status = path.stat()
    return status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022


@functools.cache
def _warn(text: str) -> None:
    settings.log.warning("%s", text)
