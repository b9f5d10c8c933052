"""One kernel for each error that a launch finds at run time: who reads it is told the kernel and the author's line."""

import linecache

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests.shorthand import f32, jitted, u64

# The statement that fails, the error, and words of its message.
WAYS = {
    "N.put_block(y[0:4], x[0:4], 7)": ("PeOutOfRange", "put in block 0 named PE 7, but there are 1"),
    "N.remote(x, 5)": ("PeOutOfRange", "remote in block 0 named PE 5"),
    "N.put_block(local[0:4], x[0:4], 0)": ("OutOfBounds", "argument local is not symmetric"),
    "N.put_signal_block(y[0:4], x[0:4], 0, word[0], 1)": ("OutOfBounds", "argument word is not symmetric"),
    "N.put_block(y[k], x[0], 0, count=8)": ("OutOfBounds", "put: y: access to 32 bytes at byte offset 240"),
    "N.atomic_add(y[k + 10], 1.0, 0)": ("OutOfBounds", "y: access to 4 bytes at byte offset 280"),
    "N.st(y[k + 11], N.ld(x[k + 12]))": ("OutOfBounds", "x: access to 4 bytes at byte offset 288"),
    "y[k + 13] = 1.0": ("OutOfBounds", "y: access to 4 bytes at byte offset 292"),
    "tile[k + 14] = 1.0": ("OutOfBounds", "tile: index 74 on axis 0 is outside of its extent of 64"),
    "y[tx] = T.__ldg(x[tx])": ("KernelError", "__ldg of symmetric memory"),
    "y[tx] = T.cast((k + 15) // (k - 60), 'float32')": ("KernelError", "integer division by zero"),
    "T.device_assert(k < 60)": ("KernelError", "a device-side assertion failed: at "),
    "N.barrier_node()": ("KernelError", "barrier in block"),
    "N.barrier_grid()": ("WaitTimeout", "for all blocks of the launch; 2 of 3 have come"),
}


@jitted
def failing(ctx: N.Context(), x: f32(64), y: f32(64), word: u64(1), local: f32(64), way: T.int32, k: T.int32):
    """Kernel `(x, y, word, local, way, k)`; k is 60."""
    with T.Kernel(3, threads=32) as block:
        tx = T.get_thread_binding()
        tile = T.alloc_shared((64,), "float32")
        if way == 12:
            N.barrier_node()
        if block == 0:
            N.put_block(y[0:4], x[0:4], N.my_pe())
            if way == 0:
                N.put_block(y[0:4], x[0:4], 7)
            if way == 1:
                view = N.remote(x, 5)
                y[tx] = view[tx]
            if way == 2:
                N.put_block(local[0:4], x[0:4], 0)
            if way == 3:
                N.put_signal_block(y[0:4], x[0:4], 0, word[0], 1)
            if way == 4:
                N.put_block(y[k], x[0], 0, count=8)
            if way == 5:
                N.atomic_add(y[k + 10], 1.0, 0)
            if way == 6:
                N.st(y[k + 11], N.ld(x[k + 12]))
            if way == 7:
                y[k + 13] = 1.0
            if way == 8:
                tile[k + 14] = 1.0
            if way == 9:
                y[tx] = T.__ldg(x[tx])
            if way == 10:
                y[tx] = T.cast((k + 15) // (k - 60), "float32")
            if way == 11:
                T.device_assert(k < 60)
        if way == 13:
            if block > 0:
                N.barrier_grid()
        y[0] = tile[0]


def fail(statement: str) -> None:
    x, y = tsn.zeros(64), tsn.zeros(64)
    word, local = torch.zeros(1, dtype=torch.uint64), torch.zeros(64)
    failing()(x, y, word, local, list(WAYS).index(statement), 60)


def line_of(statement: str) -> str:
    """Where it stands, as errors have it."""
    lines = [line.strip().replace('"', "'").removeprefix("view = ") for line in linecache.getlines(__file__)]
    return f"failing.py:{lines.index(statement) + 1}"
