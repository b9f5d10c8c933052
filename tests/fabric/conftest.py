"""Transports end with their test: some keep files in /dev/shm as long as they live."""

import gc

import pytest


@pytest.fixture(autouse=True)
def transports_end_with_the_test(nothing_left_in_shared_memory):
    yield
    gc.collect()
