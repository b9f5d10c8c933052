"""The steps of dispatch in latency mode; dispatch_latency.py puts them together, dispatch_latency_tensors.py groups their tensors."""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.moe.handshake import await_previous
from tilescale_net.kernels.moe.row_ops import copy_scales, load_batch, store_batch, store_quantised
from tilescale_net.kernels.moe.wire_layout import BAD_EXPERT, COUNT_BITS, CROWDED, NO_FAULT


@tsn.macro
def count_choices(s, mem, tokens, fault, fault_value, histogram, bad, now, thread):
    """Count the choices per expert and the tokens per rank, by one block; wait meanwhile until the headers are free.

    Leaves the counts in `histogram` [bins] and the fault of this rank with its value in `bad`.
    """
    R, experts, threads, local = s.ranks, s.experts, s.threads, s.local
    seen = T.alloc_local((s.top_k,), "int32")
    other = T.alloc_var("int32")
    choice = T.alloc_var("int32")
    first = T.alloc_var("int32")
    for i in T.serial((s.bins + threads - 1) // threads):
        if i * threads + thread < s.bins:
            histogram[i * threads + thread] = 0
    if thread == 0:
        bad[0] = fault
        bad[1] = fault_value
    if thread < R:
        if mem.active[thread] != 0:
            await_previous(mem.begun, now.parity, now.call, COUNT_BITS, thread, R)
    T.sync_threads()
    for i in T.serial((tokens + threads - 1) // threads):
        other = i * threads + thread
        if other < tokens:
            for k in T.serial(s.top_k):
                choice = -1
                if mem.topk_idx[other, k] < -1 or mem.topk_idx[other, k] >= experts:
                    bad[0] = BAD_EXPERT
                    bad[1] = T.cast(mem.topk_idx[other, k], "int32")
                else:
                    choice = T.cast(mem.topk_idx[other, k], "int32")
                seen[k] = -1
                if choice >= 0:
                    if mem.active[choice // local] != 0:
                        seen[k] = choice // local
                        # An expert has room for every token of every rank, once.
                        first = T.atomic_add(histogram[choice], 1, return_prev=True)
                        if first >= s.max_tokens:
                            bad[0] = CROWDED
                            bad[1] = choice
                        first = 1
                        for q in T.serial(k):
                            if seen[q] == seen[k]:
                                first = 0
                        if first != 0:
                            T.atomic_add(histogram[experts + seen[k]], 1)
                        if s.nodes:
                            first = 1
                            for q in T.serial(k):
                                if seen[q] >= 0 and seen[q] // s.node_size == seen[k] // s.node_size:
                                    first = 0
                            if first != 0:
                                T.atomic_add(histogram[experts + R + seen[k] // s.node_size], 1)
    T.sync_threads()


@tsn.macro
def send_headers(s, mem, histogram, bad, now, thread, warp):
    """Put a header to every rank, with a signal that carries the number of the call and of the messages to expect."""
    R, M, threads, local, head = s.ranks, s.max_tokens, s.threads, s.local, s.header
    peer = T.alloc_var("int32")
    place = T.alloc_var("int32")
    for i in T.serial((R * head.words + threads - 1) // threads):
        place = (i * threads + thread) % head.words
        peer = (i * threads + thread) // head.words
        if peer < R:
            if place < local:
                mem.header_out[now.parity * R + peer, place] = T.min(histogram[peer * local + place], M)
            elif place == head.code:
                mem.header_out[now.parity * R + peer, place] = bad[0]
            elif place == head.value:
                mem.header_out[now.parity * R + peer, place] = bad[1]
            elif s.nodes:
                if place == head.to_node:
                    mem.header_out[now.parity * R + peer, place] = histogram[s.experts + R + peer // s.node_size]
    T.sync_threads()
    for i in T.serial((R + s.warps - 1) // s.warps):
        peer = i * s.warps + warp
        if peer < R:
            if mem.active[peer] != 0:
                N.put_signal_warp(
                    mem.header_in[now.parity * R + now.me, 0], mem.header_out[now.parity * R + peer, 0], peer,
                    mem.begun[now.parity * R + now.me],
                    (now.call << T.uint64(COUNT_BITS)) | T.cast(histogram[s.experts + peer], "uint64"), count=head.words,
                )  # fmt: skip


@tsn.macro
def load_token(s, mem, chosen, piece, token: T.Ref, parity: T.Ref, thread, warp, lane):
    """Begin to load a token's row, and write its choices and their weights to its message, by a block."""
    K, M, msg = s.top_k, s.max_tokens, s.message
    place = T.alloc_var("int32")
    choice = T.alloc_var("int32")
    load_batch(piece, mem.x.rows, token, warp * 32 * s.batch, lane, s.units, s.width, s.batch)
    for g in T.serial((K + s.threads - 1) // s.threads):
        place = g * s.threads + thread
        if place < K:
            choice = -1
            if mem.topk_idx[token, place] >= 0 and mem.topk_idx[token, place] < s.experts:
                choice = T.cast(mem.topk_idx[token, place], "int32")
                if mem.active[choice // s.local] == 0:
                    choice = -1
            chosen.mine[place] = choice
            chosen.same_expert[place] = 0
            chosen.same_rank[place] = 0
            mem.message.words[parity * M + token, msg.experts + place] = choice
            mem.message.words[parity * M + token, msg.weights + place] = T.reinterpret(
                mem.topk_weights[token, place], "int32"
            )
    if thread == 0:
        mem.message.words[parity * M + token, msg.token] = token
    T.sync_threads()


@tsn.macro
def find_places(s, mem, chosen, token: T.Ref, thread):
    """Count, for each choice of a token, the earlier choices of its expert and tokens with one at its rank, or in its node."""
    K, local, of_node = s.top_k, s.local, s.local * s.node_size
    seen = T.alloc_local((K,), "int32")
    found_expert = T.alloc_local((K,), "int32")
    found_rank = T.alloc_local((K,), "int32")
    found_node = T.alloc_local((K if s.nodes else 1,), "int32")
    other = T.alloc_var("int32")
    first = T.alloc_var("int32")
    for k in T.serial(K):
        found_expert[k] = 0
        found_rank[k] = 0
        if s.nodes:
            found_node[k] = 0
    for g in T.serial((token + s.threads - 1) // s.threads):
        other = g * s.threads + thread
        if other < token:
            for q in T.serial(K):
                seen[q] = T.cast(mem.topk_idx[other, q], "int32")
            for k in T.serial(K):
                if chosen.mine[k] >= 0:
                    first = 0
                    for q in T.serial(K):
                        if seen[q] >= 0 and seen[q] < s.experts:
                            if seen[q] == chosen.mine[k]:
                                found_expert[k] = found_expert[k] + 1
                            if seen[q] // local == chosen.mine[k] // local:
                                first = 1
                    found_rank[k] = found_rank[k] + first
            if s.nodes:
                for q in T.serial(K):
                    if seen[q] >= 0 and seen[q] < s.experts:
                        if mem.active[seen[q] // local] == 0:
                            seen[q] = -1
                for k in T.serial(K):
                    if chosen.mine[k] >= 0:
                        first = 0
                        for q in T.serial(K):
                            if seen[q] >= 0 and seen[q] // of_node == chosen.mine[k] // of_node:
                                first = 1
                        found_node[k] = found_node[k] + first
    for k in T.serial(K):
        if found_expert[k] != 0:
            T.atomic_add(chosen.same_expert[k], found_expert[k])
        if found_rank[k] != 0:
            T.atomic_add(chosen.same_rank[k], found_rank[k])
        if s.nodes:
            if found_node[k] != 0:
                T.atomic_add(chosen.same_node[k], found_node[k])


@tsn.macro
def write_row(s, mem, piece, token: T.Ref, parity: T.Ref, thread, warp, lane):
    """Write a token's row, which the block has loaded, to its message; with its scales, quantised where it is asked for."""
    M, units, width, batch = s.max_tokens, s.units, s.width, s.batch
    if s.quantise:
        acc = T.alloc_local((batch * width,), "float32")
        for v in T.unroll(batch * width):
            acc[v] = T.cast(piece[v], "float32")
        store_quantised(
            mem.message.fp8, mem.message.scales, parity * M + token, acc, warp * 32 * batch, lane, units, width, batch,
            s.row_words,
        )  # fmt: skip
    else:
        store_batch(mem.message.words, parity * M + token, piece, warp * 32 * batch, lane, units, width, batch)
        for g in T.serial((s.scale_words + s.threads - 1) // s.threads):
            if g * s.threads + thread < s.scale_words:
                mem.message.words[parity * M + token, s.row_words + g * s.threads + thread] = mem.x.scales[
                    token, g * s.threads + thread
                ]


@tsn.macro
def send_message(s, mem, chosen, token: T.Ref, now, thread, warp, lane):
    """Complete a token's message and put it to every rank that hosts one of its experts, by a warp each."""
    R, K, M, local, msg = s.ranks, s.top_k, s.max_tokens, s.local, s.message
    peer = T.alloc_var("int32")
    place = T.alloc_var("int32")
    first = T.alloc_var("int32")
    for g in T.serial((K + s.threads - 1) // s.threads):
        place = g * s.threads + thread
        if place < K:
            first = 0
            for q in T.serial(place):
                if chosen.mine[q] == chosen.mine[place]:
                    first = first + 1
            mem.message.words[now.parity * M + token, msg.indices + place] = chosen.same_expert[place] + first
    T.sync_threads()
    for g in T.serial((K + s.warps - 1) // s.warps):
        place = g * s.warps + warp
        if place < K:
            if chosen.mine[place] >= 0:
                first = 1
                for q in T.serial(place):
                    if chosen.mine[q] >= 0 and chosen.mine[q] // local == chosen.mine[place] // local:
                        first = 0
                if first != 0:
                    peer = chosen.mine[place] // local
                    if lane == 0:
                        mem.token_slot[token, peer] = chosen.same_rank[place]
                    N.put_signal_warp(
                        mem.arrival[(now.parity * R + now.me) * M + chosen.same_rank[place], 0],
                        mem.message.words[now.parity * M + token, 0], peer,
                        mem.arrived[(now.parity * R + now.me) * M + chosen.same_rank[place]], now.call, count=msg.words,
                    )  # fmt: skip
    T.sync_threads()


@tsn.macro
def read_headers(s, mem, incoming, begin, now, block, thread):
    """Wait for the headers; count how many messages come from each rank, and compute where the rows of each expert begin."""
    R, M, threads, local, head = s.ranks, s.max_tokens, s.threads, s.local, s.header
    value = T.alloc_var("uint64")
    place = T.alloc_var("int32")
    total = T.alloc_var("int32")
    if thread < R:
        incoming[thread] = 0
        if mem.active[thread] != 0:
            value = N.wait(mem.begun[now.parity * R + thread], "ge", now.call << T.uint64(COUNT_BITS))
            incoming[thread] = T.min(T.cast(value & T.uint64((1 << COUNT_BITS) - 1), "int32"), M)
            if block == 0 and mem.header_in[now.parity * R + thread, head.code] != NO_FAULT:
                mem.status[1] = T.cast(thread, "int64")
                mem.status[2] = T.cast(mem.header_in[now.parity * R + thread, head.value], "int64")
                N.st(mem.status[0], T.cast(mem.header_in[now.parity * R + thread, head.code], "int64"), sem="release")
    T.sync_threads()
    for i in T.serial((local + threads - 1) // threads):
        place = i * threads + thread
        if place < local:
            total = 0
            for r in T.serial(R):
                begin[place, r] = total
                if mem.active[r] != 0:
                    total = total + mem.header_in[now.parity * R + r, place]
                if block == 0:
                    mem.kept.source_counts[place, r] = total - begin[place, r]
            if block == 0:
                mem.kept.counts[place] = total
    if block == 0 and thread < R:
        mem.kept.received[thread] = incoming[thread]
    T.sync_threads()


@tsn.macro
def receive_row(s, mem, begin, me: T.Ref, source: T.Ref, slot: T.Ref, place: T.Ref, lane, by_column):
    """Copy the row of a message to the rows of its experts on this rank, by a warp; note them for combine."""
    K, M, local, msg, batch, words = s.top_k, s.max_tokens, s.local, s.message, s.row_batch, s.row_words
    row_batches = -(-words // 4 // (32 * batch))
    row_piece = T.alloc_local((batch * 4,), "int32")
    choice = T.alloc_var("int32")
    target = T.alloc_var("int32")
    index = T.alloc_var("int32")
    load_batch(row_piece, mem.arrival, place, 0, lane, words // 4, 4, batch)
    for g in T.serial((K + 31) // 32):
        target = -1
        if g * 32 + lane < K:
            choice = mem.arrival[place, msg.experts + g * 32 + lane]
            if choice >= me * local and choice < (me + 1) * local:
                index = mem.arrival[place, msg.indices + g * 32 + lane]
                # Choices that the header does not count: the source has reported them.
                if index >= 0 and index < M:
                    target = begin[choice - me * local, source] + index
                    mem.kept.source_token[choice - me * local, target] = mem.arrival[place, msg.token]
                    target = target + (choice - me * local) * s.capacity
            mem.kept.targets[source * M + slot, g * 32 + lane] = target
            mem.kept.weights[source * M + slot, g * 32 + lane] = T.reinterpret(
                mem.arrival[place, msg.weights + g * 32 + lane], "float32"
            )
        for b in T.serial(row_batches):
            # The first batch is there already, unless later ones were loaded since.
            if b > 0 or (g > 0 and row_batches > 1):
                load_batch(row_piece, mem.arrival, place, b * 32 * batch, lane, words // 4, 4, batch)
            for k in T.serial(min(K, 32)):
                landing = T.shfl_sync(target, k)
                if landing >= 0:
                    store_batch(mem.kept.out.rows, landing, row_piece, b * 32 * batch, lane, words // 4, 4, batch)
        if s.scale_words:
            for k in T.serial(min(K, 32)):
                landing = T.shfl_sync(target, k)
                if landing >= 0:
                    copy_scales(
                        mem.kept.out.scales, landing, mem.arrival, place, s.scale_words, lane, words, s.capacity, by_column
                    )  # fmt: skip
