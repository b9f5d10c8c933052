"""The benchmarks' native loops: data, counts, lists, durations, reordering networks, GPU memory, lost peers."""

import os
import subprocess
import sys
import threading
import time

import pytest

from benchmark import instruments
from tests.fabric import programs
from tests.fabric.pair import PROVIDERS
from tests.native.builder import ROOT
from tests.ranks import launch
from tests.variants import variants
from tilescale_net.errors import FabricError
from tilescale_net.runtime import fabric

LIBRARY, PROVIDER = next(p[1:] for p in PROVIDERS if "tcp" in p[2])


def sessions(bytes: int = 1 << 20, timeout: float = 20.0, **options):
    """Two sessions that know each other; each is to be used by a thread of its own."""
    ends = []
    for rank in range(2):
        chosen = fabric.transport_options(rank=rank, **{"library": LIBRARY, "provider": PROVIDER, **options})
        ends.append(instruments.Session(chosen, 2, bytes, timeout))
    for rank in range(2):
        ends[rank].connect(1 - rank, ends[1 - rank].address())
    return ends


def together(*calls):
    """Run the calls in threads; their results, or an exception."""
    results, errors = [None] * len(calls), []

    def one(i):
        try:
            results[i] = calls[i]()
        except Exception as err:
            errors.append(err)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(calls))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
        assert not t.is_alive(), "a loop hangs"
    if errors:  # the most specific one: others may have run into a time limit because of it
        raise min(errors, key=lambda err: "nothing has happened" in str(err))
    return results


def bandwidth(ends, operation, size, both=False, **options):
    calls = [
        lambda rank=rank: ends[rank].bandwidth(1 - rank, operation, size, initiator=both or rank == 0, **options)
        for rank in range(2)
    ]
    return together(*calls)


@pytest.mark.parametrize("operation", ["send", "write", "read"])
@pytest.mark.parametrize("both", [False, True])
@variants(4, "rails", [1, 3])
def test_counts_and_data(operation, both, rails):
    ends = sessions(rails=rails, message_buffers=0 if operation == "send" else 16)
    for size, lists in ((1, 1), (63, 4), (4096, 16), (70_000, 8)):
        for seed, end in enumerate(ends):
            end.fill(size, 100 + seed)
        results = bandwidth(
            ends, operation, size, both, iterations=96, tx_depth=16, rx_depth=24, post_list=lists, recv_post_list=3
        )
        assert [r["iterations"] for r in results] == [96, 96 if both else 0]
        for r in results[: 1 + both]:
            assert 0 < r["least_s_per_message"] <= r["seconds"] / 96 * (1 + 1e-9) < 60
        if operation == "read":
            assert ends[0].holds(size, 101)
            assert not both or ends[1].holds(size, 100)
        else:
            assert ends[1].holds(size, 100)
            assert not both or ends[0].holds(size, 101)
        assert not ends[1].holds(size, 55)


@variants(1, "library,provider", [pytest.param(*p[1:], id=p[0]) for p in PROVIDERS if "tcp" in p[2]])
def test_more_messages_than_receives(library, provider):
    """Some providers stop a connection at a message without a receive: acknowledgements behind it wait for one too."""
    for turn in range(20):
        ends = sessions(library=library, provider=provider, message_buffers=0)
        options = dict(iterations=96, tx_depth=16, rx_depth=24, post_list=4, recv_post_list=3)
        results = bandwidth(ends, "send", 512, turn % 2 == 1, **options)
        assert [r["iterations"] for r in results] == [96, 96 * (turn % 2)]


def test_duration():
    ends = sessions(message_buffers=0)
    start = time.monotonic()
    (result, _) = bandwidth(ends, "send", 512, duration_s=0.3)
    assert 0.25 < result["seconds"] < 5 and time.monotonic() - start < 10
    assert result["iterations"] > 0 and result["least_s_per_message"] != result["least_s_per_message"]  # NaN: no stamps
    (again, _) = bandwidth(ends, "send", 4096, iterations=10)  # receives left over serve larger messages
    assert again["iterations"] == 10


@pytest.mark.parametrize(
    "bytes,chunk,window", [(1, 64, 4), (8, 64, 1), (4096, 1 << 20, 8), (300_001, 4096, 5), (1 << 20, 65536, 64)]
)
def test_ping_pong(bytes, chunk, window):
    ends = sessions(instruments.ping_pong_bytes(bytes, chunk), message_buffers=0)
    calls = [
        lambda r=r: ends[r].ping_pong(1 - r, bytes, iterations=7, warmup=2, chunk=chunk, window=window, starter=r == 0)
        for r in range(2)
    ]
    trips, nothing = together(*calls)
    assert len(trips) == 7 and all(0 < t < 20 for t in trips) and nothing == []


@pytest.mark.parametrize("seed", range(3))
def test_ping_pong_on_a_network_that_reorders(seed):
    """Chunks overtake one another, the short last one too; all of them must come back."""
    chaos = f"seed={seed},reorder=0.7,delay_us=300,eagain=0.2"
    ends = sessions(instruments.ping_pong_bytes(50_001, 1000), message_buffers=0, chaos=chaos)
    trips, _ = together(
        *[
            lambda r=r: ends[r].ping_pong(1 - r, 50_001, iterations=4, warmup=1, chunk=1000, window=16, starter=r == 0)
            for r in range(2)
        ]
    )
    assert len(trips) == 4


