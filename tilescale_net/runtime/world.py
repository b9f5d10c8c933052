"""The job as one rank sees it: created by init, found by kernels through `current`, taken down by finalize."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import time
import warnings

import torch

from tilescale_net import fabric
from tilescale_net.errors import PeerLost, TileScaleError
from tilescale_net.runtime import context, device_errors, settings, topology
from tilescale_net.runtime.control import Control
from tilescale_net.runtime.heap import Heap
from tilescale_net.runtime.watchdog import Watchdog

_current: World | None = None
_exit_hooks = False


class World:
    """Rank, heap, peers and context of this process.

    Attributes:
        rank, size: index of this PE and number of PEs in team "world".
        topology: placement of the PEs on nodes.
        device_kind: "cuda" or "simulator".
        device: torch device of symmetric tensors.
        heap: the symmetric heap.
        context_tensor: int64 tensor over the fixed part of the context, the argument that kernels take.
        proxy: the proxy that serves PEs of other nodes, or None when every PE is direct.
    """

    def __init__(self, heap_bytes: int | str | None):
        settings.check()
        fabric.check_settings()
        settings.load_kernels_early()
        self.device_kind = settings.device_kind()
        on_gpu = self.device_kind == "cuda"
        size = settings.heap_bytes(heap_bytes, on_gpu)
        self.timeout = settings.TIMEOUT.get()
        self.control = Control(self.timeout + 5.0)
        self.rank, self.size = self.control.rank, self.control.size
        self._failure: TileScaleError | None = None
        self._watchdog: Watchdog | None = None
        self.proxy = None
        self._memory = None
        try:
            self._set_up(size, on_gpu)
        except BaseException:
            self._release()
            raise

    def _set_up(self, size: int, on_gpu: bool) -> None:
        virtual = settings.VIRTUAL_NODES.get()
        self.control.agree(
            "tilescale_net.init", f"heap_bytes={size}, device={self.device_kind}, VIRTUAL_NODES={virtual}"
        )
        facts = self.control.gather("tilescale_net.init", (topology.host_identity(), os.getpid()))
        hosts = [host for host, _ in facts]
        self.topology = topology.discover(self.rank, self.size, hosts)
        if on_gpu:
            from tilescale_net.runtime.cuda_memory import CudaMemory

            self._memory = CudaMemory(size, int(os.environ.get("LOCAL_RANK", self.topology.local_rank)))
        else:
            from tilescale_net.runtime.shared_memory import SharedMemory

            self._memory = SharedMemory(size)
        self.device = self._memory.device

        page = self._memory.pinned(4096)
        self._abort_address, self._error_address = page, page + 64
        pids = [pid if host == hosts[self.rank] else None for host, pid in facts]
        self._watchdog = Watchdog(self.control, pids, settings.HEARTBEAT_TIMEOUT.get(), self._poll_local, self._on_loss)
        self.control.reason_of = self._watchdog.reason

        on_allocate, on_free = self._bounds_hooks()
        self.heap = Heap(self._memory, self.control.agree, self.rank, not on_gpu, on_allocate, on_free)
        handles = self.control.gather("tilescale_net.init", self._memory.handle())
        self.peer_base = [
            (self._memory.base if pe == self.rank else self._memory.map_peer(pe, handles[pe]))
            if self.topology.is_direct(pe)
            else 0
            for pe in range(self.size)
        ]
        queues, n_queues = self._start_proxy()
        if on_gpu and self.rank == 0 and self.proxy is not None and self._memory.loads_kernels_late():
            warnings.warn(
                "CUDA loads kernels at their first launch here; where data to and from other nodes are staged in host "
                "memory, that waits for a running kernel, and the kernel for its data until TSN_TIMEOUT. Set "
                "CUDA_MODULE_LOADING=EAGER before CUDA starts",
                stacklevel=5,
            )
        header = context.ContextHeader(
            my_pe=self.rank,
            n_pes=self.size,
            node_pe=self.topology.node_pe,
            n_node_pes=self.topology.node_size,
            n_queues=n_queues,
            flags=self.proxy.context_flags if self.proxy is not None else 0,
            heap_base=self._memory.base,
            heap_bytes=size,
            abort_word=self._abort_address,
            error=self._error_address,
            timeout_ns=int(self.timeout * 1e9),
            queues=queues,
        )
        self._context_bytes = self._memory.upload(context.pack(header, self.peer_base))
        words = self._context_bytes.view(torch.int64)
        self.context_tensor = words[: context.HEADER_WORDS]
        self._memory.synchronize()
        # Peers may touch this heap from here on: its system area is zero and every rank has mapped every other.
        self.control.agree("tilescale_net.init", "ready")

    # -- parts that depend on the kind of machine -------------------------------------------------------------------

    def _bounds_hooks(self):
        if self.device_kind == "cuda":
            return None, None
        from tilescale_net import _simulator

        _simulator.register_heap(self._memory.base, self._memory.size)
        _simulator.register_allocation(self._memory.base, context.SYSTEM_BYTES, "system area")
        return _simulator.register_allocation, _simulator.unregister_allocation

    def _start_proxy(self) -> tuple[int, int]:
        if self.topology.nodes == 1:
            return 0, 0
        from tilescale_net.runtime.proxy import start

        self.proxy, queues, n_queues = start(self)
        return queues, n_queues

    # -- failures ---------------------------------------------------------------------------------------------------

    @property
    def abort_address(self) -> int:
        return self._abort_address

    @property
    def error_address(self) -> int:
        return self._error_address

    def _device_error(self) -> TileScaleError | None:
        record = device_errors.read(self._error_address)
        base = self._memory.base
        return device_errors.describe(
            record, self.rank, self.size, base, self.timeout, lambda at: self.heap.describe(at)
        )

    def _poll_local(self) -> str | None:
        if self.proxy is not None:
            failed = self.proxy.failure()
            if failed is not None:
                self._failure = self._failure or failed
                return str(failed)
        error = self._device_error()
        if error is not None:
            self._failure = self._failure or error
            return str(error)
        return str(self._failure) if self._failure else None

    def _on_loss(self, reason: str) -> None:
        if self._failure is None:
            self._failure = PeerLost(f"rank {self.rank}: {reason}; restart the job")
        self.abort()

    def abort(self) -> None:
        """End every device-side wait of this rank."""
        ctypes.c_uint32.from_address(self._abort_address).value = 1

    def fail(self, error: TileScaleError) -> None:
        """Record an error found by the host (the simulator, the proxy), tell the others, and raise it."""
        self._failure = self._failure or error
        self._watchdog.announce_failure(str(error))
        self.abort()
        raise error

    def check(self) -> None:
        """Raise what a kernel, the proxy or a lost peer left behind: WaitTimeout, PeerLost, InvalidDescriptor, …"""
        error = self._device_error()
        # A peer that dies makes waits time out: the death is the better explanation when both are known.
        if self._failure is None and error is not None:
            self._failure = error
            self._watchdog.announce_failure(str(error))
        self._notice_loss()
        if self._failure is None and ctypes.c_uint32.from_address(self._abort_address).value:
            # Kernels return early from here on, with whatever data they have: whoever set the word says why.
            self._learn_why_aborted()
        if self._failure is not None:
            raise self._failure

    def _notice_loss(self) -> None:
        if self._failure is None and self._watchdog is not None and self._watchdog.reason():
            self._on_loss(self._watchdog.reason())

    def _learn_why_aborted(self, seconds: float = 2.0) -> None:
        end = time.monotonic() + seconds
        while self._failure is None and time.monotonic() < end:
            self._poll_local()
            self._notice_loss()
            if self._failure is None:
                time.sleep(0.01)
        if self._failure is None:
            self._failure = TileScaleError(f"rank {self.rank}: the job was aborted; look at the other ranks' output")

    # -- collective calls -------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """See `tilescale_net.barrier`."""
        self._memory.synchronize()
        if self.device_kind == "simulator":
            from tilescale_net import _simulator

            _simulator.flush_pending()
        self.check()
        try:
            self.control.agree("tilescale_net.barrier")
        except PeerLost as err:
            self._failure = self._failure or err
            raise self._failure from err

    def close(self, orderly: bool) -> None:
        """Take the world down. In good order it waits for the others, so that nobody's heap vanishes under a put."""
        if orderly and self._failure is None:
            try:
                self._memory.synchronize()
                if self.device_kind == "simulator":
                    from tilescale_net import _simulator

                    _simulator.flush_pending()
                if self.proxy is not None:
                    self.proxy.drain()  # endpoints close when nobody has anything on its way any more
                self.control.agree("tilescale_net.finalize")
                self._watchdog.announce_end()
                # Leave only when all have said goodbye: a rank that is gone must not look like one that failed.
                self.control.agree("tilescale_net.finalize", "end")
            except TileScaleError as err:
                self._failure = err
        elif self._watchdog is not None and not orderly:
            self._watchdog.announce_failure("it ended before finalize")
        failure = self._failure
        if self._watchdog is not None and (failure is not None or not orderly):
            self._watchdog.wait_for_others()
        self._release()
        if failure is not None and orderly:
            raise failure

    def _release(self) -> None:
        if self.proxy is not None:
            self.proxy.close()
            self.proxy = None
        if self._watchdog is not None:
            self._watchdog.close()
        if self._memory is not None:
            if self.device_kind == "simulator":
                from tilescale_net import _simulator

                _simulator.unregister_all()
            self._memory.close()
        self.control.close()


