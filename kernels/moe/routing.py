"""The routing plan of a dispatch in throughput mode: the source and target of each row, agreed before any row moves.

Each rank counts its choices per expert and its rows per rank, and puts these counts to every peer. From all counts each
rank computes the row at the target of each of its rows: by expert, then by source rank, then by token. So rows need no
second copy, their order does not depend on timing, and every rank rejects a dispatch that does not fit somewhere before
anything is sent.

Blocks share the tokens in consecutive parts, and warps of a block its choices. A choice's number is the sum of four:
the start of its bin (an expert, or "some choice at rank r"), and the choices of this bin in earlier blocks, in earlier
warps of the block, and earlier in the part of its warp. Warps find the last one while they count: lanes look at 32
choices at a time, and at equal bins among them.

`plan_nodes` runs after `plan_routing` if rows cross the network once per node. A block counts the rows to a node, and
sends this rank's forwarder there, for each of them, its offset among the rows to each rank of that node and its first
expert-major row there. Forwarders then store the received lists. The next call's plan waits for the counts of every
rank before it overwrites the buffers.
"""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.collective import EXPLICIT_SYNC, STATUS_WORDS, Nodes, report
from tilescale_net.kernels.moe.handshake import end_phase
from tilescale_net.kernels.moe.layout import (
    BAD_EXPERT,
    NO_FAULT,
    NO_ROOM,
    CountsLayout,
    NodeLayout,
    NodePlanOffsets,
    PlanOffsets,
    Route,
    align4,
    record_words,
)
from tilescale_net.kernels.moe.row_ops import int_vars, local_vectors, shared_ints

ALL_LANES = 0xFFFFFFFF
AT_ONCE = 24  # words that a thread loads before it adds the first, at most


# The tensors of plan_routing.
PlanTensors = namedtuple(
    "PlanTensors",
    "topk_idx topk_weights active partial counts_out counts_in counts_ready records_out records_in records_ready "
    "status send_token send_row token_slot records totals row_index row_weight",
)


class PlanShared(NamedTuple):
    """Shared memory of a block that plans; int32.

    Attributes:
        keys: [2, choices]: the expert of each choice; the bin of its rank where it is the first there; else -1. Where rows are
            ordered, [3, choices]: then the first of its experts there.
        numbers: alike, the numbers of the choices.
        before: [parts + 1, counts], see `number_in_block`.
        padded, offsets: [experts]. needs: [ranks]; see `align_experts`.
        alive: [ranks], `active`, or zeros if the dispatch is rejected.
        seen: [1], a choice that is no expert.
    """

    keys: Any
    numbers: Any
    before: Any
    padded: Any
    offsets: Any
    needs: Any
    alive: Any
    seen: Any


def bin_of(s: Any, row: Any, key: Any) -> Any:
    """Index of the bin of keys[row] among all counts."""
    return key + T.if_then_else(row == 2, s.firsts, 0) if s.ordered else key


