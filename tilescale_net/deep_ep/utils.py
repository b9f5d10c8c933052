"""Events for the overlap of communication and computation; also `deep_ep.utils.event`, as in the second version."""

import sys
from collections.abc import Callable

import torch

__path__: list[str] = []  # a package: programs add folders with their own modules
sys.modules[f"{__name__}.event"] = sys.modules[__name__]


class EventHandle:
    """The work on the current stream so far. In the simulator it has already ended."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event() if torch.cuda.is_available() else None
        if self._event is not None:
            self._event.record()

    def current_stream_wait(self) -> None:
        """Make the current stream wait for it."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """An event, or none, and the tensors that must live until it has happened.

    Args:
        event: EventHandle or None.
        extra_tensors: tensors that it keeps alive.

    As a context manager it makes the current stream wait at the end of the block; if it was called with `release_handle`, it
    then drops the event.

    Attributes:
        event, extra_tensors: the arguments.
        hook_after_wait: function that the next wait calls after its launch; see `register_hook_after_wait`.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None):
        self.event, self.extra_tensors = event, extra_tensors
        self.hook_after_wait: Callable[[], None] | None = None
        self._releases = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Make the current stream wait for the event. ValueError without an event.

        Args:
            release_handle: drop the event.
        """
        if self.event is None:
            raise ValueError("EventOverlap: there is no event; calls return one with async_finish=True")
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], None]) -> None:
        """Register a function to call once, after the next wait. Raises ValueError if one is registered already."""
        if self.hook_after_wait is not None:
            raise ValueError("EventOverlap: a hook is registered already; wait for the event before another one is")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> "EventOverlap":
        """This object, for `with`; arguments as in `current_stream_wait`."""
        self._releases = release_handle
        return self

    def __enter__(self) -> "EventOverlap":
        return self

    def __exit__(self, *exception: object) -> None:
        releases, self._releases = self._releases, False
        if self.event is not None:
            self.current_stream_wait(releases)


def begin(previous_event: EventOverlap | None, async_finish: bool, allocate_on_comm_stream: bool) -> None:
    """Begin a call after `previous_event`. Raises ValueError for a combination that DeepEP rejects."""
    has_event = previous_event is not None and previous_event.event is not None
    if allocate_on_comm_stream and not (has_event and async_finish):
        raise ValueError("allocate_on_comm_stream goes with previous_event and async_finish=True")
    if previous_event is not None and has_event:
        previous_event.current_stream_wait()


def end(async_finish: bool) -> EventOverlap:
    """The result of a call: an event after it, if requested."""
    return EventOverlap(EventHandle() if async_finish else None)
