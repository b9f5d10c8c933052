"""Kernels as in seeded_bugs.py, whose bugs lie between lanes of a warp, or behind a word that orders nothing."""

import tilelang.language as T

import tilescale_net.language as N
from tests.simulator.seeded_bugs import M, bug, receive, take


@bug()
def fence_of_one_lane(right, x, y, flag, out, pe, block, tx, n):
    if tx < 32:
        N.put_warp(y[0, :], x[0, :], pe)
        if right:
            T.sync_warp()
        if tx == 0:
            N.fence(pe)
            N.signal(flag[0], 1, pe)
    receive(out, y, flag, tx)


@bug()
def one_lane_waits(right, x, y, flag, out, pe, block, tx, n):
    N.put_signal_block(y[0, :], x[0, :], pe, flag[0], 1)
    if tx < 32:
        if tx == 0:
            N.wait(flag[0], "ge", 1)
        if right:
            T.sync_warp()
        for i in T.serial(T.ceildiv(M, 32)):
            if i * 32 + tx < M:
                out[0, i * 32 + tx] = y[0, i * 32 + tx]


@bug()
def counter_in_the_heap(right, x, y, flag, out, pe, block, tx, n):
    """A counter that other ranks leave alone orders no thread behind their puts."""
    N.put_signal_block(y[0, :], x[0, :], pe, flag[0], 1)
    if tx == 0:
        T.atomic_add(flag[2], T.uint64(1))
    if right:
        N.wait_block(flag[0], "ge", 1)
    T.sync_threads()
    take(out, 0, y, 0, tx)


@bug(own=True)
def read_by_other_lanes(right, x, y, flag, out, pe, block, tx, n):
    """One lane signals for all that they have read, before the place is written again."""
    shared = T.alloc_shared((4,), "float32")
    read = T.alloc_barrier([1])
    if tx == 0:
        shared[0] = x[0, 0]
    T.sync_threads()
    if tx >= 32 and tx < 64:
        out[0, tx] = shared[0]
        if right:
            T.sync_warp()
        if tx == 32:
            T.barrier_arrive(read[0])
    elif tx == 0:
        T.barrier_wait(read[0], 0)
        shared[0] = x[0, 1]
    T.sync_threads()
    take(out, 0, x, 0, tx)


@bug()
def other_word(right, x, y, flag, out, pe, block, tx, n):
    """A word that the sender changes by an atomic operation passes on all that the sender knew, another one nothing."""
    N.put_block(y[0, :], x[0, :], pe)
    T.sync_threads()
    if tx == 0:
        N.quiet(pe)  # no fence orders atomic operations
        N.atomic_add(flag[3], 1, pe)
        N.signal(flag[4], 1, pe)
        if right:
            while N.ld(flag[3], "acquire") < T.uint64(1):
                pass
        else:
            T.atomic_add(flag[5], T.uint64(1))
    T.sync_threads()
    take(out, 0, y, 0, tx)


GOES_ON = {
    fence_of_one_lane: "24", one_lane_waits: "24b", read_by_other_lanes: "24c", counter_in_the_heap: "25", other_word: "25b",
}  # fmt: skip
RULES = (fence_of_one_lane, one_lane_waits, counter_in_the_heap)
