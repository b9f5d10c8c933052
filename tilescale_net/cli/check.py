"""`python -m tilescale_net check script.py::function`: kernels of a small job under every schedule, without a GPU."""

import argparse

from tilescale_net.cli.arguments import positive_float, positive_int


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("where", metavar="SCRIPT.py::FUNCTION", help="what sets up a rank, see docs/simulator.md")
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
    command.add_argument("--no-races", action="store_true", help="only what comes of a race is wrong, not the race")


def check(args: argparse.Namespace) -> int:
    """Explore and print what came of it; 1 where something is wrong, 3 where not all schedules could be run.

    Raises:
        ConfigurationError: the function or the schedule is invalid.
    """
    from tilescale_net.explore import reports, search
    from tilescale_net.explore.case import Case, load

    with Case(load(args.where), args.ranks, races=not args.no_races) as case:
        if args.schedule:
            report = search.repeat(case, args.schedule)
            print(*report.steps, f"wrong: {report.failure}" if report.failure else "not wrong", sep="\n")
            return int(bool(report.failure))
        if args.random:
            report = search.random(case, args.random, args.seed, args.depth)
        else:
            report = search.every(case, args.most, args.seconds, args.preemptions)
        print(reports.text(report, args.where, args.ranks))
    return 1 if report.failure else 0 if report.complete or args.random else 3
