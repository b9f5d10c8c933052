"""Merges the parts of all ranks to a timeline in JSON for Perfetto and chrome://tracing, and summarises it.

A process is a rank. Its tracks: calls of the host, kernels, the threads of blocks that lead calls, and the proxy's threads;
transfers of the proxy overlap and are asynchronous events. An arrow leads from each signal to the wait that saw it.
"""

import bisect
import contextlib
import glob
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from tilescale_net.errors import ConfigurationError, TileScaleError
from tilescale_net.runtime import context
from tilescale_net.trace import events
from tilescale_net.trace.events import Kind

Json = dict[str, Any]
NameOf = Callable[[int], str | None]  # names the tensor element at a heap offset
Placed = tuple[events.Part, events.Event]

# First numbers of a rank's tracks.
_HOST, _KERNELS, _PROXY, _BLOCKS = 1, 200, 400, 1000
_THREADS = 1024  # of a block
_CATEGORY = {
    Kind.KERNEL: "kernel", Kind.CALL: "call", Kind.WAIT: "wait", Kind.HOST: "host", Kind.RANGE: "range",
    Kind.ENTRY: "proxy", Kind.TRANSFER: "proxy", Kind.STAGING: "proxy", Kind.DELIVERED: "proxy",
    Kind.KERNEL_RANGE: "range",
}  # fmt: skip


def process_of(rank: int) -> int:
    """A rank's process number in the timeline: Perfetto takes process 0 for the idle one."""
    return rank + 1


def rank_of(event: Json) -> int:
    """The rank of an event of the timeline."""
    return int(event["pid"]) - 1


def part_path(path: str, rank: int, what: str) -> str:
    """The file of one part: "host", "kernels" or "proxy0", ….."""
    return f"{path}.rank{rank}.{what}.part"


def part_files(path: str, rank: int | None = None) -> list[str]:
    """The parts that lie beside `path`, of one rank or of all, in order."""
    found = glob.glob(f"{glob.escape(path)}.rank{'*' if rank is None else rank}.*.part")
    return sorted(found, key=lambda p: [int(w) if w.isdigit() else w for w in re.split(r"(\d+)", p)])


def read_parts(path: str, rank: int | None = None) -> list[events.Part]:
    """The parts beside `path`, read. Raises ValueError for one that is damaged."""
    return [events.read_file(file, file.split(".")[-2]) for file in part_files(path, rank)]


def remove_parts(path: str) -> None:
    for file in part_files(path):
        with contextlib.suppress(OSError):
            os.unlink(file)


def write(path: str, parts: list[events.Part], name_of: NameOf = lambda offset: None) -> None:
    """Write the timeline, all of it or nothing. `name_of`: names the tensor element at a heap offset. Raises
    TileScaleError: the file cannot be written."""
    text = json.dumps(merged(parts, name_of), separators=(",", ":"))
    try:
        with open(f"{path}.tmp", "w") as file:
            file.write(text)
        os.replace(f"{path}.tmp", path)
    except OSError as err:
        raise TileScaleError(
            f"the trace {path} cannot be written ({err.strerror}); its parts are left beside it"
        ) from err


def merged(parts: list[events.Part], name_of: NameOf = lambda offset: None) -> Json:
    """The timeline as a value for JSON; times begin with 0 at the first event."""
    base = min((event.begin_ns for part in parts for event in part.events), default=0)
    out: list[Json] = []
    tracks: set[tuple[int, int, str]] = set()
    waits, sends = [], []
    for part in parts:
        for event in part.events:
            track, name = _track(part, event)
            tracks.add((part.rank, track, name))
            if event.kind != Kind.WAIT:  # those come with their senders
                out += _shown(part, event, track, len(tracks), base, name_of)
            if is_send(event):
                sends.append((part, event))
            elif event.kind == Kind.WAIT or (is_call(event) and event.operation == _WAIT):
                waits.append((part, event))
    matched = match(sends, waits)
    out += _arrows(
        [(wait, matched[id(wait[1])]) for wait in waits if is_call(wait[1]) and id(wait[1]) in matched], base
    )
    for part, event in waits:
        if event.kind == Kind.WAIT:
            send = matched.get(id(event))
            out.append(_wait(part, event, event.pe if event.pe >= 0 else send[0].rank if send else None, base))
    ranks = sorted({part.rank for part in parts})
    named = [("process_name", rank, 0, f"rank {rank}") for rank in ranks]
    named += [("thread_name", rank, track, name) for rank, track, name in sorted(tracks)]
    names = [
        {"ph": "M", "name": kind, "pid": process_of(rank), "tid": track, "args": {"name": name}}
        for kind, rank, track, name in named
    ]
    return {
        "traceEvents": names + out,
        "displayTimeUnit": "ns",
        "otherData": {
            "ranks": max((part.size for part in parts), default=0),
            "dropped": {str(rank): sum(part.dropped for part in parts if part.rank == rank) for rank in ranks},
            "clock_error_us": max((part.error_ns for part in parts), default=0) / 1e3,
        },
    }


