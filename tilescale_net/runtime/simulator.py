"""Host side of the simulator: schedules, shared memory, and the race detector's view of the host.

A seed gives every launch and rank its own schedule, which the next run repeats.
"""

import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import random
import resource
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode

from tilescale_net import _simulator, errors
from tilescale_net.errors import ConfigurationError, PeerUnreachable
from tilescale_net.runtime import settings, this_host
from tilescale_net.runtime.context import SYSTEM_BYTES
from tilescale_net.runtime.control import Control
from tilescale_net.runtime.heap import Memory

# -- simulator -----------------------------------------------------------------------------------------------------------

VISIBILITIES = ("eager", "late", "random")
_seed: int | None = None
_visibility: str | None = None
_races: bool | None = None
_launches = 0


class RecordedLaunch(NamedTuple):
    """A launch that tilescale_net/explore runs later, with the tensors of its arguments."""

    launch: Any  # of _simulator
    tensors: list[Any]
    blocks: int
    resident_blocks: int


# If a list: launches are stored there and not run.
recorded_launches: list[RecordedLaunch] | None = None


class Running:
    """Running kernels, launched by threads of the program: the heap of each, by thread."""

    def __init__(self) -> None:
        self._heaps: dict[int, int] = {}
        self._ended = threading.Condition()

    @contextlib.contextmanager
    def one(self, heap: int) -> Iterator[None]:
        """Inside the block this thread runs a kernel of the world that has this heap."""
        me = threading.get_ident()
        outer = self._heaps.get(me)  # if a signal handler launches a kernel
        with self._ended:
            self._heaps[me] = heap
        try:
            yield
        finally:
            with self._ended:
                if outer is None:
                    del self._heaps[me]
                else:
                    self._heaps[me] = outer
                self._ended.notify_all()

    def beside(self, heap: int) -> bool:
        """Whether another thread runs a kernel of that world."""
        me = threading.get_ident()  # a signal handler may come here within a kernel
        return any(h == heap and thread != me for thread, h in list(self._heaps.items()))

    def wait(self, heap: int) -> None:
        """Wait until no other thread runs a kernel of that world."""
        with self._ended:
            self._ended.wait_for(lambda: not self.beside(heap))


running = Running()


def seed() -> int:
    """The current seed: of `schedule`, else TSN_SIM_SEED, else 0."""
    return settings.SIM_SEED.get() if _seed is None else _seed


def visibility() -> str:
    """The current visibility: of `schedule`, else TSN_SIM_VISIBILITY, else `random`."""
    return _visibility or settings.SIM_VISIBILITY.get()


def races() -> bool:
    """Whether transfers and signals between ranks are followed and races reported, by `schedule` or TSN_SIM_RACES."""
    return settings.SIM_RACES.get() if _races is None else _races


def num_sms() -> int:
    return settings.SIM_SMS.get()


def stall_seconds(timeout: float) -> float:
    """Seconds without progress of a kernel. `timeout`: of its own waits, which must expire first."""
    return max(settings.SIM_STALL.get(), 2 * timeout)


def stack_bytes() -> int:
    """Bytes of stack of each simulated thread."""
    return settings.SIM_STACK.get()


@contextlib.contextmanager
def schedule(seed: int | None = None, visibility: str | None = None, races: bool | None = None) -> Iterator[None]:
    """Launches inside the block run with this seed and visibility, and report races or not, regardless of the
    environment. The count of launches starts at 0 again, so that a block repeats the schedules of an equal block."""
    global _seed, _visibility, _races, _launches
    if visibility is not None and visibility not in VISIBILITIES:
        raise ConfigurationError(f"visibility {visibility!r} is not one of {', '.join(VISIBILITIES)}")
    saved = _seed, _visibility, _races, _launches
    _seed = saved[0] if seed is None else seed
    _visibility = visibility or saved[1]
    _races = saved[2] if races is None else races
    _launches = 0
    try:
        yield
    finally:
        _seed, _visibility, _races, _launches = saved


def start_delay(rank: int, ranks: int) -> float:
    """Seconds by which this rank delays its next launch, from a random order that all ranks agree on. In most launches
    the ranks begin one after the other, so no order of messages is usual."""
    lot = random.Random(f"{seed()} {_launches}")
    order = lot.sample(range(ranks), ranks)
    return lot.choice((0.0, 1e-3, 2e-3, 2e-3)) * min(order.index(rank), 4)


