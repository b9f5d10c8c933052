"""Memory of a GPU rank: the heap from cudaMalloc, peers mapped by CUDA IPC, pinned host words.

A heap that can grow lies in reserved addresses instead; see `Range`.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import struct
import threading
import weakref
from typing import Any

import torch

from tilescale_net.errors import ConfigurationError, PeerUnreachable, TileScaleError
from tilescale_net.runtime import settings
from tilescale_net.runtime.context import SYSTEM_BYTES
from tilescale_net.runtime.heap import Memory

# -- cuda range ----------------------------------------------------------------------------------------------------------

# A heap on a GPU that can grow: reserved addresses, in which memory is mapped piece by piece, here and in peers.
#
# Peers of the host get each piece as a file descriptor over a Unix socket, and map it at the same offset. A heap that
# does not grow uses cudaMalloc instead.

_SECONDS = 30.0  # limit of a peer's answer
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

    def call(self, name: str, *arguments: object) -> Any:
        """The result of a driver function, without its status."""
        status, *values = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            raise TileScaleError(f"{name} failed: {getattr(status, 'name', status)}")
        return values[0] if values else None

    def granularity(self) -> int:
        """Granularity in bytes of sizes and offsets of memory."""
        least = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.call("cuMemGetAllocationGranularity", self._properties, least))

    def create(self, size: int) -> Any:
        """New memory of the GPU."""
        return self.call("cuMemCreate", size, self._properties, 0)

    def map(self, address: int, size: int, memory: object) -> None:
        """Map `memory` at an address, for this GPU."""
        self.call("cuMemMap", address, size, 0, memory, 0)
        try:
            self.call("cuMemSetAccess", address, size, [self._access], 1)
        except TileScaleError:
            self.call("cuMemUnmap", address, size)
            raise

    def export(self, memory: object) -> int:
        """A file descriptor by which another process maps the memory."""
        return int(self.call("cuMemExportToShareableHandle", memory, self._kind, 0))

    def adopt(self, fd: int) -> Any:
        """The memory that another process has exported."""
        return self.call("cuMemImportFromShareableHandle", fd, self._kind)


class Range:
    """Reserved addresses whose beginning has memory. `driver`: a Driver. `limit`: reserved bytes. `address`: the first
    one. `size`: bytes that have memory."""

    def __init__(self, driver: Driver, limit: int):
        self._driver, self._limit = driver, limit
        self._pieces: list[tuple[int, object]] = []  # bytes and memory of each
        self.size = 0
        self.address = int(driver.call("cuMemAddressReserve", limit, 0, 0, 0))

    def extend(self, size: int, memory: object | None = None) -> object:
        """Map `memory`, or new memory, of `size` bytes behind the mapped part; returns it, owned by this object. Raises
        TileScaleError: nothing is mapped, and the memory is freed."""
        memory = self._driver.create(size) if memory is None else memory
        try:
            if self.size + size > self._limit:
                raise TileScaleError(f"{self.size} + {size} bytes are more than the {self._limit} that are reserved")
            self._driver.map(self.address + self.size, size, memory)
        except TileScaleError:
            self._driver.call("cuMemRelease", memory)
            raise
        self._pieces.append((size, memory))
        self.size += size
        return memory

    def cut(self, size: int) -> None:
        """Unmap the pieces behind the first `size` bytes; waits for kernels, which may use them."""
        if self.size > size:
            self._driver.call("cuCtxSynchronize")
        while self.size > size:
            nbytes, memory = self._pieces.pop()
            self.size -= nbytes
            self._driver.call("cuMemUnmap", self.address + self.size, nbytes)
            self._driver.call("cuMemRelease", memory)

    def close(self) -> None:
        """Free everything; nothing may use it any more."""
        if self.address:
            self.cut(0)
            self._driver.call("cuMemAddressFree", self.address, self._limit)
            self.address = 0


class Offers:
    """Passes file descriptors to processes of this host and user, by number. `name`: of this server."""

    def __init__(self) -> None:
        self._fds: list[int] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("")  # the kernel chooses an abstract name, without a file
        self._listener.listen(4096)
        self.name: bytes = self._listener.getsockname()
        self._thread = threading.Thread(target=self._serve, name="tilescale_net-memory", daemon=True)
        self._thread.start()

    def add(self, fd: int) -> int:
        """Offer a descriptor, owned by this object from now on; returns its number."""
        self._fds.append(fd)
        return len(self._fds) - 1

    def drop(self) -> None:
        """Withdraw the last offer."""
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
                    if user != os.getuid():  # first: other users must not delay the ranks
                        continue
                    asked = asker.recv(4, socket.MSG_WAITALL)
                    number = int.from_bytes(asked, "little")
                    if len(asked) == 4 and number < len(self._fds):
                        socket.send_fds(asker, [b"1"], [self._fds[number]])
                # The asking process has ended; or the last descriptor has been dropped meanwhile.
                except (OSError, IndexError):
                    pass

    def close(self) -> None:
        """Withdraw all offers."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(_SECONDS)
        self._listener.close()
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)


