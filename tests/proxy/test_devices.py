"""The proxy over strict devices that behave as EFA does (tests/native/fabric_fake.cpp), which no test machine has."""

import os
import subprocess

import pytest

from tests.fabric.programs import fake_cuda, fake_device
from tests.native.builder import run
from tests.proxy import programs
from tests.proxy.test_failures import SHARED
from tests.proxy.test_traffic import SHAPES
from tests.variants import nightly, variants

DEVICES = {"efa": "tx=16,rx=16", "efa-direct": "name=efa-direct,tx=4,rx=24"}
# Without RDMA writes, which efa-direct always has: the library copies at the target, when that polls.
EMULATED = "manual=1,device=p4d"
CHAOS = "chaos=reorder=0.3,split=0.2,eagain=0.1,delay_us=50"


def over(device: str, *arguments: str, seed: int = 1, more: str = "nics=2", **env: str) -> str:
    """Runs the proxy's program over a device, which ends the process at the first rule that is broken."""
    env = {"FAKE_FABRIC": f"abort=1,seed={seed},{more},{DEVICES[device]}", **env}
    return run(programs.fabric_test(), *arguments, f"provider={device}", f"library={fake_device()}", env=env)


@pytest.mark.parametrize("shape", SHAPES)
@variants(10, "device", DEVICES)
def test_traffic(device, shape):
    over(device, "traffic", "rounds=10", *SHAPES[shape])


@pytest.mark.parametrize("shape", [[], SHARED, ["staging=1"]], ids=["plain", "shared", "staging"])
@variants(3, "device", DEVICES)
def test_chaos(device, shape):
    over(device, "traffic", "rounds=10", CHAOS, "seeds=1:4", *shape)


@pytest.mark.parametrize("rails", [1, 2])
def test_chunks_in_a_run_share_a_doorbell(rails):
    """The device complains of one that is never rung."""
    arguments = ["rounds=10", "print=1", "inline=0", f"rails={rails}", "chunk=1024"]
    env = {"FAKE_FABRIC": f"abort=1,name=efa-direct,nics={rails}"}
    program, library = programs.fabric_test(), f"library={fake_device()}"
    out = run(program, "traffic", "provider=efa-direct", library, *arguments, env=env)
    counts = {name: float(value) for name, value in (line.split() for line in out.splitlines() if " " in line)}
    assert 0.3 < counts["unrung"] / counts["chunks"] < 1


@pytest.mark.parametrize("device", DEVICES)
def test_narrow_immediates(device):
    over(device, "traffic", "rounds=5", CHAOS + ",imm_bits=8", "seeds=1:3", "pes=3")


@pytest.mark.nightly
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("device", [*DEVICES, "emulated"])
def test_chaos_of_many_kinds(device, shape):
    more = EMULATED if device == "emulated" else "nics=2"
    for imm_bits in (8, 16, 32):
        chaos = f"{CHAOS},imm_bits={imm_bits}"
        over(device.replace("emulated", "efa"), "traffic", "rounds=10", chaos, "seeds=1:4", *SHAPES[shape], more=more)


def test_emulated_writes():
    """And memory that is registered with an endpoint, three NICs."""
    for more in (EMULATED, "mr_endpoint=1,nics=3"):
        over("efa", "traffic", "rounds=10", more=more)
        over("efa", "traffic", "rounds=5", "staging=1", "pes=3", more=more)


@pytest.mark.parametrize("device", DEVICES)
def test_gpu_heap(device):
    """In GPU memory that the NIC reaches through the peer-memory module (DMABUF: tests/fabric/test_device.py), or that is
    staged; adds are left to kernels."""
    for memory in ("peermem=1", "hmem=0", "cuda_calls=1"):
        over(device, "traffic", "rounds=10", "cuda=1", "device_memory=1", more=memory, TSN_LIBCUDA=str(fake_cuda()))


@pytest.mark.parametrize("only", ["put_signal", "fence", "get", "quiet"])
def test_writes_of_a_nic_are_flushed_before_their_signals(only):
    """With flushes that do nothing, kernels read what was there before."""
    gpu = ["cuda=1", "device_memory=1", f"only={only}"]
    with pytest.raises(AssertionError, match="is wrong"):
        over("efa", "traffic", "rounds=10", *gpu, TSN_LIBCUDA=str(fake_cuda()), FAKE_CUDA_IDLE_FLUSH="1")


@pytest.mark.parametrize("device", DEVICES)
def test_refusals_adds_and_reasons(device):
    for scenario in ("refusals", "adds", "reasons"):
        over(device, scenario, *(["defers_adds=1"] if scenario == "adds" else []))


@pytest.mark.parametrize("staging", ["staging=0", "staging=1"])
@variants(2, "device", DEVICES)
def test_peers_that_lie(device, staging):
    """Nonsense, and messages, slots and addresses with one field that lies."""
    over(device, "garbage", "seeds=20", staging, more="nics=2,revoke=1")
    over(device, "lies", staging, more="nics=2,revoke=1")


@pytest.mark.parametrize("shape", [[], nightly(SHARED)], ids=["plain", "shared"])
@pytest.mark.parametrize("staging", ["staging=0", "staging=1"])
@pytest.mark.parametrize("device", DEVICES)
def test_failing_network(device, staging, shape):
    for chaos in ("stall_after=200", "eagain=1", "error_after=100", "error=0.02"):
        out = over(device, "failure", f"chaos={chaos}", "timeout_ms=500", "pes=3", staging, *shape, more="revoke=1")
        errors = [line for line in out.splitlines() if ": rank " in line]
        assert len(errors) == 3 and all(e.split(":")[0] in ("PeerLost", "FabricError") for e in errors), out


@pytest.mark.parametrize("shape", [[], nightly(SHARED)], ids=["plain", "shared"])
@pytest.mark.parametrize("how", ["failed=1", "failed=0"])
@pytest.mark.parametrize("device", DEVICES)
def test_endings(device, how, shape):
    over(device, "endings", how, "rounds=2", "pes=3", *shape, more=f"revoke={int(how == 'failed=1')}")


@pytest.mark.parametrize("device", DEVICES)
def test_a_peer_that_does_not_poll(device):
    """Writes of EFA complete without the target's processor; its completion queue, of which a device may give less than is
    asked for, overruns when there are too many."""
    for queue, most in (("cq=0", 4096), ("cq=1000", 500)):
        over(device, "credit", f"most={most}", more=f"unsolicited=2,tx=64,rx=8192,{queue}")


def test_a_completion_queue_that_is_too_short():
    done = subprocess.run(
        [str(programs.fabric_test()), "traffic", "pes=9", "provider=efa", f"library={fake_device()}"],
        env={**os.environ, "FAKE_FABRIC": "cq=60,tx=16,rx=16"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode and "completion queue has room for" in done.stderr and "TSN_PROXY_THREADS" in done.stderr
