"""Comparison with an earlier run: reading its JSON file and adding ratio columns."""

from __future__ import annotations

import json
from collections.abc import Mapping

from benchmark.common.table import Column, Table

SCHEMA = 1  # of the JSON files that Report writes


def load(path: str) -> dict:
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
    """How many times better `new` is than `old`: above 1 is better, whichever direction is; None when unknown."""
    if new is None or old is None or isinstance(new, str) or isinstance(old, str):
        return None
    above, below = (new, old) if column.better == "higher" else (old, new)
    return above / below if below else None


def with_ratios(table: Table, earlier: Mapping) -> Table:
    """A copy of `table` in which each column with a direction is followed by its ratio to the earlier run.

    Args:
        earlier: content of a JSON file, from `load`. Rows are matched by table name and key columns.
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
