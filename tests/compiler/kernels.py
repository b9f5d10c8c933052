"""Kernels that the compiler's tests look at."""

import tilelang.language as T

import tilescale_net.language as N
from tests.shorthand import f16, f32, u64


def reader(n=1024, threads=128):
    """Reads a tensor before and after waiting for a peer that writes it."""

    @T.prim_func
    def read(ctx: N.Context(), x: f32(n), y: f32(n), flag: u64(1)):
        with T.Kernel(1, threads=threads):
            tx = T.get_thread_binding()
            before = T.alloc_local((1,), "float32")
            before[0] = x[tx]
            N.wait_block(flag[0], "ge", 1)
            y[tx] = before[0] + x[tx] * 2.0

    return read


def pusher(n=1024, threads=128, **options):
    """Puts a tensor and signals."""

    @T.prim_func
    def push(x: f32(n), y: f32(n), ctx: N.Context(), flag: u64(1), pe: T.int32):
        with T.Kernel(1, threads=threads):
            N.put_signal_block(y, x, pe, flag[0], 1, **options)

    return push


def staged(n=4096, threads=128):
    """Copies through shared memory, as kernels do whose stores tilelang would turn into TMA stores."""

    @T.prim_func
    def stage(ctx: N.Context(), x: f16(64, n), y: f16(64, n), flag: u64(1)):
        with T.Kernel(n // 64, threads=threads) as bx:
            tile = T.alloc_shared((64, 64), "float16")
            N.wait_block(flag[0], "ge", 1)
            T.copy(x[0:64, bx * 64 : bx * 64 + 64], tile)
            T.copy(tile, y[0:64, bx * 64 : bx * 64 + 64])
            N.put_block(y[0, 0:64], x[0, 0:64], 1)

    return stage


def matmul(size=256, threads=128, proxy="generic", first=lambda flag: None, last=lambda flag: None):
    """A pipelined product, which tilelang specialises by warps on sm_90 when it may.

    Args:
        proxy: of its wait.
        first, last: calls that come before the wait and at the end.
    """

    @T.prim_func
    def product(ctx: N.Context(), a: f16(size, size), b: f16(size, size), c: f16(size, size), flag: u64(1)):
        with T.Kernel(size // 128, size // 128, threads=threads) as (bx, by):
            left = T.alloc_shared((128, 32), "float16")
            right = T.alloc_shared((32, 128), "float16")
            total = T.alloc_fragment((128, 128), "float32")
            first(flag)
            N.wait_block(flag[0], "ge", 1, proxy=proxy)
            T.clear(total)
            for k in T.Pipelined(size // 32, num_stages=3):
                T.copy(a[by * 128, k * 32], left)
                T.copy(b[k * 32, bx * 128], right)
                T.gemm(left, right, total)
            T.copy(total, c[by * 128, bx * 128])
            last(flag)

    return product
