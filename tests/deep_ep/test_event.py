"""Events of callers."""

import pytest

from tilescale_net.deep_ep import EventHandle, EventOverlap


def test_work_after_a_wait():
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
