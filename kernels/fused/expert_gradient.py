"""Weight gradients of experts: a grouped GEMM of each expert's rows, transposed, and the gradients of its outputs.

The depth of these GEMMs is an expert's number of rows, often few hundred, so writing the results takes longer than
multiplying, and reading both operands of each tile from the L2 cache would take as long again. Therefore a block computes a
whole column of an expert's tiles and keeps their right operand in shared memory if it fits. Warp roles are as in `gemm`: one
warp copies by TMA, two warpgroups multiply and store.
"""

from dataclasses import dataclass

import tilelang.language as T
import torch

import tilescale_net as tsn

from ..collective import dtype_name
from ..moe.row_ops import rows_of_expert
from . import gemm
from .gemm import DTYPES, SIMULATED_WORKERS


@dataclass(frozen=True)
class GradientTiling:
    """Geometry of `expert_gradient`.

    Args:
        tile: rows, columns and depth of a tile.
        stages: depth of the left operand's ring in shared memory.
        slots: depth of the right operand's ring. An expert's right operand stays there if it takes at most `slots` steps.
    """

    tile: tuple[int, int, int] = (128, 256, 32)
    stages: int = 8
    slots: int = 6


DEFAULT = GradientTiling()
FEW_ROWS = DEFAULT.slots * DEFAULT.tile[2]  # of an expert; the right operand of so many stays in shared memory
SIMULATED = GradientTiling((32, 32, 16), stages=2, slots=2)


