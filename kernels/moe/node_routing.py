"""The part of a routing plan that is about nodes: which rows go to each of them, and what their gateways do with them.

Runs after plan_routing. A block counts the rows to a node, and sends this rank's gateway there for each of them its
place among the rows to each rank of that node, and its first expert-major row there. Then gateways keep what came.
What is received is free again when the next call has begun: its plan waits for the counts of every rank first.
"""

from typing import Any, NamedTuple

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.moe.handshake import count_for
from tilescale_net.kernels.moe.node_layout import NodePlan, Nodes, NodeTables
from tilescale_net.kernels.moe.row_ops import EXPLICIT_SYNC
from tilescale_net.kernels.moe.totals import Totals


class _Memory(NamedTuple):
    """The tensors of the plan that is about nodes.

    Attributes:
        token_slot, send_row, totals: int32, see RoutingPlan. totals_at: places in `totals`.
        heads_out: int32 [nodes, words], heads_in: int32 [slots, words], symmetric, see `Nodes.head_words`.
        pairs_out: int32 [nodes, max_tokens, 2 * size], pairs_in: int32 [slots, max_tokens, 2 * size], symmetric: for each row
            and each rank of a node the row's place among those to the rank, or -1, and its first expert-major row there.
        told: uint64 [slots], symmetric: the last call of which the source's head and pairs are there.
        found: int32 [threads], of shared memory: what each thread has counted.
    """

    token_slot: Any
    send_row: Any
    totals: Any
    totals_at: Totals
    heads_out: Any
    heads_in: Any
    pairs_out: Any
    pairs_in: Any
    told: Any
    found: Any


@tsn.macro
def _number_rows(mem, tables, tokens, b: T.Ref, node: T.Ref, origin: T.Ref, place: T.Ref, hit: T.Ref, thread, threads):
    """Number the tokens that go to node `b`, in order, by all threads of the block; the last ends with their count."""
    at, plan = tables.at, tables.plan
    share = (tokens + threads - 1) // threads
    origin = T.if_then_else(b < node, b, b + at.size - 1)
    place = 0
    for q in T.serial(share):
        if thread * share + q < tokens:
            hit = 0
            for r in T.serial(at.size):
                hit = T.if_then_else(mem.token_slot[thread * share + q, b * at.size + r] >= 0, 1, hit)
            place = place + hit
    mem.found[thread] = place
    T.sync_threads()
    place = 0
    for p in T.serial(thread):
        place = place + mem.found[p]
    for q in T.serial(share):
        t = thread * share + q
        if t < tokens:
            hit = 0
            for r in T.serial(at.size):
                hit = T.if_then_else(mem.token_slot[t, b * at.size + r] >= 0, 1, hit)
            if b == node:
                for r in T.serial(at.size):
                    tables.words[plan.place(t, node + r)] = mem.token_slot[t, b * at.size + r]
            elif hit == 0:
                tables.words[plan.place(t, origin)] = -1
            else:
                tables.words[plan.place(t, origin)] = place
                tables.words[plan.token(b, place)] = t
                for r in T.serial(at.size):
                    j = T.alloc_var("int32")
                    j = mem.token_slot[t, b * at.size + r]
                    mem.pairs_out[b, place, 2 * r] = j
                    if j >= 0:
                        mem.pairs_out[b, place, 2 * r + 1] = mem.send_row[b * at.size + r, j]
            place = place + hit


@tsn.macro
def _place_slots(mem, tables, tokens, b: T.Ref, node: T.Ref, begin: T.Ref, hit: T.Ref, thread, threads):
    """begin = where what comes back of node `b` begins among the slots: after the ranks of this node, and earlier nodes."""
    at, plan = tables.at, tables.plan
    share = (tokens + threads - 1) // threads
    begin = 0
    if b == node:
        if thread < at.size:
            tables.words[plan.base(node + thread)] = mem.totals[mem.totals_at.sent_before + node * at.size + thread]
    else:
        for q in T.serial(share):
            if thread * share + q < tokens:
                for a in T.serial(b):
                    hit = 0
                    if a != node:
                        for r in T.serial(at.size):
                            hit = T.if_then_else(mem.token_slot[thread * share + q, a * at.size + r] >= 0, 1, hit)
                    begin = begin + hit
    mem.found[thread] = begin
    T.sync_threads()
    begin = 0
    for p in T.serial(threads):
        begin = begin + mem.found[p]
    for r in T.serial(at.size):
        begin = begin + mem.totals[mem.totals_at.sent + node * at.size + r]
    if b != node and thread == 0:
        tables.words[plan.base(T.if_then_else(b < node, b, b + at.size - 1))] = begin
    T.sync_threads()


@tsn.macro
def _tell_gateway(mem, tables, b: T.Ref, rows: T.Ref, begin: T.Ref, gateway: T.Ref, slot: T.Ref, call: T.Ref, thread):
    """Send the head and the pairs of node `b` to this rank's gateway there, by the first warp."""
    at = tables.at
    if thread < at.size:
        mem.heads_out[b, 1 + 2 * thread] = mem.totals[mem.totals_at.sent + b * at.size + thread]
        mem.heads_out[b, 2 + 2 * thread] = mem.totals[mem.totals_at.sent_base + b * at.size + thread]
    if thread == 0:
        mem.heads_out[b, 0] = rows
        mem.heads_out[b, at.slots_begin] = begin
    T.sync_threads()
    gateway = tables.map[at.gateway + b]
    slot = tables.map[at.gateway_slot + b]
    if thread < 32 and gateway >= 0:
        N.put_warp(mem.pairs_in[slot, 0, 0], mem.pairs_out[b, 0, 0], gateway, count=rows * 2 * at.size)
        N.put_warp(mem.heads_in[slot, 0], mem.heads_out[b, 0], gateway, count=at.head_words)
        T.sync_warp()
        if thread == 0:
            N.signal(mem.told[slot], call, gateway, fence=True)


