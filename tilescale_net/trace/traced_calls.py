"""The ring of calls that GPU kernels write, see device/traced_calls.h: its layout, its reader, and the meanings of call
numbers.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tilescale_net.runtime import context
from tilescale_net.trace import events
from tilescale_net.trace.events import Ring

# -- numbers of calls -------------------------------------------------------------------------------------------------

# Operations in which a thread may wait for other ranks: kernels also record their begin, for the report of a hang.
WAITING = ("wait", "barrier", "barrier_grid", "quiet", "flush")


@dataclass(frozen=True)
class CallSite:
    """A call in a kernel. `name`: of the primitive, such as "N.put_block", or of the range that begins, or of the
    kernel. `operation`: one of context.OPERATIONS, or "range_begin", "range_end" and "kernel". `compare`: of a wait,
    one of context.COMPARISONS, or "". `line`: of the author, such as "file.py:12", or ""."""

    name: str
    operation: str
    compare: str
    line: str

    def without_line(self) -> "CallSite":
        return replace(self, line="")


@dataclass(frozen=True)
class KernelSites:
    """The calls of a kernel by number. `identity`: 16 bits, not 0, that identify the kernel in the trace."""

    identity: int
    name: str
    calls: tuple[CallSite, ...]


_kernels: dict[int, KernelSites] = {}


def register_kernel(kernel: KernelSites) -> None:
    """Register the calls of a kernel that this process may launch."""
    _kernels[kernel.identity] = kernel


def call_of_number(site: int) -> tuple[str, CallSite] | None:
    """The kernel's name and the call for the number in an event; None if unknown."""
    kernel, index = _kernels.get(site >> 16), site & 0xFFFF
    return (kernel.name, kernel.calls[index]) if kernel is not None and index < len(kernel.calls) else None


# -- the ring ---------------------------------------------------------------------------------------------------------

# Operations that wait, and whose events say so.
_WAITS = ("wait", "barrier", "barrier_grid")
_SIGNALS = ("signal", "put_signal")


class TraceBuffer(ctypes.Structure):
    """tsn::TraceBuffer, the header of the ring."""

    _fields_ = context.fields("Q claimed capacity reserved*14")


class TracedCall(ctypes.Structure):
    """tsn::TracedCall."""

    _fields_ = context.fields("Q begin_ns end_ns word value bytes I site i pe I block thread Q number")


_HEAD_BYTES, _CALL_BYTES = ctypes.sizeof(TraceBuffer), ctypes.sizeof(TracedCall)
_WARPS = 1024 * 32  # kTracedBlocks * kTracedWarps


def empty(capacity: int) -> bytes:
    """A buffer for `capacity` calls, a power of two, in the layout that kernels take."""
    return bytes(TraceBuffer(capacity=capacity)) + bytes((capacity + 2 * _WARPS) * _CALL_BYTES)


@dataclass(frozen=True)
class KnownCall:
    """A call in the ring, with its kernel's name and its place there."""

    kernel: str
    site: CallSite
    call: TracedCall


@dataclass(frozen=True)
class TracedCalls:
    """Contents of a buffer. `ended`: calls that have ended, the oldest first. `waits`: pending calls, or calls cut
    short by an abort. `dropped`: upper bound of lost older calls: threads may claim a slot for a call that they never
    make."""

    ended: list[KnownCall]
    waits: list[KnownCall]
    dropped: int


def read(raw: bytes, heap: int) -> TracedCalls:
    """Parse a buffer. `heap`: address of the kernels' heap; words of calls are offsets in it."""
    head = TraceBuffer.from_buffer_copy(raw)
    kept = min(head.claimed, head.capacity)
    ring = (TracedCall * kept).from_buffer_copy(raw, _HEAD_BYTES) if kept else ()
    # The slot of a call that has not ended, or was never made, holds an older call or none.
    ages = ((head.claimed - call.number - 1) % (1 << 32) for call in ring)
    ended = [call for age, call in sorted(zip(ages, ring), key=lambda pair: -pair[0]) if age < kept and call.site]
    tables = (TracedCall * (2 * _WARPS)).from_buffer_copy(raw, _HEAD_BYTES + head.capacity * _CALL_BYTES)
    waits = sorted((call for call in tables if call.site and not call.end_ns), key=lambda call: call.begin_ns)
    for call in (*ended, *waits):
        if call.word != events.NO_WORD:
            call.word -= heap  # modulo 2^64, as a thread may have written half of it
    return TracedCalls(_known(ended), _known(waits), head.claimed - kept)


