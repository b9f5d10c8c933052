"""Ends what ranks have started when the launcher is killed: ranks end with it, but not the compilers that they run."""

import contextlib
import os
import signal


class OrphanKiller:
    """A process that waits for the end of this one, and then ends the process groups that are left.

    It holds one end of a pipe whose other end closes with this process, however that comes about.
    """

    def __init__(self):
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _end_groups(reader)
            finally:
                os._exit(0)
        os.close(reader)

    def add(self, group: int) -> None:
        """Count a process group among those to end."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """All of a process group has ended; its number may soon be another's."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the groups that are left, and the process."""
        os.close(self._writer)
        os.waitpid(self._pid, 0)

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has been killed
            os.write(self._writer, line.encode())


def _end_groups(reader: int) -> None:
    os.setsid()  # no signal of the terminal shall come here
    for fd in map(int, os.listdir("/proc/self/fd")):
        # The listener of the store, and the output that others wait for the end of.
        if fd != reader:
            with contextlib.suppress(OSError):
                os.close(fd)
    groups = set()
    with open(reader) as lines:
        for line in lines:
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