@pytest.mark.parametrize("operation", ["send", "write", "read"])
def test_bandwidth_on_a_network_that_reorders(operation):
    chaos = "seed=3,reorder=0.5,delay_us=200,eagain=0.2,split=0.3,depth=20"
    ends = sessions(message_buffers=0 if operation == "send" else 16, chaos=chaos)
    for rank, end in enumerate(ends):
        end.fill(3000, rank)
    (result, _) = bandwidth(ends, operation, 3000, iterations=200, tx_depth=64)
    assert result["iterations"] == 200
    assert ends[0].holds(3000, 1) if operation == "read" else ends[1].holds(3000, 0)


def test_wrong_data_is_found():
    """The memory from which the echo goes out changes all the time."""
    size, stop = 200_000, threading.Event()
    ends = sessions(instruments.ping_pong_bytes(size, 1 << 20), timeout=2.0, message_buffers=0)

    def scribble():
        while not stop.is_set():
            ends[1].fill(ends[1].bytes() // 2, 77)

    def start():
        try:
            return ends[0].ping_pong(1, size, iterations=1000, warmup=100)
        finally:
            stop.set()

    with pytest.raises(FabricError, match="wrong data: chunk 0 of a message of 200000 bytes came back from rank 1"):
        for _ in range(100):  # on a busy machine the thread that scribbles may get no turn at the right time
            stop.clear()
            together(start, lambda: ends[1].ping_pong(0, size, iterations=1000, warmup=100, starter=False), scribble)


def test_bad_arguments():
    ends = sessions(1 << 16)
    for words, call in [
        ("bytes=0 is outside", lambda: ends[0].bandwidth(1, "write", 0)),
        (
            "bytes=40000 is outside 1 to half of the session's buffer, 32768",
            lambda: ends[0].bandwidth(1, "write", 40_000),
        ),
        ("send, write or read, not 'push'", lambda: ends[0].bandwidth(1, "push", 8)),
        ("are 1 or more", lambda: ends[0].bandwidth(1, "write", 8, tx_depth=0)),
        ("are 1 or more", lambda: ends[0].ping_pong(1, 8, iterations=0, warmup=1)),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(FabricError, match="needs a larger buffer"):
        ends[0].ping_pong(1, 1 << 20, iterations=1, warmup=1)
    with pytest.raises(FabricError, match="message_buffers == 0"):
        ends[0].ping_pong(1, 8, iterations=1, warmup=1)


def test_a_ping_pong_refuses_receives_left_over():
    ends = sessions(message_buffers=0)
    bandwidth(ends, "send", 8, iterations=4)
    with pytest.raises(FabricError, match="receives left over"):
        ends[1].ping_pong(0, 8, iterations=1, warmup=1)


def test_a_peer_that_never_comes_is_named():
    ends = sessions(timeout=1.0)
    start = time.monotonic()
    with pytest.raises(FabricError, match="rank 0, meeting with rank 1 .* nothing has happened for 1 s"):
        ends[0].bandwidth(1, "write", 8)
    assert time.monotonic() - start < 10


def _write_for_ever(provider: str):
    import multiprocessing  # noqa: F401  (ranks are processes already; this one only talks to its twin)

    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    session = instruments.Session(fabric.transport_options(rank=rank, provider=provider), 2, 1 << 20, 3.0)
    everyone = [None, None]
    dist.all_gather_object(everyone, session.address())
    session.connect(1 - rank, everyone[1 - rank])
    session.bandwidth(1 - rank, "write", 65536, duration_s=60.0, initiator=rank == 0)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_peer_ends_the_other_rank(victim):
    """Within its time limit, with an error that names the peer; over tcp, which leaves no files behind."""
    start = time.monotonic()

    def kill(processes):
        time.sleep(2.5)
        processes[victim].kill()

    outcomes = launch(2, _write_for_ever, "", env={"GLOO_SOCKET_IFNAME": "lo"}, init=False, timeout=40, on_start=kill)
    assert time.monotonic() - start < 30
    name, text, _ = outcomes[1 - victim].error
    assert name == "FabricError" and f"with rank {victim}" in text, outcomes[1 - victim].error


GPU_SCRIPT = """
import ctypes, threading
from benchmark import instruments
from tilescale_net import _native
from tilescale_net.runtime import fabric
SIZE, CHUNK = 100_001, 4096
total = instruments.ping_pong_bytes(SIZE, CHUNK)
ends, memory = [], []
for rank in range(2):
    options = fabric.transport_options(rank=rank, message_buffers=0)
    ends.append(instruments.Session(options, 2, total, 20.0))
    memory.append((ctypes.c_ubyte * total)())
for rank in range(2):
    ends[rank].connect(1 - rank, ends[1 - rank].address())
trips = []
def run(rank):
    trips.extend(ends[rank].ping_pong(1 - rank, SIZE, iterations=5, warmup=2, chunk=CHUNK, window=8, starter=rank == 0,
                                      device_address=ctypes.addressof(memory[rank])))
threads = [threading.Thread(target=run, args=(r,)) for r in range(2)]
[t.start() for t in threads]
[t.join(60) for t in threads]
assert len(trips) == 5, trips
assert bytes(memory[0][:SIZE]) != bytes(SIZE), "nothing passed through the GPU's memory"
third = total // 3
assert bytes(memory[0][:SIZE]) in (bytes(memory[1][third:third + SIZE]), bytes(memory[1][2 * third:2 * third + SIZE]))
print("good")
"""


def test_ping_pong_from_gpu_memory_through_staging():
    """A driver without a GPU carries out copies late: code that sends or compares too early is found."""
    driver = str(programs.fake_cuda())
    env = {**os.environ, "TSN_LIBCUDA": driver, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", GPU_SCRIPT], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout.strip() == "good", done.stdout + done.stderr
