"""The device queue and the counting order, as plain C++ programs, plain and under sanitizers."""

import pytest

from tests.native.builder import run
from tests.proxy import programs
from tests.variants import nightly, variants

# As many turns in every run, and nightly.
TURNS = pytest.mark.parametrize("turns", [1, nightly(10)])


@TURNS
@variants(2, "sanitizer", ["", "thread", "address"])
def test_queue(sanitizer, turns):
    """Layout, every push, full rings, aborts, and contention at starts near every wrap-around."""
    run(programs.queue_test(sanitizer), "8", str((1000 if sanitizer else 2000) * turns))


@TURNS
@pytest.mark.parametrize("sanitizer", ["", "address"])
def test_ordering(sanitizer, turns):
    """Random operations, windows and arrival orders against a model."""
    run(programs.ordering_test(sanitizer), str((20 if sanitizer else 80) * turns), "3000")
