"""tilelang's version, include paths and flags: what a kernel is compiled with."""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
from pathlib import Path

from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import this_host

# The package uses parts of tilelang that are not a public interface; they were checked for this version.
TILELANG_VERSION = "0.1.15"
COMPILER_DIR = Path(__file__).resolve().parent
DEVICE_DIR = COMPILER_DIR.parent / "device"
HEADER = "tilescale_net.h"


def check_tilelang(version: str | None = None) -> None:
    """Raise ConfigurationError when tilelang is missing or of another version than this package supports."""
    if version is None:
        try:
            version = importlib.metadata.version("tilelang")
        except importlib.metadata.PackageNotFoundError:
            raise ConfigurationError(
                f"tilelang is not installed; run `pip install tilelang=={TILELANG_VERSION}`"
            ) from None
    if version.partition("+")[0] != TILELANG_VERSION:
        raise ConfigurationError(
            f"tilelang {version} is installed, but tilescale_net supports {TILELANG_VERSION}; "
            f"run `pip install tilelang=={TILELANG_VERSION}`"
        )


def sources_hash() -> str:
    """Hash of everything outside a kernel's IR that its code depends on: device headers, passes and lowering rules.

    tilelang's kernel cache keys on the IR and the flags; with this hash among the flags an edited file never meets a
    kernel compiled with the old one. Each rank computes it at its start and for each kernel: files are read again when
    one has changed.
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


def compile_flags(extra: list[str] | str | None = None, threads: int | None = None) -> list[str]:
    """Flags of the device compiler for every kernel, then the author's own.

    `threads` is the size of the kernel's blocks where they are of one size and one dimension. tilelang declares it as a
    bound only, so without it each primitive would compute with sizes and indices of three dimensions.
    """
    flags = [f"-I{shlex.quote(str(DEVICE_DIR))}", "-include", HEADER, f"-DTSN_SOURCES_HASH=0x{sources_hash()}ull"]
    if threads is not None:
        flags.append(f"-DTSN_BLOCK_THREADS={threads}")
    if extra:
        flags += [extra] if isinstance(extra, str) else list(extra)
    return flags


@contextlib.contextmanager
def once_per_host(name: str):
    """Ranks of one host compile kernel `name` one after the other: the first compiles, the rest find it in the cache.

    Where tilelang's cache is off or cannot hold a lock file, they all compile at once.
    """
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
