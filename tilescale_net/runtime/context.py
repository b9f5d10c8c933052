"""The context of kernels, a mirror of device/context.h, and the error record that they leave when they give up."""

import ctypes
import enum
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tilescale_net import errors

# -- context -------------------------------------------------------------------------------------------------------------

VERSION = 1
SYSTEM_BYTES = 64 * 1024
MAX_PES = (1 << 14) - 1
INLINE_BASES = 128


# Types of fields, by the letters of the module struct.
_TYPES: dict[str, Any] = {
    "Q": ctypes.c_uint64, "q": ctypes.c_int64, "I": ctypes.c_uint32, "i": ctypes.c_int32, "H": ctypes.c_uint16,
}  # fmt: skip


def fields(text: str) -> list[tuple[str, Any]]:
    """Fields of a ctypes structure: names behind the letter of their type; `name*4` is an array."""
    found, kind = [], ctypes.c_uint64
    for word in text.split():
        name, _, count = word.partition("*")
        if name in _TYPES:
            kind = _TYPES[name]
        else:
            found.append((name, kind * int(count) if count else kind))
    return found


class ContextHeader(ctypes.Structure):
    """`tsn::Context` up to `peer_base`."""

    _fields_ = fields(
        "I version bytes i my_pe n_pes node_pe n_node_pes I n_queues flags Q heap_base heap_bytes abort_word "
        "error timeout_ns queues queue_share trace reserved*4 aborted reserved_line*15"
    )


HEADER_BYTES = ctypes.sizeof(ContextHeader)  # offset of peer_base
HEADER_WORDS = HEADER_BYTES // 8


class ErrorRecord(ctypes.Structure):
    """`tsn::ErrorRecord`."""

    _fields_ = fields("I kind i pe I operation block Q address expected observed bytes claimed I comparison line")


# tsn::ErrorKind; a text has the name with spaces.
ErrorKind = enum.IntEnum(
    "ErrorKind",
    "NO_ERROR WAIT_TIMEOUT QUEUE_TIMEOUT FLUSH_TIMEOUT PE_OUT_OF_RANGE NOT_SYMMETRIC NOT_DIRECT UNSUPPORTED BARRIERS_OVERLAP",
    start=0,
)
# Names of tsn::Operation, by value.
OPERATIONS = (
    "none", "put", "get", "put_signal", "put_value", "signal", "wait", "test", "atomic", "fence", "quiet", "flush",
    "barrier", "remote", "barrier_grid",
)  # fmt: skip
# Names of tsn::Compare, by value.
COMPARISONS = ("eq", "ne", "ge", "gt", "le", "lt")


