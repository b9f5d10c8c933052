"""Dispatch in latency mode: few tokens, every multiprocessor, no exchange before the data.

A block makes one message per token (row, scales, choices; quantised on the way if asked) and puts it, with a signal of
its own, to every rank that hosts one of the token's experts: once per rank, however many experts there. Each block
finds its token's places by reading all earlier choices itself. A header carries how many messages each peer is to
expect and how many rows per expert; from the headers a receiver computes where each row goes, so the rows of an expert are
contiguous, in the order of source rank and token. Receiving warps copy rows to all their experts as the messages come in.

All buffers and signals exist twice and calls alternate. A rank sends a call when every peer has begun the one before,
which a peer does only after it has received the one before that: so no barrier is needed.

Where nodes have several ranks, each message may cross the network once per node, see node_dispatch_latency.py.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.announcement import STATUS_WORDS
from tilescale_net.kernels.moe import dispatch_latency_layout as layout
from tilescale_net.kernels.moe import dispatch_latency_steps as steps
from tilescale_net.kernels.moe import dispatch_latency_tensors as tensors
from tilescale_net.kernels.moe import handshake
from tilescale_net.kernels.moe import node_dispatch_latency as over_nodes
from tilescale_net.kernels.moe.node_layout import LatencyNodePlan, Nodes, NodeTables
from tilescale_net.kernels.moe.row_ops import EXPLICIT_SYNC, FP8, Rows
from tilescale_net.kernels.moe.wire_layout import COUNT_BITS


@tsn.jit(name="moe::dispatch_latency", pass_configs=EXPLICIT_SYNC)
def dispatch_latency(
    ranks, experts, top_k, max_tokens, row_words, scale_words, source_dtype, sends, receives, blocks, threads, index_dtype,
    absent=0, timed=False, nodes=0, slots=0, column_scales=False,
):  # fmt: skip
    """Kernel that sends, receives, or both.

    Args:
        ranks, experts, top_k, max_tokens: sizes; rank r hosts experts [r * experts / ranks, (r + 1) * …).
        row_words, scale_words: 4-byte words of a row as it travels (a multiple of 4) and of its scales (0: it has none).
        source_dtype: "bfloat16", "float16" or "float32": quantise rows of this type to FP8; "": send them as they are.
        sends, receives: which halves; a half that receives follows the one that sends, on the same stream.
        blocks, threads: launch geometry; all blocks must run at once. index_dtype: of `topk_idx`.
        absent: how many more blocks the launch geometry has than this call; block 0 counts for them.
        timed: whether to add up for how long the half that receives waits for each rank.
        nodes, slots: see Nodes; 0: each message goes to its ranks straight.
        column_scales: received scales are [local experts * scale_words, ranks * max_tokens], of an expert one row after the
            other of a word's.

    Parameters of the kernel (int32 where no type is named):
        x [rows, row_words], or [rows, hidden] of `source_dtype`; x_scales [rows, scale_words] float32 as words.
        topk_idx [rows, top_k] of `index_dtype`, topk_weights [rows, top_k] float32, tokens <= rows; fault, fault_value:
        what the host found wrong; active [ranks]: 0 for a rank that is left out.
        message [2 * max_tokens, words]: symmetric; message_fp8, message_scales: the same memory as FP8 and as float32.
        header_out, header_in [2 * ranks, words], arrival [2 * ranks * max_tokens, words]: symmetric; see Header, Message.
        begun [2 * ranks], arrived [2 * ranks * max_tokens] uint64: symmetric.
        send_calls, receive_calls [blocks] uint64: calls so far. status: see STATUS_WORDS.
        relayed [2 * slots * max_tokens, words] int32, came [2 * slots * max_tokens] uint64: symmetric; messages to be passed
        on. node_map: see Nodes. node_plan: see LatencyNodePlan. These and origin_slot with nodes only.
        token_slot [rows, ranks], targets, weights, received, source_counts, source_token, origin_slot: see ReceivedRows.
        out [local experts * ranks * max_tokens, row_words], out_scales, counts [local experts]: what the caller gets.
        waited [ranks] uint64, if timed: clocks of waiting for each rank are added: for its header by one thread, and for each
        of its messages by one.
    """
    R, K, M, S = ranks, top_k, max_tokens, slots
    at = Nodes(R, nodes, S) if nodes else None
    plan = LatencyNodePlan(at, M, K) if nodes else None
    node_size = at.size if nodes else 0
    s = layout.Sizes(R, experts, K, M, row_words, scale_words, source_dtype, blocks, threads, node_size, timed)
    msg, head, local = s.message, s.header, s.local
    scale_width = max(scale_words, 1)
    rows, scale_rows, choices, slot_rows = (T.dynamic(n) for n in ("rows", "scale_rows", "choices", "slot_rows"))
    scale_capacity, scales_width = T.dynamic("scale_capacity"), s.capacity if column_scales else scale_width

    @T.prim_func
    def main(
        ctx: N.Context(),
        x: T.Tensor((rows, s.source_width), s.source_type),
        x_scales: T.Tensor((scale_rows, scale_width), "int32"),
        topk_idx: T.Tensor((choices, K), index_dtype),
        topk_weights: T.Tensor((choices, K), "float32"),
        tokens: T.int32,
        fault: T.int32,
        fault_value: T.int32,
        active: T.Tensor((R,), "int32"),
        message: T.Tensor((2 * M, msg.words), "int32"),
        message_fp8: T.Tensor((2 * M, msg.words * 4), FP8),
        message_scales: T.Tensor((2 * M, msg.words), "float32"),
        header_out: T.Tensor((2 * R, head.words), "int32"),
        header_in: T.Tensor((2 * R, head.words), "int32"),
        arrival: T.Tensor((2 * R * M, msg.words), "int32"),
        relayed: T.Tensor((2 * S * M, msg.words), "int32") if nodes else None,
        begun: T.Tensor((2 * R,), "uint64"),
        arrived: T.Tensor((2 * R * M,), "uint64"),
        came: T.Tensor((2 * S * M,), "uint64") if nodes else None,
        node_map: T.Tensor((at.map_words,), "int32") if nodes else None,
        send_calls: T.Tensor((blocks + absent,), "uint64"),
        receive_calls: T.Tensor((blocks + absent,), "uint64"),
        status: T.Tensor((STATUS_WORDS,), "int64"),
        token_slot: T.Tensor((slot_rows, R), "int32"),
        out: T.Tensor((local * s.capacity, row_words), "int32"),
        out_scales: T.Tensor((scale_capacity, scales_width), "int32"),
        counts: T.Tensor((local,), "int32"),
        targets: T.Tensor((R * M, K), "int32"),
        weights: T.Tensor((R * M, K), "float32"),
        received: T.Tensor((R,), "int32"),
        source_counts: T.Tensor((local, R), "int32"),
        source_token: T.Tensor((local, s.capacity), "int32"),
        origin_slot: T.Tensor((slot_rows, at.origins), "int32") if nodes else None,
        node_plan: T.Tensor((plan.words,), "int32") if nodes else None,
        waited: T.Tensor((R,), "uint64") if timed else None,
    ):
        with T.Kernel(blocks, threads=threads) as block:
            mine = T.alloc_shared((K,), "int32")  # experts of the block's token
            same_expert = T.alloc_shared((K,), "int32")  # earlier choices of the same expert
            same_rank = T.alloc_shared((K,), "int32")  # earlier tokens with a choice at the same rank
            if nodes:
                same_node = T.alloc_shared((K,), "int32")  # earlier tokens with a choice in the same node
            histogram = T.alloc_shared((s.bins,), "int32")
            bad = T.alloc_shared((2,), "int32")
            begin = T.alloc_shared((local, R), "int32")
            incoming = T.alloc_shared((R,), "int32")
            if nodes:
                passing = T.alloc_shared((S,), "int32")
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            me = T.alloc_var("int32")
            me = N.my_pe()
            call = T.alloc_var("uint64")
            parity = T.alloc_var("int32")  # which of the two sets of buffers
            now = handshake.Now(me, call, parity)
            chosen = tensors.Chosen(mine, same_expert, same_rank, same_node if nodes else None)
            mem = tensors.Memory(
                x=Rows(x, x_scales),
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                active=active,
                message=tensors.Messages(message, message_fp8, message_scales),
                header_out=header_out,
                header_in=header_in,
                begun=begun,
                arrival=arrival,
                arrived=arrived,
                token_slot=token_slot,
                kept=tensors.Kept(
                    Rows(out, out_scales), counts, received, source_counts, targets, weights, source_token
                ),
                status=status,
                waited=waited,
                relayed=relayed,
                came=came,
                origin_slot=origin_slot,
                passing=passing if nodes else None,
            )
            tables = NodeTables(at, plan, node_map, node_plan)

            if sends:
                token = T.alloc_var("int32")
                piece = T.alloc_local((s.batch * s.width,), s.source_type)
                # A block without a token makes no use of its count, so its threads need not meet before it is raised.
                N.benign_race(send_calls[block])
                handshake.begin_half(send_calls, call, parity, block)
                # The last block counts for the headers; it has a token of its own only when all blocks have one.
                if block == blocks - 1:
                    steps.count_choices(s, mem, tokens, fault, fault_value, histogram, bad, now, thread)
                    steps.send_headers(s, mem, histogram, bad, now, thread, warp)
                for i in T.serial((tokens + blocks - 1) // blocks):
                    token = i * blocks + block
                    if token < tokens:
                        if nodes:
                            for g in T.serial((K + threads - 1) // threads):
                                if g * threads + thread < K:
                                    same_node[g * threads + thread] = 0
                        steps.load_token(s, mem, chosen, piece, token, parity, thread, warp, lane)
                        steps.find_places(s, mem, chosen, token, thread)
                        steps.write_row(s, mem, piece, token, parity, thread, warp, lane)
                        if nodes:
                            if thread < at.origins:
                                origin_slot[token, thread] = -1
                        if thread < R:
                            token_slot[token, thread] = -1
                            if i == 0 and active[thread] != 0:
                                handshake.await_previous(begun, parity, call, COUNT_BITS, thread, R)
                        T.sync_threads()
                        if nodes:
                            over_nodes.send_message(s, mem, tables, chosen, token, now, thread, warp, lane)
                        else:
                            steps.send_message(s, mem, chosen, token, now, thread, warp, lane)
                handshake.end_half(send_calls, call, blocks, absent, block, thread, threads)

            if receives:
                source = T.alloc_var("int32")
                slot = T.alloc_var("int32")
                place = T.alloc_var("int32")
                total = T.alloc_var("int32")
                if nodes:
                    choice = T.alloc_var("int32")
                handshake.begin_half(receive_calls, call, parity, block)
                handshake.time_announcements(timed, begun, active, parity, call, COUNT_BITS, waited, block, thread, R)
                steps.read_headers(s, mem, incoming, begin, now, block, thread)
                if nodes:
                    over_nodes.learn_of_messages(s, mem, tables, source, parity, block, thread)
                    over_nodes.pass_on_all(s, mem, tables, now, source, slot, total, choice, block, warp, lane)
                handshake.sum_of(incoming, total, R)
                for i in T.serial((total + blocks * s.warps - 1) // (blocks * s.warps)):
                    # Consecutive rows go to different blocks.
                    slot = (i * s.warps + warp) * blocks + block
                    if slot < total:
                        handshake.find_source(incoming, source, slot)
                        place = (parity * R + source) * M + slot
                        handshake.time_message(timed, arrived, place, call, waited, source, lane)
                        N.wait_warp(arrived[place], "ge", call)
                        steps.receive_row(s, mem, begin, me, source, slot, place, lane, column_scales)
                        if nodes:
                            over_nodes.note_carrier(s, mem, tables, me, source, slot, place, choice, lane)
                T.sync_threads()
                handshake.end_half(receive_calls, call, blocks, absent, block, thread, threads)

    return main
