"""Medians, timers and the proof of data: figures that a benchmark may be trusted with."""

import time

import pytest
import torch

from benchmark.common import median
from benchmark.common.measuring import GUARD, POISON, SIMULATED, Timer, difference, gigabytes_per_second, prepare


def test_statistics():
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5
    with pytest.raises(ValueError, match="no samples"):
        median([])


def test_gigabytes_are_decimal():
    assert gigabytes_per_second(4_000_000, 100.0) == 40.0


def test_wall_clock_counts_and_times_every_run():
    calls = []

    def launch(n):
        calls.append(n)
        time.sleep(0.01)

    samples = Timer("graph", warmup=2, repeat=3, on_gpu=False).measure(launch)
    assert calls == [1] * 5
    assert len(samples) == 3
    assert all(10_000 <= s < 200_000 for s in samples)


def test_simulated_times_are_labelled():
    assert SIMULATED in Timer("graph", 1, 3, on_gpu=False).label()
    assert SIMULATED not in Timer("graph", 1, 3, on_gpu=True).label()
    with pytest.raises(ValueError, match="timing mode"):
        Timer("stopwatch", 1, 1, on_gpu=True)


@pytest.fixture(params=[1, 16, 1000, 4096])
def copied(request):
    count = request.param
    src, dst = torch.zeros(count + GUARD, dtype=torch.uint8), torch.zeros(count + GUARD, dtype=torch.uint8)
    prepare(src, dst, count, seed=count)
    assert difference(dst, count, seed=count) is not None  # nothing was copied yet
    dst[:count] = src[:count]
    return count, dst


def test_right_data_pass(copied):
    count, dst = copied
    assert difference(dst, count, seed=count) is None
    assert difference(dst, count, seed=count + 1) is not None  # yesterday's data


def test_one_wrong_byte_is_found(copied):
    count, dst = copied
    dst[count // 2] += 1
    assert f"byte {count // 2} " in difference(dst, count, seed=count)
    assert f"1 of {count} bytes" in difference(dst, count, seed=count)


def test_missing_tail_is_found(copied):
    count, dst = copied
    if int(dst[count - 1]) == POISON:
        pytest.skip("the last byte happens to be the poison")
    dst[count - 1] = POISON
    assert f"byte {count - 1} was not written" in difference(dst, count, seed=count)


def test_writing_beyond_is_found(copied):
    count, dst = copied
    dst[count + GUARD - 1] = 0
    assert f"byte {count + GUARD - 1}, beyond" in difference(dst, count, seed=count)
