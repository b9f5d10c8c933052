"""The results of a run: tables in the terminal, the JSON file, ratios to an earlier file, and the environment of the
figures."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, NoReturn, TypeVar

from benchmark.common.plot import Panel, draw, significant
from tilescale_net.cli import info


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        key: name of the value in a row and in the JSON file.
        title: its name, without its unit.
        format: format specification for numbers, such as `,d`; without one, four significant digits. Text is shown as it is.
        better: `higher` or `lower`, if either is; such columns get a ratio under `--baseline` and are plotted.
        series: name in a plot's legend; the title when empty.
        unit: such as `GB/s`, `us`; shown in the heading, and columns of one unit share an axis of a plot.
        plotted: False keeps the column out of plots.
    """

    key: str
    title: str
    format: str = ""
    better: str = ""
    series: str = ""
    unit: str = ""
    plotted: bool = True

    def __post_init__(self) -> None:
        if self.better not in ("", "higher", "lower"):
            raise ValueError(f"column {self.key}: better={self.better!r} is not 'higher', 'lower' or ''")

    @property
    def heading(self) -> str:
        """The title with its unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def show(self, value: Any) -> str:
        """A value as the table shows it; None (not measured) is `-`."""
        if value is None:
            return "-"
        if isinstance(value, str):
            return value
        if isinstance(value, float) and not self.format:
            return significant(value)
        return format(value, self.format)


def us(key: str, title: str, **more: Any) -> Column:
    """A column of times."""
    return Column(key, title, better="lower", unit="us", **more)


def rate(key: str, title: str, unit: str, **more: Any) -> Column:
    """A column of rates."""
    return Column(key, title, better="higher", unit=unit, **more)


@dataclass
class Table:
    """Rows of one question. Key columns distinguish rows.

    Attributes:
        name: identifies the table in the JSON file; shown as a heading when a report has several tables.
        keys: columns of the measured case (size, threads, …).
        columns: columns of results.
        notes: lines shown below the table.
        on_row: called with the table and each row that is added.
        plotted: False keeps the table out of plots.
    """

    name: str
    keys: Sequence[Column]
    columns: Sequence[Column]
    notes: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, list[float]]] = field(default_factory=list)
    on_row: Callable[[Table, dict[str, Any]], None] | None = None
    plotted: bool = True

    def add(self, row: Mapping[str, Any], samples: Mapping[str, Sequence[float]] | None = None) -> None:
        """Add a row. `row`: value by column key; a missing or None value is shown as `-`. Keys that no column shows are
        kept in the JSON file only. `samples`: raw samples by column key, for the JSON file. Raises ValueError: a key
        column has no value."""
        for column in self.keys:
            if row.get(column.key) is None:
                raise ValueError(f"table {self.name}: a row has no value for key column {column.key!r}")
        self.rows.append(dict(row))
        self.samples.append({name: [float(s) for s in values] for name, values in (samples or {}).items()})
        if self.on_row:
            self.on_row(self, self.rows[-1])

    def of_row(self, row: Mapping[str, Any]) -> Table:
        """A table like this one that holds one row."""
        return Table(self.name, self.keys, self.columns, [], [dict(row)])

    def key_of(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values of the key columns of a row."""
        return tuple(row[column.key] for column in self.keys)


class Layout:
    """Widths and sides of columns: as wide as headings and cells, numbers to the right. `columns`: shown, in order.
    `rows`: that determine the widths; wider cells that come later move their line. `least`: of every column's
    width."""

    def __init__(self, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], least: int = 3) -> None:
        self.columns = list(columns)
        self._right = [not any(isinstance(row.get(c.key), str) for row in rows) for c in columns]
        self._widths = [
            max([least, len(c.heading), *(len(c.show(row.get(c.key))) for row in rows)]) for c in self.columns
        ]

    def head(self) -> list[str]:
        """Headings and the rule below them."""
        rule = ("-" * (w + 1) + ":" if r else ":" + "-" * (w + 1) for w, r in zip(self._widths, self._right))
        return [self._line([c.heading for c in self.columns]), "|" + "|".join(rule) + "|"]

    def row(self, row: Mapping[str, Any]) -> str:
        """A line of the table."""
        return self._line([c.show(row.get(c.key)) for c in self.columns])

    def _line(self, texts: Sequence[str]) -> str:
        padded = (t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, self._widths, self._right))
        return "| " + " | ".join(padded) + " |"


def markdown(head: Sequence[str], lines: Iterable[Iterable[Any]], words: int = 1) -> str:
    """A table of a page; its first `words` columns are aligned as words, the others as numbers."""
    rule = ["---"] * words + ["--:"] * (len(head) - words)
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [head, rule, *lines])


SCHEMA = 1  # of the JSON files that Report writes


