"""The clock of a GPU, by which kernels note their calls, against the clock of this process."""

import ctypes
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from tilescale_net.runtime import cuda_memory

T = TypeVar("T")
_SAMPLES = 16
_APART_NS = 1_000_000_000  # samples that are closer to each other do not tell how fast the clocks run


# Stores the clock; as PTX, so that it needs no compiler.
_KERNEL = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry tilescale_net_clock(.param .u64 out) {
  .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [out];
  mov.u64 %rd2, %globaltimer;
  st.global.u64 [%rd1], %rd2;
  ret;
}
\0"""


def quickest(ask: Callable[[], T]) -> tuple[T, int, int]:
    """What the quickest of several calls gave, when its middle was, and how long it took, in nanoseconds of this process."""
    best = None
    for _ in range(_SAMPLES):
        begin = time.monotonic_ns()
        found = ask()
        end = time.monotonic_ns()
        if best is None or end - begin < best[2]:
            best = found, (begin + end) // 2, end - begin
    assert best is not None
    return best


class GpuClock:
    """Translates times of the GPU. Samples both clocks when it is made, and again when it is asked to.

    Args:
        world: whose GPU it is.

    Attributes:
        error_ns: how wrong a sample may be.
    """

    def __init__(self, world):
        # The kernel writes to memory of the host: a copy would wait for kernels of the default stream.
        self._address = world.memory.pinned(8)
        self._stream = torch.cuda.Stream(world.device)
        self._driver = cuda_memory.Driver(world.device.index)
        self._module = self._driver.call("cuModuleLoadData", _KERNEL)
        self._function = self._driver.call("cuModuleGetFunction", self._module, b"tilescale_net_clock")
        self.error_ns = 0
        self._sample()  # loads it
        self.error_ns = 0
        self._first = self._last = self._sample()

    def sample_again(self) -> None:
        """Take a second pair of times, so that what one clock gains on the other is known."""
        self._last = self._sample()

    def _sample(self) -> tuple[int, int]:
        """(GPU, process), in nanoseconds, of the same moment."""

        def clock() -> int:
            self._driver.call("cuLaunchKernel", self._function, 1, 1, 1, 1, 1, 1, 0, stream, out, 0)
            self._stream.synchronize()
            return ctypes.c_int64.from_address(self._address).value

        stream, out = self._stream.cuda_stream, ((self._address,), (ctypes.c_void_p,))
        with torch.cuda.stream(self._stream):
            gpu, process, took = quickest(clock)
        self.error_ns = max(self.error_ns, took // 2)
        return gpu, process

    def process_ns(self, gpu_ns: int) -> int:
        """A time of the GPU as one of this process."""
        (gpu, process), (later_gpu, later_process) = self._first, self._last
        passed = gpu_ns - gpu
        if later_gpu - gpu < _APART_NS:
            return process + passed
        return process + passed * (later_process - process) // (later_gpu - gpu)
