"""How ranks find each other: torch.distributed's default process group, made here where the user has made none.

torch waits for ranks in several places, each with an error of its own that names nobody. Here every rank says in the
store that it has come, so that whoever waits in vain can say for whom.
"""

from __future__ import annotations

import atexit
import datetime
import os
import socket
import time

import torch.distributed as dist

from tilescale_net.errors import ConfigurationError, PeerLost

_LAST_LOOK = 1.0  # seconds that ranks which give up leave each other to say so


def join(timeout: float) -> tuple[dist.Store, str, dist.ProcessGroup]:
    """Meet the other ranks.

    The default process group is made (gloo) from RANK and WORLD_SIZE, or srun's variables, unless there is one; without
    them the job has one rank.

    Args:
        timeout: seconds that ranks may take to come.

    Returns:
        The job's store, the prefix of this meeting's keys in it, and a gloo group of the package's own.

    Raises:
        ConfigurationError: the environment does not say where to meet, rank 0 cannot listen there, or the network
            interface is the wrong one.
        PeerLost: ranks did not come within the timeout, or were lost on the way; names them.
    """
    limit = datetime.timedelta(seconds=timeout)
    if not dist.is_initialized():
        _make_default(timeout)
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    # A world of its own in the store: init after finalize must not read the keys of the earlier one.
    generation = _ask(rank, lambda: store.add(f"tsn/generation/{rank}", 1))
    prefix = f"tsn/{generation}/"
    roll = _Roll(store, prefix, rank, dist.get_world_size(), timeout)
    return store, prefix, roll.guard(lambda: dist.new_group(backend="gloo", timeout=limit))


def _make_default(timeout: float) -> None:
    found = _place()
    limit = datetime.timedelta(seconds=timeout)
    if found is None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    else:
        rank, size, address, port = found
        # One host needs no other interface than loopback, and must not pick one by accident.
        counts = [os.environ.get(name) for name in ("GROUP_WORLD_SIZE", "NODES", "SLURM_NNODES")]
        if next(filter(None, counts), "1") == "1":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = _connect(rank, size, address, port, timeout)
        roll = _Roll(store, "tsn/", rank, size, timeout)
        roll.wait_for_all()
        roll.guard(lambda: dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit))
    # Gloo's threads may still drop references to tensors when the last collective call has returned. A thread that
    # does so while the interpreter shuts down aborts the process; destroying the group waits for them.
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _place() -> tuple[int, int, str, int] | None:
    """Rank, number of ranks, and where rank 0 listens; None for a job of one rank that nobody has started as one."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, size = "RANK", "WORLD_SIZE"
    elif "SLURM_PROCID" in env and ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        rank, size = "SLURM_PROCID", "SLURM_NTASKS"
    elif "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
        raise ConfigurationError(
            "srun started several tasks but MASTER_ADDR and MASTER_PORT are not set; export them (any free port on "
            "the first node), or start the script through launch.sh"
        )
    else:
        return None
    missing = [name for name in (size, "MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise ConfigurationError(
            f"{rank}={env[rank]} is set but {' and '.join(missing)} is not; start the script through launch.sh, which sets "
            "them all, or unset it"
        )
    for name in (rank, size, "MASTER_PORT"):
        if not env[name].isdigit():
            raise ConfigurationError(f"{name}={env[name]!r} is not a number")
    if not int(env[rank]) < int(env[size]):
        raise ConfigurationError(f"{rank}={env[rank]} is not below {size}={env[size]}")
    return int(env[rank]), int(env[size]), env["MASTER_ADDR"], int(env["MASTER_PORT"])


def _connect(rank: int, size: int, address: str, port: int, timeout: float) -> dist.Store:
    # torchrun's agent has a store at that place already, one for each attempt.
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = datetime.timedelta(seconds=timeout)
    try:
        if not hosts:
            _knock(address, port, timeout)
        # A client tries twice, so half of the time each.
        store = dist.TCPStore(
            address, port, size, hosts, limit if hosts else limit / 2, wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, OSError) as err:  # DistNetworkError is a RuntimeError
        if hosts:
            raise ConfigurationError(
                f"rank 0 cannot listen at {address}:{port} ({first_line(err)}); set MASTER_ADDR to this host and "
                "MASTER_PORT to a free port"
            ) from err
        raise PeerLost(
            f"rank {rank}: rank 0 does not answer at {address}:{port} within {timeout:g} s. Look at its output, check "
            f"MASTER_ADDR and MASTER_PORT, or raise TSN_TIMEOUT if it is only slow ({first_line(err)})"
        ) from err
    store.set_timeout(limit)
    return store


def _knock(address: str, port: int, timeout: float) -> None:
    """Wait until somebody listens. The store's own attempts go on for twice their time, and fill the terminal."""
    end = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection((address, port), max(0.1, end - time.monotonic())).close()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


class _Roll:
    """Who has come, by keys in the store."""

    def __init__(self, store: dist.Store, prefix: str, rank: int, size: int, timeout: float):
        self._store, self._prefix, self._rank, self._size, self._timeout = store, prefix, rank, size, timeout

    def wait_for_all(self) -> None:
        """Wait until every rank has come here."""
        self._say("here")
        keys = [self._key("here", r) for r in range(self._size)]
        end = time.monotonic() + self._timeout
        while not self._all(keys):
            if time.monotonic() > end and (missing := self._silent("here")):
                raise self._lost("did not come", missing)
            time.sleep(0.02)

    def guard(self, run):
        """The result of a step that all ranks take together; when it fails, tell who does not even say that it failed."""
        try:
            result = run()
        except (RuntimeError, ValueError) as err:
            self._say("failed")
            time.sleep(_LAST_LOOK)
            silent = self._silent("failed", "joined")
            if silent:
                raise self._lost("came, and were not heard of again", silent, err) from err
            raise ConfigurationError(
                f"rank {self._rank}: all {self._size} ranks came, but they could not connect to each other "
                f"({first_line(err)}); let GLOO_SOCKET_IFNAME name a network interface over which they can"
            ) from err
        self._say("joined")
        return result

    def _lost(self, what: str, ranks: list[int], err: Exception | None = None) -> PeerLost:
        who = ", ".join(f"rank {r}" for r in ranks)
        cause = f" ({first_line(err)})" if err else ""
        if self._rank == 0:
            time.sleep(_LAST_LOOK)  # the store ends with this rank, and the others look at it for their message
        return PeerLost(
            f"rank {self._rank}: not all of {self._size} ranks could meet within {self._timeout:g} s. Missing: {who} "
            f"({what}). Look at the output of those ranks, or raise TSN_TIMEOUT if they are only slow{cause}"
        )

    def _silent(self, *words: str) -> list[int]:
        return [r for r in range(self._size) if not any(self._all([self._key(word, r)]) for word in words)]

    def _key(self, word: str, rank: int) -> str:
        return f"{self._prefix}{word}/{rank}"

    def _say(self, word: str) -> None:
        _ask(self._rank, lambda: self._store.set(self._key(word, self._rank), "1"))

    def _all(self, keys: list[str]) -> bool:
        return _ask(self._rank, lambda: self._store.check(keys))


def _ask(rank: int, question):
    """The store's answer."""
    try:
        return question()
    except RuntimeError as err:
        raise PeerLost(
            f"rank {rank}: rank 0, which keeps the store of the job, is gone. Look at its output ({first_line(err)})"
        ) from err


def first_line(err: Exception) -> str:
    """What an error of torch says, without the stack that follows."""
    text = str(err).strip()
    return text.splitlines()[0] if text else type(err).__name__
