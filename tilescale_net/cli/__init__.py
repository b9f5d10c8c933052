"""`python -m tilescale_net`, installed as the command `tilescale_net` too: run, info, settings.

Only the standard library is imported before a subcommand is chosen, so that `run` starts at once.
"""

from __future__ import annotations

import argparse
import sys

from tilescale_net import __version__
from tilescale_net.launch import run


def parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; `args.call(args)` runs the chosen one and returns its exit code."""
    top = argparse.ArgumentParser(prog="tilescale_net", description="Communication primitives for tilelang kernels.")
    top.add_argument("--version", action="version", version=f"tilescale_net {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    text = "run a script on every GPU of a job, or on simulated ones"
    command = commands.add_parser("run", help=text, description=f"{text.capitalize()}.", allow_abbrev=False)
    run.add_arguments(command)
    command.set_defaults(call=run.run)
    text = "versions, GPUs, compilers and networks as this installation finds them"
    command = commands.add_parser("info", help=text, description=f"{text.capitalize()}.")
    command.set_defaults(call=_info)
    text = "the environment variables that the package reads"
    command = commands.add_parser("settings", help=text, description=f"Prints {text}, as markdown.")
    command.set_defaults(call=_settings)
    return top


def _settings(args: argparse.Namespace) -> int:
    from tilescale_net.cli import settings

    print(settings.page(), end="")
    return 0


def _info(args: argparse.Namespace) -> int:
    from tilescale_net.cli import info

    print("\n".join(info.lines()))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    args = parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    return args.call(args)
