"""How ranks find each other: torch.distributed's default process group, made here where the user has made none.

torch waits for ranks in several places, each with an error of its own that names no rank. Here every rank announces
itself in the store, so that a rank that waits in vain can name the missing ones.
"""

import atexit
import contextlib
import datetime
import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from tilescale_net.errors import ConfigurationError, PeerLost
from tilescale_net.runtime import addresses, group_store, groups, job_store, placement
from tilescale_net.runtime.job_store import JobStore, first_line, has_agent, within

_FAILURE_GRACE_S = 1.0  # seconds that ranks which give up leave each other to report it
_REACH_S = 5.0  # seconds in which a system, without the help of a process, accepts a connection
_INTERFACE = "GLOO_SOCKET_IFNAME"
_ADVICE = f"let {_INTERFACE} name, on every host, the network interface over which they can"
_SLACK = 3.0  # seconds after which a step of torch that has a time limit of its own counts as hanging
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
    base = JobStore(kept, prefix, rank, silence, kept_by, secret)
    try:
        number = _number_of_meeting(base, rank, size)
    finally:
        base.close()
    # A world of its own in the store: init after finalize must not read the keys of the earlier one.
    store = JobStore(kept, f"{prefix}/{number}", rank, silence, kept_by, secret)
    try:
        attendance = _Attendance(store, rank, size, timeout, kept)
        attendance.wait_for_all("has not called tilescale_net.init")
        store.ask(lambda s: s.set(f"passed/{rank}", "1"))
        address = attendance.find_ways()
        if kept_by is None and not isinstance(group, groups.StoreGroup) and group_store.ends_with_rank_0():
            own = attendance.run_together(lambda: group_store.open_own(store, address, rank, size, timeout, silence))
            store.close()
            store = own
            attendance = _Attendance(store, rank, size, timeout)
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
    if _users_interface() or not address:
        return dist.ProcessGroupGloo(store, rank, size, limit)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout, options._threads = limit, 2
    return dist.ProcessGroupGloo(store, rank, size, options)


_chosen = ""  # what this process has set as interface for groups of torch


def _users_interface() -> str:
    """The interface that the user has named, the first of several; '' for none."""
    named = os.environ.get(_INTERFACE, "")
    return "" if named == _chosen else named.partition(",")[0]


def _prefix() -> str:
    """Before the keys of this job: a second job that comes to the same port by mistake does not act for this one."""
    name = placement.job().name
    return f"tsn/{name}" if name else "tsn"


def _number_of_meeting(store: JobStore, rank: int, size: int) -> int:
    """Which meeting to come to: the first that this rank has not been to and that is not over without it.

    A rank that gives up waiting may try again: the meeting is still open if others have not come either. It is over when
    all had come, this rank too, and only this one had given up by then.
    """

    def find(s: dist.Store) -> int:
        number = 1
        while s.check([f"{number}/passed/{rank}"]) or s.check([f"{number}/here/{r}" for r in range(size)]):
            number += 1
        return number

    return store.ask(find)


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
        asked = JobStore(store, _prefix(), place.rank, silence, None if has_agent() else 0, placement.job().secret)
        attendance = _Attendance(asked, place.rank, place.size, timeout, store)
        try:
            attendance.wait_for_all("did not come")
            mine = dist.PrefixStore(f"{_prefix()}/group", store)
            _choose_interface(attendance.find_ways())
            attendance.run_together(
                lambda: dist.init_process_group(
                    "gloo", store=mine, rank=place.rank, world_size=place.size, timeout=limit
                )
            )
        finally:
            asked.close()
    # Gloo's threads may still drop references to tensors when the last collective call has returned. A thread that
    # does so while the interpreter shuts down aborts the process; destroying the group waits for them.
    atexit.register(_leave, os.getpid())


