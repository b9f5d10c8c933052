"""The steps of combine in latency mode, and the groups of tensors that they take; combine_latency.py puts them together."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.announcement import TAG_BITS, announce
from tilescale_net.kernels.moe.handshake import await_previous, sum_of, wait_timed
from tilescale_net.kernels.moe.row_ops import (
    Result,
    Rows,
    SumSizes,
    add_dequantised,
    add_rows,
    add_scaled,
    batch_of,
    clear,
    load_batch,
    store_quantised,
    store_rounded,
)


def parts_of(hidden: int, width: int, wanted: int) -> tuple[int, int]:
    """Parts of a row and 16-byte pieces per part; a part is whole warps of pieces, so that no scale is shared."""
    units = hidden // width
    size = (units + wanted * 32 - 1) // (wanted * 32) * 32
    return -(-units // size), size


@dataclass(frozen=True)
class Sizes(SumSizes):
    """Compile-time sizes and choices; see combine_latency."""

    weighted: bool
    quantised: bool
    wanted_parts: int
    biases: int
    send_limit: int = 14  # pieces of each row per lane that a sending warp reads at once, at most
    timed: bool = False

    @property
    def parts(self) -> int:
        return parts_of(self.hidden, self.width, self.wanted_parts)[0]

    @property
    def size(self) -> int:
        """Pieces of a part."""
        return parts_of(self.hidden, self.width, self.wanted_parts)[1]

    # Rows that a warp reads at once, and pieces of each per lane.
    @property
    def send_group(self) -> int:
        return min(self.top_k, 2)

    def gathered_group(self, node_size: int) -> int:
        """The same of what the ranks of a node have for a token of another."""
        return min(node_size, self.top_k, 4)

    @property
    def unquantised(self):
        return replace(self, quantised=False)

    @property
    def send_batch(self) -> int:
        return batch_of(self.size, self.send_limit)

    @property
    def sum_batch(self) -> int:
        return batch_of(self.size, 7)


class Own(NamedTuple):
    """What this rank's experts have made.

    Attributes:
        y: [local experts * ranks * max_tokens, hidden] of the dtype of the result.
        targets: int32, weights: float32, [ranks * max_tokens, top_k]: which rows of `y` a row that came is summed of.
    """

    y: Any
    targets: Any
    weights: Any


class Memory(NamedTuple):
    """The tensors of a combine. Of each two sets of rows and signals, calls use one and the other.

    Attributes:
        own: what this rank sends. result: what the caller gets.
        received: int32 [ranks], rows that came from each rank. active: int32 [ranks], 0 for a rank that is left out.
        begun: uint64 [2 * ranks], symmetric: the last call that each rank has begun.
        slots: symmetric, [2 * ranks or origins * max_tokens, …], of the dtype of the result or of FP8.
        arrived: uint64 [2 * ranks or origins * max_tokens, parts], symmetric: the last call of which a part is in `slots`.
        token_slot: int32 [rows, ranks or origins], the slot of a token's row, or -1.
        staged: symmetric, rows to other nodes, as `slots`.
        waited: uint64 [ranks], clocks of waiting for each rank, where that is timed.
        gathered: [2 * slots of a gateway * max_tokens * ranks of a node, hidden] of the dtype of the result, symmetric, where
            rows cross the network once per node: what ranks of this node have for tokens of others.
        summed: uint64 [as many, parts], symmetric: as `arrived`, of `gathered`.
    """

    own: Own
    result: Result
    received: Any
    active: Any
    begun: Any
    slots: Rows
    arrived: Any
    token_slot: Any
    staged: Rows
    waited: Any
    gathered: Any = None
    summed: Any = None


class Part(NamedTuple):
    """The part of a token's row that a warp sums; int32 variables of the kernel, which steps read where they stand.

    Attributes:
        token: whose row it is. part: its number.
    """

    token: Any
    part: Any


@tsn.macro
def begin_sending(mem, incoming, total: T.Ref, now, block, thread, ranks):
    """Announce the call and wait until the buffers of all ranks are free; incoming = how many rows there are for each rank,
    total = for all."""
    if thread < ranks:
        incoming[thread] = mem.received[thread]
        if mem.active[thread] != 0:
            await_previous(mem.begun, now.parity, now.call, TAG_BITS, thread, ranks)
            if block == 0:
                announce(mem.begun, now.parity * ranks + now.me, now.call, 0, thread)
    T.sync_threads()
    sum_of(incoming, total, ranks)


@tsn.macro
def send_part(s, dst, dst_row, own, src, begin, end, lane):
    """Sum a part of a row over this rank's experts into a row of `dst`."""
    K, width, batch, group = s.top_k, s.width, s.send_batch, s.send_group
    piece = T.alloc_local((group * batch * width,), s.dtype)
    acc = T.alloc_local((batch * width,), "float32")
    from_row = T.alloc_local((group,), "int32")
    weight = T.alloc_local((group,), "float32")
    first = T.alloc_var("int32")
    k = T.alloc_var("int32")
    for b in T.serial(-(-s.size // (32 * batch))):
        first = begin + b * 32 * batch
        clear(acc, batch * width)
        k = 0
        while k < K:
            for g in T.unroll(group):
                from_row[g] = -1
                weight[g] = 1.0
                while k < K and from_row[g] < 0:
                    from_row[g] = own.targets[src, k]
                    if s.weighted:
                        weight[g] = own.weights[src, k]
                    k = k + 1
            add_rows(acc, piece, from_row, weight, own.y, first, lane, end, width, batch, group)
        if s.quantised:
            store_quantised(dst.rows, dst.scales, dst_row, acc, first, lane, end, width, batch)
        else:
            store_rounded(dst.rows, dst_row, acc, first, lane, end, width, batch, s.dtype)


@tsn.macro
def put_part(s, mem, there, slot: T.Ref, part: T.Ref, end: T.Ref, call: T.Ref, peer: T.Ref, lane):
    """Put a part of row `there` of staging memory to row `slot` of a rank of another node, with its signal."""
    size, width = s.size, s.width
    if s.quantised:
        N.put_warp(
            mem.slots.scales[slot, part * size * width // 128], mem.staged.scales[there, part * size * width // 128],
            peer, count=(end * width + 127) // 128 - part * size * width // 128,
        )  # fmt: skip
        N.put_warp(
            mem.slots.rows[slot, part * size * width],
            mem.staged.rows[there, part * size * width],
            peer,
            count=(end - part * size) * width,
        )
        N.signal_warp(mem.arrived[slot, part], call, peer)
    else:
        N.put_signal_warp(
            mem.slots.rows[slot, part * size * width], mem.staged.rows[there, part * size * width], peer,
            mem.arrived[slot, part], call, count=(end - part * size) * width,
        )  # fmt: skip


@tsn.macro
def send_proxied(s, mem, source: T.Ref, there, slot: T.Ref, part: T.Ref, end: T.Ref, call: T.Ref, peer: T.Ref, lane):
    """Sum a part for a rank of another node into staging memory, and put it from there."""
    send_part(s, mem.staged, there, mem.own, source, part * s.size, end, lane)
    T.sync_warp()
    put_part(s, mem, there, slot, part, end, call, peer, lane)


@tsn.macro
def _add_bias(s, acc, bias, token: T.Ref, first, end, lane):
    """Add a part of a row of the caller's to a batch of sums."""
    own = T.alloc_local((s.sum_batch * s.width,), s.dtype)
    load_batch(own, bias, token, first, lane, end, s.width, s.sum_batch)
    add_scaled(acc, own, T.float32(1), s.sum_batch * s.width)


@tsn.macro
def sum_part(s, mem, work, now, rank_of, of, end: T.Ref, first: T.Ref, peer: T.Ref, slot: T.Ref, lane):
    """Wait for a part of a token's rows and sum them in the order of ranks.

    Args:
        rank_of: which rank sends what a place in that order stands for. of: the Part.
    """
    R, M, width, batch, group = s.ranks, s.max_tokens, s.width, s.sum_batch, s.sum_group
    end = T.min(s.units, (of.part + 1) * s.size)
    for g in T.serial((R + 31) // 32):
        peer = g * 32 + lane
        if peer < R:
            slot = mem.token_slot[of.token, peer]
            if slot >= 0:
                if s.timed:
                    wait_timed(
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
                            work.piece, mem.slots.rows, work.from_row[g], first, lane, end, width, batch, g * batch * width
                        )  # fmt: skip
            for g in T.unroll(group):
                if work.from_row[g] >= 0:
                    if s.quantised:
                        add_dequantised(
                            work.acc, work.piece, mem.slots.scales, work.from_row[g], first, lane, end, width, batch,
                            g * batch * width,
                        )  # fmt: skip
                    else:
                        add_scaled(work.acc, work.piece, T.float32(1), batch * width, g * batch * width)
        if s.biases > 0:
            _add_bias(s, work.acc, mem.result.bias_0, of.token, first, end, lane)
        if s.biases > 1:
            _add_bias(s, work.acc, mem.result.bias_1, of.token, first, end, lane)
        store_rounded(mem.result.out, of.token, work.acc, first, lane, end, width, batch, s.dtype)
