"""The steps of combine in throughput mode, and the groups of tensors that they take; combine_throughput.py puts them together."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.moe.handshake import take_ticket
from tilescale_net.kernels.moe.row_ops import (
    Result,
    SumSizes,
    add_dequantised,
    add_rows,
    add_scaled,
    batch_of,
    clear,
    load_batch,
    store_quantised,
    store_rounded,
)

NONE, OWN = -1, -2  # of a rank's row for a token


@dataclass(frozen=True)
class Sizes(SumSizes):
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


class Sums(NamedTuple):
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
        return Sums(
            N.remote(self.rows, pe),
            N.remote(self.scales, pe) if s.quantised else self.scales,
            N.remote(self.values, pe) if s.valued != "" else self.values,
        )


class Own(NamedTuple):
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


class Memory(NamedTuple):
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

    own: Own
    result: Result
    slots: Sums
    arrived: Any
    token_slot: Any = None
    staged: Any = None
    relayed: Any = None
    summed: Any = None


class Places(NamedTuple):
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
