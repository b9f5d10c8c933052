"""A world, the ranks of a group: created by init, taken down by finalize; worlds.py finds it.

docs/states.md lists its states and what each call does in them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

import tilescale_net
from tilescale_net.errors import ConfigurationError, FabricError, HeapError, PeerLost, TileScaleError, WaitTimeout
from tilescale_net.runtime import context, groups, job_store, placement, profiling, settings, this_host
from tilescale_net.runtime.control import CallLog, Control, error_of_loss
from tilescale_net.runtime.fabric import RunningProxy
from tilescale_net.runtime.heap import Heap, Memory
from tilescale_net.runtime.job_store import SignedStore
from tilescale_net.runtime.liveness import Watchdog

LOADED_LATE = (
    "CUDA loads kernels at their first launch here; where data to and from other nodes are staged in host memory, that "
    "waits for a running kernel, and the kernel for its data until TSN_TIMEOUT. Set CUDA_MODULE_LOADING=EAGER before CUDA "
    "starts"
)


def check_settings() -> tuple[ConfigurationError | None, float, float]:
    """The error of the environment, if any, and the two timeouts in seconds, or defaults if they are wrong."""
    wrong = None
    try:
        if missing := this_host.missing_native():
            raise ConfigurationError(missing)
        settings.check()
        settings.load_kernels_early()
        from tilescale_net import _native, _simulator  # noqa: F401
    except (ConfigurationError, ImportError) as err:
        wrong = ConfigurationError(str(err))

    def seconds(row: settings.Setting[float]) -> float:
        try:
            return row.get()
        except ConfigurationError:
            return row.default

    return wrong, seconds(settings.TIMEOUT), seconds(settings.HEARTBEAT_TIMEOUT)


class HangReporter(Protocol):
    """Queries all ranks for their state; see trace/reporter.py."""

    def answer(self, number: int) -> None:
        """Report this rank's state, for alarm `number`. Does not wait for the store."""

    def ask_about(self, error: Exception | None) -> None:
        """Query all ranks if that may explain this rank's timeout."""

    def print_failure(self, failure: Exception) -> None:
        """Print the answers to `ask_about`, on one of the ranks that query."""

    def forget_failure(self, generation: int) -> None:
        """Start over for the next failure; `generation`: number of earlier ones."""


@dataclass(frozen=True)
class WorldHooks:
    """Hooks of higher layers into worlds, from `tilescale_net.init`.

    Attributes:
        device_code: hash of the device code of kernels, the same on all ranks.
        reporter: of a new world; has its control plane.
        recorder: of a new world; None without a trace. Collective.
        report_on_signal: lets the given reporters report at each SIGUSR1.
    """

    device_code: Callable[[], str]
    reporter: Callable[[World], HangReporter]
    recorder: Callable[[World], profiling.TraceRecorder | None]
    report_on_signal: Callable[[Callable[[], list[Any]]], None]


def create_memory(
    kind: str, size: int, limit: int, device: torch.device | None, group: groups.Group, topology: placement.Topology
) -> Memory:
    """Memory with a heap of `size` bytes, which may grow to `limit`. `kind`: "cuda" or "simulator". `device`: of this
    process's other worlds; None: `group` and `topology` determine the GPU, see `cuda_memory.gpu_ordinal`. Raises
    ConfigurationError: the machine has no such memory."""
    if kind == "cuda":
        from tilescale_net.runtime import cuda_memory

        ordinal = device.index if device is not None else cuda_memory.gpu_ordinal(group, topology.local_rank)
        shared = device is not None or cuda_memory.bound_gpu(group) is not None
        # A NIC that reaches GPU memory needs it registered in one piece.
        return cuda_memory.CudaMemory(size, limit if topology.nodes == 1 else size, ordinal, shared)
    from tilescale_net.runtime.simulator import SimulatorMemory

    return SimulatorMemory(size, limit)


