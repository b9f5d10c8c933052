"""Plain tilelang kernels for the tests of the simulator, and the way from a prim_func to a simulated kernel."""

import functools

import tilelang
import tilelang.language as T
from tilelang import tvm

from tests.shorthand import bf16, f16, f32, i32, i64, traced
from tilescale_net.compiler.simulator.cache import Lowered
from tilescale_net.compiler.simulator.kernel import SimulatedFunction

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_70"})


# tilelang guards accesses that it cannot prove to be inside; tests of bad accesses do without.
UNGUARDED = {"tl.disable_safe_memory_legalize": True}


@functools.cache
def simulate(build, *args, guarded=True) -> SimulatedFunction:
    """The simulated kernel of `build(*args)`, a function that returns a T.prim_func."""
    func = build(*args)
    with TARGET, tvm.transform.PassContext(opt_level=3, config={} if guarded else UNGUARDED):
        artifact = tilelang.lower(func, target=TARGET)
    return SimulatedFunction(build.__name__, Lowered.from_artifact(build.__name__, artifact))


def gather_scale_scatter(columns, dtype):
    rows = T.dynamic("rows")

    @T.prim_func
    def kernel(
        x: T.Tensor((rows, columns), dtype), source: i32(rows), target: i32(rows), weight: f32(rows),
        out: T.Tensor((rows, columns), dtype),
    ):  # fmt: skip
        with T.Kernel(rows, threads=128) as row:
            staged = T.alloc_shared((columns,), dtype)
            wide = T.alloc_fragment((columns,), "float32")
            T.copy(x[source[row], 0], staged)
            T.copy(staged, wide)
            for i in T.Parallel(columns):
                wide[i] = wide[i] * weight[row]
            T.copy(wide, out[target[row], 0])

    return kernel


