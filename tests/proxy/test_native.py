"""The proxy's Python face: options, errors, counters, the bare writer."""

import ctypes
import mmap
import os
import random
import struct
import subprocess
import sys
import threading
import time

import pytest

from benchmark import instruments
from tests.fabric.programs import fake_cuda
from tilescale_net import _native
from tilescale_net.errors import FabricError
from tilescale_net.runtime import fabric

HEAP = 1 << 20
QUEUE_WORDS, QUEUE_WORDS_STRIDE = 128, 32  # of device/context.h


class Pe:
    """A proxy with a heap of its own, and pushes as a kernel's."""

    def __init__(self, rank=0, n_pes=2, provider="null", **options):
        self.heap = mmap.mmap(-1, HEAP)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.heap))
        self.abort = ctypes.c_uint32(0)
        settings = dict(
            rank=rank, n_pes=n_pes, peers=[pe for pe in range(n_pes) if pe != rank], heap_base=self.base,
            heap_bytes=HEAP, abort_word=ctypes.addressof(self.abort),
        )  # fmt: skip
        self.proxy = _native.Proxy(fabric.transport_options(provider=provider), **{**settings, **options})
        self.position = 0

    def view(self, queue=0):
        fields = struct.unpack_from("8Q", self.proxy.queue_views(), queue * 64)
        return dict(zip(("slots", "tail", "head", "tail_cache", "done", "mask"), fields))

    def push(self, kind, pe, first=0, second=0, size=0, signal=0, value=0):
        view = self.view()
        parity = int(self.position & (view["mask"] + 1) == 0)
        words = (
            parity | kind << 1 | pe << 6 | first << 20,
            value,
            parity | second << 1 | size >> 17 << 45,
            size & 0x1FFFF | signal >> 3 << 17,
        )
        slot = view["slots"] + (self.position & view["mask"]) * 32
        for i in (3, 2, 1, 0):
            ctypes.c_uint64.from_address(slot + 8 * i).value = words[i]
        self.position += 1

    def tail(self):
        return ctypes.c_uint64.from_address(self.view()["tail"]).value


def pair(**options):
    pes = [Pe(rank, **options) for rank in range(2)]
    addresses = [pe.proxy.address() for pe in pes]
    for pe in pes:
        pe.proxy.connect(addresses)
        pe.proxy.start()
    return pes


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


def test_put_is_counted_and_seen():
    pe, other = pair()
    for _ in range(2000):  # more than one lap
        pe.push(1, 1, first=65536, second=65536, size=5000)
        until(lambda: pe.position - pe.tail() < 1000)
    pe.push(12, 1)  # flush
    done = pe.view()["done"] + (pe.position - 1 & pe.view()["mask"]) * 8
    until(lambda: ctypes.c_uint64.from_address(done).value >= pe.position)
    pe.proxy.stop()
    other.proxy.stop()
    stats = pe.proxy.stats()
    assert stats["puts"] == 2000 and stats["bytes_put"] == 2000 * 5000 and stats["flushes"] == 1
    assert stats["chunks"] == 2000 and stats["completion_count"] == 2000 and stats["completion_us_max"] >= 0
    assert pe.proxy.error() is None and pe.abort.value == 0
    for stage in ("pop", "post", "completion", "flush"):
        assert stats[f"{stage}_us_p50"] <= stats[f"{stage}_us_p99"] <= stats[f"{stage}_us_max"]


def test_staged_signals_travel_with_their_data():
    pe, other = pair(force_staging=True)
    for _ in range(3):
        pe.push(2, 1, first=65536, second=65536, size=5000, signal=131072, value=1)
    until(lambda: pe.proxy.stats()["bytes_put"] == 15000)
    pe.proxy.stop()
    other.proxy.stop()
    stats = pe.proxy.stats()
    assert (stats["put_signals"], stats["records"], stats["messages"]) == (3, 3, 0)


def test_views_match_the_context():
    pe = Pe(queues=3, capacity=64)
    assert len(pe.proxy.queue_views()) == 3 * 64
    for queue in range(3):
        view = pe.view(queue)
        assert view["mask"] == 63 and view["slots"] % 128 == 0
        words = pe.base + 8 * (QUEUE_WORDS + queue * QUEUE_WORDS_STRIDE)
        assert view["head"] == words and view["tail_cache"] == words + 128
    assert pe.proxy.context_flags == 0


def test_bad_descriptor_becomes_an_error():
    pe, other = pair()
    pe.push(1, 1, first=HEAP - 8, second=0, size=16)
    until(lambda: pe.proxy.error() is not None)
    error = pe.proxy.error()
    assert error["kind"] == "InvalidDescriptor" and error["pe"] == 1 and error["operation"] == "put"
    assert error["offset"] == HEAP - 8 and "rank 0" in error["text"] and str(HEAP) in error["text"]
    assert pe.abort.value == 1
    assert pe.proxy.stats()["chunks"] == 0
    pe.proxy.stop()


def test_abort_word_ends_the_threads():
    pe, other = pair()
    pe.abort.value = 1
    started = time.monotonic()
    pe.proxy.stop()
    assert time.monotonic() - started < 1.0 and pe.proxy.error() is None


