"""What a launch requests: ranks, hosts, address; from GPUS, NODES, … or from srun's variables."""

import ctypes
import os
import secrets
import socket
import subprocess

from tilescale_net.errors import ConfigurationError
from tilescale_net.launch.messages import refuse, say
from tilescale_net.runtime import placement, settings, this_host
from tilescale_net.runtime.settings import Setting

LOADING = settings.MODULE_LOADING.name
MOST_SIMULATED = 64  # ranks on a machine without a GPU; each is a Python process with torch in it


def value(row: Setting[int], required: bool = False) -> int:
    """A whole number from the environment; refuses anything else, and its absence when it is required."""
    if required and not os.environ.get(row.name):
        refuse(f"{row.name} must be set when NODES is above 1")
    try:
        return row.get()
    except ConfigurationError as err:
        refuse(str(err))


def visible_gpus() -> int:
    """GPUs that the driver shows to this process (CUDA_VISIBLE_DEVICES counts); 0 without a driver that works."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status not in (0, 34, 100):  # 34: a stub library, 100: no GPU
        say(f"the CUDA driver does not start (error {status}); looking no further for GPUs")
    return 0 if status else count.value


def memory_bytes() -> int:
    """Memory and swap of this machine."""
    with open("/proc/meminfo") as f:
        rows = dict(line.split(":", 1) for line in f)
    return sum(int(rows[row].split()[0]) << 10 for row in ("MemTotal", "SwapTotal"))


def check_ranks(ranks: int, held: int) -> None:
    """Refuse more ranks than this host can hold, heaps larger than its memory, and VIRTUAL_NODES that do not divide the ranks.

    Args:
        ranks: requested.
        held: GPUs of this host; 0 means that they are simulated.
    """
    if held and ranks > held:
        refuse(
            f"GPUS={ranks}, but this machine shows {held} GPU{'s' * (held > 1)}; use GPUS={held} or fewer, or set "
            "TSN_DEVICE=simulator to simulate them"
        )
    if not held and settings.DEVICE.get() == "cuda":
        refuse(
            f"GPUS={ranks} and TSN_DEVICE=cuda, but this machine shows no GPU; leave TSN_DEVICE out to simulate them"
        )
    if not held and ranks > MOST_SIMULATED:
        refuse(f"GPUS={ranks} is more than the {MOST_SIMULATED} ranks that are simulated on one machine")
    if not held and (heap := settings.HEAP_SIZE.get() or 0) > (memory := memory_bytes()):
        refuse(
            f"TSN_HEAP_SIZE: a heap of {heap} bytes is more than this machine has memory and swap ({memory} bytes); set it lower"
        )
    virtual = value(settings.VIRTUAL_NODES)
    if ranks % virtual:
        refuse(f"VIRTUAL_NODES={virtual} does not divide GPUS={ranks}; every node holds the same number of ranks")


_kept: list[socket.socket] = []  # for as long as this process lives
_listeners: list[socket.socket] = []  # until rank 0 has them


def reserve_port(host: str = "") -> socket.socket:
    """A socket that keeps a TCP port of this host for rank 0, however long it takes until that listens.

    It is bound but does not listen, which keeps the port from processes that request any free one. Rank 0 requests this
    very one, and gets it because both sockets allow that.
    """
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind((host, 0))
    return s


def open_store(master: str) -> dict[str, str]:
    """Where ranks of one host meet: a socket that listens on loopback, for rank 0 to take over, and a name of the job.

    No other process can listen there or act as a rank by accident: other jobs do not have the name.

    Args:
        master: MASTER_ADDR:MASTER_PORT, by which ranks tell that the variable is meant for them, and not left from a job
            around theirs.
    """
    try:
        this_host.check_loopback()
    except ConfigurationError as err:
        refuse(str(err))
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    _listeners.append(listener)
    return {"TSN_STORE": f"{listener.getsockname()[1]}/{secrets.token_hex(16)}/{master}"}


def hand_over_store(rank: int) -> tuple[dict[str, str], list[socket.socket]]:
    """Variables and sockets for one rank; this process keeps no socket, so that rank 0's end is seen at the other side."""
    if rank or not _listeners:
        return {}, []
    listener = _listeners.pop()
    return {"TSN_STORE_FD": str(listener.fileno())}, [listener]


