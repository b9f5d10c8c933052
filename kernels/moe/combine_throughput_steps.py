"""The steps of combine in throughput mode; combine_throughput.py puts them together and says what the tensors are."""

from dataclasses import dataclass

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.moe.handshake import take_ticket
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

NONE, OWN = -1, -2  # of a rank's row for a token


@dataclass(frozen=True)
class Sizes(SumSizes):
    """Compile-time sizes and choices; see combine_throughput."""

    by_rank: bool
    weighted: str
    quantised: bool
    valued: str
    biases: int
    proxied: bool
    chunk: int
    proxied_chunk: int

    @property
    def unchanged(self) -> bool:
        """Whether rows travel as they are."""
        return self.by_rank and not self.quantised and self.valued == ""

    # Rows that a warp reads at once, and pieces of each per lane; what is in flight hides the latency of memory.
    @property
    def send_group(self) -> int:
        return 1 if self.by_rank else min(self.top_k, 4)

    @property
    def send_batch(self) -> int:
        return self._scaled(batch_of(self.units, 7)) if self.by_rank else batch_of(self.units, 4)

    @property
    def sum_batch(self) -> int:
        return self._scaled(batch_of(self.units, 16 // self.sum_group))

    def _scaled(self, batch: int) -> int:
        """More pieces where they hold fewer elements."""
        return min(batch * (1 if self.width == 8 else 2), -(-self.units // 32))


@tsn.macro
def send_own_row(s, dst, dst_scales, dst_row, y, row, lane):
    """Convert a row of `y` into a row of `dst`; the next pieces are on their way while those before are converted."""
    width, batch, units = s.width, s.send_batch, s.units
    batches = -(-units // (32 * batch))
    piece = T.alloc_local((batch * width,), s.dtype)
    acc = T.alloc_local((batch * width,), "float32")
    load_batch(piece, y, row, 0, lane, units, width, batch)
    for b in T.serial(batches):
        for i in T.unroll(batch * width):
            acc[i] = T.cast(piece[i], "float32")
        if b + 1 < batches:
            load_batch(piece, y, row, (b + 1) * 32 * batch, lane, units, width, batch)
        if s.quantised:
            store_quantised(dst, dst_scales, dst_row, acc, b * 32 * batch, lane, units, width, batch)
        else:
            store_rounded(dst, dst_row, acc, b * 32 * batch, lane, units, width, batch, s.dtype)


@tsn.macro
def send_summed_row(s, dst, dst_scales, dst_row, y, row_weight, records, source, j, lane):
    """Sum row j of `source` over this rank's experts into a row of `dst`."""
    K, width, batch, group = s.top_k, s.width, s.send_batch, s.send_group
    piece = T.alloc_local((group * batch * width,), s.dtype)
    acc = T.alloc_local((batch * width,), "float32")
    from_row = T.alloc_local((group,), "int32")
    weight = T.alloc_local((group,), "float32")
    k = T.alloc_var("int32")
    for b in T.serial(-(-s.units // (32 * batch))):
        clear(acc, batch * width)
        k = 0
        while k < K:
            for g in T.unroll(group):
                from_row[g] = -1
                weight[g] = 1.0
                while k < K and from_row[g] < 0:
                    from_row[g] = records[source, j, k]
                    if s.weighted == "choices":
                        weight[g] = T.reinterpret(records[source, j, K + k], "float32")
                    k = k + 1
                if s.weighted == "rows":
                    if from_row[g] >= 0:
                        weight[g] = row_weight[from_row[g]]
            add_rows(acc, piece, from_row, weight, y, b * 32 * batch, lane, s.units, width, batch, group)
        if s.quantised:
            store_quantised(dst, dst_scales, dst_row, acc, b * 32 * batch, lane, s.units, width, batch)
        else:
            store_rounded(dst, dst_row, acc, b * 32 * batch, lane, s.units, width, batch, s.dtype)


@tsn.macro
def send_row(s, dst, dst_scales, dst_values, dst_row, y, row_weight, row_values, records, source, j, base, lane):
    """Bring row j of `source`, summed over this rank's experts, and what goes with it to a row of `dst`."""
    K, target = s.top_k, T.alloc_var("int32")
    if s.by_rank:
        send_own_row(s, dst, dst_scales, dst_row, y, base + j, lane)
    else:
        send_summed_row(s, dst, dst_scales, dst_row, y, row_weight, records, source, j, lane)
    if s.valued == "choices":
        for i in T.serial((K + 31) // 32):
            if i * 32 + lane < K:
                dst_values[dst_row, i * 32 + lane] = row_values[(base + j) * K + i * 32 + lane]
    elif s.valued == "rows":
        for i in T.serial((K + 31) // 32):
            if i * 32 + lane < K:
                target = records[source, j, i * 32 + lane]
                if target >= 0:
                    dst_values[dst_row, i * 32 + lane] = row_values[target]
                else:
                    dst_values[dst_row, i * 32 + lane] = T.float32(0)


@tsn.macro
def send_direct(
    s, y, row_weight, row_values, slots, slot_scales, slot_values, records, base, there, peer: T.Ref, c: T.Ref, n: T.Ref,
    slot: T.Ref, size: T.Ref, lane,
):  # fmt: skip
    """Sum the `n` rows of chunk `c` for a mapped rank, straight into its slots."""
    slot = there[peer] + c * size
    if s.unchanged:
        N.put_warp(slots[slot, 0], y[base[peer] + c * size, 0], peer, count=n * s.hidden)
    else:
        # A tuple, because tilelang renames a parameter that is given another name.
        at_peer = (
            N.remote(slots, peer),
            N.remote(slot_scales, peer) if s.quantised else slot_scales,
            N.remote(slot_values, peer) if s.valued != "" else slot_values,
        )
        for q in T.serial(n):
            send_row(
                s, at_peer[0], at_peer[1], at_peer[2], slot + q, y, row_weight, row_values, records, peer, c * size + q,
                base[peer], lane,
            )  # fmt: skip


@tsn.macro
def send_proxied(
    s, y, row_weight, row_values, slots, slot_scales, slot_values, staged, staged_scales, staged_values, records, base, there,
    peer: T.Ref, c: T.Ref, n: T.Ref, slot: T.Ref, size: T.Ref, lane,
):  # fmt: skip
    """Sum the `n` rows of chunk `c` for a rank of another node into staging memory, and put them from there."""
    slot = base[peer] + c * size
    for q in T.serial(n):
        send_row(
            s, staged, staged_scales, staged_values, slot + q, y, row_weight, row_values, records, peer, c * size + q,
            base[peer], lane,
        )  # fmt: skip
    T.sync_warp()
    first = there[peer] + c * size
    N.put_warp(slots[first, 0], staged[slot, 0], peer, count=n * s.hidden)
    if s.quantised:
        N.put_warp(slot_scales[first, 0], staged_scales[slot, 0], peer, count=n * s.groups)
    if s.valued != "":
        N.put_warp(slot_values[first, 0], staged_values[slot, 0], peer, count=n * s.top_k)


@tsn.macro
def send_finished(
    s, y, row_weight, records, base, there, received, slots, slot_scales, arrived, tickets, chunks, parity: T.Ref, me: T.Ref,
    call: T.Ref, ahead: T.Ref, ticket: T.Ref, peer: T.Ref, c: T.Ref, n: T.Ref, slot: T.Ref, lane,
):  # fmt: skip
    """Send chunks that no block of a combine with tiles has taken, when the product has ended. By a warp, on one node."""
    take_ticket(tickets, parity, 0, ahead, lane)
    ticket = T.shfl_sync(ahead, 0)
    while ticket < s.ranks * chunks:
        take_ticket(tickets, parity, 0, ahead, lane)
        c = ticket // s.ranks
        peer = (ticket % s.ranks + me) % s.ranks
        if c * s.chunk < received[peer]:
            c = (received[peer] - 1) // s.chunk - c
            n = T.min(s.chunk, received[peer] - c * s.chunk)
            slot = there[peer] + c * s.chunk
            at_peer = N.remote(slots, peer), N.remote(slot_scales, peer) if s.quantised else slot_scales
            for q in T.serial(n):
                send_row(
                    s, at_peer[0], at_peer[1], at_peer[1], slot + q, y, row_weight, row_weight, records, peer,
                    c * s.chunk + q, base[peer], lane,
                )  # fmt: skip
            T.sync_warp()
            if lane == 0:
                N.fence(peer)
                N.signal(arrived[me, c], call, peer)
        ticket = T.shfl_sync(ahead, 0)


@tsn.macro
def add_bias(s, acc, bias, token: T.Ref, first, lane):
    """Add a row of the caller's to a batch of sums."""
    piece = T.alloc_local((s.sum_batch * s.width,), s.dtype)
    load_batch(piece, bias, token, first, lane, s.units, s.width, s.sum_batch)
    add_scaled(acc, piece, T.float32(1), s.sum_batch * s.width)


@tsn.macro
def sum_rows(
    s, out, y, bias_0, bias_1, slots, slot_scales, slot_of, from_row, piece, acc, token: T.Ref, peer: T.Ref, lane
):
    """Sum the rows of a token in the order of ranks."""
    R, units, width, batch, group = s.ranks, s.units, s.width, s.sum_batch, s.sum_group
    for b in T.serial(-(-units // (32 * batch))):
        first = b * 32 * batch
        clear(acc, batch * width)
        for p in T.serial((R + group - 1) // group):
            for g in T.unroll(group):
                peer = p * group + g
                from_row[g] = NONE
                if peer < R:
                    from_row[g] = T.shfl_sync(slot_of[peer // 32], peer % 32)
                if from_row[g] != NONE:
                    if s.unchanged and from_row[g] <= OWN:
                        load_batch(piece, y, OWN - from_row[g], first, lane, units, width, batch, g * batch * width)
                    else:
                        load_batch(piece, slots, from_row[g], first, lane, units, width, batch, g * batch * width)
            for g in T.unroll(group):
                if from_row[g] != NONE:
                    if s.quantised:
                        add_dequantised(
                            acc, piece, slot_scales, from_row[g], first, lane, units, width, batch, g * batch * width
                        )
                    else:
                        add_scaled(acc, piece, T.float32(1), batch * width, g * batch * width)
        if s.biases > 0:
            add_bias(s, acc, bias_0, token, first, lane)
        if s.biases > 1:
            add_bias(s, acc, bias_1, token, first, lane)
        store_rounded(out, token, acc, first, lane, units, width, batch, s.dtype)


@tsn.macro
def sum_values(s, out_values, slot_values, token_slot, before, token: T.Ref, slot: T.Ref, total: T.Ref, lane):
    """Add up the numbers of a token's choices over the ranks."""
    for g in T.serial((s.top_k + 31) // 32):
        if g * 32 + lane < s.top_k:
            total = T.float32(0)
            for p in T.serial(s.ranks):
                slot = token_slot[token, p]
                if slot >= 0:
                    total = total + slot_values[before[p] + slot, g * 32 + lane]
            out_values[token, g * 32 + lane] = total
