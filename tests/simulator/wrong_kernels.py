"""Kernels that fail, hang, or print, which the simulator must report."""

import tilelang.language as T

from tests.shorthand import traced


def read_at(n):
    @T.prim_func
    def kernel(x: T.Tensor((n,), "float32"), index: T.Tensor((64,), "int32"), out: T.Tensor((64,), "float32")):
        with T.Kernel(2, threads=32) as b:
            i = b * 32 + T.get_thread_binding()
            out[i] = x[index[i]]

    return kernel


def write_shared_at(n):
    @T.prim_func
    def kernel(index: T.Tensor((64,), "int32"), out: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            i = T.get_thread_binding()
            line = T.alloc_shared((n,), "float32")
            line[index[i]] = 1.0
            T.sync_threads()
            out[i] = line[i]

    return kernel


@traced
def uninitialised_shared(out: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        i = T.get_thread_binding()
        line = T.alloc_shared((64,), "float32")
        out[i] = line[i]


@traced
def read_address(address: T.Tensor((1,), T.ptr), out: T.Tensor((32,), "float32")):
    with T.Kernel(1, threads=32):
        there = T.make_tensor_from_addr(address[0], (32,), "float32")
        i = T.get_thread_binding()
        out[i] = there[i]


@traced
def divide(a: T.Tensor((32,), "int32"), b: T.Tensor((32,), "int32")):
    with T.Kernel(1, threads=32):
        i = T.get_thread_binding()
        a[i] = T.truncdiv(a[i], b[i])


def large_local(n):
    @T.prim_func
    def kernel(index: T.Tensor((32,), "int32"), out: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            i = T.get_thread_binding()
            mine = T.alloc_local((n,), "float32")
            mine[index[i]] = 1.0
            mine[0] = 2.0
            out[i] = mine[index[i]]

    return kernel


def barrier_in_half(threads):
    @T.prim_func
    def kernel(x: T.Tensor((threads,), "int32")):
        with T.Kernel(2, threads=threads):
            i = T.get_thread_binding()
            if i < threads // 2:
                T.call_extern("void", "__syncthreads")
                x[i] = 1

    return kernel


@traced
def shuffle_in_half(x: T.Tensor((32,), "int32")):
    with T.Kernel(1, threads=32):
        i = T.get_thread_binding()
        if i < 16:
            x[i] = T.shfl_xor(x[i], 1)


@traced
def different_operations(x: T.Tensor((32,), "int32")):
    with T.Kernel(1, threads=32):
        i = T.get_thread_binding()
        if i < 16:
            x[i] = T.shfl_xor(x[i], 1)
        else:
            T.sync_warp()


def named_barriers(first, second):
    @T.prim_func
    def kernel(x: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            i = T.get_thread_binding()
            if i < 32:
                T.sync_threads(1, first)
            else:
                T.sync_threads(1, second)
            x[i] = 1

    return kernel


@traced
def endless(x: T.Tensor((1,), "int32"), out: T.Tensor((1,), "int32")):
    with T.Kernel(1, threads=32):
        if T.get_thread_binding() == 5:
            while x[0] == 0:
                out[0] = out[0] + 1


@traced
def barriers_forever(x: T.Tensor((1,), "int32"), out: T.Tensor((1,), "int32")):
    with T.Kernel(2, threads=64):
        i = T.get_thread_binding()
        while x[0] < 0:
            T.sync_threads()
            if i == 0:
                out[0] = out[0] + 1


@traced
def asserting(x: T.Tensor((32,), "int32")):
    with T.Kernel(1, threads=32):
        i = T.get_thread_binding()
        T.device_assert(x[i] >= 0, "x is negative")


@traced
def printing(x: T.Tensor((2,), "int32")):
    with T.Kernel(1, threads=32):
        if T.get_thread_binding() == 3:
            T.print(x[1])


@traced
def matrix_product(
    a: T.Tensor((64, 64), "float16"), b: T.Tensor((64, 64), "float16"), c: T.Tensor((64, 64), "float32")
):
    with T.Kernel(1, threads=128):
        left = T.alloc_shared((64, 64), "float16")
        right = T.alloc_shared((64, 64), "float16")
        out = T.alloc_fragment((64, 64), "float32")
        T.copy(a, left)
        T.copy(b, right)
        T.clear(out)
        T.gemm(left, right, out)
        T.copy(out, c)


@traced
def unknown_function(x: T.Tensor((32,), "float32")):
    with T.Kernel(1, threads=32):
        i = T.get_thread_binding()
        x[i] = T.call_extern("float32", "somebody_elses_function", x[i])
