"""The control plane: torch.distributed with gloo. Collective calls agree, or name ranks that differ or are missing.

Every collective host call of the package goes through `Control.agree`: ranks exchange their arguments before anything
is done, so a difference is an error on every rank, not a hang or a corrupted heap.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import hashlib
import itertools
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from tilescale_net.errors import PeerLost, RankMismatch, TileScaleError
from tilescale_net.runtime import bootstrap, job_store, profiling
from tilescale_net.runtime.groups import Group

# -- call log ------------------------------------------------------------------------------------------------------------

# The last calls of each object, so that ranks that wait for each other learn in which call they differ.
#
# A rank whose call is new asks the others' hosts; a rank whose call is known launches a kernel. If calls differ, each
# rank waits for the other, and neither can report it. So every rank logs its calls and writes them to the store when it
# has made none for a moment; its watchdog compares them with the next rank's. Calls differ if one object's call has
# other arguments, or if each rank has made a call that the other has not: all ranks make all calls in one order. No
# host counts calls that a CUDA graph replays, so these do not matter.

# End of the message of ranks whose calls differ; other ranks recognise the message by it.
RULE = "all ranks make the same calls in the same order"

_REMEMBERED = 256  # remembered calls of an object: largest distance between two hosts
_SENT = 8  # calls of an object that are sent to the other rank
_MOST = 16  # objects that are sent at a time
_LONGEST = 400  # characters of a call
_HOST = ""  # the key of the host's collective calls
# Looks of the watchdog, four per second, without a new call before calls are compared, and before a kernel's report of
# a difference is raised here too: the host that caused it raises with the next call, and goes on.
_QUIET, _REPORTED = 4, 12
# Up to this many ranks each query the store in every look, larger jobs less often; and looks after which all query less
# often, by this factor: the store serves a whole job.
_RANKS, _LONG, _SELDOM = 32, 24, 16


class Track:
    """The calls of one object. `name`: of the object in messages. `key`: of the object in its world, equal on all
    ranks."""

    def __init__(self, name: str, key: str):
        self.name, self.key = name, key
        self.seen, self.last = 0, 0  # calls at the last look of the watchdog, and the last look that found new ones
        self.reported: Callable[[], bool] = lambda: False  # whether a kernel has found that calls differ
        self.settled = 0
        self.outer: Track | None = None  # of the object whose calls contain this one's
        self._origin = ""
        self._calls: deque[tuple[Any, ...]] = deque(maxlen=_REMEMBERED)
        self._next = itertools.count(1).__next__

    @property
    def count(self) -> int:
        """Calls so far."""
        return self._calls[-1][0] if self._calls else 0

    def note(self, describe: str, *arguments: object) -> None:
        """Note a call; `describe` is text with a `{}` for each argument. The text is made on demand."""
        self._calls.append((self._next(), describe, arguments))

    def note_operator(self, gradient: bool, describe: str, *arguments: object) -> None:
        """As `note`, for an operator, or for one that a backward calls for a gradient; calls inside have it as their
        `origin`."""
        self._origin = "backward: " if gradient else ""
        self.note("backward: " + describe if gradient else describe, *arguments)

    @property
    def origin(self) -> str:
        """The operator that made the object's calls, unless they name it."""
        return self._origin if self.outer is None else self.outer.origin

    def settle(self) -> None:
        """A difference of the calls so far was raised: ranks continue after them."""
        self.settled = self.count
        if self.outer is not None:
            self.outer.settle()

    def text(self, call: int) -> str | None:
        """The arguments of call `call` (from 1); None if forgotten or not yet made."""
        try:
            number, describe, arguments = self._calls[call - self.count - 1]
        except IndexError:
            return None
        if number != call:  # another thread has noted one meanwhile
            return None
        shown = (list(a) if isinstance(a, tuple) else a for a in arguments)
        return str(describe).format(*shown)[:_LONGEST]


