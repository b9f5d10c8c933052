"""The receiving steps of dispatch in latency mode; `s` in them is Sizes of dispatch_latency_steps.py."""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.announcement import report
from tilescale_net.kernels.moe.handshake import wait_timed
from tilescale_net.kernels.moe.row_ops import copy_words, load_batch, store_batch
from tilescale_net.kernels.moe.wire_layout import COUNT_BITS, NO_FAULT


@tsn.macro
def read_headers(
    s, header_in, begun, active, status, incoming, begin, counts, source_counts, received, waited, parity: T.Ref,
    call: T.Ref, block, thread,
):  # fmt: skip
    """Wait for the headers; learn how many messages come from each rank, and where the rows of each expert begin."""
    R, M, threads, local, head = s.ranks, s.max_tokens, s.threads, s.local, s.header
    value = T.alloc_var("uint64")
    place = T.alloc_var("int32")
    total = T.alloc_var("int32")
    if thread < R:
        incoming[thread] = 0
        if active[thread] != 0:
            if s.timed and block == 0:
                wait_timed(lambda: begun[parity * R + thread], call << T.uint64(COUNT_BITS), waited, thread)
            value = N.wait(begun[parity * R + thread], "ge", call << T.uint64(COUNT_BITS))
            incoming[thread] = T.min(T.cast(value & T.uint64((1 << COUNT_BITS) - 1), "int32"), M)
            if block == 0 and header_in[parity * R + thread, head.code] != NO_FAULT:
                report(
                    status,
                    header_in[parity * R + thread, head.code],
                    thread,
                    header_in[parity * R + thread, head.value],
                )
    T.sync_threads()
    for i in T.serial((local + threads - 1) // threads):
        place = i * threads + thread
        if place < local:
            total = 0
            for r in T.serial(R):
                begin[place, r] = total
                if active[r] != 0:
                    total = total + header_in[parity * R + r, place]
                if block == 0:
                    source_counts[place, r] = total - begin[place, r]
            if block == 0:
                counts[place] = total
    if block == 0 and thread < R:
        received[thread] = incoming[thread]
    T.sync_threads()


@tsn.macro
def receive_row(
    s, arrival, out, out_scales, targets, weights, source_token, begin, me: T.Ref, source: T.Ref, slot: T.Ref,
    place: T.Ref, lane,
):  # fmt: skip
    """Copy the row of a message to the rows of its experts on this rank, by a warp; note them for combine."""
    K, M, local, msg, batch, words = s.top_k, s.max_tokens, s.local, s.message, s.row_batch, s.row_words
    row_batches = -(-words // 4 // (32 * batch))
    row_piece = T.alloc_local((batch * 4,), "int32")
    choice = T.alloc_var("int32")
    target = T.alloc_var("int32")
    index = T.alloc_var("int32")
    load_batch(row_piece, arrival, place, 0, lane, words // 4, 4, batch)
    for g in T.serial((K + 31) // 32):
        target = -1
        if g * 32 + lane < K:
            choice = arrival[place, msg.experts + g * 32 + lane]
            if choice >= me * local and choice < (me + 1) * local:
                index = arrival[place, msg.indices + g * 32 + lane]
                # Choices that the header does not count: the source has reported them.
                if index >= 0 and index < M:
                    target = begin[choice - me * local, source] + index
                    source_token[choice - me * local, target] = arrival[place, msg.token]
                    target = target + (choice - me * local) * s.capacity
            targets[source * M + slot, g * 32 + lane] = target
            weights[source * M + slot, g * 32 + lane] = T.reinterpret(
                arrival[place, msg.weights + g * 32 + lane], "float32"
            )
        for b in T.serial(row_batches):
            # The first batch is there already, unless later ones were loaded since.
            if b > 0 or (g > 0 and row_batches > 1):
                load_batch(row_piece, arrival, place, b * 32 * batch, lane, words // 4, 4, batch)
            for k in T.serial(min(K, 32)):
                landing = T.shfl_sync(target, k)
                if landing >= 0:
                    store_batch(out, landing, row_piece, b * 32 * batch, lane, words // 4, 4, batch)
        if s.scale_words:
            for k in T.serial(min(K, 32)):
                landing = T.shfl_sync(target, k)
                if landing >= 0:
                    copy_words(out_scales, landing, arrival, place, s.scale_words, lane, words)
