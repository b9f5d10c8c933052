"""`python -m tilescale_net`, installed as the command `tilescale_net` too: run, info, doctor, bench,
model, tune, trace, check, precompile, settings.

Only the standard library is imported before a subcommand is chosen, so that `run` starts at once.
"""

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable

from tilescale_net import __version__, launch
from tilescale_net.cli import model, precompile
from tilescale_net.cli.arguments import Parser, non_negative_int, positive_float, positive_int, writable_file
from tilescale_net.errors import ConfigurationError
from tilescale_net.launch import run
from tilescale_net.runtime import private_folder, settings
from tilescale_net.trace import timeline

# -- trace: a summary of a timeline -----------------------------------------------------------------------------------


def trace_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `trace`."""
    command.add_argument("file", metavar="FILE", help="the file of TSN_TRACE")
    command.add_argument(
        "--longest", type=positive_int, default=10, metavar="N", help="number of waits to list (%(default)s)"
    )


def trace(args: argparse.Namespace) -> int:
    """Print the summary of a timeline, first merged if its job left it in parts. Raises ConfigurationError: there is no
    trace, or it is damaged."""
    left = timeline.part_files(args.file)
    if left and not os.path.exists(args.file):
        try:
            timeline.write(args.file, timeline.read_parts(args.file))
        except ValueError as err:
            raise ConfigurationError(f"{args.file} cannot be put together: {err}") from None
        print(f"put {args.file} together from the {len(left)} parts that a job left beside it")
    print(timeline.summary(timeline.load(args.file), args.longest))
    return 0


# -- tune: finds and stores the fastest settings of calls on this machine
# ------------------------------------------------

PRODUCTS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def tune_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `tune`."""
    command.add_argument("what", choices=(*PRODUCTS, "moe"), help="calls to tune")
    text = f"ranks on this host (all GPUs; simulator {settings.GPUS.default}); ranks of torchrun or srun use theirs"
    command.add_argument("--ranks", type=positive_int, metavar="N", help=text)
    text = "rows of x on a rank; moe: tokens of a rank (%(default)s)"
    command.add_argument("--rows", type=positive_int, nargs="+", default=[4096], metavar="M", help=text)
    whole = (("k", 7168), ("n", 8192), ("experts", 256), ("hidden", 7168), ("top-k", 8), ("most", 12))
    texts = {"k": "columns of x", "n": "columns of w", "most": "candidates to try"}
    for name, default in whole:
        command.add_argument(
            f"--{name}", type=positive_int, default=default, help=f"{texts.get(name, 'moe')} (%(default)s)"
        )
    command.add_argument("--dtype", choices=("bf16", "fp16", "fp8"), default="bf16", help="(%(default)s)")
    command.add_argument("--mode", choices=("throughput", "latency"), default="throughput", help="moe (%(default)s)")
    command.add_argument("--layout", choices=("expert", "rank"), default="expert", help="moe (%(default)s)")
    command.add_argument("--heap", default="", metavar="BYTES", help="symmetric heap, such as 4G (TSN_HEAP_SIZE)")


