"""Baselines in CUDA: libraries compiled on first use, and their start-up among the ranks of a job."""

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmark.common.modules import dist, torch
from tilescale_net.compiler import toolchain
from tilescale_net.compiler.simulator import cache
from tilescale_net.runtime import settings

# Types of arguments and results.
POINTER, SIZE, INTEGER, WORD, TEXT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint64, ctypes.c_char_p


def folders(variable: str, wheels: Sequence[str], inside: str) -> list[str]:
    """Candidate folders of a library: the environment variable's, and `inside` of each installed wheel."""
    found = [os.environ.get(variable, "")]
    for wheel in wheels:
        try:
            found.append(str(metadata.distribution(wheel).locate_file(inside)))
        except metadata.PackageNotFoundError:
            continue
    return [folder for folder in found if folder]


def lacking(title: str, gpus: str, needs: Mapping[str, Callable[[], object]]) -> str | None:
    """The requirement of a baseline that this machine lacks, in one line; None if it has all. `gpus`: the GPUs it
    needs. `needs`: other requirements besides nvcc, by name, and whether they are met."""
    all_needs = {gpus: lambda: settings.device_kind() == "cuda"} | dict(needs)
    all_needs["nvcc on PATH or in CUDA_HOME"] = lambda: toolchain.find_tool("nvcc")
    found = next((what for what, is_there in all_needs.items() if not is_there()), None)
    return None if found is None else f"{title}: not measured; it needs {found}"


def compiled_once(name: str, source: str, compiler: str, command: Callable[[str], list[str]]) -> Path:
    """The compiled library, from the cache of the simulator's kernels or made now. Safe to call from several processes.

    Args:
        name: in the cache. source: file that it is made of. compiler: path of nvcc.
        command: the call that makes the library at a path; it names the other inputs.

    Raises:
        RuntimeError: nvcc failed; holds the command and its output.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    tag = repr((Path(source).read_bytes(), version, command(""))).encode()

    def make(work: Path) -> Path:
        line = command(str(work / "library.so"))
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{source} did not compile: {' '.join(line)}\n{done.stdout}{done.stderr}")
        return work / "library.so"

    return cache.get_or_build(name, hashlib.sha256(tag).hexdigest()[:24], ".so", make)


def arch() -> str:
    """Of the current GPU, as nvcc names it, such as sm_90."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def load(path: Path, prefix: str, signatures: Mapping[str, tuple[Any, list[Any]]]) -> ctypes.CDLL:
    """The library; `signatures`: types of the result and the arguments of its functions, by name behind `prefix`."""
    lib = ctypes.CDLL(str(path))
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, prefix + name)
        function.restype, function.argtypes = result, arguments
    return lib


def shared_id(size: int, make: Callable[[Any], None]) -> bytes:
    """The `size` bytes that `make` writes into its buffer on rank 0, on all ranks. Collective."""
    identity = ctypes.create_string_buffer(size)
    if dist.get_rank() == 0:
        make(identity)
    shared = [identity.raw]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]
