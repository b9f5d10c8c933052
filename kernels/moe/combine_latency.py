"""Combine in latency mode: brings the experts' outputs back and sums them, weighted, per token.

As in throughput mode a rank sums over its own experts first and sends one row per token. Rows are cut into parts, each
with a signal of its own and handled by one warp on either side, so that a few tokens keep the whole GPU busy. Buffers
and signals alternate between calls as in dispatch_latency.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.announcement import STATUS_WORDS, TAG_BITS
from tilescale_net.kernels.moe import combine_latency_steps as steps
from tilescale_net.kernels.moe import handshake
from tilescale_net.kernels.moe.row_ops import EXACT_SUMS, EXPLICIT_SYNC, FP8, Result, Rows, Work


@tsn.jit(name="moe::combine_latency", pass_configs=EXPLICIT_SYNC, compile_flags=EXACT_SUMS)
def combine_latency(
    ranks,
    top_k,
    max_tokens,
    hidden,
    dtype,
    weighted,
    quantised,
    proxied,
    sends,
    receives,
    parts,
    biases,
    blocks,
    threads,
    absent=0,
    timed=False,
):
    """Kernel that sends, receives, or both.

    Args:
        ranks, top_k, max_tokens, hidden: sizes. dtype: of a row, "bfloat16", "float16" or "float32".
        weighted: multiply each row by its weight. quantised: rows travel as FP8 with a scale per 128 elements.
        proxied: whether some ranks are on other nodes.
        sends, receives: which halves; a half that receives follows the one that sends, on the same stream.
        parts: into how many parts to cut a row, about. biases: how many of `bias_0` and `bias_1` are added to the sums.
        blocks, threads, absent, timed: as in dispatch_latency.

    Parameters of the kernel:
        y [local experts * ranks * max_tokens, hidden] of `dtype`; targets, weights, received: see ReceivedRows.
        bias_0, bias_1 [rows, hidden] of `dtype`.
        out [rows, hidden] of `dtype`, token_slot [rows, ranks] int32, tokens <= rows; active [ranks] int32.
        slots, staged [2 * ranks * max_tokens, hidden] of `dtype` or FP8, slot_scales, staged_scales [2 * ranks *
        max_tokens, groups] float32, begun [2 * ranks], arrived [2 * ranks * max_tokens, parts] uint64: symmetric.
        send_calls, receive_calls [blocks] uint64: calls so far. status: see STATUS_WORDS.
        waited [ranks] uint64, if timed: clocks of waiting for each rank are added: for its announcement by one thread, and for
        each part of its rows by one.
    """
    R, K, M = ranks, top_k, max_tokens
    s = steps.Sizes(R, K, M, hidden, dtype, weighted, quantised, parts, biases, timed=timed)
    groups, cuts, size, warps = s.groups, s.parts, s.size, threads // 32
    payload = FP8 if quantised else dtype
    rows, slot_rows, capacity = T.dynamic("rows"), T.dynamic("slot_rows"), T.dynamic("capacity")
    scale_rows, stages, scale_stages = T.dynamic("scale_rows"), T.dynamic("stages"), T.dynamic("scale_stages")
    bias_rows, other_bias_rows = T.dynamic("bias_rows"), T.dynamic("other_bias_rows")

    @T.prim_func
    def main(
        ctx: N.Context(),
        y: T.Tensor((capacity, hidden), dtype),
        targets: T.Tensor((R * M, K), "int32"),
        weights: T.Tensor((R * M, K), "float32"),
        received: T.Tensor((R,), "int32"),
        bias_0: T.Tensor((bias_rows, hidden), dtype),
        bias_1: T.Tensor((other_bias_rows, hidden), dtype),
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
        send_calls: T.Tensor((blocks + absent,), "uint64"),
        receive_calls: T.Tensor((blocks + absent,), "uint64"),
        status: T.Tensor((STATUS_WORDS,), "int64"),
        waited: T.Tensor((R,), "uint64") if timed else None,
    ):
        with T.Kernel(blocks, threads=threads) as block:
            incoming = T.alloc_shared((R,), "int32")
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            me = T.alloc_var("int32")
            me = N.my_pe()
            call = T.alloc_var("uint64")
            parity = T.alloc_var("int32")  # which of the two sets of buffers
            peer = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            part = T.alloc_var("int32")
            place = T.alloc_var("int32")
            end = T.alloc_var("int32")
            now = handshake.Now(me, call, parity)
            mem = steps.Memory(
                own=steps.Own(y, targets, weights),
                result=Result(out, bias_0, bias_1),
                received=received,
                active=active,
                begun=begun,
                slots=Rows(slots, slot_scales),
                arrived=arrived,
                token_slot=token_slot,
                staged=Rows(staged, staged_scales),
                waited=waited,
            )

            if sends:
                total = T.alloc_var("int32")
                source = T.alloc_var("int32")
                direct = T.alloc_var("int32", init=1)
                handshake.begin_half(send_calls, call, parity, block)
                steps.begin_sending(mem, incoming, total, now, block, thread, R)
                for i in T.serial((total * cuts + blocks * warps - 1) // (blocks * warps)):
                    # Consecutive parts go to different blocks.
                    slot = ((i * warps + warp) * blocks + block) // cuts
                    part = ((i * warps + warp) * blocks + block) % cuts
                    if slot < total:
                        handshake.find_source(incoming, peer, slot)
                        source = peer * M + slot
                        place = (parity * R + me) * M + slot
                        end = T.min(s.units, (part + 1) * size)
                        if proxied:
                            direct = T.if_then_else(N.is_direct(peer), 1, 0)
                        if direct != 0:
                            at_peer = mem.slots.at(peer, quantised)
                            steps.send_part(s, at_peer, place, mem.own, source, part * size, end, lane)
                            N.signal_warp(arrived[place, part], call, peer)
                        elif proxied:
                            there = (parity * R + peer) * M + slot
                            steps.send_proxied(s, mem, source, there, place, part, end, call, peer, lane)
                T.sync_threads()
                handshake.end_half(send_calls, call, blocks, absent, block, thread, threads)

            if receives:
                token = T.alloc_var("int32")
                word = T.alloc_var("uint64")
                piece = T.alloc_local((s.sum_group * s.sum_batch * s.width,), payload)
                acc = T.alloc_local((s.sum_batch * s.width,), "float32")
                from_row = T.alloc_local((s.sum_group,), "int32")
                first = T.alloc_var("int32")
                work, of = Work(piece, acc, from_row), steps.Part(token, part)
                handshake.begin_half(receive_calls, call, parity, block)
                handshake.time_announcements(timed, begun, active, parity, call, TAG_BITS, waited, block, thread, R)
                # Words of ranks that begin come before their rows: this wait costs no time.
                if (proxied or block == 0) and thread < R:
                    if active[thread] != 0:
                        word = N.wait(begun[parity * R + thread], "ge", call << T.uint64(TAG_BITS))
                        if block == 0:
                            handshake.check_announcement(word, 0, thread, status)
                        if proxied:
                            handshake.complete_to_refuser(word, thread)
                for i in T.serial((tokens * cuts + blocks * warps - 1) // (blocks * warps)):
                    token = ((i * warps + warp) * blocks + block) // cuts
                    part = ((i * warps + warp) * blocks + block) % cuts
                    if token < tokens:
                        steps.sum_part(s, mem, work, now, lambda p: p, of, end, first, peer, slot, lane)
                T.sync_threads()
                handshake.end_half(receive_calls, call, blocks, absent, block, thread, threads)

    return main
