"""Where the first halves of throughput mode run while the caller goes on: a stream of its own, or its stand-in."""

import contextlib
from collections.abc import Hashable

import torch


def stream_key(device: torch.device) -> Hashable:
    """What stands for the current stream; None while it is captured into a CUDA graph."""
    if device.type != "cuda":
        return 0
    if torch._C._cuda_isCurrentStreamCapturing():
        return None
    return torch._C._cuda_getCurrentRawStream(device.index)  # a tenth of what current_stream costs


class SideStream:
    """A CUDA stream of high priority beside the caller's.

    Args:
        in_order: launches on the caller's stream wait for those made on the side before.
    """

    def __init__(self, device: torch.device, in_order: bool = False):
        self._device, self._in_order = device, in_order
        self._on_side, self._last = False, None
        self._stream = torch.cuda.Stream(device, priority=-1)

    def launch(self, kernel, *arguments) -> None:
        """Launch a kernel on the current stream."""
        if self._in_order and self._last is not None and not self._on_side:
            self.wait(self._last)
        kernel(*arguments)

    def key(self) -> Hashable:
        """See `stream_key`."""
        return stream_key(self._device)

    @contextlib.contextmanager
    def on_side(self, tensors):
        """Run launches on this stream, after what the current stream holds; yields what `wait` waits for.

        Args:
            tensors: of the caller, which the launches use.
        """
        event = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in tensors:
            tensor.record_stream(self._stream)
        self._on_side = True
        try:
            with torch.cuda.stream(self._stream):
                yield event
                event.record(self._stream)
        finally:
            self._on_side = False
        self._last = event

    def forget(self) -> None:
        """Nothing is kept: what was launched has ended."""
        self._last = None

    def wait(self, event) -> None:
        """Let the current stream wait for what ran on the side."""
        if event is self._last:
            self._last = None
        torch.cuda.current_stream(self._device).wait_event(event)


class DeferredStream:
    """The simulator's stand-in: launches made on the side run when they are waited for, as late as a GPU may run them.

    What happens to their arguments in between, or to memory that they share with other calls, then shows in the data.

    Args:
        in_order: see SideStream.
    """

    def __init__(self, in_order: bool = False):
        self._on_side, self._in_order = False, in_order
        self._queue: list[tuple] = []
        self._sent = self._done = 0

    def launch(self, kernel, *arguments) -> None:
        """Launch a kernel, or keep it for later."""
        if self._on_side:
            self._queue.append((kernel, arguments))
            self._sent += 1
        else:
            if self._in_order:
                self.wait([self._sent])
            kernel(*arguments)

    def key(self) -> Hashable:
        """See `stream_key`."""
        return self._on_side

    @contextlib.contextmanager
    def on_side(self, tensors):
        """Keep the launches made inside; yields what `wait` waits for."""
        self._on_side, marks = True, []
        try:
            yield marks
        finally:
            self._on_side = False
            marks.append(self._sent)

    def forget(self) -> None:
        """Launches that were kept are not made any more."""
        self._queue.clear()
        self._done = self._sent

    def wait(self, marks: list[int]) -> None:
        """Run what was kept, in order, up to the launches of one `on_side`."""
        while self._done < marks[0]:
            kernel, arguments = self._queue.pop(0)
            self._done += 1
            kernel(*arguments)
