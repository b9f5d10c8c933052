"""Steps of a persistent matrix product, which kernels put together: which tile is next, who copies, who multiplies.

A block has three warpgroups. One warp of the first takes the next tile from a counter and copies its operands by TMA into
a ring of `stages`; the other two multiply half of the tile's rows each, and their results leave through shared memory
while the ring fills for the next tile. Tiles are taken, not dealt out: a block that starts late, because a kernel that
communicates had its multiprocessor, takes fewer.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N

THREADS = 384
MULTIPLIERS = 256  # of them
WARPS = MULTIPLIERS // 32


@dataclass(frozen=True)
class Shape:
    """Extents of a product and of its tiles, known when its kernel is compiled.

    Attributes:
        parts: products of `rows` rows each, one after the other.
        rows, n, k: of a product.
        tile: rows, columns and depth of a tile; the rows are twice those of a warpgroup.
        stages: of the ring of operands.
        panel: rows of tiles that are walked together, for the sake of the L2 cache.
        columns: that leave at once; they divide those of the tile.
        workers: blocks.
        transposed: the right operand is [n, k].
    """

    parts: int
    rows: int
    n: int
    k: int
    tile: tuple[int, int, int]
    stages: int
    panel: int
    columns: int
    workers: int
    transposed: bool

    @property
    def tiles_m(self) -> int:
        return -(-self.rows // self.tile[0])

    @property
    def tiles_n(self) -> int:
        return -(-self.n // self.tile[1])

    @property
    def total(self) -> int:
        """Tiles of all parts."""
        return self.parts * self.tiles_m * self.tiles_n

    @property
    def half(self) -> int:
        """Rows of a warpgroup."""
        return self.tile[0] // 2

    @property
    def right(self) -> tuple[int, int]:
        """Shape of a tile of the right operand."""
        _, bn, bk = self.tile
        return (bn, bk) if self.transposed else (bk, bn)


class Place(NamedTuple):
    """Where the tile is that a block works on; int32 [1] each, registers of a thread.

    Attributes:
        part: the number of the part, see `Shape`; in a reduce-scatter, how many places behind this PE the owner of the rows is.
        row, column: the first of the tile in the part.
        pe: the PE that has the rows, in an all-gather.
    """

    part: Any
    row: Any
    column: Any
    pe: Any = None


class Scales(NamedTuple):
    """Scales of 8-bit operands, float32.

    Attributes:
        tile: [2, rows of a warpgroup + columns of a tile], shared memory.
        x: of rows of the left operand. w: of columns of the right one.
        gathered: [2, n_pes, rows], of rows of other PEs, where such are gathered.
    """

    tile: Any
    x: Any
    w: Any
    gathered: Any = None


class Ring(NamedTuple):
    """The ring of right operands, through which summands come as well.

    Attributes:
        right: [stages, rows and columns of a tile], shared memory. full, empty: barriers [stages].
    """

    right: Any
    full: Any
    empty: Any


@tsn.macro
def place(shape, tile, part, row, column):
    """part, row, column [1] = those of the number `tile`: panels of rows, in each of them columns, in each of them rows."""
    inside = tile % (shape.tiles_m * shape.tiles_n)
    first = inside // (shape.panel * shape.tiles_n) * shape.panel
    height = T.min(shape.panel, shape.tiles_m - first)
    rest = inside - first * shape.tiles_n
    part[0] = tile // (shape.tiles_m * shape.tiles_n)
    row[0] = (first + rest % height) * shape.tile[0]
    column[0] = rest // height * shape.tile[1]


@tsn.macro
def next_tile(shape, tickets, call, chosen, given, taken, tile, turn, thread):
    """tile [1] = the next tile of this call, which the warps that multiply get too; `shape.total` or more: no more.

    By the copying warp. A call takes one ticket for each tile, and one in vain for each block, so that the counter
    `tickets` (uint64 [1]) goes on from call to call.
    """
    T.barrier_wait(taken[turn[0] % 2], ((turn[0] // 2) & 1) ^ 1)
    tile[0] = 0
    if thread == 0:
        ticket = T.atomic_add(tickets[0], T.uint64(1), return_prev=True)
        tile[0] = T.cast(T.cast(ticket, "int64") - (call - 1) * (shape.total + shape.workers), "int32")
        chosen[turn[0] % 2] = tile[0]
    tile[0] = T.shfl_sync(tile[0], 0)
    T.barrier_arrive(given[turn[0] % 2])
    turn[0] = turn[0] + 1


@tsn.macro
def get_tile(chosen, given, taken, tile, turn, thread):
    """tile [1] = the next tile. By the warps that multiply."""
    T.barrier_wait(given[turn[0] % 2], (turn[0] // 2) & 1)
    tile[0] = chosen[turn[0] % 2]
    T.sync_warp()
    if thread % 32 == 0:
        T.barrier_arrive(taken[turn[0] % 2])
    turn[0] = turn[0] + 1


@tsn.macro
def copy_left(rows, left, stage, half, full):
    """Begin to copy a warpgroup's rows of the left operand. By the copying warp."""
    T.tma_copy(rows, left[stage, half, :, :], barrier=full[stage], leader_scope_threads=32)


@tsn.macro
def copy_right(shape, w, right, stage, full, depth, column):
    """Begin to copy a tile of the right operand. By the copying warp."""
    _, bn, bk = shape.tile
    if shape.transposed:
        T.tma_copy(
            w[column : column + bn, depth : depth + bk],
            right[stage, :, :],
            barrier=full[stage],
            leader_scope_threads=32,
        )
    else:
        T.tma_copy(
            w[depth : depth + bk, column : column + bn],
            right[stage, :, :],
            barrier=full[stage],
            leader_scope_threads=32,
        )


