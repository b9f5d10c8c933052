"""Dispatch in throughput mode: moves the rows of a routing plan, each once per target rank.

Sending warps put rows straight from the caller's tensor to where the plan wants them at the target. Rows to another
node go through staging memory, several to a message. What happens at the target depends on `placement`:

- "rank": rows lie by source rank and token, nothing is left to do.
- "expert": the row lands at the row of its first expert there; receiving warps copy it to those of its other experts.
- "staged": as "expert" for an output that peers cannot reach: rows land in a buffer, receiving warps copy all of them.

Copying overlaps with sending: every chunk of rows has a signal, which carries the number of the call.

Where nodes have several ranks (`dispatch_nodes`), each row crosses the network once per node: to this rank's forwarder
there, whose warps forward it over mapped memory to the ranks of their node that need it, as the source itself does in its
own node; so receivers see no difference. Rows to other nodes leave first, then those to this node, then those that this
rank forwards: by then they begin to arrive, and no warp waits for what another one has not begun to send.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.announcement import STATUS_WORDS
from tilescale_net.kernels.moe import handshake
from tilescale_net.kernels.moe.layout import (
    NodeCallState,
    NodeLayout,
    NodePlanOffsets,
    NodeTables,
    PlanOffsets,
    record_words,
)
from tilescale_net.kernels.moe.row_ops import (
    EXPLICIT_SYNC,
    Rows,
    batch_of,
    copy_row,
    copy_words,
    load_batch,
    store_batch,
)
from tilescale_net.kernels.moe.tiles import count_rows, fill_up, say_begun


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
        return self.placement != "arrival"

    @property
    def unroll(self) -> int:
        return batch_of(self.row_words // 4, 16)


class DispatchTensors(NamedTuple):
    """The tensors of a dispatch; rows and scales are words, int32 [any, row_words] and [any, scale_words].

    Attributes:
        x: the caller's rows. out: symmetric, except for "arrival"; what the caller gets.
        arrival: symmetric, a row for each row that comes; used for "arrival" and for rows from other nodes.
        staged: symmetric, a row for each row that leaves for another node.
        send_token, send_row, records: of the plan, see RoutingPlan.
        relayed: symmetric, where rows cross the network once per node: rows to be passed on.
        came: uint64 [slots of a gateway, chunks], symmetric: the last call of which a chunk of `relayed` is there.
        arrived: uint64 [ranks, chunks], symmetric: the same of what this rank gets.
    """

    x: Rows
    out: Rows
    arrival: Rows
    staged: Rows
    send_token: Any
    send_row: Any
    records: Any
    arrived: Any
    relayed: Any = None
    came: Any = None


class RowOffsets(NamedTuple):
    """Where rows are; int32 [ranks] each, of shared memory.

    Attributes:
        first_row: the first row of this rank among those of each rank.
        landed: the first row of each rank among those that arrive.
        before: the first row to each rank among those that are sent; not where rows cross the network once per node.
    """

    first_row: Any
    landed: Any
    before: Any = None


@tsn.macro
def put_row(s, dst, row: T.Ref, src, token: T.Ref, pe: T.Ref):
    """Put row `token` of `src` with its scales to row `row` of `dst` at `pe`."""
    N.put_warp(dst.rows[row, 0], src.rows[token, 0], pe, count=s.row_words, unroll=s.unroll)
    if s.scale_words:
        N.put_warp(dst.scales[row, 0], src.scales[token, 0], pe, count=s.scale_words)


@tsn.macro
def put_staged(s, dst, row: T.Ref, staged, slot: T.Ref, pe: T.Ref, count: T.Ref):
    """Put `count` rows from slot `slot` on to rows `row` … of `dst` at `pe`, in one message, and their scales in another."""
    N.put_warp(dst.rows[row, 0], staged.rows[slot, 0], pe, count=count * s.row_words)
    if s.scale_words:
        N.put_warp(dst.scales[row, 0], staged.scales[slot, 0], pe, count=count * s.scale_words)


@tsn.macro
def send_direct(s, mem, places, chunk, j: T.Ref, row: T.Ref, token: T.Ref):
    """Put the rows of a chunk to a mapped rank, from where the caller has them to where the plan wants them."""
    for q in T.serial(chunk.n):
        j = chunk.c * s.chunk + q
        token = mem.send_token[chunk.peer, j]
        if s.placement == "expert":
            row = mem.send_row[chunk.peer, j]
        else:
            row = places.first_row[chunk.peer] + j
        put_row(s, mem.out if s.in_place else mem.arrival, row, mem.x, token, chunk.peer)


@tsn.macro
def stage(s, mem, slot: T.Ref, q, token: T.Ref, lane):
    """Copy row `token` of the caller's, with its scales, to staging memory."""
    copy_row(mem.staged.rows, slot + q, mem.x.rows, token, s.row_words, lane, 16)
    if s.scale_words:
        copy_words(mem.staged.scales, slot + q, mem.x.scales, token, s.scale_words, lane)


