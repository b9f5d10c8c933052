"""Atomics on a peer's memory against their definition, and put_value for every width."""

import functools
import itertools
import operator
import random

import pytest

from tests.integration.atomics import FLOATS, INTEGERS, THREADS, atomic, operations, put_each
from tests.integration.pool import pool_fixture

pool = pool_fixture(2)
FOLDS = {"and": operator.and_, "or": operator.or_, "xor": operator.xor, "min": min, "max": max}


def _wrap(value: int, dtype: str) -> int:
    width = int(dtype.lstrip("uint"))
    value %= 1 << width
    return value if dtype.startswith("u") or value < 1 << (width - 1) else value - (1 << width)


def _random(dtype: str, pace: random.Random) -> int:
    width = int(dtype.lstrip("uint"))
    # torch cannot make a uint64 tensor of Python integers beyond int64.
    return pace.randrange(1 << min(width, 63)) if dtype.startswith("u") else _wrap(pace.getrandbits(width), dtype)


def _chain(first, end, old, given, step) -> bool:
    """Whether the operations happened one after the other: each found what another left, from the first to the end."""
    left = dict(zip(old, given))
    if len(left) != len(old):
        return False  # two found the same state; random values make every state another
    state = first
    while state in left:
        state = step(state, left.pop(state))
    return not left and state == end


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers(pool, dtype):
    seed = random.randrange(1 << 30)
    pace = random.Random(seed)
    for turn, name in itertools.product(range(3), operations(dtype)):
        first = _random(dtype, pace)
        values = [[_random(dtype, pace) for _ in range(THREADS)] for _ in range(2)]
        if name == "cas":
            # Both ranks hand the word on from i to i + 1; exactly one of the two threads i does it.
            first, values = 0, [[i + 1 for i in range(THREADS)]] * 2
        (end, old_0), (_, old_1) = pool(atomic, dtype, name, first, values, seed + turn)
        given, old = values[0] + values[1], old_0 + old_1
        what = f"seed {seed}, {name}, {dtype}"
        if name == "add":
            assert end == _wrap(first + sum(given), dtype), what
            assert _chain(first, end, old, given, lambda state, value: _wrap(state + value, dtype)), what
        elif name in FOLDS:
            assert end == _wrap(functools.reduce(FOLDS[name], given, first), dtype), what
        elif name == "exch":
            assert _chain(first, end, old, given, lambda state, value: value), what
        else:
            done = [old_0[i] == i or old_1[i] == i for i in range(THREADS)]
            reached = done.index(False) if False in done else THREADS
            assert end == reached and not any(old_0[i] == old_1[i] == i for i in range(THREADS)), what


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats(pool, dtype):
    seed = random.randrange(1 << 30)
    pace = random.Random(seed)
    values = [[float(pace.randrange(1000)) for _ in range(THREADS)] for _ in range(2)]
    (end, old_0), (_, old_1) = pool(atomic, dtype, "add", 5.0, values, seed)
    assert end == 5.0 + sum(values[0]) + sum(values[1]), "whole numbers of this size add up without rounding"
    (end, old_0), (_, old_1) = pool(atomic, dtype, "exch", 5.0, values, seed)
    assert sorted([*values[0], *values[1], 5.0]) == sorted([*old_0, *old_1, end]), "every value is found once"


@pytest.mark.parametrize(
    "dtype",
    ["int8", "uint8", "int16", "float16", "bfloat16", "int32", "uint32", "float32", "int64", "uint64", "float64"],
)
@pytest.mark.sample(4)
def test_put_value(pool, dtype):
    for turn in range(3):
        pool(put_each, dtype, 64, random.randrange(1 << 30))
