"""Kernels compiled ahead of a benchmark, all at once on all cores; ranks then find them in the cache.

Run as a module, it is one of the processes that compile: kernel factories with their arguments come pickled on stdin.
"""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import tilescale_net as tsn
from benchmark.common.modules import dist


def compile_ahead(kernels: Sequence[functools.partial[Any]]) -> float:
    """Compile kernels, factories with all their arguments, equal on all ranks; the seconds that it took. Collective.
    One that fails is left to the call that needs it, whose error says why."""
    start = time.monotonic()
    if tsn.rank() == 0:
        unique = [*{pickle.dumps(kernel): None for kernel in kernels}]
        count = min(len(unique), os.cpu_count() or 1)
        command = [sys.executable, "-m", __name__]
        none = subprocess.DEVNULL
        processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=none, stderr=none) for _ in range(count)]
        for i, process in enumerate(processes):
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(unique[i::count]))
            process.stdin.close()
        for process in processes:
            process.wait()
    dist.barrier()
    return time.monotonic() - start


def main() -> None:
    """Compile what comes on stdin."""
    for kernel in pickle.loads(sys.stdin.buffer.read()):
        try:
            pickle.loads(kernel)()
        except tsn.TileScaleError as error:
            print(error, file=sys.stderr)


if __name__ == "__main__":
    main()
