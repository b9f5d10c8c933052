"""Copies of runs of vectors through registers, whose loads do not wait for the stores before them.

Stores to a peer leave at the rate of the links, and loads that a thread issues behind them come late. So it loads the
next rows before it stores the loaded ones: while these leave, the next ones come. Each warp has one run, so that all
links are in use from beginning to end, and what stays on this PE holds up nothing that leaves.
"""

import tilelang.language as T

import tilescale_net as tsn

from .sum_of_peers import VECTOR_BYTES

WORDS = VECTOR_BYTES // 4
UNROLL = 8  # rows of a tile: vectors that each lane loads at a time
LANES = 32


@tsn.macro
def load_tile(tile, source, at, limit, unroll):
    """tile[u] = source[at + u * LANES], below `limit`."""
    for u in T.unroll(unroll):
        if at + u * LANES < limit:
            for v in T.vectorized(WORDS):
                tile[u, v] = source[at + u * LANES, v]


@tsn.macro
def store_tile(target, at, limit, tile, unroll):
    """The reverse of `load_tile`."""
    for u in T.unroll(unroll):
        if at + u * LANES < limit:
            for v in T.vectorized(WORDS):
                target[at + u * LANES, v] = tile[u, v]


@tsn.macro
def stream(target, target_first, source, source_first, size, thread, step, unroll):
    """target[target_first + i] = source[source_first + i] for i in [0, size); by some warps.

    Args:
        target, source: [rows, WORDS] of int32.
        size: int64; equal for all threads of a warp.
        thread: place of this thread among those of the warps.
        step: how many threads these are.
        unroll: vectors that a thread loads before it stores those before.
    """
    even, odd = T.alloc_local((unroll, WORDS), "int32"), T.alloc_local((unroll, WORDS), "int32")
    i = T.alloc_var("int64")
    i = thread // LANES * (LANES * unroll) + thread % LANES
    load_tile(even, source, source_first + i, source_first + size, unroll)
    while i < size:
        load_tile(odd, source, source_first + i + step * unroll, source_first + size, unroll)
        store_tile(target, target_first + i, target_first + size, even, unroll)
        i += step * unroll
        load_tile(even, source, source_first + i + step * unroll, source_first + size, unroll)
        store_tile(target, target_first + i, target_first + size, odd, unroll)
        i += step * unroll
