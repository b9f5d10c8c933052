"""Names of host calls: ranges of torch.profiler while it runs, NVTX ranges where TSN_NVTX is set, and the host's track
of the timeline that TSN_TRACE writes.
"""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from tilescale_net.runtime import settings
from tilescale_net.trace import host_calls, recorder

# -- progress ------------------------------------------------------------------------------------------------------------

# A line about a step that takes long, so that it is not taken for a hang.

# Seconds without output; a step that is shorter is not worth a line.
SILENCE_S = 5.0


_steps: list[tuple[str, float]] = []  # of all threads, with the time of their begin
_lock = threading.Lock()


def in_long_step() -> bool:
    """Whether this process is in such a step now."""
    return bool(_steps)


def current_step(seconds: float = 0.0) -> str:
    """The step that this process has been in for the longest, and for more than `seconds`, such as "compiling kernel
    ring"; '' for none.
    """
    with _lock:
        return next((what for what, begin in _steps if time.monotonic() - begin >= seconds), "")


@contextlib.contextmanager
def long_step(what: str, more: str = "") -> Iterator[None]:
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


# -- profiling -----------------------------------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable)
_nvtx: bool | None = None  # what TSN_NVTX said when the first named call was made


def named(name: str) -> Callable[[F], F]:
    """A decorator: calls of the function are ranges `name`. It costs 0.1 us where none is recorded."""

    inside = host_calls.inside(name)

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args, **kwargs):
            if not (_profiled() or _wants_nvtx()):
                if recorder.current is None:
                    return function(*args, **kwargs)
                with inside:
                    return function(*args, **kwargs)
            with contextlib.ExitStack() as ranges:
                if recorder.current is not None:
                    ranges.enter_context(inside)
                if _profiled():
                    ranges.enter_context(torch.profiler.record_function(name))
                elif _wants_nvtx():
                    ranges.enter_context(torch.cuda.nvtx.range(name))
                return function(*args, **kwargs)

        return call

    return decorate


_profiled = torch.autograd._profiler_enabled


def _wants_nvtx() -> bool:
    global _nvtx
    if _nvtx is None:
        _nvtx = settings.NVTX.get() and torch.cuda.is_available()
    return _nvtx
