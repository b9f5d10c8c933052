"""A heap on a GPU that can grow: reserved addresses, behind which memory is mapped piece by piece, here and in peers.

Peers of the host get each piece as a file descriptor over a Unix socket, and map it at the same distance from the
beginning. Not used, and cudaMalloc in its place, where a heap does not grow.
"""

import os
import socket
import struct
import threading

from tilescale_net.errors import TileScaleError

_SECONDS = 30.0  # that a peer may take to answer
_CREDENTIALS = struct.Struct("3i")  # of a peer's process: pid, uid, gid


class Driver:
    """The calls of CUDA's driver that a range needs, for one GPU; errors are TileScaleError."""

    def __init__(self, ordinal: int):
        from cuda.bindings import driver

        self._driver = driver
        location = driver.CUmemLocation()
        location.type, location.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, ordinal
        self._kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location, self._properties.requestedHandleTypes = location, self._kind
        self._access = driver.CUmemAccessDesc()
        self._access.location = location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def call(self, name: str, *arguments):
        """What a function of the driver returns beside its status."""
        status, *values = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            raise TileScaleError(f"{name} failed: {getattr(status, 'name', status)}")
        return values[0] if values else None

    def synchronize(self) -> None:
        """Wait for what this GPU does: unmapping memory does not."""
        self.call("cuCtxSynchronize")

    def granularity(self) -> int:
        """Bytes of which sizes and places of memory are multiples."""
        least = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.call("cuMemGetAllocationGranularity", self._properties, least))

    def reserve(self, size: int) -> int:
        return int(self.call("cuMemAddressReserve", size, 0, 0, 0))

    def unreserve(self, address: int, size: int) -> None:
        self.call("cuMemAddressFree", address, size)

    def create(self, size: int):
        return self.call("cuMemCreate", size, self._properties, 0)

    def release(self, memory) -> None:
        self.call("cuMemRelease", memory)

    def map(self, address: int, size: int, memory) -> None:
        """Have `memory` at an address, for this GPU."""
        self.call("cuMemMap", address, size, 0, memory, 0)
        try:
            self.call("cuMemSetAccess", address, size, [self._access], 1)
        except TileScaleError:
            self.unmap(address, size)
            raise

    def unmap(self, address: int, size: int) -> None:
        self.call("cuMemUnmap", address, size)

    def export(self, memory) -> int:
        """A file descriptor by which another process maps the memory."""
        return int(self.call("cuMemExportToShareableHandle", memory, self._kind, 0))

    def adopt(self, fd: int):
        return self.call("cuMemImportFromShareableHandle", fd, self._kind)


class Range:
    """Addresses of which the first ones have memory.

    Args:
        driver: a Driver.
        limit: bytes of addresses.

    Attributes:
        address: where it begins.
        size: bytes that have memory.
    """

    def __init__(self, driver: Driver, limit: int):
        self._driver, self._limit = driver, limit
        self._pieces: list[tuple[int, object]] = []  # bytes and memory of each
        self.size = 0
        self.address = driver.reserve(limit)

    def extend(self, size: int, memory: object | None = None) -> object:
        """Map `memory`, or new memory, of `size` bytes behind the mapped part; returns it. It belongs to this object
        then.

        Raises:
            TileScaleError: nothing is mapped, and the memory is given back.
        """
        memory = self._driver.create(size) if memory is None else memory
        try:
            if self.size + size > self._limit:
                raise TileScaleError(f"{self.size} + {size} bytes are more than the {self._limit} that are reserved")
            self._driver.map(self.address + self.size, size, memory)
        except TileScaleError:
            self._driver.release(memory)
            raise
        self._pieces.append((size, memory))
        self.size += size
        return memory

    def cut(self, size: int) -> None:
        """Unmap what lies behind the first `size` bytes, which are whole pieces; waits for kernels, which may use it."""
        if self.size > size:
            self._driver.synchronize()
        while self.size > size:
            nbytes, memory = self._pieces.pop()
            self.size -= nbytes
            self._driver.unmap(self.address + self.size, nbytes)
            self._driver.release(memory)

    def close(self) -> None:
        """Give everything back; nothing may use it any more."""
        if self.address:
            self.cut(0)
            self._driver.unreserve(self.address, self._limit)
            self.address = 0


class Offers:
    """Gives file descriptors to processes of this host and user, by number.

    Attributes:
        name: by which others find this one.
    """

    def __init__(self) -> None:
        self._fds: list[int] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("")  # the kernel chooses an abstract name, which no file stands for
        self._listener.listen(4096)
        self.name: bytes = self._listener.getsockname()
        self._thread = threading.Thread(target=self._serve, name="tilescale_net-memory", daemon=True)
        self._thread.start()

    def add(self, fd: int) -> int:
        """Offer a descriptor, which belongs to this object then; its number."""
        self._fds.append(fd)
        return len(self._fds) - 1

    def drop(self) -> None:
        """Offer the last one no more."""
        os.close(self._fds.pop())

    def _serve(self) -> None:
        while True:
            try:
                asker, _ = self._listener.accept()
            except OSError:  # closed
                return
            with asker:
                try:
                    asker.settimeout(_SECONDS)
                    _, user, _ = _CREDENTIALS.unpack(asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                    if user != os.getuid():  # first: other users shall not keep the ranks waiting
                        continue
                    asked = asker.recv(4, socket.MSG_WAITALL)
                    number = int.from_bytes(asked, "little")
                    if len(asked) == 4 and number < len(self._fds):
                        socket.send_fds(asker, [b"1"], [self._fds[number]])
                # The asking process has ended; or the last descriptor has been dropped meanwhile.
                except (OSError, IndexError):
                    pass

    def close(self) -> None:
        """Offer nothing any more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(_SECONDS)
        self._listener.close()
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)


def take(name: bytes, pid: int, number: int) -> int:
    """The descriptor that a process offers under a number.

    Raises:
        TileScaleError: it does not, or another process has its name.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
            asker.settimeout(_SECONDS)
            asker.connect(name)
            found, user, _ = _CREDENTIALS.unpack(asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if found != pid or user != os.getuid():
                raise TileScaleError(f"process {found} of user {user} answers in the place of process {pid}")
            asker.sendall(number.to_bytes(4, "little"))
            _, fds, _, _ = socket.recv_fds(asker, 1, 1)
    except OSError as err:
        raise TileScaleError(f"process {pid} does not give its memory ({err.strerror or err})") from err
    if not fds:
        raise TileScaleError(f"process {pid} does not give its memory")
    return fds[0]
