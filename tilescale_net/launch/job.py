"""The processes of one host: start, watch and end them together, show their output, leave nothing running."""

import collections
import contextlib
import ctypes
import fcntl
import functools
import glob
import os
import pty
import re
import selectors
import signal
import socket
import subprocess
import sys
import termios
import time
import tty

from tilescale_net.launch import forking, say
from tilescale_net.runtime import settings

EXPLAINED = (2, 3)  # exit codes that rank 0 has explained: wrong arguments, an impossible benchmark
GRACE_S = 2.0  # for the others, after a failure, to print errors and clean up
USAGE_GRACE_S = 10.0  # the same after wrong arguments, which rank 0 reports for all of them
TERM_GRACE_S = 3.0  # between SIGTERM and SIGKILL
KEPT_LINES, SHOWN_LINES = 200, 60  # of a rank's output; the last ones are shown if it fails
SHARED_MEMORY = "/dev/shm"

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)

# Errors of a rank whose call failed because another rank ended: of this package, of torch's gloo and store, and of
# NCCL.
_VICTIM = re.compile(
    r"^(?:[\w.]+\.)?PeerLost\b|^rank (?P<self>\d+): (?!rank (?P=self)\b)rank \d+\b|\bDistStoreError\b|Application timeout caused pair closure"
    r"|(?:gloo|c10d|TCPStore|ProcessGroup|DistNetworkError|DistBackendError|NCCL).*"
    r"(?:Connection (?:was likely )?(?:closed|reset)|Broken pipe|recvValue failed|failed to recv|remote process exited"
    r"|Timed out waiting|client socket has timed out|caught collective operation timeout)",
    re.IGNORECASE,
)
# The last line of a traceback whose exception has a message.
_RAISED = re.compile(r"(?:[\w.]+\.)?[A-Z]\w*: .")
# The last line of a Python traceback, or a message in its style: `module.SomeError: what happened`.
_ERROR_LINE = re.compile(rb"^(?:Fatal Python error|(?:[\w.]+\.)?[A-Z]\w*)(?:: .*)?$")
_TRACEBACK = b"Traceback (most recent call last):"
# Python's lines between an exception and one that followed from it.
_CHAIN = (b"During handling of the above exception", b"The above exception was the direct cause")
# Lines of this package about steps that take long: no reason of a failure.
_PROGRESS = re.compile(rb"^(?:meeting the other ranks of the job|compiling kernel .*; the next time it is there)$")
_TORCH_PREFIX = re.compile(rb"^\[rank\d+\]: ?")  # torch's prefix of traceback lines


# -- output -----------------------------------------------------------------------------------------------------------


