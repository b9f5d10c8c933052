"""All environment variables of the package: one row each. `python -m tilescale_net settings` prints them as a page.

    settings.TIMEOUT.get()          the value in force, checked

A variable is read where it is used and as late as that, so that tests and notebooks may set it. `check` reads all of them
at once; `init` and the launcher call it, so that a wrong value or a misspelt name is an error before anything starts.
Only the standard library is imported here: the launcher reads this table as well. (TSN_CHAOS, where it is set, is checked by
the native part if that is there.)
"""

import contextlib
import difflib
import logging
import os
from collections.abc import Sequence

from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import cpu_lists, providers
from tilescale_net.runtime import setting_values as values
from tilescale_net.runtime.setting import MOST_BYTES, Setting, parse_bytes

log = logging.getLogger("tilescale_net")

DEVICE = Setting(
    "TSN_DEVICE",
    values.one_of("auto", "cuda", "simulator"),
    "auto",
    "`cuda`, `simulator` or `auto`: a GPU where there is one",
    "`auto`",
)
HEAP_SIZE = Setting(
    "TSN_HEAP_SIZE",
    parse_bytes,
    None,
    "bytes of the symmetric heap (K, M, G)",
    "1G on a GPU, 256M in the simulator",
)
HEAP_LIMIT = Setting(
    "TSN_HEAP_LIMIT",
    parse_bytes,
    None,
    "bytes to which a full heap grows, for which addresses are reserved (K, M, G); `0`: it does not grow",
    "4G in the simulator, `0` on a GPU",
)
TIMEOUT = Setting(
    "TSN_TIMEOUT",
    values.number(0.01),
    100.0,
    "seconds that a device-side wait or a collective call may take; ranks may come that far apart to a call",
    "100",
)
HEARTBEAT_TIMEOUT = Setting(
    "TSN_HEARTBEAT_TIMEOUT",
    values.number(1.0),
    15.0,
    "seconds of silence after which a rank of another host counts as lost",
    "15",
)
VIRTUAL_NODES = Setting(
    "VIRTUAL_NODES",
    values.whole(1),
    1,
    "split the ranks of a host into nodes that talk only through the fabric",
    "1",
)
MODULE_LOADING = Setting(
    "CUDA_MODULE_LOADING",
    values.text,
    "",
    "CUDA's own; set to `EAGER` where ranks are on several nodes, unless you set it (see docs/proxy.md)",
)
NVTX = Setting(
    "TSN_NVTX",
    values.flag,
    False,
    "1: calls of collectives and of `AllToAll` are NVTX ranges, for Nsight Systems",
    "0",
)
LIBCUDA = Setting("TSN_LIBCUDA", values.text, "", "the CUDA driver library", "`libcuda.so.1`")
CACHE_HOME = Setting(
    "XDG_CACHE_HOME", values.text, "", "folder whose `tilescale_net` keeps compiled kernels", "`~/.cache`"
)
TUNED = Setting(
    "TSN_TUNED",
    values.flag,
    True,
    "`0`: what `tilescale_net.tuning` has found is not used; that of rank 0 counts",
    "1",
)

TRACE = Setting(
    "TSN_TRACE",
    values.new_file,
    "",
    "file to write a timeline of all ranks to, which ui.perfetto.dev opens; see docs/debugging.md",
)
TRACE_EVENTS = Setting(
    "TSN_TRACE_EVENTS",
    values.whole(16),
    1 << 16,
    "events of 64 bytes that a rank keeps of its host calls, of its kernels and of each proxy thread; the oldest go first",
    "65536",
)

