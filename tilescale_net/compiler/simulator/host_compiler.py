"""Compiles host translation units with the machine's C++ compiler and keeps the results, see cache.py."""

import errno
import hashlib
import os
import re
import subprocess
from pathlib import Path

from tilescale_net.compiler.simulator import cache, cache_files
from tilescale_net.compiler.simulator.host_source import PRELUDE
from tilescale_net.compiler.simulator.host_toolchain import compiler, compiler_identity, cuda_include, headers_hash
from tilescale_net.compiler.simulator.precompiled import precompiled_flags
from tilescale_net.compiler.toolchain import DEVICE_DIR
from tilescale_net.errors import SimulatorUnsupported
from tilescale_net.runtime import settings

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


def load(name: str, text: str):
    """The library of `build`, loaded. One that the cache holds damaged (a full disk, a power cut) is built again."""
    from tilescale_net import _simulator

    path = build(name, text)
    try:
        return _simulator.Library(str(path))
    except RuntimeError:
        cache_files.discard(path)
        return _simulator.Library(str(build(name, text)))


def _explain(name: str, stderr: str) -> str:
    errors = [line for line in stderr.splitlines() if re.search(r"\berror\b", line)] or stderr.splitlines()
    # As g++ and as clang say it.
    unknown = re.findall(
        r"['‘](\w+)['’] (?:is not a member of|was not declared)|(?:undeclared identifier|no member named) '(\w+)'",
        stderr,
    )
    unknown = [a or b for a, b in unknown]
    what = f": it has no {', '.join(sorted(set(unknown)))}" if unknown else ""
    shown = "\n".join(errors[:8])
    return f"kernel {name}: the simulator cannot compile the generated source{what}. The compiler says:\n{shown}"