class World:
    """Rank, heap, peers and context of this process in one group.

    Attributes:
        group: its ProcessGroup or StoreGroup; None: all ranks of the job.
        job_ranks: the rank in the job of each PE.
        rank, size: index of this PE and number of PEs in team "world".
        topology: placement of the PEs on nodes.
        device_kind: "cuda" or "simulator".
        device: torch device of symmetric tensors.
        heap: the symmetric heap.
        memory: of the heap, of the device's kind.
        records: kernels' reports of invalid arguments to this rank's host.
        context_tensor: int64 tensor over the fixed part of the context, the argument that kernels take.
        proxy: the proxy that serves PEs of other nodes, or None when every PE is direct.
        hooks: see WorldHooks.
        reporter: queries all ranks for their state, for the report of a hang.
        recorder: writes this rank's part of the trace, or None when nothing is traced here.
        page: the abort page of this rank.
        closed: whether finalize() has ended it.
    """

    # Set after the rendezvous.
    memory: Memory
    heap: Heap
    topology: placement.Topology
    _watchdog: Watchdog

    def __init__(
        self, heap_bytes: int | str | None, group: groups.Group, device: torch.device | None, hooks: WorldHooks
    ):
        """See `tilescale_net.init`; `device`: of the other worlds of this process."""
        wrong, self.timeout, self._silence = check_settings()
        self.hooks = hooks
        self._failure: TileScaleError | None = None
        self.proxy: RunningProxy | None = None
        self.recorder: profiling.TraceRecorder | None = None
        self.closed = self._has_memory = False
        self.page = context.AbortPage()
        self.control = Control(self.timeout + 5.0, self._silence, group)
        self.control.on_loss = self._record
        self.group, self.job_ranks = group, self.control.job_ranks
        self.rank, self.size = self.control.rank, self.control.size
        self.calls = CallLog(self.control)
        self.control.on_mismatch = self.calls.on_mismatch
        self.reporter = hooks.reporter(self)
        self._watch()
        try:
            if wrong is not None:
                raise wrong  # now that it can be reported to the others
            self._set_up(heap_bytes, device)
        except BaseException as err:
            # The others wait for this rank; if it is rank 0, its report would vanish with its store.
            self.give_up(err if isinstance(err, TileScaleError) else TileScaleError(f"{type(err).__name__}: {err}"))
            raise

    def _set_up(self, heap_bytes: int | str | None, device: torch.device | None) -> None:
        kind = settings.device_kind() if device is None else "cuda" if device.type == "cuda" else "simulator"
        size = settings.heap_bytes(heap_bytes, on_gpu=kind == "cuda")
        limit = settings.heap_limit(size, on_gpu=kind == "cuda")
        self._agree_on_settings(f"heap_bytes={size}, TSN_HEAP_LIMIT={limit}, device={kind}")
        self.memory, self._has_memory = create_memory(kind, size, limit, device, self.group, self.topology), True
        self.device_kind, self.device = self.memory.device_kind, self.memory.device
        self.recorder = self.hooks.recorder(self)
        self.page.address = self.memory.pinned(context.ABORT_PAGE_BYTES)
        self.records = context.Records(self.memory.pinned)
        self.heap = Heap(self.memory, self.control.agree, self.rank, self.check, self._settle, self._grow)
        limits, handles = zip(*self.control.gather("tilescale_net.init", [self.memory.limit, self.memory.handle()]))
        self.memory.limit = min(limits)  # some ranks may have reserved fewer addresses
        self.peer_base = self._map_peers(handles)
        self.memory.on_mapped(self.control, self.peer_base)
        if self.topology.nodes > 1:
            proxy = RunningProxy(self)
            proxy.connect_peers("tilescale_net.init")
            self.proxy, self.control.on_ranks_excluded = proxy, proxy.exclude
            if self.rank == 0 and self.memory.loads_kernels_late():
                settings.log.warning(LOADED_LATE)
        self._make_context()
        self.memory.synchronize()
        # Peers may touch this heap from here on: its system area is zero and every rank has mapped every other.
        self.control.agree("tilescale_net.init", "ready")

    def _agree_on_settings(self, wanted: str) -> None:
        traced = f", TSN_TRACE={settings.TRACE.get()}" if settings.TRACE.get() else ""
        self.control.agree(
            "tilescale_net.init",
            f"{wanted}, VIRTUAL_NODES={settings.VIRTUAL_NODES.get()}, tilescale_net {tilescale_net.__version__}, device "
            f"code {self.hooks.device_code()}{traced}",
        )
        if self.group is None:
            self.topology = placement.job_topology(self.rank, self.size, self.control.hosts)
        else:
            node = placement.virtual_node(*groups.own_number(self.group))
            nodes = self.control.gather("tilescale_net.init", node)
            self.topology = placement.group_topology(self.rank, self.size, self.control.hosts, nodes)

    def _watch(self) -> None:
        answer = self.reporter.answer
        self._watchdog = Watchdog(self.control, self._silence, self._poll_local, self._on_loss, answer)
        self.control.reason_of, self.control.explanation = self._watchdog.reason, self._explanation

    def _map_peers(self, handles: Sequence[Any]) -> list[int]:
        """Address of each PE's heap in this process. A failing rank keeps its own heap until the others have tried too:
        without it, they would fail for another reason than the first."""
        try:
            bases = [self._base_of(pe, handles[pe]) for pe in range(self.size)]
        except BaseException:
            with contextlib.suppress(TileScaleError):
                self.control.agree("tilescale_net.init", "mapped")
            raise
        self.control.agree("tilescale_net.init", "mapped")
        return bases

    def _base_of(self, pe: int, handle: Any) -> int:
        """Address of a PE's heap in this process; 0 for a PE reached through the fabric."""
        if pe == self.rank:
            return self.memory.base
        return self.memory.map_peer(pe, handle) if self.topology.is_direct(pe) else 0

    def _make_context(self) -> None:
        """Make the context of kernels."""
        header = context.ContextHeader(
            my_pe=self.rank,
            n_pes=self.size,
            node_pe=self.rank - self.topology.node_members.start,
            n_node_pes=len(self.topology.node_members),
            n_queues=self.proxy.n_queues if self.proxy is not None else 0,
            flags=self.proxy.context_flags if self.proxy is not None else 0,
            heap_base=self.memory.base,
            heap_bytes=self.memory.size,
            abort_word=self.page.address,
            error=self.page.record_address,
            timeout_ns=int(self.timeout * 1e9),
            queues=self.proxy.views_address if self.proxy is not None else 0,
            trace=self.recorder.gpu_calls.address if self.recorder is not None and self.recorder.gpu_calls else 0,
        )
        self._context_bytes = self.memory.upload(context.pack(header, self.peer_base))
        self.context_tensor = self._context_bytes.view(torch.int64)[: context.HEADER_WORDS]

    def __copy__(self) -> World:
        return self

    def __deepcopy__(self, memo: dict[str, Any]) -> World:
        return self

    # -- failures: the first one counts, on any rank ----------------------------------------------------------------

    @property
    def failure(self) -> TileScaleError | None:
        """The error that ended the world for this rank, or None; every further call raises it."""
        if self._failure is None and (loss := self._watchdog.loss) is not None:
            reason, error = loss
            self._failure = error or error_of_loss(f"rank {self.rank}: {reason}; {self._advice}")
        return self._failure

    def check(self) -> None:
        """Raise the error of a kernel, the proxy or a lost peer: WaitTimeout, PeerLost, InvalidDescriptor, …"""
        if not (self.closed or self._failure or self._watchdog.loss or self.page.touched()):
            return  # fast path: every call comes here
        if self.closed:
            self.control.refuse()
            raise TileScaleError(f"rank {self.rank}: this world has ended with finalize(); use that of a new init()")
        if self.failure is None and (error := self._device_error()) is not None:
            self.fail(error)
        if self.failure is None and self.page.aborted:
            # Kernels return early from here on, with incomplete data: the rank that set the word gives the reason.
            self._await_reason()
        if self.failure is not None:
            raise self.failure

    def fail(self, error: TileScaleError) -> NoReturn:
        """Record an error of this rank (of a kernel, the simulator, the proxy), report it to the others, and raise it."""
        self.reporter.ask_about(error)
        failure = self.announce(error if self.failure else self._explained(error))
        self.reporter.print_failure(failure)
        self.abort()
        raise failure

    def announce(self, error: TileScaleError) -> TileScaleError:
        """Record the error that ends this rank, unless one has, and report it to the others; returns the recorded
        one."""
        failure = self._record(error)
        self.control.announce_failure(str(failure))
        return failure

    def _record(self, error: TileScaleError) -> TileScaleError:
        self._failure = self.failure or error
        return self._failure

    def abort(self) -> None:
        """End every device-side wait of this rank."""
        proxy = self.proxy  # another thread may close the world
        if proxy is not None and self.failure is not None:
            proxy.explain(str(self.failure))
        self.page.abort()

    def _device_error(self) -> TileScaleError | None:
        record = self.page.record()
        if record is None:
            return None
        return context.describe_error(
            record, self.rank, self.size, self.memory.base, self.timeout, self.heap.describe, awaited=self.awaited
        )

    @property
    def awaited(self) -> list[int]:
        """The PEs that flushes of the proxy wait for."""
        proxy = self.proxy
        return proxy.awaited() if proxy is not None else []

    def _poll_local(self) -> TileScaleError | None:
        """The error of this rank's kernels or proxy, for the watchdog."""
        failed = self._failure or (self.proxy.failure() if self.proxy is not None else None)
        found = failed or self._device_error() or self.calls.difference()
        self.reporter.ask_about(found)  # at once: the others' state may change
        return found

    def _on_loss(self) -> None:
        """Called when the watchdog finds that the job is lost."""
        self.abort()
        if self.failure is not None:
            self.reporter.print_failure(self.failure)

    def _explained(self, error: TileScaleError) -> TileScaleError:
        """`error`, or the loss of a peer that caused it: a dying peer makes waits time out and links break."""
        reason = self._watchdog.explanation_of(error)
        return error_of_loss(f"rank {self.rank}: {reason}; {self._advice} ({error})") if reason else error

    def _explanation(self, seconds: float) -> str | None:
        """The loss of a peer, and the remedy; see Watchdog.explanation."""
        reason = self._watchdog.explanation(seconds)
        return f"{reason}; {self._advice}" if reason else None

    @property
    def _advice(self) -> str:
        if self.group is None:
            return "restart the job"
        return f"restart the job (these are ranks of the group of the job's ranks {groups.named(self.job_ranks)})"

    def _await_reason(self, seconds: float = 2.0) -> None:
        end = time.monotonic() + seconds
        while self.failure is None and time.monotonic() < end:
            if (found := self._poll_local()) is not None:
                self._record(self._explained(found))
            else:
                time.sleep(0.01)
        self._record(TileScaleError(f"rank {self.rank}: the job was aborted; look at the other ranks' output"))

    # -- lost ranks -------------------------------------------------------------------------------------------------

    def shrink(self, step: int = 0, seconds: float | None = None) -> Survivors:
        """See `tilescale_net.shrink`."""
        self.control.refuse()
        if self.control.excluded or self.closed:
            raise TileScaleError(f"rank {self.rank}: shrink: this rank was left out of the job, or has ended its world")
        self._end_kernels()
        if self.failure is not None and not isinstance(self.failure, PeerLost | WaitTimeout | FabricError):
            stay_out(self.control)
            raise self.failure  # this rank has caused it
        try:
            return self._shrink(int(step), self.timeout if seconds is None else seconds)
        except TileScaleError as err:
            if not isinstance(err, PeerLost):
                self.control.announce_failure(str(err))
            self._record(err)
            raise

    def _shrink(self, step: int, seconds: float) -> Survivors:
        if self.proxy is not None:
            self.proxy.end("it goes on without ranks that are lost")  # before the others count this rank in
        members = agree_on_survivors(self.control, self._watchdog, seconds)
        self._watchdog.close()
        self.calls.forget()
        # Reset to the state before the first failure; no kernel runs.
        self.page.clear()
        self.write_context(context.ContextHeader.aborted.offset, bytes(8))
        self._failure = None
        self.reporter.forget_failure(self.control.generation + 1)
        self.control.give_up_others(members)
        self._watch()  # before ranks wait for each other again
        self.control.connect_members()
        live = live_everywhere(self.control, self.heap.live)
        level_heaps(self, live)
        self.heap.restore(live)
        self.heap.clear_system_area()
        if self.proxy is not None:
            self.proxy.restart("tilescale_net.shrink")
        return Survivors(members, self.control.gather("tilescale_net.shrink", step))

    def _end_kernels(self) -> None:
        """End this rank's kernels, which wait for lost ranks, and complete their transfers."""
        try:
            self._finish_kernels()
            self.check()
        except TileScaleError:
            self.abort()
            self.memory.finish_kernels()

    def write_context(self, at: int, data: bytes) -> None:
        """Change the context of kernels; none runs."""
        with torch.inference_mode(False):
            new = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._context_bytes[at : at + len(data)].copy_(new)
        self.memory.synchronize()

    def _grow(self, size: int) -> None:
        grow_heap(self, size)

    def _settle(self) -> bool:
        return self.proxy is not None and self.proxy.settle()

    # -- collective calls -------------------------------------------------------------------------------------------

    @profiling.inside("tilescale_net.synchronize")
    def synchronize(self) -> None:
        """See `tilescale_net.synchronize`."""
        self.check()
        self.memory.synchronize()
        self.check()

    @profiling.inside("tilescale_net.barrier")
    def barrier(self) -> None:
        """See `tilescale_net.barrier`."""
        self._finish_kernels()
        self.check()
        self.control.agree("tilescale_net.barrier")
        if self._settle():
            self.control.agree("tilescale_net.barrier", "settled")

    def _finish_kernels(self) -> None:
        self.check()
        self.memory.finish_kernels()

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self, described_as: str | None = None) -> None:
        """Take the world down in good order: wait for the others, so that no heap vanishes under a put.

        Args:
            described_as: name of this call in other ranks' messages.

        Raises:
            The error that ended the job earlier, or an error of this call; the world is down then too.
        """
        try:
            self._finish_kernels()
            self.check()
            if self.proxy is not None:
                self.proxy.drain()  # endpoints close when nothing is in flight any more
            self.control.agree("tilescale_net.finalize", described_as=described_as)
            if self.control.excluded:
                self.control.wait_for_members()
                self._watchdog.keep_store()  # the remaining ranks keep using it
            if self.recorder is not None:
                self.recorder.finish()
                self.recorder = None
            self._watchdog.announce_end()
            # Leave only when all have announced their end: a rank that is gone must not look like one that failed.
            self.control.agree("tilescale_net.finalize", "end")
        except TileScaleError as err:
            failure = self.give_up(err)
            raise failure from None if failure is err else err
        self._release()

    def give_up(self, why: TileScaleError | str) -> TileScaleError:
        """Take the world down without the others, which learn why; returns the error that ended it."""
        failure = self.announce(TileScaleError(why) if isinstance(why, str) else why)
        self.wait_for_others()
        if self.recorder is not None:
            self.recorder.leave()
        self.abort()  # kernels that still run must not access freed memory
        self._release()
        return failure

    def wait_for_others(self) -> None:
        """After a failure: report it to the other ranks if they would not learn of it otherwise."""
        self._watchdog.wait_for_others()

    def end_in_child(self, refuse: Callable[[], None]) -> None:
        """In a child made by fork, which lacks this process's other threads: cut all ties to the ranks.

        Args:
            refuse: raises the error of every call.
        """
        self.closed, self.control.refuse = True, refuse
        profiling.recorder = None
        if self._has_memory:
            self.memory.part()

    def _release(self) -> None:
        self.closed = True
        if self._has_memory:
            self.memory.await_end_of_kernels()
        if self.proxy is not None:
            self.proxy.close()
            self.proxy = None
        self._watchdog.close()
        if self.recorder is not None:
            self.recorder.stop()
        self.page.close()
        if self._has_memory:
            self.memory.close()
        self.control.close()


