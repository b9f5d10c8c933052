"""Rendezvous of ranks through torch.distributed's default process group, which is made here unless the user has made
one.

torch's errors name no missing rank. Here every rank reports its arrival in the store, so a rank that times out can name
the missing ones.

The store may hold words of an earlier attempt, for example of a launcher. So each process draws a random number and
comes under it. Rank 0 proposes the numbers that it reads; ranks that find their own number among them agree. When all
have agreed, these processes meet under a name made of their numbers.
"""

import atexit
import contextlib
import datetime
import errno
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tilescale_net.errors import ConfigurationError, PeerLost
from tilescale_net.runtime import groups, job_store, placement, this_host
from tilescale_net.runtime.job_store import JobStore, SignedStore, first_line, has_agent, run_with_timeout

T = TypeVar("T")

# -- ranks that come and connect ------------------------------------------------------------------------------------------

_FAILURE_GRACE_S = 1.0  # seconds that ranks which give up leave each other to report it
_REACH_S = 5.0  # seconds in which a system, without the help of a process, accepts a connection
SLACK = 3.0  # seconds after which a step of torch beyond its time limit counts as hanging
_ADVICE = f"let {this_host.GLOO_INTERFACE} name, on every host, the network interface over which they can"
# Limits of a process or a user, by the error of a system call that exceeds them.
_LIMITS = {errno.EMFILE: "open files (ulimit -n)", errno.EAGAIN: "processes and threads (ulimit -u)"}


class _Tracker:
    """State shared by the steps of a rendezvous. `store`: where ranks report their steps. `rank`, `size`: of this
    process, of all. `timeout`: seconds that ranks may take."""

    def __init__(self, store: JobStore, rank: int, size: int, timeout: float):
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout

    def poll(self, look: Callable[[SignedStore], T | None], seconds: float) -> T | None:
        """The first result of `look` in the store; None if there is none in time."""
        begin = time.monotonic()
        while (found := self.store.ask(look)) is None and (spent := time.monotonic() - begin) <= seconds:
            time.sleep(min(0.25, 0.002 + self.size / 10_000 + spent / 20))
        return found

    def _lost(self, what: str, ranks: list[int], cause: str = "") -> PeerLost:
        who = ", ".join(f"rank {r}" for r in ranks)
        return PeerLost(
            f"rank {self.rank}: not all of {self.size} ranks could meet within {self.timeout:g} s. Missing: {who} "
            f"({what}). Look at the output of those ranks, or raise TSN_TIMEOUT if they are only slow{cause}"
        )

    def _ack_failure(self, mine: str, others: Iterable[str]) -> None:
        """Report that this rank knows. The store ends with the rank that keeps it, and the others look at it for their
        message: slow ones, too."""
        self.store.ask(lambda s: s.set(mine, "1"))
        if self.rank == self.store.kept_by:
            keys = list(others)
            self.poll(lambda s: s.check(keys) or None, _FAILURE_GRACE_S + SLACK)


