"""What the simulator has made of kernels, kept for the next time in one folder per user: lowered kernels, libraries and headers."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import settings

SUFFIXES = (".so", ".lowered", ".gch")
# What is kept: what was used within so many days, the latest of it up to so many bytes.
KEPT_DAYS, KEPT_BYTES = 30, 1 << 30


def folder() -> Path:
    """$XDG_CACHE_HOME/tilescale_net/simulator, by default below ~/.cache.

    Whoever adds a file removes those that nobody has used for KEPT_DAYS, and the longest unused beyond KEPT_BYTES.
    """
    base = settings.CACHE_HOME.get() or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "tilescale_net" / "simulator"


def kept(name: str, key: str, suffix: str, make: Callable[[Path], Path]) -> Path:
    """Path of what `make` makes, made now or found.

    Args:
        name, key, suffix: of the file; `key` says everything that the file depends on.
        make: writes the file into the empty folder that it is given, and returns its path. Ranks of one machine make a
            file once: the others wait for it.

    Raises:
        ConfigurationError: the folder cannot be written.
        Whatever `make` raises; then nothing is kept.
    """
    place = folder()
    path = place / f"{name[:60]}-{key}{suffix}"
    if _used(path):
        return path
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = open(place / f"lock-{key[0]}", "w")  # sixteen serve all files
    except OSError as err:
        raise ConfigurationError(
            f"compiled kernels cannot be kept in {place} ({err.strerror}); set XDG_CACHE_HOME to a folder that can be written"
        ) from err
    with lock, tempfile.TemporaryDirectory(dir=place) as work:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _used(path):
            return path
        os.replace(make(Path(work)), path)
    _prune(place)
    return path


def _used(path: Path) -> bool:
    """Whether the file is there; says that it is used."""
    try:
        os.utime(path)
    except PermissionError:
        pass  # somebody else's cache
    except OSError:
        return False
    return True


def _prune(place: Path) -> None:
    """Remove what is too old or too much; programs that have a library open keep it."""
    found = []
    for path in place.iterdir():
        try:
            status = path.stat()
        except OSError:
            continue  # another process was faster
        found.append((status.st_mtime, status.st_size, path))
    oldest, size_kept = time.time() - KEPT_DAYS * 86400, 0
    for used, size, path in sorted(found, reverse=True):
        if path.is_dir():  # of something in the making; programs that end by themselves take theirs away
            if used < oldest:
                shutil.rmtree(path, ignore_errors=True)
        elif path.suffix in SUFFIXES:
            size_kept += size
            if used < oldest or size_kept > KEPT_BYTES:
                path.unlink(missing_ok=True)