def _thread_track(event: events.Event) -> int:
    return int(_BLOCKS + event.block * _THREADS + event.thread)


def _track(part: events.Part, event: events.Event) -> tuple[int, str]:
    """Number and name of the track that an event is on."""
    if event.kind in (Kind.CALL, Kind.WAIT, Kind.KERNEL_RANGE):
        return _thread_track(event), f"block {event.block} thread {event.thread}"
    if event.kind == Kind.KERNEL:
        stream = event.thread - events.FIRST_STREAM
        name = f"kernels without primitives, stream {stream}" if stream >= 0 else f"kernels {event.thread}"
        return _KERNELS + event.thread, name if event.thread else "kernels"
    if event.kind in (Kind.HOST, Kind.RANGE):
        return _HOST + event.thread, f"host thread {event.thread}" if event.thread else "host"
    named = re.fullmatch(r"proxy(\d{1,6})", part.what, re.ASCII)  # the name comes from another host
    number = int(named[1]) if named else 0
    return _PROXY + number, f"proxy thread {number}"


def _slice(part: events.Part, event: events.Event, track: int, base: int, name: str, category: str) -> Json:
    return {
        "name": name, "cat": category, "pid": process_of(part.rank), "tid": track, "ts": (event.begin_ns - base) / 1e3,
    }  # fmt: skip


def _shown(part: events.Part, event: events.Event, track: int, number: int, base: int, name_of: NameOf) -> list[Json]:
    """The JSON events of an event."""
    name = part.text(event.name)
    name = name.removesuffix("_kernel") if event.kind == Kind.KERNEL else name
    begin = _slice(part, event, track, base, name, _CATEGORY[event.kind])
    shown = begin | {"args": _arguments(part, event, name_of)}
    if event.kind in (Kind.ENTRY, Kind.DELIVERED):
        return [shown | {"ph": "i", "s": "t"}]
    if event.kind == Kind.TRANSFER:
        key = f"{part.rank}.{part.what}.{number}.{event.begin_ns}.{event.value}"
        end = begin | {"ts": (event.end_ns - base) / 1e3}
        return [shown | {"ph": "b", "id": key}, end | {"ph": "e", "id": key}]
    return [shown | {"ph": "X", "dur": (event.end_ns - event.begin_ns) / 1e3}]


def _arguments(part: events.Part, event: events.Event, name_of: NameOf) -> Json:
    found: Json = {}
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


def _wait(part: events.Part, event: events.Event, sender: int | None, base: int) -> Json:
    args = _arguments(part, event, lambda offset: None)
    args.pop("pe", None)
    if sender is not None:
        args["from"] = sender
    name = "waiting" if sender is None else f"waiting for rank {sender}"
    shown = _slice(part, event, _thread_track(event), base, name, "wait")
    return shown | {"ph": "X", "dur": (event.end_ns - event.begin_ns) / 1e3, "args": args}


def _arrows(pairs: list[tuple[Placed, Placed]], base: int) -> list[Json]:
    out = []
    for number, ((part, event), (from_part, sent)) in enumerate(pairs):
        start = _slice(from_part, sent, _thread_track(sent), base, "signal", "signal")
        end = _slice(part, event, _thread_track(event), base, "signal", "signal")
        out.append(start | {"ph": "s", "id": number})
        # Inside the slice: at its end, viewers may attach the arrow to the next slice.
        inside = max(event.begin_ns, event.end_ns - 1)
        out.append(end | {"ph": "f", "bp": "e", "id": number, "ts": (inside - base) / 1e3})
    return out


# -- which signal ended which wait ------------------------------------------------------------------------------------

_WAIT = context.OPERATIONS.index("wait")
_SENDS = {context.OPERATIONS.index("signal"), context.OPERATIONS.index("put_signal")}


def is_call(event: events.Event) -> bool:
    """Whether an event is a call of a primitive on a signal word."""
    return bool(event.kind == Kind.CALL and event.word != events.NO_WORD)


def is_send(event: events.Event) -> bool:
    """Whether an event is a call that sends a signal."""
    return bool(is_call(event) and event.operation in _SENDS)