class ArrivalTracker(_Tracker):
    """Finds the processes of a rendezvous in a store that may hold words of earlier ones."""

    def __init__(self, store: JobStore, rank: int, size: int, timeout: float):
        super().__init__(store, rank, size, timeout)
        self._number = f"{secrets.token_hex(8)}/{size}"
        self._agreed = ""  # name of the rendezvous that this rank has proposed or agreed to

    def meet(self, word: str, absent: str) -> tuple[JobStore, list[str]]:
        """Wait until every rank has come here. `word`: this rank's report. `absent`: the step that a missing rank has
        not done. Returns a store of these processes alone, which replaces the given one, and the report of each. Raises
        PeerLost: ranks did not come in time; names them."""
        try:
            if self.size == 1:
                return self.store.within(self._number), [word]
            name = self._agree(word, absent)
            return self.store.within(name), [said.partition(" ")[2] for said in self.store.ask(self._words)]
        finally:
            self.store.close()

    def _agree(self, word: str, absent: str) -> str:
        said = f"{self._number} {word}"
        self.store.ask(lambda s: s.set(f"come/{self.rank}", said))
        step, seconds = self._lead if self.rank == 0 else self._follow, self.timeout
        while (name := self.poll(step, seconds)) is None:
            seconds = 0.25
            if missing := self.store.ask(self._missing):
                numbers = self.store.ask(lambda s: [self._number_of(s, r) for r in range(self.size)])
                acks = [f"acked/{number}" for r, number in enumerate(numbers) if r not in missing]
                others = self.store.ask(self._other_size)
                self._ack_failure(f"acked/{self._number}", acks)
                raise self._lost(absent, missing, others)
        return name

    def _words(self, store: SignedStore) -> list[str]:
        """The reports of the ranks once all have reported, each behind the rank's number; none before."""
        keys = [f"come/{r}" for r in range(self.size)]
        words = store.get_all(keys) if store.check(keys) else [None]
        return [] if None in words else [word.decode(errors="replace") for word in words if word is not None]

    def _lead(self, store: SignedStore) -> str | None:
        if not (words := self._words(store)):
            return None
        proposal = " ".join(word.partition(" ")[0] for word in words)
        if (name := _name(proposal)) != self._agreed:
            self._agreed = name
            store.set("proposal", proposal)
        keys = [f"agreed/{r}" for r in range(1, self.size)]
        if not store.check(keys) or any(word != name.encode() for word in store.get_all(keys)):
            return None
        store.set(f"met/{name}", "1")
        return name

    def _follow(self, store: SignedStore) -> str | None:
        if self._agreed and store.check([f"met/{self._agreed}"]):
            return self._agreed
        proposal = job_store.get_text(store, "proposal") or ""
        numbers = proposal.split(" ")
        if len(numbers) == self.size and numbers[self.rank] == self._number:
            if (name := _name(proposal)) != self._agreed:
                self._agreed = name
                store.set(f"agreed/{self.rank}", name)
        return None

    def _missing(self, store: SignedStore) -> list[int]:
        """Missing ranks; if all seem present, those whose word is old."""
        if absent := [r for r in range(self.size) if not self._number_of(store, r)]:
            return absent
        late = [r for r in range(1, self.size) if job_store.get_text(store, f"agreed/{r}") != self._agreed]
        if self.rank == 0:
            return late
        return [r for r in late if r != self.rank and self._agreed] or [0]

    def _other_size(self, store: SignedStore) -> str:
        """Text for a rank that came as one of another number of ranks (hosts with different GPUS); '' for none. The
        store of torchrun's agent also holds ranks of earlier attempts, whose number may differ."""
        for rank in range(0 if has_agent() else 2 * self.size):
            size = self._number_of(store, rank).partition("/")[2]
            if size not in ("", str(self.size)):
                return f"; rank {rank} came as one of {size} ranks: all hosts must start the same job (GPUS, NODES, WORLD_SIZE)"
        return ""

    def _number_of(self, store: SignedStore, rank: int) -> str:
        return (job_store.get_text(store, f"come/{rank}") or "").partition(" ")[0]


def _name(proposal: str) -> str:
    return hashlib.sha256(proposal.encode()).hexdigest()[:16]


