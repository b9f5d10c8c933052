"""Hosts and containers of a test's own on this machine: network namespaces behind a switch, whose cables can be pulled,
and PID namespaces. Needs root."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess

from tests import lacking

VARIABLE = "TESTS_HOSTS"  # prefix of the hosts that ranks shall enter
INTERFACE = "cable"
_NEW_NETWORK, _NEW_NAME, _NEW_PIDS, _NEW_MOUNTS = 0x40000000, 0x04000000, 0x20000000, 0x00020000  # CLONE_NEW…
_PRIVATE = 0x44000  # MS_REC | MS_PRIVATE
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def possible() -> bool:
    """Whether this process may make hosts."""
    return os.geteuid() == 0


def enter(name: str) -> None:
    """Make this process one of the host `name`: for all that it does from here on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as network:
        failed = libc.setns(network.fileno(), _NEW_NETWORK) or libc.unshare(_NEW_NAME)
    if failed or libc.sethostname(name.encode(), len(name)):
        raise OSError(ctypes.get_errno(), f"cannot enter host {name}")


def enter_container() -> None:
    """Go on as process 1 of a PID namespace with a /proc of its own, while this process waits for the end of that one."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_PIDS | _NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "cannot make a container")
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if libc.mount(b"none", b"/", None, _PRIVATE, None) or libc.mount(b"proc", b"/proc", b"proc", 0, None):
        raise OSError(ctypes.get_errno(), "cannot mount /proc")


def enter_empty_network() -> None:
    """Leave this process no network but a loopback interface that is down, as in some sandboxes."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "cannot make a network")


class Hosts:
    """`count` hosts on one switch, while this context manager lasts.

    Attributes:
        environment: what ranks need to be on them and to meet at the first.
    """

    def __init__(self, count: int):
        self._ip = lacking.program("ip", "iproute2")
        self._prefix, self._count = f"tests{os.getpid()}-", count
        self._switch = f"{self._prefix}switch"
        self.environment = {
            VARIABLE: self._prefix,
            "NODES": str(count),
            "MASTER_ADDR": self._address(0),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }

    def __enter__(self) -> Hosts:
        try:
            self._run(f"netns add {self._switch}")
            self._run(f"-n {self._switch} link add switch type bridge")
            self._run(f"-n {self._switch} link set switch up")
            for i in range(self._count):
                host = f"{self._prefix}{i}"
                self._run(f"netns add {host}")
                self._run(f"-n {host} link set lo up")
                self._run(f"-n {self._switch} link add port{i} type veth peer name {INTERFACE} netns {host}")
                self._run(f"-n {self._switch} link set port{i} master switch up")
                self._run(f"-n {host} addr add {self._address(i)}/24 dev {INTERFACE}")
                self._run(f"-n {host} link set {INTERFACE} up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error) -> None:
        for name in (*(f"{self._prefix}{i}" for i in range(self._count)), self._switch):
            if os.path.exists(f"/run/netns/{name}"):
                self._run(f"netns del {name}")

    def pull_cable(self, host: int) -> None:
        """Nothing reaches the host any more, nor comes from it, without notice to any rank."""
        self._run(f"-n {self._switch} link set port{host} nomaster")

    def _address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def _run(self, words: str) -> None:
        subprocess.run([self._ip, *words.split()], check=True, capture_output=True, text=True)
