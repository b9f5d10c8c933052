"""Combine in throughput mode where nodes have several ranks: each token's sum crosses the network once per node.

A rank sums the rows of a token over its own experts in float32 and rounds once. For a token of its own node it sends this
row to the token's rank; for one of another node it keeps it, and that rank's gateway here reads it over mapped memory, so
that a gateway needs no room for what its node has. The gateway sums such rows in float32, in the order of ranks, rounds (or
quantises) once more, and sends one row to the token's rank. That one sums what it gets from its origins (see
node_layout.py) in their order: the sums of whole nodes, and in its own node's place the rows of single ranks.
"""

from typing import Any, NamedTuple

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.announcement import STATUS_WORDS
from tilescale_net.kernels.moe import combine_throughput_steps as steps
from tilescale_net.kernels.moe import handshake
from tilescale_net.kernels.moe import node_combine_steps as node_steps
from tilescale_net.kernels.moe.node_layout import NodeNow, NodePlan, Nodes, NodeTables
from tilescale_net.kernels.moe.row_ops import EXACT_SUMS, EXPLICIT_SYNC, FP8, Result, Work
from tilescale_net.kernels.moe.totals import Totals
from tilescale_net.kernels.moe.wire_layout import most_sent, record_words


class _Served(NamedTuple):
    """The chunk of sums of this node that a gateway sends; int32 variables of the kernel.

    Attributes:
        k: slot of the source. source: its rank. c: the number of the chunk. n: its rows.
    """

    k: Any
    source: Any
    c: Any
    n: Any


@tsn.macro
def _offer(summed, row: T.Ref, c: T.Ref, call: T.Ref, me: T.Ref, gateway: T.Ref, lane):
    """Signal to `gateway` that a chunk, kept by this warp in its own memory, may be read."""
    T.sync_warp()
    if lane == 0:
        N.quiet(me)
        N.signal(summed[row, c], call, gateway)


@tsn.macro
def _send_chunk(s, mem, tables, places, now, chunk, target: T.Ref, row: T.Ref, first: T.Ref, lane):
    """Send the rows of a chunk that this rank has for `chunk.peer` to it, or keep them for its gateway in this node."""
    at = tables.at
    away = chunk.peer // at.size != now.node
    target = T.if_then_else(away, now.me, chunk.peer)
    first = T.if_then_else(away, places.base[chunk.peer], places.there[chunk.peer]) + chunk.c * s.chunk
    if s.quantised:
        if away:
            node_steps.send_rows(s.unquantised, mem.own, mem.relayed, places, chunk, first, target, lane)
        else:
            node_steps.send_rows(s, mem.own, mem.slots, places, chunk, first, target, lane)
    else:
        first = first + T.if_then_else(away, most_sent(s.ranks, s.max_tokens, s.top_k), 0)
        node_steps.send_rows(s, mem.own, mem.slots, places, chunk, first, target, lane)
    if away:
        target = tables.map[at.carrier + chunk.peer]
        row = tables.map[at.carrier_slot + chunk.peer] * at.size + now.me % at.size
        _offer(mem.summed, row, chunk.c, now.call, now.me, target, lane)
    else:
        N.signal_warp(mem.arrived[now.mine, chunk.c], now.call, target)


