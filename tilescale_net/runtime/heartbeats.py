"""What the ranks of a job report to each other through its store while all is well: that they live, and that none
failed.

One host sends as few requests as it can: one of its ranks sends heartbeats for all of them, with the stopped ones. Each
rank looks at one key for failures, and at the heartbeats of all hosts with one request.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tilescale_net.runtime import encoding, job_store
from tilescale_net.runtime.control import announced
from tilescale_net.runtime.signed_store import SignedStore

INTERVAL = 0.25  # seconds between looks at the failure key
_BEAT = 4  # looks from one heartbeat to the next
_RANKS = 256  # a job of more looks less often, so that its store serves no more requests in all
_PAUSE = 1.5  # of the time between two heartbeats: what two looks may lie apart before this rank itself was late
_TAKEOVER = 3.0  # seconds without a heartbeat after which another rank of the host sends it
_TAKEOVER_STEP = 0.5  # seconds that the next one leaves to the one before


@dataclass
class News:
    """What a round found.

    Attributes:
        failed: the failure that another rank reported, as text.
        silent: the first rank of a host that counts as lost, and why, as text.
        lost: all ranks of such hosts.
        quiet: whether a heartbeat is late, of a host that does not count as lost yet.
        alarms: how many reports of what the ranks do were requested so far, see trace/reporter.py.
        stopped: ranks that are stopped (SIGSTOP, a debugger), and for how many seconds they have been so.
    """

    failed: str | None = None
    silent: tuple[int, str] | None = None
    lost: set[int] = field(default_factory=set)
    quiet: bool = False
    alarms: int = 0
    stopped: dict[int, float] = field(default_factory=dict)


class Heartbeats:
    """One rank's part in it.

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
        self._first: dict[str, list[int]] = {}
        self._failed_key = failed_key
        for r, host in enumerate(hosts):
            if members is not None and r not in members:
                continue
            self._first.setdefault(host, []).append(r)
        self._mine = hosts[rank]
        self._index = self._first[self._mine].index(rank)
        self._keys = [f"beat/{members[0]}" for members in self._first.values()]
        self._complete = False  # every host has sent a heartbeat
        self._rounds = 0
        self._sent = 0
        self._seen: dict[str, tuple[str, float]] = {}
        self._watched, self._looked = 0.0, clock()  # seconds that silence may count, and when this rank looked last
        self._stopped_since: dict[int, float] = {}
        self._silent: tuple[int, str] | None = None
        self._lost: set[int] = set()
        self._quiet = False
        self._failed: str | None = None
        self._alarms = 0  # of the round that looked at the failure key last
        self.interval = INTERVAL * max(1.0, len(hosts) / _RANKS)
        self._late = 2 * _BEAT * self.interval  # seconds of silence that are worth a second look

    def round(self, store: SignedStore) -> News:
        """Look, and send what is due. Raises what the store raises."""
        news = News(alarms=store.count(job_store.ALARMS))
        # One request where nothing happened: a rank that fails raises an alarm too, after it has written the reason.
        if news.alarms != self._alarms or self._rounds % _BEAT == 0:
            self._alarms = news.alarms
            self._failed = self._failed or announced(job_store.get(store, self._failed_key), self._rank)
        news.failed = self._failed
        if self._rounds % _BEAT == 0:
            self._count()
            self._beat(store)
            self._look(store)
        self._rounds += 1
        now = self._clock()
        news.silent, news.quiet, news.lost = self._silent, self._quiet, set(self._lost)
        news.stopped = {r: now - since for r, since in self._stopped_since.items()}
        return news

    def _count(self) -> None:
        """A pause of this rank itself, by a busy machine or SIGSTOP, does not count as silence of others."""
        now = self._clock()
        self._watched += min(now - self._looked, _PAUSE * _BEAT * self.interval)
        self._looked = now

    def _beat(self, store: SignedStore) -> None:
        """Send the heartbeat of this host, if that is for this rank to do."""
        key = f"beat/{self._first[self._mine][0]}"
        value, since = self._seen.get(key, ("", self._watched))
        self._seen.setdefault(key, (value, since))
        silence = self._watched - since
        if self._index == 0 or silence > _TAKEOVER + _TAKEOVER_STEP * self._index:
            self._sent += 1
            store.set(key, json.dumps([self._rank, self._sent, self._stopped()]))

    def _look(self, store: SignedStore) -> None:
        self._complete = self._complete or store.check(self._keys)
        if self._complete:
            values = {k: (v or b"").decode(errors="replace") for k, v in zip(self._keys, store.get_all(self._keys))}
        elif self._watched > self._late:  # a rank may be lost before its first heartbeat: the others are not
            values = {k: job_store.get(store, k) or "" for k in self._keys}
        else:
            values = {}
        self._judge(store, values)

    def _judge(self, store: SignedStore, values: dict[str, str]) -> None:
        now = self._watched
        self._silent, self._quiet, self._lost = None, False, set()
        stopped: set[int] = set()
        longest = self._timeout
        for (host, members), key in zip(self._first.items(), self._keys):
            last, since = self._seen.get(key, ("", now))
            value = values.get(key) or last  # what no rank has said is no sign of life
            if value != last:
                since = now
            self._seen[key] = (value, since)
            stopped |= set(_stopped_in(value)) & set(members)
            silence = now - since
            if host == self._mine or silence <= min(self._late, self._timeout) or self._ended(store, members):
                continue
            self._quiet = True
            if silence > self._timeout:
                self._lost |= set(members)
            if silence > longest:  # others may only be busy with its loss
                longest = silence
                others = f" (nor did ranks {members[1]} to {members[-1]} of its host)" if len(members) > 1 else ""
                self._silent = members[0], f"sent no heartbeat for {silence:.0f} s{others}"
        clock = self._clock()
        self._stopped_since = {r: self._stopped_since.get(r, clock) for r in stopped if r != self._rank}

    @staticmethod
    def _ended(store: SignedStore, members: list[int]) -> bool:
        return any(store.check([f"ended/{r}"]) for r in members)


def _stopped_in(value: str) -> list[int]:
    try:
        return [int(r) for r in encoding.parsed(value)[2]]
    except (ValueError, TypeError, IndexError, KeyError, OverflowError):
        return []
