"""Combine in latency mode where nodes have several ranks: each token's sum crosses the network once per node.

A rank sums a token's rows over its own experts, as in combine_latency.py, and puts the sum to the token's rank where that
is of its node, else to that rank's gateway in its node. The gateway adds up what the ranks of its node have put there, in
their order and in float32, rounds (or quantises) once more, and puts one row to the token's rank; which sums what it gets
from its origins (see node_layout.py) in their order. What gateways sum they sum in the half that receives.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.announcement import STATUS_WORDS, TAG_BITS
from tilescale_net.kernels.moe import combine_latency_steps as steps
from tilescale_net.kernels.moe import handshake
from tilescale_net.kernels.moe.node_layout import LatencyNodePlan, Nodes, NodeTables
from tilescale_net.kernels.moe.row_ops import (
    EXACT_SUMS,
    EXPLICIT_SYNC,
    FP8,
    Result,
    Rows,
    Work,
    add_rows,
    clear,
    store_quantised,
    store_rounded,
)


def _sender(tables, me, origin):
    """Which rank sends the row of an origin: one of this node, or the gateway of another node."""
    at, node_map = tables.at, tables.map
    before = me // at.size
    here = T.if_then_else(origin < before + at.size, before * at.size + origin - before, 0)
    return T.if_then_else(
        origin < before,
        node_map[at.gateway + origin],
        T.if_then_else(origin >= before + at.size, node_map[at.gateway + origin - at.size + 1], here),
    )


@tsn.macro
def _send_part(s, mem, tables, now, peer: T.Ref, slot: T.Ref, part: T.Ref, end: T.Ref, lane):
    """Sum a part of row `slot` of a rank into its memory, or into that of its gateway here, and signal it."""
    at, plan, M, size = tables.at, tables.plan, s.max_tokens, s.size
    source = T.alloc_var("int32")
    place = T.alloc_var("int32")
    target = T.alloc_var("int32")
    source = peer * M + slot
    if peer // at.size == now.me // at.size:
        here = mem.slots.at(peer, s.quantised)
        place = (now.parity * at.origins + now.me // at.size + now.me % at.size) * M + slot
        steps.send_part(s, here, place, mem.own, source, part * size, end, lane)
        N.signal_warp(mem.arrived[place, part], now.call, peer)
    else:
        target = tables.map[at.carrier + peer]
        place = (now.parity * at.slots + tables.map[at.carrier_slot + peer]) * M + tables.words[
            plan.carried(peer, slot)
        ]
        place = place * at.size + now.me % at.size
        there = Rows(N.remote(mem.gathered, target), None)
        steps.send_part(s.unquantised, there, place, mem.own, source, part * size, end, lane)
        N.signal_warp(mem.summed[place, part], now.call, target)


@tsn.macro
def _sum_in_node(s, mem, tables, work, row: T.Ref, k: T.Ref, j: T.Ref, begin, end, lane):
    """Sum a part of what ranks of this node have for message `j` of slot `k`, in their order, into `row` of `mem.staged`."""
    at, plan = tables.at, tables.plan
    width, batch, group = s.width, s.sum_batch, s.gathered_group(at.size)
    for b in T.serial(-(-s.size // (32 * batch))):
        clear(work.acc, batch * width)
        for p in T.serial(-(-min(at.size, s.top_k) // group)):
            for g in T.unroll(group):
                work.from_row[g] = -1
                work.ones[g] = 1.0
                if p * group + g < min(at.size, s.top_k):
                    if tables.words[plan.receiver(k, j, p * group + g)] >= 0:
                        work.from_row[g] = row * at.size + tables.words[plan.receiver(k, j, p * group + g)]
            add_rows(
                work.acc, work.piece, work.from_row, work.ones, mem.gathered, begin + b * 32 * batch, lane, end, width,
                batch, group,
            )  # fmt: skip
        if s.quantised:
            store_quantised(
                mem.staged.rows, mem.staged.scales, row, work.acc, begin + b * 32 * batch, lane, end, width, batch
            )
        else:
            store_rounded(mem.staged.rows, row, work.acc, begin + b * 32 * batch, lane, end, width, batch, s.dtype)


@tsn.macro
def _send_back(s, mem, tables, work, now, k: T.Ref, j: T.Ref, part: T.Ref, end: T.Ref, lane):
    """Sum a part of what this node has for message `j` of the source of slot `k`, and put it to the source."""
    at, plan, M = tables.at, tables.plan, s.max_tokens
    row = T.alloc_var("int32")
    peer = T.alloc_var("int32")
    place = T.alloc_var("int32")
    row = (now.parity * at.slots + k) * M + j
    for g in T.serial((min(at.size, s.top_k) + 31) // 32):
        if g * 32 + lane < min(at.size, s.top_k):
            place = tables.words[plan.receiver(k, j, g * 32 + lane)]
            if place >= 0:
                if s.timed:
                    handshake.wait_timed(
                        lambda: mem.summed[row * at.size + place, part], now.call, mem.waited,
                        now.me // at.size * at.size + place,
                    )  # fmt: skip
                N.wait(mem.summed[row * at.size + place, part], "ge", now.call)
    T.sync_warp()
    _sum_in_node(s, mem, tables, work, row, k, j, part * s.size, end, lane)
    T.sync_warp()
    peer = tables.map[at.source + k]
    place = now.me // at.size
    if peer // at.size < place:
        place = place + at.size - 1
    place = (now.parity * at.origins + place) * M + j
    steps.put_part(s, mem, row, place, part, end, now.call, peer, lane)


@tsn.jit(name="moe::combine_latency_nodes", pass_configs=EXPLICIT_SYNC, compile_flags=EXACT_SUMS)
def combine_latency_nodes(
    ranks, nodes, slots_of_gateway, top_k, max_tokens, hidden, dtype, weighted, quantised, sends, receives, parts, biases,
    blocks, threads, absent=0, timed=False,
):  # fmt: skip
    """Kernel that sends, receives, or both.

    Args:
        nodes, slots_of_gateway: see Nodes. The others are those of combine_latency.

    Parameters of the kernel:
        origin_slot [rows, origins] int32: see ReceivedRows.
        slots [2 * origins * max_tokens, hidden] of `dtype` or FP8, slot_scales alike, arrived [2 * origins * max_tokens,
        parts]: symmetric. gathered [2 * slots_of_gateway * max_tokens * size, hidden] of `dtype`, summed [… , parts]:
        symmetric; what ranks of this node have for tokens of others. staged, staged_scales [2 * slots_of_gateway *
        max_tokens, …]: symmetric; sums of this node. node_map: see Nodes. node_plan: see LatencyNodePlan.
        The others are those of combine_latency.
    """
    R, K, M, S, at = ranks, top_k, max_tokens, slots_of_gateway, Nodes(ranks, nodes, slots_of_gateway)
    V, L = at.origins, at.size
    plan = LatencyNodePlan(at, M, K)
    # Two places in the code sum what is sent; with larger batches they spill registers.
    s = steps.Sizes(V, K, M, hidden, dtype, weighted, quantised, parts, biases, 7, timed)
    groups, cuts, size, warps = s.groups, s.parts, s.size, threads // 32
    payload = FP8 if quantised else dtype
    rows, slot_rows, capacity = T.dynamic("rows"), T.dynamic("slot_rows"), T.dynamic("capacity")
    scale_rows, scale_stages = T.dynamic("scale_rows"), T.dynamic("scale_stages")
    bias_rows, other_bias_rows = T.dynamic("bias_rows"), T.dynamic("other_bias_rows")

    @T.prim_func
    def main(
        ctx: N.Context(),
        y: T.Tensor((capacity, hidden), dtype),
        targets: T.Tensor((R * M, K), "int32"),
        weights: T.Tensor((R * M, K), "float32"),
        received: T.Tensor((R,), "int32"),
        bias_0: T.Tensor((bias_rows, hidden), dtype),
        bias_1: T.Tensor((other_bias_rows, hidden), dtype),
        out: T.Tensor((rows, hidden), dtype),
        origin_slot: T.Tensor((slot_rows, V), "int32"),
        tokens: T.int32,
        active: T.Tensor((R,), "int32"),
        slots: T.Tensor((2 * V * M, hidden), payload),
        slot_scales: T.Tensor((scale_rows, groups), "float32"),
        gathered: T.Tensor((2 * S * M * L, hidden), dtype),
        staged: T.Tensor((2 * S * M, hidden), payload),
        staged_scales: T.Tensor((scale_stages, groups), "float32"),
        begun: T.Tensor((2 * R,), "uint64"),
        arrived: T.Tensor((2 * V * M, cuts), "uint64"),
        summed: T.Tensor((2 * S * M * L, cuts), "uint64"),
        node_map: T.Tensor((at.map_words,), "int32"),
        node_plan: T.Tensor((plan.words,), "int32"),
        send_calls: T.Tensor((blocks + absent,), "uint64"),
        receive_calls: T.Tensor((blocks + absent,), "uint64"),
        status: T.Tensor((STATUS_WORDS,), "int64"),
        waited: T.Tensor((R,), "uint64") if timed else None,
    ):
        with T.Kernel(blocks, threads=threads) as block:
            incoming = T.alloc_shared((R,), "int32")
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            me = T.alloc_var("int32")
            me = N.my_pe()
            call = T.alloc_var("uint64")
            parity = T.alloc_var("int32")  # which of the two sets of buffers
            peer = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            part = T.alloc_var("int32")
            end = T.alloc_var("int32")
            total = T.alloc_var("int32")
            now, tables = handshake.Now(me, call, parity), NodeTables(at, plan, node_map, node_plan)
            mem = steps.Memory(
                own=steps.Own(y, targets, weights),
                result=Result(out, bias_0, bias_1),
                received=received,
                active=active,
                begun=begun,
                slots=Rows(slots, slot_scales),
                arrived=arrived,
                token_slot=origin_slot,
                staged=Rows(staged, staged_scales),
                waited=waited,
                gathered=gathered,
                summed=summed,
            )

            if sends:
                handshake.begin_half(send_calls, call, parity, block)
                steps.begin_sending(mem, incoming, total, now, block, thread, R)
                for i in T.serial((total * cuts + blocks * warps - 1) // (blocks * warps)):
                    # Consecutive parts go to different blocks.
                    slot = ((i * warps + warp) * blocks + block) // cuts
                    part = ((i * warps + warp) * blocks + block) % cuts
                    if slot < total:
                        # What goes to other nodes has the longer way, so it leaves first.
                        peer = (me // L + 1) % nodes * L
                        while slot >= incoming[peer]:
                            slot = slot - incoming[peer]
                            peer = (peer + 1) % R
                        end = T.min(s.units, (part + 1) * size)
                        _send_part(s, mem, tables, now, peer, slot, part, end, lane)
                T.sync_threads()
                handshake.end_half(send_calls, call, blocks, absent, block, thread, threads)

            if receives:
                token = T.alloc_var("int32")
                word = T.alloc_var("uint64")
                k = T.alloc_var("int32")
                piece = T.alloc_local((s.sum_group * s.sum_batch * s.width,), payload)
                kept = T.alloc_local((s.gathered_group(L) * s.sum_batch * s.width,), dtype)
                acc = T.alloc_local((s.sum_batch * s.width,), "float32")
                from_row = T.alloc_local((max(s.sum_group, s.gathered_group(L)),), "int32")
                ones = T.alloc_local((s.gathered_group(L),), "float32")
                first = T.alloc_var("int32")
                work, of = Work(piece, acc, from_row), steps.Part(token, part)
                work_of_node = Work(kept, acc, from_row, ones=ones)
                handshake.begin_half(receive_calls, call, parity, block)
                handshake.time_announcements(timed, begun, active, parity, call, TAG_BITS, waited, block, thread, R)
                # Words of ranks that begin come before their rows: this wait costs no time.
                if thread < R:
                    if active[thread] != 0:
                        word = N.wait(begun[parity * R + thread], "ge", call << T.uint64(TAG_BITS))
                        if block == 0:
                            handshake.check_announcement(word, 0, thread, status)
                total = 0
                for i in T.serial(S):
                    total = total + node_plan[plan.passed(i)]
                for i in T.serial((total * cuts + blocks * warps - 1) // (blocks * warps)):
                    slot = ((i * warps + warp) * blocks + block) // cuts
                    part = ((i * warps + warp) * blocks + block) % cuts
                    if slot < total:
                        k = 0
                        while slot >= node_plan[plan.passed(k)]:
                            slot = slot - node_plan[plan.passed(k)]
                            k = k + 1
                        end = T.min(s.units, (part + 1) * size)
                        _send_back(s, mem, tables, work_of_node, now, k, slot, part, end, lane)
                T.sync_threads()
                if thread < R:
                    if active[thread] != 0:
                        handshake.complete_to_refuser(word, thread)
                for i in T.serial((tokens * cuts + blocks * warps - 1) // (blocks * warps)):
                    token = ((i * warps + warp) * blocks + block) // cuts
                    part = ((i * warps + warp) * blocks + block) % cuts
                    if token < tokens:
                        steps.sum_part(
                            s, mem, work, now, lambda p: _sender(tables, me, p), of, end, first, peer, slot, lane
                        )
                T.sync_threads()
                handshake.end_half(receive_calls, call, blocks, absent, block, thread, threads)

    return main
