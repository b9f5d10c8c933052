"""Which signal ended which wait: by the word, its value and the time."""

import bisect
from collections import defaultdict

from tilescale_net.runtime import context
from tilescale_net.trace import events, part_reader
from tilescale_net.trace.events import Kind

_WAIT = context.OPERATIONS.index("wait")
_SENDS = {context.OPERATIONS.index("signal"), context.OPERATIONS.index("put_signal")}

Place = tuple[part_reader.Part, events.Event]


def is_send(event: events.Event) -> bool:
    """Whether an event is a call that sends a signal."""
    return event.kind == Kind.CALL and event.operation in _SENDS and event.word != events.NO_WORD


def is_wait(event: events.Event) -> bool:
    """Whether an event is a call that waits for a signal."""
    return event.kind == Kind.CALL and event.operation == _WAIT and event.word != events.NO_WORD


class Matched:
    """The signals that waits have seen."""

    def __init__(self):
        self._found: dict[int, tuple[Place, Place]] = {}

    def add(self, wait: Place, send: Place) -> None:
        self._found[id(wait[1])] = wait, send

    def pairs(self) -> list[tuple[Place, Place]]:
        """(wait, signal) of each call that waits."""
        return [pair for pair in self._found.values() if pair[0][1].kind == Kind.CALL]

    def values_in_order(self, waits: list[Place]) -> list[int | None]:
        """The rank that each of `waits` waited for, None where that is not known."""
        senders = []
        for _, event in waits:
            pair = self._found.get(id(event))
            senders.append(event.pe if event.pe >= 0 else pair[1][0].rank if pair else None)
        return senders


def match(sends: list[Place], waits: list[Place]) -> Matched:
    """For each wait the latest signal with the value that it saw, or else the latest, sent to its word before it ended."""
    by_word: dict[tuple[int, int], list[Place]] = defaultdict(list)
    for place in sorted(sends, key=lambda place: place[1].begin_ns):
        by_word[place[1].pe, place[1].word].append(place)
    times = {key: [event.begin_ns for _, event in places] for key, places in by_word.items()}
    errors = {key: max(part.error_ns for part, _ in places) for key, places in by_word.items()}
    matched = Matched()
    for part, event in waits:
        key = part.rank, event.word
        places = by_word.get(key)
        if not places or event.operation != _WAIT:
            continue
        slack = part.error_ns + errors[key]
        last = bisect.bisect_right(times[key], event.end_ns + slack)
        same = [place for place in places[max(0, last - 64) : last] if place[1].value == event.value]
        if last:
            matched.add((part, event), (same or places[:last])[-1])
    return matched
