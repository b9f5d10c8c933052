"""When kernels without primitives ran on a GPU: CUDA events around each launch, read when they are long past.

Others note it themselves, see traced_kernels.py.
"""

import collections
from collections.abc import Callable

import torch

from tilescale_net.trace.events import FIRST_STREAM
from tilescale_net.trace.gpu_clock import quickest

_UNREAD = 256  # launches after which the finished ones are read


def _moment() -> tuple[torch.cuda.Event, int]:
    """An event, and when it was in nanoseconds of this process."""

    def event() -> torch.cuda.Event:
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        made.synchronize()
        return made

    return quickest(event)[:2]


class GpuKernels:
    """Times launches of kernels by name.

    Args:
        add: takes a name, begin and end in nanoseconds of this process's clock, and the track of the stream.
    """

    def __init__(self, add: Callable[[str, int, int, int], None]):
        self._add = add
        self._pending: collections.deque = collections.deque()
        self._streams: dict[int, int] = {}
        self._base, self._base_ns = _moment()
        self._first_ns = self._base_ns
        self.ended = False

    def timed(self, function: Callable, name: str) -> Callable:
        """`function`, which launches a kernel on the current stream, with events around it. Not in captured graphs."""

        def launch(*args):
            if self.ended or torch.cuda.is_current_stream_capturing():
                return function(*args)
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
        """Add what has finished, in the order of the launches; waits for nothing."""
        while self._pending and self._pending[0][2].query():
            name, begin, end, stream = self._pending.popleft()
            begin_ns = self._base_ns + int(self._base.elapsed_time(begin) * 1e6)
            end_ns = begin_ns + int(begin.elapsed_time(end) * 1e6)
            self._add(name, begin_ns, max(begin_ns, end_ns), stream)
            # Milliseconds in 32 bits are coarse after minutes: the next ones count from here.
            self._base, self._base_ns = end, end_ns

    def correction(self) -> Callable[[int], int]:
        """What makes the times that were added right, when nothing is launched any more: by then it is known how much faster
        the GPU's clock runs than this process's, some 40 us a second."""
        event, now_ns = _moment()
        told_ns = self._base_ns + int(self._base.elapsed_time(event) * 1e6)
        first, told, passed = self._first_ns, max(1, told_ns - self._first_ns), now_ns - self._first_ns
        return lambda ns: first + (ns - first) * passed // told
