"""The symmetric memory of AllToAlls: the buffers of each mode, and memory that several objects share (`Arena`)."""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.collective import EXPLICIT_SYNC, BufferSpecs, is_integer, sizes_of
from tilescale_net.kernels.moe import latency, throughput
from tilescale_net.kernels.moe.config import Config, Tuning, configure
from tilescale_net.kernels.moe.layout import NodeSizes, as_argument, nodes_of
from tilescale_net.kernels.moe.mode import Launch, stream_key
from tilescale_net.runtime import heap, settings, worlds
from tilescale_net.runtime.context import SYSTEM_BYTES
from tilescale_net.runtime.groups import MadeByRanks
from tilescale_net.runtime.launch_args import StreamOrder

if TYPE_CHECKING:
    from tilescale_net.kernels.moe.all_to_all import AllToAll
    from tilescale_net.kernels.moe.mode import Mode
    from tilescale_net.runtime.world import World


# Each mode: its class and the function that lists its symmetric memory.
IMPLEMENTATIONS = {
    "throughput": (throughput.ThroughputMode, throughput.symmetric_buffers),
    "latency": (latency.LatencyMode, latency.symmetric_buffers),
}

# Modes whose rows cross the network once per node. Their function takes the number of nodes instead of `proxied`, and
# both take masks of the active ranks, now and later.
OVER_NODES = {
    "throughput": (throughput.NodeThroughputMode, throughput.NodeThroughputMode.node_buffers),
    "latency": (latency.NodeLatencyMode, latency.NodeLatencyMode.node_buffers),
}


def make(base: AllToAll, config: Config, active: tuple[bool, ...] | None = None) -> Mode:
    """The mode of an AllToAll; `active`: the later active ranks."""
    if crosses_once(config, base.tuning, base.nodes):
        return OVER_NODES[config.mode][0](base, config, [base.active_mask, *([active] if active else [])])
    return IMPLEMENTATIONS[config.mode][0](base, config)


class Blueprint:
    """Stand-in for an AllToAll to compile its kernels: no memory, no ranks, no GPU. Same attributes."""

    def __init__(self, config: Config, tuning: Tuning, num_sms: int, nodes: NodeSizes):
        assert tuning.blocks and tuning.threads
        self.tuning, self.blocks, self.threads, self.nodes = tuning, tuning.blocks, tuning.threads, nodes
        self.all_blocks, self.rank, self.proxied, self.world = num_sms, 0, nodes != 1, None
        self.device, self.active_mask = torch.device("meta"), (True,) * config.ranks
        self.active = self._tensor((config.ranks,), torch.int32)
        self.status = types.SimpleNamespace(tensor=self._tensor((4,), torch.int64))

    def _tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def allocate(self, specs: BufferSpecs) -> dict[str, torch.Tensor]:
        return {name: self._tensor(*spec) for name, spec in specs.items()}

    def counters(self, count: int) -> torch.Tensor:
        return self._tensor((count,), torch.uint64)

    def heap_offset(self, tensor: torch.Tensor) -> int:
        return 0


def variants_of(config: Config, tuning: Tuning, num_sms: int, nodes: NodeSizes = 1) -> list[Callable[[], object]]:
    """Calls that each request one kernel of an AllToAll on GPUs: all kernels that its calls may need. `num_sms`: of the
    GPU. nodes: of the ranks, see `nodes_of`."""
    resolved = tuning.resolved(config, torch.device("meta"), num_sms)
    return make(cast("AllToAll", Blueprint(config, resolved, num_sms, nodes)), config).variants(True)


def crosses_once(config: Config, tuning: Tuning, nodes: NodeSizes) -> bool:
    """Whether a row crosses the network once per node: if nodes have several ranks and the mode supports it. ValueError
    for tiles, which this route does not count."""
    count = len(nodes_of(config.ranks, nodes).sizes)
    once = config.mode in OVER_NODES and tuning.once_per_node and 1 < count < config.ranks
    if once and config.tile_rows is not None:
        raise ValueError(
            f"AllToAll: tile_rows is {config.tile_rows}; rows that cross the network once per node are not counted by tiles: "
            "give tuning=Tuning(once_per_node=False)"
        )
    return once


def symmetric_buffers(
    config: Config, tuning: Tuning, nodes: NodeSizes, proxied: bool, masks: Sequence[tuple[bool, ...]] = ()
) -> BufferSpecs:
    """Symmetric memory of a configuration: "kernel.parameter" -> (shape, dtype)."""
    if crosses_once(config, tuning, nodes):
        return OVER_NODES[config.mode][1](config, tuning, nodes, masks)
    return IMPLEMENTATIONS[config.mode][1](config, tuning, proxied)


