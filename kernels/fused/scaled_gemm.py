"""float8_e4m3fn GEMMs with block scales, of one matrix or of one matrix per expert.

The tensor cores of Hopper keep about 14 mantissa bits of FP8 sums. Therefore each step of a tile's depth, 128 elements, is
accumulated there on its own, then multiplied by its scales and added in float32 ("promotion" in the DeepSeek-V3 technical
report, arXiv:2412.19437, section 3.3.2, with the same block sizes). Blocks of threads work as in `gemm`: one warp copies by
TMA, two warpgroups multiply; while one promotes, the other has the tensor cores. Tiles are scheduled statically, because all
take the same time; beside a dispatch or a combine, blocks take them by ticket, as in `expert_matmul`, whose class calls this
kernel then.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.compiler import versions

from ..collective import dtype_name, is_integer
from ..moe.layout import align4
from ..moe.row_ops import FP8, FP8_MAX, SMALLEST_AMAX, all_rows, rows_of_expert
from ..moe.row_ops import GROUP as BLOCK  # elements per scale in a row of `x`, and in each axis of `w`
from . import gemm
from .gemm import DTYPES, SCALED, device_obstacle

SCALES_AT_ONCE = 4  # scales of a row per TMA copy, whose minimum is 16 bytes
RESULTS_AT_ONCE = 8  # 2-byte results per 16-byte store
LOW_BESIDE_ONE = 32  # most steps of a tile with which low tiles may be beside a single row of whole tiles


@dataclass(frozen=True)
class ScaledShape:
    """Compile-time extents of a GEMM with scales and its tiles.

    Attributes:
        experts, n, k: extents of `w` [experts, n, k].
        tile: rows, columns and depth of a tile; the depth is that of a scale.
        panel: rows of tiles that are processed together, for L2 reuse.
        columns: columns per store.
        cluster: blocks of threads that share a tile of `w`, each with its own rows.
        low_tiles: see `ScaledTiling`.
        low_beside_one: whether a single row of whole tiles may have low tiles beside it, see `whole_rows`.
    """

    experts: int
    n: int
    k: int
    tile: tuple[int, int, int]
    panel: int
    columns: int
    cluster: int
    low_tiles: bool
    low_beside_one: bool

    @property
    def half(self) -> int:
        """Rows of a warpgroup."""
        return self.tile[0] // 2

    @property
    def tall(self) -> int:
        """Rows of a cluster."""
        return self.tile[0] * self.cluster

    @property
    def parts(self) -> int:
        """Parts in which the columns of a tile are multiplied; the registers do not hold two sums of all columns."""
        return max(1, self.tile[1] // BLOCK)

    @property
    def width(self) -> int:
        """Columns of a part; they share a scale."""
        return self.tile[1] // self.parts

    @property
    def tiles_n(self) -> int:
        return -(-self.n // self.tile[1])

    @property
    def low_pairs(self) -> int:
        """Tile numbers of a row of low tiles: two low tiles share a number, as they take as long as a whole tile."""
        return (self.tiles_n + 1) // 2

    @property
    def low_width(self) -> int:
        """Columns of a warpgroup in a low tile."""
        return self.tile[1] // 2

    @property
    def depth(self) -> int:
        """Number of steps of a tile."""
        return -(-self.k // BLOCK)

    def numbers(self, begin):
        """Number of tile numbers before an entry of `begins`."""
        return begin if self.low_tiles else begin * self.tiles_n

    def whole_rows(self, rows):
        """Rows of whole tiles among an expert's `rows` rows; the rest is a row of low tiles.

        A last row of whole tiles that is alone in its panel reads all of `w`, and low tiles would read it again: with many
        steps that costs more than half of the tiles' multiplications.
        """
        whole = (rows + self.half - 1) // self.tile[0]
        if self.low_beside_one:
            return whole
        alone = T.And(whole % self.panel == 1, rows > whole * self.tile[0])
        return whole + T.if_then_else(alone, 1, 0)


@tsn.macro
def count_tiles(shape, counts, offsets, heights, begins, thread):
    """begins[e] = rows of cluster tiles of the experts before expert e; with low tiles, their tile numbers. Called by all
    threads of a block."""
    for i in T.serial(-(-shape.experts // gemm.THREADS)):
        e = i * gemm.THREADS + thread
        if e < shape.experts:
            # A rejected dispatch has counts, but no room for their rows.
            if shape.low_tiles:
                rows = rows_of_expert(counts, offsets, e)
                whole = shape.whole_rows(rows)
                heights[e] = whole * shape.tiles_n + T.if_then_else(rows > whole * shape.tile[0], shape.low_pairs, 0)
            else:
                heights[e] = (rows_of_expert(counts, offsets, e) + shape.tall - 1) // shape.tall
    T.sync_threads()
    before = T.alloc_var("int32")
    for i in T.serial(-(-(shape.experts + 1) // gemm.THREADS)):
        end = i * gemm.THREADS + thread
        if end <= shape.experts:
            before = 0
            for e in T.serial(end):
                before = before + heights[e]
            begins[end] = before
    T.sync_threads()


class TileQueue(NamedTuple):
    """State of a block's tile scheduler, for `gemm.get_tile`.

    Attributes:
        tickets: int32 [2], number of tiles taken, by the parity of the call. parity: int32.
        leaves: int32, whether the block stops after `before_leaving` tiles are taken. before_leaving: int32.
        queue: int32 [2], shared memory: the next two tiles. queue_full, queue_empty: their barriers.
        turn: int32 [1], number of tiles so far. tile: int32 [1], the current tile number; -1: none.
        thread: thread index in the block.
    """

    tickets: Any
    parity: Any
    leaves: Any
    before_leaving: Any
    queue: Any
    queue_full: Any
    queue_empty: Any
    turn: Any
    tile: Any
    thread: Any


@tsn.macro
def next_tile(total, backwards, b):
    """b.tile = the next tile number of `total`; also queue it for the multiplying warps. Called by the copying warp."""
    T.barrier_wait(b.queue_empty[b.turn[0] % 2], ((b.turn[0] // 2) & 1) ^ 1)
    b.tile[0] = total
    if b.thread == 0:
        # Blocks leave before they take a ticket, so every ticket is a tile that is multiplied.
        if b.leaves == 0 or T.atomic_add(b.tickets[b.parity], 0, return_prev=True) < b.before_leaving:
            b.tile[0] = T.atomic_add(b.tickets[b.parity], 1, return_prev=True)
        if b.tile[0] >= total:
            b.tile[0] = -1
        elif backwards:
            b.tile[0] = total - 1 - b.tile[0]
        b.queue[b.turn[0] % 2] = b.tile[0]
    b.tile[0] = T.shfl_sync(b.tile[0], 0)
    T.barrier_arrive(b.queue_full[b.turn[0] % 2])
    b.turn[0] = b.turn[0] + 1


@tsn.macro
def add_missing_rows(shape, counts, offsets, finished, tiles, thread):
    """Announce tiles without rows, which no GEMM of this call announces. Called by a block."""
    used = T.alloc_var("int32")
    for i in T.serial(-(-tiles // gemm.THREADS)):
        t = i * gemm.THREADS + thread
        if t < tiles:
            used = 0
            for e in T.serial(shape.experts):
                if t * shape.tile[0] >= offsets[e] and t * shape.tile[0] < T.min(
                    offsets[e] + counts[e], offsets[e + 1]
                ):
                    used = 1
            if used == 0:
                N.signal(finished[0, t], shape.tiles_n * gemm.WARPS, N.my_pe(), op="add")


@tsn.macro
def locate(shape, counts, offsets, begins, number, backwards, rank, at):
    """at = (expert, first row, end of the expert's rows, first column) of tile `number`, which increases from call to call;
    with low tiles, at[4] is the number of low tiles, 0: a whole tile.

    Args:
        backwards: `number` decreases, and at[0] starts at the last expert. rank: rank of the block in its cluster.
    """
    if backwards:
        while number < shape.numbers(begins[at[0]]):
            at[0] = at[0] - 1
    else:
        while number >= shape.numbers(begins[at[0] + 1]):
            at[0] = at[0] + 1
    inside = number - shape.numbers(begins[at[0]])
    if shape.low_tiles:
        at[2] = offsets[at[0]] + rows_of_expert(counts, offsets, at[0])
        whole = shape.whole_rows(at[2] - offsets[at[0]])
        low = inside - whole * shape.tiles_n
        if low < 0:
            before = T.truncdiv(inside, shape.panel * shape.tiles_n) * shape.panel
            rows = T.min(shape.panel, whole - before)
            at[1] = offsets[at[0]] + (before + T.truncmod(inside - before * shape.tiles_n, rows)) * shape.tile[0]
            at[3] = T.truncdiv(inside - before * shape.tiles_n, rows) * shape.tile[1]
            at[4] = 0
        else:
            at[1] = offsets[at[0]] + whole * shape.tile[0]
            at[3] = low * 2 * shape.tile[1]
            at[4] = T.min(2, shape.tiles_n - low * 2)
    else:
        first = inside // (shape.panel * shape.tiles_n) * shape.panel
        height = T.min(shape.panel, begins[at[0] + 1] - begins[at[0]] - first)
        rest = inside - first * shape.tiles_n
        at[1] = offsets[at[0]] + (first + rest % height) * shape.tall + rank * shape.tile[0]
        at[2] = offsets[at[0]] + rows_of_expert(counts, offsets, at[0])
        at[3] = rest // height * shape.tile[1]


@tsn.macro
def store_part(shape, warpgroup, total, result, out, at, below, first, width, thread):
    """out = a warpgroup's sums of columns [at[3] + first, + width) and of rows from at[1] + below up to at[2].
    See `T.tma_store_wait`."""
    row = at[1] + below
    for h in T.unroll(width // shape.columns):
        column = at[3] + first + h * shape.columns
        # Before the branch: tilelang may place the barrier that lets the other threads write before the branch.
        T.tma_store_wait(0)
        if shape.low_tiles:
            T.copy(total[:, h * shape.columns : (h + 1) * shape.columns], result[warpgroup, :, :])
            T.fence_proxy_async()
            if row + shape.half <= at[2]:
                T.tma_copy(
                    result[warpgroup, :, :], out[row : row + shape.half, column : column + shape.columns]
                )  # fmt: skip
            else:
                store_rows(shape, warpgroup, result, out, at, row, column, thread % 128)
        elif row + shape.half <= at[2]:
            T.copy(total[:, h * shape.columns : (h + 1) * shape.columns], result[warpgroup, :, :])
            T.fence_proxy_async()
            T.tma_copy(
                result[warpgroup, :, :], out[row : row + shape.half, column : column + shape.columns]
            )  # fmt: skip
        else:  # rows of the next expert follow
            for i, j in T.Parallel(shape.half, shape.columns):
                if row + i < at[2] and column + j < shape.n:
                    out[row + i, column + j] = T.cast(total[i, h * shape.columns + j], out.dtype)


@tsn.macro
def store_rows(shape, warpgroup, result, out, at, row, column, lane):
    """out = the sums in `result` of rows before at[2], 16 bytes per store; rows of the next expert follow. Called by a
    warpgroup.

    Args:
        lane: thread index in the warpgroup.
    """
    across = shape.columns // RESULTS_AT_ONCE
    eighth = T.truncdiv(column, RESULTS_AT_ONCE)  # shows the compiler that 16 bytes are aligned
    for c in T.serial(-(-shape.half * across // 128)):
        i, j = T.truncdiv(c * 128 + lane, across), T.truncmod(c * 128 + lane, across)
        if i < shape.half and row + i < at[2] and (eighth + j) * RESULTS_AT_ONCE < shape.n:
            for v in T.vectorized(RESULTS_AT_ONCE):
                out[row + i, (eighth + j) * RESULTS_AT_ONCE + v] = result[warpgroup, i, j * RESULTS_AT_ONCE + v]


@tsn.jit(name="scaled_gemm")
def scaled_gemm(
    experts, n, k, out_dtype="bfloat16", form="block", tile=(128, 256, 128), stages=4, panel=8, columns=64,
    workers=132, cluster=1, in_turn=False, steps=1, low_tiles=False, tiles=0, waits=False,
):  # fmt: skip
    """Kernel `(out, x, w, x_scales, w_scales, counts, offsets)`: `out` = the rows of each expert times its matrix.

    Args:
        experts, n, k: extents of `x` [capacity, k] and `w` [experts, n, k], float8_e4m3fn, and of `out` [capacity, n].
        out_dtype: dtype of `out`; accumulation is in float32.
        form: granularity of the float32 scales. "block": `x_scales` [capacity, blocks of k, padded to a multiple of 4] per
            128 elements of a row, `w_scales` [experts, blocks of n, blocks of k] per 128 x 128 elements. "row": `x_scales`
            [capacity] and `w_scales` [experts, n].
        tile, panel, columns, cluster: see `ScaledShape`. stages: depth of the operand ring. in_turn, steps, low_tiles: see
            `ScaledTiling`.
        workers: number of blocks of threads, a multiple of `cluster`.
        tiles: 0, or rows of tiles of `x` if the kernel runs beside communication. With `waits`, it waits for the tiles of a
            dispatch; else it announces tiles to a combine, the last first. Further arguments are as in `expert_matmul`:
            `calls` and `tickets`, then `arrivals` and `arrived`, or `finished`, `started`, `leaving` and `share`. `offsets`
            must be multiples of the rows of a tile.

    `counts` (int32 [experts]) and `offsets` (int32 [experts + 1]) hold the number of rows and the first row of each expert;
    other rows of `out` are not written.
    """
    if cluster > 1 and not versions.CLUSTERS:
        raise tsn.ConfigurationError(f"scaled_gemm: cluster {cluster} needs tilelang 0.1.14 or newer; give cluster 1")
    shape, tells, capacity = (
        ScaledShape(
            experts, n, k, tile, panel, columns, cluster, low_tiles, tiles > 0 or -(-k // BLOCK) <= LOW_BESIDE_ONE
        ),
        tiles > 0 and not waits,
        T.dynamic("rows"),
    )
    (bm, bn, bk), half, width, by_block = tile, shape.half, shape.width, form == "block"
    fragments = (half, width)
    # A tile begins at a multiple of this number of steps; if it equals `stages`, the stages are compile-time constants.
    together = steps if shape.depth % steps == 0 and stages % steps == 0 else 1
    in_cluster: dict[str, Any] = {"cluster_dims": cluster} if cluster > 1 else {}
    shared_by = {"cluster_mask": (1 << cluster) - 1} if cluster > 1 else {}
    of_x = (capacity, align4(shape.depth)) if by_block else (capacity,)
    of_w = (experts, -(-n // BLOCK), shape.depth) if by_block else (experts, n)

    def is_tile(number, begins):
        return number[0] >= 0 if tiles else number[0] < shape.numbers(begins[experts])

    @T.macro
    def release(empty, s, thread):
        """Announce to all blocks of the cluster that this warp has read stage `s`."""
        T.sync_warp()
        if thread % 32 == 0:
            if cluster == 1:
                T.barrier_arrive(empty[s])
            else:
                for peer in T.unroll(cluster):
                    T.mbarrier_arrive(empty[s], peer)

    @T.macro
    def copy_tile(low, at, beyond, x, w, x_scales, left, right, factors, full, empty, step, chunk):
        """Copy the steps of a tile, or of a `low` tile `beyond` columns behind at[3], to the ring. Called by the copying
        warp."""
        for i in T.serial(shape.depth):
            s = step[0] % stages
            T.barrier_wait(empty[s], ((step[0] // stages) & 1) ^ 1)
            for h in T.unroll(1 if low else 2):
                T.tma_copy(
                    x[at[1] + h * half : at[1] + (h + 1) * half, i * bk : i * bk + bk], left[s, h, :, :],
                    barrier=full[s], leader_scope_threads=32,
                )  # fmt: skip
            if by_block:
                if i % SCALES_AT_ONCE == 0:
                    T.tma_copy(
                        x_scales[at[1] : at[1] + bm, i : i + SCALES_AT_ONCE], factors[chunk[0] % stages, :, :],
                        barrier=full[s], leader_scope_threads=32,
                    )  # fmt: skip
                    chunk[0] = chunk[0] + 1
            for p in T.unroll(shape.parts):
                T.tma_copy(
                    w[at[0], at[3] + beyond + p * width : at[3] + beyond + (p + 1) * width, i * bk : i * bk + bk], right[s, p, :, :],
                    barrier=full[s], leader_scope_threads=32, **shared_by,
                )  # fmt: skip
            T.barrier_arrive(full[s])
            step[0] = step[0] + 1

    @T.macro
    def add_part(total, part, width, of_rows, of_block):
        for i, j in T.Parallel(half, width):
            if by_block:
                total[i, j] += part[i, j] * (of_rows[i] * of_block)
            else:
                total[i, j] += part[i, j]

    @T.macro
    def multiply_part(warpgroup, p, left, right, part, total, of_rows, of_block, empty, s, thread, step, turns_of):
        """total += the scaled GEMM of a part of stage `s`."""
        if in_turn:  # the first warpgroup begins
            T.barrier_wait(turns_of[warpgroup], ((step[0] * shape.parts + p) & 1) ^ (1 - warpgroup))
        T.wgmma_gemm(
            left[s, warpgroup, :, :], right[s, p, :, :], part, transpose_B=True, policy=T.GemmWarpPolicy.FullRow,
            clear_accum=True,
        )  # fmt: skip
        if in_turn:
            T.sync_warp()
            if thread % 32 == 0:
                T.barrier_arrive(turns_of[1 - warpgroup])
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(part, num_regs=half * width // 128)
        if p == shape.parts - 1:
            release(empty, s, thread)
        add_part(total, part, width, of_rows, of_block)

    @T.macro
    def multiply_low(warpgroup, left, right, part, total, of_rows, of_block, empty, s, thread):
        """total += the scaled GEMM of stage `s`, which has half of a tile's rows, with the warpgroup's columns."""
        first = warpgroup * shape.low_width % width
        T.wgmma_gemm(
            left[s, 0, :, :], right[s, warpgroup * shape.low_width // width, first : first + shape.low_width, :], part,
            transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True,
        )  # fmt: skip
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(part, num_regs=half * shape.low_width // 128)
        release(empty, s, thread)
        add_part(total, part, shape.low_width, of_rows, of_block)

    @T.macro
    def multiply_step(
        warpgroup, i, s, at, beyond, low, w_scales, factors, left, right, part, first, second, of_rows, of_block, full, empty,
        step, chunk, thread, turns_of,
    ):  # fmt: skip
        """Step `i` of a tile or `low` tile, with operands in stage `s`."""
        if by_block:
            for p in T.unroll(1 if low else shape.parts):
                of_block[p] = w_scales[at[0], T.min((at[3] + beyond + p * BLOCK) // BLOCK, of_w[1] - 1), i]
        T.barrier_wait(full[s], (step[0] // stages) & 1)
        if by_block:
            if i % SCALES_AT_ONCE == 0:
                chunk[0] = chunk[0] + 1
            for r in T.Parallel(half):
                of_rows[r] = factors[(chunk[0] - 1) % stages, (0 if low else warpgroup) * half + r, i % SCALES_AT_ONCE]
        if low:
            multiply_low(warpgroup, left, right, part, first, of_rows, of_block[0], empty, s, thread)
        else:
            multiply_part(
                warpgroup, 0, left, right, part, first, of_rows, of_block[0], empty, s, thread, step, turns_of
            )
            if shape.parts == 2:
                multiply_part(
                    warpgroup, 1, left, right, part, second, of_rows, of_block[1], empty, s, thread, step, turns_of
                )
        step[0] = step[0] + 1

    @T.macro
    def scale_part(total, of_rows, w_scales, at, first, width):
        for i, j in T.Parallel(half, width):
            total[i, j] = total[i, j] * of_rows[i] * w_scales[at[0], T.min(at[3] + first + j, n - 1)]

    @T.macro
    def multiply_tile(
        warpgroup, low, below, beyond, parts, left, right, factors, result, full, empty, step, chunk, at, out, x_scales, w_scales,
        thread, of_rows, of_block, turns_of,
    ):  # fmt: skip
        """A warpgroup's rows of a tile, from at[1] + below, or its columns of a `low` tile, from at[3] + beyond."""
        part, first, second = parts
        wide = shape.low_width if low else width
        T.clear(first)
        if shape.parts == 2 and not low:
            T.clear(second)
        for o in T.serial(shape.depth // together):
            for j in T.unroll(together):
                multiply_step(
                    warpgroup, o * together + j, j if together == stages else step[0] % stages, at, beyond, low, w_scales,
                    factors, left, right, part, first, second, of_rows, of_block, full, empty, step, chunk, thread, turns_of,
                )  # fmt: skip
        if not by_block:
            for r in T.Parallel(half):
                of_rows[r] = x_scales[T.min(at[1] + below + r, capacity - 1)]
            scale_part(first, of_rows, w_scales, at, beyond, wide)
            if shape.parts == 2 and not low:
                scale_part(second, of_rows, w_scales, at, beyond + width, wide)
        store_part(shape, warpgroup, first, result, out, at, below, beyond, wide, thread)
        if shape.parts == 2 and not low:
            store_part(shape, warpgroup, second, result, out, at, below, beyond + width, wide, thread)

    @T.macro
    def work(
        warpgroup, block, begins, counts, offsets, left, right, factors, result, full, empty, step, chunk, at, number,
        out, x_scales, w_scales, thread, rank, queue_state, finished, turns_of,
    ):  # fmt: skip
        """Main loop of a multiplying warpgroup."""
        part, first, second = (T.alloc_fragment(fragments, "float32") for _ in range(3))
        low_parts = (part, first, second)
        if low_tiles and shape.low_width != width:
            low_parts = (*(T.alloc_fragment((half, shape.low_width), "float32") for _ in range(2)), None)
        of_rows = T.alloc_fragment((half,), "float32")
        of_block = T.alloc_local((2,), "float32")
        multiply = lambda low, below, beyond: multiply_tile(  # noqa: E731
            warpgroup, low, below, beyond, low_parts if low else (part, first, second), left, right, factors, result, full, empty,
            step, chunk, at, out, x_scales, w_scales, thread, of_rows, of_block, turns_of,
        )  # fmt: skip
        if tiles:
            gemm.get_tile(queue_state)
        while is_tile(number, begins):
            locate(shape, counts, offsets, begins, number[0], tells, rank, at)
            if low_tiles:
                if at[4] == 0:
                    multiply(False, warpgroup * half, 0)
                    if tells:
                        gemm.announce(finished, 0, at[1] // bm, thread)
                for u in T.serial(at[4]):
                    multiply(True, 0, u * bn + warpgroup * shape.low_width)
                    if tells:
                        gemm.announce(finished, 0, at[1] // bm, thread)
            else:
                multiply(False, warpgroup * half, 0)
                if tells:
                    gemm.announce(finished, 0, at[1] // bm, thread)
            if tiles:
                gemm.get_tile(queue_state)
            else:
                number[0] = number[0] + workers // cluster
        T.tma_store_wait(0)

    @T.prim_func
    def main(
        ctx: N.Context() if tiles else None,
        out: T.Tensor((capacity, n), out_dtype),
        x: T.Tensor((capacity, k), FP8),
        w: T.Tensor((experts, n, k), FP8),
        x_scales: T.Tensor(of_x, "float32"),
        w_scales: T.Tensor(of_w, "float32"),
        counts: T.Tensor((experts,), "int32"),
        offsets: T.Tensor((experts + 1,), "int32"),
        calls: T.Tensor((1,), "int64") if tiles else None,
        tickets: T.Tensor((2,), "int32") if tiles else None,
        arrivals: T.Tensor((1,), "int64") if waits else None,
        arrived: T.Tensor((tiles + 1,), "uint64") if waits else None,
        finished: T.Tensor((1, tiles + 1), "uint64") if tells else None,
        started: T.Tensor((1,), "uint64") if tells else None,
        leaving: T.int32 if tells else None,
        share: T.int32 if tells else None,
    ):
        with T.Kernel(workers, threads=gemm.THREADS, **in_cluster) as block:
            left = T.alloc_shared((stages, 2, half, bk), FP8)
            right = T.alloc_shared((stages, shape.parts, width, bk), FP8)
            factors = T.alloc_shared((stages, bm, SCALES_AT_ONCE), "float32")
            result = T.alloc_shared((2, half, columns), out_dtype)
            full = T.alloc_barrier([32] * stages)
            released = [gemm.WARPS * cluster] * stages
            empty = T.alloc_barrier(released) if cluster == 1 else T.alloc_cluster_barrier(released)
            turns_of = T.alloc_barrier([gemm.WARPS // 2] * 2) if in_turn else None
            heights, begins = T.alloc_shared((experts,), "int32"), T.alloc_shared((experts + 1,), "int32")
            step, chunk = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
            number, at = T.alloc_local((1,), "int32"), T.alloc_local((5 if low_tiles else 4,), "int32")
            thread = T.get_thread_binding()
            rank = block % cluster
            if cluster > 1:
                T.pdl_sync()  # tilelang launches clusters that may begin before the writes of the previous kernel are visible
            step[0] = 0
            chunk[0] = 0
            number[0] = block // cluster
            at[0] = experts - 1 if tells else 0
            count_tiles(shape, counts, offsets, heights, begins, thread)
            queue_state = None
            if tiles:
                parity = T.cast(calls[0] % 2, "int32")
                queue, turn = T.alloc_shared((2,), "int32"), T.alloc_local((1,), "int32")
                queue_full, queue_empty = T.alloc_barrier([32] * 2), T.alloc_barrier([gemm.WARPS] * 2)
                turn[0] = 0
                if block == 0:
                    if thread == 0:
                        tickets[1 - parity] = 0
                    if tells:
                        if thread == 0:
                            N.signal(started[0], 1, N.my_pe(), op="add")
                        add_missing_rows(shape, counts, offsets, finished, tiles, thread)
                leaves = T.if_then_else(block < leaving, 1, 0) if tells else 0
                before_leaving = shape.numbers(begins[experts]) * share // 256 if tells else 0
                queue_state = TileQueue(
                    tickets, parity, leaves, before_leaving, queue, queue_full, queue_empty, turn, number, thread
                )
            bring = lambda low, beyond: copy_tile(  # noqa: E731
                low, at, beyond, x, w, x_scales, left, right, factors, full, empty, step, chunk
            )
            if thread < 128:
                T.dec_max_nreg(40)
                if thread < 32:
                    if tells:
                        # True at once: TMA reads local data of earlier kernels.
                        N.wait_warp(finished[0, tiles], "ge", 0, proxy="async")
                    if tiles:
                        next_tile(shape.numbers(begins[experts]), tells, queue_state)
                    while is_tile(number, begins):
                        locate(shape, counts, offsets, begins, number[0], tells, rank, at)
                        if waits:
                            N.wait_warp(arrived[at[1] // bm], "ge", arrivals[0] * bm, proxy="async")
                        if low_tiles:
                            if at[4] == 0:
                                bring(False, 0)
                            for u in T.serial(at[4]):
                                bring(True, u * bn)
                        else:
                            bring(False, 0)
                        if tiles:
                            next_tile(shape.numbers(begins[experts]), tells, queue_state)
                        else:
                            number[0] = number[0] + workers // cluster
            elif thread < 256:
                T.inc_max_nreg(232)
                work(
                    0, block, begins, counts, offsets, left, right, factors, result, full, empty, step, chunk, at,
                    number, out, x_scales, w_scales, thread, rank, queue_state, finished, turns_of,
                )  # fmt: skip
            else:
                T.inc_max_nreg(232)
                work(
                    1, block, begins, counts, offsets, left, right, factors, result, full, empty, step, chunk, at,
                    number, out, x_scales, w_scales, thread, rank, queue_state, finished, turns_of,
                )  # fmt: skip
            if cluster > 1:
                T.cluster_sync()  # no block may end while another one signals in its shared memory

    return main


# ---------------------------------------------------------------------------------------------------------------------
# Calls.


@dataclass(frozen=True)
class ScaledTiling:
    """Geometry of a GEMM with scales.

    Args:
        tile: rows, columns and depth of a tile; the depth is 128, columns are 256 or divide 128.
        stages: depth of the operand ring in shared memory.
        panel: rows of tiles that are processed together, for L2 reuse.
        columns: columns per store; a divisor of the tile's columns and of 128.
        cluster: blocks of threads, each with its own rows, that share one TMA copy of a tile of `w`; 1: no cluster. GPUs
            only, tilelang 0.1.14 or newer.
        in_turn: whether the warpgroups alternate on the tensor cores: one promotes while the other multiplies. Otherwise
            they run in any order, and both may promote at the same time.
        steps: unrolled steps per iteration of the loop over the depth, if they divide it and `stages`; with `stages` steps,
            no address is computed between steps.
        low_tiles: whether an expert's last tile, if at most half full, takes half of the time: each warpgroup multiplies
            half of its columns. Excludes `in_turn` and clusters; `columns` must then divide half of the tile's columns.
    """

    tile: tuple[int, int, int] = (128, 256, BLOCK)
    stages: int = 4
    panel: int = 8
    columns: int = 64
    cluster: int = 1
    in_turn: bool = False
    steps: int = 4
    low_tiles: bool = False

    def __post_init__(self) -> None:
        numbers = (*self.tile, self.stages, self.panel, self.columns, self.cluster, self.steps)
        if len(numbers) != 8 or not all(map(is_integer, numbers)):
            raise ValueError(f"{self}: tile must be three positive integers, the others one each")
        if not isinstance(self.in_turn, bool) or not isinstance(self.low_tiles, bool):
            raise TypeError(f"{self}: in_turn and low_tiles must be True or False")
        if self.low_tiles and (self.in_turn or self.cluster > 1):
            raise ValueError(f"{self}: low_tiles go with neither in_turn nor clusters")
        rows, columns, depth = self.tile
        if depth != BLOCK or (columns != 2 * BLOCK and BLOCK % columns) or rows % 32:
            raise ValueError(
                f"{self}: a tile must have a multiple of 32 rows, 256 columns or a divisor of {BLOCK}, and a depth of {BLOCK}"
            )
        if min(columns, BLOCK) % self.columns or self.columns % 8:
            raise ValueError(f"{self}: columns must be a multiple of 8 and divide those of the tile, and {BLOCK}")
        if self.low_tiles and columns // 2 % self.columns:
            raise ValueError(f"{self}: with low_tiles, columns must divide half of those of the tile")


DEFAULT = ScaledTiling(low_tiles=True)
# Beside a combine: with sums of 256 columns, registers do not suffice for calls that signal. As many stages as steps, so the
# loop is unrolled: two H200s, layer of 2048 tokens, 4,867 us; 5,208 with 6 stages.
TELLING = ScaledTiling((128, 128, BLOCK), stages=4, low_tiles=True)
# Geometries for one matrix by columns of a tile, with the time of a wave in us: one H200, 128 rows, n 4096, k 7168.
PLAIN = {
    256: (39.4, ScaledTiling()),
    128: (24.8, ScaledTiling((128, 128, BLOCK))),
    64: (17.2, ScaledTiling((128, 64, BLOCK), stages=8, columns=32)),
    32: (14.8, ScaledTiling((128, 32, BLOCK), stages=8, columns=16)),
}
SIMULATED = ScaledTiling((32, 64, BLOCK), stages=2, panel=2, columns=32, low_tiles=True)


def plain_tiling(rows: int, n: int, sms: int) -> ScaledTiling:
    """Geometry of a GEMM of one matrix: few rows need narrower tiles to occupy `sms` SMs."""
    tall = -(-rows // PLAIN[256][1].tile[0])
    return PLAIN[min(PLAIN, key=lambda columns: PLAIN[columns][0] * -(-tall * -(-n // columns) // sms))][1]


def _sms(device: torch.device) -> int:
    if device.type != "cuda":
        return gemm.SIMULATED_WORKERS
    return torch.cuda.get_device_properties(device).multi_processor_count


def kernel_of(
    experts: int, n: int, k: int, out_dtype: str, form: str, tiling: ScaledTiling, device: torch.device
) -> Any:
    """The kernel of `scaled_matmul` for any number of rows; arguments as for `scaled_gemm`."""
    # The number of blocks does not depend on the rows, so all calls share a kernel; blocks without a tile end at once.
    workers = _sms(device) // tiling.cluster * tiling.cluster
    return scaled_gemm(experts, n, k, out_dtype, form, **vars(tiling), workers=workers)


def scaled_matmul(
    x: torch.Tensor, w: torch.Tensor, x_scales: torch.Tensor, w_scales: torch.Tensor, *, out: torch.Tensor | None = None,
    counts: torch.Tensor | None = None, offsets: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16,
    tiling: ScaledTiling | None = None,
) -> torch.Tensor:  # fmt: skip
    """`x @ w.T` of float8_e4m3fn with scales, accumulated in float32; or the same for each expert's rows and matrix.

    Args:
        x: [rows, k], contiguous.
        w: [n, k], as in torch.nn.Linear, or [experts, n, k]; contiguous.
        x_scales: float32, [rows, ceil(k / 128)] per block, or [rows] per row. Unless the number of blocks is a multiple of
            4 or padded to one, the scales are copied.
        w_scales: float32, […, ceil(n / 128), ceil(k / 128)] per block of 128 x 128, or […, n] per row of `w`; the
            granularity must match `x_scales`.
        out: [rows, n] of `out_dtype`; default a new tensor.
        counts, offsets: int32, rows [experts] and first rows in `x` [experts + 1] of each expert, from a dispatch; with `w`
            [experts, n, k].
        out_dtype: torch.bfloat16 or torch.float16.
        tiling: geometry; default `DEFAULT`, of one matrix `plain_tiling`.

    Returns:
        `out`; rows of no expert are not written.

    Raises:
        TypeError, ValueError: a wrong argument, by name.
        ConfigurationError: the compute capability is not 9.0, or clusters with tilelang before 0.1.14.
    """
    name = "scaled_matmul"
    tensors: dict[str, Any] = dict(x=x, w=w, x_scales=x_scales, w_scales=w_scales)
    if not isinstance(w, torch.Tensor) or w.dim() == 3 or counts is not None or offsets is not None:
        tensors |= dict(counts=counts, offsets=offsets)
    for argument, tensor in tensors.items():
        dtype = {"x": SCALED, "w": SCALED, "counts": torch.int32, "offsets": torch.int32}.get(argument, torch.float32)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: {argument} is {tensor!r}; it must be a tensor of {dtype}")
        if tensor.dtype != dtype or tensor.device != x.device:
            raise TypeError(
                f"{name}: {argument} is of {tensor.dtype} on {tensor.device}; it must be of {dtype} on {x.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: {argument} has strides {list(tensor.stride())}; it must be contiguous")
    if out_dtype not in DTYPES:
        raise TypeError(f"{name}: out_dtype {out_dtype} is not one of {', '.join(map(str, DTYPES))}")
    if x.device.type == "cuda" and (obstacle := device_obstacle(x.device)):
        raise tsn.ConfigurationError(f"{name}: {obstacle}")
    if x.dim() != 2 or w.dim() not in (2, 3) or w.shape[-1] != x.shape[1]:
        raise ValueError(f"{name}: x is {list(x.shape)} and w {list(w.shape)}; they must be [rows, k] and […, n, k]")
    (rows, k), n, experts = x.shape, w.shape[-2], w.shape[0] if w.dim() == 3 else 1
    for argument, size, unit in (("k", k, 16), ("n", n, 8)):
        if size == 0 or size % unit:
            raise ValueError(f"{name}: {argument} is {size}; it must be a multiple of {unit}, and not 0")
    form = "block" if w_scales.dim() == w.dim() else "row"
    blocks, head = -(-k // BLOCK), tuple(w.shape[:-2])
    expected: dict[str, list[tuple[int, ...]]] = (
        dict(x_scales=[(rows, blocks), (rows, align4(blocks))], w_scales=[(*head, -(-n // BLOCK), blocks)])
        if form == "block"
        else dict(x_scales=[(rows,)], w_scales=[(*head, n)])
    )
    for argument, shapes in expected.items():
        if tuple(tensors[argument].shape) not in shapes:
            raise ValueError(
                f"{name}: {argument} is {list(tensors[argument].shape)}; with scales of {form}s it must be {list(shapes[0])}"
            )
    plain = counts is None
    if counts is None or offsets is None:
        counts, offsets = all_rows(rows, x.device)
    for argument, tensor, size in (("counts", counts, experts), ("offsets", offsets, experts + 1)):
        if tuple(tensor.shape) != (size,):
            raise ValueError(f"{name}: {argument} is {list(tensor.shape)}; it must be [{size}]")
    if out is None:
        out = torch.empty((rows, n), dtype=out_dtype, device=x.device)
    elif tuple(out.shape) != (rows, n) or out.dtype != out_dtype or not out.is_contiguous() or out.device != x.device:
        raise ValueError(f"{name}: out must be contiguous, [{rows}, {n}] of {out_dtype} on {x.device}")
    if rows == 0:
        return out
    if form == "block" and x_scales.shape[1] % SCALES_AT_ONCE:
        x_scales = torch.nn.functional.pad(x_scales, (0, -x_scales.shape[1] % SCALES_AT_ONCE))
    simulated = x.device.type != "cuda"
    if tiling is None:
        tiling = SIMULATED if simulated else plain_tiling(rows, n, _sms(x.device)) if plain else DEFAULT
    if simulated and tiling.cluster > 1:
        raise ValueError(f"{name}: {tiling}: the simulator has no clusters; give cluster 1")
    kernel = kernel_of(experts, n, k, dtype_name(out_dtype), form, tiling, x.device)
    kernel(
        out, x, w.view(experts, n, k), x_scales, w_scales.view(experts, *w_scales.shape[w.dim() - 2 :]), counts, offsets
    )
    return out


def quantise_weights(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise matrices to float8_e4m3fn with a scale per block of 128 x 128 elements. In plain torch; see also the kernel
    `swiglu.quantise_matrices`.

    Args:
        w: […, n, k].

    Returns:
        (q, scales): q has the shape of `w`, scales is float32 […, ceil(n / 128), ceil(k / 128)]; q times its scale is about
        `w`.
    """
    *head, n, k = w.shape
    blocks = -(-n // BLOCK), -(-k // BLOCK)
    padded = torch.nn.functional.pad(w.contiguous().float(), (0, blocks[1] * BLOCK - k, 0, blocks[0] * BLOCK - n))
    padded = padded.view(*head, blocks[0], BLOCK, blocks[1], BLOCK)
    amax = padded.abs().amax((-3, -1), keepdim=True).clamp(min=SMALLEST_AMAX)
    largest = torch.full_like(amax, FP8_MAX)
    q = (padded * (largest / amax)).to(SCALED).view(*head, blocks[0] * BLOCK, blocks[1] * BLOCK)
    return q[..., :n, :k].contiguous(), (amax / largest).view(*head, *blocks)


def dequantise_weights(q: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Invert `quantise_weights`, up to rounding.

    Args:
        q, scales: results of `quantise_weights`.
        dtype: dtype of the result.
    """
    factors = scales.repeat_interleave(BLOCK, -2)[..., : q.shape[-2], :].repeat_interleave(BLOCK, -1)[
        ..., : q.shape[-1]
    ]
    return (q.float() * factors).to(dtype)
