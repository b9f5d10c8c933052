"""The steps of the kernel that plans the routing; routing.py puts them together, routing_numbers.py groups their tensors."""

from dataclasses import dataclass

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.announcement import report
from tilescale_net.kernels.moe import routing_numbers as numbers
from tilescale_net.kernels.moe import routing_order as order
from tilescale_net.kernels.moe.totals import Totals
from tilescale_net.kernels.moe.wire_layout import NO_FAULT, NO_ROOM, Counts, align4, record_words

WEIGHTS = 32  # that a thread holds at once
BLOCK_SHARED = 227 * 1024  # bytes of shared memory that a block may use


def fixed_bytes(experts: int, ranks: int, ordered: bool) -> int:
    """Shared memory of a block that plans, but for its choices and their counts."""
    return 4 * ((2 + ordered) * experts + 2 * ranks + 1) + 1024


def bytes_of_choice(ordered: bool) -> int:
    return 8 * (2 + ordered)


def width_of(experts: int, ranks: int, ordered: bool) -> int:
    """Counts of a block."""
    return Counts(experts, ranks).words + (experts if ordered else 0)


@dataclass(frozen=True)
class Sizes:
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
    node_size: int
    ordered: bool = False

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return self.experts // self.ranks

    @property
    def counts(self) -> Counts:
        return Counts(self.experts, self.ranks)

    @property
    def totals(self) -> Totals:
        return Totals(self.ranks, self.local)

    @property
    def firsts(self) -> int:
        """Where a block's counts of rows by their first expert begin, behind its other counts."""
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
        """Warps that number a block's choices, each with counts of its own: all that there is shared memory for."""
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
    # A thread's loads are all on their way before it looks at the first.
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
            of_rank = T.alloc_var("int32")
            of_rank = -1
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
                order.find_first(s, shared, of_rank, p)
    T.sync_threads()