@tsn.macro
def wait_for_all(arrived, chunk, n_pes, call, thread):
    """Wait until arrived[p, chunk] of every other PE p has reached `call`, by a warp; its TMA copies may read what they sent.

    A lane waits for a PE, since a look at a flag takes as long as a step of tensor cores.
    """
    for first in T.serial(-(-n_pes // 32)):
        pe = first * 32 + thread
        if pe < n_pes and pe != N.my_pe():
            N.wait(arrived[pe, chunk], "ge", call, proxy="async")
    T.sync_warp()


@tsn.macro
def copy_summand(shape, wide, summands, half, pe, right, stage, full, row, column):
    """Begin to copy a warpgroup's rows of a tile of summands[half, pe] [rows, n] to where a tile of the right operand would be.

    By the copying warp. `wide`: elements of the right operand that a summand takes the place of; `summands` is [rows, wide *
    n] of its dtype. The rows of a warpgroup may not be more than the summands that the depth of a tile has room for.
    """
    _, bn, bk = shape.tile
    if shape.transposed:
        for c in T.unroll(bn * wide // bk):
            first = column * wide + c * bk
            T.tma_copy(
                summands[half, pe, row : row + shape.half, first : first + bk],
                right[stage, c * shape.half : (c + 1) * shape.half, :],
                barrier=full[stage],
                leader_scope_threads=32,
            )
    else:
        T.tma_copy(
            summands[half, pe, row : row + shape.half, column : column + bn],
            right[stage, 0 : shape.half, :],
            barrier=full[stage],
            leader_scope_threads=32,
        )


def byte(value):
    """The byte of an element of 8 bits, as uint16."""
    return T.cast(T.reinterpret(value, "uint8"), "uint16")


@tsn.macro
def add_summand(shape, wide, dtype, mine, right, total, full, empty, step, thread):
    """total += what `copy_summand` has copied, of `dtype`, where that is `mine`. By a warpgroup that multiplies."""
    stages, bk = shape.stages, shape.tile[2] // wide
    s = step[0] % stages
    T.barrier_wait(full[s], (step[0] // stages) & 1)
    if mine:
        for i, j in T.Parallel(shape.half, shape.tile[1]):
            if wide == 2:
                # Byte by byte: the ring is laid out for operands of a byte.
                total[i, j] += T.cast(
                    T.reinterpret(
                        byte(right[s, j // bk * shape.half + i, j % bk * 2])
                        | byte(right[s, j // bk * shape.half + i, j % bk * 2 + 1]) << T.uint16(8),
                        dtype,
                    ),
                    "float32",
                )
            elif shape.transposed:
                total[i, j] += T.cast(right[s, j // bk * shape.half + i, j % bk], "float32")
            else:
                total[i, j] += T.cast(right[s, i, j], "float32")
    T.sync_warp()
    if thread % 32 == 0:
        T.barrier_arrive(empty[s])
    step[0] = step[0] + 1


@tsn.macro
def multiply(shape, group, left, right, total, full, empty, step, thread):
    """total = the product of warpgroup `group`'s rows of a tile; one step of tensor cores is always under way."""
    stages, depth = shape.stages, -(-shape.k // shape.tile[2])
    for i in T.serial(depth):
        T.barrier_wait(full[step[0] % stages], (step[0] // stages) & 1)
        T.wgmma_gemm(
            left[step[0] % stages, group, :, :], right[step[0] % stages, :, :], total, transpose_B=shape.transposed,
            policy=T.GemmWarpPolicy.FullRow, clear_accum=i == 0,
        )  # fmt: skip
        T.wait_wgmma(1)
        if i > 0:
            if thread % 32 == 0:
                T.barrier_arrive(empty[(step[0] + stages - 1) % stages])
        step[0] = step[0] + 1
    T.wait_wgmma(0)
    if thread % 32 == 0:
        T.barrier_arrive(empty[(step[0] + stages - 1) % stages])
    T.warpgroup_fence_operand(total, num_regs=shape.half * shape.tile[1] // 128)


@tsn.macro
def get_row_scales(rows, shape, group, scales, of_row, row):
    """scales[group, 0 : half] = of_row(each row of warpgroup `group`), of which there are `rows`. By it."""
    for i in T.Parallel(shape.half):
        # Rows and columns outside of the product get some scale: they are never stored.
        scales[group, i] = of_row(T.min(row + group * shape.half + i, rows - 1))


@tsn.macro
def scale(shape, group, total, scales, w_scales, column):
    """total[i, j] *= scales[group, i] * the scale of column j in `w_scales`. By warpgroup `group`.

    All pass through shared memory, since each thread needs those of a quarter of the columns.
    """
    for j in T.Parallel(shape.tile[1]):
        scales[group, shape.half + j] = w_scales[T.min(column + j, shape.n - 1)]
    for i, j in T.Parallel(shape.half, shape.tile[1]):
        total[i, j] = total[i, j] * scales[group, i] * scales[group, shape.half + j]


@tsn.macro
def store(shape, group, total, result, out, part, row, column):
    """out[part, …] = the sums of warpgroup `group`; they are on their way when this returns, see `T.tma_store_wait`."""
    columns = shape.columns
    for h in T.unroll(shape.tile[1] // columns):
        T.tma_store_wait(0)
        T.copy(total[:, h * columns : (h + 1) * columns], result[group, :, :])
        T.fence_proxy_async()
        T.tma_copy(
            result[group, :, :],
            out[
                part, row + group * shape.half : row + (group + 1) * shape.half,
                column + h * columns : column + (h + 1) * columns,
            ],
        )  # fmt: skip
