"""Where the second version has its events."""

from tilescale_net.deep_ep.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
