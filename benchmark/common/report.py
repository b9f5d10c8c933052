"""The results of a run: tables in the terminal, the JSON file, ratios to an earlier file, and what figures depend on."""

from __future__ import annotations

import argparse
import datetime
import json
import math
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

from tilescale_net.cli import machine
from tilescale_net.runtime import settings


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        key: name of the value in a row and in the JSON file.
        title: its name, without its unit.
        format: format specification for numbers, such as `,d`; without one, four significant digits. Text is shown as it is.
        better: `higher` or `lower` where one of them is; such columns get a ratio under `--baseline` and are plotted.
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


def significant(value: float, digits: int = 4) -> str:
    """A number with so many significant digits and no exponent: 0.001235, 12.35, 123,457."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 9)}f}"


def format_bytes(count: int) -> str:
    """The shortest exact form: 2048 is `2K`, 1048576 is `1M`, 1000 is `1000`."""
    for suffix in ("T", "G", "M", "K"):
        unit = settings.SUFFIXES[suffix]
        if count and count % unit == 0:
            return f"{count // unit}{suffix}"
    return str(count)


@dataclass
class Table:
    """Rows of one question. Key columns distinguish rows.

    Attributes:
        name: identifies the table in the JSON file; shown as a heading when a report has several tables.
        keys: columns that say what was measured (size, threads, …).
        columns: columns that say what came out.
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
        """Add a row.

        Args:
            row: value by column key; a missing or None value is shown as `-`. Keys that no column shows are kept in the
                JSON file only.
            samples: raw samples by column key, for the JSON file.

        Raises:
            ValueError: a key column has no value.
        """
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
    """Widths and sides of columns: as wide as headings and cells, numbers to the right.

    Args:
        columns: shown, in order.
        rows: that the widths are taken from; wider cells that come later move their line.
        least: of every column's width.
    """

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

    def lines(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Headings, rule and rows."""
        return [*self.head(), *(self.row(r) for r in rows)]

    def _line(self, texts: Sequence[str]) -> str:
        padded = (t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, self._widths, self._right))
        return "| " + " | ".join(padded) + " |"


SCHEMA = 1  # of the JSON files that Report writes


def load_baseline(path: str) -> dict[str, Any]:
    """The content of an earlier `--json` file.

    Raises:
        ValueError: the file cannot be read, is not JSON, or was not written by a benchmark of this project.
    """
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
    """How many times better `new` is than `old`: above 1 is better, in either direction; None when unknown."""
    if new is None or old is None or isinstance(new, str) or isinstance(old, str):
        return None
    above, below = (new, old) if column.better == "higher" else (old, new)
    return above / below if below else None


def with_ratios(table: Table, earlier: Mapping[str, Any]) -> Table:
    """A copy of `table` in which each column with a direction is followed by its ratio to the earlier run.

    Args:
        earlier: content of a JSON file, from `load_baseline`. Rows are matched by table name and key columns.
    """
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
    """Whether this process is the one that prints and writes files."""
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
    """Name and value of everything that belongs in a report's header, in the order it is shown.

    Versions come from the installed packages' metadata, so nothing is imported for their sake. Callers add what only
    they know, such as the fabric provider and libfabric's version.
    """
    torch = sys.modules.get("torch")
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "cores": f"{len(os.sched_getaffinity(0))} x {_processor()}",
        "GPUs": _gpus(),
        "ranks": str(world_size()),
        "driver": machine.driver(),
        "CUDA": cuda,
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": _version("torch"),
        "tilelang": _version("tilelang"),
        "tilescale_net": _commit() or _version("tilescale_net"),
    }
    return {name: value for name, value in found.items() if value}


class WrongData(RuntimeError):
    """What was measured did not deliver what was sent."""


Item = TypeVar("Item")
_PLAIN_INTERVAL = 5.0  # seconds between lines where stderr is no terminal
_LIVE_INTERVAL = 0.1


def progress(items: Iterable[Item], label: str, show: Callable[[Any], str] = str, stream: Any = None) -> Iterator[Item]:
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

    def nothing(self, reason: str) -> NoReturn:
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
        """What `--json` writes: environment, settings, and for every table its columns, rows and raw samples."""
        given = {k: v for k, v in vars(self.args).items() if k not in ("json", "plot", "baseline", "command")}
        return {
            "schema": SCHEMA,
            "benchmark": self.name,
            "complete": self._complete,
            "command": self.args.command,
            "environment": {**(self._machine or environment()), **self.environment},
            "settings": given,
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

        try:
            draw(self.tables, title_of(self.name, self.content()["environment"]), path)
        except (OSError, ValueError) as err:
            sys.exit(f"{self.name}: --plot {path}: {err}")


def _describe(column: Column) -> dict[str, str]:
    return {"key": column.key, "title": column.title, "unit": column.unit, "better": column.better}


QUANTITIES = {
    "GB/s": "Bandwidth",
    "Gbps": "Bandwidth",
    "Gb/s": "Bandwidth",
    "MiB/s": "Bandwidth",
    "us": "Time",
    "M/s": "Rate",
    "Mops": "Rate",
    "Mpps": "Message rate",
    "cycles/post": "Cost",
}
MOST_BARS = 40  # of a panel; more rows than that are mentioned, not drawn
WIDTH, DPI = 7.0, 100  # inches of a panel; two panels side by side are 1400 px wide
WIDE_RANGE = 30.0  # largest over smallest figure from which an axis is logarithmic


def title_of(name: str, environment: Mapping[str, str]) -> str:
    """Benchmark, hardware, version and date: what a figure needs beside it to be understood."""
    gpus = environment.get("GPUs", "none")
    hardware = gpus if gpus != "none" else f"simulator on {environment.get('cores', 'unknown')}"
    facts = [hardware, f"{environment['ranks']} ranks"] if "ranks" in environment else [hardware]
    facts += [f"commit {environment['tilescale_net']}"] if "tilescale_net" in environment else []
    facts += [environment["date"]] if "date" in environment else []
    return f"{name}: {', '.join(facts)}"


def panels_of(table: Table) -> dict[str, list[Column]]:
    """The measured columns of a table by unit: one panel each."""
    panels: dict[str, list[Column]] = {}
    for column in table.columns:
        if column.better and column.plotted and any(row.get(column.key) is not None for row in table.rows):
            panels.setdefault(column.unit, []).append(column)
    return panels


def draw(tables: Sequence[Table], title: str, path: str) -> None:
    """Draw every table, one panel for each unit.

    Args:
        path: the file; its suffix picks the format.

    Raises:
        ValueError: matplotlib is missing or does not know the suffix, or no table holds a measured column.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("--plot needs matplotlib; install the package's extra 'bench'") from None
    shown = [t for t in tables if t.rows and t.plotted]
    panels = [_Panel(table, unit, columns) for table in shown for unit, columns in panels_of(table).items()]
    if not panels:
        raise ValueError("nothing was measured, so there is nothing to plot")
    across = min(2, len(panels))
    lines = [panels[i : i + across] for i in range(0, len(panels), across)]
    heights = [max(p.height for p in line) for line in lines]
    figure, axes = pyplot.subplots(
        len(lines),
        across,
        figsize=(WIDTH * across, sum(heights)),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    try:
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis, panel in zip(axes.flat, panels):
            panel.draw(axis, named=len(shown) > 1)
        figure.suptitle(title, fontsize=10, wrap=True)
        figure.savefig(path, dpi=DPI, bbox_inches="tight")  # a legend may be below the figure
    finally:
        pyplot.close(figure)


class _Panel:
    """One quantity of one table.

    Attributes:
        height: in inches.
    """

    def __init__(self, table: Table, unit: str, columns: Sequence[Column]) -> None:
        self.table, self.unit, self.columns = table, unit, columns
        varying = [c for c in table.keys if len({row[c.key] for row in table.rows}) > 1] or list(table.keys)[-1:]
        numeric = [c for c in varying if self._is_numeric(c)]
        along = next((c for c in numeric if c.key == "bytes"), numeric[-1] if numeric else None)
        self.along = along if along is not None and len({row[along.key] for row in table.rows}) > 1 else None
        self.others = [c for c in varying if c is not self.along]
        rows = min(len(table.rows), MOST_BARS)
        self.height = 4.2 if self.along else min(16.0, 1.4 + rows * (0.12 + 0.16 * len(columns)))

    def _is_numeric(self, column: Column) -> bool:
        return all(isinstance(row[column.key], (int, float)) for row in self.table.rows)

    def draw(self, axis: Any, named: bool) -> None:
        if self.along:
            self._lines(axis, self.along)
        else:
            self._bars(axis)
        parts = [self.table.name] if named else []
        handles, labels = axis.get_legend_handles_labels()
        if len(labels) == 1:
            parts.append(labels[0])
        elif labels:
            axis.legend(
                fontsize=8,
                loc="upper center",
                bbox_to_anchor=(0.5, -0.22 if self.along else -0.9 / self.height),
                ncols=2,
            )
        axis.set_title(", ".join(parts), fontsize=10)

    def _quantity(self) -> str:
        if not self.unit:
            return ""
        return f"{QUANTITIES.get(self.unit, 'Value')} ({self.unit})"

    def _range(self) -> float:
        values = [row[c.key] for c in self.columns for row in self.table.rows if row.get(c.key) is not None]
        return max(values) / min(values) if min(values) > 0 else 0.0

    def _name(self, column: Column, group: Sequence[Any]) -> str:
        return ", ".join(
            [
                column.series or column.title,
                *(
                    f"{c.show(v)} {c.title.lower()}" if not isinstance(v, str) else v
                    for c, v in zip(self.others, group)
                ),
            ]
        )

    def _lines(self, axis: Any, along: Column) -> None:
        rows = self.table.rows
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in rows:
            groups.setdefault(tuple(row[c.key] for c in self.others), []).append(row)
        for group, members in groups.items():
            for column in self.columns:
                points = sorted((r[along.key], r[column.key]) for r in members if r.get(column.key) is not None)
                if points:
                    axis.plot(*zip(*points), marker="o", markersize=4, label=self._name(column, group))
        if all(row[along.key] > 0 for row in rows):
            axis.set_xscale("log", base=2)
            ticks = sorted({row[along.key] for row in rows})
            ticks = ticks[:: max(1, len(ticks) // 14)]
            axis.set_xticks(ticks, [format_bytes(t) if along.key == "bytes" else f"{t:g}" for t in ticks], rotation=45)
            axis.minorticks_off()
        axis.set_xlabel("Size" if along.key == "bytes" else along.heading)
        axis.set_ylabel(self._quantity())
        if self._range() > WIDE_RANGE:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.grid(True, alpha=0.3)

    def _bars(self, axis: Any) -> None:
        rows = self.table.rows[:MOST_BARS]
        thickness = 0.8 / len(self.columns)
        for index, column in enumerate(self.columns):
            places = [i + index * thickness for i, row in enumerate(rows) if row.get(column.key) is not None]
            values = [row[column.key] for row in rows if row.get(column.key) is not None]
            bars = axis.barh(places, values, thickness, label=column.series or column.title)
            axis.bar_label(bars, [significant(float(v), 3) for v in values], padding=2, fontsize=7)
        labels = [", ".join(self._label(c, row[c.key]) for c in self.others) for row in rows]
        axis.set_yticks([i + 0.4 - thickness / 2 for i in range(len(rows))], labels, fontsize=8)
        axis.invert_yaxis()
        axis.set_xlabel(self._quantity())
        axis.margins(x=0.12)
        if self._range() > WIDE_RANGE * 10:
            axis.set_xscale("log")
        axis.grid(True, axis="x", alpha=0.3)
        if len(self.table.rows) > MOST_BARS:
            axis.annotate(
                f"the first {MOST_BARS} of {len(self.table.rows)} rows",
                (1, 1),
                xycoords="axes fraction",
                ha="right",
                va="bottom",
                fontsize=7,
            )

    @staticmethod
    def _label(column: Column, value: Any) -> str:
        if isinstance(value, str):
            return value or "-"
        return format_bytes(value) if column.key == "bytes" else f"{column.title.lower()} {column.show(value)}"
