"""Samples of the fuzzers in fuzzers.py; each night begins with another seed, which a failure names."""

import os
import random

import pytest

from tests.runtime import fuzzers

PARTS = 4  # of a fuzzer's nightly run, each a test


@pytest.mark.parametrize("name", fuzzers.FUZZERS)
def test_sample(name):
    fuzzers.fuzz(name, 300 if name == "trace" else 1500, 1)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", fuzzers.FUZZERS)
def test_a_minute(name, part):
    """FUZZ_INPUTS=10000000 sets the number of inputs instead, FUZZ_SECONDS another time; each part has its share."""
    inputs, seconds = os.environ.get("FUZZ_INPUTS"), float(os.environ.get("FUZZ_SECONDS", "60")) / PARTS
    seed = random.randrange(1 << 30)
    if inputs:
        share = -(-int(inputs) // PARTS)
        done = fuzzers.fuzz(name, share, seed)
        assert done == share
    else:
        done = fuzzers.fuzz(name, 1 << 60, seed, seconds)
        assert done > 250
    print(f"{name}: {done} inputs from seed {seed}", flush=True)
