"""What the ranks of the simulator share so that each can find accesses of others that nothing orders with its own."""

import logging

from tilescale_net.runtime import simulator
from tilescale_net.runtime.shared_memory import SharedMemory

_LOGGER = logging.getLogger("tilescale_net")
MOST_RANKS, MOST_BYTES = 64, 1 << 36  # that clocks have room for: kMaxRanks, and a heap of kMaxWords


def share(heap: SharedMemory, control, rank: int, hosts: list[str], heaps: list[int]) -> SharedMemory | None:
    """Give every rank of a job on one host a race memory, and map those of the others. Collective.

    Args:
        heap: this rank's.
        hosts: host identity of each rank.
        heaps: where each rank's heap is mapped; 0 if only the proxy reaches it.

    Returns:
        This rank's race memory, to be closed after the heap is unregistered; None where ranks cannot follow each other:
        some are on other hosts, or there are too many, or the heap is too large. A job with the check for races gets a
        warning.
    """
    from tilescale_net import _simulator

    if limit := _limit(hosts, heap.limit):
        if simulator.races() and rank == 0:
            _LOGGER.warning("races between ranks are not checked: %s; each rank is checked by itself", limit)
        return None
    memory = SharedMemory(_simulator.race_memory_bytes(heap.limit))
    handles = control.gather("tilescale_net.init", memory.handle())
    pages = [memory.base if pe == rank else memory.map_peer(pe, handle) for pe, handle in enumerate(handles)]
    _simulator.attach_race_memory(rank, heap.base, heap.limit, pages, heaps)
    return memory


def _limit(hosts: list[str], heap_bytes: int) -> str:
    """Why ranks cannot be followed; "" if they can."""
    if len(set(hosts)) > 1:
        return f"they are on {len(set(hosts))} hosts, which share no memory (run them on one, with VIRTUAL_NODES)"
    if len(hosts) > MOST_RANKS:
        return f"there are {len(hosts)}, and at most {MOST_RANKS} are followed"
    if heap_bytes >= MOST_BYTES:
        return f"a heap of {heap_bytes >> 30} GiB is too large (TSN_HEAP_SIZE); less than {MOST_BYTES >> 30} GiB are followed"
    return ""
