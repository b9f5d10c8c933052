"""Failure detection: heartbeats between hosts, and the watchdog that ends this rank's waits."""

import contextlib
import dataclasses
import functools
import json
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswerYet  # another class than the built-in one before Python 3.11
from dataclasses import dataclass, field
from typing import Any

from tilescale_net.errors import FabricError, PeerLost, TileScaleError, WaitTimeout
from tilescale_net.runtime import job_store, profiling
from tilescale_net.runtime.control import Control, announced, failed_rank
from tilescale_net.runtime.job_store import SignedStore
from tilescale_net.runtime.this_host import Process

# -- heartbeats ----------------------------------------------------------------------------------------------------------

# Ranks report in the job's store that they live, with few requests: one rank of a host sends heartbeats for all of
# them, with the stopped ones; each rank reads one key of failures, and the heartbeats of all hosts in one request.

INTERVAL = 0.25  # seconds between looks at the failure key
_BEAT = 4  # looks from one heartbeat to the next
_RANKS = 256  # larger jobs look less often, so the store's load stays the same
_PAUSE = 1.5  # share of the heartbeat interval between two looks beyond which this rank itself was late
_TAKEOVER = 3.0  # seconds without a heartbeat after which another rank of the host sends it
_TAKEOVER_STEP = 0.5  # seconds that each rank leaves to the previous one


@dataclass
class HealthReport:
    """Result of a round.

    Attributes:
        failed: the failure that another rank reported, as text.
        silent: the first rank of a host that counts as lost, and why, as text.
        lost: all ranks of such hosts.
        quiet: whether a heartbeat of a host is late that does not count as lost yet.
        alarms: number of reports requested so far, see trace/reporter.py.
        stopped: ranks that are stopped (SIGSTOP, a debugger), and for how many seconds they have been so.
    """

    failed: str | None = None
    silent: tuple[int, str] | None = None
    lost: set[int] = field(default_factory=set)
    quiet: bool = False
    alarms: int = 0
    stopped: dict[int, float] = field(default_factory=dict)


class Heartbeats:
    """One rank's part in the heartbeats.

    Args:
        rank: of this process.
        hosts: identity of each rank's host, equal for ranks of one host.
        timeout: seconds of silence after which the ranks of another host are lost.
        stopped: returns which ranks of this host are stopped.
        members: the ranks that count; default all.
        failed_key: see job_store.failed_key.
        clock: seconds, never running backwards.
    """

    def __init__(
        self,
        rank: int,
        hosts: list[str],
        timeout: float,
        stopped: Callable[[], list[int]] = list,
        clock: Callable[[], float] = time.monotonic,
        members: list[int] | None = None,
        failed_key: str = "failed",
    ):
        self._rank, self._timeout, self._stopped, self._clock = rank, timeout, stopped, clock
        self._failed_key = failed_key
        self._first: dict[str, list[int]] = {}  # the members of each host
        for r in range(len(hosts)) if members is None else members:
            self._first.setdefault(hosts[r], []).append(r)
        self._mine = hosts[rank]
        self._index = self._first[self._mine].index(rank)
        self._keys = [f"beat/{ranks[0]}" for ranks in self._first.values()]
        self._complete = False  # every host has sent a heartbeat
        self._rounds = self._sent = 0
        self._seen: dict[str, tuple[str, float]] = {}
        self._watched, self._looked = 0.0, clock()  # seconds that silence may count, and when this rank looked last
        self._stopped_since: dict[int, float] = {}
        self._report = HealthReport()
        self.interval = INTERVAL * max(1.0, len(hosts) / _RANKS)
        self._late = 2 * _BEAT * self.interval  # seconds of silence after which to look again

    def round(self, store: SignedStore) -> HealthReport:
        """Look, and send a heartbeat if due. Raises the store's errors."""
        alarms, failed, beats = store.count(job_store.ALARMS), self._report.failed, self._rounds % _BEAT == 0
        # One request if nothing happened: a failing rank raises an alarm too, after it has written the reason.
        if failed is None and (beats or alarms != self._report.alarms):
            failed = announced(job_store.get_text(store, self._failed_key), self._rank)
        if beats:
            self._count()
            self._beat(store)
            self._report = self._look(store)
        self._rounds += 1
        now = self._clock()
        stopped = {r: now - since for r, since in self._stopped_since.items()}
        self._report = dataclasses.replace(self._report, failed=failed, alarms=alarms, stopped=stopped)
        return self._report

    def _count(self) -> None:
        """A pause of this rank itself, by a busy machine or SIGSTOP, does not count as silence of others."""
        now = self._clock()
        self._watched += min(now - self._looked, _PAUSE * _BEAT * self.interval)
        self._looked = now

    def _beat(self, store: SignedStore) -> None:
        """Send the heartbeat of this host if it is this rank's turn."""
        key = f"beat/{self._first[self._mine][0]}"
        value, since = self._seen.get(key, ("", self._watched))
        self._seen.setdefault(key, (value, since))
        silence = self._watched - since
        if self._index == 0 or silence > _TAKEOVER + _TAKEOVER_STEP * self._index:
            self._sent += 1
            store.set(key, json.dumps([self._rank, self._sent, self._stopped()]))

    def _look(self, store: SignedStore) -> HealthReport:
        self._complete = self._complete or store.check(self._keys)
        values: dict[str, str] = {}
        if self._complete:
            values = {k: (v or b"").decode(errors="replace") for k, v in zip(self._keys, store.get_all(self._keys))}
        elif self._watched > self._late:  # a rank may be lost before its first heartbeat: the others are not
            values = {k: job_store.get_text(store, k) or "" for k in self._keys}
        return self._judge(store, values)

    def _judge(self, store: SignedStore, values: dict[str, str]) -> HealthReport:
        now, report = self._watched, HealthReport()
        stopped: set[int] = set()
        longest = self._timeout
        for (host, members), key in zip(self._first.items(), self._keys):
            last, since = self._seen.get(key, ("", now))
            value = values.get(key) or last  # only signed values are signs of life
            if value != last:
                since = now
            self._seen[key] = (value, since)
            stopped |= set(_stopped_in(value)) & set(members)
            silence = now - since
            if host == self._mine or silence <= min(self._late, self._timeout) or _ended_ranks(store, members):
                continue
            report.quiet = True
            if silence > self._timeout:
                report.lost |= set(members)
            if silence > longest:  # others may only be busy with its loss
                longest = silence
                others = f" (nor did ranks {members[1]} to {members[-1]} of its host)" if len(members) > 1 else ""
                report.silent = members[0], f"sent no heartbeat for {silence:.0f} s{others}"
        clock = self._clock()
        self._stopped_since = {r: self._stopped_since.get(r, clock) for r in stopped if r != self._rank}
        return report


