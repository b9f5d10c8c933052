"""Combine in throughput mode: brings the experts' outputs back and sums them, weighted, per token.

A rank sums the rows of a token over its own experts in float32, rounds once, and sends one row per token to the token's
rank, into the slot that belongs to this pair. There, reducing warps sum the slots in the order of ranks. Both kinds of
block run at the same time; every chunk of slots has a signal, which carries the number of the call.

`sum_combined` sums what was sent while a GEMM finished it. Most tokens have their last row only when the GEMM is nearly
done, so that all SMs sum behind it, while the last rows are still in flight. On one node they first send what the few
blocks beside the GEMM have not sent yet.

Where nodes have several ranks (`combine_nodes`), each token's sum crosses the network once per node. The row for a token of
another node stays with its rank, and the token's forwarder here reads it over mapped memory, so that a forwarder needs no
room for what its node has. It sums such rows in float32, in the order of ranks, rounds (or quantises) once more, and sends
one row to the token's rank. That rank sums what it gets from its origins (see layout.py) in their order: the sums of whole
nodes, and in its own node's place the rows of single ranks.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.announcement import STATUS_WORDS
from tilescale_net.kernels.moe import handshake
from tilescale_net.kernels.moe.handshake import take_ticket
from tilescale_net.kernels.moe.layout import (
    NodeCallState,
    NodeLayout,
    NodePlanOffsets,
    NodeTables,
    PlanOffsets,
    most_sent,
    record_words,
)
from tilescale_net.kernels.moe.row_ops import (
    EXACT_SUMS,
    EXPLICIT_SYNC,
    FP8,
    Result,
    SumSizes,
    Work,
    add_dequantised,
    add_rows,
    add_scaled,
    batch_of,
    clear,
    load_batch,
    store_quantised,
    store_rounded,
)
from tilescale_net.kernels.moe.tiles import Awaited, await_rows, say_begun

NONE, OWN = -1, -2  # of a rank's row for a token


@dataclass(frozen=True)
class CombineConfig(SumSizes):
    """Compile-time sizes and choices; see combine_throughput."""

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
        """Whether rows travel as they are."""
        return self.by_rank and not self.quantised and self.valued == ""

    @property
    def unquantised(self):
        return replace(self, quantised=False)

    def in_node(self, size: int):
        """Of the sum over `size` ranks of a node, with what a warp holds at once there."""
        return replace(self, top_k=min(size, 2), by_rank=False)

    @property
    def chunks(self) -> int:
        """Signals of a rank, where rows go to their ranks straight."""
        return -(-self.max_tokens // min(self.chunk, self.proxied_chunk))

    # Rows that a warp reads at once, and pieces of each per lane; what is in flight hides the latency of memory.
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
        """More pieces where they hold fewer elements."""
        return min(batch * (1 if self.width == 8 else 2), -(-self.units // 32))


class SummedRows(NamedTuple):
    """Sums on their way back.

    Attributes:
        rows: [any, hidden] of the dtype of the result, or of FP8 where rows are quantised.
        scales: float32 [any, groups], those of FP8 rows.
        values: float32 [any, top_k], a number for each choice, where such numbers come back; else not looked at.
    """

    rows: Any
    scales: Any
    values: Any

    def at(self, s, pe):
        """The same memory of a mapped rank."""
        return SummedRows(
            N.remote(self.rows, pe),
            N.remote(self.scales, pe) if s.quantised else self.scales,
            N.remote(self.values, pe) if s.valued != "" else self.values,
        )


class LocalContribution(NamedTuple):
    """What this rank's experts have made.

    Attributes:
        y: [capacity, hidden] of the dtype of the result.
        weights: float32 [capacity], `row_weight`.
        values: float32 [capacity] or [capacity * top_k], `row_values`.
        records: int32 [ranks, max_tokens, words], see `record_words`: which rows of `y` a row that came is summed of.
    """

    y: Any
    weights: Any
    values: Any
    records: Any


class CombineTensors(NamedTuple):
    """The tensors of a combine.

    Attributes:
        own: what this rank sends. result: what the caller gets.
        slots: symmetric, a row for each row that this rank has sent in the dispatch.
        arrived: uint64 [ranks or origins, chunks], symmetric: the last call of which a chunk of `slots` is there.
        token_slot: int32 [rows, ranks], see RoutingPlan; None where rows cross the network once per node.
        staged: symmetric, rows to other nodes; None where there are none.
        relayed: symmetric, where rows cross the network once per node: what this rank has for tokens of other nodes, never
            of FP8.
        summed: uint64 [slots of a gateway * ranks of a node, chunks], symmetric: as `arrived`, of `relayed`.
    """

    own: LocalContribution
    result: Result
    slots: SummedRows
    arrived: Any
    token_slot: Any = None
    staged: Any = None
    relayed: Any = None
    summed: Any = None


class SlotOffsets(NamedTuple):
    """Where the rows of each rank are; int32 [ranks] each, of shared memory.

    Attributes:
        received: how many came from each rank.
        base: the first of them among all that came.
        there: the first slot of this rank at each rank.
        before: the first slot of each rank at this one; not where rows cross the network once per node.
    """

    received: Any
    base: Any
    there: Any
    before: Any = None


@tsn.macro
def send_own_row(s, dst, dst_row, y, row, lane):
    """Convert a row of `y` into a row of `dst`; the next pieces are on their way while those before are converted."""
    width, batch, units = s.width, s.send_batch, s.units
    batches = -(-units // (32 * batch))
    piece = T.alloc_local((batch * width,), s.dtype)
    acc = T.alloc_local((batch * width,), "float32")
    load_batch(piece, y, row, 0, lane, units, width, batch)
    for b in T.serial(batches):
        for i in T.unroll(batch * width):
            acc[i] = T.cast(piece[i], "float32")
        if b + 1 < batches:
            load_batch(piece, y, row, (b + 1) * 32 * batch, lane, units, width, batch)
        if s.quantised:
            store_quantised(dst.rows, dst.scales, dst_row, acc, b * 32 * batch, lane, units, width, batch)
        else:
            store_rounded(dst.rows, dst_row, acc, b * 32 * batch, lane, units, width, batch, s.dtype)


@tsn.macro
def send_summed_row(s, dst, dst_row, own, source, j, lane):
    """Sum row j of `source` over this rank's experts into a row of `dst`."""
    K, width, batch, group = s.top_k, s.width, s.send_batch, s.send_group
    piece = T.alloc_local((group * batch * width,), s.dtype)
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
            add_rows(acc, piece, from_row, weight, own.y, b * 32 * batch, lane, s.units, width, batch, group)
        if s.quantised:
            store_quantised(dst.rows, dst.scales, dst_row, acc, b * 32 * batch, lane, s.units, width, batch)
        else:
            store_rounded(dst.rows, dst_row, acc, b * 32 * batch, lane, s.units, width, batch, s.dtype)


