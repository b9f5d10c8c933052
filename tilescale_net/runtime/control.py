"""The control plane: torch.distributed with gloo. Collective calls agree, or name ranks that differ or are missing.

Every collective host call of the package goes through `Control.agree`: ranks exchange what they were called with
before anything is done, so that a difference becomes an error on every rank instead of a hang or a corrupted heap.
"""

import ctypes
import datetime
import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from tilescale_net.errors import PeerLost, RankMismatch, TileScaleError
from tilescale_net.runtime import encoding, job_store, rendezvous
from tilescale_net.runtime.call_log import error_of_loss
from tilescale_net.trace import host_calls

# What one rank sends first of every call, bytes: a digest of the whole text, the sizes of what follows here and of a value that
# follows in another message, the beginning of the text, and a value that has room behind it.
_RECORD, _DIGEST, _HEAD = 1024, 32, 48
_LARGEST = 64 << 20  # bytes of a value that `gather` takes from a rank
_REASON = 2.0  # seconds that the watchdog may take longer than gloo to learn why a connection closed
_LOOK = datetime.timedelta(seconds=0.25)  # between looks, while gloo waits, at whether the call can still finish

# Calls that were given up while gloo's thread goes on with them. Kept until the process ends: freeing the group would wait
# for the thread, and a thread that frees tensors while the interpreter shuts down aborts the process.
_given_up: list = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_given_up))


