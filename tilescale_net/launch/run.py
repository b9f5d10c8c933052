"""`python -m tilescale_net run script.py [args]` and launch.sh: starts one process per rank on this host.

Ranks get the variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, …). Rank 0 owns stdout and stderr; the
launcher shows the others' output when they fail, or always with TSN_OUTPUT=all.
"""

import argparse
import contextlib
import ctypes
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilescale_net import launch
from tilescale_net.errors import ConfigurationError
from tilescale_net.launch import forking, refuse, say
from tilescale_net.launch.job import Job, ProcessType
from tilescale_net.runtime import placement, private_folder, settings, this_host

PACKAGE = Path(__file__).resolve().parents[1]
MAX_SIMULATED = 64  # ranks on a machine without a GPU; each is a Python process with torch in it


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """End with a message about settings that are wrong."""
    try:
        yield
    except ConfigurationError as err:
        refuse(str(err))


def start(arguments: list[str]) -> int:
    """Run a script (or `-m module`) with its arguments on the ranks that the environment requests; the exit code."""
    _open_streams()
    check(arguments)
    if folder := import_folder():
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    os.environ.update(private_folder.for_tilelang())
    imports = _imports_the_package(arguments)
    if imports and (missing := this_host.missing_native()):
        refuse(missing)
    command = [sys.executable, *arguments]
    if _srun_starts_ranks():
        os.environ.update(_srun_rank())
        os.execv(command[0], command)
    ranks = settings.GPUS.get()
    gpus = 0 if settings.DEVICE.get() == "simulator" else visible_gpus()
    check_ranks(ranks, gpus)
    shared, port, store = _shared_variables(ranks)  # the port stays reserved as long as this socket is open
    forked = not gpus and imports and forking.preload(shared)
    try:
        process: ProcessType = subprocess.Popen
        if forked:
            process = forking.Process
        forking.status = Job(command, ranks, shared, process, store).run()
        return forking.status
    except forking.BecomeRank as rank:
        program = rank
    program.run()
    return 0


def _open_streams() -> None:
    """Redirect closed standard streams (of a daemon) to /dev/null: the next opened file would get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), mode))


# -- checks before anything starts ------------------------------------------------------------------------------------


@_refusing()
def check(arguments: list[str]) -> None:
    """Reject a job that cannot run: no such script, a folder that cannot be on Python's path, wrong settings. Uses the
    standard library alone: launch.sh calls it before it installs anything."""
    script = _script(arguments)
    if script is not None and not script.endswith(".py"):
        if launch.program != "launch.sh":
            refuse(f"{script!r} is no Python script (something.py); -m runs a module")
        refuse(
            f"{script!r} is neither a Python script (something.py) nor pytest; ranks and hosts are chosen by variables "
            "in front: GPUS=2 bash launch.sh script.py"
        )
    if script is not None and not os.path.isfile(script):
        refuse(f"there is no script {script!r} in {os.getcwd()}")
    if (folder := import_folder()) and os.pathsep in str(folder):
        refuse(f"{PACKAGE.parent} has {os.pathsep!r} in its name, which PYTHONPATH cannot hold; rename the folder")
    settings.check()
    for name, near in settings.misspelt_launch():
        say(f"{name} has no meaning here; did you mean {near}?")
    if not _srun_starts_ranks():
        settings.GPUS.get()  # one of its values


@_refusing()
def check_ranks(ranks: int, gpus: int) -> None:
    """Reject more ranks than this host can hold, heaps larger than its memory, and VIRTUAL_NODES that do not divide the
    ranks. `ranks`: requested. `gpus`: of this host; 0 means that they are simulated."""
    if gpus and ranks > gpus:
        refuse(
            f"GPUS={ranks}, but this machine shows {gpus} GPU{'s' * (gpus > 1)}; use GPUS={gpus} or fewer, or set "
            "TSN_DEVICE=simulator to simulate them"
        )
    if not gpus and settings.DEVICE.get() == "cuda":
        refuse(
            f"GPUS={ranks} and TSN_DEVICE=cuda, but this machine shows no GPU; leave TSN_DEVICE out to simulate them"
        )
    if not gpus and ranks > MAX_SIMULATED:
        refuse(f"GPUS={ranks} is more than the {MAX_SIMULATED} ranks that are simulated on one machine")
    if not gpus and (heap := settings.HEAP_SIZE.get() or 0) > (memory := _memory_bytes()):
        refuse(
            f"TSN_HEAP_SIZE: a heap of {heap} bytes is more than this machine has memory and swap ({memory} bytes); set it lower"
        )
    settings.sizes_of_virtual_nodes(ranks, f"GPUS={ranks}")


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


def _memory_bytes() -> int:
    """Memory and swap of this machine."""
    with open("/proc/meminfo") as f:
        rows = dict(line.split(":", 1) for line in f)
    return sum(int(rows[row].split()[0]) << 10 for row in ("MemTotal", "SwapTotal"))


def _script(arguments: list[str]) -> str | None:
    """The script to run; None for a module (`-m`)."""
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        return None
    return arguments[0] if arguments else ""


def _imports_the_package(arguments: list[str]) -> bool:
    """Whether a script's ranks will import the shared modules; a script that prints its usage imports nothing."""
    script = _script(arguments)
    if script is None or not {"-h", "--help"}.isdisjoint(arguments):
        return False
    text = Path(script).read_bytes()
    return b"tilescale_net" in text or b"tilelang" in text


