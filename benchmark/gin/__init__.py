"""NCCL's GIN as a baseline: its kernels, compiled on first use, between GPUs of different nodes; over TCP by its own sockets."""

import ctypes
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmark.common import cuda_library
from benchmark.common.cuda_library import INTEGER, POINTER, SIZE, TEXT, WORD
from benchmark.common.peers import nccl_over_nodes
from tilescale_net.compiler import toolchain
from tilescale_net.runtime.cuda_memory import tensor_at

__all__ = ["Gin", "missing"]
SOURCE = str(Path(__file__).with_name("p2p.cu"))
WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
LEAST = 23203  # 2.32.3, the first whose GIN crosses sockets
_TYPES = {2: "proxy", 3: "GDAKI", 4: "GPI", 5: "EFA-GDA"}
# Of p2p.cu's functions: types of the result and of the arguments.
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "error": (TEXT, [INTEGER]), "detail": (TEXT, []), "id_bytes": (INTEGER, []), "get_id": (INTEGER, [POINTER]),
    "init": (INTEGER, [POINTER, INTEGER, INTEGER]), "type": (INTEGER, []), "malloc": (INTEGER, [SIZE, POINTER, POINTER]),
    "free": (None, [POINTER, POINTER]), "finalize": (None, []),
    "ping_pong": (INTEGER, [POINTER, POINTER, SIZE, WORD, INTEGER, INTEGER, INTEGER, INTEGER, POINTER]),
}  # fmt: skip


def headers() -> str | None:
    """Folder of NCCL's headers that know GIN over sockets: below NCCL_HOME, or inside the wheel; None if not found."""
    for folder in cuda_library.folders("NCCL_HOME", WHEELS, "nvidia/nccl"):
        header = Path(folder, "include", "nccl.h")
        if not header.is_file() or not header.with_name("nccl_device.h").is_file():
            continue
        numbers = re.findall(r"define NCCL_(?:MAJOR|MINOR|PATCH) +(\d+)", header.read_text())
        if len(numbers) == 3 and int(numbers[0]) * 10000 + int(numbers[1]) * 100 + int(numbers[2]) >= LEAST:
            return str(header.parent)
    return None


def library() -> Any:
    """The libnccl.so.2 of this process, whose functions the compiled library uses; None if there is none."""
    try:
        return ctypes.CDLL("libnccl.so.2", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None


def version() -> int:
    """Of `library`, as major * 10000 + minor * 100 + patch; 0 if there is none."""
    nccl, number = library(), ctypes.c_int()
    if nccl is not None:
        nccl.ncclGetVersion(ctypes.byref(number))
    return number.value


def command(include: str, compiler: str, arch: str, output: str) -> list[str]:
    """The nvcc call."""
    return [
        compiler, "-std=c++17", "-O3", f"-arch={arch}", "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-I", include,
        SOURCE, "-o", output,
    ]  # fmt: skip


def build(include: str, compiler: str, arch: str) -> Path:
    """The compiled library; see `compiled_once`."""
    return cuda_library.compiled_once(
        "gin_p2p", SOURCE, compiler, lambda output: command(include, compiler, arch, output)
    )


def missing() -> str | None:
    """The requirement of the GIN baseline that this machine lacks, in one line; None if it can run."""
    needs = {
        f"the headers of NCCL 2.32.3 or newer (the package {WHEELS[0]}, or NCCL_HOME)": headers,
        "libnccl.so.2 of 2.32.3 or newer in this process (LD_PRELOAD)": lambda: version() >= LEAST,
    }
    return cuda_library.lacking("NCCL GIN", "GPUs", needs)


class Gin:
    """A communicator of NCCL with GIN among all ranks of the job; one per process, collective.

    Attributes:
        version: of NCCL, and the carrier of GIN, such as "2.32.3, proxy".

    Raises:
        RuntimeError: it did not compile, or NCCL has no GIN between these ranks.
    """

    def __init__(self) -> None:
        nccl_over_nodes()
        path = build(headers() or "", toolchain.find_nvcc(), cuda_library.arch())
        library()
        self._lib = cuda_library.load(path, "tsn_gin_", _SIGNATURES)
        self._memories: list[tuple[int, int]] = []
        identity = cuda_library.shared_id(
            self._lib.tsn_gin_id_bytes(), lambda b: self._check(self._lib.tsn_gin_get_id(b))
        )
        self._check(self._lib.tsn_gin_init(identity, dist.get_rank(), dist.get_world_size()))
        number = version()
        kind = _TYPES.get(self._lib.tsn_gin_type(), f"type {self._lib.tsn_gin_type()}")
        self.version = f"{number // 10000}.{number // 100 % 100}.{number % 100}, {kind}"

    def empty(self, count: int) -> tuple[torch.Tensor, int]:
        """A uint8 tensor of `count` bytes that GIN reaches, and its window. Collective; lives until finalize."""
        pointer, window = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._lib.tsn_gin_malloc(count, ctypes.byref(pointer), ctypes.byref(window)))
        self._memories.append((pointer.value or 0, window.value or 0))
        return tensor_at(pointer.value or 0, count, torch.device("cuda")), window.value or 0

    def ping_pong(
        self, dst: int, src: int, count: int, before: int, pe: int, starts: bool, *, loops: int, threads: int
    ) -> None:
        """Launch `loops` round trips of put with signal with `pe`, from window `src` to window `dst`; `before`: round trips of
        earlier launches."""
        stream = torch.cuda.current_stream().cuda_stream
        self._check(self._lib.tsn_gin_ping_pong(dst, src, count, before, pe, starts, loops, threads, stream))

    def finalize(self) -> None:
        """Free everything and end the communicator. Collective."""
        torch.cuda.synchronize()
        while self._memories:
            self._lib.tsn_gin_free(*self._memories.pop())
        self._lib.tsn_gin_finalize()

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(
                f"NCCL GIN: {self._lib.tsn_gin_error(code).decode()} ({self._lib.tsn_gin_detail().decode()}); "
                "NCCL_DEBUG=INFO tells more"
            )
