"""Warps that copy by TMA into a ring of stages, and warps that multiply, with mbarriers between them."""

import inspect

import tilelang.language as T

import tilescale_net.language as N
from tests.shorthand import f32, i32, traced, u64

ROWS, COLUMNS, DEPTH, STAGES = 64, 32, 32, 2  # of a tile


def matmul(m, n, k, dtype, frees=True):
    """`c = a @ b.T` by one warp that copies and a warpgroup that multiplies and `frees` the stages that it has read."""

    @T.prim_func
    def kernel(a: T.Tensor((m, k), dtype), b: T.Tensor((n, k), dtype), c: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(n, COLUMNS), T.ceildiv(m, ROWS), threads=256) as (x, y):
            left = T.alloc_shared((STAGES, ROWS, DEPTH), dtype)
            right = T.alloc_shared((STAGES, COLUMNS, DEPTH), dtype)
            result = T.alloc_shared((ROWS, COLUMNS), dtype)
            acc = T.alloc_fragment((ROWS, COLUMNS), "float32")
            full, empty = T.alloc_barrier([32] * STAGES), T.alloc_barrier([128] * STAGES)
            if T.get_thread_binding() < 128:
                T.dec_max_nreg(40)
                if T.get_thread_binding() < 32:
                    for i in T.serial(T.ceildiv(k, DEPTH)):
                        s, lap = i % STAGES, i // STAGES % 2
                        T.barrier_wait(empty[s], lap ^ 1)
                        T.tma_copy(
                            a[y * ROWS : y * ROWS + ROWS, i * DEPTH : i * DEPTH + DEPTH], left[s, :, :],
                            barrier=full[s], leader_scope_threads=32,
                        )  # fmt: skip
                        T.tma_copy(
                            b[x * COLUMNS : x * COLUMNS + COLUMNS, i * DEPTH : i * DEPTH + DEPTH], right[s, :, :],
                            barrier=full[s], leader_scope_threads=32,
                        )  # fmt: skip
                        T.barrier_arrive(full[s])
            else:
                T.inc_max_nreg(232)
                for i in T.serial(T.ceildiv(k, DEPTH)):
                    s, lap = i % STAGES, i // STAGES % 2
                    T.barrier_wait(full[s], lap)
                    T.wgmma_gemm(left[s, :, :], right[s, :, :], acc, transpose_B=True, clear_accum=i == 0)
                    T.wait_wgmma(0)
                    if frees:
                        T.barrier_arrive(empty[s])
                T.copy(acc, result)
                T.fence_proxy_async()
                T.tma_copy(result, c[y * ROWS : y * ROWS + ROWS, x * COLUMNS : x * COLUMNS + COLUMNS])
                T.tma_store_wait(0)

    return kernel