LIBFABRIC = Setting(
    "TSN_LIBFABRIC",
    values.text,
    "",
    "the libfabric to load; without it `/opt/amazon/efa`, the system's and the `mpich` wheel's are tried in turn",
)
PROVIDER = Setting(
    "TSN_PROVIDER",
    providers.provider,
    "",
    "libfabric provider, such as `efa`, `tcp`, `tcp;ofi_rxm`, `shm`",
    "the best one offered",
)
FABRIC_INTERFACE = Setting(
    "TSN_FABRIC_INTERFACE",
    values.text,
    "",
    "network interfaces or domains, comma-separated",
    "loopback on one host",
)
RAILS = Setting("TSN_RAILS", values.whole(0), 0, "endpoints to use; 0: one per NIC near the GPU", "0")
PROXY_QUEUES = Setting(
    "TSN_PROXY_QUEUES", values.whole(1), 1, "device queues; operations to a PE use queue PE % queues", "1"
)
PROXY_THREADS = Setting("TSN_PROXY_THREADS", values.whole(1), 1, "proxy threads, each with endpoints of its own", "1")
PROXY_PEER_THREADS = Setting(
    "TSN_PROXY_PEER_THREADS",
    values.whole(1),
    1,
    "proxy threads that share large puts and gets of one PE, in chunks of at least 64K; the others help its own",
    "1",
)
PROXY_CPUS: Setting[str | list[int]] = Setting(
    "TSN_PROXY_CPUS",
    cpu_lists.cpus,
    [],
    "CPUs that the threads are pinned to, such as `2,3`; `node`: those near the GPU",
    "not pinned",
)
PROXY_CAPACITY = Setting("TSN_PROXY_CAPACITY", values.power_of_two(2), 1024, "descriptors in a queue's ring", "1024")
PROXY_CHUNK = Setting("TSN_PROXY_CHUNK", parse_bytes, 1 << 20, "bytes of the chunks that puts travel in", "1M")
PROXY_STAGING = Setting(
    "TSN_PROXY_STAGING",
    values.flag,
    False,
    "1: go through pinned staging memory even where the network reaches the heap",
    "0",
)
PROXY_STATS = Setting("TSN_PROXY_STATS", values.flag, False, "1: print the proxy's counters when it stops", "0")
CHAOS = Setting("TSN_CHAOS", values.chaos, "", "make the network misbehave, see below")

SIM_SEED = Setting(
    "TSN_SIM_SEED",
    values.whole(0),
    0,
    "seed of the schedule and of the order in which remote writes arrive",
    "0",
)
SIM_VISIBILITY = Setting(
    "TSN_SIM_VISIBILITY",
    values.one_of("eager", "late", "random"),
    "random",
    "remote writes arrive at once (`eager`), as late as the memory model allows (`late`), or by lot (`random`)",
    "`random`",
)
SIM_SMS = Setting(
    "TSN_SIM_SMS",
    values.whole(1),
    132,
    "multiprocessors of the simulated GPU, which bound how many blocks run at a time",
    "132",
)
SIM_STALL = Setting(
    "TSN_SIM_STALL",
    values.number(0.1),
    60.0,
    "seconds without any progress after which a kernel counts as hanging; at least twice `TSN_TIMEOUT`",
    "60",
)
SIM_STACK = Setting("TSN_SIM_STACK", parse_bytes, 256 << 10, "bytes of stack per simulated thread", "256K")
SIM_CXXFLAGS: Setting[list[str]] = Setting(
    "TSN_SIM_CXXFLAGS",
    values.words,
    [],
    "further flags of the host compiler, such as `-g -O0` for a debugger",
)
SIM_RACES = Setting(
    "TSN_SIM_RACES",
    values.flag,
    False,
    "`1`: follow transfers and signals between ranks, and report accesses that nothing orders (`DataRace`)",
    "0",
)
CXX: Setting[list[str]] = Setting("CXX", values.words, [], "the host compiler", "g++, clang++ or c++")

