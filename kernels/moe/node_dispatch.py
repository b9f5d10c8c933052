"""Dispatch in throughput mode where nodes have several ranks: each row crosses the network once per node.

A sending warp stages rows to another node and puts them, several to a message, to this rank's gateway there. The gateway's
warps put each row on to the ranks of their node that need it, over mapped memory, as the source itself does in its own
node; so receivers see no difference. Rows to other nodes leave first, then those to this node, then those that this rank
passes on: by then they begin to come in, and no warp waits for what another one has not begun to send.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.announcement import STATUS_WORDS
from tilescale_net.kernels.moe import handshake
from tilescale_net.kernels.moe.dispatch_throughput import (
    Sizes,
    put_row,
    put_staged,
    receive_row,
    send_direct,
    signal_chunk,
)
from tilescale_net.kernels.moe.node_layout import NodePlan, Nodes
from tilescale_net.kernels.moe.row_ops import EXPLICIT_SYNC, copy_row, copy_words
from tilescale_net.kernels.moe.wire_layout import Totals, record_words


@tsn.macro
def _send_to_node(
    s, at, plan, x, x_scales, staged, staged_scales, relayed, relayed_scales, came, node_map, node_plan, call: T.Ref,
    b: T.Ref, node: T.Ref, c: T.Ref, n: T.Ref, slot: T.Ref, row: T.Ref, token: T.Ref, peer: T.Ref, lane,
):  # fmt: skip
    """Stage the `n` rows of chunk `c` and put them to this rank's gateway in node `b`."""
    slot = (b + at.nodes - 1 - node) % at.nodes * s.max_tokens + c * s.proxied_chunk
    for q in T.serial(n):
        token = node_plan[plan.token(b, c * s.proxied_chunk + q)]
        copy_row(staged, slot + q, x, token, s.row_words, lane, 16)
        if s.scale_words:
            copy_words(staged_scales, slot + q, x_scales, token, s.scale_words, lane)
    peer = node_map[at.gateway + b]
    row = node_map[at.gateway_slot + b] * s.max_tokens + c * s.proxied_chunk
    put_staged(s, relayed, relayed_scales, row, staged, staged_scales, slot, peer, n)
    row = node_map[at.gateway_slot + b]
    signal_chunk(came, row, c, call, peer, lane)


@tsn.macro
def _pass_on(
    s, plan, out, out_scales, arrival, arrival_scales, relayed, relayed_scales, came, arrived, node_plan, call: T.Ref, k: T.Ref,
    source: T.Ref, r: T.Ref, peer: T.Ref, c: T.Ref, n: T.Ref, j: T.Ref, row: T.Ref, slot: T.Ref, last: T.Ref, lane,
):  # fmt: skip
    """Put the `n` rows of chunk `c` that the source of slot `k` has for `peer`, rank `r` of this node, when they are here."""
    j = c * s.chunk
    slot = node_plan[plan.forward(k, r, j, 0)] // s.proxied_chunk
    last = node_plan[plan.forward(k, r, j + n - 1, 0)] // s.proxied_chunk
    while slot <= last:
        N.wait_warp(came[k, slot], "ge", call)
        slot = slot + 1
    for q in T.serial(n):
        j = c * s.chunk + q
        slot = k * s.max_tokens + node_plan[plan.forward(k, r, j, 0)]
        if s.placement == "expert":
            row = node_plan[plan.forward(k, r, j, 1)]
        else:
            row = node_plan[plan.head(k, 2 + 2 * r)] + j
        if s.in_place:
            put_row(s, out, out_scales, row, relayed, relayed_scales, slot, peer)
        else:
            put_row(s, arrival, arrival_scales, row, relayed, relayed_scales, slot, peer)
    if not s.by_rank:
        signal_chunk(arrived, source, c, call, peer, lane)


