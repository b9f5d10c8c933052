"""The device queue alone: a kernel that exercises it, and proxies that serve only the benchmark."""

from __future__ import annotations

import argparse
import os
import threading
from enum import IntEnum
from functools import partial
from typing import Any

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from benchmark.common.measuring import device_us, in_turn, median, medians, percentile
from benchmark.common.modules import fabric, instruments, torch
from benchmark.common.report import Column, Report, rate, us

THREADS = 128  # of a block; idle ones leave at once

with open(os.path.join(os.path.dirname(__file__), "queue_probes.h")) as _file:
    SOURCE = _file.read()


class Probe(IntEnum):
    """Operation of a launch, repeated `turns` times; the same as tsn::probe::Kind."""

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


# Arguments of a probe unless a caller gives others.
_USUAL = dict(bytes=64, out=0, into=0, pes=1, first=0, lanes=1, warps=1, blocks=1, only=-1)


@tsn.jit
def probe() -> Any:
    """Kernel `(kind, payload, bytes, out, into, pes, first, turns, lanes, warps, blocks, only)`; one serves all of Probe.

    Args:
        kind: a Probe.
        payload: address of the data, of which each thread takes `bytes` bytes, a multiple of 8.
        out, into: addresses of words, see Probe; 0 if unused.
        pes: blocks push to PEs 1 ... pes in turn.
        first: flags and signals take the values first + 1 ... first + turns.
        lanes, warps, blocks: the first `lanes` lanes of the first `warps` warps of each block take part.
        only: the one block that takes part; negative: all do.
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
    """Two heaps, and proxies between them that restart each time."""

    HEAP = 2 << 20

    def __init__(self, world: Any, cpu: int) -> None:
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

    def run(self, kind: Any, turns: int, **others: int) -> float:
        """Microseconds of one launch of `kind`, a Probe; `others`: see `probe`. Raises errors of kernel or proxy."""
        from tilescale_net import errors

        kernel = probe()
        named = _USUAL | {"kind": int(kind), "payload": self.payload, "turns": turns} | others
        arguments = [named.pop(name) for name in kernel.parameters]
        assert not named, f"no arguments of a probe: {named}"
        spent = device_us(lambda: kernel(self._context, *arguments), self._bench.on_gpu)
        for p in self._proxies:
            found = p.error()
            if found:
                raise getattr(errors, found["kind"], errors.FabricError)(found["text"])
        tsn.check()
        return spent

    def drain(self, pes: int = 1) -> None:
        """Wait until the proxy has completed all pushes to PEs 1 ... pes."""

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
STAGE_BYTES = 256  # larger than data inside messages


def _push_rate(
    proxies: ProxyUnderTest, queues: int, pushers: int, shape: dict[str, int], kind: Probe, turns: int
) -> float:
    """Millions of pushes a second."""
    spent = proxies.run(kind, turns, pes=queues, **shape)
    proxies.drain(queues)
    return pushers * turns / spent


def push_rates(report: Report, bench: QueueBench, args: argparse.Namespace) -> None:
    keys = [Column(k, k.capitalize()) for k in ("blocks", "warps", "lanes", "queues")]
    titles = {"published": "each published", "batch": "behind one fence", "sustained": "sustained"}
    table = report.table("pushes", keys, [rate(key, title, "M/s") for key, title in titles.items()])
    table.notes.append(
        "The first two fit the ring; sustained, they turn round it and go at the proxy's pace. Lanes of a warp push "
        "together; a block pushes to one queue."
    )
    for blocks, warps, lanes, queues in report.progress(GEOMETRIES, "pushes", str):
        pushers = blocks * warps * lanes
        burst, long = max(1, args.capacity // 2 // pushers), 8 * args.capacity // pushers
        with bench.null(args.capacity, queues) as proxies:
            ways = {
                "published": (Probe.PUSH_PUBLISHED, burst),
                "batch": (Probe.PUSH, burst),
                "sustained": (Probe.PUSH, long),
            }
            shape = dict(lanes=lanes, warps=warps, blocks=blocks)
            turns = {name: partial(_push_rate, proxies, queues, pushers, shape, *way) for name, way in ways.items()}
            samples = in_turn(turns, 1, args.repeat)
        table.add({"blocks": blocks, "warps": warps, "lanes": lanes, "queues": queues, **medians(samples)}, samples)


def places(report: Report, bench: QueueBench, args: argparse.Namespace) -> None:
    """One thread again, on one SM after another, spread over the device."""
    columns = [rate(name, name, "M/s") for name in ("slowest", "mean", "fastest")]
    count = PLACES[0 if bench.on_gpu else 1]
    table = report.table("one thread, by SM", [Column("what", "What")], columns)
    table.notes.append(
        f"{count} SMs, one at a time. The atomic that takes a slot is the longest part of "
        "a push, and takes longer where the queue's head lies in the other half of the L2 cache. Mean: all pushes over all "
        "their time."
    )
    sms = torch.cuda.get_device_properties(bench.world.device).multi_processor_count if bench.on_gpu else count
    burst = max(1, args.capacity // 2)
    with bench.null(args.capacity) as proxies:

        def push(kind: Probe, sm: int) -> float:
            spent = proxies.run(kind, burst, blocks=sms, only=sm)
            proxies.drain()
            return spent

        for what, kind in (("each published", Probe.PUSH_PUBLISHED), ("behind one fence", Probe.PUSH)):
            found = [
                median(in_turn({"": partial(push, kind, place * sms // count)}, 1, args.repeat)[""])
                for place in report.progress(range(count), f"pushes, {what}", str)
            ]
            rates = [burst / spent for spent in found]
            mean = count * burst / sum(found)
            table.add({"what": what, "slowest": min(rates), "mean": mean, "fastest": max(rates)}, {"by SM": rates})


def round_trips(report: Report, bench: QueueBench, args: argparse.Namespace) -> dict[str, float]:
    """The table of round trips; returns the figures for the stages."""
    columns = [us("released", "bare flag, release"), us("flag", "bare flag, relaxed"), us("queue", "queue")]
    columns += [us("queue_p99", "p99", plotted=False)]
    columns += [Column("released_ratio", "x release", ".3f"), Column("ratio", "x relaxed", ".3f")]
    table = report.table("round trip", [Column("what", "What")], columns)
    table.notes.append(
        "A flag with release order is what a program must send that has written anything before; before the relaxed "
        "one, a payload is published by a fence. Neither says when the work that it announces is done. "
        "p99: of the samples, each of which is a mean over the trips of a launch."
    )
    found: dict[str, float] = {}
    sent = 0
    echo = instruments.FlagEcho(bench.on_gpu, args.cpu)
    plain = {"released": Probe.RELEASE_TRIP, "flag": Probe.FLAG_TRIP, "queue": Probe.QUEUE_TRIP}
    published = (Probe.RELEASE_TRIP_PUBLISHED, Probe.FLAG_TRIP_PUBLISHED, Probe.QUEUE_TRIP_PUBLISHED)
    with bench.null(args.capacity) as proxies:

        def trip(kind: Probe, flag: bool) -> float:
            nonlocal sent
            words = dict(out=echo.ping, into=echo.pong, first=sent) if flag else {}
            sent += args.trips if flag else 0
            return proxies.run(kind, args.trips, **words) / args.trips

        both = {"flush": plain, "payload published: fence, put, flush": dict(zip(plain, published))}
        for what, kinds in both.items():
            turns = {name: partial(trip, kind, name != "queue") for name, kind in kinds.items()}
            samples = in_turn(turns, 1, args.repeat)
            row = medians(samples)
            for ratio, base in (("released_ratio", "released"), ("ratio", "flag")):
                row[ratio] = median([q / f for q, f in zip(samples["queue"], samples[base])])
            row["queue_p99"] = percentile(samples["queue"], 99)
            table.add({"what": what, **row}, samples)
            found = found or row
        found["flush_stage"] = proxies.stats()["flush_us_mean"]
    return found


def dispatch(report: Report, args: argparse.Namespace) -> None:
    column = rate("rate", "taken and posted", "M/s")
    table = report.table("one proxy thread", [Column("what", "Descriptors")], [column])
    table.notes.append("From a full ring into a transport that completes at once; the CPU's own time, on any machine.")
    kinds = {"put of 64 B": (64, False), "put of 4 KiB": (4096, False), "put_signal of 4 KiB": (4096, True)}
    for what, (size, signal) in report.progress(list(kinds.items()), "descriptors", lambda k: k[0]):
        options = dict(descriptors=1 << 20, bytes=size, with_signal=signal, cpu=args.cpu)
        rates = in_turn({"rate": partial(instruments.measure_dispatch, **options)}, 0, args.repeat)
        rates = {"rate": [each / 1e6 for each in rates["rate"]]}
        table.add({"what": what, **medians(rates)}, rates)


def bare_one_way(provider: str, trips: int, repeat: int, dedicated: bool) -> list[float]:
    """Microseconds of a write with an immediate between two CPU threads of this process, one way."""
    options = [fabric.transport_options(rank=i, provider=provider, rails=1) for i in range(2)]
    writers = [instruments.BareWriter(option, bytes=1 << 20, dedicated=dedicated) for option in options]
    for i, address in enumerate([w.address() for w in writers]):
        writers[1 - i].connect(i, address)

    def trip() -> float:
        other = threading.Thread(target=writers[1].pong, args=(0, STAGE_BYTES, trips))
        other.start()
        spent: float = writers[0].ping(1, STAGE_BYTES, trips)
        other.join()
        return spent * 1e6 / (2 * trips)

    return in_turn({"": trip}, 1, repeat)[""]


def stages(report: Report, bench: QueueBench, trip: dict[str, float], args: argparse.Namespace) -> None:
    """Each stage of a put_signal, measured alone, and all of them together."""
    from tilescale_net.runtime import settings

    table = report.table("stages", [Column("stage", "Stage")], [us("us", "Time"), Column("how", "Measured as")])
    sent = 0
    provider = args.provider or settings.PROVIDER.get()
    bare = bare_one_way(provider, args.trips, args.repeat, bench.on_gpu)
    with bench.null(args.capacity) as proxies:
        turns = args.capacity // 2

        def one(kind: Probe) -> float:
            spent = proxies.run(kind, turns) / turns
            proxies.drain()
            return spent

        alone = in_turn({kind: partial(one, kind) for kind in (Probe.FENCE, Probe.PUSH)}, 1, args.repeat)
    with bench.pair(provider, 1024) as proxies:

        def whole() -> float:
            nonlocal sent
            words = dict(out=proxies.signal, into=proxies.there, first=sent)
            sent += args.trips
            return proxies.run(Probe.ONE_WAY, args.trips, bytes=STAGE_BYTES, **words) / args.trips

        total = in_turn({"": whole}, 1, args.repeat)[""]
        proxy = proxies.stats()
    fence, push = alone[Probe.FENCE], alone[Probe.PUSH]
    parts = [median(fence), median(push), trip["flag"] / 2, proxy["pop_us_mean"], proxy["post_us_mean"], median(bare)]
    rest = median(total) - sum(parts)  # a difference of medians: noise can exceed it
    rows: list[tuple[str, float | None, str, list[float]]] = [
        ("fence", parts[0], "device: payload written, system-scope fence", fence),
        ("push", parts[1], "device: one thread, behind one fence", push),
        ("flag to the CPU, or back", parts[2], "half of the bare flag's round trip", []),
        ("poll and pop", parts[3], "proxy: a visit to a queue that held something", []),
        ("post", parts[4], "proxy: a round of posting", []),
        ("completion", proxy["completion_us_mean"], "proxy: from post until the provider reports it", []),
        ("flush", trip["flush_stage"], "proxy: from its pop until its ticket is written", []),
        ("network", parts[5], f"bare writer, one way, {STAGE_BYTES} B", bare),
        (
            "remote visibility",
            rest if rest > 0 else None,
            "the rest: target's proxy, signal seen by the waiting kernel",
            [],
        ),
        ("put_signal to remote wait", median(total), "device: all of it, by one clock", total),
    ]
    for stage, time, how, samples in rows:
        table.add({"stage": stage, "us": time, "how": how}, {"us": samples} if samples else None)
