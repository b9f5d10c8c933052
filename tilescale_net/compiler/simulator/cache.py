"""The simulator's cache, one folder per user: lowered kernels, whole kernels, libraries and headers.

Libraries are code that this process runs, so the folder and every file count only if they belong to this user and no
other user may write them.

Lowering a kernel takes tilelang up to two seconds; tracing and preparing takes each rank up to half a second, several
times the kernel's run. A kernel of `tilescale_net.kernels` depends only on files of this package, so a hash of these
and the factory's arguments identify it. Kernels of other modules are traced every time: their dependencies are unknown.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tilelang import tvm
from tvm.tirx import PrimFunc

from tilescale_net.compiler import toolchain
from tilescale_net.compiler.simulator import host_source, host_stub
from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import job_store, private_folder, this_host


def folder() -> Path:
    """`private_folder.of_user`. A process that adds a file prunes others, see `prune`."""
    return private_folder.of_user("simulator")


def get_or_build(
    name: str, key: str, suffix: str, make: Callable[[Path], Path], place: Path | None = None, lock_name: str = ""
) -> Path:
    """Path of the result of `make`, made now or found.

    Args:
        name, key, suffix: of the file; `key` covers everything that the file depends on.
        make: writes the file into the given empty folder, and returns its path. Ranks of one machine make a file once:
            the others wait for it.
        place: the folder, from which nothing is removed; default `folder()`.
        lock_name: files of one lock are made one after the other; default one of a few.

    Raises:
        ConfigurationError: the folder cannot be written, or is full.
        Any exception of `make`; then nothing is cached.
    """
    mine = place is None
    place = place or folder()
    try:
        if not private_folder.make(place, alone=not mine):
            place = private_folder.temporary(place)
        path = place / f"{name[:60]}-{key}{suffix}"
        if is_usable(path):
            return path
        # 256 locks serve all files of a kind: with fewer, a file that many processes are compiling for delays unrelated
        # ones, and a rank for longer than its peers wait in a kernel. A whole kernel is made of other files, so it must
        # not share their locks.
        lock = this_host.lock_file(place / (lock_name or f"lock-{'k' if suffix == '.kernel' else ''}{key[:2]}"))
    except OSError as err:
        raise _unusable(place, err) from err
    try:
        with lock:
            if is_usable(path):
                return path
            with tempfile.TemporaryDirectory(dir=place, prefix=TEMPORARY) as work:
                made = make(Path(work))
                if path.suffix in SEALED:
                    seal(made)
                os.replace(made, path)
    except OSError as err:
        if err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise _unusable(place, err) from err
        raise
    if mine:
        prune(place)
    return path


def get_or_write(name: str, key: str, suffix: str, make: Callable[[], Any], parse: Callable[[str], Any]) -> Any:
    """The result of `make`, or its earlier result from the file. `name`, `key`, `suffix`: as in `get_or_build`; the
    suffix is one of SEALED. `make`: returns an object with a method `text()`. `parse`: makes the object from its text;
    raises ValueError, KeyError or TypeError for an invalid text."""
    made: list[Any] = []

    def write(work: Path) -> Path:
        made.append(make())
        out = work / f"kernel{suffix}"
        out.write_text(made[0].text())
        return out

    while True:
        path = get_or_build(name, key, suffix, write)
        if made:
            return made[0]
        try:
            return parse(unseal(path.read_bytes()).decode())
        except (OSError, ValueError, KeyError, TypeError):  # another program has removed or damaged it
            discard(path)


def _unusable(place: Path, err: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"compiled kernels cannot be cached in {place} ({err.strerror}); make room there, or set XDG_CACHE_HOME to a folder "
        "that can be written"
    )


# -- files ------------------------------------------------------------------------------------------------------------

SUFFIXES = (".so", ".lowered", ".kernel", ".gch")
# Files end with a digest of their contents, so that a file damaged by a full disk or a power cut is not used: reading
# it could crash. Compilers check precompiled headers themselves.
SEALED = (".so", ".lowered", ".kernel")
_DIGEST = hashlib.sha256().digest_size
# Files used within this number of days stay, the latest up to this number of bytes.
MAX_DAYS, MAX_BYTES = 30, 1 << 30
# Seconds after which an unfinished file counts as abandoned: a live process holds its lock.
_ABANDONED = 3600
TEMPORARY = "tmp"


def discard(path: Path) -> None:
    """Remove a damaged file, so that `get_or_build` makes it again."""
    path.unlink(missing_ok=True)


def is_usable(path: Path) -> bool:
    """Whether the file exists and may be trusted; marks it as used."""
    try:
        if not private_folder.is_ours(path):
            path.unlink()  # left in a folder of ours by another user who could write there once
            return False
        if path.suffix in SEALED:
            unseal(path.read_bytes())
        os.utime(path)
    except (OSError, ValueError):
        return False
    return True


def seal(path: Path) -> None:
    """Append the digest of a file's contents; a library stays valid."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    with open(path, "ab") as f:
        f.write(digest)


