"""Event files of a running job: their layout, writer and reader.

Each rank has one for the host, one for each proxy thread and one for its kernels: a header, names, and a ring of
events. csrc/common/trace_ring.h has the same layout, and writes the files of proxy threads and simulated kernels. A
file survives a kill of its process.
"""

import ctypes
import enum
import mmap
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from tilescale_net.runtime.context import fields

# -- layout -----------------------------------------------------------------------------------------------------------

MAGIC = 0x3165636172545354  # "TSTrace1"
NO_WORD = (1 << 64) - 1  # of an event without a word
FIRST_STREAM = 100  # first track of launches timed by CUDA events; others are below


# tsn::TraceKind.
Kind = enum.IntEnum("Kind", "KERNEL CALL WAIT HOST RANGE ENTRY TRANSFER STAGING DELIVERED KERNEL_RANGE")


class Header(ctypes.Structure):
    """Header of a file. Python writes `rank`, `offset_ns` (added to get rank 0's clock) and the rest after it;
    `dropped`: lost events besides those that the ring has overwritten."""

    _fields_ = fields(
        "Q magic capacity events names_bytes names_used rank size q offset_ns Q error_ns dropped reserved*6"
    )


class Event(ctypes.Structure):
    """tsn::TraceEvent."""

    _fields_ = fields("Q begin_ns end_ns I name H kind operation i pe I block thread line Q word value bytes")


SPAN = struct.Struct("=QQIHHiIIIQQQ")  # an Event, packed five times as fast
HEADER_BYTES, EVENT_BYTES = ctypes.sizeof(Header), ctypes.sizeof(Event)


# -- writing ----------------------------------------------------------------------------------------------------------

_NAMES_BYTES = 1 << 18  # bytes for names


class Ring:
    """A new file, and the writer of its events; by one thread at a time.

    Args:
        path: the file.
        rank, size: of this process, of the job.
        capacity: events that are kept.
        offset_ns, error_ns: offset from this process's clock to rank 0's, and its error.

    Raises:
        OSError: the file cannot be written, or the disk has no room for it.
    """

    def __init__(self, path: str, rank: int, size: int, capacity: int, offset_ns: int = 0, error_ns: int = 0):
        self.path = path
        total = HEADER_BYTES + _NAMES_BYTES + capacity * EVENT_BYTES
        with open(path, "wb+") as file:
            # Allocated, not sparse: on a full disk a store to the map would end the process.
            os.posix_fallocate(file.fileno(), 0, total)
            self._map = mmap.mmap(file.fileno(), total)
        self._header = Header.from_buffer(self._map)
        h = self._header
        h.capacity, h.names_bytes, h.rank, h.size = capacity, _NAMES_BYTES, rank, size
        h.offset_ns, h.error_ns, h.magic = offset_ns, error_ns, MAGIC
        self._numbers: dict[str, int] = {}
        self._capacity = capacity

    def name(self, text: str) -> int:
        """The number of a name; 0, the empty one, when no room is left."""
        if not self._numbers and text:
            self.name("")
        if (number := self._numbers.get(text)) is not None:
            return number
        raw, used = text.encode(), self._header.names_used
        if used + 4 + len(raw) > _NAMES_BYTES:
            return 0
        at = HEADER_BYTES + used
        self._map[at : at + 4 + len(raw)] = len(raw).to_bytes(4, "little") + raw
        self._header.names_used = used + 4 + len(raw)
        self._numbers[text] = len(self._numbers)
        return self._numbers[text]

    def add(self, event: Event) -> None:
        """Add an event."""
        at = self._next()
        self._map[at : at + EVENT_BYTES] = bytes(event)
        self._header.events += 1

    def add_span(self, kind: int, name: int, begin_ns: int, end_ns: int, track: int) -> None:
        """Add an event that has a name, times and a track, and nothing else; calls of the host wait for it."""
        SPAN.pack_into(self._map, self._next(), begin_ns, end_ns, name, kind, 0, -1, 0, track, 0, NO_WORD, 0, 0)
        self._header.events += 1

    def _next(self) -> int:
        """Offset of the next event."""
        return HEADER_BYTES + _NAMES_BYTES + int(self._header.events) % self._capacity * EVENT_BYTES

    def correct(self, kind: int, corrected: Callable[[int], int]) -> None:
        """Replace the times of the events of a kind."""
        for n in range(min(self._header.events, self._header.capacity)):
            event = Event.from_buffer(self._map, HEADER_BYTES + _NAMES_BYTES + n * EVENT_BYTES)
            if event.kind == kind:
                event.begin_ns, event.end_ns = corrected(event.begin_ns), corrected(event.end_ns)
            del event  # the map cannot be closed while one refers to it

    def dropped(self, events: int) -> None:
        """Set the number of lost older events, besides those that this ring overwrites."""
        self._header.dropped = events

    def close(self) -> None:
        """Write no more; the file stays."""
        del self._header  # the map cannot be closed while it refers to it
        self._map.close()


