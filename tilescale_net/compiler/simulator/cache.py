"""What the simulator has made of kernels, kept for the next time in one folder per user: kernels before and after they
are lowered, libraries and headers.

Libraries are code that this process runs, so that the folder and every file are used only if they belong to this user
and no other user may write them.
"""

import errno
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import file_lock, private_folder

SUFFIXES = (".so", ".lowered", ".kept", ".gch")
# Files that end with a digest of what they hold, so that one which a full disk or a power cut has damaged is not used:
# reading it could crash. Compilers check precompiled headers themselves.
SEALED = (".so", ".lowered", ".kept")
_DIGEST = hashlib.sha256().digest_size
# What is kept: what was used within so many days, the latest of it up to so many bytes.
KEPT_DAYS, KEPT_BYTES = 30, 1 << 30
# Seconds after which something in the making counts as left behind: its process holds a lock while it lives.
_ABANDONED = 3600
_TEMPORARY = "tmp"


def folder() -> Path:
    """`private_folder.of_user`.

    A process that adds a file removes the files that were not used for KEPT_DAYS, and the longest unused beyond
    KEPT_BYTES.
    """
    return private_folder.of_user("simulator")


def get_or_build(name: str, key: str, suffix: str, make: Callable[[Path], Path]) -> Path:
    """Path of what `make` makes, made now or found.

    Args:
        name, key, suffix: of the file; `key` covers everything that the file depends on.
        make: writes the file into the empty folder that it is given, and returns its path. Ranks of one machine make a
            file once: the others wait for it.

    Raises:
        ConfigurationError: the folder cannot be written, or is full.
        Any exception of `make`; then nothing is kept.
    """
    place = folder()
    try:
        if not private_folder.make(place):
            place = private_folder.temporary(place)
        path = place / f"{name[:60]}-{key}{suffix}"
        if _used(path):
            return path
        # Sixteen serve all files of a kind. A kept kernel is made of the others, under whose locks it must not be.
        lock = file_lock.acquire(place / f"lock-{'k' if suffix == '.kept' else ''}{key[0]}")
    except OSError as err:
        raise _unusable(place, err) from err
    try:
        with lock:
            if _used(path):
                return path
            with tempfile.TemporaryDirectory(dir=place, prefix=_TEMPORARY) as work:
                made = make(Path(work))
                if path.suffix in SEALED:
                    seal(made)
                os.replace(made, path)
    except OSError as err:
        if err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise _unusable(place, err) from err
        raise
    _prune(place)
    return path


def get_or_write(name: str, key: str, suffix: str, make: Callable[[], Any], parse: Callable[[str], Any]) -> Any:
    """What `make` returns, or what it returned to the program that wrote the file.

    Args:
        name, key, suffix: as in `get_or_build`; the suffix is one of SEALED.
        make: returns something with a method `text()`.
        parse: makes it of its text; raises ValueError, KeyError or TypeError for an invalid text.
    """
    made: list[Any] = []

    def write(work: Path) -> Path:
        made.append(make())
        out = work / f"kernel{suffix}"
        out.write_text(made[0].text())
        return out

    while True:
        path = get_or_build(name, key, suffix, write)
        if made:
            return made[0]
        try:
            return parse(unseal(path.read_bytes()).decode())
        except (OSError, ValueError, KeyError, TypeError):  # another program has removed or damaged it
            discard(path)


def _unusable(place: Path, err: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"compiled kernels cannot be kept in {place} ({err.strerror}); make room there, or set XDG_CACHE_HOME to a folder "
        "that can be written"
    )


def discard(path: Path) -> None:
    """Remove a file that turned out to be damaged, so that `get_or_build` makes it again."""
    path.unlink(missing_ok=True)


def _used(path: Path) -> bool:
    """Whether the file is there and may be trusted; marks it as used."""
    try:
        if not private_folder.is_ours(path):
            path.unlink()  # left in a folder of ours by another user who could write there once
            return False
        if path.suffix in SEALED:
            unseal(path.read_bytes())
        os.utime(path)
    except (OSError, ValueError):
        return False
    return True


def seal(path: Path) -> None:
    """End a file with the digest of what it holds; a library stays one."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    with open(path, "ab") as f:
        f.write(digest)


def unseal(data: bytes) -> bytes:
    """What a sealed file holds. Raises ValueError for one that is damaged."""
    held, digest = data[:-_DIGEST], data[-_DIGEST:]
    if hashlib.sha256(held).digest() != digest:
        raise ValueError("damaged")
    return held


def _prune(place: Path) -> None:
    """Remove what is too old or too much; programs that have a library open keep it."""
    found = []
    for path in place.iterdir():
        try:
            status = path.stat()
        except OSError:
            continue  # another process was faster
        found.append((status.st_mtime, status.st_size, path))
    now = time.time()
    oldest, size_kept = now - KEPT_DAYS * 86400, 0
    for used, size, path in sorted(found, reverse=True):
        if path.is_dir():  # of something in the making; programs that end by themselves take theirs away
            if path.name.startswith(_TEMPORARY) and used < now - _ABANDONED:
                shutil.rmtree(path, ignore_errors=True)
        elif path.suffix in SUFFIXES:
            size_kept += size
            if used < oldest or size_kept > KEPT_BYTES:
                path.unlink(missing_ok=True)
