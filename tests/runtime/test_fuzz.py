"""Samples of the fuzzers in fuzzers.py; each night begins with another seed, which a failure names."""

import os
import random

import pytest

from tests.runtime import fuzzers


@pytest.mark.parametrize("name", fuzzers.FUZZERS)
def test_sample(name):
    fuzzers.fuzz(name, 1500, 1)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", fuzzers.FUZZERS)
def test_a_minute(name):
    """FUZZ_SECONDS lengthens it."""
    seconds = float(os.environ.get("FUZZ_SECONDS", "60"))
    assert fuzzers.fuzz(name, 1 << 60, random.randrange(1 << 30), seconds) > 1000