class Rendezvous(_Tracker):
    """The connection of ranks that have come: no other process has written to their store.

    Attributes:
        store: of this meeting.
        rank, size: of this process among them; their number.
        address: by which the others reach this rank; '' if unknown.
        hosts: identity of each rank's host, see placement.host_identity.
        processes: number and start time of each rank's process, see this_host.own_process.
        ranks: the job's rank of each of them, when `join` has returned.
        group: a gloo group of the package's own, with the ranks in this order; as late.
    """

    address: str
    hosts: list[str]
    processes: list[tuple[int, int]]
    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    _steps = 0  # that were taken together

    def find_address(self, networks: list[str], addresses: list[str], host: str) -> str:
        """The address by which the others reach this rank; '' if unknown.

        gloo tries to connect for the whole time limit of its calls. Here each rank connects to the next one, and all
        learn within seconds if one cannot.

        Args:
            networks, addresses: of each rank, see `this_host.own_address`.
            host: that keeps the store of the launcher, as this process names it; '' for none.

        Raises:
            ConfigurationError: on all ranks, if one does not reach the next.
        """
        if self.size == 1:
            return "127.0.0.1"
        address = ""
        with contextlib.ExitStack() as stack:
            try:
                if address := this_host.own_address(networks, addresses, self.rank, host):
                    listener = stack.enter_context(this_host.listen(address))
                    self._announce("at", f"{listener.getsockname()[1]} {address}")
                    self._reach((self.rank + 1) % self.size)
                else:
                    self._announce("at", "")
            except (RuntimeError, OSError) as err:
                self._announce("at", "")
                reason = f"rank {self.rank}: {first_line(err)}"
                self.store.ask(lambda s: s.set_once("why", reason))
            self._announce("tried")
            if self.poll(lambda s: s.check(self._of_all("tried")) or None, self.timeout + _REACH_S) is None:
                raise self._missed(self.store.ask(lambda s: self._silent(s, "tried")))
        if why := self.store.ask(lambda s: job_store.get_text(s, "why")):
            raise self._unconnected(why)
        return address

    def _reach(self, other: int) -> None:
        said = self.poll(lambda s: job_store.get_text(s, f"at/{other}"), self.timeout)
        if not said:
            return  # it is missing, or has no address
        port, _, address = said.partition(" ")
        try:
            socket.create_connection((address, int(port)), _REACH_S).close()
        except OSError as err:
            raise RuntimeError(f"rank {other} is not reached at {address} ({err.strerror or 'no answer'})") from err

    def run_collectively(self, run: Callable[[], T]) -> T:
        """The result of a step that all ranks take together; if it fails, name ranks that do not report it."""
        self._steps += 1
        failed, joined = f"failed {self._steps}", f"joined {self._steps}"
        try:
            result = run_with_timeout(self.timeout + SLACK, run)
        except (RuntimeError, ValueError, TimeoutError) as err:
            self._announce(failed)
            for code, limit in _LIMITS.items():
                if os.strerror(code) in str(err):  # the others still wait for this rank
                    raise ConfigurationError(
                        f"rank {self.rank}: {first_line(err)}; raise the limit of {limit}"
                    ) from err
            time.sleep(_FAILURE_GRACE_S)
            if silent := self.store.ask(lambda s: self._silent(s, failed, joined)):
                raise self._missed(silent, f" ({first_line(err)})") from err
            if isinstance(err, TimeoutError):
                raise PeerLost(
                    f"rank {self.rank}: the ranks came, but did not connect to each other in time; {_ADVICE}, or raise "
                    "TSN_TIMEOUT if they are only slow"
                ) from err
            raise self._unconnected(first_line(err)) from err
        self._announce(joined)
        return result

    def _missed(self, ranks: list[int], cause: str = "") -> PeerLost:
        self._ack_failure(f"acked/{self.rank}", self._of_all("acked"))  # some may only be slow
        return self._lost("came, then stopped responding", ranks, cause)

    def _unconnected(self, why: str) -> ConfigurationError:
        self._ack_failure(f"acked/{self.rank}", self._of_all("acked"))
        return ConfigurationError(
            f"rank {self.rank}: all {self.size} ranks came, but they could not connect to each other ({why}); {_ADVICE}"
        )

    def _of_all(self, word: str) -> list[str]:
        return [f"{word}/{r}" for r in range(self.size)]

    def _silent(self, store: SignedStore, *words: str) -> list[int]:
        """Ranks that have reported none of the words."""
        if store.check(self._of_all(words[0])):
            return []
        return [r for r in range(self.size) if not any(store.check([f"{word}/{r}"]) for word in words)]

    def _announce(self, word: str, value: str = "1") -> None:
        self.store.ask(lambda s: s.set(f"{word}/{self.rank}", value))


# -- the rendezvous ----------------------------------------------------------------------------------------------------------

_RESOLVING = 5.0  # seconds that a name server may take to come up


def join(timeout: float, silence: float, group: groups.Group = None) -> Rendezvous:
    """Meet the other ranks of a group, without the help of ranks outside it.

    The default process group is made (gloo) from the variables of launch.sh, torchrun, srun or mpirun, unless there is
    one; without them the job has one rank.

    Args:
        timeout: seconds that ranks may take to come.
        silence: seconds without an answer after which the store counts as lost.
        group: of torch.distributed, or a StoreGroup; None: all ranks of the job.

    Raises:
        ConfigurationError: the environment does not say where to meet, rank 0 cannot listen there, or the network
            interface is the wrong one.
        PeerLost: ranks did not come within the timeout, or were lost on the way; names them.
    """
    silence = min(silence, timeout)
    of_job = not isinstance(group, groups.StoreGroup)
    come = _make_default(timeout, silence) if of_job and not dist.is_initialized() else None
    ranks = groups.ranks(group)
    if come is None:
        come = _come(_meeting_store(group, ranks, silence), len(ranks), timeout, "has not called tilescale_net.init")
    try:
        if come.store.kept_by is None and of_job and _ends_with_rank_0(dist.distributed_c10d._get_default_store()):
            own = come.run_collectively(lambda: open_group_store(come, silence))
            come.store.close()
            come.store = own
        come.ranks, come.group = (
            ranks,
            come.run_collectively(
                lambda: connect_gloo(
                    dist.PrefixStore("gloo", come.store.raw), come.address, come.rank, come.size, timeout
                )
            ),
        )
    except BaseException:
        come.store.close()
        raise
    return come


