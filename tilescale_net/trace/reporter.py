"""Queries all ranks for what they do, through the store of the job, and prints the report of a hang.

A rank that wants a report raises the store's number of alarms. Every rank's watchdog looks at that number, and writes
to the store what its rank does, marked with the number that it has seen.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tilescale_net.errors import PeerLost, SimulatorDeadlock, WaitTimeout
from tilescale_net.runtime import job_store
from tilescale_net.trace import hang_report
from tilescale_net.trace.hang_report import State

if TYPE_CHECKING:
    from tilescale_net.runtime.control import Control
    from tilescale_net.runtime.world import World

PATIENCE = 0.6  # seconds in which every rank whose watchdog runs has answered
_SLOWER = 3.0  # the same for a report that no thread waits for


class Report:
    """One question to all ranks: sent when it is made, printed when the reason is known."""

    def __init__(self, reporter: Reporter, once: bool = False):
        self._reporter, self._once = reporter, once
        self._printing, self._printed = threading.Lock(), False
        self._begin = time.monotonic()
        self._number = reporter.raise_alarm()

    def print(self, why: str, patience: float = PATIENCE) -> None:
        """Print the report on stderr; a second call waits for the first one. `why`: its first line. `patience`: seconds
        since the question that ranks may take to answer."""
        with self._printing:
            if self._printed:
                return
            self._printed = True
            with contextlib.suppress(PeerLost):
                if self._once and not self._reporter.is_first():
                    return
            states = self._reporter.collect(self._number, self._begin + patience)
            text = hang_report.text(why, states, self._reporter.size)
            print(f"tilescale_net: {text}", file=sys.stderr, flush=True)


class Reporter:
    """One rank's part in reports. `control`: rank, size and store. `state`: what this rank does, see
    hang_report.state_of_rank."""

    def __init__(self, control: Control, state: Callable[[], State]):
        self.size = control.size
        self._rank, self._store, self._state = control.rank, control.store, state
        self._own: State | None = None
        self._of_failure: Report | None = None
        self._printer_key = "reported by"  # key of the rank that prints the report of a failure
        self._asking = threading.Lock()

    def ask(self) -> Report:
        """Ask all ranks."""
        return Report(self)

    def ask_about(self, error: Exception | None) -> None:
        """Query all ranks, where that may show why this one waited in vain; once, whichever thread comes first."""
        if self.size > 1 and isinstance(error, WaitTimeout | SimulatorDeadlock):
            with self._asking:
                if self._of_failure is None:
                    self._of_failure = Report(self, once=True)

    def forget_failure(self, generation: int) -> None:
        """The next question is about another failure; `generation`: how often failures were forgotten."""
        with self._asking:
            self._of_failure, self._printer_key = None, f"reported by/{generation}"

    def print_failure(self, failure: Exception) -> None:
        """Print the answers to `ask_about`, on one of the ranks that query. A lost peer explains itself."""
        if self._of_failure is not None and not isinstance(failure, PeerLost):
            self._of_failure.print(str(failure))

    def raise_alarm(self) -> int:
        """Note what this rank does, and query the others. The number of the alarm; 0: the store does not answer."""
        self._own = self._state()
        try:
            number: int = self._store.ask(lambda s: s.count_up(job_store.ALARMS), seconds=PATIENCE)
        except PeerLost:
            return 0
        self.answer(number, self._own)
        return number

    def answer(self, number: int, state: State | None = None) -> None:
        """Report what this rank does, for alarm `number`. Does not wait for the store."""
        word = json.dumps([number, state or self._state()])
        self._store.post(lambda s: s.set(f"state/{self._rank}", word))

    def is_first(self) -> bool:
        """Whether no other rank has printed the report of a failure."""
        mine = str(self._rank)
        first: bytes = self._store.ask(lambda s: s.set_once(self._printer_key, mine), seconds=PATIENCE)
        return first.decode(errors="replace") == mine

    def collect(self, number: int, end: float) -> dict[int, State]:
        """The ranks' answers to alarm `number` until time `end`; earlier answers of ranks that have not answered since."""
        states = {self._rank: self._own or self._state()}
        with contextlib.suppress(PeerLost):
            while True:
                words = self._store.ask(
                    lambda s: [
                        None if r == self._rank else job_store.get_text(s, f"state/{r}") for r in range(self.size)
                    ],
                    seconds=PATIENCE,
                )
                fresh = 1
                for rank, word in enumerate(words):
                    answered, state = _read(word)
                    if state is not None and rank != self._rank:
                        states[rank] = state
                        fresh += answered >= number
                if fresh == self.size or time.monotonic() >= end:
                    break
                time.sleep(0.03)
        return states


def _read(word: str | None) -> tuple[int, State | None]:
    """Number and state that a rank has written; None for a state of another shape."""
    try:
        number, state = job_store.parse_json(word or "")
        hang_report.doing(state)
        waits = [[wait[key] for key in ("block", "line", "pe", "offset", "seconds")] for wait in state["waiting"]]
        sent = [[int(value) for value in entry[:4]] + [entry[4] * 1.0] for entry in state["sent"]]
        return int(number), state if len(waits) + len(sent) < 1 << 20 else None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError):
        return 0, None


def of_world(world: World) -> Reporter:
    """The reporter of a world, which has its control plane."""
    return Reporter(world.control, lambda: hang_report.state_of_rank(world))


# -- SIGUSR1 --------------------------------------------------------------------------------------------------------------

_asked: Callable[[], list[Reporter]] | None = None


def report_on_signal(reporters: Callable[[], list[Reporter]]) -> None:
    """Print a report whenever SIGUSR1 comes, unless the program has a handler of its own; the second call does nothing.
    Python's own handlers run when the main thread comes back to Python, which a thread that waits for a GPU does not.
    faulthandler writes from the signal handler itself; a thread waits for what it writes."""
    global _asked
    if _asked is not None or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        return
    _asked = reporters
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    faulthandler.register(signal.SIGUSR1, file=writer, all_threads=False)
    # A child made by fork shares the pipe, and is no rank.
    os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGUSR1))
    threading.Thread(target=_listen, args=(reader,), name="tilescale_net-report", daemon=True).start()


def _listen(reader: int) -> None:
    while os.read(reader, 1 << 16):
        time.sleep(0.05)  # the rest of what is written for one signal
        os.set_blocking(reader, False)
        with contextlib.suppress(BlockingIOError):
            while os.read(reader, 1 << 16):
                pass
        os.set_blocking(reader, True)
        for reporter in _asked() if _asked else []:
            with contextlib.suppress(PeerLost):
                reporter.ask().print("asked by SIGUSR1: who waits for what", _SLOWER)
