"""Where some programs import DeepEP's events from."""

from tilescale_net.deep_ep.utils.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
