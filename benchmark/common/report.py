"""One run of a benchmark: what was measured, where, and the ways to show it."""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from benchmark.common.environment import environment, is_rank_zero
from benchmark.common.measuring import WrongData
from benchmark.common.table import SCHEMA, Column, Layout, Table, with_ratios

Item = TypeVar("Item")
_PLAIN_INTERVAL = 5.0  # seconds between lines where stderr is no terminal
_LIVE_INTERVAL = 0.1


def progress(items: Iterable[Item], label: str, show=str, stream=None) -> Iterator[Item]:
    """Yield `items`, reporting on rank 0's stderr how far the run is.

    A run that ends within the first interval prints nothing where stderr is no terminal.

    Args:
        label: what an item is, such as `sizes`.
        show: turns an item into text.
        stream: stderr when None.
    """
    stream = stream or sys.stderr
    items = list(items)
    live = stream.isatty()
    start = last = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        due = now - last >= (_LIVE_INTERVAL if live else _PLAIN_INTERVAL) or (live and done == 0)
        if due and is_rank_zero():
            text = f"{label}: {done}/{len(items)}, now {show(item)}, {now - start:.0f} s"
            stream.write(f"\r\x1b[K{text}" if live else text + "\n")
            stream.flush()
            last = now
        yield item
    if live and is_rank_zero() and items:
        stream.write("\r\x1b[K")
        stream.flush()


NOTHING = 3  # exit code of a benchmark that could measure nothing here