@tsn.macro
def _await_row(s, mem, tables, k: T.Ref, i: T.Ref, place: T.Ref, call: T.Ref, lane):
    """Wait until the ranks of this node have what they have for row `i` of slot `k`, a rank each by the lanes."""
    at, plan = tables.at, tables.plan
    for g in T.unroll(-(-at.size // 32)):
        if g * 32 + lane < at.size:
            place = tables.words[plan.gather(k, i, g * 32 + lane)]
            if place >= 0:
                place = place - tables.words[plan.head(k, 2 + 2 * (g * 32 + lane))]
                N.wait(mem.summed[k * at.size + g * 32 + lane, place // s.chunk], "ge", call)
    T.sync_warp()


@tsn.macro
def _send_back(s, mem, tables, work, now, served, i: T.Ref, row: T.Ref, place: T.Ref, total: T.Ref, lane):
    """Sum the rows of a chunk that this node has for the source of a slot, and put them to it."""
    plan = tables.plan
    for q in T.serial(served.n):
        i = served.c * s.proxied_chunk + q
        row = served.k * s.max_tokens + i
        _await_row(s, mem, tables, served.k, i, place, now.call, lane)
        node_steps.sum_in_node(s.in_node(tables.at.size), mem, tables, work, row, now.node, served.k, i, lane)
        if s.valued != "":
            node_steps.sum_values_in_node(s, mem, tables, row, now.node, served.k, i, place, total, lane)
    T.sync_warp()
    row = served.k * s.max_tokens + served.c * s.proxied_chunk
    place = tables.words[plan.head(served.k, tables.at.slots_begin)] + served.c * s.proxied_chunk
    N.put_warp(mem.slots.rows[place, 0], mem.staged.rows[row, 0], served.source, count=served.n * s.hidden)
    if s.quantised:
        N.put_warp(mem.slots.scales[place, 0], mem.staged.scales[row, 0], served.source, count=served.n * s.groups)
    if s.valued != "":
        N.put_warp(mem.slots.values[place, 0], mem.staged.values[row, 0], served.source, count=served.n * s.top_k)


@tsn.macro
def _find_rows(s, mem, tables, places, work, now, token: T.Ref, origin: T.Ref, place: T.Ref, size: T.Ref, lane):
    """Look up the rows of a token, an origin each by the lanes, and wait for them; as in combine_throughput.py."""
    at, plan = tables.at, tables.plan
    for i in T.unroll(-(-at.origins // 32)):
        origin = i * 32 + lane
        work.slot_of[i] = steps.NONE
        if origin < at.origins:
            place = tables.words[plan.place(token, origin)]
            if place >= 0:
                work.slot_of[i] = tables.words[plan.base(origin)] + place
                if s.unchanged and origin == now.mine:
                    work.slot_of[i] = steps.OWN - places.base[now.me] - place
                else:
                    size = T.if_then_else(origin >= now.node and origin < now.node + at.size, s.chunk, s.proxied_chunk)
                    N.wait(mem.arrived[origin, place // size], "ge", now.call)


@tsn.jit(name="moe::combine_nodes", pass_configs=EXPLICIT_SYNC, compile_flags=EXACT_SUMS)
def combine_nodes(
    ranks, experts, nodes, slots_of_gateway, top_k, max_tokens, hidden, dtype, by_rank, weighted, quantised, valued, biases,
    chunk, proxied_chunk, senders, reducers, threads, absent=0, absent_senders=0,
):  # fmt: skip
    """Kernel that sends and sums.

    Args:
        nodes, slots_of_gateway: see Nodes. The others are those of combine_throughput.

    Parameters of the kernel:
        slots [rows that come back or more, hidden] of `dtype` or FP8, slot_scales, slot_values alike: symmetric.
        staged [slots_of_gateway * max_tokens, hidden], staged_scales, staged_values alike: symmetric; sums of this node.
        relayed [rows received, hidden] of `dtype`, relayed_values [… , top_k] float32: symmetric; what this rank has for
        tokens of other nodes, in the order in which their rows came. Unless `quantised` they are the end of slots, behind
        those of all origins, and of slot_values: two copies of the code that sums would spill more registers.
        arrived [origins, chunks], summed [slots_of_gateway * size, chunks] uint64: symmetric; chunks that are there, of
        `slots` and of `relayed`.
        node_map: see Nodes. node_plan: see NodePlan. The others are those of combine_throughput.
    """
    R, K, M, S, at = ranks, top_k, max_tokens, slots_of_gateway, Nodes(ranks, nodes, slots_of_gateway)
    L, V = at.size, at.origins
    s = steps.Sizes(V, K, M, hidden, dtype, by_rank, weighted, quantised, valued, biases, True, chunk, proxied_chunk)
    in_node = s.in_node(at.size)
    plan = NodePlan(at, M)
    totals_at, W = Totals(R, experts // R), record_words(K)
    chunks, node_chunks = -(-M // chunk), -(-M // proxied_chunk)
    blocks, payload = senders + reducers, FP8 if quantised else dtype
    rows, value_rows, capacity, weights, values = (
        T.dynamic(n) for n in ("rows", "value_rows", "capacity", "weights", "values")
    )
    scale_rows, stages, scale_stages, value_stages, relays, value_relays = (
        T.dynamic(n) for n in ("scale_rows", "stages", "scale_stages", "value_stages", "relays", "value_relays")
    )
    slot_rows, slot_value_rows, bias_rows, other_bias_rows = (
        T.dynamic(n) for n in ("slot_rows", "slot_value_rows", "bias_rows", "other_bias_rows")
    )

    @T.prim_func
    def main(
        ctx: N.Context(),
        y: T.Tensor((capacity, hidden), dtype),
        row_weight: T.Tensor((weights,), "float32"),
        row_values: T.Tensor((values,), "float32"),
        bias_0: T.Tensor((bias_rows, hidden), dtype),
        bias_1: T.Tensor((other_bias_rows, hidden), dtype),
        out: T.Tensor((rows, hidden), dtype),
        out_values: T.Tensor((value_rows, K), "float32"),
        tokens: T.int32,
        slots: T.Tensor((slot_rows, hidden), payload),
        slot_scales: T.Tensor((scale_rows, s.groups), "float32"),
        slot_values: T.Tensor((slot_value_rows, K), "float32"),
        staged: T.Tensor((stages, hidden), payload),
        staged_scales: T.Tensor((scale_stages, s.groups), "float32"),
        staged_values: T.Tensor((value_stages, K), "float32"),
        relayed: T.Tensor((relays, hidden), dtype),
        relayed_values: T.Tensor((value_relays, K), "float32"),
        records: T.Tensor((R, M, W), "int32"),
        totals: T.Tensor((totals_at.words,), "int32"),
        node_map: T.Tensor((at.map_words,), "int32"),
        node_plan: T.Tensor((plan.words,), "int32"),
        active: T.Tensor((R,), "int32"),
        ready: T.Tensor((R,), "uint64"),
        arrived: T.Tensor((V, chunks), "uint64"),
        summed: T.Tensor((S * L, chunks), "uint64"),
        done: T.Tensor((R,), "uint64"),
        tickets: T.Tensor((2, 2), "int32"),
        calls: T.Tensor((blocks + absent,), "uint64"),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            received = T.alloc_shared((R,), "int32")
            base = T.alloc_shared((R,), "int32")
            there = T.alloc_shared((R,), "int32")  # where the slots of this rank begin at each of its node
            places, tables = steps.Places(received, base, there), NodeTables(at, plan, node_map, node_plan)
            mem = steps.Memory(
                own=steps.Own(y, row_weight, row_values, records),
                result=Result(out, bias_0, bias_1, out_values),
                slots=steps.Sums(slots, slot_scales, slot_values),
                arrived=arrived,
                staged=steps.Sums(staged, staged_scales, staged_values),
                relayed=steps.Sums(relayed, None, relayed_values),
                summed=summed,
            )
            thread = T.get_thread_binding()
            lane = thread % 32
            me = T.alloc_var("int32")
            me = N.my_pe()
            node = T.alloc_var("int32")
            node = me // L
            mine = T.alloc_var("int32")  # this rank as an origin, for those of its node
            mine = node + me % L
            call = T.alloc_var("uint64")
            call = calls[block] + T.uint64(1)
            if thread < R:
                received[thread] = totals[totals_at.received + thread]
                base[thread] = totals[totals_at.received_base + thread]
                there[thread] = totals[totals_at.slots_base + thread]
                handshake.open_call(ready, active, status, me, call, tag, block, senders, thread)
            T.sync_threads()

            # Each index has a variable of its own, because the compiler's arithmetic on sums of them cannot be trusted.
            peer = T.alloc_var("int32")
            gateway = T.alloc_var("int32")
            c = T.alloc_var("int32")
            n = T.alloc_var("int32")
            k = T.alloc_var("int32")
            i = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            row = T.alloc_var("int32")
            size = T.alloc_var("int32", init=chunk)
            total = T.alloc_var("float32")
            parity = T.alloc_var("int32")
            parity = T.cast(call % T.uint64(2), "int32")
            ahead = T.alloc_var("int32", init=0)
            ticket = T.alloc_var("int32")
            now = NodeNow(me, node, call, mine)
            chunk_of, served = handshake.Chunk(peer, c, n), _Served(k, peer, c, n)
            handshake.clear_tickets(tickets, parity, block, thread)
            sums = T.alloc_local((in_node.send_group * in_node.send_batch * s.width,), dtype)
            sum_of_node = T.alloc_local((in_node.send_batch * s.width,), "float32")
            rows_of_node = T.alloc_local((in_node.send_group,), "int32")
            work_of_node = Work(sums, sum_of_node, rows_of_node)
            if block < senders:
                handshake.first_ticket(tickets, parity, 0, ahead, ticket, lane)
                while ticket < R * chunks + S * node_chunks:
                    handshake.take_ticket(tickets, parity, 0, ahead, lane)
                    if ticket < R * chunks:
                        c = ticket // R
                        # What goes to other nodes comes first.
                        peer = (ticket % R + (node + 1) * L) % R
                        # Reducers take this rank's own rows from where they are, if they travel as they are.
                        if c * chunk < received[peer] and (peer != me or not s.unchanged):
                            n = T.min(chunk, received[peer] - c * chunk)
                            _send_chunk(s, mem, tables, places, now, chunk_of, gateway, row, slot, lane)
                    else:
                        c = (ticket - R * chunks) // S
                        k = (ticket - R * chunks) % S
                        peer = node_map[at.source + k]
                        if c * proxied_chunk < node_plan[plan.head(k, 0)]:
                            n = T.min(proxied_chunk, node_plan[plan.head(k, 0)] - c * proxied_chunk)
                            gateway = T.if_then_else(node < peer // L, node, node + L - 1)  # this node, as an origin
                            _send_back(s, mem, tables, work_of_node, now, served, i, row, slot, total, lane)
                            N.signal_warp(arrived[gateway, c], call, peer)
                    ticket = T.shfl_sync(ahead, 0)
                T.sync_threads()
                handshake.count_sender(done, active, me, thread, R)

            # Senders that are done help to sum.
            piece = T.alloc_local((s.sum_group * s.sum_batch * s.width,), payload)
            acc = T.alloc_local((s.sum_batch * s.width,), "float32")
            from_row = T.alloc_local((s.sum_group,), "int32")
            slot_of = T.alloc_local((-(-V // 32),), "int32")
            work = Work(piece, acc, from_row, slot_of)
            token = T.alloc_var("int32")
            handshake.first_ticket(tickets, parity, 1, ahead, token, lane)
            while token < tokens:
                handshake.take_ticket(tickets, parity, 1, ahead, lane)
                _find_rows(s, mem, tables, places, work, now, token, peer, row, size, lane)
                T.sync_warp()
                steps.sum_rows(s, mem, work, token, peer, lane)
                if valued != "":
                    node_steps.sum_values(s, mem, tables, token, row, total, lane)
                token = T.shfl_sync(ahead, 0)
            T.sync_threads()
            ends = handshake.Ends(active, done, calls)
            of = handshake.Blocks(R, blocks, threads, senders, absent, absent_senders)
            handshake.close_call(of, ends, me, call, block, thread)

    return main
