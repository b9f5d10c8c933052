"""Calls of primitives by kernels on a GPU: the ring in its memory, and copies of it while kernels run."""

import ctypes
import threading
import time

import torch

from tilescale_net.trace import traced_calls, traced_kernels
from tilescale_net.trace.gpu_clock import GpuClock
from tilescale_net.trace.ring import Ring
from tilescale_net.trace.traced_calls import TracedCalls


class GpuCalls:
    """The ring of one GPU.

    Args:
        world: whose kernels write to it.
        capacity: calls that are kept; taken down to a power of two.
    """

    def __init__(self, world, capacity: int):
        self._world = world
        self._capacity_log2 = capacity.bit_length() - 1
        with torch.inference_mode(False):
            self._buffer = world.memory.upload(traced_calls.empty(1 << self._capacity_log2))
            # A hang is looked at while a kernel runs: nothing may be allocated then, or wait for the default stream.
            self._copy = torch.zeros(self._buffer.numel(), dtype=torch.uint8, device="cpu").pin_memory()
            self._word = torch.zeros(8, dtype=torch.uint8, device="cpu").pin_memory()
        self._stream = torch.cuda.Stream(world.device)
        self._copying = threading.Lock()
        self._clock = GpuClock(world)

    @property
    def address(self) -> int:
        """Of the ring, for the context of kernels, as device/traced_calls.h wants it."""
        return self._buffer.data_ptr() | self._capacity_log2

    @property
    def error_ns(self) -> int:
        """How wrong times may be against those of this process."""
        return self._clock.error_ns

    def _copied(self, source: torch.Tensor, target: torch.Tensor) -> bytes:
        with self._copying, torch.inference_mode(), torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._stream.synchronize()
            return ctypes.string_at(target.data_ptr(), target.numel())

    def calls(self) -> TracedCalls:
        """The calls so far."""
        return traced_calls.read(self._copied(self._buffer, self._copy), self._world.memory.base)

    def word(self, offset: int) -> int:
        """A word of the heap as it is now."""
        return int.from_bytes(self._copied(self._world.memory.bytes_tensor(offset, 8), self._word), "little")

    def process_ns(self, gpu_ns: int) -> int:
        """A time of the GPU as one of this process."""
        return self._clock.process_ns(gpu_ns)

    def write(self, ring: Ring) -> None:
        """Write the calls to a part that holds twice as many events, when the kernels have ended, and close it."""
        self._clock.sample_again()
        calls = self.calls()
        there = {(known.call.begin_ns, known.call.block, known.call.thread) for known in calls.ended}
        waits = [w for w in calls.waits if (w.call.begin_ns, w.call.block, w.call.thread) not in there]
        traced_kernels.write(calls.ended, ring, self.process_ns)
        traced_calls.write([*calls.ended, *waits], ring, self.process_ns, time.monotonic_ns())
        ring.dropped(calls.dropped)
        ring.close()
