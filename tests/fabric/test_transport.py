"""The transport over every provider of every libfabric on this machine: data, immediates, messages, limits, refusals."""

import ctypes
import multiprocessing
import os
import random
import re
import resource
import subprocess
import sys

import pytest

from tests import hosts
from tests.fabric.pair import IDS, PROVIDERS, End, pair, until
from tests.fabric.programs import small_shm
from tests.variants import variants
from tilescale_net import _native
from tilescale_net.errors import FabricError
from tilescale_net.launch import job
from tilescale_net.runtime import fabric

every_provider = pytest.mark.parametrize("library,provider", [p[1:] for p in PROVIDERS], ids=IDS)


def fill(end, seed: int) -> bytes:
    data = random.Random(seed).randbytes(end.bytes)
    end.store(data)
    return data


def test_there_is_something_to_test():
    assert any("tcp" in p[2] for p in PROVIDERS) and any(p[2] == "shm" for p in PROVIDERS)


@every_provider
def test_writes_of_all_sizes_and_alignments(library, provider):
    a, b = pair(library, provider)
    data = fill(a, 1)
    rng = random.Random(2)
    expected = bytearray(a.bytes)
    sizes = [1, 3, 7, 8, 64, 127, 4096, 4097, 65536, 65537, 300_001]
    placed, at = [], 0
    for size in sizes:
        at += rng.randrange(0, 17)
        placed.append((at, size))
        expected[at : at + size] = data[at : at + size]
        at += size
    for cookie, (offset, size) in enumerate(placed):
        a.write(offset, size, cookie=cookie, imm=0xFFFF0000 + cookie)
    until(lambda: len(a.of("done")) == len(sizes) and len(b.of("immediate")) == len(sizes), a, b)
    assert sorted(e["cookie"] for e in a.of("done")) == list(range(len(sizes)))
    assert sorted(e["imm"] for e in b.of("immediate")) == [0xFFFF0000 + i for i in range(len(sizes))]
    assert b.load() == bytes(expected)


@every_provider
def test_an_immediate_comes_after_its_data(library, provider):
    a, b = pair(library, provider)
    for turn in range(1, 200):
        size = 1 + turn * 997 % 5000
        a.store(bytes([turn % 256]) * size)
        a.write(0, size, cookie=turn, imm=turn)
        until(lambda: b.of("immediate"), a, b)
        assert b.load(0, size) == bytes([turn % 256]) * size
        until(lambda: a.of("done"), a, b)
        a.events.clear(), b.events.clear()


@every_provider
def test_done_means_delivered(library, provider):
    """Where the provider promises it: no immediate, no message, yet the data is there."""
    a, b = pair(library, provider)
    assert a.properties()["delivery_complete"]
    for turn in range(50):
        a.store(bytes([turn + 1]) * 30_000)
        a.write(0, 30_000, cookie=turn)
        until(lambda: a.of("done"), a, b)
        assert b.load(0, 30_000) == bytes([turn + 1]) * 30_000
        a.events.clear()


@every_provider
def test_reads(library, provider):
    a, b = pair(library, provider)
    data = fill(b, 3)
    for cookie, (offset, size) in enumerate([(5, 1), (100, 8), (1001, 4096), (10_000, 500_000)]):
        a.post("read", 1, a.region, a.remote, size, offset, offset, cookie=cookie)
        until(lambda: a.of("done"), a, b)
        assert a.events.pop()["cookie"] == cookie
        assert a.load(offset, size) == data[offset : offset + size]
        a.events.clear()
    assert a.load(0, 5) == bytes(5)


