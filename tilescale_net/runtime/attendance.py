"""Ranks that come to a meeting and take its first steps together, by keys in the store.

The store may be older than the meeting: a launcher's holds what the processes of an earlier attempt have said. So ranks
come under a number that each process draws at random. Rank 0 proposes the numbers that it reads; those who find their own
among them agree, and when all have, these processes meet, under a name made of their numbers. What others have said, or
say later, is not asked for.
"""

import contextlib
import hashlib
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from tilescale_net.errors import ConfigurationError, PeerLost
from tilescale_net.runtime import addresses, job_store
from tilescale_net.runtime.job_store import JobStore, first_line, within
from tilescale_net.runtime.signed_store import SignedStore

_FAILURE_GRACE_S = 1.0  # seconds that ranks which give up leave each other to report it
_REACH_S = 5.0  # seconds in which a system, without the help of a process, accepts a connection
SLACK = 3.0  # seconds after which a step of torch that has a time limit of its own counts as hanging
_ADVICE = f"let {addresses.INTERFACE} name, on every host, the network interface over which they can"


class _Ranks:
    """Args:
    store: where the ranks say what they do.
    rank, size: of this process, of all.
    timeout: seconds that ranks may take.
    """

    def __init__(self, store: JobStore, rank: int, size: int, timeout: float):
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout

    def _lost(self, what: str, ranks: list[int], cause: str = "") -> PeerLost:
        who = ", ".join(f"rank {r}" for r in ranks)
        return PeerLost(
            f"rank {self._rank}: not all of {self._size} ranks could meet within {self._timeout:g} s. Missing: {who} "
            f"({what}). Look at the output of those ranks, or raise TSN_TIMEOUT if they are only slow{cause}"
        )

    def _let_others_look(self, mine: str, others: Iterable[str]) -> None:
        """Say that this rank knows. The store ends with the rank that keeps it, and the others look at it for their message:
        slow ones, too.
        """
        self._store.ask(lambda s: s.set(mine, "1"))
        if self._rank == self._store.kept_by:
            end, keys = time.monotonic() + _FAILURE_GRACE_S + SLACK, list(others)
            while time.monotonic() < end and not self._store.ask(lambda s: s.check(keys)):
                time.sleep(0.05)


class Arrival(_Ranks):
    """How the processes of a meeting find each other, in a store where earlier ones may have come."""

    def __init__(self, store: JobStore, rank: int, size: int, timeout: float):
        super().__init__(store, rank, size, timeout)
        self._number = secrets.token_hex(8)
        self._agreed = ""  # name of the meeting that this rank has proposed or agreed to

    def meet(self, word: str, absent: str) -> tuple[JobStore, list[str]]:
        """Wait until every rank has come here.

        Args:
            word: what this rank says.
            absent: what a missing rank has not done.

        Returns:
            A store of these processes alone, in place of the one given, and what each of them says.

        Raises:
            PeerLost: ranks did not come in time; names them.
        """
        try:
            if self._size == 1:
                return self._store.within(self._number), [word]
            name = self._agree(word, absent)
            return self._store.within(name), [said.partition(" ")[2] for said in self._store.ask(self._words)]
        finally:
            self._store.close()

    def _agree(self, word: str, absent: str) -> str:
        said = f"{self._number} {word}"
        self._store.ask(lambda s: s.set(f"come/{self._rank}", said))
        step, begin = self._lead if self._rank == 0 else self._follow, time.monotonic()
        while (name := self._store.ask(step)) is None:
            spent = time.monotonic() - begin
            if spent > self._timeout and (missing := self._store.ask(self._missing)):
                numbers = self._store.ask(lambda s: [self._number_of(s, r) for r in range(self._size)])
                told = [f"told/{number}" for r, number in enumerate(numbers) if r not in missing]
                self._let_others_look(f"told/{self._number}", told)
                raise self._lost(absent, missing)
            time.sleep(min(0.25, 0.002 + self._size / 10_000 + spent / 20))
        return name

    def _words(self, store: SignedStore) -> list[str]:
        """What the ranks have said, once all have; none before. In front stands the number of each."""
        keys = [f"come/{r}" for r in range(self._size)]
        words = store.get_all(keys) if store.check(keys) else [None]
        return [] if None in words else [word.decode(errors="replace") for word in words if word is not None]

    def _lead(self, store: SignedStore) -> str | None:
        if not (words := self._words(store)):
            return None
        proposal = " ".join(word.partition(" ")[0] for word in words)
        if (name := _name(proposal)) != self._agreed:
            self._agreed = name
            store.set("proposal", proposal)
        keys = [f"agreed/{r}" for r in range(1, self._size)]
        if not store.check(keys) or any(word != name.encode() for word in store.get_all(keys)):
            return None
        store.set(f"met/{name}", "1")
        return name

    def _follow(self, store: SignedStore) -> str | None:
        if self._agreed and store.check([f"met/{self._agreed}"]):
            return self._agreed
        proposal = job_store.get(store, "proposal") or ""
        numbers = proposal.split(" ")
        if len(numbers) == self._size and numbers[self._rank] == self._number:
            if (name := _name(proposal)) != self._agreed:
                self._agreed = name
                store.set(f"agreed/{self._rank}", name)
        return None

    def _missing(self, store: SignedStore) -> list[int]:
        """Ranks that have not come; where all seem to have, those whose word is of an earlier time."""
        if absent := [r for r in range(self._size) if not self._number_of(store, r)]:
            return absent
        late = [r for r in range(1, self._size) if job_store.get(store, f"agreed/{r}") != self._agreed]
        if self._rank == 0:
            return late
        return [r for r in late if r != self._rank and self._agreed] or [0]

    def _number_of(self, store: SignedStore, rank: int) -> str:
        return (job_store.get(store, f"come/{rank}") or "").partition(" ")[0]