def current() -> World:
    """The world of this process. Raises TileScaleError when init has not been called."""
    if _current is None:
        raise TileScaleError("tilescale_net is not initialised; call tilescale_net.init() first, on every rank")
    return _current


def init(heap_bytes: int | str | None = None) -> World:
    """See `tilescale_net.init`."""
    global _current, _exit_hooks
    if _current is not None:
        raise TileScaleError("tilescale_net is initialised already; call finalize() before another init()")
    _current = World(heap_bytes)
    if not _exit_hooks:
        _exit_hooks = True
        atexit.register(_at_exit)
        previous = sys.excepthook

        def hook(kind, value, trace):
            if _current is not None and _current._watchdog is not None:
                _current._watchdog.announce_failure(f"{kind.__name__}: {value}")
                _current._failure = _current._failure or TileScaleError(str(value))
            previous(kind, value, trace)

        sys.excepthook = hook
    return _current


def finalize() -> None:
    """See `tilescale_net.finalize`."""
    global _current
    world, _current = _current, None
    if world is not None:
        world.close(orderly=True)


def _at_exit() -> None:
    global _current
    world, _current = _current, None
    if world is None:
        return
    failed_before = world._failure is not None
    try:
        world.close(orderly=not failed_before)
    except TileScaleError as err:
        print(f"tilescale_net: {type(err).__name__}: {err}", file=sys.stderr, flush=True)
        # atexit cannot change the exit status otherwise, and a failed job must not look like a good one.
        os._exit(1)