class Control:
    """Rank, size, and the collective calls of the host side.

    Args:
        timeout: seconds after which a collective call gives up and names the ranks that did not arrive.
        silence: seconds without an answer after which the store of the job counts as lost.
        group: the ranks that take part, numbered as in this group; None: all ranks of the job.

    Attributes:
        rank, size: of this process, of the group.
        job_ranks: the ranks of the group in the job, by their rank in the group. address: see rendezvous.Meeting.
        store: the JobStore of these ranks.
        reason_of: set by the watchdog: () -> str | None, why peers are known to be lost.
        calls, last_call: how many collective calls this rank has made, and the last one.
        on_mismatch: called when ranks have made different ones.
        refuse: called first by every collective call; raises in a child made by fork.
        members: ranks that make collective calls; a new list whenever some are left out. left: whether this one was.
        on_loss: called with the error of a collective call that lost a rank; returns the one that ends the world.
        on_meeting, on_met, on_parted: called when this rank comes to a collective call; when all have come; and with ranks
            that take part no more, which may live.

    Raises:
        ConfigurationError, PeerLost: the ranks could not meet; see rendezvous.join.
    """

    def __init__(self, timeout: float, silence: float = 15.0, group: dist.ProcessGroup | None = None):
        self.timeout = timeout
        meeting = rendezvous.join(timeout, silence, group)
        self.job_ranks, self.rank, self.store, self._group = meeting.ranks, meeting.rank, meeting.store, meeting.group
        self.address = meeting.address
        self.size = len(self.job_ranks)
        self.reason_of = None
        self.on_loss: Callable[[TileScaleError], TileScaleError] = lambda error: error
        self.on_meeting = self.on_met = self.on_mismatch = lambda: None
        self.on_parted = lambda ranks: None
        self.members: list[int] = list(range(self.size))
        self.left = False
        self.refuse: Callable[[], None] = lambda: None
        self.era, self.lost = 0, set[int]()  # how often lost ranks were given up, and which
        self._outer: list = []  # groups of earlier members
        self.calls, self.last_call = 0, ""
        self._one_call = threading.RLock()  # calls of several threads come one after the other

    # -- collective calls -------------------------------------------------------------------------------------------

    def agree(self, call: str, arguments: str = "", spoken: str | None = None) -> None:
        """Wait until every rank makes this same call with the same arguments; also a barrier.

        Args:
            spoken: how the message of another rank describes this call, instead of "called call(arguments)".

        Raises:
            RankMismatch: another rank made a different call; the message holds both.
            PeerLost: a rank did not arrive within the timeout, or died.
        """
        if self.left:
            if call == "tilescale_net.finalize":
                return
            raise TileScaleError(f"rank {self.rank}: {call}: this rank was left out of the job; it may only finalize")
        text = f"{call}({arguments})"
        with self._one_call, host_calls.inside(call):
            self._meet_in(call, text, spoken or f"called {text}")

    def _meet_in(self, call: str, text: str, spoken: str, payload: bytes = b"") -> list[bytes]:
        """Wait until every rank makes the call that `text` stands for; what each of them sends with it.

        All calls begin with a message of one size: gloo ends the process where ranks send others.
        """
        digest = hashlib.sha256(text.encode()).digest()
        said = spoken.encode()
        if len(said) > _RECORD - _HEAD:
            said = said[: _RECORD - _HEAD - 5].decode(errors="ignore").encode() + " …".encode()
        numbers = len(said).to_bytes(8, "little") + len(payload).to_bytes(8, "little")
        self.last_call = spoken
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
        theirs = encoding.printable(record[_HEAD : _HEAD + length].decode(errors="replace"))
        mine = encoding.printable(said.decode())
        if mine == theirs:
            theirs += " (arguments that differ further on)"
        raise RankMismatch(
            f"rank {self.rank} {mine} while rank {other} {theirs}; every rank must make the same calls with the "
            "same arguments, in the same order"
        )

    def gather(self, what: str, value: object) -> list:
        """The `value` of every member, in their order.

        Args:
            value: None, bool, int, float, str, bytes, or lists, tuples and dicts of them; tuples come as lists.

        Raises:
            PeerLost: as `agree`.
            RankMismatch: as `agree`, or a rank sent a value that is not made like that of this rank.
        """
        payload = encoding.encode(value)
        with self._one_call:
            records = self._meet_in(what, f"{what}: a value of each rank", f"was in {what}", payload)
        values = []
        for other, record in zip(self.members, records):
            try:
                values.append(encoding.decode(record))
                encoding.check_alike(value, values[-1])
            except ValueError as err:
                raise RankMismatch(f"rank {self.rank}: rank {other} sent nonsense for {what}: {err}") from None
        return values

    def broadcast(self, what: str, value: str) -> str:
        """The `value` of the first member; those of the others do not count. Raises as `gather`."""
        return self.gather(what, value if self.rank == self.members[0] else "")[0]

    def exchange(self, what: str, numbers: Sequence[int]) -> list[int]:
        """The number that each member has for this rank, in their order.

        Args:
            numbers: one of 64 bits for each member, in their order.

        Raises:
            RankMismatch, PeerLost: as `agree`.
        """
        with self._one_call, torch.inference_mode(False):
            self._meet_in(what, f"{what}: numbers of each rank", f"was in {what}")
            sent = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
            came = torch.empty_like(sent)
            self._meet_all(what, lambda: self._group.alltoall_base(came, sent, [], []), sent, came)
        return came.tolist()

    def _all_gather(self, call: str, mine: bytes) -> list[bytes]:
        """Every rank's bytes, of one length, in rank order."""
        # The user's default device, dtype and inference mode shall not matter.
        with torch.inference_mode(False):
            sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            everyone = [torch.empty(len(mine), dtype=torch.uint8, device="cpu") for _ in self.members]
            self._meet_all(call, lambda: self._group.allgather([everyone], [sent]), sent, everyone)
        return [bytes(t.numpy()) for t in everyone]

    def _meet_all(self, call: str, start: Callable, *memory) -> None:
        """Carry out what `start` begins, a call of gloo by all members; `memory` is what that reads and writes."""
        self.refuse()
        self.calls += 1
        if self.size > 1:
            word = json.dumps([self.calls, call])
            self.store.post(lambda s: s.set(f"call/{self.rank}", word))
        begin = time.monotonic()
        self.on_meeting()
        try:
            work = start()
            if not self._finished(work):
                _given_up.append((self._group, work, memory))
                raise TimeoutError
        except TileScaleError:
            raise
        except (RuntimeError, ValueError, TimeoutError) as err:
            raise self.on_loss(error_of_loss(self._explain(call, err, time.monotonic() - begin))) from err
        self.on_met()

    def _finished(self, work) -> bool:
        """Wait for a call of gloo; False when a rank was lost or has failed, so that the call may never finish.

        Raises:
            RuntimeError: what gloo raises.
        """
        while True:
            try:
                work.wait(_LOOK)
                return True
            except RuntimeError:
                if work.is_completed():
                    work.wait()
                    return True
                if self.reason_of and self.reason_of():
                    return False

    # -- ranks that are left out ------------------------------------------------------------------------------------

    def keep(self, members: list[int], call: str) -> None:
        """Make collective calls with `members` only from here on. Made by each of them, with one list.

        Raises:
            RankMismatch: another member gave another list; names both.
            PeerLost: a member did not come in time.
        """
        if members != self.members:
            told = f"keep/{self.era}/{len(self.members)}/"
            self.store.post(lambda s: s.set(f"{told}{self.rank}", json.dumps(members)))
            end = time.monotonic() + self.timeout
            for other in members:
                said = self._said(told, other)
                while said is None and time.monotonic() < end and not (self.reason_of and self.reason_of()):
                    time.sleep(0.005)
                    said = self._said(told, other)
                if said is None:
                    raise PeerLost(f"rank {self.rank}: {call} did not finish: rank {other} did not call it")
                if said != json.dumps(members):
                    raise RankMismatch(
                        f"rank {self.rank} called {call} to keep {members}, rank {other} to keep "
                        f"{encoding.printable(said)}"
                    )
            begin = time.monotonic()
            try:
                self._meet(members, f"members/{self.era}/{len(members)}")
            except (RuntimeError, ValueError) as err:
                raise PeerLost(self._explain(call, err, time.monotonic() - begin)) from err
            self.on_parted(sorted(set(self.members) - set(members)))
            self.members = list(members)
        self.agree(call, str(members))

    def _said(self, told: str, other: int) -> str | None:
        return self.store.ask(lambda s: job_store.get(s, f"{told}{other}"), seconds=self.timeout)

    def _meet(self, members: list[int], prefix: str) -> None:
        store = dist.PrefixStore(prefix, self.store.raw)
        group = rendezvous.connect(store, self.address, members.index(self.rank), len(members), self.timeout)
        self._outer.append(self._group)
        self._group = group

    def leave(self) -> None:
        """This rank was left out: its collective calls concern no other rank from here on."""
        self.on_parted([r for r in self.members if r != self.rank])
        self.members, self.left = [self.rank], True

    def give_up_others(self, members: list[int]) -> None:
        """Only `members` count from here on, and failures so far are over; `connect_members` must come next."""
        self.lost |= set(self.members) - set(members)
        self.era, self.members, self.calls, self.reason_of = self.era + 1, list(members), 0, None

    def connect_members(self) -> None:
        """Make collective calls with the members alone from here on.

        Raises:
            PeerLost: they could not connect to each other.
        """
        begin = time.monotonic()
        try:
            self._meet(self.members, f"shrink/{self.era}")
        except (RuntimeError, ValueError) as err:
            raise PeerLost(self._explain("tilescale_net.shrink", err, time.monotonic() - begin)) from err

    @property
    def failed_key(self) -> str:
        """The key in the store of the first failure since ranks were given up."""
        return job_store.failed_key(self.era)

    # -- ranks and places ---------------------------------------------------------------------------------------------

    def _explain(self, what: str, err: Exception, spent: float) -> str:
        """Why a collective call failed; takes a few seconds at most, whichever ranks are gone."""
        failed = f"rank {self.rank}: {what} could not finish"
        end = time.monotonic() + _REASON
        reason = None
        while reason is None and time.monotonic() < end:
            reason = self.reason_of() if self.reason_of else self._announced()
            if reason is None:
                time.sleep(0.05)
        if reason:
            return f"{failed}: {reason}"
        try:
            words, steps = self.store.ask(
                lambda s: [[job_store.get(s, f"{key}/{r}") for r in range(self.size)] for key in ("call", "step")],
                seconds=_REASON,
            )
        except PeerLost as gone:
            return f"{failed}: {str(gone).partition(': ')[2]}"
        behind = []
        for other, (said, step) in enumerate(zip(words, steps)):
            calls, call = last_call(said)
            if calls < self.calls and other in self.members and other != self.rank:
                behind.append(f"rank {other} ({encoding.printable(step) + '; ' if step else ''}last call: {call})")
        if not behind:  # a connection broke: ranks that still live report, the rest is gone
            behind = [f"rank {r} (was not heard of again)" for r in self._unheard()]
        who = ", ".join(behind) if behind else "no rank is known to be missing"
        return (
            f"rank {self.rank}: {what} did not finish (gave up after {spent:.1f} s; the limit is {self.timeout:g} s); not "
            f"arrived: {who}. Look at those ranks' output, or raise TSN_TIMEOUT if they are only slow "
            f"({job_store.first_line(err)})"
        )

    def _unheard(self) -> list[int]:
        """Ranks that send no sign of life when a call has failed on all of them."""
        key = f"failing/{self.era}/{self.calls}"
        try:
            self.store.ask(lambda s: s.set(f"{key}/{self.rank}", "1"), _REASON)
            time.sleep(1.0)
            return self.store.ask(lambda s: [r for r in range(self.size) if not s.check([f"{key}/{r}"])], _REASON)
        except PeerLost:
            return [0]  # which keeps the store

    def _announced(self) -> str | None:
        try:
            return announced(self.store.ask(lambda s: job_store.get(s, self.failed_key), seconds=_REASON), self.rank)
        except PeerLost as gone:
            return str(gone).partition(": ")[2]

    def announce_failure(
        self, text: str, rank: int | None = None, seconds: float = 1.0, key: str | None = None
    ) -> None:
        """Report to the other ranks that this one fails, and why; the first report of any rank stays.

        Args:
            text: the reason; of another rank, what happened to it.
            rank: another rank, which cannot report it itself.
            seconds: how long the store may take; a process that ends at once is not heard.
            key: see job_store.failed_key; default that of now.
        """
        word = json.dumps([self.rank, f"failed: {text[:2000]}"] if rank is None else [rank, text[:2000]])
        key = key or self.failed_key
        try:
            self.store.ask(lambda s: (s.set_once(key, word), s.count_up(job_store.ALARMS)), seconds)
        except PeerLost:  # no rank is there to read it, or it is written when the store answers
            pass

    def close(self, unwatched_failure: bool = False) -> None:
        """Leave the package's own group. The default group stays: others may use it, and another init needs it.

        Args:
            unwatched_failure: the world ends by an error before its ranks are watched: the others learn of it when this
                rank leaves the group, and then read in the store what it was.
        """
        # With the last reference to a group its connections end, for which a thread has to end. Gloo's threads may still
        # drop references to tensors when the last collective call has returned. Calls that were given up keep theirs.
        groups, self._group, self._outer = [self._group, *self._outer], None, []
        try:
            job_store.within(self.timeout, groups.clear)
        except TimeoutError:
            pass
        if unwatched_failure:
            self._let_others_read()
        self.store.close()

    def _let_others_read(self, seconds: float = 5.0) -> None:
        """The rank that keeps the store stays until the others have read what failed, which they report."""
        key, end = f"read/{self.era}", time.monotonic() + seconds
        try:
            if self.rank != self.store.kept_by:
                self.store.ask(lambda s: s.set(f"{key}/{self.rank}", "1"), 1.0)
                return
            others = [f"{key}/{r}" for r in range(self.size) if r != self.rank]
            while time.monotonic() < end and not self.store.ask(lambda s: s.check(others), seconds):
                time.sleep(0.02)
        except PeerLost:
            pass


def last_call(said: str | None) -> tuple[int, str]:
    """Number and name of the last collective call that a rank has reported."""
    try:
        calls, call = encoding.parsed(said or '[0, "nothing yet"]')
        return int(calls), encoding.printable(str(call))
    except (ValueError, TypeError, OverflowError):
        return 0, "nothing that can be read"


def announced(said: str | None, rank: int) -> str | None:
    """The failure that another rank has reported, as text; None for none, and for that of `rank` itself."""
    if not said:
        return None
    try:
        who, why = encoding.parsed(said)
        who, why = int(who), encoding.printable(str(why))
    except (ValueError, TypeError, OverflowError):
        return "a rank failed, and what it said cannot be read"
    return None if who == rank else f"rank {who} {why}"


def failed_rank(said: str | None) -> int | None:
    """The rank whose failure was reported; None for none."""
    try:
        return int(encoding.parsed(said or "null")[0])
    except (ValueError, TypeError, IndexError, KeyError, OverflowError):
        return None
