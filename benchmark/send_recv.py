"""Two-sided ping-pong between rank 0 and every other rank, from GPU memory and from host memory.

    GPUS=2 VIRTUAL_NODES=2 bash launch.sh benchmark/send_recv.py
    GPUS=2 bash launch.sh benchmark/send_recv.py --sizes 8..128M --buffers host --json run.json

A message goes there and back in chunks, several of them in flight; receives are posted before they are needed. Lat is the
whole round trip and Gbps = bytes x 8 / round trip, so a link that carries one way at a time can show half its speed at
most. Figures are medians over the repetitions, averaged over the pairs. Returned data are verified.
"""

import argparse
from typing import Any

from benchmark.common import (
    BenchmarkParser,
    Column,
    Report,
    byte_count,
    format_bytes,
    median,
    percentile,
    positive_float,
    positive_int,
    rate,
    us,
)
from benchmark.common.fabric import FabricJob, SizeColumn, add_fabric_arguments, note_of_cores, run
from benchmark.common.modules import instruments, torch

BENCH = dict(nodes=2, quick="--sizes 64K,1M --repeat 3")  # see common/suite.py

MEASURED_LINK = 4 << 20  # bytes of the messages that measure a link of unknown speed


def parse() -> tuple[BenchmarkParser, argparse.Namespace]:
    parser = BenchmarkParser(
        __doc__.splitlines()[0], warmup=2, repeat=10, sizes="128K..128M", simulated="128K..16M", check=True
    )
    text = "where messages start and end (both; device needs a GPU)"
    parser.add_argument("--buffers", choices=("device", "host", "both"), default="both", help=text)
    parser.option("--chunk", byte_count, 1 << 20, "largest transfer (1M)")
    parser.option("--window", positive_int, 64, "chunks in flight each way")
    text = "speed of the link in 10^9 bits a second, for BusBW (as the NIC tells, else measured one way)"
    parser.option("--link-gbps", positive_float, None, text)
    add_fabric_arguments(parser)
    return parser, parser.parse_args()


class BufferSet:
    """Buffers of one kind: a session on every rank, all of them introduced to one another. `how`: text, how the
    network reaches the buffers."""

    def __init__(self, job: FabricJob, kind: str) -> None:
        self.job, self.args = job, job.args
        self.bytes = instruments.ping_pong_bytes(max(job.args.sizes), job.args.chunk)
        fields = {"message_buffers": 0, "delivery_complete": False}
        self.device_fields: dict[str, Any] = {}
        self.how = "registered host memory"
        if kind == "device":
            fields |= self._on_gpu()
        self.session = job.session(self.bytes, **fields)
        self.properties = self.session.properties()

    def _on_gpu(self) -> dict[str, Any]:
        from tilescale_net import _native

        ordinal = self.job.device()
        torch.cuda.set_device(ordinal)
        self.memory = torch.zeros(self.bytes, dtype=torch.uint8, device=f"cuda:{ordinal}")
        torch.cuda.synchronize()
        location = {"device_address": self.memory.data_ptr(), "device": ordinal}
        self.device_fields = location
        # All ranks take the same path: if one cannot register its memory, the others stage as well.
        probe = _native.Transport(self.job.options(device_memory=True, message_buffers=0))
        why = None
        if not probe.properties()["device_memory"]:
            why = "the provider does not reach GPU memory"
        else:
            try:
                probe.register_memory(location["device_address"], self.bytes, "cuda", ordinal)
            except Exception as err:
                why = str(err)
        reasons = [r for r in self.job.control.gather("device memory", why) if r]
        if reasons:
            self.how = f"GPU memory, staged through pinned host memory ({reasons[0]})"
            return {}
        self.how = "GPU memory, registered with the NIC"
        return {"device_memory": True, **location}

    def round_trips(self, peer: int, size: int) -> list[float]:
        """Seconds of every timed round trip between rank 0 and `peer`; on those two ranks only."""
        return self.session.ping_pong(
            peer if self.job.rank == 0 else 0,
            size,
            iterations=self.args.repeat,
            warmup=max(1, self.args.warmup),
            chunk=self.args.chunk,
            window=self.args.window,
            starter=self.job.rank == 0,
            verify=not self.args.no_check,
            **self.device_fields,
        )

    def measure(self, size: int) -> tuple[float, list[float]]:
        """Microseconds of a round trip, mean over the pairs of the median, and all samples; on rank 0."""
        medians, samples = [], []
        for peer in range(1, self.job.size):
            self.job.control.agree("pair", f"{peer}, {size}")
            if self.job.rank in (0, peer):
                trips = [s * 1e6 for s in self.round_trips(peer, size)]
                if trips:
                    medians.append(median(trips))
                    samples += trips
        return (sum(medians) / len(medians) if medians else 0.0), samples


