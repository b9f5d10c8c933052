"""`python -m tilescale_net`, installed as the command `tilescale_net` too: run, info, doctor, bench,
model, tune, trace, check, precompile, settings.

Only the standard library is imported before a subcommand is chosen, so that `run` starts at once.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable

from tilescale_net import __version__, launch
from tilescale_net.cli import commands, model, precompile
from tilescale_net.cli.arguments import positive_int, writable_file
from tilescale_net.errors import ConfigurationError
from tilescale_net.launch import run
from tilescale_net.runtime import private_folder, settings

Call = Callable[[argparse.Namespace], int]


def parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; `args.call(args)` runs the chosen one and returns its exit code."""
    top = argparse.ArgumentParser(prog="tilescale_net", description="Communication primitives for tilelang kernels.")
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
    text = "versions, GPUs, links, NICs, compilers and networks, and what a job would use of them"
    add("info", text, "Prints ", _info).add_argument("--json", action="store_true", help="as JSON")
    text = "check what a job on this machine needs, and say what to do where something is missing"
    command = add("doctor", text, "", _doctor, "Exit code: 0, or 1 when something is missing.")
    command.add_argument("--json", action="store_true", help="as JSON")
    command = add("bench", "run all benchmarks that fit this machine, and write a page of their results", "", _bench)
    command.add_argument("--quick", action="store_true", help="few sizes and repetitions: whether everything works")
    command.add_argument("--only", metavar="LIST", help="comma-separated names of files in benchmark/")
    text = "the page (%(default)s), written after each benchmark"
    command.add_argument("--output", type=writable_file, default="tilescale_net_bench.md", metavar="FILE", help=text)
    text = f"ranks of the collectives (all GPUs; simulator {settings.GPUS.default})"
    command.add_argument("-n", "--ranks", type=positive_int, metavar="N", help=text)
    text = "bytes on each link and expected times of MoE dispatch and combine on a cluster, from measured costs"
    model.add_arguments(add("model", text, "", model.run))
    text = "find how GEMMs with their communication, or MoE calls, are made best on this machine, and keep it"
    commands.tune_arguments(add("tune", text, "", commands.tune, abbrev=False))
    text = "which rank waited for which in a timeline that TSN_TRACE has written, and the longest waits"
    commands.trace_arguments(add("trace", text, "Prints ", commands.trace))
    text = "run the kernels of a small job under every schedule, and say which one goes wrong"
    epilog = "Exit code: 0, 1 when a schedule goes wrong, 2 for wrong arguments, 3 when not all could be run."
    commands.check_arguments(add("check", text, "", commands.check, epilog))
    text = "compile the kernels of listed objects into a folder that an image ships, without a GPU"
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
        return call(args)
    except ConfigurationError as err:
        launch.say(str(err))
        return 2
