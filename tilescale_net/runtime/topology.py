"""Which PEs share a node with this one: by host, or by VIRTUAL_NODES."""

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
    """Topology of a whole job from the host name of every rank.

    Where hosts run different numbers of ranks, nodes are smaller than hosts, as in `of_group`.

    Args:
        rank, size: of team "world".
        hosts: host identity per rank, gathered from all ranks.

    Raises:
        ConfigurationError: too many ranks, ranks of a host are not consecutive, or VIRTUAL_NODES does not divide them
            evenly.
    """
    if size > MAX_PES:
        raise ConfigurationError(f"a job has at most {MAX_PES} ranks, but this one has {size}")
    counts = {h: hosts.count(h) for h in hosts}
    if hosts != [h for h, n in counts.items() for _ in range(n)]:
        raise ConfigurationError(
            f"rank {rank}: every host must run consecutive ranks, but the hosts of ranks 0.. are {hosts}; start the job with "
            "launch.sh, torchrun or srun with block distribution"
        )
    virtual = settings.VIRTUAL_NODES.get()
    for n in counts.values():
        if n % virtual:
            raise ConfigurationError(
                f"VIRTUAL_NODES={virtual} does not divide the {n} ranks of this host; choose a divisor of {n}"
            )
    places = [index * virtual // n for n in counts.values() for index in range(n)]
    return _placed(rank, size, hosts, places, "job")


def of_group(rank: int, size: int, hosts: list[str], places: list[int]) -> Topology:
    """Topology of any group of a job's ranks.

    Nodes have the same number of consecutive PEs each: where the ranks of a host are not so, nodes are smaller than hosts,
    and PEs of one host reach each other through the fabric like those of two.

    Args:
        rank, size: of the group.
        hosts: host identity per rank.
        places: virtual node of its host per rank, see `virtual_node`.

    Raises:
        ConfigurationError: too many ranks.
    """
    if size > MAX_PES:
        raise ConfigurationError(f"a group has at most {MAX_PES} ranks, but this one has {size}")
    return _placed(rank, size, hosts, places, "group")


def _placed(rank: int, size: int, hosts: list[str], places: list[int], what: str) -> Topology:
    """With the largest nodes that are equal; `what`: of which ranks the warning is where that makes them smaller."""
    if rank == 0:
        _warn_of_containers(hosts)
    nodes = list(zip(hosts, places))
    node_size = next(n for n in range(size, 0, -1) if size % n == 0 and _are_nodes(nodes, n))
    if node_size < max(map(nodes.count, nodes)) and rank == 0:
        settings.log.warning(
            "the ranks of a %s are not spread evenly and in order over its hosts: nodes of %d ranks are made, which reach "
            "each other through the network even on one host",
            what,
            node_size,
        )
    return Topology(
        rank=rank,
        size=size,
        local_rank=hosts[:rank].count(hosts[rank]),
        node=rank // node_size,
        nodes=size // node_size,
        node_pe=rank % node_size,
        node_size=node_size,
        single_host=len(set(hosts)) == 1,
    )


def _are_nodes(nodes: list, size: int) -> bool:
    return all(len(set(nodes[first : first + size])) == 1 for first in range(0, len(nodes), size))


def virtual_node(job_rank: int, job_size: int) -> int:
    """Index of a rank's virtual node among those of its host, for a rank that cannot query the rest of the job."""
    virtual = settings.VIRTUAL_NODES.get()
    if virtual == 1:
        return 0
    here, local_size = os.environ.get("LOCAL_RANK", job_rank), os.environ.get("LOCAL_WORLD_SIZE", job_size)
    if int(local_size) % virtual:
        raise ConfigurationError(
            f"VIRTUAL_NODES={virtual} does not divide the {local_size} ranks of this host; choose a divisor of it"
        )
    return int(here) // (int(local_size) // virtual)


def host_identity() -> str:
    """A string equal on all ranks of one host and different between hosts: its name, the machine and the PID namespace.

    Ranks open each other's memory, watch and end each other by the numbers of their processes, which mean others in
    another PID namespace. Other namespaces may differ between ranks of a host, as under Apptainer: where they keep one
    from mapping the memory of another, that is an error.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot = f.read().strip()
    except OSError:
        boot = ""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return f"{os.uname().nodename}/{boot}/{namespace}"


def _warn_of_containers(hosts: list[str]) -> None:
    """Tell that ranks of one machine reach each other through the network, and how they need not."""
    places: dict[str, dict[str, int]] = {}  # by machine: the first rank of each PID namespace
    for rank, host in enumerate(hosts):
        machine, _, namespace = host.partition("/")[2].partition("/")
        if machine:
            places.setdefault(machine, {}).setdefault(namespace, rank)
    for found in places.values():
        if len(found) > 1:
            first, second, *_ = found.values()
            settings.log.warning(
                "ranks %d and %d run on one machine in different PID namespaces, as in two containers: they count as two "
                "hosts and reach each other through the network; start them in one container, or with --pid=host "
                "--ipc=host, to have them share memory",
                first,
                second,
            )
            return