def unseal(data: bytes) -> bytes:
    """The contents of a sealed file. Raises ValueError if it is damaged."""
    held, digest = data[:-_DIGEST], data[-_DIGEST:]
    if hashlib.sha256(held).digest() != digest:
        raise ValueError("damaged")
    return held


def prune(place: Path) -> None:
    """Remove files that are too old or too many; programs that have a library open keep it."""
    found = []
    for path in place.iterdir():
        try:
            status = path.stat()
        except OSError:
            continue  # another process was faster
        found.append((status.st_mtime, status.st_size, path))
    now = time.time()
    oldest, total = now - MAX_DAYS * 86400, 0
    for used, size, path in sorted(found, reverse=True):
        if path.is_dir():  # an unfinished file; programs that end normally remove theirs
            if path.name.startswith(TEMPORARY) and used < now - _ABANDONED:
                shutil.rmtree(path, ignore_errors=True)
        elif path.suffix in SUFFIXES:
            total += size
            if used < oldest or total > MAX_BYTES:
                path.unlink(missing_ok=True)


# -- lowered kernels --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Lowered:
    """The lowered code of a simulated kernel.

    It holds texts only: TVM's own form of a host module takes longer to read than all other steps together.

    Attributes:
        kernel_source: CUDA source.
        unit: the same as C++ for the host.
        host_function: code of checks and launch geometry, see host_stub.py.
        n_arguments: how many arguments the host function takes.
    """

    kernel_source: str
    unit: host_source.HostSource
    host_function: str
    n_arguments: int

    @classmethod
    def from_artifact(cls, name: str, artifact: Any) -> Lowered:
        """From a `tilelang.engine.param.CompiledArtifact`. Raises SimulatorUnsupported, which names the kernel."""
        return cls(
            artifact.kernel_source,
            host_source.translate(name, artifact.kernel_source),
            host_stub.compiled(name, host_stub.translate(name, artifact.host_mod)),
            len(artifact.params),
        )

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self) | {"unit": self.unit.fields()})

    @classmethod
    def parse(cls, text: str) -> Lowered:
        """From `text()`. Raises ValueError, KeyError or TypeError for anything else."""
        fields = job_store.parse_json(text)
        if not isinstance(fields, dict):
            raise TypeError("it is no kernel")
        unit = host_source.HostSource.from_fields(fields.pop("unit"))
        return cls(unit=unit, **fields)


@functools.cache
def tool_versions() -> tuple[str, ...]:
    """Versions of the lowering packages and of the interpreter's code."""
    packages = [importlib.metadata.version(package) for package in ("tilelang", "apache-tvm-ffi")]
    return (*packages, importlib.util.MAGIC_NUMBER.hex())


def get_or_lower(
    name: str, func: PrimFunc, target: dict[str, Any], pass_configs: dict[str, Any], lower: Callable[..., Any]
) -> Lowered:
    """`lower(func, target, pass_configs)`, or its cached result by the same versions.
    `name`: the kernel's name, for file names. `lower`: returns a `tilelang.engine.param.CompiledArtifact`."""
    depends_on = [
        tvm.ir.save_json(func),
        json.dumps([target, pass_configs], sort_keys=True, default=str),
        toolchain.sources_hash(),
        *tool_versions(),
    ]
    key = hashlib.sha256("\0".join(depends_on).encode()).hexdigest()[:24]
    return get_or_write(
        name, key, ".lowered", lambda: Lowered.from_artifact(name, lower(func, target, pass_configs)), Lowered.parse
    )