@tsn.macro
def _keep(mem, tables, k: T.Ref, rows: T.Ref, j: T.Ref, thread, threads):
    """Keep the head and the pairs of the source of slot `k`, as lists by rank and as places by row."""
    at, plan = tables.at, tables.plan
    L = at.size
    rows = mem.heads_in[k, 0]
    for i in T.serial((at.head_words + threads - 1) // threads):
        if i * threads + thread < at.head_words:
            tables.words[plan.head(k, i * threads + thread)] = mem.heads_in[k, i * threads + thread]
    for i in T.serial((rows * L + threads - 1) // threads):
        p = i * threads + thread
        if p < rows * L:
            j = mem.pairs_in[k, p // L, p % L * 2]
            tables.words[plan.gather(k, p // L, p % L)] = T.if_then_else(j >= 0, mem.heads_in[k, p % L * 2 + 2] + j, -1)
            if j >= 0:
                tables.words[plan.forward(k, p % L, j, 0)] = p // L
                tables.words[plan.forward(k, p % L, j, 1)] = mem.pairs_in[k, p // L, p % L * 2 + 1]


@tsn.jit(name="moe::plan_nodes", pass_configs=EXPLICIT_SYNC)
def plan_nodes(ranks, experts, nodes, slots, max_tokens, blocks, threads, absent=0):
    """Kernel that fills the part of a RoutingPlan that is about nodes, from the others.

    Args:
        ranks, experts, max_tokens: as in plan_routing. nodes, slots: see Nodes. blocks, threads, absent: launch geometry, as there.

    Parameters of the kernel (int32 where no type is named):
        tokens, token_slot, send_row, totals: see RoutingPlan. node_map [words]: see Nodes.
        heads_out [nodes, words], heads_in [slots, words], pairs_out [nodes, max_tokens, 2 * size],
        pairs_in [slots, max_tokens, 2 * size], told [slots] uint64: symmetric.
        calls [blocks] uint64: calls so far. node_plan [words]: see NodePlan.
    """
    R, M, at, totals_at = ranks, max_tokens, Nodes(ranks, nodes, slots), Totals(ranks, experts // ranks)
    L, H, plan, slot_rows = at.size, at.head_words, NodePlan(at, max_tokens), T.dynamic("slot_rows")

    @T.prim_func
    def main(
        ctx: N.Context(),
        tokens: T.int32,
        token_slot: T.Tensor((slot_rows, R), "int32"),
        send_row: T.Tensor((R, M), "int32"),
        totals: T.Tensor((totals_at.words,), "int32"),
        node_map: T.Tensor((at.map_words,), "int32"),
        heads_out: T.Tensor((nodes, H), "int32"),
        heads_in: T.Tensor((slots, H), "int32"),
        pairs_out: T.Tensor((nodes, M, 2 * L), "int32"),
        pairs_in: T.Tensor((slots, M, 2 * L), "int32"),
        told: T.Tensor((slots,), "uint64"),
        calls: T.Tensor((blocks + absent,), "uint64"),
        node_plan: T.Tensor((plan.words,), "int32"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            found = T.alloc_shared((threads,), "int32")
            tables = NodeTables(at, plan, node_map, node_plan)
            mem = _Memory(
                token_slot, send_row, totals, totals_at, heads_out, heads_in, pairs_out, pairs_in, told, found=found
            )
            thread = T.get_thread_binding()
            node = T.alloc_var("int32")
            node = N.my_pe() // L
            call = T.alloc_var("uint64")
            call = calls[block] + T.uint64(1)
            b = T.alloc_var("int32")
            origin = T.alloc_var("int32")
            place = T.alloc_var("int32")
            hit = T.alloc_var("int32")
            gateway = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            begin = T.alloc_var("int32")
            for i in T.serial((nodes + blocks - 1) // blocks):
                b = i * blocks + block
                if b < nodes:
                    _number_rows(mem, tables, tokens, b, node, origin, place, hit, thread, threads)
                    if thread == threads - 1:
                        node_plan[plan.rows(b)] = T.if_then_else(b == node, 0, place)
                    T.sync_threads()
                    _place_slots(mem, tables, tokens, b, node, begin, hit, thread, threads)
                    place = node_plan[plan.rows(b)]
                    _tell_gateway(mem, tables, b, place, begin, gateway, slot, call, thread)
                T.sync_threads()
            for i in T.serial((slots + blocks - 1) // blocks):
                b = i * blocks + block
                if b < slots:
                    if node_map[at.source + b] >= 0:
                        N.wait_block(told[b], "ge", call)
                        _keep(mem, tables, b, place, hit, thread, threads)
                    else:
                        for h in T.serial((H + threads - 1) // threads):
                            if h * threads + thread < H:
                                node_plan[plan.head(b, h * threads + thread)] = 0
            if thread == 0:
                calls[block] = call
            if absent:
                if block == 0:
                    count_for(calls, call, blocks, absent, thread, threads)

    return main
