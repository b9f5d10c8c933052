"""The transport under chaos against the strict device, as a C++ program, plain and under AddressSanitizer."""

import pytest

from tests.fabric import programs
from tests.native.builder import run
from tests.variants import variants

DEVICES = [
    "nics=3,tx=8,rx=16,seed=1",
    "nics=2,tx=5,rx=6,mr_endpoint=1,seed=2",
    "name=efa-direct,nics=3,tx=4,rx=4,seed=3",
]


@pytest.mark.parametrize("device", DEVICES)
@variants(2, "sanitizer,seeds", [("", "60"), ("address", "12")])
def test_everything_arrives_once_and_intact(device, sanitizer, seeds):
    out = run(programs.device_test(sanitizer), str(programs.fake_device()), seeds, env={"FAKE_FABRIC": device})
    assert out == "good\n"