# -- growth of the heap --------------------------------------------------------------------------------------------------------------

# The address space behind a heap is reserved at its creation (TSN_HEAP_LIMIT). So the base of every rank's heap stays,
# and kernels, whose peer addresses are base + offset, continue unchanged.

_GROW = "tilescale_net: a heap that is full"


def grow_heap(world: World, size: int) -> None:
    """Grow the heap of every member to `size` bytes. Collective; waits for the kernels of all of them. Raises
    HeapError: a rank has no memory left, on all ranks alike, and nothing has changed. TileScaleError: a kernel or a
    peer has failed."""
    memory, control = world.memory, world.control
    memory.finish_kernels()
    world.check()
    before = memory.size
    _all_or_none(world, before, lambda: memory.grow(size))
    handles = control.gather(_GROW, memory.grown_handle())
    _all_or_none(world, before, lambda: _map_grown(world, handles))
    _write_heap_size(world)
    if world.proxy is not None:
        try:
            _renew_proxy(world, world.proxy)
        except TileScaleError as err:
            world.fail(err)
    control.agree(_GROW, f"{memory.size} bytes")


def level_heaps(world: World, live: dict[int, int]) -> None:
    """After a loss in the middle of `grow`: make heaps of one size again, the earlier one if nothing `live` lies
    beyond. Collective; the proxies restart afterwards. `live`: blocks of the heap of any rank, offset -> bytes. Raises
    TileScaleError, OSError: this rank has no memory for blocks of others' heaps."""
    memory, control = world.memory, world.control
    sizes = control.gather(_GROW, memory.size)
    needed = max((offset + size for offset, size in live.items()), default=0)
    size = min(sizes) if needed <= min(sizes) else max(sizes)
    if size < max(sizes):
        memory.take_back(size)
    elif memory.size < size:
        memory.grow(size)
    if memory.limit > size or min(sizes) < max(sizes):
        _map_grown(world, control.gather(_GROW, memory.grown_handle()))
    _write_heap_size(world)


