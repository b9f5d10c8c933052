"""Reads the files that ring.py and trace_ring.h write, and makes them smaller for the way to another host."""

import os
import zlib
from dataclasses import dataclass, field

from tilescale_net.trace.events import EVENT_BYTES, HEADER_BYTES, MAGIC, Event, Header, Kind

_MOST = 1 << 30  # bytes of a file that another host has packed: a few could grow a thousandfold


@dataclass
class Part:
    """What a file holds.

    Attributes:
        rank, size: of the process that wrote it, of its job.
        what: "host", "kernels" or "proxy0", …
        events: the oldest first, with times of rank 0's clock.
        names: by number.
        dropped: events that newer ones have taken the place of.
        error_ns: how wrong the times may be against those of other ranks.
    """

    rank: int
    size: int
    what: str = ""
    events: list[Event] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    dropped: int = 0
    error_ns: int = 0

    def text(self, number: int) -> str:
        return self.names[number] if number < len(self.names) else ""


def read(raw: bytes, where: str, what: str) -> Part:
    """The bytes of a file, and what they are of. Raises ValueError for one that is no ring, or damaged."""
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
            continue  # half written when its process was killed
        event.begin_ns += h.offset_ns
        event.end_ns += h.offset_ns
        part.events.append(event)
    return part


def packed(raw: bytes) -> bytes:
    """The bytes of a file, smaller, for the way to another host."""
    return zlib.compress(raw, 1)


def unpacked(packed: bytes, where: str) -> bytes:
    """What `packed` has made smaller. Raises ValueError for what is damaged, or far larger than a trace is."""
    unpacking = zlib.decompressobj()
    try:
        raw = unpacking.decompress(packed, _MOST)
    except zlib.error as err:
        raise ValueError(f"{where} is damaged: {err}") from None
    if not unpacking.eof:
        raise ValueError(f"{where} is cut short, or has more than {_MOST >> 20} MiB")
    return raw


def read_file(path: str, what: str) -> Part:
    """As `read`, of a file. Raises OSError too."""
    with open(path, "rb") as file:
        return read(file.read(), os.path.basename(path), what)
