"""Random data that every rank can make for every other, and tensors with guarded surroundings."""

import contextlib
import gc
import os
import random
import time
import unittest.mock
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import tilelang.language as T
import torch
import tvm_ffi
from tvm.tirx import PrimFunc

import tilescale_net as tsn
from tilescale_net.compiler import ir
from tilescale_net.compiler.jit import KernelFactory
from tilescale_net.compiler.simulator import cache, host_source, lowering
from tilescale_net.compiler.simulator import kernel as simulated

GUARD = 0xA5
GUARD_BYTES = 64
# As torch.testing has them.
_RTOL = {torch.float32: 1.3e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}


def random_bytes(nbytes: int, *key) -> torch.Tensor:
    """Bytes that depend on the key only, so that a rank knows its peers' data; uint8 on the CPU."""
    # torch.randint would take longer than the copies that the bytes are for.
    generator = numpy.random.default_rng(random.Random(repr(key)).getrandbits(60))
    return torch.from_numpy(numpy.frombuffer(bytearray(generator.bytes(nbytes)), numpy.uint8))


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that begins at no multiple of 16 bytes, as a parameter within a flat one may."""
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def random_tensor(shape, dtype: torch.dtype, *key) -> torch.Tensor:
    """Random bits of a dtype, NaN and all, that depend on the key only; on the CPU."""
    if dtype == torch.bool:
        return random_bytes(torch.Size(shape).numel(), *key).view(shape) > 127
    return random_bytes(torch.Size(shape).numel() * dtype.itemsize, *key).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor's bytes on the CPU, which peers do not change any more; unlike NaN values, equal bits are equal."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).clone()


def assert_same(found: torch.Tensor, expected: torch.Tensor, label: str = "") -> None:
    """Equal shape, dtype and bits; the message names the first difference."""
    assert found.shape == expected.shape and found.dtype == expected.dtype, (label, found.shape, expected.shape)
    a, b = bits(found), bits(expected)
    if not torch.equal(a, b):
        wrong = torch.nonzero(a != b).flatten()
        at = int(wrong[0])
        raise AssertionError(
            f"{label}: {len(wrong)} of {len(a)} bytes differ, the first at byte {at}: {int(a[at])} instead of {int(b[at])}"
        )


def assert_close(found: torch.Tensor, expected: torch.Tensor, rtol: float | None = None, atol: float = 1e-5) -> None:
    """Equal within tolerances. torch.testing's own imports DTensor and sympy: half a second of each process."""
    rtol = _RTOL[found.dtype] if rtol is None else rtol
    assert found.shape == expected.shape and found.dtype == expected.dtype, (found.shape, expected.shape)
    apart = (found.double() - expected.double()).abs() - atol - rtol * expected.double().abs()
    assert bool((apart <= 0).all()), f"beyond the tolerance by up to {float(apart.max())}"


def alive_objects() -> set:
    """The collectives and arenas of this process that something refers to."""
    from tilescale_net.kernels.collective import Collective
    from tilescale_net.kernels.moe.buffers import Arena

    gc.collect()
    return {found for found in gc.get_objects() if isinstance(found, Collective | Arena)}


class Guarded:
    """A symmetric tensor at a chosen misalignment whose surroundings must stay as they are.

    Attributes:
        tensor: of the given shape and dtype, `offset` bytes behind a 256-byte boundary.
    """

    def __init__(self, shape, dtype: torch.dtype, offset: int = 0):
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        self._raw = tsn.empty(nbytes + offset + 2 * GUARD_BYTES, torch.uint8)
        self._raw.fill_(GUARD)
        self._begin, self._end = GUARD_BYTES + offset, GUARD_BYTES + offset + nbytes
        inside = self._raw[self._begin : self._end]
        self.tensor = (inside.view(dtype) if nbytes else torch.empty(0, dtype=dtype, device=tsn.device())).view(shape)

    def check(self, label: str = "") -> None:
        before, after = self._raw[: self._begin], self._raw[self._end :]
        assert bool((before == GUARD).all()), f"{label}: bytes before the tensor were written"
        assert bool((after == GUARD).all()), f"{label}: bytes behind the tensor were written"

    def free(self) -> None:
        tsn.free(self._raw)


def rejected(*cases) -> None:
    """Each case is a call, the error that it raises on every rank, and words that the message holds."""
    for number, (call, kind, *words) in enumerate(cases):
        with pytest.raises(kind) as caught:
            call()
        assert all(word in str(caught.value) for word in words), (number, words, str(caught.value))


def unsettle(pace: random.Random, chance: float = 0.3, seconds: float = 0.02) -> None:
    """Now and then let the other ranks run ahead; in the simulator, choose another schedule for the next kernel."""
    if pace.random() < chance:
        time.sleep(pace.random() * seconds)
    os.environ["TSN_SIM_SEED"] = str(pace.randrange(1 << 30))


def schedule(*key) -> None:
    """Choose the simulator's schedule for this rank's next kernels."""
    os.environ["TSN_SIM_SEED"] = str(random.Random(repr((*key, tsn.rank()))).randrange(1 << 30))


@tsn.jit
def zeroed(count):
    """Kernel `(x)` that writes bytes, uint8 [count]: the race detector compares it with transfers, whatever wrote before."""

    @T.prim_func
    def zeroed(x: T.Tensor((count,), "uint8")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(count):
                x[i] = T.cast(0, "uint8")

    return zeroed


@contextlib.contextmanager
def nothing_launched() -> Iterator[None]:
    """A context in which kernels of the simulator are launched as on a GPU, and do nothing: they are traced, but neither
    lowered nor compiled."""

    def lowered(func: PrimFunc, configs: dict[str, Any], lower: object) -> cache.CachedKernel:
        ready = lowering.prepared(func, configs)
        code = cache.Lowered("", host_source.HostSource("", {}, frozenset()), "", 0)
        return cache.CachedKernel(ir.kernel_name(func), ready.context_index, ready.names, 0, (), code)

    nothing = tvm_ffi.get_global_func("testing.nop")
    launched = {"_function": lambda self: nothing, "_supervised": lambda self, function, present: function}
    with (
        unittest.mock.patch.multiple(simulated.SimulatedKernel, **launched),
        unittest.mock.patch.object(simulated, "SimulatedFunction", lambda *made_of: None),
        unittest.mock.patch.object(lowering, "lowered", lowered),
        unittest.mock.patch.object(KernelFactory, "_cached", lambda self, args, kwargs: None),
    ):
        yield
