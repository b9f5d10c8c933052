"""Turns the record that a kernel left behind into an exception that a user can act on."""

import ctypes
from collections.abc import Callable

from tilescale_net import errors
from tilescale_net.runtime.context import COMPARISONS, OPERATIONS, ErrorKind, ErrorRecord

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
    ErrorKind.WAIT_TIMEOUT: errors.WaitTimeout,
    ErrorKind.QUEUE_TIMEOUT: errors.WaitTimeout,
    ErrorKind.FLUSH_TIMEOUT: errors.WaitTimeout,
    ErrorKind.PE_OUT_OF_RANGE: errors.PeOutOfRange,
    ErrorKind.NOT_SYMMETRIC: errors.OutOfBounds,
    ErrorKind.NOT_DIRECT: errors.KernelError,
    ErrorKind.UNSUPPORTED: errors.KernelError,
    ErrorKind.BARRIERS_OVERLAP: errors.KernelError,
}


def read(address: int) -> ErrorRecord:
    """The error record at a host address (a live view, not a copy)."""
    return ErrorRecord.from_address(address)


def _timeout(record: ErrorRecord, offset: int | None, timeout_s: float, name_of) -> tuple[str, str]:
    """What a wait on a signal word waited for, and what to do about it."""
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


def describe(
    record: ErrorRecord,
    rank: int,
    size: int,
    heap_base: int,
    timeout_s: float,
    name_of: Callable[[int], str | None] | None = None,
    argument: str | None = None,
) -> errors.TileScaleError | None:
    """The exception for a record, or None when it is empty; `name_of` names the tensor element at a heap offset.

    Args:
        argument: of the kernel, whose memory holds the record's address, where that is known.
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
        what = "a place in the queue" if kind == ErrorKind.QUEUE_TIMEOUT else "completion"
        text = f"{where} waited {timeout_s:g} s for {what} towards {peer}"
    elif kind == ErrorKind.PE_OUT_OF_RANGE:
        text = f"{where} named PE {record.pe}, but there are {size}"
    elif kind == ErrorKind.NOT_SYMMETRIC:
        text, advice = _outside(record, offset, advice, argument)
        text = f"{where} towards PE {record.pe}: {text}"
    elif kind == ErrorKind.BARRIERS_OVERLAP:
        text = f"{where} met another one that was under way"
    else:
        known = ErrorKind(kind).name.lower().replace("_", " ") if kind < len(ErrorKind) else f"error {kind}"
        text = f"{where} towards PE {record.pe} failed: {known}"
        advice = _TILE if kind == ErrorKind.NOT_DIRECT and name in ("put", "put_signal") else advice
    return _CLASSES.get(kind, errors.TileScaleError)(f"{text}; {advice}")


def _outside(record: ErrorRecord, offset: int | None, advice: str, argument: str | None) -> tuple[str, str]:
    """What lies outside of the heap. Kernels compute sizes as signed numbers and report them as unsigned ones."""
    nbytes = ctypes.c_int64(record.bytes).value
    if nbytes < 0:
        return f"a size of {nbytes} bytes", "a count that is computed at run time was negative"
    inside = offset is not None and 0 <= offset < (1 << 44)
    if argument is not None and not inside:
        return f"argument {argument} is not symmetric", advice
    place = f"heap offset {offset}" if inside else f"address {record.address:#x}"
    return f"{nbytes} bytes at {place} are not in the symmetric heap", advice
