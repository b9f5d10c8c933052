"""Steps of refusals where rows cross the network once per node: a gateway also signals for the sources that it serves, whose
rows it does not pass on.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N


@tsn.macro
def signal_dispatch(at, active, arrived, onward, node_map, me, node, c, call: T.Ref, peer: T.Ref, row: T.Ref):
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
def signal_combine(at, active, arrived, onward, node_map, me, node, c, call: T.Ref, peer: T.Ref, row: T.Ref):
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


@tsn.macro
def signal_part(
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
