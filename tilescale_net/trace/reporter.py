"""The report of a hang: each rank's activity, the ranks whose signals are missing, and the query of all ranks.

A rank that wants a report raises the store's number of alarms. Every rank's watchdog reads that number, and writes its
rank's state to the store, marked with the number.
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
from typing import TYPE_CHECKING, Any

from tilescale_net.errors import PeerLost, SimulatorDeadlock, WaitTimeout
from tilescale_net.runtime import context, job_store, profiling
from tilescale_net.trace import events, traced_calls

if TYPE_CHECKING:
    from tilescale_net.runtime.control import Control
    from tilescale_net.runtime.world import World


# -- the report --------------------------------------------------------------------------------------------------------


State = dict[str, Any]  # of a rank, see state_of_rank; or of one of its waiting threads
MAX_ROWS = 24
_HEAD = ("rank", "block", "thread", "line", "call", "word", "has", "wants", "for", "from")


def text(why: str, states: dict[int, State], size: int, missing: dict[int, str] | None = None) -> str:
    """The report. `why`: its first line. `states`: by rank, see `state_of_rank`. `size`: number of ranks. `missing`:
    facts about ranks that have not answered."""
    rows, notes = [], []
    for rank in sorted(states):
        for wait in states[rank]["waiting"]:
            sender, how = sender_of(rank, wait, states, size)
            rows.append(_row(rank, wait, sender))
            if how and how not in notes:
                notes.append(how)
    hidden = sum(state["waits"] for state in states.values()) - len(rows[:MAX_ROWS])
    lines = [why, *_table(rows[:MAX_ROWS])]
    if hidden > 0:
        lines.append(f"… and {hidden} more threads that wait")
    if not rows:
        lines.append("no thread of a kernel is known to wait")
    lines += notes
    lines += [f"rank {rank}: {doing(states[rank])}" for rank in sorted(states)]
    for rank in range(size):
        if rank not in states:
            lines.append(f"rank {rank}: {(missing or {}).get(rank, 'does not answer')}")
    return "\n".join(job_store.printable(line) for line in lines)


def doing(state: State) -> str:
    """Text of a rank's activity."""
    parts = []
    if state["kernel"]:
        name, seconds = state["kernel"]
        waits = state["waits"]
        threads = f", {waits} thread{'s' if waits > 1 else ''} waiting" if waits else ", none of its threads waits"
        parts.append(f"runs kernel {name} for {seconds:.1f} s{threads}")
    if state["host"]:
        name, seconds = state["host"]
        parts.append(f"in {name} for {seconds:.1f} s")
    if step := state.get("step"):
        parts.append(str(step))
    if not parts:
        parts.append("in the program, neither in a kernel nor in a call of the package")
    return "; ".join(parts) + (f" ({state['place']})" if state["place"] else "")