class CallLog:
    """The calls of all objects of a world on this rank; `control` has its rank, members and store."""

    def __init__(self, control: Control):
        self._control = control
        self._tracks: dict[str, Track] = {}
        self._of_name: Counter[str] = Counter()
        self._of_freed = 0  # calls of objects that are gone
        self._seen = self._sent = 0  # calls at the last look, and when they were sent
        self._looks = self._quiet = 0  # looks, and those without a new call
        self._answer: Future[Any] | None = None
        self._in_order = True  # until ranks disagree and go on: then some objects are one call apart

    def track(self, name: str) -> Track:
        """The calls of a new object; collective, as making the object is."""
        self._of_name[name] += 1
        key = f"{name}/{self._of_name[name]}"
        self._tracks[key] = Track(name, key)
        return self._tracks[key]

    def drop(self, track: Track) -> None:
        """Forget the calls of an object that all ranks have freed."""
        if self._tracks.pop(track.key, None) is not None:
            self._of_freed += track.count

    def only_track(self, name: str) -> Track:
        """The calls of an object that every rank has once, made at any time."""
        return self._tracks.setdefault(name, Track(name, name))

    def forget(self) -> None:
        """Reset: ranks were lost, and only some had made the pending calls."""
        self._tracks, self._answer = {}, None
        self._of_name.clear()
        self._seen = self._sent = self._quiet = 0
        self._in_order = False

    def on_mismatch(self) -> None:
        """Note that ranks disagreed on a host call."""
        self._in_order = False

    def difference(self) -> TileScaleError | None:
        """One look of the watchdog: the error of ranks whose calls differ; does not wait for the store."""
        members = self._control.members
        if len(members) < 2 or self._control.rank not in members:
            return None
        self._looks += 1
        for track in list(self._tracks.values()):
            if track.count != track.seen:
                track.seen, track.last = track.count, self._looks
        calls = self._all_calls()
        # Other ranks wait for a rank that compiles without a limit.
        self._quiet = self._quiet + 1 if calls == self._seen and not profiling.in_long_step() else 0
        self._seen = calls
        if self._quiet < _QUIET or not self._tracks:
            return None
        every = max(1, len(members) // _RANKS)
        late = self._quiet - _QUIET >= _LONG * every
        asks = (self._quiet + self._control.rank) % (every * (_SELDOM if late else 1)) == 0
        if asks and self._sent != calls:
            word = json.dumps(self._last_calls())
            if self._all_calls() == calls:  # no call came in between: it would be reported without earlier ones
                self._sent = calls
                self._control.store.post(lambda s: s.set(self._key(self._control.rank), word))
        return self._compare(members[(members.index(self._control.rank) + 1) % len(members)], asks)

    def _all_calls(self) -> int:
        return self._control.calls + self._of_freed + sum(track.count for track in list(self._tracks.values()))

    def _key(self, rank: int) -> str:
        return f"calls/{self._control.generation}/{rank}"

    def _last_calls(self) -> list[Any]:
        """[key of the object, calls so far, texts of the last of them, its name] of the objects called last, and the host."""
        reported = [[_HOST, self._control.calls, [self._control.last_call[:_LONGEST]], "the host"]]
        for track in sorted(list(self._tracks.values()), key=lambda track: track.last)[-_MOST:]:
            count = track.count
            texts = [track.text(c) for c in range(max(1, count - _SENT + 1), count + 1)]
            reported.append([track.key, count, texts, track.name])
        return reported

    def _compare(self, other: int, asks: bool) -> RankMismatch | None:
        """Take the store's answer about the other rank, and query it again if due."""
        answer, error = self._answer, None
        if answer is not None and not answer.done():
            return None
        if answer is not None and answer.exception() is None:
            error = self._differs(other, answer.result())
        if asks:
            self._answer = self._control.store.post(functools.partial(job_store.get_text, key=self._key(other)))
        return error

    def _differs(self, other: int, said: str | None) -> RankMismatch | None:
        """The first call that differs between both ranks, or that only one of them has made, on each side."""
        try:
            reported = [
                entry for entry in job_store.parse_json(said or "[]") if entry[0] == _HOST or entry[0] in self._tracks
            ]
            for key, count, texts, _ in reported[1:]:
                track = self._tracks[key]
                for call, theirs in zip(range(count - len(texts) + 1, count + 1), texts):
                    mine = track.text(call) if call > track.settled else None
                    known = track.reported() and self._quiet < _REPORTED
                    if None not in (mine, theirs) and mine != theirs and not known:
                        return RankMismatch(
                            f"{track.name}: rank {self._control.rank} was called with {mine}; rank {other} with "
                            f"{job_store.printable(str(theirs))}; "
                            f"{RULE}"
                        )
            return self._crossed(other, reported) if self._in_order else None
        except (ValueError, TypeError, IndexError, KeyError, OverflowError):  # nonsense
            pass
        return None

    def _crossed(self, other: int, reported: list[Any]) -> RankMismatch | None:
        """The last calls of two ranks if each is ahead of the other."""
        mine = {_HOST: self._control.calls} | {key: self._tracks[key].count for key, *_ in reported[1:]}
        if self._all_calls() != self._seen:
            return None
        ahead = [key for key, count, *_ in reported if mine[key] > int(count)]
        behind = [
            (texts, name, mine[key] - int(count)) for key, count, texts, name in reported if mine[key] < int(count)
        ]
        if not ahead or not behind:
            return None
        of = max((self._tracks[key] for key in ahead if key != _HOST), key=lambda track: track.last, default=None)
        made = self._control.last_call if of is None else f"{of.name}: {of.text(of.count)}"
        texts, name, place = behind[-1]
        theirs = texts[place] if -len(texts) <= place else texts[0]
        theirs = theirs if name == "the host" else f"{name}: {theirs}"
        return RankMismatch(
            f"rank {self._control.rank} has made a call that rank {other} has not ({made}), and rank {other} one that rank "
            f"{self._control.rank} has not ({job_store.printable(str(theirs))[:_LONGEST]}); {RULE}"
        )


def error_of_loss(text: str) -> TileScaleError:
    """The error for another rank's reason of the loss."""
    return RankMismatch(text) if RULE in text else PeerLost(text)


# -- control -------------------------------------------------------------------------------------------------------------

# First message of a rank in every call, in bytes: a digest of the whole text, the sizes of the rest and of a value in a
# second message, the beginning of the text, and a value that fits behind it.
_RECORD, _DIGEST, _HEAD = 1024, 32, 48
_LARGEST = 64 << 20  # bytes of a value that `gather` takes from a rank
# Seconds that the watchdog may take longer than gloo to learn why a connection closed: until a heartbeat is overdue,
# and one more. And seconds that the store may take.
_REASON, _ANSWER = 3.0, 2.0
_POLL = datetime.timedelta(seconds=0.25)  # between checks, while gloo waits, whether the call can still finish

# Calls that were given up while gloo's thread goes on with them. Kept until the process ends: freeing the group would wait
# for the thread, and a thread that frees tensors while the interpreter shuts down aborts the process.
_given_up: list[Any] = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_given_up))


