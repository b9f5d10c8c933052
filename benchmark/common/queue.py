"""The device queue alone: a kernel that exercises it, and proxies of a benchmark's own that serve nothing else."""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from benchmark.common.measuring import elapsed, median, percentile
from benchmark.common.report import Column, Report

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
def probe() -> Any:
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

    def __init__(self, world: Any, cpu: int) -> None:
        import torch

        self.world, self.cpu = world, cpu
        self.on_gpu = world.device_kind == "cuda"
        self.heaps = [torch.zeros(self.HEAP, dtype=torch.uint8, device=world.device) for _ in range(2)]
        if not self.on_gpu:
            from tilescale_net import _simulator

            for heap in self.heaps:
                _simulator.register_allocation(heap.data_ptr(), self.HEAP, "the benchmark's heap")

    def proxy(self, rank: int, n_pes: int, heap: int, provider: str, **options: Any) -> Any:
        """A native proxy of `rank` that serves rank 0's peers, or, for other ranks, rank 0."""
        from tilescale_net import _native
        from tilescale_net.runtime import fabric

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

    def __init__(self, bench: QueueBench, proxies: list[Any], n_pes: int, queues: int) -> None:
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

    def run(
        self,
        kind: Any,
        turns: int,
        *,
        size: int = 64,
        out: int = 0,
        into: int = 0,
        pes: int = 1,
        first: int = 0,
        lanes: int = 1,
        warps: int = 1,
        blocks: int = 1,
        only: int = -1,
    ) -> float:
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

    def stats(self) -> dict[str, Any]:
        """The first proxy's counters."""
        return self._proxies[0].stats()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        for p in self._proxies:
            p.stop()


# Blocks, warps of a block, lanes of a warp that push, queues.
GEOMETRIES = [(1, 1, 1, 1), (1, 1, 8, 1), (1, 1, 32, 1), (1, 4, 32, 1), (4, 1, 32, 1), (2, 1, 32, 2), (4, 1, 32, 4)]
PLACES = (16, 2)  # SMs that a single thread is tried on: on a GPU, in the simulator
STAGE_BYTES = 256  # more than travels inside a message