class Report:
    """Prints rows as they are measured, and keeps them in the `--json` file; silent on ranks other than 0.

    Args:
        name: of the benchmark, as in the JSON file.
        args: from `BenchmarkParser.parse_args`; a baseline of another benchmark ends the process with exit code 2.

    Attributes:
        environment: shown as the header, before the first row; add what is the benchmark's own, such as the provider.
            What is added later is shown at the end.
        notes: lines shown at the end, below all tables.
    """

    def __init__(self, name: str, args: argparse.Namespace):
        if args.baseline and args.baseline["benchmark"] != name:
            if is_rank_zero():
                print(f"{name}: error: the baseline is of benchmark {args.baseline['benchmark']}", file=sys.stderr)
            raise SystemExit(2)
        self.name = name
        self.args = args
        self.environment: dict[str, str] = {}
        self.notes: list[str] = []
        self.tables: list[Table] = []
        self._machine: dict[str, str] | None = None  # once the header is printed
        self._told: dict[str, str] = {}  # of the environment
        self._open: tuple[Table, Layout] | None = None  # whose rows are being printed
        self._headed: list[Table] = []
        self._complete = False
        if is_rank_zero():
            self._watch_for_interrupts()

    def table(self, name: str, keys: Sequence[Column], columns: Sequence[Column]) -> Table:
        """A new table of this report; see `Table`. Raises ValueError when the name is taken."""
        if any(t.name == name for t in self.tables):
            raise ValueError(f"the report already has a table {name!r}")
        self.tables.append(Table(name, keys, columns, on_row=self._on_row if is_rank_zero() else None))
        return self.tables[-1]

    progress = staticmethod(progress)

    def finish(self) -> None:
        """Print notes, then write `--json` and `--plot`. Does nothing on ranks other than 0."""
        if not is_rank_zero():
            return
        self._complete = True
        self._begin()
        late = [f"- {name}: {value}" for name, value in self.environment.items() if self._told.get(name) != value]
        lines = ["", *late] if late else []
        for table in self.tables:
            notes = [*table.notes, *self._baseline_notes(table)]
            lines += ["", *notes] if table.rows and notes else []
        lines += ["", *self.notes] if self.notes else []
        self._print(*lines)
        if self.args.json:
            self._write_json(self.args.json)
        if self.args.plot:
            self._write_plot(self.args.plot)

    def nothing(self, reason: str):
        """Say why nothing can be measured here, write an empty `--json`, and end with exit code 3. On all ranks."""
        if is_rank_zero():
            print(f"{self.name}: not measured; {reason}", flush=True)
            self.notes.append(f"not measured; {reason}")
            self._machine = environment()
            self._complete = True
            if self.args.json:
                self._write_json(self.args.json)
        raise SystemExit(NOTHING)

    # -- rows as they come ------------------------------------------------------------------------------------------

    def _print(self, *lines: str) -> None:
        # A line of progress may stand where this begins.
        clear = "\r\x1b[K" if sys.stdout.isatty() else ""
        for line in lines:
            print(clear + line, flush=True)

    def _begin(self) -> None:
        """Print the header, once."""
        if self._machine is not None:
            return
        self._machine = environment()
        self._told = dict(self.environment)
        lines = [f"# {self.name}", ""]
        lines += [f"- {name}: {value}" for name, value in {**self._machine, **self.environment}.items()]
        lines.append(f"- command: {shlex.join(self.args.command)}")
        if self.args.baseline:
            known = self.args.baseline["environment"]
            parts = [f"{name} {known[name]}" for name in ("date", "GPUs", "tilescale_net") if name in known]
            lines.append(f"- baseline: {', '.join(parts)}")
        self._print(*lines)

    def _on_row(self, table: Table, row: dict) -> None:
        self._begin()
        shown = table.of_row(row)
        if self.args.baseline:
            shown = with_ratios(shown, self.args.baseline)
        (cells,) = shown.rows
        held = self._open[1] if self._open and self._open[0] is table else None
        filled = [*shown.keys, *(c for c in shown.columns if cells.get(c.key) is not None)]
        if held is None or not {c.key for c in filled} <= {c.key for c in held.columns}:
            again = any(t is table for t in self._headed)
            self._headed += [] if again else [table]
            self._open = table, Layout(filled, shown.rows, least=8)
            title = ["", f"## {table.name}"] if len(self.tables) > 1 and not again else []
            self._print(*title, "", *self._open[1].head())
        self._print(self._open[1].row(cells))
        if self.args.json:
            self._write_json(self.args.json)

    def _baseline_notes(self, table: Table) -> list[str]:
        if not self.args.baseline:
            return []
        return with_ratios(table, self.args.baseline).notes[len(table.notes) :]

    def _watch_for_interrupts(self) -> None:
        """Say in one line, instead of a traceback, that a run was interrupted or that its data were wrong."""
        previous = sys.excepthook

        def hook(kind, error, trace):
            if issubclass(kind, KeyboardInterrupt):
                print(f"{self.name}: interrupted; the rows above are what was measured", file=sys.stderr, flush=True)
            elif issubclass(kind, WrongData):
                print(f"{self.name}: wrong data: {error}", file=sys.stderr, flush=True)
            else:
                previous(kind, error, trace)

        sys.excepthook = hook

    def content(self) -> dict:
        """What `--json` writes: environment, settings, and for every table its columns, rows and raw samples."""
        settings = {k: v for k, v in vars(self.args).items() if k not in ("json", "plot", "baseline", "command")}
        return {
            "schema": SCHEMA,
            "benchmark": self.name,
            "complete": self._complete,
            "command": self.args.command,
            "environment": {**(self._machine or environment()), **self.environment},
            "settings": settings,
            "tables": [
                {
                    "name": table.name,
                    "keys": [_describe(c) for c in table.keys],
                    "columns": [_describe(c) for c in table.columns],
                    "rows": table.rows,
                    "samples": table.samples,
                    "notes": table.notes,
                }
                for table in self.tables
            ],
            "notes": self.notes,
        }

    def _write_json(self, path: str) -> None:
        # Written whole or not at all: a reader never sees half a file, an earlier file survives a failure.
        partial = f"{path}.{os.getpid()}.partial"
        try:
            with open(partial, "w") as f:
                json.dump(self.content(), f, indent=1, default=str)
                f.write("\n")
            os.replace(partial, path)
        except OSError as err:
            if os.path.exists(partial):
                os.remove(partial)
            sys.exit(f"{self.name}: --json {path}: {err.strerror}")

    def _write_plot(self, path: str) -> None:
        from benchmark.common.plot import draw, title_of

        try:
            draw(self.tables, title_of(self.name, self.content()["environment"]), path)
        except (OSError, ValueError) as err:
            sys.exit(f"{self.name}: --plot {path}: {err}")


def _describe(column: Column) -> dict[str, str]:
    return {"key": column.key, "title": column.title, "unit": column.unit, "better": column.better}