@tsn.macro
def send_row(s, dst, dst_row, own, source, j, base, lane):
    """Bring row j of `source`, summed over this rank's experts, and what goes with it to a row of `dst`."""
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
def send_direct(s, mem, places, chunk, slot: T.Ref, lane):
    """Sum the rows of a chunk for a mapped rank, straight into its slots."""
    slot = places.there[chunk.peer] + chunk.c * chunk.size
    if s.unchanged:
        N.put_warp(
            mem.slots.rows[slot, 0], mem.own.y[places.base[chunk.peer] + chunk.c * chunk.size, 0], chunk.peer,
            count=chunk.n * s.hidden,
        )  # fmt: skip
    else:
        at_peer = mem.slots.at(s, chunk.peer)
        for q in T.serial(chunk.n):
            send_row(s, at_peer, slot + q, mem.own, chunk.peer, chunk.c * chunk.size + q, places.base[chunk.peer], lane)


@tsn.macro
def send_proxied(s, mem, places, chunk, slot: T.Ref, lane):
    """Sum the rows of a chunk for a rank of another node into staging memory, and put them from there."""
    slot = places.base[chunk.peer] + chunk.c * chunk.size
    for q in T.serial(chunk.n):
        send_row(s, mem.staged, slot + q, mem.own, chunk.peer, chunk.c * chunk.size + q, places.base[chunk.peer], lane)
    T.sync_warp()
    first = places.there[chunk.peer] + chunk.c * chunk.size
    N.put_warp(mem.slots.rows[first, 0], mem.staged.rows[slot, 0], chunk.peer, count=chunk.n * s.hidden)
    if s.quantised:
        N.put_warp(mem.slots.scales[first, 0], mem.staged.scales[slot, 0], chunk.peer, count=chunk.n * s.groups)
    if s.valued != "":
        N.put_warp(mem.slots.values[first, 0], mem.staged.values[slot, 0], chunk.peer, count=chunk.n * s.top_k)


@tsn.macro
def send_finished(s, mem, places, tickets, now, ahead: T.Ref, ticket: T.Ref, peer: T.Ref, lane):
    """Send chunks that no block of a combine with tiles has taken, when the product has ended. By a warp, on one node."""
    c, n, slot = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    take_ticket(tickets, now.parity, 0, ahead, lane)
    ticket = T.shfl_sync(ahead, 0)
    while ticket < s.ranks * s.chunks:
        take_ticket(tickets, now.parity, 0, ahead, lane)
        c = ticket // s.ranks
        peer = (ticket % s.ranks + now.me) % s.ranks
        if c * s.chunk < places.received[peer]:
            c = (places.received[peer] - 1) // s.chunk - c
            n = T.min(s.chunk, places.received[peer] - c * s.chunk)
            slot = places.there[peer] + c * s.chunk
            at_peer = mem.slots.at(s, peer)
            for q in T.serial(n):
                send_row(s, at_peer, slot + q, mem.own, peer, c * s.chunk + q, places.base[peer], lane)
            N.signal_warp(mem.arrived[now.me, c], now.call, peer)
        ticket = T.shfl_sync(ahead, 0)


@tsn.macro
def add_bias(s, acc, bias, token: T.Ref, first, lane):
    """Add a row of the caller's to a batch of sums."""
    piece = T.alloc_local((s.sum_batch * s.width,), s.dtype)
    load_batch(piece, bias, token, first, lane, s.units, s.width, s.sum_batch)
    add_scaled(acc, piece, T.float32(1), s.sum_batch * s.width)


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
                            work.piece, mem.own.y, OWN - work.from_row[g], first, lane, units, width, batch,
                            g * batch * width,
                        )  # fmt: skip
                    else:
                        load_batch(
                            work.piece, mem.slots.rows, work.from_row[g], first, lane, units, width, batch,
                            g * batch * width,
                        )  # fmt: skip
            for g in T.unroll(group):
                if work.from_row[g] != NONE:
                    if s.quantised:
                        add_dequantised(
                            work.acc, work.piece, mem.slots.scales, work.from_row[g], first, lane, units, width, batch,
                            g * batch * width,
                        )  # fmt: skip
                    else:
                        add_scaled(work.acc, work.piece, T.float32(1), batch * width, g * batch * width)
        if s.biases > 0:
            add_bias(s, work.acc, mem.result.bias_0, token, first, lane)
        if s.biases > 1:
            add_bias(s, work.acc, mem.result.bias_1, token, first, lane)
        store_rounded(mem.result.out, token, work.acc, first, lane, units, width, batch, s.dtype)


