"""A lock that processes of one host take turns at: a file that one of them holds at a time."""

import fcntl
import os
from typing import IO


def acquire(path: str | os.PathLike) -> IO[str]:
    """Wait for the lock, and hold it until the file that this returns is closed, which the end of the process does too.

    Raises:
        OSError: the file cannot be made, or its file system knows no locks.
    """
    lock = open(path, "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except BaseException:
        lock.close()
        raise
    return lock
