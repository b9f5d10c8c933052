"""Groups of the ranks of an mpi4py communicator, which meet in a store that the first of them keeps."""

import os
import socket

import torch.distributed as dist

from tilescale_net.runtime.groups import StoreGroup
from tilescale_net.runtime.topology import host_identity

_known: list[
    tuple[object, StoreGroup]
] = []  # communicators and what was made of them; both live as long as the process


def group_of(comm) -> StoreGroup:
    """The group of a communicator, the same at every call. Collective over its ranks.

    Args:
        comm: with mpi4py's Get_rank, Get_size, bcast and allgather.
    """
    for known, group in _known:
        if known is comm:
            return group
    rank, size = comm.Get_rank(), comm.Get_size()
    hosts = comm.allgather(host_identity())
    if rank == 0:
        address = "127.0.0.1" if len(set(hosts)) == 1 else socket.gethostbyname(socket.gethostname())
        with socket.create_server((address, 0), backlog=4096) as listener:
            port, fd = listener.getsockname()[1], os.dup(listener.fileno())
        store = dist.TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=fd)
        comm.bcast((address, port), root=0)
    else:
        address, port = comm.bcast(None, root=0)
        store = dist.TCPStore(address, port, None, False, wait_for_workers=False)
    _known.append((comm, StoreGroup(store, rank, size, kept_by=0)))
    return _known[-1][1]
