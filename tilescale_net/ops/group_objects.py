"""The host objects of the operators, created on first use, one set per world.

Operators take a group as text, because a graph cannot hold objects; see `name_of`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch

import tilescale_net as tsn
from tilescale_net.kernels.all_gather import AllGather
from tilescale_net.kernels.all_reduce import AllReduce
from tilescale_net.kernels.all_to_all import AllToAll
from tilescale_net.kernels.collective import Collective
from tilescale_net.kernels.fused.gemm import DistributedMatmul
from tilescale_net.kernels.reduce_scatter import ReduceScatter
from tilescale_net.kernels.send_recv import SendRecv
from tilescale_net.runtime import worlds
from tilescale_net.runtime.groups import StoreGroup
from tilescale_net.runtime.launch_args import StreamOrder
from tilescale_net.runtime.world import World

TRACK = "tilescale_net.ops"  # log of the calls of all operators of a world

_Collective = TypeVar("_Collective", bound=Collective)
_of_worlds: dict = {}
MOST_VIEWS = 1024  # most cached shapes
MOST_GEMMS = 32  # cached GEMMs of a group; each shape has its own symmetric memory


def name_of(group: tsn.Group) -> str:
    """The name of a group in an operator's arguments; "" for None. torch.compile traces this."""
    if group is None:
        return ""
    if isinstance(group, str):
        return group
    if isinstance(group, torch.distributed.ProcessGroup):
        return group.group_name
    if isinstance(group, StoreGroup):
        return group.group_name
    if isinstance(group, torch.distributed.device_mesh.DeviceMesh):
        return group.get_group().group_name
    if not isinstance(group, World):
        raise TypeError(
            f"group is of type {type(group).__name__}; give a ProcessGroup, a DeviceMesh, a StoreGroup, a World, the name of a "
            "group, or None"
        )
    inner = group.group
    return "" if inner is None else inner.group_name


def world_of(name: str):
    """The world of `name_of`; errors as `tilescale_net.world`."""
    return tsn.world(name or None)


def of(name: str) -> GroupObjects:
    """The objects of a group, by `name_of`."""
    world = world_of(name)
    if world not in _of_worlds:
        for ended in [w for w in _of_worlds if w.closed]:
            del _of_worlds[ended]
        _of_worlds[world] = GroupObjects(world)
    return _of_worlds[world]


_quick: dict[Any, GroupObjects] = {}  # by group or its name, of the current worlds
_quick_of: object = None


def in_order(group: tsn.Group) -> GroupObjects:
    """As `of`, by a group or its name; orders later work on the current stream after earlier calls, which use the same
    memory."""
    global _quick_of
    if worlds.launch_generation is not _quick_of:
        _quick.clear()
        _quick_of = worlds.launch_generation
    try:
        objects = _quick.get(group)
    except TypeError:  # not hashable, so not a group
        objects = None
    if objects is None:
        objects = _quick[group] = of(name_of(group))
    objects.order.follow()
    return objects


class SideStream:
    """A stream of higher priority beside the caller's; none on a CPU, where launches block."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextlib.contextmanager
    def following(self, *used: torch.Tensor) -> Iterator[None]:
        """Run launches on this stream, after the current stream's work; they use these tensors."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for tensor in used:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """Record an event."""
        return None if self._stream is None else self._stream.record_event()

    def join(self, mark: torch.cuda.Event | None, *results: torch.Tensor) -> None:
        """Let the current stream wait for the event, and use tensors that were allocated on this stream."""
        if self._stream is None or mark is None:
            return
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(mark)
        for tensor in results:
            tensor.record_stream(current)


