"""The steps of a routing plan that numbers rows by the first of their experts, see `Sizes.ordered` of routing_steps.py."""

import tilelang.language as T

import tilescale_net as tsn


@tsn.macro
def find_first(s, keys, key: T.Ref, cell):
    """keys[2, cell] = the first of the experts that its token has at the rank whose bin `key` is; -1 where it has none.

    By a thread for each cell; `key` is -1 but for the first of a token's cells at a rank.
    """
    K, local = s.top_k, s.local
    least = T.alloc_var("int32")
    least = -1
    if key >= 0:
        least = keys[0, cell]
        for q in T.serial(K):
            other = keys[0, cell - cell % K + q]
            if other >= 0 and other // local == key - s.experts:
                least = T.min(least, other)
    keys[2, cell] = least


@tsn.macro
def count_firsts(s, keys, four, partial, mine: T.Ref, block, thread):
    """Count the block's rows by the first of their experts, behind its other counts in `partial`."""
    threads = s.threads
    n = T.alloc_var("int32")
    for i in T.serial((s.experts + threads - 1) // threads):
        e = i * threads + thread
        if e < s.experts:
            n = 0
            for q in T.serial((mine * s.top_k + 3) // 4):
                for v in T.vectorized(4):
                    four[v] = keys[2, q * 4 + v]
                for v in T.unroll(4):
                    n = n + T.if_then_else(four[v] == e, 1, 0)
            partial[block, s.firsts + e] = n


@tsn.macro
def order_rows(s, keys, four, places, partial, firsts, mine: T.Ref, block, thread):
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
            for b in T.serial(s.blocks):
                n = n + partial[b, s.firsts + e]
            firsts[e] = n
    T.sync_threads()
    for i in T.serial((s.experts + threads - 1) // threads):
        e = i * threads + thread
        if e < s.experts:
            n = 0
            for o in T.serial(e % local):
                n = n + firsts[e - e % local + o]
            for b in T.serial(block):
                n = n + partial[b, s.firsts + e]
            for q in T.serial((mine * s.top_k + 3) // 4):
                for v in T.vectorized(4):
                    four[v] = keys[2, q * 4 + v]
                for v in T.unroll(4):
                    if four[v] == e:
                        places[2, q * 4 + v] = n
                        n = n + 1


def number(s, place, numbers, *at):
    """The number of a row whose record travels at `place`: records go by token, one part of each block."""
    return numbers[at] if s.ordered else place