@tsn.jit(name="expert_gradient")
def expert_gradient(experts, m, n, dtype, tile=(128, 256, 32), stages=8, slots=6, workers=132):
    """Kernel `(out, left, right, counts, offsets)`: out[e] = the transpose of expert e's rows of `left` times those of `right`.

    Args:
        experts, m, n: of `out` [experts, m, n], `left` [capacity, m] and `right` [capacity, n].
        dtype: dtype of all three; accumulation is in float32.
        tile, stages, slots: see `GradientTiling`.
        workers: number of blocks.

    `counts` (int32 [experts]) and `offsets` (int32 [experts + 1]) hold the number of rows of each expert and its first row, a
    multiple of the tile's depth. Rows between an expert's last row and the next multiple are zero.
    """
    (bm, bn, bk), half = tile, tile[0] // 2
    shape = gemm.Shape(experts, m, n, 0, tile, stages, 1, bn, workers, False)
    jobs = experts * shape.tiles_n  # columns of tiles

    @T.macro
    def multiply_all(group, job, left, right, result, total, full, empty, right_full, right_empty, depths, out, thread):
        """Multiply and store a warpgroup's rows of all tiles of this block."""
        step, turn, depth = (T.alloc_local((1,), "int32") for _ in range(3))
        T.inc_max_nreg(232)
        step[0] = 0
        turn[0] = 0
        while job[0] < jobs:
            depth[0] = depths[job[0] // shape.tiles_n]
            for t in T.serial(shape.tiles_m):
                for i in T.serial(depth[0]):
                    T.barrier_wait(full[step[0] % stages], (step[0] // stages) & 1)
                    T.barrier_wait(right_full[(turn[0] + i) % slots], ((turn[0] + i) // slots) & 1)
                    T.wgmma_gemm(
                        left[step[0] % stages, group, :, :], right[(turn[0] + i) % slots, :, :], total, transpose_A=True,
                        policy=T.GemmWarpPolicy.FullRow, clear_accum=i == 0,
                    )  # fmt: skip
                    T.wait_wgmma(1)
                    if i > 0:
                        if thread % 32 == 0:
                            T.barrier_arrive(empty[(step[0] + stages - 1) % stages])
                            if T.Or(depth[0] > slots, t == shape.tiles_m - 1):
                                T.barrier_arrive(right_empty[(turn[0] + i - 1) % slots])
                    step[0] = step[0] + 1
                T.wait_wgmma(0)
                if thread % 32 == 0:
                    T.barrier_arrive(empty[(step[0] + stages - 1) % stages])
                    if T.Or(depth[0] > slots, t == shape.tiles_m - 1):
                        T.barrier_arrive(right_empty[(turn[0] + depth[0] - 1) % slots])
                if T.Or(depth[0] > slots, t == shape.tiles_m - 1):
                    turn[0] = turn[0] + depth[0]
                T.warpgroup_fence_operand(total, num_regs=half * bn // 128)
                gemm.store(
                    shape, group, total, result, out, job[0] // shape.tiles_n, t * bm, job[0] % shape.tiles_n * bn
                )
            job[0] = job[0] + workers
        T.tma_store_wait(0)

    capacity = T.dynamic("capacity")

    @T.prim_func
    def main(
        out: T.Tensor((experts, m, n), dtype),
        left: T.Tensor((capacity, m), dtype),
        right: T.Tensor((capacity, n), dtype),
        counts: T.Tensor((experts,), "int32"),
        offsets: T.Tensor((experts + 1,), "int32"),
    ):
        with T.Kernel(workers, threads=gemm.THREADS) as block:
            left_ring = T.alloc_shared((stages, 2, bk, half), dtype)
            right_ring = T.alloc_shared((slots, bk, bn), dtype)
            result = T.alloc_shared((2, half, bn), dtype)
            upper, lower = (T.alloc_fragment((half, bn), "float32") for _ in range(2))
            full, empty = T.alloc_barrier([32] * stages), T.alloc_barrier([gemm.WARPS] * stages)
            right_full, right_empty = T.alloc_barrier([32] * slots), T.alloc_barrier([gemm.WARPS] * slots)
            firsts, depths = T.alloc_shared((experts,), "int32"), T.alloc_shared((experts,), "int32")
            job, step, turn, depth = (T.alloc_local((1,), "int32") for _ in range(4))
            thread = T.get_thread_binding()
            job[0] = block
            for i in T.serial(-(-experts // gemm.THREADS)):
                e = i * gemm.THREADS + thread
                if e < experts:
                    rows = rows_of_expert(counts, offsets, e)
                    # An expert without rows has one step, of rows out of bounds, which TMA reads as zeros.
                    depths[e] = T.max(1, T.ceildiv(rows, bk))
                    firsts[e] = T.if_then_else(rows > 0, offsets[e], capacity)
            T.sync_threads()
            multiply_group = lambda group, total: multiply_all(  # noqa: E731
                group, job, left_ring, right_ring, result, total, full, empty, right_full, right_empty, depths, out, thread
            )  # fmt: skip
            if thread < 128:
                T.dec_max_nreg(40)
                if thread < 32:
                    step[0] = 0
                    turn[0] = 0
                    while job[0] < jobs:
                        depth[0] = depths[job[0] // shape.tiles_n]
                        for t in T.serial(shape.tiles_m):
                            for i in T.serial(depth[0]):
                                row = firsts[job[0] // shape.tiles_n] + i * bk
                                stage = step[0] % stages
                                T.barrier_wait(empty[stage], ((step[0] // stages) & 1) ^ 1)
                                for h in T.unroll(2):
                                    column = t * bm + h * half
                                    T.tma_copy(
                                        left[row : row + bk, column : column + half], left_ring[stage, h, :, :],
                                        barrier=full[stage], leader_scope_threads=32,
                                    )  # fmt: skip
                                T.barrier_arrive(full[stage])
                                step[0] = step[0] + 1
                                if T.Or(depth[0] > slots, t == 0):
                                    slot, other = turn[0] % slots, job[0] % shape.tiles_n * bn
                                    T.barrier_wait(right_empty[slot], ((turn[0] // slots) & 1) ^ 1)
                                    T.tma_copy(
                                        right[row : row + bk, other : other + bn], right_ring[slot, :, :],
                                        barrier=right_full[slot], leader_scope_threads=32,
                                    )  # fmt: skip
                                    T.barrier_arrive(right_full[slot])
                                    turn[0] = turn[0] + 1
                        job[0] = job[0] + workers
            elif thread < 256:
                multiply_group(0, upper)
            else:
                multiply_group(1, lower)

    return main


def gradient_of_experts(
    left: torch.Tensor, right: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor, *,
    tiling: GradientTiling | None = None,
) -> torch.Tensor:  # fmt: skip
    """The transpose of each expert's rows of `left` times its rows of `right`, accumulated in float32.

    Args:
        left, right: [capacity, m] and [capacity, n], contiguous, torch.bfloat16 or torch.float16; zero in padding.
        counts, offsets: int32, [experts] rows of each expert and [experts + 1] their first rows, multiples of the depth of
            a tile (32), of a dispatch.
        tiling: geometry; default `DEFAULT`.

    Returns:
        [experts, m, n] of the dtype of `left`; zeros for an expert without rows.

    Raises:
        TypeError, ValueError: a wrong argument, by name.
        ConfigurationError: a GPU of another compute capability than 9.0.
    """
    name, simulated = "gradient_of_experts", left.device.type != "cuda"
    for label, tensor, dtype in (
        ("left", left, left.dtype), ("right", right, left.dtype), ("counts", counts, torch.int32), ("offsets", offsets, torch.int32),
    ):  # fmt: skip
        if tensor.dtype != dtype or tensor.device != left.device:
            raise TypeError(
                f"{name}: {label} is of {tensor.dtype} on {tensor.device}; it must be of {dtype} on {left.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: {label} has strides {list(tensor.stride())}; it must be contiguous")
    if left.dtype not in DTYPES:
        raise TypeError(f"{name}: left is of {left.dtype}; it must be of {' or '.join(map(str, DTYPES))}")
    if left.dim() != 2 or right.dim() != 2 or len(left) != len(right):
        raise ValueError(f"{name}: left is {list(left.shape)} and right {list(right.shape)}; they need as many rows")
    (rows, m), n, experts = left.shape, right.shape[1], len(counts)
    if tuple(offsets.shape) != (experts + 1,):
        raise ValueError(f"{name}: offsets is {list(offsets.shape)}; it must be [{experts + 1}]")
    gemm.check_extents(name, left.dtype, m=m, n=n)
    if not simulated and (obstacle := gemm.device_obstacle(left.device)):
        raise tsn.ConfigurationError(f"{name}: {obstacle}")
    tiling = tiling or (SIMULATED if simulated else DEFAULT)
    out = left.new_empty((experts, m, n))
    if not rows:
        return out.zero_()
    sms = SIMULATED_WORKERS if simulated else torch.cuda.get_device_properties(left.device).multi_processor_count
    kernel = expert_gradient(experts, m, n, dtype_name(left.dtype), **vars(tiling), workers=sms)
    kernel(out, left, right, counts, offsets)
    return out
