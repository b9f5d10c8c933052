"""Progress of long runs on stderr: a live line on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from benchmark.common.ranks import is_rank_zero

Item = TypeVar("Item")
_PLAIN_INTERVAL = 5.0  # seconds between lines where stderr is no terminal
_LIVE_INTERVAL = 0.1


def progress(items: Iterable[Item], label: str, show=str, stream=None) -> Iterator[Item]:
    """Yield `items`, reporting on rank 0's stderr how far the run is.

    A run that ends within the first interval prints nothing where stderr is no terminal.

    Args:
        label: what an item is, such as `sizes`.
        show: turns an item into text.
        stream: stderr when None.
    """
    stream = stream or sys.stderr
    items = list(items)
    live = stream.isatty()
    start = last = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        due = now - last >= (_LIVE_INTERVAL if live else _PLAIN_INTERVAL) or (live and done == 0)
        if due and is_rank_zero():
            text = f"{label}: {done}/{len(items)}, now {show(item)}, {now - start:.0f} s"
            stream.write(f"\r\x1b[K{text}" if live else text + "\n")
            stream.flush()
            last = now
        yield item
    if live and is_rank_zero() and items:
        stream.write("\r\x1b[K")
        stream.flush()