def import_folder() -> Path | None:
    """The checkout's root, for the ranks' PYTHONPATH; None if the package is installed."""
    root = PACKAGE.parent
    return root if (root / "launch.sh").is_file() else None


# -- variables of ranks -----------------------------------------------------------------------------------------------


@_refusing()
def _shared_variables(ranks: int) -> tuple[dict[str, str], socket.socket | None, socket.socket | None]:
    """The variables that all ranks of this host share, the sockets of rank 0's port and of the store."""
    env = os.environ
    reserved = store = None
    if _srun_starts_hosts():
        nodes, node = placement.slurm_nodes(), int(env["SLURM_NODEID"])
        named = settings.JOB.get() or f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
        address = _srun_address() | {settings.JOB.name: named}
    else:
        nodes, node = settings.NODES.get(), settings.NODE_RANK.get()
        if nodes > 1 and not env.get("NODE_RANK"):
            refuse("NODE_RANK must be set when NODES is above 1")
        if node >= nodes:
            refuse(f"NODE_RANK={node} is not below NODES={nodes}; the hosts are numbered from 0")
        if nodes > 1 and not env.get("MASTER_ADDR"):
            refuse("MASTER_ADDR must be set when NODES is above 1: name or address of the host with NODE_RANK=0")
        if nodes == 1 and not env.get("MASTER_PORT"):
            reserved = reserve_port()
        port = reserved.getsockname()[1] if reserved else settings.MASTER_PORT.get()
        # An IPv6 address in brackets is one to us, and none to torch.
        address = {"MASTER_ADDR": env.get("MASTER_ADDR", "").strip("[]") or "127.0.0.1", "MASTER_PORT": str(port)}
        if nodes == 1:
            store = _open_store()
            # Other jobs do not know the random name. The address tells ranks whether the variable is meant for them, or
            # left from a job around theirs.
            key = f"{secrets.token_hex(16)}/{address['MASTER_ADDR']}:{port}"
            address["TSN_STORE"] = f"{store.getsockname()[1]}/{key}"
    several = nodes > 1 or settings.has_virtual_nodes()
    loading = settings.MODULE_LOADING.name  # see settings.load_kernels_early; here it comes before anything starts CUDA
    shared = {
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // ranks)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "WORLD_SIZE": str(nodes * ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        **({loading: env.get(loading, "EAGER")} if several else {}),
        **address,
    }
    return shared, reserved, store


