"""The formulas of bandwidth, with fixed time stamps."""

import math

from hypothesis import given
from hypothesis import strategies as st

from benchmark import instruments

least = instruments.least_time_per_message


def brute_force(posted, completed):
    """perftest's definition, by trying every window."""
    n = len(posted)
    return min((completed[j] - posted[i]) / (j - i + 1) for i in range(n) for j in range(i, n))


def test_hand_computed_example():
    """Four messages of 100 bytes, two in flight.

    posted      0   10   50   60
    completed  50   58  100  104
    Windows from message 0: 50, 58/2 = 29, 100/3 = 33.3, 104/4 = 26; from 1: 48, 90/2 = 45, 94/3 = 31.3;
    from 2: 50, 54/2 = 27; from 3: 44. The least is 26: a peak of 100/26 bytes a tick, equal to the average here.
    """
    assert least([0, 10, 50, 60], [50, 58, 100, 104]) == 26.0


def test_the_best_window_lies_in_the_middle():
    """Posted 0, 100, 101, 102, 500 and completed 90, 110, 112, 114, 700: messages 1 to 3 take (114 - 100) / 3."""
    assert least([0, 100, 101, 102, 500], [90, 110, 112, 114, 700]) == 14 / 3


def test_one_message_and_none():
    assert least([7], [19]) == 12.0
    assert math.isnan(least([], []))


def test_stamps_of_a_processor_that_runs_for_days():
    """Differences count, not the size of the counter."""
    base = 1 << 60
    assert least([base, base + 10], [base + 8, base + 19]) == 8.0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 200)), min_size=1, max_size=40), st.integers(0, 1 << 50))
def test_equals_the_definition(steps, base):
    """Posts and completions in any order that a clock and a queue allow."""
    posted, completed, now, last = [], [], base, base
    for wait, duration in steps:
        now += wait
        posted.append(now)
        last = max(last, now + duration)
        completed.append(last)
    assert math.isclose(least(posted, completed), brute_force(posted, completed), rel_tol=1e-12)