def _open_terminal() -> tuple[int, int] | None:
    """Both ends of a pseudo-terminal as large as ours; None if the system has none (a bare chroot)."""
    try:
        ours, theirs = pty.openpty()
    except OSError:
        return None
    tty.setraw(theirs)  # no translation of line ends, no echo
    size = fcntl.ioctl(sys.stderr.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    return ours, theirs


class Output:
    """The output of one rank, read by the launcher. `prefix`: of each shown line. `show`: whether lines are shown as
    they come (on the launcher's stderr) or only stored. `terminal`: whether the rank gets a terminal, so that progress
    bars and colours work as without a launcher."""

    def __init__(self, prefix: str = "", show: bool = False, terminal: bool = False):
        self._prefix = prefix.encode()
        self._show = show
        self._partial = b""
        self.lines: collections.deque[bytes] = collections.deque(maxlen=KEPT_LINES)
        self.fd, self.child_fd = (_open_terminal() if terminal else None) or os.pipe()
        os.set_blocking(self.fd, False)

    def read(self) -> bool:
        """Read arrived output; False once the stream has ended."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return True
        except OSError:  # a pseudo-terminal whose other side is closed
            data = b""
        if data and self._show and not self._prefix:
            _write_all(data)
        *lines, self._partial = re.split(rb"\r?\n|\r", self._partial + data)
        if not data and self._partial:
            lines, self._partial = [self._partial], b""
        for line in lines:
            self.lines.append(line)
            if self._show and self._prefix:
                _write_all(self._prefix + line + b"\n")
        return bool(data)

    def drain(self) -> None:
        """Read the remaining output after the rank has ended, then close."""
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
        line. Empty if the rank printed nothing."""
        errors, lines = self.errors(), self._significant()
        return errors[-1] if errors else lines[-1].strip().decode(errors="replace") if lines else ""

    def errors(self) -> list[str]:
        """The reason of the failure, if it is an error message, behind the errors that caused it."""
        lines = self._significant()
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

    def _significant(self) -> list[bytes]:
        lines = [_TORCH_PREFIX.sub(b"", line).rstrip() for line in self.lines if line.strip()]
        lines = [line for line in lines if not _PROGRESS.match(line)]
        # Errors at the interpreter's shutdown are consequences.
        consequences = [i for i, line in enumerate(lines) if line.startswith(b"Exception ignored in")]
        return lines[: consequences[0]] if consequences and consequences[0] else lines


def _write_all(data: bytes) -> None:
    try:
        while data:
            data = data[os.write(2, data) :]
    except OSError:  # the launcher's stderr is closed; the job continues
        pass


# -- processes --------------------------------------------------------------------------------------------------------


def _die_with(launcher: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # ended before the call above
        os._exit(1)


def remove_objects_of_ended_processes() -> None:
    """Remove the shared-memory objects of libfabric's shm provider that ended processes of this user left. A killed
    process cannot remove its own; see csrc/fabric/provider.h."""
    for path in glob.glob(os.path.join(SHARED_MEMORY, "tilescale_net-*")):
        if ":" in path:
            continue
        with contextlib.suppress(OSError), open(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+") as lock:
            if os.fstat(lock.fileno()).st_uid == os.geteuid():
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where its process lives
                for of_an_endpoint in glob.glob(f"{path}:*"):
                    os.unlink(of_an_endpoint)
                os.unlink(path)


def start_orphan_killer(groups: list[int]) -> tuple[int, int]:
    """A process that ends process groups when the launcher ends for any reason: ranks notice that themselves, their
    compilers do not. Returns its number, and the descriptor that closes with the launcher."""
    reader, writer = os.pipe()
    if pid := os.fork():
        os.close(reader)
        return pid, writer
    try:
        os.setsid()  # no terminal signals here
        # The store's listener, and outputs whose end others wait for, including stdin, stdout and stderr.
        forking.close_all_but({reader}, first=0)
        os.read(reader, 1)
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
    finally:
        os._exit(0)


ProcessType = type[subprocess.Popen[bytes]] | type[forking.Process]


class Rank:
    """One process, in its own session so that its children can be ended with it. `command`: of a fresh interpreter.
    `environment`: the variables of the rank. `process`: starts it. `store`: the listening socket of the job's store,
    for rank 0."""

    def __init__(
        self, command: list[str], environment: dict[str, str], process: ProcessType, store: socket.socket | None
    ):
        self.index = int(environment["RANK"])
        self.code: int | None = None  # exit code, negative for a signal; None while the process runs
        first = self.index == 0
        self.output = Output(
            prefix="" if first else f"[rank {self.index}] ",
            show=first or settings.OUTPUT.get() == "all",
            terminal=first and sys.stderr.isatty(),
        )
        self.process = process(
            command,
            env={**environment, **({"TSN_STORE_FD": str(store.fileno())} if store else {})},
            stdin=subprocess.DEVNULL,
            stdout=None if first else self.output.child_fd,
            stderr=self.output.child_fd,
            start_new_session=True,
            preexec_fn=functools.partial(_die_with, os.getpid()),
            pass_fds=[store.fileno()] if store else [],
        )
        os.close(self.output.child_fd)

    def has_ended(self) -> bool:
        """Whether the process has ended; sets `code`. It stays a zombie, so its number is not reused."""
        if found := os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self.code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return found is not None

    def signal(self, number: int) -> None:
        """Send a signal to the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def clean_up(self) -> None:
        """After the process has ended: end its children, and read its last output."""
        self.signal(signal.SIGKILL)
        self.output.drain()
        remove_objects_of_ended_processes()

    def _proc(self, name: str) -> str:
        try:
            with open(f"/proc/{self.process.pid}/{name}") as f:
                return f.read()
        except OSError:
            return ""

    def is_stopped(self) -> bool:
        """Whether the process is stopped (SIGSTOP, a debugger)."""
        return self._proc("stat").rpartition(")")[2][1:2] in ("T", "t")

    def catches(self, number: int) -> bool:
        """Whether it has a handler for a signal that would otherwise end it."""
        caught = re.search(r"^SigCgt:\s*(\w+)", self._proc("status"), re.M)
        return bool(caught and int(caught[1], 16) >> (number - 1) & 1)

    def is_victim(self) -> bool:
        """Whether it reports the loss of another rank, or failed from it; it may end before that rank."""
        reported = self.output.errors() or [self.output.last_error()]
        return any(_VICTIM.search(line) for line in reported)

    def gives_reason(self) -> bool:
        """Whether its end has a reason: an error message, or a signal not sent from here."""
        return bool(self.output.errors()) or (self.code or 0) < 0

    def exit_description(self, oom_before: dict[str, int]) -> str:
        """Text of the process's end. `oom_before`: `oom_kills` before the start."""
        code = self.code or 0
        if code == -signal.SIGKILL:
            grown = [(n, name) for name, n in oom_kills().items() if n > oom_before.get(name, n)]
            return "killed by SIGKILL, " + (
                f"by the out-of-memory killer (oom_kill is {grown[0][0]} in {grown[0][1]}, and was {oom_before[grown[0][1]]} at "
                "the start): give the job more memory, or start fewer ranks"
                if grown
                else "probably by the out-of-memory killer of the kernel or of a cgroup (see dmesg)"
            )
        if code < 0:
            return f"killed by {signal.Signals(-code).name if -code in list(signal.Signals) else f'signal {-code}'}"
        return f"exit code {code}"


def oom_kills(cgroups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> dict[str, int]:
    """Number of processes that the out-of-memory killer has ended in this process's cgroup, by the file that counts them."""
    counts = {}
    with contextlib.suppress(OSError), open(cgroups) as f:
        for line in f:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controllers and controllers != "memory":
                continue
            file = f"memory/{path}/memory.oom_control" if controllers else f"{path}/memory.events"
            name = os.path.normpath(f"{root}/{file}")
            with contextlib.suppress(OSError), open(name) as events:
                if found := re.search(r"^oom_kill (\d+)$", events.read(), re.M):
                    counts[name] = int(found[1])
    return counts


class Job:
    """All ranks of this host. `command`: of every rank. `count`: ranks on this host; the first is GROUP_RANK * count.
    `shared`: environment variables of all ranks. `process`: starts a rank, by a fresh interpreter or a fork of this
    one. `store`: the listening socket of the job's store, which rank 0 takes over."""

    def __init__(
        self,
        command: list[str],
        count: int,
        shared: dict[str, str],
        process: ProcessType = subprocess.Popen,
        store: socket.socket | None = None,
    ):
        self._selector = selectors.DefaultSelector()
        self._interrupted: int | None = None
        self._oom_before = oom_kills()
        self._catch_signals()
        self.ended: list[Rank] = []
        self.failed: list[Rank] = []  # in the order in which they ended, before the launcher reacted
        self.running: list[Rank] = []
        first = int(shared["GROUP_RANK"]) * count
        for local in range(count):
            environment = {**os.environ, **shared, "RANK": str(first + local), "LOCAL_RANK": str(local)}
            rank = Rank(command, environment, process, store if first + local == 0 else None)
            if store and first + local == 0:
                store.close()  # this process keeps none, so that peers see rank 0's end
            self.running.append(rank)
            self._selector.register(rank.output.fd, selectors.EVENT_READ, (self._on_output, rank))

    def run(self) -> int:
        """Wait for the job to end and return its exit code: 0, the first failed rank's, or 128 + signal."""
        ranks = list(self.running)
        killer, lifeline = start_orphan_killer([rank.process.pid for rank in ranks])
        try:
            return self._run()
        finally:
            os.close(lifeline)
            os.waitpid(killer, 0)
            for rank in ranks:
                rank.process.wait()

    def _run(self) -> int:
        while self.running and not self.failed and not self._interrupted:
            self._poll(None)
        if self._interrupted:
            return self._interrupt(self._interrupted)
        if not self.failed:
            return 0
        self._collect(USAGE_GRACE_S if self.failed[0].code == 2 else GRACE_S)
        failed = list(self.failed)
        stopped = [rank for rank in self.running if rank.is_stopped()]
        self._end_all(signal.SIGTERM)
        return self._explain(failed, stopped)

    # -- events -----------------------------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        self._wakeup = (reader, writer)
        signal.set_wakeup_fd(writer.fileno())
        self._selector.register(reader, selectors.EVENT_READ, (lambda _: reader.recv(64), None))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup and in background scripts
                signal.signal(number, self._on_signal)
        signal.signal(signal.SIGUSR1, self._on_question)
        # The end of a rank ends a wait for events, also on systems without pidfd_open.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    def _on_signal(self, number: int, _frame: object) -> None:
        self._interrupted = number

    def _on_question(self, number: int, _frame: object) -> None:
        """A user requests a report: one rank queries the others and prints it, see trace/reporter.py."""
        for rank in [r for r in self.running if r.catches(number)][:1]:
            rank.process.send_signal(number)

    def _on_output(self, rank: Rank) -> None:
        if not rank.output.read():
            self._selector.unregister(rank.output.fd)

    def _on_end(self, rank: Rank) -> None:
        if rank.output.fd in self._selector.get_map():
            self._selector.unregister(rank.output.fd)
        rank.clean_up()
        self.running.remove(rank)
        self.ended.append(rank)
        if rank.code != 0:
            self.failed.append(rank)

    def _poll(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            handler, rank = key.data
            handler(rank)
        # Output first: an ended rank's output is drained and closed.
        for rank in [rank for rank in self.running if rank.has_ended()]:
            self._on_end(rank)

    # -- ends -------------------------------------------------------------------------------------------------------

    def _collect(self, seconds: float) -> None:
        """Let the others end by themselves, for a while."""
        end = time.monotonic() + seconds
        while self.running and not self._interrupted and (left := end - time.monotonic()) > 0:
            self._poll(left)

    def _end_all(self, *numbers: int) -> None:
        """Send each signal in turn to the ranks still running, then kill them."""
        self._interrupted = None
        for number in numbers:
            for rank in self.running:
                rank.signal(number)
            self._collect(TERM_GRACE_S)
        for rank in self.running:
            rank.signal(signal.SIGKILL)
        while self.running:
            self._poll(None)

    def _interrupt(self, number: int) -> int:
        self._end_all(*([signal.SIGINT, signal.SIGTERM] if number == signal.SIGINT else [signal.SIGTERM]))
        say(f"stopped by {signal.Signals(number).name}; every rank has ended")
        return 128 + number

    def _explain(self, failed: list[Rank], stopped: list[Rank]) -> int:
        """Name the rank to look at and return its exit code."""
        # A rank that reports a lost peer is a victim, though it may end before the lost rank; a rank that ends without
        # output may have caught that report.
        root_causes = [rank for rank in failed if not rank.is_victim()]
        first = next((rank for rank in root_causes if rank.gives_reason()), (root_causes or failed)[0])
        reason, code = first.output.last_error(), first.code or 0
        # Ranks with the same failure, ended or not: rank 0, whose output was shown, represents all.
        raised = code > 0 and not first.is_victim() and _RAISED.match(reason)
        alike = [r for r in self.failed if raised and r.output.last_error() == reason]
        rank = min(alike, key=lambda r: r.index, default=first)
        if code in EXPLAINED and any(r.index == 0 and r.code == code for r in failed):
            return code
        if rank.index != 0 and rank.output.lines and settings.OUTPUT.get() != "all":
            say(f"last output of rank {rank.index}:")
            for line in list(rank.output.lines)[-SHOWN_LINES:]:
                print("  " + line.decode(errors="replace"), file=sys.stderr)
        for other in failed:
            if other is not rank and other not in alike:
                words = other.output.last_error()
                say(f"rank {other.index}: {other.exit_description(self._oom_before)}{'; ' + words if words else ''}")
        for other in stopped:
            say(f"rank {other.index} was stopped (by SIGSTOP or a debugger) and has been ended")
        if len(alike) > 1:
            ranks = ", ".join(map(str, sorted(r.index for r in alike)))
            say(f"ranks {ranks} failed for the same reason, see above: {first.exit_description(self._oom_before)}")
        else:
            early = [str(r.index) for r in self.ended[: self.ended.index(rank)] if r.code == 0]
            say(
                f"rank {rank.index} failed first: {rank.exit_description(self._oom_before)}; {reason or 'it said nothing'}"
                + (f" (rank {', '.join(early)} had ended before, with exit code 0)" if early else "")
            )
        return code if code > 0 else 128 - code