@tsn.macro
def sum_values(s, mem, places, token: T.Ref, slot: T.Ref, total: T.Ref, lane):
    """Add up the numbers of a token's choices over the ranks."""
    for g in T.serial((s.top_k + 31) // 32):
        if g * 32 + lane < s.top_k:
            total = T.float32(0)
            for p in T.serial(s.ranks):
                slot = mem.token_slot[token, p]
                if slot >= 0:
                    total = total + mem.slots.values[places.before[p] + slot, g * 32 + lane]
            mem.result.values[token, g * 32 + lane] = total


@tsn.macro
def find_rows(s, mem, places, work, now, token: T.Ref, peer: T.Ref, slot: T.Ref, size: T.Ref, lane):
    """Look up the rows of a token, a rank each by the lanes, and wait for them.

    A lane keeps its rank's row: its place among the slots, or, for rows that are taken from where they are, OWN - place;
    NONE. Lanes get the rows of others by shuffles, because loads that look them up, or comparisons with `me`, could wait
    for the rows that are on their way.
    """
    for i in T.unroll(-(-s.ranks // 32)):
        peer = i * 32 + lane
        work.slot_of[i] = NONE
        if peer < s.ranks:
            slot = mem.token_slot[token, peer]
            if slot >= 0:
                work.slot_of[i] = (
                    OWN - places.base[now.me] - slot if s.unchanged and peer == now.me else places.before[peer] + slot
                )
                if peer != now.me or not s.unchanged:
                    if s.proxied:
                        size = T.if_then_else(N.is_direct(peer), s.chunk, s.proxied_chunk)
                    N.wait(mem.arrived[peer, slot // size], "ge", now.call)


@tsn.jit(name="moe::combine_throughput", pass_configs=EXPLICIT_SYNC, compile_flags=EXACT_SUMS)
def combine_throughput(
    ranks, experts, top_k, max_tokens, hidden, dtype, by_rank, weighted, quantised, valued, biases, proxied, chunk,
    proxied_chunk, senders, reducers, threads, absent=0, absent_senders=0, tile_rows=0, tiles=0,
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
        absent, absent_senders: how many more blocks, and senders among them, the launch geometry has than this call; block 0
            counts for them.
        tile_rows, tiles: a row of `y` is read when its tile is there, the last rows first, and nothing is summed: that is left
            to `sum_combined`. 0: all rows are there.

    Parameters of the kernel:
        y [capacity, hidden] of `dtype`; row_weight [capacity], row_values [capacity] or [capacity * top_k] float32;
        bias_0, bias_1 [rows, hidden] of `dtype`.
        out [rows, hidden] of `dtype`, out_values [rows, top_k] float32; tokens <= rows.
        slots [rows sent, hidden] of `dtype` or FP8, slot_scales [rows sent, groups] float32, slot_values [rows sent, top_k]
        float32: symmetric. staged, staged_scales, staged_values [rows received, …]: alike, for rows to other nodes.
        token_slot, records, totals: see RoutingPlan. active [ranks] int32: 0 for a rank that is left out.
        ready [ranks], arrived [ranks, chunks], done [ranks]: uint64, symmetric.
        tickets [2, 2] int32: work given out to senders and to reducers, by the parity of the call; 0 at first.
        calls [senders + reducers] uint64: calls so far. tag: 0, or the code of what this rank's host found
        wrong. status: see STATUS_WORDS.
        finished [tiles + 1] uint64, symmetric, product_calls [1] int64, growth int32: see `Tiles`; current [1] uint64, for the
        number of the call. Only where rows are awaited.
    """
    R, K, M, S = ranks, top_k, max_tokens, most_sent(ranks, max_tokens, top_k)
    s = CombineConfig(
        R, K, M, hidden, dtype, by_rank, weighted, quantised, valued, biases, proxied, chunk, proxied_chunk
    )
    at, W = PlanOffsets(R, experts // R), record_words(K)
    chunks = s.chunks
    blocks, payload = senders + reducers, FP8 if quantised else dtype
    rows, value_rows, slot_rows, capacity, weights, values = (
        T.dynamic(n) for n in ("rows", "value_rows", "slot_rows", "capacity", "weights", "values")
    )
    scale_rows, stages, scale_stages, value_stages = (
        T.dynamic(n) for n in ("scale_rows", "stages", "scale_stages", "value_stages")
    )

    bias_rows, other_bias_rows = T.dynamic("bias_rows"), T.dynamic("other_bias_rows")

    @T.prim_func
    def main(
        ctx: N.Context(),
        y: T.Tensor((capacity, hidden), dtype),
        row_weight: T.Tensor((weights,), "float32"),
        row_values: T.Tensor((values,), "float32"),
        bias_0: T.Tensor((bias_rows, hidden), dtype),
        bias_1: T.Tensor((other_bias_rows, hidden), dtype),
        out: T.Tensor((rows, hidden), dtype),
        out_values: T.Tensor((value_rows, K), "float32"),
        tokens: T.int32,
        slots: T.Tensor((S, hidden), payload),
        slot_scales: T.Tensor((scale_rows, s.groups), "float32"),
        slot_values: T.Tensor((S, K), "float32"),
        staged: T.Tensor((stages, hidden), payload),
        staged_scales: T.Tensor((scale_stages, s.groups), "float32"),
        staged_values: T.Tensor((value_stages, K), "float32"),
        token_slot: T.Tensor((slot_rows, R), "int32"),
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
        finished: T.Tensor((tiles + 1,), "uint64") if tiles else None,
        product_calls: T.Tensor((1,), "int64") if tiles else None,
        growth: T.int32 if tiles else None,
        current: T.Tensor((1,), "uint64") if tiles else None,
    ):
        with T.Kernel(blocks, threads=threads) as block:
            received = T.alloc_shared((R,), "int32")
            base = T.alloc_shared((R,), "int32")
            before = T.alloc_shared((R,), "int32")  # where the slots of each rank begin
            there = T.alloc_shared((R,), "int32")  # where those of this rank begin at each
            places = SlotOffsets(received, base, there, before)
            mem = CombineTensors(
                own=LocalContribution(y, row_weight, row_values, records),
                result=Result(out, bias_0, bias_1, out_values),
                slots=SummedRows(slots, slot_scales, slot_values),
                staged=SummedRows(staged, staged_scales, staged_values),
                arrived=arrived,
                token_slot=token_slot,
            )
            thread = T.get_thread_binding()
            lane = thread % 32
            me = T.alloc_var("int32")
            me = N.my_pe()
            call = T.alloc_var("uint64")
            call = calls[block] + T.uint64(1)
            if tiles:
                if block == 0 and thread == 0:
                    current[0] = call
                say_begun(finished, tiles, T.if_then_else(block == 0, 1 + absent, 1), me, thread)
            if thread < R:
                received[thread] = totals[at.received + thread]
                base[thread] = totals[at.received_base + thread]
                before[thread] = totals[at.sent_before + thread]
                there[thread] = totals[at.slots_base + thread]
                # This rank's slots may be overwritten from here on, and those of every rank that has begun the call.
                handshake.open_call(ready, active, status, me, call, tag, block, senders, thread)
            T.sync_threads()

            # Each index has a variable of its own, because the compiler's arithmetic on sums of them cannot be trusted.
            peer = T.alloc_var("int32")
            c = T.alloc_var("int32")
            n = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            direct = T.alloc_var("int32", init=1)
            size = T.alloc_var("int32", init=chunk)
            parity = T.alloc_var("int32")
            parity = T.cast(call % T.uint64(2), "int32")
            ahead = T.alloc_var("int32", init=0)
            ticket = T.alloc_var("int32")
            now, taken = handshake.Now(me, call, parity), handshake.Chunk(peer, c, n, size)
            handshake.clear_tickets(tickets, parity, block, thread)
            if block < senders:
                handshake.first_ticket(tickets, parity, 0, ahead, ticket, lane)
                while ticket < R * chunks:
                    handshake.take_ticket(tickets, parity, 0, ahead, lane)
                    c = ticket // R
                    peer = (ticket % R + me) % R
                    if proxied:
                        direct = T.if_then_else(N.is_direct(peer), 1, 0)
                        size = T.if_then_else(direct != 0, chunk, proxied_chunk)
                    # Reducers take this rank's own rows from where they are, if they travel as they are.
                    if c * size < received[peer] and (peer != me or not s.unchanged):
                        if tiles:
                            # The product goes from the last expert to the first, so that a row is whole when the product
                            # comes to the first of its experts, by which rows are numbered.
                            c = (received[peer] - 1) // size - c
                        n = T.min(size, received[peer] - c * size)
                        if tiles:
                            awaited = Awaited(finished, product_calls, growth, tile_rows)
                            await_rows(awaited, records, peer, c * size, n, top_k, slot, lane)
                        if direct != 0:
                            send_direct(s, mem, places, taken, slot, lane)
                        elif proxied:
                            send_proxied(s, mem, places, taken, slot, lane)
                        N.signal_warp(arrived[me, c], call, peer)
                    ticket = T.shfl_sync(ahead, 0)
                T.sync_threads()
                handshake.count_sender(done, active, me, thread, R)

            if not tiles:  # else sum_combined does it when the product has left all multiprocessors
                # Senders that are done help to sum.
                piece = T.alloc_local((s.sum_group * s.sum_batch * s.width,), payload)
                acc = T.alloc_local((s.sum_batch * s.width,), "float32")
                from_row = T.alloc_local((s.sum_group,), "int32")
                slot_of = T.alloc_local((-(-R // 32),), "int32")
                work = Work(piece, acc, from_row, slot_of)
                token = T.alloc_var("int32")
                row = T.alloc_var("int32")
                total = T.alloc_var("float32")
                handshake.first_ticket(tickets, parity, 1, ahead, token, lane)
                while token < tokens:
                    handshake.take_ticket(tickets, parity, 1, ahead, lane)
                    find_rows(s, mem, places, work, now, token, peer, row, size, lane)
                    T.sync_warp()
                    sum_rows(s, mem, work, token, peer, lane)
                    if valued != "":
                        sum_values(s, mem, places, token, row, total, lane)
                    token = T.shfl_sync(ahead, 0)
            T.sync_threads()
            ends = handshake.Ends(active, done, calls)
            of = handshake.Blocks(R, blocks, threads, senders, absent, absent_senders)
            handshake.close_call(of, ends, me, call, block, thread)

    return main


@tsn.jit(name="moe::sum_combined", pass_configs=EXPLICIT_SYNC, compile_flags=EXACT_SUMS)
def sum_combined(
    ranks, experts, top_k, max_tokens, hidden, dtype, weighted, quantised, biases, proxied, chunk, proxied_chunk, blocks,
    threads,
):  # fmt: skip
    """Kernel that sums what `combine_throughput` with tiles sends, of the call that it has begun last.

    Args:
        ranks … proxied_chunk: as there. blocks, threads: of this kernel, any.

    Parameters of the kernel: those of the same names there.
    """
    R, S, payload = ranks, most_sent(ranks, max_tokens, top_k), FP8 if quantised else dtype
    s = CombineConfig(
        R, top_k, max_tokens, hidden, dtype, False, weighted, quantised, "", biases, proxied, chunk, proxied_chunk
    )
    at = PlanOffsets(R, experts // R)
    rows, slot_rows, scale_rows = T.dynamic("rows"), T.dynamic("slot_rows"), T.dynamic("scale_rows")
    bias_rows, other_bias_rows = T.dynamic("bias_rows"), T.dynamic("other_bias_rows")
    capacity, weights, W = T.dynamic("capacity"), T.dynamic("weights"), record_words(top_k)

    @T.prim_func
    def main(
        ctx: N.Context(),
        y: T.Tensor((capacity, hidden), dtype),
        row_weight: T.Tensor((weights,), "float32"),
        bias_0: T.Tensor((bias_rows, hidden), dtype),
        bias_1: T.Tensor((other_bias_rows, hidden), dtype),
        out: T.Tensor((rows, hidden), dtype),
        tokens: T.int32,
        slots: T.Tensor((S, hidden), payload),
        slot_scales: T.Tensor((scale_rows, s.groups), "float32"),
        token_slot: T.Tensor((slot_rows, R), "int32"),
        records: T.Tensor((R, max_tokens, W), "int32"),
        totals: T.Tensor((at.words,), "int32"),
        arrived: T.Tensor((R, s.chunks), "uint64"),
        tickets: T.Tensor((2, 2), "int32"),
        current: T.Tensor((1,), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads):
            base = T.alloc_shared((R,), "int32")
            before = T.alloc_shared((R,), "int32")
            received = T.alloc_shared((R,), "int32")
            there = T.alloc_shared((R,), "int32")
            places = SlotOffsets(received, base, there, before)
            mem = CombineTensors(
                own=LocalContribution(y, row_weight, None, records),
                result=Result(out, bias_0, bias_1, None),
                slots=SummedRows(slots, slot_scales, None),
                arrived=arrived,
                token_slot=token_slot,
            )
            thread = T.get_thread_binding()
            lane = thread % 32
            me = T.alloc_var("int32")
            me = N.my_pe()
            call = T.alloc_var("uint64")
            call = current[0]
            if thread < R:
                base[thread] = totals[at.received_base + thread]
                before[thread] = totals[at.sent_before + thread]
                received[thread] = totals[at.received + thread]
                there[thread] = totals[at.slots_base + thread]
            T.sync_threads()
            parity = T.alloc_var("int32")
            parity = T.cast(call % T.uint64(2), "int32")
            peer = T.alloc_var("int32")
            size = T.alloc_var("int32", init=chunk)
            row = T.alloc_var("int32")
            ahead = T.alloc_var("int32", init=0)
            token = T.alloc_var("int32")
            now = handshake.Now(me, call, parity)
            if not proxied:
                send_finished(s, mem, places, tickets, now, ahead, token, peer, lane)
            piece = T.alloc_local((s.sum_group * s.sum_batch * s.width,), payload)
            acc = T.alloc_local((s.sum_batch * s.width,), "float32")
            from_row = T.alloc_local((s.sum_group,), "int32")
            slot_of = T.alloc_local((-(-R // 32),), "int32")
            work = Work(piece, acc, from_row, slot_of)
            handshake.first_ticket(tickets, parity, 1, ahead, token, lane)
            while token < tokens:
                handshake.take_ticket(tickets, parity, 1, ahead, lane)
                find_rows(s, mem, places, work, now, token, peer, row, size, lane)
                T.sync_warp()
                sum_rows(s, mem, work, token, peer, lane)
                token = T.shfl_sync(ahead, 0)

    return main


@tsn.macro
def send_rows(s, own, dst, places, chunk, first: T.Ref, target: T.Ref, lane):
    """Sum the rows of a chunk straight into rows `first` … of `dst` at `target`, a rank of this node."""
    if s.unchanged:
        N.put_warp(
            dst.rows[first, 0], own.y[places.base[chunk.peer] + chunk.c * s.chunk, 0], target, count=chunk.n * s.hidden
        )
    else:
        there = dst.at(s, target)
        for q in T.serial(chunk.n):
            send_row(s, there, first + q, own, chunk.peer, chunk.c * s.chunk + q, places.base[chunk.peer], lane)


@tsn.macro
def sum_in_node(s, mem, tables, work, row: T.Ref, node: T.Ref, k: T.Ref, i: T.Ref, lane):
    """Sum row `i` of slot `k` over the ranks of this node, in their order, from where each of them keeps its own."""
    at, plan, width, batch, group = tables.at, tables.plan, s.width, s.send_batch, s.send_group
    for b in T.serial(-(-s.units // (32 * batch))):
        clear(work.acc, batch * width)
        for p in T.serial(-(-at.size // group)):
            for g in T.unroll(group):
                work.from_row[g] = -1
                if p * group + g < at.size:
                    work.from_row[g] = tables.words[plan.gather(k, i, p * group + g)]
                    if work.from_row[g] >= 0:
                        # A tuple, because tilelang renames a tensor that is given another name.
                        there = (N.remote(mem.relayed.rows, node * at.size + p * group + g),)
                        load_batch(
                            work.piece, there[0], work.from_row[g], b * 32 * batch, lane, s.units, width, batch,
                            g * batch * width,
                        )  # fmt: skip
            for g in T.unroll(group):
                if work.from_row[g] >= 0:
                    add_scaled(work.acc, work.piece, T.float32(1), batch * width, g * batch * width)
        if s.quantised:
            store_quantised(
                mem.staged.rows, mem.staged.scales, row, work.acc, b * 32 * batch, lane, s.units, width, batch
            )
        else:
            store_rounded(mem.staged.rows, row, work.acc, b * 32 * batch, lane, s.units, width, batch, s.dtype)


@tsn.macro
def sum_values_in_node(s, mem, tables, row: T.Ref, node: T.Ref, k: T.Ref, i: T.Ref, place: T.Ref, total: T.Ref, lane):
    """Add up the numbers of a token's choices over the ranks of this node."""
    at, plan = tables.at, tables.plan
    for g in T.serial((s.top_k + 31) // 32):
        if g * 32 + lane < s.top_k:
            total = T.float32(0)
            for r in T.serial(at.size):
                place = tables.words[plan.gather(k, i, r)]
                if place >= 0:
                    there = (N.remote(mem.relayed.values, node * at.size + r),)
                    total = total + there[0][place, g * 32 + lane]
            mem.staged.values[row, g * 32 + lane] = total


@tsn.macro
def sum_values_of_origins(s, mem, tables, token: T.Ref, place: T.Ref, total: T.Ref, lane):
    """Add up the numbers of a token's choices over its origins."""
    at, plan = tables.at, tables.plan
    for g in T.serial((s.top_k + 31) // 32):
        if g * 32 + lane < s.top_k:
            total = T.float32(0)
            for o in T.serial(at.origins):
                place = tables.words[plan.place(token, o)]
                if place >= 0:
                    total = total + mem.slots.values[tables.words[plan.base(o)] + place, g * 32 + lane]
            mem.result.values[token, g * 32 + lane] = total


class _ReturnedChunk(NamedTuple):
    """The chunk of sums of this node that a gateway sends; int32 variables of the kernel.

    Attributes:
        k: slot of the source. source: its rank. c: the number of the chunk. n: its rows.
    """

    k: Any
    source: Any
    c: Any
    n: Any


@tsn.macro
def _offer(summed, row: T.Ref, c: T.Ref, call: T.Ref, me: T.Ref, gateway: T.Ref, lane):
    """Signal to `gateway` that a chunk, kept by this warp in its own memory, may be read."""
    T.sync_warp()
    if lane == 0:
        N.quiet(me)
        N.signal(summed[row, c], call, gateway)


@tsn.macro
def _send_chunk(s, mem, tables, places, now, chunk, target: T.Ref, row: T.Ref, first: T.Ref, lane):
    """Send the rows of a chunk that this rank has for `chunk.peer` to it, or keep them for its gateway in this node."""
    at = tables.at
    away = chunk.peer // at.size != now.node
    target = T.if_then_else(away, now.me, chunk.peer)
    first = T.if_then_else(away, places.base[chunk.peer], places.there[chunk.peer]) + chunk.c * s.chunk
    if s.quantised:
        if away:
            send_rows(s.unquantised, mem.own, mem.relayed, places, chunk, first, target, lane)
        else:
            send_rows(s, mem.own, mem.slots, places, chunk, first, target, lane)
    else:
        first = first + T.if_then_else(away, most_sent(s.ranks, s.max_tokens, s.top_k), 0)
        send_rows(s, mem.own, mem.slots, places, chunk, first, target, lane)
    if away:
        target = tables.map[at.carrier + chunk.peer]
        row = tables.map[at.carrier_slot + chunk.peer] * at.size + now.me % at.size
        _offer(mem.summed, row, chunk.c, now.call, now.me, target, lane)
    else:
        N.signal_warp(mem.arrived[now.mine, chunk.c], now.call, target)


@tsn.macro
def _await_row(s, mem, tables, k: T.Ref, i: T.Ref, place: T.Ref, call: T.Ref, lane):
    """Wait until the ranks of this node have what they have for row `i` of slot `k`, a rank each by the lanes."""
    at, plan = tables.at, tables.plan
    for g in T.unroll(-(-at.size // 32)):
        if g * 32 + lane < at.size:
            place = tables.words[plan.gather(k, i, g * 32 + lane)]
            if place >= 0:
                place = place - tables.words[plan.head(k, 2 + 2 * (g * 32 + lane))]
                N.wait(mem.summed[k * at.size + g * 32 + lane, place // s.chunk], "ge", call)
    T.sync_warp()


@tsn.macro
def _send_back(s, mem, tables, work, now, served, i: T.Ref, row: T.Ref, place: T.Ref, total: T.Ref, lane):
    """Sum the rows of a chunk that this node has for the source of a slot, and put them to it."""
    plan = tables.plan
    for q in T.serial(served.n):
        i = served.c * s.proxied_chunk + q
        row = served.k * s.max_tokens + i
        _await_row(s, mem, tables, served.k, i, place, now.call, lane)
        sum_in_node(s.in_node(tables.at.size), mem, tables, work, row, now.node, served.k, i, lane)
        if s.valued != "":
            sum_values_in_node(s, mem, tables, row, now.node, served.k, i, place, total, lane)
    T.sync_warp()
    row = served.k * s.max_tokens + served.c * s.proxied_chunk
    place = tables.words[plan.head(served.k, tables.at.slots_begin)] + served.c * s.proxied_chunk
    N.put_warp(mem.slots.rows[place, 0], mem.staged.rows[row, 0], served.source, count=served.n * s.hidden)
    if s.quantised:
        N.put_warp(mem.slots.scales[place, 0], mem.staged.scales[row, 0], served.source, count=served.n * s.groups)
    if s.valued != "":
        N.put_warp(mem.slots.values[place, 0], mem.staged.values[row, 0], served.source, count=served.n * s.top_k)


@tsn.macro
def _find_rows_of_origins(
    s, mem, tables, places, work, now, token: T.Ref, origin: T.Ref, place: T.Ref, size: T.Ref, lane
):
    """Look up the rows of a token, an origin each by the lanes, and wait for them; as in `find_rows`."""
    at, plan = tables.at, tables.plan
    for i in T.unroll(-(-at.origins // 32)):
        origin = i * 32 + lane
        work.slot_of[i] = NONE
        if origin < at.origins:
            place = tables.words[plan.place(token, origin)]
            if place >= 0:
                work.slot_of[i] = tables.words[plan.base(origin)] + place
                if s.unchanged and origin == now.mine:
                    work.slot_of[i] = OWN - places.base[now.me] - place
                else:
                    size = T.if_then_else(origin >= now.node and origin < now.node + at.size, s.chunk, s.proxied_chunk)
                    N.wait(mem.arrived[origin, place // size], "ge", now.call)


@tsn.jit(name="moe::combine_nodes", pass_configs=EXPLICIT_SYNC, compile_flags=EXACT_SUMS)
def combine_nodes(
    ranks, experts, nodes, slots_of_gateway, top_k, max_tokens, hidden, dtype, by_rank, weighted, quantised, valued, biases,
    chunk, proxied_chunk, senders, reducers, threads, absent=0, absent_senders=0,
):  # fmt: skip
    """Kernel that sends and sums.

    Args:
        nodes, slots_of_gateway: see NodeLayout. The others are those of combine_throughput.

    Parameters of the kernel:
        slots [rows that come back or more, hidden] of `dtype` or FP8, slot_scales, slot_values alike: symmetric.
        staged [slots_of_gateway * max_tokens, hidden], staged_scales, staged_values alike: symmetric; sums of this node.
        relayed [rows received, hidden] of `dtype`, relayed_values [… , top_k] float32: symmetric; what this rank has for
        tokens of other nodes, in the order in which their rows came. Unless `quantised` they are the end of slots, behind
        those of all origins, and of slot_values: two copies of the code that sums would spill more registers.
        arrived [origins, chunks], summed [slots_of_gateway * size, chunks] uint64: symmetric; chunks that are there, of
        `slots` and of `relayed`.
        node_map: see NodeLayout. node_plan: see NodePlanOffsets. The others are those of combine_throughput.
    """
    R, K, M, S, at = ranks, top_k, max_tokens, slots_of_gateway, NodeLayout(ranks, nodes, slots_of_gateway)
    L, V = at.size, at.origins
    s = CombineConfig(V, K, M, hidden, dtype, by_rank, weighted, quantised, valued, biases, True, chunk, proxied_chunk)
    in_node = s.in_node(at.size)
    plan = NodePlanOffsets(at, M)
    totals_at, W = PlanOffsets(R, experts // R), record_words(K)
    chunks, node_chunks = -(-M // chunk), -(-M // proxied_chunk)
    blocks, payload = senders + reducers, FP8 if quantised else dtype
    rows, value_rows, capacity, weights, values = (
        T.dynamic(n) for n in ("rows", "value_rows", "capacity", "weights", "values")
    )
    scale_rows, stages, scale_stages, value_stages, relays, value_relays = (
        T.dynamic(n) for n in ("scale_rows", "stages", "scale_stages", "value_stages", "relays", "value_relays")
    )
    slot_rows, slot_value_rows, bias_rows, other_bias_rows = (
        T.dynamic(n) for n in ("slot_rows", "slot_value_rows", "bias_rows", "other_bias_rows")
    )

    @T.prim_func
    def main(
        ctx: N.Context(),
        y: T.Tensor((capacity, hidden), dtype),
        row_weight: T.Tensor((weights,), "float32"),
        row_values: T.Tensor((values,), "float32"),
        bias_0: T.Tensor((bias_rows, hidden), dtype),
        bias_1: T.Tensor((other_bias_rows, hidden), dtype),
        out: T.Tensor((rows, hidden), dtype),
        out_values: T.Tensor((value_rows, K), "float32"),
        tokens: T.int32,
        slots: T.Tensor((slot_rows, hidden), payload),
        slot_scales: T.Tensor((scale_rows, s.groups), "float32"),
        slot_values: T.Tensor((slot_value_rows, K), "float32"),
        staged: T.Tensor((stages, hidden), payload),
        staged_scales: T.Tensor((scale_stages, s.groups), "float32"),
        staged_values: T.Tensor((value_stages, K), "float32"),
        relayed: T.Tensor((relays, hidden), dtype),
        relayed_values: T.Tensor((value_relays, K), "float32"),
        records: T.Tensor((R, M, W), "int32"),
        totals: T.Tensor((totals_at.words,), "int32"),
        node_map: T.Tensor((at.map_words,), "int32"),
        node_plan: T.Tensor((plan.words,), "int32"),
        active: T.Tensor((R,), "int32"),
        ready: T.Tensor((R,), "uint64"),
        arrived: T.Tensor((V, chunks), "uint64"),
        summed: T.Tensor((S * L, chunks), "uint64"),
        done: T.Tensor((R,), "uint64"),
        tickets: T.Tensor((2, 2), "int32"),
        calls: T.Tensor((blocks + absent,), "uint64"),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            received = T.alloc_shared((R,), "int32")
            base = T.alloc_shared((R,), "int32")
            there = T.alloc_shared((R,), "int32")  # where the slots of this rank begin at each of its node
            places, tables = SlotOffsets(received, base, there), NodeTables(at, plan, node_map, node_plan)
            mem = CombineTensors(
                own=LocalContribution(y, row_weight, row_values, records),
                result=Result(out, bias_0, bias_1, out_values),
                slots=SummedRows(slots, slot_scales, slot_values),
                arrived=arrived,
                staged=SummedRows(staged, staged_scales, staged_values),
                relayed=SummedRows(relayed, None, relayed_values),
                summed=summed,
            )
            thread = T.get_thread_binding()
            lane = thread % 32
            me = T.alloc_var("int32")
            me = N.my_pe()
            node = T.alloc_var("int32")
            node = me // L
            mine = T.alloc_var("int32")  # this rank as an origin, for those of its node
            mine = node + me % L
            call = T.alloc_var("uint64")
            call = calls[block] + T.uint64(1)
            if thread < R:
                received[thread] = totals[totals_at.received + thread]
                base[thread] = totals[totals_at.received_base + thread]
                there[thread] = totals[totals_at.slots_base + thread]
                handshake.open_call(ready, active, status, me, call, tag, block, senders, thread)
            T.sync_threads()

            # Each index has a variable of its own, because the compiler's arithmetic on sums of them cannot be trusted.
            peer = T.alloc_var("int32")
            gateway = T.alloc_var("int32")
            c = T.alloc_var("int32")
            n = T.alloc_var("int32")
            k = T.alloc_var("int32")
            i = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            row = T.alloc_var("int32")
            size = T.alloc_var("int32", init=chunk)
            total = T.alloc_var("float32")
            parity = T.alloc_var("int32")
            parity = T.cast(call % T.uint64(2), "int32")
            ahead = T.alloc_var("int32", init=0)
            ticket = T.alloc_var("int32")
            now = NodeCallState(me, node, call, mine)
            chunk_of, served = handshake.Chunk(peer, c, n), _ReturnedChunk(k, peer, c, n)
            handshake.clear_tickets(tickets, parity, block, thread)
            sums = T.alloc_local((in_node.send_group * in_node.send_batch * s.width,), dtype)
            sum_of_node = T.alloc_local((in_node.send_batch * s.width,), "float32")
            rows_of_node = T.alloc_local((in_node.send_group,), "int32")
            work_of_node = Work(sums, sum_of_node, rows_of_node)
            if block < senders:
                handshake.first_ticket(tickets, parity, 0, ahead, ticket, lane)
                while ticket < R * chunks + S * node_chunks:
                    handshake.take_ticket(tickets, parity, 0, ahead, lane)
                    if ticket < R * chunks:
                        c = ticket // R
                        # What goes to other nodes comes first.
                        peer = (ticket % R + (node + 1) * L) % R
                        # Reducers take this rank's own rows from where they are, if they travel as they are.
                        if c * chunk < received[peer] and (peer != me or not s.unchanged):
                            n = T.min(chunk, received[peer] - c * chunk)
                            _send_chunk(s, mem, tables, places, now, chunk_of, gateway, row, slot, lane)
                    else:
                        c = (ticket - R * chunks) // S
                        k = (ticket - R * chunks) % S
                        peer = node_map[at.source + k]
                        if c * proxied_chunk < node_plan[plan.head(k, 0)]:
                            n = T.min(proxied_chunk, node_plan[plan.head(k, 0)] - c * proxied_chunk)
                            gateway = T.if_then_else(node < peer // L, node, node + L - 1)  # this node, as an origin
                            _send_back(s, mem, tables, work_of_node, now, served, i, row, slot, total, lane)
                            N.signal_warp(arrived[gateway, c], call, peer)
                    ticket = T.shfl_sync(ahead, 0)
                T.sync_threads()
                handshake.count_sender(done, active, me, thread, R)

            # Senders that are done help to sum.
            piece = T.alloc_local((s.sum_group * s.sum_batch * s.width,), payload)
            acc = T.alloc_local((s.sum_batch * s.width,), "float32")
            from_row = T.alloc_local((s.sum_group,), "int32")
            slot_of = T.alloc_local((-(-V // 32),), "int32")
            work = Work(piece, acc, from_row, slot_of)
            token = T.alloc_var("int32")
            handshake.first_ticket(tickets, parity, 1, ahead, token, lane)
            while token < tokens:
                handshake.take_ticket(tickets, parity, 1, ahead, lane)
                _find_rows_of_origins(s, mem, tables, places, work, now, token, peer, row, size, lane)
                T.sync_warp()
                sum_rows(s, mem, work, token, peer, lane)
                if valued != "":
                    sum_values_of_origins(s, mem, tables, token, row, total, lane)
                token = T.shfl_sync(ahead, 0)
            T.sync_threads()
            ends = handshake.Ends(active, done, calls)
            of = handshake.Blocks(R, blocks, threads, senders, absent, absent_senders)
            handshake.close_call(of, ends, me, call, block, thread)

    return main
