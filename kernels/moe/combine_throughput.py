"""Combine in throughput mode: brings the experts' outputs back and sums them, weighted, per token.

A rank sums the rows of a token over its own experts in float32, rounds once, and sends one row per token to the token's
rank, into the slot that belongs to this pair. There, reducing warps sum the slots in the order of ranks. Both kinds of
block run at the same time; every chunk of slots has a signal, which carries the number of the call.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.announcement import STATUS_WORDS
from tilescale_net.kernels.moe import combine_throughput_steps as steps
from tilescale_net.kernels.moe import handshake
from tilescale_net.kernels.moe.row_ops import EXACT_SUMS, EXPLICIT_SYNC, FP8, Result, Work
from tilescale_net.kernels.moe.tiles import Awaited, await_rows, say_begun
from tilescale_net.kernels.moe.totals import Totals
from tilescale_net.kernels.moe.wire_layout import most_sent, record_words


@tsn.macro
def find_rows(s, mem, places, work, now, token: T.Ref, peer: T.Ref, slot: T.Ref, size: T.Ref, lane):
    """Look up the rows of a token, a rank each by the lanes, and wait for them.

    A lane keeps its rank's row: its place among the slots, or, for rows that are taken from where they are, OWN - place;
    NONE. Lanes get the rows of others by shuffles, because loads that look them up, or comparisons with `me`, could wait
    for the rows that are on their way.
    """
    for i in T.unroll(-(-s.ranks // 32)):
        peer = i * 32 + lane
        work.slot_of[i] = steps.NONE
        if peer < s.ranks:
            slot = mem.token_slot[token, peer]
            if slot >= 0:
                work.slot_of[i] = (
                    steps.OWN - places.base[now.me] - slot
                    if s.unchanged and peer == now.me
                    else places.before[peer] + slot
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
        calls [senders + reducers] uint64: calls so far. tag: 0. status: see STATUS_WORDS.
        finished [tiles + 1] uint64, symmetric, product_calls [1] int64, growth int32: see `Tiles`; current [1] uint64, for the
        number of the call. Only where rows are awaited.
    """
    R, K, M, S = ranks, top_k, max_tokens, most_sent(ranks, max_tokens, top_k)
    s = steps.Sizes(R, K, M, hidden, dtype, by_rank, weighted, quantised, valued, biases, proxied, chunk, proxied_chunk)
    at, W = Totals(R, experts // R), record_words(K)
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
            places = steps.Places(received, base, there, before)
            mem = steps.Memory(
                own=steps.Own(y, row_weight, row_values, records),
                result=Result(out, bias_0, bias_1, out_values),
                slots=steps.Sums(slots, slot_scales, slot_values),
                staged=steps.Sums(staged, staged_scales, staged_values),
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
                            steps.send_direct(s, mem, places, taken, slot, lane)
                        elif proxied:
                            steps.send_proxied(s, mem, places, taken, slot, lane)
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
                    steps.sum_rows(s, mem, work, token, peer, lane)
                    if valued != "":
                        steps.sum_values(s, mem, places, token, row, total, lane)
                    token = T.shfl_sync(ahead, 0)
            T.sync_threads()
            ends = handshake.Ends(active, done, calls)
            of = handshake.Blocks(R, blocks, threads, senders, absent, absent_senders)
            handshake.close_call(of, ends, me, call, block, thread)

    return main
