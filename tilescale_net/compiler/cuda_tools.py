"""CUDA's compiler and other tools of this machine, and the architecture of its GPU."""

import importlib.metadata
import importlib.util
import os
import shutil
from pathlib import Path

from tilescale_net.errors import ConfigurationError


def find_tool(name: str) -> str | None:
    """Path of a CUDA tool: in CUDA_HOME or CUDA_PATH, on PATH, or in one of NVIDIA's wheels; None if not found."""
    folders = [os.path.join(os.environ[v], "bin") for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)]
    spec = importlib.util.find_spec("nvidia")
    wheels = [
        str(p) for root in (spec.submodule_search_locations or () if spec else ()) for p in Path(root).glob("*/bin")
    ]
    return (
        shutil.which(name, path=os.pathsep.join(folders))
        or shutil.which(name)
        or shutil.which(name, path=os.pathsep.join(sorted(wheels)))
    )


def find_nvcc() -> str:
    """Path of nvcc. Raises ConfigurationError if not found."""
    found = find_tool("nvcc")
    if found is None:
        raise ConfigurationError(
            "no CUDA compiler was found (CUDA_HOME, PATH and NVIDIA's wheels were searched for nvcc); install one with "
            "`pip install nvidia-cuda-nvcc` in your toolkit's version, or run in the simulator with TSN_DEVICE=simulator"
        )
    return found


def gpu_arch() -> str:
    """`sm_XX` of the current GPU, with the architecture-specific suffix where it has one (sm_90a)."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigurationError(
            "target 'cuda' needs a GPU to know its architecture, and none is visible; name one, such as "
            "target={'kind': 'cuda', 'arch': 'sm_90'}, to compile without running, or use target='simulator'"
        )
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")