GPUS = Setting(
    "GPUS",
    values.whole(1),
    2,
    "ranks on this host: one per GPU, or simulated ones where there is no GPU; `-n` of `tilescale_net run`",
    "2",
)
NODES = Setting("NODES", values.whole(1), 1, "hosts of the job; run the same line on every host", "1")
NODE_RANK = Setting("NODE_RANK", values.whole(0), 0, "this host's index")
MASTER_ADDR = Setting("MASTER_ADDR", values.text, "", "name or address of the host where rank 0 listens")
MASTER_PORT = Setting(
    "MASTER_PORT",
    values.whole(1, 65535),
    29500,
    "the port that rank 0 listens at",
    "29500; any free one on one host, one of job and step under srun",
)
JOB = Setting(
    "TSN_JOB",
    values.text,
    "",
    "name of the job: equal on all its ranks, and of no other job. A random one (`openssl rand -hex 16`) that only its "
    "ranks know keeps others from acting as a rank, see SECURITY.md",
    "on one host random, by launch.sh; under srun job and step",
)
OUTPUT = Setting(
    "TSN_OUTPUT",
    values.one_of("all", "first"),
    "first",
    "`all`: show the output of all ranks, not only of rank 0",
)
STORE = Setting("TSN_STORE", values.text, "", "where the launcher's store is; set by the launcher, not for users")
STORE_FD = Setting(
    "TSN_STORE_FD",
    values.whole(0),
    0,
    "file of the store's socket, for rank 0; set by the launcher, not for users",
)
PYTHON = Setting(
    "TSN_PYTHON",
    values.text,
    "",
    "launch.sh: interpreter to use as it is; otherwise an active virtual environment, `.venv`, python3 or a new `.venv`",
)
VENV = Setting("TSN_VENV", values.text, "", "launch.sh: folder of that virtual environment", "`.venv`")
CHECKOUT = Setting(
    "TSN_CHECKOUT",
    values.text,
    "",
    "for scripts around a checkout: its folder; the package does not read it",
)
BUILD = Setting("TSN_BUILD", values.flag, True, "launch.sh: 0: never build the native part", "1")
LIBFABRIC_INCLUDE = Setting(
    "TSN_LIBFABRIC_INCLUDE",
    values.text,
    "",
    "the build: folder that holds `rdma/fabric.h`; `none`: build without the fabric",
    "the compiler's",
)

TEST_ORDERING = Setting(
    "TSN_TEST_ORDERING",
    values.one_of("last_chunk"),
    "",
    "`last_chunk`: order as systems do that trust the last chunk, which is wrong; shows what counting is for",
)
CHAOS_SEEDS = Setting(
    "TSN_CHAOS_SEEDS", values.whole(1), 240, "seeds of the nightly test on networks that misbehave", "240"
)

