"""Trace of a GPU: the ring of calls in its memory, launches of kernels without primitives, and its clock."""

from __future__ import annotations

import collections
import ctypes
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tilescale_net.runtime import cuda_memory
from tilescale_net.trace import traced_calls
from tilescale_net.trace.events import FIRST_STREAM, Ring
from tilescale_net.trace.traced_calls import TracedCalls

# -- clock ------------------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from tilescale_net.runtime.world import World

Launch = Callable[..., None]
T = TypeVar("T")
_SAMPLES = 16
_APART_NS = 1_000_000_000  # closer samples do not give the clocks' relative rate


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
    """Result of the quickest of several calls, its middle and its duration, in nanoseconds of this process."""
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
    """Translates times of the GPU. Samples both clocks at construction, and again on request. `world`: of the GPU.
    `error_ns`: error of a sample."""

    def __init__(self, world: World):
        # The kernel writes to memory of the host: a copy would wait for kernels of the default stream.
        assert world.memory is not None
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
        """Sample a second pair of times, for the drift between the clocks."""
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


# -- calls of primitives ----------------------------------------------------------------------------------------------


class GpuCalls:
    """The ring of one GPU. `world`: whose kernels write to it. `capacity`: of calls; rounded down to a power
    of two."""

    def __init__(self, world: World, capacity: int):
        assert world.memory is not None
        self._memory = world.memory
        self._capacity_log2 = capacity.bit_length() - 1
        with torch.inference_mode(False):
            self._buffer = self._memory.upload(traced_calls.empty(1 << self._capacity_log2))
            # Reports of hangs read it while a kernel runs: no allocation then, and no wait for the default stream.
            self._copy = torch.zeros(self._buffer.numel(), dtype=torch.uint8, device="cpu").pin_memory()
            self._word = torch.zeros(8, dtype=torch.uint8, device="cpu").pin_memory()
        self._stream = torch.cuda.Stream(world.device)
        self._copying = threading.Lock()
        self._clock = GpuClock(world)

    @property
    def address(self) -> int:
        """Address of the ring for the kernels' context, see device/traced_calls.h."""
        return self._buffer.data_ptr() | self._capacity_log2

    @property
    def error_ns(self) -> int:
        """Error of times relative to this process's clock."""
        return self._clock.error_ns

    def _copied(self, source: torch.Tensor, target: torch.Tensor) -> bytes:
        with self._copying, torch.inference_mode(), torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._stream.synchronize()
            return ctypes.string_at(target.data_ptr(), target.numel())

    def calls(self) -> TracedCalls:
        """The calls so far."""
        return traced_calls.read(self._copied(self._buffer, self._copy), self._memory.base)

    def word(self, offset: int) -> int:
        """The current value of a word of the heap."""
        return int.from_bytes(self._copied(self._memory.bytes_tensor(offset, 8), self._word), "little")

    def process_ns(self, gpu_ns: int) -> int:
        """A time of the GPU as one of this process."""
        return self._clock.process_ns(gpu_ns)

    def write(self, ring: Ring) -> None:
        """After the kernels' end, write the calls to a part with twice as many events, and close it."""
        self._clock.sample_again()
        calls = self.calls()
        there = {(known.call.begin_ns, known.call.block, known.call.thread) for known in calls.ended}
        waits = [w for w in calls.waits if (w.call.begin_ns, w.call.block, w.call.thread) not in there]
        traced_calls.write_launches(calls.ended, ring, self.process_ns)
        traced_calls.write_calls([*calls.ended, *waits], ring, self.process_ns, time.monotonic_ns())
        ring.dropped(calls.dropped)
        ring.close()


# -- launches of kernels without primitives ---------------------------------------------------------------------------

_UNREAD = 256  # launches after which the finished ones are read


def _moment() -> tuple[torch.cuda.Event, int]:
    """An event, and its time in nanoseconds of this process."""

    def event() -> torch.cuda.Event:
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        made.synchronize()
        return made

    return quickest(event)[:2]


class GpuKernels:
    """Times launches of kernels by name. `add`: takes a name, begin and end in nanoseconds of this process's clock, and
    the track of the stream."""

    def __init__(self, add: Callable[[str, int, int, int], None]):
        self._add = add
        self._pending: collections.deque[tuple[str, torch.cuda.Event, torch.cuda.Event, int]] = collections.deque()
        self._streams: dict[int, int] = {}
        self._base, self._base_ns = _moment()
        self._first_ns = self._base_ns
        self.ended = False

    def timed(self, function: Launch, name: str) -> Launch:
        """`function`, which launches a kernel on the current stream, with events around it. Not in captured graphs."""

        def launch(*args: Any) -> None:
            if self.ended or torch.cuda.is_current_stream_capturing():
                function(*args)
                return
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            function(*args)
            end.record()
            stream = self._streams.setdefault(
                torch.cuda.current_stream().cuda_stream, FIRST_STREAM + len(self._streams)
            )
            self._pending.append((name, begin, end, stream))
            if len(self._pending) >= _UNREAD:
                self.read()

        return launch

    def read(self) -> None:
        """Add finished launches, in order, without waiting."""
        while self._pending and self._pending[0][2].query():
            name, begin, end, stream = self._pending.popleft()
            begin_ns = self._base_ns + int(self._base.elapsed_time(begin) * 1e6)
            end_ns = begin_ns + int(begin.elapsed_time(end) * 1e6)
            self._add(name, begin_ns, max(begin_ns, end_ns), stream)
            # Float32 milliseconds get coarse after minutes: the next ones count from here.
            self._base, self._base_ns = end, end_ns

    def correction(self) -> Callable[[int], int]:
        """Correction of the added times, after the last launch: by then the drift of the GPU's clock against this
        process's is known, some 40 us a second."""
        event, now_ns = _moment()
        measured_ns = self._base_ns + int(self._base.elapsed_time(event) * 1e6)
        first, measured, passed = self._first_ns, max(1, measured_ns - self._first_ns), now_ns - self._first_ns
        return lambda ns: first + (ns - first) * passed // measured
