"""The second half of a combine in throughput mode whose rows were sent while a product finished them.

Most tokens have their last row only when the product is nearly done, so that sums are made behind it, by all
multiprocessors, while the last rows are still on their way. On one node those send first what the few blocks beside the
product have not sent yet.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.moe import combine_throughput_steps as steps
from tilescale_net.kernels.moe import handshake
from tilescale_net.kernels.moe.combine_throughput import find_rows
from tilescale_net.kernels.moe.row_ops import EXACT_SUMS, EXPLICIT_SYNC, FP8, Result, Work
from tilescale_net.kernels.moe.totals import Totals
from tilescale_net.kernels.moe.wire_layout import most_sent, record_words


@tsn.jit(name="moe::sum_combined", pass_configs=EXPLICIT_SYNC, compile_flags=EXACT_SUMS)
def sum_combined(
    ranks, experts, top_k, max_tokens, hidden, dtype, weighted, quantised, biases, proxied, chunk, proxied_chunk, blocks,
    threads,
):  # fmt: skip
    """Kernel that sums what `combine_throughput` with tiles sends, of the call that it has begun last.

    Args:
        ranks … proxied_chunk: as there. blocks, threads: of this kernel, any.

    Parameters of the kernel: those of the same names there.
    """
    R, S, payload = ranks, most_sent(ranks, max_tokens, top_k), FP8 if quantised else dtype
    s = steps.Sizes(
        R, top_k, max_tokens, hidden, dtype, False, weighted, quantised, "", biases, proxied, chunk, proxied_chunk
    )
    at = Totals(R, experts // R)
    rows, slot_rows, scale_rows = T.dynamic("rows"), T.dynamic("slot_rows"), T.dynamic("scale_rows")
    bias_rows, other_bias_rows = T.dynamic("bias_rows"), T.dynamic("other_bias_rows")
    capacity, weights, W = T.dynamic("capacity"), T.dynamic("weights"), record_words(top_k)

    @T.prim_func
    def main(
        ctx: N.Context(),
        y: T.Tensor((capacity, hidden), dtype),
        row_weight: T.Tensor((weights,), "float32"),
        bias_0: T.Tensor((bias_rows, hidden), dtype),
        bias_1: T.Tensor((other_bias_rows, hidden), dtype),
        out: T.Tensor((rows, hidden), dtype),
        tokens: T.int32,
        slots: T.Tensor((S, hidden), payload),
        slot_scales: T.Tensor((scale_rows, s.groups), "float32"),
        token_slot: T.Tensor((slot_rows, R), "int32"),
        records: T.Tensor((R, max_tokens, W), "int32"),
        totals: T.Tensor((at.words,), "int32"),
        arrived: T.Tensor((R, s.chunks), "uint64"),
        tickets: T.Tensor((2, 2), "int32"),
        current: T.Tensor((1,), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads):
            base = T.alloc_shared((R,), "int32")
            before = T.alloc_shared((R,), "int32")
            received = T.alloc_shared((R,), "int32")
            there = T.alloc_shared((R,), "int32")
            places = steps.Places(received, base, there, before)
            mem = steps.Memory(
                own=steps.Own(y, row_weight, None, records),
                result=Result(out, bias_0, bias_1, None),
                slots=steps.Sums(slots, slot_scales, None),
                arrived=arrived,
                token_slot=token_slot,
            )
            thread = T.get_thread_binding()
            lane = thread % 32
            me = T.alloc_var("int32")
            me = N.my_pe()
            call = T.alloc_var("uint64")
            call = current[0]
            if thread < R:
                base[thread] = totals[at.received_base + thread]
                before[thread] = totals[at.sent_before + thread]
                received[thread] = totals[at.received + thread]
                there[thread] = totals[at.slots_base + thread]
            T.sync_threads()
            parity = T.alloc_var("int32")
            parity = T.cast(call % T.uint64(2), "int32")
            peer = T.alloc_var("int32")
            size = T.alloc_var("int32", init=chunk)
            row = T.alloc_var("int32")
            ahead = T.alloc_var("int32", init=0)
            token = T.alloc_var("int32")
            now = handshake.Now(me, call, parity)
            if not proxied:
                steps.send_finished(s, mem, places, tickets, now, ahead, token, peer, lane)
            piece = T.alloc_local((s.sum_group * s.sum_batch * s.width,), payload)
            acc = T.alloc_local((s.sum_batch * s.width,), "float32")
            from_row = T.alloc_local((s.sum_group,), "int32")
            slot_of = T.alloc_local((-(-R // 32),), "int32")
            work = Work(piece, acc, from_row, slot_of)
            handshake.first_ticket(tickets, parity, 1, ahead, token, lane)
            while token < tokens:
                handshake.take_ticket(tickets, parity, 1, ahead, lane)
                find_rows(s, mem, places, work, now, token, peer, row, size, lane)
                T.sync_warp()
                steps.sum_rows(s, mem, work, token, peer, lane)
                token = T.shfl_sync(ahead, 0)

    return main
