"""A store for the ranks of a group whose job's store would end with a rank that is not among them.

Where no launcher keeps the store of the job, rank 0 of the job does. A group without that rank gets a store of its own,
kept by the group's first rank: what befalls the others is no concern of the group.
"""

import datetime
import os
import time
from collections.abc import Sequence

import torch.distributed as dist

from tilescale_net.runtime import addresses, job_store
from tilescale_net.runtime.job_store import JobStore

_PREFIX = "tsn"


def keeper(ranks: Sequence[int]) -> int | None:
    """Which of a group's ranks keeps the store of the job, by its number in the group; None: none of them."""
    return ranks.index(0) if 0 in ranks and not job_store.has_agent() else None


def ends_with_rank_0() -> bool:
    """Whether the store of the job is lost with the job's rank 0. A launcher's is not, nor is one in a file."""
    return not job_store.has_agent() and isinstance(_of_job(), dist.TCPStore)


def open_own(job: JobStore, address: str, rank: int, size: int, timeout: float, silence: float) -> JobStore:
    """The store of a group; called by all of its ranks.

    Args:
        job: where the ranks of the group speak to each other up to now.
        address: by which the others reach this rank. Where it is loopback no other process shall act as a rank.
        rank, size: of this process, of the group.
        timeout: seconds that the others may take.
        silence: seconds without an answer after which the new store counts as lost.

    Raises:
        RuntimeError, OSError, TimeoutError: it cannot be opened or reached.
    """
    limit = datetime.timedelta(seconds=timeout)
    if rank == 0:
        with addresses.listen(address) as listener:
            host, port, fd = address, listener.getsockname()[1], os.dup(listener.fileno())
        opened = dist.TCPStore(host, port, None, True, limit, wait_for_workers=False, master_listen_fd=fd)
        job.ask(lambda s: s.set("own store", f"{port} {host}"))
    else:
        end = time.monotonic() + timeout
        while (said := job.ask(lambda s: job_store.get(s, "own store"))) is None:
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.02)
        port, _, host = said.partition(" ")
        opened = dist.TCPStore(host, int(port), None, False, limit / 2, wait_for_workers=False)
    return JobStore(opened, _PREFIX, rank, silence, kept_by=0, secret=job.secret)


def _of_job() -> dist.Store:
    return underlying(dist.distributed_c10d._get_default_store())


def underlying(store):
    """The store of torch below all prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
