"""A timeline in numbers: which rank waited for which and how long, and the longest waits."""

import json
from collections import defaultdict

from tilescale_net.errors import ConfigurationError
from tilescale_net.trace.timeline import rank_of

_MOST_RANKS = 32  # of a matrix that is shown


def load(path: str) -> dict:
    """The timeline in a file. Raises ConfigurationError for another file."""
    try:
        with open(path) as file:
            found = json.load(file)
        return found | {"traceEvents": list(found["traceEvents"]), "otherData": dict(found["otherData"])}
    except OSError as err:
        raise ConfigurationError(f"the trace {path} cannot be read ({err.strerror})") from None
    except (ValueError, TypeError, KeyError):
        raise ConfigurationError(f"{path} is not a trace that TSN_TRACE has written") from None


def waiting(timeline: dict) -> dict[tuple[int, int | None], float]:
    """Microseconds that threads of one rank have waited for another rank; None: for which is not known."""
    total: dict[tuple[int, int | None], float] = defaultdict(float)
    for event in timeline["traceEvents"]:
        if event.get("cat") == "wait":
            total[rank_of(event), event["args"].get("from")] += event["dur"]
    return dict(total)


def text(timeline: dict, longest: int = 10) -> str:
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


def _matrix(total: dict, ranks: int) -> list[str]:
    """Rows wait, columns are waited for."""
    columns: list[int | None] = [*range(min(ranks, _MOST_RANKS))]
    if any(sender is None for _, sender in total):
        columns.append(None)
    head = ["ms waited by", *("not known" if c is None else f"for {c}" for c in columns)]
    rows = [head]
    for rank in range(min(ranks, _MOST_RANKS)):
        rows.append([f"rank {rank}", *(f"{total.get((rank, c), 0.0) / 1e3:.3f}" for c in columns)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    if ranks > _MOST_RANKS:
        lines.append(f"(the first {_MOST_RANKS} of {ranks} ranks)")
    return lines


def _slow(total: dict) -> list[str]:
    """Ranks in the order of how long others have waited for them."""
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


def _longest(events: list[dict], count: int) -> list[str]:
    waits = sorted((e for e in events if e.get("cat") == "wait"), key=lambda event: -event["dur"])[:count]
    lines = ["longest waits:"]
    for event in waits:
        sender = event["args"].get("from")
        lines.append(
            f"{event['dur'] / 1e3:9.3f} ms  rank {rank_of(event)}  {event['args'].get('line', '')}  "
            f"for {'?' if sender is None else f'rank {sender}'}  at {event['ts'] / 1e3:.3f} ms"
        )
    return lines
