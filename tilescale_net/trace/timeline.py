"""From the parts of all ranks to one timeline in the JSON that Perfetto and chrome://tracing open.

A process is a rank. Its tracks: calls of the host, kernels, the threads of blocks that lead calls, and the proxy's threads;
transfers of the proxy overlap and are asynchronous events. An arrow leads from each signal to the wait that saw it.
"""

import contextlib
import glob
import json
import os
import re
from collections.abc import Callable

from tilescale_net.errors import TileScaleError
from tilescale_net.trace import arrows, events, part_reader
from tilescale_net.trace.events import Kind

# First numbers of a rank's tracks.
_HOST, _KERNELS, _PROXY, _BLOCKS = 1, 200, 400, 1000
_THREADS = 1024  # of a block
_CATEGORY = {
    Kind.KERNEL: "kernel", Kind.CALL: "call", Kind.WAIT: "wait", Kind.HOST: "host", Kind.RANGE: "range",
    Kind.ENTRY: "proxy", Kind.TRANSFER: "proxy", Kind.STAGING: "proxy", Kind.DELIVERED: "proxy",
    Kind.KERNEL_RANGE: "range",
}  # fmt: skip


def process_of(rank: int) -> int:
    """The number that a rank has as a process of the timeline: Perfetto takes process 0 for the idle one."""
    return rank + 1


def rank_of(event: dict) -> int:
    """The rank of an event of the timeline."""
    return event["pid"] - 1


def part_path(path: str, rank: int, what: str) -> str:
    """The file of one part: "host", "kernels" or "proxy0", ….."""
    return f"{path}.rank{rank}.{what}.part"


def part_files(path: str, rank: int | None = None) -> list[str]:
    """The parts that lie beside `path`, of one rank or of all, in order."""
    found = glob.glob(f"{glob.escape(path)}.rank{'*' if rank is None else rank}.*.part")
    return sorted(found, key=lambda p: [int(w) if w.isdigit() else w for w in re.split(r"(\d+)", p)])


def read_parts(path: str, rank: int | None = None) -> list[part_reader.Part]:
    """What they hold. Raises ValueError for one that is damaged."""
    parts = []
    for file in part_files(path, rank):
        parts.append(part_reader.read_file(file, file.split(".")[-2]))
    return parts


def remove_parts(path: str) -> None:
    for file in part_files(path):
        with contextlib.suppress(OSError):
            os.unlink(file)


def write(path: str, parts: list[part_reader.Part], name_of: Callable[[int], str | None] = lambda offset: None) -> None:
    """Write the timeline, all of it or nothing.

    Args:
        name_of: names the tensor element at a heap offset.

    Raises:
        TileScaleError: the file cannot be written.
    """
    text = json.dumps(merged(parts, name_of), separators=(",", ":"))
    try:
        with open(f"{path}.tmp", "w") as file:
            file.write(text)
        os.replace(f"{path}.tmp", path)
    except OSError as err:
        raise TileScaleError(
            f"the trace {path} cannot be written ({err.strerror}); its parts are left beside it"
        ) from err


def merged(parts: list[part_reader.Part], name_of: Callable[[int], str | None] = lambda offset: None) -> dict:
    """The timeline as a value for JSON; times begin with 0 at the first event."""
    base = min((event.begin_ns for part in parts for event in part.events), default=0)
    out: list[dict] = []
    tracks: set[tuple[int, int, str]] = set()
    waits, sends = [], []
    for part in parts:
        for event in part.events:
            out += _shown(part, event, base, tracks, name_of)
            if arrows.is_send(event):
                sends.append((part, event))
            elif event.kind == Kind.WAIT or arrows.is_wait(event):
                waits.append((part, event))
    matched = arrows.match(sends, waits)
    out += _arrows(matched, base)
    out += [
        _wait(part, event, sender, base)
        for (part, event), sender in zip(waits, matched.values_in_order(waits))
        if event.kind == Kind.WAIT
    ]
    names = [_meta("process_name", rank, 0, f"rank {rank}") for rank in sorted({part.rank for part in parts})]
    names += [_meta("thread_name", rank, track, name) for rank, track, name in sorted(tracks)]
    return {
        "traceEvents": names + out,
        "displayTimeUnit": "ns",
        "otherData": {
            "ranks": max((part.size for part in parts), default=0),
            "dropped": {str(r): sum(p.dropped for p in parts if p.rank == r) for r in sorted({p.rank for p in parts})},
            "clock_error_us": max((part.error_ns for part in parts), default=0) / 1e3,
        },
    }


