"""put, get and put_signal end to end: all scopes, engines, dtypes, sizes and alignments, in many schedules."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.copies import CAPACITY, SLACK, WAYS, example
from tests.integration.pool import pool_fixture

pool = pool_fixture(2)
three = pool_fixture(3)

# dtype, threads, engine, unroll, ring
CONFIGURATIONS = [
    (torch.uint8, 96, "ldst", None, None),
    (torch.bfloat16, 64, "auto", 1, None),
    (torch.float32, 32, "bulk", 3, (2, 1024)),
    (torch.float64, 128, "auto", 4, (3, 2048)),
]
NAMES = [f"{str(c[0]).removeprefix('torch.')}-{c[1]}-{c[2]}" for c in CONFIGURATIONS]
# What goes wrong does so around the unit of an access (16 bytes), of a warp, and of a tile.
COUNTS = [0, 1, 2, 3, 15, 16, 17, 31, 33, 127, 128, 129, 1000, 1024, 4097]


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=NAMES)
@pytest.mark.sample(2)
def test_sizes_around_units(pool, configuration):
    pace = random.Random(str(configuration))
    seed = random.randrange(1 << 30)
    cases = [(way, pace.randrange(SLACK), pace.randrange(SLACK), count, seed) for way in WAYS for count in COUNTS]
    pool(example, configuration, cases, "random")


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=NAMES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cases=st.lists(
        st.tuples(
            st.sampled_from(WAYS),
            st.integers(0, SLACK),
            st.integers(0, SLACK),
            st.one_of(st.integers(0, 300), st.integers(0, CAPACITY - SLACK)),
            st.integers(0, 1 << 30),
        ),
        min_size=1,
        max_size=4,
    ),
    visibility=st.sampled_from(["eager", "late", "random"]),
)
@pytest.mark.sample(2)
def test_any_copy(pool, configuration, cases, visibility):
    pool(example, configuration, cases, visibility)


def test_a_ring_of_three(three):
    pace = random.Random()
    cases = [(pace.choice(WAYS), pace.randrange(9), pace.randrange(9), pace.randrange(2000), i) for i in range(40)]
    three(example, CONFIGURATIONS[1], cases, "random")
