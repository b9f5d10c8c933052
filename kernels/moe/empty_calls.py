"""No-op kernels that keep the handshake alive when this rank's arguments are invalid: the others end their calls and
report the fault.

A rank that found an argument wrong cannot compute what the others expect from it. It signals that all rows are there,
with any content, takes part in what begins and ends the call, and counts it. No row of this rank is sent. Where rows cross
the network once per node, a forwarder also signals for the sources that it serves, whose rows it does not forward.
"""

from typing import Any, NamedTuple

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.announcement import TAG_BITS, announce
from tilescale_net.kernels.moe.handshake import Blocks, Ends, await_previous, begin_half
from tilescale_net.kernels.moe.layout import NodeLayout, NodeTables
from tilescale_net.kernels.moe.row_ops import EXPLICIT_SYNC


class _EmptySignals(NamedTuple):
    """What a rank signals whose call is refused.

    Attributes:
        active: int32 [ranks], 0 for a rank that is left out.
        arrived: uint64, symmetric, of the kernel whose place is taken; so is onward: `came` of a dispatch, `summed` of a combine.
    """

    active: Any
    arrived: Any
    onward: Any


@tsn.macro
def signal_dispatch(signals, tables, me, node, c, call: T.Ref, peer: T.Ref, row: T.Ref):
    """Chunk `c` of all that this rank sends and passes on in a dispatch."""
    at = tables.at
    for b in T.serial(at.nodes):
        peer = tables.map[at.gateway + b]
        if peer >= 0:
            row = tables.map[at.gateway_slot + b]
            N.signal(signals.onward[row, c], call, peer)
    for r in T.serial(at.size):
        peer = node * at.size + r
        if signals.active[peer] != 0:
            N.signal(signals.arrived[me, c], call, peer)
            for k in T.serial(at.slots):
                row = tables.map[at.source + k]
                if row >= 0:
                    N.signal(signals.arrived[row, c], call, peer)