def reserve_port(host: str = "") -> socket.socket:
    """A socket that keeps a TCP port of this host for rank 0 until rank 0 listens. It is bound but does not listen,
    which keeps the port from processes that request any free one. Rank 0 requests this very port, and gets it because
    both sockets permit that."""
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind((host, 0))
    return s


def _open_store() -> socket.socket:
    """A socket that listens on loopback, where ranks of one host meet and which rank 0 takes over."""
    this_host.check_loopback()
    return socket.create_server(("127.0.0.1", 0), backlog=4096)


def _srun_starts_hosts() -> bool:
    """Whether srun started one task per host, each of which starts GPUS ranks."""
    return "NODES" not in os.environ and "GPUS" in os.environ and 1 < placement.slurm_tasks() == placement.slurm_nodes()


@_refusing()
def _srun_starts_ranks() -> bool:
    """Whether srun started one task per rank. Rejects a contradicting GPUS."""
    tasks, nodes = placement.slurm_tasks(), placement.slurm_nodes()
    if "NODES" in os.environ or tasks == 1 or _srun_starts_hosts():
        return False
    if os.environ.get("GPUS") and settings.GPUS.get() * nodes != tasks:
        refuse(
            f"GPUS={os.environ['GPUS']}, but srun started {tasks} tasks on {nodes} host{'s' * (nodes > 1)}, each of which is "
            "a rank: leave GPUS (-n) out, start as many tasks on each host (--ntasks-per-node), or one that starts the ranks "
            "of its host (--ntasks-per-node=1). In a shell of srun, unset SLURM_PROCID SLURM_STEP_NUM_TASKS before"
        )
    return True


def _srun_address() -> dict[str, str]:
    """Address and port of rank 0 under srun: the first host of the step, and a port that all tasks compute."""
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
        return {"MASTER_ADDR": done.stdout.split()[0], "MASTER_PORT": port}
    except (OSError, IndexError, subprocess.TimeoutExpired):
        refuse(f"scontrol did not tell the first host of {hosts!r}; set MASTER_ADDR and MASTER_PORT")


def _srun_rank() -> dict[str, str]:
    """The rank variables of this task of srun."""
    env = os.environ
    return {
        **_srun_address(),
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": str(placement.slurm_tasks()),
        "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "GROUP_RANK": env.get("SLURM_NODEID", "0"),
        "GROUP_WORLD_SIZE": str(placement.slurm_nodes()),
    }


# -- the command ------------------------------------------------------------------------------------------------------

# Flags of `run`, each for a variable of launch.sh.
FLAGS: dict[str, tuple[settings.Setting[Any], str]] = {
    "--ranks": (settings.GPUS, "N"), "--virtual-nodes": (settings.VIRTUAL_NODES, "N|A+B"),
    "--nodes": (settings.NODES, "N"), "--node-rank": (settings.NODE_RANK, "I"),
    "--master-addr": (settings.MASTER_ADDR, "HOST"), "--master-port": (settings.MASTER_PORT, "PORT"),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `run` to a parser."""
    for flag, (row, metavar) in FLAGS.items():
        default = f" ({row.default_text})" if row.default_text else ""
        names = ["-n", flag] if flag == "--ranks" else [flag]
        parser.add_argument(*names, dest=row.name, metavar=metavar, help=f"{row.meaning}{default}; as {row.name}=")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module instead of a script")
    parser.add_argument("script", help="Python script, or module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def run(args: argparse.Namespace) -> int:
    """Start the job of the parsed flags of `add_arguments`; the job's exit code."""
    launch.program = "tilescale_net run"
    for flag, (row, _) in FLAGS.items():
        if (value := getattr(args, row.name)) is not None:
            row.value_of(value, flag)  # an error names the flag, not the variable
            os.environ[row.name] = value
    return start([*(["-m"] if args.module else []), args.script, *args.arguments])
