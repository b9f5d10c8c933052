"""Runs a script as launch.sh does, with launchers that fork from a process that has imported torch and tilelang.

A launcher of a fresh interpreter spends two seconds of a processor on imports. tests/launch starts everything from nothing,
as users do.
"""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile

from tilescale_net.launch import forking, run

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


def _serve(requests: socket.socket) -> list[str] | None:
    """Fork a launcher for each request; returns its arguments there, and None in the server at its end."""
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
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (fds[0], 1), (fds[1], 2)):
            os.dup2(source, target)
        requests.close()
        forking.close_all_but(())
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        return arguments


def _main() -> None:
    forking.preload({})
    import tests.preloaded  # noqa: F401

    arguments = _serve(socket.socket(fileno=int(sys.argv[1])))
    if arguments is not None:
        sys.exit(run.start(arguments))


if __name__ == "__main__":
    _main()
