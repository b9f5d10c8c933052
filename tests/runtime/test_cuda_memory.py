"""Which GPU a rank gets; and heaps on GPUs that grow, with a driver that has no GPU."""

import ctypes
import os
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.native.builder import build
from tilescale_net.errors import ConfigurationError, TileScaleError
from tilescale_net.runtime import cuda_memory
from tilescale_net.runtime.cuda_memory import GrowingHeap

GROUP = SimpleNamespace(bound_device_id=None)


def _machine(monkeypatch, count: int, current: int | None, local_rank: int | None) -> None:
    """GPUs, the current GPU of a program that uses CUDA already, and the launcher's variables."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: current is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))


@pytest.mark.parametrize(
    ("count", "current", "local_rank", "of_world", "of_group"),
    [
        (8, None, 3, 3, 3),  # by the launcher
        (1, None, 3, 0, 0),  # one GPU is shown to each process
        (8, 5, 3, 5, 5),  # the program has chosen
        (8, 0, 3, 3, 3),  # it uses CUDA, and has not
        (8, 5, None, 5, 5),
        (8, 0, None, 2, 0),
        (8, None, None, 2, 2),
    ],
)
def test_which_gpu(monkeypatch, count, current, local_rank, of_world, of_group):
    _machine(monkeypatch, count, current, local_rank)
    assert cuda_memory.gpu_ordinal(None, 2) == of_world
    assert cuda_memory.gpu_ordinal(GROUP, 2) == of_group
    bound = SimpleNamespace(bound_device_id=torch.device("cuda", 6))
    assert cuda_memory.gpu_ordinal(bound, 2) == cuda_memory.bound_gpu(bound) == 6


@pytest.mark.parametrize("shared", [False, True])
def test_two_ranks_with_one_gpu(shared):
    memory = cuda_memory.CudaMemory.__new__(cuda_memory.CudaMemory)
    memory.ordinal, memory._shared = 0, shared
    block = ctypes.create_string_buffer(1 << 16)  # the heap of the peer
    memory._growing = SimpleNamespace(map_peer=lambda pe, pid, name: ctypes.addressof(block))
    memory._rt = SimpleNamespace(
        cudaDeviceGetPCIBusId=lambda size, ordinal: (0, b"0000:0A:00.0\0 \0left"),
        cudaMemcpyKind=SimpleNamespace(cudaMemcpyDefault=4),
        cudaMemcpy=lambda to, source, nbytes, kind: (ctypes.memmove(to, source, nbytes), (0,))[1],
    )
    word = 77  # by which peers know this heap
    ctypes.c_uint64.from_buffer(block, cuda_memory._WORD).value = word
    assert memory.map_peer(1, (7, b"", "0000:0B:00.0", word)) == ctypes.addressof(block)
    if shared:
        assert memory.map_peer(1, (7, b"", "0000:0A:00.0", word)) == ctypes.addressof(block)
    else:
        with pytest.raises(ConfigurationError, match="PE 1 has the GPU of this rank, 0000:0A:00.0"):
            memory.map_peer(1, (7, b"", "0000:0A:00.0", word))


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
    with pytest.raises(ConfigurationError, match="units of 2097152 bytes"):
        GrowingHeap(driver, 3 * MIB, 32 * MIB)
    assert not [t for t in threading.enumerate() if t.name == "tilescale_net-memory"]


@pytest.mark.skipif(
    ranks.visible_gpus() > 0, reason="the driver of this machine's GPU takes the place of the made-up one"
)
def test_two_processes():
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ranks.run(2, _two, _library(), store.port, init=False)
