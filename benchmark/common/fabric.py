"""Shared parts of fabric and proxy benchmarks: arguments, the job's ranks, bare writers, jobs with a proxy.

`FabricJob` needs libfabric and nothing else of the package: no heap, no kernels, no GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import tilescale_net as tsn
from benchmark.common import measuring
from benchmark.common.arguments import BenchmarkParser, positive_float
from benchmark.common.measuring import GUARD, POISON, device_us, gather, median, random_bytes
from benchmark.common.modules import fabric, instruments, p2p, torch
from benchmark.common.plot import format_bytes
from benchmark.common.report import Column, is_rank_zero, rank, world_size


class SizeColumn(Column):
    """Sizes as 8M."""

    def show(self, value: Any) -> str:
        return format_bytes(value)


def add_fabric_arguments(parser: BenchmarkParser) -> None:
    """Adds --provider, --domain and --timeout."""
    text = "libfabric provider (TSN_PROVIDER, else the best)"
    parser.add_argument("--provider", default="", metavar="NAME", help=text)
    text = "domain or interface, such as lo or rdmap0s0; several separated by commas (loopback on one host)"
    parser.add_argument("-d", "--domain", default="", metavar="NAME", help=text)
    parser.option("--timeout", positive_float, 30.0, "seconds without any progress after which a run gives up")


class FabricJob:
    """The ranks of a benchmark, and transports with the user's choice of provider and interface.

    Args:
        parser, args: as parsed; choices that libfabric does not offer end the process with exit code 2.
        ranks: number of ranks of the method; None: two or more.
    """

    def __init__(self, parser: BenchmarkParser, args: argparse.Namespace, ranks: int | None = None) -> None:
        size = world_size()
        if ranks and size != ranks:
            start = f"start it with GPUS={ranks} bash launch.sh …"
            parser.error(f"the method takes {ranks} ranks, this job has {size}; {start}")
        parser.require_two_ranks("the method takes")
        from tilescale_net import errors
        from tilescale_net.runtime import control, placement

        self.parser, self.args = parser, args
        self.rank, self.size = rank(), size
        try:
            self.library = fabric.library()
            self._check_choices(fabric.offers())
        except errors.FabricError as err:
            raise SystemExit(f"{parser.prog}: {err}") from None
        # Only death ends a collective call early: the native loops have a time limit of their own.
        self.control = control.Control(3600.0)
        hosts = self.control.gather("hosts", placement.host_identity())
        self.multi_host = len(set(hosts)) > 1
        self._local_rank = hosts[: self.rank].count(hosts[self.rank])

    def _check_choices(self, offers: list[dict[str, Any]]) -> None:
        args, providers = self.args, sorted({o["provider"] for o in offers})
        if args.provider and args.provider not in providers:
            self.parser.error(f"--provider {args.provider!r} is not one of {', '.join(providers)}")
        known = {o["domain"] for o in offers} | {o["address"] for o in offers}
        for name in filter(None, args.domain.split(",")):
            if name not in known:
                self.parser.error(f"--domain {name!r} is not one of {', '.join(sorted(known - {''}))}")

    def options(self, **fields: Any) -> Any:
        """Transport options: the user's choices, this rank, and `fields`."""
        fields.setdefault("gpu_pci", self.gpu_pci())
        return fabric.transport_options(
            rank=self.rank,
            provider=self.args.provider,
            interface=self.args.domain,
            multi_host=self.multi_host,
            rails=getattr(self.args, "rails", 1),
            **fields,
        )

    def properties(self, **fields: Any) -> dict[str, Any]:
        """Properties of a transport with these options, before memory is allocated for it."""
        from tilescale_net import _native

        return _native.Transport(self.options(**fields)).properties()

    def device(self) -> int | None:
        """Ordinal of this rank's GPU, None without one."""
        return self._local_rank % torch.cuda.device_count() if torch.cuda.is_available() else None

    def gpu_pci(self) -> str:
        """PCI address of this rank's GPU, '' without one."""
        ordinal = self.device()
        if ordinal is None:
            return ""
        p: Any = torch.cuda.get_device_properties(ordinal)
        return f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"

    def session(self, size: int, **fields: Any) -> Any:
        """A native session with a buffer of `size` bytes, introduced to every rank. Collective.

        Args:
            fields: of the transport options; `device_address` and `device` put the buffer into GPU memory.
        """
        place = {name: fields.pop(name) for name in ("device_address", "device") if name in fields}
        session = instruments.Session(self.options(**fields), self.size, size, self.args.timeout, **place)
        for other, address in enumerate(self.control.gather("addresses", session.address())):
            if other != self.rank:
                session.connect(other, address)
        return session

    def header(self, properties: dict[str, Any]) -> dict[str, str]:
        """For Report.environment."""
        rails = f", {properties['rails']} rails" if properties["rails"] > 1 else ""
        return {
            "provider": f"{properties['provider']} on {properties['interface']}{rails}",
            "libfabric": properties["version"],
            "hosts": "several" if self.multi_host else "one: both ends share its processors and memory",
        }