@tsn.macro
def signal_combine(signals, tables, me, node, c, call: T.Ref, peer: T.Ref, row: T.Ref):
    """Chunk `c` of all that this rank sends and sums in a combine."""
    at = tables.at
    for r in T.serial(at.size):
        peer = node * at.size + r
        if signals.active[peer] != 0:
            N.signal(signals.arrived[node + me % at.size, c], call, peer)
    for p in T.serial(at.ranks):
        peer = tables.map[at.carrier + p]
        if peer >= 0:
            row = tables.map[at.carrier_slot + p] * at.size + me % at.size
            N.signal(signals.onward[row, c], call, peer)
    for k in T.serial(at.slots):
        peer = tables.map[at.source + k]
        if peer >= 0:
            row = T.if_then_else(node < peer // at.size, node, node + at.size - 1)
            N.signal(signals.arrived[row, c], call, peer)


@tsn.macro
def signal_part(
    signals, tables, me, node, parity: T.Ref, j: T.Ref, part: T.Ref, M, call: T.Ref, peer: T.Ref, row: T.Ref
):
    """Part `part` of row `j` of all that this rank sends and sums in a combine of latency mode."""
    at = tables.at
    for r in T.serial(at.size):
        peer = node * at.size + r
        if signals.active[peer] != 0:
            N.signal(signals.arrived[(parity * at.origins + node + me % at.size) * M + j, part], call, peer)
    for p in T.serial(at.ranks):
        peer = tables.map[at.carrier + p]
        if peer >= 0:
            row = ((parity * at.slots + tables.map[at.carrier_slot + p]) * M + j) * at.size + me % at.size
            N.signal(signals.onward[row, part], call, peer)
    for k in T.serial(at.slots):
        peer = tables.map[at.source + k]
        if peer >= 0:
            row = T.if_then_else(node < peer // at.size, node, node + at.size - 1)
            N.signal(signals.arrived[(parity * at.origins + row) * M + j, part], call, peer)


@tsn.macro
def begin_refused(active, ready, me, call: T.Ref, code, thread, ranks):
    """Announce to every rank that this one takes part without rows, and wait until all have begun."""
    if thread < ranks:
        if active[thread] != 0:
            announce(ready, me, call, code, thread)
            N.wait(ready[thread], "ge", call << T.uint64(TAG_BITS))
    T.sync_threads()


@tsn.macro
def end_refused(of, ends, tickets, me, call: T.Ref, thread):
    """End as a call of so many blocks would that has sent all; but `of.threads` are of this kernel."""
    T.sync_threads()
    if thread < of.ranks:
        if ends.active[thread] != 0:
            N.signal(ends.done[me], of.senders, thread, op="add", fence=True)
            N.wait(ends.done[thread], "ge", call * T.uint64(of.senders))
    if thread < 2:
        tickets[1 - T.cast(call % T.uint64(2), "int32"), thread] = 0
    T.sync_threads()
    for i in T.serial((of.blocks + of.threads - 1) // of.threads):
        if i * of.threads + thread < of.blocks:
            ends.calls[i * of.threads + thread] = call


@tsn.macro
def begin_refused_halves(active, begun, calls, me, call: T.Ref, parity: T.Ref, code, thread, ranks):
    """Latency mode: announce to every rank that this one takes part without rows, when its buffers are free."""
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
def refuse_throughput(ranks, chunks, senders, blocks, threads, nodes=0, slots=0, dispatch=True):
    """Kernel in the place of a dispatch with a known routing, or of a combine; one block.

    Args:
        chunks: signals per rank. senders, blocks: of the kernel whose place it takes. threads: of this one.
        nodes, slots: see NodeLayout; 0: rows go to their ranks straight. dispatch: whether it takes the place of one.

    Parameters of the kernel:
        code: of the fault. onward: `came` of dispatch_nodes, or `summed` of combine_nodes; it and node_map with nodes only.
        The others are those of dispatch_throughput and combine_throughput.
    """
    R, at = ranks, NodeLayout(ranks, nodes, slots) if nodes else None
    signals = chunks if nodes else R * chunks
    signal_chunk = signal_dispatch if dispatch else signal_combine

    @T.prim_func
    def main(
        ctx: N.Context(),
        code: T.int32,
        active: T.Tensor((R,), "int32"),
        ready: T.Tensor((R,), "uint64"),
        arrived: T.Tensor((R if dispatch or not nodes else at.origins, chunks), "uint64"),
        onward: T.Tensor((slots if dispatch else at.lists, chunks), "uint64") if nodes else None,
        node_map: T.Tensor((at.map_words,), "int32") if nodes else None,
        done: T.Tensor((R,), "uint64"),
        tickets: T.Tensor((2, 2), "int32"),
        calls: T.Tensor((blocks,), "uint64"),
    ):
        with T.Kernel(1, threads=threads):
            thread = T.get_thread_binding()
            me = N.my_pe()
            peer = T.alloc_var("int32")
            if nodes:
                row = T.alloc_var("int32")
            call = T.alloc_var("uint64")
            call = calls[0] + T.uint64(1)
            begin_refused(active, ready, me, call, code, thread, R)
            for i in T.serial((signals + threads - 1) // threads):
                if i * threads + thread < signals:
                    if nodes:
                        signals_of, tables = (
                            _EmptySignals(active, arrived, onward),
                            NodeTables(at, None, node_map, None),
                        )
                        signal_chunk(signals_of, tables, me, me // at.size, i * threads + thread, call, peer, row)
                    else:
                        peer = (i * threads + thread) % R
                        if active[peer] != 0:
                            N.signal(arrived[me, (i * threads + thread) // R], call, peer)
            of, ends = Blocks(R, blocks, threads, senders), Ends(active, done, calls)
            end_refused(of, ends, tickets, me, call, thread)

    return main


@tsn.jit(name="moe::refuse_latency", pass_configs=EXPLICIT_SYNC)
def refuse_latency(ranks, max_tokens, parts, blocks, threads, nodes=0, slots=0):
    """Kernel in the place of both halves of a combine in latency mode; one block.

    Args:
        max_tokens, parts, blocks: of the kernel whose place it takes. threads: of this one. nodes, slots: as above.

    Parameters of the kernel:
        code: of the fault. The others are those of combine_latency, or of combine_latency_nodes.
    """
    R, M, at = ranks, max_tokens, NodeLayout(ranks, nodes, slots) if nodes else None
    signals = M * parts if nodes else R * M * parts

    @T.prim_func
    def main(
        ctx: N.Context(),
        code: T.int32,
        active: T.Tensor((R,), "int32"),
        begun: T.Tensor((2 * R,), "uint64"),
        arrived: T.Tensor((2 * at.origins * M, parts) if nodes else (2 * R, M * parts), "uint64"),
        summed: T.Tensor((2 * slots * M * at.size, parts), "uint64") if nodes else None,
        node_map: T.Tensor((at.map_words,), "int32") if nodes else None,
        send_calls: T.Tensor((blocks,), "uint64"),
        receive_calls: T.Tensor((blocks,), "uint64"),
    ):
        with T.Kernel(1, threads=threads):
            thread = T.get_thread_binding()
            me = N.my_pe()
            peer = T.alloc_var("int32")
            if nodes:
                row = T.alloc_var("int32")
                j = T.alloc_var("int32")
                part = T.alloc_var("int32")
            parity = T.alloc_var("int32")
            call = T.alloc_var("uint64")
            begin_refused_halves(active, begun, send_calls, me, call, parity, code, thread, R)
            for i in T.serial((signals + threads - 1) // threads):
                if i * threads + thread < signals:
                    if nodes:
                        j = (i * threads + thread) // parts
                        part = (i * threads + thread) % parts
                        signals_of, tables = (
                            _EmptySignals(active, arrived, summed),
                            NodeTables(at, None, node_map, None),
                        )
                        signal_part(signals_of, tables, me, me // at.size, parity, j, part, M, call, peer, row)
                    else:
                        peer = (i * threads + thread) % R
                        if active[peer] != 0:
                            N.signal(arrived[parity * R + me, (i * threads + thread) // R], call, peer)
            end_refused_halves(send_calls, receive_calls, call, blocks, thread, threads)

    return main
