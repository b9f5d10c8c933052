"""Which tile of the experts' products is next, and what a product signals of the others; steps of `matmul_experts`.

Their arguments: `shape`, see `product.Shape`; `at` and `totals`, see `totals.Totals`.
"""

from typing import Any, NamedTuple

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N

from ..fused import product


class Order(NamedTuple):
    """In which order a call takes the tiles of the experts.

    Attributes:
        tickets: int32 [2], tiles that are taken, by the parity of the call. parity: int32.
        begins: int32 [experts + 1], of shared memory, see `count_tiles`.
        totals: int32, see `totals.Totals`.
    """

    tickets: Any
    parity: Any
    begins: Any
    totals: Any


@tsn.macro
def count_tiles(shape, at, totals, heights, begins, thread):
    """begins [experts + 1] = rows of tiles of the experts before each. By all threads of a block.

    Args:
        heights: int32 [experts], for each expert's rows of tiles.
    """
    n = T.alloc_var("int32")
    for i in T.serial(-(-at.local_experts // product.THREADS)):
        e = i * product.THREADS + thread
        if e < at.local_experts:
            # A dispatch that was refused has counts, and no room for their rows.
            n = T.min(totals[at.counts + e], totals[at.offsets + e + 1] - totals[at.offsets + e])
            heights[e] = (n + shape.tile[0] - 1) // shape.tile[0]
    T.sync_threads()
    for i in T.serial(-(-(at.local_experts + 1) // product.THREADS)):
        end = i * product.THREADS + thread
        if end <= at.local_experts:
            n = 0
            for e in T.serial(end):
                n = n + heights[e]
            begins[end] = n
    T.sync_threads()


@tsn.macro
def next_tile(shape, at, backwards, order, chosen, given, taken, tile, turn, thread):
    """tile [3] = expert, row and column of the next tile, which the warps that multiply get too; expert -1: no more.

    By the copying warp. Experts go one by one, in each of them columns, in each column rows; `backwards` from the last one.
    """
    expert = T.alloc_var("int32")
    inside = T.alloc_var("int32")
    height = T.alloc_var("int32")
    T.barrier_wait(taken[turn[0] % 2], ((turn[0] // 2) & 1) ^ 1)
    for i in T.unroll(3):
        tile[i] = -1
    if thread == 0:
        inside = T.atomic_add(order.tickets[order.parity], 1, return_prev=True)
        if inside < order.begins[at.local_experts] * shape.tiles_n:
            if backwards:
                inside = order.begins[at.local_experts] * shape.tiles_n - 1 - inside
            expert = 0
            while inside >= order.begins[expert + 1] * shape.tiles_n:
                expert = expert + 1
            inside = inside - order.begins[expert] * shape.tiles_n
            height = order.begins[expert + 1] - order.begins[expert]
            tile[0] = expert
            tile[1] = order.totals[at.offsets + expert] + inside % height * shape.tile[0]
            tile[2] = inside // height * shape.tile[1]
        for i in T.unroll(3):
            chosen[turn[0] % 2, i] = tile[i]
    for i in T.unroll(3):
        tile[i] = T.shfl_sync(tile[i], 0)
    T.barrier_arrive(given[turn[0] % 2])
    turn[0] = turn[0] + 1


@tsn.macro
def get_tile(chosen, given, taken, tile, turn, thread):
    """tile [3] = the next tile. By the warps that multiply."""
    T.barrier_wait(given[turn[0] % 2], (turn[0] // 2) & 1)
    for i in T.unroll(3):
        tile[i] = chosen[turn[0] % 2, i]
    T.sync_warp()
    if thread % 32 == 0:
        T.barrier_arrive(taken[turn[0] % 2])
    turn[0] = turn[0] + 1


@tsn.macro
def scale(shape, group, total, scales, w_scales, expert, column):
    """As `product.scale`, of a column of the expert's. By warpgroup `group`."""
    for j in T.Parallel(shape.tile[1]):
        scales[group, shape.half + j] = w_scales[expert, T.min(column + j, shape.n - 1)]
    for i, j in T.Parallel(shape.half, shape.tile[1]):
        total[i, j] = total[i, j] * scales[group, i] * scales[group, shape.half + j]


@tsn.macro
def fill_up(shape, at, totals, finished, tiles, thread):
    """Add to the words of tiles that no product of this call finishes what it adds to the others. By a block."""
    begin = T.alloc_var("int32")
    end = T.alloc_var("int32")
    used = T.alloc_var("int32")
    for i in T.serial(-(-tiles // product.THREADS)):
        t = i * product.THREADS + thread
        if t < tiles:
            used = 0
            for e in T.serial(at.local_experts):
                begin = totals[at.offsets + e]
                end = T.min(begin + totals[at.counts + e], totals[at.offsets + e + 1])
                if t * shape.tile[0] >= begin and t * shape.tile[0] < end:
                    used = 1
            if used == 0:
                N.signal(finished[0, t], shape.tiles_n * product.WARPS, N.my_pe(), op="add")