class Control:
    """Rank, size, and the collective calls of the host side.

    Args:
        timeout: seconds after which a collective call gives up and names the ranks that did not arrive.
        silence: seconds without an answer after which the store of the job counts as lost.
        group: the ranks that take part, numbered as in this group; None: all ranks of the job.

    Attributes:
        rank, size: of this process, of the group.
        job_ranks: the ranks of the group in the job, by their rank in the group.
        address, hosts, processes: see bootstrap.Rendezvous.
        store: the JobStore of these ranks.
        reason_of, explanation: set by the watchdog: why peers are known to be lost; and the same after the given number
            of seconds, or longer while a rank is silent.
        calls, last_call: how many collective calls this rank has made, and the last one.
        on_mismatch: called when ranks have made different ones.
        refuse: called first by every collective call; raises in a child made by fork.
        members: ranks that make collective calls; a new list whenever some are left out. left: whether this one was.
        on_loss: called with the error of a collective call that lost a rank; returns the one that ends the world.
        on_collective_begin, on_collective_done, on_ranks_excluded: called when this rank comes to a collective call;
            when all have come; and with excluded ranks, which may be alive.

    Raises:
        ConfigurationError, PeerLost: the ranks could not meet; see bootstrap.join.
    """

    def __init__(self, timeout: float, silence: float = 15.0, group: Group = None):
        self.timeout = timeout
        found = bootstrap.join(timeout, silence, group)
        self.job_ranks, self.rank, self.store, self.address = found.ranks, found.rank, found.store, found.address
        self.hosts, self.processes = found.hosts, found.processes
        self.size = len(self.job_ranks)
        self._group: Any = found.group
        self.reason_of: Callable[[], str | None] = lambda: None
        self.explanation: Callable[[float], str | None] = lambda seconds: None
        self.on_loss: Callable[[TileScaleError], TileScaleError] = lambda error: error
        self.on_collective_begin = self.on_collective_done = self.on_mismatch = lambda: None
        self.on_ranks_excluded = lambda ranks: None
        self.members: list[int] = list(range(self.size))
        self.excluded, self._stayed = False, list[str]()
        self.refuse: Callable[[], None] = lambda: None
        self.generation, self.lost = 0, set[int]()  # how often lost ranks were given up, and which
        self._outer: list[Any] = []  # groups of earlier members
        self.calls, self.last_call = 0, ""
        self._one_call = threading.RLock()  # calls of several threads come one after the other

    # -- collective calls -------------------------------------------------------------------------------------------

    def agree(self, call: str, arguments: str = "", described_as: str | None = None) -> None:
        """Wait until every rank makes this same call with the same arguments; also a barrier.

        Args:
            described_as: how the message of another rank describes this call, instead of "called call(arguments)".

        Raises:
            RankMismatch: another rank made a different call; the message holds both.
            PeerLost: a rank did not arrive within the timeout, or died.
        """
        if self.excluded:
            if call == "tilescale_net.finalize":
                return
            raise TileScaleError(f"rank {self.rank}: {call}: this rank was left out of the job; it may only finalize")
        text = f"{call}({arguments})"
        with self._one_call, profiling.inside(call):
            self._exchange_call(call, text, described_as or f"called {text}")

    def _exchange_call(self, call: str, text: str, described_as: str, payload: bytes = b"") -> list[bytes]:
        """Wait until every rank makes the call of this `text`; returns the value that each sends with it. All calls
        begin with a message of one size: gloo ends the process if sizes differ."""
        digest = hashlib.sha256(text.encode()).digest()
        said = described_as.encode()
        if len(said) > _RECORD - _HEAD:
            said = said[: _RECORD - _HEAD - 5].decode(errors="ignore").encode() + " …".encode()
        numbers = len(said).to_bytes(8, "little") + len(payload).to_bytes(8, "little")
        self.last_call = described_as
        record = (digest + numbers + said + payload)[:_RECORD].ljust(_RECORD, b"\0")
        records = self._all_gather(call, record)
        sizes = []
        for other, theirs in zip(self.members, records):
            if theirs[:_DIGEST] != digest:
                self._raise_mismatch(said, other, theirs)
            sizes.append(int.from_bytes(theirs[_DIGEST + 8 : _HEAD], "little"))
            if sizes[-1] > _LARGEST:
                raise RankMismatch(
                    f"rank {self.rank}: rank {other} sends {sizes[-1]} bytes for {call}; at most {_LARGEST} are taken"
                )
        begin = _HEAD + len(said)
        if begin + max(sizes) > _RECORD:
            begin, records = 0, self._all_gather(call, payload.ljust(max(sizes), b"\0"))
        return [theirs[begin : begin + size] for theirs, size in zip(records, sizes)]

    def _raise_mismatch(self, said: bytes, other: int, record: bytes) -> None:
        self.on_mismatch()
        length = int.from_bytes(record[_DIGEST : _DIGEST + 8], "little")
        theirs = job_store.printable(record[_HEAD : _HEAD + length].decode(errors="replace"))
        mine = job_store.printable(said.decode())
        if mine == theirs:
            theirs += " (arguments that differ further on)"
        raise RankMismatch(
            f"rank {self.rank} {mine} while rank {other} {theirs}; every rank must make the same calls with the "
            "same arguments, in the same order"
        )

    def gather(self, what: str, value: object) -> list[Any]:
        """The `value` of every member, in their order. `value`: None, bool, int, float, str, bytes, or lists, tuples
        and dicts of them; tuples come as lists. Raises PeerLost: as `agree`. RankMismatch: as `agree`, or a rank sent a
        value of another structure than this rank's."""
        payload = job_store.encode(value)
        with self._one_call:
            records = self._exchange_call(what, f"{what}: a value of each rank", f"was in {what}", payload)
        values = []
        for other, record in zip(self.members, records):
            try:
                values.append(job_store.decode(record))
                job_store.check_alike(value, values[-1])
            except ValueError as err:
                raise RankMismatch(f"rank {self.rank}: rank {other} sent nonsense for {what}: {err}") from None
        return values

    def broadcast(self, what: str, value: str) -> str:
        """The `value` of the first member; other values are ignored. Raises as `gather`."""
        return str(self.gather(what, value if self.rank == self.members[0] else "")[0])

    def exchange(self, what: str, numbers: Sequence[int]) -> list[int]:
        """The number that each member has for this rank, in their order. `numbers`: one of 64 bits for each member, in
        their order. Raises RankMismatch, PeerLost: as `agree`."""
        with self._one_call, torch.inference_mode(False):
            self._exchange_call(what, f"{what}: numbers of each rank", f"was in {what}")
            sent = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
            came = torch.empty_like(sent)
            self._run_gloo(what, lambda: self._group.alltoall_base(came, sent, [], []), sent, came)
        return came.tolist()

    def _all_gather(self, call: str, mine: bytes) -> list[bytes]:
        """Every rank's bytes, of one length, in rank order."""
        # Independent of the user's default device, dtype and inference mode.
        with torch.inference_mode(False):
            sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            everyone = [torch.empty(len(mine), dtype=torch.uint8, device="cpu") for _ in self.members]
            self._run_gloo(call, lambda: self._group.allgather([everyone], [sent]), sent, everyone)
        return [bytes(t.numpy()) for t in everyone]

    def _run_gloo(self, call: str, start: Callable[[], Any], *memory: object) -> None:
        """Complete the call of gloo that `start` begins, by all members; `memory`: its tensors."""
        self.refuse()
        self.calls += 1
        if self.size > 1:
            word = json.dumps([self.calls, call])
            self.store.post(lambda s: s.set(f"call/{self.rank}", word))
        begin = time.monotonic()
        self.on_collective_begin()
        try:
            work = start()
            if not self._finished(work):
                _given_up.append((self._group, work, memory))
                raise TimeoutError
        except TileScaleError:
            raise
        except (RuntimeError, ValueError, TimeoutError) as err:
            # The message names the call and the cause, unlike gloo's errors.
            raise self.on_loss(error_of_loss(self._explain(call, err, time.monotonic() - begin))) from None
        self.on_collective_done()

    def _finished(self, work: Any) -> bool:
        """Wait for a call of gloo; False if a rank was lost or has failed, so the call may never finish. Raises
        RuntimeError: of gloo."""
        while True:
            try:
                work.wait(_POLL)
                return True
            except RuntimeError:
                if work.is_completed():
                    work.wait()
                    return True
                if self.reason_of():
                    return False

    # -- excluded ranks -------------------------------------------------------------------------------------------

    def shrink_to(self, members: list[int], call: str) -> None:
        """Make collective calls with `members` only from here on. Called by each member, with one list. Raises
        RankMismatch: another member gave another list; names both. PeerLost: a member did not come in time."""
        if members != self.members:
            prefix, mine = self._keep_prefix, json.dumps(members)
            self.store.post(lambda s: s.set(f"{prefix}{self.rank}", mine))
            end = time.monotonic() + self.timeout
            for other in members:
                look = functools.partial(job_store.get_text, key=f"{prefix}{other}")
                while (theirs := self.store.ask(look, seconds=self.timeout)) is None:
                    if time.monotonic() > end or self.reason_of():
                        raise PeerLost(f"rank {self.rank}: {call} did not finish: rank {other} did not call it")
                    time.sleep(0.005)
                if theirs != mine:
                    raise RankMismatch(
                        f"rank {self.rank} called {call} to keep {members}, rank {other} to keep "
                        f"{job_store.printable(theirs)}"
                    )
            self._connect(members, f"members/{self.generation}/{len(members)}", call)
            self.on_ranks_excluded(sorted(set(self.members) - set(members)))
            self.members = list(members)
        self.agree(call, str(members))

    def _connect(self, members: list[int], prefix: str, call: str) -> None:
        store, begin = dist.PrefixStore(prefix, self.store.raw), time.monotonic()
        try:
            group = bootstrap.connect_gloo(store, self.address, members.index(self.rank), len(members), self.timeout)
        except (RuntimeError, ValueError) as err:
            # No chain: the text holds the first line of gloo's error.
            raise PeerLost(self._explain(call, err, time.monotonic() - begin)) from None
        self._outer.append(self._group)
        self._group = group

    @property
    def _keep_prefix(self) -> str:
        """Prefix of keys by which each member reports that its earlier kernels have ended."""
        return f"keep/{self.generation}/{len(self.members)}/"

    def leave(self, members: list[int]) -> None:
        """Record that `members` excluded this rank: its collective calls concern no other rank from here on."""
        self._stayed = [f"{self._keep_prefix}{r}" for r in members]
        self.on_ranks_excluded([r for r in self.members if r != self.rank])
        self.members, self.excluded = [self.rank], True

    def wait_for_members(self) -> None:
        """On an excluded rank: wait until the members have excluded it, too. Until then their kernels may wait for
        answers of its proxy, or write to its heap. Waits at most the timeout, and only while the members live."""
        end, pause = time.monotonic() + self.timeout, 0.002
        try:
            while (left := end - time.monotonic()) > 0 and not self.reason_of():
                if self.store.ask(lambda s: s.check(self._stayed), seconds=left):
                    return
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
        except PeerLost:  # the store has ended, and so have they
            return

    def give_up_others(self, members: list[int]) -> None:
        """Only `members` count from here on, and failures so far are over; `connect_members` must come next."""
        self.lost |= set(self.members) - set(members)
        self.generation, self.members, self.calls, self.reason_of = self.generation + 1, list(members), 0, lambda: None

    def connect_members(self) -> None:
        """Make collective calls with the members alone from here on. Raises PeerLost: they could not connect to each
        other."""
        self._connect(self.members, f"shrink/{self.generation}", "tilescale_net.shrink")

    @property
    def failed_key(self) -> str:
        """The key in the store of the first failure since ranks were given up."""
        return job_store.failed_key(self.generation)

    # -- ranks and places ---------------------------------------------------------------------------------------------

    def _explain(self, what: str, err: Exception, spent: float) -> str:
        """The reason of a failed collective call; takes a few seconds, longer only while a rank is silent."""
        failed = f"rank {self.rank}: {what} could not finish"
        if reason := self.reason_of() or self.explanation(_REASON):
            return f"{failed}: {reason}"
        try:
            words, steps = self.store.ask(
                lambda s: [[job_store.get_text(s, f"{key}/{r}") for r in range(self.size)] for key in ("call", "step")],
                seconds=_ANSWER,
            )
        except PeerLost as gone:
            return f"{failed}: {str(gone).partition(': ')[2]}"
        behind = []
        for other, (said, step) in enumerate(zip(words, steps)):
            calls, call = last_call(said)
            if calls < self.calls and other in self.members and other != self.rank:
                behind.append(f"rank {other} ({job_store.printable(step) + '; ' if step else ''}last call: {call})")
        who = ", ".join(behind) if behind else "no rank is known to be missing"
        return (
            f"rank {self.rank}: {what} did not finish (gave up after {spent:.1f} s; the limit is {self.timeout:g} s); not "
            f"arrived: {who}. Look at those ranks' output, or raise TSN_TIMEOUT if they are only slow "
            f"({job_store.first_line(err)})"
        )

    def announce_failure(
        self, text: str, rank: int | None = None, seconds: float = 1.0, key: str | None = None
    ) -> None:
        """Report to the other ranks that this one fails, and why; only the first report counts.

        Args:
            text: the reason; for another rank, its fate.
            rank: another rank, which cannot report it itself.
            seconds: how long the store may take; the report of a process that ends at once may be lost.
            key: see job_store.failed_key; default the current one.
        """
        word = json.dumps([self.rank, f"failed: {text[:2000]}"] if rank is None else [rank, text[:2000]])
        key = key or self.failed_key
        try:
            self.store.ask(lambda s: (s.set_once(key, word), s.count_up(job_store.ALARMS)), seconds)
        except PeerLost:  # no rank is there to read it, or it is written when the store answers
            pass

    def close(self) -> None:
        """Leave the package's own group. The default group stays: others may use it, and another init needs it."""
        # A group's connections end with the last reference to it, which takes a thread's end. Gloo's threads may still
        # drop references to tensors after the last collective call has returned. Abandoned calls keep theirs.
        groups = [self._group, *self._outer]
        self._group, self._outer = None, []
        try:
            job_store.run_with_timeout(self.timeout, groups.clear)
        except TimeoutError:
            pass
        self.store.close()


def last_call(said: str | None) -> tuple[int, str]:
    """Number and name of the last collective call that a rank has reported."""
    if not said:
        return 0, "nothing yet"
    unreadable = 0, "nothing that can be read"
    return job_store.read(said, lambda found: (int(found[0]), job_store.printable(str(found[1]))), unreadable)


def announced(said: str | None, rank: int) -> str | None:
    """The failure that another rank has reported, as text; None without one, or if `rank` itself reported it."""
    unreadable = rank, ""
    who, why = job_store.read(said, lambda found: (int(found[0]), job_store.printable(str(found[1]))), unreadable)
    if said and (who, why) == unreadable:
        return "a rank failed, and its reason cannot be read"
    return None if who == rank else f"rank {who} {why}"


def failed_rank(said: str | None) -> int | None:
    """The rank whose failure was reported; None for none."""
    return job_store.read(said, lambda found: int(found[0]), None)
