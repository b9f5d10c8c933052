"""The commands `trace`, `tune` and `check` of `python -m tilescale_net`: their arguments, and what they call."""

import argparse
import os

from tilescale_net.cli.arguments import positive_float, positive_int
from tilescale_net.errors import ConfigurationError
from tilescale_net.launch import run
from tilescale_net.runtime import settings
from tilescale_net.trace import timeline

# -- trace: a summary of a timeline -----------------------------------------------------------------------------------


def trace_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `trace`."""
    command.add_argument("file", metavar="FILE", help="the file that TSN_TRACE named")
    command.add_argument(
        "--longest", type=positive_int, default=10, metavar="N", help="how many waits to list (%(default)s)"
    )


def trace(args: argparse.Namespace) -> int:
    """Print the summary of a timeline, put together first if its job left it in parts. Raises ConfigurationError: there
    is no trace, or it is damaged."""
    left = timeline.part_files(args.file)
    if left and not os.path.exists(args.file):
        try:
            timeline.write(args.file, timeline.read_parts(args.file))
        except ValueError as err:
            raise ConfigurationError(f"{args.file} cannot be put together: {err}") from None
        print(f"put {args.file} together from the {len(left)} parts that a job left beside it")
    print(timeline.summary(timeline.load(args.file), args.longest))
    return 0


# -- tune: finds how calls are made best on this machine, and keeps it ---------------------------------------------------

PRODUCTS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def tune_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `tune`."""
    command.add_argument("what", choices=(*PRODUCTS, "moe"), help="calls that are tuned")
    text = (
        f"ranks on this host (all GPUs; simulator {settings.GPUS.default}); a rank that torchrun or srun has started takes "
        "theirs"
    )
    command.add_argument("--ranks", type=positive_int, metavar="N", help=text)
    text = "rows of x on a rank; moe: tokens of a rank (%(default)s)"
    command.add_argument("--rows", type=positive_int, nargs="+", default=[4096], metavar="M", help=text)
    whole = (("k", 7168), ("n", 8192), ("experts", 256), ("hidden", 7168), ("top-k", 8), ("most", 12))
    texts = {"k": "columns of x", "n": "columns of w", "most": "candidates that are tried"}
    for name, default in whole:
        command.add_argument(
            f"--{name}", type=positive_int, default=default, help=f"{texts.get(name, 'moe')} (%(default)s)"
        )
    command.add_argument("--dtype", choices=("bf16", "fp16", "fp8"), default="bf16", help="(%(default)s)")
    command.add_argument("--mode", choices=("throughput", "latency"), default="throughput", help="moe (%(default)s)")
    command.add_argument("--layout", choices=("expert", "rank"), default="expert", help="moe (%(default)s)")
    command.add_argument("--heap", default=None, metavar="BYTES", help="symmetric heap, such as 4G (TSN_HEAP_SIZE)")


def tune(args: argparse.Namespace) -> int:
    """Start the ranks, which run the same command (`args.words`), or be one of them; the exit code."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _tune(args)
        return 0
    if args.ranks is not None:
        os.environ["GPUS"] = str(args.ranks)
    elif settings.DEVICE.get() != "simulator" and (gpus := run.visible_gpus()):
        os.environ["GPUS"] = str(gpus)
    return run.start(["-m", "tilescale_net", *args.words])


def _tune(args: argparse.Namespace) -> None:
    """A rank."""
    import torch

    import tilescale_net as tsn
    from tilescale_net import tuning
    from tilescale_net.runtime import tuned

    world = tsn.init(args.heap)
    kept = tuned.path_of(tuned.place_of(world))
    if world.rank == 0:
        what = "dispatch and combine of kernels.moe.AllToAll" if args.what == "moe" else f"ops.{args.what}"
        where = "GPUs" if world.device_kind == "cuda" else "simulated ranks, whose times mean nothing"
        print(
            f"tune: {what} on {world.size} {where}; tries up to {args.most} ways for each number of rows "
            f"({', '.join(map(str, args.rows))}), a line for each, and keeps the fastest in {kept}; later calls of these "
            "sizes take it. The first call of a way compiles its kernels, which can take a minute.",
            flush=True,
        )
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}[args.dtype]
    for rows in args.rows:
        if args.what == "moe":
            sizes = (args.experts, rows, args.hidden, args.top_k)
            found = tuning.moe(*sizes, dtype, args.mode, layout=args.layout, most=args.most)
        else:
            found = tuning.product(args.what, rows, args.k, args.n, dtype=dtype, most=args.most)
        if world.rank == 0:
            print(found.text(), flush=True)
    if world.rank == 0:
        print(f"kept in {kept}")
    tsn.finalize()


# -- check: kernels of a small job under every schedule, without a GPU ----------------------------------------------------


def check_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `check`."""
    command.add_argument("where", metavar="SCRIPT.py::FUNCTION", help="sets up a rank, see docs/simulator.md")
    command.add_argument("-n", "--ranks", type=positive_int, default=2, metavar="N", help="ranks (%(default)s)")
    command.add_argument("--random", type=positive_int, metavar="N", help="instead of all schedules: N random ones")
    command.add_argument("--seed", type=int, default=0, metavar="S", help="of the first random one (%(default)s)")
    command.add_argument(
        "--depth", type=int, default=3, metavar="D", help="of random ones: changes of priority, plus 1 (%(default)s)"
    )
    command.add_argument("--schedule", metavar="TEXT|FILE", help="only this one, as printed by an earlier check")
    command.add_argument("--preemptions", type=int, default=-1, metavar="P", help="at most P in a schedule")
    command.add_argument("--most", type=positive_int, default=1 << 62, metavar="N", help="end after N schedules")
    command.add_argument(
        "--seconds", type=positive_float, default=600.0, metavar="S", help="end after S seconds (%(default)g)"
    )
    command.add_argument(
        "--no-races", action="store_true", help="only the consequences of a race are wrong, not the race"
    )


def check(args: argparse.Namespace) -> int:
    """Explore the schedules and print the result; 1 where something is wrong, 3 where not all schedules could be run.
    Raises ConfigurationError: the function or the schedule is invalid."""
    from tilescale_net.explore import reports, search
    from tilescale_net.explore.case import Case, load

    with Case(load(args.where), args.ranks, races=not args.no_races) as case:
        if args.schedule:
            report = search.repeat(case, args.schedule, args.seconds)
            print(*report.steps, f"wrong: {report.failure}" if report.failure else "not wrong", sep="\n")
            return int(bool(report.failure))
        if args.random:
            report = search.random(case, args.random, args.seed, args.depth, args.seconds)
        else:
            report = search.every(case, args.most, args.seconds, args.preemptions)
        print(reports.text(report, args.where, args.ranks))
    return 1 if report.failure else 0 if report.complete or args.random else 3
