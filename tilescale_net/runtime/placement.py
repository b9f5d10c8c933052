"""This process's job and rank, from the launchers' variables, and the PEs of its node."""

import atexit
import hashlib
import itertools
import math
import os
import secrets
import socket
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import private_folder, settings, this_host
from tilescale_net.runtime.context import MAX_PES

# -- placement -----------------------------------------------------------------------------------------------------------

# Launchers' names of rank and size, and of the number of ranks on this host, if any. srun may have started MPI's, one
# process per host.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", None),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI, Flux
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),  # MVAPICH's mpirun_rsh
    ("PALS_RANKID", "PALS_SIZE", None),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", None),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", None),
    ("PMIX_RANK", "PMIX_SIZE", None),
)
# Names of processes that start all ranks of one host.
_STARTERS = "hydra_pmi_proxy pmi_proxy mpirun mpiexec mpiexec.hydra mpispawn orted prted prterun".split()


@dataclass(frozen=True)
class LaunchedRank:
    """Rank, number of ranks, and the address and port where rank 0 keeps the store. `listener`: a socket that listens
    there already, handed to rank 0; -1 without one."""

    rank: int
    size: int
    address: str
    port: int
    listener: int = -1


def launched_rank(timeout: float) -> LaunchedRank | None:
    """Rank and size of this process; None if no launcher has started it: a job of one rank. Raises ConfigurationError:
    wrong variables, or several ranks without a rendezvous address."""
    env = os.environ
    for rank, size, local in _LAUNCHERS:
        if rank not in env or (rank == "RANK" and size not in env):
            continue
        if rank != "RANK" and (slurm_tasks() if rank == "SLURM_PROCID" else _number(size, 1)) <= 1:
            if rank == "PMIX_RANK" and size not in env:
                raise ConfigurationError(
                    "PMIX_RANK is set but nothing says how many ranks there are; export RANK, WORLD_SIZE, MASTER_ADDR and "
                    "MASTER_PORT, or start the script through launch.sh or torchrun"
                )
            continue  # one task: alone unless another launcher has set more
        return _launched(rank, size, local, timeout)
    if "RANK" in env:
        raise ConfigurationError(f"RANK={env['RANK']} is set but WORLD_SIZE is not; {_ADVICE}")
    if notice := slurm_notice():
        settings.log.warning(notice)
    return None


_ADVICE = "start the script through launch.sh, which sets them all, or unset it"


@dataclass(frozen=True)
class JobIdentity:
    """Identity of this job, against another one on the same port, by mistake or on purpose. `name`: public prefix of
    its keys in the store; '' without one. `secret`: only the ranks have it, and sign with it; None without one."""

    name: str
    secret: bytes | None = None


def job_identity() -> JobIdentity:
    """The job of this process: as named by launch.sh (one host) or TSN_JOB, or as numbered by torchrun or srun."""
    store = launchers_store()
    if given := store[1] if store else settings.JOB.get():
        name, secret = (hashlib.sha256(f"{use} of {given}".encode()) for use in ("name", "secret"))
        return JobIdentity(name.hexdigest()[:32], secret.digest())
    return JobIdentity(os.environ.get("TORCHELASTIC_RUN_ID") or _step_of_srun())


def _step_of_srun() -> str:
    """Job and step of Slurm if srun has started this very rank; other launchers' ranks see them on some hosts only."""
    env, size = os.environ, str(slurm_tasks())
    started = next((row for row in _LAUNCHERS[1:] if row[0] in env and _number(row[1], 1) > 1), None)
    mine = (env.get("RANK", env.get("SLURM_PROCID")), env.get("WORLD_SIZE", size))
    by_srun = started is not None and started[0] == "SLURM_PROCID" and mine == (env.get("SLURM_PROCID"), size)
    return slurm_step() if by_srun and size != "1" else ""


def launchers_store() -> tuple[int, str] | None:
    """Port of the store and name of the job if launch.sh has started this rank; see launch/run.py."""
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