# The page: titles, and what stands below them.
SECTIONS: dict[str, tuple[Setting, ...]] = {
    "": (DEVICE, HEAP_SIZE, HEAP_LIMIT, TIMEOUT, HEARTBEAT_TIMEOUT, VIRTUAL_NODES, MODULE_LOADING, LIBCUDA, NVTX)
    + (CACHE_HOME, TUNED)
    + (TRACE, TRACE_EVENTS),
    "Network": (
        *(LIBFABRIC, PROVIDER, FABRIC_INTERFACE, RAILS, PROXY_QUEUES, PROXY_THREADS, PROXY_PEER_THREADS, PROXY_CPUS),
        *(PROXY_CAPACITY, PROXY_CHUNK, PROXY_STAGING, PROXY_STATS, CHAOS),
    ),
    "Simulator": (SIM_SEED, SIM_VISIBILITY, SIM_RACES, SIM_SMS, SIM_STALL, SIM_STACK, SIM_CXXFLAGS, CXX),
    "Launcher and build": (
        *(GPUS, NODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, OUTPUT),
        *(JOB, PYTHON, VENV, CHECKOUT, BUILD, LIBFABRIC_INCLUDE, STORE, STORE_FD),
    ),
    "Tests": (TEST_ORDERING, CHAOS_SEEDS),
}
ALL: dict[str, Setting] = {row.name: row for rows in SECTIONS.values() for row in rows}
# The launcher's own, which it checks with the words of a launcher; elsewhere other programs may use these names.
LAUNCHER = ("GPUS", "NODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "VIRTUAL_NODES")

# What the launcher sets for its ranks; not to be set by hand. See launch/environment.py.
HANDED_OVER = ("TSN_STORE", "TSN_STORE_FD")


def check() -> None:
    """Read every variable that is set.

    Raises:
        ConfigurationError: a value that its variable does not take, or a name with TSN_ that no variable has.
    """
    for name in sorted(os.environ):
        if name.startswith("TSN_") and name not in ALL:
            near = nearest(name, [row for row in ALL if row.startswith("TSN_") and row not in HANDED_OVER])
            advice = f"did you mean {near}? " if near else ""
            raise ConfigurationError(
                f"there is no setting {name}; {advice}docs/settings.md lists all that begin with TSN_"
            )
        elif name in ALL and name not in LAUNCHER:
            ALL[name].get()


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name that `name` was most likely meant for: by its words or its letters; None where it shares neither."""
    mine = name.upper().removeprefix("TSN_")

    def likeness(row: str) -> float:
        theirs = row.removeprefix("TSN_")
        ratio = difflib.SequenceMatcher(None, mine, theirs).ratio()
        words, others = {*mine.split("_")}, {*theirs.split("_")}
        if words <= others:
            return 0.9 + ratio / 10
        return ratio if ratio >= 0.75 else ratio / 2 if words & others else 0.0

    best = max(known, key=likeness, default=None)
    return best if best is not None and likeness(best) else None


def misspelt_launch() -> list[tuple[str, str]]:
    """Variables without TSN_ that are nearly one of the launcher's, which is not set and takes their values; with its name."""
    absent = [row for row in LAUNCHER if row not in os.environ]
    found = []
    for name, value in sorted(os.environ.items()):
        for row in difflib.get_close_matches(name.upper(), absent, n=1, cutoff=0.85) if name not in LAUNCHER else []:
            with contextlib.suppress(ConfigurationError):
                ALL[row].parse(value, name)
                found.append((name, row))
    return found


def heap_bytes(explicit: int | str | None, on_gpu: bool) -> int:
    """Size of the symmetric heap in bytes: the argument, else TSN_HEAP_SIZE, else the default; whole 2 MiB pages."""
    name = "heap_bytes"
    if explicit is None:
        name, explicit = HEAP_SIZE.name, HEAP_SIZE.get() or (1 << 30 if on_gpu else 256 << 20)
    if not isinstance(explicit, int | str) or isinstance(explicit, bool):
        raise ConfigurationError(f'{name}={explicit!r} is neither a number of bytes nor text such as "512M"')
    size = parse_bytes(explicit, name) if isinstance(explicit, str) else explicit
    page = 2 << 20
    if size < page:
        raise ConfigurationError(f"{name}: a heap of {size} bytes is too small; the minimum is {page} (2M)")
    if size > MOST_BYTES:
        raise ConfigurationError(f"{name}: a heap of {size} bytes is more than any memory holds")
    return (size + page - 1) // page * page


def heap_limit(size: int, on_gpu: bool) -> int:
    """Bytes to which a heap of `size` bytes grows when it is full: TSN_HEAP_LIMIT, or `size` where that is more."""
    limit = HEAP_LIMIT.get()
    if limit is None:
        limit = 0 if on_gpu else 4 << 30
    page = 2 << 20
    return max(size, limit // page * page)


def load_kernels_early() -> None:
    """Where ranks may be on several nodes, have CUDA load the kernels of libraries when it starts; call before it does.

    Otherwise it loads each of them at its first launch, and keeps copies between host and GPU waiting until the kernels
    that run by then have ended. One that waits for data from another node, which the proxy copies, would not end.
    """
    ranks = _count("WORLD_SIZE", 1)
    if VIRTUAL_NODES.get() > 1 or _count("LOCAL_WORLD_SIZE", ranks) < ranks:
        os.environ.setdefault(MODULE_LOADING.name, "EAGER")


def _count(name: str, default: int) -> int:
    """A variable of torch's launchers."""
    return values.whole(0)(os.environ[name], name) if os.environ.get(name) else default


def device_kind() -> str:
    """`cuda` or `simulator`."""
    kind = DEVICE.get()
    if kind != "auto":
        return kind
    import torch

    return "cuda" if torch.cuda.is_available() else "simulator"
