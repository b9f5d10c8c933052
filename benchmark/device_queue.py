"""The cost of the queue between GPU and proxy: pushes a second, round trips, descriptors a second, each stage alone.

    GPUS=1 bash launch.sh benchmark/device_queue.py
    GPUS=1 bash launch.sh benchmark/device_queue.py --provider tcp --json run.json

The proxies are the benchmark's own. Most of them use a transport that completes at once, so only the queue is measured;
for the stages, two proxies of this process communicate over a real provider.
"""

import argparse
import os

import tilescale_net as tsn
from benchmark.common import BenchmarkParser, Report, is_rank_zero, one_of, positive_int
from benchmark.common.measuring import SIMULATED

BENCH = dict(ranks=1, quick="--parts push,dispatch --repeat 1")  # see common/suite.py

PARTS = ("push", "round-trip", "dispatch", "stages")
# Defaults: on a GPU, in the simulator.
DEFAULTS = {"repeat": (7, 3), "trips": (2000, 50), "capacity": (65536, 4096)}


def parse() -> argparse.Namespace:
    parser = BenchmarkParser(__doc__.splitlines()[0], warmup=None, repeat=None)
    parser.option("--parts", one_of(*PARTS), list(PARTS), ", ".join(PARTS))
    parser.option("--repeat", positive_int, None, "timed runs, whose median is shown (7; simulator 3)")
    parser.option("--trips", positive_int, None, "round trips of a run (2000; simulator 50)")
    parser.option("--capacity", positive_int, None, "descriptors of a ring (65536; simulator 4096)")
    parser.option("--cpu", int, -1, "CPU of the proxy's and the flag's thread (any)", "N")
    text = "libfabric provider of the stages (TSN_PROVIDER, else the best)"
    parser.add_argument("--provider", metavar="NAME", help=text)
    args = parser.parse_args()
    if args.capacity and args.capacity & (args.capacity - 1):
        parser.error(f"a ring of {args.capacity} descriptors; the number must be a power of two")
    alone()
    return args


def alone() -> None:
    """One rank measures the queue: the others end here, and rank 0 becomes a new job."""
    if not is_rank_zero():
        raise SystemExit(0)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_WORLD_SIZE="1")
    os.environ.pop("VIRTUAL_NODES", None)


def without_fabric() -> str:
    """The reason why the stages cannot be measured; empty if they can."""
    from tilescale_net import errors
    from tilescale_net.runtime import fabric

    try:
        fabric.library()
    except (errors.ConfigurationError, errors.FabricError) as err:
        return " ".join(str(err).split())
    return ""


def main() -> None:
    args = parse()
    from benchmark.common import queue  # seconds of imports, after the arguments

    report = Report("queue", args)
    if "stages" in args.parts and (reason := without_fabric()):
        args.parts.remove("stages")
        if not args.parts:
            report.nothing(f"stages need a fabric: {reason}")
        report.environment["stages"] = f"not measured: {reason}"
    world = tsn.init("4M")
    bench = queue.QueueBench(world, args.cpu)
    for name, (gpu, simulator) in DEFAULTS.items():
        setattr(args, name, getattr(args, name) or (gpu if bench.on_gpu else simulator))
    report.environment["ring"] = f"{args.capacity} descriptors"
    timing = f"median of {args.repeat} kernels"
    report.environment["timing"] = timing if bench.on_gpu else f"{timing}; device {SIMULATED}, the proxy's own are real"
    if "push" in args.parts:
        queue.push_rates(report, bench, args)
        queue.places(report, bench, args)
    if "round-trip" in args.parts or "stages" in args.parts:
        trip = queue.round_trips(report, bench, args)
    if "dispatch" in args.parts:
        queue.dispatch(report, args)
    if "stages" in args.parts:
        queue.stages(report, bench, trip, args)
    report.finish()


if __name__ == "__main__":
    main()
