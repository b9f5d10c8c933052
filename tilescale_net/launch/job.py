"""The processes of one host: started together, watched, ended together."""

import contextlib
import ctypes
import fcntl
import functools
import glob
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time

from tilescale_net.launch import forking, messages
from tilescale_net.launch.environment import hand_over_store
from tilescale_net.launch.orphans import OrphanKiller
from tilescale_net.launch.output import Output
from tilescale_net.runtime import settings

TOLD = (2, 3)  # exit codes that rank 0 has explained: wrong arguments, and a benchmark that can measure nothing here
GRACE = 2.0  # seconds that the others have, after a failure, to print what they know and to clean up
USAGE_GRACE = 10.0  # the same after wrong arguments, which rank 0 reports for all of them
TERM_GRACE_S = 3.0  # between asking a rank to end and killing it

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
SHARED_MEMORY = "/dev/shm"

# The errors of a rank whose call broke, or came to nothing, because another rank ended: of this package, of torch's
# gloo and store, and of NCCL.
_VICTIM = re.compile(
    r"^(?:[\w.]+\.)?PeerLost\b|^rank (?P<self>\d+): (?!rank (?P=self)\b)rank \d+\b|\bDistStoreError\b|Application timeout caused pair closure"
    r"|(?:gloo|c10d|TCPStore|ProcessGroup|DistNetworkError|DistBackendError|NCCL).*"
    r"(?:Connection (?:was likely )?(?:closed|reset)|Broken pipe|recvValue failed|failed to recv|remote process exited"
    r"|Timed out waiting|client socket has timed out|caught collective operation timeout)",
    re.IGNORECASE,
)


# The last line of the traceback of an exception that says something.
_RAISED = re.compile(r"(?:[\w.]+\.)?[A-Z]\w*: .")


