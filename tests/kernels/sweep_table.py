"""The table of docs/simulator.md: what became of the mutants of each file, from the rows that test_sweep.py prints."""

import re
from collections import Counter

from tests.kernels import survivors

_TEST = re.compile(r"\[(?P<name>[\w/]+), (?P<change>.+), (?P<number>\d+)\]$")
_ROW = re.compile(r"^\| .* \| [^|]+ \| (?P<checked>[^|]+) \| (?P<seeds>[^|]+) \| (?P<explored>[^|]+) \|$", re.MULTILINE)
_STANDS_STILL = {"SimulatorDeadlock", "WaitTimeout"}
_COLUMNS = ("a race", "wrong data", "stands still", "another error", "harmless", "not shown", "not run")


def _became(checked: str, reason: str | None, change: str) -> str:
    """The column of a mutant: the report of the run with the check, or why it survives.

    A `take_vectors` that is missing leaves its data unread, which no order could mend.
    """
    if checked == "DataRace":
        return "a race"
    if checked in ("-", "the same program"):
        return "harmless" if reason in survivors.HARMLESS else "not run" if reason in survivors.NOT_RUN else "not shown"
    if checked == "wrong data" and (reason == survivors.VALUE or change == "no take_vectors"):
        return "another error"
    return checked if checked == "wrong data" else "stands still" if checked in _STANDS_STILL else "another error"


def _counts(outcomes: dict[str, dict]) -> dict[str, Counter]:
    counts: dict[str, Counter] = {}
    for test, outcome in outcomes.items():
        place, row = _TEST.search(test), _ROW.search(outcome["said"])
        if "test_sweep" not in test or place is None or row is None:
            continue
        reason = survivors.KNOWN.get(place["name"], {}).get((place["change"], int(place["number"])))
        of_file = counts.setdefault(place["name"], Counter())
        of_file[_became(row["checked"], reason, place["change"])] += 1
        of_file["mutants"] += 1
        of_file["seeds"] += row["seeds"] != "-"
        of_file["explored"] += row["explored"] not in ("-", "none wrong")
        of_file["could be explored"] += row["explored"] != "-"
    return dict(sorted(counts.items(), key=lambda item: (item[0].isdigit(), item[0])))


def table(outcomes: dict[str, dict]) -> str:
    """The table of outcomes by test, as Markdown, with the reported share of the mutants that the check must report.

    Those are the ones that change an order which the memory model needs: without those that are harmless or not run, and
    without those that no order could save, because the job stands still (no rank sends the awaited data) or the
    program is no longer valid (another error).
    """
    counts = _counts(outcomes)
    if not counts:
        return ""
    total: Counter = sum(counts.values(), Counter())
    lines = [
        f"| file | mutants | {' | '.join(_COLUMNS)} | by seeds | explored |",
        f"| --- {'| --: ' * (len(_COLUMNS) + 3)}|",
    ]
    for name, of_file in [*counts.items(), ("all", total)]:
        explored = f"{of_file['explored']} of {of_file['could be explored']}" if of_file["could be explored"] else "-"
        cells = [of_file["mutants"], *(of_file[column] for column in _COLUMNS), of_file["seeds"], explored]
        shown = f"tutorial {name}" if name.isdigit() else name if name == "all" else f"`{name}.py`"
        lines.append(f"| {shown} | {' | '.join(map(str, cells))} |")
    needed = total["a race"] + total["wrong data"] + total["not shown"]
    if needed:
        share = f"{100 * total['a race'] / needed:.1f}"
        lines += [
            "",
            f"Of {needed} that change an order which the memory model needs, {share} % are reported as a race.",
        ]
    return "\n".join(lines)
