"""All environment variables of the package: one row each. `python -m tilescale_net settings` prints them as a page.

    settings.TIMEOUT.get()          the value in force, checked

A variable is read at each use, so tests and notebooks may set it. `check` reads all of them; `init` and the launcher
call it, so a wrong value or a misspelt name is an error before anything starts. Only the standard library is imported
here: the launcher reads this table as well. (The native part, if built, checks TSN_CHAOS.)
"""

import contextlib
import difflib
import logging
import math
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tilescale_net.errors import ConfigurationError, FabricError

log = logging.getLogger("tilescale_net")

T = TypeVar("T")
N = TypeVar("N", int, float)
MOST_BYTES = 1 << 60  # more than any memory holds
SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Setting(Generic[T]):
    """A row of the table of settings.

    Attributes:
        name: of the environment variable.
        parse: (text, name) -> value; raises ConfigurationError that names the variable.
        default: the value if the variable is absent or empty.
        meaning: one line of markdown for docs/settings.md.
        shown: text of the default on the page, if the value alone is unclear.
    """

    name: str
    parse: Callable[[str, str], T]
    default: T
    meaning: str
    shown: str | None = None

    @property
    def default_text(self) -> str:
        """The default as markdown."""
        if self.shown is not None or self.default in (None, "", []):
            return self.shown or ""
        if isinstance(self.default, str):
            return f"`{self.default}`"
        if isinstance(self.default, int) and self.parse is parse_bytes:
            return _bytes_text(self.default)
        return f"{self.default:g}"

    def get(self) -> T:
        """The value in force. Raises ConfigurationError when the variable's text is not one of its values."""
        return self.value_of(os.environ.get(self.name, ""), self.name)

    def value_of(self, text: str, name: str) -> T:
        """The value of a text; an empty text means the default. Raises ConfigurationError that names `name`."""
        text = text.strip()
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            raise ConfigurationError(f"{name}={text!r} is not text in UTF-8")
        return self.parse(text, name) if text else self.default


def _bytes_text(nbytes: int) -> str:
    """A whole number of bytes as `parse_bytes` takes it, with the largest suffix that divides it."""
    suffix, unit = next((s, unit) for s, unit in reversed(SUFFIXES.items()) if nbytes % unit == 0)
    return f"{nbytes // unit}{suffix}"


