"""The tables of benchmark/device_queue.py."""

import threading

from benchmark.common.measuring import median, percentile
from benchmark.common.queue_bench import Probe, QueueBench
from benchmark.common.report import Report
from benchmark.common.table import Column

# Blocks, warps of a block, lanes of a warp that push, queues.
GEOMETRIES = [(1, 1, 1, 1), (1, 1, 8, 1), (1, 1, 32, 1), (1, 4, 32, 1), (4, 1, 32, 1), (2, 1, 32, 2), (4, 1, 32, 4)]
PLACES = (16, 2)  # multiprocessors that a single thread is tried on: on a GPU, in the simulator
STAGE_BYTES = 256  # more than travels inside a message


def push_rates(report: Report, bench: QueueBench, args) -> None:
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


def places(report: Report, bench: QueueBench, args) -> None:
    """One thread again, on one multiprocessor after another, spread over the device."""
    columns = [
        Column("slowest", "slowest", better="higher", unit="M/s"),
        Column("mean", "mean", better="higher", unit="M/s"),
        Column("fastest", "fastest", better="higher", unit="M/s"),
    ]
    count = PLACES[0 if bench.on_gpu else 1]
    table = report.table("one thread, by multiprocessor", [Column("what", "What")], columns)
    table.notes.append(
        f"{count} multiprocessors, one at a time. The atomic that takes a slot is the longest part of "
        "a push, and takes longer where the queue's head lies in the other half of the L2 cache. Mean: all pushes over all "
        "their time."
    )
    blocks = _multiprocessors(bench) if bench.on_gpu else count
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
            table.add(
                {"what": what, "slowest": min(rates), "mean": mean, "fastest": max(rates)}, {"by multiprocessor": rates}
            )


def _multiprocessors(bench: QueueBench) -> int:
    import torch

    return torch.cuda.get_device_properties(bench.world.device).multi_processor_count


def round_trips(report: Report, bench: QueueBench, args) -> dict[str, float]:
    """The table of round trips; what the stages need of it."""
    from tilescale_net import _native

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
    echo = _native.FlagEcho(bench.on_gpu, args.cpu)
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
            for ratio, flag in (("released_ratio", "released"), ("ratio", "flag")):
                row[ratio] = median([q / f for q, f in zip(samples["queue"], samples[flag])])
            row["queue_p99"] = percentile(samples["queue"], 99)
            table.add({"what": "payload published: fence, put, flush" if publish else "flush", **row}, samples)
            if not publish:
                found = row
        found["flush_stage"] = proxies.stats()["flush_us_mean"]
    del echo
    return found


def dispatch(report: Report, args) -> None:
    from tilescale_net import _native

    column = Column("rate", "taken and posted", better="higher", unit="M/s")
    table = report.table("one proxy thread", [Column("what", "Descriptors")], [column])
    table.notes.append("From a full ring into a transport that completes at once; the CPU's own time, on any machine.")
    kinds = {"put of 64 B": (64, False), "put of 4 KiB": (4096, False), "put_signal of 4 KiB": (4096, True)}
    for what, (size, signal) in report.progress(list(kinds.items()), "descriptors", lambda k: k[0]):
        rates = [
            _native.measure_dispatch(descriptors=1 << 20, bytes=size, with_signal=signal, cpu=args.cpu) / 1e6
            for _ in range(args.repeat)
        ]
        table.add({"what": what, "rate": median(rates)}, {"rate": rates})


def bare_one_way(provider: str, trips: int, repeat: int, dedicated: bool) -> list[float]:
    """Microseconds of a write with an immediate between two CPU threads of this process, one way."""
    from tilescale_net import _native, fabric

    writers = [
        _native.BareWriter(
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


def stages(report: Report, bench: QueueBench, trip: dict[str, float], args) -> None:
    """Each stage of a put_signal on its way, measured alone, and all of them together."""
    from tilescale_net.runtime import settings

    table = report.table(
        "stages",
        [Column("stage", "Stage")],
        [Column("us", "Time", better="lower", unit="us"), Column("how", "Measured as")],
    )

    def add(stage: str, us: float | None, how: str, samples=()):
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
