"""Life cycle of the proxy that serves PEs of other nodes: options, key exchange, failures."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tilescale_net import errors, fabric
from tilescale_net.errors import ConfigurationError, TileScaleError
from tilescale_net.runtime import setting, settings


def start(world) -> tuple[RunningProxy, int, int]:
    """Start the proxy of this rank and connect it to its peers. Collective.

    Returns:
        The proxy, the device address of its queue views, and their number: what the context holds.
    """
    proxy = RunningProxy(world)
    try:
        addresses = world.control.gather("tilescale_net.init (proxy)", proxy.address())
        proxy.connect(addresses)
        # Nobody may send before everybody knows everybody: some networks drop writes from strangers.
        world.control.agree("tilescale_net.init (proxy)", "connected")
    except BaseException:
        proxy.close()
        raise
    return proxy, proxy.views_address, proxy.n_queues


class RunningProxy:
    """The native proxy with this package's options and errors. Made by `start`."""

    def __init__(self, world):
        try:
            from tilescale_net import _native
        except ImportError as err:
            raise ConfigurationError(
                "PEs of other nodes need the native part, which is not built; run `python setup.py build_ext --inplace` "
                f"or use launch.sh ({err})"
            ) from err
        self._world = world
        peers = [pe for pe in range(world.size) if not world.topology.is_direct(pe)]
        memory = world.memory
        transport = fabric.transport_options(
            multi_host=not world.topology.single_host, gpu_pci=_pci_address(memory), rails=settings.RAILS.get()
        )
        self._proxy = _native.Proxy(
            transport,
            rank=world.rank,
            n_pes=world.size,
            peers=peers,
            heap_base=memory.base,
            heap_bytes=memory.size,
            heap_kind=memory.kind,
            device=max(memory.ordinal, 0),
            defers_adds=True,  # the host cannot add to memory of a GPU; the simulator does as GPUs do
            abort_word=world.page.address,
            timeout=world.timeout,
            queues=settings.PROXY_QUEUES.get(),
            threads=settings.PROXY_THREADS.get(),
            peer_threads=settings.PROXY_PEER_THREADS.get(),
            cpus=_cpus(memory),
            capacity=settings.PROXY_CAPACITY.get(),
            chunk_bytes=settings.PROXY_CHUNK.get(),
            force_staging=settings.PROXY_STAGING.get(),
            trace=world.recorder.proxy_files(settings.PROXY_THREADS.get()) if world.recorder is not None else [],
            print_stats=settings.PROXY_STATS.get(),
            trust_last_chunk=settings.TEST_ORDERING.get() == "last_chunk",
        )
        views = self._proxy.queue_views()
        self._views: torch.Tensor = memory.upload(views)
        self.views_address = self._views.data_ptr()
        self.n_queues = len(views) // 64

    def address(self) -> bytes:
        return self._proxy.address()

    def connect(self, addresses: list[bytes]) -> None:
        self._proxy.connect(addresses)
        self._proxy.start()

    def explain(self, reason: str) -> None:
        """Tell the peers why this rank is about to set its abort word. The first reason counts."""
        self._proxy.explain(reason)

    def failure(self) -> TileScaleError | None:
        """What made the proxy give up, or None."""
        found = self._proxy.error()
        if found is None:
            return None
        return getattr(errors, found["kind"], errors.FabricError)(found["text"])

    def stats(self) -> dict:
        return dict(self._proxy.stats())

    @property
    def context_flags(self) -> int:
        """What `Context::flags` must contain for kernels to meet this proxy half-way."""
        return self._proxy.context_flags

    @property
    def staged(self) -> bool:
        """Whether data go through pinned host memory, because the network does not reach the heap."""
        return self.properties["staged"]

    @property
    def properties(self) -> dict:
        """Provider, libfabric version, rails and limits of the transport."""
        return dict(self._proxy.properties())

    def drain(self) -> None:
        """Wait until everything that kernels have sent is at its target, while the peers are served on.

        Raises:
            TileScaleError: the proxy has failed.
        """
        self._finish(self._proxy.drain)

    def settle(self) -> bool:
        """Carry out the adds to signal words that were left to the next waiting kernel.

        To be called between two agreements, while no kernel runs on any rank. Returns whether this job defers adds:
        where it does, every rank must have settled before any goes on.
        """
        if not self.context_flags:
            return False
        self._finish(self._proxy.apply_adds)
        return True

    def _finish(self, call) -> None:
        if not call(self._world.timeout) and (failed := self.failure()) is not None:
            raise failed

    def close(self) -> None:
        self._proxy.close()


def _pci_address(memory) -> str:
    if memory.kind != "cuda":
        return ""
    return memory.handle()[2].lower()


def _cpus(memory) -> list[int]:
    cpus = settings.PROXY_CPUS.get()
    if cpus == "node":
        path = Path(f"/sys/bus/pci/devices/{_pci_address(memory)}/local_cpulist")
        try:
            cpus = setting.cpu_list(path.read_text().strip(), str(path))
        except OSError as err:
            raise ConfigurationError(
                f"TSN_PROXY_CPUS=node: the CPUs near the GPU cannot be read from {path} ({err.strerror}); list them"
            ) from err
    known = os.sched_getaffinity(0)
    bad = [c for c in cpus if c not in known]
    if bad:
        raise ConfigurationError(f"TSN_PROXY_CPUS: this process may not use CPUs {bad}; it has {sorted(known)}")
    return cpus
