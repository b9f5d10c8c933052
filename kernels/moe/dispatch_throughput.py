"""Dispatch in throughput mode: moves the rows of a layout, each once per target rank.

Sending warps put rows straight from the caller's tensor to where the layout wants them at the target. Rows to another
node go through staging memory, several to a message. What happens at the target depends on `placement`:

- "rank": rows lie by source rank and token, nothing is left to do.
- "expert": the row lands at the place of its first expert there; receiving warps copy it to those of its other experts.
- "arrival": as "expert" for an output that peers cannot reach: rows land in a buffer, receiving warps copy all of them.

Copying overlaps with sending: every chunk of rows has a signal, which carries the number of the call.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.moe.handshake import open_call
from tilescale_net.kernels.moe.rows import EXPLICIT_SYNC, batch_of, copy_row, copy_words, load_batch, store_batch
from tilescale_net.kernels.moe.sizes import STATUS_WORDS, Totals, record_words


@T.macro
def _signal_chunk(arrived, me, c, epoch, pe, lane):
    """Tell `pe` that a chunk, put by this warp, is there."""
    T.sync_warp()
    if lane == 0:
        N.fence(pe)
        N.signal(arrived[me, c], epoch, pe)


@T.macro
def _scatter(out, out_scales, src, src_scales, row, records, source, j, skip, K, words, scale_words, lane):
    """Copy a row to all rows that its record names, except row `skip`."""
    batch = batch_of(words // 4, 16)
    piece = T.alloc_local((batch * 4,), "int32")
    for b in T.serial((words // 4 + 32 * batch - 1) // (32 * batch)):
        load_batch(piece, src, row, b * 32 * batch, lane, words // 4, 4, batch)
        for k in T.serial(K):
            target = T.alloc_var("int32")
            target = records[source, j, k]
            if target >= 0 and target != skip:
                store_batch(out, target, piece, b * 32 * batch, lane, words // 4, 4, batch)
    if scale_words:
        for k in T.serial(K):
            place = T.alloc_var("int32")
            place = records[source, j, k]
            if place >= 0 and place != skip:
                copy_words(out_scales, place, src_scales, row, scale_words, lane)


@tsn.jit(name="moe_dispatch_throughput", pass_configs=EXPLICIT_SYNC)
def dispatch_throughput(
    ranks,
    experts,
    top_k,
    max_tokens,
    row_words,
    scale_words,
    placement,
    proxied,
    chunk,
    far_chunk,
    senders,
    receivers,
    threads,
):
    """Kernel that moves the rows.

    Args:
        ranks, experts, top_k, max_tokens: as in the layout.
        row_words, scale_words: 4-byte words of a row (a multiple of 4) and of its scales (0: it has none).
        placement: "rank", "expert" or "arrival".
        proxied: whether some ranks are on other nodes.
        chunk, far_chunk: rows per signal to a mapped rank, and rows per message to another node.
        senders, receivers: blocks of each kind (no receivers for "rank"); threads: of a block. All blocks run at once.

    Parameters of the kernel:
        x [rows, row_words], x_scales: what to send. out, out_scales: symmetric, except for "arrival".
        arrival, arrival_scales [ranks * max_tokens, …]: symmetric; used for "arrival" and for rows from other nodes.
        staged, staged_scales [ranks * max_tokens, …]: symmetric; used for rows to other nodes.
        send_token … totals, active: see the layout. ready [ranks], arrived [ranks, chunks], done [ranks]: symmetric.
        tickets [2, 2]: work given out to senders and to receivers, by the parity of the call; 0 at first.
        epochs [senders + receivers]: calls so far. tag: see output_tag. status: see STATUS_WORDS.
    """
    R, K, M = ranks, top_k, max_tokens
    at, W = Totals(ranks, experts // ranks), record_words(top_k)
    chunks = -(-M // min(chunk, far_chunk))
    blocks, warps = senders + receivers, threads // 32
    scale_width = max(scale_words, 1)
    unroll = batch_of(row_words // 4, 16)
    by_rank, in_place = placement == "rank", placement != "arrival"
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
        epochs: T.Tensor((blocks,), "uint64"),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            sent = T.alloc_shared((R,), "int32")
            base = T.alloc_shared((R,), "int32")
            received = T.alloc_shared((R,), "int32")
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            me = T.alloc_var("int32")
            me = N.my_pe()
            epoch = T.alloc_var("uint64")
            epoch = epochs[block] + T.uint64(1)
            if thread < R:
                sent[thread] = totals[at.sent + thread]
                base[thread] = totals[at.sent_base + thread]
                received[thread] = totals[at.received + thread]
                # This rank's outputs may be overwritten from here on; so may those of ranks that say the same.
                open_call(ready, active, status, me, epoch, tag, block, senders, thread)
            T.sync_threads()

            # A variable of its own for each index: the compiler's arithmetic on the sums is not to be trusted.
            peer = T.alloc_var("int32")
            c = T.alloc_var("int32")
            j = T.alloc_var("int32")
            n = T.alloc_var("int32")
            row = T.alloc_var("int32")
            place = T.alloc_var("int32")
            token = T.alloc_var("int32")
            near = T.alloc_var("int32", init=1)
            # Warps take the next chunk when they are done with one: equal shares would not take them equally long, because
            # multiprocessors share ports to the links. Lane 0 asks for the next ticket while the warp is at work.
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
                    # Consecutive tickets are for the same chunk and different ranks: all links are busy, rows are read once.
                    c = ticket // R
                    peer = (ticket % R + me) % R
                    if proxied:
                        near = T.if_then_else(N.is_direct(peer), 1, 0)
                    # Receivers take this rank's own rows from where they are.
                    if near != 0 and c * chunk < sent[peer] and (by_rank or peer != me):
                        n = T.min(chunk, sent[peer] - c * chunk)
                        for q in T.serial(n):
                            j = c * chunk + q
                            token = send_token[peer, j]
                            if by_rank:
                                row = base[peer] + j
                            elif in_place:
                                row = send_row[peer, j]
                            else:
                                row = me * M + j
                            if in_place:
                                N.put_warp(out[row, 0], x[token, 0], peer, count=row_words, unroll=unroll)
                                if scale_words:
                                    N.put_warp(out_scales[row, 0], x_scales[token, 0], peer, count=scale_words)
                            else:
                                N.put_warp(arrival[row, 0], x[token, 0], peer, count=row_words, unroll=unroll)
                                if scale_words:
                                    N.put_warp(arrival_scales[row, 0], x_scales[token, 0], peer, count=scale_words)
                        if not by_rank:
                            _signal_chunk(arrived, me, c, epoch, peer, lane)
                    if proxied:
                        if near == 0 and c * far_chunk < sent[peer]:
                            n = T.min(far_chunk, sent[peer] - c * far_chunk)
                            place = peer * M + c * far_chunk
                            for q in T.serial(n):
                                token = send_token[peer, c * far_chunk + q]
                                copy_row(staged, place + q, x, token, row_words, lane, 16)
                                if scale_words:
                                    copy_words(staged_scales, place + q, x_scales, token, scale_words, lane)
                            if by_rank:
                                row = base[peer] + c * far_chunk
                                N.put_warp(out[row, 0], staged[place, 0], peer, count=n * row_words)
                                if scale_words:
                                    N.put_warp(out_scales[row, 0], staged_scales[place, 0], peer, count=n * scale_words)
                            else:
                                row = me * M + c * far_chunk
                                N.put_warp(arrival[row, 0], staged[place, 0], peer, count=n * row_words)
                                if scale_words:
                                    N.put_warp(
                                        arrival_scales[row, 0], staged_scales[place, 0], peer, count=n * scale_words
                                    )
                                _signal_chunk(arrived, me, c, epoch, peer, lane)
                    ticket = T.shfl_sync(ahead, 0)
                T.sync_threads()
                if thread < R:
                    if active[thread] != 0:
                        N.fence(thread)
                        N.signal(done[me], 1, thread, op="add")

            if receivers:
                # Senders that are done help to receive.
                size = T.alloc_var("int32", init=chunk)
                if lane == 0:
                    ahead = T.atomic_add(tickets[turn, 1], 1, return_prev=True)
                ticket = T.shfl_sync(ahead, 0)
                while ticket < R * chunks:
                    if lane == 0:
                        ahead = T.atomic_add(tickets[turn, 1], 1, return_prev=True)
                    c = ticket // R
                    peer = (me + R - ticket % R) % R
                    if proxied:
                        near = T.if_then_else(N.is_direct(peer), 1, 0)
                        size = T.if_then_else(near != 0, chunk, far_chunk)
                    if c * size < received[peer]:
                        if peer != me:
                            N.wait_warp(arrived[peer, c], "ge", epoch)
                        n = T.min(size, received[peer] - c * size)
                        for q in T.serial(n):
                            j = c * size + q
                            if peer == me:
                                token = send_token[me, j]
                                _scatter(
                                    out, out_scales, x, x_scales, token, records, peer, j, -1, K, row_words,
                                    scale_words, lane,
                                )  # fmt: skip
                            else:
                                row = -1
                                if in_place:
                                    for k in T.serial(K):
                                        if row < 0:
                                            row = records[peer, j, k]
                                if in_place and near != 0:
                                    _scatter(
                                        out, out_scales, out, out_scales, row, records, peer, j, row, K, row_words,
                                        scale_words, lane,
                                    )  # fmt: skip
                                elif proxied or not in_place:
                                    place = peer * M + j
                                    _scatter(
                                        out, out_scales, arrival, arrival_scales, place, records, peer, j, -1, K,
                                        row_words, scale_words, lane,
                                    )  # fmt: skip
                    ticket = T.shfl_sync(ahead, 0)
            T.sync_threads()
            # Nobody ends before all have sent all: so no signal of a call meets one of the next.
            if block == 0 and thread < R:
                if active[thread] != 0:
                    N.wait(done[thread], "ge", epoch * T.uint64(senders))
            if thread == 0:
                # The caller may write to x, and the next call to the staged rows, as soon as this kernel has ended.
                if block < senders:
                    N.quiet()
                epochs[block] = epoch

    return main