def read_json(path: str) -> dict[str, Any]:
    """The content of an earlier `--json` file. Raises ValueError: the file cannot be read, is not JSON, or was not
    written by a benchmark of this project."""
    try:
        with open(path) as f:
            content = json.load(f)
    except OSError as err:
        raise ValueError(f"baseline {path!r} cannot be read: {err.strerror}") from None
    except ValueError as err:
        raise ValueError(f"baseline {path!r} is not JSON: {err}") from None
    if (
        not isinstance(content, dict)
        or content.get("schema") != SCHEMA
        or not {"benchmark", "tables", "environment"} <= content.keys()
    ):
        raise ValueError(f"baseline {path!r} was not written by --json of this version (schema {SCHEMA})")
    return content


def ratio(column: Column, new: float | None, old: float | None) -> float | None:
    """How many times better `new` is than `old`: above 1 is better, in either direction; None if unknown."""
    if new is None or old is None or isinstance(new, str) or isinstance(old, str):
        return None
    above, below = (new, old) if column.better == "higher" else (old, new)
    return above / below if below else None


def with_ratios(table: Table, earlier: Mapping[str, Any]) -> Table:
    """A copy of `table` in which each column with a direction is followed by its ratio to the earlier run. `earlier`:
    content of a JSON file, from `read_json`. Rows are matched by table name and key columns."""
    old_table = next((t for t in earlier["tables"] if t["name"] == table.name), None)
    keys = [column.key for column in table.keys]
    if old_table is None or [c["key"] for c in old_table["keys"]] != keys:
        return Table(
            table.name,
            table.keys,
            table.columns,
            [*table.notes, "The baseline holds no table of this name with these key columns."],
            table.rows,
        )
    old_rows = {table.key_of(row): row for row in old_table["rows"]}
    columns: list[Column] = []
    for column in table.columns:
        columns.append(column)
        if column.better:
            columns.append(Column(column.key + "/baseline", "x base", ".3f"))
    rows = []
    for row in table.rows:
        old = old_rows.get(table.key_of(row), {})
        ratios = {c.key + "/baseline": ratio(c, row.get(c.key), old.get(c.key)) for c in table.columns if c.better}
        rows.append({**row, **ratios})
    note = "x base: times better than the baseline; above 1 is better."
    if not any(table.key_of(row) in old_rows for row in table.rows):
        note = "The baseline holds none of these rows."
    return Table(table.name, table.keys, columns, [*table.notes, note], rows)


def _from_environment(names: tuple[str, ...], default: int) -> int:
    for name in names:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return default


def rank() -> int:
    """This process's rank: RANK (launch.sh, torchrun) or SLURM_PROCID (srun), else 0."""
    return _from_environment(("RANK", "SLURM_PROCID"), 0)


def world_size() -> int:
    """Number of ranks: WORLD_SIZE or SLURM_NTASKS, else 1."""
    return _from_environment(("WORLD_SIZE", "SLURM_NTASKS"), 1)


def is_rank_zero() -> bool:
    """Whether this process prints and writes files."""
    return rank() == 0


ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Abbreviated commit of the checkout, with `-dirty` when files differ from it; None outside a checkout."""
    command = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            names = re.findall(r"^model name\s*:\s*(.+)$", f.read(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else "unknown model"


def _gpus() -> str:
    """Names of the visible GPUs with their counts; from torch, which every benchmark that uses GPUs has imported."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return "none"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names))


def environment() -> dict[str, str]:
    """Name and value of everything that belongs in a report's header, in the order it is shown. Versions come from the
    installed packages' metadata, without importing these. Callers add the rest, such as
    the fabric provider and libfabric's version."""
    torch = sys.modules.get("torch")
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "cores": f"{len(os.sched_getaffinity(0))} x {_processor()}",
        "GPUs": _gpus(),
        "ranks": str(world_size()),
        "driver": info.driver(),
        "CUDA": cuda,
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": _version("torch"),
        "tilelang": _version("tilelang"),
        "tilescale_net": _commit() or _version("tilescale_net"),
    }
    return {name: value for name, value in found.items() if value}


class WrongData(RuntimeError):
    """The measured operation delivered wrong data."""


Item = TypeVar("Item")
_PLAIN_INTERVAL = 5.0  # seconds between lines where stderr is no terminal
_LIVE_INTERVAL = 0.1


