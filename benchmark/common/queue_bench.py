"""The device queue alone: a kernel that exercises it, and proxies of a benchmark's own that serve nothing else."""

from __future__ import annotations

import os
from enum import IntEnum

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from benchmark.common.measuring import elapsed

THREADS = 128  # of a block; idle ones leave at once

with open(os.path.join(os.path.dirname(__file__), "queue_probes.h")) as _file:
    SOURCE = _file.read()


class Probe(IntEnum):
    """What a launch does, `turns` times; the same as tsn::probe::Kind."""

    PUSH = 0  # puts behind one fence
    PUSH_PUBLISHED = 1  # puts that publish a payload each
    FENCE = 2  # a payload written, and a system-scope fence
    QUEUE_TRIP = 3  # a flush, until its completion is seen
    QUEUE_TRIP_PUBLISHED = 4  # a published put and a flush
    FLAG_TRIP = 5  # a relaxed flag at `out`, until the CPU's answer is seen at `into`
    FLAG_TRIP_PUBLISHED = 6  # the same behind a payload and a fence
    ONE_WAY = 7  # put_signal to the word at `out`, until it is seen at `into`, the target's own word
    RELEASE_TRIP = 8  # FLAG_TRIP with a flag that has release order
    RELEASE_TRIP_PUBLISHED = 9  # the same behind a payload


@tsn.jit
def probe():
    """Kernel `(kind, payload, bytes, out, into, pes, first, turns, lanes, warps, blocks, only)`; one serves all of Probe.

    Args:
        kind: a Probe.
        payload: address of the data, of which each thread takes `bytes` bytes, a multiple of 8.
        out, into: addresses of words, see Probe; 0 where they are not used.
        pes: blocks push to PEs 1 ... pes in turn.
        first: flags and signals take the values first + 1 ... first + turns.
        lanes, warps, blocks: the first `lanes` lanes of the first `warps` warps of each block take part.
        only: the one block that takes part, the others leave at once; negative: all do.
    """

    @T.prim_func
    def main(
        ctx: N.Context(),
        kind: T.int32,
        payload: T.int64,
        bytes: T.int64,
        out: T.int64,
        into: T.int64,
        pes: T.int32,
        first: T.int64,
        turns: T.int32,
        lanes: T.int32,
        warps: T.int32,
        blocks: T.int32,
        only: T.int32,
    ):
        with T.Kernel(blocks, threads=THREADS) as block:
            T.import_source(SOURCE)
            thread = T.get_thread_binding()
            pe = 1 + block % pes
            if thread % 32 < lanes and thread < 32 * warps and (only < 0 or block == only):
                T.call_extern(
                    "void", "tsn::probe::run",
                    T.address_of(ctx[0]), kind, payload, bytes, out, into, pe, first, turns,
                )  # fmt: skip

    return main


class QueueBench:
    """Two heaps, and proxies between them that start from nothing each time."""

    HEAP = 2 << 20

    def __init__(self, world, cpu: int):
        import torch

        self.world, self.cpu = world, cpu
        self.on_gpu = world.device_kind == "cuda"
        self.heaps = [torch.zeros(self.HEAP, dtype=torch.uint8, device=world.device) for _ in range(2)]
        if not self.on_gpu:
            from tilescale_net import _simulator

            for heap in self.heaps:
                _simulator.register_allocation(heap.data_ptr(), self.HEAP, "the benchmark's heap")

    def proxy(self, rank: int, n_pes: int, heap: int, provider: str, **options):
        """A native proxy of `rank` that serves rank 0's peers, or, for other ranks, rank 0."""
        from tilescale_net import _native, fabric

        return _native.Proxy(
            fabric.transport_options(provider=provider),
            rank=rank,
            n_pes=n_pes,
            peers=[0] if rank else list(range(1, n_pes)),
            heap_base=self.heaps[heap].data_ptr(),
            heap_bytes=self.HEAP,
            heap_kind="cuda" if self.on_gpu else "host",
            device=self.world.device.index or 0,
            abort_word=self.world.page.address,
            timeout=self.world.timeout,
            cpus=[self.cpu] if self.cpu >= 0 else [],
            **options,
        )

    def null(self, capacity: int, queues: int = 1) -> ProxyUnderTest:
        """A proxy with a queue for each of its peers, and a transport that completes at once."""
        self._clear()
        options = dict(queues=queues, threads=queues if self.on_gpu else 1)
        silent = [self.proxy(1 + i, 1 + queues, 0, "null", capacity=2, **options) for i in range(queues)]
        proxy = self.proxy(0, 1 + queues, 0, "null", capacity=capacity, **options)
        proxy.connect([b"", *(p.address() for p in silent)])
        return ProxyUnderTest(self, [proxy], 1 + queues, queues)

    def pair(self, provider: str, capacity: int) -> ProxyUnderTest:
        """Two proxies on a real provider, each with a heap of its own, both within reach of this device."""
        self._clear()
        proxies = [self.proxy(i, 2, i, provider, capacity=capacity) for i in range(2)]
        addresses = [p.address() for p in proxies]
        for p in proxies:
            p.connect(addresses)
        return ProxyUnderTest(self, proxies, 2, 1)

    def _clear(self) -> None:
        for heap in self.heaps:
            heap.zero_()
        self.world.memory.synchronize()


class ProxyUnderTest:
    """Running proxies and the context with which kernels reach PE 0's queues; a `with` block ends them."""

    def __init__(self, bench: QueueBench, proxies: list, n_pes: int, queues: int):
        import torch

        from tilescale_net.runtime import context

        self._bench, self._proxies = bench, proxies
        world, heap = bench.world, bench.heaps[0].data_ptr()
        self.payload = heap + context.SYSTEM_BYTES
        self.signal = self.payload + (1 << 20)
        self.there = self.signal - heap + bench.heaps[1].data_ptr()
        self._views = world.memory.upload(proxies[0].queue_views())
        header = context.ContextHeader(
            my_pe=0,
            n_pes=n_pes,
            node_pe=0,
            n_node_pes=1,
            n_queues=queues,
            flags=proxies[0].context_flags,
            heap_base=heap,
            heap_bytes=bench.HEAP,
            abort_word=world.page.address,
            error=world.page.record_address,
            timeout_ns=int(world.timeout * 1e9),
            queues=self._views.data_ptr(),
        )
        bases = [heap] + [0] * (n_pes - 1)
        self._bytes = world.memory.upload(context.pack(header, bases))
        self._context = self._bytes.view(torch.int64)[: context.HEADER_WORDS]
        for p in proxies:
            p.start()

    def run(self, kind, turns, *, size=64, out=0, into=0, pes=1, first=0, lanes=1, warps=1, blocks=1, only=-1) -> float:
        """Microseconds of one launch of `kind`, a Probe. Raises what kernel or proxy met."""
        import tilescale_net as tsn
        from tilescale_net import errors

        kernel = probe()
        arguments = (int(kind), self.payload, size, out, into, pes, first, turns, lanes, warps, blocks, only)
        spent = elapsed(lambda: kernel(self._context, *arguments), self._bench.on_gpu)
        for p in self._proxies:
            found = p.error()
            if found:
                raise getattr(errors, found["kind"], errors.FabricError)(found["text"])
        tsn.check()
        return spent

    def drain(self, pes: int = 1) -> None:
        """Wait until the proxy has done everything that was pushed to PEs 1 ... pes."""

        self.run(Probe.QUEUE_TRIP, 1, pes=pes, blocks=pes)

    def stats(self) -> dict:
        """The first proxy's counters."""
        return self._proxies[0].stats()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for p in self._proxies:
            p.stop()
