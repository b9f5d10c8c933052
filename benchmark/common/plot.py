"""Figures of tables, with matplotlib; imported only when one is drawn.

One panel holds one quantity of one table, on an axis that names it with its unit: lines over sizes and counts, bars over
categories and where only one size was measured.
"""

from collections.abc import Mapping, Sequence

from benchmark.common.arguments import format_bytes
from benchmark.common.table import Column, Table, significant

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

    def __init__(self, table: Table, unit: str, columns: Sequence[Column]):
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

    def draw(self, axis, named: bool) -> None:
        (self._lines if self.along else self._bars)(axis)
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

    def _name(self, column: Column, group: Sequence) -> str:
        return ", ".join(
            [
                column.series or column.title,
                *(
                    f"{c.show(v)} {c.title.lower()}" if not isinstance(v, str) else v
                    for c, v in zip(self.others, group)
                ),
            ]
        )

    def _lines(self, axis) -> None:
        along, rows = self.along, self.table.rows
        groups: dict[tuple, list[dict]] = {}
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

    def _bars(self, axis) -> None:
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
    def _label(column: Column, value) -> str:
        if isinstance(value, str):
            return value or "-"
        return format_bytes(value) if column.key == "bytes" else f"{column.title.lower()} {column.show(value)}"
