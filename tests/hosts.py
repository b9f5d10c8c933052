"""Hosts and containers of a test's own on this machine: network namespaces behind a switch, whose cables can be pulled,
and PID namespaces. Needs root."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess

from tests import lacking

VARIABLE = "TESTS_HOSTS"  # prefix of the hosts that ranks shall enter
NAMES = "TESTS_HOSTS_NAMES"  # a file for each host, after a dot, that it has as /etc/hosts
INTERFACE = "cable"
_NEW_NETWORK, _NEW_NAME, _NEW_PIDS, _NEW_MOUNTS = 0x40000000, 0x04000000, 0x20000000, 0x00020000  # CLONE_NEW…
_BIND, _PRIVATE = 0x1000, 0x44000  # MS_BIND, MS_REC | MS_PRIVATE
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
    if names := os.environ.get(NAMES):
        file = f"{names}.{name.rpartition('-')[2]}".encode()
        if libc.unshare(_NEW_MOUNTS) or _keep_mounts(libc) or libc.mount(file, b"/etc/hosts", None, _BIND, None):
            raise OSError(ctypes.get_errno(), f"host {name} cannot have an /etc/hosts of its own")


def _keep_mounts(libc: ctypes.CDLL) -> int:
    """Let mounts of this process stay in its namespace; other than 0 where that fails.

    The root of a chroot is no mount, and whoever made it has chosen where mounts in it go.
    """
    failed = libc.mount(None, b"/", None, _PRIVATE, None)
    return failed if ctypes.get_errno() != errno.EINVAL else 0


def enter_container() -> None:
    """Go on as process 1 of a PID namespace with a /proc of its own, while this process waits for the end of that one."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_PIDS | _NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "cannot make a container")
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if _keep_mounts(libc) or libc.mount(b"proc", b"/proc", b"proc", 0, None):
        raise OSError(ctypes.get_errno(), "cannot mount /proc")


def enter_empty_network() -> None:
    """Leave this process no network but a loopback interface that is down, as in some sandboxes."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "cannot make a network")


class Hosts:
    """`count` hosts on one switch, while this context manager lasts. No resolver knows their names.

    Args:
        ipv6: their addresses are of IPv6 alone.

    Attributes:
        names: of the hosts. addresses: of the hosts.
        environment: what ranks need to be on them and to meet at the first.
    """

    def __init__(self, count: int, ipv6: bool = False):
        self._ip = lacking.program("ip", "iproute2")
        self._prefix = f"tests{os.getpid()}-"
        self._switch = f"{self._prefix}switch"
        self.names = [f"{self._prefix}{i}" for i in range(count)]
        self.addresses = [f"fd00:77::{i + 1}" if ipv6 else f"10.77.0.{i + 1}" for i in range(count)]
        self.environment = {VARIABLE: self._prefix, "NODES": str(count), "MASTER_ADDR": self.addresses[0]}

    def __enter__(self) -> Hosts:
        try:
            self._run(f"netns add {self._switch}")
            self._run(f"-n {self._switch} link add switch type bridge")
            self._run(f"-n {self._switch} link set switch up")
            for i, host in enumerate(self.names):
                self._run(f"netns add {host}")
                self._run(f"-n {host} link set lo up")
                self._run(f"-n {self._switch} link add port{i} type veth peer name {INTERFACE} netns {host}")
                self._run(f"-n {self._switch} link set port{i} master switch up")
                # As of Docker: the first of each host, with one address on all, from which nothing comes to another.
                self._run(f"-n {host} link add docker0 type bridge")
                self._run(f"-n {host} addr add 172.17.0.1/16 dev docker0")
                self._run(f"-n {host} link set docker0 up")
                self._run(f"-n {host} addr add {self._of_network(i)} dev {INTERFACE}")
                self._run(f"-n {host} link set {INTERFACE} up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error) -> None:
        for name in (*self.names, self._switch):
            if os.path.exists(f"/run/netns/{name}"):
                self._run(f"netns del {name}")

    def pull_cable(self, host: int) -> None:
        """Nothing reaches the host any more, nor comes from it, without notice to any rank."""
        self._run(f"-n {self._switch} link set port{host} nomaster")

    def _of_network(self, host: int) -> str:
        address = self.addresses[host]
        return f"{address}/64 nodad" if ":" in address else f"{address}/24"

    def _run(self, words: str) -> None:
        subprocess.run([self._ip, *words.split()], check=True, capture_output=True, text=True)
