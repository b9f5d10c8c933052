"""What the collectives of a rank were called with last, so that ranks that wait for each other learn in which call they differ.

A rank whose call is new to it queries the others' hosts, and one whose call is known starts a kernel: where they
differ, each waits for the other, and neither can report it. So every rank notes its calls. When it has made none for a
moment, it writes them to the store, and its watchdog compares them with those of the next rank. They differ where a call
of one object has other arguments; and where each rank has made a call that the other has not, of another object or of the
host: all ranks make all calls in one order, so that what one has made is the beginning of what the other has made. Numbers of
calls that were replayed by a CUDA graph are not counted by any host, so they do not matter.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future

from tilescale_net.errors import PeerLost, RankMismatch, TileScaleError
from tilescale_net.runtime import encoding, job_store, progress

# What ends the message of ranks whose calls differ; ranks that receive it recognise it by this.
RULE = "all ranks make the same calls in the same order"

_KEPT = 256  # calls of an object that are remembered: how far the hosts of two ranks may be apart
_TOLD = 8  # calls of an object that are sent to the other rank
_MOST = 16  # objects that are sent at a time
_LONGEST = 400  # characters of a call
_HOST = ""  # the key of the host's collective calls
# Looks of the watchdog, four in a second, without a new call before calls are compared; and before a difference that a
# kernel has reported is reported here too: its host raises it with the next call, and goes on.
_QUIET, _REPORTED = 4, 12
# Ranks of which each queries the store in every look, larger jobs less often; and looks after which all query it less
# often, by how much: the store serves a whole job.
_RANKS, _LONG, _SELDOM = 32, 24, 16


class Track:
    """The calls of one object.

    Args:
        name: of the object, as messages have it.
        key: of the object among those of its world, equal on all ranks.
    """

    def __init__(self, name: str, key: str):
        self.name, self.key, self.count = name, key, 0
        self.seen, self.last = 0, 0  # calls at the last look of the watchdog, and the last look that found new ones
        self.reported: Callable[[], bool] = lambda: False  # whether a kernel has found that calls differ
        self.settled = 0
        self.outer: Track | None = None  # of the object whose calls make those of this one
        self._origin = ""
        self._kept: deque[tuple] = deque(maxlen=_KEPT)

    def note(self, describe: str, *arguments) -> None:
        """Note a call; `describe` is text with a `{}` for each argument. The text is made on demand."""
        self._kept.append((self.count + 1, describe, arguments))
        self.count += 1

    def note_operator(self, gradient: bool, describe: str, *arguments) -> None:
        """As `note`, of an operator, or of one that a backward calls for a gradient; what it calls has that as its `origin`."""
        self._origin = "backward: " if gradient else ""
        self.note("backward: " + describe if gradient else describe, *arguments)

    @property
    def origin(self) -> str:
        """What the object's calls are made for, where that is more than they say."""
        return self._origin if self.outer is None else self.outer.origin

    def settle(self) -> None:
        """That the calls so far differ was raised: ranks go on after them."""
        self.settled = self.count
        if self.outer is not None:
            self.outer.settle()

    def text(self, call: int) -> str | None:
        """What call `call` (from 1) was made with, None where that is forgotten or to come."""
        try:
            number, describe, arguments = self._kept[call - self.count - 1]
        except IndexError:
            return None
        if number != call:  # another thread has noted one meanwhile
            return None
        shown = (list(a) if isinstance(a, tuple) else a for a in arguments)
        return describe.format(*shown)[:_LONGEST]