def run(main: Callable[[], None]) -> None:
    """Call main(); an error of the package becomes its message on stderr and exit code 1."""
    from tilescale_net.errors import TileScaleError

    try:
        main()
    except TileScaleError as err:
        sys.stderr.write(f"{err}\n")
        sys.stderr.flush()
        os._exit(1)  # at once: other ranks may be waiting for this one


def middle(runs: list[dict[str, Any]], figure: Callable[[dict[str, Any]], float]) -> dict[str, Any]:
    """The run whose figure is nearest to the median of all."""
    target = median([figure(run) for run in runs])
    return min(runs, key=lambda run: abs(figure(run) - target))


def note_of_cores(needed: int, what: str) -> str | None:
    """A warning if this machine has fewer cores than busy threads, else None."""
    cores = len(os.sched_getaffinity(0))
    if cores >= needed:
        return None
    return f"{what} keep {needed} threads busy on {cores} cores: the figures mean little."


WINDOW = 64  # writes in flight, without staging
MEMORY = 64 << 20  # bytes of each thread that moves data as MoE does: more than a second-level cache holds


def bare_writer(world: Any, memory: Any, rails: int) -> Any:
    """A bare writer on `memory` (uint8), staged if the proxy stages."""
    on_gpu, properties = world.device_kind == "cuda", world.proxy.properties
    options = fabric.transport_options(rank=world.rank, multi_host=not world.topology.single_host, rails=rails)
    return instruments.BareWriter(
        options,
        bytes=memory.numel(),
        base=memory.data_ptr(),
        heap_kind="cuda" if on_gpu else "host",
        device=world.device.index or 0,
        force_staging=properties["staged"],
        chunk_bytes=properties["chunk_bytes"],
        # As much staging memory as a proxy thread has: more would fall out of the processor's caches.
        window=properties["staging_slots"] or WINDOW,
        dedicated=on_gpu,
    )


def threads_for(peers: list[int]) -> int:
    """Number of a rank's proxy threads for traffic to these PEs."""
    proxy = cast(Any, tsn.world()).proxy
    queues, threads, helpers = proxy.n_queues, proxy.threads, range(proxy.peer_threads)
    return len({(pe % queues % threads + i) % threads for pe in peers for i in helpers})


