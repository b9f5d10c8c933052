"""Processes of this host: known by number and start time, so that none is taken for another that had its number."""

import contextlib
import errno
import os
import signal

# Fields of /proc/PID/stat behind the name: state, threads, and start time in ticks since the host started.
_STATE, _THREADS, _STARTED = 0, 17, 19


def own() -> tuple[int, int]:
    """Number and start time of this process, as /proc shows them to processes of its PID namespace."""
    try:
        # Not os.getpid(): where /proc is that of an outer PID namespace, processes have other numbers there.
        pid = int(os.readlink("/proc/self"))
        with open("/proc/self/stat", "rb") as stat:
            return pid, _started(_fields(stat.read()))
    except (OSError, ValueError, IndexError):
        return os.getpid(), 0


def is_stopped(pid: int, started: int) -> bool:
    """Whether a process exists and is stopped, by SIGSTOP or a debugger."""
    try:
        found = Process(pid, started)
    except OSError:
        return False
    try:
        return found.stopped()
    finally:
        found.close()


class Process:
    """Another process of this PID namespace.

    Args:
        pid, started: what `own` returned there.

    Raises:
        OSError: it cannot be seen from here, or has ended and is gone.
    """

    def __init__(self, pid: int, started: int):
        self._pid, self._started = pid, started
        # Of this process as long as it is open; reading it fails once the process is gone.
        self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        found = self._look()
        if found is None or _started(found) != started:
            self.close()
            raise ProcessLookupError(errno.ESRCH, "another process has its number")

    def ended(self) -> bool:
        """Whether it has ended: all its threads, whose memory is unmapped then. It may be a zombie still."""
        found = self._look()
        return found is None or found[_STATE] in (b"Z", b"X") and int(found[_THREADS]) <= 1

    def stopped(self) -> bool:
        """Whether it exists and is stopped, by SIGSTOP or a debugger."""
        found = self._look()
        return found is not None and found[_STATE] in (b"T", b"t")

    def kill(self) -> None:
        """End it, by SIGKILL. Does nothing where it has ended, or is another user's."""
        with contextlib.suppress(OSError):
            folder = os.open(f"/proc/{self._pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                with open(os.open("stat", os.O_RDONLY, dir_fd=folder), "rb") as stat:
                    same = _started(_fields(stat.read())) == self._started
                if same:
                    self._send_kill(folder)
            finally:
                os.close(folder)

    def _send_kill(self, folder: int) -> None:
        try:
            signal.pidfd_send_signal(folder, signal.SIGKILL)  # which takes a folder of /proc, too
        except OSError:  # refused by the sandbox, or unknown to it
            # Numbers are reused in turn: this one is not another's a moment after the look.
            if int(os.readlink("/proc/self")) == os.getpid() and not self.ended():
                os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Look at it no more."""
        os.close(self._stat)

    def _look(self) -> list[bytes] | None:
        """What /proc shows of it; None when it is gone."""
        try:
            return _fields(os.pread(self._stat, 1024, 0))
        except ProcessLookupError:
            return None


def _fields(stat: bytes) -> list[bytes]:
    return stat.rpartition(b")")[2].split()  # the name before may hold anything


def _started(fields: list[bytes]) -> int:
    return int(fields[_STARTED])