def progress(items: Iterable[Item], label: str, show: Callable[[Any], str] = str, stream: Any = None) -> Iterator[Item]:
    """Yield `items`, reporting on rank 0's stderr how far the run is. A run that ends within the first interval prints
    nothing where stderr is no terminal. `label`: name of the items, such as `sizes`. `show`: turns an item into text.
    `stream`: stderr when None."""
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
        environment: shown as the header, before the first row; add the benchmark's own facts, such as the provider.
            Later additions are shown at the end.
        notes: lines shown at the end, below all tables.
    """

    def __init__(self, name: str, args: argparse.Namespace) -> None:
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

    def finish(self, *libraries: Any) -> None:
        """Print notes and write `--json` and `--plot` on rank 0; then end these libraries, if not None, and the job.
        Collective."""
        if is_rank_zero():
            self._write()
        for library in filter(None, libraries):
            library.finalize()
        if worlds := sys.modules.get("tilescale_net.runtime.worlds"):
            worlds.finalize()

    def _write(self) -> None:
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

    def nothing(self, reason: str) -> NoReturn:
        """Print the reason why nothing can be measured here, write an empty `--json`, and end with exit code 3. On all
        ranks."""
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

    def _on_row(self, table: Table, row: dict[str, Any]) -> None:
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
            held = Layout(filled, shown.rows, least=8)
            self._open = table, held
            title = ["", f"## {table.name}"] if len(self.tables) > 1 and not again else []
            self._print(*title, "", *held.head())
        self._print(held.row(cells))
        if self.args.json:
            self._write_json(self.args.json)

    def _baseline_notes(self, table: Table) -> list[str]:
        if not self.args.baseline:
            return []
        return with_ratios(table, self.args.baseline).notes[len(table.notes) :]

    def _watch_for_interrupts(self) -> None:
        """Say in one line, instead of a traceback, that a run was interrupted or that its data were wrong."""
        previous = sys.excepthook

        def hook(kind: Any, error: Any, trace: Any) -> None:
            if issubclass(kind, KeyboardInterrupt):
                print(f"{self.name}: interrupted; the rows above are what was measured", file=sys.stderr, flush=True)
            elif issubclass(kind, WrongData):
                print(f"{self.name}: wrong data: {error}", file=sys.stderr, flush=True)
            else:
                previous(kind, error, trace)

        sys.excepthook = hook

    def content(self) -> dict[str, Any]:
        """Contents of `--json`: environment, settings, and for every table its columns, rows and raw samples."""
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
        found = self.content()["environment"]
        shown = [panel for t in self.tables if t.rows and t.plotted for panel in panels_of(t, hardware(found))]
        facts = [
            self.name,
            f"commit {found['tilescale_net']}" if "tilescale_net" in found else "",
            found.get("date", ""),
        ]
        try:
            draw(shown, path, ", ".join(filter(None, facts)))
        except (OSError, ValueError) as err:
            sys.exit(f"{self.name}: --plot {path}: {err}")


def _describe(column: Column) -> dict[str, str]:
    return {"key": column.key, "title": column.title, "unit": column.unit, "better": column.better}


QUANTITIES = {
    "GB/s": "Bandwidth", "Gbps": "Bandwidth", "Gb/s": "Bandwidth", "MiB/s": "Bandwidth", "us": "Time", "M/s": "Rate",
    "Mops": "Rate", "Mpps": "Message rate", "cycles/post": "Cost",
}  # fmt: skip


MOST_LINES = 6  # of a panel, over another key than the size


def hardware(environment: Mapping[str, str]) -> str:
    """GPUs and ranks of a run, in few words."""
    gpus = environment.get("GPUs", "none")
    found = gpus.replace("NVIDIA ", "").replace(" 80GB HBM3", "") if gpus != "none" else "simulator"
    return f"{found}, {environment['ranks']} ranks" if "ranks" in environment else found


def panels_of(table: Table, where: str) -> list[Panel]:
    """A panel for each unit of the table's measured columns. `where`: the hardware."""
    varying = [c for c in table.keys if len({row[c.key] for row in table.rows}) > 1] or list(table.keys)[-1:]
    numeric = [c for c in varying if all(isinstance(row[c.key], (int, float)) for row in table.rows)]
    along = next((c for c in numeric if c.key == "bytes"), numeric[-1] if numeric else None)
    if along and along.key != "bytes":  # if each line would be another row's, words are better
        groups = {tuple(row[c.key] for c in varying if c is not along) for row in table.rows}
        along = None if len(groups) > MOST_LINES else along
    others = [c for c in varying if c is not along]

    def words(row: Mapping[str, Any]) -> list[str]:
        return [
            row[c.key] if isinstance(row[c.key], str) else f"{c.show(row[c.key])} {c.title.lower()}" for c in others
        ]

    units: dict[str, dict[str, dict[Any, float]]] = {}
    for column in (c for c in table.columns if c.better and c.plotted):
        for row in (row for row in table.rows if row.get(column.key) is not None):
            name = column.series or column.title
            at = row[along.key] if along else ", ".join(words(row))
            points = units.setdefault(column.unit, {})
            points.setdefault(", ".join([name, *words(row)]) if along else name, {})[at] = row[column.key]
    axis = "" if along is None else "Size" if along.key == "bytes" else along.heading
    return [
        Panel(f"{table.name}, {where}", f"{QUANTITIES.get(unit, 'Value')} ({unit})" if unit else "", axis, points)
        for unit, points in units.items()
    ]
