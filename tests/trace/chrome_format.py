"""Rules of Chrome's trace-event format, which Perfetto reads too, for a JSON file.

By phase: which fields an event has and of what types; what belongs together (B and E, b and e, s and f) and nests; that
times, ids and names can be read without guessing. Stricter than the readers, which drop what they cannot
place without a word.
"""

import json
import math
from collections import defaultdict

PHASES = "BEXiCbnestfMNOD"
METADATA = {"process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index"}
KNOWN = {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args", "id", "s", "bp"}


def load(text):
    """JSON as its standard has it: no NaN, no infinity, no key twice."""

    def pairs(found):
        assert len(dict(found)) == len(found), f"a key twice: {[key for key, _ in found]}"
        return dict(found)

    def constant(word):
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, parse_constant=constant, object_pairs_hook=pairs)


def ns(microseconds):
    return round(microseconds * 1000)


def is_count(value, least=0):
    return type(value) is int and least <= value < 1 << 31


def is_time(value):
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value < 1 << 53


def problems(trace):
    """Errors in a trace; empty for a valid one."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["no object with a list traceEvents"]
    found = [] if trace.get("displayTimeUnit", "ms") in ("ms", "ns") else ["displayTimeUnit is neither ms nor ns"]
    events = trace["traceEvents"]
    for event in events:
        found += [f"{text}: {event}" for text in _of_event(event)]
    if found:
        return found
    return [*_names(events), *_nesting(events), *_asynchronous(events), *_flows(events)]


def _of_event(e):
    if not isinstance(e, dict):
        return ["not an object"]
    phase = e.get("ph")
    wrong = [] if isinstance(phase, str) and phase in PHASES and len(phase) == 1 else ["a phase that is not documented"]
    wrong += [f"fields {sorted(set(e) - KNOWN)} are not documented"] if set(e) - KNOWN else []
    if not (isinstance(e.get("name"), str) and e["name"]):
        wrong.append("no name")
    if not (is_count(e.get("pid"), 1) and is_count(e.get("tid"))):
        wrong.append("pid or tid is no number")  # process 0 is the idle one
    if not isinstance(e.get("args", {}), dict):
        wrong.append("args is no object")
    if phase == "M":
        return wrong + ([] if e.get("name") in METADATA and set(e.get("args", ())) & {"name", "labels", "sort_index"}
                        else ["metadata of no documented kind"])  # fmt: skip
    wrong += [] if is_time(e.get("ts")) else ["ts is no time"]
    wrong += [] if isinstance(e.get("cat"), str) and e["cat"] else ["no category"]
    wrong += [] if ("dur" in e) == (phase == "X") and is_time(e.get("dur", 0)) else ["dur"]
    wrong += [] if (e.get("s") in ("g", "p", "t")) == (phase == "i") else ["the scope of an instant"]
    wrong += [] if (type(e.get("id")) in (int, str)) == (phase in "bnestf") else ["id"]
    wrong += [] if "bp" not in e or (phase == "f" and e["bp"] == "e") else ["bp"]
    return wrong


def _names(events):
    """Each process and track that has events has one name, and no two tracks of a process the same."""
    named = defaultdict(list)
    for e in (e for e in events if e["ph"] == "M"):
        named[e["name"], e["pid"], e["tid"] if e["name"] == "thread_name" else None].append(e["args"]["name"])
    wrong = [f"{key} has names {names}" for key, names in named.items() if len(names) != 1 or not names[0]]
    for e in (e for e in events if e["ph"] != "M"):
        for key in (("process_name", e["pid"], None), ("thread_name", e["pid"], e["tid"])):
            wrong += [] if key in named else [f"{key} has no name"]
    tracks = [(pid, names[0]) for (kind, pid, _), names in named.items() if kind == "thread_name"]
    return wrong + [f"two tracks {track}" for track in set(tracks) if tracks.count(track) > 1]


def _nesting(events):
    """B and E are balanced, and slices of a track lie side by side or one inside another."""
    wrong, tracks = [], defaultdict(list)
    for e in (e for e in events if e["ph"] in "BEX"):
        tracks[e["pid"], e["tid"]].append(e)
    for track, found in tracks.items():
        open_b = 0
        for e in (e for e in found if e["ph"] in "BE"):
            open_b += 1 if e["ph"] == "B" else -1
            wrong += [f"{track}: E without B"] if open_b < 0 else []
        wrong += [f"{track}: B without E"] if open_b > 0 else []
        ends = []
        for e in sorted((e for e in found if e["ph"] == "X"), key=lambda e: (ns(e["ts"]), -ns(e["dur"]))):
            begin, end = ns(e["ts"]), ns(e["ts"]) + ns(e["dur"])
            while ends and ends[-1] <= begin:
                ends.pop()
            wrong += (
                [f"{track}: {e['name']} at {e['ts']} ends after the slice it begins in"]
                if ends and end > ends[-1]
                else []
            )
            ends.append(end)
    return wrong


def _asynchronous(events):
    """A b and a later e of each category and id."""
    wrong, pairs = [], defaultdict(list)
    for e in (e for e in events if e["ph"] in "be"):
        pairs[e["cat"], e["id"], e["pid"]].append(e)
    for key, found in pairs.items():
        ok = [e["ph"] for e in found] == ["b", "e"] and found[0]["name"] == found[1]["name"]
        wrong += (
            [] if ok and ns(found[0]["ts"]) <= ns(found[1]["ts"]) else [f"{key}: not one b and a later e of its name"]
        )
    return wrong


def _flows(events):
    """An s and a later f of each id, each inside a slice of its own track."""
    wrong, flows, slices = [], defaultdict(list), defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            slices[e["pid"], e["tid"]].append((ns(e["ts"]), ns(e["ts"]) + ns(e["dur"])))
        elif e["ph"] in "stf":
            flows[e["cat"], e["name"], e["id"]].append(e)
    for key, found in flows.items():
        ok = [e["ph"] for e in found] == ["s", "f"] and ns(found[0]["ts"]) <= ns(found[1]["ts"])
        wrong += [] if ok else [f"{key}: not one s and a later f"]
        for e in found:
            at, around = ns(e["ts"]), slices[e["pid"], e["tid"]]
            inside = any(begin <= at < end or begin == at == end for begin, end in around)
            wrong += [] if inside else [f"{key}: the {e['ph']} at {e['ts']} is in no slice"]
    return wrong
