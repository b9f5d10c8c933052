"""Figures of tables, with matplotlib; imported only when `--plot` is given."""

from __future__ import annotations

from collections.abc import Sequence

from benchmark.common.sizes import format_bytes
from benchmark.common.table import Column, Table


def _split_unit(column: Column) -> tuple[str, str]:
    """`Push (GB/s)` is ("Push", "GB/s")."""
    name, bracket, unit = column.title.rpartition(" (")
    return (name, unit.rstrip(")")) if bracket else (column.title, "")


def _panels(table: Table) -> dict[str, list[Column]]:
    """The measured columns of a table by unit: one panel each."""
    panels: dict[str, list[Column]] = {}
    for column in table.columns:
        if column.better and any(row.get(column.key) is not None for row in table.rows):
            panels.setdefault(_split_unit(column)[1], []).append(column)
    return panels


def draw(tables: Sequence[Table], title: str, path: str) -> None:
    """Draw every table, one panel for each unit: the last key column with several values runs along x.

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
    panels = [(table, unit, columns) for table in tables if table.rows for unit, columns in _panels(table).items()]
    if not panels:
        raise ValueError("nothing was measured, so there is nothing to plot")
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(8, 4.5 * len(panels)), squeeze=False)
    for axis, (table, unit, columns) in zip(axes[:, 0], panels):
        _draw_panel(axis, table, unit, columns, named=len(tables) > 1)
    figure.suptitle(title)
    figure.tight_layout()
    try:
        figure.savefig(path)
    finally:
        pyplot.close(figure)


def _draw_panel(axis, table: Table, unit: str, columns: Sequence[Column], named: bool) -> None:
    varying = [c for c in table.keys if len({row[c.key] for row in table.rows}) > 1] or list(table.keys)
    along = varying[-1] if "bytes" not in [c.key for c in varying] else next(c for c in varying if c.key == "bytes")
    others = [c for c in varying if c is not along]
    groups: dict[tuple, list[dict]] = {}
    for row in table.rows:
        groups.setdefault(tuple(row[c.key] for c in others), []).append(row)
    numeric = all(not isinstance(row[along.key], str) for row in table.rows)
    for group, rows in groups.items():
        suffix = "".join(f", {c.title} {value}" for c, value in zip(others, group))
        for column in columns:
            points = [(row[along.key], row[column.key]) for row in rows if row.get(column.key) is not None]
            if points:
                axis.plot(*zip(*points), marker="o", label=(column.series or _split_unit(column)[0]) + suffix)
    if numeric and all(row[along.key] > 0 for row in table.rows):
        axis.set_xscale("log", base=2)
        ticks = sorted({row[along.key] for row in table.rows})
        axis.set_xticks(ticks, [format_bytes(t) if along.key == "bytes" else f"{t:g}" for t in ticks], rotation=45)
    axis.set_xlabel(along.title)
    axis.set_ylabel(unit)
    if named:
        axis.set_title(table.name)
    axis.set_ylim(bottom=0)
    axis.grid(True, alpha=0.3)
    axis.legend()
