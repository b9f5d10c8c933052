"""Writes files of events while a job runs: a header, names, and a ring of events.

Each rank has one for the host, one for each proxy thread and one for its kernels; csrc/common/trace_ring.h writes those of
proxy threads and of simulated kernels. A file stays when its process is killed.
"""

import mmap
import os
from collections.abc import Callable

from tilescale_net.trace.events import EVENT_BYTES, HEADER_BYTES, MAGIC, NO_WORD, SPAN, Event, Header

_NAMES = 1 << 18  # bytes for names


class Ring:
    """A new file, and the writer of its events; by one thread at a time.

    Args:
        path: the file.
        rank, size: of this process, of the job.
        capacity: events that are kept.
        offset_ns, error_ns: what to add to this process's clock to get that of rank 0, and how wrong that may be.

    Raises:
        OSError: the file cannot be written, or the disk has no room for it.
    """

    def __init__(self, path: str, rank: int, size: int, capacity: int, offset_ns: int = 0, error_ns: int = 0):
        self.path = path
        total = HEADER_BYTES + _NAMES + capacity * EVENT_BYTES
        with open(path, "wb+") as file:
            # Not only as long: where the disk is full, a store to the map would end the process.
            os.posix_fallocate(file.fileno(), 0, total)
            self._map = mmap.mmap(file.fileno(), total)
        self._header = Header.from_buffer(self._map)
        h = self._header
        h.capacity, h.names_bytes, h.rank, h.size = capacity, _NAMES, rank, size
        h.offset_ns, h.error_ns, h.magic = offset_ns, error_ns, MAGIC
        self._numbers: dict[str, int] = {}
        self._capacity = capacity

    def name(self, text: str) -> int:
        """The number of a name; 0, the empty one, when there is no room for more."""
        if not self._numbers and text:
            self.name("")
        if (number := self._numbers.get(text)) is not None:
            return number
        raw, used = text.encode(), self._header.names_used
        if used + 4 + len(raw) > _NAMES:
            return 0
        at = HEADER_BYTES + used
        self._map[at : at + 4 + len(raw)] = len(raw).to_bytes(4, "little") + raw
        self._header.names_used = used + 4 + len(raw)
        self._numbers[text] = len(self._numbers)
        return self._numbers[text]

    def add(self, event: Event) -> None:
        at = self._next()
        self._map[at : at + EVENT_BYTES] = bytes(event)
        self._header.events += 1

    def add_span(self, kind: int, name: int, begin_ns: int, end_ns: int, track: int) -> None:
        """Add an event that has a name, times and a track, and nothing else; calls of the host wait for it."""
        SPAN.pack_into(self._map, self._next(), begin_ns, end_ns, name, kind, 0, -1, 0, track, 0, NO_WORD, 0, 0)
        self._header.events += 1

    def _next(self) -> int:
        """Where the next event goes."""
        return HEADER_BYTES + _NAMES + self._header.events % self._capacity * EVENT_BYTES

    def correct(self, kind: int, corrected: Callable[[int], int]) -> None:
        """Replace the times of the events of a kind."""
        for n in range(min(self._header.events, self._header.capacity)):
            event = Event.from_buffer(self._map, HEADER_BYTES + _NAMES + n * EVENT_BYTES)
            if event.kind == kind:
                event.begin_ns, event.end_ns = corrected(event.begin_ns), corrected(event.end_ns)
            del event  # the map cannot be closed while one refers to it

    def dropped(self, events: int) -> None:
        """Note how many older events are gone, besides those that this ring overwrites."""
        self._header.dropped = events

    def close(self) -> None:
        self._header = None
        self._map.close()
