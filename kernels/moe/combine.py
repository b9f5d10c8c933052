"""Combine in throughput mode: brings the experts' outputs back and sums them, weighted, per token.

A rank sums the rows of a token over its own experts in float32, rounds once, and sends one row per token to the token's
rank, into the slot of this pair. Reducing warps there sum the slots in the order of ranks. Both kinds of block run at
the same time; every chunk of slots has a signal, which carries the call number.

With `nodes` each token's sum crosses the network once per node. The row for a token of another node stays in its rank's
memory; the token's forwarder in this node reads it over mapped memory, so forwarders need no buffers for rows of their
node. A forwarder sums these rows in float32, in the order of ranks, rounds (or quantises) once more, and sends one row
to the token's rank. The token's rank sums its origins (see layout.py) in order: one sum per other node, and single rows
of its own node's ranks.

`sum_combined` sums the rows that a combine sent while a GEMM finished them. Most tokens get their last row only when
the GEMM is nearly done, so all SMs sum afterwards, while the last rows are still in flight. On one node they first send
the rows that the few blocks beside the GEMM have not sent yet.
"""

from collections import namedtuple
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.collective import EXACT_SUMS, EXPLICIT_SYNC, STATUS_WORDS
from tilescale_net.kernels.moe import handshake
from tilescale_net.kernels.moe.layout import NodeLayout, NodePlanOffsets, PlanOffsets, Route, most_sent, record_words
from tilescale_net.kernels.moe.row_ops import (
    FP8,
    Result,
    SumSizes,
    Work,
    add_biases,
    add_rows,
    add_slots,
    batch_of,
    clear,
    int_vars,
    load_batch,
    shared_ints,
    store_rounded,
    store_sums,
)
from tilescale_net.kernels.moe.tiles import Awaited, await_rows, signal_started

NONE, OWN = -1, -2  # offset of a rank's row for a token


