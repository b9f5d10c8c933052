"""The layout of a dispatch in throughput mode: which row goes where, agreed before any row moves.

Each rank counts its choices per expert and its rows per rank, and puts these counts to every peer. From everybody's
counts each rank knows the final place of each of its rows at the target: expert by expert, within an expert by source
rank, then by token. So rows need no second copy, their order does not depend on timing, and a dispatch that does not
fit somewhere is refused everywhere before anything is sent.

Blocks share the tokens in consecutive parts. A thread counts one bin (an expert, or "some choice at rank r") over its
block's part, and later numbers that bin's choices.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.moe.rows import EXPLICIT_SYNC
from tilescale_net.kernels.moe.sizes import (
    BAD_EXPERT,
    NO_FAULT,
    NO_ROOM,
    STATUS_WORDS,
    Counts,
    Totals,
    align4,
    record_words,
)


@tsn.jit(name="moe_layout", pass_configs=EXPLICIT_SYNC)
def layout(ranks, experts, top_k, max_tokens, capacity, alignment, blocks, threads, index_dtype):
    """Kernel that fills a layout; see `Layout` in handle.py for the tensors of the last group.

    Args:
        ranks, experts, top_k, max_tokens: sizes; rank r hosts experts [r * experts / ranks, (r + 1) * …).
        capacity: rows that the expert-major output of a rank may have.
        alignment: the first row of every expert is a multiple of it.
        blocks, threads: launch geometry; all blocks must run at once.
        index_dtype: of `topk_idx`, "int32" or "int64".

    Parameters of the kernel:
        topk_idx, topk_weights [rows >= tokens, top_k], tokens, fault, fault_value; active [ranks], 0 for a rank that is
        left out; counts_out, counts_in, records_out, records_in, counts_ready, records_ready, met: symmetric;
        epochs [blocks]: calls so far; partial: scratch; status: see STATUS_WORDS.
    """
    R, K, M = ranks, top_k, max_tokens
    local = experts // ranks
    C, totals_at, W = Counts(experts, ranks), Totals(ranks, local), record_words(top_k)
    part = -(-M // blocks)  # tokens of a block at most
    cells = align4(part * K)
    warps = threads // 32
    rows, slot_rows = T.dynamic("rows"), T.dynamic("slot_rows")

    @T.prim_func
    def main(
        ctx: N.Context(),
        topk_idx: T.Tensor((rows, K), index_dtype),
        topk_weights: T.Tensor((rows, K), "float32"),
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
        met: T.Tensor((1,), "uint64"),
        epochs: T.Tensor((blocks,), "uint64"),
        partial: T.Tensor((blocks, C.words), "int32"),
        status: T.Tensor((STATUS_WORDS,), "int64"),
        send_token: T.Tensor((R, M), "int32"),
        send_row: T.Tensor((R, M), "int32"),
        token_slot: T.Tensor((slot_rows, R), "int32"),
        records: T.Tensor((R, M, W), "int32"),
        totals: T.Tensor((totals_at.words,), "int32"),
        row_index: T.Tensor((capacity,), "int32"),
        row_weight: T.Tensor((capacity,), "float32"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            # keys[0]: the expert of each choice; keys[1]: the bin of its rank where it is the first there; else -1.
            keys = T.alloc_shared((2, cells), "int32")
            places = T.alloc_shared((2, cells), "int32")
            padded = T.alloc_shared((experts,), "int32")
            alive = T.alloc_shared((R,), "int32")
            seen = T.alloc_shared((1,), "int32")
            thread = T.get_thread_binding()
            warp = thread // 32
            me = N.my_pe()
            epoch = T.alloc_var("uint64")
            epoch = epochs[block] + T.uint64(1)
            share = (tokens + blocks - 1) // blocks
            first = share * block
            mine = T.alloc_var("int32")
            mine = T.max(0, T.min(share, tokens - first))

            # -- read the choices
            bad = T.alloc_var("int32")
            bad = 0
            for i in T.serial((cells + threads - 1) // threads):
                p = i * threads + thread
                if p < cells:
                    key = T.alloc_var("int32")
                    key = -1
                    if p < mine * K:
                        choice = T.alloc_var(index_dtype)
                        choice = topk_idx[first + p // K, p % K]
                        if choice < -1 or choice >= experts:
                            bad = 1
                            seen[0] = T.cast(choice, "int32")  # any of them will do
                        elif choice >= 0:
                            if active[T.cast(choice, "int32") // local] != 0:
                                key = T.cast(choice, "int32")
                    keys[0, p] = key
            any_bad = T.alloc_var("int32")
            any_bad = T.syncthreads_or(bad)
            for i in T.serial((cells + threads - 1) // threads):
                p = i * threads + thread
                if p < cells:
                    key = T.alloc_var("int32")
                    key = -1
                    if keys[0, p] >= 0:
                        key = experts + keys[0, p] // local
                        for q in T.serial(p % K):
                            if keys[0, p - p % K + q] >= 0 and keys[0, p - p % K + q] // local == keys[0, p] // local:
                                key = -1
                    keys[1, p] = key
            T.sync_threads()

            # -- count this block's part
            four = T.alloc_local((4,), "int32")
            for i in T.serial((C.bins + threads - 1) // threads):
                bin = i * threads + thread
                if bin < C.bins:
                    side = T.if_then_else(bin < experts, 0, 1)
                    n = T.alloc_var("int32")
                    n = 0
                    for q in T.serial((mine * K + 3) // 4):
                        for v in T.vectorized(4):
                            four[v] = keys[side, q * 4 + v]
                        for v in T.unroll(4):
                            n = n + T.if_then_else(four[v] == bin, 1, 0)
                    partial[block, bin] = n
            if thread == 0:
                partial[block, C.code] = T.if_then_else(any_bad != 0, BAD_EXPERT, NO_FAULT)
                partial[block, C.value] = T.if_then_else(any_bad != 0, seen[0], 0)
            T.sync_threads()

            # -- all blocks meet; the first one sends the sums
            if thread == 0:
                N.signal(met[0], 1, me, op="add")
            N.wait_block(met[0], "ge", epoch * T.uint64(blocks))
            if block == 0:
                for i in T.serial((C.bins + threads - 1) // threads):
                    bin = i * threads + thread
                    if bin < C.bins:
                        n = T.alloc_var("int32")
                        n = 0
                        for b in T.serial(blocks):
                            n = n + partial[b, bin]
                        counts_out[bin] = n
                if thread == 0:
                    code = T.alloc_var("int32")
                    code = fault
                    value = T.alloc_var("int32")
                    value = fault_value
                    for b in T.serial(blocks):
                        if code == NO_FAULT and partial[b, C.code] != NO_FAULT:
                            code = partial[b, C.code]
                            value = partial[b, C.value]
                    counts_out[C.code] = code
                    counts_out[C.value] = value
                T.sync_threads()
                for i in T.serial((R + warps - 1) // warps):
                    pe = i * warps + warp
                    if pe < R:
                        if active[pe] != 0:
                            N.put_signal_warp(
                                counts_in[me, 0], counts_out[0], pe, counts_ready[me], epoch, count=C.words
                            )
            if thread < R:
                alive[thread] = active[thread]
                if active[thread] != 0:
                    N.wait(counts_ready[thread], "ge", epoch)
            T.sync_threads()

            # -- refuse what somebody found wrong, or what does not fit; all ranks come to the same answer
            for i in T.serial((experts + threads - 1) // threads):
                e = i * threads + thread
                if e < experts:
                    n = T.alloc_var("int32")
                    n = 0
                    for s in T.serial(R):
                        if alive[s] != 0:
                            n = n + counts_in[s, e]
                    padded[e] = (n + alignment - 1) // alignment * alignment
            T.sync_threads()
            code = T.alloc_var("int32")
            code = NO_FAULT
            need = T.alloc_var("int32")
            need = 0
            if thread < R:
                for e in T.serial(local):
                    need = need + padded[thread * local + e]
                if need > capacity:
                    code = NO_ROOM
                if alive[thread] != 0:
                    if counts_in[thread, C.code] != NO_FAULT:
                        code = counts_in[thread, C.code]
                        need = counts_in[thread, C.value]
            stop = T.alloc_var("int32")
            stop = T.syncthreads_or(code)
            if stop != 0:
                mine = 0
                if thread < R:
                    alive[thread] = 0
                    if block == 0 and code != NO_FAULT:
                        status[1] = T.cast(thread, "int64")
                        status[2] = T.cast(need, "int64")
                        N.st(status[0], T.cast(code, "int64"), sem="release")
            T.sync_threads()

            # -- number the choices: their rows at the target, and their places among the rows to that rank
            for i in T.serial((C.bins + threads - 1) // threads):
                bin = i * threads + thread
                if bin < C.bins:
                    n = T.alloc_var("int32")
                    n = 0
                    for b in T.serial(block):
                        n = n + partial[b, bin]
                    if bin < experts:
                        for s in T.serial(me):
                            if alive[s] != 0:
                                n = n + counts_in[s, bin]
                        for e in T.serial(bin % local):
                            n = n + padded[bin - bin % local + e]
                    side = T.if_then_else(bin < experts, 0, 1)
                    for q in T.serial((mine * K + 3) // 4):
                        for v in T.vectorized(4):
                            four[v] = keys[side, q * 4 + v]
                        for v in T.unroll(4):
                            if four[v] == bin:
                                places[side, q * 4 + v] = n
                                n = n + 1
            for i in T.serial((part * R + threads - 1) // threads):
                p = i * threads + thread
                if p < T.min(share, tokens - first) * R:
                    token_slot[first + p // R, p % R] = -1
            T.sync_threads()

            # -- what the sender keeps, and the records that go with the rows
            for i in T.serial((cells + threads - 1) // threads):
                p = i * threads + thread
                if p < mine * K:
                    if keys[1, p] >= 0:
                        pe = keys[1, p] - experts
                        j = places[1, p]
                        t = first + p // K
                        token_slot[t, pe] = j
                        send_token[pe, j] = t
                        send_row[pe, j] = places[0, p]
                        for k in T.serial(K):
                            cell = p - p % K + k
                            here = keys[0, cell] >= 0 and keys[0, cell] // local == pe
                            records_out[pe, j, k] = T.if_then_else(here, places[0, cell], -1)
                            records_out[pe, j, K + k] = T.reinterpret(topk_weights[t, k], "int32")
            T.sync_threads()
            for i in T.serial((R + warps - 1) // warps):
                pe = i * warps + warp
                if pe < R:
                    if active[pe] != 0:
                        begin = T.alloc_var("int32")
                        begin = 0
                        for b in T.serial(block):
                            begin = begin + partial[b, experts + pe]
                        n = T.if_then_else(stop != 0, 0, partial[block, experts + pe])
                        at = T.min(begin, M - 1)
                        N.put_signal_warp(
                            records_in[me, at, 0],
                            records_out[pe, at, 0],
                            pe,
                            records_ready[me],
                            1,
                            op="add",
                            count=n * W,
                        )

            # -- totals
            if block == 0:
                for i in T.serial((local + threads - 1) // threads):
                    e = i * threads + thread
                    if e < local:
                        n = T.alloc_var("int32")
                        n = 0
                        for s in T.serial(R):
                            if alive[s] != 0:
                                n = n + counts_in[s, me * local + e]
                        totals[totals_at.counts + e] = n
                        before = T.alloc_var("int32")
                        before = 0
                        if stop == 0:
                            for o in T.serial(e):
                                before = before + padded[me * local + o]
                        totals[totals_at.offsets + e] = before
                        if e == local - 1:
                            totals[totals_at.offsets + local] = before + T.if_then_else(
                                stop == 0, padded[me * local + e], 0
                            )
                if thread < R:
                    totals[totals_at.sent + thread] = T.if_then_else(alive[me] != 0, counts_in[me, experts + thread], 0)
                    totals[totals_at.received + thread] = T.if_then_else(
                        alive[thread] != 0, counts_in[thread, experts + me], 0
                    )
                    before_me = T.alloc_var("int32")
                    before_me = 0
                    for s in T.serial(me):
                        before_me = before_me + T.if_then_else(alive[s] != 0, counts_in[s, experts + thread], 0)
                    totals[totals_at.sent_base + thread] = before_me
                    before_it = T.alloc_var("int32")
                    before_it = 0
                    for s in T.serial(thread):
                        before_it = before_it + T.if_then_else(alive[s] != 0, counts_in[s, experts + me], 0)
                    totals[totals_at.received_base + thread] = before_it
                    if thread == R - 1:
                        totals[totals_at.received_base + R] = before_it + T.if_then_else(
                            alive[thread] != 0, counts_in[thread, experts + me], 0
                        )

            # -- keep what the peers sent
            if thread < R:
                if active[thread] != 0:
                    N.wait(records_ready[thread], "ge", epoch * T.uint64(blocks))
            T.sync_threads()
            base = T.alloc_var("int32")
            base = 0
            for s in T.serial(R):
                n = T.alloc_var("int32")
                n = T.if_then_else(alive[s] != 0, counts_in[s, experts + me], 0)
                for i in T.serial((n * K + blocks * threads - 1) // (blocks * threads)):
                    p = (i * blocks + block) * threads + thread
                    if p < n * K:
                        row = T.alloc_var("int32")
                        row = records_in[s, p // K, p % K]
                        weight = T.alloc_var("int32")
                        weight = records_in[s, p // K, K + p % K]
                        records[s, p // K, p % K] = row
                        records[s, p // K, K + p % K] = weight
                        if row >= 0 and row < capacity:
                            row_index[row] = base + p // K
                            row_weight[row] = T.reinterpret(weight, "float32")
                base = base + n
            T.sync_threads()
            if thread == 0:
                epochs[block] = epoch

    return main
