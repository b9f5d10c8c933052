"""An index outside of a tensor is reported in any use; partial tiles at the edge are cut off as on a GPU."""

import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks
from tests.shorthand import f32, i32, traced, u64
from tests.simulator.recorded import recorded_errors

SIZE, TILE = 100, 64


@traced
def accesses(ctx: N.Context(), y: i32(SIZE), words: u64(SIZE), out: i32(SIZE), how: T.int32, at: T.int32):
    """`how` decides at run time which access uses `at`."""
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


@traced
def tiles(x: f32(SIZE), y: f32(SIZE), z: f32(SIZE)):
    """Doubles `x` tile by tile; the last tile is a part of one."""
    with T.Kernel(T.ceildiv(SIZE, TILE), threads=32) as block:
        tile = T.alloc_shared((TILE,), "float32")
        T.copy(x[block * TILE : (block + 1) * TILE], tile)
        T.copy(tile, z[block * TILE : (block + 1) * TILE])
        for i in T.Parallel(TILE):
            y[block * TILE + i] = x[block * TILE + i] + tile[i]


@ranks.on(1)
def test_indices_outside_of_a_tensor():
    errors = recorded_errors()
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


ROWS, COLUMNS = 4, 25


@traced
def elements(ctx: N.Context(), y: i32(ROWS, COLUMNS), out: i32(SIZE), how: T.int32, at: T.int32):
    """`how` decides which access uses column `at` of row 1: some columns outside of the row are inside of the tensor."""
    with T.Kernel(1, threads=32):
        tile = T.alloc_shared((ROWS, COLUMNS), "int32")
        flat = T.alloc_shared((SIZE,), "int32")
        if T.get_thread_binding() == 3:
            me = N.my_pe()
            if how == 0:
                y[1, at] = 7
            if how == 1:
                out[0] = y[1, at]
            if how == 2:
                N.put_value(y[1, at], 7, me)
            if how == 3:
                out[0] = N.atomic_add(y[1, at], 7, me)
            if how == 4:
                N.st(y[1, at], 7, sem="relaxed", scope="sys")
            if how == 5:
                out[0] = N.ld(y[1, at], sem="relaxed", scope="sys")
            if how == 6:
                out[y[1, at]] = 1
            if how == 7:
                T.atomic_add(y[1, at], 7)
            if how == 8:
                out[0] = T.atomic_add(y[1, at], 7, return_prev=True)
            if how == 9:
                out[0] = T.if_then_else(at == -2, 0, y[1, at])
            if how == 10:
                tile[1, at] = 7
                flat[0] = tile[1, 0]
            if how == 11:
                flat[at + SIZE - COLUMNS] = 7
                tile[0, 0] = flat[0]


@ranks.on(1)
def test_indices_outside_of_a_row():
    errors = recorded_errors()
    kernel = tsn.compile(elements(), target="simulator")
    y = tsn.zeros((ROWS, COLUMNS), torch.int32)
    out = torch.zeros(SIZE, dtype=torch.int32)
    for how in range(12):
        for at in (-1, COLUMNS, 2 * COLUMNS, 0, COLUMNS - 1):
            errors.clear()
            kernel(y, out, how, at)
            tensor = {10: "tile", 11: "flat"}.get(how, "y")
            axis, index, extent = (0, at + SIZE - COLUMNS, SIZE) if how == 11 else (1, at, COLUMNS)
            named = f"{tensor}: index {index} on axis {axis} is outside of its extent of {extent}"
            if 0 <= index < extent:
                assert not errors, (how, at, errors)
            else:
                assert len(errors) == 1 and "OutOfBounds" in errors[0] and named in errors[0], (how, at, errors)
                assert "thread (3, 0, 0)" in errors[0]
        errors.clear()
        if how == 9:  # an arm that is not taken is no access
            kernel(y, out, how, -2)
            assert not errors


@traced
def partial_tiles(ctx: N.Context(), y: i32(12, 40), c: i32(12, 40), z: i32(12, 40), at: T.int32):
    """Rows whose tiles begin at column `at` of row 1 or end beyond it, with every access that tilelang guards."""
    with T.Kernel(1, threads=32):
        tx = T.get_thread_binding()
        me = N.my_pe()
        for i in T.Parallel(40):
            y[1, i + at] = i + 1
        for i in T.Parallel(40):
            T.atomic_add(y[4, i + at], i + 1)
        for i in T.Parallel(40):
            z[4, i] = T.atomic_add(c[4, i + at], i + 1, return_prev=True)
        for i in T.Parallel(40):
            z[7, i] = y[1, i + at]
        if tx == 0:
            for i in T.vectorized(8):
                y[7, i + at] = i + 1
            for i in T.vectorized(8):
                y[10, i + at] = N.atomic_add(c[10, i], 1, me) + i + 1


@ranks.on(1, TSN_DEVICE="simulator")
def test_partial_tiles_inside_of_a_tensor():
    kernel = tsn.compile(partial_tiles(), target="simulator")
    for at in (-3, 36):
        y, c, z = (tsn.zeros((12, 40), torch.int32) for _ in range(3))
        c.fill_(5)
        c[10] = 0
        z.fill_(9)
        kernel(y, c, z, at)
        expected, sums, read = torch.zeros_like(y), torch.full_like(y, 5), torch.full_like(y, 9)
        sums[10] = 0
        sums[10, :8] = 1
        read[4] = 0
        read[7] = 0
        for i in range(40):
            if 0 <= i + at < 40:
                expected[1, i + at] = expected[4, i + at] = i + 1
                sums[4, i + at] += i + 1
                read[4, i], read[7, i] = 5, i + 1
                if i < 8:
                    expected[7, i + at] = expected[10, i + at] = i + 1
        assert torch.equal(y, expected) and torch.equal(c, sums) and torch.equal(z, read), (at, y, c, z)


def test_partial_tiles():
    x = torch.arange(SIZE, dtype=torch.float32)
    y, z = torch.zeros(SIZE), torch.zeros(SIZE)
    tsn.compile(tiles(), target="simulator")(x, y, z)
    assert torch.equal(y, 2 * x) and torch.equal(z, x)


def test_the_guard_of_tilelang_when_asked_for():
    @T.prim_func
    def kernel(y: i32(SIZE), at: T.int32):
        with T.Kernel(1, threads=32):
            y[at] = 7

    y = torch.zeros(SIZE, dtype=torch.int32)
    with pytest.raises(tsn.OutOfBounds, match="y: access to 4 bytes at byte offset 400"):
        tsn.compile(kernel, target="simulator")(y, SIZE)
    guarded = tsn.compile(kernel, target="simulator", pass_configs={"tl.disable_safe_memory_legalize": False})
    guarded(y, SIZE)
    assert not y.any()
