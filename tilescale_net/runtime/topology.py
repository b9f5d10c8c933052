"""Which PEs share a node with this one: by host, or by VIRTUAL_NODES."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import settings
from tilescale_net.runtime.context import MAX_PES


@dataclass(frozen=True)
class Topology:
    """Placement of the PEs of team "world".

    Attributes:
        rank, size: this PE and the number of PEs.
        local_rank: index of this PE among the PEs of its *host* (picks the GPU).
        node, nodes: index of this PE's node, number of nodes.
        node_pe, node_size: index of this PE in team "node", size of that team.
        single_host: whether all PEs run on one host.
    """

    rank: int
    size: int
    local_rank: int
    node: int
    nodes: int
    node_pe: int
    node_size: int
    single_host: bool

    @property
    def node_members(self) -> range:
        """PEs of this PE's node; consecutive by construction."""
        first = self.rank - self.node_pe
        return range(first, first + self.node_size)

    def is_direct(self, pe: int) -> bool:
        """Whether `pe` is reached by mapped memory rather than through the fabric."""
        return pe in self.node_members


def discover(rank: int, size: int, hosts: list[str]) -> Topology:
    """Topology from the host name of every rank.

    Args:
        rank, size: of team "world".
        hosts: host identity per rank, gathered from all ranks.

    Raises:
        ConfigurationError: too many ranks, ranks of a host are not consecutive, or VIRTUAL_NODES does not divide them
            evenly.
    """
    if size > MAX_PES:
        raise ConfigurationError(f"a job has at most {MAX_PES} ranks, but this one has {size}")
    same = [r for r in range(size) if hosts[r] == hosts[rank]]
    counts = {h: hosts.count(h) for h in hosts}
    if same != list(range(same[0], same[0] + len(same))) or len(set(counts.values())) != 1:
        raise ConfigurationError(
            f"rank {rank}: every host must run the same number of consecutive ranks, but the hosts of ranks 0.. are "
            f"{hosts}; start the job with launch.sh, torchrun or srun with block distribution"
        )
    virtual = settings.VIRTUAL_NODES.get()
    if len(same) % virtual:
        raise ConfigurationError(
            f"VIRTUAL_NODES={virtual} does not divide the {len(same)} ranks of this host; choose a divisor of {len(same)}"
        )
    node_size = len(same) // virtual
    return Topology(
        rank=rank,
        size=size,
        local_rank=same.index(rank),
        node=rank // node_size,
        nodes=size // node_size,
        node_pe=rank % node_size,
        node_size=node_size,
        single_host=len(counts) == 1,
    )


def host_identity() -> str:
    """A string equal on all ranks of one host and different between hosts."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot = f.read().strip()
    except OSError:
        boot = ""
    return f"{os.uname().nodename}/{boot}"
