"""`python -m tilescale_net doctor`: the requirements of a job on this machine, their state, and remedies.

Exit code 0 if no requirement is missing, else 1. Warnings are about limits of speed or size.
"""

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from tilescale_net.cli import info
from tilescale_net.errors import TileScaleError
from tilescale_net.launch import set_up
from tilescale_net.runtime import private_folder, settings

GOOD, WARNING, MISSING, UNUSED = "ok", "warning", "missing", "not needed"
DRIVER = 13000  # CUDA 13, as the driver counts
NVCC = (13, 0)
SET_UP = 6 << 30  # disk space of packages with a CUDA torch
EFA_LIBFABRIC = (1, 18)  # the first that registers GPU memory by DMABUF for EFA
# Measured by benchmark/start_up.py over tcp; plus descriptors of torch, tilelang and a training program.
FILES_OF_A_PEER, FILES_OF_A_PROGRAM = 4, 200


@dataclass(frozen=True)
class Finding:
    """Outcome of a check. `what`: the checked item. `state`: GOOD, WARNING, MISSING or UNUSED. `found`: the present
    state. `remedy`: the action to take, if any."""

    what: str
    state: str
    found: str
    remedy: str = ""


def _judge(what: str, good: bool, found: str, remedy: str, bad: str = WARNING, unused: str = "") -> Finding:
    """GOOD, or `bad` with the remedy; UNUSED if `unused` has a reason."""
    if unused:
        return Finding(what, UNUSED, f"{found}; {unused}" if found else unused)
    return Finding(what, GOOD, found) if good else Finding(what, bad, found, remedy)


