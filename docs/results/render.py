"""Tables and plots of the measured results, made from the JSON files beside this program.

    python docs/results/render.py            writes the plots here, and the tables into README.md and docs/results/*.md
    python docs/results/render.py --check    changes nothing; exit code 1 and a list when something is out of date

The JSON files are what `--json` of the benchmarks wrote on the machine that they name. A table stands in a page between
the lines `<!-- table NAME -->` and `<!-- end -->`: `summary.py` makes those that compare, `details.py` those with all rows
of a report, `reports.py` the lines that say where they come from. A plot (`plots.py`) carries the digest of its data and
of these programs, which is what `--check` compares: another version of matplotlib may draw the same plot with other bytes.
"""

import functools
import hashlib
import re
import sys

import details
import plots
import reports
import summary
from reports import HERE

ROOT = HERE.parents[1]
PAGES = [ROOT / "README.md", *sorted(HERE.glob("*.md"))]
# Page -> reports whose figures it shows.
SOURCES = {
    "copies": ("unrolledcp_p2p", "launch_cost"),
    "signals": ("put_signal",),
    "collectives": tuple(summary.COLLECTIVES),
    "products": (*summary.fused_reports(), "matmul", "matmul_fp8"),
    "moe": (
        "moe_throughput",
        "moe_latency",
        "moe_calls",
        "moe_calls_latency",
        "moe_two_nodes",
        "moe_host",
        "moe_layer",
        "moe_layer_top2",
        "moe_layer_two_gpus",
    ),
    "fabric": ("proxy_write", "queue"),
}
TABLES = {
    "highlights": summary.highlights,
    "others-ahead": summary.others_ahead,
    "summary": lambda: summary.table(r for subject in summary.SUBJECTS for r in summary.shown(subject)),
    "source": lambda: reports.source(*reports.names()),
    **{name: lambda name=name: summary.table(summary.shown(name)) for name in summary.SUBJECTS},
    **{f"source-{page}": functools.partial(reports.source, *names) for page, names in SOURCES.items()},
    **details.TABLES,
}
DRAWN_BY = ("reports.py", "summary.py", "plots.py")


def digest(names: tuple[str, ...]) -> str:
    """Of the data of a plot and of the programs that draw it."""
    found = hashlib.sha256()
    for name in (*DRAWN_BY, *(f"{name}.json" for name in names)):
        found.update((HERE / name).read_bytes())
    return found.hexdigest()[:16]


def plot_is_current(name: str) -> bool:
    path = HERE / f"{name}.svg"
    return path.exists() and digest(plots.PLOTS[name][0]) in path.read_text()


def with_tables(text: str) -> str:
    """A page with all its tables as they should be now. Raises KeyError for a table that nobody knows."""

    def current(match: re.Match) -> str:
        return f"<!-- table {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table ([\w-]+) -->\n.*?<!-- end -->", current, text, flags=re.DOTALL)


def stale() -> list[str]:
    """What does not agree with the data, and reports that no page names as its source."""
    pages = [str(p.relative_to(ROOT)) for p in PAGES if with_tables(p.read_text()) != p.read_text()]
    unnamed = sorted(set(reports.names()) - {name for names in SOURCES.values() for name in names})
    drawn = [f"docs/results/{name}.svg" for name in plots.PLOTS if not plot_is_current(name)]
    return pages + drawn + [f"{name}.json is in no page: name it in SOURCES" for name in unnamed]


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        out = stale()
        print("\n".join([*(f"out of date: {o}" for o in out), *(["run docs/results/render.py"] if out else [])]))
        return 1 if out else 0
    if sys.argv[1:]:
        print(__doc__)
        return 2
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
    for name, (names, _, _) in plots.PLOTS.items():
        if not plot_is_current(name):
            plots.write(name, f"data {digest(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
