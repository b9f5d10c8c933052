"""Dispatch in latency mode: few tokens, every multiprocessor, no exchange before the data.

A block makes one message per token (row, scales, choices; quantised on the way if asked) and puts it, with a signal of
its own, to every rank that hosts one of the token's experts: once per rank, however many experts there. Each block
finds its token's places by reading all earlier choices itself. A header tells each peer how many messages to expect and
how many rows per expert; from the headers a receiver knows where each row goes, so the rows of an expert are contiguous,
in the order of source rank and token. Receiving warps copy rows to all their experts as the messages come in.

All buffers and signals exist twice and calls alternate. A rank sends call e when every peer has begun call e - 1, which
a peer does only after it has received call e - 2: so no barrier is needed.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.moe.rows import (
    EXPLICIT_SYNC,
    FP8,
    batch_of,
    copy_words,
    load_batch,
    store_batch,
    store_quantised,
)
from tilescale_net.kernels.moe.sizes import BAD_EXPERT, CROWDED, NO_FAULT, STATUS_WORDS, Header, Message


@tsn.jit(name="moe_dispatch_latency", pass_configs=EXPLICIT_SYNC)
def dispatch_latency(
    ranks,
    experts,
    top_k,
    max_tokens,
    row_words,
    scale_words,
    source_dtype,
    sends,
    receives,
    blocks,
    threads,
    index_dtype,
):
    """Kernel that sends, receives, or both.

    Args:
        ranks, experts, top_k, max_tokens: sizes; rank r hosts experts [r * experts / ranks, (r + 1) * …).
        row_words, scale_words: 4-byte words of a row as it travels (a multiple of 4) and of its scales (0: it has none).
        source_dtype: "bfloat16", "float16" or "float32": quantise rows of this type to FP8; "": send them as they are.
        sends, receives: which halves; a half that receives follows the one that sends, on the same stream.
        blocks, threads: launch geometry; all blocks must run at once. index_dtype: of `topk_idx`.

    Parameters of the kernel:
        x [rows, …], x_scales, topk_idx, topk_weights [rows, top_k], tokens <= rows, fault, fault_value; active [ranks];
        message, message_fp8, message_scales [2 * max_tokens, …]: the same symmetric memory by three types;
        header_out [2 * ranks, …], header_in [2 * ranks, …], arrival [2 * ranks * max_tokens, …], begun [2 * ranks],
        arrived [2 * ranks * max_tokens]: symmetric; send_epochs, receive_epochs [blocks]: calls so far; status: see
        STATUS_WORDS. token_slot [rows, ranks]: where the sender finds its rows again.
        out [local experts * ranks * max_tokens, …], out_scales, counts [local experts]: what the caller gets;
        targets, weights [ranks * max_tokens, top_k], received [ranks]: what combine needs.
    """
    R, K, M = ranks, top_k, max_tokens
    local, capacity = experts // ranks, ranks * max_tokens
    msg, head = Message(row_words, scale_words, top_k), Header(experts // ranks)
    warps, scale_width = threads // 32, max(scale_words, 1)
    quantise = source_dtype != ""
    source_width, source_type = (row_words * 4, source_dtype) if quantise else (row_words, "int32")
    width = 4 if source_type in ("float32", "int32") else 8  # elements in 16 bytes
    units = source_width // width
    batch = -(-units // threads)  # a block holds a whole row
    row_batch = batch_of(row_words // 4, 16)
    row_batches = -(-row_words // 4 // (32 * row_batch))
    rows, scale_rows, choices, slot_rows = (T.dynamic(n) for n in ("rows", "scale_rows", "choices", "slot_rows"))
    scale_capacity = T.dynamic("scale_capacity")

    @T.prim_func
    def main(
        ctx: N.Context(),
        x: T.Tensor((rows, source_width), source_type),
        x_scales: T.Tensor((scale_rows, scale_width), "int32"),
        topk_idx: T.Tensor((choices, K), index_dtype),
        topk_weights: T.Tensor((choices, K), "float32"),
        tokens: T.int32,
        fault: T.int32,
        fault_value: T.int32,
        active: T.Tensor((R,), "int32"),
        message: T.Tensor((2 * M, msg.words), "int32"),
        message_fp8: T.Tensor((2 * M, msg.words * 4), FP8),
        message_scales: T.Tensor((2 * M, msg.words), "float32"),
        header_out: T.Tensor((2 * R, head.words), "int32"),
        header_in: T.Tensor((2 * R, head.words), "int32"),
        arrival: T.Tensor((2 * R * M, msg.words), "int32"),
        begun: T.Tensor((2 * R,), "uint64"),
        arrived: T.Tensor((2 * R * M,), "uint64"),
        send_epochs: T.Tensor((blocks,), "uint64"),
        receive_epochs: T.Tensor((blocks,), "uint64"),
        status: T.Tensor((STATUS_WORDS,), "int64"),
        token_slot: T.Tensor((slot_rows, R), "int32"),
        out: T.Tensor((local * capacity, row_words), "int32"),
        out_scales: T.Tensor((scale_capacity, scale_width), "int32"),
        counts: T.Tensor((local,), "int32"),
        targets: T.Tensor((R * M, K), "int32"),
        weights: T.Tensor((R * M, K), "float32"),
        received: T.Tensor((R,), "int32"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            mine = T.alloc_shared((K,), "int32")  # experts of the block's token
            same_expert = T.alloc_shared((K,), "int32")  # earlier choices of the same expert
            same_rank = T.alloc_shared((K,), "int32")  # earlier tokens with a choice at the same rank
            histogram = T.alloc_shared((experts + R,), "int32")
            bad = T.alloc_shared((2,), "int32")
            begin = T.alloc_shared((local, R), "int32")
            incoming = T.alloc_shared((R,), "int32")
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            me = T.alloc_var("int32")
            me = N.my_pe()
            epoch = T.alloc_var("uint64")
            side = T.alloc_var("int32")  # which of the two sets of buffers
            peer = T.alloc_var("int32")
            choice = T.alloc_var("int32")
            place = T.alloc_var("int32")

            if sends:
                token = T.alloc_var("int32")
                other = T.alloc_var("int32")
                first = T.alloc_var("int32")
                seen = T.alloc_local((K,), "int32")
                found_expert = T.alloc_local((K,), "int32")
                found_rank = T.alloc_local((K,), "int32")
                piece = T.alloc_local((batch * width,), source_type)
                acc = T.alloc_local((batch * width,), "float32")
                epoch = send_epochs[block] + T.uint64(1)
                side = T.cast(epoch & T.uint64(1), "int32")
                # -- the last block, which has a token only when all have one, counts for the headers
                if block == blocks - 1:
                    for i in T.serial((experts + R + threads - 1) // threads):
                        if i * threads + thread < experts + R:
                            histogram[i * threads + thread] = 0
                    if thread == 0:
                        bad[0] = fault
                        bad[1] = fault_value
                    if thread < R:
                        if active[thread] != 0:
                            N.wait(begun[(1 - side) * R + thread], "ge", (epoch - T.uint64(1)) << T.uint64(32))
                    T.sync_threads()
                    for i in T.serial((tokens + threads - 1) // threads):
                        other = i * threads + thread
                        if other < tokens:
                            for k in T.serial(K):
                                choice = -1
                                if topk_idx[other, k] < -1 or topk_idx[other, k] >= experts:
                                    bad[0] = BAD_EXPERT
                                    bad[1] = T.cast(topk_idx[other, k], "int32")
                                else:
                                    choice = T.cast(topk_idx[other, k], "int32")
                                seen[k] = -1
                                if choice >= 0:
                                    if active[choice // local] != 0:
                                        seen[k] = choice // local
                                        # An expert has room for every token of every rank, once.
                                        first = T.atomic_add(histogram[choice], 1, return_prev=True)
                                        if first >= M:
                                            bad[0] = CROWDED
                                            bad[1] = choice
                                        first = 1
                                        for q in T.serial(k):
                                            if seen[q] == seen[k]:
                                                first = 0
                                        if first != 0:
                                            T.atomic_add(histogram[experts + seen[k]], 1)
                    T.sync_threads()
                    for i in T.serial((R * head.words + threads - 1) // threads):
                        place = (i * threads + thread) % head.words
                        peer = (i * threads + thread) // head.words
                        if peer < R:
                            if place < local:
                                header_out[side * R + peer, place] = T.min(histogram[peer * local + place], M)
                            elif place == head.code:
                                header_out[side * R + peer, place] = bad[0]
                            elif place == head.value:
                                header_out[side * R + peer, place] = bad[1]
                    T.sync_threads()
                    for i in T.serial((R + warps - 1) // warps):
                        peer = i * warps + warp
                        if peer < R:
                            if active[peer] != 0:
                                N.put_signal_warp(
                                    header_in[side * R + me, 0],
                                    header_out[side * R + peer, 0],
                                    peer,
                                    begun[side * R + me],
                                    (epoch << T.uint64(32)) | T.cast(histogram[experts + peer], "uint64"),
                                    count=head.words,
                                )

                # -- one message per token
                for i in T.serial((tokens + blocks - 1) // blocks):
                    token = i * blocks + block
                    if token < tokens:
                        load_batch(piece, x, token, warp * 32 * batch, lane, units, width, batch)
                        for g in T.serial((K + threads - 1) // threads):
                            place = g * threads + thread
                            if place < K:
                                choice = -1
                                if topk_idx[token, place] >= 0 and topk_idx[token, place] < experts:
                                    choice = T.cast(topk_idx[token, place], "int32")
                                    if active[choice // local] == 0:
                                        choice = -1
                                mine[place] = choice
                                same_expert[place] = 0
                                same_rank[place] = 0
                                message[side * M + token, msg.experts + place] = choice
                                message[side * M + token, msg.weights + place] = T.reinterpret(
                                    topk_weights[token, place], "int32"
                                )
                        T.sync_threads()
                        for k in T.serial(K):
                            found_expert[k] = 0
                            found_rank[k] = 0
                        for g in T.serial((token + threads - 1) // threads):
                            other = g * threads + thread
                            if other < token:
                                for q in T.serial(K):
                                    seen[q] = T.cast(topk_idx[other, q], "int32")
                                for k in T.serial(K):
                                    if mine[k] >= 0:
                                        first = 0
                                        for q in T.serial(K):
                                            if seen[q] >= 0 and seen[q] < experts:
                                                if seen[q] == mine[k]:
                                                    found_expert[k] = found_expert[k] + 1
                                                if seen[q] // local == mine[k] // local:
                                                    first = 1
                                        found_rank[k] = found_rank[k] + first
                        for k in T.serial(K):
                            if found_expert[k] != 0:
                                T.atomic_add(same_expert[k], found_expert[k])
                            if found_rank[k] != 0:
                                T.atomic_add(same_rank[k], found_rank[k])

                        if quantise:
                            for v in T.unroll(batch * width):
                                acc[v] = T.cast(piece[v], "float32")
                            store_quantised(
                                message_fp8, message_scales, side * M + token, acc, warp * 32 * batch, lane, units, width,
                                batch, row_words,
                            )  # fmt: skip
                        else:
                            store_batch(message, side * M + token, piece, warp * 32 * batch, lane, units, width, batch)
                            for g in T.serial((scale_words + threads - 1) // threads):
                                if g * threads + thread < scale_words:
                                    message[side * M + token, row_words + g * threads + thread] = x_scales[
                                        token, g * threads + thread
                                    ]
                        if thread < R:
                            token_slot[token, thread] = -1
                            if i == 0 and active[thread] != 0:
                                N.wait(begun[(1 - side) * R + thread], "ge", (epoch - T.uint64(1)) << T.uint64(32))
                        T.sync_threads()
                        for g in T.serial((K + threads - 1) // threads):
                            place = g * threads + thread
                            if place < K:
                                first = 0
                                for q in T.serial(place):
                                    if mine[q] == mine[place]:
                                        first = first + 1
                                message[side * M + token, msg.indices + place] = same_expert[place] + first
                        T.sync_threads()
                        for g in T.serial((K + warps - 1) // warps):
                            place = g * warps + warp
                            if place < K:
                                if mine[place] >= 0:
                                    first = 1
                                    for q in T.serial(place):
                                        if mine[q] >= 0 and mine[q] // local == mine[place] // local:
                                            first = 0
                                    if first != 0:
                                        peer = mine[place] // local
                                        if lane == 0:
                                            token_slot[token, peer] = same_rank[place]
                                        N.put_signal_warp(
                                            arrival[(side * R + me) * M + same_rank[place], 0],
                                            message[side * M + token, 0],
                                            peer,
                                            arrived[(side * R + me) * M + same_rank[place]],
                                            epoch,
                                            count=msg.words,
                                        )
                        T.sync_threads()
                if thread == 0:
                    send_epochs[block] = epoch

            if receives:
                source = T.alloc_var("int32")
                slot = T.alloc_var("int32")
                total = T.alloc_var("int32")
                target = T.alloc_var("int32")
                index = T.alloc_var("int32")
                value = T.alloc_var("uint64")
                row_piece = T.alloc_local((row_batch * 4,), "int32")
                epoch = receive_epochs[block] + T.uint64(1)
                side = T.cast(epoch & T.uint64(1), "int32")
                if thread < R:
                    incoming[thread] = 0
                    if active[thread] != 0:
                        value = N.wait(begun[side * R + thread], "ge", epoch << T.uint64(32))
                        incoming[thread] = T.min(T.cast(value & T.uint64(0xFFFFFFFF), "int32"), M)
                        if block == 0 and header_in[side * R + thread, head.code] != NO_FAULT:
                            status[1] = T.cast(thread, "int64")
                            status[2] = T.cast(header_in[side * R + thread, head.value], "int64")
                            N.st(status[0], T.cast(header_in[side * R + thread, head.code], "int64"), sem="release")
                T.sync_threads()
                for i in T.serial((local + threads - 1) // threads):
                    place = i * threads + thread
                    if place < local:
                        total = 0
                        for s in T.serial(R):
                            begin[place, s] = total
                            if active[s] != 0:
                                total = total + header_in[side * R + s, place]
                        if block == 0:
                            counts[place] = total
                if block == 0 and thread < R:
                    received[thread] = incoming[thread]
                T.sync_threads()
                total = 0
                for s in T.serial(R):
                    total = total + incoming[s]
                for i in T.serial((total + blocks * warps - 1) // (blocks * warps)):
                    # Consecutive rows go to different blocks.
                    slot = (i * warps + warp) * blocks + block
                    if slot < total:
                        source = 0
                        while slot >= incoming[source]:
                            slot = slot - incoming[source]
                            source = source + 1
                        place = (side * R + source) * M + slot
                        N.wait_warp(arrived[place], "ge", epoch)
                        load_batch(row_piece, arrival, place, 0, lane, row_words // 4, 4, row_batch)
                        for g in T.serial((K + 31) // 32):
                            target = -1
                            if g * 32 + lane < K:
                                choice = arrival[place, msg.experts + g * 32 + lane]
                                if choice >= me * local and choice < (me + 1) * local:
                                    index = arrival[place, msg.indices + g * 32 + lane]
                                    # Choices that the header does not count: the source has reported them.
                                    if index >= 0 and index < M:
                                        target = begin[choice - me * local, source] + index
                                        target = target + (choice - me * local) * capacity
                                targets[source * M + slot, g * 32 + lane] = target
                                weights[source * M + slot, g * 32 + lane] = T.reinterpret(
                                    arrival[place, msg.weights + g * 32 + lane], "float32"
                                )
                            for b in T.serial(row_batches):
                                # The first batch is there already, unless later ones were loaded since.
                                if b > 0 or (g > 0 and row_batches > 1):
                                    load_batch(
                                        row_piece,
                                        arrival,
                                        place,
                                        b * 32 * row_batch,
                                        lane,
                                        row_words // 4,
                                        4,
                                        row_batch,
                                    )
                                for k in T.serial(min(K, 32)):
                                    landing = T.shfl_sync(target, k)
                                    if landing >= 0:
                                        store_batch(
                                            out,
                                            landing,
                                            row_piece,
                                            b * 32 * row_batch,
                                            lane,
                                            row_words // 4,
                                            4,
                                            row_batch,
                                        )
                            if scale_words:
                                for k in T.serial(min(K, 32)):
                                    landing = T.shfl_sync(target, k)
                                    if landing >= 0:
                                        copy_words(out_scales, landing, arrival, place, scale_words, lane, row_words)
                T.sync_threads()
                if thread == 0:
                    receive_epochs[block] = epoch

    return main
