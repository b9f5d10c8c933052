"""Makes `import deep_ep` find this package."""

import importlib
import sys

from tilescale_net.errors import TileScaleError

_PACKAGE = "tilescale_net.deep_ep"


def install() -> None:
    """From now on `import deep_ep` gives this package in this process. Calling it again changes nothing.

    Raises:
        TileScaleError: another deep_ep was imported before.
    """
    ours = sys.modules[_PACKAGE]
    found = sys.modules.get("deep_ep")
    if found is not None and found is not ours:
        raise TileScaleError(
            f"deep_ep was imported already, from {getattr(found, '__file__', None)}; call tilescale_net.deep_ep.install() "
            "before anything imports it"
        )
    sys.modules["deep_ep"] = ours
    for name in ("buffer", "utils", "utils.event"):
        sys.modules[f"deep_ep.{name}"] = importlib.import_module(f"{_PACKAGE}.{name}")
