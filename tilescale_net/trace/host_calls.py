"""Which call of the package each thread of this process is in, for reports of hangs."""

import contextlib
import os
import sys
import threading
import time

from tilescale_net.trace import recorder
from tilescale_net.trace.events import Kind

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_calls: dict[int, list[tuple[str, int]]] = {}  # by thread, the outermost first


class inside(contextlib.ContextDecorator):
    """The calling thread is in the call `name` while the block, or the decorated function, runs. It has no state of its
    own, so that one may be entered by several threads, and again within itself."""

    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> None:
        _calls.setdefault(threading.get_ident(), []).append((self._name, time.monotonic_ns()))

    def __exit__(self, *_) -> None:
        name, begin = _calls[threading.get_ident()].pop()
        if recorder.current is not None:
            recorder.current.add(Kind.HOST, name, begin, time.monotonic_ns())


def outermost() -> tuple[str, float] | None:
    """The call that the main thread is in, as its program made it, and for how many seconds."""
    stack = _calls.get(threading.main_thread().ident or 0)
    if not stack:
        return None
    with contextlib.suppress(IndexError):  # the thread goes on meanwhile
        name, since = stack[0]
        return name, (time.monotonic_ns() - since) * 1e-9
    return None


def python_place() -> str:
    """Where the main thread is in the user's program, such as "train.py:40 in step"; empty when that is not known."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_users(path: str) -> bool:
    return not path.startswith((_PACKAGE, "<", os.path.dirname(threading.__file__))) or "site-packages" in path