def _die_with(launcher: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # which ended before the call above
        os._exit(1)


def remove_objects_of_ended_processes() -> None:
    """Remove the objects in shared memory by which libfabric's shm provider reached processes of this user that have ended.

    A process that is killed cannot remove its own; see csrc/fabric/shared_memory_objects.h.
    """
    for path in glob.glob(os.path.join(SHARED_MEMORY, "tilescale_net-*")):
        if ":" in path:
            continue
        with contextlib.suppress(OSError), open(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+") as lock:
            if os.fstat(lock.fileno()).st_uid == os.geteuid():
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where its process lives
                for of_an_endpoint in glob.glob(f"{path}:*"):
                    os.unlink(of_an_endpoint)
                os.unlink(path)


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise."""
    try:
        with open(f"/proc/{pid}/status") as f:
            return any(line.startswith("SigCgt:") and int(line.split()[1], 16) >> (number - 1) & 1 for line in f)
    except (OSError, ValueError):
        return False


ProcessType = type[subprocess.Popen] | type[forking.Process]


class Rank:
    """One process, in a session of its own so that all that it starts can be ended with it."""

    def __init__(self, command: list[str], index: int, local: int, shared: dict[str, str], process: ProcessType):
        self.index = index
        everything = settings.OUTPUT.get() == "all"
        first = index == 0
        self.output = Output(
            prefix="" if first else f"[rank {index}] ",
            show=first or everything,
            terminal=first and sys.stderr.isatty(),
        )
        store, listeners = hand_over_store(index)
        environment = {**os.environ, **shared, **store, "RANK": str(index), "LOCAL_RANK": str(local)}
        self.process = process(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if first else self.output.child_fd,
            stderr=self.output.child_fd,
            start_new_session=True,
            preexec_fn=functools.partial(_die_with, os.getpid()),
            pass_fds=[listener.fileno() for listener in listeners],
        )
        for listener in listeners:
            listener.close()
        self.output.close_child_end()

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        return self.process.returncode

    def has_ended(self) -> bool:
        """Whether the process has ended; it stays a zombie until `reap`."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def signal(self, number: int) -> None:
        """Send a signal to the process and all that it started."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def reap(self) -> None:
        """After the process has ended: end what it left behind, and take its last output."""
        # First, while the process is a zombie: no other process can have its number yet.
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.output.drain()
        remove_objects_of_ended_processes()

    def is_stopped(self) -> bool:
        """Whether the process stands still (SIGSTOP, a debugger)."""
        try:
            with open(f"/proc/{self.process.pid}/stat") as f:
                return f.read().rpartition(")")[2].split()[0] in "Tt"
        except (OSError, IndexError):
            return False

    def is_victim(self) -> bool:
        """Whether it reports that another rank was lost, or failed from that; it may well end before that one does."""
        said = self.output.errors() or [self.output.last_error()]
        return any(_VICTIM.search(line) for line in said)

    def gives_reason(self) -> bool:
        """Whether its own end says why: by an error message, or a signal that nobody here has sent."""
        return bool(self.output.errors()) or self.code < 0

    def exit_description(self) -> str:
        """How the process ended, as text."""
        if self.code < 0:
            name = signal.Signals(-self.code).name if -self.code in list(signal.Signals) else f"signal {-self.code}"
            return f"killed by {name}"
        return f"exit code {self.code}"


class Job:
    """All ranks of this host.

    Args:
        command: what every rank runs.
        count: ranks on this host; the first is GROUP_RANK * count.
        shared: environment variables of all ranks.
        process: starts a rank, by a fresh interpreter or by a fork of this one.
    """

    def __init__(self, command: list[str], count: int, shared: dict[str, str], process: ProcessType = subprocess.Popen):
        self._orphans = OrphanKiller()
        self._selector = selectors.DefaultSelector()
        self._interrupted: int | None = None
        self._catch_signals()
        self.ended: list[Rank] = []
        self.failed: list[Rank] = []  # in the order in which they ended, before anything was done about it
        self.running: list[Rank] = []
        first = int(shared["GROUP_RANK"]) * count
        for local in range(count):
            rank = Rank(command, first + local, local, shared, process)
            self.running.append(rank)
            self._orphans.add(rank.process.pid)
            self._selector.register(rank.output.fd, selectors.EVENT_READ, (self._on_output, rank))

    def run(self) -> int:
        """Wait for the job to end and return its exit code: 0, that of the rank that failed first, or 128 + signal."""
        try:
            return self._run()
        finally:
            self._orphans.close()

    def _run(self) -> int:
        while self.running and not self.failed and not self._interrupted:
            self._poll(None)
        if self._interrupted:
            return self._interrupt()
        if not self.failed:
            return 0
        self._collect(USAGE_GRACE if self.failed[0].code == 2 else GRACE)
        failed_ranks = list(self.failed)
        stopped = [rank for rank in self.running if rank.is_stopped()]
        self._end_all(signal.SIGTERM)
        return self._explain(failed_ranks, stopped)

    # -- events -----------------------------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        self._wakeup = (reader, writer)
        signal.set_wakeup_fd(writer.fileno())
        self._selector.register(reader, selectors.EVENT_READ, (lambda _: reader.recv(64), None))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup and scripts in the background set them
                signal.signal(number, self._on_signal)
        signal.signal(signal.SIGUSR1, self._on_question)
        # The end of a rank ends a wait for events, on systems that refuse pidfd_open, too.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    def _on_signal(self, number: int, _frame) -> None:
        self._interrupted = number

    def _on_question(self, number: int, _frame) -> None:
        """A user asks what the ranks do: one of them queries the others and prints it, see trace/reporter.py."""
        for rank in [r for r in self.running if _catches(r.process.pid, number)][:1]:
            rank.process.send_signal(number)

    def _on_output(self, rank: Rank) -> None:
        if not rank.output.read():
            self._selector.unregister(rank.output.fd)

    def _on_end(self, rank: Rank) -> None:
        if rank.output.fd in self._selector.get_map():
            self._selector.unregister(rank.output.fd)
        rank.reap()
        self._orphans.remove(rank.process.pid)
        self.running.remove(rank)
        self.ended.append(rank)
        if rank.code != 0:
            self.failed.append(rank)

    def _poll(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            handler, rank = key.data
            handler(rank)
        # Output first: that of a rank that has ended is drained and closed.
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

    def _interrupt(self) -> int:
        number = self._interrupted
        self._end_all(*([signal.SIGINT, signal.SIGTERM] if number == signal.SIGINT else [signal.SIGTERM]))
        messages.say(f"stopped by {signal.Signals(number).name}; every rank has ended")
        return 128 + number

    def _explain(self, failed_ranks: list[Rank], stopped: list[Rank]) -> int:
        """Name the rank to look at and return its exit code."""
        # A rank that reports a lost peer is a victim, though it may well end before the rank that it lost; and one that
        # ends without a word may have caught that report.
        root_causes = [rank for rank in failed_ranks if not rank.is_victim()]
        first = next((rank for rank in root_causes if rank.gives_reason()), (root_causes or failed_ranks)[0])
        said = first.output.last_error()
        # Ranks that met the same, also those that have not come to their end: rank 0, which was heard, speaks for all.
        raised = first.code > 0 and not first.is_victim() and _RAISED.match(said)
        alike = [r for r in self.failed if raised and r.output.last_error() == said]
        rank = min(alike, key=lambda r: r.index, default=first)
        code = first.code if first.code > 0 else 128 - first.code
        if code in TOLD and any(r.index == 0 and r.code == code for r in failed_ranks):
            return code
        if rank.index != 0 and rank.output.lines and settings.OUTPUT.get() != "all":
            messages.say(f"last output of rank {rank.index}:")
            for line in list(rank.output.lines)[-60:]:
                print("  " + line.decode(errors="replace"), file=sys.stderr)
        for other in failed_ranks:
            if other is not rank and other not in alike:
                words = other.output.last_error()
                messages.say(f"rank {other.index}: {other.exit_description()}{'; ' + words if words else ''}")
        for other in stopped:
            messages.say(f"rank {other.index} was stopped (by SIGSTOP or a debugger) and has been ended")
        if len(alike) > 1:
            ranks = ", ".join(map(str, sorted(r.index for r in alike)))
            messages.say(f"ranks {ranks} failed for the same reason, see above: {first.exit_description()}")
            return code
        early = [r.index for r in self.ended[: self.ended.index(rank)] if r.code == 0]
        messages.say(
            f"rank {rank.index} failed first: {rank.exit_description()}"
            + (f"; {said}" if said else "; it said nothing")
            + (f" (rank {', '.join(map(str, early))} had ended before, with exit code 0)" if early else "")
        )
        return code
