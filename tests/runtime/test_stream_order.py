"""The order of calls that are made on different streams."""

import contextlib

import torch

from tilescale_net.runtime.launch_args import StreamOrder


class _Stream:
    """Of a GPU that is not there: remembers which streams it waits for."""

    def __init__(self, key: int):
        self.key, self.captured, self.waited = key, False, []

    def wait_stream(self, other) -> None:
        self.waited.append(other.key)


def test_calls_on_different_streams(monkeypatch):
    streams, current = [_Stream(key) for key in range(3)], [0]

    @contextlib.contextmanager
    def inside(stream):
        before, current[0] = current[0], stream.key
        yield
        current[0] = before

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[current[0]])
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: streams[current[0]].captured)
    order = StreamOrder(torch.device("cuda", 0))  # made on stream 0, whose work the first call waits for
    for key in (1, 1, 0, 0):
        current[0] = key
        order.follow()
    assert [s.waited for s in streams] == [[1], [0], []]
    streams[2].captured = True  # cannot wait for what is not captured, nor is waited for
    for key in (2, 2, 1):
        current[0] = key
        order.follow()
    assert [s.waited for s in streams] == [[1], [0, 0], []]  # the last that was not captured is not forgotten
    streams[0].captured = True
    for key in (2, 0):  # two streams of one capture
        current[0] = key
        order.follow()
    assert streams[0].waited == [1, 2]
    StreamOrder(torch.device("cpu")).follow()