def _map_grown(world: World, handles: list[Any]) -> None:
    """Map memory that the node's other members have added."""
    for pe, handle in zip(world.control.members, handles):
        if pe != world.rank and world.topology.is_direct(pe):
            world.memory.map_grown(pe, handle)


def _write_heap_size(world: World) -> None:
    world.write_context(context.ContextHeader.heap_bytes.offset, world.memory.size.to_bytes(8, "little"))


def _all_or_none(world: World, before: int, step: Callable[[], None]) -> None:
    """Take a step on all ranks or on none."""
    error = ""
    try:
        step()
    except (TileScaleError, OSError, MemoryError) as err:
        error = str(err) or type(err).__name__
    said = world.control.gather(_GROW, error)
    failed = [(pe, text) for pe, text in zip(world.control.members, said) if text]
    if failed:
        world.memory.take_back(before)
        pe, text = failed[0]
        raise HeapError(
            f"rank {world.rank}: the symmetric heap of {before} bytes is full and cannot grow, because rank {pe} has no "
            f"memory for it: {text}; free tensors, or set TSN_HEAP_SIZE (or init(heap_bytes=…)) before the memory is taken"
        )


def _renew_proxy(world: World, proxy: RunningProxy) -> None:
    """Complete transfers, then restart the proxy with the whole heap."""
    proxy.drain()
    world.control.agree(_GROW, "drained")
    if proxy.settle():
        world.control.agree(_GROW, "settled")
    proxy.pause()
    world.control.agree(_GROW, "paused")
    world.heap.clear_system_area()
    world.memory.synchronize()
    proxy.restart(_GROW)


