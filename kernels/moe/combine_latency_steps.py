"""The steps of combine in latency mode; combine_latency.py puts them together and says what the tensors are."""

from dataclasses import dataclass, replace

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.announcement import TAG_BITS, announce
from tilescale_net.kernels.moe.handshake import await_previous, sum_of, wait_timed
from tilescale_net.kernels.moe.row_ops import (
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


@tsn.macro
def begin_sending(
    received, active, begun, incoming, total: T.Ref, me: T.Ref, call: T.Ref, parity: T.Ref, block, thread, ranks
):
    """Announce the call and wait until the buffers of all ranks are free; incoming = how many rows there are for each rank,
    total = for all."""
    if thread < ranks:
        incoming[thread] = received[thread]
        if active[thread] != 0:
            await_previous(begun, parity, call, TAG_BITS, thread, ranks)
            if block == 0:
                announce(begun, parity * ranks + me, call, 0, thread)
    T.sync_threads()
    sum_of(incoming, total, ranks)


@tsn.macro
def send_part(s, dst, dst_scales, dst_row, y, targets, weights, src, begin, end, lane):
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
                    from_row[g] = targets[src, k]
                    if s.weighted:
                        weight[g] = weights[src, k]
                    k = k + 1
            add_rows(acc, piece, from_row, weight, y, first, lane, end, width, batch, group)
        if s.quantised:
            store_quantised(dst, dst_scales, dst_row, acc, first, lane, end, width, batch)
        else:
            store_rounded(dst, dst_row, acc, first, lane, end, width, batch, s.dtype)


@tsn.macro
def signal_part(arrived, slot: T.Ref, part: T.Ref, call: T.Ref, pe: T.Ref, lane):
    """Tell `pe` that a part, put by this warp, is there."""
    T.sync_warp()
    if lane == 0:
        N.fence(pe)
        N.signal(arrived[slot, part], call, pe)


@tsn.macro
def put_part(
    s, slots, slot_scales, staged, staged_scales, arrived, there, slot: T.Ref, part: T.Ref, end: T.Ref, call: T.Ref,
    peer: T.Ref, lane,
):  # fmt: skip
    """Put a part of row `there` of staging memory to row `slot` of a rank of another node, with its signal."""
    size, width = s.size, s.width
    if s.quantised:
        N.put_warp(
            slot_scales[slot, part * size * width // 128], staged_scales[there, part * size * width // 128], peer,
            count=(end * width + 127) // 128 - part * size * width // 128,
        )  # fmt: skip
        N.put_warp(
            slots[slot, part * size * width],
            staged[there, part * size * width],
            peer,
            count=(end - part * size) * width,
        )
        signal_part(arrived, slot, part, call, peer, lane)
    else:
        N.put_signal_warp(
            slots[slot, part * size * width], staged[there, part * size * width], peer, arrived[slot, part], call,
            count=(end - part * size) * width,
        )  # fmt: skip


@tsn.macro
def send_proxied(
    s, y, targets, weights, slots, slot_scales, staged, staged_scales, arrived, source: T.Ref, there, slot: T.Ref,
    part: T.Ref, end: T.Ref, call: T.Ref, peer: T.Ref, lane,
):  # fmt: skip
    """Sum a part for a rank of another node into staging memory, and put it from there."""
    send_part(s, staged, staged_scales, there, y, targets, weights, source, part * s.size, end, lane)
    T.sync_warp()
    put_part(s, slots, slot_scales, staged, staged_scales, arrived, there, slot, part, end, call, peer, lane)


@tsn.macro
def _add_bias(s, acc, bias, token: T.Ref, first, end, lane):
    """Add a part of a row of the caller's to a batch of sums."""
    own = T.alloc_local((s.sum_batch * s.width,), s.dtype)
    load_batch(own, bias, token, first, lane, end, s.width, s.sum_batch)
    add_scaled(acc, own, T.float32(1), s.sum_batch * s.width)


@tsn.macro
def sum_part(
    s, out, bias_0, bias_1, slots, slot_scales, token_slot, arrived, waited, rank_of, piece, acc, from_row, token: T.Ref,
    part: T.Ref, end: T.Ref, first: T.Ref, peer: T.Ref, slot: T.Ref, call: T.Ref, parity: T.Ref, lane,
):  # fmt: skip
    """Wait for a part of a token's rows and sum them in the order of ranks.

    Args:
        rank_of: which rank sends what a place in that order stands for.
    """
    R, M, width, batch, group = s.ranks, s.max_tokens, s.width, s.sum_batch, s.sum_group
    end = T.min(s.units, (part + 1) * s.size)
    for g in T.serial((R + 31) // 32):
        peer = g * 32 + lane
        if peer < R:
            slot = token_slot[token, peer]
            if slot >= 0:
                if s.timed:
                    wait_timed(lambda: arrived[(parity * R + peer) * M + slot, part], call, waited, rank_of(peer))
                N.wait(arrived[(parity * R + peer) * M + slot, part], "ge", call)
    T.sync_warp()
    for b in T.serial(-(-s.size // (32 * batch))):
        first = part * s.size + b * 32 * batch
        clear(acc, batch * width)
        for p in T.serial((R + group - 1) // group):
            for g in T.unroll(group):
                from_row[g] = -1
                if p * group + g < R:
                    slot = token_slot[token, p * group + g]
                    if slot >= 0:
                        from_row[g] = (parity * R + p * group + g) * M + slot
                        load_batch(piece, slots, from_row[g], first, lane, end, width, batch, g * batch * width)
            for g in T.unroll(group):
                if from_row[g] >= 0:
                    if s.quantised:
                        add_dequantised(
                            acc, piece, slot_scales, from_row[g], first, lane, end, width, batch, g * batch * width
                        )
                    else:
                        add_scaled(acc, piece, T.float32(1), batch * width, g * batch * width)
        if s.biases > 0:
            _add_bias(s, acc, bias_0, token, first, end, lane)
        if s.biases > 1:
            _add_bias(s, acc, bias_1, token, first, end, lane)
        store_rounded(out, token, acc, first, lane, end, width, batch, s.dtype)
