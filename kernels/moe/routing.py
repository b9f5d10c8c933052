"""The routing plan of a dispatch in throughput mode: which row goes where, agreed before any row moves.

Each rank counts its choices per expert and its rows per rank, and puts these counts to every peer. From the counts of
all ranks each rank computes the final place of each of its rows at the target: expert by expert, within an expert by source
rank, then by token. So rows need no second copy, their order does not depend on timing, and a dispatch that does not
fit somewhere is refused everywhere before anything is sent.

Blocks share the tokens in consecutive parts, and the warps of a block share its choices in the same way.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.announcement import STATUS_WORDS
from tilescale_net.kernels.moe import routing_numbers as numbers
from tilescale_net.kernels.moe import routing_order as order
from tilescale_net.kernels.moe import routing_steps as steps
from tilescale_net.kernels.moe.handshake import count_for
from tilescale_net.kernels.moe.row_ops import EXPLICIT_SYNC
from tilescale_net.kernels.moe.wire_layout import record_words


@tsn.jit(name="moe::plan_routing", pass_configs=EXPLICIT_SYNC)
def plan_routing(
    ranks, experts, top_k, max_tokens, capacity, alignment, blocks, threads, index_dtype, absent=0, node_size=0,
    ordered=False,
):  # fmt: skip
    """Kernel that fills a RoutingPlan (handle.py), the tensors of the last group.

    Args:
        ranks, experts, top_k, max_tokens: sizes; rank r hosts experts [r * experts / ranks, (r + 1) * …).
        capacity: rows that the expert-major output of a rank may have.
        alignment: the first row of every expert is a multiple of it.
        blocks, threads: launch geometry; all blocks must run at once.
        index_dtype: of `topk_idx`, "int32" or "int64".
        absent: how many more blocks the launch geometry has than this call; block 0 counts for them.
        node_size: ranks of a node, where rows cross the network once per node; else 0.
        ordered: rows to a rank are numbered by the first of their experts there, not by token alone.

    Parameters of the kernel (int32 where no type is named):
        topk_idx [rows, top_k] of `index_dtype`, topk_weights [rows, top_k] float32, tokens <= rows; fault, fault_value:
        what the host found wrong; active [ranks]: 0 for a rank that is left out.
        counts_out [words], counts_in [ranks, words] (see Counts), records_out, records_in [ranks, max_tokens, …],
        counts_ready, records_ready [ranks] uint64, blocks_ready [1] uint64: symmetric.
        calls [blocks] uint64: calls so far. partial [blocks, words]: scratch, with as many words more as experts where rows
        are ordered. status: see STATUS_WORDS.
    """
    R, K, M = ranks, top_k, max_tokens
    s = steps.Sizes(R, experts, K, M, capacity, alignment, blocks, threads, index_dtype, absent, node_size, ordered)
    C, W = s.counts, record_words(K)
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
        blocks_ready: T.Tensor((1,), "uint64"),
        calls: T.Tensor((blocks + absent,), "uint64"),
        partial: T.Tensor((blocks + absent, C.words + (experts if ordered else 0)), "int32"),
        status: T.Tensor((STATUS_WORDS,), "int64"),
        send_token: T.Tensor((R, M), "int32"),
        send_row: T.Tensor((R, M), "int32"),
        token_slot: T.Tensor((slot_rows, R), "int32"),
        records: T.Tensor((R, M, W), "int32"),
        totals: T.Tensor((s.totals.words,), "int32"),
        row_index: T.Tensor((capacity,), "int32"),
        row_weight: T.Tensor((capacity,), "float32"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            keys = T.alloc_shared((2 + ordered, s.cells), "int32")
            places = T.alloc_shared((2 + ordered, s.cells), "int32")
            before = T.alloc_shared((s.parts + 1, s.width), "int32")
            padded = T.alloc_shared((experts,), "int32")
            offsets = T.alloc_shared((experts,), "int32")
            needs = T.alloc_shared((R,), "int32")
            alive = T.alloc_shared((R,), "int32")
            seen = T.alloc_shared((1,), "int32")
            shared = numbers.Shared(keys, places, before, padded, offsets, needs, alive, seen)
            mem = numbers.Memory(
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                active=active,
                partial=partial,
                counts_out=counts_out,
                counts_in=counts_in,
                counts_ready=counts_ready,
                records_out=records_out,
                records_in=records_in,
                records_ready=records_ready,
                status=status,
                send_token=send_token,
                send_row=send_row,
                token_slot=token_slot,
                records=records,
                totals=totals,
                row_index=row_index,
                row_weight=row_weight,
            )
            thread = T.get_thread_binding()
            warp = thread // 32
            me = N.my_pe()
            call = T.alloc_var("uint64")
            call = calls[block] + T.uint64(1)
            share = (tokens + blocks - 1) // blocks
            first = share * block
            mine = T.alloc_var("int32")
            mine = T.max(0, T.min(share, tokens - first))

            bad = T.alloc_var("int32")
            any_bad = T.alloc_var("int32")
            steps.read_choices(s, mem, shared, first, mine, bad, any_bad, thread)
            part = T.alloc_var("int32")
            part = T.max(1, (mine * K + 32 * s.parts - 1) // (32 * s.parts))
            numbers.number_in_block(s, shared, part, thread)
            numbers.count_part(s, mem, shared, any_bad, block, thread)
            if thread == 0:
                N.signal(blocks_ready[0], 1, me, op="add")
                if absent:
                    if block == 0:
                        N.signal(blocks_ready[0], absent, me, op="add")
            N.wait_block(blocks_ready[0], "ge", call * T.uint64(blocks + absent))
            steps.exchange_counts(s, mem, shared, fault, fault_value, me, call, block, thread, warp)
            numbers.align_experts(s, mem, shared, thread)
            code = T.alloc_var("int32")
            need = T.alloc_var("int32")
            stop = T.alloc_var("int32")
            steps.refuse_or_go_on(s, mem, shared, mine, code, need, stop, block, thread)
            numbers.number_choices(s, mem, shared, part, mine, me, block, thread)
            if ordered:
                firsts = T.alloc_shared((experts,), "int32")
                order.order_rows(s, mem, shared, firsts, part, mine, block, thread)
            for i in T.serial((s.part * R + threads - 1) // threads):
                p = i * threads + thread
                if p < T.min(share, tokens - first) * R:
                    token_slot[first + p // R, p % R] = -1
            T.sync_threads()
            steps.write_records(s, mem, shared, first, mine, thread)
            steps.send_records(s, mem, shared, me, stop, block, thread)
            if block == 0:
                steps.write_totals(s, mem, shared, me, stop, thread)
            steps.count_received(s, mem, shared, me, thread)
            if thread < R:
                if active[thread] != 0:
                    N.wait(records_ready[thread], "ge", call * T.uint64(blocks + absent))
            T.sync_threads()
            steps.keep_records(s, mem, shared, block, thread)
            if thread == 0:
                calls[block] = call
            if absent:
                if block == 0:
                    count_for(calls, call, blocks, absent, thread, threads)

    return main
