"""What the ranks of the simulator share so that each can tell its accesses from those of others that nothing orders."""

from tilescale_net.runtime.shared_memory import SharedMemory


def share(heap: SharedMemory, control, rank: int, hosts: list[str], heaps: list[int]) -> SharedMemory | None:
    """Give every rank of a job on one host a race memory, and map those of the others. Collective.

    Args:
        heap: this rank's.
        hosts: host identity of each rank.
        heaps: where each rank's heap is mapped; 0 for those that only the proxy reaches.

    Returns:
        This rank's race memory, to be closed after the heap is unregistered; None where some ranks are on other hosts,
        which cannot be followed.
    """
    from tilescale_net import _simulator

    if len(set(hosts)) > 1:
        return None
    memory = SharedMemory(_simulator.race_memory_bytes(heap.limit))
    handles = control.gather("tilescale_net.init", memory.handle())
    pages = [memory.base if pe == rank else memory.map_peer(pe, handle) for pe, handle in enumerate(handles)]
    _simulator.attach_race_memory(rank, heap.base, heap.limit, pages, heaps)
    return memory
