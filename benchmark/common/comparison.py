"""Sides measured one after the other over sizes and geometries, and the table that sets them next to each other."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmark.common.geometry import geometries, varying_columns
from benchmark.common.point_to_point import DIRECTIONS, Side, measure
from benchmark.common.report import Report
from benchmark.common.sizes import format_bytes
from benchmark.common.statistics import median
from benchmark.common.table import Column, Table
from benchmark.common.timing import Timer, gigabytes_per_second


def _key(side: Side, direction: str, what: str) -> str:
    return f"{side.name} {direction} {what}".lower().replace(" ", "_")


def columns_of(sides: Sequence[Side], reference: str | None, percent: bool) -> list[Column]:
    """Bandwidth of every side, ratios to the reference side, then times."""
    named = len(sides) > 1
    bandwidth, ratios, times = [], [], []
    for side in sides:
        for direction in DIRECTIONS:
            title = f"{side.name} {direction.capitalize()}" if named else direction.capitalize()
            bandwidth.append(Column(_key(side, direction, "gbps"), f"{title} BW", better="higher", unit="GB/s"))
            times.append(Column(_key(side, direction, "us"), f"{title}", better="lower", unit="us"))
            if reference and side.name != reference:
                shown = f"{title} of {reference}" if percent else f"{title} x {reference}"
                ratios.append(Column(_key(side, direction, "ratio"), shown, ".1%" if percent else ".2f"))
    return bandwidth + ratios + times


def compare(
    report: Report,
    args: argparse.Namespace,
    sides: Sequence[Side],
    timer: Timer,
    *,
    reference: str | None = None,
    percent: bool = False,
) -> Table:
    """Measure every side and add one table, `bandwidth`, to the report. Collective.

    Args:
        args: with `sizes`, `bidirectional`, `no_check` and the flags of Geometry.
        sides: columns, in this order.
        reference: name of the side that the others are divided by; ignored when it was not measured.
        percent: show those ratios as percentages.
    """
    if reference not in [side.name for side in sides]:
        reference = None
    size = Column("bytes", "Size", ",d", unit="Bytes")
    table = report.table("bandwidth", [*varying_columns(args), size], columns_of(sides, reference, percent))
    known: dict[tuple, list[float]] = {}
    steps = [(geometry, count) for geometry in geometries(args) for count in args.sizes]
    for geometry, count in report.progress(steps, "copies", lambda s: f"{format_bytes(s[1])}, {s[0]}"):
        row = {"bytes": count, "threads": geometry.threads, "blocks": geometry.blocks, "engine": geometry.engine}
        samples = {}
        for side in sides:
            for direction in DIRECTIONS:
                key = (side.name, direction, count, side.relevant(geometry))
                if key not in known:
                    known[key] = measure(
                        side, direction, count, geometry, timer,
                        bidirectional=args.bidirectional, check=not args.no_check,
                    )  # fmt: skip
                samples[_key(side, direction, "us")] = known[key]
                row[_key(side, direction, "us")] = median(known[key])
                row[_key(side, direction, "gbps")] = gigabytes_per_second(count, median(known[key]))
        for side in sides if reference else ():
            for direction in DIRECTIONS:
                base = row[_key(next(s for s in sides if s.name == reference), direction, "gbps")]
                row[_key(side, direction, "ratio")] = row[_key(side, direction, "gbps")] / base
        table.add(row, samples)
    return table
