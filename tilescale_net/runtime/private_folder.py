"""Folders for code and data that the package loads again; no other user may write there."""

import atexit
import functools
import os
import pwd
import shutil
import stat
import tempfile
from pathlib import Path

from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import settings

_NAME = "tilescale_net"
TILELANG = "TILELANG_CACHE_DIR"


def of_user(name: str) -> Path:
    """$XDG_CACHE_HOME/tilescale_net/NAME, by default below ~/.cache; below the temporary folder without a home to write."""
    base = settings.CACHE_HOME.get()
    if not os.path.isabs(base):
        home = os.environ.get("HOME") or _home_of_user()
        base = os.path.join(home, ".cache") if os.path.isabs(home) else ""
        if base and not can_be_made(base):
            base = ""
    if not base:
        return Path(tempfile.gettempdir()) / f"{_NAME}-{os.getuid()}" / name
    return Path(base) / _NAME / name


def for_tilelang() -> dict[str, str]:
    """The variable that gives tilelang a folder to keep kernels in, if the home does not; to be set before it is imported.
    Raises ConfigurationError: no folder can be written."""
    own = os.path.expanduser("~/.tilelang")
    if os.environ.get(TILELANG) or can_be_made(own):
        return {}
    try:
        folder = of_user("tilelang")
        return {TILELANG: str(folder if can_be_made(str(folder)) else temporary(folder))}
    except OSError as err:
        raise ConfigurationError(
            f"tilelang needs a folder, and none can be written ({err}); set TMPDIR or TILELANG_CACHE_DIR to one, such as a "
            "volume of a container whose root is read-only"
        ) from None


@functools.cache
def can_be_made(folder: str) -> bool:
    """Whether a folder and files in it exist or can be made. Tries it and removes the folder: permissions alone do not
    tell for root, for full file systems and for those without folders."""
    try:
        while not os.path.lexists(folder):
            folder = os.path.dirname(folder)
        os.rmdir(tempfile.mkdtemp(dir=folder, prefix=f".{_NAME}-"))
    except OSError:
        return False
    return True


def _home_of_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a container with a user of its own
        return ""


def is_ours(path: str | os.PathLike[str]) -> bool:
    """Whether a folder or file belongs to this user, and no other may write it. Raises OSError if it is missing."""
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return False
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def make(path: Path, alone: bool = False) -> bool:
    """Make a folder for this user alone if it does not exist; returns whether code may be loaded from it.

    The same must hold, unless `alone`, for the package's folders above it, up to the one named tilescale_net…: their
    owner can replace a folder after the check. The parent of that one is up to the user.

    Raises:
        OSError: it cannot be made.
    """
    above = [folder for folder in path.parents if folder.name.startswith(_NAME) and not alone]
    depth = len(path.relative_to(above[-1]).parts) if above else 0
    for folder in [*reversed(path.parents[:depth]), path]:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.lstat(folder).st_uid == os.getuid() and not folder.is_symlink():
            folder.chmod(0o700)
        if not folder.is_dir() or not is_ours(folder):
            return False
    return True


@functools.cache
def temporary(instead_of: Path) -> Path:
    """A folder of this process alone, removed with it; prints a notice once."""
    folder = Path(tempfile.mkdtemp(prefix=f"{_NAME}-"))
    _temporary.append((os.getpid(), folder))
    atexit.register(remove_temporary)
    settings.log.warning(
        "%s belongs to another user or may be written by others: kernels are compiled for this process only, in %s; set "
        "XDG_CACHE_HOME to a folder of your own",
        instead_of,
        folder,
    )
    return folder


_temporary: list[tuple[int, Path]] = []  # folders, and the processes that made them


def remove_temporary() -> None:
    """Remove the folders that `temporary` has made in this process."""
    for owner, folder in _temporary:
        if owner == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)
