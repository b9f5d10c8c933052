"""This host: addresses, processes, locks between processes, and the built native part."""

import contextlib
import errno
import fcntl
import importlib
import importlib.util
import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import IO

import tilescale_net
from tilescale_net.errors import ConfigurationError

# -- addresses -----------------------------------------------------------------------------------------------------------

# Address and interface by which other hosts reach this one.

_ANY_PORT = 9  # to which nothing is sent


def address_towards(host: str) -> str:
    """Address of this host on the way to another; nothing is sent. Raises OSError: the name is not known, or there is
    no way."""
    family, kind, _, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(address)  # of a datagram socket: chooses the interface
        return str(way.getsockname()[0])


def address_reaching(hosts: Iterable[str]) -> str:
    """As `address_towards`, for the first host that is known and not reached by loopback; '' for none."""
    for host in filter(None, hosts):
        try:
            address = address_towards(host)
        except OSError:
            continue
        if not is_loopback(address):
            return address
    return ""


GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_chosen = ""  # set by this process


def users_interface() -> str:
    """The interface that the user has named, the first of several; '' for none."""
    named = os.environ.get(GLOO_INTERFACE, "")
    return "" if named == _chosen else named.partition(",")[0]


def choose_interface(address: str) -> None:
    """For torch's default group, which takes no address, and for the program's groups."""
    global _chosen
    number = address.partition("%")[0]
    interface = next((name for name, its in _interfaces() if its.partition("%")[0] == number), None)
    if not users_interface() and interface:
        os.environ[GLOO_INTERFACE] = _chosen = interface


def own_address(networks: list[str], addresses: list[str], rank: int, host: str) -> str:
    """The address by which the others reach this rank, as far as this host tells; '' if unknown.

    The address of the user's interface; loopback if all ranks share it, whatever address the store has; else of the
    interface towards the store. If this host calls the store loopback: of the interface towards another rank.

    Args:
        networks: `identity("net")` of each rank.
        addresses: by which each rank reaches the store; '' for loopback.
        host: that keeps the store of the ranks, as this process names it; '' for none.

    Raises:
        RuntimeError: there is no such interface as the user has named, or it has no address.
    """
    if interface := users_interface():
        if found := next((its for name, its in _interfaces() if name == interface), None):
            return found
        raise RuntimeError(f"this host has no network interface {interface!r} with an address")
    if len(set(networks)) == 1:
        return "127.0.0.1"
    return addresses[rank] or address_reaching(addresses) or ("127.0.0.1" if host else "")


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens at an address of this host, with room for a whole job to come at once."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=4096)


def is_loopback(address: str) -> bool:
    """Whether a number is loopback; a name is not."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def identity(namespace: str) -> str:
    """Identity of a Linux namespace ("net": of loopback) on this machine; equal only for processes that share it."""
    boot, space = "", 0
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as f:
        boot = f.read().strip()
    with contextlib.suppress(OSError):
        space = os.stat(f"/proc/self/ns/{namespace}").st_ino
    return f"{os.uname().nodename}/{boot}/{space}"


def _interfaces() -> Iterator[tuple[str, str]]:
    """Each address of this host with the name of its interface."""
    import psutil  # the launcher reads this module before anything is installed

    for name, addresses in psutil.net_if_addrs().items():
        yield from ((name, its.address) for its in addresses if its.family in (socket.AF_INET, socket.AF_INET6))


def check_loopback() -> None:
    """Raise ConfigurationError where processes of this host cannot reach each other at 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.create_connection(listener.getsockname(), 5).close()
    except OSError as err:
        raise ConfigurationError(
            f"loopback is down, or has no IPv4 address: 127.0.0.1 cannot be reached ({err.strerror or err}), but ranks of one "
            "host connect there; ip link set lo up (and, if that is not enough, ip addr add 127.0.0.1/8 dev lo)"
        ) from err


# -- processes -----------------------------------------------------------------------------------------------------------

# Processes of this host: identified by number and start time, because numbers are reused.

# Fields of /proc/PID/stat behind the name: state, threads, and start time in ticks since the host started.
_STATE, _THREADS, _STARTED = 0, 17, 19


def own_process() -> tuple[int, int]:
    """Number and start time of this process, as /proc shows them to processes of its PID namespace."""
    try:
        # Not os.getpid(): if /proc belongs to an outer PID namespace, processes have other numbers there.
        pid = int(os.readlink("/proc/self"))
        with open("/proc/self/stat", "rb") as stat:
            return pid, _started(_fields(stat.read()))
    except (OSError, ValueError, IndexError):
        return os.getpid(), 0


def is_stopped(pid: int, started: int) -> bool:
    """Whether a process exists and is stopped, by SIGSTOP or a debugger."""
    try:
        found = Process(pid, started)
    except OSError:
        return False
    try:
        return found.stopped()
    finally:
        found.close()


