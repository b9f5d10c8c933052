"""`pytest --outcomes=FILE`: each test's outcome, a line of JSON that is written when the test has ended.

A run that was cut short goes on where it stood: tests that have passed according to FILE are not run again.

usage: python -m tests.outcomes FILE…     counts, the longest tests, those that failed, rows of tables that they printed, and the table of mutants
"""

import json
import sys
from collections import Counter
from pathlib import Path

from tests.kernels import sweep_table

LONGEST = 15


def read(path: Path) -> dict[str, dict]:
    """The last outcome of each test; a line that was cut off is skipped."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            outcome = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[outcome["test"]] = outcome
    return found


class Outcomes:
    """A plugin of pytest; with pytest-xdist it writes in the process that hands tests out, and leaves out in all."""

    def __init__(self, path: Path, passed: list[str] | None = None):
        self._path, self._writes = path, passed is None
        self._passed = passed if passed is not None else [t for t, o in read(path).items() if o["outcome"] == "passed"]
        self._cut_off = self._writes and path.exists() and not path.read_text().endswith("\n")
        self._running: dict[str, dict] = {}

    def pytest_configure_node(self, node):
        node.workerinput["passed"] = self._passed

    def pytest_collection_modifyitems(self, config, items):
        done = set(self._passed)
        gone = [item for item in items if item.nodeid in done]
        if gone:
            config.hook.pytest_deselected(items=gone)
            items[:] = [item for item in items if item.nodeid not in done]

    def pytest_runtest_logreport(self, report):
        if not self._writes:
            return
        known = self._running.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0, "said": ""})
        known["seconds"] += getattr(report, "duration", 0.0)
        if report.outcome != "passed":
            known["outcome"] = report.outcome
            known["said"] += report.longreprtext
        if report.when == "call" or report.outcome == "failed":
            known["said"] += report.capstdout
        if report.when not in ("setup", "call"):  # a worker that died reports once
            self._write(report.nodeid)

    def _write(self, test: str) -> None:
        known = self._running.pop(test)
        line = {"test": test, "outcome": known["outcome"], "seconds": round(known["seconds"], 1), "said": known["said"]}
        with self._path.open("a") as file:
            file.write("\n" * self._cut_off + json.dumps(line) + "\n")
        self._cut_off = False


def configure(config) -> None:
    """Add the plugin where the option is given."""
    path = config.option.outcomes
    if path and (worker := getattr(config, "workerinput", None)) is not None:
        config.pluginmanager.register(Outcomes(Path(path), worker["passed"]), "outcomes")
    elif path:
        config.pluginmanager.register(Outcomes(Path(path).absolute()), "outcomes")


def _tell(found: dict[str, dict]) -> None:
    counts = Counter(o["outcome"] for o in found.values())
    total = sum(o["seconds"] for o in found.values())
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())), f"in {total:.0f} s of tests")
    for test, outcome in sorted(found.items(), key=lambda item: -item[1]["seconds"])[:LONGEST]:
        print(f"{outcome['seconds']:8.1f} s  {test}")
    for test, outcome in found.items():
        if outcome["outcome"] == "failed":
            print(f"\nfailed: {test}\n{outcome['said']}")
    rows = [line for o in found.values() for line in o["said"].splitlines() if line.startswith("| ")]
    print(*rows, sep="\n")
    print(sweep_table.table(found))


if __name__ == "__main__":
    _tell({test: outcome for name in sys.argv[1:] for test, outcome in read(Path(name)).items()})