@every_provider
@variants(5, "rails", [1, 3])
def test_messages_in_both_directions(library, provider, rails):
    """Small ones are injected, large ones use bounce buffers; more are sent than there are buffers."""
    a, b = pair(library, provider, rails=rails, message_buffers=16, message_bytes=400)
    count = 600
    texts = [bytes([i % 256]) * (i % 401) for i in range(count)]
    for i, text in enumerate(texts):
        a.message(text, rail=i % rails)
        if i % 3 == 0:
            b.message(text, cookie=i, rail=i % rails)
    until(lambda: len(b.of("message")) == count and len(a.of("message")) == (count + 2) // 3, a, b)
    until(lambda: len(b.of("done")) == (count + 2) // 3, a, b)
    assert sorted(e["data"] for e in b.of("message")) == sorted(texts)
    assert {e["peer"] for e in b.of("message")} == {0} and {e["peer"] for e in a.of("message")} == {1}
    assert sorted(e["cookie"] for e in b.of("done")) == list(range(0, count, 3))
    if a.properties()["ordered_messages"] and rails == 1:
        assert [e["data"] for e in b.of("message")] == texts


@every_provider
@pytest.mark.sample(3)
def test_more_operations_than_the_queue_holds(library, provider):
    """Posting answers 'again' at the bound, never loses an operation, and reports each cookie once."""
    a, b = pair(library, provider, depth=8)
    assert a.properties()["depth"] <= 8
    data = fill(a, 4)
    n = 500
    refused = sum(a.write(i * 64, 64, cookie=i, imm=i, more=i % 4 != 3) for i in range(n))
    until(lambda: len(a.of("done")) == n and len(b.of("immediate")) == n, a, b)
    assert refused > 0
    assert sorted(e["cookie"] for e in a.of("done")) == list(range(n))
    assert sorted(e["imm"] for e in b.of("immediate")) == list(range(n))
    assert b.load(0, n * 64) == data[: n * 64]


@every_provider
def test_silent_operations_are_not_reported(library, provider):
    a, b = pair(library, provider)
    a.write(0, 128, imm=9)
    a.message(b"x" * 200)
    until(lambda: b.of("immediate") and b.of("message"), a, b)
    a.write(0, 128, cookie=1)
    until(lambda: a.of("done"), a, b)
    assert [e["cookie"] for e in a.events] == [1]


@every_provider
@pytest.mark.sample(3)
def test_several_rails_carry_parts_of_one_buffer(library, provider):
    a, b = pair(library, provider, rails=3)
    assert a.properties()["rails"] == 3
    data = fill(a, 5)
    part = 40_000
    for i in range(24):
        a.write(i * part, part, cookie=i, imm=i, rail=i % 3)
    until(lambda: len(a.of("done")) == 24 and len(b.of("immediate")) == 24, a, b)
    assert b.load(0, 24 * part) == data[: 24 * part]
    assert {e["rail"] for e in b.of("immediate")} == {0, 1, 2}


@every_provider
def test_ends_with_different_numbers_of_rails(library, provider):
    """The surplus rails of one side reach the other side all the same."""
    a, b = pair(library, provider, options=({"rails": 3}, {"rails": 2}))
    ours, theirs = fill(a, 7), fill(b, 8)
    for rail in range(3):
        a.write(rail * 100, 100, cookie=rail, imm=rail, rail=rail)
    b.write(5000, 100, cookie=0, imm=0, rail=0)
    b.write(5100, 100, cookie=1, imm=1, rail=1)
    until(lambda: len(b.of("immediate")) == 3 and len(a.of("immediate")) == 2, a, b)
    assert b.load(0, 301) == ours[:300] + theirs[300:301] and a.load(5000, 201) == theirs[5000:5200] + ours[5200:5201]


@every_provider
def test_two_sided_transfers(library, provider):
    a, b = pair(library, provider, message_buffers=0)
    data = fill(a, 6)
    sizes = [s for s in (1, 8, 4096, 200_000) if s <= a.properties()["max_send"]]
    offsets = [0, 64, 8192, 65536]
    for i, (offset, size) in enumerate(zip(offsets, sizes)):
        b.post("receive", b.region, offset, size, cookie=100 + i)
    for i, (offset, size) in enumerate(zip(offsets, sizes)):
        a.post("send", 1, a.region, offset, size, cookie=i)
        until(lambda: len(b.of("done")) > i and len(a.of("done")) > i, a, b)
    assert [(e["cookie"], e["bytes"]) for e in b.of("done")] == [(100 + i, s) for i, s in enumerate(sizes)]
    for offset, size in zip(offsets, sizes):
        assert b.load(offset, size) == data[offset : offset + size]


def _serve_until_killed(library: str, pipe):
    b = End(1, library=library, provider="shm")
    pipe.send(b.address())
    b.join(*pipe.recv())
    pipe.send("ready")
    while True:
        b.poll()


@pytest.mark.parametrize("library", [p[1] for p in PROVIDERS if p[2] == "shm"])
def test_the_shared_memory_of_a_killed_peer_goes(library):
    """conftest.py looks for files left in /dev/shm."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve_until_killed, args=(library, theirs), daemon=True)
    process.start()
    a = End(0, library=library, provider="shm")
    a.join(*pipe.recv())
    pipe.send(a.address())
    assert pipe.recv() == "ready"
    a.write(0, 1000, cookie=1)
    until(lambda: a.of("done"), a)
    process.kill()
    process.join()


@pytest.mark.parametrize("library", [p[1] for p in PROVIDERS if p[2] == "shm"])
def test_objects_of_a_killed_job_are_removed_by_the_next(library):
    """Objects go whose process does not hold their lock, by the next endpoint or by the launcher; others stay.

    Those of living processes stay whatever their numbers are here, as with processes of another PID namespace, and so do
    endpoints of other programs, whose processes may live there.
    """
    number = subprocess.Popen(["true"])
    number.wait()
    name = f"tilescale_net-{number.pid}-"
    gone, kept = [f"{name}a", f"{name}a:0:0", f"{name}a:0:1_12"], [f"{name}b", f"{name}b:0:0"]
    others = [f"{number.pid}:{os.geteuid()}:0"]
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(); input()"]
        + [f"/dev/shm/{kept[0]}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        holder.stdout.readline()
        for remove in (lambda: End(0, library=library, provider="shm"), job.remove_objects_of_ended_processes):
            for file in gone + kept[1:] + others:
                open(f"/dev/shm/{file}", "w").close()
            remove()
            left = os.listdir("/dev/shm")
            assert not set(gone) & set(left) and {*kept, *others} <= set(left)
        holder.kill()
        holder.wait()
        job.remove_objects_of_ended_processes()
        assert not set(kept) & set(os.listdir("/dev/shm"))
    finally:
        holder.kill()
        holder.communicate()
        for file in {*gone, *kept, *others} & set(os.listdir("/dev/shm")):
            os.unlink(f"/dev/shm/{file}")


@pytest.mark.parametrize("library", [p[1] for p in PROVIDERS if p[2] == "shm"])
@pytest.mark.skipif(not hosts.possible(), reason="lacks root")
def test_endpoints_stay_while_processes_of_another_pid_namespace_come_and_go(library):
    """A container that shares /dev/shm does not see the process that owns them."""
    end = End(0, library=library, provider="shm")
    mine = {file for file in os.listdir("/dev/shm") if f"-{os.getpid()}-" in file}
    assert len(mine) >= 2
    process = multiprocessing.get_context("fork").Process(target=_in_a_container, args=(library,))
    process.start()
    process.join()
    assert process.exitcode == 0 and mine <= set(os.listdir("/dev/shm"))
    del end


def _in_a_container(library: str) -> None:
    hosts.enter_container()
    End(0, library=library, provider="shm")


def test_refusals_name_the_mistake():
    a, b = pair(*PROVIDERS[0][1:], bytes=4096)
    write = a.transport.write
    for args, words in [
        ((5, a.region, a.remote, 8), "peer 5 is not connected"),
        ((-1, a.region, a.remote, 8), "peer -1 is not connected"),
        ((1, 7, a.remote, 8), "not inside region 7"),
        ((1, a.region, 3, 8), r"not inside region 3 of peer 1"),
        ((1, a.region, a.remote, 4097), r"\[0, \+4097\)"),
        ((1, a.region, a.remote, 0), "are not inside"),
        ((1, a.region, a.remote, 8, 4090), r"local bytes \[4090, \+8\)"),
        ((1, a.region, a.remote, 8, 0, 4089), r"remote bytes \[4089, \+8\)"),
        ((1, a.region, a.remote, 8, 0, 2**64 - 4), "remote bytes"),
        ((1, a.region, a.remote, 2**63, 2**63), "local bytes"),
    ]:
        with pytest.raises(FabricError, match=words):
            write(*args)
    with pytest.raises(FabricError, match="rail 9 does not exist; there are 1"):
        write(1, a.region, a.remote, 8, rail=9)
    with pytest.raises(FabricError, match="257 bytes exceeds the limit of 256"):
        a.transport.message(1, b"x" * 257)
    with pytest.raises(FabricError, match="message_buffers == 0"):
        a.transport.receive(a.region, 0, 8, 1)
    with pytest.raises(FabricError, match="connected already"):
        a.transport.connect(1, b.transport.address())
    with pytest.raises(FabricError, match="is not one"):
        a.transport.connect(2, b"rubbish")
    with pytest.raises(FabricError, match="is not one"):
        a.transport.connect(2, b.transport.address()[:-1])
    with pytest.raises(FabricError, match="not connected"):
        a.transport.add_remote(3, b.transport.region_key(b.region))
    with pytest.raises(FabricError, match="GPU memory"):
        a.transport.register_memory(ctypes.addressof(a.memory), 4096, kind="cuda")
    with pytest.raises(FabricError, match="null"):
        a.transport.register_memory(0, 4096)
    # And it still works.
    a.write(0, 64, cookie=1, imm=1)
    until(lambda: b.of("immediate") and a.of("done"), a, b)


def test_released_memory_is_refused():
    a, _ = pair(*PROVIDERS[0][1:], bytes=4096)
    a.transport.release_memory(a.region)
    with pytest.raises(FabricError, match="not inside region"):
        a.transport.write(1, a.region, a.remote, 8)
    with pytest.raises(FabricError, match="is not registered"):
        a.transport.release_memory(a.region)


def test_different_providers_are_reported():
    (library, first), (_, second) = PROVIDERS[0][1:], PROVIDERS[1][1:]
    assert first != second
    a, b = (End(r, library=library, provider=p) for r, p in ((0, first), (1, second)))
    with pytest.raises(FabricError, match=f"peer 1 uses provider '{second}', this process '{first}': set TSN_PROVIDER"):
        a.transport.connect(1, b.transport.address())


@pytest.mark.parametrize(
    "options,words",
    [
        ({"provider": "nonsuch"}, "provider 'nonsuch' is unknown.*offers one-sided traffic by: .*shm"),
        ({"interface": "nonsuch0"}, "interface 'nonsuch0'"),
        ({"library": "/nonexistent/libfabric.so"}, "TSN_LIBFABRIC"),
        ({"library": "libc.so.6"}, "is not libfabric"),
        ({"provider": "shm", "multi_host": True}, "'shm' is unknown here or does not offer .* between hosts"),
        ({"provider": "udp"}, "'udp' is unknown here or does not offer"),
    ],
)
def test_impossible_options_name_a_remedy(options, words):
    with pytest.raises(FabricError, match=words):
        _native.Transport(fabric.transport_options(**options))


@pytest.mark.parametrize("library", sorted({p[1] for p in PROVIDERS if p[2] == "shm"}))
def test_full_shared_memory_is_reported(library):
    """libfabric reckons with an endpoint for each processor, so that this comes and goes where others use /dev/shm."""
    script = (
        "from tilescale_net import _native\nfrom tilescale_net.runtime import fabric\n"
        f"_native.Transport(fabric.transport_options(provider='shm', library={library!r}))"
    )
    environment = {**os.environ, "LD_PRELOAD": str(small_shm())}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    words = rf"/dev/shm has room for .* {os.cpu_count()} processors, \d+ MB, and now 1 MB are free: .*--shm-size"
    assert done.returncode == 1 and re.search(words, done.stderr), done.stderr


def test_one_host_means_loopback():
    t = _native.Transport(fabric.transport_options())
    assert t.properties()["interface"] == "lo" and "tcp" in t.properties()["provider"]
    outside = [o for o in fabric.offers() if not o["loopback"] and "tcp" in o["provider"]]
    if outside:
        t = _native.Transport(fabric.transport_options(multi_host=True))
        assert t.properties()["interface"] != "lo"
        t = _native.Transport(fabric.transport_options(interface=outside[0]["address"]))
        assert t.properties()["interface"] == outside[0]["domain"]


def test_an_endpoint_over_tcp_takes_little_memory():
    """The pages that it touches; libfabric's own default would be 64 MiB of buffers for messages."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    t = _native.Transport(fabric.transport_options(provider="tcp;ofi_rxm"))
    touched = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert t.properties()["max_message"] >= 256 and touched * resource.getpagesize() < 32 << 20


def test_environment_chooses(monkeypatch):
    monkeypatch.setenv("TSN_PROVIDER", "shm")
    assert _native.Transport(fabric.transport_options()).properties()["provider"] == "shm"
    monkeypatch.setenv("TSN_CHAOS", "seed=3")
    assert _native.Transport(fabric.transport_options()).properties()["provider"] == "chaos+shm"
    assert _native.Transport(fabric.transport_options(chaos="off")).properties()["provider"] == "shm"
    monkeypatch.setenv("TSN_LIBFABRIC", "/nonexistent.so")
    with pytest.raises(FabricError, match="nonexistent"):
        _native.Transport(fabric.transport_options())


def test_options_are_checked():
    with pytest.raises(TypeError, match="no field 'railes'"):
        fabric.transport_options(railes=2)
    with pytest.raises(TypeError, match="rails cannot be 'two'"):
        fabric.transport_options(rails="two")


def test_nearest_devices():
    """A node's shape: two switches, each with two NICs and a GPU."""
    nics = [f"/sys/devices/pci0000:{s:02x}/0000:{s:02x}:01.0/0000:{s + 1:02x}:00.{f}" for s in (0, 16) for f in (0, 1)]
    gpu = "/sys/devices/pci0000:10/0000:10:01.0/0000:12:00.0"
    assert _native.nearest_devices(nics, gpu, 4) == [2, 3]
    assert _native.nearest_devices(nics, gpu, 1) == [2]
    assert _native.nearest_devices(nics, gpu, 1, first=1) == [3]
    assert _native.nearest_devices(nics, "", 3) == [0, 1, 2]
    assert _native.nearest_devices(nics, "", 2, first=3) == [0, 3]
    assert _native.nearest_devices([], gpu, 4) == []
