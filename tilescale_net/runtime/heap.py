"""The symmetric heap: the same offsets on every PE, allocated and freed collectively, reusable."""

from __future__ import annotations

import bisect
import contextlib
import math
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tilescale_net.errors import HeapError, PeerLost
from tilescale_net.runtime import settings
from tilescale_net.runtime.context import SYSTEM_BYTES
from tilescale_net.runtime.control import Control

# -- memory --------------------------------------------------------------------------------------------------------------

# Memory of the heap: one class per kind of device, chosen here once.


class Memory(Protocol):
    """Memory of one rank, in which its heap lies, and how to wait for the kernels that use it.

    Attributes:
        device_kind: "cuda" or "simulator", as in settings.
        kind: "cuda" or "host", the fabric's name.
        device: torch device of tensors in it.
        ordinal: number of the GPU; -1 without one.
        size, base: of the heap in bytes, and its address in this process.
        limit: bytes to which the heap can grow where it is.
        poisons: whether to fill new and freed tensors with NaN patterns, which shows reads of unwritten data.
    """

    device_kind: str
    kind: str
    device: torch.device
    ordinal: int
    size: int
    limit: int
    base: int
    poisons: bool

    def handle(self) -> tuple[Any, ...]:
        """A handle by which peers on this host map this heap."""

    def map_peer(self, pe: int, handle: Any) -> int:
        """Map a peer's heap and return its address here. Raises ConfigurationError when the system refuses."""

    def on_mapped(self, control: Control, peer_base: list[int]) -> None:
        """All ranks have mapped their peers, whose heaps are at `peer_base` here (0: not mapped). Collective."""
        return

    def grow(self, size: int) -> None:
        """Grow the heap to `size` bytes. Raises TileScaleError or OSError if that fails."""

    def grown_handle(self) -> tuple[Any, ...]:
        """A handle by which peers on this host map the memory that `grow` has added."""

    def map_grown(self, pe: int, handle: Any) -> None:
        """Map memory that a peer has added, behind its mapped part."""

    def take_back(self, size: int) -> None:
        """Undo `grow` and `map_grown`, to a heap of `size` bytes."""

    def bytes_tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """A uint8 tensor over heap bytes [offset, offset + nbytes)."""

    def upload(self, data: bytes) -> torch.Tensor:
        """A uint8 tensor that kernels can read, holding `data`."""

    def pinned(self, nbytes: int) -> int:
        """Address of zeroed memory that host and kernels both reach; it lives as long as this object."""

    def on_allocate(self, address: int, nbytes: int, name: str) -> None:
        """Called when the heap has allocated these bytes."""
        return

    def before_free(self, address: int, nbytes: int) -> None:
        """Called before the heap frees these bytes, even with transfers in flight."""
        return

    def on_free(self, address: int) -> None:
        """Called when the heap has freed them."""
        return

    def loads_kernels_late(self) -> bool:
        """Whether a kernel's first launch may wait for running kernels; see settings.load_kernels_early."""
        return False

    def synchronize(self) -> None:
        """Wait for kernels that this rank has launched."""

    def finish_kernels(self) -> None:
        """`synchronize`, and post the kernels' transfers to other ranks."""
        self.synchronize()

    def await_end_of_kernels(self) -> None:
        """Wait for kernels whose waits were ended, if they could still access memory that is unmapped next."""
        return

    def part(self) -> None:
        """In a child made by fork: detach its writes from other ranks."""
        return

    def close(self) -> None:
        """Release everything that no tensor refers to."""


# -- heap ----------------------------------------------------------------------------------------------------------------

ALIGNMENT = 256
# Unused bytes behind every allocation, so that accesses past the end are seen and hit no neighbour.
GAP = 256
# Freed tensors to remember before dead ones are dropped.
_FREED = 32
# Heaps are whole pages.
PAGE = 2 << 20
# Smallest step of growth, which briefly stops all kernels.
STEP = 64 << 20
# 0xFF bytes are NaN in every floating-point type and -1 in every signed integer.
POISON = 0xFF


def footprint(sizes: Sequence[int]) -> int:
    """Heap bytes of tensors of these sizes, including gaps."""
    return sum(_rounded(nbytes) for nbytes in sizes)


