"""The table of a hang: which rank waits where for what, since when, which should have sent it and what it does."""

from tilescale_net.runtime import job_store

MAX_ROWS = 24
_HEAD = ("rank", "block", "thread", "line", "call", "word", "has", "wants", "for", "from")


def text(why: str, states: dict[int, dict], size: int, missing: dict[int, str] | None = None) -> str:
    """The report.

    Args:
        why: its first line.
        states: by rank, see state.of_rank.
        size: number of ranks.
        missing: what is known of ranks that have not answered.
    """
    rows, notes = [], []
    for rank in sorted(states):
        for wait in states[rank]["waiting"]:
            sender, how = sender_of(rank, wait, states, size)
            rows.append(_row(rank, wait, sender))
            if how and how not in notes:
                notes.append(how)
    hidden = sum(state["waits"] for state in states.values()) - len(rows[:MAX_ROWS])
    lines = [why, *_table(rows[:MAX_ROWS])]
    if hidden > 0:
        lines.append(f"… and {hidden} more threads that wait")
    if not rows:
        lines.append("no thread of a kernel is known to wait")
    lines += notes
    lines += [f"rank {rank}: {doing(states[rank])}" for rank in sorted(states)]
    for rank in range(size):
        if rank not in states:
            lines.append(f"rank {rank}: {(missing or {}).get(rank, 'does not answer')}")
    return "\n".join(job_store.printable(line) for line in lines)


def doing(state: dict) -> str:
    """What a rank does, as text."""
    parts = []
    if state["kernel"]:
        name, seconds = state["kernel"]
        waits = state["waits"]
        threads = f", {waits} thread{'s' if waits > 1 else ''} waiting" if waits else ", none of its threads waits"
        parts.append(f"runs kernel {name} for {seconds:.1f} s{threads}")
    if state["host"]:
        name, seconds = state["host"]
        parts.append(f"in {name} for {seconds:.1f} s")
    if step := state.get("step"):
        parts.append(str(step))
    if not parts:
        parts.append("in the program, neither in a kernel nor in a call of the package")
    return "; ".join(parts) + (f" ({state['place']})" if state["place"] else "")


def _row(rank: int, wait: dict, sender: int | None) -> tuple[str, ...]:
    word = wait["name"] or ""
    if not word and wait["offset"] is not None:
        word = "the package's own" if wait["operation"].startswith("barrier") else f"heap offset {wait['offset']}"
    elif word:
        word = f"{word} at {wait['offset']}"
    return (
        str(rank),
        str(wait["block"]),
        "" if wait["thread"] is None else str(wait["thread"]),
        wait["line"],
        wait["operation"],
        word,
        "" if wait["has"] is None else str(wait["has"]),
        "" if wait["wants"] is None else f"{wait['compare']} {wait['wants']}".strip(),
        f"{wait['seconds']:.1f} s",
        "?" if sender is None else f"rank {sender}",
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    widths = [max(len(row[i]) for row in [_HEAD, *rows]) for i in range(len(_HEAD))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [_HEAD, *rows]]


# -- which rank should have sent it -----------------------------------------------------------------------------------

# A waiting rank does not know which rank writes its word; the ranks that write words do. Where no rank has sent this very
# word yet, the words that the ranks have sent to each other so far show the pattern of the program.


def sender_of(rank: int, wait: dict, states: dict[int, dict], size: int) -> tuple[int | None, str]:
    """The rank that should send what thread `wait` of `rank` waits for, None where that is not known, and how it is
    known.

    Args:
        wait: an element of "waiting", see state.of_rank.
        states: of the ranks that have answered.
    """
    if wait["pe"] is not None and wait["pe"] >= 0:
        return wait["pe"], ""
    if wait["offset"] is None or wait["operation"] not in ("wait", "test"):
        return None, ""
    same_word = [
        (sender, entry) for sender, state in states.items() for entry in state["sent"] if entry[1] == wait["offset"]
    ]
    here = [(sender, entry) for sender, entry in same_word if entry[0] == rank]
    if here:
        sender, (_, _, count, value, ago, line) = min(here, key=lambda found: found[1][4])
        times = "once" if count == 1 else f"{count} times"
        where = f" in {line}" if line else ""
        return sender, f"rank {sender} has sent it {times}, the last time {value}, {ago:.1f} s ago{where}"
    senders = {sender for sender, _ in same_word}
    if len(senders) == 1:
        (sender,) = senders
        if sender != rank:
            return sender, f"rank {sender} sends this word to other ranks, and has not sent it to rank {rank}"
    distances = {(entry[0] - sender) % size for sender, entry in same_word}
    if len(distances) == 1:
        sender = (rank - distances.pop()) % size
        return sender, f"others get this word from the rank at the same distance; rank {sender} has not sent it"
    if size == 2:
        return 1 - rank, f"rank {1 - rank} has not sent it"
    return None, "no rank has sent this word to any rank"
