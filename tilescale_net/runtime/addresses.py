"""By which address other hosts reach this one."""

import socket

from tilescale_net.errors import ConfigurationError


def towards(host: str, port: int) -> tuple[int, str]:
    """Address family and number of this host on the way to another; nothing is sent.

    Raises:
        OSError: the name is not known, or there is no way.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(address)  # of a datagram socket: chooses the interface
        return family, way.getsockname()[0]


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
