"""Medians and spreads of repeated measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def median(samples: Sequence[float]) -> float:
    """The median; of an even number of samples the mean of the middle two. Raises ValueError when there are none."""
    if not samples:
        raise ValueError("the median of no samples is not defined")
    return float(statistics.median(samples))


def spread(samples: Sequence[float]) -> float:
    """(maximum - minimum) / median, a measure of how far a median can be trusted; 0 for one sample."""
    middle = median(samples)
    return (max(samples) - min(samples)) / middle if middle else 0.0


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that so many percent of all do not exceed; ValueError when there are none."""
    if not samples:
        raise ValueError("a percentile of no samples is not defined")
    return float(sorted(samples)[max(0, math.ceil(len(samples) * percent / 100) - 1)])


def summary(samples: Sequence[float]) -> dict[str, float]:
    """`median`, `min`, `max` and `count` of the samples."""
    return {"median": median(samples), "min": min(samples), "max": max(samples), "count": len(samples)}
