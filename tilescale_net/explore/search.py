"""Exploring a case: every schedule, random ones, or one again."""

import itertools
import time

from tilescale_net.errors import ConfigurationError
from tilescale_net.explore.case import Case
from tilescale_net.explore.reports import Report, packed, unpacked

_EFFORT = 4000  # schedules that are tried for each number of preemptions, to find a shorter one that fails


def every(case: Case, most: int = 1 << 62, seconds: float = 600.0, preemptions: int = -1) -> Report:
    """Run every schedule, except schedules that differ only in the order of independent events. `most`, `seconds`:
    after so many schedules, or so long, it ends, and is not complete. `preemptions`: only schedules that leave a block
    which could go on at most so often, and never complete; -1: all."""
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
    """Run schedules of random priorities, one for each seed, that change depth - 1 times; the first failure ends it, or the
    time."""
    began = time.monotonic()
    found = case.native.random(first, seeds, depth, seconds)
    report = _report(case, found, began)
    report.seed = found["seed"] if report.failure else None
    return _with_steps(case, report, found)


def repeat(case: Case, schedule: str, seconds: float = 600.0) -> Report:
    """Run one schedule again, for so long at most.

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
    """As text; to be called before anything else runs."""
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
    """Equal ones in a row once."""
    runs = [(text, len(list(group))) for text, group in itertools.groupby(texts)]
    return [f"{text} ({count} times)" if count > 1 else text for text, count in runs]
