"""By which address, and by which interface, other hosts reach this one."""

import ctypes
import ipaddress
import os
import socket
from collections.abc import Iterable, Iterator

from tilescale_net.errors import ConfigurationError

_ANY_PORT = 9  # to which nothing is sent


def towards(host: str) -> str:
    """Address of this host on the way to another; nothing is sent.

    Raises:
        OSError: the name is not known, or there is no way.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(address)  # of a datagram socket: chooses the interface
        return way.getsockname()[0]


def reaching(hosts: Iterable[str]) -> str:
    """As `towards`, for the first of the hosts that is known and that this host reaches by more than loopback; '' for
    none.
    """
    for host in filter(None, hosts):
        try:
            address = towards(host)
        except OSError:
            continue
        if not is_loopback(address):
            return address
    return ""


INTERFACE = "GLOO_SOCKET_IFNAME"
_chosen = ""  # what this process has set


def users_interface() -> str:
    """The interface that the user has named, the first of several; '' for none."""
    named = os.environ.get(INTERFACE, "")
    return "" if named == _chosen else named.partition(",")[0]


def choose_interface(address: str) -> None:
    """For torch's default group, which takes no address, and for what the program makes of it."""
    global _chosen
    if not users_interface() and (interface := interface_of(address)):
        os.environ[INTERFACE] = _chosen = interface


def way(host: str) -> str:
    """What a rank tells the others for `own`: its network, and its address there towards a host, unless that is loopback."""
    return f"{network()} {reaching([host])}"


def own(ways: list[str], rank: int, host: str) -> str:
    """By which address the others reach this rank, as far as this host tells; '' where nothing does.

    That of the interface which the user has named; loopback where all share it, whatever address the store has; else of
    the interface towards the store. What this host calls the store's may be loopback: then that towards another rank.

    Args:
        ways: `way` of each rank.
        host: that keeps the store of the ranks, as this process names it; '' for none.

    Raises:
        RuntimeError: there is no such interface as the user has named, or it has no address.
    """
    if interface := users_interface():
        if found := of_interface(interface):
            return found
        raise RuntimeError(f"this host has no network interface {interface!r} with an address")
    networks, _, found_by = zip(*(said.partition(" ") for said in ways))
    if len(set(networks)) == 1:
        return "127.0.0.1"
    return found_by[rank] or reaching(found_by) or ("127.0.0.1" if host else "")


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


def network() -> str:
    """Equal for processes that share their loopback, and only for those."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot = f.read().strip()
        space = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        boot, space = "", 0
    return f"{os.uname().nodename}/{boot}/{space}"


def interface_of(address: str) -> str | None:
    """Name of the interface that has an address; None for none."""
    number = address.partition("%")[0]
    return next((name for name, its in _interfaces() if its.partition("%")[0] == number), None)


def of_interface(name: str) -> str | None:
    """The first address of an interface, as gloo takes it; None for an interface that has none."""
    return next((its for interface, its in _interfaces() if interface == name), None)


class _Entry(ctypes.Structure):
    """`struct ifaddrs` of getifaddrs(3), as far as it is read."""

    _fields_ = [
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
    ]


_IN_SOCKADDR = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}  # where the number stands, in bytes


def _interfaces() -> Iterator[tuple[str, str]]:
    """Each address of this host with the name of its interface, in the system's order."""
    libc, first = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p()
    if libc.getifaddrs(ctypes.byref(first)):
        return
    try:
        entry = first.value
        while entry:
            found = _Entry.from_address(entry)
            family = ctypes.cast(found.address, ctypes.POINTER(ctypes.c_ushort))[0] if found.address else None
            if family in _IN_SOCKADDR:
                begin, size = _IN_SOCKADDR[family]
                number = ctypes.string_at(found.address + begin, size)
                name, text = found.name.decode(), socket.inet_ntop(family, number)
                yield name, f"{text}%{name}" if text.startswith("fe80:") else text
            entry = found.next
    finally:
        libc.freeifaddrs(first)


def check_loopback() -> None:
    """Raise ConfigurationError where processes of this host cannot reach each other at 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.create_connection(listener.getsockname(), 5).close()
    except OSError as err:
        raise ConfigurationError(
            f"loopback is down, or has no IPv4 address: 127.0.0.1 cannot be reached ({err.strerror or err}), where ranks of one "
            "host meet; ip link set lo up (and, if that is not enough, ip addr add 127.0.0.1/8 dev lo)"
        ) from err
