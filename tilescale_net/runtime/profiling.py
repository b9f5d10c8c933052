"""Ranges of host calls: in torch.profiler while it runs, in NVTX with TSN_NVTX, and on the host's track of TSN_TRACE."""

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, cast

import torch

from tilescale_net.runtime import settings
from tilescale_net.runtime.launch_args import has_function_mode, put_default_device, take_default_device

# -- progress ------------------------------------------------------------------------------------------------------------

# Messages about long steps, so that users do not take them for a hang.

# Seconds without output; a step that is shorter is not worth a line.
SILENCE_S = 5.0


_steps: list[tuple[str, float]] = []  # of all threads, with their start time
_lock = threading.Lock()


def in_long_step() -> bool:
    """Whether this process is in such a step."""
    return bool(_steps)


def current_step(seconds: float = 0.0) -> str:
    """The step that this process has been in for the longest, and for more than `seconds`, such as "compiling kernel
    ring"; '' for none."""
    with _lock:
        return next((what for what, begin in _steps if time.monotonic() - begin >= seconds), "")


@contextlib.contextmanager
def long_step(what: str, more: str = "") -> Iterator[None]:
    """Log `what` and `more` as a warning of the logger "tilescale_net" if the block takes longer than SILENCE_S
    seconds. Only the first rank of a host logs: the others do the same or wait for it."""
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


# -- host calls ----------------------------------------------------------------------------------------------------------


class TraceRecorder(Protocol):
    """The trace of a rank while TSN_TRACE is set. `gpu_calls`: the ring of calls in a GPU's memory, with its `address`;
    None without one."""

    gpu_calls: Any

    def add_host_call(self, name: str, begin_ns: int, end_ns: int) -> None:
        """Record a finished call of the package by this thread."""

    def timed(self, launch: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`launch`, which launches a kernel on a GPU, with its times in the trace."""

    def proxy_files(self, threads: int) -> list[str]:
        """A file for each thread of the proxy to write to."""

    def finish(self) -> None:
        """Write the trace at the regular end of a job. Collective."""

    def leave(self) -> None:
        """Keep the parts of a failed job."""

    def stop(self) -> None:
        """Write no more events."""


recorder: TraceRecorder | None = None  # of this process, while it records

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_calls: dict[int, list[tuple[str, int]]] = {}  # by thread, the outermost first


class inside(contextlib.ContextDecorator):
    """The calling thread is in the call `name` during the block, or the decorated function. It has no state of its own,
    so several threads may enter one object, also recursively."""

    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> None:
        _calls.setdefault(threading.get_ident(), []).append((self._name, time.monotonic_ns()))

    def __exit__(self, *_: object) -> None:
        name, begin = _calls[threading.get_ident()].pop()
        if recorder is not None:
            recorder.add_host_call(name, begin, time.monotonic_ns())


def outermost() -> tuple[str, float] | None:
    """The outermost call that the main thread is in, and its seconds so far."""
    stack = _calls.get(threading.main_thread().ident or 0)
    if not stack:
        return None
    with contextlib.suppress(IndexError):  # the thread goes on meanwhile
        name, since = stack[0]
        return name, (time.monotonic_ns() - since) * 1e-9
    return None


def python_place() -> str:
    """The main thread's line in the user's program, such as "train.py:40 in step"; empty if unknown."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_users(path: str) -> bool:
    return not path.startswith((_PACKAGE, "<", os.path.dirname(threading.__file__))) or "site-packages" in path


# -- profiling -----------------------------------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])
_nvtx: bool | None = None  # TSN_NVTX at the first named call


def named(name: str) -> Callable[[F], F]:
    """A decorator: calls of the function are ranges `name`, and run without the mode of torch.set_default_device. It
    costs 0.1 us if nothing records."""

    in_call = inside(name)

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if has_function_mode() and (mode := take_default_device()) is not None:
                try:
                    return call(*args, **kwargs)
                finally:
                    put_default_device(mode)
            if not (_profiled() or (_nvtx is not False and _wants_nvtx())):
                if recorder is None:
                    return function(*args, **kwargs)
                with in_call:
                    return function(*args, **kwargs)
            with contextlib.ExitStack() as ranges:
                if recorder is not None:
                    ranges.enter_context(in_call)
                if _profiled():
                    ranges.enter_context(torch.profiler.record_function(name))
                elif _wants_nvtx():
                    ranges.enter_context(torch.cuda.nvtx.range(name))
                return function(*args, **kwargs)

        return cast(F, call)

    return decorate


_profiled = torch.autograd._profiler_enabled


def _wants_nvtx() -> bool:
    global _nvtx
    if _nvtx is None:
        _nvtx = settings.NVTX.get() and torch.cuda.is_available()
    return _nvtx