def _known(calls: Sequence[TracedCall]) -> list[KnownCall]:
    """Calls with a known kernel: a half-written one may have any number."""
    found = ((call_of_number(call.site), call) for call in calls)
    return [KnownCall(*known, call) for known, call in found if known is not None]


def signals(calls: Sequence[KnownCall]) -> list[KnownCall]:
    """Calls that have sent signals."""
    return [known for known in calls if known.site.operation in _SIGNALS and known.call.word != events.NO_WORD]


def write_calls(calls: Sequence[KnownCall], ring: Ring, process_ns: Callable[[int], int], now: int) -> None:
    """Add the calls to a part of the trace, two events for a waiting one. `process_ns`: translates times of the GPU.
    `now`: end of pending calls in nanoseconds of this process."""

    def event_of(known: KnownCall, kind: int, end_ns: int, **more: int) -> events.Event:
        call, site, begin = known.call, known.site, process_ns(known.call.begin_ns)
        names = {"name": ring.name(site.name), "line": ring.name(site.line)}
        place = {"block": call.block, "thread": call.thread}
        return events.Event(begin, max(begin, end_ns), kind=kind, **names, **place, **more)

    ranges: dict[tuple[int, int], list[KnownCall]] = {}
    for known in calls:
        call, site = known.call, known.site
        if site.operation == "kernel":  # see gpu.py
            continue
        if site.operation == "range_begin":
            ranges.setdefault((call.block, call.thread), []).append(known)
            continue
        if site.operation == "range_end":
            if begun := ranges.get((call.block, call.thread)):  # otherwise its beginning is gone
                end, more = process_ns(call.begin_ns), {"pe": -1, "word": events.NO_WORD}
                ring.add(event_of(begun.pop(), events.Kind.KERNEL_RANGE, end, **more))
            continue
        event = event_of(
            known, events.Kind.CALL, process_ns(call.end_ns) if call.end_ns else now, pe=call.pe, word=call.word,
            operation=context.OPERATIONS.index(site.operation), value=call.value, bytes=call.bytes,
        )  # fmt: skip
        ring.add(event)
        if site.operation in _WAITS:
            event.kind, event.bytes = events.Kind.WAIT, 0
            ring.add(event)


# -- launches ---------------------------------------------------------------------------------------------------------


@dataclass
class Launch:
    """A launch of a kernel: from the first of its blocks to the last, in nanoseconds of the GPU's clock. `name`: of the
    kernel. `blocks`: how many it has. `found`: numbers of those in the trace."""

    name: str
    blocks: int
    begin_ns: int
    end_ns: int
    found: set[int] = field(default_factory=set)

    def has(self, call: TracedCall) -> bool:
        """Whether a block that begins no earlier than the known ones may belong to the same launch."""
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


def write_launches(calls: Sequence[KnownCall], ring: Ring, process_ns: Callable[[int], int]) -> None:
    """Add the launches to a part of the trace; concurrent ones on different tracks. `process_ns`:
    translates times of the GPU."""
    free_from: list[int] = []  # of each track
    for launch in launches(calls):
        begin = process_ns(launch.begin_ns)
        end = max(begin, process_ns(launch.end_ns))
        track = next((n for n, free in enumerate(free_from) if free <= begin), len(free_from))
        free_from[track : track + 1] = [end]
        ring.add_span(events.Kind.KERNEL, ring.name(launch.name), begin, end, track)