def take_descriptor(name: bytes, pid: int, number: int) -> int:
    """The descriptor that a process offers under a number. Raises TileScaleError: it does not, or another process has
    its name."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
            asker.settimeout(_SECONDS)
            asker.connect(name)
            found, user, _ = _CREDENTIALS.unpack(asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if found != pid or user != os.getuid():
                raise TileScaleError(f"process {found} of user {user} answers instead of process {pid}")
            asker.sendall(number.to_bytes(4, "little"))
            _, fds, _, _ = socket.recv_fds(asker, 1, 1)
    except OSError as err:
        raise TileScaleError(f"process {pid} does not give its memory ({err.strerror or err})") from err
    if not fds:
        raise TileScaleError(f"process {pid} does not give its memory")
    return fds[0]


# -- cuda memory ---------------------------------------------------------------------------------------------------------

_WORD = SYSTEM_BYTES - 8  # heap offset of the random word by which peers identify it; no kernel uses these bytes


def _runtime() -> Any:
    from cuda.bindings import runtime

    return runtime


def check(result: tuple[Any, ...], what: str) -> Any:
    """Unpack a cuda-bindings result; raises TileScaleError with the call and CUDA's message."""
    error, *values = result
    if int(error) != 0:
        rt = _runtime()
        _, text = rt.cudaGetErrorString(error)
        raise TileScaleError(f"{what} failed: {text.decode()} ({error.name})")
    return values[0] if len(values) == 1 else tuple(values)


def bound_gpu(group: object) -> int | None:
    """The GPU that the program has bound to a group, or to all ranks, with `init_process_group(device_id=)`."""
    default = torch.distributed.group.WORLD
    devices = (getattr(g, "bound_device_id", None) for g in (group, default))
    return next((device.index for device in devices if device is not None), None)


def gpu_ordinal(group: object, local_rank: int) -> int:
    """The GPU of this rank, if no world of this process has one yet. `group`: of the world, for whose ranks the program
    may have chosen the GPU; None: the whole job. `local_rank`: number of this rank among those of `group` on this
    host."""
    if (number := bound_gpu(group)) is not None:
        return number
    if torch.cuda.device_count() == 1:
        return 0  # each process may be shown a GPU of its own
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    if current:
        return current  # the program has chosen it; 0 is current without a choice
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    if group is None:
        return local_rank
    if current is not None:
        return current
    number = torch.distributed.get_rank() if torch.distributed.is_initialized() else local_rank
    return number % max(1, torch.cuda.device_count())


