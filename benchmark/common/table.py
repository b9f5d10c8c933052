"""Markdown tables whose columns line up in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        key: name of the value in a row and in the JSON file.
        title: heading, with its unit.
        format: format specification for numbers, such as `,d` or `.2f`; text is shown as it is.
        better: `higher` or `lower` where one of them is; such columns get a ratio under `--baseline` and are plotted.
        series: name in a plot's legend; the title without its unit when empty.
    """

    key: str
    title: str
    format: str = ""
    better: str = ""
    series: str = ""

    def __post_init__(self):
        if self.better not in ("", "higher", "lower"):
            raise ValueError(f"column {self.key}: better={self.better!r} is not 'higher', 'lower' or ''")

    def show(self, value) -> str:
        """A value as the table shows it; None (not measured) is `-`."""
        if value is None:
            return "-"
        if isinstance(value, str):
            return value
        return format(value, self.format)


@dataclass
class Table:
    """Rows of one question. Rows are told apart by their key columns.

    Attributes:
        name: identifies the table in the JSON file; shown as a heading when a report has several tables.
        keys: columns that say what was measured (size, threads, …).
        columns: columns that say what came out.
        notes: lines shown below the table.
    """

    name: str
    keys: Sequence[Column]
    columns: Sequence[Column]
    notes: list[str] = field(default_factory=list)
    rows: list[dict] = field(default_factory=list)
    samples: list[dict[str, list[float]]] = field(default_factory=list)

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

    def key_of(self, row: Mapping) -> tuple:
        """The values of the key columns of a row."""
        return tuple(row[column.key] for column in self.keys)

    def markdown(self) -> str:
        """The table as aligned markdown; numbers to the right, text to the left. Columns with no value are left out."""
        shown = [*self.keys, *(c for c in self.columns if any(r.get(c.key) is not None for r in self.rows))]
        cells = [[c.show(row.get(c.key)) for c in shown] for row in self.rows]
        right = [not any(isinstance(row.get(c.key), str) for row in self.rows) for c in shown]
        widths = [max(3, len(c.title), *(len(line[i]) for line in cells)) for i, c in enumerate(shown)]

        def line(texts: Sequence[str]) -> str:
            padded = (t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, widths, right))
            return "| " + " | ".join(padded) + " |"

        rule = "|" + "|".join("-" * (w + 1) + ":" if r else ":" + "-" * (w + 1) for w, r in zip(widths, right)) + "|"
        return "\n".join([line([c.title for c in shown]), rule, *(line(c) for c in cells)])