def _ended_ranks(store: SignedStore, ranks: Iterable[int]) -> set[int]:
    """Ranks that have left in good order."""
    return {r for r in ranks if store.check([f"ended/{r}"])}


def _stopped_in(value: str) -> list[int]:
    nothing: list[int] = []
    return job_store.read(value, lambda found: [int(rank) for rank in found[2]], nothing)


# -- watchdog ------------------------------------------------------------------------------------------------------------

# A thread per rank. It watches peers on this host as processes, whose exit it sees at once, and peers on other hosts by
# heartbeats in the store. A failing rank writes the reason to the store, so the others can name it. On a loss the
# watchdog sets the abort word: kernels return from their waits, and the next call of the package raises PeerLost. The
# thread never waits for the store: a store that does not answer is a loss too.

_STOPPED = 1.0  # seconds after which others go on without a stopped process
_SLOW = 3.0  # seconds without an answer after which the store counts as silent
_LONG = 1.0  # seconds after which a step of this rank is reported to the others
_EXPLAIN = 0.5  # seconds that a peer's death or report has to arrive, which explains an error of this rank


class Watchdog:
    """Watches the other members of a job.

    Args:
        control: the control plane (rank, members, store, and where the ranks are).
        heartbeat_timeout: seconds of silence after which ranks of another host are lost.
        poll_local: looks for an error of this rank's kernels or proxy.
        on_alarm: called with the number of alarms whenever another rank has raised one.
        on_loss: called once when a peer or this rank has failed, see `loss`.

    Attributes:
        loss: why the job is lost, with this rank's own error, if that is why; or None.
    """

    def __init__(
        self,
        control: Control,
        heartbeat_timeout: float,
        poll_local: Callable[[], TileScaleError | None],
        on_loss: Callable[[], None],
        on_alarm: Callable[[int], None],
    ):
        self._control = control
        self._timeout = heartbeat_timeout
        self._poll_local = poll_local
        self._on_loss, self._on_alarm = on_loss, on_alarm
        self._alarms = 0
        self._step = ""
        # Read by other threads, so both parts change together.
        self.loss: tuple[str, TileScaleError | None] | None = None
        self._news = HealthReport()
        self._round: Future[Any] | None = None
        self._asked = 0.0  # when the round began
        self._silent: tuple[int | None, int] = (None, 0)
        self._processes: dict[int, Process] = {}
        self._departed: set[int] = set()
        self._stopped_since: dict[int, float] = {}
        self._lock = threading.Lock()
        self._failed_key, self._ack_key = control.failed_key, f"acked/{control.generation}"
        hosts = control.hosts
        for rank, (host, process) in enumerate(zip(hosts, control.processes)):
            if rank == control.rank or rank in control.lost or host != hosts[control.rank]:
                continue
            with contextlib.suppress(OSError):  # gone already: its report or a broken connection will show that
                self._processes[rank] = Process(*process)
        present = [r for r in range(len(hosts)) if r not in control.lost]
        self._beats = Heartbeats(
            control.rank, hosts, heartbeat_timeout, self._stopped_here, members=present, failed_key=self._failed_key
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tilescale_net-watchdog", daemon=True)
        self._thread.start()

    def reason(self) -> str | None:
        """Why the job is lost, or None."""
        return self.loss[0] if self.loss is not None else None

    def lost_ranks(self) -> set[int]:
        """Ranks known to be lost now: processes that have ended or are stopped, and hosts that are silent."""
        self._ask()
        now = time.monotonic()
        self._stopped_since = {rank: self._stopped_since.get(rank, now) for rank in self._stopped_here()}
        stopped = {rank for rank, since in self._stopped_since.items() if now - since >= _STOPPED}
        return {*self._dead(), *stopped, *self._news.lost}

    def end_processes(self, ranks: set[int], seconds: float = 10.0) -> set[int]:
        """End processes of this host (SIGKILL) and wait for their end; returns ranks that may still run."""
        with self._lock:
            for process in [self._processes[rank] for rank in ranks if rank in self._processes]:
                process.kill()
        end = time.monotonic() + seconds
        while (left := ranks - self._ended()) and time.monotonic() < end and left & self._processes.keys():
            time.sleep(0.01)
        return left

    def explanation_of(self, error: TileScaleError) -> str | None:
        """The loss of a peer, if it may have caused this rank's `error`."""
        return self.explanation() if isinstance(error, WaitTimeout | FabricError | PeerLost) else None

    def explanation(self, seconds: float = _EXPLAIN) -> str | None:
        """The loss of a peer. Waits until it is known; while a rank is silent, until that rank responds or is lost."""
        begin = looked = time.monotonic()
        while True:
            loss = self.loss
            found = loss[0] if loss is not None and loss[1] is None else self._peers()
            if found:
                return found
            now = time.monotonic()
            closed = self._stop.is_set() and threading.current_thread() is self._thread
            if closed or now > begin + seconds and not (self._heartbeat_overdue() and now < begin + 2 * self._timeout):
                return self._stopped_peer(0.0)
            if threading.current_thread() is self._thread and now >= looked + self._beats.interval:
                looked = now
                self._count_store_silence()
            self._ask()
            time.sleep(0.02)

    def _heartbeat_overdue(self) -> bool:
        """Whether a host, or the store, is silent and may turn out to be lost."""
        with self._lock:
            owes = self._round is not None and not self._round.done()
            return self._news.quiet or (owes and time.monotonic() - self._asked > _EXPLAIN / 2)

    def announce_end(self) -> None:
        """Report to the other ranks that this one leaves in good order, and stop watching for others that leave."""
        self._stop.set()
        rank = self._control.rank
        try:
            self._control.store.ask(lambda s: s.set(f"ended/{rank}", "1"), seconds=self._timeout)
        except PeerLost:
            pass

    def keep_store(self) -> None:
        """Stay until all others have ended, or the job is lost, if the store ends with this process."""
        if self._control.rank == self._control.store.kept_by:
            self._stay_while(lambda others, store: self.loss is None and bool(others - _ended_ranks(store, others)))

    def wait_for_others(self, seconds: float = 10.0) -> None:
        """After a failure: let the other ranks learn its reason. Only the rank that keeps the store has to wait. It
        does not wait for lost ranks or the failed rank; the limit is for slow or silent ranks."""
        self._control.store.post(self._ack_failure)  # this rank fails too, and waits for no other reason
        self._stay_while(self._unacked, seconds)

    def _stay_while(self, wanted: Callable[[set[int], SignedStore], bool], seconds: float = math.inf) -> None:
        """Wait while other live ranks need it; on rank 0 if no rank keeps the store."""
        control, end, pause = self._control, time.monotonic() + seconds, 0.02
        while control.rank == (control.store.kept_by or 0) and (left := end - time.monotonic()) > 0:
            others = set(range(control.size)) - {control.rank, *self._dead(), *self._departed} - control.lost
            try:
                if not control.store.ask(functools.partial(wanted, others), min(left, control.store.silence)):
                    return
            except PeerLost:
                return
            time.sleep(min(pause, left))
            pause = min(2 * pause, self._beats.interval)

    def _unacked(self, others: set[int], store: SignedStore) -> bool:
        """Whether a rank has still to learn of a failure."""
        others = others - {failed_rank(job_store.get_text(store, self._failed_key))}
        if store.check([f"{self._ack_key}/{r}" for r in others]):
            return False
        return not all(store.check([f"{self._ack_key}/{r}"]) or store.check([f"ended/{r}"]) for r in others)

    def close(self) -> None:
        """Stop the watchdog."""
        self._stop.set()
        self._thread.join(timeout=5)
        self.loss = None
        with self._lock:
            for process in self._processes.values():
                process.close()
            self._processes = {}

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(self._beats.interval):
            self._report_step()
            self._count_store_silence()
            if self.loss is None:
                found = self._look()
                if found and not self._stop.is_set():
                    self.loss = found
                    self._control.store.post(self._ack_failure)
                    self._on_loss()

    def _report_step(self) -> None:
        """The long step that this rank is in: ranks that wait for it may give up."""
        if (step := profiling.current_step(_LONG)) != self._step:
            self._step = step
            self._control.store.post(lambda s: s.set(f"step/{self._control.rank}", step))

    def _ack_failure(self, store: SignedStore) -> None:
        if (rank := self._control.rank) != (self._control.store.kept_by or 0):
            store.set(f"{self._ack_key}/{rank}", "1")

    def _look(self) -> tuple[str, TileScaleError | None] | None:
        """The reason of a loss and this rank's own error."""
        own = self._poll_local()
        if own is not None:
            cause = self.explanation_of(own)
            if cause is None:
                if not self._stop.is_set():
                    self._control.announce_failure(str(own), key=self._failed_key)
                return str(own), own
            return cause, None
        self._ask()
        found = self._peers() or self._stopped_peer(self._timeout)
        return (found, None) if found else None

    def _ask(self) -> None:
        """Take the answer of the round before, and begin the next one."""
        with self._lock:
            if self._round is not None and not self._round.done():
                return
            if self._round is not None and self._round.exception() is None:
                self._news = self._round.result()
                if self._news.alarms > self._alarms:
                    self._alarms = self._news.alarms
                    self._on_alarm(self._alarms)
            self._round, self._asked = self._control.store.post(self._beats.round), time.monotonic()

    def _peers(self) -> str | None:
        """The reason why peers are lost."""
        if self._news.failed:
            return self._news.failed
        for rank in self._dead():
            reason = self._exit_reason(rank)
            if reason:
                return reason
        if self._news.silent:
            return self._report_failed(*self._news.silent)
        return self._store_is_lost()

    def _report_failed(self, rank: int, why: str) -> str:
        """Report the loss of a rank that cannot report it itself, so all ranks name the same one."""
        self._control.announce_failure(why, rank, seconds=0.1, key=self._failed_key)
        return f"rank {rank} {why}"

    def _exit_reason(self, rank: int) -> str | None:
        """The reason of the loss of a rank whose process has ended; None if it left in good order."""
        words = self._control.store.post(
            lambda s: (s.check([f"ended/{rank}"]), job_store.get_text(s, self._failed_key))
        )
        try:
            ended, failed = words.result(_EXPLAIN)
        except NoAnswerYet:
            if self._store_silence_s() < _SLOW:  # on a busy machine: the next look tries again
                return None
            ended, failed = False, None
        except PeerLost:  # it kept the store
            ended, failed = False, None
        if ended:
            with self._lock:
                self._departed.add(rank)
            return None
        found = announced(failed, self._control.rank)
        return found or self._report_failed(rank, "(process ended without a report) is gone")

    def _count_store_silence(self) -> None:
        answered, looks = self._silent
        now = self._control.store.answered
        self._silent = now, looks + 1 if now is not None and now == answered else 0

    def _store_silence_s(self) -> float:
        """Seconds without an answer of the store: counted in looks, so a process that was itself stopped does not blame
        the store."""
        return self._silent[1] * self._beats.interval

    def _store_is_lost(self) -> str | None:
        if self._control.store.lost:
            return self._control.store.lost
        seconds = self._store_silence_s()
        return (
            f"{self._control.store.keeper} does not answer (for {seconds:.0f} s)" if seconds > self._timeout else None
        )

    def _stopped_peer(self, seconds: float) -> str | None:
        for rank, since in self._news.stopped.items():
            if since >= seconds:
                return self._report_failed(rank, f"is stopped (by SIGSTOP or a debugger) for {since:.0f} s or more")
        return None

    # -- processes of this host -------------------------------------------------------------------------------------

    def _dead(self) -> list[int]:
        """Ranks whose process has ended, except ranks that left in good order."""
        return sorted(self._ended() - self._departed)

    def _ended(self) -> set[int]:
        with self._lock:
            return {rank for rank, process in self._processes.items() if process.ended()}

    def _stopped_here(self) -> list[int]:
        """Ranks of this host that are stopped."""
        with self._lock:
            return [rank for rank, process in self._processes.items() if process.stopped()]