# -- reading ----------------------------------------------------------------------------------------------------------

_MAX_UNPACKED = 1 << 30  # limit of another host's unpacked file: a few bytes could grow a thousandfold


@dataclass
class Part:
    """The contents of a file. `rank`, `size`: of the process that wrote it, of its job. `what`: "host", "kernels" or
    "proxy0", …. `events`: the oldest first, with times of rank 0's clock. `names`: by number. `dropped`: events that
    newer ones have overwritten. `error_ns`: error of the times relative to other ranks."""

    rank: int
    size: int
    what: str = ""
    events: list[Event] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    dropped: int = 0
    error_ns: int = 0

    def text(self, number: int) -> str:
        return self.names[number] if number < len(self.names) else ""


def read_part(raw: bytes, where: str, what: str) -> Part:
    """The header and bytes of a file. Raises ValueError if it is no ring, or damaged."""
    if len(raw) < HEADER_BYTES:
        raise ValueError(f"{where} is no trace: it has {len(raw)} bytes")
    h = Header.from_buffer_copy(raw)
    if h.magic != MAGIC:
        raise ValueError(f"{where} is no trace of this version")
    if (
        len(raw) != HEADER_BYTES + h.names_bytes + h.capacity * EVENT_BYTES
        or h.names_used > h.names_bytes
        or not h.capacity
    ):
        raise ValueError(f"{where} is damaged: {len(raw)} bytes do not fit its header")
    overwritten = max(0, h.events - h.capacity)
    part = Part(int(h.rank), int(h.size), what, dropped=overwritten + h.dropped, error_ns=int(h.error_ns))
    at, end = HEADER_BYTES, HEADER_BYTES + h.names_used
    while at + 4 <= end:
        length = int.from_bytes(raw[at : at + 4], "little")
        part.names.append(raw[at + 4 : min(end, at + 4 + length)].decode(errors="replace"))
        at += 4 + length
    first = HEADER_BYTES + h.names_bytes
    for n in range(overwritten, h.events):
        event = Event.from_buffer_copy(raw, first + n % h.capacity * EVENT_BYTES)
        if event.kind not in Kind.__members__.values() or event.end_ns < event.begin_ns:
            continue  # partly written when its process was killed
        event.begin_ns += h.offset_ns
        event.end_ns += h.offset_ns
        part.events.append(event)
    return part


def packed(raw: bytes) -> bytes:
    """The bytes of a file, compressed for the way to another host."""
    return zlib.compress(raw, 1)


def unpacked(packed: bytes, where: str) -> bytes:
    """The bytes that `packed` compressed. Raises ValueError for damaged ones, or far more than a trace has."""
    unpacking = zlib.decompressobj()
    try:
        raw = unpacking.decompress(packed, _MAX_UNPACKED)
    except zlib.error as err:
        raise ValueError(f"{where} is damaged: {err}") from None
    if not unpacking.eof:
        raise ValueError(f"{where} is cut short, or has more than {_MAX_UNPACKED >> 20} MiB")
    return raw


def read_file(path: str, what: str) -> Part:
    """As `read_part`, of a file. Raises OSError too."""
    with open(path, "rb") as file:
        return read_part(file.read(), os.path.basename(path), what)
