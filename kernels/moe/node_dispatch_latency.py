"""Steps of dispatch in latency mode where nodes have several ranks: each message crosses the network once per node.

A block makes a token's message as in dispatch_latency.py and puts it to the ranks of its own node, and once to this rank's
gateway in every other node that hosts one of the token's experts. There a warp for each choice waits for the message and
puts it on over mapped memory, to the place at the receiver that the message itself names; so receivers see no difference.
Headers go to every rank from its source, and tell a gateway how many messages to expect. What is passed on is so in the
half that receives: it waits for nothing but what sources send.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.moe import handshake


@tsn.macro
def send_message(
    s, at, message, arrival, arrived, relayed, came, token_slot, origin_slot, node_map, mine, same_expert, same_rank,
    same_node, me: T.Ref, token: T.Ref, parity: T.Ref, call: T.Ref, thread, warp, lane,
):  # fmt: skip
    """Complete a token's message and put it to the ranks of this node and to the gateways of others, by a warp each."""
    R, K, M, local, msg = s.ranks, s.top_k, s.max_tokens, s.local, s.message
    peer = T.alloc_var("int32")
    place = T.alloc_var("int32")
    slot = T.alloc_var("int32")
    first = T.alloc_var("int32")
    first_of_node = T.alloc_var("int32")
    for g in T.serial((K + s.threads - 1) // s.threads):
        place = g * s.threads + thread
        if place < K:
            first = 0
            for q in T.serial(place):
                if mine[q] == mine[place]:
                    first = first + 1
            message[parity * M + token, msg.indices + place] = same_expert[place] + first
            message[parity * M + token, msg.at_rank + place] = same_rank[place]
            message[parity * M + token, msg.at_node + place] = same_node[place]
    T.sync_threads()
    for g in T.serial((K + s.warps - 1) // s.warps):
        place = g * s.warps + warp
        if place < K:
            if mine[place] >= 0:
                first = 1
                first_of_node = 1
                for q in T.serial(place):
                    if mine[q] >= 0:
                        if mine[q] // local == mine[place] // local:
                            first = 0
                        if mine[q] // (local * at.size) == mine[place] // (local * at.size):
                            first_of_node = 0
                peer = mine[place] // local
                if first != 0 and lane == 0:
                    token_slot[token, peer] = same_rank[place]
                if peer // at.size == me // at.size:
                    if first != 0:
                        if lane == 0:
                            origin_slot[token, me // at.size + peer % at.size] = same_rank[place]
                        N.put_signal_warp(
                            arrival[(parity * R + me) * M + same_rank[place], 0], message[parity * M + token, 0], peer,
                            arrived[(parity * R + me) * M + same_rank[place]], call, count=msg.words,
                        )  # fmt: skip
                elif first_of_node != 0:
                    if lane == 0:
                        slot = peer // at.size
                        if slot > me // at.size:
                            slot = slot + at.size - 1
                        origin_slot[token, slot] = same_node[place]
                    slot = node_map[at.gateway_slot + peer // at.size]
                    peer = node_map[at.gateway + peer // at.size]
                    slot = (parity * at.slots + slot) * M + same_node[place]
                    N.put_signal_warp(
                        relayed[slot, 0], message[parity * M + token, 0], peer, came[slot], call, count=msg.words,
                    )  # fmt: skip
    T.sync_threads()


@tsn.macro
def _pass_on(
    s, at, plan, timed, relayed, came, arrival, arrived, node_plan, waited, me: T.Ref, source: T.Ref, k: T.Ref, j: T.Ref,
    choice: T.Ref, parity: T.Ref, call: T.Ref, lane,
):  # fmt: skip
    """Put message `j` of the source of slot `k` on to the rank of its choice number `choice`, unless that is another node's,
    or an earlier choice's; and note, for combine, number `choice` of the ranks that it goes to."""
    R, K, M, local, msg = s.ranks, s.top_k, s.max_tokens, s.local, s.message
    row = T.alloc_var("int32")
    rank = T.alloc_var("int32")
    other = T.alloc_var("int32")
    first = T.alloc_var("int32")
    again = T.alloc_var("int32")
    number = T.alloc_var("int32")  # of this rank among those of the message
    count = T.alloc_var("int32")
    row = (parity * at.slots + k) * M + j
    handshake.time_message(timed, came, row, call, waited, source, lane)
    N.wait_warp(came[row], "ge", call)
    rank = -1
    if relayed[row, msg.experts + choice] >= 0:
        rank = relayed[row, msg.experts + choice] // local
        if rank // at.size != me // at.size:
            rank = -1
    first = 1
    number = 0
    count = 0
    for q in T.serial(K):
        other = relayed[row, msg.experts + q]
        if other >= 0:
            other = other // local
            if other // at.size == me // at.size:
                again = 0
                for p in T.serial(q):
                    if relayed[row, msg.experts + p] >= 0:
                        if relayed[row, msg.experts + p] // local == other:
                            again = 1
                if again == 0:
                    count = count + 1
                    if other < rank:
                        number = number + 1
                if other == rank and q < choice:
                    first = 0
    if lane == 0:
        if choice >= count:
            node_plan[plan.receiver(k, j, choice)] = -1
        if rank >= 0 and first != 0:
            node_plan[plan.receiver(k, j, number)] = rank % at.size
    if rank >= 0 and first != 0:
        other = relayed[row, msg.at_rank + choice]
        # The receiver has no place for it where the source has reported a fault.
        if other >= 0 and other < M:
            other = (parity * R + source) * M + other
            N.put_signal_warp(arrival[other, 0], relayed[row, 0], rank, arrived[other], call, count=msg.words)


@tsn.macro
def learn_of_messages(
    s, at, plan, header_in, node_map, node_plan, passing, source: T.Ref, parity: T.Ref, block, thread
):
    """How many messages come from the source of each slot to be passed on: into `passing` [slots], and for combine."""
    for i in T.serial((at.slots + s.threads - 1) // s.threads):
        if i * s.threads + thread < at.slots:
            passing[i * s.threads + thread] = 0
            source = node_map[at.source + i * s.threads + thread]
            if source >= 0:
                passing[i * s.threads + thread] = T.min(
                    header_in[parity * s.ranks + source, s.header.to_node], s.max_tokens
                )
            if block == 0:
                node_plan[plan.passed(i * s.threads + thread)] = passing[i * s.threads + thread]
    T.sync_threads()


@tsn.macro
def pass_on_all(
    s, at, plan, timed, relayed, came, arrival, arrived, node_map, node_plan, passing, waited, me: T.Ref, source: T.Ref,
    slot: T.Ref, total: T.Ref, choice: T.Ref, parity: T.Ref, call: T.Ref, block, warp, lane,
):  # fmt: skip
    """Pass on what comes to be passed on, by a warp for each choice of each message."""
    k = T.alloc_var("int32")
    handshake.sum_of(passing, total, at.slots)
    for i in T.serial((total * s.top_k + s.blocks * s.warps - 1) // (s.blocks * s.warps)):
        slot = (i * s.warps + warp) * s.blocks + block
        if slot < total * s.top_k:
            choice = slot % s.top_k
            slot = slot // s.top_k
            handshake.find_source(passing, k, slot)
            source = node_map[at.source + k]
            _pass_on(
                s, at, plan, timed, relayed, came, arrival, arrived, node_plan, waited, me, source, k, slot, choice, parity, call,
                lane,
            )  # fmt: skip


@tsn.macro
def note_carrier(s, plan, arrival, node_plan, me: T.Ref, source: T.Ref, slot: T.Ref, place: T.Ref, choice: T.Ref, lane):
    """Note, for combine, as which message of `source` to this node row `slot` of `source` has come."""
    if lane == 0:
        for q in T.serial(s.top_k):
            choice = arrival[place, s.message.experts + q]
            if choice >= me * s.local and choice < (me + 1) * s.local:
                node_plan[plan.carried(source, slot)] = arrival[place, s.message.at_node + q]
