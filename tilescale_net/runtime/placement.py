"""Which rank of which job this process is, from the variables that launchers set, and where the ranks meet."""

import atexit
import hashlib
import os
import secrets
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import private_folder, settings, slurm

# Rank and size as launchers name them; what counts the ranks of this host, where the launcher has it. Those of MPI may
# have been started by srun, one process a host.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", None),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI, MVAPICH
    ("PALS_RANKID", "PALS_SIZE", None),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", None),
    ("PMIX_RANK", "PMIX_SIZE", None),
)
# Processes that start the ranks of one host: what all of them descend from.
_STARTERS = ("hydra_pmi_proxy", "pmi_proxy", "mpirun", "mpiexec", "mpiexec.hydra", "orted", "prted", "prterun")


@dataclass(frozen=True)
class Place:
    """Rank, number of ranks, and the address and port where rank 0 keeps the store.

    `listener` is a socket that listens there already, handed to rank 0; -1 without one.
    """

    rank: int
    size: int
    address: str
    port: int
    listener: int = -1

    @property
    def keeps_store(self) -> bool:
        """Whether this process keeps the store. torchrun's agent has one there already, the same for all attempts."""
        return self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def find(timeout: float) -> Place | None:
    """The place of this process; None for a process that no launcher has started: a job of one rank.

    Raises:
        ConfigurationError: variables that make no sense, or several ranks without a place to meet.
    """
    env = os.environ
    for rank, size, local in _LAUNCHERS:
        if rank not in env or (rank == "RANK" and size not in env):
            continue
        if rank != "RANK" and (slurm.tasks() if rank == "SLURM_PROCID" else _number(size, 1)) <= 1:
            if rank == "PMIX_RANK" and size not in env:
                raise ConfigurationError(
                    "PMIX_RANK is set but nothing says how many ranks there are; export RANK, WORLD_SIZE, MASTER_ADDR and "
                    "MASTER_PORT, or start the script through launch.sh or torchrun"
                )
            continue  # one task: alone unless another launcher has set more
        return _place(rank, size, local, timeout)
    if "RANK" in env:
        raise ConfigurationError(f"RANK={env['RANK']} is set but WORLD_SIZE is not; {_ADVICE}")
    if notice := slurm.promised():
        settings.log.warning(notice)
    return None


_ADVICE = "start the script through launch.sh, which sets them all, or unset it"


@dataclass(frozen=True)
class JobIdentity:
    """What distinguishes the ranks of one job from those of another that comes to the same port, by mistake or on
    purpose.

    `name` goes before their keys in the store and may be read by all; '' without one. Only the ranks have `secret`, and
    sign with it; None without one.
    """

    name: str
    secret: bytes | None = None


def job() -> JobIdentity:
    """The job of this process: as named by launch.sh (one host) or TSN_JOB, or as numbered by torchrun or srun."""
    store = launchers_store()
    if given := store[1] if store else settings.JOB.get():
        name, secret = (hashlib.sha256(f"{use} of {given}".encode()) for use in ("name", "secret"))
        return JobIdentity(name.hexdigest()[:32], secret.digest())
    return JobIdentity(os.environ.get("TORCHELASTIC_RUN_ID") or _step_of_srun())


def _step_of_srun() -> str:
    """Job and step of Slurm, where srun has started this very rank; what others start may see them on some hosts only."""
    env, size = os.environ, str(slurm.tasks())
    started = next((row for row in _LAUNCHERS[1:] if row[0] in env and _number(row[1], 1) > 1), None)
    mine = (env.get("RANK", env.get("SLURM_PROCID")), env.get("WORLD_SIZE", size))
    by_srun = started is not None and started[0] == "SLURM_PROCID" and mine == (env.get("SLURM_PROCID"), size)
    return slurm.step() if by_srun and size != "1" else ""


def launchers_store() -> tuple[int, str] | None:
    """Port of the store and name of the job, where launch.sh has started this rank; see launch/environment.py."""
    port, _, rest = settings.STORE.get().partition("/")
    job, _, master = rest.partition("/")
    mine = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return (int(port), job) if _is_number(port, 65535) and job and master == mine else None