class Process:
    """Another process of this PID namespace. `pid`, `started`: from `own` there. Raises OSError: it cannot be
    seen from here, or has ended and is gone."""

    def __init__(self, pid: int, started: int):
        self._pid, self._started = pid, started
        # The open file belongs to this process alone: reads fail once the process is gone.
        self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        found = self._look()
        if found is None or _started(found) != started:
            self.close()
            raise ProcessLookupError(errno.ESRCH, "another process has its number")

    def ended(self) -> bool:
        """Whether all its threads have ended, so their memory is unmapped. It may still be a zombie."""
        found = self._look()
        return found is None or found[_STATE] in (b"Z", b"X") and int(found[_THREADS]) <= 1

    def stopped(self) -> bool:
        """Whether it exists and is stopped, by SIGSTOP or a debugger."""
        found = self._look()
        return found is not None and found[_STATE] in (b"T", b"t")

    def kill(self) -> None:
        """End it, by SIGKILL. Does nothing if it has ended, or is another user's."""
        with contextlib.suppress(OSError):
            folder = os.open(f"/proc/{self._pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                with open(os.open("stat", os.O_RDONLY, dir_fd=folder), "rb") as stat:
                    same = _started(_fields(stat.read())) == self._started
                if same:
                    self._send_kill(folder)
            finally:
                os.close(folder)

    def _send_kill(self, folder: int) -> None:
        try:
            signal.pidfd_send_signal(folder, signal.SIGKILL)  # takes a folder of /proc, too
        except OSError:  # refused by the sandbox, or unknown to it
            # Numbers are reused in turn, so this one is not another's so soon after the check.
            if int(os.readlink("/proc/self")) == os.getpid() and not self.ended():
                os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Stop watching the process."""
        os.close(self._stat)

    def _look(self) -> list[bytes] | None:
        """Its fields in /proc; None if it is gone."""
        try:
            return _fields(os.pread(self._stat, 1024, 0))
        except ProcessLookupError:
            return None


def _fields(stat: bytes) -> list[bytes]:
    return stat.rpartition(b")")[2].split()  # the preceding name may hold anything


def _started(fields: list[bytes]) -> int:
    return int(fields[_STARTED])


# -- file lock -----------------------------------------------------------------------------------------------------------

# A lock between processes of one host: a file that one of them holds at a time.
#
# Without the lock work is only done twice, never wrong: so nobody waits for a stopped holder.

_LOOK_SECONDS = 0.02
_STOPPED_SECONDS = 2.0  # seconds after which nobody waits for a stopped holder


def lock_file(path: str | os.PathLike[str]) -> IO[str]:
    """Wait for the lock, and hold it until the returned file is closed, at the latest by the end of the process. Does
    not hold it if its holder is stopped (by SIGSTOP or a debugger). Raises OSError: the file cannot be made, or its
    file system has no locks."""
    lock = open(path, "a+", errors="replace")
    try:
        _wait_for(lock)
    except BaseException:
        lock.close()
        raise
    return lock


def _wait_for(lock: IO[str]) -> None:
    stopped_since = None
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            now = time.monotonic()
            stopped_since = (stopped_since or now) if is_stopped(*_holder(lock)) else None
            if stopped_since is not None and now - stopped_since >= _STOPPED_SECONDS:
                return
            time.sleep(_LOOK_SECONDS)
        else:
            with contextlib.suppress(OSError):  # on a full disk the holder is not recorded
                lock.truncate(0)
                lock.write(" ".join(map(str, own_process())))
                lock.flush()
            return


def _holder(lock: IO[str]) -> tuple[int, int]:
    """The process that holds the lock, as it wrote there; (0, 0) if unreadable."""
    lock.seek(0)
    pid, _, started = lock.read(40).partition(" ")
    return (int(pid), int(started)) if pid.isdecimal() and started.isdecimal() else (0, 0)


# -- native part ---------------------------------------------------------------------------------------------------------

# The C++ extension modules, which a checkout has after a build.

NATIVE_MODULES = ("_native", "_simulator")


def missing_native() -> str | None:
    """The remedy for a missing extension module; None if all exist for this Python. Loads none of them."""
    if all(importlib.util.find_spec(f"tilescale_net.{name}") for name in NATIVE_MODULES):
        return None
    # The import system's folder; files of a checkout may be links into another one.
    folder = tilescale_net.__path__[0]
    return (
        f"the native part of tilescale_net is not built for Python {sys.version_info[0]}.{sys.version_info[1]} in {folder}; "
        "run `bash launch.sh --setup-only` or `pip install -e .` in the checkout"
    )


def load_native(name: str) -> ModuleType:
    """An extension module. Raises ImportError with the remedy if it is not built."""
    if missing := missing_native():
        raise ImportError(missing)
    return importlib.import_module(f"tilescale_net.{name}")