def _launched(rank_name: str, size_name: str, local_name: str | None, timeout: float) -> LaunchedRank:
    env = os.environ
    if rank_name == "RANK" and "MASTER_ADDR" not in env:
        raise ConfigurationError(f"RANK={env['RANK']} is set but MASTER_ADDR is not; {_ADVICE}")
    rank, size = _number(rank_name, 0), _number(size_name, 1)
    if rank >= size:
        raise ConfigurationError(f"{rank_name}={rank} is not below {size_name}={size}")
    if size > MAX_PES:
        raise ConfigurationError(f"{size_name}={size}: a job has at most {MAX_PES} ranks")
    here = local_name is not None and _number(local_name, 0) == size
    if "MASTER_ADDR" in env and ("MASTER_PORT" in env or not here):
        port = env.get("MASTER_PORT", str(settings.MASTER_PORT.default))
        if not _is_number(port, 65535):
            raise ConfigurationError(f"MASTER_PORT={port!r} is not a number up to 65535")
        if (store := launchers_store()) is not None:
            listener = _number("TSN_STORE_FD", 0) if rank == 0 and env.get("TSN_STORE_FD") else -1
            return LaunchedRank(rank, size, "127.0.0.1", store[0], listener)
        return LaunchedRank(rank, size, env["MASTER_ADDR"].strip("[]"), int(port))
    if here:
        return _meet_on_this_host(rank, size, timeout)
    raise ConfigurationError(
        f"{rank_name}={rank} of {size_name}={size}, but MASTER_ADDR is not set: several ranks were started without "
        f"a common address; export MASTER_ADDR (the first host) and MASTER_PORT (a free port there, if not "
        f"{settings.MASTER_PORT.default}), or start the script through launch.sh"
    )


def _meet_on_this_host(rank: int, size: int, timeout: float) -> LaunchedRank:
    """Rendezvous of one mpirun: rank 0 listens on loopback and writes the port to a file of this user."""
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
        return LaunchedRank(rank, size, "127.0.0.1", port, fd)
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        try:
            return LaunchedRank(rank, size, "127.0.0.1", int(path.read_text()))
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


# -- slurm ---------------------------------------------------------------------------------------------------------------

# Slurm's variables: this process is a task of srun, or a shell or script in an allocation. Shells and batch scripts
# have the variables of task 0 and SLURM_NTASKS of the whole allocation. Only srun sets variables of a step, and
# programs in an allocation may pass on the variables of an outer step.

# Step numbers of shells, batch scripts and Slurm's own programs.
_FIRST_RESERVED_STEP = 0xFFFFFFF0


def slurm_tasks() -> int:
    """Number of tasks of this process's srun step; 1 if srun started no others."""
    env = os.environ
    if "SLURM_PROCID" not in env or _slurm_number("SLURM_STEP_ID") >= _FIRST_RESERVED_STEP or _is_in_shell():
        return 1
    return max(1, _slurm_number("SLURM_STEP_NUM_TASKS"))


def slurm_nodes() -> int:
    """Number of hosts of that step."""
    return max(1, _slurm_number("SLURM_STEP_NUM_NODES") or _slurm_number("SLURM_NNODES"))


def slurm_step() -> str:
    """Job and step, as text that is equal on all tasks of the step and on no other; '' if Slurm has none."""
    job, number = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID")
    return f"{job}.{number}" if job and number and "SLURM_HET_SIZE" not in os.environ else ""


def slurm_notice() -> str | None:
    """Warning that the allocation has more tasks than were started; None otherwise."""
    if "SLURM_PROCID" not in os.environ or slurm_tasks() > 1 or (count := _slurm_number("SLURM_NTASKS")) < 2:
        return None
    return (
        f"srun did not start this process, so it is a job of one rank, though SLURM_NTASKS={count}: start it by srun, or "
        "by launch.sh, whose GPUS is the number of ranks on this host"
    )