@tsn.macro
def exchange_counts(s, mem, shared, fault, fault_value, me, call: T.Ref, block, thread, warp):
    """Block 0 sends the sums over the blocks to every rank; all blocks wait for the sums of every rank."""
    R, C, threads, blocks, warps = s.ranks, s.counts, s.threads, s.blocks, s.threads // 32
    if block == 0:
        for i in T.serial((C.bins + threads - 1) // threads):
            bin = i * threads + thread
            if bin < C.bins:
                n = T.alloc_var("int32")
                n = 0
                numbers.add_blocks(s, n, mem.partial, bin, blocks)
                mem.counts_out[bin] = n
        if thread == threads - 1:  # the last one has the fewest counts to add
            code = T.alloc_var("int32")
            code = fault
            value = T.alloc_var("int32")
            value = fault_value
            numbers.first_fault(s, mem.partial, code, value)
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
def refuse_or_go_on(s, mem, shared, mine: T.Ref, code: T.Ref, need: T.Ref, stop: T.Ref, block, thread):
    """Refuse what some rank found wrong, or what does not fit somewhere; all ranks come to the same answer."""
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
    """Write what this rank keeps of its rows, and the records that go with them."""
    K, threads = s.top_k, s.threads
    iterations = -(-s.cells // threads)
    at_once = max(1, min(iterations, WEIGHTS // K))
    weight = T.alloc_local((at_once * K if K <= WEIGHTS else 1,), "float32")
    for i in T.serial((iterations + at_once - 1) // at_once):
        # The weights are all on their way before the first is stored.
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
    """Write the record of the row of choice `p`; its token's weights are in `weight` from `at` on, if there are up to
    WEIGHTS."""
    K, local, vectors = s.top_k, s.local, record_words(s.top_k) // 4
    pe = shared.keys[1, p] - s.experts
    j = shared.places[1, p]
    t = first + p // K
    mem.token_slot[t, pe] = order.number(s, j, shared.places, 2, p)
    mem.send_token[pe, order.number(s, j, shared.places, 2, p)] = t
    mem.send_row[pe, order.number(s, j, shared.places, 2, p)] = shared.places[0, p]
    words = T.alloc_local((4,), "int32")
    # Records lie one behind the other and each thread writes one, so that every store takes a sector of its own: the fewer
    # the better.
    for v in T.unroll(vectors) if K <= WEIGHTS else T.serial(vectors):
        for i in T.unroll(4):
            if v * 4 + i < K:
                cell = p - p % K + v * 4 + i
                here = shared.keys[0, cell] >= 0 and shared.keys[0, cell] // local == pe
                words[i] = T.if_then_else(here, shared.places[0, cell], -1)
            elif v * 4 + i < 2 * K:
                value = weight[at + v * 4 + i - K] if K <= WEIGHTS else mem.topk_weights[t, v * 4 + i - K]
                words[i] = T.reinterpret(value, "int32")
            elif v * 4 + i == 2 * K:
                words[i] = t
            else:
                words[i] = shared.places[2, p] if s.ordered else 0
        for i in T.vectorized(4):
            mem.records_out[pe, j, v * 4 + i] = words[i]


@tsn.macro
def send_records(s, mem, shared, me, stop: T.Ref, block, thread):
    """Put the block's records to every rank, all threads together, then signal them to all."""
    at = T.alloc_var("int32")
    n = T.alloc_var("int32")
    for hop in T.serial(s.ranks):
        pe = (me + 1 + hop) % s.ranks  # this rank's own last, while the others' are on their way
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


@tsn.macro
def write_totals(s, mem, shared, me, stop: T.Ref, thread):
    """Write the rows of each expert and of each pair of ranks; see Totals."""
    R, experts, local, threads, at = s.ranks, s.experts, s.local, s.threads, s.totals
    for i in T.serial((local + threads - 1) // threads):
        e = i * threads + thread
        if e < local:
            n = T.alloc_var("int32")
            n = 0
            for r in T.serial(R):
                mem.totals[at.by_source + e * R + r] = 0
                if shared.alive[r] != 0:
                    n = n + mem.counts_in[r, me * local + e]
                    mem.totals[at.by_source + e * R + r] = mem.counts_in[r, me * local + e]
            mem.totals[at.counts + e] = n
            before = T.alloc_var("int32")
            before = T.if_then_else(stop == 0, shared.offsets[me * local + e], 0)
            mem.totals[at.offsets + e] = before
            if e == local - 1:
                mem.totals[at.offsets + local] = before + T.if_then_else(stop == 0, shared.padded[me * local + e], 0)
    if thread < R:
        mem.totals[at.sent + thread] = T.if_then_else(shared.alive[me] != 0, mem.counts_in[me, experts + thread], 0)
        mem.totals[at.received + thread] = T.if_then_else(
            shared.alive[thread] != 0, mem.counts_in[thread, experts + me], 0
        )
        before_me = T.alloc_var("int32")
        before_me = 0
        for r in T.serial(me):
            before_me = before_me + T.if_then_else(shared.alive[r] != 0, mem.counts_in[r, experts + thread], 0)
        mem.totals[at.sent_base + thread] = before_me
        earlier = T.alloc_var("int32")
        earlier = 0
        if s.node_size:
            for r in T.serial(thread % s.node_size):
                other = thread - thread % s.node_size + r
                earlier = earlier + T.if_then_else(shared.alive[me] != 0, mem.counts_in[me, experts + other], 0)
        else:
            for r in T.serial(thread):
                earlier = earlier + T.if_then_else(shared.alive[me] != 0, mem.counts_in[me, experts + r], 0)
        mem.totals[at.sent_before + thread] = earlier
        slots = T.alloc_var("int32")
        slots = 0
        if s.node_size:
            for r in T.serial(me % s.node_size):
                mate = me - me % s.node_size + r
                slots = slots + T.if_then_else(shared.alive[thread] != 0, mem.counts_in[thread, experts + mate], 0)
        else:
            for r in T.serial(me):
                slots = slots + T.if_then_else(shared.alive[thread] != 0, mem.counts_in[thread, experts + r], 0)
        mem.totals[at.slots_base + thread] = slots
        before_it = T.alloc_var("int32")
        before_it = 0
        for r in T.serial(thread):
            before_it = before_it + T.if_then_else(shared.alive[r] != 0, mem.counts_in[r, experts + me], 0)
        mem.totals[at.received_base + thread] = before_it
        if thread == R - 1:
            mem.totals[at.refused] = stop
            mem.totals[at.received_base + R] = before_it + T.if_then_else(
                shared.alive[thread] != 0, mem.counts_in[thread, experts + me], 0
            )


@tsn.macro
def count_received(s, mem, shared, me, thread):
    """needs[r] = the rows that come from rank r."""
    if thread < s.ranks:
        shared.needs[thread] = T.if_then_else(shared.alive[thread] != 0, mem.counts_in[thread, s.experts + me], 0)


@tsn.macro
def keep_records(s, mem, shared, block, thread):
    """Copy the records of every rank to where the next call does not overwrite them, and index them by expert-major row.

    Blocks share the ranks, or the records of a rank. A thread copies a choice at a time, but loads several before it stores
    the first.
    """
    K, at_once, groups = s.top_k, 8, min(s.ranks, s.blocks)
    group = block % groups
    stride = (s.blocks - group + groups - 1) // groups * s.threads
    row = T.alloc_local((at_once,), "int32")
    weight = T.alloc_local((at_once,), "int32")
    token = T.alloc_local((at_once,), "int32")
    place = T.alloc_local((at_once,), "int32")
    base = T.alloc_var("int32")
    j = T.alloc_var("int32")
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
                    place[u] = order.number(s, p // K, mem.records_in, r, p // K, 2 * K + 1)
            for u in T.unroll(at_once):
                p = (i * at_once + u) * stride + block // groups * s.threads + thread
                if p < cells:
                    j = place[u]
                    mem.records[r, j, p % K] = row[u]
                    mem.records[r, j, K + p % K] = weight[u]
                    if p % K == 0:
                        mem.records[r, j, 2 * K] = token[u]
                    if row[u] >= 0 and row[u] < s.capacity:
                        mem.row_index[row[u]] = base + j
                        mem.row_weight[row[u]] = T.reinterpret(weight[u], "float32")
    T.sync_threads()
