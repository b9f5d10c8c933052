"""The tools of a kernel's compilation: tilelang's version, include paths, flags, CUDA's tools."""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import this_host

# The package uses parts of tilelang that are not a public interface, see versions.py; they were checked for these versions.
TILELANG_VERSIONS = ("0.1.12", "0.1.13", "0.1.14", "0.1.15")
COMPILER_DIR = Path(__file__).resolve().parent
DEVICE_DIR = COMPILER_DIR.parent / "device"
HEADER = "tilescale_net.h"


def check_tilelang(version: str | None = None) -> None:
    """Raise ConfigurationError if tilelang is missing or of an unsupported version."""
    if version is None:
        try:
            version = importlib.metadata.version("tilelang")
        except importlib.metadata.PackageNotFoundError:
            raise ConfigurationError(
                f"tilelang is not installed; run `pip install tilelang=={TILELANG_VERSIONS[-1]}`"
            ) from None
    if version.partition("+")[0] not in TILELANG_VERSIONS:
        raise ConfigurationError(
            f"tilelang {version} is installed, but tilescale_net supports {TILELANG_VERSIONS[0]} to {TILELANG_VERSIONS[-1]}; "
            f"run `pip install tilelang=={TILELANG_VERSIONS[-1]}`"
        )


def sources_hash() -> str:
    """Hash of a kernel's inputs outside of its IR: device headers, passes and lowering rules.

    tilelang's kernel cache keys on the IR and the flags; with this hash among the flags an edited file never finds a
    kernel compiled from the old one. Each rank computes it at its start and for each kernel: changed files are read
    again.
    """
    return _hash_of(tuple(_stamps(DEVICE_DIR, ".h") + _stamps(COMPILER_DIR, ".py")))


def _stamps(folder: str | Path, ending: str) -> list[tuple[str, int, int]]:
    """Path, time of change and size of the files below a folder, in the order of their paths."""
    found = []
    for entry in os.scandir(folder):
        if entry.is_dir():
            found += _stamps(entry.path, ending)
        elif entry.name.endswith(ending):
            status = entry.stat()
            found.append((entry.path, status.st_mtime_ns, status.st_size))
    return sorted(found)


@functools.lru_cache(maxsize=1)
def _hash_of(stamps: tuple[tuple[str, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, *_ in stamps:
        digest.update(os.path.basename(path).encode() + b"\0" + Path(path).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def compile_flags(extra: Sequence[str] = (), threads: int | None = None) -> list[str]:
    """Flags of the device compiler for every kernel, then the author's own. `threads` is the size of the kernel's
    blocks, if all have one size and one dimension. tilelang declares it as a bound only, so without it each
    primitive would compute with sizes and indices of three dimensions."""
    flags = [f"-I{shlex.quote(str(DEVICE_DIR))}", "-include", HEADER, f"-DTSN_SOURCES_HASH=0x{sources_hash()}ull"]
    if threads is not None:
        flags.append(f"-DTSN_BLOCK_THREADS={threads}")
    return [*flags, *extra]


@contextlib.contextmanager
def once_per_host(name: str) -> Iterator[None]:
    """Ranks of one host compile kernel `name` one after the other: the first compiles, the rest find it in the cache.
    If tilelang's cache is off or cannot hold a lock file, they all compile at once."""
    from tilelang import env

    lock = None
    if env.is_cache_enabled():
        with contextlib.suppress(OSError):
            os.makedirs(env.TILELANG_CACHE_DIR, exist_ok=True)
            lock = this_host.lock_file(os.path.join(env.TILELANG_CACHE_DIR, f"tilescale_net-{name}.lock"))
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


# -- CUDA's tools -----------------------------------------------------------------------------------------------------


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
    """`sm_XX` of the current GPU, with the architecture-specific suffix if it has one (sm_90a)."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigurationError(
            "target 'cuda' needs a GPU to know its architecture, and none is visible; name one, such as "
            "target={'kind': 'cuda', 'arch': 'sm_90'}, to compile without running, or use target='simulator'"
        )
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


# -- generated source through nvcc and nvdisasm; needs no GPU ---------------------------------------------------------

SM_90 = {"kind": "cuda", "arch": "sm_90"}


@overload
def compile_source(
    source: str,
    kind: Literal["ptx"],
    target: dict[str, Any] = ...,
    extra: tuple[str, ...] = ...,
    threads: int | None = ...,
) -> str: ...
@overload
def compile_source(
    source: str,
    kind: Literal["cubin"],
    target: dict[str, Any] = ...,
    extra: tuple[str, ...] = ...,
    threads: int | None = ...,
) -> bytes: ...
def compile_source(
    source: str, kind: str, target: dict[str, Any] = SM_90, extra: tuple[str, ...] = (), threads: int | None = None
) -> bytes | str:
    """Compile generated source with the flags of `tsn.jit`.

    Args:
        source: CUDA source.
        kind: "ptx" (returns str) or "cubin" (returns bytes).
        target: tilelang target with an architecture.
        extra: further flags.
        threads: of a block, if it has one dimension; tsn.jit takes it from the kernel.

    Raises:
        ConfigurationError: no nvcc, or nvcc refuses the source; carries its messages.
    """
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    ours = [token for flag in compile_flags(threads=threads) for token in shlex.split(flag)]
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "kernel.cu", Path(folder) / f"kernel.{kind}"
        path.write_text(source)
        command = [
            find_nvcc(), f"--{kind}", "-O3", "-std=c++20", f"-arch={target['arch']}",
            f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}", *ours, *extra, "-o", str(out), str(path),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ConfigurationError(f"nvcc failed:\n{done.stderr or done.stdout}")
        return out.read_text() if kind == "ptx" else out.read_bytes()


def disassemble(cubin: bytes, *options: str) -> str:
    """SASS of a cubin. Raises ConfigurationError when nvdisasm is missing.

    Args:
        cubin: of `compile_source`.
        options: nvdisasm's.
    """
    tool = find_tool("nvdisasm")
    if tool is None:
        raise ConfigurationError("nvdisasm was not found; install it with `pip install nvidia-cuda-nvdisasm`")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True).stdout