def _is_in_shell() -> bool:
    """Whether a user typed the command in a shell of `srun --pty`, even as one task of several."""
    task = os.environ.get("SLURM_TASK_PID", "")
    if "SLURM_PTY_PORT" not in os.environ or not task.isdigit() or int(task) == os.getpid() or not os.isatty(0):
        return False
    try:
        program, *options = Path(f"/proc/{task}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return False
    return bool(program) and all(option.startswith(b"-") and option != b"-c" for option in options)


def _slurm_number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0


# -- topology ------------------------------------------------------------------------------------------------------------

# Nodes of PEs: by host, or by VIRTUAL_NODES.


@dataclass(frozen=True)
class Topology:
    """Placement of the PEs of team "world".

    Attributes:
        rank, size: this PE and the number of PEs.
        local_rank: index of this PE among the PEs of its *host* (picks the GPU).
        node, nodes: index of this PE's node, number of nodes; if node sizes differ, of their largest equal parts.
        node_pe, node_size: index of this PE in that node or part, its size.
        single_host: whether all PEs run on one host.
        sizes: PEs of every node, in order; PEs of a node map each other's memory.
    """

    rank: int
    size: int
    local_rank: int
    node: int
    nodes: int
    node_pe: int
    node_size: int
    single_host: bool
    sizes: tuple[int, ...]

    @property
    def node_members(self) -> range:
        """PEs of this PE's node, which is team "node"; consecutive by construction."""
        ends = itertools.accumulate(self.sizes)
        end, size = next((end, size) for end, size in zip(ends, self.sizes) if self.rank < end)
        return range(end - size, end)

    def is_direct(self, pe: int) -> bool:
        """Whether `pe` is mapped, rather than reached through the fabric."""
        return pe in self.node_members


def job_topology(rank: int, size: int, hosts: list[str]) -> Topology:
    """Topology of a whole job from the host name of every rank.

    Args:
        rank, size: of team "world".
        hosts: host identity per rank, gathered from all ranks.

    Raises:
        ConfigurationError: too many ranks, ranks of a host are not consecutive, or VIRTUAL_NODES does not fit them.
    """
    counts = Counter(hosts)
    if hosts != [h for h, n in counts.items() for _ in range(n)]:
        raise ConfigurationError(
            f"rank {rank}: every host must run consecutive ranks, but the hosts of ranks 0.. are {hosts}; start the job with "
            "launch.sh, torchrun or srun with block distribution"
        )
    sizes = [settings.sizes_of_virtual_nodes(n, f"the {n} ranks of this host") for n in counts.values()]
    virtual_nodes = [node for of_host in sizes for node, n in enumerate(of_host) for _ in range(n)]
    return _placed(rank, size, hosts, virtual_nodes, "job")


def group_topology(rank: int, size: int, hosts: list[str], virtual_nodes: list[int]) -> Topology:
    """Topology of any group of a job's ranks.

    Nodes are runs of PEs of one host: if a host's ranks are not consecutive, it has several nodes, which reach each
    other through the fabric.

    Args:
        rank, size: of the group.
        hosts: host identity per rank.
        virtual_nodes: virtual node of its host per rank, see `virtual_node`.

    Raises:
        ConfigurationError: too many ranks.
    """
    return _placed(rank, size, hosts, virtual_nodes, "group")


def _placed(rank: int, size: int, hosts: list[str], virtual_nodes: list[int], what: str) -> Topology:
    """`what`: the ranks' name in the warning if a host's ranks are on several nodes."""
    if size > MAX_PES:
        raise ConfigurationError(f"a {what} has at most {MAX_PES} ranks, but this one has {size}")
    if rank == 0:
        _warn_of_containers(hosts)
    nodes = list(zip(hosts, virtual_nodes))
    sizes = tuple(len(list(run)) for _, run in itertools.groupby(nodes))
    if len(sizes) > len(set(nodes)) and rank == 0:
        settings.log.warning(
            "the ranks of a %s are not in the order of its hosts: nodes of consecutive ranks are made, which reach each other "
            "through the network even on one host",
            what,
        )
    node_size = math.gcd(*sizes)
    return Topology(
        rank=rank,
        size=size,
        local_rank=hosts[:rank].count(hosts[rank]),
        node=rank // node_size,
        nodes=size // node_size,
        node_pe=rank % node_size,
        node_size=node_size,
        single_host=len(set(hosts)) == 1,
        sizes=sizes,
    )


def virtual_node(job_rank: int, job_size: int) -> int:
    """Index of a rank's virtual node within its host, without a query of the rest of the job."""
    if not settings.has_virtual_nodes():
        return 0
    here, local_size = os.environ.get("LOCAL_RANK", job_rank), os.environ.get("LOCAL_WORLD_SIZE", job_size)
    sizes = settings.sizes_of_virtual_nodes(int(local_size), f"the {local_size} ranks of this host")
    return next(node for node, end in enumerate(itertools.accumulate(sizes)) if int(here) < end)


def host_identity() -> str:
    """A string equal on all ranks of one host and different between hosts: its name, the machine and the PID namespace.

    Ranks open each other's memory, watch and end each other by process numbers, which differ between PID namespaces.
    Other namespaces may differ between ranks of a host (Apptainer); if they prevent mapping of memory, that is an
    error.
    """
    return this_host.identity("pid")


def _warn_of_containers(hosts: list[str]) -> None:
    """Warn if ranks of one machine reach each other through the network, with the remedy."""
    machines: dict[str, dict[str, int]] = {}  # by machine: the first rank of each PID namespace
    for rank, host in enumerate(hosts):
        machine, _, namespace = host.partition("/")[2].partition("/")
        if machine:
            machines.setdefault(machine, {}).setdefault(namespace, rank)
    for found in machines.values():
        if len(found) > 1:
            first, second, *_ = found.values()
            settings.log.warning(
                "ranks %d and %d run on one machine in different PID namespaces, as in two containers: they count as two "
                "hosts and reach each other through the network; start them in one container, or with --pid=host "
                "--ipc=host, to have them share memory",
                first,
                second,
            )
            return