@pytest.mark.parametrize(
    "options, error, words",
    [
        (dict(capacity=3), ValueError, "power of two"),
        (dict(queues=0), ValueError, "queues"),
        (dict(queues=65), ValueError, "64"),
        (dict(threads=2), ValueError, "threads"),
        (dict(threads=3, peer_threads=2), ValueError, "3 threads for 1 queues, of which 2 serve one peer"),
        (dict(peer_threads=2), ValueError, "1 to 1, the number of threads"),
        (dict(peer_threads=0), ValueError, "threads for a peer"),
        (dict(heap_bytes=1000), ValueError, "heap"),
        (dict(peers=[0]), ValueError, "peer"),
        (dict(peers=[2]), ValueError, "peer"),
        (dict(n_pes=20000, peers=[]), ValueError, "PEs"),
        (dict(timeout=0), ValueError, "timeout"),
        (dict(chunk_bytes=1), ValueError, "64"),
        (dict(heap_kind="tape"), ValueError, "tape"),
        (dict(rank="one"), TypeError, "rank"),
        (dict(speed=3), TypeError, "speed"),
        (dict(group_window=6), ValueError, "window"),
        (dict(provider="carrier-pigeon"), FabricError, "carrier-pigeon"),
    ],
)
def test_bad_options_are_named(options, error, words):
    with pytest.raises(error, match=words):
        Pe(**options)


def test_ranks_must_agree():
    a, b = Pe(0, queues=2), Pe(1, queues=1)
    with pytest.raises(FabricError, match="number of queues 2, rank 1 has 1"):
        a.proxy.connect([a.proxy.address(), b.proxy.address()])
    a, b = Pe(0, threads=2, peer_threads=2), Pe(1, queues=2, threads=2)
    with pytest.raises(FabricError, match="number of queues 1, rank 1 has 2"):
        a.proxy.connect([a.proxy.address(), b.proxy.address()])
    a = Pe(0, queues=2, threads=2, peer_threads=2)
    with pytest.raises(FabricError, match="threads for a peer 2, rank 1 has 1"):
        a.proxy.connect([a.proxy.address(), b.proxy.address()])
    a, b = Pe(0, force_staging=True), Pe(1)
    with pytest.raises(FabricError, match="staging"):
        a.proxy.connect([a.proxy.address(), b.proxy.address()])
    with pytest.raises(FabricError, match="2 PEs"):
        a.proxy.connect([a.proxy.address()])
    with pytest.raises(FabricError, match="rank 1"):
        a.proxy.connect([b"", b"nonsense"])


def test_messages_between_ranks_do_not_grow_with_their_number():
    """Everyone hears it from everyone, so that it would grow with the square of the ranks."""
    shape = dict(queues=2, threads=2)

    def said(n_pes):
        return len(Pe(n_pes=n_pes, peers=[pe for pe in range(n_pes) if pe // 8 != 0], **shape).proxy.address())

    assert said(256) == said(16)


def test_pinning_outside_the_allowed_cpus():
    pe, other = Pe(0, cpus=[4000]), Pe(1)
    pe.proxy.connect([pe.proxy.address(), other.proxy.address()])
    with pytest.raises(ValueError, match="CPU 4000"):
        pe.proxy.start()


def bare_writers(**how) -> None:
    """Two of them in one process: bandwidth, round trips and every byte, over the provider that is found."""
    size, chunk = 1_000_000, 65536
    memories = [(ctypes.c_ubyte * size).from_buffer_copy(random.Random(rank).randbytes(size)) for rank in range(2)]
    writers = [
        instruments.BareWriter(
            fabric.transport_options(rank=rank),
            bytes=size,
            base=ctypes.addressof(memories[rank]),
            chunk_bytes=chunk,
            window=8,
            **how,
        )
        for rank in range(2)
    ]
    addresses = [w.address() for w in writers]
    writers[0].connect(1, addresses[1])
    writers[1].connect(0, addresses[0])
    answers = threading.Thread(target=lambda: (writers[1].serve(0), writers[1].pong(0, 999, 50)))
    answers.start()
    sent = bytes(memories[0])
    for blocking in (False, True):
        assert 0 < writers[0].write(1, size, 4, blocking) < 20
    writers[0].finish(1)
    assert 0 < writers[0].ping(1, 999, 50) < 20
    answers.join(20)
    assert not answers.is_alive()
    assert bytes(memories[1]) == sent == bytes(memories[0])
    with pytest.raises(FabricError, match="do not fit"):
        writers[0].write(1, size + 1, 1)


@pytest.mark.parametrize("staged", [False, True])
def test_bare_writer(staged):
    bare_writers(force_staging=staged)


def test_bare_writer_of_gpu_memory():
    """With a stand-in for the driver, whose streams run late and out of step."""
    code = "from tests.proxy.test_native import bare_writers; bare_writers(heap_kind='cuda')"
    env = {**os.environ, "TSN_LIBCUDA": str(fake_cuda()), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_dispatch_rate():
    """A tenth of what one thread must reach, so that a busy machine does not fail the suite."""
    assert instruments.measure_dispatch(1 << 18) > 1e6
    assert instruments.measure_dispatch(1 << 18, with_signal=True) > 5e5
