"""One run of a benchmark: what was measured, where, and the ways to show it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence

from benchmark.common.baseline import SCHEMA, with_ratios
from benchmark.common.environment import environment
from benchmark.common.progress import progress
from benchmark.common.ranks import is_rank_zero
from benchmark.common.table import Column, Table


class Report:
    """Collects tables and shows them at the end; on ranks other than 0 it collects and shows nothing.

    Args:
        name: of the benchmark, as in the JSON file.
        args: from `BenchmarkParser.parse_args`; a baseline of another benchmark ends the process with exit code 2.

    Attributes:
        environment: shown as the header; add what only the benchmark knows, such as the provider.
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

    def table(self, name: str, keys: Sequence[Column], columns: Sequence[Column]) -> Table:
        """A new table of this report; see `Table`. Raises ValueError when the name is taken."""
        if any(t.name == name for t in self.tables):
            raise ValueError(f"the report already has a table {name!r}")
        self.tables.append(Table(name, keys, columns))
        return self.tables[-1]

    progress = staticmethod(progress)

    def finish(self) -> None:
        """Print header, tables and notes, then write `--json` and `--plot`. Does nothing on ranks other than 0."""
        if not is_rank_zero():
            return
        self.environment = {**environment(), **self.environment}
        print(self.text(), end="", flush=True)
        if self.args.json:
            self._write_json(self.args.json)
        if self.args.plot:
            self._write_plot(self.args.plot)

    def text(self) -> str:
        """The report as markdown, with the baseline's ratios where one was given."""
        lines = [f"# {self.name}", ""]
        lines += [f"- {name}: {value}" for name, value in self.environment.items()]
        lines.append(f"- command: {shlex.join(self.args.command)}")
        if self.args.baseline:
            known = self.args.baseline["environment"]
            parts = [f"{name} {known[name]}" for name in ("date", "GPUs", "tilescale_net") if name in known]
            lines.append(f"- baseline: {', '.join(parts)}")
        tables = [with_ratios(t, self.args.baseline) if self.args.baseline else t for t in self.tables]
        for table in tables:
            if table.rows:
                lines += ["", *([f"## {table.name}", ""] if len(self.tables) > 1 else []), table.markdown()]
                lines += ["", *table.notes] if table.notes else []
        lines += ["", *self.notes] if self.notes else []
        return "\n".join(lines) + "\n"

    def content(self) -> dict:
        """What `--json` writes: environment, settings, and for every table its columns, rows and raw samples."""
        settings = {k: v for k, v in vars(self.args).items() if k not in ("json", "plot", "baseline", "command")}
        return {
            "schema": SCHEMA,
            "benchmark": self.name,
            "command": self.args.command,
            "environment": self.environment,
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
        from benchmark.common.plot import draw

        try:
            draw(self.tables, "\n".join(filter(None, [self.name, self.environment.get("timing")])), path)
        except (OSError, ValueError) as err:
            sys.exit(f"{self.name}: --plot {path}: {err}")


def _describe(column: Column) -> dict[str, str]:
    return {"key": column.key, "title": column.title, "better": column.better}