def world_with_room(world: World, config: Config, tuning: Tuning, active: tuple[bool, ...] | None = None) -> World:
    """`world` if its heap has room for the buffers of a configuration, else a new one of the same ranks. Collective;
    all heaps have the same contents, so all ranks decide alike."""
    world.control.agree("AllToAll", f"grow=True, {config.describe()}, {tuning}, active={active}")
    masks = [tuple(r in world.control.members for r in range(config.ranks)), *([active] if active else [])]
    sizes = sizes_of(symmetric_buffers(config, tuning, as_argument(world.topology.sizes), 0 in world.peer_base, masks))
    if world.heap.size_to_hold(sizes) <= world.heap.limit:
        return world
    usual = settings.heap_bytes(None, world.device.type == "cuda")
    return worlds.make_sibling(world, max(usual, heap.footprint(sizes) + SYSTEM_BYTES))


def heap_bytes(
    *sizes: Any, ranks: int | None = None, nodes: NodeSizes | None = None, tuning: Tuning | None = None, group: tsn.Group = None,
    in_arena: bool = False, **options: Any,
) -> int:  # fmt: skip
    """Bytes of the symmetric heap for an object; may be called before `tilescale_net.init`.

    Args:
        sizes, options: the constructor's arguments: num_experts, max_tokens, hidden, top_k and so on.
        ranks: of the job; default those of `group`.
        nodes: their number, or the ranks of each (a tuple) if these differ; default: the group's, and 1 with `ranks`.
        tuning: as for the constructor.
        group: the ranks; see `tilescale_net.world`.
        in_arena: count only the memory besides an arena.

    Returns:
        Bytes, without `runtime.context.SYSTEM_BYTES` of the heap itself and without memory of `empty_output`.

    Raises:
        ValueError, TypeError: as the constructor.
    """
    specs = _specs(ranks, nodes, group, tuning, *sizes, **options)
    return heap.footprint(sizes_of(divide(specs)[1] if in_arena else specs))


def arena_bytes(
    *sizes: Any, ranks: int | None = None, nodes: NodeSizes | None = None, tuning: Tuning | None = None, group: tsn.Group = None,
    **options: Any,
) -> int:  # fmt: skip
    """Bytes of an `Arena` for an object; arguments as for `heap_bytes`."""
    return heap.footprint(sizes_of(divide(_specs(ranks, nodes, group, tuning, *sizes, **options))[0]))


def _specs(
    ranks: int | None, nodes: NodeSizes | None, group: tsn.Group, tuning: Tuning | None, *sizes: Any, **options: Any
) -> BufferSpecs:
    if ranks is None:
        world = tsn.world(group)
        ranks, nodes = world.size, as_argument(world.topology.sizes) if nodes is None else nodes
    nodes = 1 if nodes is None else nodes
    if isinstance(nodes, tuple):
        if any(type(n) is not int or n < 1 for n in nodes) or sum(nodes) != ranks:
            raise ValueError(f"AllToAll: nodes is {nodes!r}; the ranks of each node must add up to ranks, {ranks!r}")
        nodes = as_argument(nodes)
    for name, value, most in (("ranks", ranks, None), ("nodes", nodes, ranks)):
        if isinstance(value, tuple):
            continue
        if type(value) is not int or value < 1 or (most is not None and value > most):
            limits = "of 1 or more" if most is None else f"from 1 to {most}, the number of ranks"
            raise ValueError(f"AllToAll: {name} is {value!r}; it must be an integer {limits}")
    return symmetric_buffers(configure(ranks, *sizes, **options), tuning or Tuning(), nodes, nodes != 1)


_numbers = itertools.count()


class Member(Protocol):
    """The interface of AllToAll that an arena uses."""

    n_pes: int
    device: torch.device
    active: torch.Tensor

    @property
    def meets_first(self) -> bool: ...
    @property
    def alive(self) -> bool: ...
    @property
    def in_flight(self) -> tuple[str, ...]: ...


def divide(specs: BufferSpecs) -> tuple[BufferSpecs, BufferSpecs]:
    """Buffers that an arena may hold, and the object's own: signals, and counts that arrive before any rank waits."""
    own = {name: spec for name, spec in specs.items() if spec[1] == torch.uint64 or name.startswith("routing.counts")}
    return {name: spec for name, spec in specs.items() if name not in own}, own


@tsn.jit(name="moe::meet", pass_configs=EXPLICIT_SYNC)
def meet(ranks, threads):
    """Kernel that ends when all ranks that take part have launched it, and so have ended the kernels before.

    Parameters of the kernel:
        active [ranks] int32: 0 for a rank that is left out. met [ranks] uint64: symmetric. calls [1] uint64: calls so far.
    """

    @T.prim_func
    def main(
        ctx: N.Context(),
        active: T.Tensor((ranks,), "int32"),
        met: T.Tensor((ranks,), "uint64"),
        calls: T.Tensor((1,), "uint64"),
    ):
        with T.Kernel(1, threads=threads):
            thread = T.get_thread_binding()
            me = N.my_pe()
            call = T.alloc_var("uint64", calls[0] + T.uint64(1))
            if thread < ranks:
                if active[thread] != 0:
                    N.signal(met[me], call, thread)
                    N.wait(met[thread], "ge", call)
            T.sync_threads()
            if thread == 0:
                calls[0] = call

    return main


