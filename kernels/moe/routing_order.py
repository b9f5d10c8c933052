"""The steps of a routing plan that numbers rows by the first of their experts, see `Sizes.ordered` of routing_steps.py."""

import tilelang.language as T

import tilescale_net as tsn
from tilescale_net.kernels.moe.routing_numbers import add_begins, add_blocks


@tsn.macro
def find_first(s, shared, key: T.Ref, cell):
    """keys[2, cell] = the first of the experts that its token has at the rank whose bin `key` is; -1 where it has none.

    By a thread for each cell; `key` is -1 but for the first of a token's cells at a rank.
    """
    K, local = s.top_k, s.local
    least = T.alloc_var("int32")
    least = -1
    if key >= 0:
        least = shared.keys[0, cell]
        for q in T.serial(K):
            other = shared.keys[0, cell - cell % K + q]
            if other >= 0 and other // local == key - s.experts:
                least = T.min(least, other)
    shared.keys[2, cell] = least


@tsn.macro
def order_rows(s, mem, shared, firsts, part: T.Ref, mine: T.Ref, block, thread):
    """Number the rows to each rank by the first of their experts there, then by token: places[2, …].

    Rows of the first experts are then sent first, so that whole tiles of them are there while others are on their way.

    Args:
        firsts: int32 [experts] of shared memory.
    """
    threads, local = s.threads, s.local
    n = T.alloc_var("int32")
    for i in T.serial((s.experts + threads - 1) // threads):
        e = i * threads + thread
        if e < s.experts:
            n = 0
            add_blocks(s, n, mem.partial, s.firsts + e, s.blocks)
            firsts[e] = n
    T.sync_threads()
    for i in T.serial((s.experts + threads - 1) // threads):
        e = i * threads + thread
        if e < s.experts:
            n = 0
            for o in T.serial(e % local):
                n = n + firsts[e - e % local + o]
            add_blocks(s, n, mem.partial, s.firsts + e, block)
            shared.before[s.parts, s.firsts + e] = n
    T.sync_threads()
    for i in T.serial((s.cells + threads - 1) // threads):
        p = i * threads + thread
        if p < mine * s.top_k:
            add_begins(s, 2, shared, part, p)


def number(s, place, numbers, *at):
    """The number of a row whose record travels at `place`: records go by token, one part of each block."""
    return numbers[at] if s.ordered else place
