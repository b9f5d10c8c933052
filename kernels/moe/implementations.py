"""The modes of an AllToAll: their classes, and the symmetric memory that each takes."""

from __future__ import annotations

import tilescale_net as tsn
from tilescale_net.kernels.collective import sizes_of
from tilescale_net.kernels.moe import latency, node_throughput, throughput
from tilescale_net.kernels.moe.config import configure
from tilescale_net.kernels.moe.tuning import Tuning
from tilescale_net.runtime import heap

# Each mode: its class, and the function that gives the symmetric memory it takes.
IMPLEMENTATIONS = {
    "throughput": (throughput.ThroughputMode, throughput.symmetric_buffers),
    "latency": (latency.LatencyMode, latency.symmetric_buffers),
}

# The same of a mode whose rows cross the network once per node; the function also takes the number of nodes.
OVER_NODES = {
    "throughput": (node_throughput.NodeThroughputMode, node_throughput.symmetric_buffers),
}


def make(base, config):
    """The mode of an AllToAll."""
    kinds = OVER_NODES if crosses_once(config, base.tuning, base.nodes) else IMPLEMENTATIONS
    return kinds[config.mode][0](base, config)


def crosses_once(config, tuning: Tuning, nodes: int) -> bool:
    """Whether a row crosses the network once per node: where nodes have several ranks, and the mode can do it."""
    return config.mode in OVER_NODES and tuning.once_per_node and 1 < nodes < config.ranks


def heap_bytes(
    *sizes, ranks: int | None = None, nodes: int | None = None, tuning: Tuning | None = None, group: tsn.Group = None,
    **options,
):  # fmt: skip
    """Bytes of the symmetric heap that an object takes; can be asked before `tilescale_net.init`.

    Args:
        sizes, options: what the constructor gets: num_experts, max_tokens, hidden, top_k and so on.
        ranks, nodes: of the job; default those of `group` (one node where `ranks` is given).
        tuning: as for the constructor.

    Returns:
        Bytes. The heap holds `runtime.context.SYSTEM_BYTES` of its own beside them, and what `empty_output` makes.

    Raises:
        ValueError, TypeError: as the constructor.
    """
    if ranks is None:
        world = tsn.world(group)
        ranks, nodes = world.size, nodes or world.topology.nodes
    config = configure(ranks, *sizes, **options)
    tuning, nodes = tuning or Tuning(), nodes or 1
    if crosses_once(config, tuning, nodes):
        specs = OVER_NODES[config.mode][1](config, tuning, nodes)
    else:
        specs = IMPLEMENTATIONS[config.mode][1](config, tuning, nodes > 1)
    return heap.footprint(sizes_of(specs))
