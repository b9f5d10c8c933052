"""Names of networks that the setting TSN_PROVIDER takes: libfabric's providers, and transports of our own."""

import difflib
import os

from tilescale_net.errors import ConfigurationError

# Of libfabric 1.17 to 2.x. A utility provider stands behind the one that it builds on: `tcp;ofi_rxm`.
PROVIDERS = (
    *("bgq", "cxi", "efa", "efa-direct", "gni", "lnx", "lpp", "net", "opx", "psm", "psm2", "psm3", "rstream", "shm"),
    *("sm2", "sockets", "tcp", "ucx", "udp", "usnic", "verbs"),
    *("ofi_rxm", "ofi_rxd", "ofi_mrail"),
)

# Transports that are not libfabric's, by the names that csrc/fabric/factory.cpp has for them.
OWN_TRANSPORTS: tuple[str, ...] = ()


def provider(value: str, name: str) -> str:
    """Name of a libfabric provider, or of a transport of our own.

    Whether the libfabric at hand offers it is seen when a network is requested.

    Any name is taken where FI_PROVIDER_PATH gives libfabric further ones.
    """
    for part in value.split(";"):
        if part.lower() not in (*PROVIDERS, *OWN_TRANSPORTS) and not os.environ.get("FI_PROVIDER_PATH"):
            near = difflib.get_close_matches(part.lower(), PROVIDERS, n=1)
            advice = f"; did you mean {near[0]}?" if near else ""
            raise ConfigurationError(f"{name}={value!r}: libfabric has no provider {part!r}{advice}")
    return value
