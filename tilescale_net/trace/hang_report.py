"""The table of a hang: which rank waits where for what, since when, which should have sent it and what it does."""

from tilescale_net.runtime import job_store
from tilescale_net.trace import senders

MOST_ROWS = 24
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
            sender, how = senders.of_wait(rank, wait, states, size)
            rows.append(_row(rank, wait, sender))
            if how and how not in notes:
                notes.append(how)
    hidden = sum(state["waits"] for state in states.values()) - len(rows[:MOST_ROWS])
    lines = [why, *_table(rows[:MOST_ROWS])]
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
