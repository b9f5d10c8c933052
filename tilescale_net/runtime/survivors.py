"""Ranks that are lost: the remaining ranks agree on their members and on what their heaps hold, and go on."""

import json
import time
from dataclasses import dataclass

from tilescale_net.errors import PeerLost
from tilescale_net.runtime import encoding, job_store, settings

_PAUSE = 0.02  # seconds between looks at which ranks have come


@dataclass(frozen=True)
class Survivors:
    """The ranks that go on after others were lost.

    Attributes:
        ranks: of the group, ascending.
        steps: what each of them gave to `shrink`, in this order.
    """

    ranks: list[int]
    steps: list[int]


def call_roll(control, watchdog, seconds: float) -> list[int]:
    """The members that go on: they come here within `seconds`. Called by each of them when its kernels have ended.

    No rank waits for ranks that are known to be lost. Ranks that are given up and may live are ended: what they
    launched would write into memory that has a new use.

    Raises:
        PeerLost: the others have gone on without this rank, because it came too late; or the rank that keeps the store of
            the job is lost.
    """
    store, members, rank = control.store, control.members, control.rank
    key = _key(control)
    end = time.monotonic() + seconds
    store.ask(lambda s: s.set(f"{key}/here/{rank}", "1"))
    while True:
        lost = watchdog.lost_ranks() & set(members)

        def look(s, lost=lost):
            for r in lost:
                s.set(f"{key}/out/{r}", "1")
            here = {r for r in members if s.check([f"{key}/here/{r}"])}
            out = {r for r in members if s.check([f"{key}/out/{r}"])}
            return here, out, job_store.get(s, f"{key}/members")

        here, out, decided = store.ask(look)
        if decided is not None:
            break
        if here | out >= set(members) or time.monotonic() > end:
            # The first list counts, so that all go on with the same ranks.
            word = json.dumps(sorted(here - out))
            store.ask(lambda s, word=word: s.set_once(f"{key}/members", word))
        else:
            time.sleep(_PAUSE)
    kept = _members(decided, members)
    if rank not in kept:
        raise PeerLost(f"rank {rank}: ranks {kept} have gone on without this one, which they took for lost")
    if store.kept_by in members and store.kept_by not in kept:  # one that was left out before may still keep it
        raise PeerLost(f"rank {rank}: {store.keeper} did not come, and no rank can go on without it")
    _end(watchdog, rank, set(members) - set(kept) - here)
    return kept


def _end(watchdog, rank: int, ranks: set[int]) -> None:
    living = watchdog.end_processes(ranks)
    if living:
        settings.log.warning(
            "rank %d: ranks %s are given up, and their processes cannot be seen from here; what still runs of them may "
            "write into the memory of the others", rank, sorted(living),
        )  # fmt: skip


def stay_out(control) -> None:
    """Report to the others that this rank does not go on, and that its kernels have ended."""
    key = f"{_key(control)}/%s/{control.rank}"
    try:
        control.store.ask(lambda s: [s.set(key % word, "1") for word in ("out", "here")])
    except PeerLost:  # no rank can be notified
        pass


def _key(control) -> str:
    return f"shrink/{control.era + 1}"


def _members(said: str, members: list[int]) -> list[int]:
    try:
        kept = sorted({int(r) for r in encoding.parsed(said)} & set(members))
    except (ValueError, TypeError, OverflowError):
        kept = []
    if not kept:
        raise PeerLost(f"who goes on after ranks were lost cannot be read from the store of the job: {said[:100]!r}")
    return kept


def live_everywhere(control, live: dict[int, int]) -> dict[int, int]:
    """The blocks of the heap (offset -> bytes) that are live on some member.

    A rank that is lost in the middle of a collective call leaves members that have allocated, or freed, and others that
    have not. What one of them may still use, no other gives away.
    """
    said = control.gather("tilescale_net.shrink", json.dumps(sorted(live.items())))
    union: dict[int, int] = {}
    for text in said:
        try:
            union |= {int(offset): int(size) for offset, size in encoding.parsed(text)}
        except (ValueError, TypeError, OverflowError) as err:
            raise PeerLost(f"what the heap of another rank holds cannot be read: {err}") from None
    return union
