"""Finds NVSHMEM (the wheel nvidia-nvshmem-cu13) and nvcc, and compiles p2p.cu once into a cached shared library."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from importlib import metadata

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "p2p.cu")
WHEELS = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")


def home() -> str | None:
    """Folder with NVSHMEM's `include` and `lib`: NVSHMEM_HOME, or inside the wheel; None when there is none."""
    candidates = [os.environ.get("NVSHMEM_HOME", "")]
    for wheel in WHEELS:
        try:
            candidates.append(str(metadata.distribution(wheel).locate_file("nvidia/nvshmem")))
        except metadata.PackageNotFoundError:
            continue
    for folder in candidates:
        if folder and os.path.exists(os.path.join(folder, "include", "nvshmem.h")):
            return folder
    return None


def nvcc() -> str | None:
    """Path of nvcc: CUDA_HOME, PATH, /usr/local/cuda; None when there is none."""
    explicit = os.path.join(os.environ.get("CUDA_HOME", ""), "bin", "nvcc")
    return next(
        (c for c in (explicit, shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc") if c and os.path.exists(c)), None
    )


def _host_library(folder: str) -> str:
    names = sorted(n for n in os.listdir(os.path.join(folder, "lib")) if n.startswith("libnvshmem_host.so"))
    if not names:
        raise RuntimeError(f"{folder}/lib holds no libnvshmem_host.so; reinstall {WHEELS[0]}")
    return names[0]


def command(folder: str, compiler: str, arch: str, output: str) -> list[str]:
    """The nvcc call. Relocatable device code and the static device library: NVSHMEM's device side asks for both."""
    lib = os.path.join(folder, "lib")
    return [
        compiler, "-std=c++17", "-O3", f"-arch={arch}", "-rdc=true", "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden",
        "-I", os.path.join(folder, "include"), SOURCE, "-o", output,
        "-L", lib, f"-l:{_host_library(folder)}", "-lnvshmem_device", "-Xlinker", f"-rpath,{lib}",
    ]  # fmt: skip


def cache_folder() -> str:
    """Where compiled baselines are kept: $XDG_CACHE_HOME/tilescale_net/nvshmem, by default below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(base, "tilescale_net", "nvshmem")


def build(folder: str, compiler: str, arch: str) -> str:
    """Path of the compiled library; compiles it unless the cache holds it. Safe to call from several processes.

    Raises:
        RuntimeError: nvcc failed; holds the command and its output.
    """
    with open(SOURCE, "rb") as f:
        source = f.read()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    tag = repr((source, version, command(folder, compiler, arch, ""))).encode()
    cache = cache_folder()
    os.makedirs(cache, exist_ok=True)
    library = os.path.join(cache, f"p2p-{hashlib.sha256(tag).hexdigest()[:16]}.so")
    with open(library + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(library):
            partial = f"{library}.{os.getpid()}.partial"
            line = command(folder, compiler, arch, partial)
            done = subprocess.run(line, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(
                    f"the NVSHMEM baseline did not compile: {' '.join(line)}\n{done.stdout}{done.stderr}"
                )
            os.replace(partial, library)
    return library
