"""The machine's C++ compiler and the headers that the simulator compiles with; libraries of kernels, cached, see cache.py."""

import contextlib
import errno
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tilescale_net.compiler.simulator import cache
from tilescale_net.compiler.simulator.host_source import PRELUDE
from tilescale_net.compiler.toolchain import DEVICE_DIR
from tilescale_net.errors import ConfigurationError, SimulatorUnsupported
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
    """A compiler's command and version, as text."""
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    return " ".join(command) + "\n" + done.stdout


@functools.cache
def cuda_include() -> tuple[str, ...]:
    """Include folders with CUDA's number types (cuda_fp16.h and the like) for the host. The wheels nvidia-cuda-runtime
    and nvidia-cuda-cccl, else a toolkit in CUDA_HOME, CUDA_PATH or /usr/local/cuda. Raises ConfigurationError if
    there is neither."""
    roots: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for wheel in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        roots += [*sorted(Path(wheel).glob("cu*/include"), reverse=True), Path(wheel) / "cuda_runtime" / "include"]
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
    files: list[tuple[Path, Path | str]] = [
        (path, path.relative_to(DEVICE_DIR)) for path in sorted(DEVICE_DIR.rglob("*.h"))
    ]
    files += [(Path(folder) / name, name) for folder in cuda_include() for name in numbers]
    for path, name in files:
        if path.exists():
            digest.update(str(name).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


# -- precompiled headers ----------------------------------------------------------------------------------------------


def precompiled_flags(flags: list[str]) -> list[str]:
    """Flags that make g++ start from precompiled headers: half the time of a small kernel. None for other compilers,
    and if the cache cannot hold the file: then the kernel's own includes are read."""
    if "Free Software Foundation" not in compiler_identity():
        return []
    # The first letter separates the file's lock from kernels' locks, which are held while it is made.
    key = "h" + hashlib.sha256("\0".join([headers_hash(), compiler_identity(), *flags]).encode()).hexdigest()[:23]

    def make(work: Path) -> Path:
        header, out = work / "prelude.h", work / "prelude.h.gch"
        header.write_text(PRELUDE)
        done = subprocess.run(
            [*compiler(), *flags, "-x", "c++-header", str(header), "-o", str(out)], capture_output=True
        )
        if done.returncode:
            raise OSError("the headers do not compile alone")
        return out

    with contextlib.suppress(OSError):
        header = cache.get_or_build("prelude", key, ".h.gch", make).with_suffix("")
        if not header.exists():  # read if a compiler cannot use the precompiled file
            header.write_text(PRELUDE)
        return ["-include", str(header)]
    return []


# -- libraries --------------------------------------------------------------------------------------------------------

# Generated code puns types and overflows integers as GPUs allow; no exception passes through a kernel.
FLAGS = (
    "-std=c++17 -O2 -fPIC -shared -w -fvisibility=hidden -fno-strict-aliasing -fwrapv -fno-exceptions -fno-rtti "
    "-fno-math-errno -fno-trapping-math -fno-stack-protector -fstack-clash-protection -fno-asynchronous-unwind-tables"
).split()


def build(name: str, text: str) -> Path:
    """Path of the shared library made of a translation unit, compiled now or found in the cache.

    Args:
        name: the kernel's name, for file names and errors.
        text: C++ source from `host_source.translate`.

    Raises:
        ConfigurationError: no compiler, or a cache folder that cannot be written.
        SimulatorUnsupported: the compiler refuses the source; carries its first messages.
    """
    folders = [f"-I{DEVICE_DIR}", f"-I{DEVICE_DIR / 'host'}", *(f"-I{p}" for p in cuda_include())]
    flags = [*FLAGS, *([] if "clang" in compiler_identity() else ["-fno-gnu-unique"])]
    flags += settings.SIM_CXXFLAGS.get()
    key = hashlib.sha256("\0".join([text, headers_hash(), compiler_identity(), *flags]).encode()).hexdigest()[:24]

    def make(work: Path) -> Path:
        source, out = work / f"{name[:60]}.cpp", work / "kernel.so"
        source.write_text(text)
        headers = precompiled_flags([*folders, *flags]) if text.startswith(PRELUDE) else []
        command = [*compiler(), *folders, *flags, *headers, str(source), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode and os.strerror(errno.ENOSPC) in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if done.returncode:
            raise SimulatorUnsupported(_explain(name, done.stderr))
        return out

    return cache.get_or_build(name, key, ".so", make)


def load(name: str, text: str) -> Any:
    """The library of `build`, loaded. A damaged one (a full disk, a power cut) is built again. Raises the errors of
    `build`, and ConfigurationError: no code may be loaded from its folder."""
    from tilescale_net import _simulator

    path = build(name, text)
    try:
        return _simulator.Library(str(path))
    except RuntimeError:
        cache.discard(path)
    path = build(name, text)
    try:
        return _simulator.Library(str(path))
    except RuntimeError as error:
        raise ConfigurationError(
            f"a compiled kernel cannot be loaded: {error}; where its file system is mounted noexec, set XDG_CACHE_HOME to a "
            "folder on another"
        ) from None


def _explain(name: str, stderr: str) -> str:
    errors = [line for line in stderr.splitlines() if re.search(r"\berror\b", line)] or stderr.splitlines()
    # As g++ and as clang say it.
    unknown = re.findall(
        r"['‘](\w+)['’] (?:is not a member of|was not declared)|(?:undeclared identifier|no member named) '(\w+)'",
        stderr,
    )
    unknown = [a or b for a, b in unknown]
    reason = f": it has no {', '.join(sorted(set(unknown)))}" if unknown else ""
    shown = "\n".join(errors[:8])
    return f"kernel {name}: the simulator cannot compile the generated source{reason}. The compiler says:\n{shown}"