def _rounded(nbytes: int) -> int:
    return (max(nbytes, 1) + GAP + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


_attempts = threading.local()  # `made`: heap and offset of this thread's allocations in the innermost attempt


@contextlib.contextmanager
def attempt() -> Iterator[None]:
    """If an exception ends the block, free this thread's allocations inside it, of any heap. Each rank does this for
    itself: if ranks disagreed on a call, all of them fail. If a rank is lost, `tilescale_net.shrink` handles live
    blocks."""
    made: list[tuple[Heap, int]] = []
    outer = getattr(_attempts, "made", None)
    _attempts.made = made
    try:
        yield
    except PeerLost:
        raise
    except BaseException:
        for heap, offset in made:
            heap.take_back(offset)
        made = []
        raise
    finally:
        _attempts.made = outer
        if outer is not None:
            outer += made


class Allocator:
    """First-fit allocator of offsets with coalescing. Deterministic: equal calls give equal offsets on every rank.
    `start`, `end`: the range of offsets to hand out."""

    def __init__(self, start: int, end: int):
        self._end = end
        self._holes: list[tuple[int, int]] = [(start, end)]
        self.live: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a new block of at least `nbytes` bytes, or None when no hole is large enough."""
        need = _rounded(nbytes)
        for i, (start, end) in enumerate(self._holes):
            if end - start >= need:
                if end - start == need:
                    del self._holes[i]
                else:
                    self._holes[i] = (start + need, end)
                self.live[start] = need
                return start
        return None

    def release(self, offset: int) -> None:
        """Free a block; merge neighbouring holes. Raises KeyError for an offset that is not live."""
        size = self.live.pop(offset)
        i = bisect.bisect(self._holes, (offset, offset))
        start, end = offset, offset + size
        if i < len(self._holes) and self._holes[i][0] == end:
            end = self._holes.pop(i)[1]
        if i and self._holes[i - 1][1] == start:
            start = self._holes.pop(i - 1)[0]
            i -= 1
        self._holes.insert(i, (start, end))

    def restore(self, start: int, end: int, live: dict[int, int]) -> None:
        """Set the live blocks (offset -> bytes), in a range from `start` to `end`."""
        self.live, self._holes, self._end = dict(live), [], end
        for offset, size in [*sorted(live.items()), (self._end, 0)]:
            if offset > start:
                self._holes.append((start, offset))
            start = offset + size

    def end_with(self, sizes: Sequence[int]) -> int:
        """End of the smallest range, this one or a longer one, that holds blocks of these sizes beside the live ones."""
        trial = Allocator(0, 0)
        trial._holes, trial._end = list(self._holes), self._end
        trial.extend(self._end + footprint(sizes))
        ends = [self._end]
        for nbytes in sizes:
            offset = trial.allocate(nbytes)
            assert offset is not None  # there is room for all of them behind the end
            ends.append(offset + _rounded(nbytes))
        return max(ends)

    def extend(self, end: int) -> None:
        """Extend the range."""
        start = self._end
        if self._holes and self._holes[-1][1] == start:
            start = self._holes.pop()[0]
        self._holes.append((start, end))
        self._end = end

    @property
    def largest_hole(self) -> int:
        return max((end - start for start, end in self._holes), default=0)


class Heap:
    """Tensors in symmetric memory.

    Args:
        memory: of the tensors; it is notified of each allocation and free.
        agree: collective check `(call, arguments) -> None`.
        check: called first by every call; raises when the job has failed or is over.
        settle: applies deferred operations of other ranks to this heap; returns whether there can be any.
        grow: gives all ranks a heap of a given number of bytes, or raises HeapError on all of them; collective.
    """

    def __init__(
        self,
        memory: Memory,
        agree: Callable[[str, str], None],
        rank: int,
        check: Callable[[], None] = lambda: None,
        settle: Callable[[], bool] | None = None,
        grow: Callable[[int], None] | None = None,
    ):
        self._memory = memory
        self._agree = agree
        self._rank = rank
        self._check = check
        self._settle = settle
        self._grow = grow
        self._allocator = Allocator(SYSTEM_BYTES, memory.size)
        self._freed: dict[StorageWeakRef, int] = {}  # offsets of freed tensors, and of some dead ones
        self._most_freed = _FREED
        self._made: dict[int, tuple[str, tuple[int, ...], torch.dtype]] = {}  # by offset: call, shape, dtype
        self.clear_system_area()

    def clear_system_area(self) -> None:
        """Reset the package's own words: barriers, queues, deferred adds. No kernel runs on any rank."""
        with torch.inference_mode(False):
            self._memory.bytes_tensor(0, SYSTEM_BYTES).zero_()

    @property
    def base(self) -> int:
        return self._memory.base

    @property
    def size(self) -> int:
        return self._memory.size

    @property
    def limit(self) -> int:
        """Bytes to which a full heap grows; `size` if it does not grow."""
        return self._memory.limit if self._grow else self.size

    def make_room(self, sizes: Sequence[int]) -> bool:
        """Make room for tensors of these sizes, growing if needed; False if impossible. Collective.
        Raises HeapError: a rank has no memory left; on all ranks."""
        wanted = self.size_to_hold(sizes)
        if wanted <= self.size:
            return True
        if self._grow is None or wanted > self.limit:
            return False
        self._grow(min(self.limit, max(wanted, self.size + STEP)))
        self._allocator.extend(self.size)
        return True

    def size_to_hold(self, sizes: Sequence[int]) -> int:
        """Bytes of the smallest heap, this one or a larger one, that holds tensors of these sizes beside the live ones."""
        end = self._allocator.end_with(sizes)
        return self.size if end <= self.size else -(-end // PAGE) * PAGE

    def advice(self, sizes: Sequence[int]) -> str:
        """The remedy for tensors of these sizes that do not fit."""
        wanted = self.size_to_hold(sizes)
        if wanted > settings.MOST_BYTES:
            return "choose smaller sizes: this is more than any memory holds"
        return f"set TSN_HEAP_SIZE={wanted} (or init(heap_bytes={wanted})) or more"

    def as_bytes(self) -> torch.Tensor:
        """The whole heap, uint8 [size], for kernels that address it by offset."""
        return self._memory.bytes_tensor(0, self.size)

    def allocate(self, shape: Sequence[int] | int, dtype: torch.dtype, zero: bool) -> torch.Tensor:
        """See `tilescale_net.empty`."""
        self._check()
        name = "zeros" if zero else "empty"
        shape = _shape(shape)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(
                f"{name}(): dtype={dtype!r} is not a torch dtype such as torch.float32; a shape of several sizes is one "
                f"argument, as in {name}((4, 5))"
            )
        if str(dtype).startswith(("torch.qint", "torch.quint")):  # views of such dtypes crash torch
            raise TypeError(
                f"{name}(): dtype is {dtype}; a quantized tensor is more than its memory, take that of its int_repr()"
            )
        nbytes = math.prod(shape) * dtype.itemsize
        self._agree(f"tilescale_net.{name}", f"{list(shape)}, {dtype}")
        # torch counts in 64 bits, and in strides of a tensor without elements too.
        if math.prod(max(d, 1) for d in shape) >= 1 << 62:
            raise HeapError(f"a shape of {list(shape)} has more elements than any heap")
        # Tensors made under inference mode are read-only outside of it.
        with torch.inference_mode(False), attempt():
            if not nbytes:
                return torch.empty(shape, dtype=dtype, device=self._memory.device)
            offset = self._allocator.allocate(nbytes) if self.make_room([nbytes]) else None
            if offset is None:
                raise HeapError(
                    f"rank {self._rank}: the symmetric heap is exhausted: {name}({list(shape)}, {dtype}) needs {nbytes} "
                    f"bytes, the largest free piece of the {self.size}-byte heap holds "
                    f"{max(0, self._allocator.largest_hole - GAP)}; free tensors, or {self.advice([nbytes])}"
                    + (f"; it grows to TSN_HEAP_LIMIT={self.limit} at most" if self.limit > self.size else "")
                )
            _attempts.made.append((self, offset))
            raw = self._memory.bytes_tensor(offset, nbytes)
            if zero:
                raw.zero_()
            elif self._memory.poisons:
                raw.fill_(POISON)
            self._made[offset] = (name, shape, dtype)
            self._memory.synchronize()  # peers may write as soon as the collective call returns
            self._memory.on_allocate(self.base + offset, nbytes, f"{name}({list(shape)}, {dtype})")
            # Second agreement: no rank may write into a peer's tensor before the peer has initialised it.
            self._agree(f"tilescale_net.{name}", f"initialised at heap offset {offset}")
            return raw.view(dtype).view(shape)

    def free(self, tensor: torch.Tensor) -> None:
        """See `tilescale_net.free`."""
        self._check()
        if isinstance(tensor, torch.Tensor) and tensor.numel() == 0:
            return self._agree("tilescale_net.free", "a tensor of no elements")  # it has no memory
        offset = self.offset_of(tensor)
        self._memory.synchronize()
        if offset in self._allocator.live:
            self._memory.before_free(self.base + offset, self._allocator.live[offset] - GAP)
        storage = StorageWeakRef(tensor.untyped_storage())
        again = storage in self._freed
        self._agree("tilescale_net.free", f"offset {offset}{', freed already' if again else ''}")
        # Pending operations on this memory must finish before it is reused.
        if self._settle and self._settle():
            self._agree("tilescale_net.free", "settled")
        if offset not in self._allocator.live or again:
            raise HeapError(
                f"rank {self._rank}: free of a tensor at heap offset {offset}, which is no live allocation; it was freed "
                "already, or it is a view that does not begin where its allocation begins"
            )
        self.take_back(offset)
        self._note_freed(storage, offset)

    def take_back(self, offset: int) -> None:
        """Free a block for reuse if it is live; by all ranks."""
        size = self._allocator.live.get(offset)
        if size is None:
            return
        self._allocator.release(offset)
        self._made.pop(offset, None)
        self._memory.on_free(self.base + offset)
        if self._memory.poisons:
            self._memory.bytes_tensor(offset, size).fill_(POISON)  # shows use after free

    def _note_freed(self, storage: StorageWeakRef, offset: int) -> None:
        self._freed[storage] = offset
        if len(self._freed) >= self._most_freed:
            self._freed = {freed: at for freed, at in self._freed.items() if not freed.expired()}
            self._most_freed = max(_FREED, 2 * len(self._freed))  # so that a free looks at two on average

    def is_freed(self, tensor: torch.Tensor) -> bool:
        """Whether it was freed: the tensor of `empty` or `zeros` itself, or a view of it."""
        return bool(self._freed) and StorageWeakRef(tensor.untyped_storage()) in self._freed

    @property
    def live(self) -> dict[int, int]:
        """Allocated blocks: offset -> bytes."""
        return dict(self._allocator.live)

    def restore(self, live: dict[int, int]) -> None:
        """Mark blocks live on other ranks as allocated here, after a collective call that only some ranks finished."""
        restored = live.keys() - self._allocator.live.keys()
        for offset in sorted(restored):
            self._memory.on_allocate(self.base + offset, live[offset] - GAP, "memory that another rank may still use")
        self._allocator.restore(SYSTEM_BYTES, self.size, live)
        # All ranks free the blocks that only some had freed.
        self._freed = {freed: offset for freed, offset in self._freed.items() if offset not in restored}

    def describe(self, offset: int) -> str | None:
        """The element at a heap offset as text, such as "[2, 0] of zeros([4, 2], torch.uint64)"; None outside of
        tensors."""
        for start, (name, shape, dtype) in list(self._made.items()):  # another thread may call
            index = (offset - start) // dtype.itemsize
            if start in self._allocator.live and 0 <= index < math.prod(shape):
                at: list[int] = []
                for extent in reversed(shape):
                    at.insert(0, index % extent)
                    index //= extent
                return f"{at} of {name}({list(shape)}, {dtype})"
        return None

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Heap offset of a tensor in bytes. Raises HeapError for one that is not symmetric."""
        if not isinstance(tensor, torch.Tensor):
            raise HeapError(f"rank {self._rank}: {type(tensor).__name__} is not a tensor of the symmetric heap")
        offset = tensor.data_ptr() - self.base
        if not 0 <= offset < self.size:
            raise HeapError(
                f"rank {self._rank}: a tensor of shape {list(tensor.shape)} on {tensor.device} is not in the symmetric heap; "
                "make it with tilescale_net.empty or zeros"
            )
        return offset


def _shape(shape: Sequence[int] | int) -> tuple[int, ...]:
    try:
        dims = (operator.index(shape),) if isinstance(shape, int) else tuple(operator.index(d) for d in shape)
    except TypeError:
        raise TypeError(f"a shape is a whole number or a sequence of them, not {shape!r}") from None
    if any(d < 0 for d in dims):
        raise TypeError(f"a shape of {list(dims)} has a negative size")
    return dims
