"""The steps of dispatch in latency mode; dispatch_latency.py puts them together and says what the tensors are."""

from dataclasses import dataclass

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.moe.handshake import await_previous
from tilescale_net.kernels.moe.row_ops import batch_of, copy_scales, load_batch, store_batch, store_quantised
from tilescale_net.kernels.moe.wire_layout import BAD_EXPERT, COUNT_BITS, CROWDED, NO_FAULT, Header, Message


@dataclass(frozen=True)
class Sizes:
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
    node_size: int = 0  # ranks of a node, where rows cross the network once per node

    @property
    def nodes(self) -> int:
        return self.ranks // self.node_size if self.node_size else 0

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
    def message(self) -> Message:
        return Message(self.row_words, self.scale_words, self.top_k, self.nodes > 0)

    @property
    def header(self) -> Header:
        return Header(self.local, self.nodes > 0)

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
        """Elements of a row as the caller has it."""
        return self.row_words * 4 if self.quantise else self.row_words

    @property
    def width(self) -> int:
        """Elements of 16 bytes of such a row."""
        return 4 if self.source_type in ("float32", "int32") else 8

    @property
    def units(self) -> int:
        """Pieces of 16 bytes in such a row."""
        return self.source_width // self.width

    @property
    def batch(self) -> int:
        """Pieces of a thread; a block holds a whole row."""
        return -(-self.units // self.threads)

    @property
    def row_batch(self) -> int:
        """Pieces of a lane and batch of a row as it travels."""
        return batch_of(self.row_words // 4, 16)


@tsn.macro
def count_choices(
    s, topk_idx, tokens, fault, fault_value, active, begun, histogram, bad, parity: T.Ref, call: T.Ref, thread
):
    """Count the choices per expert and the tokens per rank, by one block; wait meanwhile until the headers are free.

    Leaves the counts in `histogram` [bins] and the fault of this rank with its value in `bad`.
    """
    R, experts, threads, local = s.ranks, s.experts, s.threads, s.local
    seen = T.alloc_local((s.top_k,), "int32")
    other = T.alloc_var("int32")
    choice = T.alloc_var("int32")
    first = T.alloc_var("int32")
    for i in T.serial((s.bins + threads - 1) // threads):
        if i * threads + thread < s.bins:
            histogram[i * threads + thread] = 0
    if thread == 0:
        bad[0] = fault
        bad[1] = fault_value
    if thread < R:
        if active[thread] != 0:
            await_previous(begun, parity, call, COUNT_BITS, thread, R)
    T.sync_threads()
    for i in T.serial((tokens + threads - 1) // threads):
        other = i * threads + thread
        if other < tokens:
            for k in T.serial(s.top_k):
                choice = -1
                if topk_idx[other, k] < -1 or topk_idx[other, k] >= experts:
                    bad[0] = BAD_EXPERT
                    bad[1] = T.cast(topk_idx[other, k], "int32")
                else:
                    choice = T.cast(topk_idx[other, k], "int32")
                seen[k] = -1
                if choice >= 0:
                    if active[choice // local] != 0:
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
                                if seen[q] >= 0 and seen[q] // s.node_size == seen[k] // s.node_size:
                                    first = 0
                            if first != 0:
                                T.atomic_add(histogram[experts + R + seen[k] // s.node_size], 1)
    T.sync_threads()


@tsn.macro
def send_headers(
    s, header_out, header_in, begun, active, histogram, bad, me: T.Ref, parity: T.Ref, call: T.Ref, thread, warp
):
    """Put a header to every rank, with a signal that carries the number of the call and of the messages to expect."""
    R, M, threads, local, head = s.ranks, s.max_tokens, s.threads, s.local, s.header
    peer = T.alloc_var("int32")
    place = T.alloc_var("int32")
    for i in T.serial((R * head.words + threads - 1) // threads):
        place = (i * threads + thread) % head.words
        peer = (i * threads + thread) // head.words
        if peer < R:
            if place < local:
                header_out[parity * R + peer, place] = T.min(histogram[peer * local + place], M)
            elif place == head.code:
                header_out[parity * R + peer, place] = bad[0]
            elif place == head.value:
                header_out[parity * R + peer, place] = bad[1]
            elif s.nodes:
                if place == head.to_node:
                    header_out[parity * R + peer, place] = histogram[s.experts + R + peer // s.node_size]
    T.sync_threads()
    for i in T.serial((R + s.warps - 1) // s.warps):
        peer = i * s.warps + warp
        if peer < R:
            if active[peer] != 0:
                N.put_signal_warp(
                    header_in[parity * R + me, 0], header_out[parity * R + peer, 0], peer, begun[parity * R + me],
                    (call << T.uint64(COUNT_BITS)) | T.cast(histogram[s.experts + peer], "uint64"), count=head.words,
                )  # fmt: skip


@tsn.macro
def load_token(
    s, x, topk_idx, topk_weights, active, message, mine, same_expert, same_rank, piece, token: T.Ref, parity: T.Ref, thread,
    warp, lane,
):  # fmt: skip
    """Begin to load a token's row, and write its choices and their weights to its message, by a block."""
    K, M, msg = s.top_k, s.max_tokens, s.message
    place = T.alloc_var("int32")
    choice = T.alloc_var("int32")
    load_batch(piece, x, token, warp * 32 * s.batch, lane, s.units, s.width, s.batch)
    for g in T.serial((K + s.threads - 1) // s.threads):
        place = g * s.threads + thread
        if place < K:
            choice = -1
            if topk_idx[token, place] >= 0 and topk_idx[token, place] < s.experts:
                choice = T.cast(topk_idx[token, place], "int32")
                if active[choice // s.local] == 0:
                    choice = -1
            mine[place] = choice
            same_expert[place] = 0
            same_rank[place] = 0
            message[parity * M + token, msg.experts + place] = choice
            message[parity * M + token, msg.weights + place] = T.reinterpret(topk_weights[token, place], "int32")
    if thread == 0:
        message[parity * M + token, msg.token] = token
    T.sync_threads()


@tsn.macro
def find_places(s, topk_idx, active, mine, same_expert, same_rank, same_node, token: T.Ref, thread):
    """Count, for each choice of a token, the earlier choices of its expert and tokens with one at its rank, or in its node."""
    K, local = s.top_k, s.local
    seen = T.alloc_local((K,), "int32")
    found_expert = T.alloc_local((K,), "int32")
    found_rank = T.alloc_local((K,), "int32")
    found_node = T.alloc_local((K if s.nodes else 1,), "int32")
    other = T.alloc_var("int32")
    first = T.alloc_var("int32")
    for k in T.serial(K):
        found_expert[k] = 0
        found_rank[k] = 0
        if s.nodes:
            found_node[k] = 0
    for g in T.serial((token + s.threads - 1) // s.threads):
        other = g * s.threads + thread
        if other < token:
            for q in T.serial(K):
                seen[q] = T.cast(topk_idx[other, q], "int32")
            for k in T.serial(K):
                if mine[k] >= 0:
                    first = 0
                    for q in T.serial(K):
                        if seen[q] >= 0 and seen[q] < s.experts:
                            if seen[q] == mine[k]:
                                found_expert[k] = found_expert[k] + 1
                            if seen[q] // local == mine[k] // local:
                                first = 1
                    found_rank[k] = found_rank[k] + first
            if s.nodes:
                for q in T.serial(K):
                    if seen[q] >= 0 and seen[q] < s.experts:
                        if active[seen[q] // local] == 0:
                            seen[q] = -1
                for k in T.serial(K):
                    if mine[k] >= 0:
                        first = 0
                        for q in T.serial(K):
                            if seen[q] >= 0 and seen[q] // (local * s.node_size) == mine[k] // (local * s.node_size):
                                first = 1
                        found_node[k] = found_node[k] + first
    for k in T.serial(K):
        if found_expert[k] != 0:
            T.atomic_add(same_expert[k], found_expert[k])
        if found_rank[k] != 0:
            T.atomic_add(same_rank[k], found_rank[k])
        if s.nodes:
            if found_node[k] != 0:
                T.atomic_add(same_node[k], found_node[k])


@tsn.macro
def write_row(
    s, x_scales, message, message_fp8, message_scales, piece, token: T.Ref, parity: T.Ref, thread, warp, lane
):
    """Write a token's row, which the block has loaded, to its message; with its scales, quantised where it is asked for."""
    M, units, width, batch = s.max_tokens, s.units, s.width, s.batch
    if s.quantise:
        acc = T.alloc_local((batch * width,), "float32")
        for v in T.unroll(batch * width):
            acc[v] = T.cast(piece[v], "float32")
        store_quantised(
            message_fp8, message_scales, parity * M + token, acc, warp * 32 * batch, lane, units, width, batch, s.row_words
        )  # fmt: skip
    else:
        store_batch(message, parity * M + token, piece, warp * 32 * batch, lane, units, width, batch)
        for g in T.serial((s.scale_words + s.threads - 1) // s.threads):
            if g * s.threads + thread < s.scale_words:
                message[parity * M + token, s.row_words + g * s.threads + thread] = x_scales[
                    token, g * s.threads + thread
                ]


@tsn.macro
def send_message(
    s, message, arrival, arrived, token_slot, mine, same_expert, same_rank, me: T.Ref, token: T.Ref, parity: T.Ref,
    call: T.Ref, thread, warp, lane,
):  # fmt: skip
    """Complete a token's message and put it to every rank that hosts one of its experts, by a warp each."""
    R, K, M, local, msg = s.ranks, s.top_k, s.max_tokens, s.local, s.message
    peer = T.alloc_var("int32")
    place = T.alloc_var("int32")
    first = T.alloc_var("int32")
    for g in T.serial((K + s.threads - 1) // s.threads):
        place = g * s.threads + thread
        if place < K:
            first = 0
            for q in T.serial(place):
                if mine[q] == mine[place]:
                    first = first + 1
            message[parity * M + token, msg.indices + place] = same_expert[place] + first
    T.sync_threads()
    for g in T.serial((K + s.warps - 1) // s.warps):
        place = g * s.warps + warp
        if place < K:
            if mine[place] >= 0:
                first = 1
                for q in T.serial(place):
                    if mine[q] >= 0 and mine[q] // local == mine[place] // local:
                        first = 0
                if first != 0:
                    peer = mine[place] // local
                    if lane == 0:
                        token_slot[token, peer] = same_rank[place]
                    N.put_signal_warp(
                        arrival[(parity * R + me) * M + same_rank[place], 0], message[parity * M + token, 0], peer,
                        arrived[(parity * R + me) * M + same_rank[place]], call, count=msg.words,
                    )  # fmt: skip
    T.sync_threads()


@tsn.macro
def read_headers(
    s, header_in, begun, active, status, incoming, begin, counts, source_counts, received, parity: T.Ref, call: T.Ref, block,
    thread,
):  # fmt: skip
    """Wait for the headers; learn how many messages come from each rank, and where the rows of each expert begin."""
    R, M, threads, local, head = s.ranks, s.max_tokens, s.threads, s.local, s.header
    value = T.alloc_var("uint64")
    place = T.alloc_var("int32")
    total = T.alloc_var("int32")
    if thread < R:
        incoming[thread] = 0
        if active[thread] != 0:
            value = N.wait(begun[parity * R + thread], "ge", call << T.uint64(COUNT_BITS))
            incoming[thread] = T.min(T.cast(value & T.uint64((1 << COUNT_BITS) - 1), "int32"), M)
            if block == 0 and header_in[parity * R + thread, head.code] != NO_FAULT:
                status[1] = T.cast(thread, "int64")
                status[2] = T.cast(header_in[parity * R + thread, head.value], "int64")
                N.st(status[0], T.cast(header_in[parity * R + thread, head.code], "int64"), sem="release")
    T.sync_threads()
    for i in T.serial((local + threads - 1) // threads):
        place = i * threads + thread
        if place < local:
            total = 0
            for r in T.serial(R):
                begin[place, r] = total
                if active[r] != 0:
                    total = total + header_in[parity * R + r, place]
                if block == 0:
                    source_counts[place, r] = total - begin[place, r]
            if block == 0:
                counts[place] = total
    if block == 0 and thread < R:
        received[thread] = incoming[thread]
    T.sync_threads()


@tsn.macro
def receive_row(
    s, arrival, out, out_scales, targets, weights, source_token, begin, me: T.Ref, source: T.Ref, slot: T.Ref,
    place: T.Ref, lane, by_column,
):  # fmt: skip
    """Copy the row of a message to the rows of its experts on this rank, by a warp; note them for combine."""
    K, M, local, msg, batch, words = s.top_k, s.max_tokens, s.local, s.message, s.row_batch, s.row_words
    row_batches = -(-words // 4 // (32 * batch))
    row_piece = T.alloc_local((batch * 4,), "int32")
    choice = T.alloc_var("int32")
    target = T.alloc_var("int32")
    index = T.alloc_var("int32")
    load_batch(row_piece, arrival, place, 0, lane, words // 4, 4, batch)
    for g in T.serial((K + 31) // 32):
        target = -1
        if g * 32 + lane < K:
            choice = arrival[place, msg.experts + g * 32 + lane]
            if choice >= me * local and choice < (me + 1) * local:
                index = arrival[place, msg.indices + g * 32 + lane]
                # Choices that the header does not count: the source has reported them.
                if index >= 0 and index < M:
                    target = begin[choice - me * local, source] + index
                    source_token[choice - me * local, target] = arrival[place, msg.token]
                    target = target + (choice - me * local) * s.capacity
            targets[source * M + slot, g * 32 + lane] = target
            weights[source * M + slot, g * 32 + lane] = T.reinterpret(
                arrival[place, msg.weights + g * 32 + lane], "float32"
            )
        for b in T.serial(row_batches):
            # The first batch is there already, unless later ones were loaded since.
            if b > 0 or (g > 0 and row_batches > 1):
                load_batch(row_piece, arrival, place, b * 32 * batch, lane, words // 4, 4, batch)
            for k in T.serial(min(K, 32)):
                landing = T.shfl_sync(target, k)
                if landing >= 0:
                    store_batch(out, landing, row_piece, b * 32 * batch, lane, words // 4, 4, batch)
        if s.scale_words:
            for k in T.serial(min(K, 32)):
                landing = T.shfl_sync(target, k)
                if landing >= 0:
                    copy_scales(out_scales, landing, arrival, place, s.scale_words, lane, words, s.capacity, by_column)