class CallLog:
    """The calls of all objects of a world on this rank.

    Args:
        control: rank, members and store.
    """

    def __init__(self, control):
        self._control = control
        self._tracks: dict[str, Track] = {}
        self._of_name: Counter = Counter()
        self._of_freed = 0  # calls of objects that are gone
        self._seen = self._told = self._quiet = (
            0  # calls at the last look, and when they were sent; looks without a new one
        )
        self._answer: Future | None = None
        self._looks = 0
        # Ranks that did not agree, and go on, are a call apart in some objects.
        self._in_order = True

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
        """The calls of what every rank has once, whenever a rank comes to it."""
        return self._tracks.setdefault(name, Track(name, name))

    def forget(self) -> None:
        """Begin anew: ranks were lost, and what was under way then was made by some and not by others."""
        self._tracks, self._answer = {}, None
        self._of_name.clear()
        self._seen = self._told = self._quiet = 0
        self._in_order = False

    def on_mismatch(self) -> None:
        """Ranks did not agree on a call of their hosts."""
        self._in_order = False

    def difference(self) -> TileScaleError | None:
        """One look, by the watchdog: the error of ranks whose calls differ; does not wait for the store."""
        members = self._control.members
        if len(members) < 2 or self._control.rank not in members:
            return None
        self._looks += 1
        for track in list(self._tracks.values()):
            if track.count != track.seen:
                track.seen, track.last = track.count, self._looks
        calls = self._all_calls()
        # A rank that compiles is not waited for by anything but patience.
        self._quiet = self._quiet + 1 if calls == self._seen and not progress.active() else 0
        self._seen = calls
        if self._quiet < _QUIET or not self._tracks:
            return None
        every = max(1, len(members) // _RANKS)
        late = self._quiet - _QUIET >= _LONG * every
        asks = (self._quiet + self._control.rank) % (every * (_SELDOM if late else 1)) == 0
        if asks and self._told != calls:
            word = json.dumps(self._last_calls())
            if self._all_calls() == calls:  # none came in between, which would be told without those before it
                self._told = calls
                self._control.store.post(lambda s: s.set(self._key(self._control.rank), word))
        return self._compare(members[(members.index(self._control.rank) + 1) % len(members)], asks)

    def _all_calls(self) -> int:
        return self._control.calls + self._of_freed + sum(track.count for track in list(self._tracks.values()))

    def _key(self, rank: int) -> str:
        return f"calls/{self._control.era}/{rank}"

    def _last_calls(self) -> list:
        """[key of the object, calls so far, texts of the last of them, its name] of the objects called last, and the host."""
        told = [[_HOST, self._control.calls, [self._control.last_call[:_LONGEST]], "the host"]]
        for track in sorted(list(self._tracks.values()), key=lambda track: track.last)[-_MOST:]:
            count = track.count
            texts = [track.text(c) for c in range(max(1, count - _TOLD + 1), count + 1)]
            told.append([track.key, count, texts, track.name])
        return told

    def _compare(self, other: int, asks: bool) -> RankMismatch | None:
        """Take the store's answer about the other rank, and query it again where that is due."""
        answer, error = self._answer, None
        if answer is not None and not answer.done():
            return None
        if answer is not None and answer.exception() is None:
            error = self._differs(other, answer.result())
        if not asks:
            return error
        key = self._key(other)
        try:
            self._answer = self._control.store.post(lambda s: job_store.get(s, key))
        except PeerLost:
            self._answer = None
        return error

    def _differs(self, other: int, said: str | None) -> RankMismatch | None:
        """The first call that both ranks have made and made differently, or that each has made and the other has not."""
        try:
            told = [entry for entry in encoding.parsed(said or "[]") if entry[0] == _HOST or entry[0] in self._tracks]
            for key, count, texts, _ in told[1:]:
                track = self._tracks[key]
                for call, theirs in zip(range(count - len(texts) + 1, count + 1), texts):
                    mine = track.text(call) if call > track.settled else None
                    known = track.reported() and self._quiet < _REPORTED
                    if None not in (mine, theirs) and mine != theirs and not known:
                        return RankMismatch(
                            f"{track.name}: rank {self._control.rank} was called with {mine}; rank {other} with "
                            f"{encoding.printable(str(theirs))}; "
                            f"{RULE}"
                        )
            return self._crossed(other, told) if self._in_order else None
        except (ValueError, TypeError, IndexError, KeyError, OverflowError):  # nonsense
            pass
        return None

    def _crossed(self, other: int, told: list) -> RankMismatch | None:
        """What two ranks have made last, where each is ahead of the other."""
        mine = {_HOST: self._control.calls} | {key: self._tracks[key].count for key, *_ in told[1:]}
        if self._all_calls() != self._seen:
            return None
        ahead = [key for key, count, *_ in told if mine[key] > int(count)]
        behind = [(texts, name, mine[key] - int(count)) for key, count, texts, name in told if mine[key] < int(count)]
        if not ahead or not behind:
            return None
        of = max((self._tracks[key] for key in ahead if key != _HOST), key=lambda track: track.last, default=None)
        made = self._control.last_call if of is None else f"{of.name}: {of.text(of.count)}"
        texts, name, place = behind[-1]
        theirs = texts[place] if -len(texts) <= place else texts[0]
        theirs = theirs if name == "the host" else f"{name}: {theirs}"
        return RankMismatch(
            f"rank {self._control.rank} has made a call that rank {other} has not ({made}), and rank {other} one that rank "
            f"{self._control.rank} has not ({encoding.printable(str(theirs))[:_LONGEST]}); {RULE}"
        )


def error_of_loss(text: str) -> TileScaleError:
    """The error for another rank's text of why the job is lost."""
    return RankMismatch(text) if RULE in text else PeerLost(text)
