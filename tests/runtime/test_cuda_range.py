"""Heaps on GPUs that grow, with a driver that has no GPU: what CUDA is asked for, and what processes see of each other."""

import ctypes
import os
import threading

import pytest
import torch.distributed as dist

from tests import ranks
from tests.native.builder import build
from tilescale_net.errors import ConfigurationError, TileScaleError
from tilescale_net.runtime import cuda_memory
from tilescale_net.runtime.cuda_memory import GrowingHeap

MIB = 1 << 20


def _library() -> str:
    return str(build("fake_vmm", ["tests/native/fake_vmm.cpp"], shared=True, flags=("-Wl,-soname,libcuda.so.1",)))


def _byte(address: int) -> ctypes.c_uint8:
    return ctypes.c_uint8.from_address(address)


def _fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def _two(library: str, port: int) -> None:
    rank = int(os.environ["RANK"])
    fake = ctypes.CDLL(library, ctypes.RTLD_GLOBAL)  # code that loads libcuda.so.1 finds it from now on
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    meetings = iter(range(100))

    def meet(said: str = "") -> list[str]:
        number = next(meetings)
        store.set(f"{number}/{rank}", said)
        return [store.get(f"{number}/{r}").decode() for r in range(2)]

    driver = cuda_memory.Driver(0)
    assert driver.granularity() == 2 * MIB
    heap, before = GrowingHeap(driver, 4 * MIB, 32 * MIB), _fds()
    pid, name = meet(f"{os.getpid()} {heap.offers.name.hex()}")[1 - rank].split()
    base, theirs = heap.address, heap.map_peer(1 - rank, int(pid), bytes.fromhex(name))
    sizes = [4 * MIB, 6 * MIB, 32 * MIB]
    for size, larger in zip(sizes, [*sizes[1:], 0]):
        _byte(base + size - 1).value = size // MIB + rank
        meet()
        assert _byte(theirs + size - 1).value == size // MIB + 1 - rank
        if larger:
            heap.grow(larger)
            meet()
            heap.map_grown(1 - rank)
    assert heap.address == base and _byte(base + 4 * MIB - 1).value == 4 + rank
    with pytest.raises(TileScaleError, match="more than the"):
        heap.grow(34 * MIB)
    with pytest.raises(TileScaleError, match="does not give its memory"):
        cuda_memory.take_descriptor(bytes.fromhex(name), int(pid), 7)
    with pytest.raises(TileScaleError, match="answers instead of process 1"):
        cuda_memory.take_descriptor(bytes.fromhex(name), 1, 0)
    meet()
    heap.cut(4 * MIB)  # as where a rank had no memory for it
    meet()
    os.environ["FAKE_VMM_BYTES"] = str(36 * MIB)
    with pytest.raises(TileScaleError, match="cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"):
        heap.grow(10 * MIB)
    del os.environ["FAKE_VMM_BYTES"]
    heap.grow(8 * MIB)
    meet()
    heap.map_grown(1 - rank)
    _byte(base + 8 * MIB - 1).value = 77 + rank
    meet()
    assert _byte(theirs + 8 * MIB - 1).value == 77 + 1 - rank
    meet()
    heap.leave()
    assert _byte(base).value == 0, "its own memory stays while something refers to it"
    with pytest.raises(TileScaleError):
        cuda_memory.take_descriptor(heap.offers.name, os.getpid(), 0)
    del heap
    assert fake.fake_vmm_left() == 0
    assert _fds() <= before - 2, "memory and the listener are gone"
    with pytest.raises(ConfigurationError, match="pieces of 2097152 bytes"):
        GrowingHeap(driver, 3 * MIB, 32 * MIB)
    assert not [t for t in threading.enumerate() if t.name == "tilescale_net-memory"]


@pytest.mark.skipif(
    ranks.visible_gpus() > 0, reason="the driver of this machine's GPU takes the place of the made-up one"
)
def test_two_processes():
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ranks.run(2, _two, _library(), store.port, init=False)
