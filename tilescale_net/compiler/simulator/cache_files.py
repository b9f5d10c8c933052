"""Files of the simulator's cache, see cache.py: which may be trusted, and which are removed."""

import hashlib
import os
import shutil
import time
from pathlib import Path

from tilescale_net.runtime import private_folder

SUFFIXES = (".so", ".lowered", ".kept", ".gch")
# Files that end with a digest of what they hold, so that one which a full disk or a power cut has damaged is not used:
# reading it could crash. Compilers check precompiled headers themselves.
SEALED = (".so", ".lowered", ".kept")
_DIGEST = hashlib.sha256().digest_size
# What is kept: what was used within so many days, the latest of it up to so many bytes.
KEPT_DAYS, KEPT_BYTES = 30, 1 << 30
# Seconds after which something in the making counts as left behind: its process holds a lock while it lives.
_ABANDONED = 3600
TEMPORARY = "tmp"


def discard(path: Path) -> None:
    """Remove a file that turned out to be damaged, so that `get_or_build` makes it again."""
    path.unlink(missing_ok=True)


def is_usable(path: Path) -> bool:
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


def prune(place: Path) -> None:
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
            if path.name.startswith(TEMPORARY) and used < now - _ABANDONED:
                shutil.rmtree(path, ignore_errors=True)
        elif path.suffix in SUFFIXES:
            size_kept += size
            if used < oldest or size_kept > KEPT_BYTES:
                path.unlink(missing_ok=True)
