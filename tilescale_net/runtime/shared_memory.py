"""Memory of the simulator: the heap as anonymous shared memory that peers map through /proc.

The heap is a memfd, not a file in /dev/shm: it has no name, so nothing can be left behind however a rank ends. A mapping
goes when nothing refers to it any more, so that a tensor that outlives the heap still has its memory.
"""

import ctypes
import mmap
import os
import resource
import secrets

import torch

from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import processes


class SharedMemory:
    """Heap memory of one rank on a machine without a GPU.

    Attributes:
        base: address of this rank's heap in this process.
        device: torch device of tensors in it.
    """

    kind = "host"
    device = torch.device("cpu")
    ordinal = -1

    def __init__(self, size: int, limit: int | None = None):
        """Of `size` bytes; with addresses for `limit`, unless those of this process are limited."""
        unlimited = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
        self.size, self.limit = size, max(size, limit or 0) if unlimited else size
        # By its name a peer knows that it has opened this file, and not one of another process.
        self._name = f"tilescale_net-heap-{secrets.token_hex(8)}"
        try:
            self._fd = os.memfd_create(self._name, os.MFD_CLOEXEC)
        except OSError as err:
            raise ConfigurationError(
                f"the system refuses memfd_create ({err.strerror}), which makes the memory that ranks of the simulator share: "
                "let the sandbox allow it (docker run --security-opt seccomp=unconfined)"
            ) from err
        try:
            # mmap maps no more than there is; afterwards there may be less: touching that ends the process.
            os.ftruncate(self._fd, self.limit)
            self._maps: list = [mmap.mmap(self._fd, self.limit)]
            os.ftruncate(self._fd, size)
        except (OSError, OverflowError) as err:
            os.close(self._fd)
            raise ConfigurationError(
                f"the machine cannot give {size} bytes of shared memory for the symmetric heap "
                f"({getattr(err, 'strerror', err)}); set TSN_HEAP_SIZE (or init(heap_bytes=…)) lower"
            ) from err
        self.base = _address(self._maps[0])
        self._pinned: list[mmap.mmap] = []

    def handle(self) -> tuple[int, int, str]:
        """What a peer on this host needs to map this heap."""
        return (processes.own()[0], self._fd, self._name)

    def map_peer(self, pe: int, handle: tuple[int, int, str]) -> int:
        """Map a peer's heap and return its address here. Raises ConfigurationError when the system refuses."""
        pid, fd, name = handle
        try:
            peer = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as err:
            raise ConfigurationError(
                f"the heap of PE {pe} (process {pid}) cannot be opened: {err.strerror}; ranks of one node must run in "
                "one container, as one user, with /proc mounted"
            ) from err
        try:
            if name not in os.readlink(f"/proc/self/fd/{peer}"):
                raise ConfigurationError(
                    f"the heap of PE {pe} was not found: descriptor {fd} of process {pid} is another file here; ranks of one "
                    "node must run in one container, with its own /proc mounted"
                )
            mapped = _PeerMap(peer, self.limit)
        except OSError as err:
            raise ConfigurationError(
                f"the heap of PE {pe} cannot be mapped ({err.strerror}): {self.limit} bytes of addresses for each of the "
                "node's PEs; set TSN_HEAP_SIZE lower, or TSN_HEAP_LIMIT=0"
            ) from err
        finally:
            os.close(peer)
        self._maps.append(mapped)
        return mapped.address

    def grow(self, size: int) -> None:
        """Grow the heap to so many bytes. Raises OSError if that fails."""
        os.ftruncate(self._fd, size)
        self.size = size

    def grown_handle(self) -> tuple[int]:
        """Nothing: peers have mapped the file up to the limit."""
        return (self.size,)

    def map_grown(self, pe: int, handle: tuple[int]) -> None:
        """It is mapped already."""

    def take_back(self, size: int) -> None:
        """Undo `grow`."""
        os.ftruncate(self._fd, size)
        self.size = size

    def bytes_tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """A uint8 tensor over heap bytes [offset, offset + nbytes)."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self._maps[0], dtype=torch.uint8, count=nbytes, offset=offset)

    def upload(self, data: bytes) -> torch.Tensor:
        """A uint8 tensor that kernels can read, holding `data`."""
        # torch aligns its allocations to 64 bytes, which is more than the context needs.
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()

    def pinned(self, nbytes: int) -> int:
        """Address of zeroed memory that host and kernels both reach; it lives as long as this object."""
        block = mmap.mmap(-1, nbytes)
        self._pinned.append(block)
        return _address(block)

    def synchronize(self) -> None:
        """Kernels run synchronously in the simulator: nothing to wait for."""

    def part(self) -> None:
        """In a child made by fork: it reads the heap as it is, and what it writes stays its own; peers are out of reach."""
        for peer in self._maps[1:]:
            peer.hide()
        both = mmap.PROT_READ | mmap.PROT_WRITE
        _libc.mmap(self.base, self.limit, both, _IN_PLACE, self._fd, 0)
        for block in self._pinned:
            _libc.mmap(_address(block), len(block), both, _IN_PLACE | mmap.MAP_ANONYMOUS, -1, 0)

    def close(self) -> None:
        """Let go of everything. The heap stays mapped while tensors refer to it: their bytes stay what they were."""
        self._maps, self._pinned = [], []
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_IN_PLACE = mmap.MAP_PRIVATE | 0x10 | 0x4000  # MAP_FIXED and MAP_NORESERVE of Linux on x86-64 and arm64
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + 3 * [ctypes.c_int] + [ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _PeerMap:
    """So many bytes of addresses of a file that may be shorter; unmapped with this object."""

    def __init__(self, fd: int, nbytes: int):
        self.address, self._nbytes = 0, nbytes
        found = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if found in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address = found

    def hide(self) -> None:
        """Let accesses fail."""
        _libc.mmap(self.address, self._nbytes, 0, _IN_PLACE | mmap.MAP_ANONYMOUS, -1, 0)

    def __del__(self):
        if self.address:
            _libc.munmap(self.address, self._nbytes)


def _address(mapped: mmap.mmap) -> int:
    view = ctypes.c_char.from_buffer(mapped)
    address = ctypes.addressof(view)
    del view  # releases the buffer, so that close() can unmap
    return address
