"""A line about a step that takes long, so that it is not taken for a hang."""

import contextlib
import os
import threading
from collections.abc import Iterator

from tilescale_net.runtime import settings

# Seconds without output; a step that is shorter is not worth a line.
SILENCE_S = 5.0


_steps = 0
_lock = threading.Lock()


def active() -> bool:
    """Whether this process is in such a step now."""
    return _steps > 0


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Log `what` as a warning of the logger "tilescale_net" when the block takes longer than SILENCE_S seconds.

    Of the ranks of a host only the first does so: the others do the same or wait for the one that does.
    """
    global _steps
    timer = threading.Timer(SILENCE_S, settings.log.warning, ("%s", what))
    timer.daemon = True
    with _lock:
        _steps += 1
    try:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            timer.start()
        yield
    finally:
        timer.cancel()
        with _lock:
            _steps -= 1
