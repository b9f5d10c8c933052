"""The AllToAll objects that a Buffer's calls need, created on first use, and their memory.

All ranks of a group make the same calls, so they make the same objects in the same order. DeepEP takes any number of
tokens; an AllToAll is made for the largest. The first dispatch agrees on it, and a dispatch of more tokens is rejected on
all ranks, which then agree on a larger object and repeat the call. Objects that the heap has no room for get another heap,
in another world of the same ranks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import tilescale_net as tsn
from tilescale_net.deep_ep.groups import Masks, join, leave
from tilescale_net.errors import HeapError, RankMismatch, TileScaleError
from tilescale_net.kernels.moe import AllToAll, Tuning
from tilescale_net.runtime import settings, worlds
from tilescale_net.runtime.context import SYSTEM_BYTES
from tilescale_net.runtime.groups import MadeByRanks
from tilescale_net.runtime.launch_args import StreamOrder
from tilescale_net.runtime.world import World

IN_FLIGHT = 2  # low-latency calls of a kind that may be in flight


def low_latency_options(dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of the AllToAll of low-latency calls with rows of this dtype, besides its sizes."""
    scales = dict(column_scales=True) if dtype == torch.float8_e4m3fn else {}
    return dict(dtype=dtype, mode="latency", combine_dtype=torch.bfloat16, **scales)


def high_throughput_options(scale_words: int | None) -> dict[str, Any]:
    """Arguments of the AllToAll of high-throughput calls, besides its sizes, dtype and mode."""
    return dict(layout="rank", combine_dtype=torch.bfloat16, scale_words=scale_words)


def room_for(tokens: int) -> int:
    """Tokens per rank of a high-throughput object for calls with this many: a power of two."""
    return 1 << max(6, (tokens - 1).bit_length())