# -- keys of whole kernels --------------------------------------------------------------------------------------------

_KERNELS = "tilescale_net.kernels"
# A younger file may differ from the module that this process has imported.
_IMPORTED = time.time()


def kernel_key(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any], anywhere: bool = False
) -> str | None:  # fmt: skip
    """A key that identifies a kernel; None if it may not be cached. `function`: the factory, with its arguments.
    `options`: of `tsn.jit`. `anywhere`: the kernel does not depend on where the package lies: it holds no lines of its
    files."""
    if not (function.__module__ or "").startswith(_KERNELS + "."):
        return None
    if not _unchanged(function):
        return None
    try:
        values = _written([args, sorted(kwargs.items()), sorted(options.items())])
    except TypeError:
        return None
    parts = [
        contents_hash() if anywhere else package_hash(),
        *tool_versions(),
        function.__module__,
        function.__qualname__,
        values,
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


@functools.cache
def _folders() -> tuple[Path, ...]:
    """The package's files, by import name."""
    specs = [importlib.util.find_spec(name) for name in ("tilescale_net", _KERNELS)]
    return tuple(
        Path([*spec.submodule_search_locations][0]).absolute()
        for spec in specs
        if spec and spec.submodule_search_locations
    )


@functools.cache
def package_hash() -> str:
    """Hash of the package's Python files and their paths, and of `toolchain.sources_hash`."""
    return _hash_of_files(lambda path, folder: path)


@functools.cache
def contents_hash() -> str:
    """The same without paths."""
    return _hash_of_files(lambda path, folder: path.relative_to(folder))


def _hash_of_files(named: Callable[[Path, Path], Path]) -> str:
    digest = hashlib.sha256(toolchain.sources_hash().encode())
    for folder in _folders():
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(named(path, folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _unchanged(function: Callable[..., Any]) -> bool:
    """Whether the package's modules match its files: a test may have replaced modules, an author may have
    edited them since this process began."""
    files = [function.__code__.co_filename]
    files += [
        getattr(m, "__file__", None) or "" for name, m in [*sys.modules.items()] if name.startswith("tilescale_net.")
    ]
    ours = tuple(f"{folder}{os.sep}" for folder in _folders())
    try:
        return all(os.path.abspath(f).startswith(ours) and os.stat(f).st_mtime < _IMPORTED for f in files if f)
    except OSError:
        return False


def _written(value: Any) -> str:
    """An argument as a unique text. Raises TypeError if it has none."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return f"{_name(value)} {value!r}"
    if isinstance(value, (tuple, list)):
        return f"{_name(value)}({', '.join(map(_written, value))})"
    if isinstance(value, dict):
        return _written(sorted((str(getattr(k, "value", k)), v) for k, v in value.items()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return f"{_name(value)}{_written(fields)}"
    raise TypeError(f"{value!r} has no text")


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


# -- whole kernels ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CachedKernel:
    """Data of a simulated kernel, except for its traced function. `name`: the kernel's. `context_index`,
    `names`, `ring_bytes`: see passes.Prepared. `lines`: source lines of its primitives, see sites.py. `lowered`: the
    code."""

    name: str
    context_index: int | None
    names: tuple[str, ...]
    ring_bytes: int
    lines: tuple[str, ...]
    lowered: Lowered

    def text(self) -> str:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps(fields | {"lowered": self.lowered.text()})

    @classmethod
    def parse(cls, text: str) -> CachedKernel:
        """From `text()`. Raises ValueError, KeyError or TypeError for anything else."""
        fields = job_store.parse_json(text)
        if not isinstance(fields, dict):
            raise TypeError("it is no kernel")
        for name in ("names", "lines"):
            fields[name] = tuple(fields[name])
        return cls(lowered=Lowered.parse(fields.pop("lowered")), **fields)
