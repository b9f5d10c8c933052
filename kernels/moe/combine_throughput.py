"""Combine in throughput mode: brings the experts' outputs back and sums them, weighted, per token.

A rank sums the rows of a token over its own experts in float32, rounds once, and sends one row per token to the token's
rank, into the slot that belongs to this pair. There, reducing warps sum the slots in the order of ranks. Both kinds of
block run at the same time; every chunk of slots has a signal, which carries the number of the call.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.moe.handshake import open_call
from tilescale_net.kernels.moe.rows import (
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
from tilescale_net.kernels.moe.sizes import STATUS_WORDS, Totals, record_words

NONE, OWN = -1, -2  # of a rank's row for a token


@tsn.jit(name="moe_combine_throughput", pass_configs=EXPLICIT_SYNC, compile_flags=EXACT_SUMS)
def combine_throughput(
    ranks,
    experts,
    top_k,
    max_tokens,
    hidden,
    dtype,
    by_rank,
    weighted,
    quantised,
    valued,
    proxied,
    chunk,
    far_chunk,
    senders,
    reducers,
    threads,
):
    """Kernel that sends and sums.

    Args:
        ranks, experts, top_k, max_tokens, proxied, chunk, far_chunk, threads: as in dispatch_throughput.
        hidden, dtype: elements of a row and their type, "bfloat16", "float16" or "float32".
        by_rank: `y` holds one row per received row ("rank" layout); else one per expert's row.
        weighted: "choices": multiply each row by the weight of its choice; "rows": by its `row_weight`; "": sum as it is.
        quantised: rows travel as FP8 with a scale per 128 elements.
        valued: also bring `row_values`, one number per expert's row, back to the choice it belongs to.
        senders, reducers: blocks of each kind; all run at once.

    Parameters of the kernel:
        y [capacity, hidden], row_weight [capacity], row_values [capacity]; out [rows, hidden], out_values [rows, top_k],
        tokens <= rows; slots, slot_scales, slot_values [ranks * max_tokens, …]: symmetric; staged, staged_scales,
        staged_values [ranks * max_tokens, …]: symmetric, for rows to other nodes; token_slot, records, totals, active:
        see the layout; ready [ranks], arrived [ranks, chunks], done [ranks]: symmetric; tickets [2, 2]: work given
        out to senders and to reducers, by the parity of the call; epochs [senders + reducers]: calls so far. Both 0 at
        first. tag: no output. status: see STATUS_WORDS.
    """
    R, K, M = ranks, top_k, max_tokens
    at, W = Totals(ranks, experts // ranks), record_words(top_k)
    chunks = -(-M // min(chunk, far_chunk))
    blocks, warps = senders + reducers, threads // 32
    width = 4 if dtype == "float32" else 8
    units, groups = hidden // width, groups_of(hidden)
    # Rows that a warp reads at once, and pieces of each per lane; what is in flight hides the latency of memory.
    send_group, send_batch = (1, batch_of(units, 8)) if by_rank else (min(K, 3), batch_of(units, 7))
    sum_group = min(R, 4)
    sum_batch = batch_of(units, 16 // sum_group)
    scale = 1 if width == 8 else 2  # more pieces of fewer elements
    send_batch, sum_batch = min(send_batch * scale, -(-units // 32)), min(sum_batch * scale, -(-units // 32))
    send_batches, sum_batches = (-(-units // (32 * b)) for b in (send_batch, sum_batch))
    choices = 1 if by_rank else K
    lane_rows = -(-R // 32)
    payload = FP8 if quantised else dtype
    whole = by_rank and not quantised and not valued  # rows travel as they are
    rows, value_rows, slot_rows, capacity, weights, values = (
        T.dynamic(n) for n in ("rows", "value_rows", "slot_rows", "capacity", "weights", "values")
    )
    scale_rows, stages, scale_stages, value_stages = (
        T.dynamic(n) for n in ("scale_rows", "stages", "scale_stages", "value_stages")
    )

    @T.macro
    def send_row(dst, dst_scales, dst_values, dst_row, y, row_weight, row_values, records, source, j, base, lane):
        """Sum row j of `source` over this rank's experts into a row of `dst`."""
        piece = T.alloc_local((send_group * send_batch * width,), dtype)
        acc = T.alloc_local((send_batch * width,), "float32")
        from_row = T.alloc_local((send_group,), "int32")
        weight = T.alloc_local((send_group,), "float32")
        target = T.alloc_var("int32")
        k = T.alloc_var("int32")
        for b in T.serial(send_batches):
            clear(acc, send_batch * width)
            k = 0
            while k < choices:
                for g in T.unroll(send_group):
                    from_row[g] = -1
                    weight[g] = 1.0
                    while k < choices and from_row[g] < 0:
                        if by_rank:
                            from_row[g] = base + j
                        else:
                            from_row[g] = records[source, j, k]
                            if weighted == "choices":
                                weight[g] = T.reinterpret(records[source, j, K + k], "float32")
                        k = k + 1
                    if weighted == "rows":
                        if from_row[g] >= 0:
                            weight[g] = row_weight[from_row[g]]
                add_rows(
                    acc, piece, from_row, weight, y, b * 32 * send_batch, lane, units, width, send_batch, send_group
                )
            if quantised:
                store_quantised(dst, dst_scales, dst_row, acc, b * 32 * send_batch, lane, units, width, send_batch)
            else:
                store_rounded(dst, dst_row, acc, b * 32 * send_batch, lane, units, width, send_batch, dtype)
        if valued:
            for i in T.serial((K + 31) // 32):
                if i * 32 + lane < K:
                    target = records[source, j, i * 32 + lane]
                    if target >= 0:
                        dst_values[dst_row, i * 32 + lane] = row_values[target]
                    else:
                        dst_values[dst_row, i * 32 + lane] = T.float32(0)

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
        slot_scales: T.Tensor((scale_rows, groups), "float32"),
        slot_values: T.Tensor((R * M, K), "float32"),
        staged: T.Tensor((stages, hidden), payload),
        staged_scales: T.Tensor((scale_stages, groups), "float32"),
        staged_values: T.Tensor((value_stages, K), "float32"),
        token_slot: T.Tensor((slot_rows, R), "int32"),
        records: T.Tensor((R, M, W), "int32"),
        totals: T.Tensor((at.words,), "int32"),
        active: T.Tensor((R,), "int32"),
        ready: T.Tensor((R,), "uint64"),
        arrived: T.Tensor((R, chunks), "uint64"),
        done: T.Tensor((R,), "uint64"),
        tickets: T.Tensor((2, 2), "int32"),
        epochs: T.Tensor((blocks,), "uint64"),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            received = T.alloc_shared((R,), "int32")
            base = T.alloc_shared((R,), "int32")
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            me = T.alloc_var("int32")
            me = N.my_pe()
            epoch = T.alloc_var("uint64")
            epoch = epochs[block] + T.uint64(1)
            if thread < R:
                received[thread] = totals[at.received + thread]
                base[thread] = totals[at.received_base + thread]
                # This rank's slots may be overwritten from here on; so may those of ranks that say the same.
                open_call(ready, active, status, me, epoch, tag, block, senders, thread)
            T.sync_threads()

            # A variable of its own for each index: the compiler's arithmetic on the sums is not to be trusted.
            peer = T.alloc_var("int32")
            c = T.alloc_var("int32")
            n = T.alloc_var("int32")
            place = T.alloc_var("int32")
            near = T.alloc_var("int32", init=1)
            size = T.alloc_var("int32", init=chunk)
            # Warps take the next chunk, or token, when they are done with one, as in dispatch.
            turn = T.alloc_var("int32")
            turn = T.cast(epoch % T.uint64(2), "int32")
            ahead = T.alloc_var("int32", init=0)
            ticket = T.alloc_var("int32")
            if block == 0 and thread < 2:
                tickets[1 - turn, thread] = 0
            if block < senders:
                if lane == 0:
                    ahead = T.atomic_add(tickets[turn, 0], 1, return_prev=True)
                ticket = T.shfl_sync(ahead, 0)
                while ticket < R * chunks:
                    if lane == 0:
                        ahead = T.atomic_add(tickets[turn, 0], 1, return_prev=True)
                    c = ticket // R
                    peer = (ticket % R + me) % R
                    if proxied:
                        near = T.if_then_else(N.is_direct(peer), 1, 0)
                        size = T.if_then_else(near != 0, chunk, far_chunk)
                    # Reducers take this rank's own rows from where they are, if they travel as they are.
                    if c * size < received[peer] and (peer != me or not whole):
                        n = T.min(size, received[peer] - c * size)
                        if near != 0:
                            place = me * M + c * size
                            if whole:
                                N.put_warp(slots[place, 0], y[base[peer] + c * size, 0], peer, count=n * hidden)
                            else:
                                far_slots = N.remote(slots, peer)
                                far_scales = N.remote(slot_scales, peer) if quantised else slot_scales
                                far_values = N.remote(slot_values, peer) if valued else slot_values
                                for q in T.serial(n):
                                    send_row(
                                        far_slots, far_scales, far_values, place + q, y, row_weight, row_values, records,
                                        peer, c * size + q, base[peer], lane,
                                    )  # fmt: skip
                        elif proxied:
                            place = peer * M + c * size
                            for q in T.serial(n):
                                send_row(
                                    staged, staged_scales, staged_values, place + q, y, row_weight, row_values, records,
                                    peer, c * size + q, base[peer], lane,
                                )  # fmt: skip
                            T.sync_warp()
                            there = me * M + c * size
                            N.put_warp(slots[there, 0], staged[place, 0], peer, count=n * hidden)
                            if quantised:
                                N.put_warp(slot_scales[there, 0], staged_scales[place, 0], peer, count=n * groups)
                            if valued:
                                N.put_warp(slot_values[there, 0], staged_values[place, 0], peer, count=n * K)
                        T.sync_warp()
                        if lane == 0:
                            N.fence(peer)
                            N.signal(arrived[me, c], epoch, peer)
                    ticket = T.shfl_sync(ahead, 0)
                T.sync_threads()
                if thread < R:
                    if active[thread] != 0:
                        N.fence(thread)
                        N.signal(done[me], 1, thread, op="add")

            # Senders that are done help to sum.
            piece = T.alloc_local((sum_group * sum_batch * width,), payload)
            acc = T.alloc_local((sum_batch * width,), "float32")
            from_row = T.alloc_local((sum_group,), "int32")
            place_of = T.alloc_local((lane_rows,), "int32")
            token = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            total = T.alloc_var("float32")
            if lane == 0:
                ahead = T.atomic_add(tickets[turn, 1], 1, return_prev=True)
            token = T.shfl_sync(ahead, 0)
            while token < tokens:
                if lane == 0:
                    ahead = T.atomic_add(tickets[turn, 1], 1, return_prev=True)
                # A lane knows one rank's row for this token: its place among the slots, or, for rows that are taken from
                # where they are, OWN - place; NONE. Lanes tell each other, because loads that look it up, or compare
                # with `me`, could wait for the rows that are on their way.
                for i in T.unroll(lane_rows):
                    peer = i * 32 + lane
                    place_of[i] = NONE
                    if peer < R:
                        slot = token_slot[token, peer]
                        if slot >= 0:
                            place_of[i] = OWN - base[me] - slot if whole and peer == me else peer * M + slot
                            if peer != me or not whole:
                                if proxied:
                                    size = T.if_then_else(N.is_direct(peer), chunk, far_chunk)
                                N.wait(arrived[peer, slot // size], "ge", epoch)
                T.sync_warp()
                for b in T.serial(sum_batches):
                    first = b * 32 * sum_batch
                    clear(acc, sum_batch * width)
                    for p in T.serial((R + sum_group - 1) // sum_group):
                        for g in T.unroll(sum_group):
                            peer = p * sum_group + g
                            from_row[g] = NONE
                            if peer < R:
                                from_row[g] = T.shfl_sync(place_of[peer // 32], peer % 32)
                            if from_row[g] != NONE:
                                if whole and from_row[g] <= OWN:
                                    load_batch(
                                        piece, y, OWN - from_row[g], first, lane, units, width, sum_batch,
                                        g * sum_batch * width,
                                    )  # fmt: skip
                                else:
                                    load_batch(
                                        piece, slots, from_row[g], first, lane, units, width, sum_batch,
                                        g * sum_batch * width,
                                    )  # fmt: skip
                        for g in T.unroll(sum_group):
                            if from_row[g] != NONE:
                                if quantised:
                                    add_dequantised(
                                        acc, piece, slot_scales, from_row[g], first, lane, units, width, sum_batch,
                                        g * sum_batch * width,
                                    )  # fmt: skip
                                else:
                                    add_scaled(acc, piece, T.float32(1), sum_batch * width, g * sum_batch * width)
                    store_rounded(out, token, acc, first, lane, units, width, sum_batch, dtype)
                if valued:
                    for g in T.serial((K + 31) // 32):
                        if g * 32 + lane < K:
                            total = T.float32(0)
                            for p in T.serial(R):
                                slot = token_slot[token, p]
                                if slot >= 0:
                                    total = total + slot_values[p * M + slot, g * 32 + lane]
                            out_values[token, g * 32 + lane] = total
                token = T.shfl_sync(ahead, 0)
            T.sync_threads()
            # Nobody ends before all have sent all: so no signal of a call meets one of the next.
            if block == 0 and thread < R:
                if active[thread] != 0:
                    N.wait(done[thread], "ge", epoch * T.uint64(senders))
            if thread == 0:
                # The caller may write to y, and the next call to the staged rows, as soon as this kernel has ended.
                if block < senders:
                    N.quiet()
                epochs[block] = epoch

    return main
