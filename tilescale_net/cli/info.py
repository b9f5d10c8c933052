"""`python -m tilescale_net info`: versions, devices, compilers and networks, and what a job would use of them."""

import importlib.metadata
import os
import platform
from collections.abc import Callable
from typing import Any

from tilescale_net.cli import machine
from tilescale_net.cli.network_info import chosen, libfabric, providers
from tilescale_net.errors import TileScaleError

PACKAGES = ("torch", "tilelang", "apache-tvm-ffi", "cuda-bindings", "nvidia-nvshmem-cu13", "mpich")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def collect() -> dict:
    """Everything, as JSON holds it. What cannot be found out is a text with the reason."""
    import tilescale_net
    from tilescale_net.compiler import toolchain
    from tilescale_net.compiler.simulator import host_compiler
    from tilescale_net.runtime import settings

    gpus = machine.gpus()
    return {
        "tilescale_net": tilescale_net.__version__,
        "folder": os.path.dirname(tilescale_net.__file__),
        "python": platform.python_version(),
        "driver": machine.driver(),
        "cuda": _cuda(),
        "packages": {name: _version(name) for name in PACKAGES},
        "settings": {name: os.environ[name] for name in settings.ALL if os.environ.get(name)},
        "device": _device(gpus),
        "gpus": gpus,
        "nics": _said(lambda: machine.nics([g["pci"] for g in gpus])),
        "nvcc": toolchain.find_tool("nvcc"),
        "host_compiler": _said(lambda: " ".join(host_compiler.compiler())),
        "libfabric": _said(libfabric),
        "providers": _said(providers),
        "network": {"one host": _said(lambda: chosen(False)), "several hosts": _said(lambda: chosen(True))},
    }


def _said(question: Callable[[], Any]) -> Any:
    """The answer, or the text of the error."""
    try:
        return question()
    except ImportError as err:
        return f"native part: not built ({err}); run `python setup.py build_ext --inplace`"
    except TileScaleError as err:
        return str(err)


def _device(gpus: list[dict]) -> dict:
    from tilescale_net.runtime import settings

    wanted = settings.DEVICE.get()
    if wanted != "auto":
        why = f"TSN_DEVICE={wanted}"
    else:
        why = f"torch shows {len(gpus)} GPUs" if gpus else "torch shows no GPU"
    return {"kind": settings.device_kind(), "why": why}


def _cuda() -> str | None:
    """The version of CUDA that torch was built for."""
    import torch

    return torch.version.cuda