class Doctor:
    """All checks; each yields findings. Shared facts are determined once."""

    def __init__(self) -> None:
        self.gpus = info.gpus()
        self.loaded = info.modules()

    def run(self) -> Iterator[Finding]:
        """The findings of all checks."""
        build = (self.packages, self.native, self.host_compiler, self.driver, self.nvcc)
        memory = (
            self.peers,
            self.gpu_network_memory,
            self.shared_memory,
            self.memlock,
            self.open_files,
            self.huge_pages,
        )
        for check in (*build, *memory, self.cache, self.cache_of_tilelang, self.disk, self.libfabric, self.nics):
            yield from check()

    def packages(self) -> Iterator[Finding]:
        yield Finding("Python", GOOD, f"{platform.python_version()}, {sys.executable} (>=3.10)")
        for wanted in set_up.dependencies():
            name = set_up.name_of(wanted)
            if name not in ("torch", "tilelang"):
                continue
            limits = wanted[len(name) :]
            try:
                found = f"{metadata.version(name)} ({limits})"
            except metadata.PackageNotFoundError:
                found = "none"
            yield _judge(name, set_up.satisfied(wanted), found, f"pip install '{wanted}'", MISSING)

    def native(self) -> Iterator[Finding]:
        for name, use in (("_native", "proxy and fabric"), ("_simulator", "simulator")):
            try:
                __import__(f"tilescale_net.{name}")
                yield Finding(f"native part: {use}", GOOD, name)
            except ImportError as err:
                remedy = "python setup.py build_ext --inplace, or pip install . (a C++17 compiler is needed)"
                yield Finding(f"native part: {use}", MISSING, str(err), remedy)

    def host_compiler(self) -> Iterator[Finding]:
        from tilescale_net.compiler.simulator import host_compiler

        try:
            yield Finding("C++ compiler", GOOD, " ".join(host_compiler.compiler()))
        except TileScaleError as err:
            state = WARNING if self.gpus else MISSING
            yield Finding(
                "C++ compiler", state, str(err), "apt-get install g++; the simulator compiles kernels with it"
            )

    def driver(self) -> Iterator[Finding]:
        from tilescale_net.launch import run

        if not os.path.exists("/dev/nvidiactl") and not run.visible_gpus():
            yield Finding("GPUs", UNUSED, "none; kernels run in the simulator")
            return
        from cuda.bindings import driver

        status, version = driver.cuDriverGetVersion()
        found = f"{len(self.gpus)} GPUs, driver for CUDA {version // 1000}.{version % 1000 // 10}"
        if int(status) or version < DRIVER:
            yield Finding("CUDA driver", MISSING, found, "install a driver of the 580 series or newer (CUDA 13)")
        elif not self.gpus:
            remedy = "nvidia-smi says why; in a container start with --gpus all; a torch built for CUDA is needed"
            yield Finding("CUDA driver", MISSING, found, remedy)
        else:
            yield Finding("CUDA driver", GOOD, found)

    def nvcc(self) -> Iterator[Finding]:
        from tilescale_net.compiler import toolchain

        found = toolchain.find_tool("nvcc")
        if not found:
            remedy, unused = "pip install nvidia-cuda-nvcc, or set CUDA_HOME", "" if self.gpus else "none"
            yield _judge("nvcc", False, "" if unused else "none", remedy, MISSING, unused)
            return
        version = _nvcc_version(found)
        text = f"{'.'.join(map(str, version)) or 'a version that it does not print'}, {found}"
        remedy = "pip install 'nvidia-cuda-nvcc>=13.0,<13.1', or set CUDA_HOME to a newer toolkit"
        yield _judge("nvcc", not self.gpus or version >= NVCC, text, remedy)

    def peers(self) -> Iterator[Finding]:
        if len(self.gpus) < 2:
            yield Finding("peer access between GPUs", UNUSED, f"{len(self.gpus)} GPUs")
            return
        apart = [f"{a}-{b}" for a, g in enumerate(self.gpus) for b in range(a) if b not in g["peers"]]
        remedy = (
            "put ranks of GPUs that cannot map each other on different nodes with VIRTUAL_NODES; disable ACS on PCIe"
        )
        found = f"none between {', '.join(apart)}" if apart else f"all {len(self.gpus)} map each other"
        yield _judge("peer access between GPUs", not apart, found, remedy)
        yield self._ipc()

    def _ipc(self) -> Finding:
        """Whether processes can share memory: makes a handle, which containers may forbid."""
        from cuda.bindings import runtime

        from tilescale_net.runtime.cuda_memory import check

        remedy = "start the container with --ipc=host and one PID namespace for all ranks of a node"
        try:
            address = check(runtime.cudaMalloc(2 << 20), "cudaMalloc")
            try:
                check(runtime.cudaIpcGetMemHandle(address), "cudaIpcGetMemHandle")
            finally:
                runtime.cudaFree(address)
        except TileScaleError as err:
            return Finding("CUDA IPC", MISSING, str(err), remedy)
        return Finding("CUDA IPC", GOOD, "handles can be made")

    def gpu_network_memory(self) -> Iterator[Finding]:
        subject = "GPU memory for NICs (DMABUF, peermem)"
        if not self.gpus or not info.nics([]):
            yield Finding(subject, UNUSED, "needs a GPU and a NIC for remote memory")
            return
        found = ["DMABUF"] * _dmabuf() + sorted(self.loaded & {"nvidia_peermem", "efa_nv_peermem"})
        remedy = (
            "use the open kernel modules of the driver (DMABUF), or modprobe nvidia_peermem; until then data are staged"
        )
        yield _judge(subject, bool(found), ", ".join(found) or "neither", remedy)

    def shared_memory(self) -> Iterator[Finding]:
        total, free = info.shared_memory()
        found = f"{free >> 20} of {total >> 20} MiB are free"
        if self.gpus:
            yield _judge("/dev/shm", free > 64 << 20, found, _SHM)
            return
        heaps = 2 * settings.heap_bytes(None, False)
        text = f"{found}; two simulated ranks take {heaps >> 20} MiB when full"
        yield _judge("/dev/shm", free >= heaps, text, _SHM + ", or lower TSN_HEAP_SIZE")

    def cache(self) -> Iterator[Finding]:
        from tilescale_net.compiler.simulator import cache

        folder = cache.folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as err:
            remedy = "name another folder in XDG_CACHE_HOME; without it kernels are compiled again by every process"
            yield Finding("cache of kernels", WARNING, f"{folder}: {err.strerror}", remedy)
            return
        free = shutil.disk_usage(folder).free
        remedy = "free some space there, or name another folder in XDG_CACHE_HOME"
        yield _judge("cache of kernels", free > 1 << 30, f"{folder}, {free >> 20} MiB free", remedy)

    def cache_of_tilelang(self) -> Iterator[Finding]:
        what, remedy = "tilelang's cache", "name a folder that can be written in TILELANG_CACHE_DIR"
        folder = os.environ.get(private_folder.TILELANG) or os.path.expanduser("~/.tilelang/cache")
        if folder == str(private_folder.of_user("tilelang")):
            text = f"{folder}, since the home cannot be written; programs that launch.sh does not start fail"
            yield Finding(what, WARNING, text, remedy)
        else:
            good = private_folder.can_be_made(folder)
            yield _judge(what, good, folder if good else f"{folder} cannot be written", remedy, MISSING)

    def disk(self) -> Iterator[Finding]:
        root = set_up.ROOT
        if not os.path.exists(os.path.join(root, "launch.sh")):
            return  # installed: no set-up here
        free = shutil.disk_usage(root).free
        there = os.path.isdir(settings.VENV.get() or os.path.join(root, ".venv")) or free >= SET_UP
        remedy = f"launch.sh needs {SET_UP >> 30} GiB for packages; free some, or name a folder in TSN_VENV"
        yield _judge("disk of the checkout", there, f"{free >> 20} MiB free in {root}", remedy)

    def memlock(self) -> Iterator[Finding]:
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        found = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"
        unused = "" if info.nics([]) else "NICs for remote memory need it"
        enough = limit == resource.RLIM_INFINITY or limit >= settings.heap_bytes(None, bool(self.gpus))
        remedy = "ulimit -l unlimited (limits.conf: * - memlock unlimited; docker: --ulimit memlock=-1)"
        yield _judge("memory that may be locked", enough, found, remedy, MISSING, unused)

    def open_files(self) -> Iterator[Finding]:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY:
            yield Finding("open files", GOOD, "unlimited")
            return
        ranks = max(0, limit - FILES_OF_A_PROGRAM) // FILES_OF_A_PEER
        remedy = "ulimit -n 65536 (limits.conf: * - nofile 65536; docker: --ulimit nofile=65536)"
        yield _judge("open files", ranks >= 64, f"{limit}, enough for jobs of about {ranks} ranks over tcp", remedy)

    def _efa(self) -> list[dict[str, Any]]:
        return [nic for nic in info.nics([]) if nic["driver"] == "efa"]

    def huge_pages(self) -> Iterator[Finding]:
        total, free = info.huge_pages()
        remedy = "sysctl vm.nr_hugepages=5128, or FI_EFA_USE_HUGE_PAGE=0"
        unused = "" if self._efa() else "EFA uses some"
        yield _judge("huge pages", bool(free), f"{free} of {total} are free", remedy, unused=unused)

    def libfabric(self) -> Iterator[Finding]:
        remedy = "pip install mpich (has one inside), apt-get install libfabric1, or name a library in TSN_LIBFABRIC"
        try:
            from tilescale_net import _native
            from tilescale_net.runtime import fabric

            library = fabric.library()
            properties = _native.Transport(fabric.transport_options()).properties()
        except ImportError:
            return  # reported above
        except TileScaleError as err:
            found, headers, advice = str(err).partition("; install the headers")
            # Without libfabric's headers the native part's error has the remedy: a library alone would not help.
            yield Finding(
                "libfabric", WARNING, f"{found}; ranks of one node do without", (headers + advice)[2:] or remedy
            )
            return
        yield Finding("libfabric", GOOD, f"{library['version']}, {library['path']}")
        yield Finding("provider on this host", GOOD, f"{properties['provider']} on {properties['interface']}")

    def nics(self) -> Iterator[Finding]:
        found = info.nics([])
        if not found:
            yield Finding("NICs for remote memory", UNUSED, "none; between hosts data go through tcp")
            return
        down = [nic["name"] for nic in found if nic["state"] != "ACTIVE"]
        text = f"{len(found)}, not active: {', '.join(down)}" if down else f"{len(found)}, all active"
        yield _judge("NICs for remote memory", not down, text, "ibstat and the cable's link say why")
        if self._efa():
            yield from self._efa_needs()

    def _efa_needs(self) -> Iterator[Finding]:
        from tilescale_net.runtime import fabric

        installer = "install AWS's EFA software (its libfabric in /opt/amazon/efa is found automatically)"
        verbs = [name for name in _listed("/dev/infiniband") if name.startswith("uverbs")]
        if not verbs or not os.access(f"/dev/infiniband/{verbs[0]}", os.R_OK | os.W_OK):
            remedy = "docker: --device /dev/infiniband for each uverbs device"
            yield Finding("EFA: devices", MISSING, "/dev/infiniband/uverbs* cannot be opened", remedy)
        try:
            version = fabric.library()["version"]
            offered = any(o["provider"].startswith("efa") for o in fabric.offers())
        except TileScaleError as err:
            yield Finding("EFA: provider", MISSING, str(err), installer)
            return
        if not offered:
            yield Finding("EFA: provider", MISSING, f"libfabric {version} does not offer efa", installer)
        else:
            new = tuple(int(n) for n in version.split(".")[:2]) >= EFA_LIBFABRIC
            yield _judge("EFA: provider", new, f"libfabric {version} {'offers efa' if new else 'is old'}", installer)


def _nvcc_version(path: str) -> tuple[int, ...]:
    """Version of an nvcc; () if it prints none."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return tuple(map(int, found.groups())) if found else ()


def _dmabuf() -> bool:
    """Whether the driver exports GPU memory as DMABUF."""
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
    try:
        status, device = driver.cuDeviceGet(0)
        return not int(status) and bool(driver.cuDeviceGetAttribute(attribute, device)[1])
    except RuntimeError:  # there is no driver
        return False


_SHM = "mount -o remount,size=8G /dev/shm (docker: --shm-size=8g)"


def _listed(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def text(findings: list[Finding]) -> str:
    """Findings line by line, each with its remedy below."""
    width = max(len(f.what) for f in findings)
    out = []
    for f in findings:
        out.append(f"{f.state:>10}  {f.what.ljust(width)}  {f.found}")
        if f.remedy:
            out.append(f"{'':>10}  {'':{width}}  -> {f.remedy}")
    return "\n".join(out)
