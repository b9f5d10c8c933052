"""Plots of measured figures: panels one below the other, in one column that can be read on a phone."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilescale_net.runtime import settings

OURS, PEER, OTHER = "#1f77b4", "#d9822b", "#7f7f7f"
WIDTH = 5.2  # inches; text of 9 points is 9 px high where the figure is 390 px wide
FEW = 5  # sizes that are bars; more are points of a line
MOST_BARS = 40  # groups of a panel; how many more there are stands in its title
WIDE_RANGE = 10.0  # largest over smallest figure from which an axis is logarithmic
LABEL, SMALL = 10, 9  # points


def significant(value: float, digits: int = 4) -> str:
    """A number with that many significant digits and no exponent: 0.001235, 12.35, 123,457."""
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


@dataclass(frozen=True)
class Panel:
    """One quantity by one key: lines over many numbers, bars for few numbers or for words.

    Attributes:
        title: names the hardware.
        quantity: label of the measured axis, such as "Time (us)".
        along: label of the key's axis; "Size" for bytes.
        points: by name in the legend: the figure of each key.
        styles: by name: colour, and a dash pattern for lines; names without one take the next colour.
        lines: lines even for few keys.
        reference: name and figure of a horizontal line.
    """

    title: str
    quantity: str
    along: str
    points: Mapping[str, Mapping[Any, float]]
    styles: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    lines: bool = False
    reference: tuple[str, float] | None = None

    @property
    def keys(self) -> list[Any]:
        found = list(dict.fromkeys(key for figures in self.points.values() for key in figures))
        return sorted(found) if all(isinstance(key, (int, float)) for key in found) else found

    @property
    def as_lines(self) -> bool:
        return not any(isinstance(key, str) for key in self.keys) and (self.lines or len(self.keys) > FEW)

    @property
    def legend_columns(self) -> int:
        return 2 if max(map(len, self.points)) <= 28 else 1

    @property
    def height(self) -> float:
        """In inches."""
        bars = sum(_slots(self, key) for key in self.keys[:MOST_BARS])
        legend = 0.2 * math.ceil(len(self.points) / self.legend_columns) if len(self.points) > 1 else 0
        return (2.4 if self.as_lines else 0.7 + 0.17 * bars) + 0.3 + legend


def _range(panel: Panel) -> float:
    """The largest figure over the smallest."""
    figures = [figure for found in panel.points.values() for figure in found.values()]
    return max(figures) / min(figures) if min(figures) > 0 else 0.0


def _style(panel: Panel, index: int, name: str) -> tuple[str, str]:
    return panel.styles.get(name, (f"C{index % 10}", "-"))


def _key(panel: Panel, key: Any) -> str:
    if isinstance(key, str):
        return textwrap.fill(key or "-", 22)
    if panel.along != "Size":
        return f"{key:g}"
    return f"{key} B" if (text := format_bytes(key)).isdigit() else text


def _plain(axis: Any) -> None:
    """Ticks of a logarithmic axis as 1, 10, 100."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _lines(axes: Any, panel: Panel) -> None:
    for index, (name, figures) in enumerate(panel.points.items()):
        colour, dashes = _style(panel, index, name)
        axes.plot(*zip(*sorted(figures.items())), dashes, color=colour, marker="o", markersize=3, label=name)
    keys = panel.keys
    if min(keys) > 0:
        axes.set_xscale("log", base=2)
        ticks = keys[:: math.ceil(len(keys) / 7)]
        axes.set_xticks(ticks, [_key(panel, tick) for tick in ticks])
        axes.minorticks_off()
    axes.set_xlabel(panel.along, fontsize=SMALL)
    axes.set_ylabel(panel.quantity, fontsize=SMALL)
    if _range(panel) > WIDE_RANGE:
        axes.set_yscale("log")
        _plain(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
    if panel.reference:
        name, figure = panel.reference
        axes.axhline(figure, color="black", linewidth=1, linestyle=":", label=name)
    axes.grid(True, alpha=0.3)


def _slots(panel: Panel, key: Any) -> float:
    """Of a group of bars, in bars: as many as there are figures, or as its label is high, and a gap."""
    return (
        max(sum(key in figures for figures in panel.points.values()), 0.85 * len(_key(panel, key).splitlines())) + 0.5
    )


def _bars(axes: Any, panel: Panel) -> None:
    keys, begin, ticks = panel.keys[:MOST_BARS], 0.0, []
    for key in keys:  # names without a figure leave no gap
        there = [(i, name) for i, name in enumerate(panel.points) if key in panel.points[name]]
        middle = begin + (_slots(panel, key) - 0.5) / 2
        ticks.append(middle)
        for place, (index, name) in enumerate(there):
            figure = panel.points[name][key]
            at = middle + place - (len(there) - 1) / 2
            bar = axes.barh(at, figure, 0.9, color=_style(panel, index, name)[0])
            axes.bar_label(bar, [significant(figure, 3)], padding=2, fontsize=SMALL - 0.5)
        begin += _slots(panel, key)
    for index, name in enumerate(panel.points):  # a handle for the legend
        axes.fill_between([], [], [], color=_style(panel, index, name)[0], label=name)
    axes.set_yticks(ticks, [_key(panel, key) for key in keys])
    axes.set_ylim(begin - 0.4, -0.1)
    axes.margins(x=0.14)
    axes.set_xlabel(panel.quantity, fontsize=SMALL)
    if _range(panel) > 30 * WIDE_RANGE:
        axes.set_xscale("log")
        _plain(axes.xaxis)
    axes.grid(True, axis="x", alpha=0.3)


def draw(panels: Sequence[Panel], path: str, title: str = "", description: str = "") -> None:
    """Draw the panels, one below the other, into a file.

    Args:
        path: the file; its suffix picks the format.
        title: of all of them.
        description: stands in the metadata of an SVG file.

    Raises:
        ValueError: matplotlib is missing or does not know the suffix, or there is no panel.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib; install the package's extra 'bench'") from None
    if not panels:
        raise ValueError("nothing was measured, so there is nothing to plot")
    heights = [panel.height for panel in panels]
    # Text stays text, in the fonts of the reader, and the same data make the same file.
    options: dict[Any, Any] = {
        "svg.hashsalt": os.path.basename(path),
        "svg.fonttype": "none",
        "font.family": "sans-serif",
    }
    with matplotlib.rc_context({**options, "xtick.labelsize": SMALL, "ytick.labelsize": SMALL}):
        head = textwrap.fill(title, 58)
        figure = Figure(figsize=(WIDTH, sum(heights) + 0.22 * len(head.splitlines())), layout="constrained")
        if head:
            figure.suptitle(head, fontsize=LABEL)
        parts = figure.subfigures(len(panels), 1, squeeze=False, height_ratios=heights)
        for part, panel in zip(parts.flat, panels):
            more = len(panel.keys) - MOST_BARS if not panel.as_lines else 0
            words = panel.title + (f" (the first {MOST_BARS} of {len(panel.keys)})" if more > 0 else "")
            words, bold = textwrap.fill(words, 58), {"size": LABEL, "weight": "bold"}
            axes = part.subplots()
            (_lines if panel.as_lines else _bars)(axes, panel)
            if len(panel.points) > 1:
                place = {
                    "loc": "outside upper center",
                    "ncols": panel.legend_columns,
                    "frameon": False,
                    "borderaxespad": 0.2,
                }
                part.legend(title=words, title_fontproperties=bold, fontsize=SMALL, **place)
            else:
                part.suptitle(words, **bold)
        metadata = {"Date": None, "Description": description} if path.endswith(".svg") else None
        figure.savefig(path, metadata=metadata, facecolor="white", dpi=150)
