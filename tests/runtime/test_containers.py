"""Ranks in containers and sandboxes: of one machine in several, without shared memory or loopback; and the addresses that a rank takes
for the heap of another."""

import ctypes
import os
import time
from types import SimpleNamespace

import pytest
import torch

import tilescale_net as tsn
from tests import hosts, ranks
from tilescale_net.errors import ConfigurationError
from tilescale_net.kernels.all_reduce import AllReduce
from tilescale_net.runtime import cuda_memory
from tilescale_net.runtime.simulator import SharedMemory


def _in_a_container() -> tuple[int, int]:
    hosts.enter_container()
    tsn.init("4M")
    x, reduce = tsn.zeros(1024, torch.float32), AllReduce(threads=64, blocks=2)
    x.fill_(tsn.rank() + 1)
    reduce(x)
    assert x.tolist() == [3.0] * 1024
    nodes = tsn.world().topology.nodes
    tsn.finalize()
    return os.getpid(), nodes


@pytest.mark.skipif(not hosts.possible(), reason="lacks root")
def test_containers_are_hosts():
    """Both ranks are process 1: by its number each would take itself for the other."""
    env = {"TSN_FABRIC_INTERFACE": "lo", "TSN_DEVICE": "simulator"}
    outcomes = ranks.launch(2, _in_a_container, init=False, env=env, timeout=120)
    assert [o.value if o.ok else o.error for o in outcomes] == [(1, 2)] * 2


def test_another_file_is_not_taken_for_a_heap():
    mine, theirs = SharedMemory(1 << 16), SharedMemory(1 << 16)
    assert mine.map_peer(1, theirs.handle())
    with pytest.raises(
        ConfigurationError, match=r"heap of PE 1 was not found: descriptor \d+ of process \d+ is another"
    ):
        mine.map_peer(1, (*mine.handle()[:2], theirs.handle()[2]))
    for memory in mine, theirs:
        memory.close()


def test_memory_that_cannot_be_shared_is_named(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(
        ConfigurationError, match=r"rejects memfd_create \(Operation not permitted\).*seccomp=unconfined"
    ):
        SharedMemory(1 << 16)


def _without_loopback(launched: bool) -> float:
    hosts.enter_empty_network()
    if not launched:
        for name in "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT":
            del os.environ[name]
    begin = time.monotonic()
    with pytest.raises(ConfigurationError, match="loopback is down.*ip link set lo up"):
        tsn.init("4M")
    return time.monotonic() - begin


@pytest.mark.skipif(not hosts.possible(), reason="lacks root")
@pytest.mark.parametrize("launched", [False, True], ids=["one rank", "ranks of one host"])
def test_loopback_that_is_down_is_named(launched):
    assert max(ranks.run(1 + launched, _without_loopback, launched, init=False, env={"TSN_DEVICE": "simulator"})) < 10


class _Runtime:
    """Stands for CUDA's runtime: "GPU memory" is host memory, and a handle holds its address."""

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)
    cudaIpcMemLazyEnablePeerAccess = 1

    def cudaIpcMemHandle_t(self):
        return SimpleNamespace(reserved=b"")

    def cudaIpcGetMemHandle(self, address):
        return 0, SimpleNamespace(reserved=address.to_bytes(64, "little"))

    def cudaIpcOpenMemHandle(self, handle, flags):
        return 0, int.from_bytes(handle.reserved, "little")

    def cudaMemcpy(self, to, source, nbytes, kind):
        ctypes.memmove(to, source, nbytes)
        return (0,)


def test_other_memory_of_a_gpu_is_not_taken_for_a_heap(monkeypatch):
    def of_gpu(number: int) -> cuda_memory.CudaMemory:
        memory = object.__new__(cuda_memory.CudaMemory)
        block = ctypes.create_string_buffer(1 << 16)
        vars(memory).update(
            _rt=_Runtime(), base=ctypes.addressof(block), _block=block, _growing=None, _word=0, _peers=[], _shared=False
        )
        monkeypatch.setattr(memory, "_bus", lambda: f"0000:0{number}:00.0", raising=False)
        monkeypatch.setattr(memory, "synchronize", lambda: None, raising=False)
        tensor = lambda at, size: torch.frombuffer(block, dtype=torch.uint8)[at : at + size]  # noqa: E731
        monkeypatch.setattr(memory, "bytes_tensor", tensor, raising=False)
        return memory

    mine, theirs = of_gpu(1), of_gpu(2)
    handle = theirs.handle()
    assert handle == theirs.handle() and mine.map_peer(1, handle) == theirs.base
    with pytest.raises(ConfigurationError, match="the memory mapped for the heap of PE 1 .* is not that heap"):
        mine.map_peer(1, (handle[0], mine.handle()[1], *handle[2:]))
