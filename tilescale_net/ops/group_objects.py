"""The host objects behind the operators: made on first use, one set per world.

Operators take a group as text, because a graph holds no objects; see `name_of`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any

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

TRACK = "tilescale_net.ops"  # of the calls of all operators of a world

_of_worlds: dict = {}
MOST_VIEWS = 1024  # shapes whose views are kept
KEPT = 32  # GEMMs of a group, of different shapes: each has its own symmetric memory


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
    found = _of_worlds.get(world)
    if found is None:
        for ended in [w for w in _of_worlds if w.closed]:
            del _of_worlds[ended]
        found = _of_worlds[world] = GroupObjects(world)
    return found


_quick: dict[Any, GroupObjects] = {}  # by group or its name, of the current worlds
_quick_of: object = None


def in_order(group: tsn.Group) -> GroupObjects:
    """As `of`, by a group or its name; later work on the current stream comes after the calls so far, which use the
    same memory.
    """
    global _quick_of
    if worlds.launch_generation is not _quick_of:
        _quick.clear()
        _quick_of = worlds.launch_generation
    try:
        found = _quick.get(group)
    except TypeError:  # not hashable, and no group
        found = None
    if found is None:
        found = of(name_of(group))
        _quick[group] = found
    found.order.follow()
    return found


class SideStream:
    """A stream beside the caller's, of higher priority; none on a CPU, where launches block.

    Args:
        device: of the stream.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextlib.contextmanager
    def following(self, *used: torch.Tensor) -> Iterator[None]:
        """Run launches inside on it, behind the current stream's work; they use these tensors."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for tensor in used:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """An event behind its current work."""
        return None if self._stream is None else self._stream.record_event()

    def join(self, mark: torch.cuda.Event | None, *made: torch.Tensor) -> None:
        """Make the current stream wait for the event, and use tensors that were made there."""
        if self._stream is None or mark is None:
            return
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(mark)
        for tensor in made:
            tensor.record_stream(current)


class GroupObjects:
    """The collectives of a world, and the memory that functional calls pass through.

    Making one, and asking for more memory than before, is collective.

    Attributes:
        world: theirs.
        geometry: threads and blocks of kernels that communicate.
        needs_symmetric_source: whether inputs must lie in symmetric memory, because some PEs are on other nodes.
        calls: the log of every operator, by which differing ranks learn of it.
        order: of calls on different streams, which use the same memory.
        without_room: keys of memory that the symmetric heap had no room for.
        known_gemms: data shared by like calls of fused GEMMs, see fused.py.
    """

    def __init__(self, world):
        self.world = world
        self.needs_symmetric_source = 0 in world.peer_base
        # The simulator runs threads in turn, so it gets few; elsewhere the defaults.
        self.geometry = {} if world.device.type == "cuda" else {"threads": 64, "blocks": 4}
        self._on_gpu = world.device.type == "cuda"
        self.calls = world.calls.only_track(TRACK)
        self.order = StreamOrder(world.device)
        self._memory: torch.Tensor | None = None
        self._memory_in_graph = False  # some CUDA graph of this rank has its addresses
        self._views: dict[tuple, list[torch.Tensor]] = {}  # of the current memory
        self._samples: dict[tuple, torch.Tensor] = {}
        self._of_graphs: list[torch.Tensor] = []  # earlier memory that graphs have the addresses of
        self._made: dict[Hashable, Collective] = {}
        self._products: dict[Hashable, DistributedMatmul] = {}  # the one used last is the last
        self._captured: set[Hashable] = set()
        self.without_room: set[Hashable] = set()
        self.known_gemms: dict[Hashable, Any] = {}

    @functools.cached_property
    def side_stream(self) -> SideStream:
        return SideStream(self.world.device)

    @functools.cached_property
    def all_gather(self) -> AllGather:
        return AllGather(group=self.world, **self.geometry).tracked_by(self.calls)

    @functools.cached_property
    def reduce_scatter(self) -> ReduceScatter:
        return ReduceScatter(group=self.world, **self.geometry).tracked_by(self.calls)

    @functools.cached_property
    def all_reduce(self) -> AllReduce:
        return AllReduce(group=self.world, **self.geometry).tracked_by(self.calls)

    @functools.cached_property
    def all_reduce_fp8(self) -> AllReduce:
        return AllReduce(group=self.world, algorithm="fp8", **self.geometry).tracked_by(self.calls)

    @functools.cached_property
    def all_to_all(self) -> AllToAll:
        return AllToAll(group=self.world, **self.geometry).tracked_by(self.calls)

    @functools.cached_property
    def send_recv(self) -> SendRecv:
        return SendRecv(group=self.world, **self.geometry)

    def check(self) -> None:
        """Raise errors that the collectives so far have found."""
        for collective in list(vars(self).values()):
            if isinstance(collective, Collective):
                collective.check()

    def made(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The object of a key that is still alive; made by `make()` if none is."""
        found = self._made.get(key)
        if found is None or not found.alive:
            self._made = {key: kept for key, kept in self._made.items() if kept.alive}
            with self._settling():
                found = self._made[key] = make()
        return found

    def product(self, key: Hashable, make: Callable[[], DistributedMatmul]) -> Any:
        """As `made`, for objects of which only the KEPT most recent ones stay; older ones are freed when another is
        made.

        One that was called while a CUDA graph was captured, on any rank, stays, since the graph has its addresses.

        Raises:
            TileScaleError: the object would have to be made while a CUDA graph is captured.
        """
        capturing = self._is_capturing()
        found = self._products.get(key)
        if found is None or not found.alive:
            if capturing:
                raise tsn.TileScaleError(
                    f"rank {self.world.rank}: this GEMM's shape is not among the {KEPT} most recent ones (or is new), "
                    "and its buffers cannot be allocated while a CUDA graph is captured; call it once just before"
                )
            with self._settling():
                self._free_oldest()
                found = make()
        else:
            del self._products[key]
        self._products[key] = found
        if capturing:
            self._captured.add(key)
        return found

    def _is_capturing(self) -> bool:
        return self._on_gpu and torch._C._cuda_isCurrentStreamCapturing()

    def _free_oldest(self) -> None:
        """Make room for another GEMM; all ranks together, which make the same calls but may differ in graph
        captures."""
        self._products = {key: product for key, product in self._products.items() if product.alive}
        if len(self._products) < KEPT:
            return
        mine = "".join("01"[key in self._captured] for key in self._products)
        reports = self.world.control.gather("tilescale_net.ops: products in CUDA graphs", mine)
        free = [key for i, key in enumerate(self._products) if all(said[i : i + 1] == "0" for said in reports)]
        for key in free[: len(self._products) - KEPT + 1]:
            self._products.pop(key).free()

    @contextlib.contextmanager
    def _settling(self) -> Iterator[None]:
        """A RankMismatch inside already reports the differing ranks: their calls are not compared again."""
        try:
            yield
        except tsn.RankMismatch:
            self.calls.settle()
            raise

    def symmetric(self, *parts: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        """Symmetric tensors of these shapes and dtypes, equal on all ranks; the next call hands out the same memory.

        Memory that was handed out while a CUDA graph was captured, on any rank, stays when a larger one takes its place.

        Raises:
            TileScaleError: the memory would have to grow while a CUDA graph is captured.
            HeapError: the heap has no room.
            RankMismatch: ranks ask for different sizes, of which some are new.
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
        found = []
        with torch.inference_mode(False):
            for start, (shape, dtype) in zip(starts, parts):
                nbytes = math.prod(shape) * dtype.itemsize
                found.append(self._memory[start : start + nbytes].view(dtype).view(shape))
        if len(self._views) >= MOST_VIEWS:
            self._views.clear()
        self._views[parts] = found
        return found

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor of this rank's own; `torch.empty_like` takes a third of the time of `new_empty`."""
        sample = self._samples.get((shape, dtype))
        if sample is None:
            with torch.inference_mode(False):
                one = torch.empty(1, dtype=dtype, device=self.world.device)
                if len(self._samples) >= MOST_VIEWS:
                    self._samples.clear()
                sample = self._samples[shape, dtype] = one.expand(shape)  # takes no memory
        return torch.empty_like(sample)

    def source(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Symmetric memory for a collective's input, handed out as by `symmetric`: if all ranks' inputs are at the same
        offset, their owners pull them or they are summed in place. None if symmetric memory is optional and the heap
        has no room, on all ranks alike (HeapError if it is required); and for tensors on other devices, which the
        collective rejects.
        """
        if device != self.world.device:
            return None
        if self.without_room and ("source", math.prod(shape) * dtype.itemsize) in self.without_room:
            return None
        try:
            (found,) = self.symmetric((shape, dtype))
        except tsn.HeapError:
            if self.needs_symmetric_source:
                raise
            self.without_room.add(("source", math.prod(shape) * dtype.itemsize))
            return None
        return found

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
        """Make the memory larger: by powers of two, so that sizes that grow slowly are agreed on rarely."""
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
