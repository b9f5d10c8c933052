"""Common parts of collectives: argument checks, signals that are never reset, agreement of ranks."""

import ctypes
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import tilelang.language as T
import torch
from tilelang import tvm

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.runtime import heap
from tilescale_net.runtime.groups import MadeByRanks
from tilescale_net.runtime.launch_args import StreamOrder, unresolved

from .algorithms import BufferSpecs
from .launches import Launch

if TYPE_CHECKING:
    from tilescale_net.runtime.control import Track
    from tilescale_net.runtime.world import World


# These kernels synchronise threads themselves; the compiler sees neither divergent warps nor peers' writes.
EXPLICIT_SYNC = {
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,
    "tl.disable_safe_memory_legalize": True,  # callers check every index; guards would cost registers
}

# Products are rounded before they are added, as everywhere else, so results can be compared bitwise.
EXACT_SUMS = "-fmad=false"


# ---------------------------------------------------------------------------------------------------------------------
# Slices of a tensor per block.


# Smallest slice that pays for its signals; with PEs on other nodes, for a proxy's messages and copies; and with several
# PEs per node, where blocks also forward data and more of them are faster.
MIN_BYTES = 16 * 1024
MIN_BYTES_OVER_NODES = 128 * 1024
MIN_BYTES_WITH_GATEWAYS = 32 * 1024
# Slices begin at multiples of this, which keeps the tensors' alignment.
ALIGN_BYTES = 128


