"""What a rank launches in the place of a call that its host refuses, where rows cross the network once per node.

As refuse_throughput and refuse_latency; a gateway also signals for the sources that it serves, whose rows it does not pass on.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.moe.node_layout import Nodes
from tilescale_net.kernels.moe.refusal import begin_refused, begin_refused_halves, end_refused, end_refused_halves
from tilescale_net.kernels.moe.row_ops import EXPLICIT_SYNC


@tsn.macro
def _signal_dispatch(at, active, arrived, onward, node_map, me, node, c, call: T.Ref, peer: T.Ref, row: T.Ref):
    """Chunk `c` of all that this rank sends and passes on in a dispatch."""
    for b in T.serial(at.nodes):
        peer = node_map[at.gateway + b]
        if peer >= 0:
            row = node_map[at.gateway_slot + b]
            N.signal(onward[row, c], call, peer)
    for r in T.serial(at.size):
        peer = node * at.size + r
        if active[peer] != 0:
            N.signal(arrived[me, c], call, peer)
            for k in T.serial(at.slots):
                row = node_map[at.source + k]
                if row >= 0:
                    N.signal(arrived[row, c], call, peer)


@tsn.macro
def _signal_combine(at, active, arrived, onward, node_map, me, node, c, call: T.Ref, peer: T.Ref, row: T.Ref):
    """Chunk `c` of all that this rank sends and sums in a combine."""
    for r in T.serial(at.size):
        peer = node * at.size + r
        if active[peer] != 0:
            N.signal(arrived[node + me % at.size, c], call, peer)
    for p in T.serial(at.ranks):
        peer = node_map[at.carrier + p]
        if peer >= 0:
            row = node_map[at.carrier_slot + p] * at.size + me % at.size
            N.signal(onward[row, c], call, peer)
    for k in T.serial(at.slots):
        peer = node_map[at.source + k]
        if peer >= 0:
            row = T.if_then_else(node < peer // at.size, node, node + at.size - 1)
            N.signal(arrived[row, c], call, peer)


@tsn.jit(name="moe::refuse_nodes", pass_configs=EXPLICIT_SYNC)
def refuse_nodes(ranks, nodes, slots, dispatch, chunks, senders, blocks, threads):
    """Kernel in the place of a dispatch with a known routing, or of a combine; one block.

    Args:
        nodes, slots: see Nodes. dispatch: whether it takes the place of one. The others: see refuse_throughput.

    Parameters of the kernel:
        onward: `came` of dispatch_nodes, or `summed` of combine_nodes. node_map: see Nodes. The others: see
        refuse_throughput.
    """
    R, at = ranks, Nodes(ranks, nodes, slots)
    signal_chunk = _signal_dispatch if dispatch else _signal_combine

    @T.prim_func
    def main(
        ctx: N.Context(),
        code: T.int32,
        active: T.Tensor((R,), "int32"),
        ready: T.Tensor((R,), "uint64"),
        arrived: T.Tensor((R if dispatch else at.origins, chunks), "uint64"),
        onward: T.Tensor((slots if dispatch else at.lists, chunks), "uint64"),
        node_map: T.Tensor((at.map_words,), "int32"),
        done: T.Tensor((R,), "uint64"),
        tickets: T.Tensor((2, 2), "int32"),
        calls: T.Tensor((blocks,), "uint64"),
    ):
        with T.Kernel(1, threads=threads):
            thread = T.get_thread_binding()
            me = N.my_pe()
            peer = T.alloc_var("int32")
            row = T.alloc_var("int32")
            call = T.alloc_var("uint64")
            call = calls[0] + T.uint64(1)
            begin_refused(active, ready, me, call, code, thread, R)
            for i in T.serial((chunks + threads - 1) // threads):
                if i * threads + thread < chunks:
                    signal_chunk(
                        at, active, arrived, onward, node_map, me, me // at.size, i * threads + thread, call, peer, row
                    )
            end_refused(active, done, tickets, calls, me, call, senders, blocks, thread, threads, R)

    return main


@tsn.macro
def _signal_latency(
    at, active, arrived, summed, node_map, me, node, parity: T.Ref, j: T.Ref, part: T.Ref, M, call: T.Ref, peer: T.Ref,
    row: T.Ref,
):  # fmt: skip
    """Part `part` of row `j` of all that this rank sends and sums in a combine of latency mode."""
    for r in T.serial(at.size):
        peer = node * at.size + r
        if active[peer] != 0:
            N.signal(arrived[(parity * at.origins + node + me % at.size) * M + j, part], call, peer)
    for p in T.serial(at.ranks):
        peer = node_map[at.carrier + p]
        if peer >= 0:
            row = ((parity * at.slots + node_map[at.carrier_slot + p]) * M + j) * at.size + me % at.size
            N.signal(summed[row, part], call, peer)
    for k in T.serial(at.slots):
        peer = node_map[at.source + k]
        if peer >= 0:
            row = T.if_then_else(node < peer // at.size, node, node + at.size - 1)
            N.signal(arrived[(parity * at.origins + row) * M + j, part], call, peer)


@tsn.jit(name="moe::refuse_latency_nodes", pass_configs=EXPLICIT_SYNC)
def refuse_latency_nodes(ranks, nodes, slots, max_tokens, parts, blocks, threads):
    """Kernel in the place of both halves of a combine in latency mode; one block.

    Args:
        nodes, slots: see Nodes. max_tokens, parts: of the kernel whose place it takes. The others: see refuse_latency.

    Parameters of the kernel:
        code: of the fault. The others are those of combine_latency_nodes.
    """
    R, M, at = ranks, max_tokens, Nodes(ranks, nodes, slots)

    @T.prim_func
    def main(
        ctx: N.Context(),
        code: T.int32,
        active: T.Tensor((R,), "int32"),
        begun: T.Tensor((2 * R,), "uint64"),
        arrived: T.Tensor((2 * at.origins * M, parts), "uint64"),
        summed: T.Tensor((2 * slots * M * at.size, parts), "uint64"),
        node_map: T.Tensor((at.map_words,), "int32"),
        send_calls: T.Tensor((blocks,), "uint64"),
        receive_calls: T.Tensor((blocks,), "uint64"),
    ):
        with T.Kernel(1, threads=threads):
            thread = T.get_thread_binding()
            me = N.my_pe()
            peer = T.alloc_var("int32")
            row = T.alloc_var("int32")
            j = T.alloc_var("int32")
            part = T.alloc_var("int32")
            parity = T.alloc_var("int32")
            call = T.alloc_var("uint64")
            begin_refused_halves(active, begun, send_calls, me, call, parity, code, thread, R)
            for i in T.serial((M * parts + threads - 1) // threads):
                if i * threads + thread < M * parts:
                    j = (i * threads + thread) // parts
                    part = (i * threads + thread) % parts
                    _signal_latency(
                        at, active, arrived, summed, node_map, me, me // at.size, parity, j, part, M, call, peer, row
                    )
            end_refused_halves(send_calls, receive_calls, call, blocks, thread, threads)

    return main
