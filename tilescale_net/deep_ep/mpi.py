"""Groups of the ranks of an mpi4py communicator, which meet in a store that the first of them keeps."""

import os
import socket
from collections.abc import Iterable

import torch.distributed as dist

from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import this_host
from tilescale_net.runtime.groups import StoreGroup

_NOBODY = ("192.0.2.1", "2001:db8::1")  # addresses that no host has: the default route leads there

_known: list[
    tuple[object, StoreGroup]
] = []  # communicators and what was made of them; both live as long as the process


def group_of(comm) -> StoreGroup:
    """The group of a communicator, the same at every call. Collective over its ranks.

    Args:
        comm: with mpi4py's Get_rank, Get_size, bcast and allgather.

    Raises:
        ConfigurationError: the ranks are on several hosts, and the first of them has no address by which the others
            reach it; on all ranks.
    """
    for known, group in _known:
        if known is comm:
            return group
    rank, size = comm.Get_rank(), comm.Get_size()
    places = [tuple(place) for place in comm.allgather([this_host.network_identity(), socket.gethostname()])]
    store = None
    if rank == 0:
        try:
            address = _meeting_place({name for host, name in places if host != places[0][0]})
            with this_host.listen(address) as listener:
                port, fd = listener.getsockname()[1], os.dup(listener.fileno())
        except (ConfigurationError, OSError) as error:
            comm.bcast(("", str(error)), root=0)
            raise
        store = dist.TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=fd)
        comm.bcast((address, port), root=0)
    else:
        address, port = comm.bcast(None, root=0)
        if not address:
            raise ConfigurationError(port)
        store = dist.TCPStore(address, port, None, False, wait_for_workers=False)
    _known.append((comm, StoreGroup(store, rank, size, kept_by=0)))
    return _known[-1][1]


def _meeting_place(others: Iterable[str]) -> str:
    """Address of this host, as ranks on the hosts of other names reach it; else loopback."""
    others = sorted(others)
    if not others:
        return "127.0.0.1"
    if found := this_host.address_reaching([*others, socket.gethostname(), *_NOBODY]):
        return found
    raise ConfigurationError(
        f"deep_ep.Buffer(comm=): ranks are on other hosts ({', '.join(others)}), whose names are not known on this one, and its "
        f"own name {socket.gethostname()} stands for loopback or for nothing, nor is there a default route; write the hosts' addresses into /etc/hosts, or "
        "make a group of torch.distributed and give group="
    )
