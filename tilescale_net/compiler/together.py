"""Kernels of an object compiled at the same time, on all processors, each by one rank of a host for all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch


def compile_together(
    calls: Sequence[Callable[[], object]], device: torch.device | None = None, local_rank: int = 0, node_size: int = 1
) -> None:
    """Make calls of which each compiles a kernel, in threads: compilers release Python's lock for most of the time.

    Each rank of a host begins elsewhere in the list, so that ranks compile at the same time what all of them find in the
    cache afterwards: a rank that comes to a kernel which another one compiles waits for it.

    Args:
        calls: the same on all ranks.
        device: of the rank; calls run on its current stream. For the simulator (a CPU) one call follows the other.
        local_rank, node_size: of the rank among those of its host.

    Raises:
        What a call raises, the first in the order of `calls`; the others have ended then.
    """
    first = len(calls) * local_rank // node_size
    mine = [*calls[first:], *calls[:first]]
    workers = min(len(calls), len(os.sched_getaffinity(0)) // node_size)
    if workers < 2 or (device is not None and device.type == "cpu"):
        for call in mine:
            call()
        return
    stream = torch.cuda.current_stream(device) if device is not None and device.type == "cuda" else None

    def run(call: Callable[[], object]) -> None:
        # A new thread has the first device and its default stream.
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            call()

    with ThreadPoolExecutor(workers, "tilescale_net-compiler") as threads:
        ended = [threads.submit(run, call) for call in mine]
        try:
            wait(ended)
        except BaseException:  # Ctrl-C: only what has begun is waited for
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    failed = [
        error for future in ended[len(calls) - first :] + ended[: len(calls) - first] if (error := future.exception())
    ]
    if failed:
        raise failed[0]
