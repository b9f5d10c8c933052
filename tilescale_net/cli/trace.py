"""`python -m tilescale_net trace FILE`: a summary of a timeline, put together first if its job left it in parts."""

import argparse
import os

from tilescale_net.cli.arguments import positive_int
from tilescale_net.errors import ConfigurationError
from tilescale_net.trace import timeline


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", metavar="FILE", help="what TSN_TRACE named")
    command.add_argument(
        "--longest", type=positive_int, default=10, metavar="N", help="how many waits to list (%(default)s)"
    )


def show(args: argparse.Namespace) -> int:
    """Print the summary.

    Raises:
        ConfigurationError: there is no trace, or it is damaged.
    """
    left = timeline.part_files(args.file)
    if left and not os.path.exists(args.file):
        try:
            timeline.write(args.file, timeline.read_parts(args.file))
        except ValueError as err:
            raise ConfigurationError(f"{args.file} cannot be put together: {err}") from None
        print(f"put {args.file} together from the {len(left)} parts that a job left beside it")
    print(timeline.summary(timeline.load(args.file), args.longest))
    return 0
