"""The steps of the routing plan that count choices and number them, in the order of tokens at any timing.

A choice's number is the sum of four: how many of its bin (an expert, or "some choice at rank r") come before it in the part of
its warp, in the parts of the warps before, in the blocks before, and where the bin begins. The first is found when the choices
are counted: lanes of a warp look at 32 choices at a time, and at which of them are of the same bin.
"""

from typing import Any, NamedTuple

import tilelang.language as T

import tilescale_net as tsn
from tilescale_net.kernels.moe.wire_layout import BAD_EXPERT, NO_FAULT

ALL_LANES = 0xFFFFFFFF
AT_ONCE = 24  # words that a thread loads before it adds the first, at most


class Memory(NamedTuple):
    """The tensors of a routing plan in the making; int32 where no type is named.

    Attributes:
        topk_idx: [rows, top_k] of int32 or int64. topk_weights: float32 [rows, top_k].
        active: [ranks], 0 for a rank that is left out.
        partial: [blocks, words], the counts of each block, see Counts; with those by first experts where rows are ordered.
        counts_out: [words], counts_in: [ranks, words], symmetric, see Counts. counts_ready: uint64 [ranks], symmetric.
        records_out, records_in: [ranks, max_tokens, record_words], symmetric. records_ready: uint64 [ranks], symmetric.
        status: int64, see STATUS_WORDS.
        send_token, send_row, token_slot, records, totals, row_index, row_weight: the plan, see RoutingPlan.
    """

    topk_idx: Any
    topk_weights: Any
    active: Any
    partial: Any
    counts_out: Any
    counts_in: Any
    counts_ready: Any
    records_out: Any
    records_in: Any
    records_ready: Any
    status: Any
    send_token: Any
    send_row: Any
    token_slot: Any
    records: Any
    totals: Any
    row_index: Any
    row_weight: Any


class Shared(NamedTuple):
    """Shared memory of a block that plans; int32.

    Attributes:
        keys: [2, choices]: the expert of each choice; the bin of its rank where it is the first there; else -1. Where rows are
            ordered, [3, choices]: then the first of its experts there.
        places: alike, the numbers of the choices.
        before: [parts + 1, counts], see `number_in_block`.
        padded, offsets: [experts]. needs: [ranks]; see `align_experts`.
        alive: [ranks], `active`, or zeros where the dispatch is refused.
        seen: [1], a choice that is no expert.
    """

    keys: Any
    places: Any
    before: Any
    padded: Any
    offsets: Any
    needs: Any
    alive: Any
    seen: Any


def place_of(s, row, key):
    """Where the bin of keys[row] stands among all counts."""
    return key + T.if_then_else(row == 2, s.firsts, 0) if s.ordered else key


