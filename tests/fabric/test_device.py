"""The transport against a strict device that behaves as EFA does, which no test machine has: tests/native/fabric_fake.cpp.

It reorders, has 4-byte immediates that use up receives, small queues, several NICs, and checks every rule it can check.
"""

import ctypes
import errno
import gc
import json
import os
import random
import subprocess
import sys

import pytest

from tests.fabric import programs
from tests.fabric.pair import pair, until
from tests.native.builder import ROOT
from tilescale_net import _native
from tilescale_net.errors import FabricError
from tilescale_net.runtime import fabric

HEADERS = tuple(int(n) for n in fabric.library()["headers"].split("."))


@pytest.fixture(scope="module")
def device():
    """Path of the library, and the library itself."""
    path = str(programs.fake_device())
    library = ctypes.CDLL(path)
    library.fake_violations.restype = ctypes.c_char_p
    return path, library


@pytest.fixture
def fake(device, monkeypatch):
    """Configures the device; afterwards it must have nothing to complain about."""
    path, library = device

    def configure(text: str) -> str:
        monkeypatch.setenv("FAKE_FABRIC", text)
        library.fake_reset()
        return path

    yield configure
    assert library.fake_violations().decode() == ""


CONFIGURATIONS = [
    "seed=1,tx=16,rx=64",
    "seed=2,name=efa-direct,tx=16,rx=64",
    "seed=3,name=efa-direct,tx=4,rx=4",
    "seed=4,tx=3",
    "seed=5,mr_endpoint=1,nics=3,tx=16,rx=64",
    "seed=6,name=efa-direct,nics=2,tx=7,rx=9",
    "seed=7,name=efa-direct,device=p6",
]


@pytest.mark.parametrize("text", CONFIGURATIONS)
def test_traffic(fake, text):
    a, b = pair(fake(text), bytes=1 << 18)
    p = a.properties()
    assert p["provider"] == ("efa-direct" if "direct" in text else "efa")
    assert p["delivery_complete"] and p["doorbells"] and not p["ordered_messages"]
    assert p["link_gbps"] == (400 if "p6" in text else 100) * p["rails"]
    assert p["rails"] == (3 if "nics=3" in text else 2 if "nics=2" in text else 1)
    rng = random.Random(text)
    data = rng.randbytes(a.bytes)
    a.store(data)
    n, part = 150, 1500
    for i in range(n):
        a.write(i * part, 1 + i * 10, cookie=i, imm=0xFFFF0000 + i, rail=i % p["rails"], more=rng.random() < 0.5)
        a.message(b"%d" % i * (1 + i % 3), cookie=1000 + i, rail=i % p["rails"])
    a.write(0, 1, cookie=n)
    until(lambda: len(a.of("done")) == 2 * n + 1 and len(b.of("immediate")) == len(b.of("message")) == n, a, b)
    assert sorted(e["cookie"] for e in a.of("done")) == [*range(n + 1), *range(1000, 1000 + n)]
    assert sorted(e["imm"] for e in b.of("immediate")) == [0xFFFF0000 + i for i in range(n)]
    assert sorted(e["data"] for e in b.of("message")) == sorted(b"%d" % i * (1 + i % 3) for i in range(n))
    assert [e["imm"] for e in b.of("immediate")] != sorted(e["imm"] for e in b.of("immediate"))
    for i in range(n):
        assert b.load(i * part, 1 + i * 10) == data[i * part : i * part + 1 + i * 10]
    b.store(bytes(reversed(data)))
    a.events.clear()
    for i in range(40):
        a.post("read", 1, a.region, a.remote, 700, i * 700, i * 700, cookie=i, more=i % 3 == 0 and i < 39)
    until(lambda: len(a.of("done")) == 40, a, b)
    assert a.load(0, 40 * 700) == b.load(0, 40 * 700)


def test_immediates_take_receives(fake):
    """Where the device could do without, which would let one side overrun the other's completion queue."""
    a, b = pair(fake("name=efa-direct,rx=16,tx=8"))
    b.poll()  # its receives
    a.twin = None  # b is away
    taken, refused = 0, 0
    while refused < 200:
        if a.transport.write(1, a.region, a.remote, 8, 0, remote_offset=0, imm=taken, cookie=taken):
            taken += 1
        else:
            refused += 1
            a.poll()
        assert taken <= 16 + 8
    assert taken > 8
    until(lambda: len(b.of("immediate")) == taken == len(a.of("done")), a, b)


def test_every_immediate_that_may_come_finds_a_receive(fake, device):
    """Otherwise EFA sends its write again from the start: with 256 receives for 4096 immediates, 3840 were refused."""
    a, b = pair(fake("name=efa-direct"))
    b.poll()
    a.twin = None  # b is away
    credit = b.properties()["immediates"]
    assert credit == 4096
    for i in range(credit):
        a.write(0, 8, imm=i, cookie=i)
    until(lambda: len(a.of("done")) == credit, a)
    assert device[1].fake_refusals() == 0
    until(lambda: len(b.of("immediate")) == credit, b)
    a.message(b"and a message", cookie=credit)
    until(lambda: b.of("message"), a, b)


@pytest.mark.parametrize("name", ["efa", "efa-direct"])
def test_a_message_that_fails_tells_to_whom_it_was(fake, name):
    """An injected one would fail without its context."""
    a, b = pair(fake(f"name={name}"))
    a.twin = None
    assert a.transport.message(1, b"x")
    del b
    gc.collect()
    while not a.events:
        a.poll()
    (event,) = a.events
    assert event["kind"] == "failed" and event["peer"] == 1 and event["code"] == errno.ENOTCONN


