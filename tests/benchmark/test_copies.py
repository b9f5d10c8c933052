"""The measuring of copies: any implementation that delivers wrong data is found, whichever way it copies."""

import pytest

import tilescale_net as tsn
from benchmark.common.copies import CopyEngine, Geometry, TilescaleNet, batch_for, measure
from benchmark.common.measuring import Timer
from tests import ranks

SIZE = 5000


class Broken(TilescaleNet):
    """Copies, but leaves out the last byte, or writes one byte too many, or copies nothing when it is timed."""

    name = "broken"

    def __init__(self, capacity, how):
        super().__init__(capacity)
        self._how = how

    def launcher(self, direction, count, pe, geometry):
        count = {"short": count - 1, "long": count + 1, "idle": 0}[self._how]
        return super().launcher(direction, count, pe, geometry)


def _measure(implementation, direction, bidirectional, check):
    made = TilescaleNet(SIZE) if implementation == "ours" else Broken(SIZE, implementation)
    timer = Timer("graph", 1, 2, on_gpu=tsn.world().device_kind == "cuda")
    return measure(made, direction, SIZE, Geometry(), timer, bidirectional=bidirectional, check=check)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("direction", ["push", "pull"])
def test_right_copies_are_measured(direction, bidirectional):
    everyone = ranks.run(2, _measure, "ours", direction, bidirectional, True)
    assert everyone[0] == everyone[1]  # all ranks know the figures
    assert len(everyone[0]) == 2 and all(t > 0 for t in everyone[0])


@pytest.mark.parametrize("how", ["short", "long", "idle"])
@pytest.mark.parametrize("direction", ["push", "pull"])
def test_wrong_copies_are_found(direction, how):
    outcomes = ranks.launch(2, _measure, how, direction, False, True)
    receiver = 1 if direction == "push" else 0
    for outcome in outcomes:
        name, text, _ = outcome.error
        assert name == "WrongData"
        assert f"broken {direction} of {SIZE} bytes" in text and f"on rank {receiver}, " in text


def test_verification_can_be_left_out():
    ranks.run(2, _measure, "idle", "push", False, False)


def test_ranks_beyond_the_pair_only_take_part():
    everyone = ranks.run(3, _measure, "ours", "push", True, True)
    assert everyone[0] == everyone[1] == everyone[2] and all(t > 0 for t in everyone[0])


def test_batches_shrink_with_size():
    assert batch_for(2048) == batch_for(4 << 20) == 20
    assert batch_for(256 << 20) == 1
    assert batch_for(8 << 20) == 10


def test_copy_engine_is_measured_once_for_all_geometries():
    engine = CopyEngine.__new__(CopyEngine)
    assert engine.relevant(Geometry()) == engine.relevant(Geometry(threads=64, blocks=9))
