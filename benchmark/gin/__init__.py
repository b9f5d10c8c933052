"""NCCL's GIN as a baseline: its kernels, compiled on first use, between GPUs of different nodes; over TCP by its own sockets."""

import ctypes
import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmark.common.cuda_library import compiled_once
from benchmark.common.peers import nccl_over_nodes
from tilescale_net.compiler import toolchain
from tilescale_net.runtime import settings
from tilescale_net.runtime.cuda_memory import tensor_at

__all__ = ["Gin", "missing"]
SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "p2p.cu")
WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
LEAST = 23203  # 2.32.3, the first whose GIN crosses sockets
_TYPES = {2: "proxy", 3: "GDAKI", 4: "GPI", 5: "EFA-GDA"}


def headers() -> str | None:
    """Folder of NCCL's headers that know GIN over sockets: below NCCL_HOME, or inside the wheel; None if not found."""
    candidates = [os.environ.get("NCCL_HOME", "")]
    for wheel in WHEELS:
        try:
            candidates.append(str(metadata.distribution(wheel).locate_file("nvidia/nccl")))
        except metadata.PackageNotFoundError:
            continue
    for folder in candidates:
        header = Path(folder, "include", "nccl.h")
        if not folder or not header.is_file() or not header.with_name("nccl_device.h").is_file():
            continue
        numbers = re.findall(r"define NCCL_(?:MAJOR|MINOR|PATCH) +(\d+)", header.read_text())
        if len(numbers) == 3 and int(numbers[0]) * 10000 + int(numbers[1]) * 100 + int(numbers[2]) >= LEAST:
            return str(header.parent)
    return None


def library() -> Any:
    """The libnccl.so.2 of this process, whose functions the compiled library takes; None where there is none."""
    try:
        return ctypes.CDLL("libnccl.so.2", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None


def version() -> int:
    """Of `library`, as major * 10000 + minor * 100 + patch; 0 where there is none."""
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
    return compiled_once("gin_p2p", SOURCE, compiler, lambda output: command(include, compiler, arch, output))


def missing() -> str | None:
    """What this machine lacks to run the GIN baseline, in one line; None when it can run."""
    if settings.device_kind() != "cuda":
        lacks = "GPUs"
    elif headers() is None:
        lacks = f"the headers of NCCL 2.32.3 or newer (the package {WHEELS[0]}, or NCCL_HOME)"
    elif version() < LEAST:
        lacks = "libnccl.so.2 of 2.32.3 or newer in this process (LD_PRELOAD)"
    elif toolchain.find_tool("nvcc") is None:
        lacks = "nvcc on PATH or in CUDA_HOME"
    else:
        return None
    return f"NCCL GIN: not measured; it needs {lacks}"


class Gin:
    """A communicator of NCCL with GIN among all ranks of the job; one per process, collective.

    Attributes:
        version: of NCCL, and what carries GIN, such as "2.32.3, proxy".

    Raises:
        RuntimeError: it did not compile, or NCCL has no GIN between these ranks.
    """

    def __init__(self) -> None:
        nccl_over_nodes()
        major, minor = torch.cuda.get_device_capability()
        path = build(headers() or "", toolchain.find_nvcc(), f"sm_{major}{minor}")
        library()
        self._lib = _declare(ctypes.CDLL(str(path)))
        self._memories: list[tuple[int, int]] = []
        identity = ctypes.create_string_buffer(self._lib.tsn_gin_id_bytes())
        if dist.get_rank() == 0:
            self._check(self._lib.tsn_gin_get_id(identity))
        shared = [identity.raw]
        dist.broadcast_object_list(shared, src=0)
        self._check(self._lib.tsn_gin_init(shared[0], dist.get_rank(), dist.get_world_size()))
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


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    """Argument and result types of p2p.cu's functions."""
    pointer, size, integer, word = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint64
    signatures = {
        "error": (ctypes.c_char_p, [integer]), "detail": (ctypes.c_char_p, []), "id_bytes": (integer, []),
        "get_id": (integer, [pointer]), "init": (integer, [pointer, integer, integer]), "type": (integer, []),
        "malloc": (integer, [size, pointer, pointer]), "free": (None, [pointer, pointer]), "finalize": (None, []),
        "ping_pong": (integer, [pointer, pointer, size, word, integer, integer, integer, integer, pointer]),
    }  # fmt: skip
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, f"tsn_gin_{name}")
        function.restype, function.argtypes = result, arguments
    return lib
