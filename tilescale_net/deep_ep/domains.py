"""Nodes of a group, and its ranks on one, before and after there is a world."""

import torch.distributed as dist

import tilescale_net as tsn
from tilescale_net.runtime import groups, placement


def get_physical_domain_size(group: dist.ProcessGroup) -> tuple[int, int]:
    """Nodes of a group, and its ranks on one. Collective where the group has no world yet.

    Args:
        group: a ProcessGroup.
    """
    try:
        found = tsn.world(group).topology
    except tsn.ConfigurationError:
        raise
    except tsn.TileScaleError:
        place = placement.host_identity(), placement.virtual_node(*groups.own_number(group))
        places: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(places, place, group)
        found = placement.group_topology(dist.get_rank(group), len(places), *map(list, zip(*places)))
    return found.nodes, found.node_size


def get_logical_domain_size(group: dist.ProcessGroup, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """As `get_physical_domain_size`: rows always cross the network once per node, and `allow_hybrid_mode` changes nothing."""
    return get_physical_domain_size(group)