@tsn.macro
def _send_proxied(s, mem, places, chunk, slot: T.Ref, row: T.Ref, token: T.Ref, lane):
    """Stage the rows of a chunk and put them to a rank of another node."""
    slot = places.before[chunk.peer] + chunk.c * s.proxied_chunk
    for q in T.serial(chunk.n):
        token = mem.send_token[chunk.peer, chunk.c * s.proxied_chunk + q]
        stage(s, mem, slot, q, token, lane)
    row = places.first_row[chunk.peer] + chunk.c * s.proxied_chunk
    put_staged(s, mem.out if s.by_rank else mem.arrival, row, mem.staged, slot, chunk.peer, chunk.n)


@tsn.macro
def _scatter(s, mem, src, row, source, j, skip, lane):
    """Copy a row to all rows of `mem.out` that its record names, except row `skip`."""
    words, batch = s.row_words, s.unroll
    piece = T.alloc_local((batch * 4,), "int32")
    for b in T.serial((words // 4 + 32 * batch - 1) // (32 * batch)):
        load_batch(piece, src.rows, row, b * 32 * batch, lane, words // 4, 4, batch)
        for k in T.serial(s.top_k):
            target = T.alloc_var("int32")
            target = mem.records[source, j, k]
            if target >= 0 and target != skip:
                store_batch(mem.out.rows, target, piece, b * 32 * batch, lane, words // 4, 4, batch)
    if s.scale_words:
        for k in T.serial(s.top_k):
            place = T.alloc_var("int32")
            place = mem.records[source, j, k]
            if place >= 0 and place != skip:
                copy_words(mem.out.scales, place, src.scales, row, s.scale_words, lane)


@tsn.macro
def receive_row(
    s, mem, places, me: T.Ref, peer: T.Ref, j: T.Ref, row: T.Ref, slot: T.Ref, token: T.Ref, direct: T.Ref, lane
):
    """Copy row `j` of `peer` to the rows of its experts; this rank's own rows are taken from where the caller has them."""
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
            slot = places.landed[peer] + j
            _scatter(s, mem, mem.arrival, slot, peer, j, -1, lane)


@tsn.jit(name="moe::dispatch_throughput", pass_configs=EXPLICIT_SYNC)
def dispatch_throughput(
    ranks, experts, top_k, max_tokens, row_words, scale_words, placement, proxied, chunk, proxied_chunk, senders, receivers,
    threads, absent=0, absent_senders=0, tile_rows=0, tiles=0,
):  # fmt: skip
    """Kernel that moves the rows.

    Args:
        ranks, experts, top_k, max_tokens: as in the plan.
        row_words, scale_words: 4-byte words of a row (a multiple of 4) and of its scales (0: it has none).
        placement: "rank", "expert" or "arrival".
        proxied: whether some ranks are on other nodes.
        chunk, proxied_chunk: rows per signal to a mapped rank, and rows per message to another node.
        senders, receivers: blocks of each kind (no receivers for "rank"); threads: of a block. All blocks run at once.
        absent, absent_senders: how many more blocks, and senders among them, the launch geometry has than this call; block 0
            counts for them.
        tile_rows, tiles: count the rows of tiles of `out` that are there, for a kernel that consumes them meanwhile; 0: there is none.

    Parameters of the kernel (int32 where no type is named; rows and scales are moved as words of 4 bytes):
        x, x_scales: what to send. out, out_scales: symmetric, except for "arrival".
        arrival, arrival_scales [rows received, …]: symmetric; used for "arrival" and for rows from other nodes.
        staged, staged_scales [rows sent, …]: symmetric; used for rows to other nodes.
        send_token … totals: see RoutingPlan. active [ranks]: 0 for a rank that is left out.
        ready [ranks], arrived [ranks, chunks], done [ranks]: uint64, symmetric.
        tickets [2, 2]: work given out to senders and to receivers, by the parity of the call; 0 at first.
        calls [senders + receivers]: uint64, calls so far. tag: see output_tag. status: see STATUS_WORDS.
        counted [tiles + 1]: uint64, symmetric, see `Tiles`; only where tiles are counted.
    """
    R, M = ranks, max_tokens
    s = DispatchConfig(R, top_k, M, row_words, scale_words, placement, proxied, chunk, proxied_chunk)
    at, W = PlanOffsets(R, experts // R), record_words(top_k)
    chunks = -(-M // min(chunk, proxied_chunk))
    blocks, scale_width = senders + receivers, max(scale_words, 1)
    rows, scale_rows, capacity, scale_capacity = (
        T.dynamic(n) for n in ("rows", "scale_rows", "capacity", "scale_capacity")
    )
    arrivals, scale_arrivals, stages, scale_stages = (
        T.dynamic(n) for n in ("arrivals", "scale_arrivals", "stages", "scale_stages")
    )

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
        send_token: T.Tensor((R, M), "int32"),
        send_row: T.Tensor((R, M), "int32"),
        records: T.Tensor((R, M, W), "int32"),
        totals: T.Tensor((at.words,), "int32"),
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
            sent = T.alloc_shared((R,), "int32")
            first_row = T.alloc_shared((R,), "int32")
            received = T.alloc_shared((R,), "int32")
            before = T.alloc_shared((R,), "int32")  # where the rows to each rank begin among those that are sent
            landed = T.alloc_shared((R,), "int32")  # where the rows from each rank begin among those that arrive
            places = RowOffsets(first_row, landed, before)
            mem = DispatchTensors(
                x=Rows(x, x_scales),
                out=Rows(out, out_scales),
                arrival=Rows(arrival, arrival_scales),
                staged=Rows(staged, staged_scales),
                send_token=send_token,
                send_row=send_row,
                records=records,
                arrived=arrived,
            )
            thread = T.get_thread_binding()
            lane = thread % 32
            me = T.alloc_var("int32")
            me = N.my_pe()
            call = T.alloc_var("uint64")
            call = calls[block] + T.uint64(1)
            if tiles:
                say_begun(counted, tiles, T.if_then_else(block == 0, 1 + absent, 1), me, thread)
            if thread < R:
                sent[thread] = totals[at.sent + thread]
                first_row[thread] = totals[at.sent_base + thread]
                received[thread] = totals[at.received + thread]
                before[thread] = totals[at.sent_before + thread]
                landed[thread] = totals[at.received_base + thread]
                # This rank's outputs may be overwritten from here on, and those of every rank that has begun the call.
                handshake.open_call(ready, active, status, me, call, tag, block, senders, thread)
            T.sync_threads()

            # Each index has a variable of its own, because the compiler's arithmetic on sums of them cannot be trusted.
            peer = T.alloc_var("int32")
            c = T.alloc_var("int32")
            j = T.alloc_var("int32")
            n = T.alloc_var("int32")
            row = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            token = T.alloc_var("int32")
            direct = T.alloc_var("int32", init=1)
            parity = T.alloc_var("int32")
            parity = T.cast(call % T.uint64(2), "int32")
            ahead = T.alloc_var("int32", init=0)
            ticket = T.alloc_var("int32")
            taken = handshake.Chunk(peer, c, n)
            handshake.clear_tickets(tickets, parity, block, thread)
            if block < senders:
                handshake.first_ticket(tickets, parity, 0, ahead, ticket, lane)
                while ticket < R * chunks:
                    handshake.take_ticket(tickets, parity, 0, ahead, lane)
                    # Consecutive tickets are for the same chunk and different ranks: all links are busy, rows are read once.
                    c = ticket // R
                    peer = (ticket % R + me) % R
                    if proxied:
                        direct = T.if_then_else(N.is_direct(peer), 1, 0)
                    # Receivers take this rank's own rows from where they are.
                    if direct != 0 and c * chunk < sent[peer] and (s.by_rank or peer != me):
                        n = T.min(chunk, sent[peer] - c * chunk)
                        send_direct(s, mem, places, taken, j, row, token)
                        if not s.by_rank:
                            N.signal_warp(arrived[me, c], call, peer)
                    if proxied:
                        if direct == 0 and c * proxied_chunk < sent[peer]:
                            n = T.min(proxied_chunk, sent[peer] - c * proxied_chunk)
                            _send_proxied(s, mem, places, taken, slot, row, token, lane)
                            if not s.by_rank:
                                N.signal_warp(arrived[me, c], call, peer)
                    ticket = T.shfl_sync(ahead, 0)
                T.sync_threads()
                handshake.count_sender(done, active, me, thread, R)

            if tiles:
                if block == blocks - 1:
                    fill_up(counted, totals, at, tile_rows, tiles, me, thread, threads)
            if receivers:
                # Senders that are done help to receive.
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
                            receive_row(s, mem, places, me, peer, j, row, slot, token, direct, lane)
                        if tiles:
                            count_rows(counted, records, peer, c * size, n, top_k, tile_rows, me, lane)
                    ticket = T.shfl_sync(ahead, 0)
            T.sync_threads()
            ends = handshake.Ends(active, done, calls)
            of = handshake.Blocks(R, blocks, threads, senders, absent, absent_senders)
            handshake.close_call(of, ends, me, call, block, thread)

    return main


class _NodeChunk(NamedTuple):
    """The chunk of rows that a warp sends to another node; int32 variables of the kernel.

    Attributes:
        b: the node. c: the number of the chunk. n: its rows.
    """

    b: Any
    c: Any
    n: Any


class _ForwardedChunk(NamedTuple):
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
        nodes, slots: see NodeLayout. The others are those of dispatch_throughput.

    Parameters of the kernel (int32 where no type is named; rows and scales are moved as words of 4 bytes):
        staged, staged_scales [(nodes - 1) * max_tokens, …]: symmetric; rows to other nodes.
        relayed, relayed_scales [slots * max_tokens, …]: symmetric; rows to be passed on.
        came [slots, chunks]: uint64, symmetric; as `arrived`, of rows to be passed on.
        node_map: see NodeLayout. node_plan: see NodePlanOffsets.
        The others are those of dispatch_throughput; arrival is used for "arrival" only.
    """
    R, M, S, at = ranks, max_tokens, slots, NodeLayout(ranks, nodes, slots)
    plan = NodePlanOffsets(at, M)
    s = DispatchConfig(R, top_k, M, row_words, scale_words, placement, False, chunk, proxied_chunk)
    totals_at, W, L = PlanOffsets(R, experts // R), record_words(top_k), at.size
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
            places, tables = RowOffsets(first_row, landed), NodeTables(at, plan, node_map, node_plan)
            mem = DispatchTensors(
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
            now, taken = NodeCallState(me, node, call), handshake.Chunk(peer, c, n)
            to_node, passed = _NodeChunk(b, c, n), _ForwardedChunk(k, token, r, peer, c, n)
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
