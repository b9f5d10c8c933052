"""The NVSHMEM baseline: real NVSHMEM kernels, compiled on first use, timed next to ours; tensors, put, get, ping-pong."""

import ctypes
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmark.common.cuda_library import compiled_once
from tilescale_net.compiler import toolchain
from tilescale_net.runtime import settings
from tilescale_net.runtime.cuda_memory import tensor_at

__all__ = ["Nvshmem", "missing"]
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
    """The compiled library; see `compiled_once`."""
    return compiled_once("nvshmem_p2p", SOURCE, compiler, lambda output: command(folder, compiler, arch, output))


def missing() -> str | None:
    """What this machine lacks to run the NVSHMEM baseline, in one line; None when it can run."""
    if settings.device_kind() != "cuda":
        lacks = "GPUs that reach each other's memory"
    elif home() is None:
        lacks = f"the package {WHEELS[0]} (or NVSHMEM_HOME)"
    elif toolchain.find_tool("nvcc") is None:
        lacks = "nvcc on PATH or in CUDA_HOME"
    else:
        return None
    return f"NVSHMEM baseline: not measured; it needs {lacks}"


class Nvshmem:
    """NVSHMEM, initialised over torch.distributed; one per process, collective.

    The current torch device is used. Launches go to torch's current stream, so they can be captured in CUDA graphs.

    Attributes:
        version: of the headers it was compiled with, such as "3.4.5"; ends with "+TMA" when NVSHMEM_TMA_POLICY=ENABLE
            makes NVSHMEM copy by TMA (3.7 and later).

    Raises:
        RuntimeError: it did not compile, or NVSHMEM refused to start.
    """

    def __init__(self) -> None:
        # The unique-id bootstrap and transports to other nodes are looked for by name: only peer memory is used here.
        os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
        os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")  # multicast serves collectives, which are not measured
        device = torch.cuda.current_device()
        major, minor = torch.cuda.get_device_capability(device)
        library = build(home() or "", toolchain.find_nvcc(), f"sm_{major}{minor}")
        self._lib = _declare(ctypes.CDLL(str(library)))
        number = self._lib.tsn_nvshmem_version()
        tma = "+TMA" if self._lib.tsn_nvshmem_lent() else ""
        self.version = f"{number // 10000}.{number // 100 % 100}.{number % 100}{tma}"
        self._memories: list[torch.Tensor] = []
        torch.cuda.synchronize()  # makes the device's context current before NVSHMEM looks for it
        identity = ctypes.create_string_buffer(self._lib.tsn_nvshmem_id_bytes())
        if dist.get_rank() == 0 and self._lib.tsn_nvshmem_get_id(identity) != 0:
            raise RuntimeError("NVSHMEM gave no unique id; NVSHMEM_DEBUG=INFO tells more")
        shared = [identity.raw]
        dist.broadcast_object_list(shared, src=0)
        rank = dist.get_rank()
        if status := self._lib.tsn_nvshmem_init(shared[0], rank, dist.get_world_size(), device):
            raise RuntimeError(f"NVSHMEM did not start on rank {rank} (status {status}); NVSHMEM_DEBUG=INFO tells more")

    def empty(self, count: int) -> torch.Tensor:
        """A symmetric uint8 tensor of `count` bytes. Collective; lives until finalize."""
        pointer = self._lib.tsn_nvshmem_malloc(count)
        if not pointer:
            raise RuntimeError(f"NVSHMEM has no room for {count} bytes; raise NVSHMEM_SYMMETRIC_SIZE")
        self._memories.append(tensor_at(pointer, count, torch.device("cuda")))
        return self._memories[-1]

    def put(self, dst: torch.Tensor, src: torch.Tensor, count: int, pe: int, loops: int = 1, **launch: int) -> None:
        """Launch a kernel (`blocks`, `threads`) that pushes `count` bytes of `src` to `dst` on `pe`, `loops` times, then
        calls quiet."""
        self._copy(self._lib.tsn_nvshmem_put, dst, src, count, pe, loops, **launch)

    def get(self, dst: torch.Tensor, src: torch.Tensor, count: int, pe: int, loops: int = 1, **launch: int) -> None:
        """Launch a kernel (`blocks`, `threads`) that pulls `count` bytes of `src` on `pe` into `dst`, `loops` times."""
        self._copy(self._lib.tsn_nvshmem_get, dst, src, count, pe, loops, **launch)

    def _copy(
        self, function: Any, dst: torch.Tensor, src: torch.Tensor, count: int, pe: int, loops: int, blocks: int = 1,
        threads: int = 128,
    ) -> None:  # fmt: skip
        self._check(function(dst.data_ptr(), src.data_ptr(), count, pe, loops, blocks, threads, _stream()))

    def ping_pong(
        self, dst: torch.Tensor, src: torch.Tensor, count: int, signal: torch.Tensor, base: int, pe: int, starts: bool,
        *, loops: int, threads: int,
    ) -> None:  # fmt: skip
        """Launch `loops` round trips of put-with-signal with `pe`; signal values run from base + 1 to base + loops."""
        addresses = dst.data_ptr(), src.data_ptr(), count, signal.data_ptr()
        self._check(self._lib.tsn_nvshmem_ping_pong(*addresses, base, pe, starts, loops, threads, _stream()))

    def finalize(self) -> None:
        """Free everything and leave NVSHMEM. Collective."""
        torch.cuda.synchronize()
        while self._memories:
            self._lib.tsn_nvshmem_free(self._memories.pop().data_ptr())
        sys.stdout.flush()
        self._lib.tsn_nvshmem_finalize()

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"NVSHMEM baseline: {self._lib.tsn_nvshmem_error(code).decode()} (CUDA error {code})")


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    """Argument and result types of p2p.cu's functions."""
    pointer, size, integer, word = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint64
    copy = [pointer, pointer, size, integer, integer, integer, integer, pointer]
    signatures = {
        "version": (integer, []), "lent": (integer, []), "error": (ctypes.c_char_p, [integer]), "id_bytes": (integer, []),
        "get_id": (integer, [pointer]), "init": (integer, [pointer, integer, integer, integer]), "finalize": (None, []),
        "malloc": (pointer, [size]), "free": (None, [pointer]), "put": (integer, copy), "get": (integer, copy),
        "ping_pong": (integer, [pointer, pointer, size, pointer, word, integer, integer, integer, integer, pointer]),
    }  # fmt: skip
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, f"tsn_nvshmem_{name}")
        function.restype, function.argtypes = result, arguments
    return lib
