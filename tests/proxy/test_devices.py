"""The proxy over strict devices that behave as EFA does (tests/native/fabric_fake.cpp), which no test machine has."""

import pytest

from tests.fabric.programs import fake_device
from tests.native.builder import run
from tests.proxy import programs
from tests.proxy.test_failures import SHARED
from tests.proxy.test_traffic import SHAPES

DEVICES = {
    "efa": "tx=16,rx=16",
    "efa-direct": "name=efa-direct,tx=4,rx=6",
}


def over(device: str, *arguments: str, seed: int = 1) -> str:
    """Runs the proxy's program over a device, which ends the process at the first rule that is broken."""
    env = {"FAKE_FABRIC": f"abort=1,nics=2,seed={seed},{DEVICES[device]}"}
    return run(programs.fabric_test(), *arguments, f"provider={device}", f"library={fake_device()}", env=env)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("device", DEVICES)
def test_traffic(device, shape):
    over(device, "traffic", "rounds=10", *SHAPES[shape])


@pytest.mark.parametrize("shape", [[], SHARED, ["staging=1"]], ids=["plain", "shared", "staging"])
@pytest.mark.parametrize("device", DEVICES)
def test_chaos(device, shape):
    over(device, "traffic", "rounds=10", "chaos=reorder=0.3,split=0.2,eagain=0.1,delay_us=50", "seeds=1:4", *shape)


@pytest.mark.parametrize("device", DEVICES)
def test_refusals_and_adds(device):
    for scenario in ("refusals", "adds"):
        over(device, scenario, *(["defers_adds=1"] if scenario == "adds" else []))
