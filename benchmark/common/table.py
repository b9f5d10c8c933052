"""Markdown tables whose columns line up in a terminal, and their comparison with an earlier run's JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


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

    def __post_init__(self):
        if self.better not in ("", "higher", "lower"):
            raise ValueError(f"column {self.key}: better={self.better!r} is not 'higher', 'lower' or ''")

    @property
    def heading(self) -> str:
        """The title with its unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def show(self, value) -> str:
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
    rows: list[dict] = field(default_factory=list)
    samples: list[dict[str, list[float]]] = field(default_factory=list)
    on_row: Callable[[Table, dict], None] | None = None
    plotted: bool = True

    def add(self, row: Mapping, samples: Mapping[str, Sequence[float]] | None = None) -> None:
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

    def of_row(self, row: Mapping) -> Table:
        """A table like this one that holds one row."""
        return Table(self.name, self.keys, self.columns, [], [dict(row)])

    def key_of(self, row: Mapping) -> tuple:
        """The values of the key columns of a row."""
        return tuple(row[column.key] for column in self.keys)


class Layout:
    """Widths and sides of columns: as wide as headings and cells, numbers to the right.

    Args:
        columns: shown, in order.
        rows: that the widths are taken from; wider cells that come later move their line.
        least: of every column's width.
    """

    def __init__(self, columns: Sequence[Column], rows: Sequence[Mapping], least: int = 3):
        self.columns = list(columns)
        self._right = [not any(isinstance(row.get(c.key), str) for row in rows) for c in columns]
        self._widths = [
            max([least, len(c.heading), *(len(c.show(row.get(c.key))) for row in rows)]) for c in self.columns
        ]

    def head(self) -> list[str]:
        """Headings and the rule below them."""
        rule = ("-" * (w + 1) + ":" if r else ":" + "-" * (w + 1) for w, r in zip(self._widths, self._right))
        return [self._line([c.heading for c in self.columns]), "|" + "|".join(rule) + "|"]

    def row(self, row: Mapping) -> str:
        """A line of the table."""
        return self._line([c.show(row.get(c.key)) for c in self.columns])

    def lines(self, rows: Sequence[Mapping]) -> list[str]:
        """Headings, rule and rows."""
        return [*self.head(), *(self.row(r) for r in rows)]

    def _line(self, texts: Sequence[str]) -> str:
        padded = (t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, self._widths, self._right))
        return "| " + " | ".join(padded) + " |"


SCHEMA = 1  # of the JSON files that Report writes


def load_baseline(path: str) -> dict:
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


def with_ratios(table: Table, earlier: Mapping) -> Table:
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
