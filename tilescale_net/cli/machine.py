"""What this machine has: GPUs with their links, NICs with their places, memory; read from CUDA, /sys and /proc."""

import os
import re
from pathlib import Path
from typing import Any

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
    """What a GPU reaches the memory of another by: "NVLink", "PCIe", or "none". CUDA does not name the link, but
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
    `links` has what each of the peers is reached by, see `link`."""
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
