"""Baselines in CUDA: libraries that are compiled on first use."""

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

from tilescale_net.compiler.simulator import cache


def compiled_once(name: str, source: str, compiler: str, command: Callable[[str], list[str]]) -> Path:
    """The compiled library, from the cache of the simulator's kernels or made now. Safe to call from several processes.

    Args:
        name: in the cache. source: file that it is made of. compiler: path of nvcc.
        command: the call that makes the library at a path; what else it is made of is told by the call.

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
