"""How a file of events is laid out: its header, an event, and kinds of events; as csrc/common/trace_ring.h has them."""

import ctypes
import enum
import struct

MAGIC = 0x3165636172545354  # "TSTrace1"
NO_WORD = (1 << 64) - 1  # of an event without a word
FIRST_STREAM = 100  # first track of launches that CUDA events have timed; others are below


class Kind(enum.IntEnum):
    """tsn::TraceKind."""

    KERNEL = 1
    CALL = 2
    WAIT = 3
    HOST = 4
    RANGE = 5
    ENTRY = 6
    TRANSFER = 7
    STAGING = 8
    DELIVERED = 9
    KERNEL_RANGE = 10


class Header(ctypes.Structure):
    """What a file begins with. `rank`, `offset_ns` (to be added for rank 0's clock) and the rest after it are Python's;
    `dropped` events are gone besides those that the ring has overwritten."""

    _fields_ = [
        ("magic", ctypes.c_uint64),
        ("capacity", ctypes.c_uint64),
        ("events", ctypes.c_uint64),
        ("names_bytes", ctypes.c_uint64),
        ("names_used", ctypes.c_uint64),
        ("rank", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("offset_ns", ctypes.c_int64),
        ("error_ns", ctypes.c_uint64),
        ("dropped", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64 * 6),
    ]


class Event(ctypes.Structure):
    """tsn::TraceEvent."""

    _fields_ = [
        ("begin_ns", ctypes.c_uint64),
        ("end_ns", ctypes.c_uint64),
        ("name", ctypes.c_uint32),
        ("kind", ctypes.c_uint16),
        ("operation", ctypes.c_uint16),
        ("pe", ctypes.c_int32),
        ("block", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("line", ctypes.c_uint32),
        ("word", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
    ]


_LETTERS = {ctypes.c_uint64: "Q", ctypes.c_uint32: "I", ctypes.c_int32: "i", ctypes.c_uint16: "H"}
SPAN = struct.Struct("=" + "".join(_LETTERS[kind] for _, kind in Event._fields_))  # an Event, packed five times as fast
HEADER_BYTES, EVENT_BYTES = ctypes.sizeof(Header), ctypes.sizeof(Event)