def by_ws(m, n, k, dtype):
    """The same with T.ws for the roles, and T.gemm."""

    @T.prim_func
    def kernel(a: T.Tensor((m, k), dtype), b: T.Tensor((n, k), dtype), c: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(n, COLUMNS), T.ceildiv(m, ROWS), threads=256) as (x, y):
            left = T.alloc_shared((STAGES, ROWS, DEPTH), dtype)
            right = T.alloc_shared((STAGES, COLUMNS, DEPTH), dtype)
            acc = T.alloc_fragment((ROWS, COLUMNS), "float32")
            full, empty = T.alloc_barrier([128] * STAGES), T.alloc_barrier([128] * STAGES)
            with T.ws(1):
                for i in T.serial(T.ceildiv(k, DEPTH)):
                    T.barrier_wait(empty[i % STAGES], i // STAGES % 2 ^ 1)
                    s = i % STAGES
                    T.tma_copy(
                        a[y * ROWS : y * ROWS + ROWS, i * DEPTH : i * DEPTH + DEPTH], left[s, :, :], barrier=full[s]
                    )
                    T.tma_copy(
                        b[x * COLUMNS : x * COLUMNS + COLUMNS, i * DEPTH : i * DEPTH + DEPTH], right[s, :, :],
                        barrier=full[s],
                    )  # fmt: skip
                    T.barrier_arrive(full[i % STAGES])
            with T.ws(0):
                T.clear(acc)
                for i in T.serial(T.ceildiv(k, DEPTH)):
                    T.barrier_wait(full[i % STAGES], i // STAGES % 2)
                    T.gemm(left[i % STAGES, :, :], right[i % STAGES, :, :], acc, transpose_B=True)
                    T.barrier_arrive(empty[i % STAGES])
                T.copy(acc, c[y * ROWS, x * COLUMNS])

    return kernel


def reads_without_waiting(waits):
    """One warp writes a line of shared memory, the other one reads it."""

    @T.prim_func
    def kernel(x: i32(32)):
        with T.Kernel(1, threads=64):
            line = T.alloc_shared((32,), "int32")
            full = T.alloc_barrier(32)
            thread = T.get_thread_binding()
            if thread < 32:
                line[thread] = thread
                T.barrier_arrive(full)
            else:
                if waits:
                    T.barrier_wait(full, 0)
                x[thread - 32] = line[63 - thread]

    return kernel


@traced
def waits_for_a_second_phase(x: i32(32)):
    """One warp arrives once, the other one waits for that and once more."""
    with T.Kernel(1, threads=64):
        full = T.alloc_barrier(32)
        thread = T.get_thread_binding()
        if thread < 32:
            T.barrier_arrive(full)
        else:
            T.barrier_wait(full, 0)
            T.barrier_wait(full, 1)
            x[thread - 32] = 1


@traced
def hands_over_after_a_signal(ctx: N.Context(), x: i32(32), flag: u64(1), call: T.int64):
    """One warp hands lines to the other one, behind a signal of the rank to itself."""
    with T.Kernel(1, threads=64):
        full, empty = T.alloc_barrier(32), T.alloc_barrier(32)
        thread = T.get_thread_binding()
        N.signal_block(flag, call, N.my_pe())
        N.wait_block(flag, "ge", call)
        if thread < 32:
            for i in T.serial(4):
                T.barrier_wait(empty, i % 2 ^ 1)
                T.barrier_arrive(full)
        else:
            for i in T.serial(4):
                T.barrier_wait(full, i % 2)
                T.barrier_arrive(empty)
            x[thread - 32] = 1


def reads_behind_its_own_arrival(waits):
    """One warp writes a line of shared memory and arrives; the other one arrives as the last, and reads it."""

    @T.prim_func
    def kernel(x: i32(32), there: i32(1)):
        with T.Kernel(1, threads=64):
            line = T.alloc_shared((32,), "int32")
            both = T.alloc_barrier(64)
            thread = T.get_thread_binding()
            if thread < 32:
                line[thread] = thread
                T.barrier_arrive(both)
                N.st(there[0], 1, sem="relaxed", scope="gpu")
            else:
                while N.ld(there[0], sem="relaxed", scope="gpu") == 0:
                    T.evaluate(0)
                T.barrier_arrive(both)
                if waits:
                    T.barrier_wait(both, 0)
                x[thread - 32] = line[63 - thread]

    return kernel


@T.macro
def _cluster_copy(x, y, tile, barrier):
    T.tma_copy(x, tile, barrier=barrier, cluster_mask=3)


@T.macro
def _cluster_meeting(x, y, tile, barrier):
    T.cluster_sync()


@T.macro
def _expected_bytes(x, y, tile, barrier):
    T.mbarrier_expect_tx(barrier, 128)


@T.macro
def _tensor_memory(x, y, tile, barrier):
    T.tcgen05_before_thread_sync()


@T.macro
def _other_ways_to_copy(x, y, tile, barrier):
    T.tma_copy(x, tile, barrier=barrier)
    T.mbarrier_arrive(barrier)
    T.mbarrier_wait_parity(barrier, 0)
    T.copy(tile, y, prefer_instruction="tma")
    T.async_copy(x, tile)
    T.ptx_wait_group(0)
    T.sync_threads()
    T.atomic_add(y, tile, use_tma=True)
    T.pdl_trigger()


BODIES = {
    "a copy to several blocks of a cluster": _cluster_copy,
    "thread block clusters: tl::cluster_sync": _cluster_meeting,
    "bytes that a barrier waits for": _expected_bytes,
    "tensor memory": _tensor_memory,
    "all that it can": _other_ways_to_copy,
}
if "cluster_mask" not in inspect.signature(T.tma_copy).parameters:  # before tilelang 0.1.14
    del BODIES["a copy to several blocks of a cluster"]


def with_body(name):
    """A kernel of one of `BODIES`, in float32 [128, 64]."""
    body = BODIES[name]

    @T.prim_func
    def kernel(x: f32(128, 64), y: f32(128, 64)):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((128, 64), "float32")
            barrier = T.alloc_barrier(128)
            body(x, y, tile, barrier)

    return kernel
