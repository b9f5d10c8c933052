"""Where ranks run: in the simulator when their test requires it, independent of earlier tests."""

import os

import tilescale_net as tsn
from tests import ranks


def _device():
    return os.environ["TSN_DEVICE"], tsn.world().device_kind


def _asked_for():
    return os.environ["TSN_DEVICE"]


def test_ranks_of_these_tests_are_simulated():
    assert ranks.run(2, _device) == [("simulator", "simulator")] * 2


def test_the_choice_of_one_test_is_not_that_of_the_next(monkeypatch):
    monkeypatch.setattr(ranks, "visible_gpus", lambda: 2)
    assert ranks.run(1, _asked_for, init=False) == ["simulator"]
    monkeypatch.delenv("TSN_DEVICE")
    assert ranks.run(2, _asked_for, init=False) == ["auto"] * 2
    assert ranks.run(3, _asked_for, init=False) == ["simulator"] * 3
    monkeypatch.setenv("TSN_DEVICE", "cuda")
    assert ranks.run(1, _asked_for, init=False) == ["cuda"]
