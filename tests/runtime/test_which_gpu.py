"""Which GPU a rank gets: what the program has bound or chosen, what it is shown, what the launcher has set."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import cuda_memory

GROUP = SimpleNamespace(bound_device_id=None)


def _machine(monkeypatch, count: int, current: int | None, local_rank: int | None) -> None:
    """GPUs, the current one of a program that uses CUDA already, and what the launcher has set."""
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
        cudaDeviceGetPCIBusId=lambda size, ordinal: (0, b"0000:0A:00.0\0"),
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
