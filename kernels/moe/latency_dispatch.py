"""Dispatch in latency mode: few tokens, every SM, no exchange before the data.

A block makes one message per token (row, scales, choices; quantised if asked) and puts it, with its own signal, to
every rank that hosts one of the token's experts, once per rank. Each block finds its token's slots by reading all
earlier choices itself. A header carries the number of messages to expect and of rows per expert; from the headers a
receiver computes the place of each row, so an expert's rows are contiguous, in the order of source rank and token.
Receiving warps copy rows to all their experts as messages arrive.

All buffers and signals exist twice and calls alternate. A rank sends a call when every peer has begun the previous one,
and so has received the one before: no barrier is needed.

Where nodes have several ranks, each message may cross the network once per node: to this rank's forwarder in every
other node that hosts one of the token's experts. A warp per choice there waits for the message and forwards it over
mapped memory, to the receiver's slot that the message names; receivers see no difference. Headers go from a source to
every rank, and carry the number of messages for a forwarder. Messages are forwarded in the receive phase, which waits
only for sources.
"""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.collective import EXPLICIT_SYNC, STATUS_WORDS, Nodes
from tilescale_net.kernels.moe import handshake
from tilescale_net.kernels.moe.handshake import RECEIVES, SENDS, await_previous
from tilescale_net.kernels.moe.layout import (
    BAD_EXPERT,
    COUNT_BITS,
    CROWDED,
    NO_FAULT,
    HeaderLayout,
    LatencyNodePlanOffsets,
    MessageLayout,
    NodeLayout,
    Route,
)
from tilescale_net.kernels.moe.row_ops import (
    FP8,
    Rows,
    batch_of,
    copy_scales,
    int_vars,
    load_batch,
    local_vectors,
    store_batch,
    store_quantised,
)