@tsn.macro
def number_in_block(s, shared, part: T.Ref, thread):
    """Number the block's choices: numbers = choices of the same bin that precede each in its warp's part; before[w] =
    the count of earlier warps' parts; before[parts] = the total. `part` becomes the number of 32-choice groups per
    warp."""
    cell, key = int_vars(2)
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
                    n = shared.before[warp, bin_of(s, row, key)] + T.cast(
                        T.popcount(same & ((T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1))), "int32"
                    )
                    shared.numbers[row, cell] = n
                T.sync_warp()
                if key >= 0 and (same >> T.cast(lane, "uint32")) == T.uint32(1):  # the last of its bin here
                    shared.before[warp, bin_of(s, row, key)] = n + 1
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
    """Write the block's counts, and its fault, to its row of `partial`; a thread writes its own sums."""
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
    """total += a bin's counts of the first `blocks` blocks; several loads are in flight before the first is added."""
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
    """code, value = the fault of the first block that found one, unless `code` is a fault already."""
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
    """padded = the rows of each expert on all ranks together, rounded up to the alignment; offsets = the
    expert's first row in its rank; need = the rows of each rank."""
    n, up, run = int_vars(3)
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
    """Add the start of the warp's part within its bin, and of the block's, to the number of a choice."""
    if shared.keys[row, cell] >= 0:
        shared.numbers[row, cell] = (
            shared.numbers[row, cell]
            + shared.before[s.parts, bin_of(s, row, shared.keys[row, cell])]
            + shared.before[cell // 32 // part, bin_of(s, row, shared.keys[row, cell])]
        )


@tsn.macro
def number_choices(s, mem, shared, part: T.Ref, mine: T.Ref, me, block, thread):
    """numbers = the choices' rows at the target, and their indices among the rows to that rank; before[parts] = the block's
    start in each bin. No other thread reads a thread's choices before the block synchronises."""
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


@tsn.macro
def find_first(s, shared, key: T.Ref, cell):
    """keys[2, cell] = the first of its token's experts at the rank whose bin `key` is; -1 for none. One thread per
    cell; `key` is -1 except in the first of a token's cells at a rank."""
    K, local = s.top_k, s.local
    least = T.alloc_var("int32", -1)
    if key >= 0:
        least = shared.keys[0, cell]
        for q in T.serial(K):
            other = shared.keys[0, cell - cell % K + q]
            if other >= 0 and other // local == key - s.experts:
                least = T.min(least, other)
    shared.keys[2, cell] = least


@tsn.macro
def order_rows(s, mem, shared, firsts, part: T.Ref, mine: T.Ref, block, thread):
    """Number the rows to each rank by their first expert there, then by token: numbers[2, …]. Rows of the first experts
    are then sent first, so their tiles are complete while others are in flight. `firsts`: int32 [experts] of shared
    memory."""
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


def number(s: Any, index: Any, numbers: Any, *at: Any) -> Any:
    """The number of the row whose record is at `index`: records are sent by token, in parts of blocks."""
    return numbers[at] if s.ordered else index


WEIGHTS = 32  # that a thread holds at once
BLOCK_SHARED = 227 * 1024  # bytes of shared memory that a block may use


def fixed_bytes(experts: int, ranks: int, ordered: bool) -> int:
    """Shared memory of a planning block, without its choices and their counts."""
    return 4 * ((2 + ordered) * experts + 2 * ranks + 1) + 1024


def bytes_of_choice(ordered: bool) -> int:
    return 8 * (2 + ordered)


def width_of(experts: int, ranks: int, ordered: bool) -> int:
    """Counts of a block."""
    return CountsLayout(experts, ranks).words + (experts if ordered else 0)


@dataclass(frozen=True)
class PlanConfig:
    """Compile-time sizes; see plan_routing."""

    ranks: int
    experts: int
    top_k: int
    max_tokens: int
    capacity: int
    alignment: int
    blocks: int
    threads: int
    index_dtype: str
    absent: int
    node_size: int | tuple[int, ...]
    ordered: bool = False

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return self.experts // self.ranks

    @property
    def once_per_node(self) -> bool:
        return self.node_size != 0

    @property
    def of(self) -> Nodes:
        return Nodes.of(self.ranks, self.node_size)

    @property
    def counts(self) -> CountsLayout:
        return CountsLayout(self.experts, self.ranks)

    @property
    def totals(self) -> PlanOffsets:
        return PlanOffsets(self.ranks, self.local)

    @property
    def firsts(self) -> int:
        """Start of a block's counts of rows by first expert, behind its other counts."""
        return self.counts.words

    @property
    def part(self) -> int:
        """Tokens of a block at most."""
        return -(-self.max_tokens // self.blocks)

    @property
    def cells(self) -> int:
        """Choices of a block at most."""
        return align4(self.part * self.top_k)

    @property
    def width(self) -> int:
        return width_of(self.experts, self.ranks, self.ordered)

    @property
    def parts(self) -> int:
        """Warps that number a block's choices, each with its own counts, as far as shared memory permits."""
        left = BLOCK_SHARED - fixed_bytes(self.experts, self.ranks, self.ordered)
        left -= self.cells * bytes_of_choice(self.ordered)
        return max(1, min(self.threads // 32, left // (4 * self.width) - 1))


@tsn.macro
def read_choices(s, mem, shared, first, mine: T.Ref, bad: T.Ref, any_bad: T.Ref, thread):
    """Fill `keys` from the choices of the block's `mine` tokens from token `first` on."""
    K, threads, experts, local = s.top_k, s.threads, s.experts, s.local
    at_once = min(8, -(-s.cells // threads))
    choice = T.alloc_local((at_once,), s.index_dtype)
    counts = T.alloc_local((at_once,), "int32")  # not 0: its rank is not left out
    bad = 0
    # A thread's loads are all in flight before the first is used.
    for i in T.serial((s.cells + threads * at_once - 1) // (threads * at_once)):
        for u in T.unroll(at_once):
            p = (i * at_once + u) * threads + thread
            choice[u] = -1
            if p < mine * K:
                choice[u] = mem.topk_idx[first + p // K, p % K]
        for u in T.unroll(at_once):
            counts[u] = 0
            if choice[u] < -1 or choice[u] >= experts:
                bad = 1
                shared.seen[0] = T.cast(choice[u], "int32")  # any of them will do
            elif choice[u] >= 0:
                counts[u] = mem.active[T.cast(choice[u], "int32") // local]
        for u in T.unroll(at_once):
            p = (i * at_once + u) * threads + thread
            if p < s.cells:
                shared.keys[0, p] = T.if_then_else(counts[u] != 0, T.cast(choice[u], "int32"), -1)
    any_bad = T.syncthreads_or(bad)
    for i in T.serial((s.cells + threads - 1) // threads):
        p = i * threads + thread
        if p < s.cells:
            of_rank = T.alloc_var("int32", -1)
            if shared.keys[0, p] >= 0:
                of_rank = experts + shared.keys[0, p] // local
                for q in T.serial(p % K):
                    if (
                        shared.keys[0, p - p % K + q] >= 0
                        and shared.keys[0, p - p % K + q] // local == shared.keys[0, p] // local
                    ):
                        of_rank = -1
            shared.keys[1, p] = of_rank
            if s.ordered:
                find_first(s, shared, of_rank, p)
    T.sync_threads()


@tsn.macro
def exchange_counts(s, mem, shared, fault, fault_value, me, call: T.Ref, block, thread, warp):
    """Block 0 sends the sums over the blocks to every rank; all blocks wait for the sums of every rank."""
    R, C, threads, blocks, warps = s.ranks, s.counts, s.threads, s.blocks, s.threads // 32
    if block == 0:
        for i in T.serial((C.bins + threads - 1) // threads):
            bin = i * threads + thread
            if bin < C.bins:
                n = T.alloc_var("int32", 0)
                add_blocks(s, n, mem.partial, bin, blocks)
                mem.counts_out[bin] = n
        if thread == threads - 1:  # the last one has the fewest counts to add
            code = T.alloc_var("int32", fault)
            value = T.alloc_var("int32", fault_value)
            first_fault(s, mem.partial, code, value)
            mem.counts_out[C.code] = code
            mem.counts_out[C.value] = value
        T.sync_threads()
        for i in T.serial((R + warps - 1) // warps):
            pe = i * warps + warp
            if pe < R:
                if mem.active[pe] != 0:
                    N.put_signal_warp(
                        mem.counts_in[me, 0], mem.counts_out[0], pe, mem.counts_ready[me], call, count=C.words
                    )
    if thread < R:
        shared.alive[thread] = mem.active[thread]
        if mem.active[thread] != 0:
            N.wait(mem.counts_ready[thread], "ge", call)
    T.sync_threads()


@tsn.macro
def reject_or_continue(s, mem, shared, mine: T.Ref, code: T.Ref, need: T.Ref, stop: T.Ref, block, thread):
    """Reject a dispatch with a fault or without room on some rank; all ranks decide alike."""
    code = NO_FAULT
    need = 0
    if thread < s.ranks:
        need = shared.needs[thread]
        if need > s.capacity:
            code = NO_ROOM
        if shared.alive[thread] != 0:
            if mem.counts_in[thread, s.counts.code] != NO_FAULT:
                code = mem.counts_in[thread, s.counts.code]
                need = mem.counts_in[thread, s.counts.value]
    stop = T.syncthreads_or(code)
    if stop != 0:
        mine = 0
        if thread < s.ranks:
            shared.alive[thread] = 0
            if block == 0 and code != NO_FAULT:
                report(mem.status, code, thread, need)
    T.sync_threads()


@tsn.macro
def write_records(s, mem, shared, first, mine: T.Ref, thread):
    """Write this rank's own plan of its rows, and their records."""
    K, threads = s.top_k, s.threads
    iterations = -(-s.cells // threads)
    at_once = max(1, min(iterations, WEIGHTS // K))
    weight = T.alloc_local((at_once * K if K <= WEIGHTS else 1,), "float32")
    for i in T.serial((iterations + at_once - 1) // at_once):
        # The weights are all in flight before the first is stored.
        if K <= WEIGHTS:
            for u in T.unroll(at_once):
                p = (i * at_once + u) * threads + thread
                if p < mine * K:
                    if shared.keys[1, p] >= 0:
                        for k in T.unroll(K):
                            weight[u * K + k] = mem.topk_weights[first + p // K, k]
        for u in T.unroll(at_once):
            p = (i * at_once + u) * threads + thread
            if p < mine * K:
                if shared.keys[1, p] >= 0:
                    write_record(s, mem, shared, first, p, weight, u * K)
    T.sync_threads()


@tsn.macro
def write_record(s, mem, shared, first, p, weight, at):
    """Write the record of the row of choice `p`; its token's weights are in `weight` from `at` on, for up to
    WEIGHTS."""
    K, local, vectors = s.top_k, s.local, record_words(s.top_k) // 4
    pe = shared.keys[1, p] - s.experts
    j = shared.numbers[1, p]
    t = first + p // K
    mem.token_slot[t, pe] = number(s, j, shared.numbers, 2, p)
    mem.send_token[pe, number(s, j, shared.numbers, 2, p)] = t
    mem.send_row[pe, number(s, j, shared.numbers, 2, p)] = shared.numbers[0, p]
    words = T.alloc_local((4,), "int32")
    # Each thread writes one of consecutive records: every store takes a sector of its own, so few stores are better.
    for v in T.unroll(vectors) if K <= WEIGHTS else T.serial(vectors):
        for i in T.unroll(4):
            if v * 4 + i < K:
                cell = p - p % K + v * 4 + i
                here = shared.keys[0, cell] >= 0 and shared.keys[0, cell] // local == pe
                words[i] = T.if_then_else(here, shared.numbers[0, cell], -1)
            elif v * 4 + i < 2 * K:
                value = weight[at + v * 4 + i - K] if K <= WEIGHTS else mem.topk_weights[t, v * 4 + i - K]
                words[i] = T.reinterpret(value, "int32")
            elif v * 4 + i == 2 * K:
                words[i] = t
            else:
                words[i] = shared.numbers[2, p] if s.ordered else 0
        for i in T.vectorized(4):
            mem.records_out[pe, j, v * 4 + i] = words[i]


@tsn.macro
def send_records(s, mem, shared, me, stop: T.Ref, block, thread):
    """Put the block's records to every rank, all threads together, then signal them to all."""
    at, n = int_vars(2)
    for hop in T.serial(s.ranks):
        pe = (me + 1 + hop) % s.ranks  # this rank's own last, while the others' are in flight
        if mem.active[pe] != 0:
            at = T.min(shared.before[s.parts, s.experts + pe], s.max_tokens - 1)
            n = T.if_then_else(stop != 0, 0, mem.partial[block, s.experts + pe])
            N.put_block(mem.records_in[me, at, 0], mem.records_out[pe, at, 0], pe, count=n * record_words(s.top_k))
    T.sync_threads()
    if thread < s.ranks:
        if mem.active[thread] != 0:
            N.signal(
                mem.records_ready[me], T.if_then_else(block == 0, 1 + s.absent, 1) if s.absent else 1, thread, op="add",
                fence=True,
            )  # fmt: skip


def rows_between(s: Any, mem: Any, shared: Any, source: Any, target: Any) -> Any:
    """Number of rows from one rank to another."""
    return T.if_then_else(shared.alive[source] != 0, mem.counts_in[source, s.experts + target], 0)


@tsn.macro
def write_totals(s, mem, shared, me, stop: T.Ref, thread):
    """Write the rows of each expert and of each pair of ranks; see PlanOffsets."""
    R, experts, local, threads, at = s.ranks, s.experts, s.local, s.threads, s.totals
    for i in T.serial((local + threads - 1) // threads):
        e = i * threads + thread
        if e < local:
            n = T.alloc_var("int32", 0)
            for r in T.serial(R):
                mem.totals[at.by_source + e * R + r] = 0
                if shared.alive[r] != 0:
                    n = n + mem.counts_in[r, me * local + e]
                    mem.totals[at.by_source + e * R + r] = mem.counts_in[r, me * local + e]
            mem.totals[at.counts + e] = n
            before = T.alloc_var("int32", T.if_then_else(stop == 0, shared.offsets[me * local + e], 0))
            mem.totals[at.offsets + e] = before
            if e == local - 1:
                mem.totals[at.offsets + local] = before + T.if_then_else(stop == 0, shared.padded[me * local + e], 0)
    if thread < R:
        mem.totals[at.sent + thread] = rows_between(s, mem, shared, me, thread)
        mem.totals[at.received + thread] = rows_between(s, mem, shared, thread, me)
        before_me = T.alloc_var("int32", 0)
        for r in T.serial(me):
            before_me = before_me + rows_between(s, mem, shared, r, thread)
        mem.totals[at.sent_base + thread] = before_me
        # Of the same node, if rows cross the network once per node.
        earlier = T.alloc_var("int32", 0)
        for r in T.serial(s.of.index_of(thread) if s.once_per_node else thread):
            first = thread - s.of.index_of(thread) if s.once_per_node else 0
            earlier = earlier + rows_between(s, mem, shared, me, first + r)
        mem.totals[at.sent_before + thread] = earlier
        slots = T.alloc_var("int32", 0)
        for r in T.serial(s.of.index_of(me) if s.once_per_node else me):
            first = me - s.of.index_of(me) if s.once_per_node else 0
            slots = slots + rows_between(s, mem, shared, thread, first + r)
        mem.totals[at.slots_base + thread] = slots
        before_it = T.alloc_var("int32", 0)
        for r in T.serial(thread):
            before_it = before_it + rows_between(s, mem, shared, r, me)
        mem.totals[at.received_base + thread] = before_it
        if thread == R - 1:
            mem.totals[at.rejected] = stop
            mem.totals[at.received_base + R] = before_it + rows_between(s, mem, shared, thread, me)


@tsn.macro
def count_received(s, mem, shared, me, thread):
    """needs[r] = the rows of rank r."""
    if thread < s.ranks:
        shared.needs[thread] = rows_between(s, mem, shared, thread, me)


@tsn.macro
def store_records(s, mem, shared, block, thread):
    """Copy the records of every rank out of the next call's reach, and index them by expert-major row. Blocks share the
    ranks, or the records of a rank. A thread copies one choice at a time, but loads several before it stores the
    first."""
    K, at_once, groups = s.top_k, 8, min(s.ranks, s.blocks)
    group = block % groups
    stride = (s.blocks - group + groups - 1) // groups * s.threads
    row, weight, token, index = local_vectors(4, at_once, "int32")
    base, j = int_vars(2)
    for turn in T.serial((s.ranks - group + groups - 1) // groups):
        r = turn * groups + group
        base = 0
        for earlier in T.serial(r):
            base = base + shared.needs[earlier]
        cells = shared.needs[r] * K
        for i in T.serial((cells + stride * at_once - 1) // (stride * at_once)):
            for u in T.unroll(at_once):
                p = (i * at_once + u) * stride + block // groups * s.threads + thread
                if p < cells:
                    row[u] = mem.records_in[r, p // K, p % K]
                    weight[u] = mem.records_in[r, p // K, K + p % K]
                    token[u] = mem.records_in[r, p // K, 2 * K]
                    index[u] = number(s, p // K, mem.records_in, r, p // K, 2 * K + 1)
            for u in T.unroll(at_once):
                p = (i * at_once + u) * stride + block // groups * s.threads + thread
                if p < cells:
                    j = index[u]
                    mem.records[r, j, p % K] = row[u]
                    mem.records[r, j, K + p % K] = weight[u]
                    if p % K == 0:
                        mem.records[r, j, 2 * K] = token[u]
                    if row[u] >= 0 and row[u] < s.capacity:
                        mem.row_index[row[u]] = base + j
                        mem.row_weight[row[u]] = T.reinterpret(weight[u], "float32")
    T.sync_threads()


@tsn.jit(name="moe::plan_routing", pass_configs=EXPLICIT_SYNC)
def plan_routing(
    ranks, experts, top_k, max_tokens, capacity, alignment, blocks, threads, index_dtype, absent=0, node_size=0,
    ordered=False,
):  # fmt: skip
    """Kernel that fills a RoutingPlan (handle.py), the tensors of the last group.

    Args:
        ranks, experts, top_k, max_tokens: sizes; rank r hosts experts [r * experts / ranks, (r + 1) * …).
        capacity: most rows of a rank's expert-major output.
        alignment: the first row of every expert is a multiple of it.
        blocks, threads: launch geometry; all blocks must run at once.
        index_dtype: of `topk_idx`, "int32" or "int64".
        absent: blocks of the launch geometry that this call lacks; block 0 counts for them.
        node_size: ranks of a node, or a tuple of every node's ranks, if rows cross the network once per node; else 0.
        ordered: rows to a rank are numbered by the first of their experts there, not by token alone.

    Parameters of the kernel (int32 if no type is named):
        topk_idx [rows, top_k] of `index_dtype`, topk_weights [rows, top_k] float32, tokens <= rows; fault, fault_value:
        the fault that the host found; active [ranks]: 0 for a rank that is left out.
        counts_out [words], counts_in [ranks, words] (see CountsLayout), records_out, records_in [ranks, max_tokens, …],
        counts_ready, records_ready [ranks] uint64, blocks_ready [1] uint64: symmetric.
        calls [blocks] uint64: calls so far. partial [blocks, words]: scratch, with as many words more as experts where rows
        are ordered. status: see STATUS_WORDS.
    """
    R, K, M = ranks, top_k, max_tokens
    s = PlanConfig(R, experts, K, M, capacity, alignment, blocks, threads, index_dtype, absent, node_size, ordered)
    C, W = s.counts, record_words(K)

    @T.prim_func
    def main(
        ctx: N.Context(),
        topk_idx: T.Tensor((T.dynamic("rows"), K), index_dtype),
        topk_weights: T.Tensor((T.dynamic("rows"), K), "float32"),
        tokens: T.int32,
        fault: T.int32,
        fault_value: T.int32,
        active: T.Tensor((R,), "int32"),
        counts_out: T.Tensor((C.words,), "int32"),
        counts_in: T.Tensor((R, C.words), "int32"),
        records_out: T.Tensor((R, M, W), "int32"),
        records_in: T.Tensor((R, M, W), "int32"),
        counts_ready: T.Tensor((R,), "uint64"),
        records_ready: T.Tensor((R,), "uint64"),
        blocks_ready: T.Tensor((1,), "uint64"),
        calls: T.Tensor((blocks + absent,), "uint64"),
        partial: T.Tensor((blocks + absent, C.words + (experts if ordered else 0)), "int32"),
        status: T.Tensor((STATUS_WORDS,), "int64"),
        send_token: T.Tensor((R, M), "int32"),
        send_row: T.Tensor((R, M), "int32"),
        token_slot: T.Tensor((T.dynamic("slot_rows"), R), "int32"),
        records: T.Tensor((R, M, W), "int32"),
        totals: T.Tensor((s.totals.words,), "int32"),
        row_index: T.Tensor((capacity,), "int32"),
        row_weight: T.Tensor((capacity,), "float32"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            keys, numbers = shared_ints(2, 2 + ordered, s.cells)
            before = T.alloc_shared((s.parts + 1, s.width), "int32")
            padded, offsets = shared_ints(2, experts)
            needs, alive = shared_ints(2, R)
            seen = T.alloc_shared((1,), "int32")
            shared = PlanShared(keys, numbers, before, padded, offsets, needs, alive, seen)
            mem = PlanTensors(
                topk_idx, topk_weights, active, partial, counts_out, counts_in, counts_ready, records_out, records_in,
                records_ready, status, send_token, send_row, token_slot, records, totals, row_index, row_weight,
            )  # fmt: skip
            thread = T.get_thread_binding()
            warp = thread // 32
            me = N.my_pe()
            call = T.alloc_var("uint64", calls[block] + T.uint64(1))
            share = (tokens + blocks - 1) // blocks
            first = share * block
            mine = T.alloc_var("int32", T.max(0, T.min(share, tokens - first)))

            bad, any_bad = int_vars(2)
            read_choices(s, mem, shared, first, mine, bad, any_bad, thread)
            part = T.alloc_var("int32", T.max(1, (mine * K + 32 * s.parts - 1) // (32 * s.parts)))
            number_in_block(s, shared, part, thread)
            count_part(s, mem, shared, any_bad, block, thread)
            if thread == 0:
                N.signal(blocks_ready[0], 1, me, op="add")
                if absent:
                    if block == 0:
                        N.signal(blocks_ready[0], absent, me, op="add")
            N.wait_block(blocks_ready[0], "ge", call * T.uint64(blocks + absent))
            exchange_counts(s, mem, shared, fault, fault_value, me, call, block, thread, warp)
            align_experts(s, mem, shared, thread)
            code, need, stop = int_vars(3)
            reject_or_continue(s, mem, shared, mine, code, need, stop, block, thread)
            number_choices(s, mem, shared, part, mine, me, block, thread)
            if ordered:
                firsts = T.alloc_shared((experts,), "int32")
                order_rows(s, mem, shared, firsts, part, mine, block, thread)
            for i in T.serial((s.part * R + threads - 1) // threads):
                p = i * threads + thread
                if p < T.min(share, tokens - first) * R:
                    token_slot[first + p // R, p % R] = -1
            T.sync_threads()
            write_records(s, mem, shared, first, mine, thread)
            send_records(s, mem, shared, me, stop, block, thread)
            if block == 0:
                write_totals(s, mem, shared, me, stop, thread)
            count_received(s, mem, shared, me, thread)
            if thread < R:
                if active[thread] != 0:
                    N.wait(records_ready[thread], "ge", call * T.uint64(blocks + absent))
            T.sync_threads()
            store_records(s, mem, shared, block, thread)
            end_phase(calls, call, blocks, absent, block, thread, threads)

    return main


# The tensors of plan_nodes. totals_at: offsets in `totals`. thread_counts: int32 [threads], of shared memory.
NodePlanTensors = namedtuple(
    "NodePlanTensors",
    "token_slot send_row totals totals_at heads_out heads_in pairs_out pairs_in heads_arrived thread_counts",
)


@tsn.macro
def _number_rows(mem, route, tokens, b: T.Ref, node: T.Ref, origin: T.Ref, index: T.Ref, hit: T.Ref, thread, threads):
    """Number the tokens that go to node `b`, in order, by all threads of the block; the last ends with their count."""
    at, plan = route.at, route.plan
    share = (tokens + threads - 1) // threads
    origin = T.if_then_else(b < node, b, b + at.size - 1)
    index = 0
    for q in T.serial(share):
        if thread * share + q < tokens:
            hit = 0
            for r in T.serial(at.of.size(b)):
                hit = T.if_then_else(mem.token_slot[thread * share + q, at.of.first(b) + r] >= 0, 1, hit)
            index = index + hit
    mem.thread_counts[thread] = index
    T.sync_threads()
    index = 0
    for p in T.serial(thread):
        index = index + mem.thread_counts[p]
    for q in T.serial(share):
        t = thread * share + q
        if t < tokens:
            hit = 0
            for r in T.serial(at.of.size(b)):
                hit = T.if_then_else(mem.token_slot[t, at.of.first(b) + r] >= 0, 1, hit)
            if b == node:
                for r in T.serial(at.of.size(b)):
                    route.words[plan.origin_index(t, node + r)] = mem.token_slot[t, at.of.first(b) + r]
                if not at.of.is_even:
                    for r in T.serial(at.size - at.of.size(b)):
                        route.words[plan.origin_index(t, node + at.of.size(b) + r)] = -1
            elif hit == 0:
                route.words[plan.origin_index(t, origin)] = -1
            else:
                route.words[plan.origin_index(t, origin)] = index
                route.words[plan.token(b, index)] = t
                for r in T.serial(at.of.size(b)):
                    j = T.alloc_var("int32", mem.token_slot[t, at.of.first(b) + r])
                    mem.pairs_out[b, index, 2 * r] = j
                    if j >= 0:
                        mem.pairs_out[b, index, 2 * r + 1] = mem.send_row[at.of.first(b) + r, j]
            index = index + hit


@tsn.macro
def _place_slots(mem, route, tokens, b: T.Ref, node: T.Ref, begin: T.Ref, hit: T.Ref, thread, threads):
    """begin = start of node `b`'s returning rows among the slots: after the ranks of this node and earlier nodes."""
    at, plan = route.at, route.plan
    share = (tokens + threads - 1) // threads
    begin = 0
    if b == node:
        if thread < at.of.size(node):
            route.words[plan.base(node + thread)] = mem.totals[mem.totals_at.sent_before + at.of.first(node) + thread]
    else:
        for q in T.serial(share):
            if thread * share + q < tokens:
                for a in T.serial(b):
                    hit = 0
                    if a != node:
                        for r in T.serial(at.of.size(a)):
                            hit = T.if_then_else(mem.token_slot[thread * share + q, at.of.first(a) + r] >= 0, 1, hit)
                    begin = begin + hit
    mem.thread_counts[thread] = begin
    T.sync_threads()
    begin = 0
    for p in T.serial(threads):
        begin = begin + mem.thread_counts[p]
    for r in T.serial(at.of.size(node)):
        begin = begin + mem.totals[mem.totals_at.sent + at.of.first(node) + r]
    if b != node and thread == 0:
        route.words[plan.base(T.if_then_else(b < node, b, b + at.size - 1))] = begin
    T.sync_threads()


@tsn.macro
def _send_to_forwarder(
    mem, route, b: T.Ref, rows: T.Ref, begin: T.Ref, forwarder: T.Ref, slot: T.Ref, call: T.Ref, thread
):
    """Send the head and the pairs of node `b` to this rank's forwarder there, by the first warp."""
    at = route.at
    if thread < at.of.size(b):
        mem.heads_out[b, 1 + 2 * thread] = mem.totals[mem.totals_at.sent + at.of.first(b) + thread]
        mem.heads_out[b, 2 + 2 * thread] = mem.totals[mem.totals_at.sent_base + at.of.first(b) + thread]
    if not at.of.is_even:
        if thread >= at.of.size(b) and thread < at.size:  # ranks that the node lacks get no rows
            mem.heads_out[b, 1 + 2 * thread] = 0
            mem.heads_out[b, 2 + 2 * thread] = 0
    if thread == 0:
        mem.heads_out[b, 0] = rows
        mem.heads_out[b, at.slots_begin] = begin
    T.sync_threads()
    forwarder = route.forwarder(b)
    slot = route.forwarder_slot(b)
    if thread < 32 and forwarder >= 0:
        N.put_warp(mem.pairs_in[slot, 0, 0], mem.pairs_out[b, 0, 0], forwarder, count=rows * 2 * at.size)
        N.put_warp(mem.heads_in[slot, 0], mem.heads_out[b, 0], forwarder, count=at.head_words)
        T.sync_warp()
        if thread == 0:
            N.signal(mem.heads_arrived[slot], call, forwarder, fence=True)


@tsn.macro
def _store_pairs(mem, route, node: T.Ref, k: T.Ref, rows: T.Ref, j: T.Ref, thread, threads):
    """Store the head and the pairs of the source of slot `k`, as lists by rank and as indices by row."""
    at, plan = route.at, route.plan
    L = at.size
    rows = mem.heads_in[k, 0]
    for i in T.serial((at.head_words + threads - 1) // threads):
        if i * threads + thread < at.head_words:
            route.words[plan.head(k, i * threads + thread)] = mem.heads_in[k, i * threads + thread]
    for i in T.serial((rows * L + threads - 1) // threads):
        p = i * threads + thread
        if p < rows * L:
            j = mem.pairs_in[k, p // L, p % L * 2]
            if not at.of.is_even:
                if p % L >= at.of.size(node):
                    j = -1
            route.words[plan.gather(k, p // L, p % L)] = T.if_then_else(j >= 0, mem.heads_in[k, p % L * 2 + 2] + j, -1)
            if j >= 0:
                route.words[plan.forward(k, p % L, j, 0)] = p // L
                route.words[plan.forward(k, p % L, j, 1)] = mem.pairs_in[k, p // L, p % L * 2 + 1]


@tsn.jit(name="moe::plan_nodes", pass_configs=EXPLICIT_SYNC)
def plan_nodes(ranks, experts, nodes, slots, max_tokens, blocks, threads, absent=0):
    """Kernel that fills the node part of a RoutingPlan from the other fields.

    Args:
        ranks, experts, max_tokens: as in plan_routing. nodes, slots: see NodeLayout. blocks, threads, absent: launch geometry, as there.

    Parameters of the kernel (int32 if no type is named):
        tokens, token_slot, send_row, totals: see RoutingPlan. node_map [words]: see NodeLayout.
        heads_out [nodes, words], heads_in [slots, words]: symmetric, see `NodeLayout.head_words`.
        pairs_out [nodes, max_tokens, 2 * size], pairs_in [slots, max_tokens, 2 * size]: symmetric; for each row and each rank of
        a node the row's index among those to the rank, or -1, and its first expert-major row there.
        heads_arrived [slots] uint64: symmetric; the last call whose head and pairs from the source have arrived.
        calls [blocks] uint64: calls so far. node_plan [words]: see NodePlanOffsets.
    """
    R, M, at, totals_at = ranks, max_tokens, NodeLayout(ranks, nodes, slots), PlanOffsets(ranks, experts // ranks)
    nodes, L, H, plan = at.nodes, at.size, at.head_words, NodePlanOffsets(at, max_tokens)

    @T.prim_func
    def main(
        ctx: N.Context(),
        tokens: T.int32,
        token_slot: T.Tensor((T.dynamic("slot_rows"), R), "int32"),
        send_row: T.Tensor((R, M), "int32"),
        totals: T.Tensor((totals_at.words,), "int32"),
        node_map: T.Tensor((at.map_words,), "int32"),
        heads_out: T.Tensor((nodes, H), "int32"),
        heads_in: T.Tensor((slots, H), "int32"),
        pairs_out: T.Tensor((nodes, M, 2 * L), "int32"),
        pairs_in: T.Tensor((slots, M, 2 * L), "int32"),
        heads_arrived: T.Tensor((slots,), "uint64"),
        calls: T.Tensor((blocks + absent,), "uint64"),
        node_plan: T.Tensor((plan.words,), "int32"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread_counts = T.alloc_shared((threads,), "int32")
            route = Route(at, plan, node_map, node_plan)
            mem = NodePlanTensors(
                token_slot, send_row, totals, totals_at, heads_out, heads_in, pairs_out, pairs_in, heads_arrived,
                thread_counts,
            )  # fmt: skip
            thread = T.get_thread_binding()
            node = T.alloc_var("int32", at.of.node_of(N.my_pe()))
            call = T.alloc_var("uint64", calls[block] + T.uint64(1))
            b, origin, index, hit, forwarder, slot, begin = int_vars(7)
            for i in T.serial((nodes + blocks - 1) // blocks):
                b = i * blocks + block
                if b < nodes:
                    _number_rows(mem, route, tokens, b, node, origin, index, hit, thread, threads)
                    if thread == threads - 1:
                        node_plan[plan.rows(b)] = T.if_then_else(b == node, 0, index)
                    T.sync_threads()
                    _place_slots(mem, route, tokens, b, node, begin, hit, thread, threads)
                    index = node_plan[plan.rows(b)]
                    _send_to_forwarder(mem, route, b, index, begin, forwarder, slot, call, thread)
                T.sync_threads()
            for i in T.serial((slots + blocks - 1) // blocks):
                b = i * blocks + block
                if b < slots:
                    if route.source(b) >= 0:
                        N.wait_block(heads_arrived[b], "ge", call)
                        _store_pairs(mem, route, node, b, index, hit, thread, threads)
                    else:
                        for h in T.serial((H + threads - 1) // threads):
                            if h * threads + thread < H:
                                node_plan[plan.head(b, h * threads + thread)] = 0
            end_phase(calls, call, blocks, absent, block, thread, threads)

    return main
