"""Where libfabric is and what it offers; the native part does the rest."""

import importlib.metadata
import os
from typing import Any

from tilescale_net.runtime import settings


def bundled_library() -> str:
    """Path of the libfabric inside the `mpich` wheel, or '' without that wheel: the last place that is searched."""
    try:
        files = importlib.metadata.files("mpich") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    for file in files:
        if file.name == "libfabric.so.1":
            path = os.path.realpath(str(file.locate()))
            return path if os.path.exists(path) else ""
    return ""


def transport_options(**fields: Any) -> Any:
    """Options of a native transport.

    What is not given is taken from TSN_PROVIDER, TSN_FABRIC_INTERFACE and TSN_CHAOS.

    Args:
        fields: members of `TransportOptions` in csrc/fabric/transport.h (rank, provider, interface, rails, depth,
            chaos, …), in its units.
    Raises:
        TypeError: a field is unknown or of a wrong type.
    """
    from tilescale_net import _native

    fields.setdefault("library_fallback", bundled_library())
    for name, row in (
        ("provider", settings.PROVIDER),
        ("interface", settings.FABRIC_INTERFACE),
        ("chaos", settings.CHAOS),
    ):
        fields[name] = fields.get(name) or row.get()
    return _native.TransportOptions(**fields)


def library() -> dict:
    """The libfabric in use: path, version, api, headers. Raises FabricError without one."""
    from tilescale_net import _native

    return _native.fabric_library(fallback=bundled_library())


def offers() -> list[dict]:
    """What libfabric offers for one-sided traffic: dicts with provider, domain, address, loopback, hardware,
    immediates, device_memory. Raises FabricError when there is no libfabric."""
    from tilescale_net import _native

    return _native.fabric_offers(fallback=bundled_library())
