"""How far the clock of another host is from that of rank 0's: from messages whose order is known.

All ranks exchange the time once per round. A rank reads its clock for round k after round k - 1 has ended for it, so after
rank 0 had read its own for that round, and before round k has ended for rank 0. Each round so bounds the difference from
both sides; the narrowest bounds of all rounds count.
"""

import time
from collections.abc import Callable

ROUNDS = 12


def offset(exchange: Callable[[list[int]], list[list[int]]], rank: int) -> tuple[int, int]:
    """What to add to this process's time.monotonic_ns() to get rank 0's, and how wrong that may be. Collective.

    Args:
        exchange: gives every rank's numbers, in rank order, to all.
    """
    ended, rounds = 0, []
    for _ in range(ROUNDS):
        everyone = exchange([time.monotonic_ns(), ended])
        ended = time.monotonic_ns()
        rounds.append(everyone)
    last = exchange([0, ended])
    sent = [r[rank][0] for r in rounds]
    first_sent = [r[0][0] for r in rounds]
    # A rank's value in a round is when its round before has ended.
    first_ended = [r[0][1] for r in (*rounds[1:], last)]
    return from_rounds(sent, first_sent, first_ended) if rank else (0, 0)


def from_rounds(sent: list[int], first_sent: list[int], first_ended: list[int]) -> tuple[int, int]:
    """The offset and its error from the rounds' times: when this rank and rank 0 sent, and when each ended for rank 0."""
    least = max(before - mine for before, mine in zip(first_sent, sent[1:]))
    most = min(after - mine for after, mine in zip(first_ended, sent))
    return (least + most) // 2, max(0, most - least) // 2
