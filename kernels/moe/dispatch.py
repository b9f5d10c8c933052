"""Dispatch in throughput mode: moves the rows of a routing plan, each once per target rank.

Sending warps put rows straight from the caller's tensor to their planned places at the target. Rows to another node go
through staging memory, several to a message. `placement` selects the work at the target:

- "rank": rows lie by source rank and token; no copy.
- "expert": the row lands at its first expert's row there; receiving warps copy it to the rows of its other experts.
- "staged": for an output that peers cannot reach: rows land in a buffer, receiving warps copy all of them.

Copying overlaps with sending: every chunk of rows has a signal, which carries the call number.

With `nodes` each row crosses the network once per node: to this rank's forwarder there, whose warps forward it over
mapped memory to the ranks of their node that need it, as the source does in its own node; receivers see no difference.
Rows to other nodes leave first, then rows to this node, then rows that this rank forwards: these have begun to arrive
by then, and no warp waits for a send that another warp has not begun.
"""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.collective import EXPLICIT_SYNC, STATUS_WORDS
from tilescale_net.kernels.moe import handshake
from tilescale_net.kernels.moe.layout import NodeLayout, NodePlanOffsets, PlanOffsets, Route, record_words
from tilescale_net.kernels.moe.row_ops import (
    Rows,
    batch_of,
    copy_row,
    copy_words,
    int_vars,
    load_batch,
    shared_ints,
    store_batch,
)
from tilescale_net.kernels.moe.tiles import add_missing_rows, count_rows, signal_started


