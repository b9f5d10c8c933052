"""The ranks of a group as one of them sees it: created by init, taken down by finalize; worlds.py finds it.

docs/states.md lists its states and what each call does in them.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from tilescale_net.errors import FabricError, PeerLost, TileScaleError, WaitTimeout
from tilescale_net.runtime import (
    abort_page,
    call_log,
    context,
    device_errors,
    groups,
    growth,
    memory,
    processes,
    records,
    settings,
    start_up,
    survivors,
    topology,
)
from tilescale_net.runtime.control import Control
from tilescale_net.runtime.heap import Heap
from tilescale_net.runtime.memory import Memory
from tilescale_net.runtime.watchdog import Watchdog
from tilescale_net.trace import host_calls, recorder, state
from tilescale_net.trace.reporter import Reporter


class World:
    """Rank, heap, peers and context of this process in one group.

    Attributes:
        group: what it was made of, a ProcessGroup or a StoreGroup; None: all ranks of the job.
        job_ranks: the rank in the job of each PE.
        rank, size: index of this PE and number of PEs in team "world".
        topology: placement of the PEs on nodes.
        device_kind: "cuda" or "simulator".
        device: torch device of symmetric tensors.
        heap: the symmetric heap.
        memory: what the heap lies in, of the kind of the device.
        records: in which kernels tell this rank's host what they refuse.
        context_tensor: int64 tensor over the fixed part of the context, the argument that kernels take.
        proxy: the proxy that serves PEs of other nodes, or None when every PE is direct.
        reporter: queries all ranks for what they do, for the report of a hang.
        recorder: writes this rank's part of the trace, or None when nothing is traced here.
        page: through which this rank gives up.
        failure: what ended the world for this rank, or None; every further call raises it.
    """

    def __init__(
        self,
        heap_bytes: int | str | None,
        group: dist.ProcessGroup | groups.StoreGroup | None = None,
        device: torch.device | None = None,
    ):
        """See `tilescale_net.init`; `device` is that of the other worlds of this process."""
        wrong, self.timeout, silence = start_up.check_settings()
        self.failure: TileScaleError | None = None
        self.proxy = None
        self._watchdog: Watchdog | None = None
        self.recorder: recorder.Recorder | None = None
        self.memory: Memory | None = None
        self._closed = False
        self.page = abort_page.AbortPage()
        self.control = Control(self.timeout + 5.0, silence, group)
        self.control.on_loss = self._lost_in_a_call
        self.group, self.job_ranks = group, self.control.job_ranks
        self.rank, self.size = self.control.rank, self.control.size
        self.calls = call_log.CallLog(self.control)
        self.control.on_mismatch = self.calls.on_mismatch
        self.reporter = Reporter(self.control, lambda: state.of_rank(self))
        try:
            if wrong is not None:
                raise wrong  # now that it can be reported to the others
            self._set_up(heap_bytes, silence, device)
        except BaseException as err:
            # The others wait for this rank; with the store of rank 0, its report would be gone too.
            self.announce(err if isinstance(err, TileScaleError) else TileScaleError(f"{type(err).__name__}: {err}"))
            self.wait_for_others()
            self._release()
            raise

    def _set_up(self, heap_bytes: int | str | None, silence: float, device: torch.device | None) -> None:
        kind = settings.device_kind() if device is None else "cuda" if device.type == "cuda" else "simulator"
        size = settings.heap_bytes(heap_bytes, on_gpu=kind == "cuda")
        limit = settings.heap_limit(size, on_gpu=kind == "cuda")
        hosts = self._meet_the_others(f"heap_bytes={size}, TSN_HEAP_LIMIT={limit}, device={kind}", silence)
        self.memory = memory.create(kind, size, limit, device, self.group, self.topology)
        self.device_kind, self.device = self.memory.device_kind, self.memory.device
        self.recorder = recorder.start(self, hosts)
        self.page.address = self.memory.pinned(abort_page.BYTES)
        self.records = records.Records(self.memory)
        self.heap = Heap(self.memory, self.control.agree, self.rank, self.check, self._settle, self._grow)
        limits, handles = zip(*self.control.gather("tilescale_net.init", [self.memory.limit, self.memory.handle()]))
        self.memory.limit = min(limits)  # some ranks may not have got so many addresses
        self.peer_base = [self._base_of(pe, handles[pe]) for pe in range(self.size)]
        self.memory.on_mapped(self.control, self.rank, hosts, self.peer_base)
        queues = n_queues = 0
        if self.topology.nodes > 1:
            from tilescale_net.runtime.proxy import start

            self.proxy, queues, n_queues = start(self)
            self.control.on_parted = self.proxy.excuse
            if self.rank == 0 and self.memory.loads_kernels_late():
                settings.log.warning(start_up.LOADED_LATE)
        self._make_context(queues, n_queues)
        self.memory.synchronize()
        # Peers may touch this heap from here on: its system area is zero and every rank has mapped every other.
        self.control.agree("tilescale_net.init", "ready")

    def _meet_the_others(self, wanted: str, silence: float) -> list[str]:
        """Learn where the ranks are, watch over them from now on, and agree on what is wanted; the host of every rank."""
        virtual = settings.VIRTUAL_NODES.get()
        place = topology.virtual_node(*groups.own_number(self.group)) if self.group is not None else 0
        facts = self.control.gather("tilescale_net.init", [topology.host_identity(), processes.own(), place])
        hosts, known, places = map(list, zip(*facts))
        self._watch = lambda: Watchdog(
            self.control, hosts, known, silence, self._poll_local, self._on_loss, self.reporter.answer
        )
        self._watchdog = self._watch()
        self.control.reason_of = self._watchdog.reason
        traced = f", TSN_TRACE={settings.TRACE.get()}" if settings.TRACE.get() else ""
        self.control.agree("tilescale_net.init", f"{wanted}, VIRTUAL_NODES={virtual}, {start_up.version()}{traced}")
        if self.group is None:
            self.topology = topology.discover(self.rank, self.size, hosts)
        else:
            self.topology = topology.of_group(self.rank, self.size, hosts, places)
        return hosts

    def _base_of(self, pe: int, handle) -> int:
        """Where the heap of a PE is in this process; 0 for one that is reached through the fabric."""
        if pe == self.rank:
            return self.memory.base
        return self.memory.map_peer(pe, handle) if self.topology.is_direct(pe) else 0

    def _make_context(self, queues: int, n_queues: int) -> None:
        """Make what kernels take as their context. `queues`: device address of the proxy's queue views."""
        header = context.ContextHeader(
            my_pe=self.rank,
            n_pes=self.size,
            node_pe=self.topology.node_pe,
            n_node_pes=self.topology.node_size,
            n_queues=n_queues,
            flags=self.proxy.context_flags if self.proxy is not None else 0,
            heap_base=self.memory.base,
            heap_bytes=self.memory.size,
            abort_word=self.page.address,
            error=self.page.record_address,
            timeout_ns=int(self.timeout * 1e9),
            queues=queues,
            trace=self.recorder.gpu_calls.address if self.recorder is not None and self.recorder.gpu_calls else 0,
        )
        self._context_bytes = self.memory.upload(context.pack(header, self.peer_base))
        self.context_tensor = self._context_bytes.view(torch.int64)[: context.HEADER_WORDS]

    def __copy__(self):
        return self

    def __deepcopy__(self, memo: dict):
        return self

    # -- failures ---------------------------------------------------------------------------------------------------

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
        return device_errors.describe(record, self.rank, self.size, self.memory.base, self.timeout, self.heap.describe)

    def _poll_local(self) -> TileScaleError | None:
        """What this rank's kernels or proxy have met, for the watchdog."""
        failed = self.failure or (self.proxy.failure() if self.proxy is not None else None)
        found = failed or self._device_error() or self.calls.difference()
        self.reporter.ask_about(found)  # at once: what the others do meanwhile may end
        return found

    def _on_loss(self, reason: str, error: TileScaleError | None) -> None:
        if self.failure is None:
            self.failure = error or call_log.error_of_loss(f"rank {self.rank}: {reason}; {self._what_to_do}")
        self.abort()
        self.reporter.print_failure(self.failure)

    def _explained(self, error: TileScaleError) -> TileScaleError:
        """`error`, or the loss of a peer where that is why: a peer that dies makes waits time out and links break."""
        reason = self._watchdog.explanation_of(error) if self._watchdog is not None else None
        return call_log.error_of_loss(f"rank {self.rank}: {reason}; {self._what_to_do} ({error})") if reason else error

    @property
    def _what_to_do(self) -> str:
        if self.group is None:
            return "restart the job"
        return f"restart the job (these are ranks of the group of the job's ranks {groups.named(self.job_ranks)})"

    @property
    def closed(self) -> bool:
        """Whether finalize() has ended it."""
        return self._closed

    def announce(self, error: TileScaleError) -> None:
        """Record what ends this rank and report it to the others, unless a reason is known already."""
        if self.failure is None:
            self.failure = error
        self.control.announce_failure(str(self.failure))

    def wait_for_others(self) -> None:
        """After a failure: report it to the other ranks, where they would not learn of it without this process."""
        if self._watchdog is not None:
            self._watchdog.wait_for_others()

    def fail(self, error: TileScaleError) -> None:
        """Record an error found by the host (the simulator, the proxy), report it to the others, and raise it."""
        self.reporter.ask_about(error)
        if self.failure is None:
            self.failure = self._explained(error)
        self.control.announce_failure(str(self.failure))
        self.reporter.print_failure(self.failure)
        self.abort()
        raise self.failure

    def check(self) -> None:
        """Raise what a kernel, the proxy or a lost peer left behind: WaitTimeout, PeerLost, InvalidDescriptor, …"""
        if not (self._closed or self.failure or self.page.touched or self._watchdog.reason()):
            return  # as nearly always, and every call comes here
        if self._closed:
            self.control.refuse()
            raise TileScaleError(f"rank {self.rank}: this world has ended with finalize(); use that of a new init()")
        if self.failure is None and (error := self._device_error()) is not None:
            self.reporter.ask_about(error)
            self.announce(self._explained(error))
            self.reporter.print_failure(self.failure)
        self._notice_loss()
        if self.failure is None and self.page.aborted:
            # Kernels return early from here on, with incomplete data: the rank that set the word gives the reason.
            self._learn_why_aborted()
        if self.failure is not None:
            raise self.failure

    def _lost_in_a_call(self, error: TileScaleError) -> TileScaleError:
        """A collective call of any object lost a rank: the world ends, at once and with the first reason."""
        if self._watchdog is not None:  # ranks have met
            self._notice_loss()  # it may be this rank's own error that the watchdog has met
        self.failure = self.failure or error
        return self.failure

    def _notice_loss(self) -> None:
        if self.failure is None and (loss := self._watchdog.loss()) is not None:
            self._on_loss(*loss)

    def _learn_why_aborted(self, seconds: float = 2.0) -> None:
        end = time.monotonic() + seconds
        while self.failure is None and time.monotonic() < end:
            found = self._poll_local()
            if found is not None and self.failure is None:
                self.failure = self._explained(found)
            self._notice_loss()
            if self.failure is None:
                time.sleep(0.01)
        if self.failure is None:
            self.failure = TileScaleError(f"rank {self.rank}: the job was aborted; look at the other ranks' output")

    def shrink(self, step: int = 0, seconds: float | None = None) -> survivors.Survivors:
        """See `tilescale_net.shrink`."""
        self.control.refuse()
        if self.control.left or self._closed:
            raise TileScaleError(f"rank {self.rank}: shrink: this rank was left out of the job, or has ended its world")
        self._end_kernels()
        if self.failure is not None and not isinstance(self.failure, PeerLost | WaitTimeout | FabricError):
            survivors.stay_out(self.control)
            raise self.failure  # this rank is what is wrong
        try:
            return self._go_on(int(step), self.timeout if seconds is None else seconds)
        except TileScaleError as err:
            if not isinstance(err, PeerLost):
                self.control.announce_failure(str(err))
            self.failure = self.failure or err
            raise

    def _go_on(self, step: int, seconds: float) -> survivors.Survivors:
        if self.proxy is not None:
            self.proxy.end("it goes on without ranks that are lost")  # before the others count this rank in
        kept = survivors.call_roll(self.control, self._watchdog, seconds)
        self._watchdog.close()
        self.calls.forget()
        self._forget_failure()
        self.control.give_up_others(kept)
        self._watchdog = self._watch()  # before ranks wait for each other again
        self.control.reason_of = self._watchdog.reason
        self.control.connect_members()
        live = survivors.live_everywhere(self.control, self.heap.live)
        growth.level(self, live)
        self.heap.restore(live)
        self.heap.clear_system_area()
        if self.proxy is not None:
            self.proxy.restart("tilescale_net.shrink")
        return survivors.Survivors(kept, self.control.gather("tilescale_net.shrink", step))

    def _end_kernels(self) -> None:
        """Let this rank's kernels end, which wait for ranks that are lost, and what they have sent arrive."""
        try:
            self.check()
            self.memory.finish_kernels()
            self.check()
        except TileScaleError:
            self.abort()
            self.memory.finish_kernels()

    def _forget_failure(self) -> None:
        """As before the first failure; no kernel runs."""
        self.page.clear()
        self.write_context(context.ContextHeader.aborted.offset, bytes(8))
        self.failure = None
        self.reporter.forget_failure(self.control.era + 1)

    def write_context(self, at: int, data: bytes) -> None:
        """Change what kernels take as their context; none runs."""
        with torch.inference_mode(False):
            new = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._context_bytes[at : at + len(data)].copy_(new)
        self.memory.synchronize()

    def _grow(self, size: int) -> None:
        growth.grow(self, size)

    def _settle(self) -> bool:
        return self.proxy is not None and self.proxy.settle()

    # -- collective calls -------------------------------------------------------------------------------------------

    @host_calls.inside("tilescale_net.synchronize")
    def synchronize(self) -> None:
        """See `tilescale_net.synchronize`."""
        self.check()
        self.memory.synchronize()
        self.check()

    @host_calls.inside("tilescale_net.barrier")
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

    def close(self, spoken: str | None = None) -> None:
        """Take the world down in good order: wait for the others, so that no heap vanishes under a put.

        Args:
            spoken: what messages of other ranks say of this call.

        Raises:
            What ended the job before, or what makes this end fail; the world is down then too.
        """
        try:
            self._finish_kernels()
            self.check()
            if self.proxy is not None:
                self.proxy.drain()  # endpoints close when nothing is on its way any more
            self.control.agree("tilescale_net.finalize", spoken=spoken)
            if self.control.left:
                self._watchdog.keep_store()  # the ranks that stay go on with it
            recorder.finish(self)
            self._watchdog.announce_end()
            # Leave only when all have announced their end: a rank that is gone must not look like one that failed.
            self.control.agree("tilescale_net.finalize", "end")
        except TileScaleError as err:
            self.give_up(str(err), err)
            raise self.failure from None if self.failure is err else err
        self._release()

    def give_up(self, why: str, error: TileScaleError | None = None) -> None:
        """Take the world down without the others; they learn why."""
        self.announce(error or TileScaleError(why))
        self.wait_for_others()
        recorder.leave(self)
        self.abort()  # kernels that still run must not use what is freed now
        self._release()

    def end_in_child(self, refuse: Callable[[], None]) -> None:
        """In a child made by fork, which has none of this process's other threads: nothing here reaches the ranks any more.

        Args:
            refuse: raises what every call is to say.
        """
        self._closed, self.control.refuse = True, refuse
        recorder.forget()
        if self.memory is not None:
            self.memory.part()

    def _release(self) -> None:
        self._closed = True
        if self.memory is not None:
            self.memory.await_end_of_kernels()
        if self.proxy is not None:
            self.proxy.close()
            self.proxy = None
        if self._watchdog is not None:
            self._watchdog.close()
        recorder.stop(self)
        self.page.close()
        if self.memory is not None:
            self.memory.close()
        self.control.close(unwatched_failure=self.failure is not None and self._watchdog is None)
