"""Finds NVSHMEM (the wheel nvidia-nvshmem-cu13), and compiles p2p.cu once into a cached shared library."""

import hashlib
import os
import subprocess
from importlib import metadata
from pathlib import Path

from tilescale_net.compiler.simulator import cache

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "p2p.cu")
WHEELS = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")


def home() -> str | None:
    """Folder with NVSHMEM's `include` and `lib`: NVSHMEM_HOME, or inside the wheel; None if not found."""
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


def _host_library(folder: str) -> str:
    names = sorted(n for n in os.listdir(os.path.join(folder, "lib")) if n.startswith("libnvshmem_host.so"))
    if not names:
        raise RuntimeError(f"{folder}/lib holds no libnvshmem_host.so; reinstall {WHEELS[0]}")
    return names[0]


def command(folder: str, compiler: str, arch: str, output: str) -> list[str]:
    """The nvcc call. Relocatable device code and the static device library: NVSHMEM's device side requires both."""
    lib = os.path.join(folder, "lib")
    return [
        compiler, "-std=c++17", "-O3", f"-arch={arch}", "-rdc=true", "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden",
        "-I", os.path.join(folder, "include"), SOURCE, "-o", output,
        "-L", lib, f"-l:{_host_library(folder)}", "-lnvshmem_device", "-Xlinker", f"-rpath,{lib}",
    ]  # fmt: skip


def build(folder: str, compiler: str, arch: str) -> Path:
    """The compiled library, from the cache of the simulator's kernels or made now. Safe to call from several processes.

    Raises:
        RuntimeError: nvcc failed; holds the command and its output.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    tag = repr((Path(SOURCE).read_bytes(), version, command(folder, compiler, arch, ""))).encode()

    def make(work: Path) -> Path:
        line = command(folder, compiler, arch, str(work / "p2p.so"))
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"the NVSHMEM baseline did not compile: {' '.join(line)}\n{done.stdout}{done.stderr}")
        return work / "p2p.so"

    return cache.get_or_build("nvshmem_p2p", hashlib.sha256(tag).hexdigest()[:24], ".so", make)
