"""signal, wait and test: every comparison at every scope, set and add, values up to 2^64 - 1, which waits see as signed."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import ranks
from tests.integration.pool import pool_fixture
from tests.integration.signals import (
    COMPARISONS,
    HOLDS,
    THREADS,
    WAITERS,
    count,
    count_from_zero,
    wait_for,
    wait_in_vain,
)

pool = pool_fixture(2)
TOP = (1 << 64) - 1

# What a word holds first, what is waited for, what arrives: the first does not satisfy the comparison, the last does.
STEPS = {
    "eq": (3, 7, [5, 7]),
    "ne": (7, 7, [9]),
    "ge": (6, 1 << 62, [7, (1 << 62) + 4]),
    "gt": (TOP, 0, [0, 5]),  # all bits set are -1
    "le": (9, 7, [8, TOP - 1]),
    "lt": (7, 7, [7, 0]),
}


# Each is a kernel of its own: every second one in every run, so that no waiter and no comparison is left out.
@pytest.mark.parametrize(
    "waiter, compare",
    [
        pytest.param(waiter, compare, marks=pytest.mark.nightly if (i + k) % 2 else [])
        for i, waiter in enumerate(WAITERS)
        for k, compare in enumerate(COMPARISONS)
    ],
)
def test_every_wait(pool, waiter, compare):
    first, wanted, values = STEPS[compare]
    assert not HOLDS[compare](first, wanted) and HOLDS[compare](values[-1], wanted)
    for delay in (0.0, 0.02):
        _, (seen, left) = pool(wait_for, waiter, compare, first, wanted, values, "set", delay, 1)
        assert left == values[-1]
        assert len(seen) == THREADS and all(HOLDS[compare](s, wanted) and s in values for s in seen), seen
        if waiter in ("warp", "block"):
            group = 32 if waiter == "warp" else THREADS
            assert all(len(set(seen[i : i + group])) == 1 for i in range(0, THREADS, group)), "one value for the scope"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    waiter=st.sampled_from(WAITERS),
    first=st.integers(0, TOP),
    values=st.lists(st.integers(0, TOP), min_size=1, max_size=8),
    op=st.sampled_from(["set", "add"]),
    seed=st.integers(0, 1 << 30),
)
def test_last_value_stays(pool, waiter, first, values, op, seed):
    """Signals from one PE to one word happen in the order in which they were sent; additions wrap at 2^64."""
    last = values[-1] if op == "set" else (first + sum(values)) % (1 << 64)
    _, (seen, left) = pool(wait_for, waiter, "eq", first, last, values, op, 0.0, seed)
    sums = [first, *values] if op == "set" else [(first + sum(values[:i])) % (1 << 64) for i in range(len(values) + 1)]
    # `test` shows that the word was equal; where that value comes more than once, a look afterwards may find another.
    assert left == last and set(seen) <= (set(sums) if waiter == "test" and sums.count(last) > 1 else {last})


def test_messages_are_counted_from_zero(pool):
    """A wait for a number below zero is over at once."""
    for seed in range(3):
        assert pool(count_from_zero, 6, seed) == [0, 0]


def test_a_timeout_names_the_word_and_the_comparison():
    kind, text, _ = ranks.launch(1, wait_in_vain, env={"TSN_TIMEOUT": "0.5"})[0].error
    assert kind == "WaitTimeout" and "waited 0.5 s for eq 1 on the signal [1, 2] of zeros([2, 3], torch.uint64)" in text
    assert "last seen 4; the word went past that value" in text, text


def test_ordered_adds_are_in_the_word(pool):
    for seed, how in enumerate(["quiet", "fence"] * 6):
        assert pool(count, how, seed) == [[0, 0, 0]] * 2, (seed, how)
