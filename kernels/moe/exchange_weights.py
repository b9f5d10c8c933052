"""Weights that the caller gives to combine in latency mode: brought to the ranks whose rows they multiply.

Each rank puts the weights of its tokens to every rank that has rows of them, in the order of those rows, and waits for
the weights of the others. The buffers exist twice and calls alternate: who has begun a call has read what came in the
one before the last, because it has ended that.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.moe.handshake import wait_timed
from tilescale_net.kernels.moe.row_ops import EXPLICIT_SYNC


@tsn.jit(name="moe::exchange_weights", pass_configs=EXPLICIT_SYNC)
def exchange_weights(ranks, top_k, max_tokens, threads, timed=False):
    """Kernel of a block for each rank.

    Args:
        ranks, top_k, max_tokens: sizes. threads: of a block. timed: as in dispatch_latency.

    Parameters of the kernel:
        topk_weights [rows, top_k] float32, tokens <= rows; token_slot, received: see ReceivedRows.
        active [ranks] int32: 0 for a rank that is left out.
        weights_out, weights_in [2 * ranks * max_tokens, top_k] float32, sent [2 * ranks] uint64: symmetric.
        calls [ranks] uint64: calls so far.
        weights [ranks * max_tokens, top_k] float32: of each row received, what its rank has given.
        waited [ranks] uint64, if timed: clocks of waiting for each rank's weights are added.
    """
    R, K, M = ranks, top_k, max_tokens
    rows, slot_rows = T.dynamic("rows"), T.dynamic("slot_rows")

    @T.prim_func
    def main(
        ctx: N.Context(),
        topk_weights: T.Tensor((rows, K), "float32"),
        tokens: T.int32,
        token_slot: T.Tensor((slot_rows, R), "int32"),
        received: T.Tensor((R,), "int32"),
        active: T.Tensor((R,), "int32"),
        weights_out: T.Tensor((2 * R * M, K), "float32"),
        weights_in: T.Tensor((2 * R * M, K), "float32"),
        sent: T.Tensor((2 * R,), "uint64"),
        calls: T.Tensor((R,), "uint64"),
        weights: T.Tensor((R * M, K), "float32"),
        waited: T.Tensor((R,), "uint64") if timed else None,
    ):
        with T.Kernel(R, threads=threads) as block:
            count = T.alloc_shared((1,), "int32")  # rows that the peer has of this rank
            thread = T.get_thread_binding()
            me = T.alloc_var("int32")
            me = N.my_pe()
            peer = T.alloc_var("int32")
            peer = block
            call = T.alloc_var("uint64")
            call = calls[block] + T.uint64(1)
            parity = T.alloc_var("int32")
            parity = T.cast(call & T.uint64(1), "int32")
            place = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            if active[peer] != 0:
                if thread == 0:
                    count[0] = 0
                T.sync_threads()
                for i in T.serial((tokens * K + threads - 1) // threads):
                    place = i * threads + thread
                    if place < tokens * K:
                        slot = token_slot[place // K, peer]
                        if slot >= 0:
                            weights_out[(parity * R + peer) * M + slot, place % K] = topk_weights[place // K, place % K]
                            if place % K == 0:
                                T.atomic_add(count[0], 1)
                T.sync_threads()
                N.put_signal_block(
                    weights_in[(parity * R + me) * M, 0], weights_out[(parity * R + peer) * M, 0], peer,
                    sent[parity * R + me], call, count=count[0] * K,
                )  # fmt: skip
                if timed:
                    if thread == 0:
                        wait_timed(lambda: sent[parity * R + peer], call, waited, peer)
                N.wait_block(sent[parity * R + peer], "ge", call)
                for i in T.serial((received[peer] * K + threads - 1) // threads):
                    place = i * threads + thread
                    if place < received[peer] * K:
                        weights[peer * M + place // K, place % K] = weights_in[
                            (parity * R + peer) * M + place // K, place % K
                        ]
                T.sync_threads()
                if thread == 0:
                    N.quiet(peer)
            if thread == 0:
                calls[block] = call

    return main
