"""The NVSHMEM baseline: real NVSHMEM kernels, compiled on first use, timed next to ours; tensors, put, get, ping-pong."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmark.common import cuda_library
from benchmark.common.cuda_library import INTEGER, POINTER, SIZE, TEXT, WORD
from tilescale_net.compiler import toolchain
from tilescale_net.runtime.cuda_memory import tensor_at

__all__ = ["Nvshmem", "missing"]
SOURCE = str(Path(__file__).with_name("p2p.cu"))
WHEELS = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
_COPY: list[Any] = [POINTER, POINTER, SIZE, INTEGER, INTEGER, INTEGER, INTEGER, POINTER]
# Of p2p.cu's functions: types of the result and of the arguments.
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "version": (INTEGER, []), "lent": (INTEGER, []), "error": (TEXT, [INTEGER]), "id_bytes": (INTEGER, []),
    "get_id": (INTEGER, [POINTER]), "init": (INTEGER, [POINTER, INTEGER, INTEGER, INTEGER]), "finalize": (None, []),
    "malloc": (POINTER, [SIZE]), "free": (None, [POINTER]), "put": (INTEGER, _COPY), "get": (INTEGER, _COPY),
    "ping_pong": (INTEGER, [POINTER, POINTER, SIZE, POINTER, WORD, INTEGER, INTEGER, INTEGER, INTEGER, POINTER]),
}  # fmt: skip


def home() -> str | None:
    """Folder with NVSHMEM's `include` and `lib`: NVSHMEM_HOME, or inside the wheel; None if not found."""
    found = cuda_library.folders("NVSHMEM_HOME", WHEELS, "nvidia/nvshmem")
    return next((folder for folder in found if os.path.exists(os.path.join(folder, "include", "nvshmem.h"))), None)


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
    return cuda_library.compiled_once(
        "nvshmem_p2p", SOURCE, compiler, lambda output: command(folder, compiler, arch, output)
    )


def missing() -> str | None:
    """What this machine lacks to run the NVSHMEM baseline, in one line; None when it can run."""
    needs = {f"the package {WHEELS[0]} (or NVSHMEM_HOME)": home}
    return cuda_library.lacking("NVSHMEM baseline", "GPUs that reach each other's memory", needs)


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
        library = build(home() or "", toolchain.find_nvcc(), cuda_library.arch())
        self._lib = cuda_library.load(library, "tsn_nvshmem_", _SIGNATURES)
        number = self._lib.tsn_nvshmem_version()
        tma = "+TMA" if self._lib.tsn_nvshmem_lent() else ""
        self.version = f"{number // 10000}.{number // 100 % 100}.{number % 100}{tma}"
        self._memories: list[torch.Tensor] = []
        torch.cuda.synchronize()  # makes the device's context current before NVSHMEM looks for it
        identity = cuda_library.shared_id(self._lib.tsn_nvshmem_id_bytes(), self._make_id)
        rank, device = dist.get_rank(), torch.cuda.current_device()
        if status := self._lib.tsn_nvshmem_init(identity, rank, dist.get_world_size(), device):
            raise RuntimeError(f"NVSHMEM did not start on rank {rank} (status {status}); NVSHMEM_DEBUG=INFO tells more")

    def _make_id(self, buffer: Any) -> None:
        if self._lib.tsn_nvshmem_get_id(buffer) != 0:
            raise RuntimeError("NVSHMEM gave no unique id; NVSHMEM_DEBUG=INFO tells more")

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
