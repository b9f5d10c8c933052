"""Events of callers, and the order of calls that are made on different streams."""

import contextlib

import pytest
import torch

from tilescale_net.deep_ep import EventHandle, EventOverlap
from tilescale_net.deep_ep.event import StreamOrder


def test_a_wait_and_what_comes_after_it():
    event, seen = EventOverlap(EventHandle()), []
    event.register_hook_after_wait(lambda: seen.append(event.event))
    with pytest.raises(ValueError, match="registered already"):
        event.register_hook_after_wait(print)
    handle = event.event
    with event:
        assert not seen
    assert seen == [handle] and event.event is handle
    event.current_stream_wait()
    with event(release_handle=True):
        pass
    assert seen == [handle] and event.event is None
    with pytest.raises(ValueError, match="there is no event"):
        event.current_stream_wait(release_handle=True)
    with event:  # as results of calls without async_finish are used
        pass


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
    order = StreamOrder(torch.device("cuda", 0))
    for key in (0, 0, 1, 1, 0):
        current[0] = key
        order.follow()
    assert [s.waited for s in streams] == [[1], [0], []]
    streams[2].captured = True  # cannot wait for what is not captured, nor is waited for
    for key in (2, 2, 1):
        current[0] = key
        order.follow()
    assert [s.waited for s in streams] == [[1], [0], []]
    streams[0].captured = True
    for key in (2, 0):  # two streams of one capture
        current[0] = key
        order.follow()
    assert streams[0].waited == [1, 2]
    StreamOrder(torch.device("cpu")).follow()