def job(ranks: int) -> dict[str, str]:
    """The variables that all ranks of this host share, as torchrun names them."""
    env = os.environ
    if srun_starts_hosts():
        nodes, node = placement.slurm_nodes(), int(env["SLURM_NODEID"])
        named = settings.JOB.get() or f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
        shared = srun_address() | {settings.JOB.name: named}
    else:
        nodes = value(settings.NODES)
        node = value(settings.NODE_RANK, required=nodes > 1)
        if node >= nodes:
            refuse(f"NODE_RANK={node} is not below NODES={nodes}; the hosts are numbered from 0")
        if nodes > 1 and not env.get("MASTER_ADDR"):
            refuse("MASTER_ADDR must be set when NODES is above 1: name or address of the host with NODE_RANK=0")
        if nodes == 1 and not env.get("MASTER_PORT"):
            _kept.append(reserve_port())
            port = _kept[-1].getsockname()[1]
        else:
            port = value(settings.MASTER_PORT)
        # An IPv6 address in brackets is one to us, and none to torch.
        shared = {"MASTER_ADDR": env.get("MASTER_ADDR", "").strip("[]") or "127.0.0.1", "MASTER_PORT": str(port)}
        if nodes == 1:
            shared.update(open_store(f"{shared['MASTER_ADDR']}:{port}"))
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    return {
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS") or str(threads),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "WORLD_SIZE": str(nodes * ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        # See load_kernels_early in runtime/settings.py; here it comes before anything could start CUDA.
        **({LOADING: env.get(LOADING, "EAGER")} if nodes > 1 or value(settings.VIRTUAL_NODES) > 1 else {}),
        **shared,
    }


def srun_starts_hosts() -> bool:
    """Whether srun started one task per host, each of which shall start GPUS ranks."""
    return "NODES" not in os.environ and "GPUS" in os.environ and 1 < placement.slurm_tasks() == placement.slurm_nodes()


def srun_starts_ranks() -> bool:
    """Whether srun started one task per rank. Refuses a GPUS that says otherwise."""
    tasks, nodes = placement.slurm_tasks(), placement.slurm_nodes()
    if "NODES" in os.environ or tasks == 1 or srun_starts_hosts():
        return False
    if os.environ.get("GPUS") and value(settings.GPUS) * nodes != tasks:
        refuse(
            f"GPUS={os.environ['GPUS']}, but srun started {tasks} tasks on {nodes} host{'s' * (nodes > 1)}, each of which is "
            "a rank: leave GPUS (-n) out, start as many tasks on each host (--ntasks-per-node), or one that starts the ranks "
            "of its host (--ntasks-per-node=1). In a shell of srun, unset SLURM_PROCID SLURM_STEP_NUM_TASKS before"
        )
    return True


def srun_address() -> dict[str, str]:
    """Where rank 0 listens under srun: the first host of the step, and a port that all tasks compute alike."""
    env = os.environ
    steps = int(env.get("SLURM_JOB_ID", "0")) * 7 + int(env.get("SLURM_STEP_ID", "0"))
    port = env.get("MASTER_PORT") or str(20000 + steps % 10000)
    if env.get("MASTER_ADDR"):
        return {"MASTER_ADDR": env["MASTER_ADDR"].strip("[]"), "MASTER_PORT": port}
    if "SLURM_HET_SIZE" in env:
        refuse(
            "Slurm's variables do not tell where task 0 of a heterogeneous job is; set MASTER_ADDR to that host, and "
            "MASTER_PORT"
        )
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", hosts], capture_output=True, text=True, timeout=30)
        first = done.stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        refuse(f"scontrol did not tell the first host of {hosts!r}; set MASTER_ADDR and MASTER_PORT")
    return {"MASTER_ADDR": first, "MASTER_PORT": port}


def srun_rank() -> dict[str, str]:
    """The variables of the rank that srun started this process as."""
    env = os.environ
    return {
        **srun_address(),
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": str(placement.slurm_tasks()),
        "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "GROUP_RANK": env.get("SLURM_NODEID", "0"),
        "GROUP_WORLD_SIZE": str(placement.slurm_nodes()),
    }