@dataclass(frozen=True)
class CombineConfig(SumSizes):
    """Compile-time sizes and choices; see combine_throughput. `ranks`: ranks or origins to sum."""

    by_rank: bool
    weighted: str
    quantised: bool
    valued: str
    biases: int
    proxied: bool
    chunk: int
    proxied_chunk: int

    @property
    def unchanged(self) -> bool:
        """Whether rows travel unquantised."""
        return self.by_rank and not self.quantised and self.valued == ""

    @property
    def unquantised(self) -> "CombineConfig":
        return replace(self, quantised=False)

    def in_node(self, size: int) -> "CombineConfig":
        """Sizes of the sum over the `size` ranks of a node, with that sum's batches."""
        return replace(self, top_k=min(size, 2), by_rank=False)

    @property
    def chunks(self) -> int:
        """Signals of a rank, if rows go straight to their ranks."""
        return -(-self.max_tokens // min(self.chunk, self.proxied_chunk))

    # Rows that a warp reads at once, and vectors of each per lane: loads in flight hide memory latency.
    @property
    def send_group(self) -> int:
        return 1 if self.by_rank else min(self.top_k, 4)

    @property
    def send_batch(self) -> int:
        return self._scaled(batch_of(self.units, 7)) if self.by_rank else batch_of(self.units, 4)

    @property
    def sum_batch(self) -> int:
        return self._scaled(batch_of(self.units, 16 // self.sum_group))

    def _scaled(self, batch: int) -> int:
        """More vectors if they hold fewer elements."""
        return min(batch * (1 if self.width == 8 else 2), -(-self.units // 32))


class SummedRows(NamedTuple):
    """Rows of sums, their scales if quantised, and the numbers of choices sent with them. `rows`:
    [any, hidden]. scales: float32 [any, groups]. values: float32 [any, top_k]."""

    rows: Any
    scales: Any
    values: Any

    def at(self, s: CombineConfig, pe: Any) -> "SummedRows":
        """The same memory of a mapped rank."""
        return SummedRows(
            N.remote(self.rows, pe),
            N.remote(self.scales, pe) if s.quantised else self.scales,
            N.remote(self.values, pe) if s.valued != "" else self.values,
        )


class LocalContribution(NamedTuple):
    """Results of this rank's experts. `y`: [capacity, hidden] of the dtype of the result. `weights`: float32
    [capacity], `row_weight`. `values`: float32 [capacity] or [capacity * top_k], `row_values`. `records`: int32 [ranks,
    max_tokens, words], see `record_words`: the rows of `y` that each received row sums."""

    y: Any
    weights: Any
    values: Any
    records: Any


# The tensors of combine_throughput. own: rows to send, result: the caller's output; slots, staged, offered: SummedRows.
CombineTensors = namedtuple(
    "CombineTensors", "own result slots arrived token_slot staged offered offer_ready", defaults=(None, None, None)
)


class SlotOffsets(NamedTuple):
    """Where the rows of each rank are; int32 [ranks] each, of shared memory. `received`: how many came from each rank.
    `base`: the first of them among all that came. `before`: the first slot of each rank at this one; not used where
    rows cross the network once per node. `slots_base`: the first slot of this rank at each rank."""

    received: Any
    base: Any
    before: Any
    slots_base: Any


class ReturnedChunk(NamedTuple):
    """The chunk of sums of this node that a forwarder sends; int32 variables of the kernel. `k`: slot of the source.
    source: its rank. c: the number of the chunk. n: its rows."""

    k: Any
    source: Any
    c: Any
    n: Any


@tsn.macro
def send_own_row(s, dst, dst_row, y, row, lane):
    """Convert a row of `y` into a row of `dst`; the next vectors are in flight during conversion."""
    width, batch, units = s.width, s.send_batch, s.units
    batches = -(-units // (32 * batch))
    loaded = T.alloc_local((batch * width,), s.dtype)
    acc = T.alloc_local((batch * width,), "float32")
    load_batch(loaded, y, row, 0, lane, units, width, batch)
    for b in T.serial(batches):
        for i in T.unroll(batch * width):
            acc[i] = T.cast(loaded[i], "float32")
        if b + 1 < batches:
            load_batch(loaded, y, row, (b + 1) * 32 * batch, lane, units, width, batch)
        store_sums(s, dst, dst_row, acc, b * 32 * batch, lane, units, batch)


@tsn.macro
def send_summed_row(s, dst, dst_row, own, source, j, lane):
    """Sum row j of `source` over this rank's experts into a row of `dst`."""
    K, width, batch, group = s.top_k, s.width, s.send_batch, s.send_group
    loaded = T.alloc_local((group * batch * width,), s.dtype)
    acc = T.alloc_local((batch * width,), "float32")
    from_row = T.alloc_local((group,), "int32")
    weight = T.alloc_local((group,), "float32")
    k = T.alloc_var("int32")
    for b in T.serial(-(-s.units // (32 * batch))):
        clear(acc, batch * width)
        k = 0
        while k < K:
            for g in T.unroll(group):
                from_row[g] = -1
                weight[g] = 1.0
                while k < K and from_row[g] < 0:
                    from_row[g] = own.records[source, j, k]
                    if s.weighted == "choices":
                        weight[g] = T.reinterpret(own.records[source, j, K + k], "float32")
                    k = k + 1
                if s.weighted == "rows":
                    if from_row[g] >= 0:
                        weight[g] = own.weights[from_row[g]]
            add_rows(acc, loaded, from_row, weight, own.y, b * 32 * batch, lane, s.units, width, batch, group)
        store_sums(s, dst, dst_row, acc, b * 32 * batch, lane, s.units, batch)


@tsn.macro
def send_row(s, dst, dst_row, own, source, j, base, lane):
    """Copy row j of `source`, summed over this rank's experts, and its numbers to a row of `dst`."""
    K, target = s.top_k, T.alloc_var("int32")
    if s.by_rank:
        send_own_row(s, dst, dst_row, own.y, base + j, lane)
    else:
        send_summed_row(s, dst, dst_row, own, source, j, lane)
    if s.valued == "choices":
        for i in T.serial((K + 31) // 32):
            if i * 32 + lane < K:
                dst.values[dst_row, i * 32 + lane] = own.values[(base + j) * K + i * 32 + lane]
    elif s.valued == "rows":
        for i in T.serial((K + 31) // 32):
            if i * 32 + lane < K:
                target = own.records[source, j, i * 32 + lane]
                if target >= 0:
                    dst.values[dst_row, i * 32 + lane] = own.values[target]
                else:
                    dst.values[dst_row, i * 32 + lane] = T.float32(0)


@tsn.macro
def send_rows(s, own, dst, offsets, chunk, first: T.Ref, target: T.Ref, lane):
    """Sum the rows of a chunk straight into rows `first` … of `dst` at `target`, a mapped rank."""
    if s.unchanged:
        N.put_warp(
            dst.rows[first, 0], own.y[offsets.base[chunk.peer] + chunk.c * chunk.size, 0], target,
            count=chunk.n * s.hidden,
        )  # fmt: skip
    else:
        remote = dst.at(s, target)
        for q in T.serial(chunk.n):
            send_row(s, remote, first + q, own, chunk.peer, chunk.c * chunk.size + q, offsets.base[chunk.peer], lane)


@tsn.macro
def put_staged(s, mem, first, slot, pe, count):
    """Put `count` rows from slot `slot` of staging memory on to slots `first` … at `pe`, with scales and numbers."""
    N.put_warp(mem.slots.rows[first, 0], mem.staged.rows[slot, 0], pe, count=count * s.hidden)
    if s.quantised:
        N.put_warp(mem.slots.scales[first, 0], mem.staged.scales[slot, 0], pe, count=count * s.groups)
    if s.valued != "":
        N.put_warp(mem.slots.values[first, 0], mem.staged.values[slot, 0], pe, count=count * s.top_k)


@tsn.macro
def send_proxied(s, mem, offsets, chunk, slot: T.Ref, lane):
    """Sum the rows of a chunk for a rank of another node into staging memory, and put them from there."""
    slot = offsets.base[chunk.peer] + chunk.c * chunk.size
    for q in T.serial(chunk.n):
        send_row(s, mem.staged, slot + q, mem.own, chunk.peer, chunk.c * chunk.size + q, offsets.base[chunk.peer], lane)
    T.sync_warp()
    first = offsets.slots_base[chunk.peer] + chunk.c * chunk.size
    put_staged(s, mem, first, slot, chunk.peer, chunk.n)


@tsn.macro
def send_finished(s, mem, offsets, tickets, now, ahead: T.Ref, ticket: T.Ref, peer: T.Ref, lane):
    """Send chunks that no block of a combine with tiles has taken, when the GEMM has ended. By a warp, on one node."""
    c, n, slot = int_vars(3)
    handshake.take_ticket(tickets, now.parity, 0, ahead, lane)
    ticket = T.shfl_sync(ahead, 0)
    while ticket < s.ranks * s.chunks:
        handshake.take_ticket(tickets, now.parity, 0, ahead, lane)
        c = ticket // s.ranks
        peer = (ticket % s.ranks + now.me) % s.ranks
        if c * s.chunk < offsets.received[peer]:
            c = (offsets.received[peer] - 1) // s.chunk - c
            n = T.min(s.chunk, offsets.received[peer] - c * s.chunk)
            slot = offsets.slots_base[peer] + c * s.chunk
            at_peer = mem.slots.at(s, peer)
            for q in T.serial(n):
                send_row(s, at_peer, slot + q, mem.own, peer, c * s.chunk + q, offsets.base[peer], lane)
            N.signal_warp(mem.arrived[now.me, c], now.call, peer)
        ticket = T.shfl_sync(ahead, 0)


# Where rows cross the network once per node.


@tsn.macro
def send_or_offer(
    s, mem, route, offsets, chunk, me: T.Ref, node, mine, call: T.Ref, target: T.Ref, row: T.Ref, first: T.Ref, lane
):
    """Send this rank's rows of a chunk to `chunk.peer`, or keep them and offer them to its forwarder here."""
    at = route.at
    away = at.of.node_of(chunk.peer) != node
    target = T.if_then_else(away, me, chunk.peer)
    first = T.if_then_else(away, offsets.base[chunk.peer], offsets.slots_base[chunk.peer]) + chunk.c * s.chunk
    if s.quantised:
        if away:
            send_rows(s.unquantised, mem.own, mem.offered, offsets, chunk, first, target, lane)
        else:
            send_rows(s, mem.own, mem.slots, offsets, chunk, first, target, lane)
    else:
        first = first + T.if_then_else(away, most_sent(s.ranks, s.max_tokens, s.top_k), 0)
        send_rows(s, mem.own, mem.slots, offsets, chunk, first, target, lane)
    if away:
        target = route.local_forwarder(chunk.peer)
        row = route.local_forwarder_slot(chunk.peer) * at.size + at.of.index_of(me)
        T.sync_warp()
        if lane == 0:
            N.quiet(me)
            N.signal(mem.offer_ready[row, chunk.c], call, target)
    else:
        N.signal_warp(mem.arrived[mine, chunk.c], call, target)


@tsn.macro
def await_contributions(s, mem, route, k: T.Ref, i: T.Ref, index: T.Ref, call: T.Ref, lane):
    """Wait until the ranks of this node offer their rows for row `i` of slot `k`; each lane waits for one rank."""
    at, plan = route.at, route.plan
    for g in T.unroll(-(-at.size // 32)):
        if g * 32 + lane < at.size:
            index = route.words[plan.gather(k, i, g * 32 + lane)]
            if index >= 0:
                index = index - route.words[plan.head(k, 2 + 2 * (g * 32 + lane))]
                N.wait(mem.offer_ready[k * at.size + g * 32 + lane, index // s.chunk], "ge", call)
    T.sync_warp()


@tsn.macro
def sum_in_node(s, mem, route, work, row: T.Ref, node: T.Ref, k: T.Ref, i: T.Ref, lane):
    """Sum row `i` of slot `k` over the ranks of this node, in order, from each rank's memory."""
    at, plan, width, batch, group = route.at, route.plan, s.width, s.send_batch, s.send_group
    for b in T.serial(-(-s.units // (32 * batch))):
        clear(work.acc, batch * width)
        for p in T.serial(-(-at.size // group)):
            for g in T.unroll(group):
                work.from_row[g] = NONE
                if p * group + g < at.size:
                    work.from_row[g] = route.words[plan.gather(k, i, p * group + g)]
                    if work.from_row[g] >= 0:
                        # A tuple: tilelang renames a tensor that is assigned to another name.
                        remote = (N.remote(mem.offered.rows, at.of.first(node) + p * group + g),)
                        load_batch(
                            work.loaded, remote[0], work.from_row[g], b * 32 * batch, lane, s.units, width, batch,
                            g * batch * width,
                        )  # fmt: skip
            add_slots(s.unquantised, work, None, lambda row: row >= 0, b * 32 * batch, lane, s.units, batch, group)
        store_sums(s, mem.staged, row, work.acc, b * 32 * batch, lane, s.units, batch)


@tsn.macro
def sum_values_in_node(s, mem, route, row: T.Ref, node: T.Ref, k: T.Ref, i: T.Ref, index: T.Ref, total: T.Ref, lane):
    """Add up the numbers of a token's choices over the ranks of this node."""
    at, plan = route.at, route.plan
    for g in T.serial((s.top_k + 31) // 32):
        if g * 32 + lane < s.top_k:
            total = T.float32(0)
            for r in T.serial(at.size):
                index = route.words[plan.gather(k, i, r)]
                if index >= 0:
                    remote = (N.remote(mem.offered.values, at.of.first(node) + r),)
                    total = total + remote[0][index, g * 32 + lane]
            mem.staged.values[row, g * 32 + lane] = total


@tsn.macro
def send_back(
    s, mem, route, work, node: T.Ref, call: T.Ref, chunk, i: T.Ref, row: T.Ref, index: T.Ref, total: T.Ref, lane
):
    """Sum this node's rows of a chunk for the source of a slot, and put the sums to the source."""
    for q in T.serial(chunk.n):
        i = chunk.c * s.proxied_chunk + q
        row = chunk.k * s.max_tokens + i
        await_contributions(s, mem, route, chunk.k, i, index, call, lane)
        sum_in_node(s.in_node(route.at.size), mem, route, work, row, node, chunk.k, i, lane)
        if s.valued != "":
            sum_values_in_node(s, mem, route, row, node, chunk.k, i, index, total, lane)
    T.sync_warp()
    row = chunk.k * s.max_tokens + chunk.c * s.proxied_chunk
    index = route.words[route.plan.head(chunk.k, route.at.slots_begin)] + chunk.c * s.proxied_chunk
    put_staged(s, mem, index, row, chunk.source, chunk.n)


# The receiving side.


@tsn.macro
def find_rows(s, mem, offsets, work, now, token: T.Ref, peer: T.Ref, slot: T.Ref, size: T.Ref, lane):
    """Look up the rows of a token, one rank per lane, and wait for them.

    A lane keeps its rank's row: its offset among the slots; OWN - offset for a row that is read in place; NONE. Lanes
    get the rows of others by shuffles: loads to look them up, or comparisons with `me`, could wait for the rows in
    flight.
    """
    for i in T.unroll(-(-s.ranks // 32)):
        peer = i * 32 + lane
        work.slot_of[i] = NONE
        if peer < s.ranks:
            slot = mem.token_slot[token, peer]
            if slot >= 0:
                work.slot_of[i] = (
                    OWN - offsets.base[now.me] - slot if s.unchanged and peer == now.me else offsets.before[peer] + slot
                )
                if peer != now.me or not s.unchanged:
                    if s.proxied:
                        size = T.if_then_else(N.is_direct(peer), s.chunk, s.proxied_chunk)
                    N.wait(mem.arrived[peer, slot // size], "ge", now.call)


@tsn.macro
def find_rows_of_origins(
    s, mem, route, offsets, work, now, node: T.Ref, mine: T.Ref, token: T.Ref, origin: T.Ref, index: T.Ref, size: T.Ref, lane
):  # fmt: skip
    """As `find_rows`, one origin per lane."""
    at, plan = route.at, route.plan
    for i in T.unroll(-(-at.origins // 32)):
        origin = i * 32 + lane
        work.slot_of[i] = NONE
        if origin < at.origins:
            index = route.words[plan.origin_index(token, origin)]
            if index >= 0:
                work.slot_of[i] = route.words[plan.base(origin)] + index
                if s.unchanged and origin == mine:
                    work.slot_of[i] = OWN - offsets.base[now.me] - index
                else:
                    size = T.if_then_else(origin >= node and origin < node + at.size, s.chunk, s.proxied_chunk)
                    N.wait(mem.arrived[origin, index // size], "ge", now.call)


@tsn.macro
def sum_rows(s, mem, work, token: T.Ref, peer: T.Ref, lane):
    """Sum the rows of a token in the order of ranks."""
    R, units, width, batch, group = s.ranks, s.units, s.width, s.sum_batch, s.sum_group
    for b in T.serial(-(-units // (32 * batch))):
        first = b * 32 * batch
        clear(work.acc, batch * width)
        for p in T.serial((R + group - 1) // group):
            for g in T.unroll(group):
                peer = p * group + g
                work.from_row[g] = NONE
                if peer < R:
                    work.from_row[g] = T.shfl_sync(work.slot_of[peer // 32], peer % 32)
                if work.from_row[g] != NONE:
                    if s.unchanged and work.from_row[g] <= OWN:
                        load_batch(
                            work.loaded, mem.own.y, OWN - work.from_row[g], first, lane, units, width, batch,
                            g * batch * width,
                        )  # fmt: skip
                    else:
                        load_batch(
                            work.loaded, mem.slots.rows, work.from_row[g], first, lane, units, width, batch,
                            g * batch * width,
                        )  # fmt: skip
            add_slots(s, work, mem.slots.scales, lambda row: row != NONE, first, lane, units, batch, group)
        add_biases(s, work.acc, mem.result, token, first, lane, units)
        store_rounded(mem.result.out, token, work.acc, first, lane, units, width, batch, s.dtype)


@tsn.macro
def sum_values(s, mem, slot_of, token: T.Ref, slot: T.Ref, total: T.Ref, lane):
    """Add up the numbers of a token's choices over the ranks or origins. `slot_of`: offset of the token's row among a
    rank's rows, -1 for none, and the start of that rank's rows."""
    for g in T.serial((s.top_k + 31) // 32):
        if g * 32 + lane < s.top_k:
            total = T.float32(0)
            for p in T.serial(s.ranks):
                slot = slot_of(p)[0]
                if slot >= 0:
                    total = total + mem.slots.values[slot_of(p)[1] + slot, g * 32 + lane]
            mem.result.values[token, g * 32 + lane] = total


@tsn.jit(name="moe::combine_throughput", pass_configs=EXPLICIT_SYNC, compile_flags=EXACT_SUMS)
def combine_throughput(
    ranks, experts, top_k, max_tokens, hidden, dtype, by_rank, weighted, quantised, valued, biases, proxied, chunk,
    proxied_chunk, senders, reducers, threads, absent=0, absent_senders=0, tile_rows=0, tiles=0, nodes=0, forwarder_slots=0,
):  # fmt: skip
    """Kernel that sends and sums.

    Args:
        ranks, experts, top_k, max_tokens, proxied, chunk, proxied_chunk, threads: as in dispatch_throughput.
        hidden, dtype: elements of a row and their type, "bfloat16", "float16" or "float32".
        by_rank: `y` holds one row per received row ("rank" layout); else one per expert's row.
        weighted: "choices": multiply each row by the weight of its choice; "rows": by its `row_weight`; "": sum as it is.
        quantised: rows travel as FP8 with a scale per 128 elements.
        valued: also bring `row_values` back to the choices: "rows": one number per expert's row; "choices": one for each
            choice of a received row (by_rank), added up over the ranks; "": none.
        biases: how many of `bias_0` and `bias_1` are added to the sums.
        senders, reducers: blocks of each kind; all run at once.
        absent, absent_senders: blocks, and senders among them, of the launch geometry that this call lacks; block 0
            counts for them.
        tile_rows, tiles: read a row of `y` when its tile is complete, the last rows first, and leave the sums to
            `sum_combined`. 0: all rows are complete.
        nodes, forwarder_slots: see NodeLayout; 0: each row goes straight to its rank.

    Parameters of the kernel:
        y [capacity, hidden] of `dtype`; row_weight [capacity], row_values [capacity] or [capacity * top_k] float32;
        bias_0, bias_1 [rows, hidden] of `dtype`.
        out [rows, hidden] of `dtype`, out_values [rows, top_k] float32; tokens <= rows.
        slots [rows sent, hidden] of `dtype` or FP8, slot_scales [rows sent, groups] float32, slot_values [rows sent, top_k]
        float32: symmetric. staged, staged_scales, staged_values: alike, [rows received, …] to other nodes; with nodes
        [forwarder_slots * max_tokens, …], sums of this node.
        offered [rows received, hidden] of `dtype`, offered_values [… , top_k] float32: symmetric, with nodes only; this
        rank's rows for tokens of other nodes, in the order of their arrival. Unless `quantised` they are the end of
        slots, behind all origins' rows, and of slot_values: two copies of the summing code would spill more registers.
        token_slot: see RoutingPlan, without nodes only. records, totals: see there. active [ranks] int32: 0 for a rank that is
        left out. node_map: see NodeLayout. node_plan: see NodePlanOffsets.
        ready [ranks], done [ranks]: uint64, symmetric. arrived [ranks or origins, chunks]: alike, the last call of which a
        chunk of `slots` is there. offer_ready [forwarder_slots * size, chunks]: alike, of `offered`.
        tickets [2, 2] int32: work given out to senders and to reducers, by the parity of the call; 0 at first.
        calls [senders + reducers] uint64: calls so far. tag: 0, or the code of the fault that this rank's host
        found. status: see STATUS_WORDS.
        finished [tiles + 1] uint64, symmetric, product_calls [1] int64, growth int32: see `Tiles`; current [1] uint64, for the
        number of the call. Only with tiles.
    """
    R, K, M = ranks, top_k, max_tokens
    node_at = NodeLayout(ranks, nodes, forwarder_slots) if nodes else None
    V = node_at.origins if nodes else R
    s = CombineConfig(
        V, K, M, hidden, dtype, by_rank, weighted, quantised, valued, biases, proxied, chunk, proxied_chunk
    )
    at, W = PlanOffsets(R, experts // R), record_words(K)
    chunks = -(-M // chunk) if nodes else s.chunks
    blocks, payload = senders + reducers, FP8 if quantised else dtype
    tickets_to_send, S, slot_value_rows = R * chunks, most_sent(R, M, K), most_sent(R, M, K)
    if nodes:
        nodes, L, plan, in_node = node_at.nodes, node_at.size, NodePlanOffsets(node_at, M), s.in_node(node_at.size)
        tickets_to_send += forwarder_slots * -(-M // proxied_chunk)
        S, slot_value_rows, relays, value_relays = (
            T.dynamic(n) for n in ("back", "slot_value_rows", "relays", "value_relays")
        )

    @T.prim_func
    def main(
        ctx: N.Context(),
        y: T.Tensor((T.dynamic("capacity"), hidden), dtype),
        row_weight: T.Tensor((T.dynamic("weights"),), "float32"),
        row_values: T.Tensor((T.dynamic("values"),), "float32"),
        bias_0: T.Tensor((T.dynamic("bias_rows"), hidden), dtype),
        bias_1: T.Tensor((T.dynamic("other_bias_rows"), hidden), dtype),
        out: T.Tensor((T.dynamic("rows"), hidden), dtype),
        out_values: T.Tensor((T.dynamic("value_rows"), K), "float32"),
        tokens: T.int32,
        slots: T.Tensor((S, hidden), payload),
        slot_scales: T.Tensor((T.dynamic("scale_rows"), s.groups), "float32"),
        slot_values: T.Tensor((slot_value_rows, K), "float32"),
        staged: T.Tensor((T.dynamic("stages"), hidden), payload),
        staged_scales: T.Tensor((T.dynamic("scale_stages"), s.groups), "float32"),
        staged_values: T.Tensor((T.dynamic("value_stages"), K), "float32"),
        offered: T.Tensor((relays, hidden), dtype) if nodes else None,
        offered_values: T.Tensor((value_relays, K), "float32") if nodes else None,
        token_slot: None if nodes else T.Tensor((T.dynamic("slot_rows"), R), "int32"),
        records: T.Tensor((R, M, W), "int32"),
        totals: T.Tensor((at.words,), "int32"),
        node_map: T.Tensor((node_at.map_words,), "int32") if nodes else None,
        node_plan: T.Tensor((plan.words,), "int32") if nodes else None,
        active: T.Tensor((R,), "int32"),
        ready: T.Tensor((R,), "uint64"),
        arrived: T.Tensor((V, chunks), "uint64"),
        offer_ready: T.Tensor((node_at.lists, chunks), "uint64") if nodes else None,
        done: T.Tensor((R,), "uint64"),
        tickets: T.Tensor((2, 2), "int32"),
        calls: T.Tensor((blocks + absent,), "uint64"),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        finished: T.Tensor((tiles + 1,), "uint64") if tiles else None,
        product_calls: T.Tensor((1,), "int64") if tiles else None,
        growth: T.int32 if tiles else None,
        current: T.Tensor((1,), "uint64") if tiles else None,
    ):
        with T.Kernel(blocks, threads=threads) as block:
            received, base, before, slots_base = shared_ints(4, R)
            offsets = SlotOffsets(received, base, before, slots_base)
            mem = CombineTensors(
                LocalContribution(y, row_weight, row_values, records), Result(out, bias_0, bias_1, out_values),
                SummedRows(slots, slot_scales, slot_values), arrived, token_slot,
                SummedRows(staged, staged_scales, staged_values), SummedRows(offered, None, offered_values), offer_ready,
            )  # fmt: skip
            thread = T.get_thread_binding()
            lane = thread % 32
            me = T.alloc_var("int32", N.my_pe())
            call = T.alloc_var("uint64", calls[block] + T.uint64(1))
            if tiles:
                if block == 0 and thread == 0:
                    current[0] = call
                signal_started(finished, tiles, T.if_then_else(block == 0, 1 + absent, 1), me, thread)
            if thread < R:
                received[thread] = totals[at.received + thread]
                base[thread] = totals[at.received_base + thread]
                before[thread] = totals[at.sent_before + thread]
                slots_base[thread] = totals[at.slots_base + thread]
                # From here on slots may be overwritten: this rank's, and those of every rank that has begun the call.
                handshake.open_call(ready, active, status, me, call, tag, block, senders, thread)
            T.sync_threads()

            # Each index has its own variable: the compiler's arithmetic on their sums cannot be trusted.
            peer, c, n, slot = int_vars(4)
            direct = T.alloc_var("int32", init=1)
            size = T.alloc_var("int32", init=chunk)
            parity = T.alloc_var("int32", T.cast(call % T.uint64(2), "int32"))
            ahead = T.alloc_var("int32", init=0)
            ticket = T.alloc_var("int32")
            now, taken = handshake.CallState(me, call, parity), handshake.Chunk(peer, c, n, chunk if nodes else size)
            if nodes:
                route = Route(node_at, plan, node_map, node_plan)
                node, mine, k, i, forwarder, row = int_vars(6)
                total = T.alloc_var("float32")
                node = node_at.of.node_of(me)
                mine = node + node_at.of.index_of(me)  # this rank as an origin, for those of its node
                returned = ReturnedChunk(k, peer, c, n)
                sums = T.alloc_local((in_node.send_group * in_node.send_batch * s.width,), dtype)
                sum_of_node = T.alloc_local((in_node.send_batch * s.width,), "float32")
                rows_of_node = T.alloc_local((in_node.send_group,), "int32")
                work_of_node = Work(sums, sum_of_node, rows_of_node)
            handshake.clear_tickets(tickets, parity, block, thread)
            if block < senders:
                handshake.first_ticket(tickets, parity, 0, ahead, ticket, lane)
                while ticket < tickets_to_send:
                    handshake.take_ticket(tickets, parity, 0, ahead, lane)
                    if nodes:
                        if ticket < R * chunks:
                            c = ticket // R
                            # Rows to other nodes come first.
                            peer = (ticket % R + node_at.of.end(node)) % R
                            # Reducers read this rank's own rows in place unless rows are quantised.
                            if c * chunk < received[peer] and (peer != me or not s.unchanged):
                                n = T.min(chunk, received[peer] - c * chunk)
                                send_or_offer(
                                    s, mem, route, offsets, taken, me, node, mine, call, forwarder, row, slot, lane
                                )
                        else:
                            c = (ticket - R * chunks) // forwarder_slots
                            k = (ticket - R * chunks) % forwarder_slots
                            peer = route.source(k)
                            if c * proxied_chunk < node_plan[plan.head(k, 0)]:
                                n = T.min(proxied_chunk, node_plan[plan.head(k, 0)] - c * proxied_chunk)
                                forwarder = T.if_then_else(
                                    node < node_at.of.node_of(peer), node, node + L - 1
                                )  # this node, as an origin
                                send_back(s, mem, route, work_of_node, node, call, returned, i, row, slot, total, lane)
                                N.signal_warp(arrived[forwarder, c], call, peer)
                    else:
                        c = ticket // R
                        peer = (ticket % R + me) % R
                        if proxied:
                            direct = T.if_then_else(N.is_direct(peer), 1, 0)
                            size = T.if_then_else(direct != 0, chunk, proxied_chunk)
                        # Reducers read this rank's own rows in place unless rows are quantised.
                        if c * size < received[peer] and (peer != me or not s.unchanged):
                            if tiles:
                                # The GEMM runs from the last expert to the first, so a row is complete when the GEMM
                                # reaches the first of its experts, by which rows are numbered.
                                c = (received[peer] - 1) // size - c
                            n = T.min(size, received[peer] - c * size)
                            if tiles:
                                awaited = Awaited(finished, product_calls, growth, tile_rows)
                                await_rows(awaited, records, peer, c * size, n, top_k, slot, lane)
                            if direct != 0:
                                slot = slots_base[peer] + c * size
                                send_rows(s, mem.own, mem.slots, offsets, taken, slot, peer, lane)
                            elif proxied:
                                send_proxied(s, mem, offsets, taken, slot, lane)
                            N.signal_warp(arrived[me, c], call, peer)
                    ticket = T.shfl_sync(ahead, 0)
                T.sync_threads()
                handshake.count_sender(done, active, me, thread, R)

            if not tiles:  # else sum_combined sums when the GEMM has left all SMs
                # Finished senders help to sum.
                loaded = T.alloc_local((s.sum_group * s.sum_batch * s.width,), payload)
                acc = T.alloc_local((s.sum_batch * s.width,), "float32")
                from_row = T.alloc_local((s.sum_group,), "int32")
                slot_of = T.alloc_local((-(-V // 32),), "int32")
                work = Work(loaded, acc, from_row, slot_of)
                token = T.alloc_var("int32")
                if not nodes:
                    row = T.alloc_var("int32")
                    total = T.alloc_var("float32")
                handshake.first_ticket(tickets, parity, 1, ahead, token, lane)
                while token < tokens:
                    handshake.take_ticket(tickets, parity, 1, ahead, lane)
                    if nodes:
                        find_rows_of_origins(
                            s, mem, route, offsets, work, now, node, mine, token, peer, row, size, lane
                        )
                    else:
                        find_rows(s, mem, offsets, work, now, token, peer, row, size, lane)
                    T.sync_warp()
                    sum_rows(s, mem, work, token, peer, lane)
                    if valued != "":
                        if nodes:
                            sum_values(
                                s, mem, lambda o: (node_plan[plan.origin_index(token, o)], node_plan[plan.base(o)]), token, row,
                                total, lane,
                            )  # fmt: skip
                        else:
                            sum_values(s, mem, lambda p: (token_slot[token, p], before[p]), token, row, total, lane)
                    token = T.shfl_sync(ahead, 0)
            T.sync_threads()
            ends = handshake.CompletionSignals(active, done, calls)
            of = handshake.Blocks(R, blocks, threads, senders, absent, absent_senders)
            handshake.close_call(of, ends, me, call, block, thread)

    return main


@tsn.jit(name="moe::sum_combined", pass_configs=EXPLICIT_SYNC, compile_flags=EXACT_SUMS)
def sum_combined(
    ranks, experts, top_k, max_tokens, hidden, dtype, weighted, quantised, biases, proxied, chunk, proxied_chunk, blocks,
    threads,
):  # fmt: skip
    """Kernel that sums the rows of the last call of `combine_throughput` with tiles.

    Args:
        ranks … proxied_chunk: as there. blocks, threads: of this kernel, any.

    Parameters of the kernel: as there.
    """
    R, S, payload = ranks, most_sent(ranks, max_tokens, top_k), FP8 if quantised else dtype
    s = CombineConfig(
        R, top_k, max_tokens, hidden, dtype, False, weighted, quantised, "", biases, proxied, chunk, proxied_chunk
    )
    at = PlanOffsets(R, experts // R)
    W = record_words(top_k)

    @T.prim_func
    def main(
        ctx: N.Context(),
        y: T.Tensor((T.dynamic("capacity"), hidden), dtype),
        row_weight: T.Tensor((T.dynamic("weights"),), "float32"),
        bias_0: T.Tensor((T.dynamic("bias_rows"), hidden), dtype),
        bias_1: T.Tensor((T.dynamic("other_bias_rows"), hidden), dtype),
        out: T.Tensor((T.dynamic("rows"), hidden), dtype),
        tokens: T.int32,
        slots: T.Tensor((S, hidden), payload),
        slot_scales: T.Tensor((T.dynamic("scale_rows"), s.groups), "float32"),
        token_slot: T.Tensor((T.dynamic("slot_rows"), R), "int32"),
        records: T.Tensor((R, max_tokens, W), "int32"),
        totals: T.Tensor((at.words,), "int32"),
        arrived: T.Tensor((R, s.chunks), "uint64"),
        tickets: T.Tensor((2, 2), "int32"),
        current: T.Tensor((1,), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads):
            base, before, received, slots_base = shared_ints(4, R)
            offsets = SlotOffsets(received, base, before, slots_base)
            mem = CombineTensors(
                own=LocalContribution(y, row_weight, None, records), result=Result(out, bias_0, bias_1, None),
                slots=SummedRows(slots, slot_scales, None), arrived=arrived, token_slot=token_slot,
            )  # fmt: skip
            thread = T.get_thread_binding()
            lane = thread % 32
            me = T.alloc_var("int32", N.my_pe())
            call = T.alloc_var("uint64", current[0])
            if thread < R:
                base[thread] = totals[at.received_base + thread]
                before[thread] = totals[at.sent_before + thread]
                received[thread] = totals[at.received + thread]
                slots_base[thread] = totals[at.slots_base + thread]
            T.sync_threads()
            parity = T.alloc_var("int32", T.cast(call % T.uint64(2), "int32"))
            peer = T.alloc_var("int32")
            size = T.alloc_var("int32", init=chunk)
            row = T.alloc_var("int32")
            ahead = T.alloc_var("int32", init=0)
            token = T.alloc_var("int32")
            now = handshake.CallState(me, call, parity)
            if not proxied:
                send_finished(s, mem, offsets, tickets, now, ahead, token, peer, lane)
            loaded = T.alloc_local((s.sum_group * s.sum_batch * s.width,), payload)
            acc = T.alloc_local((s.sum_batch * s.width,), "float32")
            from_row = T.alloc_local((s.sum_group,), "int32")
            slot_of = T.alloc_local((-(-R // 32),), "int32")
            work = Work(loaded, acc, from_row, slot_of)
            handshake.first_ticket(tickets, parity, 1, ahead, token, lane)
            while token < tokens:
                handshake.take_ticket(tickets, parity, 1, ahead, lane)
                find_rows(s, mem, offsets, work, now, token, peer, row, size, lane)
                T.sync_warp()
                sum_rows(s, mem, work, token, peer, lane)
                token = T.shfl_sync(ahead, 0)

    return main