@tsn.jit(name="moe::dispatch_nodes", pass_configs=EXPLICIT_SYNC)
def dispatch_nodes(
    ranks, experts, nodes, slots, top_k, max_tokens, row_words, scale_words, placement, chunk, proxied_chunk, senders,
    receivers, threads, absent=0, absent_senders=0,
):  # fmt: skip
    """Kernel that moves the rows.

    Args:
        nodes, slots: see Nodes. The others are those of dispatch_throughput.

    Parameters of the kernel (int32 unless said; rows and scales are moved as words of 4 bytes):
        staged, staged_scales [(nodes - 1) * max_tokens, …]: symmetric; rows to other nodes.
        relayed, relayed_scales [slots * max_tokens, …]: symmetric; rows to be passed on.
        came [slots, chunks]: uint64, symmetric; as `arrived`, of rows to be passed on.
        node_map: see Nodes. node_plan: see NodePlan.
        The others are those of dispatch_throughput; arrival is used for "arrival" only.
    """
    R, M, S, at = ranks, max_tokens, slots, Nodes(ranks, nodes, slots)
    plan = NodePlan(at, M)
    s = Sizes(R, top_k, M, row_words, scale_words, placement, False, chunk, proxied_chunk)
    totals_at, W, L = Totals(R, experts // R), record_words(top_k), at.size
    chunks, node_chunks = -(-M // chunk), -(-M // proxied_chunk)
    blocks, scale_width = senders + receivers, max(scale_words, 1)
    # Tickets: chunks to nodes, then those to ranks of this node, then those to be passed on.
    to_nodes, to_ranks, to_pass_on = nodes * node_chunks, L * chunks, S * L * chunks
    rows, scale_rows, capacity, scale_capacity = (
        T.dynamic(n) for n in ("rows", "scale_rows", "capacity", "scale_capacity")
    )
    arrivals, scale_arrivals, stages, scale_stages = (
        T.dynamic(n) for n in ("arrivals", "scale_arrivals", "stages", "scale_stages")
    )
    relays, scale_relays = T.dynamic("relays"), T.dynamic("scale_relays")

    # Longer than 120 lines: parameters and variables that senders and receivers have in common; their work is in macros.
    @T.prim_func
    def main(
        ctx: N.Context(),
        x: T.Tensor((rows, row_words), "int32"),
        x_scales: T.Tensor((scale_rows, scale_width), "int32"),
        out: T.Tensor((capacity, row_words), "int32"),
        out_scales: T.Tensor((scale_capacity, scale_width), "int32"),
        arrival: T.Tensor((arrivals, row_words), "int32"),
        arrival_scales: T.Tensor((scale_arrivals, scale_width), "int32"),
        staged: T.Tensor((stages, row_words), "int32"),
        staged_scales: T.Tensor((scale_stages, scale_width), "int32"),
        relayed: T.Tensor((relays, row_words), "int32"),
        relayed_scales: T.Tensor((scale_relays, scale_width), "int32"),
        came: T.Tensor((S, chunks), "uint64"),
        send_token: T.Tensor((R, M), "int32"),
        send_row: T.Tensor((R, M), "int32"),
        records: T.Tensor((R, M, W), "int32"),
        totals: T.Tensor((totals_at.words,), "int32"),
        node_map: T.Tensor((at.map_words,), "int32"),
        node_plan: T.Tensor((plan.words,), "int32"),
        active: T.Tensor((R,), "int32"),
        ready: T.Tensor((R,), "uint64"),
        arrived: T.Tensor((R, chunks), "uint64"),
        done: T.Tensor((R,), "uint64"),
        tickets: T.Tensor((2, 2), "int32"),
        calls: T.Tensor((blocks + absent,), "uint64"),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            sent = T.alloc_shared((R,), "int32")
            first_row = T.alloc_shared((R,), "int32")
            received = T.alloc_shared((R,), "int32")
            landed = T.alloc_shared((R,), "int32")  # where the rows from each rank begin among those that arrive
            thread = T.get_thread_binding()
            lane = thread % 32
            me = T.alloc_var("int32")
            me = N.my_pe()
            node = T.alloc_var("int32")
            node = me // L
            call = T.alloc_var("uint64")
            call = calls[block] + T.uint64(1)
            if thread < R:
                sent[thread] = totals[totals_at.sent + thread]
                first_row[thread] = totals[totals_at.sent_base + thread]
                received[thread] = totals[totals_at.received + thread]
                landed[thread] = totals[totals_at.received_base + thread]
                handshake.open_call(ready, active, status, me, call, tag, block, senders, thread)
            T.sync_threads()

            # Each index has a variable of its own, because the compiler's arithmetic on sums of them cannot be trusted.
            peer = T.alloc_var("int32")
            b = T.alloc_var("int32")
            k = T.alloc_var("int32")
            r = T.alloc_var("int32")
            c = T.alloc_var("int32")
            j = T.alloc_var("int32")
            n = T.alloc_var("int32")
            row = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            last = T.alloc_var("int32")
            token = T.alloc_var("int32")
            direct = T.alloc_var("int32", init=1)
            parity = T.alloc_var("int32")
            parity = T.cast(call % T.uint64(2), "int32")
            ahead = T.alloc_var("int32", init=0)
            ticket = T.alloc_var("int32")
            handshake.clear_tickets(tickets, parity, block, thread)
            if block < senders:
                handshake.first_ticket(tickets, parity, 0, ahead, ticket, lane)
                while ticket < to_nodes + to_ranks + to_pass_on:
                    handshake.take_ticket(tickets, parity, 0, ahead, lane)
                    if ticket < to_nodes:
                        c = ticket // nodes
                        b = (ticket % nodes + node) % nodes
                        if b != node and c * proxied_chunk < node_plan[plan.rows(b)]:
                            n = T.min(proxied_chunk, node_plan[plan.rows(b)] - c * proxied_chunk)
                            _send_to_node(
                                s, at, plan, x, x_scales, staged, staged_scales, relayed, relayed_scales, came, node_map,
                                node_plan, call, b, node, c, n, slot, row, token, peer, lane,
                            )  # fmt: skip
                    elif ticket < to_nodes + to_ranks:
                        c = (ticket - to_nodes) // L
                        peer = node * L + ((ticket - to_nodes) % L + me) % L
                        if c * chunk < sent[peer] and (s.by_rank or peer != me):
                            n = T.min(chunk, sent[peer] - c * chunk)
                            send_direct(
                                s, x, x_scales, out, out_scales, arrival, arrival_scales, send_token, send_row, first_row,
                                peer, c, n, j, row, token,
                            )  # fmt: skip
                            if not s.by_rank:
                                signal_chunk(arrived, me, c, call, peer, lane)
                    else:
                        c = (ticket - to_nodes - to_ranks) // (S * L)
                        k = (ticket - to_nodes - to_ranks) // L % S
                        r = ((ticket - to_nodes - to_ranks) % L + me) % L
                        peer = node * L + r
                        row = node_plan[plan.head(k, 1 + 2 * r)]
                        if c * chunk < row:
                            n = T.min(chunk, row - c * chunk)
                            token = node_map[at.source + k]
                            _pass_on(
                                s, plan, out, out_scales, arrival, arrival_scales, relayed, relayed_scales, came, arrived,
                                node_plan, call, k, token, r, peer, c, n, j, row, slot, last, lane,
                            )  # fmt: skip
                    ticket = T.shfl_sync(ahead, 0)
                T.sync_threads()
                handshake.count_sender(done, active, me, thread, R)

            if receivers:
                # Senders that are done help to receive.
                handshake.first_ticket(tickets, parity, 1, ahead, ticket, lane)
                while ticket < R * chunks:
                    handshake.take_ticket(tickets, parity, 1, ahead, lane)
                    c = ticket // R
                    peer = (me + R - ticket % R) % R
                    if c * chunk < received[peer]:
                        if peer != me:
                            N.wait_warp(arrived[peer, c], "ge", call)
                        n = T.min(chunk, received[peer] - c * chunk)
                        for q in T.serial(n):
                            j = c * chunk + q
                            receive_row(
                                s, x, x_scales, out, out_scales, arrival, arrival_scales, send_token, records, landed, me,
                                peer, j, row, slot, token, direct, lane,
                            )  # fmt: skip
                    ticket = T.shfl_sync(ahead, 0)
            T.sync_threads()
            handshake.close_call(
                done, active, calls, me, call, blocks, senders, absent, absent_senders, block, thread, threads, R
            )

    return main