def row_reductions(rows, columns, threads, dtype):
    block = 4

    @T.prim_func
    def kernel(
        x: T.Tensor((rows, columns), dtype), total: T.Tensor((rows,), dtype), high: T.Tensor((rows,), dtype),
        low: T.Tensor((rows,), dtype), extent: T.Tensor((rows,), dtype),
    ):  # fmt: skip
        with T.Kernel(rows // block, threads=threads) as b:
            tile = T.alloc_fragment((block, columns), dtype)
            result = T.alloc_fragment((block,), dtype)
            T.copy(x[b * block, 0], tile)
            T.reduce_sum(tile, result, dim=1)
            T.copy(result, total[b * block])
            T.reduce_max(tile, result, dim=1)
            T.copy(result, high[b * block])
            T.reduce_min(tile, result, dim=1)
            T.copy(result, low[b * block])
            T.reduce_absmax(tile, result, dim=1)
            T.copy(result, extent[b * block])

    return kernel


def lanes(threads):
    @T.prim_func
    def kernel(x: i32(threads), out: i32(8, threads)):
        with T.Kernel(1, threads=threads):
            i = T.get_thread_binding()
            v = x[i]
            out[0, i] = T.shfl_xor(v, 5)
            out[1, i] = T.shfl_down(v, 3)
            out[2, i] = T.shfl_up(v, 7)
            out[3, i] = T.shfl_sync(v, 9)
            out[4, i] = T.warp_reduce_sum(v)
            out[5, i] = T.warp_reduce_max(v)
            out[6, i] = T.syncthreads_count(v > 0)
            out[7, i] = T.cast(T.call_extern("uint32", "__ballot_sync", T.uint32(0xFFFFFFFF), v > 0), "int32")

    return kernel


def atomics(n, bins):
    @T.prim_func
    def kernel(
        key: i32(n), count: i32(bins), weight: f32(bins), half: f16(bins), brain: bf16(bins), wide: i64(bins),
        edge: i32(2), unit: f32(2), pair: f32(2), place: i32(n),
    ):  # fmt: skip
        with T.Kernel(n // 128, threads=128) as b:
            i = b * 128 + T.get_thread_binding()
            place[i] = T.atomic_add(count[key[i]], 1, return_prev=True)
            T.atomic_add(weight[key[i]], 0.5)
            T.atomic_add(half[key[i]], T.cast(1.0, "float16"))
            T.atomic_add(brain[key[i]], T.cast(1.0, "bfloat16"))
            T.atomic_add(wide[key[i]], T.int64(1 << 33))
            T.atomic_max(edge[0], i)
            T.atomic_min(edge[1], -i)
            T.atomic_addx2(pair[0], unit[0])

    return kernel


def casts(n):
    @T.prim_func
    def kernel(
        x: f32(n), e4: T.Tensor((n,), "float8_e4m3fn"), e5: T.Tensor((n,), "float8_e5m2"), half: f16(n), brain: bf16(n),
        back4: bf16(n), back5: f16(n), small: T.Tensor((n,), "int8"),
    ):  # fmt: skip
        with T.Kernel(n // 1024, threads=128) as b:
            wide = T.alloc_fragment((1024,), "float32")
            f4 = T.alloc_fragment((1024,), "float8_e4m3fn")
            f5 = T.alloc_fragment((1024,), "float8_e5m2")
            h = T.alloc_fragment((1024,), "float16")
            bf = T.alloc_fragment((1024,), "bfloat16")
            T.copy(x[b * 1024], wide)
            T.copy(wide, f4)
            T.copy(f4, e4[b * 1024])
            T.copy(f4, bf)
            T.copy(bf, back4[b * 1024])
            T.copy(wide, f5)
            T.copy(f5, e5[b * 1024])
            T.copy(f5, h)
            T.copy(h, back5[b * 1024])
            T.copy(wide, h)
            T.copy(h, half[b * 1024])
            T.copy(wide, bf)
            T.copy(bf, brain[b * 1024])
            for i in T.Parallel(1024):
                small[b * 1024 + i] = T.cast(T.min(T.max(x[b * 1024 + i], -100.0), 100.0), "int8")

    return kernel


def pipelined_sum(rows, columns, dtype):
    @T.prim_func
    def kernel(x: T.Tensor((rows, columns), dtype), out: T.Tensor((rows, 64), dtype)):
        with T.Kernel(rows // 32, threads=64) as b:
            staged = T.alloc_shared((32, 64), dtype)
            total = T.alloc_fragment((32, 64), dtype)
            T.clear(total)
            for k in T.Pipelined(columns // 64, num_stages=2):
                T.copy(x[b * 32, k * 64], staged)
                for i, j in T.Parallel(32, 64):
                    total[i, j] += staged[i, j]
            T.copy(total, out[b * 32, 0])

    return kernel


def prefix_sum(n):
    @T.prim_func
    def kernel(x: i32(n), out: i32(n)):
        with T.Kernel(1, threads=128):
            line = T.alloc_shared((n,), "int32")
            T.copy(x, line)
            T.cumsum(line)
            T.copy(line, out)

    return kernel


def strided(columns):
    rows = T.dynamic("rows")
    pitch = T.dynamic("pitch")

    @T.prim_func
    def kernel(
        x: T.StridedTensor((rows, columns), (pitch, 1), "float32"), out: f32(rows * 2, columns), n: T.int64,
        a: T.float32,
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(rows, 2), columns // 32, threads=(32, 2)) as (bx, by):
            tx = T.get_thread_binding(0)
            ty = T.get_thread_binding(1)
            line = T.alloc_shared((2, columns), "float32")
            line[ty, by * 32 + tx] = x[bx * 2 + ty, by * 32 + tx]
            T.sync_threads()
            for half in T.serial(2):
                out[(bx * 2 + ty) * 2 + half, by * 32 + tx] = line[ty, by * 32 + tx] * a + T.cast(n, "float32")

    return kernel


def producer_consumer(blocks):
    """Block 0 waits for every other block, in a grid that runs in waves."""

    @T.prim_func
    def kernel(flag: i32(1), seen: i32(1)):
        with T.Kernel(blocks, threads=32) as b:
            if T.get_thread_binding() == 0:
                if b == 0:
                    while T.atomic_load(flag[0]) < blocks - 1:
                        T.evaluate(0)
                    seen[0] = T.atomic_load(flag[0])
                else:
                    T.atomic_add(flag[0], 1)

    return kernel


def grid_phases(blocks):
    @T.prim_func
    def kernel(x: i32(blocks), out: i32(blocks)):
        with T.Kernel(blocks, threads=32) as b:
            if T.get_thread_binding() == 0:
                x[b] = b + 1
            T.sync_grid()
            if T.get_thread_binding() == 0:
                out[b] = x[blocks - 1 - b]

    return kernel


def order_of_blocks(blocks):
    """Which place each block takes when all draw a ticket: distinguishes schedules."""

    @T.prim_func
    def kernel(ticket: i32(1), place: i32(blocks)):
        with T.Kernel(blocks, threads=64) as b:
            if T.get_thread_binding() == 0:
                place[b] = T.atomic_add(ticket[0], 1, return_prev=True)

    return kernel


def last_block_first(blocks):
    """Every block waits for the last one: runs only where all blocks are resident."""

    @T.prim_func
    def kernel(flag: i32(1)):
        with T.Kernel(blocks, threads=32) as b:
            if T.get_thread_binding() == 0:
                if b == blocks - 1:
                    T.atomic_store(flag[0], 1)
                else:
                    while T.atomic_load(flag[0]) == 0:
                        T.evaluate(0)

    return kernel


@traced
def static_shared(x: T.Tensor((4, 96), "float32"), out: T.Tensor((4, 96), "float32")):
    with T.Kernel(4, threads=(32, 3)) as b:
        first = T.alloc_shared((96,), "float32", scope="shared")
        second = T.alloc_shared((3, 32), "bfloat16", scope="shared")
        tx, ty = T.get_thread_binding(0), T.get_thread_binding(1)
        first[95 - (ty * 32 + tx)] = x[b, ty * 32 + tx]
        second[2 - ty, 31 - tx] = T.cast(x[b, ty * 32 + tx], "bfloat16")
        T.sync_threads()
        out[b, ty * 32 + tx] = first[ty * 32 + tx] - T.cast(second[ty, tx], "float32")


def nothing(n):
    @T.prim_func
    def main(x: i32(n)):
        with T.Kernel(2, threads=32):
            if T.get_thread_binding() == 0:
                pass

    return main