class GroupObjects:
    """The collectives of a world, and their memory for functional calls.

    Creating one, and requesting more memory than before, is collective.

    Attributes:
        world: the world.
        geometry: threads and blocks of communicating kernels.
        needs_symmetric_source: whether inputs must be in symmetric memory, because some PEs are on other nodes.
        calls: the log of every operator, which shows ranks that make different calls.
        order: order of calls on different streams, which use the same memory.
        without_room: keys of memory that the symmetric heap had no room for.
        known_gemms: data shared by calls of one kind of fused GEMMs, see fused.py.
    """

    def __init__(self, world):
        self.world = world
        self.needs_symmetric_source = 0 in world.peer_base
        # Few threads for the simulator, which runs them in turn; default on GPUs.
        self.geometry = {} if world.device.type == "cuda" else {"threads": 64, "blocks": 4}
        self._on_gpu = world.device.type == "cuda"
        self.calls = world.calls.only_track(TRACK)
        self.order = StreamOrder(world.device)
        self._memory: torch.Tensor | None = None
        self._memory_in_graph = False  # whether a CUDA graph of this rank has its addresses
        self._views: dict[tuple, list[torch.Tensor]] = {}  # views of the current memory
        self._samples: dict[tuple, torch.Tensor] = {}
        self._of_graphs: list[torch.Tensor] = []  # earlier memory whose addresses are in CUDA graphs
        self._cached: dict[Hashable, Collective] = {}
        self._products: dict[Hashable, DistributedMatmul] = {}  # in the order of their last use
        self._captured: set[Hashable] = set()
        self.without_room: set[Hashable] = set()
        self.known_gemms: dict[Hashable, Any] = {}

    def _new(self, kind: type[_Collective], **options: Any) -> _Collective:
        return kind(group=self.world, **options, **self.geometry).tracked_by(self.calls)

    side_stream = functools.cached_property(lambda self: SideStream(self.world.device))
    all_gather = functools.cached_property(lambda self: self._new(AllGather))
    reduce_scatter = functools.cached_property(lambda self: self._new(ReduceScatter))
    all_reduce = functools.cached_property(lambda self: self._new(AllReduce))
    all_reduce_fp8 = functools.cached_property(lambda self: self._new(AllReduce, algorithm="fp8"))
    all_to_all = functools.cached_property(lambda self: self._new(AllToAll))
    send_recv = functools.cached_property(lambda self: SendRecv(group=self.world, **self.geometry))

    def check(self) -> None:
        """Raise errors that the collectives have found so far."""
        for collective in list(vars(self).values()):
            if isinstance(collective, Collective):
                collective.check()

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The object of a key, created by `make()` unless one is alive."""
        op = self._cached.get(key)
        if op is None or not op.alive:
            self._cached = {other: op for other, op in self._cached.items() if op.alive}
            with self._settling():
                op = self._cached[key] = make()
        return op

    def collective(self, kind: type[_Collective], **options: Any) -> _Collective:
        """The object of a class with these options."""
        op: _Collective = self.cached((kind, *options.values()), lambda: self._new(kind, **options))
        return op

    def product(self, key: Hashable, make: Callable[[], DistributedMatmul]) -> Any:
        """As `cached`, for the MOST_GEMMS most recent GEMMs; older ones are freed when another one is created, unless they
        were called while a CUDA graph was captured, on any rank: the graph has their addresses.

        Raises:
            TileScaleError: the object would have to be created while a CUDA graph is captured.
        """
        capturing = self._is_capturing()
        op = self._products.get(key)
        if op is None or not op.alive:
            if capturing:
                raise tsn.TileScaleError(
                    f"rank {self.world.rank}: this GEMM's shape is not among the {MOST_GEMMS} most recent ones (or is new), "
                    "and its buffers cannot be allocated while a CUDA graph is captured; call it once just before"
                )
            with self._settling():
                self._free_oldest()
                op = make()
        else:
            del self._products[key]
        self._products[key] = op
        if capturing:
            self._captured.add(key)
        return op

    def _is_capturing(self) -> bool:
        return self._on_gpu and torch._C._cuda_isCurrentStreamCapturing()

    def _free_oldest(self) -> None:
        """Make room for another GEMM. Collective; ranks make the same calls but may differ in graph captures."""
        self._products = {key: product for key, product in self._products.items() if product.alive}
        if len(self._products) < MOST_GEMMS:
            return
        mine = "".join("01"[key in self._captured] for key in self._products)
        reports = self.world.control.gather("tilescale_net.ops: products in CUDA graphs", mine)
        free = [key for i, key in enumerate(self._products) if all(report[i : i + 1] == "0" for report in reports)]
        for key in free[: len(self._products) - MOST_GEMMS + 1]:
            self._products.pop(key).free()

    @contextlib.contextmanager
    def _settling(self) -> Iterator[None]:
        """Do not compare the calls of ranks again after a RankMismatch, which reports the differing ranks."""
        try:
            yield
        except tsn.RankMismatch:
            self.calls.settle()
            raise

    def symmetric(self, *parts: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        """Symmetric tensors of these shapes and dtypes, equal on all ranks; the next call returns the same memory.

        Memory returned while a CUDA graph was captured, on any rank, is not freed when larger memory replaces it.

        Raises:
            TileScaleError: the memory would have to grow while a CUDA graph is captured.
            HeapError: the heap has no room.
            RankMismatch: ranks request different sizes, of which some are new.
        """
        views = self._views.get(parts)
        if views is not None:
            if not self._memory_in_graph:
                self._memory_in_graph = self._is_capturing()
            return views
        starts, end = [], 0
        for shape, dtype in parts:
            starts.append(end)
            end += -(-math.prod(shape) * dtype.itemsize // 256) * 256
        capturing = self._is_capturing()
        if self._memory is None or self._memory.numel() < end:
            if capturing:
                raise tsn.TileScaleError(
                    f"rank {self.world.rank}: operators of this group have not needed {end} bytes of symmetric memory before, "
                    "which cannot be made while a CUDA graph is captured; call them once just before"
                )
            with self._settling():
                self._grow(end)
        assert self._memory is not None
        self._memory_in_graph |= capturing
        views = []
        with torch.inference_mode(False):
            for start, (shape, dtype) in zip(starts, parts):
                nbytes = math.prod(shape) * dtype.itemsize
                views.append(self._memory[start : start + nbytes].view(dtype).view(shape))
        if len(self._views) >= MOST_VIEWS:
            self._views.clear()
        self._views[parts] = views
        return views

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A new local tensor; `torch.empty_like` takes a third of the time of `new_empty`."""
        sample = self._samples.get((shape, dtype))
        if sample is None:
            with torch.inference_mode(False):
                one = torch.empty(1, dtype=dtype, device=self.world.device)
                if len(self._samples) >= MOST_VIEWS:
                    self._samples.clear()
                sample = self._samples[shape, dtype] = one.expand(shape)  # takes no memory
        return torch.empty_like(sample)

    def source(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Symmetric memory for a collective's input, as `symmetric` returns it: inputs at the same offset on all ranks are
        pulled or summed in place. None if symmetric memory is optional and the heap has no room, on all ranks alike
        (HeapError if it is required); and for tensors on other devices, which the collective rejects.
        """
        if device != self.world.device:
            return None
        if self.without_room and ("source", math.prod(shape) * dtype.itemsize) in self.without_room:
            return None
        try:
            (memory,) = self.symmetric((shape, dtype))
        except tsn.HeapError:
            if self.needs_symmetric_source:
                raise
            self.without_room.add(("source", math.prod(shape) * dtype.itemsize))
            return None
        return memory

    def gathered(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """[ranks, *shape] of each contiguous tensor, from all ranks; in symmetric memory, until the next operator."""
        ranks, me = self.world.size, self.world.rank
        outs = self.symmetric(*(((ranks, *x.shape), x.dtype) for x in tensors))
        for out, x in zip(outs, tensors):
            travels = (
                self.needs_symmetric_source and x.device == out.device
            )  # the collective rejects tensors on other devices
            self.all_gather(out, out[me].copy_(x) if travels else x)
        return outs

    def _grow(self, nbytes: int) -> None:
        """Grow the memory by powers of two, so slowly growing sizes need few agreements."""
        self._views.clear()
        if self._memory is not None:
            memory, self._memory = self._memory, None
            reports = self.world.control.gather("tilescale_net.ops: memory in CUDA graphs", self._memory_in_graph)
            self._memory_in_graph = False
            if any(reports):
                self._of_graphs.append(memory)
            else:
                tsn.free(memory, group=self.world)
        try:
            self._memory = tsn.empty(1 << max(12, (nbytes - 1).bit_length()), torch.uint8, group=self.world)
        except tsn.HeapError:
            self._memory = tsn.empty(nbytes, torch.uint8, group=self.world)