def _meta(kind: str, rank: int, track: int, name: str) -> dict:
    return {"ph": "M", "name": kind, "pid": process_of(rank), "tid": track, "args": {"name": name}}


def _track(part: part_reader.Part, event: events.Event, tracks: set) -> int:
    if event.kind in (Kind.CALL, Kind.WAIT, Kind.KERNEL_RANGE):
        track, name = _BLOCKS + event.block * _THREADS + event.thread, f"block {event.block} thread {event.thread}"
    elif event.kind == Kind.KERNEL:
        stream = event.thread - events.FIRST_STREAM
        told = f"kernels without primitives, stream {stream}" if stream >= 0 else f"kernels {event.thread}"
        track, name = _KERNELS + event.thread, told if event.thread else "kernels"
    elif event.kind in (Kind.HOST, Kind.RANGE):
        track, name = _HOST + event.thread, f"host thread {event.thread}" if event.thread else "host"
    else:
        named = re.fullmatch(r"proxy(\d{1,6})", part.what, re.ASCII)  # the name comes from another host
        number = int(named[1]) if named else 0
        track, name = _PROXY + number, f"proxy thread {number}"
    tracks.add((part.rank, track, name))
    return track


def _shown(part: part_reader.Part, event: events.Event, base: int, tracks: set, name_of) -> list[dict]:
    """The events of JSON that show an event; none for waits inside of calls, which come with their sender."""
    track = _track(part, event, tracks)
    if event.kind == Kind.WAIT:
        return []
    shown = {
        "name": _name(part, event), "cat": _CATEGORY[event.kind], "pid": process_of(part.rank), "tid": track,
        "ts": (event.begin_ns - base) / 1e3, "args": _arguments(part, event, name_of),
    }  # fmt: skip
    if event.kind in (Kind.ENTRY, Kind.DELIVERED):
        return [shown | {"ph": "i", "s": "t"}]
    if event.kind == Kind.TRANSFER:
        key = f"{part.rank}.{part.what}.{len(tracks)}.{event.begin_ns}.{event.value}"
        end = {k: shown[k] for k in ("name", "cat", "pid", "tid")} | {"ts": (event.end_ns - base) / 1e3}
        return [shown | {"ph": "b", "id": key}, end | {"ph": "e", "id": key}]
    return [shown | {"ph": "X", "dur": (event.end_ns - event.begin_ns) / 1e3}]


def _name(part: part_reader.Part, event: events.Event) -> str:
    name = part.text(event.name)
    return name.removesuffix("_kernel") if event.kind == Kind.KERNEL else name


def _arguments(part: part_reader.Part, event: events.Event, name_of) -> dict:
    found: dict = {}
    if part.text(event.line):
        found["line"] = part.text(event.line)
    if event.pe >= 0:
        found["pe"] = event.pe
    if event.bytes:
        found["bytes"] = event.bytes
    if event.word != events.NO_WORD:
        name = name_of(event.word)
        found["word"] = f"{name} at {event.word}" if name else event.word
        found["value"] = event.value
    return found


def _wait(part: part_reader.Part, event: events.Event, sender: int | None, base: int) -> dict:
    args = _arguments(part, event, lambda offset: None)
    args.pop("pe", None)
    if sender is not None:
        args["from"] = sender
    name = "waiting" if sender is None else f"waiting for rank {sender}"
    return {
        "ph": "X", "name": name, "cat": "wait", "pid": process_of(part.rank), "tid": _BLOCKS + event.block * _THREADS + event.thread,
        "ts": (event.begin_ns - base) / 1e3, "dur": (event.end_ns - event.begin_ns) / 1e3, "args": args,
    }  # fmt: skip


def _arrows(matched, base: int) -> list[dict]:
    out = []
    for number, ((part, event), (from_part, sent)) in enumerate(matched.pairs()):
        common = {"cat": "signal", "name": "signal", "id": number}
        start = {"pid": process_of(from_part.rank), "tid": _BLOCKS + sent.block * _THREADS + sent.thread}
        end = {"pid": process_of(part.rank), "tid": _BLOCKS + event.block * _THREADS + event.thread}
        out.append(common | start | {"ph": "s", "ts": (sent.begin_ns - base) / 1e3})
        out.append(common | end | {"ph": "f", "bp": "e", "ts": (event.end_ns - base) / 1e3})
    return out
