"""Exploration of a case by every schedule, random ones, or one again; and its report."""

import itertools
import os
import re
import time
from dataclasses import dataclass, field

from tilescale_net.errors import ConfigurationError
from tilescale_net.explore.case import Case

# -- reports, and schedules in a line ----------------------------------------------------------------------------------


_MOST_STEPS = 80  # printed ones


@dataclass
class Report:
    """Result of an exploration.

    Attributes:
        schedules: how many were run to their end.
        cut: how many were abandoned because they would have repeated others.
        states: final states of memory that differ.
        events: decisions of the longest schedule.
        complete: whether there are no other schedules.
        not_followed: operations of kernels whose other orders are not explored, with lines; then `complete` is false.
        failure: the error; "" without one.
        schedule: of the failure, as `repeat` takes it.
        preemptions: how often that schedule leaves a runnable block.
        steps: its events.
        seed: of the failure, for random schedules.
        seconds: that it took.
    """

    schedules: int
    cut: int
    states: int
    events: int
    complete: bool
    seconds: float
    failure: str = ""
    schedule: str = ""
    preemptions: int = 0
    steps: list[str] = field(default_factory=list)
    seed: int | None = None
    not_followed: list[str] = field(default_factory=list)


def packed(schedule: list[int]) -> str:
    """A schedule as text: the numbers of the processes in order, 3x4 for 3 four times."""
    runs = [(value, len(list(group))) for value, group in itertools.groupby(schedule)]
    return ".".join(f"{value}x{count}" if count > 1 else str(value) for value, count in runs)


def unpacked(text: str) -> list[int]:
    """The schedule in a line, or in the file that it names. Raises ConfigurationError: it is invalid."""
    if os.path.isfile(text):
        with open(text) as file:
            text = file.read()
    text = text.strip()
    if not re.fullmatch(r"(\d+(x\d+)?)(\.\d+(x\d+)?)*", text):
        raise ConfigurationError(f"{text[:60]!r} is no schedule, as a check prints it, and no file that holds one")
    runs = [part.partition("x") for part in text.split(".")]
    return [int(value) for value, _, count in runs for _ in range(int(count or 1))]


def text(report: Report, where: str, size: int) -> str:
    """A report as it is printed. `where`: "script.py::function"."""
    tried = f"{report.schedules} schedules of {where} with {size} ranks, at most {report.events} decisions each"
    took = f"{report.seconds:.1f} s"
    if not report.failure:
        if report.complete:
            return f"all schedules explored: {report.schedules}, none wrong ({where}, {size} ranks, {took})"
        why = f": not followed: {'; '.join(report.not_followed)}" if report.not_followed else ""
        return f"{tried}, none wrong, and not all there are ({took}){why}"
    shown = report.steps[-_MOST_STEPS:]
    left_out = [f"  … {len(report.steps) - len(shown)} steps before"] if len(shown) < len(report.steps) else []
    seed = f", seed {report.seed}" if report.seed is not None else ""
    return "\n".join([
        f"wrong: {report.failure}",
        f"in schedule {report.schedules} of {where} with {size} ranks ({took}{seed}); the one with the fewest preemptions that "
        f"was found has {report.preemptions}:",
        *left_out,
        *(f"  {step}" for step in shown),
        f"repeat it with: python -m tilescale_net check {where} -n {size} --schedule {report.schedule}",
    ])  # fmt: skip


# -- searches ----------------------------------------------------------------------------------------------------------


_EFFORT = 4000  # schedules to try for each number of preemptions, to find a shorter failing one


def every(case: Case, most: int = 1 << 62, seconds: float = 600.0, preemptions: int = -1) -> Report:
    """Run every schedule, except schedules that differ only in the order of independent events.

    Args:
        case: the case to explore.
        most, seconds: limits of schedules and of time, at which the search ends incomplete.
        preemptions: only schedules with at most this many preemptions, and never complete; -1: all.
    """
    began = time.monotonic()
    found = case.native.all(most, seconds, preemptions)
    report = _report(case, found, began)
    for fewer in range(found["preemptions"] if report.failure else 0):
        shorter = case.native.all(_EFFORT, max(2.0, report.seconds), fewer)
        if shorter["failure"]:
            found = shorter
            report.failure, report.preemptions = _failure(case, shorter), fewer
            break
    return _with_steps(case, report, found)


def random(case: Case, seeds: int, first: int = 0, depth: int = 3, seconds: float = 600.0) -> Report:
    """Run schedules of random priorities until the first failure or the time limit.

    Args:
        case, seconds: as in `every`.
        seeds, first: how many schedules, and the seed of the first.
        depth: priorities change depth - 1 times.
    """
    began = time.monotonic()
    found = case.native.random(first, seeds, depth, seconds)
    report = _report(case, found, began)
    report.seed = found["seed"] if report.failure else None
    return _with_steps(case, report, found)


def repeat(case: Case, schedule: str, seconds: float = 600.0) -> Report:
    """Run one schedule again.

    Args:
        case, seconds: as in `every`.
        schedule: of a failure, see `Report`.

    Raises:
        ConfigurationError: it is invalid, or not one of this case.
    """
    began, decisions = time.monotonic(), unpacked(schedule)
    try:
        found = case.native.repeat(decisions, seconds)
    except ValueError as error:
        raise ConfigurationError(f"{error}: it is of another kernel, or of other ranks or arguments") from None
    report = _report(case, found, began)
    report.steps, report.schedule = _steps(found["texts"]), packed(found["schedule"])
    return report


def _failure(case: Case, found: dict) -> str:
    """As text; call it before anything else runs."""
    record = case.worlds[found["gave_up"]].error() if found["gave_up"] >= 0 else ""
    return record or found["failure"]


def _report(case: Case, found: dict, began: float) -> Report:
    return Report(
        found["schedules"], found["cut"], found["states"], found["events"], found["complete"],
        time.monotonic() - began, _failure(case, found) if found["failure"] else "", preemptions=found["preemptions"],
        not_followed=found["not_followed"],
    )  # fmt: skip


def _with_steps(case: Case, report: Report, found: dict) -> Report:
    if report.failure:
        report.schedule = packed(found["schedule"])
        report.steps = _steps(case.native.repeat(found["schedule"], 600.0)["texts"])
    return report


def _steps(texts: list[str]) -> list[str]:
    """Merge equal neighbours."""
    runs = [(text, len(list(group))) for text, group in itertools.groupby(texts)]
    return [f"{text} ({count} times)" if count > 1 else text for text, count in runs]
