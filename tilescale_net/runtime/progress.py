"""A line about a step that takes long, so that it is not taken for a hang."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from tilescale_net.runtime import settings

# Seconds without output; a step that is shorter is not worth a line.
SILENCE_S = 5.0


_steps: list[tuple[str, float]] = []  # of all threads, with the time of their begin
_lock = threading.Lock()


def active() -> bool:
    """Whether this process is in such a step now."""
    return bool(_steps)


def current(seconds: float = 0.0) -> str:
    """The step that this process has been in for the longest, and for more than `seconds`, such as "compiling kernel
    ring"; '' for none.
    """
    with _lock:
        return next((what for what, begin in _steps if time.monotonic() - begin >= seconds), "")


@contextlib.contextmanager
def step(what: str, more: str = "") -> Iterator[None]:
    """Log `what` and `more` as a warning of the logger "tilescale_net" when the block takes longer than SILENCE_S seconds.

    Of the ranks of a host only the first does so: the others do the same or wait for the one that does.
    """
    timer = threading.Timer(SILENCE_S, settings.log.warning, ("%s%s", what, more))
    timer.daemon = True
    mine = what, time.monotonic()
    with _lock:
        _steps.append(mine)
    try:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            timer.start()
        yield
    finally:
        timer.cancel()
        with _lock:
            _steps.remove(mine)
