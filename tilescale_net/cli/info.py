"""`python -m tilescale_net info`: versions, devices, compilers and networks, and what a job would use of them."""

import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any

from tilescale_net.cli import machine
from tilescale_net.errors import TileScaleError

PACKAGES = ("torch", "tilelang", "apache-tvm-ffi", "cuda-bindings", "nvidia-nvshmem-cu13", "mpich")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def collect() -> dict[str, Any]:
    """Everything, as JSON holds it. What cannot be found out is a text with the reason."""
    import torch

    import tilescale_net
    from tilescale_net.compiler import toolchain
    from tilescale_net.compiler.simulator import host_compiler
    from tilescale_net.runtime import fabric, settings

    gpus = machine.gpus()
    if (wanted := settings.DEVICE.get()) != "auto":
        why = f"TSN_DEVICE={wanted}"
    else:
        why = f"torch shows {len(gpus)} GPUs" if gpus else "torch shows no GPU"
    return {
        "tilescale_net": tilescale_net.__version__,
        "folder": os.path.dirname(tilescale_net.__file__),
        "python": platform.python_version(),
        "driver": machine.driver(),
        "cuda": torch.version.cuda,
        "packages": {name: _version(name) for name in PACKAGES},
        "settings": {name: os.environ[name] for name in settings.ALL if os.environ.get(name)},
        "device": {"kind": settings.device_kind(), "why": why},
        "gpus": gpus,
        "nics": _answer(lambda: machine.nics([g["pci"] for g in gpus])),
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
    """What `collect` has found, as text, one fact a line."""
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
