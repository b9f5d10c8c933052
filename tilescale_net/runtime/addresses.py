"""By which address other hosts reach this one."""

import socket


def towards(host: str, port: int) -> tuple[int, str]:
    """Address family and number of this host on the way to another; nothing is sent.

    Raises:
        OSError: the name is not known, or there is no way.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(address)  # of a datagram socket: chooses the interface
        return family, way.getsockname()[0]
