"""Life cycle of the proxy that serves PEs of other nodes: options, key exchange, failures.

| variable | meaning | default |
| --- | --- | --- |
| TSN_PROVIDER | libfabric provider, e.g. `efa`, `tcp`, `tcp;ofi_rxm`, `shm` | the best one offered |
| TSN_FABRIC_INTERFACE | network interface or domain, comma-separated | loopback on one host |
| TSN_CHAOS | faults to inject, e.g. `seed=7,reorder=0.3` | none |
| TSN_RAILS | endpoints to use; 0: one per NIC near the GPU | 0 |
| TSN_PROXY_QUEUES | device queues; operations to a PE use queue PE % queues | 1 |
| TSN_PROXY_THREADS | proxy threads, each with endpoints of its own | 1 |
| TSN_PROXY_CPUS | CPUs that the threads are pinned to, e.g. `2,3`; `node`: those near the GPU | not pinned |
| TSN_PROXY_CAPACITY | descriptors in a queue's ring | 1024 |
| TSN_PROXY_CHUNK | bytes of the pieces that puts travel in | 1M |
| TSN_PROXY_STAGING | 1: go through pinned staging memory even where the network reaches the heap | 0 |
| TSN_PROXY_STATS | 1: print the proxy's counters when it stops | 0 |
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tilescale_net import errors, fabric
from tilescale_net.errors import ConfigurationError, TileScaleError
from tilescale_net.runtime import settings


def start(world) -> tuple[RunningProxy, int, int]:
    """Start the proxy of this rank and connect it to its peers. Collective.

    Returns:
        The proxy, the device address of its queue views, and their number: what the context holds.
    """
    proxy = RunningProxy(world)
    blobs = world.control.gather("tilescale_net.init (proxy)", proxy.address())
    proxy.connect(blobs)
    # Nobody may send before everybody knows everybody: some networks drop writes from strangers.
    world.control.agree("tilescale_net.init (proxy)", "connected")
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
        memory = world._memory
        self._proxy = _native.Proxy(
            rank=world.rank,
            n_pes=world.size,
            peers=peers,
            heap_base=memory.base,
            heap_bytes=memory.size,
            heap_kind=memory.kind,
            device=max(memory.ordinal, 0),
            abort_word=world.abort_address,
            timeout=world.timeout,
            provider=os.environ.get("TSN_PROVIDER", ""),
            interface=os.environ.get("TSN_FABRIC_INTERFACE", ""),
            multi_host=not world.topology.single_host,
            gpu_pci=_pci_address(memory),
            rails=settings.integer("TSN_RAILS", 0),
            chaos=os.environ.get("TSN_CHAOS", ""),
            library_fallback=fabric.bundled_library(),
            queues=settings.integer("TSN_PROXY_QUEUES", 1, 1),
            threads=settings.integer("TSN_PROXY_THREADS", 1, 1),
            cpus=_cpus(memory),
            capacity=settings.integer("TSN_PROXY_CAPACITY", 1024, 2),
            chunk_bytes=settings.parse_bytes(os.environ.get("TSN_PROXY_CHUNK", "1M"), "TSN_PROXY_CHUNK"),
            force_staging=settings.integer("TSN_PROXY_STAGING", 0) != 0,
            print_stats=settings.integer("TSN_PROXY_STATS", 0) != 0,
        )
        views = self._proxy.queue_views()
        self._views: torch.Tensor = memory.upload(views)
        self.views_address = self._views.data_ptr()
        self.n_queues = len(views) // 64

    def address(self) -> bytes:
        return self._proxy.local_blob()

    def connect(self, blobs: list[bytes]) -> None:
        self._proxy.connect(blobs)
        self._proxy.start()

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
        if not self._proxy.drain(self._world.timeout):
            failed = self.failure()
            if failed is not None:
                raise failed

    def close(self) -> None:
        self._proxy.close()


def _pci_address(memory) -> str:
    if memory.kind != "cuda":
        return ""
    return memory.handle()[2].lower()


def _cpus(memory) -> list[int]:
    text = os.environ.get("TSN_PROXY_CPUS", "")
    if not text:
        return []
    if text == "node":
        path = Path(f"/sys/bus/pci/devices/{_pci_address(memory)}/local_cpulist")
        try:
            text = path.read_text().strip()
        except OSError as err:
            raise ConfigurationError(
                f"TSN_PROXY_CPUS=node: the CPUs near the GPU cannot be read from {path} ({err.strerror}); list them"
            ) from err
    cpus: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            cpus += range(int(first), int(last or first) + 1)
    except ValueError:
        raise ConfigurationError(f"TSN_PROXY_CPUS={text!r} is not a list such as 2,3 or 4-7") from None
    known = os.sched_getaffinity(0)
    bad = [c for c in cpus if c not in known]
    if bad:
        raise ConfigurationError(f"TSN_PROXY_CPUS: this process may not use CPUs {bad}; it has {sorted(known)}")
    return cpus
