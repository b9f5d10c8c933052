"""These tests are about the simulator: they use it on machines with GPUs too."""

import pytest


@pytest.fixture(autouse=True)
def in_the_simulator(monkeypatch):
    monkeypatch.setenv("TSN_DEVICE", "simulator")