# -- survivors of a loss -----------------------------------------------------------------------------------------------------------

_PAUSE = 0.02  # seconds between checks of arrived ranks


@dataclass(frozen=True)
class Survivors:
    """The ranks that continue after a loss.

    Attributes:
        ranks: of the group, ascending.
        steps: each rank's argument of `shrink`, in this order.
    """

    ranks: list[int]
    steps: list[int]


def agree_on_survivors(control: Control, watchdog: Watchdog, seconds: float) -> list[int]:
    """The members that continue: they come here within `seconds`. Each calls this when its kernels have ended.

    No rank waits for ranks that are known to be lost. Excluded ranks that may be alive are killed: their launches would
    write into reused memory.

    Raises:
        PeerLost: the others have gone on without this rank, because it came too late; or the rank that keeps the store of
            the job is lost.
    """
    store, members, rank = control.store, control.members, control.rank
    key = _shrink_key(control)
    end = time.monotonic() + seconds
    store.ask(lambda s: s.set(f"{key}/here/{rank}", "1"))
    while True:
        lost = watchdog.lost_ranks() & set(members)

        def look(s: SignedStore, lost: set[int] = lost) -> tuple[set[int], set[int], str | None]:
            for r in lost:
                s.set(f"{key}/out/{r}", "1")
            here = {r for r in members if s.check([f"{key}/here/{r}"])}
            out = {r for r in members if s.check([f"{key}/out/{r}"])}
            return here, out, job_store.get_text(s, f"{key}/members")

        here, out, decided = store.ask(look)
        if decided is not None:
            break
        if here | out >= set(members) or time.monotonic() > end:
            # The first list counts, so all continue with the same ranks.
            word = json.dumps(sorted(here - out))
            store.ask(functools.partial(SignedStore.set_once, key=f"{key}/members", value=word))
        else:
            time.sleep(_PAUSE)
    kept = _parse_members(decided, members)
    if rank not in kept:
        raise PeerLost(f"rank {rank}: ranks {kept} have continued without this one, which they considered lost")
    if store.kept_by in members and store.kept_by not in kept:  # one that was left out before may still keep it
        raise PeerLost(f"rank {rank}: {store.keeper} did not arrive, and no rank can continue without it")
    _end_processes(watchdog, rank, set(members) - set(kept) - here)
    return kept


