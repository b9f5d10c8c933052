"""DeepEP's interface on the kernels of tilescale_net: the signatures and meanings of its version 1.2.1.

    import tilescale_net.deep_ep
    tilescale_net.deep_ep.install()     # before anything imports deep_ep
    import deep_ep                      # this package

docs/integrations.md describes the set-up of frameworks, and lists unsupported features.
"""

import importlib
import sys

import torch

from tilescale_net.deep_ep.buffer import Buffer
from tilescale_net.deep_ep.elastic import ElasticBuffer, EPHandle
from tilescale_net.deep_ep.groups import get_logical_domain_size, get_physical_domain_size
from tilescale_net.deep_ep.objects import Config
from tilescale_net.deep_ep.utils import EventHandle, EventOverlap
from tilescale_net.errors import TileScaleError

__version__ = "1.2.1"  # of DeepEP, whose interface Buffer has
topk_idx_t = torch.int64  # of choices; int32 is taken too

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "install",
    "topk_idx_t",
]


def install() -> None:
    """From now on `import deep_ep` imports this package in this process. A second call has no effect.

    Raises:
        TileScaleError: another deep_ep was imported before.
    """
    ours = sys.modules[__name__]
    loaded = sys.modules.get("deep_ep")
    if loaded is not None and loaded is not ours:
        raise TileScaleError(
            f"deep_ep was imported already, from {getattr(loaded, '__file__', None)}; call tilescale_net.deep_ep.install() "
            "before anything imports it"
        )
    sys.modules["deep_ep"] = ours
    for name in ("buffer", "utils", "utils.event"):
        sys.modules[f"deep_ep.{name}"] = importlib.import_module(f"{__name__}.{name}")
