"""Samples of the fuzzers in fuzzers.py; each night begins with another seed, which a failure names."""

import os
import random

import pytest

from tests.runtime import fuzzers


@pytest.mark.parametrize("name", fuzzers.FUZZERS)
def test_sample(name):
    fuzzers.fuzz(name, 1500, 1)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", fuzzers.FUZZERS)
def test_a_minute(name):
    """FUZZ_INPUTS=10000000 is so many inputs instead, FUZZ_SECONDS another time."""
    inputs, seconds = os.environ.get("FUZZ_INPUTS"), float(os.environ.get("FUZZ_SECONDS", "60"))
    seed = random.randrange(1 << 30)
    if inputs:
        assert fuzzers.fuzz(name, int(inputs), seed) == int(inputs)
    else:
        assert fuzzers.fuzz(name, 1 << 60, seed, seconds) > 1000
