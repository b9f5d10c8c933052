"""libfabric's location and providers, and the life cycle of the proxy that serves PEs of other nodes."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tilescale_net import errors
from tilescale_net.errors import ConfigurationError, TileScaleError, WaitTimeout
from tilescale_net.runtime import settings

# -- fabric --------------------------------------------------------------------------------------------------------------


def bundled_library() -> str:
    """Path of the libfabric inside the `mpich` wheel, or '' without that wheel: the last place that is searched."""
    try:
        files = importlib.metadata.files("mpich") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    for file in files:
        if file.name == "libfabric.so.1":
            path = os.path.realpath(str(file.locate()))
            return path if os.path.exists(path) else ""
    return ""


def transport_options(**fields: Any) -> Any:
    """Options of a native transport.

    Defaults come from TSN_PROVIDER, TSN_FABRIC_INTERFACE and TSN_CHAOS.

    Args:
        fields: members of `TransportOptions` in csrc/fabric/transport.h (rank, provider, interface, rails, depth,
            chaos, …), in its units.
    Raises:
        TypeError: a field is unknown or of a wrong type.
    """
    from tilescale_net import _native

    fields.setdefault("library_fallback", bundled_library())
    for name, row in (
        ("provider", settings.PROVIDER),
        ("interface", settings.FABRIC_INTERFACE),
        ("chaos", settings.CHAOS),
    ):
        fields[name] = fields.get(name) or row.get()
    return _native.TransportOptions(**fields)


def library() -> dict[str, Any]:
    """The libfabric in use: path, version, api, headers. Raises FabricError without one."""
    from tilescale_net import _native

    return dict(_native.fabric_library(fallback=bundled_library()))


def offers() -> list[dict[str, Any]]:
    """libfabric's domains for one-sided traffic: dicts with provider, domain, address, loopback, hardware,
    immediates, device_memory. Raises FabricError when there is no libfabric."""
    from tilescale_net import _native

    return list(_native.fabric_offers(fallback=bundled_library()))


# -- proxy ---------------------------------------------------------------------------------------------------------------

# Life cycle of the proxy that serves PEs of other nodes: options, key exchange, failures.


# A software network is bound by the copies of one processor. Threads that share the traffic to a PE, each with its own
# sockets; processors of the host for each thread; and staging memory of all threads, per direction.
SOFTWARE_THREADS, PROCESSORS_OF_THREAD, STAGING_BYTES = 4, 3, 32 << 20
# Smallest chunk that threads share: each share costs a copy from and to the GPU, too much for a row of an expert layer.
SHARED_BYTES, SHARED_BYTES_OF_SOFTWARE = 64 << 10, 8 << 10


def threads_of_software(provider: str, heap_kind: str, processors: int, ranks: int) -> int:
    """Default number of a rank's proxy threads.

    Args:
        provider: of the fabric. heap_kind: "cuda" or "host". processors: that the ranks of this host may use. ranks: of
            this host.
    """
    if heap_kind != "cuda" or provider.partition(";")[0] not in ("tcp", "sockets"):
        return 1
    return max(1, min(SOFTWARE_THREADS, processors // (PROCESSORS_OF_THREAD * ranks)))


class RunningProxy:
    """The native proxy with this package's options and errors. `connect_peers` must come next; after `end` or `pause` comes `restart`."""

    def __init__(self, world: Any):
        from tilescale_net import _native

        self._make, self._world = _native.Proxy, world
        # The kernels' context stays valid when the proxy restarts.
        self.n_queues = settings.PROXY_QUEUES.get()
        self.threads, self.peer_threads = settings.PROXY_THREADS.get() or 1, settings.PROXY_PEER_THREADS.get() or 1
        self._staging_bytes, self._shared_bytes = STAGING_BYTES, SHARED_BYTES
        self._proxy = self._create()
        self._share_work()
        self._views: torch.Tensor = world.memory.upload(self._proxy.queue_views())
        self.views_address = self._views.data_ptr()

    def _share_work(self) -> None:
        """Set the number of threads that suits the network, the same on all ranks, unless the user has set it.
        Collective."""
        world = self._world
        configured = settings.PROXY_THREADS.get() or settings.PROXY_PEER_THREADS.get()
        wanted = 1
        if not configured and self.n_queues == 1:
            ranks, processors = world.control.hosts.count(world.control.hosts[world.rank]), len(os.sched_getaffinity(0))
            wanted = threads_of_software(self.properties["provider"], world.memory.kind, processors, ranks)
        agreed = min(world.control.gather("tilescale_net.init (proxy threads)", wanted))
        if agreed > 1:
            self._proxy.close()
            self.threads = self.peer_threads = agreed
            self._staging_bytes, self._shared_bytes = STAGING_BYTES // agreed, SHARED_BYTES_OF_SOFTWARE
            self._proxy = self._create()

    def _create(self) -> Any:
        world, memory = self._world, self._world.memory
        transport = transport_options(
            multi_host=not world.topology.single_host,
            address=world.control.address,
            gpu_pci=_pci_address(memory),
            rails=settings.RAILS.get(),
        )
        proxy = self._make(
            transport,
            rank=world.rank,
            n_pes=world.size,
            peers=[pe for pe in world.control.members if not world.topology.is_direct(pe)],
            heap_base=memory.base,
            heap_bytes=memory.size,
            heap_kind=memory.kind,
            device=max(memory.ordinal, 0),
            defers_adds=True,  # the host cannot add to memory of a GPU; the simulator does as GPUs do
            abort_word=world.page.address,
            timeout=world.timeout,
            queues=self.n_queues,
            threads=self.threads,
            peer_threads=self.peer_threads,
            staging_bytes=self._staging_bytes,
            shared_bytes=self._shared_bytes,
            cpus=_cpus(memory),
            capacity=settings.PROXY_CAPACITY.get(),
            chunk_bytes=settings.PROXY_CHUNK.get(),
            force_staging=settings.PROXY_STAGING.get(),
            trace=world.recorder.proxy_files(self.threads) if world.recorder is not None else [],
            print_stats=settings.PROXY_STATS.get(),
            trust_last_chunk=settings.TEST_ORDERING.get() == "last_chunk",
        )
        self.context_flags: int = proxy.context_flags  # the flags of `Context::flags` that kernels need
        # Provider, libfabric version, rails and limits of the transport.
        self.properties: dict[str, Any] = dict(proxy.properties())
        return proxy

    def connect_peers(self, call: str) -> None:
        """Connect to the proxies of the other members, and start. Collective."""
        control = self._world.control
        try:
            addresses = [b""] * self._world.size
            for pe, address in zip(control.members, control.gather(f"{call} (proxy)", self._proxy.address())):
                addresses[pe] = address
            self._proxy.connect(addresses)
            self._proxy.start()
            # No rank may send before all are connected: some networks drop writes from unknown senders.
            control.agree(f"{call} (proxy)", "connected")
        except BaseException:
            self.close()
            raise

    def exclude(self, peers: list[int]) -> None:
        """Exclude PEs, which may end at any time: no rank waits for them."""
        if self._proxy is not None:
            self._proxy.exclude(peers)

    def end(self, reason: str) -> None:
        """Stop serving peers and touching this rank's heap; operations in flight are lost. The peers learn why."""
        proxy, self._proxy = self._proxy, None
        if proxy is not None:
            proxy.explain(reason)
            self._world.page.abort()
            proxy.close()

    def pause(self) -> None:
        """Stop serving peers, when all ranks have drained and met; `restart` must come next."""
        proxy, self._proxy = self._proxy, None
        proxy.close()

    def restart(self, call: str) -> None:
        """Restart with the remaining peers and empty queues. Collective; no kernel runs on any rank."""
        self._proxy = self._create()
        with torch.inference_mode(False):
            self._views.copy_(torch.frombuffer(bytearray(self._proxy.queue_views()), dtype=torch.uint8))
        self._world.memory.synchronize()
        self.connect_peers(call)

    def explain(self, reason: str) -> None:
        """Send the peers the reason why this rank is about to set its abort word. The first one counts."""
        proxy = self._proxy  # another thread may end it
        if proxy is not None:
            proxy.explain(reason)

    def failure(self) -> TileScaleError | None:
        """The error that made the proxy give up, or None."""
        proxy = self._proxy
        found = proxy.error() if proxy is not None else None
        if found is None:
            return None
        return getattr(errors, found["kind"], errors.FabricError)(found["text"])

    def awaited(self) -> list[int]:
        """The PEs that flushes wait for."""
        proxy = self._proxy
        return list(proxy.awaited()) if proxy is not None else []

    def stats(self) -> dict[str, Any]:
        proxy = self._proxy
        return dict(proxy.stats()) if proxy is not None else {}

    @property
    def staged(self) -> bool:
        """Whether the network does not reach the heap, so data go through pinned host memory."""
        return bool(self.properties["staged"])

    @property
    def holds_up_launches(self) -> bool:
        """Whether a launch on the current stream returns when all kernels of the device have ended; see
        `CudaKernel._supervised`.
        """
        return self.staged and torch.cuda.current_stream() == torch.cuda.default_stream()

    def drain(self) -> None:
        """Wait until all data of kernels have arrived; peers are still served.

        Raises:
            TileScaleError: the proxy has failed, or has not ended within the job's timeout.
        """
        self._finish(self._proxy.drain, "not all peers have confirmed the data that kernels have sent")

    def settle(self) -> bool:
        """Apply adds to signal words that were deferred to the next waiting kernel. Call it between two agreements,
        while no kernel runs on any rank. Returns whether this job defers adds: then every rank must have settled before
        any continues.
        """
        if not self.context_flags:
            return False
        self._finish(self._proxy.apply_adds, "adds to signal words have not been applied")
        return True

    def _finish(self, call: Callable[[float], bool], what: str) -> None:
        """Make a call that takes a time limit. The proxy's own, shorter limit names the PE that it waits for."""
        timeout = self._world.timeout
        if call(timeout + 2.0):
            return
        if (failed := self.failure()) is not None:
            raise failed
        if not self._world.page.aborted:
            raise WaitTimeout(
                f"rank {self._world.rank}: {what} within {timeout:g} s; look at the other ranks' output, or raise "
                "TSN_TIMEOUT if they are only slow"
            )

    def close(self) -> None:
        proxy = self._proxy
        if proxy is not None:
            proxy.close()


def _pci_address(memory: Any) -> str:
    if memory.kind != "cuda":
        return ""
    return str(memory.handle()[2]).lower()


def _cpus(memory: Any) -> list[int]:
    cpus = settings.PROXY_CPUS.get()
    if isinstance(cpus, str):  # "node"
        path = Path(f"/sys/bus/pci/devices/{_pci_address(memory)}/local_cpulist")
        try:
            cpus = settings.cpu_list(path.read_text().strip(), str(path))
        except OSError as err:
            raise ConfigurationError(
                f"TSN_PROXY_CPUS=node: the CPUs near the GPU cannot be read from {path} ({err.strerror}); list them"
            ) from err
    known = os.sched_getaffinity(0)
    bad = [c for c in cpus if c not in known]
    if bad:
        raise ConfigurationError(f"TSN_PROXY_CPUS: this process may not use CPUs {bad}; it has {sorted(known)}")
    return cpus