def match(sends: list[Placed], waits: list[Placed]) -> dict[int, Placed]:
    """The signal that each wait saw, by `id` of the wait's event, if known: the latest signal with the seen value, or
    else the latest one, sent to its word before the wait ended."""
    by_word: dict[tuple[int, int], list[Placed]] = defaultdict(list)
    for place in sorted(sends, key=lambda place: place[1].begin_ns):
        by_word[place[1].pe, place[1].word].append(place)
    times = {key: [event.begin_ns for _, event in places] for key, places in by_word.items()}
    errors = {key: max(part.error_ns for part, _ in places) for key, places in by_word.items()}
    matched: dict[int, Placed] = {}
    for part, event in waits:
        key = part.rank, event.word
        places = by_word.get(key)
        if not places or event.operation != _WAIT:
            continue
        last = bisect.bisect_right(times[key], event.end_ns + part.error_ns + errors[key])
        same = [place for place in places[max(0, last - 64) : last] if place[1].value == event.value]
        if last:
            matched[id(event)] = (same or places[:last])[-1]
    return matched


# -- summary ----------------------------------------------------------------------------------------------------------

_MAX_RANKS = 32  # of a shown matrix
Waited = dict[tuple[int, int | None], float]  # waits of one rank's threads for another rank in us; None: unknown


def load(path: str) -> Json:
    """The timeline in a file. Raises ConfigurationError for another file."""
    try:
        with open(path) as file:
            found: Json = json.load(file)
        return found | {"traceEvents": list(found["traceEvents"]), "otherData": dict(found["otherData"])}
    except OSError as err:
        raise ConfigurationError(f"the trace {path} cannot be read ({err.strerror})") from None
    except (ValueError, TypeError, KeyError):
        raise ConfigurationError(f"{path} is not a trace that TSN_TRACE has written") from None


def waiting(timeline: Json) -> Waited:
    """Microseconds that threads of one rank have waited for another rank; None: unknown."""
    total: dict[tuple[int, int | None], float] = defaultdict(float)
    for event in timeline["traceEvents"]:
        if event.get("cat") == "wait":
            total[rank_of(event), event["args"].get("from")] += event["dur"]
    return dict(total)


def summary(timeline: Json, longest: int = 10) -> str:
    """The summary: events, the matrix of waiting time, ranks that others waited for, and the longest waits."""
    other, events = timeline["otherData"], timeline["traceEvents"]
    shown = [event for event in events if event["ph"] in "Xib"]
    lines = [f"{len(shown)} events of {other['ranks']} ranks; clocks agree to {other['clock_error_us']:.1f} us"]
    for rank, dropped in other["dropped"].items():
        if dropped:
            lines.append(
                f"rank {rank}: the {dropped} oldest events were dropped; TSN_TRACE_EVENTS sets how many are kept"
            )
    total = waiting(timeline)
    if not total:
        return "\n".join([*lines, "no thread of a kernel waited"])
    return "\n".join([*lines, "", *_matrix(total, other["ranks"]), "", *_slow(total), "", *_longest(events, longest)])


def _matrix(total: Waited, ranks: int) -> list[str]:
    """Rows wait for columns."""
    columns: list[int | None] = [*range(min(ranks, _MAX_RANKS))]
    if any(sender is None for _, sender in total):
        columns.append(None)
    head = ["ms waited by", *("not known" if c is None else f"for {c}" for c in columns)]
    rows = [head]
    for rank in range(min(ranks, _MAX_RANKS)):
        rows.append([f"rank {rank}", *(f"{total.get((rank, c), 0.0) / 1e3:.3f}" for c in columns)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    if ranks > _MAX_RANKS:
        lines.append(f"(the first {_MAX_RANKS} of {ranks} ranks)")
    return lines


def _slow(total: Waited) -> list[str]:
    """Ranks ordered by the time that others waited for them."""
    by_sender: dict[int, float] = defaultdict(float)
    for (rank, sender), us in total.items():
        if sender is not None and sender != rank:
            by_sender[sender] += us
    order = sorted(by_sender, key=lambda sender: -by_sender[sender])
    everyone = sum(by_sender.values())
    return [
        f"rank {sender}: others waited {by_sender[sender] / 1e3:.3f} ms for it"
        + (f", {by_sender[sender] / everyone:.0%} of all waiting" if everyone else "")
        for sender in order[:8]
    ] or ["no rank is known to have been waited for"]


def _longest(events: list[Json], count: int) -> list[str]:
    waits = sorted((e for e in events if e.get("cat") == "wait"), key=lambda event: -event["dur"])[:count]
    lines = ["longest waits:"]
    for event in waits:
        sender = event["args"].get("from")
        lines.append(
            f"{event['dur'] / 1e3:9.3f} ms  rank {rank_of(event)}  {event['args'].get('line', '')}  "
            f"for {'?' if sender is None else f'rank {sender}'}  at {event['ts'] / 1e3:.3f} ms"
        )
    return lines
