"""Combine in latency mode: brings the experts' outputs back and sums them, weighted, per token.

As in throughput mode a rank sums over its own experts first and sends one row per token. Rows are cut into parts, each
with a signal of its own and handled by one warp on either side: a few tokens keep the whole GPU busy. Buffers
and signals alternate between calls as in latency_dispatch.py.

With `nodes` each token's sum crosses the network once per node. A rank puts its sum to the token's rank if that is in
its node, else to that rank's forwarder in its own node. The forwarder adds up the sums of its node's ranks, in order
and in float32, rounds (or quantises) once more, and puts one row to the token's rank, which sums its origins (see
layout.py) in order. Forwarders sum in the receive phase.

`exchange_weights` sends the caller's weights of a combine to the ranks of the weighted rows.
"""

from collections import namedtuple
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.collective import EXACT_SUMS, EXPLICIT_SYNC, STATUS_WORDS, TAG_BITS, announce
from tilescale_net.kernels.moe import handshake
from tilescale_net.kernels.moe.handshake import RECEIVES, SENDS
from tilescale_net.kernels.moe.layout import LatencyNodePlanOffsets, NodeLayout, Route
from tilescale_net.kernels.moe.row_ops import (
    FP8,
    Result,
    Rows,
    SumSizes,
    Work,
    add_biases,
    add_rows,
    add_slots,
    batch_of,
    clear,
    int_vars,
    load_batch,
    store_rounded,
    store_sums,
)


