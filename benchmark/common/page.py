"""One HTML page of several benchmarks' results: tables, plots, commands; nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from benchmark.common.table import significant

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; }
th, td { border: 1px solid #ccc; padding: 3px 8px; text-align: right; }
th { background: #f2f2f2; } td.text { text-align: left; }
code { background: #f2f2f2; padding: 1px 4px; } img { max-width: 100%; }
.failed { color: #b00020; }
"""


@dataclass
class Result:
    """What became of one benchmark.

    Attributes:
        content: of its JSON file, None when it left none.
        plot: an SVG image.
        said: why there are no results, or not all.
        seconds: that it took.
    """

    name: str
    content: dict | None = None
    plot: bytes | None = None
    said: str = ""
    failed: bool = False
    seconds: float = 0.0

    @property
    def measured(self) -> bool:
        return bool(self.content and any(t["rows"] for t in self.content["tables"]))


def page(results: Sequence[Result]) -> str:
    """The page: what all runs have in common first, then one section a benchmark."""
    environments = [r.content["environment"] for r in results if r.measured]
    common = (
        {k: v for k, v in environments[0].items() if all(e.get(k) == v for e in environments)} if environments else {}
    )
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>tilescale_net benchmarks</title>",
        f"<style>{STYLE}</style></head><body><h1>tilescale_net benchmarks</h1>",
        _facts(common),
        "<ul>",
        *(f"<li><a href='#{r.name}'>{r.name}</a>{_state(r)}</li>" for r in results),
        "</ul>",
        *(_section(r, common) for r in results),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _facts(facts: dict[str, str]) -> str:
    if not facts:
        return ""
    rows = "".join(f"<tr><th>{escape(k)}</th><td class='text'>{escape(str(v))}</td></tr>" for k, v in facts.items())
    return f"<table>{rows}</table>"


def _state(result: Result) -> str:
    if not result.said:
        return f": {result.seconds:.0f} s"
    mark = " class='failed'" if result.failed else ""
    return f": <span{mark}>{escape(result.said)}</span>"


def _section(result: Result, common: dict[str, str]) -> str:
    out = [f"<h2 id='{result.name}'>{result.name}</h2>"]
    if result.said:
        out.append(f"<p{' class=failed' if result.failed else ''}>{escape(result.said)}</p>")
    if not result.content:
        return "\n".join(out)
    out.append(
        f"<p><code>{escape(' '.join(result.content['command'][:1] + _public(result.content['command'][1:])))}</code></p>"
    )
    out.append(_facts({k: v for k, v in result.content["environment"].items() if k not in common}))
    if result.plot:
        image = base64.b64encode(result.plot).decode()
        out.append(f"<p><img alt='{result.name}' src='data:image/svg+xml;base64,{image}'></p>")
    for table in result.content["tables"]:
        if table["rows"]:
            out.append(f"<h3>{escape(table['name'])}</h3>")
            out.append(_table(table))
            out += [f"<p>{escape(note)}</p>" for note in table["notes"]]
    out += [f"<p>{escape(note)}</p>" for note in result.content["notes"]]
    return "\n".join(out)


def _public(arguments: list[str]) -> list[str]:
    """Arguments without the files that the suite itself asks for."""
    kept, skip = [], False
    for argument in arguments:
        if skip or argument in ("--json", "--plot"):
            skip = not skip
            continue
        kept.append(argument)
    return kept


def _table(table: dict) -> str:
    columns = [
        c for c in [*table["keys"], *table["columns"]] if any(r.get(c["key"]) is not None for r in table["rows"])
    ]
    units = [f" ({c['unit']})" if c.get("unit") else "" for c in columns]
    head = "".join(f"<th>{escape(c['title'] + unit)}</th>" for c, unit in zip(columns, units))
    lines = []
    for row in table["rows"]:
        cells = []
        for c in columns:
            value = row.get(c["key"])
            kind = " class='text'" if isinstance(value, str) else ""
            cells.append(f"<td{kind}>{escape(_show(value))}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _show(value) -> str:
    if value is None:
        return "-"
    return significant(value) if isinstance(value, float) else f"{value:,d}" if isinstance(value, int) else str(value)