def _row(rank: int, wait: State, sender: int | None) -> tuple[str, ...]:
    word = wait["name"] or ""
    if not word and wait["offset"] is not None:
        word = "the package's own" if wait["operation"].startswith("barrier") else f"heap offset {wait['offset']}"
    elif word:
        word = f"{word} at {wait['offset']}"
    return (
        str(rank),
        str(wait["block"]),
        "" if wait["thread"] is None else str(wait["thread"]),
        wait["line"],
        wait["operation"],
        word,
        "" if wait["has"] is None else str(wait["has"]),
        "" if wait["wants"] is None else f"{wait['compare']} {wait['wants']}".strip(),
        f"{wait['seconds']:.1f} s",
        "?" if sender is None else f"rank {sender}",
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    widths = [max(len(row[i]) for row in [_HEAD, *rows]) for i in range(len(_HEAD))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [_HEAD, *rows]]


# -- the rank that should signal --------------------------------------------------------------------------------------

# A waiting rank does not know which rank writes its word; the writers do. If no rank has sent this very word yet, the
# words sent so far show the program's pattern.


def sender_of(rank: int, wait: State, states: dict[int, State], size: int) -> tuple[int | None, str]:
    """The rank that should send the signal for thread `wait` of `rank`, None if unknown, and the evidence. `wait`: an
    element of "waiting", see `state_of_rank`. `states`: of the ranks that have answered."""
    if wait["pe"] is not None and wait["pe"] >= 0:
        return wait["pe"], ""
    if wait["offset"] is None or wait["operation"] not in ("wait", "test"):
        return None, ""
    same_word = [
        (sender, entry) for sender, state in states.items() for entry in state["sent"] if entry[1] == wait["offset"]
    ]
    here = [(sender, entry) for sender, entry in same_word if entry[0] == rank]
    if here:
        sender, (_, _, count, value, ago, line) = min(here, key=lambda found: found[1][4])
        times = "once" if count == 1 else f"{count} times"
        where = f" in {line}" if line else ""
        return sender, f"rank {sender} has sent it {times}, the last time {value}, {ago:.1f} s ago{where}"
    senders = {sender for sender, _ in same_word}
    if len(senders) == 1:
        (sender,) = senders
        if sender != rank:
            return sender, f"rank {sender} sends this word to other ranks, and has not sent it to rank {rank}"
    distances = {(entry[0] - sender) % size for sender, entry in same_word}
    if len(distances) == 1:
        sender = (rank - distances.pop()) % size
        return sender, f"others get this word from the rank at the same distance; rank {sender} has not sent it"
    if size == 2:
        return 1 - rank, f"rank {1 - rank} has not sent it"
    return None, "no rank has sent this word to any rank"


# -- state of one rank
# --------------------------------------------------------------------------------------------------

MAX_WAITS = 64  # sent to others, besides the total number
MAX_SENT = 512


def state_of_rank(world: World) -> State:
    """The state of this process in `world`.

    Returns:
        rank; host: [call, seconds] or None; step: that takes long, or ''; place: in the user's program; kernel: [name,
        seconds] or None; waits: how many threads wait; waiting: of the longest, a dict each with block, thread, line,
        operation, pe, offset, name, compare, wants, has, seconds; sent: [pe, offset, count, value, seconds ago, line] of
        signals sent, the latest last.
    """
    call = profiling.outermost()
    state = {
        "rank": world.rank,
        "host": list(call) if call else None,
        "step": profiling.current_step(),
        "place": profiling.python_place(),
        "kernel": None,
        "waits": 0,
        "waiting": [],
        "sent": [],
    }
    if getattr(world, "heap", None) is None:
        return state  # under construction
    if world.device_kind == "simulator":
        _add_simulated(state, world)
    elif not _add_traced(state, world):
        _add_record(state, world)
    return state


def _add_simulated(state: State, world: World) -> None:
    from tilescale_net import _simulator

    memory = world.memory
    assert memory is not None
    live, now = _simulator.live_state(), time.monotonic_ns()
    if live["kernel"]:
        state["kernel"] = [live["kernel"].removesuffix("_kernel"), (now - live["began_ns"]) * 1e-9]
    waits = sorted(live["waits"], key=lambda wait: wait["since_ns"])
    state["waits"] = len(waits)
    for wait in waits[:MAX_WAITS]:
        found = _subject(world, wait["operation"], wait["word"], wait["comparison"], wait["wanted"], wait["has"])
        found |= {key: wait[key] for key in ("block", "thread", "line", "pe")}
        state["waiting"].append(found | {"seconds": (now - wait["since_ns"]) * 1e-9})
    state["sent"] = [
        [pe, word - memory.base, count, value, (now - at) * 1e-9, line]
        for pe, word, count, value, at, line in _simulator.sent_signals(MAX_SENT)
        if 0 <= word - memory.base < memory.size
    ]


def _add_traced(state: State, world: World) -> bool:
    """The calls that kernels have written to the trace of a GPU; False if none is written, or no thread waits."""
    gpu = world.recorder.gpu_calls if world.recorder is not None else None
    if gpu is None:
        return False
    calls, now, memory = gpu.calls(), time.monotonic_ns(), world.memory
    assert memory is not None

    def since(gpu_ns: int) -> float:
        return float(now - gpu.process_ns(gpu_ns)) * 1e-9

    sent: dict[tuple[int, int], list[Any]] = {}
    for known in traced_calls.signals(calls.ended):
        call = known.call
        count = sent.pop((call.pe, call.word), (0, 0, 0))[2]
        sent[call.pe, call.word] = [call.pe, call.word, count + 1, call.value, since(call.end_ns), known.site.line]
    state["sent"] = [*sent.values()][-MAX_SENT:]
    if not calls.waits:
        return False
    state["kernel"] = [calls.waits[0].kernel, since(calls.waits[0].call.begin_ns)]
    state["waits"] = len(calls.waits)
    for known in calls.waits[:MAX_WAITS]:
        call, site = known.call, known.site
        has_word = call.word != events.NO_WORD
        found = _subject(
            world,
            context.OPERATIONS.index(site.operation),
            memory.base + call.word if has_word else 0,
            1 + context.COMPARISONS.index(site.compare) if site.compare else 0,
            call.value,
            gpu.word(call.word) if has_word else 0,
        )
        found |= {"block": call.block, "thread": call.thread, "line": site.line, "pe": call.pe}
        state["waiting"].append(found | {"seconds": since(call.begin_ns)})
    return True


def _add_record(state: State, world: World) -> None:
    """The error record of a GPU: the first thread that gave up."""
    record = world.page.record()
    if record is None or record.kind not in (1, 2, 3):
        return
    found = _subject(world, record.operation, record.address, record.comparison, record.expected, record.observed)
    found |= {"block": record.block, "thread": None, "line": "", "pe": record.pe, "seconds": world.timeout}
    state["waits"], state["waiting"] = 1, [found]


def _subject(world: World, operation: int, word: int, comparison: int, wanted: int, has: int) -> State:
    known = operation < len(context.OPERATIONS)
    assert world.memory is not None
    offset = word - world.memory.base if word else None
    wanted, has = (value - (1 << 64) if value >= 1 << 63 else value for value in (wanted, has))
    return {
        "operation": context.OPERATIONS[operation] if known else f"operation {operation}",
        "offset": offset,
        "name": world.heap.describe(offset) if offset is not None else None,
        "compare": context.COMPARISONS[comparison - 1] if 0 < comparison <= len(context.COMPARISONS) else "",
        "wants": wanted if word else None,
        "has": has if word else None,
    }


# -- questions to all ranks, through the store of the job --------------------------------------------------------------


PATIENCE = 0.6  # seconds within which every running watchdog answers
_SLOWER = 3.0  # the same for a report that no thread waits for


class Report:
    """One query of all ranks: sent at construction, printed when the reason is known."""

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
            print(f"tilescale_net: {text(why, states, self._reporter.size)}", file=sys.stderr, flush=True)


class Reporter:
    """One rank's part in reports. `control`: rank, size and store. `state`: of this rank, see state_of_rank."""

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
        """Query all ranks if that may explain this rank's timeout; only the first thread does so."""
        if self.size > 1 and isinstance(error, WaitTimeout | SimulatorDeadlock):
            with self._asking:
                if self._of_failure is None:
                    self._of_failure = Report(self, once=True)

    def forget_failure(self, generation: int) -> None:
        """Start over for the next failure; `generation`: number of earlier ones."""
        with self._asking:
            self._of_failure, self._printer_key = None, f"reported by/{generation}"

    def print_failure(self, failure: Exception) -> None:
        """Print the answers to `ask_about`, on one of the ranks that query. A lost peer explains itself."""
        if self._of_failure is not None and not isinstance(failure, PeerLost):
            self._of_failure.print(str(failure))

    def raise_alarm(self) -> int:
        """Record this rank's state, and query the others. Returns the number of the alarm; 0: the store does not
        answer."""
        self._own = self._state()
        try:
            number: int = self._store.ask(lambda s: s.count_up(job_store.ALARMS), seconds=PATIENCE)
        except PeerLost:
            return 0
        self.answer(number, self._own)
        return number

    def answer(self, number: int, state: State | None = None) -> None:
        """Report this rank's state, for alarm `number`. Does not wait for the store."""
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
        doing(state)
        waits = [[wait[key] for key in ("block", "line", "pe", "offset", "seconds")] for wait in state["waiting"]]
        sent = [[int(value) for value in entry[:4]] + [entry[4] * 1.0] for entry in state["sent"]]
        return int(number), state if len(waits) + len(sent) < 1 << 20 else None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError):
        return 0, None


def of_world(world: World) -> Reporter:
    """The reporter of a world, which has its control plane."""
    return Reporter(world.control, lambda: state_of_rank(world))


# -- SIGUSR1 --------------------------------------------------------------------------------------------------------------

_asked: Callable[[], list[Reporter]] | None = None


def report_on_signal(reporters: Callable[[], list[Reporter]]) -> None:
    """Print a report at each SIGUSR1, unless the program has its own handler; the second call does nothing. Python's
    handlers run only when the main thread returns to Python, which a thread that waits for a GPU does not. So
    faulthandler writes from the signal handler itself, and a thread waits for its output."""
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
        time.sleep(0.05)  # the rest of one signal's output
        os.set_blocking(reader, False)
        with contextlib.suppress(BlockingIOError):
            while os.read(reader, 1 << 16):
                pass
        os.set_blocking(reader, True)
        for reporter in _asked() if _asked else []:
            with contextlib.suppress(PeerLost):
                reporter.ask().print("asked by SIGUSR1: who waits for what", _SLOWER)
