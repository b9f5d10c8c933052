"""Start-up cost of a rank: time of init, memory, open files, endpoints, queues, against the number of ranks.

    for n in 2 8 32 64; do GPUS=$n VIRTUAL_NODES=2 bash launch.sh benchmark/start_up.py; done

One row for the job that runs it. The heap is small, so that growth with the number of ranks shows. Times are of
processes that have imported everything; if ranks outnumber processors they wait for one another.
"""

import os
from typing import Any

import tilescale_net as tsn
from benchmark.common import BenchmarkParser, Column, Report, is_rank_zero, median
from benchmark.common.measuring import gather, in_turn, wall_us

BENCH = dict(ranks=2, quick="--warmup 1 --repeat 1")  # see common/suite.py
HEAP = 4 << 20


def resident() -> float:
    """Private MiB of this process."""
    with open("/proc/self/smaps_rollup") as f:
        words = [line.split() for line in f]
    return sum(int(w[1]) for w in words if w[0].startswith("Private_")) / 1024


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def main() -> None:
    args = BenchmarkParser(__doc__.splitlines()[0], warmup=1, repeat=3).parse_args()

    report = Report("start_up", args)
    before, files = resident(), open_files()
    seconds = wall_us(lambda: tsn.init(HEAP)) / 1e6
    world = tsn.world()
    barriers = in_turn({"": lambda: wall_us(tsn.barrier)}, args.warmup, args.repeat)[""]
    proxy: dict[str, Any] = world.proxy.properties if world.proxy is not None else {}
    staging = proxy.get("staging_bytes", 0) / 2**20
    found = gather(
        dict(
            seconds=seconds, barrier=median(barriers) / 1e3, memory=resident() - before, files=open_files() - files,
            context=world.context_tensor.untyped_storage().nbytes(), endpoints=proxy.get("endpoints", 0), staging=staging,
            **{name: proxy.get(f"{name}_bytes", 0) / 1024 for name in ("queue", "window")},
        )
    )  # fmt: skip
    names = {
        "seconds": ("init", "s"), "barrier": ("barrier of the host", "ms"), "memory": ("memory of a rank", "MiB"),
        "files": ("open files", ""), "context": ("context", "B"), "queue": ("queues", "KiB"), "window": ("windows", "KiB"),
        "staging": ("staging", "MiB"), "endpoints": ("endpoints", ""),
    }  # fmt: skip
    keys = [Column("ranks", "ranks", ",d"), Column("nodes", "nodes", ",d")]
    columns = [Column(k, title, better="lower", unit=unit) for k, (title, unit) in names.items()]
    table = report.table("Start-up", keys, columns)
    table.notes.append("init: of the slowest rank; others: of the rank with the most, beyond what it had before init.")
    if is_rank_zero():
        table.add({"ranks": tsn.size(), "nodes": world.topology.nodes} | {k: max(f[k] for f in found) for k in names})
    report.finish()


if __name__ == "__main__":
    main()
