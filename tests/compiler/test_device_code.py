"""Every primitive compiles for sm_90 with nvcc, and has the expected instructions where they matter."""

import re

import pytest
import tilelang.language as T

import tilescale_net.language as N
from tests.compiler.kernels import matmul
from tests.integration.test_streams import from_tiles, streams
from tests.ptx import read_only_loads
from tests.shorthand import traced
from tilescale_net.compiler import inspect
from tilescale_net.compiler.operators import OPERATORS


@traced
def everything(
    ctx: N.Context(), a: T.Tensor((4096,), "float32"), b: T.Tensor((4096,), "float32"), i32: T.Tensor((64,), "int32"),
    u64: T.Tensor((64,), "uint64"), words: T.Tensor((8,), "int64"), box: T.Tensor((64, 64), "float32"), n: T.int64,
    pe: T.int32,
):  # fmt: skip
    """Calls every primitive that is not in OTHERS."""
    with T.Kernel(2, threads=128) as bx:
        tx = T.get_thread_binding()
        N.put_block(box[0:4, 0:8], box[8:12, 8:16], pe)
        N.get_warp(box[0:2, 0:8], box[8:10, 8:16], pe)
        N.put_signal_warp(box[0:4, 0:8], box[8:12, 8:16], pe, u64[6], 1)
        N.barrier_grid()
        N.put_block(b, a, pe, ring=(4, 4096))
        N.get_block(b[0:n], a[bx], pe, engine="bulk", ring=(4, 4096))
        N.put_signal_block(b, a, pe, words[0], 1, op="add", unroll=4)
        N.wait_block(words[0], "ge", 1)
        N.put_warp(b[tx // 32 * 64], a, pe, count=64, engine="ldst", unroll=2)
        N.get_warp(b, a[0:64], pe, count=64, unroll=2)
        N.put_signal_warp(b[0:64], a[0:64], pe, u64[1], n, unroll=2)
        N.wait_warp(u64[1], "ne", 0)
        if tx == 0:
            N.put_thread(b, a, pe, count=n, unroll=2)
            N.get_thread(b[5], a[6], N.my_pe() - N.node_pe(), unroll=1)
            N.put_signal_thread(b[1], a[2], N.n_pes() - N.n_node_pes(), u64[3], 3, unroll=1)
            if N.is_direct(pe):
                old = N.atomic_add(i32[0], 1, pe) + N.atomic_exch(i32[1], 2, pe) + N.atomic_cas(i32[2], 0, 1, pe)
                N.atomic_max(i32[3], old, pe)
                N.atomic_min(i32[4], old, pe)
                N.atomic_and(words[1], 7, pe)
                N.atomic_or(words[1], 7, pe)
                N.atomic_xor(words[1], 7, pe)
                N.atomic_add(a[0], 1.5, pe)
            N.put_value(a[7], b[8], pe)
            vector = T.alloc_local((2, 4), "float32")
            N.put_vector(a[8:12], vector[1, 0:4], pe)
            N.put_vectors(a[12:16], vector[1, 0:4], 2, pe)
            N.take_vectors(vector, b[0:8])
            N.fence(pe)
            N.benign_race(u64[3])
            with N.range("some words"):
                N.st(i32[7], 1)
            N.signal(u64[2], 5, pe, op="add")
            ticket = N.flush_async(pe)
            N.flush_wait(ticket)
            N.quiet()
            while not N.test(u64[4], "le", n):
                N.st(i32[5], N.ld(i32[6], sem="acquire", scope="gpu"), sem="release")
            N.wait(words[2], "lt", n)
        view = N.remote(b, pe)
        for i in T.Parallel(4096):
            view[i] = a[i]
        N.barrier_node()
        N.barrier_all()


# Kernels of tests between ranks, which call what `everything` does not.
OTHERS = {
    "streams": lambda: streams.trace(scope="warp", slots=2),
    "from_tiles": lambda: from_tiles.trace(dtype="float16"),
}


@pytest.fixture(scope="module")
def everything_ptx():
    return inspect.ptx(everything())


def test_every_primitive_is_called():
    sources = [inspect.cuda_source(kernel) for kernel in (everything(), *(make() for make in OTHERS.values()))]
    # A kernel that waits for the async proxy may use little else.
    sources.append(inspect.cuda_source(matmul(proxy="async"), {"kind": "cuda", "arch": "sm_90a"}))
    assert set(re.findall(r"tsn::(\w+)[<(]", "".join(sources))) == set(OPERATORS)


def test_every_primitive_compiles(everything_ptx):
    assert ".entry everything_kernel" in everything_ptx
    assert not read_only_loads(everything_ptx)


@pytest.mark.parametrize("name", OTHERS)
def test_kernels_of_tests_between_ranks_compile(name):
    assert not read_only_loads(inspect.ptx(OTHERS[name]()))


@pytest.mark.parametrize(
    "instruction", ["st.relaxed.sys.global.v4.b32", "cp.async.bulk.shared", "cp.async.bulk.global"]
)
def test_wide_and_bulk_copies(everything_ptx, instruction):
    assert instruction in everything_ptx


def test_values_of_every_type_compile():
    @T.prim_func
    def kernel(
        ctx: N.Context(), f32: T.Tensor((4,), "float32"), f16: T.Tensor((4,), "float16"),
        bf16: T.Tensor((4,), "bfloat16"), e4m3: T.Tensor((4,), "float8_e4m3fn"), e5m2: T.Tensor((4,), "float8_e5m2"),
        i8: T.Tensor((4,), "int8"), u8: T.Tensor((4,), "uint8"), i16: T.Tensor((4,), "int16"),
        u16: T.Tensor((4,), "uint16"), i32: T.Tensor((4,), "int32"), u32: T.Tensor((4,), "uint32"),
        i64: T.Tensor((4,), "int64"), u64: T.Tensor((4,), "uint64"), f64: T.Tensor((4,), "float64"),
        flag: T.Tensor((4,), "bool"), pe: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            for tensor in (f32, f16, bf16, e4m3, e5m2, i8, u8, i16, u16, i32, u32, i64, u64, f64):
                N.put_value(tensor[0], 1, pe)
                N.put_value(tensor[1], tensor[2], pe)
                N.st(tensor[2], N.ld(tensor[3], sem="volatile"), sem="volatile")
                N.st(tensor[0], N.ld(tensor[1], sem="acquire"), sem="release")
                N.put_thread(tensor[0:3], tensor[1:4], pe, unroll=1)
            N.put_thread(flag[0:2], flag[2:4], pe, unroll=1)
            N.put_value(flag[0], True, pe)
            for tensor in (i32, u32, i64, u64):
                N.atomic_add(tensor[0], 1, pe)
                N.atomic_cas(tensor[0], tensor[1], tensor[2], pe)
                N.atomic_xor(tensor[0], pe, pe)
            for tensor in (f32, f64):
                N.atomic_add(tensor[0], tensor[1], pe)
                N.atomic_exch(tensor[0], 2.5, pe)

    assert ".entry kernel_kernel" in inspect.ptx(kernel)