def one_way_gbps(job: FabricJob) -> float:
    """Bandwidth of large messages from rank 0 to rank 1, in 10^9 bits a second. Collective."""
    session = job.session(2 * MEASURED_LINK, message_buffers=0, delivery_complete=False)
    rate = 0.0
    if job.rank < 2:
        size = min(MEASURED_LINK, session.properties()["max_send"])
        for _ in range(2):  # the first one connects
            got = session.bandwidth(1 - job.rank, "send", size, 64, initiator=job.rank == 0)
            rate = got["iterations"] * size * 8 / got["seconds"] / 1e9 if got["iterations"] else 0.0
    return job.control.gather("link", rate)[0]


def kinds_of(parser: BenchmarkParser, args: argparse.Namespace, has_gpu: bool) -> list[str]:
    if args.buffers == "both":
        return ["device", "host"] if has_gpu else ["host"]
    if args.buffers == "device" and not has_gpu:
        parser.error("--buffers device needs a GPU on every rank; this job has none")
    return [args.buffers]


def main() -> None:
    parser, args = parse()
    job = FabricJob(parser, args)
    kinds = kinds_of(parser, args, all(d is not None for d in job.control.gather("devices", job.device())))
    report = Report("send_recv", args)
    columns = [Column("count", "Count", "d")]
    for kind in kinds:
        name = kind.capitalize()
        columns += [rate(f"{kind}_gbps", name, "Gbps"), Column(f"{kind}_bus", "BusBW", unit="%")]
        columns += [us(f"{kind}_us", "Lat", series=name)]
    table = report.table("send_recv", [SizeColumn("bytes", "Size")], columns)
    link = args.link_gbps
    buffer_sets = {}
    for kind in kinds:
        buffer_sets[kind] = buffers = BufferSet(job, kind)
        report.environment.update(job.header(buffers.properties))
        report.environment[f"{kind} buffers"] = buffers.how
        if not link:
            link = buffers.properties["link_gbps"]
            said = "as the NIC tells" if link else "measured with large messages, one way"
            link = link or one_way_gbps(job)
            report.environment["link"] = f"{link:.1f} Gbps, {said}"
    for size in report.progress(args.sizes, "sizes", format_bytes):
        row, samples = {"bytes": size, "count": size // 4 or None}, {}
        for kind, buffers in buffer_sets.items():
            trip, samples[f"{kind}_us"] = buffers.measure(size)
            if job.rank == 0:
                gbps = size * 8 / trip / 1e3
                row |= {f"{kind}_us": trip, f"{kind}_gbps": gbps, f"{kind}_bus": 100 * gbps / link}
                row[f"{kind}_p99"] = percentile(samples[f"{kind}_us"], 99)
        table.add(row, samples)
    table.notes.append("Lat is the round trip; Gbps = bytes x 8 / Lat, so 50 % of the link is the ceiling.")
    if "device" not in kinds and args.buffers == "both":
        report.notes.append("No GPU: host buffers only.")
    if cores := note_of_cores(2, "the two ranks of a pair") if not job.multi_host else None:
        report.notes.append(cores)
    report.finish()


if __name__ == "__main__":
    run(main)