class BareWriterPair:
    """Bare writers between each rank and one of another node, in both directions at once. Collective.

    Every rank writes to the rank one node size further on, and is written to from the rank one node size back. Each
    thread does both, as in a proxy, and there are as many threads as proxy threads with peers.
    """

    def __init__(self) -> None:
        world = cast(Any, tsn.world())
        size, step = world.size, world.topology.node_size
        self._to, self._from = (world.rank + step) % size, (world.rank - step) % size
        properties = world.proxy.properties
        self.threads = threads_for([pe for pe in range(size) if not world.topology.is_direct(pe)])
        self._bytes = MEMORY
        self._memory = torch.zeros((self.threads, self._bytes), dtype=torch.uint8, device=world.device)
        self._writers = [bare_writer(world, memory, properties["rails"]) for memory in self._memory]
        for addresses, writer in zip(zip(*gather([w.address() for w in self._writers])), self._writers):
            for peer in {self._to, self._from}:
                writer.connect(peer, addresses[peer])
        self._pool = ThreadPoolExecutor(self.threads)
        tsn.barrier()

    def move(self, count: int) -> float:
        """Move about `count` bytes each way; microseconds until this rank's data are in place."""
        share = -(-count // self.threads)
        laps = max(1, -(-share // self._bytes))
        tsn.barrier()
        start = time.perf_counter()
        ends = self._pool.map(lambda writer: self._one(writer, max(1, -(-share // laps)), laps), self._writers)
        return (max(ends) - start) * 1e6

    def _one(self, writer: Any, count: int, laps: int) -> float:
        """Time when the last of `laps` times `count` bytes is in place."""
        writer.write(self._to, count, laps, from_peer=self._from)
        end = time.perf_counter()
        writer.finish(self._to)
        writer.serve(self._from)
        return end

    def close(self) -> None:
        tsn.barrier()
        self._pool.shutdown()
        self._writers.clear()


class ProxyBench:
    """The job with a given number of channels: buffers, the proxy's kernels, and the bare writer. Collective.

    Attributes:
        rails: channels in use.
        dst, src: symmetric uint8 tensors.
        peer: the target PE; ranks other than 0 and it only take part in barriers.

    Args:
        rails: channels; 0 for one per NIC near the GPU.
        largest: bytes of the largest write.
        both: the peer writes to rank 0 at the same time.

    Raises:
        SystemExit: with 2, when every PE is mapped.
    """

    def __init__(self, rails: int, largest: int, both: bool = False) -> None:
        from tilescale_net.kernels import proxy_write

        os.environ["TSN_RAILS"] = str(rails)
        self._both = both
        capacity = largest + GUARD
        self.world = cast(Any, tsn.init(2 * capacity + (8 << 20)))
        if self.world.proxy is None:
            if is_rank_zero():
                sys.stderr.write("error: every PE is mapped, so nothing goes through a proxy; set VIRTUAL_NODES=2\n")
            raise SystemExit(2)
        self.on_gpu = self.world.device_kind == "cuda"
        self.rank, self.peer = tsn.rank(), self.world.topology.node_size
        self._other = self.peer - self.rank  # of the two that take part
        self.properties = self.world.proxy.properties
        self.rails = self.properties["rails"]
        self.dst, self.src = (tsn.empty(capacity, torch.uint8) for _ in range(2))
        self._flag, self._counter = (tsn.zeros((1,), torch.uint64) for _ in range(2))
        self._counted = 0
        self._write, self._ping_pong = proxy_write.write(capacity), p2p.ping_pong(capacity, threads=32)
        self._sent = 0
        self._bare: Any = None

    def open_bare(self) -> None:
        """Make the bare writer, on the proxy's own memory, staged if the proxy stages. Collective."""
        self._bare = bare_writer(self.world, self.src, self.rails)
        addresses = gather(self._bare.address())
        if self.rank in (0, self.peer):
            self._bare.connect(self._other, addresses[self._other])
        gather(None)

    def _timed(self, mine: Callable[[], float] | None, peers: Callable[[], float] | None, count: int) -> float:
        """Microseconds of this rank's work over `count`, between barriers of all; 0 without work."""
        tsn.barrier()
        act = mine if self.rank == 0 else peers if self.rank == self.peer else None
        spent = act() if act else 0.0
        tsn.barrier()
        return spent / count

    def write(self, count: int, piece: int, writes: int, blocking: int) -> float:
        """Microseconds per write through the proxy; meaningful on rank 0 only."""
        arguments = (self.dst, self.src, count, piece or count, self._other, writes, blocking)
        write = lambda: device_us(lambda: self._write(*arguments), self.on_gpu)  # noqa: E731
        return self._timed(write, write if self._both else None, writes)

    def bare_write(self, count: int, writes: int) -> float:
        """Microseconds per write by the bare writer, which fills its window as a non-blocking proxy does."""

        def write() -> float:
            both = {"from_peer": self._other} if self._both else {}
            spent: float = self._bare.write(self._other, count, writes, **both) * 1e6
            self._bare.finish(self._other)
            return spent + (serve() if self._both else 0.0)

        def serve() -> float:
            self._bare.serve(self._other)
            return 0.0

        return self._timed(write, write if self._both else serve, writes)

    def one_way(self, count: int, trips: int) -> float:
        """Microseconds from put_signal to the wait at the other side: half a round trip."""
        arguments = (self.dst, self.src, self._flag, count, self._other, self._sent, int(self.rank == 0), trips)
        trip = lambda: device_us(lambda: self._ping_pong(*arguments), self.on_gpu)  # noqa: E731
        self._sent += trips
        return self._timed(trip, trip, 2 * trips)

    def bare_one_way(self, count: int, trips: int) -> float:
        """The same by two bare writers: until the target's CPU has seen the data."""
        ping = lambda: self._bare.ping(self._other, count, trips) * 1e6  # noqa: E731
        pong = lambda: self._bare.pong(self._other, count, trips) or 0.0  # noqa: E731
        return self._timed(ping, pong, 2 * trips)

    def ordered(self, count: int, destinations: int, turns: int, ordering: int) -> float:
        """Microseconds of a turn of `kernels.proxy_write.signals`, by rank 0 to the first PEs of other nodes. Collective.

        Raises:
            WrongData: on all ranks, if signals were lost or doubled.
        """
        from tilescale_net.kernels import proxy_write

        kernel = proxy_write.signals(self.dst.numel())
        arguments = (self.dst, self.src, self._counter, count, self.peer, destinations, turns, ordering)
        spent = self._timed(lambda: device_us(lambda: kernel(*arguments), self.on_gpu), None, turns)
        self._counted += turns if self.rank == self.peer else 0
        seen = int(self._counter.item())
        error = None if seen == self._counted else f"{seen} signals of {self._counted} at rank {self.rank}"
        # Further destinations count as the first one does.
        measuring.raise_if_wrong(f"signals with {count} bytes", error if self.rank == self.peer else None)
        return spent

    def prepare(self, count: int, seed: int) -> None:
        """Fresh data at rank 0, poison at its peer, in the proxy's destination and the bare writer's."""
        if self.rank == 0:
            self.src[:count] = random_bytes(count, seed, self.src.device)
        elif self.rank == self.peer:
            for buffer in (self.src, self.dst):
                buffer[: count + GUARD] = POISON

    def difference(self, buffer: Any, count: int, seed: int) -> str | None:
        """The error of the peer's `buffer`; None elsewhere."""
        return measuring.difference(buffer, count, seed) if self.rank == self.peer else None

    def close(self) -> None:
        tsn.barrier()  # no bare writer ends while another one still sends
        del self._bare, self.dst, self.src, self._flag, self._counter
        tsn.finalize()
