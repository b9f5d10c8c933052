"""What came of exploring a case, as a report and in words; and schedules in a line."""

import itertools
import os
import re
from dataclasses import dataclass, field

from tilescale_net.errors import ConfigurationError

_MOST_STEPS = 80  # that are printed


@dataclass
class Report:
    """What came of an exploration.

    Attributes:
        schedules: how many were run to their end.
        cut: how many were given up because they would have repeated others.
        states: final states of memory that differ.
        events: decisions of the longest schedule.
        complete: whether there are no other schedules.
        not_followed: what kernels did that other schedules may order otherwise, with lines; then it is not complete.
        failure: what was wrong; "" for nothing.
        schedule: of the failure, as `repeat` takes it.
        preemptions: how often that schedule leaves a block that could go on.
        steps: what happens in it.
        seed: of the failure, where schedules were random.
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
    """A schedule in a line: the numbers of the processes that go on, 3x4 for 3 four times."""
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
