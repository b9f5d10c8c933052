"""How ranks find each other: torch.distributed's default process group, made here where the user has made none.

torch waits for ranks in several places, each with an error of its own that names no rank. Here every rank announces
itself in the store, so that a rank that waits in vain can name the missing ones.
"""

import atexit
import datetime
import hashlib
import os
import socket
import time
from dataclasses import dataclass

import torch.distributed as dist

from tilescale_net.errors import ConfigurationError, PeerLost
from tilescale_net.runtime import addresses, group_store, groups, placement
from tilescale_net.runtime.attendance import SLACK, Arrival, Attendance
from tilescale_net.runtime.job_store import JobStore, first_line, has_agent, within

_RESOLVING = 5.0  # seconds that a name server may take to come up


@dataclass(frozen=True)
class Meeting:
    """Ranks that have met.

    Attributes:
        ranks: the job's rank of each of them.
        rank: of this process among them.
        store: where these ranks speak of this meeting.
        group: a gloo group of the package's own, with the ranks in this order.
        address: by which the others reach this rank; '' where nothing tells it.
    """

    ranks: tuple[int, ...]
    rank: int
    store: JobStore
    group: dist.ProcessGroup
    address: str


def join(timeout: float, silence: float, group: dist.ProcessGroup | groups.StoreGroup | None = None) -> Meeting:
    """Meet the other ranks of a group, without the help of ranks outside it.

    The default process group is made (gloo) from the variables of launch.sh, torchrun, srun or mpirun, unless there is
    one; without them the job has one rank.

    Args:
        timeout: seconds that ranks may take to come.
        silence: seconds without an answer after which the store counts as lost.
        group: of torch.distributed, or one that meets in a store of its own; None: all ranks of the job.

    Raises:
        ConfigurationError: the environment does not say where to meet, rank 0 cannot listen there, or the network
            interface is the wrong one.
        PeerLost: ranks did not come within the timeout, or were lost on the way; names them.
    """
    silence = min(silence, timeout)
    kept, kept_by, prefix, rank = _place(group, timeout, silence)
    # Processes that meet in a store of the program's own may have been started by different launchers, or by none.
    secret = None if isinstance(group, groups.StoreGroup) else placement.job().secret
    ranks = groups.ranks(group)
    size = len(ranks)
    host = _host_of(kept)
    base = JobStore(kept, prefix, rank, silence, kept_by, secret)
    store, ways = Arrival(base, rank, size, timeout).meet(addresses.way(host), "has not called tilescale_net.init")
    try:
        attendance = Attendance(store, rank, size, timeout)
        address = attendance.find_ways(ways, host)
        if kept_by is None and not isinstance(group, groups.StoreGroup) and group_store.ends_with_rank_0():
            own = attendance.run_together(lambda: group_store.open_own(store, address, rank, size, timeout, silence))
            store.close()
            store = own
            attendance = Attendance(store, rank, size, timeout)
        raw = dist.PrefixStore("gloo", store.raw)
        connected = attendance.run_together(lambda: connect(raw, address, rank, size, timeout))
    except BaseException:
        store.close()
        raise
    return Meeting(ranks, rank, store, connected, address)


def _place(group, timeout: float, silence: float) -> tuple[dist.Store, int | None, str, int]:
    """Where the ranks of a group meet: a store, which of them keeps it, a prefix for their keys; and this one's rank."""
    if isinstance(group, groups.StoreGroup):
        return group.store, group.kept_by, f"tsn/of {group.size()}", group.rank()
    if not dist.is_initialized():
        _make_default(timeout, silence)
    ranks = groups.ranks(group)
    # Ranks of different groups have nothing to do with each other, and the groups are not counted.
    prefix = _prefix() if group is None else f"{_prefix()}/group/{hashlib.sha256(str(ranks).encode()).hexdigest()}"
    kept = dist.distributed_c10d._get_default_store()
    return kept, group_store.keeper(ranks), prefix, ranks.index(dist.get_rank())


def connect(store: dist.Store, address: str, rank: int, size: int, timeout: float) -> dist.ProcessGroup:
    """A gloo group of these ranks alone, which torch.distributed does not count among its own.

    Args:
        address: of this rank, at which gloo listens unless the user has named an interface; '': gloo's own choice, which
            is that of this host's name.
    """
    limit = datetime.timedelta(seconds=timeout)
    if addresses.users_interface() or not address:
        return dist.ProcessGroupGloo(store, rank, size, limit)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout, options._threads = limit, 2
    return dist.ProcessGroupGloo(store, rank, size, options)


def _host_of(store: dist.Store) -> str:
    return str(getattr(group_store.underlying(store), "host", ""))


def _prefix() -> str:
    """Before the keys of this job: a second job that comes to the same port by mistake does not act for this one."""
    name = placement.job().name
    return f"tsn/{name}" if name else "tsn"


