"""Dispatch in latency mode where nodes have several ranks: each message crosses the network once per node.

A block makes a token's message as in dispatch_latency.py and puts it to the ranks of its own node, and once to this rank's
gateway in every other node that hosts one of the token's experts. There a warp for each choice waits for the message and
puts it on over mapped memory, to the place at the receiver that the message itself names; so receivers see no difference.
Headers go to every rank from its source, and tell a gateway how many messages to expect. What is passed on is so in the
half that receives: it waits for nothing but what sources send.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.announcement import STATUS_WORDS
from tilescale_net.kernels.moe import dispatch_latency_steps as steps
from tilescale_net.kernels.moe import handshake
from tilescale_net.kernels.moe.node_layout import LatencyNodePlan, Nodes
from tilescale_net.kernels.moe.row_ops import EXPLICIT_SYNC, FP8
from tilescale_net.kernels.moe.wire_layout import COUNT_BITS


@tsn.macro
def _send_message(
    s, at, message, arrival, arrived, relayed, came, token_slot, origin_slot, node_map, mine, same_expert, same_rank,
    same_node, me: T.Ref, token: T.Ref, parity: T.Ref, call: T.Ref, thread, warp, lane,
):  # fmt: skip
    """Complete a token's message and put it to the ranks of this node and to the gateways of others, by a warp each."""
    R, K, M, local, msg = s.ranks, s.top_k, s.max_tokens, s.local, s.message
    peer = T.alloc_var("int32")
    place = T.alloc_var("int32")
    slot = T.alloc_var("int32")
    first = T.alloc_var("int32")
    first_of_node = T.alloc_var("int32")
    for g in T.serial((K + s.threads - 1) // s.threads):
        place = g * s.threads + thread
        if place < K:
            first = 0
            for q in T.serial(place):
                if mine[q] == mine[place]:
                    first = first + 1
            message[parity * M + token, msg.indices + place] = same_expert[place] + first
            message[parity * M + token, msg.at_rank + place] = same_rank[place]
            message[parity * M + token, msg.at_node + place] = same_node[place]
    T.sync_threads()
    for g in T.serial((K + s.warps - 1) // s.warps):
        place = g * s.warps + warp
        if place < K:
            if mine[place] >= 0:
                first = 1
                first_of_node = 1
                for q in T.serial(place):
                    if mine[q] >= 0:
                        if mine[q] // local == mine[place] // local:
                            first = 0
                        if mine[q] // (local * at.size) == mine[place] // (local * at.size):
                            first_of_node = 0
                peer = mine[place] // local
                if first != 0 and lane == 0:
                    token_slot[token, peer] = same_rank[place]
                if peer // at.size == me // at.size:
                    if first != 0:
                        if lane == 0:
                            origin_slot[token, me // at.size + peer % at.size] = same_rank[place]
                        N.put_signal_warp(
                            arrival[(parity * R + me) * M + same_rank[place], 0], message[parity * M + token, 0], peer,
                            arrived[(parity * R + me) * M + same_rank[place]], call, count=msg.words,
                        )  # fmt: skip
                elif first_of_node != 0:
                    if lane == 0:
                        slot = peer // at.size
                        if slot > me // at.size:
                            slot = slot + at.size - 1
                        origin_slot[token, slot] = same_node[place]
                    slot = node_map[at.gateway_slot + peer // at.size]
                    peer = node_map[at.gateway + peer // at.size]
                    slot = (parity * at.slots + slot) * M + same_node[place]
                    N.put_signal_warp(
                        relayed[slot, 0], message[parity * M + token, 0], peer, came[slot], call, count=msg.words,
                    )  # fmt: skip
    T.sync_threads()


@tsn.macro
def _pass_on(
    s, at, plan, timed, relayed, came, arrival, arrived, node_plan, waited, me: T.Ref, source: T.Ref, k: T.Ref, j: T.Ref,
    choice: T.Ref, parity: T.Ref, call: T.Ref, lane,
):  # fmt: skip
    """Put message `j` of the source of slot `k` on to the rank of its choice number `choice`, unless that is another node's,
    or an earlier choice's; and note, for combine, number `choice` of the ranks that it goes to."""
    R, K, M, local, msg = s.ranks, s.top_k, s.max_tokens, s.local, s.message
    row = T.alloc_var("int32")
    rank = T.alloc_var("int32")
    other = T.alloc_var("int32")
    first = T.alloc_var("int32")
    again = T.alloc_var("int32")
    number = T.alloc_var("int32")  # of this rank among those of the message
    count = T.alloc_var("int32")
    row = (parity * at.slots + k) * M + j
    handshake.time_message(timed, came, row, call, waited, source, lane)
    N.wait_warp(came[row], "ge", call)
    rank = -1
    if relayed[row, msg.experts + choice] >= 0:
        rank = relayed[row, msg.experts + choice] // local
        if rank // at.size != me // at.size:
            rank = -1
    first = 1
    number = 0
    count = 0
    for q in T.serial(K):
        other = relayed[row, msg.experts + q]
        if other >= 0:
            other = other // local
            if other // at.size == me // at.size:
                again = 0
                for p in T.serial(q):
                    if relayed[row, msg.experts + p] >= 0:
                        if relayed[row, msg.experts + p] // local == other:
                            again = 1
                if again == 0:
                    count = count + 1
                    if other < rank:
                        number = number + 1
                if other == rank and q < choice:
                    first = 0
    if lane == 0:
        if choice >= count:
            node_plan[plan.receiver(k, j, choice)] = -1
        if rank >= 0 and first != 0:
            node_plan[plan.receiver(k, j, number)] = rank % at.size
    if rank >= 0 and first != 0:
        other = relayed[row, msg.at_rank + choice]
        # The receiver has no place for it where the source has reported a fault.
        if other >= 0 and other < M:
            other = (parity * R + source) * M + other
            N.put_signal_warp(arrival[other, 0], relayed[row, 0], rank, arrived[other], call, count=msg.words)


@tsn.macro
def _learn_of_messages(
    s, at, plan, header_in, node_map, node_plan, passing, source: T.Ref, parity: T.Ref, block, thread
):
    """How many messages come from the source of each slot to be passed on: into `passing` [slots], and for combine."""
    for i in T.serial((at.slots + s.threads - 1) // s.threads):
        if i * s.threads + thread < at.slots:
            passing[i * s.threads + thread] = 0
            source = node_map[at.source + i * s.threads + thread]
            if source >= 0:
                passing[i * s.threads + thread] = T.min(
                    header_in[parity * s.ranks + source, s.header.to_node], s.max_tokens
                )
            if block == 0:
                node_plan[plan.passed(i * s.threads + thread)] = passing[i * s.threads + thread]
    T.sync_threads()


@tsn.macro
def _pass_on_all(
    s, at, plan, timed, relayed, came, arrival, arrived, node_map, node_plan, passing, waited, me: T.Ref, source: T.Ref,
    slot: T.Ref, total: T.Ref, choice: T.Ref, parity: T.Ref, call: T.Ref, block, warp, lane,
):  # fmt: skip
    """Pass on what comes to be passed on, by a warp for each choice of each message."""
    k = T.alloc_var("int32")
    handshake.sum_of(passing, total, at.slots)
    for i in T.serial((total * s.top_k + s.blocks * s.warps - 1) // (s.blocks * s.warps)):
        slot = (i * s.warps + warp) * s.blocks + block
        if slot < total * s.top_k:
            choice = slot % s.top_k
            slot = slot // s.top_k
            handshake.find_source(passing, k, slot)
            source = node_map[at.source + k]
            _pass_on(
                s, at, plan, timed, relayed, came, arrival, arrived, node_plan, waited, me, source, k, slot, choice, parity, call,
                lane,
            )  # fmt: skip


@tsn.jit(name="moe::dispatch_latency_nodes", pass_configs=EXPLICIT_SYNC)
def dispatch_latency_nodes(
    ranks, experts, nodes, slots, top_k, max_tokens, row_words, scale_words, source_dtype, sends, receives, blocks, threads,
    index_dtype, absent=0, timed=False,
):  # fmt: skip
    """Kernel that sends, receives, or both.

    Args:
        nodes, slots: see Nodes. The others are those of dispatch_latency.

    Parameters of the kernel:
        relayed [2 * slots * max_tokens, words] int32, came [2 * slots * max_tokens] uint64: symmetric; messages to be
        passed on. node_map: see Nodes. node_plan: see LatencyNodePlan. origin_slot [rows, origins]: see
        ReceivedRows. The others are those of dispatch_latency.
    """
    R, K, M, S, at = ranks, top_k, max_tokens, slots, Nodes(ranks, nodes, slots)
    plan = LatencyNodePlan(at, M, K)
    s = steps.Sizes(R, experts, K, M, row_words, scale_words, source_dtype, blocks, threads, at.size)
    msg, head, local = s.message, s.header, s.local
    scale_width = max(scale_words, 1)
    rows, scale_rows, choices, slot_rows = (T.dynamic(n) for n in ("rows", "scale_rows", "choices", "slot_rows"))
    scale_capacity = T.dynamic("scale_capacity")

    # Longer than 120 lines: parameters and variables that senders and receivers have in common; their work is in macros.
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
        relayed: T.Tensor((2 * S * M, msg.words), "int32"),
        begun: T.Tensor((2 * R,), "uint64"),
        arrived: T.Tensor((2 * R * M,), "uint64"),
        came: T.Tensor((2 * S * M,), "uint64"),
        node_map: T.Tensor((at.map_words,), "int32"),
        send_calls: T.Tensor((blocks + absent,), "uint64"),
        receive_calls: T.Tensor((blocks + absent,), "uint64"),
        status: T.Tensor((STATUS_WORDS,), "int64"),
        token_slot: T.Tensor((slot_rows, R), "int32"),
        out: T.Tensor((local * s.capacity, row_words), "int32"),
        out_scales: T.Tensor((scale_capacity, scale_width), "int32"),
        counts: T.Tensor((local,), "int32"),
        targets: T.Tensor((R * M, K), "int32"),
        weights: T.Tensor((R * M, K), "float32"),
        received: T.Tensor((R,), "int32"),
        source_counts: T.Tensor((local, R), "int32"),
        source_token: T.Tensor((local, s.capacity), "int32"),
        origin_slot: T.Tensor((slot_rows, at.origins), "int32"),
        node_plan: T.Tensor((plan.words,), "int32"),
        waited: T.Tensor((R,), "uint64") if timed else None,
    ):
        with T.Kernel(blocks, threads=threads) as block:
            mine = T.alloc_shared((K,), "int32")  # as in dispatch_latency
            same_expert = T.alloc_shared((K,), "int32")
            same_rank = T.alloc_shared((K,), "int32")
            same_node = T.alloc_shared((K,), "int32")  # earlier tokens with a choice in the same node
            histogram = T.alloc_shared((s.bins,), "int32")
            bad = T.alloc_shared((2,), "int32")
            begin = T.alloc_shared((local, R), "int32")
            incoming = T.alloc_shared((R,), "int32")
            passing = T.alloc_shared((S,), "int32")
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            me = T.alloc_var("int32")
            me = N.my_pe()
            call = T.alloc_var("uint64")
            parity = T.alloc_var("int32")  # which of the two sets of buffers

            if sends:
                token = T.alloc_var("int32")
                piece = T.alloc_local((s.batch * s.width,), s.source_type)
                # A block without a token makes no use of its count, so its threads need not meet before it is raised.
                N.benign_race(send_calls[block])
                handshake.begin_half(send_calls, call, parity, block)
                if block == blocks - 1:
                    steps.count_choices(
                        s, topk_idx, tokens, fault, fault_value, active, begun, histogram, bad, parity, call, thread
                    )
                    steps.send_headers(
                        s, header_out, header_in, begun, active, histogram, bad, me, parity, call, thread, warp
                    )
                for i in T.serial((tokens + blocks - 1) // blocks):
                    token = i * blocks + block
                    if token < tokens:
                        for g in T.serial((K + threads - 1) // threads):
                            if g * threads + thread < K:
                                same_node[g * threads + thread] = 0
                        steps.load_token(
                            s, x, topk_idx, topk_weights, active, message, mine, same_expert, same_rank, piece, token,
                            parity, thread, warp, lane,
                        )  # fmt: skip
                        steps.find_places(s, topk_idx, active, mine, same_expert, same_rank, same_node, token, thread)
                        steps.write_row(
                            s, x_scales, message, message_fp8, message_scales, piece, token, parity, thread, warp, lane
                        )
                        if thread < at.origins:
                            origin_slot[token, thread] = -1
                        if thread < R:
                            token_slot[token, thread] = -1
                            if i == 0 and active[thread] != 0:
                                handshake.await_previous(begun, parity, call, COUNT_BITS, thread, R)
                        T.sync_threads()
                        _send_message(
                            s, at, message, arrival, arrived, relayed, came, token_slot, origin_slot, node_map, mine,
                            same_expert, same_rank, same_node, me, token, parity, call, thread, warp, lane,
                        )  # fmt: skip
                handshake.end_half(send_calls, call, blocks, absent, block, thread, threads)

            if receives:
                source = T.alloc_var("int32")
                slot = T.alloc_var("int32")
                place = T.alloc_var("int32")
                total = T.alloc_var("int32")
                choice = T.alloc_var("int32")
                handshake.begin_half(receive_calls, call, parity, block)
                handshake.time_announcements(timed, begun, active, parity, call, COUNT_BITS, waited, block, thread, R)
                steps.read_headers(
                    s, header_in, begun, active, status, incoming, begin, counts, source_counts, received, parity, call,
                    block, thread,
                )  # fmt: skip
                _learn_of_messages(s, at, plan, header_in, node_map, node_plan, passing, source, parity, block, thread)
                _pass_on_all(
                    s, at, plan, timed, relayed, came, arrival, arrived, node_map, node_plan, passing, waited, me, source, slot, total,
                    choice, parity, call, block, warp, lane,
                )  # fmt: skip
                handshake.sum_of(incoming, total, R)
                for i in T.serial((total + blocks * s.warps - 1) // (blocks * s.warps)):
                    # Consecutive rows go to different blocks.
                    slot = (i * s.warps + warp) * blocks + block
                    if slot < total:
                        handshake.find_source(incoming, source, slot)
                        place = (parity * R + source) * M + slot
                        handshake.time_message(timed, arrived, place, call, waited, source, lane)
                        N.wait_warp(arrived[place], "ge", call)
                        steps.receive_row(
                            s, arrival, out, out_scales, targets, weights, source_token, begin, me, source, slot, place,
                            lane,
                        )  # fmt: skip
                        if lane == 0:
                            for q in T.serial(K):
                                choice = arrival[place, msg.experts + q]
                                if choice >= me * local and choice < (me + 1) * local:
                                    node_plan[plan.carried(source, slot)] = arrival[place, msg.at_node + q]
                T.sync_threads()
                handshake.end_half(receive_calls, call, blocks, absent, block, thread, threads)

    return main
