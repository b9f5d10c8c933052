"""Runs a script as launch.sh does, in forks of a process that has imported torch and tilelang.

A rank of a fresh interpreter spends three seconds of a processor on imports; here it forks and then ends as a program
does. The launcher is the real one. tests/launch starts everything from nothing, as users do.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_MESSAGE = 1 << 20


# -- in the test ------------------------------------------------------------------------------------------------------


class _Server:
    """The process that forks; it ends when the other end of its socket is closed, at the latest with this process."""

    def __init__(self):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            env = {**os.environ, "OMP_NUM_THREADS": "1", "TSN_DEVICE": "simulator"}
            env["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, [env.get("PYTHONPATH")])])
            command = [sys.executable, "-m", "tests.jobs", str(theirs.fileno())]
            self._process = subprocess.Popen(command, env=env, cwd=ROOT, pass_fds=[theirs.fileno()])

    def run(self, arguments: list[str], env: dict[str, str], cwd: str, timeout: float) -> subprocess.CompletedProcess:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            request = json.dumps([arguments, env, cwd]).encode()
            socket.send_fds(self._socket, [request], [out.fileno(), err.fileno()])
            pid = int(self._socket.recv(_MESSAGE))
            self._socket.settimeout(timeout)
            try:
                code = int(self._socket.recv(_MESSAGE))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                self._socket.settimeout(10)
                self._socket.recv(_MESSAGE)
                code = None
            finally:
                self._socket.settimeout(None)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        if code is None:
            raise AssertionError(f"{arguments} did not end within {timeout} s; stderr: {texts[1]}")
        return subprocess.CompletedProcess(arguments, code, *texts)


_server = functools.cache(_Server)


def launch(
    script: str, *arguments: str, env: dict[str, str], cwd: str = ROOT, timeout: float = 200
) -> subprocess.CompletedProcess:
    """Run `bash launch.sh script arguments` to its end; ranks are simulated if TSN_DEVICE is set to that.

    Args:
        env: the whole environment of the launcher.
    """
    from tests import ranks

    if env.get("TSN_DEVICE") == "simulator" and not ranks.visible_gpus():
        return _server().run([script, *arguments], env, cwd, timeout)
    return subprocess.run(
        ["bash", os.path.join(ROOT, "launch.sh"), script, *arguments],
        cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
    )  # fmt: skip


# -- in the server ----------------------------------------------------------------------------------------------------


class _BecomeRank(BaseException):
    """Unwinds a forked rank to where the program begins.

    Carries the script with its arguments, and copies of the descriptors that are handed to the rank: the launcher's
    objects close them.
    """


class _Rank:
    """In place of the subprocess.Popen by which the launcher starts a rank."""

    def __init__(self, command, env, stdin, stdout, stderr, start_new_session, preexec_fn, pass_fds):
        self.returncode = None
        self.pid = os.fork()
        if self.pid:
            return
        os.setsid()
        preexec_fn()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        if stdout is not None:
            os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.environ.clear()
        os.environ.update(env)
        raise _BecomeRank(command[1:], {fd: os.dup(fd) for fd in pass_fds})

    def wait(self) -> int:
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _launcher(arguments: list[str]) -> int:
    """The launcher's process: imported here, because it notes whose child it is not."""
    from tilescale_net.launch import job, run

    job.subprocess = types.SimpleNamespace(Popen=_Rank, DEVNULL=subprocess.DEVNULL)
    return run.start(arguments)


def _close_all_but(kept) -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):
                os.close(fd)


def _close_objects() -> None:
    """Close the launcher's sockets and selectors, which would close descriptors of the rank when they are collected."""
    gc.collect()
    with warnings.catch_warnings():  # of modules that are looked at
        warnings.simplefilter("ignore")
        for found in gc.get_objects():
            if isinstance(found, (socket.socket, selectors.BaseSelector)):
                found.close()


def _serve(requests: socket.socket) -> list[str] | None:
    """Fork a launcher for each request; what is returned is for a rank to run, or None in the server at its end."""
    while True:
        request, fds, _, _ = socket.recv_fds(requests, _MESSAGE, 2)
        if not request:
            return None
        pid = os.fork()
        if pid:
            for fd in fds:
                os.close(fd)
            requests.send(str(pid).encode())
            requests.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
            continue
        arguments, env, cwd = json.loads(request)
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        requests.close()
        _close_all_but(())
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        try:
            _leave(_launcher(arguments))
        except _BecomeRank as rank:
            command, copies = rank.args
        _close_objects()
        for fd, copy in copies.items():
            os.dup2(copy, fd)
        _close_all_but(copies)
        return command


def _leave(code: int | None) -> None:
    """End this process: to take an interpreter with torch in it apart costs a fork a quarter of a second of a processor."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _main() -> None:
    code: int | None = 0
    # The first that is registered comes last, after all that the program has registered.
    atexit.register(lambda: _leave(code))

    import torch.distributed  # noqa: F401

    import tests.preloaded  # noqa: F401
    import tilescale_net.compiler.jit
    import tilescale_net.language  # noqa: F401

    base = [p for p in sys.path if p not in (ROOT, "")]
    try:
        command = _serve(socket.socket(fileno=int(sys.argv[1])))
        if command is None:
            return
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [os.path.dirname(os.path.abspath(command[0])), *filter(None, given), *base]
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
    except BaseException as end:
        code = end.code if isinstance(end, SystemExit) and isinstance(end.code, int | None) else 1
        raise


if __name__ == "__main__":
    _main()