def next_launch_seed(rank: int) -> int:
    """Seed of one launch: mixes the seed in force, the rank, and the number of the launch in this process."""
    global _launches
    _launches += 1
    mixed = 0
    for part in (seed(), rank, _launches):
        mixed = (mixed ^ part) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019 & (1 << 64) - 1
        mixed ^= mixed >> 29
    return mixed


# -- host accesses -------------------------------------------------------------------------------------------------------

# Follows the host's accesses to symmetric tensors between launches, for the race detector. Every operator of torch
# passes here, in threads that call the package or are started meanwhile: modes of torch belong to a thread. An operator
# that accesses symmetric memory is compared with the transfers of all ranks, as a kernel's loads and stores are; the
# threads of a rank count as one. `numpy()`, DLPack and `tolist()`, which are no operators, are replaced by functions
# that report their reads. Later writes through an array show as changed bytes that no recorded store explains. Ranks
# meet on the host in collective calls of the package and of torch.distributed.

_MAX_RUNS = 4096  # pieces of a strided tensor to check; further ones are ignored
_READERS = ("numpy", "tolist", "__dlpack__")  # methods of tensors
_MAX_ALIASED = 1 << 28  # bytes of tensors that arrays refer to
_WITHOUT_DATA = ("new_", "empty", "is_pinned", "_has_compatible")
# Stack frames outside of the user's program: torch, this package, the standard library, and wrappers of torch's
# functions.
_NOT_THE_USERS = (
    *(os.path.dirname(module.__file__ or "") + os.sep for module in (torch, errors, os)),
    os.path.join(os.path.dirname(os.path.dirname(torch.__file__ or "")), "typing_extensions.py"),
    "<",
)
_thread = threading.local()  # `inside`: whether the mode is on the stack of this thread


