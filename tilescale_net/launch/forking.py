"""Simulated ranks fork from the launcher, which has imported torch and tilelang once for all of them.

A fresh interpreter spends two to three seconds of a processor on these imports. A forked rank unwinds the launcher's stack
and then runs its script as `python script.py` would: same sys.path, sys.argv, __main__, signals, tracebacks and exit code.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import io
import os
import selectors
import signal
import socket
import sys
import types
import warnings
from collections.abc import Callable, Iterable
from typing import cast

from tilescale_net.runtime import private_folder

_paths: list[str] = []  # sys.path of a fresh interpreter without the script's folder and PYTHONPATH
status: int | None = None  # the exit status of this process, once known


def preload(environment: dict[str, str]) -> bool:
    """Import the modules that every simulated rank imports; the second call does nothing. `environment`: variables of
    all ranks that libraries read when loaded. Returns False if an import fails: then a fresh interpreter reports it."""
    if _paths:
        return True
    # The first registered function runs last, after the modules' and the program's.
    atexit.register(_leave)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    before = dict(os.environ)
    os.environ.update(environment)
    # The collector would scan the new modules repeatedly during their import, and later in each rank, where that copies
    # the pages.
    gc.disable()
    try:
        for module in ("torch.distributed", "tilescale_net.language", "tilescale_net.compiler.simulator.preloaded"):
            importlib.import_module(module)
    except Exception:
        return False
    finally:
        os.environ.clear()
        os.environ.update(before)
        gc.enable()
    gc.freeze()
    _paths[:] = [path for path in sys.path[1:] if path not in paths]
    return True


class Process:
    """A forked rank, instead of the subprocess.Popen of a fresh interpreter; raises BecomeRank in the rank."""

    def __init__(
        self,
        command: list[str],
        env: dict[str, str],
        stdin: int,
        stdout: int | None,
        stderr: int,
        start_new_session: bool,
        preexec_fn: Callable[[], None],
        pass_fds: list[int],
    ):
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            return
        os.setsid()
        preexec_fn()
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
            if source is not None:
                os.dup2(source, target)
        os.environ.clear()
        os.environ.update(env)
        raise BecomeRank(command[1:], pass_fds)

    def wait(self) -> int:
        """Wait for the end of the process; its exit code, negative for a signal."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        os.kill(self.pid, number)


class BecomeRank(BaseException):
    """Unwinds a forked rank to the frame that runs its script. `arguments`: the script and its arguments.
    `descriptors`: open in the rank under the same numbers."""

    def __init__(self, arguments: list[str], descriptors: Iterable[int]):
        super().__init__(arguments)
        self._arguments = arguments
        # Copies: the launcher's objects close their own.
        self._descriptors = {fd: os.dup(fd) for fd in descriptors}

    def run(self) -> None:
        """Run the script in this process, and pass its exceptions on."""
        global status
        _close_objects()
        for fd, copy in self._descriptors.items():
            os.dup2(copy, fd)
        close_all_but(self._descriptors)
        _reset_signals()
        faulthandler.enable()  # PYTHONFAULTHANDLER
        for stream in (sys.stdout, sys.stderr):
            cast(io.TextIOWrapper, stream).reconfigure(write_through=True)  # PYTHONUNBUFFERED
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()  # otherwise all ranks draw the same numbers
        script = self._arguments[0]
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [os.path.dirname(os.path.realpath(script)), *filter(None, paths), *_paths]
        sys.argv = list(self._arguments)
        main = types.ModuleType("__main__")
        vars(main).update(__file__=script, __builtins__=__builtins__, __cached__=None)
        sys.modules["__main__"] = main
        status = 1
        try:
            with open(script, "rb") as file:
                code = compile(file.read(), script, "exec", dont_inherit=True)
            exec(code, vars(main))
            status = 0
        except SystemExit as end:
            status = 0 if end.code is None else end.code & 0xFF if isinstance(end.code, int) else 1
            raise
        except KeyboardInterrupt:
            status = None  # the interpreter ends itself by the signal
            raise
        except BaseException as error:
            # As at the end of a program, but without the launcher's frames.
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_globals is not vars(main):
                trace = trace.tb_next
            sys.last_value = error.with_traceback(trace)
            sys.excepthook(type(error), error, trace)
            raise SystemExit(1) from None


def _close_objects() -> None:
    """Close the launcher's sockets and selectors, which would close descriptors of the rank when they are collected."""
    gc.collect()
    with warnings.catch_warnings():  # of checked modules
        warnings.simplefilter("ignore")
        for found in gc.get_objects():
            if isinstance(found, (socket.socket, selectors.BaseSelector)):
                found.close()


def close_all_but(kept: Iterable[int], first: int = 3) -> None:
    """Close the descriptors of this process from `first` on; those before 3 are stdin, stdout and stderr."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd >= first and fd not in kept:
            with contextlib.suppress(OSError):
                os.close(fd)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
        if callable(signal.getsignal(number)):  # the launcher's own handler, and not SIG_IGN, which a rank inherits
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _leave() -> None:
    """End this process without taking the interpreter apart, which costs a quarter of a second of a processor."""
    if status is None:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    private_folder.remove_temporary()  # made before this was registered, when the package was imported
    os._exit(status)