def pack(header: ContextHeader, peer_base: list[int]) -> bytes:
    """The bytes of a whole context; sets `version`, `bytes` and `queue_share`. The first INLINE_BASES bases always
    exist; 0 beyond the last PE."""
    bases = peer_base + [0] * (INLINE_BASES - len(peer_base))
    header.version = VERSION
    header.queue_share = -(-(1 << 32) // header.n_queues) if header.n_queues else 0
    header.bytes = HEADER_BYTES + 8 * len(bases)
    return bytes(header) + bytes((ctypes.c_uint64 * len(bases))(*bases))


# -- device errors -------------------------------------------------------------------------------------------------------

# Turns the record that a kernel left behind into an exception that a user can act on.

_SENDER = "check that the peer sends this signal (and that it still runs), or raise TSN_TIMEOUT"
_PASSED = "the word went past that value, and a wait for eq misses one that is soon replaced: wait with ge"
_BARRIER = (
    "check that every PE calls the barrier as often as this one, by one block at a time: where several blocks of a PE call "
    'it, each call counts (scope="grid" is for whole grids); or raise TSN_TIMEOUT'
)
_GRID = (
    "all blocks of the launch must call it, and be able to run at the same time: launch fewer of them, or smaller ones; or "
    "raise TSN_TIMEOUT"
)
_TILE = "a source in shared memory goes to PEs of this node only: T.copy it to a symmetric tensor, and put that"
_ADVICE = {
    ErrorKind.QUEUE_TIMEOUT: "the proxy does not keep up or has stopped; look for a fabric error, or raise TSN_TIMEOUT",
    ErrorKind.FLUSH_TIMEOUT: "the fabric did not complete the operation; look for a fabric error, or raise TSN_TIMEOUT",
    ErrorKind.PE_OUT_OF_RANGE: "PEs are numbered from 0 to n_pes - 1",
    ErrorKind.NOT_SYMMETRIC: "pass tensors made with tilescale_net.empty or zeros, and stay within them",
    ErrorKind.NOT_DIRECT: "this operation needs mapped memory; guard it with N.is_direct(pe), or use put/get",
    ErrorKind.UNSUPPORTED: "this operation exists on the direct path only; see the table in docs/primitives.md",
    ErrorKind.BARRIERS_OVERLAP: "one block of a PE at a time calls a barrier, and all blocks of a launch the grid's "
    '(scope="grid", barrier_grid); launches that run side by side may not wait for one another',
}
_CLASSES = {
    ErrorKind.WAIT_TIMEOUT: errors.WaitTimeout, ErrorKind.QUEUE_TIMEOUT: errors.WaitTimeout,
    ErrorKind.FLUSH_TIMEOUT: errors.WaitTimeout, ErrorKind.PE_OUT_OF_RANGE: errors.PeOutOfRange,
    ErrorKind.NOT_SYMMETRIC: errors.OutOfBounds, ErrorKind.NOT_DIRECT: errors.KernelError,
    ErrorKind.UNSUPPORTED: errors.KernelError, ErrorKind.BARRIERS_OVERLAP: errors.KernelError,
}  # fmt: skip


def error_record_at(address: int) -> ErrorRecord:
    """The error record at a host address (a live view, not a copy)."""
    return ErrorRecord.from_address(address)


def _timeout(
    record: ErrorRecord, offset: int | None, timeout_s: float, name_of: Callable[[int], str | None] | None
) -> tuple[str, str]:
    """Text of a wait on a signal word: its condition, and the remedy."""
    wanted, seen = (ctypes.c_int64(value).value for value in (record.expected, record.observed))
    if OPERATIONS[record.operation] == "barrier":
        return f"waited {timeout_s:g} s for PE {record.pe} at barrier {wanted}; it has come to barrier {seen}", _BARRIER
    if OPERATIONS[record.operation] == "barrier_grid":
        return f"waited {timeout_s:g} s for all blocks of the launch; {seen} of {wanted} have come", _GRID
    compare = COMPARISONS[record.comparison - 1] if 0 < record.comparison <= len(COMPARISONS) else ""
    name = name_of(offset) if name_of is not None and offset is not None else None
    word = f"the signal {name} (heap offset {offset})" if name else f"the signal at heap offset {offset}"
    text = f"waited {timeout_s:g} s for {f'{compare} {wanted}'.strip()} on {word}; last seen {seen}"
    return text, _PASSED if compare == "eq" and seen > wanted else _SENDER


def describe_error(
    record: ErrorRecord,
    rank: int,
    size: int,
    heap_base: int,
    timeout_s: float,
    name_of: Callable[[int], str | None] | None = None,
    argument: str | None = None,
    awaited: Sequence[int] = (),
) -> errors.TileScaleError | None:
    """The exception for a record, or None when it is empty; `name_of` names the tensor element at a heap offset.

    Args:
        argument: of the kernel, outside of the heap, whose memory holds the record's address, if known.
        awaited: PEs that flushes of the proxy wait for.
    """
    kind = record.kind
    if kind == ErrorKind.NO_ERROR:
        return None
    name = OPERATIONS[record.operation] if record.operation < len(OPERATIONS) else f"operation {record.operation}"
    where = f"rank {rank}: {name} in block {record.block}"
    offset = record.address - heap_base if record.address else None
    advice = _ADVICE.get(kind, "see the documentation")
    if kind == ErrorKind.WAIT_TIMEOUT:
        text, advice = _timeout(record, offset, timeout_s, name_of)
        text = f"{where} {text}"
    elif kind in (ErrorKind.QUEUE_TIMEOUT, ErrorKind.FLUSH_TIMEOUT):
        peer = "all PEs" if record.pe < 0 else f"PE {record.pe}"
        what = "a slot in the queue" if kind == ErrorKind.QUEUE_TIMEOUT else "completion"
        text = f"{where} waited {timeout_s:g} s for {what} towards {peer}"
        if kind == ErrorKind.FLUSH_TIMEOUT and awaited:
            text += f", of which PE {' and PE '.join(map(str, awaited))} did not answer"
    elif kind == ErrorKind.PE_OUT_OF_RANGE:
        text = f"{where} named PE {record.pe}, but there are {size}"
    elif kind == ErrorKind.NOT_SYMMETRIC:
        text, advice = _outside(record, offset, advice, argument)
        text = f"{where} towards PE {record.pe}: {text}"
    elif kind == ErrorKind.BARRIERS_OVERLAP:
        text = f"{where} met another one in flight"
    else:
        known = ErrorKind(kind).name.lower().replace("_", " ") if kind < len(ErrorKind) else f"error {kind}"
        text = f"{where} towards PE {record.pe} failed: {known}"
        advice = _TILE if kind == ErrorKind.NOT_DIRECT and name in ("put", "put_signal") else advice
    return _CLASSES.get(kind, errors.TileScaleError)(f"{text}; {advice}")


def _outside(record: ErrorRecord, offset: int | None, advice: str, argument: str | None) -> tuple[str, str]:
    """Text of an address outside of the heap. Kernels compute signed sizes and report them as unsigned ones."""
    nbytes = ctypes.c_int64(record.bytes).value
    if nbytes < 0:
        return f"a size of {nbytes} bytes", "a count that is computed at run time was negative"
    if argument is not None:
        return f"argument {argument} is not symmetric", advice
    inside = offset is not None and 0 <= offset < (1 << 44)
    place = f"heap offset {offset}" if inside else f"address {record.address:#x}"
    return f"{nbytes} bytes at {place} are not in the symmetric heap", advice


# -- abort page ----------------------------------------------------------------------------------------------------------

# The page of host memory through which a rank gives up: the word that ends its waits, and the record of its error.

ABORT_PAGE_BYTES = 4096
_RECORD_OFFSET = 64  # offset of the record, which has a cache line of its own


class AbortPage:
    """Made before the page exists: threads may read it at any time, even after the page is gone. `address`: of the
    page, for kernels too; 0 without a page."""

    def __init__(self) -> None:
        # Reentrant: a handler of signals may read while its thread does.
        self._in_use = threading.RLock()
        # Whether waits were ended, or a kernel has left a record; cheap, because every call asks.
        self.touched: Callable[[], bool] = bool  # False, until there is a page
        self._watch: Callable[[list[int]], None] | None = None
        self.address = 0

    @property
    def address(self) -> int:
        return self._address

    @address.setter
    def address(self, address: int) -> None:
        with self._in_use:
            self._address = address
            if address and self._watch is None:
                from tilescale_net import _native  # a rank without it reports that after the rendezvous

                self.touched, self._watch = _native.launch.words()
            if self._watch is not None:
                self._watch([address, address + _RECORD_OFFSET + ErrorRecord.kind.offset] if address else [])

    @property
    def record_address(self) -> int:
        return self.address and self.address + _RECORD_OFFSET

    def abort(self) -> None:
        """End every device-side wait of this rank."""
        with self._in_use:
            if self.address:
                ctypes.c_uint32.from_address(self.address).value = 1

    @property
    def aborted(self) -> bool:
        with self._in_use:
            return bool(self.address and ctypes.c_uint32.from_address(self.address).value)

    def record(self) -> ErrorRecord | None:
        """A copy of the record of a kernel that gave up; None without one."""
        with self._in_use:
            if not self.address:
                return None
            record = ErrorRecord.from_buffer_copy(error_record_at(self.record_address))
            return record if record.kind else None

    def clear(self) -> None:
        """As at first. No kernel may run."""
        with self._in_use:
            ctypes.memset(self.address, 0, ABORT_PAGE_BYTES)

    def close(self) -> None:
        """The page is about to be unmapped."""
        with self._in_use:
            self.address = 0


# -- records -------------------------------------------------------------------------------------------------------------

# Records of host memory that kernels reach too: many to a page, used again when they are given back.

RECORD_BYTES = 64  # of a record: a cache line of its own
_RECORD_PAGE = 4096


class Records:
    """The records of a world, which come from pages that it keeps as long as it lives. `pinned`: gives zeroed memory of
    a given number of bytes that kernels reach too."""

    def __init__(self, pinned: Callable[[int], int]):
        self._pinned = pinned
        self._unused: list[int] = []

    def take(self) -> int:
        """Address of a zeroed record of BYTES bytes."""
        if not self._unused:
            page = self._pinned(_RECORD_PAGE)
            self._unused = [page + at for at in range(0, _RECORD_PAGE, RECORD_BYTES)][::-1]
        return self._unused.pop()

    def give_back(self, address: int) -> None:
        """Use a record again, which no kernel writes any more."""
        ctypes.memset(address, 0, RECORD_BYTES)
        self._unused.append(address)
