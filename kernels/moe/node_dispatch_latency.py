"""Steps of dispatch in latency mode where nodes have several ranks: each message crosses the network once per node.

A block makes a token's message as in dispatch_latency.py and puts it to the ranks of its own node, and once to this rank's
gateway in every other node that hosts one of the token's experts. There a warp for each choice waits for the message and
puts it on over mapped memory, to the place at the receiver that the message itself names; so receivers see no difference.
Headers go from a source to every rank, and carry how many messages a gateway is to expect. The half that receives passes
messages on: it waits for nothing but what sources send.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.moe import handshake


@tsn.macro
def send_message(s, mem, tables, chosen, token: T.Ref, now, thread, warp, lane):
    """Complete a token's message and put it to the ranks of this node and to the gateways of others, by a warp each."""
    at = tables.at
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
                if chosen.mine[q] == chosen.mine[place]:
                    first = first + 1
            mem.message.words[now.parity * M + token, msg.indices + place] = chosen.same_expert[place] + first
            mem.message.words[now.parity * M + token, msg.at_rank + place] = chosen.same_rank[place]
            mem.message.words[now.parity * M + token, msg.at_node + place] = chosen.same_node[place]
    T.sync_threads()
    for g in T.serial((K + s.warps - 1) // s.warps):
        place = g * s.warps + warp
        if place < K:
            if chosen.mine[place] >= 0:
                first = 1
                first_of_node = 1
                for q in T.serial(place):
                    if chosen.mine[q] >= 0:
                        if chosen.mine[q] // local == chosen.mine[place] // local:
                            first = 0
                        if chosen.mine[q] // (local * at.size) == chosen.mine[place] // (local * at.size):
                            first_of_node = 0
                peer = chosen.mine[place] // local
                if first != 0 and lane == 0:
                    mem.token_slot[token, peer] = chosen.same_rank[place]
                if peer // at.size == now.me // at.size:
                    if first != 0:
                        if lane == 0:
                            mem.origin_slot[token, now.me // at.size + peer % at.size] = chosen.same_rank[place]
                        N.put_signal_warp(
                            mem.arrival[(now.parity * R + now.me) * M + chosen.same_rank[place], 0],
                            mem.message.words[now.parity * M + token, 0], peer,
                            mem.arrived[(now.parity * R + now.me) * M + chosen.same_rank[place]], now.call, count=msg.words,
                        )  # fmt: skip
                elif first_of_node != 0:
                    if lane == 0:
                        slot = peer // at.size
                        if slot > now.me // at.size:
                            slot = slot + at.size - 1
                        mem.origin_slot[token, slot] = chosen.same_node[place]
                    slot = tables.map[at.gateway_slot + peer // at.size]
                    peer = tables.map[at.gateway + peer // at.size]
                    slot = (now.parity * at.slots + slot) * M + chosen.same_node[place]
                    N.put_signal_warp(
                        mem.relayed[slot, 0], mem.message.words[now.parity * M + token, 0], peer, mem.came[slot], now.call,
                        count=msg.words,
                    )  # fmt: skip
    T.sync_threads()


@tsn.macro
def _pass_on(s, mem, tables, now, source: T.Ref, k: T.Ref, j: T.Ref, choice: T.Ref, lane):
    """Put message `j` of the source of slot `k` on to the rank of its choice number `choice`, unless that is another node's,
    or an earlier choice's; and note, for combine, number `choice` of the ranks that it goes to."""
    at, plan = tables.at, tables.plan
    R, K, M, local, msg = s.ranks, s.top_k, s.max_tokens, s.local, s.message
    row = T.alloc_var("int32")
    rank = T.alloc_var("int32")
    other = T.alloc_var("int32")
    first = T.alloc_var("int32")
    again = T.alloc_var("int32")
    number = T.alloc_var("int32")  # of this rank among those of the message
    count = T.alloc_var("int32")
    row = (now.parity * at.slots + k) * M + j
    handshake.time_message(s.timed, mem.came, row, now.call, mem.waited, source, lane)
    N.wait_warp(mem.came[row], "ge", now.call)
    rank = -1
    if mem.relayed[row, msg.experts + choice] >= 0:
        rank = mem.relayed[row, msg.experts + choice] // local
        if rank // at.size != now.me // at.size:
            rank = -1
    first = 1
    number = 0
    count = 0
    for q in T.serial(K):
        other = mem.relayed[row, msg.experts + q]
        if other >= 0:
            other = other // local
            if other // at.size == now.me // at.size:
                again = 0
                for p in T.serial(q):
                    if mem.relayed[row, msg.experts + p] >= 0:
                        if mem.relayed[row, msg.experts + p] // local == other:
                            again = 1
                if again == 0:
                    count = count + 1
                    if other < rank:
                        number = number + 1
                if other == rank and q < choice:
                    first = 0
    if lane == 0:
        if choice >= count:
            tables.words[plan.receiver(k, j, choice)] = -1
        if rank >= 0 and first != 0:
            tables.words[plan.receiver(k, j, number)] = rank % at.size
    if rank >= 0 and first != 0:
        other = mem.relayed[row, msg.at_rank + choice]
        # The receiver has no place for it where the source has reported a fault.
        if other >= 0 and other < M:
            other = (now.parity * R + source) * M + other
            N.put_signal_warp(
                mem.arrival[other, 0], mem.relayed[row, 0], rank, mem.arrived[other], now.call, count=msg.words
            )


@tsn.macro
def learn_of_messages(s, mem, tables, source: T.Ref, parity: T.Ref, block, thread):
    """How many messages come from the source of each slot to be passed on: into `mem.passing`, and for combine."""
    at, plan = tables.at, tables.plan
    for i in T.serial((at.slots + s.threads - 1) // s.threads):
        if i * s.threads + thread < at.slots:
            mem.passing[i * s.threads + thread] = 0
            source = tables.map[at.source + i * s.threads + thread]
            if source >= 0:
                mem.passing[i * s.threads + thread] = T.min(
                    mem.header_in[parity * s.ranks + source, s.header.to_node], s.max_tokens
                )
            if block == 0:
                tables.words[plan.passed(i * s.threads + thread)] = mem.passing[i * s.threads + thread]
    T.sync_threads()


@tsn.macro
def pass_on_all(s, mem, tables, now, source: T.Ref, slot: T.Ref, total: T.Ref, choice: T.Ref, block, warp, lane):
    """Pass on what comes to be passed on, by a warp for each choice of each message."""
    at = tables.at
    k = T.alloc_var("int32")
    handshake.sum_of(mem.passing, total, at.slots)
    for i in T.serial((total * s.top_k + s.blocks * s.warps - 1) // (s.blocks * s.warps)):
        slot = (i * s.warps + warp) * s.blocks + block
        if slot < total * s.top_k:
            choice = slot % s.top_k
            slot = slot // s.top_k
            handshake.find_source(mem.passing, k, slot)
            source = tables.map[at.source + k]
            _pass_on(s, mem, tables, now, source, k, slot, choice, lane)


@tsn.macro
def note_carrier(s, mem, tables, me: T.Ref, source: T.Ref, slot: T.Ref, place: T.Ref, choice: T.Ref, lane):
    """Note, for combine, as which message of `source` to this node row `slot` of `source` has come."""
    plan = tables.plan
    if lane == 0:
        for q in T.serial(s.top_k):
            choice = mem.arrival[place, s.message.experts + q]
            if choice >= me * s.local and choice < (me + 1) * s.local:
                tables.words[plan.carried(source, slot)] = mem.arrival[place, s.message.at_node + q]