def _make_default(timeout: float, silence: float) -> None:
    place = placement.find(timeout)
    limit = datetime.timedelta(seconds=timeout)
    if place is None:
        try:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
        except RuntimeError:  # gloo found no interface
            addresses.check_loopback()
            raise
    else:
        store = _connect(place, timeout, silence)
        rank, size, host = place.rank, place.size, _host_of(store)
        kept_by, secret = None if has_agent() else 0, placement.job().secret
        base = JobStore(store, f"{_prefix()}/default", rank, silence, kept_by, secret)
        asked, ways = Arrival(base, rank, size, timeout).meet(addresses.way(host), "did not come")
        try:
            attendance = Attendance(asked, rank, size, timeout)
            addresses.choose_interface(attendance.find_ways(ways, host))
            mine = dist.PrefixStore("group", asked.raw)
            attendance.run_together(
                lambda: dist.init_process_group("gloo", store=mine, rank=rank, world_size=size, timeout=limit)
            )
        finally:
            asked.close()
    # Gloo's threads may still drop references to tensors when the last collective call has returned. A thread that
    # does so while the interpreter shuts down aborts the process; destroying the group waits for them.
    atexit.register(_leave, os.getpid())


def _leave(pid: int) -> None:
    if dist.is_initialized() and os.getpid() == pid:
        dist.destroy_process_group()


def _connect(place: placement.Place, timeout: float, silence: float) -> dist.Store:
    if _is_loopback(place.address):
        addresses.check_loopback()
    keeps = place.keeps_store
    limit = datetime.timedelta(seconds=timeout)
    try:
        _resolve(place.address, place.port)
        if keeps:
            store = _listen(place, limit)
        else:
            _wait_for_port(place.address, place.port, timeout)
            # A client tries twice, so half of the time each.
            store = within(
                timeout + SLACK, lambda: dist.TCPStore(
                    place.address, place.port, place.size, False, limit / 2, wait_for_workers=False, multi_tenant=True
                )
            )  # fmt: skip
    except socket.gaierror as err:
        raise ConfigurationError(
            f"rank {place.rank}: the host MASTER_ADDR={place.address!r} is not known ({err.strerror}); set MASTER_ADDR to "
            "the name or address of the host of rank 0"
        ) from err
    except (RuntimeError, OSError) as err:  # DistNetworkError is a RuntimeError, TimeoutError an OSError
        if keeps:
            raise ConfigurationError(
                f"rank 0 cannot listen at {place.address}:{place.port} ({first_line(err)}); set MASTER_ADDR to this host "
                "and MASTER_PORT to a free port"
            ) from err
        raise PeerLost(
            f"rank {place.rank}: rank 0 does not answer at {place.address}:{place.port} within {timeout:g} s. Look at its "
            f"output, check MASTER_ADDR and MASTER_PORT, or raise TSN_TIMEOUT if it is only slow ({first_line(err)})"
        ) from err
    store.set_timeout(limit)
    return store


def _listen(place: placement.Place, limit: datetime.timedelta) -> dist.Store:
    """The store of rank 0, on loopback alone where the address is loopback: no other process shall act as a rank."""
    fd = place.listener
    if fd < 0 and _is_loopback(place.address):
        with addresses.listen(place.address, place.port) as listener:
            fd = os.dup(listener.fileno())
    elif fd >= 0:
        os.set_inheritable(fd, False)
        # Another init in this process must not take the number for a socket.
        os.environ.pop("TSN_STORE_FD", None)
    listening = {"master_listen_fd": fd} if fd >= 0 else {}
    return dist.TCPStore(
        place.address, place.port, place.size, True, limit, wait_for_workers=False, multi_tenant=True, **listening
    )


def _is_loopback(address: str) -> bool:
    """Whether an address, not the name of a host (which may stand for loopback on that host alone), is loopback."""
    return address == "localhost" or addresses.is_loopback(address)


def _resolve(address: str, port: int) -> None:
    """Raise gaierror for a host that no resolver knows. torch would try on, and print a stack of C++ at each turn."""
    end = time.monotonic() + _RESOLVING
    while True:
        try:
            socket.getaddrinfo(address, port)
            return
        except socket.gaierror as err:
            if err.errno != socket.EAI_AGAIN or time.monotonic() > end:
                raise
            time.sleep(0.1)


def _wait_for_port(address: str, port: int, timeout: float) -> None:
    """Wait until a process listens. The store's own attempts go on for twice their time, and fill the terminal."""
    begin = time.monotonic()
    while True:
        try:
            return socket.create_connection((address, port), max(0.1, begin + timeout - time.monotonic())).close()
        except OSError:
            if time.monotonic() - begin > timeout:
                raise
            time.sleep(0.05)