class Arena(MadeByRanks):
    """Memory for the rows of several objects that never run at the same time, such as FP8 forward and BF16 backward, or
    prefill and decoding: the size of the largest. Each object keeps its own signals.

    All ranks make all calls of its objects in the same order; the calls run one after the other. While a phase of one is
    pending, calls of the others raise ValueError. Results in symmetric memory are valid until the next call of any object.
    When latency mode follows another object, ranks first meet in a kernel of some microseconds; after a capture in a CUDA
    graph, before each of its calls.

    Args:
        nbytes: bytes, the largest `AllToAll.arena_bytes` of its objects. Equal on all ranks.
        group: see `tilescale_net.world`.

    Attributes:
        order: of the calls of all its objects, and their phases, on different streams.

    Raises:
        HeapError: the symmetric heap has no room.
        RankMismatch: ranks pass different sizes.
    """

    def __init__(self, nbytes: int, group: tsn.Group = None):
        if not is_integer(nbytes):
            raise ValueError(f"Arena: nbytes is {nbytes!r}; it must be a positive integer")
        self.world, self.number = tsn.world(group), next(_numbers)
        with heap.attempt():
            self._memory = tsn.empty((nbytes,), torch.uint8, group=self.world)
            self._met = tsn.zeros((self.world.size,), torch.uint64, group=self.world)
        with torch.inference_mode(False):
            self._calls = torch.zeros((1,), dtype=torch.uint64, device=self.world.device)
        self._objects: weakref.WeakSet = weakref.WeakSet()
        self._meetings: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._last: weakref.ref | None = None  # whose call was the last
        self.order = StreamOrder(self.world.device)
        self._in_graphs = self._freed = False

    @property
    def alive(self) -> bool:
        """Whether neither free() nor finalize() was called."""
        return not self._freed and not self.world.closed

    @property
    def _made_in(self) -> World:
        return self.world

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def place(self, specs: BufferSpecs) -> dict[str, torch.Tensor]:
        """Tensors for an object, from the beginning on. Raises HeapError if there is no room."""
        needed = heap.footprint(sizes_of(specs))
        if self._freed or needed > self.nbytes:
            has = "has been freed" if self._freed else f"has {self.nbytes}"
            raise tsn.HeapError(f"AllToAll: needs {needed} bytes of the arena, which {has}; see AllToAll.arena_bytes")
        placed, begin = {}, 0
        for (name, (shape, dtype)), nbytes in zip(specs.items(), sizes_of(specs)):
            placed[name] = self._memory[begin : begin + nbytes].view(dtype).view(shape)
            begin += heap.footprint([nbytes])
        return placed

    def join(self, op: Member) -> None:
        """`op` is made, and runs in this memory."""
        self._objects.add(op)
        if not op.meets_first:
            constants = {"active": op.active, "met": self._met, "calls": self._calls}
            self._meetings[op] = Launch(meet(op.n_pes, max(32, -(-op.n_pes // 32) * 32)), constants, (), self.world)

    def enter(self, op: Member, call: str) -> None:
        """`op` is about to launch a call: its rows come next.

        Raises:
            ValueError: another object has a phase in flight; nothing changes.
        """
        busy = next((other for other in self._objects if other is not op and other.alive and other.in_flight), None)
        if busy is not None:
            half = busy.in_flight[0]
            raise ValueError(
                f"AllToAll.{call}: another object of this arena has sent a {half} that is not received; call its {half}_recv first"
            )
        captured = stream_key(op.device)() is None
        self._in_graphs |= captured
        stays = not self._in_graphs and self._last is not None and self._last() is op
        self._last = weakref.ref(op)
        if op in self._meetings and not stays:
            self._meetings[op]()

    def reset(self) -> None:
        """As after construction; all ranks are here, and their kernels have ended."""
        self._met.view(torch.uint8).zero_()
        self._calls.view(torch.uint8).zero_()
        self._last = None

    def free(self) -> None:
        """Free the memory. Collective.

        Raises:
            TileScaleError: an object still uses it; free the object first.
        """
        if any(op.alive for op in self._objects):
            raise tsn.TileScaleError("Arena.free: an AllToAll still is in this arena; free that first")
        if not self._freed:
            self._freed = True
            tsn.free(self._met, group=self.world)
            tsn.free(self._memory, group=self.world)