def _name(proposal: str) -> str:
    return hashlib.sha256(proposal.encode()).hexdigest()[:16]


class Attendance(_Ranks):
    """The processes of one meeting: nobody else has spoken in this store."""

    def find_ways(self, words: list[str], host: str) -> str:
        """The address by which the others reach this rank; '' where nothing tells it.

        gloo tries to connect for as long as its calls may take. Here each rank connects to the next one, and all know
        within seconds that one cannot.

        Args:
            words: `addresses.way` of each rank.
            host: that keeps the store of the launcher, as this process names it; '' for none.

        Raises:
            ConfigurationError: on all ranks, where one does not reach the next.
        """
        if self._size == 1:
            return "127.0.0.1"
        address = ""
        with contextlib.ExitStack() as stack:
            try:
                if address := addresses.own(words, self._rank, host):
                    listener = stack.enter_context(addresses.listen(address))
                    self._announce("at", f"{listener.getsockname()[1]} {address}")
                    self._reach((self._rank + 1) % self._size)
                else:
                    self._announce("at", "")
            except (RuntimeError, OSError) as err:
                self._announce("at", "")
                reason = f"rank {self._rank}: {first_line(err)}"
                self._store.ask(lambda s: s.set_once("why", reason))
            self._announce("tried")
            begin = time.monotonic()
            while missing := self._missing("tried"):
                spent = time.monotonic() - begin
                if spent > self._timeout + _REACH_S:
                    raise self._missed(missing)
                time.sleep(min(0.25, 0.002 + self._size / 10_000 + spent / 20))
        if why := self._store.ask(lambda s: job_store.get(s, "why")):
            raise self._unconnected(why)
        return address

    def _reach(self, other: int) -> None:
        end, key = time.monotonic() + self._timeout, f"at/{other}"
        while (said := self._store.ask(lambda s: job_store.get(s, key))) is None and time.monotonic() < end:
            time.sleep(0.01)
        if not said:
            return  # it is missing, or has no address
        port, _, address = said.partition(" ")
        try:
            socket.create_connection((address, int(port)), _REACH_S).close()
        except OSError as err:
            raise RuntimeError(f"rank {other} is not reached at {address} ({err.strerror or 'no answer'})") from err

    def run_together(self, run: Callable[[], Any]):
        """The result of a step that all ranks take together; when it fails, name ranks that do not even report it."""
        try:
            result = within(self._timeout + SLACK, run)
        except (RuntimeError, ValueError, TimeoutError) as err:
            self._announce("failed")
            time.sleep(_FAILURE_GRACE_S)
            if silent := self._missing("failed", "joined"):
                raise self._missed(silent, err) from err
            if isinstance(err, TimeoutError):
                raise PeerLost(
                    f"rank {self._rank}: the ranks came, but did not connect to each other in time; {_ADVICE}, or raise "
                    "TSN_TIMEOUT if they are only slow"
                ) from err
            raise self._unconnected(first_line(err)) from err
        self._announce("joined")
        return result

    def _missed(self, ranks: list[int], err: BaseException | None = None) -> PeerLost:
        self._let_others_look(f"told/{self._rank}", self._told())
        return self._lost("came, and were not heard of again", ranks, f" ({first_line(err)})" if err else "")

    def _unconnected(self, why: str) -> ConfigurationError:
        self._let_others_look(f"told/{self._rank}", self._told())
        return ConfigurationError(
            f"rank {self._rank}: all {self._size} ranks came, but they could not connect to each other ({why}); {_ADVICE}"
        )

    def _told(self) -> list[str]:
        return [f"told/{r}" for r in range(self._size)]

    def _missing(self, *words: str) -> list[int]:
        """Ranks that have said none of the words."""
        if self._store.ask(lambda s: s.check([f"{words[0]}/{r}" for r in range(self._size)])):
            return []

        def unsaid(store: SignedStore) -> list[int]:
            return [r for r in range(self._size) if not any(store.check([f"{word}/{r}"]) for word in words)]

        return self._store.ask(unsaid)

    def _announce(self, word: str, value: str = "1") -> None:
        self._store.ask(lambda s: s.set(f"{word}/{self._rank}", value))
