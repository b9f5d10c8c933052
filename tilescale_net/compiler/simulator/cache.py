"""What the simulator has made of kernels, kept for the next time in one folder per user: kernels before and after they
are lowered, libraries and headers.

Libraries are code that this process runs, so that the folder and every file are used only if they belong to this user
and no other user may write them.
"""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilescale_net.compiler.simulator.cache_files import SEALED, TEMPORARY, discard, is_usable, prune, seal, unseal
from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import private_folder, this_host


def folder() -> Path:
    """`private_folder.of_user`.

    A process that adds a file removes others, see `cache_files.prune`.
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
        if is_usable(path):
            return path
        # Sixteen serve all files of a kind. A kept kernel is made of the others, under whose locks it must not be.
        lock = this_host.lock_file(place / f"lock-{'k' if suffix == '.kept' else ''}{key[0]}")
    except OSError as err:
        raise _unusable(place, err) from err
    try:
        with lock:
            if is_usable(path):
                return path
            with tempfile.TemporaryDirectory(dir=place, prefix=TEMPORARY) as work:
                made = make(Path(work))
                if path.suffix in SEALED:
                    seal(made)
                os.replace(made, path)
    except OSError as err:
        if err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise _unusable(place, err) from err
        raise
    prune(place)
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
