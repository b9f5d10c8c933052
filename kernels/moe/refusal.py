"""What a rank launches in the place of a call that its host refuses: the others end theirs and report the fault.

A rank that found an argument wrong does not know what the others expect from it. It signals that all rows are there,
whatever they hold, takes part in what begins and ends the call, and counts it. No row of this rank is sent.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.announcement import TAG_BITS, announce
from tilescale_net.kernels.moe.handshake import await_previous, begin_half
from tilescale_net.kernels.moe.row_ops import EXPLICIT_SYNC


@tsn.macro
def begin_refused(active, ready, me, call: T.Ref, code, thread, ranks):
    """Tell every rank that this one takes part without rows, and wait until all have begun."""
    if thread < ranks:
        if active[thread] != 0:
            announce(ready, me, call, code, thread)
            N.wait(ready[thread], "ge", call << T.uint64(TAG_BITS))
    T.sync_threads()


@tsn.macro
def end_refused(active, done, tickets, calls, me, call: T.Ref, senders, blocks, thread, threads, ranks):
    """End as a call of so many blocks would that has sent all."""
    T.sync_threads()
    if thread < ranks:
        if active[thread] != 0:
            N.fence(thread)
            N.signal(done[me], senders, thread, op="add")
            N.wait(done[thread], "ge", call * T.uint64(senders))
    if thread < 2:
        tickets[1 - T.cast(call % T.uint64(2), "int32"), thread] = 0
    T.sync_threads()
    for i in T.serial((blocks + threads - 1) // threads):
        if i * threads + thread < blocks:
            calls[i * threads + thread] = call


@tsn.macro
def begin_refused_halves(active, begun, calls, me, call: T.Ref, parity: T.Ref, code, thread, ranks):
    """Latency mode: tell every rank that this one takes part without rows, when its buffers are free."""
    begin_half(calls, call, parity, 0)
    if thread < ranks:
        if active[thread] != 0:
            await_previous(begun, parity, call, TAG_BITS, thread, ranks)
            announce(begun, parity * ranks + me, call, code, thread)
    T.sync_threads()


@tsn.macro
def end_refused_halves(send_calls, receive_calls, call: T.Ref, blocks, thread, threads):
    """Latency mode: count the call for both halves of so many blocks."""
    T.sync_threads()
    for i in T.serial((blocks + threads - 1) // threads):
        if i * threads + thread < blocks:
            send_calls[i * threads + thread] = call
            receive_calls[i * threads + thread] = call


@tsn.jit(name="moe::refuse_throughput", pass_configs=EXPLICIT_SYNC)
def refuse_throughput(ranks, chunks, senders, blocks, threads):
    """Kernel in the place of a dispatch with a known routing, or of a combine; one block.

    Args:
        chunks: signals per rank. senders, blocks: of the kernel whose place it takes. threads: of this one.

    Parameters of the kernel:
        code: of the fault. The others are those of dispatch_throughput and combine_throughput.
    """
    R = ranks

    @T.prim_func
    def main(
        ctx: N.Context(),
        code: T.int32,
        active: T.Tensor((R,), "int32"),
        ready: T.Tensor((R,), "uint64"),
        arrived: T.Tensor((R, chunks), "uint64"),
        done: T.Tensor((R,), "uint64"),
        tickets: T.Tensor((2, 2), "int32"),
        calls: T.Tensor((blocks,), "uint64"),
    ):
        with T.Kernel(1, threads=threads):
            thread = T.get_thread_binding()
            me = N.my_pe()
            peer = T.alloc_var("int32")
            call = T.alloc_var("uint64")
            call = calls[0] + T.uint64(1)
            begin_refused(active, ready, me, call, code, thread, R)
            for i in T.serial((R * chunks + threads - 1) // threads):
                if i * threads + thread < R * chunks:
                    peer = (i * threads + thread) % R
                    if active[peer] != 0:
                        N.signal(arrived[me, (i * threads + thread) // R], call, peer)
            end_refused(active, done, tickets, calls, me, call, senders, blocks, thread, threads, R)

    return main


@tsn.jit(name="moe::refuse_latency", pass_configs=EXPLICIT_SYNC)
def refuse_latency(ranks, signals, blocks, threads):
    """Kernel in the place of both halves of a combine in latency mode; one block.

    Args:
        signals: per rank, of one of the two sets of buffers. blocks: of the kernel whose place it takes. threads: of
            this one.

    Parameters of the kernel:
        code: of the fault. The others are those of combine_latency; arrived: [2 * ranks, signals].
    """
    R = ranks

    @T.prim_func
    def main(
        ctx: N.Context(),
        code: T.int32,
        active: T.Tensor((R,), "int32"),
        begun: T.Tensor((2 * R,), "uint64"),
        arrived: T.Tensor((2 * R, signals), "uint64"),
        send_calls: T.Tensor((blocks,), "uint64"),
        receive_calls: T.Tensor((blocks,), "uint64"),
    ):
        with T.Kernel(1, threads=threads):
            thread = T.get_thread_binding()
            me = N.my_pe()
            peer = T.alloc_var("int32")
            parity = T.alloc_var("int32")
            call = T.alloc_var("uint64")
            begin_refused_halves(active, begun, send_calls, me, call, parity, code, thread, R)
            for i in T.serial((R * signals + threads - 1) // threads):
                if i * threads + thread < R * signals:
                    peer = (i * threads + thread) % R
                    if active[peer] != 0:
                        N.signal(arrived[parity * R + me, (i * threads + thread) // R], call, peer)
            end_refused_halves(send_calls, receive_calls, call, blocks, thread, threads)

    return main