class CudaMemory(Memory):
    """Heap memory of one rank on a GPU; see `heap.Memory`. `size`, `limit`: bytes of the heap, now and at most.
    `ordinal`: of the GPU, which becomes the current device. `shared`: whether other ranks may have the same GPU."""

    device_kind = kind = "cuda"
    poisons = False

    def __init__(self, size: int, limit: int, ordinal: int, shared: bool = False):
        count = torch.cuda.device_count()
        if ordinal >= count:
            raise ConfigurationError(
                f"local rank {ordinal} needs its own GPU, but this machine shows {count}; start at most {count} ranks "
                "(GPUS=…), or set TSN_DEVICE=simulator"
            )
        self.size, self.limit = size, limit
        self.ordinal, self._shared = ordinal, shared
        self.device = torch.device("cuda", ordinal)
        before = torch.cuda.current_device() if torch.cuda.is_initialized() else ordinal
        if before != ordinal:
            settings.log.warning(
                "cuda:%d is this rank's GPU, and becomes the current device instead of cuda:%d", ordinal, before
            )
        torch.cuda.set_device(ordinal)
        torch.cuda.init()
        self._rt = _runtime()
        free, total = torch.cuda.mem_get_info(ordinal)
        if size > free:
            raise ConfigurationError(
                f"the symmetric heap of {size} bytes does not fit GPU {ordinal}: {free} of {total} bytes are free"
                f"{_Allocation.held()}; set TSN_HEAP_SIZE (or init(heap_bytes=…)) lower"
            )
        self._peers: list[int] = []
        self._pinned: list[int] = []
        self._word = 0
        self._growing: GrowingHeap | None = None
        if limit > size:
            check(self._rt.cudaFree(0), "cudaFree(0)")  # makes CUDA's context current in this thread
            self._growing = GrowingHeap(Driver(ordinal), size, limit)
            self._heap: _Allocation | GrowingHeap | None = self._growing
            self.base = self._growing.address
        else:
            self._heap = allocation = _Allocation(self._rt, size)
            self.base = allocation.address

    def _bus(self) -> str:
        """The PCI address of the GPU; GPU numbers differ between processes."""
        bus = check(self._rt.cudaDeviceGetPCIBusId(32, self.ordinal), "cudaDeviceGetPCIBusId")
        # The buffer has garbage behind the end of the string.
        return (bus.decode(errors="replace") if isinstance(bus, bytes) else str(bus)).split("\0")[0].strip()

    def handle(self) -> tuple[int, bytes, str, int]:
        bus, word = self._bus(), self._marked()
        if self._growing is not None:
            return (os.getpid(), self._growing.offers.name, bus, word)
        ipc = check(self._rt.cudaIpcGetMemHandle(self.base), "cudaIpcGetMemHandle")
        return (os.getpid(), bytes(ipc.reserved), bus, word)

    def _marked(self) -> int:
        """The random word by which peers identify this heap."""
        if not self._word:
            self._word = 1 + secrets.randbelow((1 << 63) - 1)
            with torch.inference_mode(False):
                self.bytes_tensor(_WORD, 8).view(torch.int64).fill_(self._word)
            self.synchronize()
        return self._word

    def map_peer(self, pe: int, handle: tuple[int, bytes, str, int]) -> int:
        address = self._map_peer(pe, handle)
        found = ctypes.c_uint64()  # not read by torch, which would make a context on the peer's GPU
        to, how = ctypes.addressof(found), self._rt.cudaMemcpyKind.cudaMemcpyDefault
        check(self._rt.cudaMemcpy(to, address + _WORD, 8, how), "cudaMemcpy from the heap of a peer")
        if found.value != handle[3]:
            raise ConfigurationError(
                f"the memory mapped for the heap of PE {pe} (GPU {handle[2]}) is not that heap; the ranks of one node must run "
                "in one container"
            )
        return address

    def _map_peer(self, pe: int, handle: tuple[int, bytes, str, int]) -> int:
        if handle[2] == self._bus() and not self._shared:
            raise ConfigurationError(
                f"PE {pe} has the GPU of this rank, {handle[2]}: each rank needs its own; start at most as many ranks as there "
                "are GPUs (GPUS=…), show each process another one (CUDA_VISIBLE_DEVICES), or set TSN_DEVICE=simulator. Ranks "
                "that shall share one say so with init_process_group(device_id=…)"
            )
        if self._growing is not None:
            return self._growing.map_peer(pe, handle[0], handle[1])
        ipc = self._rt.cudaIpcMemHandle_t()
        ipc.reserved = handle[1]
        try:
            address = int(
                check(
                    self._rt.cudaIpcOpenMemHandle(ipc, self._rt.cudaIpcMemLazyEnablePeerAccess),
                    f"cudaIpcOpenMemHandle for PE {pe}",
                )
            )
        except TileScaleError as err:
            raise PeerUnreachable(
                f"the heap of PE {pe} (GPU {handle[2]}) cannot be mapped: {err}. GPUs of one node must reach each other "
                "over NVLink or PCIe peer access, and their ranks must share one container; otherwise split them with "
                "VIRTUAL_NODES"
            ) from err
        self._peers.append(address)
        return address

    def grow(self, size: int) -> None:
        """Grow the heap to `size` bytes. Raises TileScaleError if that fails."""
        assert self._growing is not None  # a heap at its limit does not call this
        self._growing.grow(size)
        self.size = size

    def grown_handle(self) -> tuple[int]:
        """The size to which it has grown; peers know its address."""
        return (self.size,)

    def map_grown(self, pe: int, handle: tuple[int]) -> None:
        """Map memory that a peer has added. Raises TileScaleError."""
        assert self._growing is not None
        self._growing.map_grown(pe)

    def take_back(self, size: int) -> None:
        """Undo `grow` and `map_grown`."""
        assert self._growing is not None
        self._growing.cut(size)
        self.size = size

    def bytes_tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        return tensor_at(self.base + offset, nbytes, self.device, self._heap)

    def copy_to_peer(self, peer_base: int, there: torch.Tensor, data: torch.Tensor) -> None:
        """Copy contiguous data, on the current stream, to a peer's heap, at the offset of `there` in this heap. Between
        GPUs copy engines do it, without SMs. Copies of a stream complete in order, also in a graph. `peer_base`:
        address of the peer's heap in this process."""
        address, stream = peer_base + there.data_ptr() - self.base, torch.cuda.current_stream(self.device).cuda_stream
        how = self._rt.cudaMemcpyKind.cudaMemcpyDefault
        copied = self._rt.cudaMemcpyAsync(address, data.data_ptr(), data.nbytes, how, stream)
        check(copied, f"cudaMemcpyAsync of {data.nbytes} bytes to a peer")

    def upload(self, data: bytes) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)

    def pinned(self, nbytes: int) -> int:
        rt = self._rt
        flags = rt.cudaHostAllocMapped | rt.cudaHostAllocPortable
        address = int(check(rt.cudaHostAlloc(nbytes, flags), f"cudaHostAlloc of {nbytes} bytes"))
        ctypes.memset(address, 0, nbytes)
        self._pinned.append(address)
        return address

    def loads_kernels_late(self) -> bool:
        """Whether CUDA loads kernels when they are first launched; see settings.load_kernels_early."""
        from cuda.bindings import driver

        mode = check(driver.cuModuleGetLoadingMode(), "cuModuleGetLoadingMode")
        return bool(mode == driver.CUmoduleLoadingMode.CU_MODULE_LAZY_LOADING)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Unmap the peers. The heap is freed when no tensor refers to it any more."""
        rt = self._rt
        for address in self._peers:
            rt.cudaIpcCloseMemHandle(address)
        for address in self._pinned:
            rt.cudaFreeHost(address)
        if self._growing is not None:
            self._growing.leave()
        if isinstance(self._heap, _Allocation):
            self._heap.left_behind = True
        self._peers, self._pinned, self._heap, self._growing, self.base = [], [], None, None, 0


class GrowingHeap:
    """This rank's heap and its peers' heaps, each in its own reserved addresses; the heap lives as long as references
    to it. `driver`: a Driver. `size`, `limit`: bytes of memory and of addresses; multiples of the GPU's granularity."""

    def __init__(self, driver: Driver, size: int, limit: int):
        self._driver, self._limit = driver, limit
        step = driver.granularity()
        if size % step or limit % step:
            raise ConfigurationError(
                f"a heap of {size} bytes that grows to {limit}: this GPU allocates memory in units of {step} bytes; make "
                "TSN_HEAP_SIZE and TSN_HEAP_LIMIT multiples of that, or set TSN_HEAP_LIMIT=0"
            )
        self._own = Range(driver, limit)
        self._peers: dict[int, tuple[Range, int, bytes]] = {}  # by PE, with process and name of its offers
        self._sizes: list[int] = []  # sizes of the pieces, the same on all ranks
        self.offers = Offers()
        try:
            self.grow(size)
        except BaseException:
            self.leave()
            raise

    @property
    def address(self) -> int:
        return self._own.address

    def grow(self, size: int) -> None:
        """Grow to `size` bytes, which peers may then map."""
        more = size - self._own.size
        memory = self._own.extend(more)
        try:
            self.offers.add(self._driver.export(memory))
        except TileScaleError:
            self._own.cut(size - more)
            raise
        self._sizes.append(more)

    def map_peer(self, pe: int, pid: int, name: bytes) -> int:
        """Map a peer's heap; its address here."""
        found = Range(self._driver, self._limit)
        self._peers[pe] = found, pid, name
        try:
            self.map_grown(pe)
        except TileScaleError as err:
            raise PeerUnreachable(
                f"the heap of PE {pe} cannot be mapped: {err}. GPUs of one node must reach each other over NVLink or PCIe "
                "peer access, and their ranks must share one container and user; otherwise set TSN_HEAP_LIMIT=0"
            ) from err
        return found.address

    def map_grown(self, pe: int) -> None:
        """Map the pieces of a peer's heap that are not mapped yet."""
        there, pid, name = self._peers[pe]
        begin = 0
        for number, size in enumerate(self._sizes):
            if begin >= there.size:
                fd = take_descriptor(name, pid, number)
                try:
                    there.extend(size, self._driver.adopt(fd))
                finally:
                    os.close(fd)
            begin += size

    def cut(self, size: int) -> None:
        """Unmap memory behind the first `size` bytes, here and of the peers."""
        for there, _, _ in self._peers.values():
            there.cut(size)
        while self._own.size > size:
            self.offers.drop()
            self._own.cut(self._own.size - self._sizes.pop())

    def leave(self) -> None:
        """Unmap the peers' heaps and withdraw all offers; this rank's heap stays while something refers to it."""
        for there, _, _ in self._peers.values():
            there.close()
        self._peers = {}
        self.offers.close()

    def __del__(self) -> None:
        try:
            self._own.close()
        except Exception:  # the interpreter ends, and CUDA with it
            pass