@tsn.macro
def number_in_block(s, shared, part: T.Ref, thread):
    """Number the block's choices: places = how many of the same bin come before each in the part of its warp; before[w] =
    how many in the parts of the warps before w; before[parts] = how many in all.

    `part` becomes the groups of 32 choices of a warp's part.
    """
    cell = T.alloc_var("int32")
    key = T.alloc_var("int32")
    same = T.alloc_var("uint32")
    n = T.alloc_var("int32")
    warp, lane, width = thread // 32, thread % 32, s.width
    for i in T.serial(((s.parts + 1) * width + s.threads - 1) // s.threads):
        if i * s.threads + thread < (s.parts + 1) * width:
            shared.before[(i * s.threads + thread) // width, (i * s.threads + thread) % width] = 0
    T.sync_threads()
    if warp < s.parts:
        for i in T.serial(part):
            cell = (warp * part + i) * 32 + lane
            for row in T.unroll(2 + s.ordered):
                key = -1
                if cell < s.cells:
                    key = shared.keys[row, cell]
                same = T.call_extern("uint32", "__match_any_sync", T.uint32(ALL_LANES), key)
                if key >= 0:
                    n = shared.before[warp, place_of(s, row, key)] + T.cast(
                        T.popcount(same & ((T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1))), "int32"
                    )
                    shared.places[row, cell] = n
                T.sync_warp()
                if key >= 0 and (same >> T.cast(lane, "uint32")) == T.uint32(1):  # the last of its bin here
                    shared.before[warp, place_of(s, row, key)] = n + 1
                T.sync_warp()
    T.sync_threads()
    for i in T.serial((width + s.threads - 1) // s.threads):
        bin = i * s.threads + thread
        if bin < width:
            n = 0
            for w in T.serial(s.parts):
                key = shared.before[w, bin]
                shared.before[w, bin] = n
                n = n + key
            shared.before[s.parts, bin] = n


@tsn.macro
def count_part(s, mem, shared, any_bad: T.Ref, block, thread):
    """Write the block's counts, and its fault, to its row of `partial`; a thread those that it has added up."""
    C, threads = s.counts, s.threads
    for i in T.serial((s.width + threads - 1) // threads):
        bin = i * threads + thread
        if bin < s.width and (bin < C.bins or bin >= s.firsts):
            mem.partial[block, bin] = shared.before[s.parts, bin]
    if thread == 0:
        mem.partial[block, C.code] = T.if_then_else(any_bad != 0, BAD_EXPERT, NO_FAULT)
        mem.partial[block, C.value] = T.if_then_else(any_bad != 0, shared.seen[0], 0)
    T.sync_threads()


@tsn.macro
def add_blocks(s, total: T.Ref, partial, bin, blocks):
    """total += what the first `blocks` blocks counted of a bin; several loads are under way before the first is added."""
    at_once = min(s.blocks, AT_ONCE)
    some = T.alloc_local((at_once,), "int32")
    for i in T.serial((blocks + at_once - 1) // at_once):
        for b in T.unroll(at_once):
            some[b] = 0
            if i * at_once + b < blocks:
                some[b] = partial[i * at_once + b, bin]
        for b in T.unroll(at_once):
            total = total + some[b]


@tsn.macro
def first_fault(s, partial, code: T.Ref, value: T.Ref):
    """code, value = what the first block found that found something wrong, unless `code` is a fault already."""
    at_once = min(s.blocks, AT_ONCE)
    codes, values = T.alloc_local((at_once,), "int32"), T.alloc_local((at_once,), "int32")
    for i in T.serial((s.blocks + at_once - 1) // at_once):
        for b in T.unroll(at_once):
            codes[b] = NO_FAULT
            if i * at_once + b < s.blocks:
                codes[b] = partial[i * at_once + b, s.counts.code]
                values[b] = partial[i * at_once + b, s.counts.value]
        for b in T.unroll(at_once):
            if code == NO_FAULT and codes[b] != NO_FAULT:
                code = codes[b]
                value = values[b]


@tsn.macro
def align_experts(s, mem, shared, thread):
    """padded = the rows of each expert on all ranks together, up to the next multiple of the alignment; offsets = where the
    expert's begin among those of its rank; need = the rows of each rank."""
    n = T.alloc_var("int32")
    up = T.alloc_var("int32")
    run = T.alloc_var("int32")
    warp, lane, warps = thread // 32, thread % 32, s.threads // 32
    for i in T.serial((s.experts + s.threads - 1) // s.threads):
        e = i * s.threads + thread
        if e < s.experts:
            n = 0
            for r in T.serial(s.ranks):
                if shared.alive[r] != 0:
                    n = n + mem.counts_in[r, e]
            shared.padded[e] = (n + s.alignment - 1) // s.alignment * s.alignment
    T.sync_threads()
    for i in T.serial((s.ranks + warps - 1) // warps):
        rank = i * warps + warp
        if rank < s.ranks:
            run = 0
            for c in T.serial((s.local + 31) // 32):
                e = c * 32 + lane
                n = 0
                if e < s.local:
                    n = shared.padded[rank * s.local + e]
                for step in T.unroll(5):
                    up = T.shfl_up(n, 1 << step)
                    if lane >= 1 << step:
                        n = n + up
                if e < s.local:
                    shared.offsets[rank * s.local + e] = run + n - shared.padded[rank * s.local + e]
                run = run + T.shfl_sync(n, 31)
            if lane == 0:
                shared.needs[rank] = run
    T.sync_threads()


@tsn.macro
def add_begins(s, row, shared, part: T.Ref, cell):
    """Add to a choice's number in the part of its warp where that part begins in its bin, and where the block's do."""
    if shared.keys[row, cell] >= 0:
        shared.places[row, cell] = (
            shared.places[row, cell]
            + shared.before[s.parts, place_of(s, row, shared.keys[row, cell])]
            + shared.before[cell // 32 // part, place_of(s, row, shared.keys[row, cell])]
        )


@tsn.macro
def number_choices(s, mem, shared, part: T.Ref, mine: T.Ref, me, block, thread):
    """places = the choices' rows at the target, and their places among the rows to that rank; before[parts] = where the
    block's begin in each bin. A thread numbers choices that it alone looks at until the block meets again."""
    C, experts, threads = s.counts, s.experts, s.threads
    n = T.alloc_var("int32")
    for i in T.serial((C.bins + threads - 1) // threads):
        bin = i * threads + thread
        if bin < C.bins:
            n = 0
            add_blocks(s, n, mem.partial, bin, block)
            if bin < experts:
                for r in T.serial(me):
                    if shared.alive[r] != 0:
                        n = n + mem.counts_in[r, bin]
                n = n + shared.offsets[bin]
            shared.before[s.parts, bin] = n
    T.sync_threads()
    for i in T.serial((s.cells + threads - 1) // threads):
        p = i * threads + thread
        if p < mine * s.top_k:
            for row in T.unroll(2):
                add_begins(s, row, shared, part, p)