def _choose_interface(address: str) -> None:
    """For the default group, which takes no address, and what the program may make of it."""
    global _chosen
    if not _users_interface() and (interface := addresses.interface_of(address)):
        os.environ[_INTERFACE] = _chosen = interface


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
                timeout + _SLACK, lambda: dist.TCPStore(
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


class _Attendance:
    """Ranks that have come, by keys in the store.

    Args:
        kept: torch's store, towards which a rank finds the address by which others reach it.
    """

    def __init__(self, store: JobStore, rank: int, size: int, timeout: float, kept: dist.Store | None = None):
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._host = str(getattr(group_store.underlying(kept), "host", ""))

    def wait_for_all(self, absent: str) -> None:
        """Wait until every rank has come here; `absent`: what a missing rank has not done."""
        self._wait("here", f"{addresses.network()} {addresses.reaching([self._host])}", absent)

    def _wait(self, word: str, value: str, absent: str) -> None:
        """Say a word and wait until every rank has."""
        self._announce(word, value)
        keys = [f"{word}/{r}" for r in range(self._size)]
        begin = time.monotonic()
        while not self._all(keys):
            spent = time.monotonic() - begin
            if spent > self._timeout and (missing := self._missing(word)):
                raise self._lost(absent, missing, told=set(range(self._size)) - set(missing))
            time.sleep(min(0.25, 0.02 + spent / 20))

    def find_ways(self) -> str:
        """When all have come: the address by which the others reach this rank; '' where nothing tells it.

        gloo tries to connect for as long as its calls may take. Here each rank connects to the next one, and all know
        within seconds that one cannot.

        Raises:
            ConfigurationError: on all ranks, where one does not reach the next.
        """
        if self._size == 1:
            return "127.0.0.1"
        address = ""
        with contextlib.ExitStack() as stack:
            try:
                if address := self._address():
                    listener = stack.enter_context(addresses.listen(address))
                    self._announce("at", f"{listener.getsockname()[1]} {address}")
                    self._reach((self._rank + 1) % self._size)
                else:
                    self._announce("at", "")
            except (RuntimeError, OSError) as err:
                self._announce("at", "")
                reason = f"rank {self._rank}: {first_line(err)}"
                self._store.ask(lambda s: s.set_once("why", reason))
            self._wait("tried", "1", "came, and were not heard of again")
        if why := self._store.ask(lambda s: job_store.get(s, "why")):
            raise self._unconnected(why)
        return address

    def _address(self) -> str:
        """By which the others reach this rank, as far as this host tells.

        That of the interface which the user has named; loopback where all share it, whatever address the store has; else
        of the interface towards the store. What this host calls the store's may be loopback: then that towards another rank.
        """
        if interface := _users_interface():
            if found := addresses.of_interface(interface):
                return found
            raise RuntimeError(f"this host has no network interface {interface!r} with an address")
        keys = [f"here/{r}" for r in range(self._size)]
        words = [(word or b"").decode().partition(" ") for word in self._store.ask(lambda s: s.get_all(keys))]
        if len({network for network, _, _ in words}) == 1:
            return "127.0.0.1"
        way = words[self._rank][2] or addresses.reaching(way for _, _, way in words)
        return way or ("127.0.0.1" if self._host else "")

    def _reach(self, other: int) -> None:
        end, key = time.monotonic() + self._timeout, f"at/{other}"
        while (said := self._store.ask(lambda s: job_store.get(s, key))) is None and time.monotonic() < end:
            time.sleep(0.02)
        if not said:
            return  # it is missing, or has no address
        port, _, address = said.partition(" ")
        try:
            socket.create_connection((address, int(port)), _REACH_S).close()
        except OSError as err:
            raise RuntimeError(f"rank {other} is not reached at {address} ({err.strerror or 'no answer'})") from err

    def run_together(self, run: Callable[[], Any]):
        """The result of a step that all ranks take together; when it fails, name ranks that do not even report it."""
        try:
            result = within(self._timeout + _SLACK, run)
        except (RuntimeError, ValueError, TimeoutError) as err:
            self._announce("failed")
            time.sleep(_FAILURE_GRACE_S)
            silent = self._missing("failed", "joined")
            if silent:
                raise self._lost("came, and were not heard of again", silent, err) from err
            if isinstance(err, TimeoutError):
                raise PeerLost(
                    f"rank {self._rank}: the ranks came, but did not connect to each other in time; {_ADVICE}, or raise "
                    "TSN_TIMEOUT if they are only slow"
                ) from err
            raise self._unconnected(first_line(err)) from err
        self._announce("joined")
        return result

    def _unconnected(self, why: str) -> ConfigurationError:
        self._announce("told")
        if self._rank == self._store.kept_by:
            self._let_others_look(range(self._size))
        return ConfigurationError(
            f"rank {self._rank}: all {self._size} ranks came, but they could not connect to each other ({why}); {_ADVICE}"
        )

    def _lost(
        self, what: str, ranks: list[int], err: BaseException | None = None, told: set[int] | None = None
    ) -> PeerLost:
        who = ", ".join(f"rank {r}" for r in ranks)
        cause = f" ({first_line(err)})" if err else ""
        self._announce("told")
        if self._rank == self._store.kept_by:
            self._let_others_look(range(self._size) if told is None else told)
        return PeerLost(
            f"rank {self._rank}: not all of {self._size} ranks could meet within {self._timeout:g} s. Missing: {who} "
            f"({what}). Look at the output of those ranks, or raise TSN_TIMEOUT if they are only slow{cause}"
        )

    def _let_others_look(self, ranks: Iterable[int]) -> None:
        """The store ends with this rank, and the others look at it for their message: slow ones, too."""
        end, keys = time.monotonic() + _FAILURE_GRACE_S + _SLACK, [f"told/{r}" for r in ranks]
        while time.monotonic() < end and not self._all(keys):
            time.sleep(0.05)

    def _missing(self, *words: str) -> list[int]:
        return [r for r in range(self._size) if not any(self._all([f"{word}/{r}"]) for word in words)]

    def _announce(self, word: str, value: str = "1") -> None:
        self._store.ask(lambda s: s.set(f"{word}/{self._rank}", value))

    def _all(self, keys: list[str]) -> bool:
        return self._store.ask(lambda s: s.check(keys))
