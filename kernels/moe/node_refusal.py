"""Steps of refusals where rows cross the network once per node: a gateway also signals for the sources that it serves, whose
rows it does not pass on.
"""

from typing import Any, NamedTuple

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N


class Signals(NamedTuple):
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
