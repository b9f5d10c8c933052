"""The output of a job's ranks: of rank 0 as it is, of the others kept until they fail."""

import collections
import fcntl
import os
import pty
import re
import sys
import termios
import tty

KEPT_LINES = 200

# The last line of a Python traceback, or a message in its style: `module.SomeError: what happened`.
_ERROR_LINE = re.compile(rb"^(?:Fatal Python error|(?:[\w.]+\.)?[A-Z]\w*)(?:: .*)?$")
_TRACEBACK = b"Traceback (most recent call last):"
# What Python prints between an exception and one that followed from it.
_CHAIN = (b"During handling of the above exception", b"The above exception was the direct cause")
# Lines of this package about steps that take long: no reason of a failure.
_PROGRESS = re.compile(rb"^(?:meeting the other ranks of the job|compiling kernel .*; the next time it is there)$")
_TORCH_PREFIX = re.compile(rb"^\[rank\d+\]: ?")  # torch puts it before each line of a traceback


def _open_terminal() -> tuple[int, int] | None:
    """Both ends of a pseudo-terminal as large as ours; None where the system has none to give (a bare chroot)."""
    try:
        ours, theirs = pty.openpty()
    except OSError:
        return None
    tty.setraw(theirs)  # no translation of line ends, no echo
    size = fcntl.ioctl(sys.stderr.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    return ours, theirs


class Output:
    """One stream of one rank, read by the launcher.

    Args:
        prefix: put before each line that is shown.
        show: whether lines are shown as they come (on the launcher's stderr) or only kept.
        terminal: whether the rank shall see a terminal, so that progress bars and colours work as without a launcher.
    """

    def __init__(self, prefix: str = "", show: bool = False, terminal: bool = False):
        self._prefix = prefix.encode()
        self._show = show
        self._partial = b""
        self.lines: collections.deque[bytes] = collections.deque(maxlen=KEPT_LINES)
        self.fd, self.child_fd = (_open_terminal() if terminal else None) or os.pipe()
        os.set_blocking(self.fd, False)

    def close_child_end(self) -> None:
        os.close(self.child_fd)

    def read(self) -> bool:
        """Take what has arrived; False once the stream has ended."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return True
        except OSError:  # a pseudo-terminal whose other side is closed
            data = b""
        if data and self._show and not self._prefix:
            _write_all(data)
        whole = self._partial + data
        *lines, self._partial = re.split(rb"\r?\n|\r", whole)
        if not data and self._partial:
            lines, self._partial = [self._partial], b""
        for line in lines:
            self.lines.append(line)
            if self._show and self._prefix:
                _write_all(self._prefix + line + b"\n")
        return bool(data)

    def drain(self) -> None:
        """Take all that is left after the rank has ended, then close."""
        before = -1
        while before != len(self.lines) + len(self._partial):
            before = len(self.lines) + len(self._partial)
            if not self.read():
                break
        if self._partial:
            self.lines.append(self._partial)
        os.close(self.fd)

    def last_error(self) -> str:
        """The line with the reason of the failure: the end of its last traceback, or else its last error message or
        line.

        Empty when the rank printed nothing.
        """
        errors = self.errors()
        lines = self._said()
        return errors[-1] if errors else lines[-1].strip().decode(errors="replace") if lines else ""

    def errors(self) -> list[str]:
        """The reason of the failure, where it is an error message, behind the errors that it followed from."""
        lines = self._said()
        starts = [i for i, line in enumerate(lines) if line.startswith(_TRACEBACK)]
        if not starts:
            return [line.decode(errors="replace") for line in lines if _ERROR_LINE.match(line)][-1:]
        chain = starts[-1:]
        for start in reversed(starts[:-1]):
            if not lines[chain[0] - 1].startswith(_CHAIN):
                break
            chain.insert(0, start)
        ends = [next((line for line in lines[start + 1 :] if _ERROR_LINE.match(line)), b"") for start in chain]
        return [end.decode(errors="replace") for end in ends if end]

    def _said(self) -> list[bytes]:
        lines = [_TORCH_PREFIX.sub(b"", line).rstrip() for line in self.lines if line.strip()]
        lines = [line for line in lines if not _PROGRESS.match(line)]
        # What goes wrong while the interpreter ends is a consequence, not the reason.
        consequences = [i for i, line in enumerate(lines) if line.startswith(b"Exception ignored in")]
        return lines[: consequences[0]] if consequences and consequences[0] else lines


def _write_all(data: bytes) -> None:
    try:
        while data:
            data = data[os.write(2, data) :]
    except OSError:  # no process reads the launcher's stderr any more; the job goes on
        pass