def tune(args: argparse.Namespace) -> int:
    """Start the ranks, which run the same command (`args.words`), or be one of them; the exit code. Raises
    ConfigurationError: the heap is no size."""
    settings.HEAP_SIZE.value_of(args.heap, "--heap")
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

    world = tsn.init(args.heap or None)
    kept = tuned.path_of(tuned.place_of(world))
    if world.rank == 0:
        subject = "dispatch and combine of kernels.moe.AllToAll" if args.what == "moe" else f"ops.{args.what}"
        where = "GPUs" if world.device_kind == "cuda" else "simulated ranks, whose times mean nothing"
        print(
            f"tune: {subject} on {world.size} {where}; tries up to {args.most} candidates for each number of rows "
            f"({', '.join(map(str, args.rows))}), prints a line for each, and stores the fastest in {kept} for later calls of these "
            "sizes. The first call of a candidate compiles its kernels, which can take a minute.",
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
    command.add_argument(
        "where", metavar="SCRIPT.py::FUNCTION", help="function that sets up a rank, see docs/simulator.md"
    )
    command.add_argument("-n", "--ranks", type=positive_int, default=2, metavar="N", help="ranks (%(default)s)")
    command.add_argument("--random", type=positive_int, metavar="N", help="N random schedules instead of all")
    command.add_argument(
        "--seed", type=non_negative_int, default=0, metavar="S", help="seed of the first random schedule (%(default)s)"
    )
    command.add_argument(
        "--depth",
        type=positive_int,
        default=3,
        metavar="D",
        help="changes of priority in a random schedule, plus 1 (%(default)s)",
    )
    command.add_argument(
        "--schedule", metavar="TEXT|FILE", help="only this schedule, from the output of an earlier check"
    )
    command.add_argument(
        "--preemptions", type=non_negative_int, default=-1, metavar="P", help="at most P preemptions in a schedule"
    )
    command.add_argument("--most", type=positive_int, default=1 << 62, metavar="N", help="stop after N schedules")
    command.add_argument(
        "--seconds", type=positive_float, default=600.0, metavar="S", help="stop after S seconds (%(default)g)"
    )
    command.add_argument("--no-races", action="store_true", help="a race is no error, only its consequences")


def check(args: argparse.Namespace) -> int:
    """Explore the schedules and print the result; 1 if a schedule is wrong, 3 if not all could run.
    Raises ConfigurationError: the function or the schedule is invalid."""
    from tilescale_net.explore import search
    from tilescale_net.explore.case import Case, load

    function = load(args.where)
    try:
        made = Case(function, args.ranks, races=not args.no_races)
    except ConfigurationError:
        raise
    except Exception:  # of the function
        traceback.print_exc()
        raise ConfigurationError(f"{args.where} does not set up a rank, see above") from None
    with made as case:
        if args.schedule:
            report = search.repeat(case, args.schedule, args.seconds)
            print(*report.steps, f"wrong: {report.failure}" if report.failure else "not wrong", sep="\n")
            return int(bool(report.failure))
        if args.random:
            report = search.random(case, args.random, args.seed, args.depth, args.seconds)
        else:
            report = search.every(case, args.most, args.seconds, args.preemptions)
        print(search.text(report, args.where, args.ranks))
    return 1 if report.failure else 0 if report.complete or args.random else 3


# -- all commands ------------------------------------------------------------------------------------------------------


Call = Callable[[argparse.Namespace], int]


def parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; `args.call(args)` runs the chosen one and returns its exit code."""
    top = Parser(prog="tilescale_net", description="Communication primitives for tilelang kernels.")
    top.add_argument("--version", action="version", version=f"tilescale_net {__version__}")
    added = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(
        name: str, text: str, verb: str, call: Call, epilog: str = "", abbrev: bool = True
    ) -> argparse.ArgumentParser:
        about = f"{verb}{text}." if verb else f"{text[0].upper()}{text[1:]}."
        command = added.add_parser(name, help=text, description=about, epilog=epilog, allow_abbrev=abbrev)
        command.set_defaults(call=call)
        return command

    text = "run a script on every GPU of a job, or on simulated ones"
    run.add_arguments(add("run", text, "", run.run, abbrev=False))
    text = "versions, GPUs, links, NICs, compilers and networks, and those that a job would use"
    add("info", text, "Prints ", _info).add_argument("--json", action="store_true", help="as JSON")
    text = "check the requirements of a job on this machine, and print a remedy for each missing one"
    command = add("doctor", text, "", _doctor, "Exit code: 0, or 1 if something is missing.")
    command.add_argument("--json", action="store_true", help="as JSON")
    command = add(
        "bench", "run all benchmarks that this machine supports, and write a page of their results", "", _bench
    )
    command.add_argument(
        "--quick", action="store_true", help="few sizes and repetitions, to test that everything works"
    )
    command.add_argument("--only", metavar="LIST", help="comma-separated names of files in benchmark/")
    text = "the page (%(default)s), written after each benchmark"
    command.add_argument("--output", type=writable_file, default="tilescale_net_bench.md", metavar="FILE", help=text)
    text = f"ranks of the collectives (all GPUs; simulator {settings.GPUS.default})"
    command.add_argument("-n", "--ranks", type=positive_int, metavar="N", help=text)
    text = "bytes on each link and expected times of MoE dispatch and combine on a cluster, from measured costs"
    model.add_arguments(add("model", text, "", model.run))
    text = "find and store the fastest settings of GEMMs with their communication, or MoE calls, on this machine"
    tune_arguments(add("tune", text, "", tune, abbrev=False))
    text = "which rank waited for which in a timeline of TSN_TRACE, and the longest waits"
    trace_arguments(add("trace", text, "Prints ", trace))
    text = "run the kernels of a small job under every schedule, and print a wrong one"
    epilog = "Exit code: 0, 1 if a schedule is wrong, 2 for wrong arguments, 3 if not all schedules could run."
    check_arguments(add("check", text, "", check, epilog))
    text = "compile the kernels of listed objects into a folder for an image, without a GPU"
    precompile.precompile_arguments(add("precompile", text, "", precompile.precompile))
    add("settings", "the environment variables that the package reads, as markdown", "Prints ", _settings)
    return top


def _settings(args: argparse.Namespace) -> int:
    print(settings.page(), end="")
    return 0


def _bench(args: argparse.Namespace) -> int:
    root = run.PACKAGE.parent
    if not (root / "benchmark" / "common" / "suite.py").is_file():
        launch.refuse("the benchmarks are in a checkout of the project, not in the wheel")
    sys.path.append(str(root))
    from benchmark.common import suite

    return suite.main(args)


def _info(args: argparse.Namespace) -> int:
    from tilescale_net.cli import info

    found = info.collect()
    print(json.dumps(found, indent=1) if args.json else "\n".join(info.lines(found)))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from tilescale_net.cli import doctor

    findings = list(doctor.Doctor().run())
    print(json.dumps([vars(f) for f in findings], indent=1) if args.json else doctor.text(findings))
    return int(any(f.state == doctor.MISSING for f in findings))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    launch.program = "tilescale_net"
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parser().parse_args(arguments)
    args.words = arguments
    os.environ.update(private_folder.for_tilelang())
    try:
        if args.call is not _settings:
            settings.check()
        call: Call = args.call
        code = call(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except ConfigurationError as err:
        launch.say(str(err))
        return 2
    except BrokenPipeError:  # the reader of the output has ended, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the rest
        return 128 + signal.SIGPIPE
