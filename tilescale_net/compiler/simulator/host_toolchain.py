"""Which C++ compiler the machine has for the simulator, and the headers that it compiles with."""

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from tilescale_net.compiler.toolchain import DEVICE_DIR
from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import settings


@functools.cache
def compiler() -> tuple[str, ...]:
    """The host compiler's command: $CXX, g++, clang++ or c++. Raises ConfigurationError if none is found."""
    named = settings.CXX.get()
    candidates = [named] if named else [["g++"], ["clang++"], ["c++"]]
    for command in candidates:
        if command and shutil.which(command[0]):
            return tuple(command)
    tried = " ".join(named) or "g++, clang++ and c++"
    raise ConfigurationError(
        f"the simulator needs a C++17 compiler and found none ({tried}); install g++ or clang, or name one in CXX"
    )


@functools.cache
def compiler_identity() -> str:
    return identity(compiler())


@functools.cache
def identity(command: tuple[str, ...]) -> str:
    """What a compiler's command and version are, as text."""
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    return " ".join(command) + "\n" + done.stdout


@functools.cache
def cuda_include() -> tuple[str, ...]:
    """Include folders with CUDA's number types (cuda_fp16.h and the like) for the host.

    The wheels nvidia-cuda-runtime and nvidia-cuda-cccl, else a toolkit in CUDA_HOME, CUDA_PATH or /usr/local/cuda.
    Raises ConfigurationError when neither is there.
    """
    roots = []
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        roots += [*sorted(Path(root).glob("cu*/include"), reverse=True), Path(root) / "cuda_runtime" / "include"]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            roots.append(Path(os.environ[variable]) / "include")
    nvcc = shutil.which("nvcc")
    if nvcc:
        roots.append(Path(nvcc).resolve().parent.parent / "include")
    roots.append(Path("/usr/local/cuda/include"))
    for root in roots:
        cccl = [
            p for p in (root / "cccl", root, root.parent.parent / "cuda_cccl" / "include") if (p / "nv/target").exists()
        ]
        if (root / "cuda_fp8.h").exists() and cccl:
            return (str(root), str(cccl[0]))
    raise ConfigurationError(
        "the simulator needs CUDA's headers for number types (cuda_fp16.h and others; no GPU and no toolkit) and found "
        "none; run `pip install nvidia-cuda-runtime nvidia-cuda-cccl`"
    )


@functools.cache
def headers_hash() -> str:
    """Hash of the headers' texts, wherever they lie: another checkout of the same version finds the same kernels."""
    digest = hashlib.sha256()
    numbers = ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp8.h", "cuda_fp8.hpp")
    files = [(path, path.relative_to(DEVICE_DIR)) for path in sorted(DEVICE_DIR.rglob("*.h"))]
    files += [(Path(folder) / name, name) for folder in cuda_include() for name in numbers]
    for path, name in files:
        if path.exists():
            digest.update(str(name).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
