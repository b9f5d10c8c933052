"""Combine in throughput mode: brings the experts' outputs back and sums them, weighted, per token.

A rank sums the rows of a token over its own experts in float32, rounds once, and sends one row per token to the token's
rank, into the slot that belongs to this pair. There, reducing warps sum the slots in the order of ranks. Both kinds of
block run at the same time; every chunk of slots has a signal, which carries the number of the call.
"""

from dataclasses import dataclass

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.announcement import STATUS_WORDS
from tilescale_net.kernels.moe.handshake import close_call, count_sender, open_call, take_ticket
from tilescale_net.kernels.moe.row_ops import (
    EXACT_SUMS,
    EXPLICIT_SYNC,
    FP8,
    add_dequantised,
    add_rows,
    add_scaled,
    batch_of,
    clear,
    groups_of,
    load_batch,
    store_quantised,
    store_rounded,
)
from tilescale_net.kernels.moe.wire_layout import Totals, record_words

NONE, OWN = -1, -2  # of a rank's row for a token


@dataclass(frozen=True)
class _Sizes:
    """Compile-time sizes and choices; see combine_throughput."""

    ranks: int
    top_k: int
    max_tokens: int
    hidden: int
    dtype: str
    by_rank: bool
    weighted: str
    quantised: bool
    valued: bool
    proxied: bool
    chunk: int
    proxied_chunk: int

    @property
    def width(self) -> int:  # elements of 16 bytes
        return 4 if self.dtype == "float32" else 8

    @property
    def units(self) -> int:  # pieces of 16 bytes in a row
        return self.hidden // self.width

    @property
    def groups(self) -> int:
        return groups_of(self.hidden)

    @property
    def unchanged(self) -> bool:
        """Whether rows travel as they are."""
        return self.by_rank and not self.quantised and not self.valued

    # Rows that a warp reads at once, and pieces of each per lane; what is in flight hides the latency of memory.
    @property
    def send_group(self) -> int:
        return 1 if self.by_rank else min(self.top_k, 3)

    @property
    def sum_group(self) -> int:
        return min(self.ranks, 4)

    @property
    def send_batch(self) -> int:
        return self._scaled(batch_of(self.units, 8 if self.by_rank else 7))

    @property
    def sum_batch(self) -> int:
        return self._scaled(batch_of(self.units, 16 // self.sum_group))

    def _scaled(self, batch: int) -> int:
        """More pieces where they hold fewer elements."""
        return min(batch * (1 if self.width == 8 else 2), -(-self.units // 32))


@T.macro
def _send_row(s, dst, dst_scales, dst_values, dst_row, y, row_weight, row_values, records, source, j, base, lane):
    """Sum row j of `source` over this rank's experts into a row of `dst`."""
    K, width, batch, group, choices = s.top_k, s.width, s.send_batch, s.send_group, 1 if s.by_rank else s.top_k
    piece = T.alloc_local((group * batch * width,), s.dtype)
    acc = T.alloc_local((batch * width,), "float32")
    from_row = T.alloc_local((group,), "int32")
    weight = T.alloc_local((group,), "float32")
    target = T.alloc_var("int32")
    k = T.alloc_var("int32")
    for b in T.serial(-(-s.units // (32 * batch))):
        clear(acc, batch * width)
        k = 0
        while k < choices:
            for g in T.unroll(group):
                from_row[g] = -1
                weight[g] = 1.0
                while k < choices and from_row[g] < 0:
                    if s.by_rank:
                        from_row[g] = base + j
                    else:
                        from_row[g] = records[source, j, k]
                        if s.weighted == "choices":
                            weight[g] = T.reinterpret(records[source, j, K + k], "float32")
                    k = k + 1
                if s.weighted == "rows":
                    if from_row[g] >= 0:
                        weight[g] = row_weight[from_row[g]]
            add_rows(acc, piece, from_row, weight, y, b * 32 * batch, lane, s.units, width, batch, group)
        if s.quantised:
            store_quantised(dst, dst_scales, dst_row, acc, b * 32 * batch, lane, s.units, width, batch)
        else:
            store_rounded(dst, dst_row, acc, b * 32 * batch, lane, s.units, width, batch, s.dtype)
    if s.valued:
        for i in T.serial((K + 31) // 32):
            if i * 32 + lane < K:
                target = records[source, j, i * 32 + lane]
                if target >= 0:
                    dst_values[dst_row, i * 32 + lane] = row_values[target]
                else:
                    dst_values[dst_row, i * 32 + lane] = T.float32(0)


@T.macro
def _send_direct(
    s, y, row_weight, row_values, slots, slot_scales, slot_values, records, base, me: T.Ref, peer: T.Ref, c: T.Ref, n: T.Ref,
    slot: T.Ref, size: T.Ref, lane,
):  # fmt: skip
    """Sum the `n` rows of chunk `c` for a mapped rank, straight into its slots."""
    slot = me * s.max_tokens + c * size
    if s.unchanged:
        N.put_warp(slots[slot, 0], y[base[peer] + c * size, 0], peer, count=n * s.hidden)
    else:
        # A tuple, because tilelang renames a parameter that is given another name.
        at_peer = (
            N.remote(slots, peer),
            N.remote(slot_scales, peer) if s.quantised else slot_scales,
            N.remote(slot_values, peer) if s.valued else slot_values,
        )
        for q in T.serial(n):
            _send_row(
                s, at_peer[0], at_peer[1], at_peer[2], slot + q, y, row_weight, row_values, records, peer, c * size + q,
                base[peer], lane,
            )  # fmt: skip


@T.macro
def _send_proxied(
    s, y, row_weight, row_values, slots, slot_scales, slot_values, staged, staged_scales, staged_values, records, base, me: T.Ref,
    peer: T.Ref, c: T.Ref, n: T.Ref, slot: T.Ref, size: T.Ref, lane,
):  # fmt: skip
    """Sum the `n` rows of chunk `c` for a rank of another node into staging memory, and put them from there."""
    slot = peer * s.max_tokens + c * size
    for q in T.serial(n):
        _send_row(
            s, staged, staged_scales, staged_values, slot + q, y, row_weight, row_values, records, peer, c * size + q,
            base[peer], lane,
        )  # fmt: skip
    T.sync_warp()
    there = me * s.max_tokens + c * size
    N.put_warp(slots[there, 0], staged[slot, 0], peer, count=n * s.hidden)
    if s.quantised:
        N.put_warp(slot_scales[there, 0], staged_scales[slot, 0], peer, count=n * s.groups)
    if s.valued:
        N.put_warp(slot_values[there, 0], staged_values[slot, 0], peer, count=n * s.top_k)


@T.macro
def _find_rows(
    s,
    slot_of,
    token_slot,
    arrived,
    base,
    me: T.Ref,
    call: T.Ref,
    token: T.Ref,
    peer: T.Ref,
    slot: T.Ref,
    size: T.Ref,
    lane,
):
    """Look up the rows of a token, a rank each by the lanes, and wait for them.

    A lane keeps its rank's row: its place among the slots, or, for rows that are taken from where they are, OWN - place;
    NONE. Lanes get the rows of others by shuffles, because loads that look them up, or comparisons with `me`, could wait
    for the rows that are on their way.
    """
    for i in T.unroll(-(-s.ranks // 32)):
        peer = i * 32 + lane
        slot_of[i] = NONE
        if peer < s.ranks:
            slot = token_slot[token, peer]
            if slot >= 0:
                slot_of[i] = OWN - base[me] - slot if s.unchanged and peer == me else peer * s.max_tokens + slot
                if peer != me or not s.unchanged:
                    if s.proxied:
                        size = T.if_then_else(N.is_direct(peer), s.chunk, s.proxied_chunk)
                    N.wait(arrived[peer, slot // size], "ge", call)


@T.macro
def _sum_rows(s, out, y, slots, slot_scales, slot_of, from_row, piece, acc, token: T.Ref, peer: T.Ref, lane):
    """Sum the rows of a token in the order of ranks."""
    R, units, width, batch, group = s.ranks, s.units, s.width, s.sum_batch, s.sum_group
    for b in T.serial(-(-units // (32 * batch))):
        first = b * 32 * batch
        clear(acc, batch * width)
        for p in T.serial((R + group - 1) // group):
            for g in T.unroll(group):
                peer = p * group + g
                from_row[g] = NONE
                if peer < R:
                    from_row[g] = T.shfl_sync(slot_of[peer // 32], peer % 32)
                if from_row[g] != NONE:
                    if s.unchanged and from_row[g] <= OWN:
                        load_batch(piece, y, OWN - from_row[g], first, lane, units, width, batch, g * batch * width)
                    else:
                        load_batch(piece, slots, from_row[g], first, lane, units, width, batch, g * batch * width)
            for g in T.unroll(group):
                if from_row[g] != NONE:
                    if s.quantised:
                        add_dequantised(
                            acc, piece, slot_scales, from_row[g], first, lane, units, width, batch, g * batch * width
                        )
                    else:
                        add_scaled(acc, piece, T.float32(1), batch * width, g * batch * width)
        store_rounded(out, token, acc, first, lane, units, width, batch, s.dtype)


@T.macro
def _sum_values(s, out_values, slot_values, token_slot, token: T.Ref, slot: T.Ref, total: T.Ref, lane):
    """Bring the numbers of a token's choices together; each comes from one rank."""
    for g in T.serial((s.top_k + 31) // 32):
        if g * 32 + lane < s.top_k:
            total = T.float32(0)
            for p in T.serial(s.ranks):
                slot = token_slot[token, p]
                if slot >= 0:
                    total = total + slot_values[p * s.max_tokens + slot, g * 32 + lane]
            out_values[token, g * 32 + lane] = total


@tsn.jit(name="moe_combine_throughput", pass_configs=EXPLICIT_SYNC, compile_flags=EXACT_SUMS)
def combine_throughput(
    ranks, experts, top_k, max_tokens, hidden, dtype, by_rank, weighted, quantised, valued, proxied, chunk, proxied_chunk,
    senders, reducers, threads,
):  # fmt: skip
    """Kernel that sends and sums.

    Args:
        ranks, experts, top_k, max_tokens, proxied, chunk, proxied_chunk, threads: as in dispatch_throughput.
        hidden, dtype: elements of a row and their type, "bfloat16", "float16" or "float32".
        by_rank: `y` holds one row per received row ("rank" layout); else one per expert's row.
        weighted: "choices": multiply each row by the weight of its choice; "rows": by its `row_weight`; "": sum as it is.
        quantised: rows travel as FP8 with a scale per 128 elements.
        valued: also bring `row_values`, one number per expert's row, back to the choice it belongs to.
        senders, reducers: blocks of each kind; all run at once.

    Parameters of the kernel:
        y [capacity, hidden] of `dtype`; row_weight, row_values [capacity] float32.
        out [rows, hidden] of `dtype`, out_values [rows, top_k] float32; tokens <= rows.
        slots [ranks * max_tokens, hidden] of `dtype` or FP8, slot_scales [ranks * max_tokens, groups] float32,
        slot_values [ranks * max_tokens, top_k] float32: symmetric. staged, staged_scales, staged_values: alike, for rows
        to other nodes.
        token_slot, records, totals: see RoutingPlan. active [ranks] int32: 0 for a rank that is left out.
        ready [ranks], arrived [ranks, chunks], done [ranks]: uint64, symmetric.
        tickets [2, 2] int32: work given out to senders and to reducers, by the parity of the call; 0 at first.
        calls [senders + reducers] uint64: calls so far. tag: 0. status: see STATUS_WORDS.
    """
    R, K, M = ranks, top_k, max_tokens
    s = _Sizes(R, K, M, hidden, dtype, by_rank, weighted, quantised, valued, proxied, chunk, proxied_chunk)
    at, W = Totals(R, experts // R), record_words(K)
    chunks = -(-M // min(chunk, proxied_chunk))
    blocks, payload = senders + reducers, FP8 if quantised else dtype
    rows, value_rows, slot_rows, capacity, weights, values = (
        T.dynamic(n) for n in ("rows", "value_rows", "slot_rows", "capacity", "weights", "values")
    )
    scale_rows, stages, scale_stages, value_stages = (
        T.dynamic(n) for n in ("scale_rows", "stages", "scale_stages", "value_stages")
    )

    @T.prim_func
    def main(
        ctx: N.Context(),
        y: T.Tensor((capacity, hidden), dtype),
        row_weight: T.Tensor((weights,), "float32"),
        row_values: T.Tensor((values,), "float32"),
        out: T.Tensor((rows, hidden), dtype),
        out_values: T.Tensor((value_rows, K), "float32"),
        tokens: T.int32,
        slots: T.Tensor((R * M, hidden), payload),
        slot_scales: T.Tensor((scale_rows, s.groups), "float32"),
        slot_values: T.Tensor((R * M, K), "float32"),
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
        calls: T.Tensor((blocks,), "uint64"),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            received = T.alloc_shared((R,), "int32")
            base = T.alloc_shared((R,), "int32")
            thread = T.get_thread_binding()
            lane = thread % 32
            me = T.alloc_var("int32")
            me = N.my_pe()
            call = T.alloc_var("uint64")
            call = calls[block] + T.uint64(1)
            if thread < R:
                received[thread] = totals[at.received + thread]
                base[thread] = totals[at.received_base + thread]
                # This rank's slots may be overwritten from here on, and those of every rank that has begun the call.
                open_call(ready, active, status, me, call, tag, block, senders, thread)
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
            if block == 0 and thread < 2:
                tickets[1 - parity, thread] = 0
            if block < senders:
                take_ticket(tickets, parity, 0, ahead, lane)
                ticket = T.shfl_sync(ahead, 0)
                while ticket < R * chunks:
                    take_ticket(tickets, parity, 0, ahead, lane)
                    c = ticket // R
                    peer = (ticket % R + me) % R
                    if proxied:
                        direct = T.if_then_else(N.is_direct(peer), 1, 0)
                        size = T.if_then_else(direct != 0, chunk, proxied_chunk)
                    # Reducers take this rank's own rows from where they are, if they travel as they are.
                    if c * size < received[peer] and (peer != me or not s.unchanged):
                        n = T.min(size, received[peer] - c * size)
                        if direct != 0:
                            _send_direct(
                                s, y, row_weight, row_values, slots, slot_scales, slot_values, records, base, me, peer, c,
                                n, slot, size, lane,
                            )  # fmt: skip
                        elif proxied:
                            _send_proxied(
                                s, y, row_weight, row_values, slots, slot_scales, slot_values, staged, staged_scales,
                                staged_values, records, base, me, peer, c, n, slot, size, lane,
                            )  # fmt: skip
                        T.sync_warp()
                        if lane == 0:
                            N.fence(peer)
                            N.signal(arrived[me, c], call, peer)
                    ticket = T.shfl_sync(ahead, 0)
                T.sync_threads()
                count_sender(done, active, me, thread, R)

            # Senders that are done help to sum.
            piece = T.alloc_local((s.sum_group * s.sum_batch * s.width,), payload)
            acc = T.alloc_local((s.sum_batch * s.width,), "float32")
            from_row = T.alloc_local((s.sum_group,), "int32")
            slot_of = T.alloc_local((-(-R // 32),), "int32")
            token = T.alloc_var("int32")
            row = T.alloc_var("int32")
            total = T.alloc_var("float32")
            take_ticket(tickets, parity, 1, ahead, lane)
            token = T.shfl_sync(ahead, 0)
            while token < tokens:
                take_ticket(tickets, parity, 1, ahead, lane)
                _find_rows(s, slot_of, token_slot, arrived, base, me, call, token, peer, row, size, lane)
                T.sync_warp()
                _sum_rows(s, out, y, slots, slot_scales, slot_of, from_row, piece, acc, token, peer, lane)
                if valued:
                    _sum_values(s, out_values, slot_values, token_slot, token, row, total, lane)
                token = T.shfl_sync(ahead, 0)
            T.sync_threads()
            close_call(done, active, calls, call, block, senders, thread, R)

    return main