def test_limits_of_messages_and_transfers_differ(fake):
    a, _ = pair(fake("name=efa-direct"), message_buffers=0)
    p = a.properties()
    assert p["max_write"] == 1 << 30
    assert p["max_send"] == 8928


@pytest.mark.parametrize("name", ["efa", "efa-direct"])
@pytest.mark.parametrize("limit", ["mr_bytes=200000", "mr_count=1"])
def test_more_memory_than_the_device_registers(fake, name, limit):
    with pytest.raises(FabricError, match="registering 262144 bytes .*: .*TSN_HEAP_SIZE"):
        pair(fake(f"name={name},tx=16,rx=64,{limit}"), bytes=1 << 18)


def test_a_completion_queue_shorter_than_asked_for(fake):
    a, _ = pair(fake("tx=16,rx=64,cq=500"))
    assert 0 < a.properties()["immediates"] < 500
    assert pair(fake("seed=1"))[0].properties()["immediates"] == 4096


def test_an_offer_without_immediates_is_no_offer(fake):
    with pytest.raises(FabricError, match="no provider offers one-sided writes with 4-byte immediates"):
        _native.Transport(fabric.transport_options(library=fake("imm_bytes=0")))


def test_a_remote_error_is_reported_with_its_reason(fake):
    a, b = pair(fake("seed=9"))
    b.transport.release_memory(b.region)
    a.write(0, 64, cookie=5)
    while not a.events:
        a.poll(), b.poll()
    (event,) = a.events
    assert event["kind"] == "failed" and event["cookie"] == 5 and event["peer"] == 1
    assert "Permission denied" in event["text"] and "a fake device's reason" in event["text"]


def test_nearest_nic_is_taken(fake):
    """The GPU is at the same place as NIC 2, which is as near as can be; both exist on every PC's bus."""
    if not os.path.exists("/sys/bus/pci/devices/0000:00:02.0"):
        pytest.skip("no such PCI device here")
    library = fake("nics=3")
    t = _native.Transport(fabric.transport_options(library=library, gpu_pci="00000000:00:02.0"))
    assert t.properties()["interface"] == "rdmap2s0"
    t = _native.Transport(fabric.transport_options(library=library, max_rails=2, rank=1))
    assert t.properties()["interface"] == "rdmap2s0,rdmap3s0"
    t = _native.Transport(fabric.transport_options(library=library, interface="rdmap3s0,rdmap1s0"))
    assert t.properties()["interface"] == "rdmap1s0,rdmap3s0"
    t = _native.Transport(fabric.transport_options(library=library, rails=4))
    assert t.properties()["interface"] == "rdmap1s0,rdmap2s0,rdmap3s0,rdmap1s0"


def test_emulated_writes_are_reported(fake, capfd):
    for device in ("p5", "p4d", "p4d"):
        t = _native.Transport(fabric.transport_options(library=fake(f"device={device}")))
        assert t.properties()["emulated_write"] == (device == "p4d")
    assert capfd.readouterr().err.count("warning: provider efa emulates RDMA writes") == 1


# What becomes of GPU memory on a device: noted ways to register it, and whether the transport offers it.
GPU_MEMORY = {
    "dmabuf=1": ({"dmabuf"}, True),
    "dmabuf=0": ({"peermem"}, True),
    "dmabuf=0,peermem=0": (set(), True),
    "cuda_calls=1": (set(), False),
    "hmem=0": (set(), False),
}
# A fork for each device: the import takes longest.
REGISTERS = """
import ctypes, json, os, sys
from tilescale_net import _native
from tilescale_net.runtime import fabric
from tilescale_net.errors import FabricError
path, folder, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
for number, text in enumerate(texts):
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0, text
        continue
    os.environ["FAKE_FABRIC"] = text
    library = ctypes.CDLL(path)
    t = _native.Transport(fabric.transport_options(library=path, device_memory=True))
    memory = (ctypes.c_ubyte * (3 * 4096))()
    base = (ctypes.addressof(memory) + 4095) // 4096 * 4096
    try:
        t.register_memory(base, 8192, kind="cuda")
        error = ""
    except FabricError as err:
        error = str(err)
    notes = [n for n in ("dmabuf", "peermem") if library.fake_noted(n.encode())]
    with open(f"{folder}/{number}", "w") as file:
        json.dump([t.properties()["device_memory"], notes, error], file)
    os._exit(0)
"""


def test_gpu_memory(device, tmp_path):
    """Registered as a DMABUF, else through the peer-memory module, else refused; never by a provider that calls CUDA."""
    env = {
        **os.environ,
        "TSN_LIBCUDA": str(programs.fake_cuda()),
        "FAKE_CUDA_DMABUF": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    command = [sys.executable, "-c", REGISTERS, device[0], str(tmp_path), json.dumps([*GPU_MEMORY])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for number, (text, (notes, usable)) in enumerate(GPU_MEMORY.items()):
        if HEADERS < (1, 20) and "dmabuf" in notes:
            notes = {"peermem"}
        offered, noted, error = json.loads((tmp_path / str(number)).read_text())
        assert (offered, set(noted)) == (usable, notes), (text, error)
        assert bool(error) != bool(notes), text
        assert notes or ("GPU memory" in error and ("nvidia_peermem" in error or "stage through" in error)), text
