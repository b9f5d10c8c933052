"""Which files in /dev/shm were made by processes that this one started, however deep, and whose maker has ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import struct
import threading

FOLDER = "/dev/shm"
# Inherited by every process that is started from here on; a process keeps it when its parent ends.
MARK = "TESTS_STARTED_BY"
_CREATED = 0x100  # IN_CREATE


class Watch:
    """Notes at once which process makes a file, since that cannot be found after the process has ended.

    libfabric's providers put the number of their process into the names of their files; files without one (of Python,
    of the CUDA driver) have no owner.
    """

    def __init__(self):
        self._mark = f"{MARK}={os.getpid()}".encode()
        os.environ[MARK] = str(os.getpid())
        self._ours: dict[str, int] = {}
        self._ended = threading.Event()
        self._thread = None
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd >= 0 and libc.inotify_add_watch(self._fd, FOLDER.encode(), _CREATED) >= 0:
            self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Watch:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._ended.set()
        if self._thread:
            self._thread.join()
        if self._fd >= 0:
            os.close(self._fd)

    def _listen(self) -> None:
        while not self._ended.wait(0.02):
            with contextlib.suppress(BlockingIOError):
                self._note(os.read(self._fd, 1 << 16))

    def _note(self, events: bytes) -> None:
        at = 0
        while at < len(events):
            _, _, _, size = struct.unpack_from("iIII", events, at)
            name = events[at + 16 : at + 16 + size].rstrip(b"\0").decode()
            at += 16 + size
            for pid in map(int, re.findall(r"\d+", name)):
                if self._started_here(pid):
                    self._ours[name] = pid

    def _started_here(self, pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/environ", "rb") as f:
                return self._mark in f.read().split(b"\0")
        except OSError:
            return False

    def left(self) -> set[str]:
        """Files of ours that are still there although the process that made them has ended."""
        return {
            name
            for name, pid in list(self._ours.items())
            if os.path.exists(os.path.join(FOLDER, name)) and not os.path.exists(f"/proc/{pid}")
        }

    def forget(self, names: set[str]) -> None:
        """Reported once is enough: the next test is not to blame."""
        for name in names:
            self._ours.pop(name, None)
