"""`python -m tilescale_net info`: versions, devices, compilers and networks as this installation finds them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil

from tilescale_net.errors import TileScaleError


def lines() -> list[str]:
    """The report, one fact a line; what is missing is named with what it is needed for."""
    import torch

    import tilescale_net
    from tilescale_net.runtime import settings

    out = [f"tilescale_net {tilescale_net.__version__}, Python {platform.python_version()}, torch {torch.__version__}"]
    for name in ("tilelang", "apache-tvm-ffi", "cuda-bindings", "nvidia-nvshmem-cu13", "mpich"):
        try:
            out.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            out.append(f"{name}: not installed")
    out.append(f"device: {settings.device_kind()}, {torch.cuda.device_count()} GPUs")
    for i in range(torch.cuda.device_count()):
        out.append(f"  GPU {i}: {torch.cuda.get_device_name(i)}")
    nvcc = shutil.which("nvcc") or "not on PATH (needed to compile kernels for a GPU)"
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    out.append(f"nvcc: {nvcc}")
    out.append(f"host compiler: {compiler or 'none (the simulator needs g++ or clang++)'}")
    return out + _fabric_lines()


def _fabric_lines() -> list[str]:
    try:
        from tilescale_net import fabric

        found = fabric.library()
        out = [f"libfabric {found['version']}: {found['path']}"]
        for offer in fabric.offers():
            reach = "loopback" if offer["loopback"] else offer["address"]
            memory = ", reaches GPU memory" if offer["device_memory"] else ""
            out.append(f"  provider {offer['provider']}, domain {offer['domain']}, {reach}{memory}")
        return out
    except ImportError as err:
        return [f"native part: not built ({err}); run `python setup.py build_ext --inplace`"]
    except TileScaleError as err:
        return [f"libfabric: {err}"]