def size_of(text: str) -> float:
    """Bytes from text such as `4096`, `64M` or `1.5GiB` (powers of two). Raises ValueError for other text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a size; write bytes with an optional K, M, G or T, e.g. 512M")
    return float(match.group(1)) * SUFFIXES[match.group(2).upper()]


def parse_bytes(text: str, name: str) -> int:
    """Bytes from text such as `4096`, `64M` or `1.5G` (powers of two). Raises ConfigurationError that names `name`."""
    try:
        found = size_of(text)
    except ValueError as err:
        raise ConfigurationError(f"{name}={err}") from None
    if found > MOST_BYTES:
        raise ConfigurationError(f"{name}={text!r} is more than any memory holds")
    return int(found)


# -- values -----------------------------------------------------------------------------------------------------------


def _text(value: str, name: str) -> str:
    """Any text."""
    return value


def _chaos(value: str, name: str) -> str:
    """Options of csrc/testing/chaos.cpp; any text without the native part, and so without a network."""
    try:
        from tilescale_net import _native
    except ImportError:
        return value
    try:
        if value != "off":
            _native.parse_chaos(value)
    except FabricError as err:
        raise ConfigurationError(f"{name}={value!r}: {str(err).removeprefix('chaos: ')}") from None
    return value


def _new_file(value: str, name: str) -> str:
    """Path of a file that can be written."""
    folder = os.path.dirname(os.path.abspath(value))
    if not os.path.isdir(folder):
        raise ConfigurationError(f"{name}={value}: there is no folder {folder}")
    if not can_be_written(value):
        raise ConfigurationError(f"{name}={value}: no file can be written there")
    return value


def can_be_written(path: str) -> bool:
    """Whether a file can be created or changed. Creates a missing one: permissions alone do not tell for root, nor for
    file systems without new files."""
    if os.path.exists(path):
        return os.access(path, os.W_OK) and not os.path.isdir(path)
    try:
        tempfile.TemporaryFile(dir=os.path.dirname(os.path.abspath(path))).close()
    except OSError:
        return False
    return True


def _words(value: str, name: str) -> list[str]:
    """Words as a shell splits them."""
    try:
        return shlex.split(value)
    except ValueError as err:
        raise ConfigurationError(f"{name}={value!r} cannot be split into words ({err})") from None


def _parts(known: tuple[str, ...]) -> Callable[[str, str], tuple[str, ...]]:
    """Some of these words, separated by commas; 1 for all, 0 for none."""

    def parse(value: str, name: str) -> tuple[str, ...]:
        if value in ("0", "1"):
            return known if value == "1" else ()
        found = tuple(word.strip() for word in value.split(","))
        for word in found:
            if word not in known:
                raise ConfigurationError(
                    f"{name}={value!r}: {word!r} is not one of {', '.join(known)}; 1 stands for all"
                )
        return found

    return parse


def _limited(kind: Callable[[str], N], minimum: N, maximum: N) -> Callable[[str, str], N]:
    """A number of a kind, float or int, within limits."""
    expected = "a whole number" if kind is int else "a number"

    def parse(value: str, name: str) -> N:
        try:
            found = kind(value)
        except ValueError:
            raise ConfigurationError(f"{name}={value!r} is not {expected}") from None
        if isinstance(found, float) and not math.isfinite(found):
            raise ConfigurationError(f"{name}={value!r} is not a finite number")
        if found < minimum:
            raise ConfigurationError(f"{name}={value} is below the minimum of {minimum:g}")
        if found > maximum:
            raise ConfigurationError(f"{name}={value} is above the maximum of {maximum:g}")
        return found

    return parse


def _number(minimum: float, maximum: float = 1e9) -> Callable[[str, str], float]:
    return _limited(float, minimum, maximum)


def _whole(minimum: int, maximum: int = 1 << 53) -> Callable[[str, str], int]:
    return _limited(int, minimum, maximum)


def _nodes(value: str, name: str) -> int | tuple[int, ...]:
    """A number of equal nodes, or the ranks of each, joined by plus signs."""
    if "+" not in value:
        return _whole(1)(value, name)
    return tuple(_whole(1)(part, name) for part in value.split("+"))


def _power_of_two(minimum: int) -> Callable[[str, str], int]:
    """A power of two."""
    at_least = _whole(minimum)

    def parse(value: str, name: str) -> int:
        found = at_least(value, name)
        if found & (found - 1):
            raise ConfigurationError(
                f"{name}={value} is not a power of two; write {1 << found.bit_length()} for example"
            )
        return found

    return parse


def _one_of(*names: str) -> Callable[[str, str], str]:
    """One of some words, in either case."""

    def parse(value: str, name: str) -> str:
        if value.lower() not in names:
            raise ConfigurationError(f"{name}={value!r} is not one of {', '.join(names)}")
        return value.lower()

    return parse


def _flag(value: str, name: str) -> bool:
    """0 or 1."""
    if value not in ("0", "1"):
        raise ConfigurationError(f"{name}={value!r} is neither 0 nor 1")
    return value == "1"


_CPUS = 1 << 16  # more than any machine has


def _cpus(value: str, name: str) -> str | list[int]:
    """CPUs such as `2,3` or `4-7`, or the word `node`."""
    if value == "node":
        return value
    return cpu_list(value, name)


def cpu_list(value: str, name: str) -> list[int]:
    """CPUs as Linux writes them: `2,3`, `4-7`."""
    found: list[int] = []
    try:
        for part in value.split(","):
            first, _, last = part.partition("-")
            some = range(int(first), int(last or first) + 1)
            if not some or some[-1] >= _CPUS:
                raise ValueError
            found += some
    except ValueError:
        raise ConfigurationError(f"{name}={value!r} is not a list such as 2,3 or 4-7") from None
    return found


# Of libfabric 1.17 to 2.x. A utility provider follows its base provider: `tcp;ofi_rxm`.
PROVIDERS = (
    *("bgq", "cxi", "efa", "efa-direct", "gni", "lnx", "lpp", "net", "opx", "psm", "psm2", "psm3", "rstream", "shm"),
    *("sm2", "sockets", "tcp", "ucx", "udp", "usnic", "verbs"),
    *("ofi_rxm", "ofi_rxd", "ofi_mrail"),
)

# Names of transports without libfabric, as in csrc/fabric/factory.cpp.
OWN_TRANSPORTS: tuple[str, ...] = ()


def _provider(value: str, name: str) -> str:
    """Name of a libfabric provider, or of a transport of our own. The request of a network shows whether libfabric
    offers it. With FI_PROVIDER_PATH, which adds providers, any name is accepted."""
    for part in value.split(";"):
        if part.lower() not in (*PROVIDERS, *OWN_TRANSPORTS) and not os.environ.get("FI_PROVIDER_PATH"):
            near = difflib.get_close_matches(part.lower(), PROVIDERS, n=1)
            advice = f"; did you mean {near[0]}?" if near else ""
            raise ConfigurationError(f"{name}={value!r}: libfabric has no provider {part!r}{advice}")
    return value


# -- the table --------------------------------------------------------------------------------------------------------

DEVICE = Setting(
    "TSN_DEVICE", _one_of("auto", "cuda", "simulator"), "auto",
    "`cuda`, `simulator` or `auto`: a GPU if there is one",
)  # fmt: skip
# Defaults of HEAP_SIZE and HEAP_LIMIT; on a GPU a heap does not grow.
HEAP_ON_GPU, HEAP_SIMULATED, LIMIT_SIMULATED = 1 << 30, 256 << 20, 4 << 30
HEAP_SIZE = Setting(
    "TSN_HEAP_SIZE", parse_bytes, None, "bytes of the symmetric heap (K, M, G)",
    f"{_bytes_text(HEAP_ON_GPU)} on a GPU, {_bytes_text(HEAP_SIMULATED)} in the simulator",
)  # fmt: skip
HEAP_LIMIT = Setting(
    "TSN_HEAP_LIMIT", parse_bytes, None,
    "bytes to which a full heap grows (K, M, G), whose addresses are reserved; `0`: it does not grow",
    f"{_bytes_text(LIMIT_SIMULATED)} in the simulator, `0` on a GPU",
)  # fmt: skip
TIMEOUT = Setting(
    "TSN_TIMEOUT", _number(0.01), 100.0,
    "seconds that a device-side wait or a collective call may take: the longest delay between two ranks' calls",
)  # fmt: skip
HEARTBEAT_TIMEOUT = Setting(
    "TSN_HEARTBEAT_TIMEOUT", _number(1.0), 15.0, "seconds of silence after which a rank of another host counts as lost"
)
VIRTUAL_NODES: Setting[int | tuple[int, ...]] = Setting(
    "VIRTUAL_NODES",
    _nodes,
    1,
    "split the ranks of a host into this many nodes, or nodes of these sizes, such as `3+5`, which communicate only through "
    "the fabric",
)
MODULE_LOADING = Setting(
    "CUDA_MODULE_LOADING", _text, "",
    "CUDA's own; the package sets `EAGER` for ranks on several nodes, unless you set it (see docs/proxy.md)",
)  # fmt: skip
NVTX = Setting(
    "TSN_NVTX",
    _flag,
    False,
    "1: calls of collectives, of `AllToAll` and of `deep_ep` in low-latency mode are NVTX ranges, for Nsight Systems",
)
LIBCUDA = Setting("TSN_LIBCUDA", _text, "", "the CUDA driver library", "`libcuda.so.1`")
CACHE_HOME = Setting("XDG_CACHE_HOME", _text, "", "folder that holds compiled kernels in `tilescale_net`", "`~/.cache`")
KERNELS = Setting("TSN_KERNELS", _text, "", "read-only folder of compiled kernels for GPUs, for example in an image")
TUNED = Setting("TSN_TUNED", _flag, True, "`0`: ignore the results of `tilescale_net.tuning`; rank 0's value counts")

DEPENDENT_LAUNCH = Setting(
    "TSN_DEPENDENT_LAUNCH", _flag, True,
    "launch kernels of all-reduces up to some MiB or by FP8, and of `AllReduceNorm`, while the kernel before ends (programmatic "
    "dependent launch); 0: after it",
)  # fmt: skip

SERVER_PARTS = ("deep_ep", "all_reduce", "norm")


def _server(name: str, server: str) -> Setting[tuple[str, ...]]:
    return Setting(
        name,
        _parts(SERVER_PARTS),
        (),
        f"parts of this package that {server}'s processes use, comma-separated: `deep_ep` for DeepEP, `all_reduce` for "
        "tensor parallelism, `norm` to fuse that with RMSNorm; `1`: all parts; see docs/integrations.md",
        shown="0",
    )


VLLM = _server("TSN_VLLM", "vLLM")
SGLANG = _server("TSN_SGLANG", "SGLang")

TRACE = Setting(
    "TSN_TRACE", _new_file, "",
    "file for a timeline of all ranks, which ui.perfetto.dev opens; see docs/debugging.md",
)  # fmt: skip
TRACE_EVENTS = Setting(
    "TSN_TRACE_EVENTS",
    _whole(16),
    1 << 16,
    "latest events of 64 bytes that a rank keeps of its host calls, of its kernels and of each proxy thread",
)

LIBFABRIC = Setting(
    "TSN_LIBFABRIC", _text, "",
    "the libfabric to load; by default the first of `/opt/amazon/efa`, the system's and the `mpich` wheel's",
)  # fmt: skip
PROVIDER = Setting(
    "TSN_PROVIDER",
    _provider,
    "",
    "libfabric provider, such as `efa`, `tcp`, `tcp;ofi_rxm`, `shm`; without an EFA device launch.sh runs `efa` and "
    "`efa-direct` over the emulated one of `bash tests/efa/build.sh`, in a checkout that has built it",
    "the best one offered",
)
FABRIC_INTERFACE = Setting(
    "TSN_FABRIC_INTERFACE", _text, "", "network interfaces or domains, comma-separated", "loopback on one host"
)
RAILS = Setting("TSN_RAILS", _whole(0), 0, "endpoints to use; 0: one per NIC near the GPU")
PROXY_QUEUES = Setting("TSN_PROXY_QUEUES", _whole(1), 1, "device queues; operations to a PE use queue PE % queues")
PROXY_THREADS: Setting[int | None] = Setting(
    "TSN_PROXY_THREADS", _whole(1), None, "proxy threads, each with separate endpoints",
    "1; up to 4 that share every PE if tcp serves GPUs of a host with 3 processors for each",
)  # fmt: skip
PROXY_PEER_THREADS: Setting[int | None] = Setting(
    "TSN_PROXY_PEER_THREADS", _whole(1), None,
    "proxy threads that share large puts and gets of one PE, in chunks of at least 64K",
    "1, or as above",
)  # fmt: skip
PROXY_CPUS: Setting[str | list[int]] = Setting(
    "TSN_PROXY_CPUS", _cpus, [], "CPUs to which the threads are pinned, such as `2,3`; `node`: CPUs near the GPU",
    "not pinned",
)  # fmt: skip
PROXY_CAPACITY = Setting("TSN_PROXY_CAPACITY", _power_of_two(2), 1024, "descriptors in a queue's ring")
PROXY_CHUNK = Setting("TSN_PROXY_CHUNK", parse_bytes, 1 << 20, "bytes of a put's chunks")
PROXY_STAGING = Setting(
    "TSN_PROXY_STAGING", _flag, False, "1: use pinned staging memory even if the network reaches the heap"
)
PROXY_STATS = Setting("TSN_PROXY_STATS", _flag, False, "1: print the proxy's counters when it stops")
CHAOS = Setting("TSN_CHAOS", _chaos, "", "make the network unreliable, see below")

SIM_SEED = Setting("TSN_SIM_SEED", _whole(0), 0, "seed of the schedule and of the order in which remote writes arrive")
SIM_VISIBILITY = Setting(
    "TSN_SIM_VISIBILITY", _one_of("eager", "late", "random"), "random",
    "remote writes arrive at once (`eager`), as late as the memory model allows (`late`), or at random (`random`)",
)  # fmt: skip
SIM_RACES = Setting(
    "TSN_SIM_RACES", _flag, False,
    "`1`: follow transfers and signals between ranks, and report accesses that nothing orders (`DataRace`)",
)  # fmt: skip
SIM_SMS = Setting("TSN_SIM_SMS", _whole(1), 132, "SMs of the simulated GPU, which limit the number of blocks in flight")
SIM_STALL = Setting(
    "TSN_SIM_STALL", _number(0.1), 60.0,
    "seconds without progress after which a kernel counts as hung; at least twice `TSN_TIMEOUT`",
)  # fmt: skip
SIM_STACK = Setting("TSN_SIM_STACK", parse_bytes, 256 << 10, "bytes of stack per simulated thread")
SIM_CXXFLAGS: Setting[list[str]] = Setting(
    "TSN_SIM_CXXFLAGS", _words, [], "further flags of the host compiler, such as `-g -O0` for a debugger"
)
CXX: Setting[list[str]] = Setting("CXX", _words, [], "the host compiler", "g++, clang++ or c++")

GPUS = Setting(
    "GPUS", _whole(1), 2, "ranks on this host: one per GPU, or simulated ranks without a GPU",
)  # fmt: skip
NODES = Setting("NODES", _whole(1), 1, "hosts of the job; run the same line on every host")
NODE_RANK = Setting("NODE_RANK", _whole(0), 0, "this host's index")
MASTER_ADDR = Setting("MASTER_ADDR", _text, "", "name or address of the host where rank 0 listens")
MASTER_PORT = Setting(
    "MASTER_PORT", _whole(1, 65535), 29500,
    "rank 0's port; by default any free port on one host, and a port derived from job and step under srun",
)  # fmt: skip
OUTPUT = Setting(
    "TSN_OUTPUT", _one_of("all", "first"), "first", "`all`: show the output of all ranks, not only of rank 0"
)
JOB = Setting(
    "TSN_JOB",
    _text,
    "",
    "name of the job: equal on all its ranks, different from other jobs. A random secret name (`openssl rand -hex 16`) keeps "
    "other processes from acting as a rank, see SECURITY.md",
    "random on one host, by launch.sh; job and step under srun",
)
PYTHON = Setting(
    "TSN_PYTHON",
    _text,
    "",
    "launch.sh: interpreter to use unchanged; otherwise an active virtual environment, `.venv`, python3 or a new `.venv`",
)
TORCH = Setting(
    "TSN_TORCH",
    _text,
    "",
    "launch.sh: the torch of a new environment: `cpu` for one without CUDA, from PyTorch's index, or a requirement or wheel",
    "PyPI's, with CUDA",
)
VENV = Setting("TSN_VENV", _text, "", "launch.sh: folder of that virtual environment", "`.venv`")
CHECKOUT = Setting(
    "TSN_CHECKOUT", _text, "", "a checkout's folder, for scripts around it; the package does not read it"
)
BUILD = Setting("TSN_BUILD", _flag, True, "launch.sh: 0: never build the native code")
LIBFABRIC_INCLUDE = Setting(
    "TSN_LIBFABRIC_INCLUDE", _text, "",
    "the build: folder that holds `rdma/fabric.h`; `none`: build without the fabric", "the compiler's",
)  # fmt: skip
STORE = Setting("TSN_STORE", _text, "", "address of the launcher's store; set by the launcher, not for users")
STORE_FD = Setting(
    "TSN_STORE_FD", _whole(0), 0, "file of the store's socket, for rank 0; set by the launcher, not for users", ""
)

TEST_ORDERING = Setting(
    "TSN_TEST_ORDERING",
    _one_of("last_chunk"),
    "",
    "`last_chunk`: rely on the last chunk for ordering, as some systems do, which is wrong: shows why the proxy counts arrivals",
)
CHAOS_SEEDS = Setting("TSN_CHAOS_SEEDS", _whole(1), 240, "seeds of the nightly test on unreliable networks")

ALL: dict[str, Setting[Any]] = {row.name: row for row in list(globals().values()) if isinstance(row, Setting)}
# Variables of the launcher, which checks them itself; elsewhere other programs may use these names.
LAUNCHER = ("GPUS", "NODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "VIRTUAL_NODES")

# Variables that the launcher sets for its ranks; not for users.
HANDED_OVER = ("TSN_STORE", "TSN_STORE_FD")


def check() -> None:
    """Read every variable that is set. Raises ConfigurationError: a value that its variable does not take, or a name
    with TSN_ that no variable has."""
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
    """The most similar known name, by words or letters; None if there is none."""
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
    """Set variables without TSN_ that resemble an unset one of the launcher and suit it as values; with its name."""
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
        name, explicit = HEAP_SIZE.name, HEAP_SIZE.get() or (HEAP_ON_GPU if on_gpu else HEAP_SIMULATED)
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
    """Bytes to which a heap of `size` bytes grows when it is full: TSN_HEAP_LIMIT, or `size` if larger."""
    limit = HEAP_LIMIT.get()
    if limit is None:
        limit = 0 if on_gpu else LIMIT_SIMULATED
    page = 2 << 20
    return max(size, limit // page * page)


def load_kernels_early() -> None:
    """If ranks may be on several nodes, have CUDA load library kernels when it starts; call it before that. Otherwise
    CUDA loads a kernel at its first launch, and copies between host and GPU wait until running kernels have ended. A
    kernel that waits for data from another node, which the proxy copies, would not end."""
    ranks = _count("WORLD_SIZE", 1)
    if has_virtual_nodes() or _count("LOCAL_WORLD_SIZE", ranks) < ranks:
        os.environ.setdefault(MODULE_LOADING.name, "EAGER")


def has_virtual_nodes() -> bool:
    """Whether a host's ranks are split into several nodes."""
    return VIRTUAL_NODES.get() != 1


