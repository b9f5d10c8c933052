"""Dispatch in throughput mode where nodes have several ranks: each row crosses the network once per node.

A sending warp stages rows to another node and puts them, several to a message, to this rank's gateway there. The gateway's
warps put each row on to the ranks of their node that need it, over mapped memory, as the source itself does in its own
node; so receivers see no difference. Rows to other nodes leave first, then those to this node, then those that this rank
passes on: by then they begin to come in, and no warp waits for what another one has not begun to send.
"""

from typing import Any, NamedTuple

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.announcement import STATUS_WORDS
from tilescale_net.kernels.moe import handshake
from tilescale_net.kernels.moe.dispatch_throughput import (
    Memory,
    Places,
    Sizes,
    put_row,
    put_staged,
    receive_row,
    send_direct,
    stage,
)
from tilescale_net.kernels.moe.node_layout import NodeNow, NodePlan, Nodes, NodeTables
from tilescale_net.kernels.moe.row_ops import EXPLICIT_SYNC, Rows
from tilescale_net.kernels.moe.totals import Totals
from tilescale_net.kernels.moe.wire_layout import record_words


class _ToNode(NamedTuple):
    """The chunk of rows that a warp sends to another node; int32 variables of the kernel.

    Attributes:
        b: the node. c: the number of the chunk. n: its rows.
    """

    b: Any
    c: Any
    n: Any


class _Passed(NamedTuple):
    """The chunk of rows that a gateway passes on; int32 variables of the kernel.

    Attributes:
        k: slot of the source. source: its rank. r: index in this node of the rank that gets the rows. peer: that rank.
        c: the number of the chunk. n: its rows.
    """

    k: Any
    source: Any
    r: Any
    peer: Any
    c: Any
    n: Any


@tsn.macro
def _send_to_node(s, mem, tables, now, chunk, slot: T.Ref, row: T.Ref, token: T.Ref, peer: T.Ref, lane):
    """Stage the rows of a chunk and put them to this rank's gateway in their node."""
    at, plan = tables.at, tables.plan
    slot = (chunk.b + at.nodes - 1 - now.node) % at.nodes * s.max_tokens + chunk.c * s.proxied_chunk
    for q in T.serial(chunk.n):
        token = tables.words[plan.token(chunk.b, chunk.c * s.proxied_chunk + q)]
        stage(s, mem, slot, q, token, lane)
    peer = tables.map[at.gateway + chunk.b]
    row = tables.map[at.gateway_slot + chunk.b] * s.max_tokens + chunk.c * s.proxied_chunk
    put_staged(s, mem.relayed, row, mem.staged, slot, peer, chunk.n)
    row = tables.map[at.gateway_slot + chunk.b]
    N.signal_warp(mem.came[row, chunk.c], now.call, peer)


@tsn.macro
def _pass_on(s, mem, tables, call: T.Ref, chunk, j: T.Ref, row: T.Ref, slot: T.Ref, last: T.Ref, lane):
    """Put the rows of a chunk on to their rank, when they are here."""
    plan = tables.plan
    j = chunk.c * s.chunk
    slot = tables.words[plan.forward(chunk.k, chunk.r, j, 0)] // s.proxied_chunk
    last = tables.words[plan.forward(chunk.k, chunk.r, j + chunk.n - 1, 0)] // s.proxied_chunk
    while slot <= last:
        N.wait_warp(mem.came[chunk.k, slot], "ge", call)
        slot = slot + 1
    for q in T.serial(chunk.n):
        j = chunk.c * s.chunk + q
        slot = chunk.k * s.max_tokens + tables.words[plan.forward(chunk.k, chunk.r, j, 0)]
        if s.placement == "expert":
            row = tables.words[plan.forward(chunk.k, chunk.r, j, 1)]
        else:
            row = tables.words[plan.head(chunk.k, 2 + 2 * chunk.r)] + j
        put_row(s, mem.out if s.in_place else mem.arrival, row, mem.relayed, slot, chunk.peer)
    if not s.by_rank:
        N.signal_warp(mem.arrived[chunk.source, chunk.c], call, chunk.peer)


@tsn.jit(name="moe::dispatch_nodes", pass_configs=EXPLICIT_SYNC)
def dispatch_nodes(
    ranks, experts, nodes, slots, top_k, max_tokens, row_words, scale_words, placement, chunk, proxied_chunk, senders,
    receivers, threads, absent=0, absent_senders=0,
):  # fmt: skip
    """Kernel that moves the rows.

    Args:
        nodes, slots: see Nodes. The others are those of dispatch_throughput.

    Parameters of the kernel (int32 where no type is named; rows and scales are moved as words of 4 bytes):
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
            places, tables = Places(first_row, landed), NodeTables(at, plan, node_map, node_plan)
            mem = Memory(
                x=Rows(x, x_scales),
                out=Rows(out, out_scales),
                arrival=Rows(arrival, arrival_scales),
                staged=Rows(staged, staged_scales),
                send_token=send_token,
                send_row=send_row,
                records=records,
                arrived=arrived,
                relayed=Rows(relayed, relayed_scales),
                came=came,
            )
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
            now, taken = NodeNow(me, node, call), handshake.Chunk(peer, c, n)
            to_node, passed = _ToNode(b, c, n), _Passed(k, token, r, peer, c, n)
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
                            _send_to_node(s, mem, tables, now, to_node, slot, row, token, peer, lane)
                    elif ticket < to_nodes + to_ranks:
                        c = (ticket - to_nodes) // L
                        peer = node * L + ((ticket - to_nodes) % L + me) % L
                        if c * chunk < sent[peer] and (s.by_rank or peer != me):
                            n = T.min(chunk, sent[peer] - c * chunk)
                            send_direct(s, mem, places, taken, j, row, token)
                            if not s.by_rank:
                                N.signal_warp(arrived[me, c], call, peer)
                    else:
                        c = (ticket - to_nodes - to_ranks) // (S * L)
                        k = (ticket - to_nodes - to_ranks) // L % S
                        r = ((ticket - to_nodes - to_ranks) % L + me) % L
                        peer = node * L + r
                        row = node_plan[plan.head(k, 1 + 2 * r)]
                        if c * chunk < row:
                            n = T.min(chunk, row - c * chunk)
                            token = node_map[at.source + k]
                            _pass_on(s, mem, tables, call, passed, j, row, slot, last, lane)
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
                            receive_row(s, mem, places, me, peer, j, row, slot, token, direct, lane)
                    ticket = T.shfl_sync(ahead, 0)
            T.sync_threads()
            ends = handshake.Ends(active, done, calls)
            of = handshake.Blocks(R, blocks, threads, senders, absent, absent_senders)
            handshake.close_call(of, ends, me, call, block, thread)

    return main