class _Allocation:
    """Device memory that is freed with the last object that refers to it."""

    _alive: weakref.WeakSet[_Allocation] = weakref.WeakSet()

    def __init__(self, rt: Any, size: int):
        self._rt, self.size = rt, size
        self.address = 0
        self.left_behind = False  # its heap is closed
        self.address = int(check(rt.cudaMalloc(size), f"cudaMalloc of the {size}-byte heap"))
        self._alive.add(self)

    def __del__(self) -> None:
        try:
            if self.address:
                self._rt.cudaFree(self.address)
        except Exception:  # the interpreter ends, and CUDA with it
            pass

    @classmethod
    def held(cls) -> str:
        """Text of the memory that tensors of closed heaps hold; empty if none."""
        size = sum(a.size for a in cls._alive if a.left_behind)
        return f" (tensors from before finalize() still hold {size} bytes; drop them)" if size else ""


def tensor_at(address: int, nbytes: int, device: torch.device, owner: object = None) -> torch.Tensor:
    """uint8 [nbytes] over memory that the GPU can reach; `owner` is kept alive as long as torch refers to it."""
    return torch.as_tensor(_Bytes(address, nbytes, owner), device=device)


class _Bytes:
    """Memory that torch adopts."""

    def __init__(self, address: int, nbytes: int, owner: object):
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }
