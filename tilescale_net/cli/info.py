"""`python -m tilescale_net info`: versions, devices, compilers and networks, and a job's choice of them.

`doctor` and the benchmarks take the facts of the machine from here.
"""

import importlib.metadata
import os
import platform
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tilescale_net.errors import TileScaleError

# -- this machine: GPUs with links, NICs with locations, memory; read from CUDA, /sys and /proc -----------------------


SYS = Path("/sys")
PROC = Path("/proc")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def driver() -> str | None:
    """Version of NVIDIA's kernel driver; None without it."""
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", _read(PROC / "driver/nvidia/version"))
    return found.group(1) if found else None


def link(first: int, second: int) -> str:
    """The link from a GPU to another's memory: "NVLink", "PCIe", or "none". CUDA does not name the link, but
    reports whether atomic operations are carried out at its other end: over NVLink only."""
    from cuda.bindings import runtime

    attributes = runtime.cudaDeviceP2PAttr
    for name, attribute in (
        ("NVLink", attributes.cudaDevP2PAttrNativeAtomicSupported),
        ("PCIe", attributes.cudaDevP2PAttrAccessSupported),
    ):
        error, value = runtime.cudaDeviceGetP2PAttribute(attribute, first, second)
        if not int(error) and value:
            return name
    return "none"


def gpus() -> list[dict[str, Any]]:
    """One dict a GPU: name, compute_capability, memory (bytes), pci, numa_node, peers (ordinals it can map), links.
    `links`: the link to each of the peers, see `link`."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = []
    for ordinal in range(count):
        p: Any = torch.cuda.get_device_properties(ordinal)
        peers = [n for n in range(count) if n != ordinal and torch.cuda.can_device_access_peer(ordinal, n)]
        pci = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
        found.append(
            {
                "name": p.name,
                "compute_capability": f"{p.major}.{p.minor}",
                "memory": p.total_memory,
                "pci": pci,
                "numa_node": _read(SYS / "bus/pci/devices" / pci / "numa_node"),
                "peers": peers,
                "links": {str(other): link(ordinal, other) for other in peers},
            }
        )
    return found


def nics(gpu_places: list[str]) -> list[dict[str, Any]]:
    """One dict a NIC for remote memory: name, driver, path, numa_node, state, rate, near (ordinals of the nearest
    GPUs). `gpu_places`: PCI addresses of the GPUs, by ordinal."""
    folder = SYS / "class/infiniband"
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    found = []
    for name in names:
        device = folder / name / "device"
        port = folder / name / "ports/1"
        found.append(
            {
                "name": name,
                "driver": os.path.basename(os.path.realpath(device / "driver")) if (device / "driver").exists() else "",
                "path": os.path.realpath(device),
                "numa_node": _read(device / "numa_node"),
                "state": _read(port / "state").partition(": ")[2],
                "rate": _read(port / "rate"),
                "near": [],
            }
        )
    if found and gpu_places:
        from tilescale_net import _native

        paths = [nic["path"] for nic in found]
        for ordinal, pci in enumerate(gpu_places):
            place = os.path.realpath(SYS / "bus/pci/devices" / pci)
            for index in _native.nearest_devices(paths, place, len(paths)):
                found[index]["near"].append(ordinal)
    return found


def modules() -> set[str]:
    """Names of the loaded kernel modules."""
    return {line.split()[0] for line in _read(PROC / "modules").splitlines() if line}


def huge_pages() -> tuple[int, int]:
    """Huge pages that are reserved, and free."""
    values = dict(line.split(":") for line in _read(PROC / "meminfo").splitlines() if line.count(":") == 1)
    total, free = (int(values.get(name, "0").split()[0]) for name in ("HugePages_Total", "HugePages_Free"))
    return total, free


def shared_memory() -> tuple[int, int]:
    """Bytes of /dev/shm, and free ones; zeros without it."""
    try:
        s = os.statvfs("/dev/shm")
    except OSError:
        return 0, 0
    return s.f_blocks * s.f_frsize, s.f_bavail * s.f_frsize


# -- the command -------------------------------------------------------------------------------------------------------


PACKAGES = ("torch", "tilelang", "apache-tvm-ffi", "cuda-bindings", "nvidia-nvshmem-cu13", "mpich")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def collect() -> dict[str, Any]:
    """All facts, for JSON; an unknown fact is a text with the reason."""
    import torch

    import tilescale_net
    from tilescale_net.compiler import toolchain
    from tilescale_net.compiler.simulator import host_compiler
    from tilescale_net.runtime import fabric, settings

    found = gpus()
    if (wanted := settings.DEVICE.get()) != "auto":
        why = f"TSN_DEVICE={wanted}"
    else:
        why = f"torch shows {len(found)} GPUs" if found else "torch shows no GPU"
    return {
        "tilescale_net": tilescale_net.__version__,
        "folder": os.path.dirname(tilescale_net.__file__),
        "python": platform.python_version(),
        "driver": driver(),
        "cuda": torch.version.cuda,
        "packages": {name: _version(name) for name in PACKAGES},
        "settings": {name: os.environ[name] for name in settings.ALL if os.environ.get(name)},
        "device": {"kind": settings.device_kind(), "why": why},
        "gpus": found,
        "nics": _answer(lambda: nics([g["pci"] for g in found])),
        "nvcc": toolchain.find_tool("nvcc"),
        "host_compiler": _answer(lambda: " ".join(host_compiler.compiler())),
        "libfabric": _answer(fabric.library),
        "providers": _answer(providers),
        "network": {"one host": _answer(lambda: chosen(False)), "several hosts": _answer(lambda: chosen(True))},
    }


def _answer(question: Callable[[], Any]) -> Any:
    """The answer, or the text of the error."""
    try:
        return question()
    except ImportError as err:
        return f"native part: not built ({err}); run `python setup.py build_ext --inplace`"
    except TileScaleError as err:
        return str(err)


def providers() -> list[dict[str, Any]]:
    """One dict a libfabric provider: its domains, whether a NIC is behind it, and whether it reaches GPU memory."""
    from tilescale_net.runtime import fabric

    found: dict[str, dict[str, Any]] = {}
    for offer in fabric.offers():
        entry = found.setdefault(
            offer["provider"], {"provider": offer["provider"], "domains": [], "hardware": False, "device_memory": False}
        )
        if offer["domain"] not in entry["domains"]:
            entry["domains"].append(offer["domain"])
        entry["hardware"] |= offer["hardware"]
        entry["device_memory"] |= offer["device_memory"]
    return list(found.values())


def chosen(multi_host: bool) -> dict[str, Any]:
    """The network that ranks of different nodes would use, and why."""
    from tilescale_net import _native
    from tilescale_net.runtime import fabric, settings

    p = _native.Transport(fabric.transport_options(multi_host=multi_host)).properties()
    named = [row.name for row in (settings.PROVIDER, settings.FABRIC_INTERFACE, settings.CHAOS) if row.get()]
    if named:
        why = f"{' and '.join(named)} {'say' if len(named) > 1 else 'says'} so"
    elif p["link_gbps"] or p["device_memory"]:
        why = "a NIC comes before software"
    else:
        why = "no NIC for remote memory; of software providers, tcp comes first"
    keys = ("provider", "interface", "rails", "link_gbps", "device_memory")
    return {**{key: p[key] for key in keys}, "why": why}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The facts of `collect` as text, one per line."""
    yield f"tilescale_net {found['tilescale_net']}, Python {found['python']}"
    for name, version in found["packages"].items():
        yield f"  {name} {version or 'not installed'}"
    yield f"NVIDIA driver: {found['driver'] or 'none'}; CUDA of torch: {found['cuda'] or 'none, it is built without'}"
    yield f"device: {found['device']['kind']} ({found['device']['why']})"
    for ordinal, g in enumerate(found["gpus"]):
        peers = ", ".join(f"{n} ({g['links'][str(n)]})" for n in g["peers"]) or "none"
        yield (
            f"  GPU {ordinal}: {g['name']}, compute capability {g['compute_capability']}, {g['memory'] >> 30} GiB, PCI "
            f"{g['pci']}, NUMA node {g['numa_node'] or '?'}, maps GPUs {peers}"
        )
    if isinstance(found["nics"], str):
        yield f"NICs: {found['nics']}"
    for nic in found["nics"] if isinstance(found["nics"], list) else ():
        near = f", nearest to GPUs {', '.join(map(str, nic['near']))}" if nic["near"] else ""
        yield f"  NIC {nic['name']}: {nic['driver']}, {nic['state']}, {nic['rate']}, NUMA node {nic['numa_node']}{near}"
    yield f"nvcc: {found['nvcc'] or 'none (needed to compile kernels for a GPU)'}"
    yield f"host compiler: {found['host_compiler']}"
    library = found["libfabric"]
    yield f"libfabric: {library}" if isinstance(library, str) else f"libfabric {library['version']}: {library['path']}"
    for p in found["providers"] if isinstance(found["providers"], list) else ():
        marks = (", a NIC" if p["hardware"] else "") + (", reaches GPU memory" if p["device_memory"] else "")
        yield f"  provider {p['provider']}: {', '.join(p['domains'])}{marks}"
    for where, network in found["network"].items():
        if isinstance(network, str):
            yield f"between nodes of {where}: {network}"
        else:
            rails = f", {network['rails']} rails" if network["rails"] > 1 else ""
            yield f"between nodes of {where}: {network['provider']} on {network['interface']}{rails} ({network['why']})"
    for name, value in found["settings"].items():
        yield f"set: {name}={value}"
