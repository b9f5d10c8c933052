"""The page of host memory through which a rank gives up: the word that ends its waits, and the record of what it met."""

import ctypes
import threading

from tilescale_net.runtime import device_errors
from tilescale_net.runtime.context import ErrorRecord

BYTES = 4096
_RECORD = 64  # offset of the record, which has a cache line of its own


class AbortPage:
    """Made before the page exists: threads may read it at any time, also when it is gone.

    Attributes:
        address: of the page, which kernels reach too; 0 without a page.
    """

    def __init__(self):
        # Reentrant: a handler of signals may read while its thread does.
        self._in_use = threading.RLock()
        self.address = 0

    @property
    def address(self) -> int:
        return self._address

    @address.setter
    def address(self, address: int) -> None:
        with self._in_use:
            self._address = address
            places = (address, address + _RECORD + ErrorRecord.kind.offset) if address else ()
            self._looked_at = tuple(map(ctypes.c_uint32.from_address, places))

    @property
    def record_address(self) -> int:
        return self.address and self.address + _RECORD

    def abort(self) -> None:
        """End every device-side wait of this rank."""
        with self._in_use:
            if self.address:
                ctypes.c_uint32.from_address(self.address).value = 1

    @property
    def aborted(self) -> bool:
        with self._in_use:
            return bool(self.address and ctypes.c_uint32.from_address(self.address).value)

    @property
    def touched(self) -> bool:
        """Whether waits were ended, or a kernel has left a record; cheap."""
        with self._in_use:
            for word in self._looked_at:
                if word.value:
                    return True
            return False

    def record(self) -> ErrorRecord | None:
        """A copy of what a kernel left behind when it gave up; None where none did."""
        with self._in_use:
            if not self.address:
                return None
            record = ErrorRecord.from_buffer_copy(device_errors.read(self.record_address))
            return record if record.kind else None

    def clear(self) -> None:
        """As at first. No kernel may run."""
        with self._in_use:
            ctypes.memset(self.address, 0, BYTES)

    def close(self) -> None:
        """The page is about to be unmapped."""
        with self._in_use:
            self.address = 0