def _is_number(text: str, most: int = 999_999_999) -> bool:
    """Whether `text` is a number as launchers write them: decimal digits alone, and not above `most`."""
    return text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= most


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not _is_number(text):
        raise ConfigurationError(f"{name}={text!r} is not a number")
    return int(text)


def _place(rank_name: str, size_name: str, local_name: str | None, timeout: float) -> Place:
    env = os.environ
    if rank_name == "RANK" and "MASTER_ADDR" not in env:
        raise ConfigurationError(f"RANK={env['RANK']} is set but MASTER_ADDR is not; {_ADVICE}")
    rank, size = _number(rank_name, 0), _number(size_name, 1)
    if rank >= size:
        raise ConfigurationError(f"{rank_name}={rank} is not below {size_name}={size}")
    here = local_name is not None and _number(local_name, 0) == size
    if "MASTER_ADDR" in env and ("MASTER_PORT" in env or not here):
        port = env.get("MASTER_PORT", str(settings.MASTER_PORT.default))
        if not _is_number(port, 65535):
            raise ConfigurationError(f"MASTER_PORT={port!r} is not a number up to 65535")
        if (store := launchers_store()) is not None:
            listener = _number("TSN_STORE_FD", 0) if rank == 0 and env.get("TSN_STORE_FD") else -1
            return Place(rank, size, "127.0.0.1", store[0], listener)
        return Place(rank, size, env["MASTER_ADDR"].strip("[]"), int(port))
    if here:
        return _meet_on_this_host(rank, size, timeout)
    raise ConfigurationError(
        f"{rank_name}={rank} of {size_name}={size}, but MASTER_ADDR is not set: several ranks were started and not told "
        f"where to meet; export MASTER_ADDR (the first host) and MASTER_PORT (a free port there, if not "
        f"{settings.MASTER_PORT.default}), or start the script through launch.sh"
    )


def _meet_on_this_host(rank: int, size: int, timeout: float) -> Place:
    """Where the ranks of one mpirun meet: rank 0 listens on loopback and leaves the port in a file of this user."""
    starter = _starter()
    if starter is None:
        raise ConfigurationError(
            "an MPI launcher started several ranks, and it is not among the ancestors of this process; export MASTER_ADDR "
            "and MASTER_PORT (any free port of the first host), or start the script through launch.sh"
        )
    folder = _private_folder()
    path = folder / f"mpi-{starter}"
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        port = listener.getsockname()[1]
        fd = os.dup(listener.fileno())
        listener.close()
        partial = folder / f"{path.name}.{secrets.token_hex(8)}"
        partial.write_text(str(port))
        os.replace(partial, path)
        _forget_later(path)
        return Place(rank, size, "127.0.0.1", port, fd)
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        try:
            return Place(rank, size, "127.0.0.1", int(path.read_text()))
        except (OSError, ValueError):
            time.sleep(0.05)
    raise ConfigurationError(
        f"rank {rank}: rank 0 of this mpirun did not call tilescale_net.init within {timeout:g} s; look at its output, or "
        "raise TSN_TIMEOUT if it is only slow"
    )


def _forget_later(path: Path) -> None:
    owner = os.getpid()
    atexit.register(lambda: path.unlink(missing_ok=True) if os.getpid() == owner else None)


def _starter() -> str | None:
    """Process id and start time of the nearest ancestor that is an MPI launcher: one name for one run on one host."""
    pid = os.getppid()
    while pid > 1:
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            return None
        fields = rest.split()
        if name in _STARTERS:
            return f"{pid}-{fields[19]}"
        pid = int(fields[1])
    return None


def _private_folder() -> Path:
    """A folder that only this user can write."""
    folder = Path(tempfile.gettempdir()) / f"tilescale_net-{os.getuid()}"
    if not private_folder.make(folder):
        raise ConfigurationError(
            f"{folder} is not a folder of this user alone; remove it, or export MASTER_ADDR and MASTER_PORT"
        )
    return folder
