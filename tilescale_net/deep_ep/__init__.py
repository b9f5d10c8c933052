"""DeepEP's module over the kernels of tilescale_net: the signatures and meanings of its version 1.2.1.

    import tilescale_net.deep_ep
    tilescale_net.deep_ep.install()     # before anything imports deep_ep
    import deep_ep                      # this package

docs/integrations.md describes how frameworks are set up, and what is not supported.
"""

import torch

from tilescale_net.deep_ep.buffer import Buffer
from tilescale_net.deep_ep.config import Config
from tilescale_net.deep_ep.domains import get_logical_domain_size, get_physical_domain_size
from tilescale_net.deep_ep.elastic import ElasticBuffer, EPHandle
from tilescale_net.deep_ep.event import EventHandle, EventOverlap
from tilescale_net.deep_ep.replacement import install

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