@dataclass(frozen=True)
class DispatchConfig:
    """Compile-time sizes and choices; see dispatch_throughput."""

    ranks: int
    top_k: int
    max_tokens: int
    row_words: int
    scale_words: int
    placement: str
    proxied: bool
    chunk: int
    proxied_chunk: int

    @property
    def by_rank(self) -> bool:
        return self.placement == "rank"

    @property
    def in_place(self) -> bool:
        return self.placement != "staged"

    @property
    def unroll(self) -> int:
        return batch_of(self.row_words // 4, 16)


# The tensors of dispatch_throughput; x, out, arrival, staged and to_forward are `Rows`.
DispatchTensors = namedtuple(
    "DispatchTensors", "x out arrival staged send_token send_row records arrived to_forward forward_arrived"
)


class RowOffsets(NamedTuple):
    """The rows to and from each rank; int32 [ranks] each, of shared memory.

    Attributes:
        sent, received: how many.
        first_row: this rank's first row at each rank.
        before: the first row to each rank among the sent rows; unused if rows cross the network once per node.
        landed: the first row of each rank among the arriving rows.
    """

    sent: Any
    first_row: Any
    received: Any
    before: Any
    landed: Any


class NodeChunk(NamedTuple):
    """The chunk of rows that a warp sends to another node, or forwards in its own; int32 variables of the kernel.
    `node`: the other node. k: slot of the source of forwarded rows. source: its rank. r: index in this node of the
    rank that gets the rows. peer: that rank. c: the number of the chunk. n: its rows."""

    node: Any
    k: Any
    source: Any
    r: Any
    peer: Any
    c: Any
    n: Any


@tsn.macro
def put_row(s, dst, row: T.Ref, src, token: T.Ref, pe: T.Ref):
    """Put row `token` of `src` with its scales to row `row` of `dst` at `pe`."""
    N.put_warp(dst.rows[row, 0], src.rows[token, 0], pe, count=s.row_words, unroll=s.unroll)
    if s.scale_words:
        N.put_warp(dst.scales[row, 0], src.scales[token, 0], pe, count=s.scale_words)


@tsn.macro
def put_staged(s, dst, row: T.Ref, staged, slot: T.Ref, pe: T.Ref, count: T.Ref):
    """Put `count` rows from slot `slot` to rows from `row` of `dst` at `pe`: a message of rows, another of scales."""
    N.put_warp(dst.rows[row, 0], staged.rows[slot, 0], pe, count=count * s.row_words)
    if s.scale_words:
        N.put_warp(dst.scales[row, 0], staged.scales[slot, 0], pe, count=count * s.scale_words)


@tsn.macro
def send_direct(s, mem, offsets, chunk, me: T.Ref, call: T.Ref, j: T.Ref, row: T.Ref, token: T.Ref):
    """Put the rows of a chunk from the caller's tensor to their planned rows at a mapped rank, and signal them."""
    for q in T.serial(chunk.n):
        j = chunk.c * s.chunk + q
        token = mem.send_token[chunk.peer, j]
        if s.placement == "expert":
            row = mem.send_row[chunk.peer, j]
        else:
            row = offsets.first_row[chunk.peer] + j
        put_row(s, mem.out if s.in_place else mem.arrival, row, mem.x, token, chunk.peer)
    if not s.by_rank:
        N.signal_warp(mem.arrived[me, chunk.c], call, chunk.peer)


@tsn.macro
def stage(s, mem, slot: T.Ref, q, token: T.Ref, lane):
    """Copy row `token` of the caller's, with its scales, to staging memory."""
    copy_row(mem.staged.rows, slot + q, mem.x.rows, token, s.row_words, lane, 16)
    if s.scale_words:
        copy_words(mem.staged.scales, slot + q, mem.x.scales, token, s.scale_words, lane)


@tsn.macro
def send_proxied(s, mem, offsets, chunk, me: T.Ref, call: T.Ref, slot: T.Ref, row: T.Ref, token: T.Ref, lane):
    """Stage the rows of a chunk, put them to a rank of another node, and signal it."""
    slot = offsets.before[chunk.peer] + chunk.c * s.proxied_chunk
    for q in T.serial(chunk.n):
        token = mem.send_token[chunk.peer, chunk.c * s.proxied_chunk + q]
        stage(s, mem, slot, q, token, lane)
    row = offsets.first_row[chunk.peer] + chunk.c * s.proxied_chunk
    put_staged(s, mem.out if s.by_rank else mem.arrival, row, mem.staged, slot, chunk.peer, chunk.n)
    if not s.by_rank:
        N.signal_warp(mem.arrived[me, chunk.c], call, chunk.peer)


@tsn.macro
def send_to_node(s, mem, route, chunk, node, call: T.Ref, slot: T.Ref, row: T.Ref, token: T.Ref, peer: T.Ref, lane):
    """Stage the rows of a chunk and put them to this rank's forwarder in their node."""
    at, plan = route.at, route.plan
    slot = (chunk.node + at.nodes - 1 - node) % at.nodes * s.max_tokens + chunk.c * s.proxied_chunk
    for q in T.serial(chunk.n):
        token = route.words[plan.token(chunk.node, chunk.c * s.proxied_chunk + q)]
        stage(s, mem, slot, q, token, lane)
    peer = route.forwarder(chunk.node)
    row = route.forwarder_slot(chunk.node) * s.max_tokens + chunk.c * s.proxied_chunk
    put_staged(s, mem.to_forward, row, mem.staged, slot, peer, chunk.n)
    row = route.forwarder_slot(chunk.node)
    N.signal_warp(mem.forward_arrived[row, chunk.c], call, peer)


@tsn.macro
def forward(s, mem, route, chunk, call: T.Ref, j: T.Ref, row: T.Ref, slot: T.Ref, last: T.Ref, lane):
    """Wait for the rows of a chunk and forward them to their rank."""
    plan = route.plan
    j = chunk.c * s.chunk
    slot = route.words[plan.forward(chunk.k, chunk.r, j, 0)] // s.proxied_chunk
    last = route.words[plan.forward(chunk.k, chunk.r, j + chunk.n - 1, 0)] // s.proxied_chunk
    while slot <= last:
        N.wait_warp(mem.forward_arrived[chunk.k, slot], "ge", call)
        slot = slot + 1
    for q in T.serial(chunk.n):
        j = chunk.c * s.chunk + q
        slot = chunk.k * s.max_tokens + route.words[plan.forward(chunk.k, chunk.r, j, 0)]
        if s.placement == "expert":
            row = route.words[plan.forward(chunk.k, chunk.r, j, 1)]
        else:
            row = route.words[plan.head(chunk.k, 2 + 2 * chunk.r)] + j
        put_row(s, mem.out if s.in_place else mem.arrival, row, mem.to_forward, slot, chunk.peer)
    if not s.by_rank:
        N.signal_warp(mem.arrived[chunk.source, chunk.c], call, chunk.peer)


@tsn.macro
def _scatter(s, mem, src, row, source, j, skip, lane):
    """Copy a row to all rows of `mem.out` that its record names, except row `skip`."""
    words, batch = s.row_words, s.unroll
    loaded = T.alloc_local((batch * 4,), "int32")
    for b in T.serial((words // 4 + 32 * batch - 1) // (32 * batch)):
        load_batch(loaded, src.rows, row, b * 32 * batch, lane, words // 4, 4, batch)
        for k in T.serial(s.top_k):
            target = T.alloc_var("int32", mem.records[source, j, k])
            if target >= 0 and target != skip:
                store_batch(mem.out.rows, target, loaded, b * 32 * batch, lane, words // 4, 4, batch)
    if s.scale_words:
        for k in T.serial(s.top_k):
            index = T.alloc_var("int32", mem.records[source, j, k])
            if index >= 0 and index != skip:
                copy_words(mem.out.scales, index, src.scales, row, s.scale_words, lane)


@tsn.macro
def receive_row(
    s, mem, offsets, me: T.Ref, peer: T.Ref, j: T.Ref, row: T.Ref, slot: T.Ref, token: T.Ref, direct: T.Ref, lane
):
    """Copy row `j` of `peer` to the rows of its experts; this rank's own rows are read from the caller's tensor."""
    if peer == me:
        token = mem.send_token[me, j]
        _scatter(s, mem, mem.x, token, peer, j, -1, lane)
    else:
        row = -1
        if s.in_place:
            for k in T.serial(s.top_k):
                if row < 0:
                    row = mem.records[peer, j, k]
        if s.in_place and direct != 0:
            _scatter(s, mem, mem.out, row, peer, j, row, lane)
        elif s.proxied or not s.in_place:
            slot = offsets.landed[peer] + j
            _scatter(s, mem, mem.arrival, slot, peer, j, -1, lane)


@tsn.jit(name="moe::dispatch_throughput", pass_configs=EXPLICIT_SYNC)
def dispatch_throughput(
    ranks, experts, top_k, max_tokens, row_words, scale_words, placement, proxied, chunk, proxied_chunk, senders, receivers,
    threads, absent=0, absent_senders=0, tile_rows=0, tiles=0, nodes=0, slots=0,
):  # fmt: skip
    """Kernel that moves the rows.

    Args:
        ranks, experts, top_k, max_tokens: as in the plan.
        row_words, scale_words: 4-byte words of a row (a multiple of 4) and of its scales (0: it has none).
        placement: "rank", "expert" or "staged".
        proxied: whether rows go straight to ranks of other nodes.
        chunk, proxied_chunk: rows per signal to a mapped rank, and rows per message to another node.
        senders, receivers: blocks of each kind (no receivers for "rank"); threads: of a block. All blocks run at once.
        absent, absent_senders: blocks, and senders among them, of the launch geometry that this call lacks; block 0
            counts for them.
        tile_rows, tiles: count the arrived rows of each tile of `out` for a kernel that consumes them meanwhile; 0: no
            tiles.
        nodes, slots: see NodeLayout; 0: each row goes straight to its ranks.

    Parameters of the kernel (int32 if no type is named; rows and scales are moved as words of 4 bytes):
        x, x_scales: rows to send. out, out_scales: symmetric, except for "staged".
        arrival, arrival_scales [rows received, …]: symmetric; used for "staged" and for rows that come straight from other
        nodes.
        staged, staged_scales [rows sent to other nodes, …]: symmetric.
        to_forward, to_forward_scales [slots * max_tokens, …]: symmetric; rows to forward. forward_arrived [slots, chunks]: uint64, symmetric;
        as `arrived`, of rows to forward. node_map: see NodeLayout. node_plan: see NodePlanOffsets. These with nodes only.
        send_token … totals: see RoutingPlan. active [ranks]: 0 for a rank that is left out.
        ready [ranks], done [ranks]: uint64, symmetric. arrived [ranks, chunks]: uint64, symmetric: the last call whose
        chunk has arrived.
        tickets [2, 2]: work given out to senders and to receivers, by the parity of the call; 0 at first.
        calls [senders + receivers]: uint64, calls so far. tag: see output_tag. status: see STATUS_WORDS.
        counted [tiles + 1]: uint64, symmetric, see `Tiles`; only where tiles are counted.
    """
    R, M = ranks, max_tokens
    s = DispatchConfig(R, top_k, M, row_words, scale_words, placement, proxied, chunk, proxied_chunk)
    at, W = PlanOffsets(R, experts // R), record_words(top_k)
    chunks = -(-M // (chunk if nodes else min(chunk, proxied_chunk)))
    blocks, scale_width = senders + receivers, max(scale_words, 1)
    if nodes:
        node_at, node_chunks = NodeLayout(ranks, nodes, slots), -(-M // proxied_chunk)
        nodes, L, plan = node_at.nodes, node_at.size, NodePlanOffsets(node_at, M)
        # Tickets: chunks to nodes, then those to ranks of this node, then those to forward.
        to_nodes, to_ranks, forwards = nodes * node_chunks, L * chunks, slots * L * chunks

    @T.prim_func
    def main(
        ctx: N.Context(),
        x: T.Tensor((T.dynamic("rows"), row_words), "int32"),
        x_scales: T.Tensor((T.dynamic("scale_rows"), scale_width), "int32"),
        out: T.Tensor((T.dynamic("capacity"), row_words), "int32"),
        out_scales: T.Tensor((T.dynamic("scale_capacity"), scale_width), "int32"),
        arrival: T.Tensor((T.dynamic("arrivals"), row_words), "int32"),
        arrival_scales: T.Tensor((T.dynamic("scale_arrivals"), scale_width), "int32"),
        staged: T.Tensor((T.dynamic("stages"), row_words), "int32"),
        staged_scales: T.Tensor((T.dynamic("scale_stages"), scale_width), "int32"),
        to_forward: T.Tensor((T.dynamic("relays"), row_words), "int32") if nodes else None,
        to_forward_scales: T.Tensor((T.dynamic("scale_relays"), scale_width), "int32") if nodes else None,
        forward_arrived: T.Tensor((slots, chunks), "uint64") if nodes else None,
        send_token: T.Tensor((R, M), "int32"),
        send_row: T.Tensor((R, M), "int32"),
        records: T.Tensor((R, M, W), "int32"),
        totals: T.Tensor((at.words,), "int32"),
        node_map: T.Tensor((node_at.map_words,), "int32") if nodes else None,
        node_plan: T.Tensor((plan.words,), "int32") if nodes else None,
        active: T.Tensor((R,), "int32"),
        ready: T.Tensor((R,), "uint64"),
        arrived: T.Tensor((R, chunks), "uint64"),
        done: T.Tensor((R,), "uint64"),
        tickets: T.Tensor((2, 2), "int32"),
        calls: T.Tensor((blocks + absent,), "uint64"),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        counted: T.Tensor((tiles + 1,), "uint64") if tiles else None,
    ):
        with T.Kernel(blocks, threads=threads) as block:
            sent, first_row, received, before, landed = shared_ints(5, R)
            offsets = RowOffsets(sent, first_row, received, before, landed)
            mem = DispatchTensors(
                Rows(x, x_scales), Rows(out, out_scales), Rows(arrival, arrival_scales), Rows(staged, staged_scales),
                send_token, send_row, records, arrived, Rows(to_forward, to_forward_scales) if nodes else None, forward_arrived,
            )  # fmt: skip
            thread = T.get_thread_binding()
            lane = thread % 32
            me = T.alloc_var("int32", N.my_pe())
            call = T.alloc_var("uint64", calls[block] + T.uint64(1))
            if tiles:
                signal_started(counted, tiles, T.if_then_else(block == 0, 1 + absent, 1), me, thread)
            if thread < R:
                sent[thread] = totals[at.sent + thread]
                first_row[thread] = totals[at.sent_base + thread]
                received[thread] = totals[at.received + thread]
                before[thread] = totals[at.sent_before + thread]
                landed[thread] = totals[at.received_base + thread]
                # From here on outputs may be overwritten: this rank's, and those of every rank that has begun the call.
                handshake.open_call(ready, active, status, me, call, tag, block, senders, thread)
            T.sync_threads()

            # Each index has its own variable: the compiler's arithmetic on their sums cannot be trusted.
            peer, c, j, n, row, slot, token = int_vars(7)
            direct = T.alloc_var("int32", init=1)
            parity = T.alloc_var("int32", T.cast(call % T.uint64(2), "int32"))
            ahead = T.alloc_var("int32", init=0)
            ticket = T.alloc_var("int32")
            taken = handshake.Chunk(peer, c, n)
            if nodes:
                route = Route(node_at, plan, node_map, node_plan)
                b, k, r, last = int_vars(4)
                node = T.alloc_var("int32", node_at.of.node_of(me))
                node_chunk = NodeChunk(b, k, token, r, peer, c, n)
            handshake.clear_tickets(tickets, parity, block, thread)
            if block < senders:
                handshake.first_ticket(tickets, parity, 0, ahead, ticket, lane)
                while ticket < (to_nodes + to_ranks + forwards if nodes else R * chunks):
                    handshake.take_ticket(tickets, parity, 0, ahead, lane)
                    if nodes:
                        if ticket < to_nodes:
                            c = ticket // nodes
                            b = (ticket % nodes + node) % nodes
                            if b != node and c * proxied_chunk < node_plan[plan.rows(b)]:
                                n = T.min(proxied_chunk, node_plan[plan.rows(b)] - c * proxied_chunk)
                                send_to_node(s, mem, route, node_chunk, node, call, slot, row, token, peer, lane)
                        elif ticket < to_nodes + to_ranks:
                            c = (ticket - to_nodes) // L
                            peer = node_at.of.first(node) + ((ticket - to_nodes) % L + me) % L
                            if not node_at.of.is_even:  # a ticket for a rank that this node lacks has no rows
                                c = T.if_then_else(peer < node_at.of.end(node), c, chunks)
                                peer = T.min(peer, R - 1)
                            if c * chunk < sent[peer] and (s.by_rank or peer != me):
                                n = T.min(chunk, sent[peer] - c * chunk)
                                send_direct(s, mem, offsets, taken, me, call, j, row, token)
                        else:
                            c = (ticket - to_nodes - to_ranks) // (slots * L)
                            k = (ticket - to_nodes - to_ranks) // L % slots
                            r = ((ticket - to_nodes - to_ranks) % L + me) % L
                            peer = node_at.of.first(node) + r
                            row = node_plan[plan.head(k, 1 + 2 * r)]
                            if c * chunk < row:
                                n = T.min(chunk, row - c * chunk)
                                token = route.source(k)
                                forward(s, mem, route, node_chunk, call, j, row, slot, last, lane)
                    else:
                        # Consecutive tickets are for the same chunk and different ranks: all links are busy, rows are read once.
                        c = ticket // R
                        peer = (ticket % R + me) % R
                        if proxied:
                            direct = T.if_then_else(N.is_direct(peer), 1, 0)
                        # Receivers read this rank's own rows in place.
                        if direct != 0 and c * chunk < sent[peer] and (s.by_rank or peer != me):
                            n = T.min(chunk, sent[peer] - c * chunk)
                            send_direct(s, mem, offsets, taken, me, call, j, row, token)
                        if proxied:
                            if direct == 0 and c * proxied_chunk < sent[peer]:
                                n = T.min(proxied_chunk, sent[peer] - c * proxied_chunk)
                                send_proxied(s, mem, offsets, taken, me, call, slot, row, token, lane)
                    ticket = T.shfl_sync(ahead, 0)
                T.sync_threads()
                handshake.count_sender(done, active, me, thread, R)

            if tiles:
                if block == blocks - 1:
                    add_missing_rows(counted, totals, at, tile_rows, tiles, me, thread, threads)
            if receivers:
                # Finished senders help to receive.
                size = T.alloc_var("int32", init=chunk)
                handshake.first_ticket(tickets, parity, 1, ahead, ticket, lane)
                while ticket < R * chunks:
                    handshake.take_ticket(tickets, parity, 1, ahead, lane)
                    c = ticket // R
                    peer = (me + R - ticket % R) % R
                    if proxied:
                        direct = T.if_then_else(N.is_direct(peer), 1, 0)
                        size = T.if_then_else(direct != 0, chunk, proxied_chunk)
                    if c * size < received[peer]:
                        if peer != me:
                            N.wait_warp(arrived[peer, c], "ge", call)
                        n = T.min(size, received[peer] - c * size)
                        for q in T.serial(n):
                            j = c * size + q
                            receive_row(s, mem, offsets, me, peer, j, row, slot, token, direct, lane)
                        if tiles:
                            count_rows(counted, records, peer, c * size, n, top_k, tile_rows, me, lane)
                    ticket = T.shfl_sync(ahead, 0)
            T.sync_threads()
            ends = handshake.CompletionSignals(active, done, calls)
            of = handshake.Blocks(R, blocks, threads, senders, absent, absent_senders)
            handshake.close_call(of, ends, me, call, block, thread)

    return main