def push_rates(report: Report, bench: QueueBench, args: argparse.Namespace) -> None:
    keys = [Column(k, k.capitalize()) for k in ("blocks", "warps", "lanes", "queues")]
    columns = [
        Column("published", "each published", better="higher", unit="M/s"),
        Column("batch", "behind one fence", better="higher", unit="M/s"),
        Column("sustained", "sustained", better="higher", unit="M/s"),
    ]
    table = report.table("pushes", keys, columns)
    table.notes.append(
        "The first two fit the ring; sustained, they turn round it and go at the proxy's pace. Lanes of a warp push "
        "together; a block pushes to one queue."
    )
    for blocks, warps, lanes, queues in report.progress(GEOMETRIES, "pushes", str):
        pushers = blocks * warps * lanes
        burst, long = max(1, args.capacity // 2 // pushers), 8 * args.capacity // pushers
        samples: dict[str, list[float]] = {"published": [], "batch": [], "sustained": []}
        with bench.null(args.capacity, queues) as proxies:
            for _ in range(1 + args.repeat):
                for name, turns in (("published", burst), ("batch", burst), ("sustained", long)):
                    kind = Probe.PUSH_PUBLISHED if name == "published" else Probe.PUSH
                    spent = proxies.run(kind, turns, pes=queues, lanes=lanes, warps=warps, blocks=blocks)
                    samples[name].append(pushers * turns / spent)
                    proxies.drain(queues)
        samples = {name: values[1:] for name, values in samples.items()}
        row = {"blocks": blocks, "warps": warps, "lanes": lanes, "queues": queues}
        table.add(row | {name: median(values) for name, values in samples.items()}, samples)


def places(report: Report, bench: QueueBench, args: argparse.Namespace) -> None:
    """One thread again, on one SM after another, spread over the device."""
    columns = [
        Column("slowest", "slowest", better="higher", unit="M/s"),
        Column("mean", "mean", better="higher", unit="M/s"),
        Column("fastest", "fastest", better="higher", unit="M/s"),
    ]
    count = PLACES[0 if bench.on_gpu else 1]
    table = report.table("one thread, by SM", [Column("what", "What")], columns)
    table.notes.append(
        f"{count} SMs, one at a time. The atomic that takes a slot is the longest part of "
        "a push, and takes longer where the queue's head lies in the other half of the L2 cache. Mean: all pushes over all "
        "their time."
    )
    blocks = _num_sms(bench) if bench.on_gpu else count
    burst = max(1, args.capacity // 2)
    with bench.null(args.capacity) as proxies:
        for what, kind in (("each published", Probe.PUSH_PUBLISHED), ("behind one fence", Probe.PUSH)):
            medians = []
            for place in report.progress(range(count), f"pushes, {what}", str):
                spent = []
                for _ in range(1 + args.repeat):
                    spent.append(proxies.run(kind, burst, blocks=blocks, only=place * blocks // count))
                    proxies.drain()
                medians.append(median(spent[1:]))
            rates = [burst / spent for spent in medians]
            mean = count * burst / sum(medians)
            table.add({"what": what, "slowest": min(rates), "mean": mean, "fastest": max(rates)}, {"by SM": rates})


def _num_sms(bench: QueueBench) -> int:
    import torch

    return torch.cuda.get_device_properties(bench.world.device).multi_processor_count


def round_trips(report: Report, bench: QueueBench, args: argparse.Namespace) -> dict[str, float]:
    """The table of round trips; what the stages need of it."""
    from benchmark import instruments

    columns = [
        Column("released", "bare flag, release", better="lower", unit="us"),
        Column("flag", "bare flag, relaxed", better="lower", unit="us"),
        Column("queue", "queue", better="lower", unit="us"),
        Column("queue_p99", "p99", better="lower", unit="us", plotted=False),
        Column("released_ratio", "x release", ".3f"),
        Column("ratio", "x relaxed", ".3f"),
    ]
    table = report.table("round trip", [Column("what", "What")], columns)
    table.notes.append(
        "A flag with release order is what a program must send that has written anything before; before the relaxed "
        "one, a payload is published by a fence. Neither says when the work that it announces is done. "
        "p99: of the samples, each of which is a mean over the trips of a launch."
    )
    found: dict[str, float] = {}
    sent = 0
    echo = instruments.FlagEcho(bench.on_gpu, args.cpu)
    with bench.null(args.capacity) as proxies:
        for publish in (False, True):
            flags = {
                "released": Probe.RELEASE_TRIP_PUBLISHED if publish else Probe.RELEASE_TRIP,
                "flag": Probe.FLAG_TRIP_PUBLISHED if publish else Probe.FLAG_TRIP,
            }
            queue = Probe.QUEUE_TRIP_PUBLISHED if publish else Probe.QUEUE_TRIP
            samples: dict[str, list[float]] = {"released": [], "flag": [], "queue": []}
            for _ in range(1 + args.repeat):
                for name, flag in flags.items():
                    spent = proxies.run(flag, args.trips, out=echo.ping, into=echo.pong, first=sent)
                    sent += args.trips
                    samples[name].append(spent / args.trips)
                samples["queue"].append(proxies.run(queue, args.trips) / args.trips)
            samples = {name: values[1:] for name, values in samples.items()}
            row = {name: median(values) for name, values in samples.items()}
            for ratio, base in (("released_ratio", "released"), ("ratio", "flag")):
                row[ratio] = median([q / f for q, f in zip(samples["queue"], samples[base])])
            row["queue_p99"] = percentile(samples["queue"], 99)
            table.add({"what": "payload published: fence, put, flush" if publish else "flush", **row}, samples)
            if not publish:
                found = row
        found["flush_stage"] = proxies.stats()["flush_us_mean"]
    del echo
    return found


def dispatch(report: Report, args: argparse.Namespace) -> None:
    from benchmark import instruments

    column = Column("rate", "taken and posted", better="higher", unit="M/s")
    table = report.table("one proxy thread", [Column("what", "Descriptors")], [column])
    table.notes.append("From a full ring into a transport that completes at once; the CPU's own time, on any machine.")
    kinds = {"put of 64 B": (64, False), "put of 4 KiB": (4096, False), "put_signal of 4 KiB": (4096, True)}
    for what, (size, signal) in report.progress(list(kinds.items()), "descriptors", lambda k: k[0]):
        rates = [
            instruments.measure_dispatch(descriptors=1 << 20, bytes=size, with_signal=signal, cpu=args.cpu) / 1e6
            for _ in range(args.repeat)
        ]
        table.add({"what": what, "rate": median(rates)}, {"rate": rates})


def bare_one_way(provider: str, trips: int, repeat: int, dedicated: bool) -> list[float]:
    """Microseconds of a write with an immediate between two CPU threads of this process, one way."""
    from benchmark import instruments
    from tilescale_net.runtime import fabric

    writers = [
        instruments.BareWriter(
            fabric.transport_options(rank=i, provider=provider, rails=1),
            bytes=1 << 20,
            dedicated=dedicated,
        )
        for i in range(2)
    ]
    addresses = [w.address() for w in writers]
    for i, w in enumerate(writers):
        w.connect(1 - i, addresses[1 - i])
    samples = []
    for turn in range(1 + repeat):
        other = threading.Thread(target=writers[1].pong, args=(0, STAGE_BYTES, trips))
        other.start()
        spent = writers[0].ping(1, STAGE_BYTES, trips)
        other.join()
        if turn:
            samples.append(spent * 1e6 / (2 * trips))
    return samples


def stages(report: Report, bench: QueueBench, trip: dict[str, float], args: argparse.Namespace) -> None:
    """Each stage of a put_signal on its way, measured alone, and all of them together."""
    from tilescale_net.runtime import settings

    table = report.table(
        "stages",
        [Column("stage", "Stage")],
        [Column("us", "Time", better="lower", unit="us"), Column("how", "Measured as")],
    )

    def add(stage: str, us: float | None, how: str, samples: Sequence[float] = ()) -> None:
        table.add({"stage": stage, "us": us, "how": how}, {"us": samples} if samples else None)

    total, sent = [], 0
    provider = args.provider or settings.PROVIDER.get()
    bare = bare_one_way(provider, args.trips, args.repeat, bench.on_gpu)
    with bench.null(args.capacity) as proxies:
        turns = args.capacity // 2
        fence = [proxies.run(Probe.FENCE, turns) / turns for _ in range(1 + args.repeat)][1:]
        push = []
        for _ in range(1 + args.repeat):
            push.append(proxies.run(Probe.PUSH, turns) / turns)
            proxies.drain()
        push = push[1:]
    with bench.pair(provider, 1024) as proxies:
        for _ in range(1 + args.repeat):
            spent = proxies.run(
                Probe.ONE_WAY, args.trips, size=STAGE_BYTES, out=proxies.signal, into=proxies.there, first=sent
            )
            sent += args.trips
            total.append(spent / args.trips)
        proxy = proxies.stats()
    total = total[1:]
    add("fence", median(fence), "device: payload written, system-scope fence", fence)
    add("push", median(push), "device: one thread, behind one fence", push)
    add("flag to the CPU, or back", trip["flag"] / 2, "half of the bare flag's round trip")
    add("poll and pop", proxy["pop_us_mean"], "proxy: a visit to a queue that held something")
    add("post", proxy["post_us_mean"], "proxy: a round of posting")
    add("completion", proxy["completion_us_mean"], "proxy: from post until the provider reports it")
    add("flush", trip["flush_stage"], "proxy: from its pop until its ticket is written")
    add("network", median(bare), f"bare writer, one way, {STAGE_BYTES} B", bare)
    known = (
        median(fence) + median(push) + trip["flag"] / 2 + proxy["pop_us_mean"] + proxy["post_us_mean"] + median(bare)
    )
    rest = median(total) - known  # a difference of medians: noise can be larger than what is left
    add("remote visibility", rest if rest > 0 else None, "the rest: target's proxy, signal seen by the waiting kernel")
    add("put_signal to remote wait", median(total), "device: all of it, by one clock", total)
