"""An index outside of a tensor is reported, whatever uses it; partial tiles at the edge are cut off as on a GPU."""

import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks

SIZE, TILE = 100, 64


def accesses():
    """`how` decides at run time which access uses `at`."""

    @T.prim_func
    def kernel(
        ctx: N.Context(),
        y: T.Tensor((SIZE,), "int32"),
        words: T.Tensor((SIZE,), "uint64"),
        out: T.Tensor((SIZE,), "int32"),
        how: T.int32,
        at: T.int32,
    ):
        with T.Kernel(1, threads=32):
            if T.get_thread_binding() == 3:
                me = N.my_pe()
                if how == 0:
                    y[at] = 7
                if how == 1:
                    out[0] = y[at]
                if how == 2:
                    N.put_value(y[at], 7, me)
                if how == 3:
                    N.atomic_add(y[at], 7, me)
                if how == 4:
                    N.st(y[at], 7, sem="relaxed", scope="sys")
                if how == 5:
                    out[0] = N.ld(y[at], sem="relaxed", scope="sys")
                if how == 6:
                    N.signal(words[at], 1, me)

    return kernel


def tiles():
    """Doubles `x` tile by tile; the last tile is a part of one."""

    @T.prim_func
    def kernel(x: T.Tensor((SIZE,), "float32"), y: T.Tensor((SIZE,), "float32"), z: T.Tensor((SIZE,), "float32")):
        with T.Kernel(T.ceildiv(SIZE, TILE), threads=32) as block:
            tile = T.alloc_shared((TILE,), "float32")
            T.copy(x[block * TILE : (block + 1) * TILE], tile)
            T.copy(tile, z[block * TILE : (block + 1) * TILE])
            for i in T.Parallel(TILE):
                y[block * TILE + i] = x[block * TILE + i] + tile[i]

    return kernel


def _outside():
    from tilescale_net.compiler.simulator.kernel import SimulatedFunction

    errors = []
    SimulatedFunction._give_up = lambda self, context, error: errors.append(f"{type(error).__name__}: {error}")
    kernel = tsn.compile(accesses(), target="simulator")
    y, words = tsn.zeros((SIZE,), torch.int32), tsn.zeros((SIZE,), torch.uint64)
    out = torch.zeros(SIZE, dtype=torch.int32)
    for how in range(7):
        for at in (-1, SIZE, 0, SIZE - 1):
            errors.clear()
            kernel(y, words, out, how, at)
            named = f"{'words' if how == 6 else 'y'}: access to {8 if how == 6 else 4} bytes"
            if 0 <= at < SIZE:
                assert not errors, (how, at, errors)
            else:
                assert len(errors) == 1 and "OutOfBounds" in errors[0] and named in errors[0], (how, at, errors)
                assert "thread (3, 0, 0)" in errors[0]


def test_indices_outside_of_a_tensor():
    ranks.run(1, _outside)


def test_partial_tiles():
    x = torch.arange(SIZE, dtype=torch.float32)
    y, z = torch.zeros(SIZE), torch.zeros(SIZE)
    tsn.compile(tiles(), target="simulator")(x, y, z)
    assert torch.equal(y, 2 * x) and torch.equal(z, x)


def test_the_guard_of_tilelang_when_asked_for():
    @T.prim_func
    def kernel(y: T.Tensor((SIZE,), "int32"), at: T.int32):
        with T.Kernel(1, threads=32):
            y[at] = 7

    y = torch.zeros(SIZE, dtype=torch.int32)
    with pytest.raises(tsn.OutOfBounds, match="y: access to 4 bytes at byte offset 400"):
        tsn.compile(kernel, target="simulator")(y, SIZE)
    guarded = tsn.compile(kernel, target="simulator", pass_configs={"tl.disable_safe_memory_legalize": False})
    guarded(y, SIZE)
    assert not y.any()
