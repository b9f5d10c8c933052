"""A lock that processes of one host take turns at: a file that one of them holds at a time.

What is done under such a lock is right without it, too, and only done twice then: so a process that was stopped while it
held one is not waited for.
"""

import contextlib
import fcntl
import os
import time
from typing import IO

from tilescale_net.runtime import processes

_LOOK_SECONDS = 0.02
_STOPPED_SECONDS = 2.0  # for which a holder has been seen stopped before it is not waited for


def acquire(path: str | os.PathLike) -> IO[str]:
    """Wait for the lock, and hold it until the file that this returns is closed, which the end of the process does too.

    Returns:
        The file; without holding it where its holder is stopped (by SIGSTOP or a debugger).

    Raises:
        OSError: the file cannot be made, or its file system has no locks.
    """
    lock = open(path, "a+", errors="replace")
    try:
        _wait_for(lock)
    except BaseException:
        lock.close()
        raise
    return lock


def _wait_for(lock: IO[str]) -> None:
    stopped_since = None
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            now = time.monotonic()
            stopped_since = (stopped_since or now) if processes.is_stopped(*_holder(lock)) else None
            if stopped_since is not None and now - stopped_since >= _STOPPED_SECONDS:
                return
            time.sleep(_LOOK_SECONDS)
        else:
            with contextlib.suppress(OSError):  # on a full disk the holder is not recorded
                lock.truncate(0)
                lock.write(" ".join(map(str, processes.own())))
                lock.flush()
            return


def _holder(lock: IO[str]) -> tuple[int, int]:
    """The process that holds the lock, as it has written there; (0, 0) where that cannot be read."""
    lock.seek(0)
    pid, _, started = lock.read(40).partition(" ")
    return (int(pid), int(started)) if pid.isdecimal() and started.isdecimal() else (0, 0)