def tensor_runs(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Address and bytes of each contiguous piece of a tensor."""
    if tensor.numel() == 0:
        return []
    dims = sorted((s, n) for n, s in zip(tensor.shape, tensor.stride()) if n > 1 and s > 0)
    inner = 1
    while dims and dims[0][0] == inner:
        inner *= dims.pop(0)[1]
    size, begin = tensor.element_size(), tensor.data_ptr()
    starts = itertools.product(*(range(0, n * s, s) for s, n in reversed(dims)))
    return [(begin + sum(start) * size, inner * size) for start in itertools.islice(starts, _MAX_RUNS)]


def _host_line() -> str:
    """The current line of the user's program, outside of torch and this package: `file:line`, or nothing in torch's own
    threads."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""


class _Dispatch:
    """`HostAccessMode.__torch_dispatch__`, without an import of Dynamo. torch wraps the method of a mode so that Dynamo
    ignores it, and imports Dynamo for that at the first call, which takes a second of processor time. If nobody else
    has imported Dynamo, nothing needs to ignore it."""

    def __call__(self, mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return mode.dispatch(func, args, kwargs or {})

    def __get__(self, mode: Any, owner: Any = None) -> Any:
        return self if mode is None else functools.partial(self, mode)

    def __getattr__(self, name: str) -> Any:
        if name == "__dynamo_disable" and "torch._dynamo" not in sys.modules:
            return self
        raise AttributeError(name)


class HostAccessMode(TorchDispatchMode):
    """Checks each operator's tensors in `heaps`, and ignores other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.heaps: dict[int, int] = {}  # bytes, by base
        self.met = True  # by torch.distributed, since the last access or launch

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Do not affect torch.compile; torch before 2.11 ignores this, and compiles nothing."""
        return True

    __torch_dispatch__ = _Dispatch()

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        meets = "c10d" in func.namespace
        looks = self.heaps and races() and self._look(func, args, kwargs, meets)
        if meets:
            _aliases.compare()
        self.met = self.met or meets
        done = func(*args, **kwargs)
        if looks or meets:
            _aliases.take(still_changing=meets)
        return done

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], meets: bool) -> bool:
        """Whether the operator writes to a heap."""
        name = func._schema.name.split("::")[-1]
        if name.endswith("_like") or name.startswith(_WITHOUT_DATA):
            return False
        writes = False
        pairs = itertools.zip_longest(func._schema.arguments, args)
        for argument, value in [*pairs, *((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs)]:
            if argument is None:
                continue
            alias = argument.alias_info
            if alias is not None and not alias.is_write:
                continue  # a view of it is made
            store = _is_filled(argument.name, name, args) if meets else alias is not None
            for tensor in _tensors(value):
                writes = self.access(tensor, store, name) is not None and store or writes
        return writes

    def access(self, tensor: torch.Tensor, store: bool, name: str) -> int | None:
        """Report that the host reads or writes a tensor, by torch's function of this name; returns its heap."""
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            return None
        begin = tensor.untyped_storage().data_ptr()
        base = next((b for b, size in self.heaps.items() if 0 <= begin - b < size), None)
        if base is None:
            return None
        self.settle()
        _aliases.compare()
        wrong = _simulator.host_access(base, tensor_runs(tensor), store, f"torch's {name} on the host", _host_line())
        if wrong:
            report_race(base, wrong)
        return base

    def settle(self) -> None:
        """Order other ranks' accesses before the call of torch.distributed before later ones."""
        if self.met:
            host_meets()
        self.met = False


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Tensors of an argument."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _is_filled(argument: str, name: str, args: tuple[Any, ...]) -> bool:
    """Whether a collective operator of torch writes its argument, which its schema does not say."""
    if argument != "tensors":
        return argument.startswith("output")
    if name == "broadcast_":
        return bool(torch.distributed.ProcessGroup.unbox(args[1]).rank() != args[2])
    return name != "send"


@functools.cache
def _warn_of_arrays() -> None:
    settings.log.warning(
        "numpy() or DLPack of a symmetric tensor: the race detector has compared the array's current contents; later "
        "reads through it are not followed"
    )


class _Aliases:
    """Live arrays that share memory with symmetric tensors."""

    def __init__(self) -> None:
        self._alive: dict[tuple[int, int], tuple[int, object]] = {}  # bytes and a reference, by base and number
        self._dead: list[tuple[int, int]] = []  # heaps with possible writes before

    def add(self, base: int, tensor: torch.Tensor, array: object) -> None:
        """`array`: dies with the last use of the tensor's memory; None if unknown."""
        _warn_of_arrays()
        size = tensor.numel() * tensor.element_size()
        if not size or size + sum(size for size, _ in self._alive.values()) > _MAX_ALIASED:
            return
        self.compare()
        key = base, _simulator.add_alias(base, tensor_runs(tensor), tensor.element_size(), _host_line())
        self._alive[key] = size, array if array is None else weakref.ref(array, lambda _: self._dead.append(key))
        self.take()

    def compare(self) -> None:
        """Report the host's writes through arrays so far."""
        if not self._alive:
            return
        _mode.settle()
        for base in {base for base, _ in self._alive}:
            if wrong := _simulator.alias_access(base, "the host, through an array"):
                report_race(base, wrong)
        while self._dead:
            base, number = self._dead.pop()
            if self._alive.pop((base, number), None) is not None:
                _simulator.drop_alias(base, number)
        self.take()

    def take(self, still_changing: bool = False) -> None:
        """Take the current contents as a new base: others may have written the memory."""
        for base in {base for base, _ in self._alive}:
            _simulator.take_aliases(base, still_changing or running.beside(base))

    def forget(self, base: int) -> None:
        """Forget the heap."""
        self._alive = {key: kept for key, kept in self._alive.items() if key[0] != base}


_aliases = _Aliases()


def _reader(name: str) -> Callable[..., Any]:
    inherited = getattr(torch.Tensor, name)

    @functools.wraps(inherited)
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        base = _mode.access(self, False, name) if _mode.heaps and races() else None
        result = inherited(self, *args, **kwargs)
        if base is not None and name != "tolist":
            _aliases.add(base, self, result if name == "numpy" else None)
        return result

    return read


class _Hooks:
    """Replaced functions of torch and threading while a heap is followed."""

    def __init__(self) -> None:
        self.readers: dict[str, Callable[..., Any]] = {}
        self.replaced: dict[str, Callable[..., Any]] = {}  # torch.Tensor's own; it inherits others
        self.profile: Any = None  # threading's original

    def install(self) -> None:
        self.profile = threading.getprofile()
        threading.setprofile(self.begin_thread)
        self.readers = {name: _reader(name) for name in _READERS}
        self.replaced = {name: torch.Tensor.__dict__[name] for name in _READERS if name in torch.Tensor.__dict__}
        for name, reader in self.readers.items():
            setattr(torch.Tensor, name, reader)

    def remove(self) -> None:
        if threading.getprofile() == self.begin_thread:
            threading.setprofile(self.profile)
        for name, reader in self.readers.items():
            if torch.Tensor.__dict__.get(name) is reader:
                if name in self.replaced:
                    setattr(torch.Tensor, name, self.replaced[name])
                else:
                    delattr(torch.Tensor, name)
        self.readers = {}

    def begin_thread(self, frame: Any, event: Any, arg: Any) -> None:
        """Report the first event of a new thread."""
        sys.setprofile(self.profile)
        if self.profile is not None:
            self.profile(frame, event, arg)
        _follow_thread()


def _raise(base: int, error: errors.DataRace) -> None:
    raise error


# Raises the error of a race in the heap at `base`. worlds.py reports it to the other ranks.
on_race: Callable[[int, errors.DataRace], None] = _raise


def report_race(base: int, wrong: str) -> None:
    """Raise DataRace; in a world, every rank learns of it."""
    on_race(base, errors.DataRace(f"{wrong} (simulated, seed {seed()}, visibility {visibility()})"))


def follow_host(base: int, size: int) -> None:
    """Follow the host's accesses to a heap from now on, if the race detector is on."""
    if not _mode.heaps:
        _hooks.install()
    _mode.heaps[base] = size
    _follow_thread()


def _follow_thread() -> None:
    """Follow this thread, too."""
    if _mode.heaps and not getattr(_thread, "inside", False):
        _below_others(_mode.__enter__)
        _thread.inside = True


def _below_others(change: Callable[[], object]) -> None:
    """Enter or leave at the bottom of the stack: the user's modes end in their own order."""
    others = []
    while (top := _get_current_dispatch_mode()) is not None and top is not _mode:
        others.append(_pop_mode(getattr(top, "_mode_key", None)))
    try:
        change()
    finally:
        for mode in reversed(others):
            _push_mode(mode)


def forget_heap(base: int) -> None:
    """Forget the heap. After the last one, other threads keep a mode that checks nothing."""
    _aliases.forget(base)
    if _mode.heaps.pop(base, None) is None or _mode.heaps:
        return
    _hooks.remove()
    if getattr(_thread, "inside", False):
        _below_others(lambda: _mode.__exit__(None, None, None))
        _thread.inside = False


def is_followed(base: int) -> bool:
    """Whether the host's accesses to a heap are followed, and so its meetings are known."""
    return base in _mode.heaps


def host_meets(base: int | None = None) -> None:
    """Report that this rank's host has met the others. `base`: the heap of ranks that met in a call of the package;
    None: in a call of torch.distributed, after which a rank that went on may have recorded more, which then counts as
    before the meeting, too."""
    _follow_thread()
    if base is None:
        _simulator.host_meets()
    else:
        _simulator.host_has_met(base)
        if list(_mode.heaps) == [base]:
            _mode.met = False  # an earlier meeting by torch.distributed is covered by this one, which is exact
        _aliases.take()


def host_comes(base: int) -> None:
    """Report that this rank's host comes to a collective call of the package."""
    _aliases.compare()
    _simulator.host_comes(base)


def before_launch() -> None:
    """Report a requested launch."""
    _follow_thread()
    if _mode.heaps:
        _mode.settle()
        _aliases.compare()


def after_launch() -> None:
    """Report the end of a launch."""
    _aliases.take()


def host_frees(base: int, address: int, size: int) -> None:
    """Report that the host frees heap memory, which may then be reused."""
    if not is_followed(base) or not races():
        return
    _mode.settle()
    _aliases.compare()
    if wrong := _simulator.host_access(base, [(address, size)], True, "tilescale_net.free", _host_line()):
        report_race(base, wrong)


_mode = HostAccessMode()
_hooks = _Hooks()


# -- shared memory -------------------------------------------------------------------------------------------------------

# The simulator's heap: anonymous shared memory that peers map through /proc.
#
# The heap is a memfd, not a file in /dev/shm: it has no name, so nothing is left behind however a rank ends. A mapping
# lives as long as references to it, so a tensor that outlives the heap still has its memory.


class SharedMemory(Memory):
    """Heap memory of one rank on a machine without a GPU. `base`: address of this rank's heap in this process.
    `device`: torch device of tensors in it."""

    device_kind, kind, poisons = "simulator", "host", True
    device = torch.device("cpu")
    ordinal = -1

    def __init__(self, size: int, limit: int | None = None):
        """Of `size` bytes; with addresses for `limit`, unless those of this process are limited."""
        unlimited = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
        self.size, self.limit = size, max(size, limit or 0) if unlimited else size
        # The name tells a peer that it has opened this file, not one of another process.
        self._name = f"tilescale_net-heap-{secrets.token_hex(8)}"
        try:
            self._fd = os.memfd_create(self._name, os.MFD_CLOEXEC)
        except OSError as err:
            raise ConfigurationError(
                f"the system rejects memfd_create ({err.strerror}), which allocates the shared memory of simulated ranks: "
                "allow it in the sandbox (docker run --security-opt seccomp=unconfined)"
            ) from err
        try:
            # mmap maps no more than is free; later there may be less, and an access would end the process.
            os.ftruncate(self._fd, self.limit)
            self._maps: list[Any] = [mmap.mmap(self._fd, self.limit)]
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
        return (this_host.own_process()[0], self._fd, self._name)

    def map_peer(self, pe: int, handle: tuple[int, int, str]) -> int:
        pid, fd, name = handle
        try:
            peer = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as err:
            raise PeerUnreachable(
                f"the heap of PE {pe} (process {pid}) cannot be opened: {err.strerror}; ranks of one node must run in "
                "one container, as one user, with /proc mounted"
            ) from err
        try:
            if name not in os.readlink(f"/proc/self/fd/{peer}"):
                raise PeerUnreachable(
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
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self._maps[0], dtype=torch.uint8, count=nbytes, offset=offset)

    def upload(self, data: bytes) -> torch.Tensor:
        # torch aligns its allocations to 64 bytes, which is more than the context needs.
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()

    def pinned(self, nbytes: int) -> int:
        block = mmap.mmap(-1, nbytes)
        self._pinned.append(block)
        return _address(block)

    def synchronize(self) -> None:
        """Kernels run synchronously in the simulator: nothing to wait for."""

    def part(self) -> None:
        """In a child made by fork: it can read the heap, its writes stay private, and peers are unreachable."""
        for peer in self._maps[1:]:
            peer.hide()
        both = mmap.PROT_READ | mmap.PROT_WRITE
        _libc.mmap(self.base, self.limit, both, _IN_PLACE, self._fd, 0)
        for block in self._pinned:
            _libc.mmap(_address(block), len(block), both, _IN_PLACE | mmap.MAP_ANONYMOUS, -1, 0)

    def close(self) -> None:
        """Release everything. The heap stays mapped, with its contents, while tensors refer to it."""
        self._maps, self._pinned = [], []
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_IN_PLACE = mmap.MAP_PRIVATE | 0x10 | 0x4000  # MAP_FIXED and MAP_NORESERVE of Linux on x86-64 and arm64
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(3 * [ctypes.c_int]), ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _PeerMap:
    """`nbytes` addresses of a file, which may be shorter; unmapped with this object."""

    def __init__(self, fd: int, nbytes: int):
        self.address, self._nbytes = 0, nbytes
        found = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if found in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address = found

    def hide(self) -> None:
        """Let accesses fail."""
        _libc.mmap(self.address, self._nbytes, 0, _IN_PLACE | mmap.MAP_ANONYMOUS, -1, 0)

    def __del__(self) -> None:
        if self.address:
            _libc.munmap(self.address, self._nbytes)


def _address(mapped: mmap.mmap) -> int:
    view = ctypes.c_char.from_buffer(mapped)
    address = ctypes.addressof(view)
    del view  # releases the buffer, so that close() can unmap
    return address


# -- race memory ---------------------------------------------------------------------------------------------------------

# Memory that simulated ranks share so that each finds unordered accesses of the others.

MOST_RANKS, MOST_BYTES = 64, 1 << 36  # limits of the clocks: kMaxRanks, and a heap of kMaxWords


def share_race_memory(heap: SharedMemory, control: Control, heaps: list[int]) -> SharedMemory | None:
    """Give every rank of a job on one host a race memory, and map the others'. Collective.

    Args:
        heap: this rank's.
        heaps: where each rank's heap is mapped; 0 if only the proxy reaches it.

    Returns:
        This rank's race memory, to be closed after the heap is unregistered; None where ranks cannot follow each other:
        some are on other hosts, or there are too many, or the heap is too large. A job with the race detector gets a
        warning.
    """
    if limit := _race_limit(control.hosts, heap.limit):
        if races() and control.rank == 0:
            settings.log.warning("races between ranks are not checked: %s; each rank is checked separately", limit)
        return None
    memory = SharedMemory(_simulator.race_memory_bytes(heap.limit))
    handles = control.gather("tilescale_net.init", memory.handle())
    pages = [memory.base if pe == control.rank else memory.map_peer(pe, handle) for pe, handle in enumerate(handles)]
    _simulator.attach_race_memory(control.rank, heap.base, heap.limit, pages, heaps)
    return memory


def _race_limit(hosts: list[str], heap_bytes: int) -> str:
    """Why ranks cannot be followed; "" if they can."""
    if len(set(hosts)) > 1:
        return f"they are on {len(set(hosts))} hosts, which share no memory (run them on one, with VIRTUAL_NODES)"
    if len(hosts) > MOST_RANKS:
        return f"there are {len(hosts)}, and at most {MOST_RANKS} are followed"
    if heap_bytes >= MOST_BYTES:
        return f"a heap of {heap_bytes >> 30} GiB is too large (TSN_HEAP_SIZE); less than {MOST_BYTES >> 30} GiB are followed"
    return ""


# -- simulator memory ----------------------------------------------------------------------------------------------------

# Heap memory of a rank without a GPU; the simulator checks bounds and races.


class SimulatorMemory(SharedMemory):
    """Shared memory in which kernels of the simulator run; see `heap.Memory`."""

    def __init__(self, size: int, limit: int | None = None):
        super().__init__(size, limit)
        self._race_memory: SharedMemory | None = None
        _simulator.register_heap(self.base, size)
        self.on_allocate(self.base, SYSTEM_BYTES, "system area")

    def on_mapped(self, control: Control, peer_base: list[int]) -> None:
        """Share the race memory with the ranks of this host."""
        self._race_memory = share_race_memory(self, control, peer_base)
        if races() and self._race_memory is not None:
            follow_host(self.base, self.limit)
            control.on_collective_begin = functools.partial(host_comes, self.base)
            control.on_collective_done = functools.partial(host_meets, self.base)

    def grow(self, size: int) -> None:
        super().grow(size)
        _simulator.register_heap(self.base, size, True)

    def take_back(self, size: int) -> None:
        super().take_back(size)
        _simulator.register_heap(self.base, size, True)

    def on_allocate(self, address: int, nbytes: int, name: str) -> None:
        """Count these bytes as part of a tensor from now on."""
        _simulator.register_allocation(address, nbytes, name)

    def before_free(self, address: int, nbytes: int) -> None:
        """Report a transfer that may still be in flight as a race with the free."""
        host_frees(self.base, address, nbytes)

    def on_free(self, address: int) -> None:
        """Count these bytes as outside of every tensor."""
        _simulator.unregister_allocation(address)

    def finish_kernels(self) -> None:
        """Deliver the kernels' transfers to other ranks."""
        self.await_end_of_kernels()
        _simulator.flush_pending()

    def await_end_of_kernels(self) -> None:
        """Wait for other threads' kernels: this thread's have ended."""
        running.wait(self.base)

    def part(self) -> None:
        """As SharedMemory; races between ranks are found without this process."""
        forget_heap(self.base)
        super().part()

    def close(self) -> None:
        """As SharedMemory; the simulator forgets the heap first."""
        forget_heap(self.base)
        _simulator.unregister_heap(self.base)
        if self._race_memory is not None:
            self._race_memory.close()
        super().close()