def slice_elements(count, blocks: int, dtype: str, least_bytes: int = MIN_BYTES):
    """Elements of a slice (int64) if `blocks` blocks share `count` elements of `dtype`; called in a traced kernel. Block b
    has [b * slice, min((b + 1) * slice, count)), possibly empty. `least_bytes`: minimum of all slices but the last."""
    element = max(1, tvm.DataType(dtype).bits * tvm.DataType(dtype).lanes // 8)
    align, least = max(1, ALIGN_BYTES // element), max(1, least_bytes // element)
    share = T.max(T.ceildiv(count, T.int64(blocks)), T.int64(least))
    return T.ceildiv(share, T.int64(align)) * align


@dataclass(frozen=True)
class Nodes:
    """Nodes of consecutive PEs, which may differ in size; methods take Python integers and kernel expressions.

    Equal nodes need plain arithmetic; others a comparison for each node behind the first.

    Attributes:
        sizes: number of PEs of every node, in order.
    """

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, n_pes: int, node_size: int | tuple[int, ...]) -> "Nodes":
        """Nodes of one size, or of the sizes in a tuple."""
        return cls(node_size if isinstance(node_size, tuple) else (node_size,) * (n_pes // node_size))

    @property
    def is_even(self) -> bool:
        return len(set(self.sizes)) == 1

    @property
    def largest(self) -> int:
        return max(self.sizes)

    @property
    def turns(self) -> int:
        """Most PEs of another node for which one PE forwards."""
        return -(-self.largest // min(self.sizes))

    @property
    def _firsts(self) -> list[int]:
        return [0, *itertools.accumulate(self.sizes)][:-1]

    @staticmethod
    def _is_from(number: Any, least: int) -> Any:
        """1 from `least` on, else 0."""
        return int(number >= least) if isinstance(number, int) else T.cast(number >= least, "int32")

    def node_of(self, pe: Any) -> Any:
        """The node of a PE."""
        return pe // self.largest if self.is_even else sum(self._is_from(pe, first) for first in self._firsts[1:])

    def first(self, node: Any) -> Any:
        """The first PE of a node."""
        if self.is_even:
            return node * self.largest
        return sum(size * self._is_from(node, i + 1) for i, size in enumerate(self.sizes[:-1]))

    def size(self, node: Any) -> Any:
        """The PEs of a node."""
        if self.is_even:
            return self.largest
        steps = zip(self.sizes, self.sizes[1:])
        return self.sizes[0] + sum((b - a) * self._is_from(node, i + 1) for i, (a, b) in enumerate(steps) if a != b)

    def end(self, node: Any) -> Any:
        """The first PE after a node."""
        return (node + 1) * self.largest if self.is_even else self.first(node) + self.size(node)

    def index_of(self, pe: Any) -> Any:
        """A PE's index within its node."""
        return pe % self.largest if self.is_even else pe - self.first(self.node_of(pe))

    def forwarder(self, node: Any, index: Any) -> Any:
        """The PE of a node that serves the PEs with this index in other nodes: the PE with the same index, or round-robin if
        the node is smaller."""
        return self.first(node) + (index if self.is_even else index % self.size(node))

    def is_last(self, pe: Any) -> Any:
        """Whether this PE is the last of its node."""
        if self.is_even:
            return pe % self.largest == self.largest - 1
        return sum(self._is_from(pe, end - 1) - self._is_from(pe, end) for end in itertools.accumulate(self.sizes)) == 1


# Bits of a piece's number within a call; the upper bits hold the call number.
PIECE_BITS = 20


def piece_number(call, piece):
    """Value of a signal when the first `piece` pieces of call `call` (uint64) have arrived; greater than in earlier calls."""
    return (call << T.uint64(PIECE_BITS)) + T.cast(piece, "uint64")


# ---------------------------------------------------------------------------------------------------------------------
# Begin of a call: every rank sends every rank the call number and a tag.
#
# Arguments of the kernels: `calls` (uint64, in any device memory) counts calls, so a captured call can be replayed. `tag`
# (int32) encodes the arguments that must be equal on all PEs; PEs compare tags before any data move, do not write their
# outputs if tags differ, and report the difference to `status` (int64 [STATUS_WORDS]). Other words are uint64 signals in
# symmetric memory. Calls and signals are zero before the first call and never reset.


# Bits of a tag, the lower bits of the word; a later call has a greater word.
TAG_BITS = 24
# The words of a status record: code (written last), rank, value, and padding to 32 bytes.
STATUS_WORDS = 4
# Code of `compare`: another rank makes another call.
CALL_MISMATCH = 1


@tsn.macro
def report(status, code, rank, value):
    """Report a fault to the host: its code (int32, not 0), its rank and its value. The code is written last."""
    status[1] = T.cast(rank, "int64")
    status[2] = T.cast(value, "int64")
    N.st(status[0], T.cast(code, "int64"), sem="release")


def call_word(call, tag):
    """The word of a rank that has begun call `call` (uint64); the least one with tag 0."""
    return (call << T.uint64(TAG_BITS)) | T.cast(tag, "uint64")


@tsn.macro
def announce(ready, index, call, tag, pe):
    """Set word `index` of `ready` at `pe`: this rank has begun call `call`."""
    N.signal(ready[index], call_word(call, tag), pe)


@tsn.macro
def report_other_call(status, rank, call, tag, word):
    """Report that `rank`, whose call word is `word`, makes another call than this rank. A word of an earlier call is not a
    fault: the job was aborted during the wait."""
    if word >= call_word(call, 0):
        theirs = T.cast(word & T.uint64((1 << TAG_BITS) - 1), "int64")
        known = T.if_then_else(word >> T.uint64(TAG_BITS) == call, theirs, T.int64((1 << TAG_BITS) - 1))
        report(status, CALL_MISMATCH, rank, (T.cast(tag, "int64") << T.int64(TAG_BITS)) | known)


@tsn.macro
def compare(same: T.Ref, rank, call, tag, word, status, reports):
    """same = whether `rank`, whose call word is `word`, makes the same call as this rank. A rank that makes another call
    may already have begun its next one. `reports`: whether this thread reports a difference."""
    same = T.cast(word == call_word(call, tag), "int32")
    if same == 0 and reports:
        report_other_call(status, rank, call, tag, word)


@tsn.macro
def check_tag_or_newer(same: T.Ref, rank, call, tag, word, status, reports):
    """As `compare`, for kernels in which a rank may finish early and run ahead: a later word proves agreement."""
    same = T.cast(word == call_word(call, tag) or word >= call_word(call + T.uint64(1), 0), "int32")
    if same == 0 and reports:
        report_other_call(status, rank, call, tag, word)


@tsn.macro
def agree_by_blocks(agrees, ready, block, call: T.Ref, tag, status, thread, me, n_pes, runs_ahead=False):
    """Meet the blocks with this index of all PEs; agrees[p] = whether PE p makes the same call as this PE. Called by a
    block. `agrees`: shared int32 [n_pes]. `ready`: signals [n_pes, blocks]. `runs_ahead`: see `check_tag_or_newer`."""
    if thread < n_pes:
        same = T.alloc_var("int32", 1)
        if thread != me:
            N.signal(ready[me, block], call_word(call, tag), thread)
            word = N.wait(ready[thread, block], "ge", call_word(call, 0))
            if runs_ahead:
                check_tag_or_newer(same, thread, call, tag, word, status, True)
            else:
                compare(same, thread, call, tag, word, status, True)
        agrees[thread] = same
    T.sync_threads()


@tsn.macro
def all_agree(agreed: T.Ref, agrees, n_pes):
    """agreed = whether all of agrees [n_pes] are 1. Called by all threads of a block."""
    agreed = 1
    for p in T.unroll(n_pes):
        agreed = agreed & agrees[p]


@tsn.macro
def end_call(calls, block, call, thread):
    """calls[block] = call (not a variable) when all threads of the block are done. Called by all threads of a block."""
    T.sync_threads()
    if thread == 0:
        calls[block] = call


@tsn.macro
def count_call(calls, block, call: T.Ref, used, thread, threads, max_blocks):
    """calls[b] = call for this block; block 0 also sets the words of unused blocks. `calls`: uint64 [max_blocks]. `used`:
    int64, number of blocks with work."""
    if thread == 0:
        calls[block] = call
    if block == 0:
        for turn in T.serial(T.ceildiv(max_blocks, threads)):
            other = turn * threads + thread
            if other < max_blocks and other >= used:
                calls[other] = call


class StatusRecord:
    """A record in host memory that kernels write when they reject a call; reading it does not wait for the GPU."""

    def __init__(self, world):
        from tilescale_net import _native  # if it is missing, init raises

        nbytes = STATUS_WORDS * 8
        self._records = world.records
        self._address = self._records.take()
        raw = (ctypes.c_char * nbytes).from_address(self._address)
        if world.device.type == "cuda":
            from tilescale_net.runtime.cuda_memory import tensor_at

            self.tensor = tensor_at(self._address, nbytes, world.device).view(torch.int64)
        else:
            self.tensor = torch.frombuffer(raw, dtype=torch.int64)
        self._words = (ctypes.c_int64 * STATUS_WORDS).from_address(self._address)
        # Whether a fault is pending; checked by every call.
        self.written: Callable[[], bool]
        self.written, self._watch = _native.launch.words()
        self._watch([self._address])

    def close(self) -> None:
        """Free the record; no kernel may write it any more."""
        self._words = (ctypes.c_int64 * STATUS_WORDS)()
        self._watch([])
        del self.tensor
        self._records.give_back(self._address)

    def take(self) -> tuple[int, int, int]:
        """Take the fault: code, rank and value; the code is 0 without a fault."""
        code, rank, value, _ = self._words
        if code:
            self._words[0] = 0
        return code, rank, value


class Agreement:
    """Agreed arguments of calls, and their tags. `name`: the collective, for errors. `world`: its ranks."""

    # Tags that encode arguments; after this many they are reused.
    _TAGS = (1 << TAG_BITS) - 1

    def __init__(self, name: str, world):
        self._name, self._world = name, world
        self._numbers: dict[tuple, int] = {}
        self._texts: list[str] = []
        self._record: StatusRecord | None = None

    @property
    def status(self) -> torch.Tensor:
        """The record that kernels report to, int64 [STATUS_WORDS]; created on first use."""
        if self._record is None:
            with torch.inference_mode(False):
                self._record = StatusRecord(self._world)
        return self._record.tensor

    def number(self, describe: str, *arguments) -> int:
        """The tag of a call with these arguments. Collective for new arguments, which the ranks compare; raises
        RankMismatch, which names two ranks whose arguments differ. `describe`: text with a `{}` for each argument.
        `arguments`: hashable."""
        key = (describe, *arguments)
        number = self._numbers.get(key)
        if number is None:
            shown = (list(a) if isinstance(a, torch.Size) else a for a in arguments)
            text = describe.format(*shown)
            self._world.control.agree(self._name, text)
            number = self._numbers[key] = len(self._texts) % self._TAGS
            self._texts.append(text)
        return number

    def has_reported(self) -> bool:
        """Whether kernels have reported a fault that `error` has not taken yet."""
        return self._record is not None and self._record.written()

    def close(self) -> None:
        """Free the record; no kernel may write it any more."""
        record, self._record = self._record, None
        if record is not None:
            record.close()

    def error(self) -> tsn.RankMismatch | None:
        """The error that kernels reported since the last call; does not wait for them."""
        if self._record is None:
            return None
        code, rank, value = self._record.take()
        if code == 0:
            return None
        mine, theirs = value >> TAG_BITS, value & self._TAGS
        other = f"{self._texts[theirs]}" if theirs < len(self._texts) else "something else, and has gone on since"
        return tsn.RankMismatch(
            f"{self._name}: rank {self._world.rank} was called with {self._texts[mine]}; rank {rank} with {other}; nothing "
            "moved between the two: all ranks make the same calls in the same order"
        )


_Object = TypeVar("_Object", bound="Collective")
_Result = TypeVar("_Result")

# Most blocks of a launch in the simulator.
SIMULATOR_BLOCKS = 64


def sizes_of(specs: BufferSpecs) -> list[int]:
    """Bytes of each tensor."""
    return [math.prod(shape) * dtype.itemsize for shape, dtype in specs.values()]


def is_integer(value: object, least: int = 1, unit: int = 1) -> bool:
    """Whether `value` is an int of at least `least`, and a multiple of `unit`; a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least and value % unit == 0


def check_threads(name: str, argument: str, threads: int, ranks: int) -> None:
    """Raise ValueError for an unsupported number of threads per block."""
    if not is_integer(threads, max(32, ranks), 32) or threads > 1024:
        raise ValueError(
            f"{name}: {argument} is {threads!r}; it must be a multiple of 32, at most 1024, and not below the number of PEs "
            f"({ranks})"
        )


def check_chunk(name: str, chunk_bytes: int) -> None:
    """Raise ValueError for an unsupported size of a chunk."""
    if not is_integer(chunk_bytes, 128, 128):
        raise ValueError(f"{name}: chunk_bytes is {chunk_bytes!r}; it must be a positive multiple of 128")


@tsn.jit(name="fused_gate")
def wait_until_resident():
    """Kernel `(calls, begun, growth, begins)`: ends when `begun[0]` has grown by `begins` in this call. Later kernels on the
    stream then cannot take the SMs of the blocks that have begun.

    Args of the kernel:
        calls: int64 [1], the number of this call. begun: uint64 [1], symmetric; grows by `growth` in every call.
    """

    @T.prim_func
    def main(
        ctx: N.Context(), calls: T.Tensor((1,), "int64"), begun: T.Tensor((1,), "uint64"), growth: T.int32, begins: T.int32
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            if T.get_thread_binding() == 0:
                N.wait(begun[0], "ge", (calls[0] - 1) * growth + begins)

    return main


class _Constructed(type):
    """Metaclass that frees an object's memory if its construction fails."""

    # Declared to return the instance, so type checkers take the arguments from `__init__`.
    def __call__(cls: type[_Result], *args: Any, **named: Any) -> _Result:
        with heap.attempt():
            return type.__call__(cls, *args, **named)

    @property
    def __signature__(cls) -> inspect.Signature:
        """The constructor's signature instead of the signature of `__call__`."""
        signature = inspect.signature(inspect.getattr_static(cls, "__init__"))
        return signature.replace(parameters=list(signature.parameters.values())[1:], return_annotation=signature.empty)


class Collective(MadeByRanks, metaclass=_Constructed):
    """Base of the host classes: construction is collective, calls are asynchronous on the current stream.

    Signals carry the number of the call, which is in device memory: nothing is reset between calls, and a call captured in
    a CUDA graph can be replayed. All ranks make the same calls in the same order. Calls on different streams run one after
    the other, in the order of the host (see `StreamOrder`).

    Args:
        name: name in errors.
        configuration: arguments that must be equal on all ranks.
        threads: threads per block, a multiple of 32 from the number of ranks to 1024.
        blocks: blocks per launch; all of them must be able to run at once.
        group: see `tilescale_net.world`.

    Raises:
        ValueError: a launch geometry that the kernels or the GPU cannot run.
        RankMismatch: ranks pass different arguments; names both.
        TileScaleError: ranks have left the job; the kernels need all of them.
    """

    allows_partial_membership = False  # of the ranks of the world

    def __init__(self, name: str, configuration: str, threads: int, blocks: int, group: "tsn.Group" = None) -> None:
        self._world = tsn.world(group)
        self.name = name
        self.rank, self.n_pes = self._world.rank, self._world.size
        self.device = self._world.device
        # A PE of another node gets its data from the fabric, which reads symmetric memory only.
        self.needs_symmetric_source = 0 in self._world.peer_base
        # Whether nodes have several PEs, which can forward data that cross the network once per node.
        self.node_map = Nodes(self._world.topology.sizes)
        self.has_gateways = 1 < len(self.node_map.sizes) < self.n_pes
        # PEs of a node, or of every node if these differ, as kernels take them.
        self.node_size = self.node_map.largest if self.node_map.is_even else self.node_map.sizes
        # Number of PEs whose sum every algorithm rounds before adding it to others; None: one rounding over all PEs.
        self.node_sum = self.node_size if self.has_gateways else None
        over_nodes = MIN_BYTES_WITH_GATEWAYS if self.has_gateways else MIN_BYTES_OVER_NODES
        self.min_slice_bytes = over_nodes if self.needs_symmetric_source else MIN_BYTES
        check_threads(name, "threads", threads, self.n_pes)
        limit = SIMULATOR_BLOCKS
        if self.device.type == "cuda":
            limit = torch.cuda.get_device_properties(self.device).multi_processor_count
        if not 1 <= blocks <= limit:
            raise ValueError(
                f"{name}: blocks is {blocks}; it must be from 1 to {limit}, because all blocks run at the same time"
            )
        self.threads, self.blocks, self.block_limit = threads, blocks, limit
        self._agreement = Agreement(name, self._world)
        self._order = StreamOrder(self.device)
        self._mapped: dict[tuple, tuple[bool, int, tuple]] = {}
        # Up to the heap's limit, because it may grow.
        self._heap_range = self._world.heap.base, self._world.heap.base + self._world.heap.limit
        self._launches: dict[Hashable, Callable[..., None]] = {}
        self._again: dict[Hashable, tuple[tuple, Callable[..., Any]]] = {}
        self._mismatch: tsn.RankMismatch | None = None  # raised by every call
        self._owned: list[torch.Tensor] = []
        self._used: list[Collective] = []
        self._counters: list[torch.Tensor] = []
        self._members = self._world.control.members
        if len(self._members) < self.n_pes and not self.allows_partial_membership:
            raise tsn.TileScaleError(
                f"{name}: ranks were left out of the job (now {self._members}), and it works with all of them only; make a "
                "world of those that are left (tilescale_net.init with a new group, or a StoreGroup), and this in it"
            )
        self._world.control.agree(name, f"threads={threads}, blocks={blocks}, {configuration}")
        self._call_track = self._world.calls.track(name)
        self._call_track.reported = self._agreement.has_reported  # the log does not hold this object

    def _symmetric(self, shape: tuple[int, ...] | int, dtype: torch.dtype) -> torch.Tensor:
        """Zeroed symmetric memory, owned by this object. On HeapError, which all ranks raise, frees the earlier tensors."""
        try:
            self._owned.append(tsn.zeros(shape, dtype, group=self._world))
        except tsn.HeapError:
            self._release()
            raise
        return self._owned[-1]

    def allocate(self, specs: BufferSpecs) -> dict[str, torch.Tensor]:
        """Allocate all of `specs`, zeroed, or raise HeapError and allocate nothing."""
        sizes, memory = sizes_of(specs), self._world.heap
        if not memory.make_room(sizes):
            raise tsn.HeapError(
                f"{self.name} on rank {self.rank}: needs {heap.footprint(sizes)} bytes of symmetric memory; the heap of "
                f"{memory.size} bytes has no room for them; free tensors, or {memory.advice(sizes)}"
            )
        return {name: self._symmetric(*spec) for name, spec in specs.items()}

    def replace(self, old: dict[str, torch.Tensor], specs: BufferSpecs) -> dict[str, torch.Tensor]:
        """Replace the tensors of `old` that `specs` names; collective. On HeapError, which all ranks raise, frees all memory
        of this object."""
        for name in specs:
            if any(tensor is old[name] for tensor in self._owned):
                self._owned = [tensor for tensor in self._owned if tensor is not old[name]]
                tsn.free(old[name], group=self._world)
        try:
            return self.allocate(specs)
        except tsn.HeapError:
            self._release()
            raise

    def _use(self, other: _Object) -> _Object:
        """Use another collective in calls of this one, which frees it."""
        self._used.append(other.tracked_by(self._call_track))
        return other

    def tracked_by(self: _Object, calls: "Track") -> _Object:
        """Use this object within calls of another object, which are logged in `calls`."""
        self._call_track.outer = calls
        return self

    def ordered_by(self: _Object, order: StreamOrder) -> _Object:
        """Order the calls of this object with the calls of other objects, in the common `order`."""
        self._order = order
        order.follow()
        return self

    @property
    def status_record(self) -> torch.Tensor:
        """The record that kernels report to, int64 [STATUS_WORDS]."""
        return self._agreement.status

    def _signals(self, *shape: int) -> torch.Tensor:
        """Signal words, all zero."""
        return self._symmetric(shape, torch.uint64)

    def counters(self, *shape: int) -> torch.Tensor:
        """Zeroed uint64 words in local memory."""
        with torch.inference_mode(False):
            self._counters.append(torch.zeros(shape, dtype=torch.uint64, device=self.device))
        return self._counters[-1]

    def free(self) -> None:
        """Free the symmetric memory. Collective; do not call the object afterwards."""
        self._check_alive()
        for other in self._used:
            other.free()
        self._call_track.note("free()")
        self._release()

    def _release(self) -> None:
        """Free this object's resources. All ranks call this."""
        owned, self._owned = self._owned, []
        for tensor in owned:
            tsn.free(tensor, group=self._world)
        self._launches.clear()
        self._again.clear()
        self._agreement.close()
        self._world.calls.drop(self._call_track)

    @property
    def world(self) -> "World":
        """The world in which its kernels run."""
        return self._world

    @property
    def _made_in(self) -> "World":
        return self._world

    # -- checks of a call's arguments -------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether neither free() nor finalize() was called."""
        return bool(self._owned) and not self._world.closed

    def _check_alive(self) -> None:
        if not self.alive:
            self._world.check()
            raise tsn.TileScaleError(f"{self.name}: used after free() or finalize()")

    def _begin(self) -> None:
        """First step of every call: check that all ranks of the object are alive, and order the next launches after
        earlier calls.

        Raises:
            TileScaleError: ranks are gone, or the object was freed. RankMismatch: of an earlier call.
        """
        world = self._world
        if (
            not self._owned
            or world.closed
            or self._members is not world.control.members
            or self._mismatch is not None
            or self._agreement.has_reported()
        ):
            self._check_callable()
        self._order.follow()

    def _check_callable(self) -> None:
        """Raise TileScaleError unless all ranks of the object are still in the job."""
        self._check_alive()
        if self._members is not self._world.control.members:
            raise tsn.TileScaleError(
                f"{self.name}: ranks were left out of the job (now {self._world.control.members}); this object works with "
                "all ranks only, free it"
            )
        self._raise_mismatch()

    def _check(self, name: str, tensor, dtype: torch.dtype | None = None, symmetric: bool = False) -> None:
        """Raise TypeError, ValueError or HeapError, which name the argument, for a tensor that kernels cannot use."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{self.name}: {name} must be a tensor, not {type(tensor).__name__}")
        if dtype is not None and tensor.dtype != dtype:
            raise TypeError(f"{self.name}: {name} has dtype {tensor.dtype}; it must be {dtype}")
        if tensor.device != self.device:
            raise ValueError(f"{self.name}: {name} is on {tensor.device}; this rank's kernels run on {self.device}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{self.name}: {name} of shape {list(tensor.shape)} has strides {list(tensor.stride())}; it must be contiguous"
            )
        if lazy := unresolved(tensor):
            raise ValueError(f"{self.name}: {name} {lazy}")
        heap = self._world.heap
        if symmetric and tensor.numel() and not 0 <= tensor.data_ptr() - heap.base <= heap.size - tensor.nbytes:
            raise tsn.HeapError(
                f"{self.name}: {name} of shape {list(tensor.shape)} is not in the symmetric heap; make it with "
                "tilescale_net.empty or zeros"
            )

    def _check_dtype(self, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
        """Raise TypeError for a tensor of another dtype."""
        if tensor.dtype not in dtypes:
            raise TypeError(f"{self.name}: dtype {tensor.dtype} is not one of {', '.join(map(str, dtypes))}")

    def _check_parts(self, name: str, tensor: torch.Tensor, part_name: str, part: torch.Tensor) -> None:
        """Raise ValueError unless `tensor` has the shape of n_pes parts, stacked or concatenated along the first axis."""
        stacked = torch.Size((self.n_pes, *part.shape))
        joined = torch.Size((self.n_pes * part.shape[0], *part.shape[1:])) if part.dim() else stacked
        if tensor.shape not in (stacked, joined):
            raise ValueError(
                f"{self.name}: {name} has shape {list(tensor.shape)}; with {part_name} of shape {list(part.shape)} and "
                f"{self.n_pes} PEs it must be {list(stacked)} or {list(joined)}"
            )

    def _check_apart(self, a_name: str, a: torch.Tensor, b_name: str, b: torch.Tensor) -> None:
        """Raise ValueError if two tensors overlap."""
        if a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes:
            raise ValueError(f"{self.name}: {a_name} and {b_name} overlap in memory")

    # -- agreement of ranks -----------------------------------------------------------------------------------------

    def _agree(self, describe: str, *arguments) -> int:
        """The tag of a call with these arguments; see `Agreement.number`.

        Later calls with the same arguments need no agreement, so a CUDA graph can capture them.
        """
        self._call_track.note(describe, *arguments)
        return self._number(describe, *arguments)

    def _number(self, describe: str, *arguments) -> int:
        try:
            origin = self._call_track.origin
            return self._agreement.number(origin + describe if origin else describe, *arguments)
        except tsn.RankMismatch:
            self._call_track.settle()
            raise

    def check(self) -> None:
        """Wait for the calls so far and raise errors of their arguments. Not collective.

        In the simulator each call does this; on a GPU it synchronises with the host.

        Raises:
            RankMismatch: another rank made another call; names both.
        """
        try:
            self._world.synchronize()
        except tsn.TileScaleError:
            self._raise_mismatch()  # explains a wait that did not end, see `_launch_checked`
            raise
        self._raise_mismatch()
        self._world.check()

    def _raise_mismatch(self) -> None:
        """Raise faults of finished kernels."""
        error = self._agreement.error()
        if error is not None:
            self._call_track.settle()
            raise error

    def _launch_checked(self, launch: Callable[..., _Result], *arguments: Any) -> _Result:
        """Launch a kernel; a mismatch that it reports explains a timed-out wait."""
        try:
            result = launch(*arguments)
        except tsn.TileScaleError:
            self._raise_mismatch()
            raise
        self._raise_mismatch_if_simulated()
        return result

    def _raise_mismatch_if_simulated(self) -> None:
        """Raise a mismatch at once in the simulator, which has run the kernel when a launch returns."""
        if self.device.type == "cpu":
            self._raise_mismatch()

    # -- repeated calls ---------------------------------------------------------------------------------------------

    def prepared(self, key: Hashable, make: Callable[[], Launch]) -> Callable[..., None]:
        """The launch of a key, created by `make()` on first use."""
        launch = self._launches.get(key)
        if launch is None:
            with torch.inference_mode(False):
                launch = self._launches[key] = make().quick()
        return launch

    def _key(self, a: Any, b: Any, *options: Hashable) -> Hashable:
        """Key of checks, agreement and launch of a call with these tensors; None: no fast path.

        Calls with the same key differ only in the addresses of tensors outside of the symmetric heap.
        """
        device = self.device
        if type(a) is not torch.Tensor or type(b) is not torch.Tensor or a.device != device or b.device != device:
            return None
        if not a.is_contiguous() or not b.is_contiguous():
            return None
        kind, other = a.dtype, b.dtype
        if a.is_neg() or b.is_neg() or (kind.is_complex and a.is_conj()) or (other.is_complex and b.is_conj()):
            return None
        first, second = a.data_ptr(), b.data_ptr()
        base, end = self._heap_range
        offsets = first - base if base <= first <= end else None, second - base if base <= second <= end else None
        if first < second + b.nbytes and second < first + a.nbytes and None in offsets:
            options = *options, second - first  # they overlap
        return a.shape, b.shape, kind, other, first & 15, second & 15, offsets, self._call_track.origin, *options

    def _made_again(self, key: Hashable, *tensors: torch.Tensor) -> bool:
        """Repeat an earlier call of this key; False if there is none."""
        earlier = self._again.get(key) if key is not None else None
        if earlier is None:
            return False
        noted, launch = earlier
        self._call_track.note(*noted)
        self._launch_checked(launch, *tensors)
        return True

    def _launch_and_remember(
        self, key: Hashable, noted: tuple, launch: Callable[..., Any], *tensors: torch.Tensor
    ) -> None:
        """`_launch_checked`, for `_made_again` of later calls with this key."""
        self._launch_checked(launch, *tensors)
        if key is not None:
            self._again[key] = noted, launch

    def _agree_on_offsets(self, describe: str, *arguments, offsets: list[int | None]) -> tuple[bool, int, tuple]:
        """As `_agree`; also whether kernels may use tensors in place, in the memory of all PEs.

        Args:
            offsets: heap offsets of the tensors, None for other tensors. They may differ between ranks.

        Returns:
            Whether all ranks have the same offsets and no None; the tag of a call, which then covers the offsets; and the
            text for the call log.
        """
        # If one tensor is copied, the offsets of the others do not matter.
        key = (self._call_track.origin, describe, *arguments, *([None] if None in offsets else offsets))
        known = self._mapped.get(key)
        if known is None:
            self._call_track.note(f"{describe}, tensors at places that were not used before", *arguments)
            tag = self._number(describe, *arguments)
            mine = [-1 if offset is None else offset for offset in offsets]  # ranks compare values of one type
            everyone = self._world.control.gather(f"{self.name}: where the tensors are", mine)
            mapped = None not in offsets and all(theirs == mine for theirs in everyone)
            if mapped:
                noted: tuple = f"{describe}, tensors at heap offsets {{}}", *arguments, tuple(offsets)
                tag = self._number(*noted)
            else:
                noted = f"{describe}, tensors that were used before and are copied", *arguments
            known = self._mapped[key] = mapped, tag, noted
        else:
            self._call_track.note(*known[2])
        return known

    def aligned_offset(self, tensor: torch.Tensor) -> int | None:
        """Heap offset of a symmetric tensor that begins and ends at multiples of 16 bytes; None for others."""
        heap = self._world.heap
        inside = 0 <= tensor.data_ptr() - heap.base <= heap.size - tensor.nbytes
        return self.heap_offset(tensor) if inside and is_aligned(16, tensor) else None

    def heap_offset(self, tensor: torch.Tensor) -> int:
        """Heap offset of a symmetric tensor; 0 for an empty tensor."""
        return tensor.data_ptr() - self._world.heap.base if tensor.numel() else 0

    place, place_of_vectors = heap_offset, aligned_offset  # former names


def is_aligned(nbytes: int, *tensors: torch.Tensor) -> bool:
    """Whether tensors begin and end at multiples of `nbytes` bytes."""
    return all((tensor.data_ptr() | tensor.nbytes) % nbytes == 0 for tensor in tensors)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """tilelang's name of the dtype."""
    return str(dtype).removeprefix("torch.")


def as_bytes(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """A view of a contiguous tensor as bytes; axes of one element may have any stride."""
    dense = tensor if tensor.dim() and tensor.stride(-1) == 1 else tensor.as_strided((tensor.numel(),), (1,))
    return dense.view(torch.uint8).view(shape)
