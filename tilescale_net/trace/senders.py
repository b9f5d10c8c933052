"""Which rank should have sent the signal that another one waits for.

A waiting rank does not know which rank writes its word; the ranks that write words do. Where no rank has sent this very
word yet, the words that the ranks have sent to each other so far show the pattern of the program.
"""


def of_wait(rank: int, wait: dict, states: dict[int, dict], size: int) -> tuple[int | None, str]:
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