def sizes_of_virtual_nodes(ranks: int, what: str) -> tuple[int, ...]:
    """Ranks of each of a host's nodes.

    Args:
        ranks: of the host. what: their name in errors.

    Raises:
        ConfigurationError: VIRTUAL_NODES does not divide them, or its sizes have another sum.
    """
    wanted = VIRTUAL_NODES.get()
    if isinstance(wanted, tuple):
        if sum(wanted) != ranks:
            shown = "+".join(map(str, wanted))
            raise ConfigurationError(
                f"VIRTUAL_NODES={shown} are {sum(wanted)} ranks, which are not {what}; choose sizes whose sum is {ranks}"
            )
        return wanted
    if ranks % wanted:
        raise ConfigurationError(
            f"VIRTUAL_NODES={wanted} does not divide {what}; choose a divisor of {ranks}, or the ranks of each node, such as "
            "3+5"
        )
    return (ranks // wanted,) * wanted


def _count(name: str, default: int) -> int:
    """A variable of torch's launchers."""
    return _whole(0)(os.environ[name], name) if os.environ.get(name) else default


def device_kind() -> str:
    """`cuda` or `simulator`."""
    kind = DEVICE.get()
    if kind != "auto":
        return kind
    import torch

    return "cuda" if torch.cuda.is_available() else "simulator"


# -- the page ---------------------------------------------------------------------------------------------------------

# The first row of each section, and the section's title.
SECTIONS = {
    "TSN_DEVICE": "", "TSN_LIBFABRIC": "Network", "TSN_SIM_SEED": "Simulator", "GPUS": "Launcher and build",
    "TSN_TEST_ORDERING": "Tests",
}  # fmt: skip

HEAD = """# Settings
The package reads these environment variables. A wrong value, or an unknown name that begins with TSN_, is an error that
names the variable. All ranks of a job should have the same values. `python -m tilescale_net settings` prints this page, from the table in
`tilescale_net/runtime/settings.py`.
"""

CHAOS_FIELDS = {
    "seed": "of the random numbers (1)",
    "reorder": "probability that an operation or an arrival is delayed and overtaken by later ones",
    "delay_us": "the longest delay, in microseconds (100)",
    "split": "probability that a write travels in several pieces, which arrive in any order",
    "eagain": 'probability that a post returns "try again"',
    "depth": "outstanding operations of an endpoint", "max_write": "bytes of the largest transfer",
    "imm_bits": "width of immediates (32)", "error": "probability that an operation fails",
    "error_after": "number of the first operation that fails; all later ones fail too",
    "error_code": "error of the failed operations (5, EIO); 104 (ECONNRESET) simulates a dead process",
    "stall_after": "number of the operation after which nothing moves, as with a dead peer",
}  # fmt: skip

NOTES = {
    "Network": "\n".join(
        [
            "`TSN_CHAOS=on`, or some of these, comma-separated, such as `seed=7,reorder=0.3,delay_us=200`:",
            "",
            "| field | meaning |",
            "| --- | --- |",
            *(f"| `{name}` | {text} |" for name, text in CHAOS_FIELDS.items()),
            "",
            "`on` stands for `seed=1,reorder=0.3,split=0.2,eagain=0.1`.",
        ]
    ),
    "Simulator": "A seed gives every launch and every rank its own schedule, which the next run repeats.",
    "Launcher and build": (
        "`bash launch.sh script.py` and `python -m tilescale_net run script.py` read the first six; `run` has flags for most "
        "of them. Without them ranks read the variables of torchrun, srun or mpirun."
    ),
}


def page() -> str:
    """docs/settings.md."""
    lines, note = [HEAD], ""
    for row in ALL.values():
        if (title := SECTIONS.get(row.name)) is not None:
            lines += [*([f"\n{note}"] * bool(note)), *([f"\n## {title}"] * bool(title))]
            lines += ["| variable | meaning | default |", "| --- | --- | --- |"]
            note = NOTES.get(title, "")
        lines.append(f"| `{row.name}` | {row.meaning} | {row.default_text} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"