def _ends_with_rank_0(store: dist.Store) -> bool:
    """Whether the store of the job is lost with the job's rank 0. A launcher's store is not, nor a store in a file."""
    return not has_agent() and isinstance(underlying_store(store), dist.TCPStore)


def _meeting_store(group: groups.Group, ranks: Sequence[int], silence: float) -> JobStore:
    """Where the ranks of a group come."""
    if isinstance(group, groups.StoreGroup):
        # Different launchers, or none, may have started processes that meet in the program's own store.
        return JobStore(group.store, f"tsn/of {group.size()}", group.rank(), silence, group.kept_by)
    # Groups are independent and unnumbered: each has its own names.
    prefix = _prefix() if group is None else f"{_prefix()}/group/{hashlib.sha256(str(ranks).encode()).hexdigest()}"
    kept, secret = dist.distributed_c10d._get_default_store(), placement.job_identity().secret
    kept_by = ranks.index(0) if 0 in ranks and not has_agent() else None
    return JobStore(kept, prefix, ranks.index(dist.get_rank()), silence, kept_by, secret)


def _come(base: JobStore, size: int, timeout: float, absent: str) -> Rendezvous:
    """Wait until all ranks have come to `base`, which is closed then; `absent`: the step that a missing rank has not
    done."""
    host = str(getattr(underlying_store(base.raw), "host", ""))
    own = (this_host.identity("net"), this_host.address_reaching([host]), placement.host_identity())
    mine = [*own, *this_host.own_process()]
    store, words = ArrivalTracker(base, base.rank, size, timeout).meet(json.dumps(mine), absent)
    tracker = Rendezvous(store, base.rank, size, timeout)
    try:
        networks, addresses, tracker.hosts, pids, started = map(list, zip(*(_parse_arrival(mine, w) for w in words)))
        tracker.processes = list(zip(pids, started))
        tracker.address = tracker.find_address(networks, addresses, host)
        return tracker
    except BaseException:
        store.close()
        raise


def _parse_arrival(mine: list[Any], word: str) -> list[Any]:
    try:
        theirs: list[Any] = job_store.parse_json(word)
        job_store.check_alike(mine, theirs)
        return theirs
    except ValueError as err:
        raise PeerLost(f"a rank's report of itself cannot be read: {err}") from None


def open_group_store(ranks: Rendezvous, silence: float) -> JobStore:
    """A store of the ranks of a group, kept by its rank 0; called by all of them. `ranks`: if the address is loopback,
    no other process may act as one of them. `silence`: seconds without an answer after which the new store counts as
    lost. Raises RuntimeError, OSError, TimeoutError: it cannot be opened or reached."""
    job, limit = ranks.store, datetime.timedelta(seconds=ranks.timeout)
    if ranks.rank == 0:
        with this_host.listen(ranks.address) as listener:
            host, port, fd = ranks.address, listener.getsockname()[1], os.dup(listener.fileno())
        opened = dist.TCPStore(host, port, None, True, limit, wait_for_workers=False, **_listening_on(fd))
        job.ask(lambda s: s.set("own store", f"{port} {host}"))
    else:
        said = ranks.poll(lambda s: job_store.get_text(s, "own store"), ranks.timeout)
        if said is None:
            raise TimeoutError
        port, _, host = said.partition(" ")
        opened = dist.TCPStore(host, int(port), None, False, limit / 2, wait_for_workers=False)
    return JobStore(opened, "tsn", ranks.rank, silence, kept_by=0, secret=job.secret)


def _listening_on(fd: int) -> dict[str, Any]:
    """Arguments of a TCPStore that listens on this socket: before torch 2.8, the store made with libuv cannot."""
    return {"master_listen_fd": fd} | ({} if torch.__version__ >= "2.8" else {"use_libuv": False})


def underlying_store(store: dist.Store) -> dist.Store:
    """The store of torch below all prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def connect_gloo(store: dist.Store, address: str, rank: int, size: int, timeout: float) -> Any:
    """A gloo group of these ranks alone, outside of torch.distributed's own groups. `address`: of this rank, on which
    gloo listens unless the user has named an interface; '': gloo's choice, from this host's name."""
    limit = datetime.timedelta(seconds=timeout)
    if this_host.users_interface() or not address:
        return dist.ProcessGroupGloo(store, rank, size, limit)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout, options._threads = limit, 2
    return dist.ProcessGroupGloo(store, rank, size, options)


def _prefix() -> str:
    """Prefix of this job's keys: a second job on the same port by mistake does not act for this one."""
    name = placement.job_identity().name
    return f"tsn/{name}" if name else "tsn"


