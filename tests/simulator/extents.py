"""Copies between places whose extents are known at run time only, by every primitive, scope and engine, and by rows."""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tests.shorthand import f32, traced, u64

# How many elements there are to copy to and from, of k and m, by name; and the error's message.
WAYS = {
    "put": ("N.put_block: dst (y) spans {} elements, src (x) {}; make them equal", 1, 1),
    "bulk": ("N.put_block: dst (y) spans {} elements, src (x) {}; make them equal", 1, 1),
    "get": ("N.get_warp: dst (y) spans {} elements, src (x) {}; make them equal", 1, 1),
    "put_signal": ("N.put_signal_thread: dst (y) spans {} elements, src (x) {}; make them equal", 1, 1),
    "tile": ("N.put_warp: dst (y) spans {} elements, src (tile) {}; make them equal", 1, 1),
    "rows": ("N.put_signal_block: dst (box) has {} rows, src (other) {}; make them equal", 4, 4),
    "columns": ("N.get_block: dst (box) has rows of {} elements, src (other) {}; make them equal", 4, 4),
    "pack": ("N.put_warp: dst (y) spans {} elements, src (other) {}; make them equal", 1, 4),
    "unpack": ("N.get_thread: dst (box) spans {} elements, src (x) {}; make them equal", 4, 1),
    "box": ("N.put_block: dst (cube) spans {} elements, src (x) {}; make them equal", 16, 1),
    "count": ("N.put_block: count is {1}, but dst (y) holds {0} elements", 1, 1),
    "count of src": ("N.get_block: count is {0}, but src (x) holds {1} elements", 1, 1),
    "dynamic": ("N.put_block: dst (part) spans {} elements, src (whole) {}; make them equal", 1, 1),
}


def copy(clamped=False):
    """Kernel `(x, y, box, other, cube, part, whole, flag, way, k, m)`: one copy to `k` from `m` elements or rows.

    Args:
        clamped: as in code for GPUs, without reports of accesses outside.
    """
    return (_clamped if clamped else _reported)()


@traced
def _kernel(
    ctx: N.Context(), x: f32(64), y: f32(64), box: f32(8, 8), other: f32(8, 8), cube: f32(4, 4, 4), part: f32(20),
    whole: f32(T.dynamic("w")), flag: u64(1), way: T.int32, k: T.int32, m: T.int32,
):  # fmt: skip
    with T.Kernel(1, threads=64):
        tx = T.get_thread_binding()
        tile = T.alloc_shared((64,), "float32")
        tile[tx] = x[tx]
        T.sync_threads()
        if way == 0:
            N.put_block(y[0:k], x[0:m], 0)
        if way == 1:
            N.put_block(y[0:k], x[0:m], 0, engine="bulk", ring=(2, 128))
        if way == 2 and tx < 32:
            N.get_warp(y[0:k], x[0:m], 0)
        if way == 3 and tx == 0:
            N.put_signal_thread(y[0:k], x[0:m], 0, flag[0], 1)
        if way == 4 and tx < 32:
            N.put_warp(y[0:k], tile[0:m], 0)
        if way == 5:
            N.put_signal_block(box[0:k, 0:4], other[0:m, 0:4], 0, flag[0], 1)
        if way == 6:
            N.get_block(box[0:4, 0:k], other[0:4, 0:m], 0)
        if way == 7 and tx < 32:
            N.put_warp(y[0:k], other[0:m, 0:4], 0)
        if way == 8 and tx == 0:
            N.get_thread(box[0:k, 0:4], x[0:m], 0)
        if way == 9:
            N.put_block(cube[0:k, 0:4, 0:4], x[0:m], 0)
        if way == 10:
            N.put_block(y[0:k], x, 0, count=m)
        if way == 11:
            N.get_block(y, x[0:m], 0, count=k)
        if way == 12:
            N.put_block(part, whole, 0)
        N.quiet_block()


_reported = tsn.jit(_kernel)
_clamped = tsn.jit(pass_configs={"tl.disable_safe_memory_legalize": False})(_kernel)