@dataclass(frozen=True)
class LatencyDispatchConfig:
    """Compile-time sizes and choices; see dispatch_latency."""

    ranks: int
    experts: int
    top_k: int
    max_tokens: int
    row_words: int
    scale_words: int
    source_dtype: str
    blocks: int
    threads: int
    node_sizes: tuple[int, ...] = ()  # ranks of each node, if rows cross the network once per node
    timed: bool = False

    @property
    def nodes(self) -> int:
        return len(self.node_sizes)

    @property
    def of(self) -> Nodes:
        return Nodes(self.node_sizes)

    def node_of_expert(self, expert: Any) -> Any:
        """The node of an expert's rank."""
        return expert // (self.local * self.of.largest) if self.of.is_even else self.of.node_of(expert // self.local)

    @property
    def bins(self) -> int:
        return self.experts + self.ranks + self.nodes

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return self.experts // self.ranks

    @property
    def capacity(self) -> int:
        """Rows of an expert."""
        return self.ranks * self.max_tokens

    @property
    def message(self) -> MessageLayout:
        return MessageLayout(self.row_words, self.scale_words, self.top_k, self.nodes > 0)

    @property
    def header(self) -> HeaderLayout:
        return HeaderLayout(self.local, self.nodes > 0)

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def quantise(self) -> bool:
        return self.source_dtype != ""

    @property
    def source_type(self) -> str:
        return self.source_dtype or "int32"

    @property
    def source_width(self) -> int:
        """Elements of a row of the caller."""
        return self.row_words * 4 if self.quantise else self.row_words

    @property
    def width(self) -> int:
        """Elements of 16 bytes of such a row."""
        return 4 if self.source_type in ("float32", "int32") else 8

    @property
    def units(self) -> int:
        """Vectors of 16 bytes in such a row."""
        return self.source_width // self.width

    @property
    def batch(self) -> int:
        """Vectors of a thread; a block holds a whole row."""
        return -(-self.units // self.threads)

    @property
    def row_batch(self) -> int:
        """Vectors per lane and batch of a travelling row."""
        return batch_of(self.row_words // 4, 16)


class MessageViews(NamedTuple):
    """The messages that a rank makes, one per token, [2 * max_tokens, …]: views of the same symmetric memory.
    `words`: int32, see MessageLayout. fp8: bytes of a row that is quantised. scales: float32, its scales."""

    words: Any
    fp8: Any
    scales: Any


# Tensors of received rows, see ReceivedRows; `out`: the caller's `Rows`.
ReceivedTensors = namedtuple("ReceivedTensors", "out counts totals received source_counts targets weights source_token")


# The tensors of dispatch_latency; of each two sets of messages, headers and signals, calls use one and the other. message: a
# MessageViews, results: ReceivedTensors, forwarding: int32 [slots of a forwarder], of shared memory: messages to forward
# from the source of each slot.
LatencyDispatchTensors = namedtuple(
    "LatencyDispatchTensors",
    "x topk_idx topk_weights active message header_out header_in begun arrival arrived token_slot results status "
    "waited to_forward forward_arrived origin_slot forwarding",
)


class TokenChoices(NamedTuple):
    """The choices of a block's token; int32 [top_k] each, of shared memory. `mine`: the experts, or -1. same_expert:
    earlier choices of the same expert. `same_rank`, `same_node`: earlier tokens with a choice at the same rank, or in
    the same node."""

    mine: Any
    same_expert: Any
    same_rank: Any
    same_node: Any = None


@tsn.macro
def count_choices(s, mem, tokens, fault, fault_value, histogram, bad, now, thread):
    """Count the choices per expert and the tokens per rank, by one block, and wait until the headers are free. Leaves
    the counts in `histogram` [bins], and this rank's fault and its value in `bad`."""
    R, experts, threads, local = s.ranks, s.experts, s.threads, s.local
    seen = T.alloc_local((s.top_k,), "int32")
    other, choice, first = int_vars(3)
    for i in T.serial((s.bins + threads - 1) // threads):
        if i * threads + thread < s.bins:
            histogram[i * threads + thread] = 0
    if thread == 0:
        bad[0] = fault
        bad[1] = fault_value
    if thread < R:
        if mem.active[thread] != 0:
            await_previous(mem.begun, now.parity, now.call, COUNT_BITS, thread, R)
    T.sync_threads()
    for i in T.serial((tokens + threads - 1) // threads):
        other = i * threads + thread
        if other < tokens:
            for k in T.serial(s.top_k):
                choice = -1
                if mem.topk_idx[other, k] < -1 or mem.topk_idx[other, k] >= experts:
                    bad[0] = BAD_EXPERT
                    bad[1] = T.cast(mem.topk_idx[other, k], "int32")
                else:
                    choice = T.cast(mem.topk_idx[other, k], "int32")
                seen[k] = -1
                if choice >= 0:
                    if mem.active[choice // local] != 0:
                        seen[k] = choice // local
                        # An expert has room for every token of every rank, once.
                        first = T.atomic_add(histogram[choice], 1, return_prev=True)
                        if first >= s.max_tokens:
                            bad[0] = CROWDED
                            bad[1] = choice
                        first = 1
                        for q in T.serial(k):
                            if seen[q] == seen[k]:
                                first = 0
                        if first != 0:
                            T.atomic_add(histogram[experts + seen[k]], 1)
                        if s.nodes:
                            first = 1
                            for q in T.serial(k):
                                if seen[q] >= 0 and s.of.node_of(seen[q]) == s.of.node_of(seen[k]):
                                    first = 0
                            if first != 0:
                                T.atomic_add(histogram[experts + R + s.of.node_of(seen[k])], 1)
    T.sync_threads()


@tsn.macro
def send_headers(s, mem, histogram, bad, now, thread, warp):
    """Put a header to every rank; its signal carries the call number and the number of messages to expect."""
    R, M, threads, local, head = s.ranks, s.max_tokens, s.threads, s.local, s.header
    peer, index = int_vars(2)
    for i in T.serial((R * head.words + threads - 1) // threads):
        index = (i * threads + thread) % head.words
        peer = (i * threads + thread) // head.words
        if peer < R:
            if index < local:
                mem.header_out[now.parity * R + peer, index] = T.min(histogram[peer * local + index], M)
            elif index == head.code:
                mem.header_out[now.parity * R + peer, index] = bad[0]
            elif index == head.value:
                mem.header_out[now.parity * R + peer, index] = bad[1]
            elif s.nodes:
                if index == head.to_node:
                    mem.header_out[now.parity * R + peer, index] = histogram[s.experts + R + s.of.node_of(peer)]
    T.sync_threads()
    for i in T.serial((R + s.warps - 1) // s.warps):
        peer = i * s.warps + warp
        if peer < R:
            if mem.active[peer] != 0:
                N.put_signal_warp(
                    mem.header_in[now.parity * R + now.me, 0], mem.header_out[now.parity * R + peer, 0], peer,
                    mem.begun[now.parity * R + now.me],
                    (now.call << T.uint64(COUNT_BITS)) | T.cast(histogram[s.experts + peer], "uint64"), count=head.words,
                )  # fmt: skip


@tsn.macro
def load_token(s, mem, chosen, loaded, token: T.Ref, parity: T.Ref, thread, warp, lane):
    """Begin to load a token's row, and write its choices and their weights to its message, by a block."""
    K, M, msg = s.top_k, s.max_tokens, s.message
    index, choice = int_vars(2)
    load_batch(loaded, mem.x.rows, token, warp * 32 * s.batch, lane, s.units, s.width, s.batch)
    for g in T.serial((K + s.threads - 1) // s.threads):
        index = g * s.threads + thread
        if index < K:
            choice = -1
            if mem.topk_idx[token, index] >= 0 and mem.topk_idx[token, index] < s.experts:
                choice = T.cast(mem.topk_idx[token, index], "int32")
                if mem.active[choice // s.local] == 0:
                    choice = -1
            chosen.mine[index] = choice
            chosen.same_expert[index] = 0
            chosen.same_rank[index] = 0
            mem.message.words[parity * M + token, msg.experts + index] = choice
            mem.message.words[parity * M + token, msg.weights + index] = T.reinterpret(
                mem.topk_weights[token, index], "int32"
            )
    if thread == 0:
        mem.message.words[parity * M + token, msg.token] = token
    T.sync_threads()


@tsn.macro
def count_earlier(s, mem, chosen, token: T.Ref, thread):
    """Count, for each choice of a token, the earlier choices of its expert and tokens with one at its rank, or in its node."""
    K, local = s.top_k, s.local
    seen, found_expert, found_rank = local_vectors(3, K, "int32")
    found_node = T.alloc_local((K if s.nodes else 1,), "int32")
    other, first = int_vars(2)
    for k in T.serial(K):
        found_expert[k] = 0
        found_rank[k] = 0
        if s.nodes:
            found_node[k] = 0
    for g in T.serial((token + s.threads - 1) // s.threads):
        other = g * s.threads + thread
        if other < token:
            for q in T.serial(K):
                seen[q] = T.cast(mem.topk_idx[other, q], "int32")
            for k in T.serial(K):
                if chosen.mine[k] >= 0:
                    first = 0
                    for q in T.serial(K):
                        if seen[q] >= 0 and seen[q] < s.experts:
                            if seen[q] == chosen.mine[k]:
                                found_expert[k] = found_expert[k] + 1
                            if seen[q] // local == chosen.mine[k] // local:
                                first = 1
                    found_rank[k] = found_rank[k] + first
            if s.nodes:
                for q in T.serial(K):
                    if seen[q] >= 0 and seen[q] < s.experts:
                        if mem.active[seen[q] // local] == 0:
                            seen[q] = -1
                for k in T.serial(K):
                    if chosen.mine[k] >= 0:
                        first = 0
                        for q in T.serial(K):
                            if seen[q] >= 0 and s.node_of_expert(seen[q]) == s.node_of_expert(chosen.mine[k]):
                                first = 1
                        found_node[k] = found_node[k] + first
    for k in T.serial(K):
        if found_expert[k] != 0:
            T.atomic_add(chosen.same_expert[k], found_expert[k])
        if found_rank[k] != 0:
            T.atomic_add(chosen.same_rank[k], found_rank[k])
        if s.nodes:
            if found_node[k] != 0:
                T.atomic_add(chosen.same_node[k], found_node[k])


@tsn.macro
def write_row(s, mem, loaded, token: T.Ref, parity: T.Ref, thread, warp, lane):
    """Write a token's row, which the block has loaded, to its message; with its scales, quantised if asked."""
    M, units, width, batch = s.max_tokens, s.units, s.width, s.batch
    if s.quantise:
        acc = T.alloc_local((batch * width,), "float32")
        for v in T.unroll(batch * width):
            acc[v] = T.cast(loaded[v], "float32")
        store_quantised(
            mem.message.fp8, mem.message.scales, parity * M + token, acc, warp * 32 * batch, lane, units, width, batch,
            s.row_words,
        )  # fmt: skip
    else:
        store_batch(mem.message.words, parity * M + token, loaded, warp * 32 * batch, lane, units, width, batch)
        for g in T.serial((s.scale_words + s.threads - 1) // s.threads):
            if g * s.threads + thread < s.scale_words:
                mem.message.words[parity * M + token, s.row_words + g * s.threads + thread] = mem.x.scales[
                    token, g * s.threads + thread
                ]


@tsn.macro
def put_message(s, mem, chosen, token: T.Ref, now, index: T.Ref, peer: T.Ref):
    """Put a token's message to the rank of its choice `index`, by a warp."""
    R, M = s.ranks, s.max_tokens
    N.put_signal_warp(
        mem.arrival[(now.parity * R + now.me) * M + chosen.same_rank[index], 0],
        mem.message.words[now.parity * M + token, 0], peer,
        mem.arrived[(now.parity * R + now.me) * M + chosen.same_rank[index]], now.call, count=s.message.words,
    )  # fmt: skip


@tsn.macro
def send_message(s, mem, route, chosen, token: T.Ref, now, thread, warp, lane):
    """Complete a token's message and put it, one warp per target, to every rank that hosts one of its experts; with
    nodes, to the ranks of this node and to this rank's forwarder in each other node."""
    K, M, local, msg = s.top_k, s.max_tokens, s.local, s.message
    peer, index, first = int_vars(3)
    if s.nodes:
        slot, first_of_node = int_vars(2)
        of = s.of
    for g in T.serial((K + s.threads - 1) // s.threads):
        index = g * s.threads + thread
        if index < K:
            first = 0
            for q in T.serial(index):
                if chosen.mine[q] == chosen.mine[index]:
                    first = first + 1
            mem.message.words[now.parity * M + token, msg.indices + index] = chosen.same_expert[index] + first
            if s.nodes:
                mem.message.words[now.parity * M + token, msg.at_rank + index] = chosen.same_rank[index]
                mem.message.words[now.parity * M + token, msg.at_node + index] = chosen.same_node[index]
    T.sync_threads()
    for g in T.serial((K + s.warps - 1) // s.warps):
        index = g * s.warps + warp
        if index < K:
            if chosen.mine[index] >= 0:
                first = 1
                for q in T.serial(index):
                    if chosen.mine[q] >= 0 and chosen.mine[q] // local == chosen.mine[index] // local:
                        first = 0
                if first != 0:
                    peer = chosen.mine[index] // local
                    if lane == 0:
                        mem.token_slot[token, peer] = chosen.same_rank[index]
                    if s.nodes:
                        if of.node_of(peer) == of.node_of(now.me):
                            if lane == 0:
                                mem.origin_slot[token, of.node_of(now.me) + of.index_of(peer)] = chosen.same_rank[index]
                            put_message(s, mem, chosen, token, now, index, peer)
                    else:
                        put_message(s, mem, chosen, token, now, index, peer)
                if s.nodes:
                    peer = chosen.mine[index] // local
                    first_of_node = 1
                    for q in T.serial(index):
                        if chosen.mine[q] >= 0 and s.node_of_expert(chosen.mine[q]) == of.node_of(peer):
                            first_of_node = 0
                    if first_of_node != 0 and of.node_of(peer) != of.node_of(now.me):
                        if lane == 0:
                            slot = of.node_of(peer)
                            if slot > of.node_of(now.me):
                                slot = slot + of.largest - 1
                            mem.origin_slot[token, slot] = chosen.same_node[index]
                        slot = (
                            now.parity * route.at.slots + route.forwarder_slot(of.node_of(peer))
                        ) * M + chosen.same_node[index]
                        peer = route.forwarder(of.node_of(peer))
                        N.put_signal_warp(
                            mem.to_forward[slot, 0], mem.message.words[now.parity * M + token, 0], peer, mem.forward_arrived[slot],
                            now.call, count=msg.words,
                        )  # fmt: skip
    T.sync_threads()


@tsn.macro
def read_headers(s, mem, incoming, begin, now, block, thread):
    """Wait for the headers; count how many messages each rank sends, and compute where the rows of each expert begin."""
    R, M, threads, local, head = s.ranks, s.max_tokens, s.threads, s.local, s.header
    value = T.alloc_var("uint64")
    index, total = int_vars(2)
    if thread < R:
        incoming[thread] = 0
        if mem.active[thread] != 0:
            value = N.wait(mem.begun[now.parity * R + thread], "ge", now.call << T.uint64(COUNT_BITS))
            incoming[thread] = T.min(T.cast(value & T.uint64((1 << COUNT_BITS) - 1), "int32"), M)
            if block == 0 and mem.header_in[now.parity * R + thread, head.code] != NO_FAULT:
                mem.status[1] = T.cast(thread, "int64")
                mem.status[2] = T.cast(mem.header_in[now.parity * R + thread, head.value], "int64")
                N.st(mem.status[0], T.cast(mem.header_in[now.parity * R + thread, head.code], "int64"), sem="release")
    T.sync_threads()
    for i in T.serial((local + threads - 1) // threads):
        index = i * threads + thread
        if index < local:
            total = 0
            for r in T.serial(R):
                begin[index, r] = total
                if mem.active[r] != 0:
                    total = total + mem.header_in[now.parity * R + r, index]
                if block == 0:
                    mem.results.source_counts[index, r] = total - begin[index, r]
            if block == 0:
                mem.results.counts[index] = total
                T.atomic_add(mem.results.totals[index], total)  # whose results no thread waits for
    if block == 0 and thread < R:
        mem.results.received[thread] = incoming[thread]
    T.sync_threads()


@tsn.macro
def receive_row(s, mem, begin, me: T.Ref, source: T.Ref, slot: T.Ref, index: T.Ref, lane, by_column):
    """Copy the row of a message to the rows of its experts on this rank, by a warp; note them for combine."""
    K, M, local, msg, batch, words = s.top_k, s.max_tokens, s.local, s.message, s.row_batch, s.row_words
    row_batches = -(-words // 4 // (32 * batch))
    row_piece = T.alloc_local((batch * 4,), "int32")
    choice, target, order = int_vars(3)
    load_batch(row_piece, mem.arrival, index, 0, lane, words // 4, 4, batch)
    for g in T.serial((K + 31) // 32):
        target = -1
        if g * 32 + lane < K:
            choice = mem.arrival[index, msg.experts + g * 32 + lane]
            if choice >= me * local and choice < (me + 1) * local:
                order = mem.arrival[index, msg.indices + g * 32 + lane]
                # The header does not count these choices: the source has reported them.
                if order >= 0 and order < M:
                    target = begin[choice - me * local, source] + order
                    mem.results.source_token[choice - me * local, target] = mem.arrival[index, msg.token]
                    target = target + (choice - me * local) * s.capacity
            mem.results.targets[source * M + slot, g * 32 + lane] = target
            mem.results.weights[source * M + slot, g * 32 + lane] = T.reinterpret(
                mem.arrival[index, msg.weights + g * 32 + lane], "float32"
            )
        for b in T.serial(row_batches):
            # The first batch is there already, unless later ones were loaded since.
            if b > 0 or (g > 0 and row_batches > 1):
                load_batch(row_piece, mem.arrival, index, b * 32 * batch, lane, words // 4, 4, batch)
            for k in T.serial(min(K, 32)):
                landing = T.shfl_sync(target, k)
                if landing >= 0:
                    store_batch(mem.results.out.rows, landing, row_piece, b * 32 * batch, lane, words // 4, 4, batch)
        if s.scale_words:
            for k in T.serial(min(K, 32)):
                landing = T.shfl_sync(target, k)
                if landing >= 0:
                    copy_scales(
                        mem.results.out.scales, landing, mem.arrival, index, s.scale_words, lane, words, s.capacity, by_column
                    )  # fmt: skip


@tsn.macro
def _forward(s, mem, route, now, source: T.Ref, k: T.Ref, j: T.Ref, choice: T.Ref, lane):
    """Forward message `j` of the source of slot `k` to the rank of its choice `choice`, unless that rank is in another
    node or has an earlier choice; for combine, note number `choice` of the ranks that it goes to."""
    at, plan = route.at, route.plan
    R, K, M, local, msg = s.ranks, s.top_k, s.max_tokens, s.local, s.message
    row, rank, other, first, again = int_vars(5)
    number = T.alloc_var("int32")  # of this rank among those of the message
    count = T.alloc_var("int32")
    row = (now.parity * at.slots + k) * M + j
    handshake.time_message(s.timed, mem.forward_arrived, row, now.call, mem.waited, source, lane)
    N.wait_warp(mem.forward_arrived[row], "ge", now.call)
    rank = -1
    if mem.to_forward[row, msg.experts + choice] >= 0:
        rank = mem.to_forward[row, msg.experts + choice] // local
        if at.of.node_of(rank) != at.of.node_of(now.me):
            rank = -1
    first = 1
    number = 0
    count = 0
    for q in T.serial(K):
        other = mem.to_forward[row, msg.experts + q]
        if other >= 0:
            other = other // local
            if at.of.node_of(other) == at.of.node_of(now.me):
                again = 0
                for p in T.serial(q):
                    if mem.to_forward[row, msg.experts + p] >= 0:
                        if mem.to_forward[row, msg.experts + p] // local == other:
                            again = 1
                if again == 0:
                    count = count + 1
                    if other < rank:
                        number = number + 1
                if other == rank and q < choice:
                    first = 0
    if lane == 0:
        if choice >= count:
            route.words[plan.receiver(k, j, choice)] = -1
        if rank >= 0 and first != 0:
            route.words[plan.receiver(k, j, number)] = at.of.index_of(rank)
    if rank >= 0 and first != 0:
        other = mem.to_forward[row, msg.at_rank + choice]
        # The receiver has no slot for it if the source has reported a fault.
        if other >= 0 and other < M:
            other = (now.parity * R + source) * M + other
            N.put_signal_warp(
                mem.arrival[other, 0], mem.to_forward[row, 0], rank, mem.arrived[other], now.call, count=msg.words
            )


@tsn.macro
def count_forwarded(s, mem, route, source: T.Ref, parity: T.Ref, block, thread):
    """Count the messages of each slot's source to forward: into `mem.forwarding`, and for combine."""
    at, plan = route.at, route.plan
    for i in T.serial((at.slots + s.threads - 1) // s.threads):
        if i * s.threads + thread < at.slots:
            mem.forwarding[i * s.threads + thread] = 0
            source = route.source(i * s.threads + thread)
            if source >= 0:
                mem.forwarding[i * s.threads + thread] = T.min(
                    mem.header_in[parity * s.ranks + source, s.header.to_node], s.max_tokens
                )
            if block == 0:
                route.words[plan.forwarded(i * s.threads + thread)] = mem.forwarding[i * s.threads + thread]
    T.sync_threads()


@tsn.macro
def forward_all(s, mem, route, now, source: T.Ref, slot: T.Ref, total: T.Ref, choice: T.Ref, block, warp, lane):
    """Forward messages, one warp per choice of a message."""
    at = route.at
    k = T.alloc_var("int32")
    handshake.sum_of(mem.forwarding, total, at.slots)
    for i in T.serial((total * s.top_k + s.blocks * s.warps - 1) // (s.blocks * s.warps)):
        slot = (i * s.warps + warp) * s.blocks + block
        if slot < total * s.top_k:
            choice = slot % s.top_k
            slot = slot // s.top_k
            handshake.find_source(mem.forwarding, k, slot)
            source = route.source(k)
            _forward(s, mem, route, now, source, k, slot, choice, lane)


@tsn.macro
def note_message(s, mem, route, me: T.Ref, source: T.Ref, slot: T.Ref, index: T.Ref, choice: T.Ref, lane):
    """For combine: store which message of `source` to this node became row `slot` of `source`."""
    plan = route.plan
    if lane == 0:
        for q in T.serial(s.top_k):
            choice = mem.arrival[index, s.message.experts + q]
            if choice >= me * s.local and choice < (me + 1) * s.local:
                route.words[plan.message_index(source, slot)] = mem.arrival[index, s.message.at_node + q]


@tsn.jit(name="moe::dispatch_latency", pass_configs=EXPLICIT_SYNC)
def dispatch_latency(
    ranks, experts, top_k, max_tokens, row_words, scale_words, source_dtype, blocks, threads, index_dtype,
    absent=0, timed=False, nodes=0, slots=0, column_scales=False,
):  # fmt: skip
    """Kernel that sends, receives, or both.

    Args:
        ranks, experts, top_k, max_tokens: sizes; rank r hosts experts [r * experts / ranks, (r + 1) * …).
        row_words, scale_words: 4-byte words of a row as it travels (a multiple of 4) and of its scales (0: it has none).
        source_dtype: "bfloat16", "float16" or "float32": quantise rows of this type to FP8; "": send them as they are.
        blocks, threads: launch geometry; all blocks must run at once. index_dtype: of `topk_idx`.
        absent: blocks of the launch geometry that this call lacks; block 0 counts for them.
        timed: whether to add up how long the receive phase waits for each rank.
        nodes, slots: see NodeLayout; 0: each message goes straight to its ranks.
        column_scales: received scales are [local experts * scale_words, ranks * max_tokens]: for each expert, one row
            per scale word.

    Parameters of the kernel (int32 if no type is named):
        phases: SENDS, RECEIVES or both; the receive phase follows the send phase on the same stream.
        x [rows, row_words], or [rows, hidden] of `source_dtype`; x_scales [rows, scale_words] float32 as words.
        topk_idx [rows, top_k] of `index_dtype`, topk_weights [rows, top_k] float32, tokens <= rows; fault, fault_value:
        the fault that the host found; active [ranks]: 0 for a rank that is left out.
        message [2 * max_tokens, words]: symmetric; message_fp8, message_scales: the same memory as FP8 and as float32.
        header_out, header_in [2 * ranks, words], arrival [2 * ranks * max_tokens, words]: symmetric; see HeaderLayout, MessageLayout.
        begun [2 * ranks], arrived [2 * ranks * max_tokens] uint64: symmetric.
        send_calls, receive_calls [blocks] uint64: calls so far. status: see STATUS_WORDS.
        to_forward [2 * slots * max_tokens, words] int32, forward_arrived [2 * slots * max_tokens] uint64: symmetric;
        messages to forward. node_map: see NodeLayout. node_plan: see LatencyNodePlanOffsets. These and origin_slot with
        nodes only.
        token_slot [rows, ranks], targets, weights, received, source_counts, source_token, origin_slot: see ReceivedRows.
        out [local experts * ranks * max_tokens, row_words], out_scales, counts [local experts]: the caller's outputs.
        totals [local experts]: the counts are added, by the receive phase.
        waited [ranks] uint64, if timed: clocks of waiting are added for each rank: one thread waits for its header, and
        one for each of its messages.
    """
    R, K, M, S = ranks, top_k, max_tokens, slots
    at = NodeLayout(R, nodes, S) if nodes else None
    plan = LatencyNodePlanOffsets(at, M, K) if nodes else None
    nodes, sizes = (at.nodes, at.of.sizes) if at else (0, ())
    s = LatencyDispatchConfig(R, experts, K, M, row_words, scale_words, source_dtype, blocks, threads, sizes, timed)
    msg, head, local = s.message, s.header, s.local
    scale_width = max(scale_words, 1)
    scales_width = s.capacity if column_scales else scale_width

    @T.prim_func
    def main(
        ctx: N.Context(),
        x: T.Tensor((T.dynamic("rows"), s.source_width), s.source_type),
        x_scales: T.Tensor((T.dynamic("scale_rows"), scale_width), "int32"),
        topk_idx: T.Tensor((T.dynamic("choices"), K), index_dtype),
        topk_weights: T.Tensor((T.dynamic("choices"), K), "float32"),
        tokens: T.int32,
        fault: T.int32,
        fault_value: T.int32,
        phases: T.int32,
        active: T.Tensor((R,), "int32"),
        message: T.Tensor((2 * M, msg.words), "int32"),
        message_fp8: T.Tensor((2 * M, msg.words * 4), FP8),
        message_scales: T.Tensor((2 * M, msg.words), "float32"),
        header_out: T.Tensor((2 * R, head.words), "int32"),
        header_in: T.Tensor((2 * R, head.words), "int32"),
        arrival: T.Tensor((2 * R * M, msg.words), "int32"),
        to_forward: T.Tensor((2 * S * M, msg.words), "int32") if nodes else None,
        begun: T.Tensor((2 * R,), "uint64"),
        arrived: T.Tensor((2 * R * M,), "uint64"),
        forward_arrived: T.Tensor((2 * S * M,), "uint64") if nodes else None,
        node_map: T.Tensor((at.map_words,), "int32") if nodes else None,
        send_calls: T.Tensor((blocks + absent,), "uint64"),
        receive_calls: T.Tensor((blocks + absent,), "uint64"),
        status: T.Tensor((STATUS_WORDS,), "int64"),
        token_slot: T.Tensor((T.dynamic("slot_rows"), R), "int32"),
        out: T.Tensor((local * s.capacity, row_words), "int32"),
        out_scales: T.Tensor((T.dynamic("scale_capacity"), scales_width), "int32"),
        counts: T.Tensor((local,), "int32"),
        totals: T.Tensor((local,), "int32"),
        targets: T.Tensor((R * M, K), "int32"),
        weights: T.Tensor((R * M, K), "float32"),
        received: T.Tensor((R,), "int32"),
        source_counts: T.Tensor((local, R), "int32"),
        source_token: T.Tensor((local, s.capacity), "int32"),
        origin_slot: T.Tensor((T.dynamic("slot_rows"), at.origins), "int32") if nodes else None,
        node_plan: T.Tensor((plan.words,), "int32") if nodes else None,
        waited: T.Tensor((R,), "uint64") if timed else None,
    ):
        with T.Kernel(blocks, threads=threads) as block:
            mine = T.alloc_shared((K,), "int32")  # experts of the block's token
            same_expert = T.alloc_shared((K,), "int32")  # earlier choices of the same expert
            same_rank = T.alloc_shared((K,), "int32")  # earlier tokens with a choice at the same rank
            if nodes:
                same_node = T.alloc_shared((K,), "int32")  # earlier tokens with a choice in the same node
            histogram = T.alloc_shared((s.bins,), "int32")
            bad = T.alloc_shared((2,), "int32")
            begin = T.alloc_shared((local, R), "int32")
            incoming = T.alloc_shared((R,), "int32")
            if nodes:
                forwarding = T.alloc_shared((S,), "int32")
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            me = T.alloc_var("int32", N.my_pe())
            call = T.alloc_var("uint64")
            parity = T.alloc_var("int32")  # the set of buffers
            now = handshake.CallState(me, call, parity)
            chosen = TokenChoices(mine, same_expert, same_rank, same_node if nodes else None)
            mem = LatencyDispatchTensors(
                Rows(x, x_scales), topk_idx, topk_weights, active, MessageViews(message, message_fp8, message_scales),
                header_out, header_in, begun, arrival, arrived, token_slot,
                ReceivedTensors(
                    Rows(out, out_scales), counts, totals, received, source_counts, targets, weights, source_token
                ),
                status, waited, to_forward, forward_arrived, origin_slot, forwarding if nodes else None,
            )  # fmt: skip
            route = Route(at, plan, node_map, node_plan)

            if phases & SENDS != 0:
                token = T.alloc_var("int32")
                loaded = T.alloc_local((s.batch * s.width,), s.source_type)
                # A block without a token does not use its count: no synchronisation before the count is raised.
                N.benign_race(send_calls[block])
                handshake.begin_phase(send_calls, call, parity, block)
                # The last block counts for the headers; it has a token of its own only when all blocks have one.
                if block == blocks - 1:
                    count_choices(s, mem, tokens, fault, fault_value, histogram, bad, now, thread)
                    send_headers(s, mem, histogram, bad, now, thread, warp)
                for i in T.serial((tokens + blocks - 1) // blocks):
                    token = i * blocks + block
                    if token < tokens:
                        if nodes:
                            for g in T.serial((K + threads - 1) // threads):
                                if g * threads + thread < K:
                                    same_node[g * threads + thread] = 0
                        load_token(s, mem, chosen, loaded, token, parity, thread, warp, lane)
                        count_earlier(s, mem, chosen, token, thread)
                        write_row(s, mem, loaded, token, parity, thread, warp, lane)
                        if nodes:
                            if thread < at.origins:
                                origin_slot[token, thread] = -1
                        if thread < R:
                            token_slot[token, thread] = -1
                            if i == 0 and active[thread] != 0:
                                handshake.await_previous(begun, parity, call, COUNT_BITS, thread, R)
                        T.sync_threads()
                        send_message(s, mem, route, chosen, token, now, thread, warp, lane)
                handshake.end_phase(send_calls, call, blocks, absent, block, thread, threads)

            if phases & RECEIVES != 0:
                source, slot, index, total = int_vars(4)
                if nodes:
                    choice = T.alloc_var("int32")
                handshake.begin_phase(receive_calls, call, parity, block)
                handshake.time_announcements(timed, begun, active, parity, call, COUNT_BITS, waited, block, thread, R)
                read_headers(s, mem, incoming, begin, now, block, thread)
                if nodes:
                    count_forwarded(s, mem, route, source, parity, block, thread)
                    forward_all(s, mem, route, now, source, slot, total, choice, block, warp, lane)
                handshake.sum_of(incoming, total, R)
                for i in T.serial((total + blocks * s.warps - 1) // (blocks * s.warps)):
                    # Consecutive rows go to different blocks.
                    slot = (i * s.warps + warp) * blocks + block
                    if slot < total:
                        handshake.find_source(incoming, source, slot)
                        index = (parity * R + source) * M + slot
                        handshake.time_message(timed, arrived, index, call, waited, source, lane)
                        N.wait_warp(arrived[index], "ge", call)
                        receive_row(s, mem, begin, me, source, slot, index, lane, column_scales)
                        if nodes:
                            note_message(s, mem, route, me, source, slot, index, choice, lane)
                T.sync_threads()
                handshake.end_phase(receive_calls, call, blocks, absent, block, thread, threads)

    return main