def check_dimensions(name: str, x: Any, *allowed: int) -> None:
    """Raise TypeError or ValueError unless it is a tensor with one of these numbers of dimensions."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
    if x.dim() not in allowed:
        text = f"{name} has shape {list(x.shape)}; it must have {' or '.join(map(str, allowed))} dimensions"
        raise ValueError(f"{text}, of which the first is the tokens" if max(allowed) > 1 else text)


class Objects:
    """The AllToAll objects of a Buffer.

    Args:
        world: of the Buffer.
        shrinks: whether low-latency calls continue when ranks are lost.

    Attributes:
        masks: the masked ranks.
        calls: the log of every call, by which differing ranks learn of it.
        order: of calls on different streams, including those of the objects; a call's own launches come after its
            `follow`.
        max_tokens, top_k: of the high-throughput object that new routings use; 0 before the first.
    """

    def __init__(self, world: World, shrinks: bool = False):
        self.calls = world.calls.track("deep_ep")
        self.world, self.masks, self.order = world, Masks(world, shrinks), StreamOrder(world.device)
        self.max_tokens = self.top_k = 0
        self._made: dict[tuple, AllToAll] = {}
        self._usual: dict[tuple, AllToAll] = {}  # by sizes, objects for low-latency calls with none in flight
        self._generation = world.control.generation
        self._worlds = [world]  # each with a heap; this object created all but the first
        self._stream: torch.cuda.Stream | None = None
        self._freed = False

    @contextlib.contextmanager
    def rejecting(self, call: str) -> Iterator[None]:
        """Check arguments inside: a TypeError or ValueError gets the names of the call and the rank; other ranks that
        wait for the call learn of it from the log, and ranks that also reject theirs have the same entry there."""
        try:
            yield
        except (TypeError, ValueError) as error:
            self.calls.note("{}: rejected, as its own error says", call)
            raise type(error)(f"deep_ep.{call} on rank {self.world.rank}: {error}") from None

    def check_world(self, world: World) -> None:
        """Raise ValueError for a handle of a buffer of another world."""
        if world is not self.world:
            raise ValueError("handle is of a buffer of another group; dispatch with this one")

    def check_alive(self, op: AllToAll) -> None:
        """Raise TileScaleError for objects of a destroyed buffer in a live world."""
        if not (op.alive or self.world.closed):
            raise TileScaleError("deep_ep: handle is of a buffer that was destroyed; dispatch again")

    def comm_stream(self) -> torch.cuda.Stream:
        """A stream for the caller, the same at every call."""
        if self.world.device.type != "cuda":
            raise TileScaleError("deep_ep: get_comm_stream: there are no streams in the simulator")
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.world.device)
        return self._stream

    def high_throughput(
        self, num_experts: int, max_tokens: int, hidden: int, top_k: int, dtype: torch.dtype, num_sms: int, scale_words: int | None = None
    ) -> AllToAll:  # fmt: skip
        """For dispatches of each token once per rank, and their combines in BF16."""
        options = high_throughput_options(scale_words)
        return self._throughput((num_experts, max_tokens, hidden, top_k, dtype, "throughput"), num_sms, options)

    def elastic(
        self, sizes: tuple, num_sms: int, scale_words: int | None, alignment: int, expands: bool, combine_dtype: torch.dtype
    ) -> AllToAll:  # fmt: skip
        """For dispatches of each token once per rank, or (`expands`) once per expert, in new tensors.

        Args:
            sizes: num_experts, max_tokens, hidden, top_k and dtype.
            combine_dtype: of returned rows, and of sums that travel.
        """
        layout = dict(layout="expert", zero_copy=False) if expands else dict(layout="rank")
        options = dict(combine_dtype=combine_dtype, scale_words=scale_words, alignment=alignment, **layout)
        return self._throughput((*sizes, "throughput"), num_sms, options)

    def _throughput(self, sizes: tuple, num_sms: int, options: dict) -> AllToAll:
        """The object for calls on this many blocks; see `blocks`."""
        if self.world.device.type != "cuda":
            return self._object(sizes, dict(options, tuning=None))
        kind = (*sizes, *options.items())
        tunings = [value for *known, (name, value), _ in self._made if name == "tuning" and tuple(known) == kind]
        fitting = [tuning for tuning in tunings if tuning.blocks >= num_sms]
        return self._object(sizes, dict(options, tuning=fitting[0] if fitting else Tuning(blocks=num_sms)))

    @staticmethod
    def blocks(op: AllToAll, num_sms: int) -> int:
        """Number of blocks of a call of `op` on this many SMs."""
        return min(max(num_sms, 2), op.blocks)

    def low_latency(self, kind: str, sizes: tuple) -> AllToAll:
        """For low-latency dispatches of one dtype and their combines in BF16.

        Args:
            kind: "dispatch" or "combine": returns an object with none of them in flight if one of the IN_FLIGHT objects
                has none. Handles of one serve the others.
            sizes: num_experts, max_tokens, hidden, top_k and dtype.
        """
        op = self._usual.get(sizes)
        if op is not None and op.takes(kind) and self._generation == self.world.control.generation:
            return op
        options = low_latency_options(sizes[-1])
        del options["dtype"], options["mode"]
        for number in range(IN_FLIGHT):
            op = self._object((*sizes, "latency"), options, number)
            if not number:
                self._usual[sizes] = op
            if kind not in op.in_flight:
                return op
        return self._object((*sizes, "latency"), options)  # which raises for the call in flight

    def _object(self, sizes: tuple, options: dict, number: int = 0) -> AllToAll:
        key = (*sizes, *options.items(), number)
        if self._generation != self.world.control.generation:
            self._keep_common()
        if key not in self._made:
            self._made[key] = self._make(sizes, options)
        elif self._made[key].outdated:
            self._made[key].set_active()
        return self._made[key]

    def _keep_common(self) -> None:
        """After a loss, perhaps in the middle of a construction: keep the objects that all others have."""
        self._usual.clear()
        names = {str(key): key for key in self._made}
        reports = self.world.control.gather("deep_ep.Buffer: objects", json.dumps(list(names)))
        common = set(names).intersection(*map(json.loads, reports))
        self._made = {names[name]: self._made[names[name]] for name in names if name in common}
        self._generation = self.world.control.generation

    def _make(self, sizes: tuple, options: dict) -> AllToAll:
        """Construct it in the first heap that has room, or in a new one; the same on all ranks.

        This compiles the kernels of ordinary calls, a fifth of all; another kind of call compiles its kernels at its
        first use, on all ranks.
        """
        if self._freed:  # its world lives on if others use it; a new object would leak
            raise TileScaleError(
                "deep_ep: this buffer was destroyed; make another one, or destroy it after its last call"
            )
        for world in self._worlds:
            try:
                return AllToAll(*sizes, **options, warm_up=False, group=world).ordered_by(self.order)
            except RankMismatch:  # for calls that are not compared again
                self.calls.settle()
                raise
            except HeapError:
                if self.masks.shrinks:  # all objects lose the same ranks
                    raise
        nodes = self.world.topology.sizes
        nbytes = AllToAll.heap_bytes(*sizes, **options, ranks=self.world.size, nodes=nodes)
        default = settings.heap_bytes(None, self.world.device.type == "cuda")
        self._worlds.append(worlds.make_sibling(self.world, max(default, nbytes + SYSTEM_BYTES)))
        return AllToAll(*sizes, **options, warm_up=False, group=self._worlds[-1]).ordered_by(self.order)

    def grow(self, tokens: int) -> bool:
        """Agree with all ranks on room for the most tokens of any rank; False if there was room."""
        most = max(self.world.control.gather("deep_ep.Buffer.dispatch: tokens", tokens))
        if most <= self.max_tokens:
            return False
        self.max_tokens = room_for(most)
        return True

    def free(self) -> None:
        """Free all objects; collective. Raises ValueError, and changes nothing, if calls are in flight."""
        self.world.control.refuse()
        if any(op.alive and op.in_flight and not op.outdated for op in self._made.values()):
            self.world.check()  # a failure is why they wait
            raise ValueError(
                "deep_ep: destroy: low-latency calls of this buffer wait for their hooks; call these first"
            )
        self._freed = True
        self._usual.clear()
        ops, self._made = self._made, {}
        for op in ops.values():
            if op.alive:
                op.free()
        worlds_made, self._worlds = self._worlds[1:], self._worlds[:1]
        for world in worlds_made[::-1]:
            if not world.closed:
                tsn.finalize(world)
        self.world.calls.drop(self.calls)


class GroupBuffer(MadeByRanks):
    """Base of both interfaces' buffers: the world of a group and its objects.

    Args:
        group, nbytes: see `groups.join`. shrinks: see `Objects`.
    """

    runtime = None

    def __init__(self, group: tsn.Group, nbytes: int, shrinks: bool = False):
        self._world = join(group, nbytes)
        self._objects = Objects(self._world, shrinks)
        self._alive = True

    @property
    def alive(self) -> bool:
        """Whether neither destroy() nor finalize() was called."""
        return self._alive and not self._world.closed

    @property
    def _made_in(self) -> World:
        return self._world

    def destroy(self) -> None:
        """Release memory, and the world if a buffer has created it and this is the last buffer. Collective.

        Raises:
            ValueError: low-latency calls wait for their hooks; nothing has changed.
        """
        if self._alive:
            self._objects.free()
            self._alive = False
            leave(self._world)

    def get_comm_stream(self) -> torch.cuda.Stream:
        """A stream for the caller; work of this buffer runs on the current stream."""
        return self._objects.comm_stream()


TOKENS = 4096  # tokens per rank in the hints of high-throughput buffers
EXPERTS = 256
NODE_RANKS = 8  # most ranks of a node in hints


@dataclass(frozen=True)
class Config:
    """Choices for a high-throughput call.

    Args:
        num_sms: blocks of its kernels, on a GPU.
        num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens: change nothing: DeepEP's rings do not exist here.
        num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens: change nothing.

    Args of methods:
        hidden_bytes: of a row.
        num_ranks: of the group.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of symmetric memory for 4096 tokens a rank of `hidden_bytes` bytes, top-8 of 256 experts.

        Enough for ranks of one node and for nodes of 8 ranks, whichever takes more.
        """
        experts = -(-EXPERTS // num_ranks) * num_ranks
        sizes = (experts, TOKENS, hidden_bytes // 2, max(8, num_ranks))
        options: dict[str, Any] = dict(layout="rank", combine_dtype=torch.bfloat16, ranks=num_ranks)
        return widest(num_ranks, lambda nodes: AllToAll.heap_bytes(*sizes, **options, nodes=nodes))

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: ranks on other nodes use the same memory. Arguments as in `get_nvl_buffer_size_hint`."""
        return 0


def widest(num_ranks: int, nbytes: Callable[[int], int]) -> int:
    """The most bytes of a size that depends on the number of nodes, for ranks that are of one node or of nodes of up to 8.

    Args:
        num_ranks: of the group.
        nbytes: bytes by the number of nodes.
    """
    node_size = max(size for size in range(1, NODE_RANKS + 1) if num_ranks % size == 0)
    return max(nbytes(nodes) for nodes in {1, num_ranks // node_size})


def low_latency_bytes(max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Bytes of symmetric memory for low-latency calls with rows of BF16 and of FP8, up to top-16, two of each in flight."""
    options: dict[str, Any] = dict(mode="latency", combine_dtype=torch.bfloat16, ranks=num_ranks)
    dtypes = torch.bfloat16, torch.float8_e4m3fn

    def nbytes(nodes: int) -> int:
        sizes = num_experts, max_tokens, hidden, min(16, num_experts)
        return sum(AllToAll.heap_bytes(*sizes, dtype, **options, nodes=nodes) for dtype in dtypes)

    return IN_FLIGHT * widest(num_ranks, nbytes)