def _make_default(timeout: float, silence: float) -> Rendezvous | None:
    """Make torch's default group; returns its ranks if they had to meet for it."""
    launched = placement.launched_rank(timeout)
    limit = datetime.timedelta(seconds=timeout)
    come = None
    if launched is None:
        try:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
        except RuntimeError:  # gloo found no interface
            this_host.check_loopback()
            raise
    else:
        kept, rank, size = _connect(launched, timeout), launched.rank, launched.size
        kept_by, secret = None if has_agent() else 0, placement.job_identity().secret
        come = _come(JobStore(kept, _prefix(), rank, silence, kept_by, secret), size, timeout, "did not come")
        try:
            this_host.choose_interface(come.address)
            mine = dist.PrefixStore("group", come.store.raw)
            come.run_collectively(
                lambda: dist.init_process_group("gloo", store=mine, rank=rank, world_size=size, timeout=limit)
            )
        except BaseException:
            come.store.close()
            raise
    # Gloo's threads may still drop references to tensors after the last collective call has returned. A thread that
    # does so while the interpreter shuts down aborts the process; destroying the group waits for these threads.
    atexit.register(_leave, os.getpid())
    return come


def _leave(pid: int) -> None:
    if dist.is_initialized() and os.getpid() == pid:
        dist.destroy_process_group()


def _connect(launched: placement.LaunchedRank, timeout: float) -> dist.Store:
    if _is_loopback(launched.address):
        this_host.check_loopback()
    keeps = launched.rank == 0 and not has_agent()  # torchrun's agent keeps one there, the same for all attempts
    limit = datetime.timedelta(seconds=timeout)
    try:
        _resolve(launched.address, launched.port)
        if keeps:
            store = _listen(launched, limit)
        else:
            _wait_for_port(launched.address, launched.port, timeout)
            # A client tries twice, so half of the time each.
            store = run_with_timeout(
                timeout + SLACK, lambda: dist.TCPStore(
                    launched.address, launched.port, launched.size, False, limit / 2, wait_for_workers=False, multi_tenant=True
                )
            )  # fmt: skip
    except socket.gaierror as err:
        raise ConfigurationError(
            f"rank {launched.rank}: the host MASTER_ADDR={launched.address!r} is not known ({err.strerror}); set MASTER_ADDR to "
            "the name or address of the host of rank 0"
        ) from err
    except (RuntimeError, OSError) as err:  # DistNetworkError is a RuntimeError, TimeoutError an OSError
        if keeps:
            this_host.check_loopback()  # route of a host to its own addresses
            raise ConfigurationError(
                f"rank 0 cannot listen at {launched.address}:{launched.port} ({first_line(err)}); set MASTER_ADDR to this host "
                "and MASTER_PORT to a free port"
            ) from err
        raise PeerLost(
            f"rank {launched.rank}: rank 0 does not answer at {launched.address}:{launched.port} within {timeout:g} s. Look at its "
            f"output, check MASTER_ADDR and MASTER_PORT, or raise TSN_TIMEOUT if it is only slow ({first_line(err)})"
        ) from err
    store.set_timeout(limit)
    return store


def _listen(launched: placement.LaunchedRank, limit: datetime.timedelta) -> dist.Store:
    """The store of rank 0, on loopback alone if the address is loopback: no process elsewhere may act as a rank."""
    fd = launched.listener
    if fd < 0 and _is_loopback(launched.address):
        with this_host.listen(launched.address, launched.port) as listener:
            fd = os.dup(listener.fileno())
    elif fd >= 0:
        os.set_inheritable(fd, False)
        # Another init in this process must not take the number for a socket.
        os.environ.pop("TSN_STORE_FD", None)
    listening = _listening_on(fd) if fd >= 0 else {}
    return dist.TCPStore(
        launched.address,
        launched.port,
        launched.size,
        True,
        limit,
        wait_for_workers=False,
        multi_tenant=True,
        **listening,
    )


def _is_loopback(address: str) -> bool:
    """Whether an address is loopback; a host name does not count, as it may mean loopback on that host alone."""
    return address == "localhost" or this_host.is_loopback(address)


def _resolve(address: str, port: int) -> None:
    """Raise gaierror for a host that no resolver knows. torch would retry, and print a C++ stack each time."""
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
