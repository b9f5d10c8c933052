"""The end of this process while its rank is in a job: it is reported to the other ranks, with the reason.

Uncaught exceptions, SystemExit, the end of the program, `finalize` and children made by fork all come here. What ends a
rank without Python's doing (a signal, os._exit) is found by the other ranks' watchdogs.
"""

import atexit
import ctypes
import gc
import os
import sys
import threading
import types
from collections.abc import Callable

from tilescale_net.errors import TileScaleError

# Seconds that other ranks may take to come to a `finalize` that handles an exception, before that exception is reported
# to them.
patience = 10.0

_installed = False
_exit_code: object = None  # that of the SystemExit which ends the program


def install(current: Callable, take: Callable, forget: Callable[[], None]) -> None:
    """Watch for the end of this process; the second call does nothing.

    Args:
        current: returns the worlds of this process.
        take: the same, in the order in which they may end; afterwards none are left.
        forget: called in a child made by fork, which is no rank.
    """
    global _installed
    if _installed:
        return
    _installed = True
    owner = os.getpid()
    os.register_at_fork(after_in_child=forget)
    atexit.register(lambda: _at_exit(take()) if os.getpid() == owner else None)
    previous = sys.excepthook

    def hook(kind, value, trace):
        for world in current():
            world.announce(TileScaleError(_words(value)))
        previous(kind, value, trace)

    sys.excepthook = hook
    _follow_exits()


def finish(world) -> None:
    """Close a world in good order, as `finalize` does.

    In a `finally` or `except` the rank may be failing alone: the others then wait for it in a kernel and would find out
    by its silence only. The exception is reported to them when they do not come.
    """
    raised = sys.exc_info()[1]
    if raised is None or (isinstance(raised, SystemExit) and not _status(raised.code)):
        world.close()
        return
    tell = threading.Timer(patience, world.announce, [TileScaleError(_words(raised))])
    tell.daemon = True
    tell.start()
    try:
        world.close(spoken=f"called tilescale_net.finalize() while it handled {_words(raised)}")
    finally:
        tell.cancel()


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _at_exit(worlds: list) -> None:
    # First those whose ranks are to learn of a failure: the end of another one may take long.
    ended = [_end(world) for world in sorted(worlds, key=lambda world: world.failure is None)]
    if not all(ended):
        # atexit cannot change the exit status otherwise, and a failed job must not look like a good one.
        sys.stdout.flush()
        os._exit(1)


def _end(world) -> bool:
    """End a world at the end of the process; whether the exit status may stay as it is."""
    code = _status(_exit_code)
    # The uncaught exception; Python notes it even where another excepthook has taken the place of the one above.
    uncaught = getattr(sys, "last_value", None)
    if world.failure is None and uncaught is not None:
        world.give_up(_words(uncaught))
    elif world.failure is not None or code:
        world.give_up(f"it ended (exit code {code})" if code else "it ended before finalize")
    else:
        try:
            world.close(spoken="ended (exit code 0)")
        except TileScaleError as err:
            print(f"tilescale_net: {type(err).__name__}: {err}", file=sys.stderr, flush=True)
            return False
    return True


def _status(code: object) -> int:
    """The exit status that Python makes of the code of a SystemExit."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _follow_exits() -> None:
    """Note the code of the SystemExit that ends the program, however and by whatever it was raised.

    Python does not report the status with which it ends: it reads `code` of the exception when no frame of Python is left,
    and drops it. All that raises or catches the exception uses this one class, so its attribute is what can be watched.
    """
    if sys.version_info < (3, 12):  # whose sys.exit makes no exception before somebody looks at it
        built_in = sys.exit
        for module in [m for m in list(sys.modules.values()) if isinstance(m, types.ModuleType)]:
            for name in [name for name, value in list(vars(module).items()) if value is built_in]:
                vars(module)[name] = _exit
    stored = SystemExit.__dict__["code"]

    def read(error: SystemExit) -> object:
        global _exit_code
        code = stored.__get__(error)
        try:
            sys._getframe(1)
        except ValueError:
            _exit_code = code
        return code

    (attributes,) = gc.get_referents(SystemExit.__dict__)
    attributes["code"] = property(read, stored.__set__, stored.__delete__, stored.__doc__)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))


def _exit(status=None, /):
    """Exit the interpreter by raising SystemExit(status); see Python's documentation of sys.exit."""
    raise SystemExit(status)
