"""The Python mirror of device/context.h; `tests/runtime/test_context.py` holds the two against each other."""

import ctypes
import enum

VERSION = 1
SYSTEM_BYTES = 64 * 1024
QUEUE_WORDS = 128
QUEUE_WORDS_STRIDE = 32
MAX_QUEUES = 64
MAX_PES = (1 << 14) - 1
INLINE_BASES = 128


class ContextHeader(ctypes.Structure):
    """`tsn::Context` up to `peer_base`."""

    _fields_ = [
        ("version", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("my_pe", ctypes.c_int32),
        ("n_pes", ctypes.c_int32),
        ("node_pe", ctypes.c_int32),
        ("n_node_pes", ctypes.c_int32),
        ("n_queues", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("heap_base", ctypes.c_uint64),
        ("heap_bytes", ctypes.c_uint64),
        ("abort_word", ctypes.c_uint64),
        ("error", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("queues", ctypes.c_uint64),
        ("queue_share", ctypes.c_uint64),
        ("trace", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64 * 4),
        ("aborted", ctypes.c_uint64),
        ("reserved_line", ctypes.c_uint64 * 15),
    ]


HEADER_BYTES = ctypes.sizeof(ContextHeader)  # offset of peer_base
HEADER_WORDS = HEADER_BYTES // 8


class ErrorRecord(ctypes.Structure):
    """`tsn::ErrorRecord`."""

    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("pe", ctypes.c_int32),
        ("operation", ctypes.c_uint32),
        ("block", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("expected", ctypes.c_uint64),
        ("observed", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("claimed", ctypes.c_uint64),
        ("comparison", ctypes.c_uint32),
        ("line", ctypes.c_uint32),
    ]


class ErrorKind(enum.IntEnum):
    """`tsn::ErrorKind`; what a text calls one is its name with spaces."""

    NO_ERROR = 0
    WAIT_TIMEOUT = 1
    QUEUE_TIMEOUT = 2
    FLUSH_TIMEOUT = 3
    PE_OUT_OF_RANGE = 4
    NOT_SYMMETRIC = 5
    NOT_DIRECT = 6
    UNSUPPORTED = 7
    BARRIERS_OVERLAP = 8


# Names of tsn::Operation, by value.
OPERATIONS = (
    "none",
    "put",
    "get",
    "put_signal",
    "put_value",
    "signal",
    "wait",
    "test",
    "atomic",
    "fence",
    "quiet",
    "flush",
    "barrier",
    "remote",
    "barrier_grid",
)
# Names of tsn::Compare, by value.
COMPARISONS = ("eq", "ne", "ge", "gt", "le", "lt")


def pack(header: ContextHeader, peer_base: list[int]) -> bytes:
    """The bytes of a whole context; sets `version`, `bytes` and `queue_share`.

    The first INLINE_BASES bases always exist; 0 beyond the last PE.
    """
    bases = peer_base + [0] * (INLINE_BASES - len(peer_base))
    header.version = VERSION
    header.queue_share = -(-(1 << 32) // header.n_queues) if header.n_queues else 0
    header.bytes = HEADER_BYTES + 8 * len(bases)
    return bytes(header) + bytes((ctypes.c_uint64 * len(bases))(*bases))
