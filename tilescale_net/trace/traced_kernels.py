"""When kernels ran on a GPU, by what the first thread of each block has noted; in CUDA graphs too."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tilescale_net.trace import events
from tilescale_net.trace.ring import Ring
from tilescale_net.trace.traced_calls import KnownCall, TracedCall


@dataclass
class Launch:
    """A launch of a kernel: from the first of its blocks to the last, in nanoseconds of the GPU's clock.

    Attributes:
        name: of the kernel.
        blocks: how many it has.
        found: numbers of those in the trace.
    """

    name: str
    blocks: int
    begin_ns: int
    end_ns: int
    found: set[int] = field(default_factory=set)

    def has(self, call: TracedCall) -> bool:
        """Whether a block that begins no earlier than those that are here may be one of the same launch."""
        return call.begin_ns <= self.end_ns and call.block not in self.found

    def add(self, call: TracedCall) -> None:
        self.end_ns = max(self.end_ns, call.end_ns)
        self.found.add(call.block)


def launches(calls: Sequence[KnownCall]) -> list[Launch]:
    """The launches that have ended, by their beginnings."""
    found: list[Launch] = []
    incomplete: dict[str, list[Launch]] = {}
    blocks = [known for known in calls if known.site.operation == "kernel"]
    for known in sorted(blocks, key=lambda known: known.call.begin_ns):
        call, begun = known.call, incomplete.setdefault(known.kernel, [])
        launch = next((one for one in begun if one.has(call)), None)
        if launch is None:
            launch = Launch(known.kernel, call.value, call.begin_ns, call.end_ns)
            found.append(launch)
            begun.append(launch)
        launch.add(call)
        begun[:] = [one for one in begun if len(one.found) < one.blocks and one.end_ns >= call.begin_ns]
    return found


def write(calls: Sequence[KnownCall], ring: Ring, process_ns: Callable[[int], int]) -> None:
    """Add the launches to a part of the trace; those that run at the same time are on different tracks.

    Args:
        process_ns: translates times of the GPU.
    """
    free_from: list[int] = []  # of each track
    for launch in launches(calls):
        begin = process_ns(launch.begin_ns)
        end = max(begin, process_ns(launch.end_ns))
        track = next((n for n, free in enumerate(free_from) if free <= begin), len(free_from))
        free_from[track : track + 1] = [end]
        ring.add_span(events.Kind.KERNEL, ring.name(launch.name), begin, end, track)
