"""Combine in latency mode: brings the experts' outputs back and sums them, weighted, per token.

As in throughput mode a rank sums over its own experts first and sends one row per token. Rows are cut into parts, each
with a signal of its own and handled by one warp on either side, so that a few tokens keep the whole GPU busy. Buffers
and signals alternate between calls as in dispatch_latency.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.moe.handshake import judge, tell
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
from tilescale_net.kernels.moe.sizes import STATUS_WORDS, TAG_BITS


def parts_of(hidden: int, width: int, wanted: int) -> tuple[int, int]:
    """Parts of a row and 16-byte pieces per part; a part is whole warps of pieces, so that no scale is shared."""
    units = hidden // width
    size = (units + wanted * 32 - 1) // (wanted * 32) * 32
    return -(-units // size), size


@tsn.jit(name="moe_combine_latency", pass_configs=EXPLICIT_SYNC, compile_flags=EXACT_SUMS)
def combine_latency(
    ranks, top_k, max_tokens, hidden, dtype, weighted, quantised, proxied, sends, receives, parts, blocks, threads
):
    """Kernel that sends, receives, or both.

    Args:
        ranks, top_k, max_tokens, hidden: sizes. dtype: of a row, "bfloat16", "float16" or "float32".
        weighted: multiply each row by its weight. quantised: rows travel as FP8 with a scale per 128 elements.
        proxied: whether some ranks are on other nodes.
        sends, receives: which halves; a half that receives follows the one that sends, on the same stream.
        parts: into how many parts to cut a row, about. blocks, threads: launch geometry; all blocks must run at once.

    Parameters of the kernel:
        y [local experts * ranks * max_tokens, hidden], targets, weights, received: as dispatch_latency left them;
        out [rows, hidden], token_slot [rows, ranks], tokens <= rows; active [ranks];
        slots, slot_scales, staged, staged_scales [2 * ranks * max_tokens, …], begun [2 * ranks],
        arrived [2 * ranks * max_tokens, parts]: symmetric; send_epochs, receive_epochs [blocks]: calls so far;
        status: see STATUS_WORDS.
    """
    R, K, M = ranks, top_k, max_tokens
    width = 4 if dtype == "float32" else 8
    units, groups = hidden // width, groups_of(hidden)
    cuts, size = parts_of(hidden, width, parts)
    # Rows that a warp reads at once, and pieces of each per lane.
    send_group, sum_group = min(K, 2), min(R, 4)
    send_batch, sum_batch = batch_of(size, 14), batch_of(size, 7)
    send_batches, sum_batches = (-(-size // (32 * b)) for b in (send_batch, sum_batch))
    warps = threads // 32
    payload = FP8 if quantised else dtype
    rows, slot_rows, capacity = T.dynamic("rows"), T.dynamic("slot_rows"), T.dynamic("capacity")
    scale_rows, stages, scale_stages = T.dynamic("scale_rows"), T.dynamic("stages"), T.dynamic("scale_stages")

    @T.macro
    def send_part(dst, dst_scales, dst_row, y, targets, weights, src, begin, end, lane):
        """Sum a part of a row over this rank's experts into a row of `dst`."""
        piece = T.alloc_local((send_group * send_batch * width,), dtype)
        acc = T.alloc_local((send_batch * width,), "float32")
        from_row = T.alloc_local((send_group,), "int32")
        weight = T.alloc_local((send_group,), "float32")
        first = T.alloc_var("int32")
        k = T.alloc_var("int32")
        for b in T.serial(send_batches):
            first = begin + b * 32 * send_batch
            clear(acc, send_batch * width)
            k = 0
            while k < K:
                for g in T.unroll(send_group):
                    from_row[g] = -1
                    weight[g] = 1.0
                    while k < K and from_row[g] < 0:
                        from_row[g] = targets[src, k]
                        if weighted:
                            weight[g] = weights[src, k]
                        k = k + 1
                add_rows(acc, piece, from_row, weight, y, first, lane, end, width, send_batch, send_group)
            if quantised:
                store_quantised(dst, dst_scales, dst_row, acc, first, lane, end, width, send_batch)
            else:
                store_rounded(dst, dst_row, acc, first, lane, end, width, send_batch, dtype)

    @T.prim_func
    def main(
        ctx: N.Context(),
        y: T.Tensor((capacity, hidden), dtype),
        targets: T.Tensor((R * M, K), "int32"),
        weights: T.Tensor((R * M, K), "float32"),
        received: T.Tensor((R,), "int32"),
        out: T.Tensor((rows, hidden), dtype),
        token_slot: T.Tensor((slot_rows, R), "int32"),
        tokens: T.int32,
        active: T.Tensor((R,), "int32"),
        slots: T.Tensor((2 * R * M, hidden), payload),
        slot_scales: T.Tensor((scale_rows, groups), "float32"),
        staged: T.Tensor((stages, hidden), payload),
        staged_scales: T.Tensor((scale_stages, groups), "float32"),
        begun: T.Tensor((2 * R,), "uint64"),
        arrived: T.Tensor((2 * R * M, cuts), "uint64"),
        send_epochs: T.Tensor((blocks,), "uint64"),
        receive_epochs: T.Tensor((blocks,), "uint64"),
        status: T.Tensor((STATUS_WORDS,), "int64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            incoming = T.alloc_shared((R,), "int32")
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            me = T.alloc_var("int32")
            me = N.my_pe()
            epoch = T.alloc_var("uint64")
            side = T.alloc_var("int32")  # which of the two sets of buffers
            peer = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            part = T.alloc_var("int32")
            place = T.alloc_var("int32")
            end = T.alloc_var("int32")

            if sends:
                total = T.alloc_var("int32")
                source = T.alloc_var("int32")
                near = T.alloc_var("int32", init=1)
                epoch = send_epochs[block] + T.uint64(1)
                side = T.cast(epoch & T.uint64(1), "int32")
                if thread < R:
                    incoming[thread] = received[thread]
                    if active[thread] != 0:
                        N.wait(begun[(1 - side) * R + thread], "ge", (epoch - T.uint64(1)) << T.uint64(TAG_BITS))
                        if block == 0:
                            tell(begun, side * R + me, epoch, 0, thread)
                T.sync_threads()
                total = 0
                for s in T.serial(R):
                    total = total + incoming[s]
                for i in T.serial((total * cuts + blocks * warps - 1) // (blocks * warps)):
                    # Consecutive parts go to different blocks.
                    slot = ((i * warps + warp) * blocks + block) // cuts
                    part = ((i * warps + warp) * blocks + block) % cuts
                    if slot < total:
                        peer = 0
                        while slot >= incoming[peer]:
                            slot = slot - incoming[peer]
                            peer = peer + 1
                        source = peer * M + slot
                        place = (side * R + me) * M + slot
                        end = T.min(units, (part + 1) * size)
                        if proxied:
                            near = T.if_then_else(N.is_direct(peer), 1, 0)
                        if near != 0:
                            far_slots = N.remote(slots, peer)
                            far_scales = N.remote(slot_scales, peer) if quantised else slot_scales
                            send_part(far_slots, far_scales, place, y, targets, weights, source, part * size, end, lane)
                            T.sync_warp()
                            if lane == 0:
                                N.fence(peer)
                                N.signal(arrived[place, part], epoch, peer)
                        elif proxied:
                            there = (side * R + peer) * M + slot
                            send_part(staged, staged_scales, there, y, targets, weights, source, part * size, end, lane)
                            T.sync_warp()
                            if quantised:
                                N.put_warp(
                                    slot_scales[place, part * size * width // 128],
                                    staged_scales[there, part * size * width // 128],
                                    peer,
                                    count=(end * width + 127) // 128 - part * size * width // 128,
                                )
                                N.put_warp(
                                    slots[place, part * size * width],
                                    staged[there, part * size * width],
                                    peer,
                                    count=(end - part * size) * width,
                                )
                                T.sync_warp()
                                if lane == 0:
                                    N.fence(peer)
                                    N.signal(arrived[place, part], epoch, peer)
                            else:
                                N.put_signal_warp(
                                    slots[place, part * size * width],
                                    staged[there, part * size * width],
                                    peer,
                                    arrived[place, part],
                                    epoch,
                                    count=(end - part * size) * width,
                                )
                T.sync_threads()
                if thread == 0:
                    send_epochs[block] = epoch

            if receives:
                token = T.alloc_var("int32")
                said = T.alloc_var("uint64")
                piece = T.alloc_local((sum_group * sum_batch * width,), payload)
                acc = T.alloc_local((sum_batch * width,), "float32")
                from_row = T.alloc_local((sum_group,), "int32")
                first = T.alloc_var("int32")
                epoch = receive_epochs[block] + T.uint64(1)
                side = T.cast(epoch & T.uint64(1), "int32")
                # Words of ranks that begin come before their rows: this wait costs no time.
                if block == 0 and thread < R:
                    if active[thread] != 0:
                        said = N.wait(begun[side * R + thread], "ge", epoch << T.uint64(TAG_BITS))
                        judge(said, 0, thread, status)
                for i in T.serial((tokens * cuts + blocks * warps - 1) // (blocks * warps)):
                    token = ((i * warps + warp) * blocks + block) // cuts
                    part = ((i * warps + warp) * blocks + block) % cuts
                    if token < tokens:
                        end = T.min(units, (part + 1) * size)
                        for g in T.serial((R + 31) // 32):
                            peer = g * 32 + lane
                            if peer < R:
                                slot = token_slot[token, peer]
                                if slot >= 0:
                                    N.wait(arrived[(side * R + peer) * M + slot, part], "ge", epoch)
                        T.sync_warp()
                        for b in T.serial(sum_batches):
                            first = part * size + b * 32 * sum_batch
                            clear(acc, sum_batch * width)
                            for p in T.serial((R + sum_group - 1) // sum_group):
                                for g in T.unroll(sum_group):
                                    from_row[g] = -1
                                    if p * sum_group + g < R:
                                        slot = token_slot[token, p * sum_group + g]
                                        if slot >= 0:
                                            from_row[g] = (side * R + p * sum_group + g) * M + slot
                                            load_batch(
                                                piece, slots, from_row[g], first, lane, end, width, sum_batch,
                                                g * sum_batch * width,
                                            )  # fmt: skip
                                for g in T.unroll(sum_group):
                                    if from_row[g] >= 0:
                                        if quantised:
                                            add_dequantised(
                                                acc, piece, slot_scales, from_row[g], first, lane, end, width, sum_batch,
                                                g * sum_batch * width,
                                            )  # fmt: skip
                                        else:
                                            add_scaled(
                                                acc, piece, T.float32(1), sum_batch * width, g * sum_batch * width
                                            )
                            store_rounded(out, token, acc, first, lane, end, width, sum_batch, dtype)
                T.sync_threads()
                if thread == 0:
                    receive_epochs[block] = epoch

    return main
