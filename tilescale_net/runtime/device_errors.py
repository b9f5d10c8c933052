"""Turns the record that a kernel left behind into an exception that a user can act on."""

from __future__ import annotations

import ctypes

from tilescale_net import errors
from tilescale_net.runtime.context import ERROR_KINDS, OPERATIONS, ErrorRecord

_ADVICE = {
    1: "check that the peer sends this signal (and that it still runs), or raise TSN_TIMEOUT",
    2: "the proxy does not keep up or has stopped; look for a fabric error, or raise TSN_TIMEOUT",
    3: "the fabric did not complete the operation; look for a fabric error, or raise TSN_TIMEOUT",
    4: "PEs are numbered from 0 to n_pes - 1",
    5: "pass tensors made with tilescale_net.empty or zeros, and stay within them",
    6: "this operation needs mapped memory; guard it with N.is_direct(pe), or use put/get",
    7: "this operation exists on the direct path only; see the memory model's table",
}
_CLASSES = {
    1: errors.WaitTimeout,
    2: errors.WaitTimeout,
    3: errors.WaitTimeout,
    4: errors.PeOutOfRange,
    5: errors.OutOfBounds,
    6: errors.KernelError,
    7: errors.KernelError,
}


def read(address: int) -> ErrorRecord:
    """The error record at a host address (a live view, not a copy)."""
    return ErrorRecord.from_address(address)


def describe(
    record: ErrorRecord, rank: int, size: int, heap_base: int, timeout_s: float
) -> errors.TileScaleError | None:
    """The exception for a record, or None when it is empty."""
    kind = record.kind
    if kind == 0:
        return None
    name = OPERATIONS[record.operation] if record.operation < len(OPERATIONS) else f"operation {record.operation}"
    where = f"rank {rank}: {name} in block {record.block}"
    offset = record.address - heap_base if record.address else None
    if kind == 1:
        signed = ctypes.c_int64(record.observed).value
        text = f"{where} waited {timeout_s:g} s on the signal at heap offset {offset} for {record.expected}; last seen: {signed}"
    elif kind in (2, 3):
        peer = "all PEs" if record.pe < 0 else f"PE {record.pe}"
        what = "a place in the queue" if kind == 2 else "completion"
        text = f"{where} waited {timeout_s:g} s for {what} towards {peer}"
    elif kind == 4:
        text = f"{where} named PE {record.pe}, but there are {size}"
    elif kind == 5:
        inside = offset is not None and 0 <= offset < (1 << 44)
        place = f"heap offset {offset}" if inside else f"address {record.address:#x}"
        text = f"{where} towards PE {record.pe}: {record.bytes} bytes at {place} are not in the symmetric heap"
    else:
        known = ERROR_KINDS[kind] if kind < len(ERROR_KINDS) else f"error {kind}"
        text = f"{where} towards PE {record.pe} failed: {known}"
    return _CLASSES.get(kind, errors.TileScaleError)(f"{text}; {_ADVICE.get(kind, 'see the documentation')}")