def _end_processes(watchdog: Watchdog, rank: int, ranks: set[int]) -> None:
    living = watchdog.end_processes(ranks)
    if living:
        settings.log.warning(
            "rank %d: ranks %s are given up, and their processes cannot be seen from here; what still runs of them may "
            "write into the memory of the others", rank, sorted(living),
        )  # fmt: skip


def stay_out(control: Control) -> None:
    """Report to the others that this rank stops, and that its kernels have ended."""

    def say(store: SignedStore) -> None:
        for word in ("out", "here"):
            store.set(f"{_shrink_key(control)}/{word}/{control.rank}", "1")

    try:
        control.store.ask(say)
    except PeerLost:  # no rank can be notified
        pass


def _shrink_key(control: Control) -> str:
    return f"shrink/{control.generation + 1}"


def _parse_members(said: str, members: list[int]) -> list[int]:
    nobody: list[int] = []
    kept = job_store.read(said, lambda found: sorted({int(r) for r in found} & set(members)), nobody)
    if not kept:
        raise PeerLost(f"the list of remaining ranks in the job's store cannot be read: {said[:100]!r}")
    return kept


def live_everywhere(control: Control, live: dict[int, int]) -> dict[int, int]:
    """The blocks of the heap (offset -> bytes) that are live on some member. A loss in the middle of a collective call
    leaves members that have allocated, or freed, and others that have not. No member may reuse a block that another may
    still use."""
    union: dict[int, int] = {}
    for text in control.gather("tilescale_net.shrink", json.dumps(sorted(live.items()))):
        blocks = job_store.read(text, lambda found: {int(offset): int(size) for offset, size in found}, None)
        if blocks is None:
            raise PeerLost("the list of another rank's allocations cannot be read")
        union |= blocks
    return union
