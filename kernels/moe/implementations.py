"""The modes of an AllToAll: their classes, and the symmetric memory that each takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tilescale_net as tsn
from tilescale_net.kernels.collective import BufferSpecs, sizes_of
from tilescale_net.kernels.moe import latency, node_latency, node_throughput, throughput, throughput_buffers
from tilescale_net.kernels.moe.arena import divide
from tilescale_net.kernels.moe.config import Config, configure
from tilescale_net.kernels.moe.tuning import Tuning
from tilescale_net.runtime import heap, settings, worlds
from tilescale_net.runtime.context import SYSTEM_BYTES

# Each mode: its class, and the function that gives the symmetric memory it takes.
IMPLEMENTATIONS = {
    "throughput": (throughput.ThroughputMode, throughput_buffers.symmetric_buffers),
    "latency": (latency.LatencyMode, latency.symmetric_buffers),
}

# The same of a mode whose rows cross the network once per node; instead of `proxied` the function takes the number of
# nodes, and both take masks: of the ranks that take part, now and later.
OVER_NODES = {
    "throughput": (node_throughput.NodeThroughputMode, node_throughput.symmetric_buffers),
    "latency": (node_latency.NodeLatencyMode, node_latency.symmetric_buffers),
}


def make(base, config: Config, active: tuple[bool, ...] | None = None):
    """The mode of an AllToAll; `active`: who takes part later on."""
    if crosses_once(config, base.tuning, base.nodes):
        return OVER_NODES[config.mode][0](base, config, [base.mask, *([active] if active else [])])
    return IMPLEMENTATIONS[config.mode][0](base, config)


def crosses_once(config: Config, tuning: Tuning, nodes: int) -> bool:
    """Whether a row crosses the network once per node: where nodes have several ranks, and the mode can do it.

    ValueError for tiles, which are not counted there.
    """
    once = config.mode in OVER_NODES and tuning.once_per_node and 1 < nodes < config.ranks
    if once and config.tile_rows is not None:
        raise ValueError(
            f"AllToAll: tile_rows is {config.tile_rows}; rows that cross the network once per node are not counted by tiles: "
            "give tuning=Tuning(once_per_node=False)"
        )
    return once


def symmetric_buffers(
    config: Config, tuning: Tuning, nodes: int, proxied: bool, masks: Sequence[tuple[bool, ...]] = ()
) -> BufferSpecs:
    """Symmetric memory of a configuration: "kernel.parameter" -> (shape, dtype)."""
    if crosses_once(config, tuning, nodes):
        return OVER_NODES[config.mode][1](config, tuning, nodes, masks)
    return IMPLEMENTATIONS[config.mode][1](config, tuning, proxied)


def world_with_room(world, config: Config, tuning: Tuning, active: tuple[bool, ...] | None = None):
    """`world` where its heap has room for the buffers of a configuration, else a new one of the same ranks.

    Collective; heaps hold the same on all ranks, so that all that want the same come to the same answer.
    """
    world.control.agree("AllToAll", f"grow=True, {config.describe()}, {tuning}, active={active}")
    masks = [tuple(r in world.control.members for r in range(config.ranks)), *([active] if active else [])]
    sizes = sizes_of(symmetric_buffers(config, tuning, world.topology.nodes, 0 in world.peer_base, masks))
    if world.heap.size_to_hold(sizes) <= world.heap.limit:
        return world
    usual = settings.heap_bytes(None, world.device.type == "cuda")
    return worlds.make_sibling(world, max(usual, heap.footprint(sizes) + SYSTEM_BYTES))


def heap_bytes(
    *sizes: Any, ranks: int | None = None, nodes: int | None = None, tuning: Tuning | None = None, group: tsn.Group = None,
    in_arena: bool = False, **options: Any,
) -> int:  # fmt: skip
    """Bytes of the symmetric heap that an object takes; can be asked before `tilescale_net.init`.

    Args:
        sizes, options: what the constructor gets: num_experts, max_tokens, hidden, top_k and so on.
        ranks, nodes: of the job; default those of `group` (one node where `ranks` is given).
        tuning: as for the constructor.
        in_arena: what it takes beside an arena.

    Returns:
        Bytes. The heap holds `runtime.context.SYSTEM_BYTES` of its own beside them, and what `empty_output` makes.

    Raises:
        ValueError, TypeError: as the constructor.
    """
    specs = _specs(ranks, nodes, group, tuning, *sizes, **options)
    return heap.footprint(sizes_of(divide(specs)[1] if in_arena else specs))


def arena_bytes(
    *sizes: Any, ranks: int | None = None, nodes: int | None = None, tuning: Tuning | None = None, group: tsn.Group = None,
    **options: Any,
) -> int:  # fmt: skip
    """Bytes of an `Arena` that an object takes; the arguments are those of `heap_bytes`."""
    return heap.footprint(sizes_of(divide(_specs(ranks, nodes, group, tuning, *sizes, **options))[0]))


def _specs(
    ranks: int | None, nodes: int | None, group: tsn.Group, tuning: Tuning | None, *sizes, **options
) -> BufferSpecs:
    if ranks is None:
        world = tsn.world(group)
        ranks, nodes = world.size, world.topology.nodes if nodes is None else nodes
    nodes = 1 if nodes is None else nodes
    for name, value, most in (("ranks", ranks, None), ("nodes", nodes, ranks)):
        if type(value) is not int or value < 1 or (most is not None and value > most):
            limits = "of 1 or more" if most is None else f"from 1 to {most}, the number of ranks"
            raise ValueError(f"AllToAll: {name} is {value!r}; it must be a whole number {limits}")
    return symmetric_buffers(configure(ranks, *sizes, **options), tuning or Tuning(), nodes, nodes > 1)
