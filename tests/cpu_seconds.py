"""Processor time of each test with all that it starts: `pytest -p tests.cpu_seconds --cpu-seconds FILE` (as root).

getrusage does not see ranks: they are children of the server that forks them. Each pytest process, workers of xdist among
them, puts itself into a control group of its own, whose account holds all its descendants. A server's start counts for the
test that needed it first, as a kernel's compilation does.
"""

import os
import time
from pathlib import Path

import pytest

V1, V2 = Path("/sys/fs/cgroup/cpuacct"), Path("/sys/fs/cgroup")


class Account:
    """A control group that this process and its descendants are in."""

    def __init__(self):
        self._is_v2 = not V1.exists()
        self.folder = (V2 if self._is_v2 else V1) / f"tilescale_net-tests-{os.getpid()}"
        self.folder.mkdir(exist_ok=True)
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def seconds(self) -> float:
        if self._is_v2:
            return int((self.folder / "cpu.stat").read_text().split()[1]) / 1e6
        return int((self.folder / "cpuacct.usage").read_text()) / 1e9

    def close(self) -> None:
        """Leave the group, and remove it unless something of it still runs."""
        (self.folder.parent / "cgroup.procs").write_text(str(os.getpid()))
        try:
            self.folder.rmdir()
        except OSError:
            pass


def pytest_addoption(parser):
    parser.addoption(
        "--cpu-seconds", metavar="FILE", help="append a line per test: seconds of processors, of the clock"
    )


def pytest_configure(config):
    if config.option.cpu_seconds:
        config.pluginmanager.register(Lines(os.path.abspath(config.option.cpu_seconds)))


class Lines:
    def __init__(self, path: str):
        self._path = path
        self._account = Account()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        before, begin = self._account.seconds(), time.monotonic()
        yield
        used, spent = self._account.seconds() - before, time.monotonic() - begin
        with open(self._path, "a") as file:
            file.write(f"{used:9.2f} {spent:9.2f} {item.nodeid}\n")

    def pytest_unconfigure(self):
        self._account.close()
