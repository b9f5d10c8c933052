"""The device queue and the counting order, as plain C++ programs, plain and under sanitizers."""

import pytest

from tests.native.builder import run
from tests.proxy import programs


@pytest.mark.parametrize("sanitizer", ["", "thread", "address"])
def test_queue(sanitizer):
    """Layout, every push, full rings, aborts, and contention at starts near every wrap-around."""
    run(programs.queue_test(sanitizer), "8", "5000" if sanitizer else "10000")


@pytest.mark.parametrize("sanitizer", ["", "address"])
def test_ordering(sanitizer):
    """Random operations, windows and arrival orders against a model."""
    run(programs.ordering_test(sanitizer), "100" if sanitizer else "400", "3000")