def parts_of(hidden: int, width: int, parts: int) -> tuple[int, int]:
    """Parts of a row and 16-byte vectors per part; a part is whole warps of vectors, so parts share no scale."""
    units = hidden // width
    size = (units + parts * 32 - 1) // (parts * 32) * 32
    return -(-units // size), size


@dataclass(frozen=True)
class LatencyCombineConfig(SumSizes):
    """Compile-time sizes and choices; see combine_latency. `ranks`: ranks or origins whose rows a token's rank sums."""

    weighted: bool
    quantised: bool
    wanted_parts: int
    biases: int
    send_limit: int = 14  # vectors of each row per lane that a sending warp reads at once, at most
    timed: bool = False

    @property
    def parts(self) -> int:
        return parts_of(self.hidden, self.width, self.wanted_parts)[0]

    @property
    def size(self) -> int:
        """Vectors of a part."""
        return parts_of(self.hidden, self.width, self.wanted_parts)[1]

    # Rows that a warp reads at once, and vectors of each per lane.
    @property
    def send_group(self) -> int:
        return min(self.top_k, 2)

    def partials_group(self, node_size: int) -> int:
        """The same for a forwarder's sum over the ranks of its node."""
        return min(node_size, self.top_k, 4)

    @property
    def unquantised(self) -> "LatencyCombineConfig":
        return replace(self, quantised=False)

    @property
    def send_batch(self) -> int:
        return batch_of(self.size, self.send_limit)

    @property
    def sum_batch(self) -> int:
        return batch_of(self.size, 7)


# The tensors of combine_latency. result: a Result, slots, staged: `Rows`; token_slot: int32 [rows, ranks or origins], the slot
# of a token's row, or -1.
LatencyCombineTensors = namedtuple(
    "LatencyCombineTensors",
    "y targets weights result received active begun slots arrived token_slot staged waited partial_sums "
    "partials_arrived",
)


class TokenPart(NamedTuple):
    """The part of a token's row that a warp sums; int32 variables of the kernel, which steps read in place.
    `token`: whose row it is. part: its number."""

    token: Any
    part: Any


@tsn.macro
def begin_sending(mem, incoming, total: T.Ref, now, tag, block, thread, ranks):
    """Announce the call and wait until the buffers of all ranks are free; incoming = rows for each rank, total = their
    sum."""
    if thread < ranks:
        incoming[thread] = mem.received[thread]
        if mem.active[thread] != 0:
            handshake.await_previous(mem.begun, now.parity, now.call, TAG_BITS, thread, ranks)
            if block == 0:
                announce(mem.begun, now.parity * ranks + now.me, now.call, tag, thread)
    T.sync_threads()
    handshake.sum_of(incoming, total, ranks)


@tsn.macro
def send_part(s, dst, dst_row, mem, src, begin, end, lane):
    """Sum a part of a row over this rank's experts into a row of `dst`."""
    K, width, batch, group = s.top_k, s.width, s.send_batch, s.send_group
    loaded = T.alloc_local((group * batch * width,), s.dtype)
    acc = T.alloc_local((batch * width,), "float32")
    from_row = T.alloc_local((group,), "int32")
    weight = T.alloc_local((group,), "float32")
    first, k = int_vars(2)
    for b in T.serial(-(-s.size // (32 * batch))):
        first = begin + b * 32 * batch
        clear(acc, batch * width)
        k = 0
        while k < K:
            for g in T.unroll(group):
                from_row[g] = -1
                weight[g] = 1.0
                while k < K and from_row[g] < 0:
                    from_row[g] = mem.targets[src, k]
                    if s.weighted:
                        weight[g] = mem.weights[src, k]
                    k = k + 1
            add_rows(acc, loaded, from_row, weight, mem.y, first, lane, end, width, batch, group)
        store_sums(s, dst, dst_row, acc, first, lane, end, batch)


@tsn.macro
def put_part(s, mem, stage_row, slot: T.Ref, part: T.Ref, end: T.Ref, call: T.Ref, peer: T.Ref, lane):
    """Put a part of row `there` of staging memory to row `slot` of a rank of another node, with its signal."""
    begin, width = part * s.size, s.width
    if s.quantised:
        N.put_warp(
            mem.slots.scales[slot, begin * width // 128], mem.staged.scales[stage_row, begin * width // 128], peer,
            count=(end * width + 127) // 128 - begin * width // 128,
        )  # fmt: skip
        N.put_warp(
            mem.slots.rows[slot, begin * width], mem.staged.rows[stage_row, begin * width], peer,
            count=(end - begin) * width,
        )  # fmt: skip
        N.signal_warp(mem.arrived[slot, part], call, peer)
    else:
        N.put_signal_warp(
            mem.slots.rows[slot, begin * width], mem.staged.rows[stage_row, begin * width], peer, mem.arrived[slot, part],
            call, count=(end - begin) * width,
        )  # fmt: skip


@tsn.macro
def sum_part(s, mem, work, now, rank_of, of, end: T.Ref, first: T.Ref, peer: T.Ref, slot: T.Ref, lane):
    """Wait for a part of a token's rows and sum them in the order of ranks. `rank_of`: the sending rank of each index
    in that order. of: the TokenPart."""
    R, M, width, batch, group = s.ranks, s.max_tokens, s.width, s.sum_batch, s.sum_group
    end = T.min(s.units, (of.part + 1) * s.size)
    for g in T.serial((R + 31) // 32):
        peer = g * 32 + lane
        if peer < R:
            slot = mem.token_slot[of.token, peer]
            if slot >= 0:
                if s.timed:
                    handshake.wait_timed(
                        lambda: mem.arrived[(now.parity * R + peer) * M + slot, of.part], now.call, mem.waited, rank_of(peer)
                    )  # fmt: skip
                N.wait(mem.arrived[(now.parity * R + peer) * M + slot, of.part], "ge", now.call)
    T.sync_warp()
    for b in T.serial(-(-s.size // (32 * batch))):
        first = of.part * s.size + b * 32 * batch
        clear(work.acc, batch * width)
        for p in T.serial((R + group - 1) // group):
            for g in T.unroll(group):
                work.from_row[g] = -1
                if p * group + g < R:
                    slot = mem.token_slot[of.token, p * group + g]
                    if slot >= 0:
                        work.from_row[g] = (now.parity * R + p * group + g) * M + slot
                        load_batch(
                            work.loaded, mem.slots.rows, work.from_row[g], first, lane, end, width, batch, g * batch * width
                        )  # fmt: skip
            add_slots(s, work, mem.slots.scales, lambda row: row >= 0, first, lane, end, batch, group)
        add_biases(s, work.acc, mem.result, of.token, first, lane, end)
        store_rounded(mem.result.out, of.token, work.acc, first, lane, end, width, batch, s.dtype)


# Where rows cross the network once per node.


def sender_of(route: Route, me: Any, origin: Any) -> Any:
    """The rank that sends the row of an origin: one of this node, or the forwarder of another node."""
    size, of = route.at.size, route.at.of
    before = of.node_of(me)
    here = T.if_then_else(origin < before + size, of.first(before) + origin - before, 0)
    return T.if_then_else(
        origin < before,
        route.forwarder(origin),
        T.if_then_else(origin >= before + size, route.forwarder(origin - size + 1), here),
    )


@tsn.macro
def send_part_in_node(s, mem, route, now, peer: T.Ref, slot: T.Ref, part: T.Ref, end: T.Ref, lane):
    """Sum a part of row `slot` of a rank into its memory or its forwarder's here, and signal it."""
    at, M = route.at, s.max_tokens
    source, index, target = int_vars(3)
    source = peer * M + slot
    if at.of.node_of(peer) == at.of.node_of(now.me):
        here = mem.slots.at(peer, s.quantised)
        index = (now.parity * at.origins + at.of.node_of(now.me) + at.of.index_of(now.me)) * M + slot
        send_part(s, here, index, mem, source, part * s.size, end, lane)
        N.signal_warp(mem.arrived[index, part], now.call, peer)
    else:
        target = route.local_forwarder(peer)
        index = (now.parity * at.slots + route.local_forwarder_slot(peer)) * M
        index = (index + route.words[route.plan.message_index(peer, slot)]) * at.size + at.of.index_of(now.me)
        remote = Rows(N.remote(mem.partial_sums, target), None)
        send_part(s.unquantised, remote, index, mem, source, part * s.size, end, lane)
        N.signal_warp(mem.partials_arrived[index, part], now.call, target)


@tsn.macro
def sum_in_node(s, mem, route, work, row: T.Ref, k: T.Ref, j: T.Ref, begin, end, lane):
    """Sum a part of this node's rows for message `j` of slot `k`, in the order of ranks, into `row` of `mem.staged`."""
    at, plan = route.at, route.plan
    width, batch, group = s.width, s.sum_batch, s.partials_group(at.size)
    for b in T.serial(-(-s.size // (32 * batch))):
        clear(work.acc, batch * width)
        for p in T.serial(-(-min(at.size, s.top_k) // group)):
            for g in T.unroll(group):
                work.from_row[g] = -1
                work.ones[g] = 1.0
                if p * group + g < min(at.size, s.top_k):
                    if route.words[plan.receiver(k, j, p * group + g)] >= 0:
                        work.from_row[g] = row * at.size + route.words[plan.receiver(k, j, p * group + g)]
            add_rows(
                work.acc, work.loaded, work.from_row, work.ones, mem.partial_sums, begin + b * 32 * batch, lane, end, width,
                batch, group,
            )  # fmt: skip
        store_sums(s, mem.staged, row, work.acc, begin + b * 32 * batch, lane, end, batch)


@tsn.macro
def send_back(s, mem, route, work, now, k: T.Ref, j: T.Ref, part: T.Ref, end: T.Ref, lane):
    """Sum a part of this node's rows for message `j` of the source of slot `k`, and put the sum to the source."""
    at, plan, M = route.at, route.plan, s.max_tokens
    row, peer, index = int_vars(3)
    row = (now.parity * at.slots + k) * M + j
    for g in T.serial((min(at.size, s.top_k) + 31) // 32):
        if g * 32 + lane < min(at.size, s.top_k):
            index = route.words[plan.receiver(k, j, g * 32 + lane)]
            if index >= 0:
                if s.timed:
                    handshake.wait_timed(
                        lambda: mem.partials_arrived[row * at.size + index, part], now.call, mem.waited,
                        at.of.first(at.of.node_of(now.me)) + index,
                    )  # fmt: skip
                N.wait(mem.partials_arrived[row * at.size + index, part], "ge", now.call)
    T.sync_warp()
    sum_in_node(s, mem, route, work, row, k, j, part * s.size, end, lane)
    T.sync_warp()
    peer = route.source(k)
    index = at.of.node_of(now.me)
    if at.of.node_of(peer) < index:
        index = index + at.size - 1
    index = (now.parity * at.origins + index) * M + j
    put_part(s, mem, row, index, part, end, now.call, peer, lane)


@tsn.jit(name="moe::combine_latency", pass_configs=EXPLICIT_SYNC, compile_flags=EXACT_SUMS)
def combine_latency(
    ranks, top_k, max_tokens, hidden, dtype, weighted, quantised, proxied, parts, biases, blocks, threads,
    absent=0, timed=False, nodes=0, forwarder_slots=0,
):  # fmt: skip
    """Kernel that sends, receives, or both.

    Args:
        ranks, top_k, max_tokens, hidden: sizes. dtype: of a row, "bfloat16", "float16" or "float32".
        weighted: multiply each row by its weight. quantised: rows travel as FP8 with a scale per 128 elements.
        proxied: whether some ranks are on other nodes.
        parts: into how many parts to cut a row, about. biases: how many of `bias_0` and `bias_1` are added to the sums.
        blocks, threads, absent, timed: as in dispatch_latency.
        nodes, forwarder_slots: see NodeLayout; 0: each row goes straight to its rank.

    Parameters of the kernel:
        phases (int32): SENDS, RECEIVES or both; the receive phase follows the send phase on the same stream.
        y [local experts * ranks * max_tokens, hidden] of `dtype`; targets, weights, received: see ReceivedRows.
        bias_0, bias_1 [rows, hidden] of `dtype`.
        out [rows, hidden] of `dtype`, tokens <= rows; active [ranks] int32. token_slot [rows, ranks] int32, or with nodes
        origin_slot [rows, origins]: see ReceivedRows. tag: 0, or the code of the fault that this rank's host found.
        slots [2 * ranks or origins * max_tokens, hidden] of `dtype` or FP8, slot_scales [… , groups] float32, arrived [… ,
        parts] uint64, begun [2 * ranks] uint64: symmetric. staged, staged_scales [2 * ranks * max_tokens, …], with nodes [2 *
        forwarder_slots * max_tokens, …]: alike, rows to other nodes.
        partial_sums [2 * forwarder_slots * max_tokens * size, hidden] of `dtype`, partials_arrived [… , parts] uint64:
        symmetric; this node's sums for tokens of others. node_map: see NodeLayout. node_plan: see
        LatencyNodePlanOffsets. These with nodes only.
        send_calls, receive_calls [blocks] uint64: calls so far. status: see STATUS_WORDS.
        waited [ranks] uint64, if timed: clocks of waiting are added for each rank: one thread waits for its
        announcement, and one for each part of its rows.
    """
    R, K, M, S = ranks, top_k, max_tokens, forwarder_slots
    node_at = NodeLayout(R, nodes, S) if nodes else None
    V = node_at.origins if nodes else R
    # Across nodes two loops sum; with larger batches they spill registers.
    limit = dict(send_limit=7) if nodes else {}
    s = LatencyCombineConfig(V, K, M, hidden, dtype, weighted, quantised, parts, biases, timed=timed, **limit)
    groups, cuts, size, warps = s.groups, s.parts, s.size, threads // 32
    payload = FP8 if quantised else dtype
    if nodes:
        nodes, L, group = node_at.nodes, node_at.size, s.partials_group(node_at.size)
        plan = LatencyNodePlanOffsets(node_at, M, K)

    @T.prim_func
    def main(
        ctx: N.Context(),
        y: T.Tensor((T.dynamic("capacity"), hidden), dtype),
        targets: T.Tensor((R * M, K), "int32"),
        weights: T.Tensor((R * M, K), "float32"),
        received: T.Tensor((R,), "int32"),
        bias_0: T.Tensor((T.dynamic("bias_rows"), hidden), dtype),
        bias_1: T.Tensor((T.dynamic("other_bias_rows"), hidden), dtype),
        out: T.Tensor((T.dynamic("rows"), hidden), dtype),
        token_slot: None if nodes else T.Tensor((T.dynamic("slot_rows"), R), "int32"),
        origin_slot: T.Tensor((T.dynamic("slot_rows"), V), "int32") if nodes else None,
        tokens: T.int32,
        tag: T.int32,
        phases: T.int32,
        active: T.Tensor((R,), "int32"),
        slots: T.Tensor((2 * V * M, hidden), payload),
        slot_scales: T.Tensor((T.dynamic("scale_rows"), groups), "float32"),
        staged: T.Tensor((T.dynamic("stages"), hidden), payload),
        staged_scales: T.Tensor((T.dynamic("scale_stages"), groups), "float32"),
        partial_sums: T.Tensor((2 * S * M * L, hidden), dtype) if nodes else None,
        begun: T.Tensor((2 * R,), "uint64"),
        arrived: T.Tensor((2 * V * M, cuts), "uint64"),
        partials_arrived: T.Tensor((2 * S * M * L, cuts), "uint64") if nodes else None,
        node_map: T.Tensor((node_at.map_words,), "int32") if nodes else None,
        node_plan: T.Tensor((plan.words,), "int32") if nodes else None,
        send_calls: T.Tensor((blocks + absent,), "uint64"),
        receive_calls: T.Tensor((blocks + absent,), "uint64"),
        status: T.Tensor((STATUS_WORDS,), "int64"),
        waited: T.Tensor((R,), "uint64") if timed else None,
    ):
        with T.Kernel(blocks, threads=threads) as block:
            incoming = T.alloc_shared((R,), "int32")
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            me = T.alloc_var("int32", N.my_pe())
            call = T.alloc_var("uint64")
            parity, peer, slot, part, index, end = int_vars(6)  # parity: the set of buffers
            now = handshake.CallState(me, call, parity)
            mem = LatencyCombineTensors(
                y, targets, weights, Result(out, bias_0, bias_1), received, active, begun, Rows(slots, slot_scales), arrived,
                origin_slot if nodes else token_slot, Rows(staged, staged_scales), waited, partial_sums, partials_arrived,
            )  # fmt: skip
            if nodes:
                route = Route(node_at, plan, node_map, node_plan)

            total = T.alloc_var("int32")
            if phases & SENDS != 0:
                source = T.alloc_var("int32")
                direct = T.alloc_var("int32", init=1)
                handshake.begin_phase(send_calls, call, parity, block)
                begin_sending(mem, incoming, total, now, tag, block, thread, R)
                for i in T.serial((total * cuts + blocks * warps - 1) // (blocks * warps)):
                    # Consecutive parts go to different blocks.
                    slot = ((i * warps + warp) * blocks + block) // cuts
                    part = ((i * warps + warp) * blocks + block) % cuts
                    if slot < total:
                        if nodes:
                            # Rows to other nodes take longer, so they leave first.
                            peer = node_at.of.first((node_at.of.node_of(me) + 1) % nodes)
                            while slot >= incoming[peer]:
                                slot = slot - incoming[peer]
                                peer = (peer + 1) % R
                            end = T.min(s.units, (part + 1) * size)
                            send_part_in_node(s, mem, route, now, peer, slot, part, end, lane)
                        else:
                            handshake.find_source(incoming, peer, slot)
                            source = peer * M + slot
                            index = (parity * R + me) * M + slot
                            end = T.min(s.units, (part + 1) * size)
                            if proxied:
                                direct = T.if_then_else(N.is_direct(peer), 1, 0)
                            if direct != 0:
                                at_peer = mem.slots.at(peer, quantised)
                                send_part(s, at_peer, index, mem, source, part * size, end, lane)
                                N.signal_warp(arrived[index, part], call, peer)
                            elif proxied:
                                stage_row = (parity * R + peer) * M + slot
                                send_part(s, mem.staged, stage_row, mem, source, part * size, end, lane)
                                T.sync_warp()
                                put_part(s, mem, stage_row, index, part, end, call, peer, lane)
                T.sync_threads()
                handshake.end_phase(send_calls, call, blocks, absent, block, thread, threads)

            if phases & RECEIVES != 0:
                token = T.alloc_var("int32")
                word = T.alloc_var("uint64")
                loaded = T.alloc_local((s.sum_group * s.sum_batch * s.width,), payload)
                acc = T.alloc_local((s.sum_batch * s.width,), "float32")
                from_row = T.alloc_local((max(s.sum_group, group) if nodes else s.sum_group,), "int32")
                first = T.alloc_var("int32")
                work, of = Work(loaded, acc, from_row), TokenPart(token, part)
                handshake.begin_phase(receive_calls, call, parity, block)
                handshake.time_announcements(timed, begun, active, parity, call, TAG_BITS, waited, block, thread, R)
                # Announcements arrive before rows: this wait costs no time.
                if block == 0 and thread < R:
                    if active[thread] != 0:
                        word = N.wait(begun[parity * R + thread], "ge", call << T.uint64(TAG_BITS))
                        handshake.check_announcement(word, tag, thread, status)
                if nodes:
                    k = T.alloc_var("int32")
                    node_rows = T.alloc_local((group * s.sum_batch * s.width,), dtype)
                    ones = T.alloc_local((group,), "float32")
                    work_of_node = Work(node_rows, acc, from_row, ones=ones)
                    total = 0
                    for i in T.serial(S):
                        total = total + node_plan[plan.forwarded(i)]
                    for i in T.serial((total * cuts + blocks * warps - 1) // (blocks * warps)):
                        slot = ((i * warps + warp) * blocks + block) // cuts
                        part = ((i * warps + warp) * blocks + block) % cuts
                        if slot < total:
                            k = 0
                            while slot >= node_plan[plan.forwarded(k)]:
                                slot = slot - node_plan[plan.forwarded(k)]
                                k = k + 1
                            end = T.min(s.units, (part + 1) * size)
                            send_back(s, mem, route, work_of_node, now, k, slot, part, end, lane)
                for i in T.serial((tokens * cuts + blocks * warps - 1) // (blocks * warps)):
                    token = ((i * warps + warp) * blocks + block) // cuts
                    part = ((i * warps + warp) * blocks + block) % cuts
                    if token < tokens:
                        sum_part(
                            s, mem, work, now, lambda p: sender_of(route, me, p) if nodes else p, of, end, first, peer,
                            slot, lane,
                        )  # fmt: skip
                T.sync_threads()
                handshake.end_phase(receive_calls, call, blocks, absent, block, thread, threads)

    return main


@tsn.jit(name="moe::exchange_weights", pass_configs=EXPLICIT_SYNC)
def exchange_weights(ranks, top_k, max_tokens, threads, timed=False):
    """Kernel with one block per rank: sends the caller's weights of a combine to the ranks of the weighted rows.

    Each rank puts its tokens' weights to every rank that has rows of them, in the order of those rows, and waits for
    the weights of the others. The buffers exist twice and calls alternate: a rank that has begun a call has ended the
    one before, and so has read the buffers of the call before that.

    Args:
        ranks, top_k, max_tokens: sizes. threads: of a block. timed: as in dispatch_latency.

    Parameters of the kernel:
        topk_weights [rows, top_k] float32, tokens <= rows; token_slot, received: see ReceivedRows.
        active [ranks] int32: 0 for a rank that is left out.
        weights_out, weights_in [2 * ranks * max_tokens, top_k] float32, sent [2 * ranks] uint64: symmetric.
        calls [ranks] uint64: calls so far.
        weights [ranks * max_tokens, top_k] float32: the weights of each received row, from its source.
        waited [ranks] uint64, if timed: clocks of waiting for each rank's weights are added.
    """
    R, K, M = ranks, top_k, max_tokens

    @T.prim_func
    def main(
        ctx: N.Context(),
        topk_weights: T.Tensor((T.dynamic("rows"), K), "float32"),
        tokens: T.int32,
        token_slot: T.Tensor((T.dynamic("slot_rows"), R), "int32"),
        received: T.Tensor((R,), "int32"),
        active: T.Tensor((R,), "int32"),
        weights_out: T.Tensor((2 * R * M, K), "float32"),
        weights_in: T.Tensor((2 * R * M, K), "float32"),
        sent: T.Tensor((2 * R,), "uint64"),
        calls: T.Tensor((R,), "uint64"),
        weights: T.Tensor((R * M, K), "float32"),
        waited: T.Tensor((R,), "uint64") if timed else None,
    ):
        with T.Kernel(R, threads=threads) as block:
            count = T.alloc_shared((1,), "int32")  # rows that the peer has of this rank
            thread = T.get_thread_binding()
            me = T.alloc_var("int32", N.my_pe())
            peer = T.alloc_var("int32", block)
            call = T.alloc_var("uint64", calls[block] + T.uint64(1))
            parity = T.alloc_var("int32", T.cast(call & T.uint64(1), "int32"))
            index, slot = int_vars(2)
            if active[peer] != 0:
                if thread == 0:
                    count[0] = 0
                T.sync_threads()
                for i in T.serial((tokens * K + threads - 1) // threads):
                    index = i * threads + thread
                    if index < tokens * K:
                        slot = token_slot[index // K, peer]
                        if slot >= 0:
                            weights_out[(parity * R + peer) * M + slot, index % K] = topk_weights[index // K, index % K]
                            if index % K == 0:
                                T.atomic_add(count[0], 1)
                T.sync_threads()
                N.put_signal_block(
                    weights_in[(parity * R + me) * M, 0], weights_out[(parity * R + peer) * M, 0], peer,
                    sent[parity * R + me], call, count=count[0] * K,
                )  # fmt: skip
                if timed:
                    if thread == 0:
                        handshake.wait_timed(lambda: sent[parity * R + peer], call, waited, peer)
                N.wait_block(sent[parity * R + peer], "ge", call)
                for i in T.serial((received[peer] * K + threads - 1) // threads):
                    index = i * threads + thread
                    if index < received[peer] * K:
                        weights[peer * M + index // K, index % K] = weights_in[
                            (parity * R + peer) * M + index // K, index % K
                        ]
                T.sync_threads()
                if thread == 0:
                    N.quiet(peer)
            if thread == 0:
                calls[block] = call

    return main
