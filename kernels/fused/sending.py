"""Steps of the blocks that send while the others multiply: which piece is next, and where it goes.

A product announces each row of tiles when all of its tiles are in memory. Pieces of such rows are taken one at a time, in
the order in which they are computed, by the blocks that are free: those beside the product, and in an all-reduce all blocks of
the GPU when the product is done.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N

from .product import WARPS


@dataclass(frozen=True)
class Sent:
    """What a rank sends in a call, known when its kernel is compiled.

    Attributes:
        n_pes, rows, n: rows that each PE owns, and columns.
        height: rows of a row of tiles. across: tiles of one.
        slices: rows are computed slice by slice: in each, the parts of the other PEs, then the own one.
        pieces: in which a row of tiles is sent.
        shares: the own sums, too, go to all other PEs.
    """

    n_pes: int
    rows: int
    n: int
    height: int
    across: int
    slices: int
    pieces: int
    shares: bool

    @property
    def tiles(self) -> int:
        """Rows of tiles of a PE's rows."""
        return -(-self.rows // self.height)

    @property
    def slice_tiles(self) -> int:
        return self.tiles // self.slices

    @property
    def piece(self) -> int:
        """Rows of a piece."""
        return self.height // self.pieces

    @property
    def of_slice(self) -> int:
        """Pieces of a slice for their owners; as many of its sums."""
        return (self.n_pes - 1) * self.slice_tiles * self.pieces

    @property
    def items(self) -> int:
        return self.slices * self.of_slice * (1 + self.shares)

    @property
    def adds(self) -> int:
        """By which a counter of `done` grows in a call."""
        return self.across * WARPS


class Memory(NamedTuple):
    """What is sent, where to, and which pieces are.

    Attributes:
        partial: [n_pes, rows, n], the parts of the product for the other PEs.
        summands: [2, n_pes, rows, n], symmetric, of the same dtype: where they go, in halves by the parity of the call.
        part, sums: [1, rows, n] and [2, n_pes, rows, n], symmetric: the same of the own sums, where they are shared.
        done: uint64 [n_pes, tiles]: how often warps have announced a row of tiles: of the part of the PE h places behind this
            one in line h - 1, of the own in the last.
        arrived, shared: uint64 [n_pes, tiles], symmetric: pieces that have come from each PE.
        sent: int32 [2], by the parity of the call: pieces that are taken.
    """

    partial: Any
    summands: Any
    part: Any
    sums: Any
    done: Any
    arrived: Any
    shared: Any
    sent: Any


@tsn.macro
def begin_call(ready, sent, call, me, n_pes, block, thread):
    """Signal to all PEs that this one has begun the call, and wait until they have begun the one before.

    By all blocks that send. The half of a buffer that this call writes was last read two calls ago: a PE that has begun the
    last call is done with it. Tickets of the next call begin at 0.
    """
    if thread < n_pes and thread != me:
        if block == 0:
            N.signal(ready[me], T.cast(call, "uint64"), thread)
        N.wait(ready[thread], "ge", call - 1)
    if block == 0 and thread == 0:
        sent[1 - call % 2] = 0
    T.sync_threads()


@tsn.macro
def announce(done, line, tiles, thread):
    """Count that a warp's part of a tile, of which it has begun the stores, is in memory. By the warps that multiply.

    The thread that has begun them waits for their end, and its warp signals it; all others are counted like it.
    """
    T.tma_store_wait(0, read=False)
    T.sync_warp()
    if thread % 32 == 0:
        N.signal(done[line, tiles], 1, N.my_pe(), op="add", fence=True)


def count_of(s: Sent, row):
    """Elements of the piece that begins at `row`; none where that is behind the last row."""
    return T.cast(T.max(T.min(s.piece, s.rows - row), 0), "int64") * s.n


@tsn.macro
def _send(s, wait, put_signal, engine, item, mem, call, me):
    """Send piece `item` when it is there, by the scope of `wait` and `put_signal`; arguments as in `send_all`."""
    kind = item % (s.of_slice * (1 + s.shares)) // s.of_slice
    inside = item % s.of_slice
    first = item // (s.of_slice * (1 + s.shares)) * s.slice_tiles
    if kind == 0:
        hop = inside // (s.slice_tiles * s.pieces)
        c = first + inside // s.pieces % s.slice_tiles
        row = c * s.height + inside % s.pieces * s.piece
        pe = (me + 1 + hop) % s.n_pes
        wait(mem.done[hop, c], "ge", call * s.adds)
        put_signal(
            mem.summands[call % 2, me, T.min(row, s.rows - 1), 0], mem.partial[pe, T.min(row, s.rows - 1), 0], pe,
            mem.arrived[me, c], 1, op="add", count=count_of(s, row), engine=engine,
        )  # fmt: skip
    elif s.shares:
        hop = inside % (s.n_pes - 1)
        c = first + inside // (s.n_pes - 1) // s.pieces
        row = c * s.height + inside // (s.n_pes - 1) % s.pieces * s.piece
        wait(mem.done[s.n_pes - 1, c], "ge", call * s.adds)
        put_signal(
            mem.sums[call % 2, me, T.min(row, s.rows - 1), 0], mem.part[0, T.min(row, s.rows - 1), 0], (me + 1 + hop) % s.n_pes,
            mem.shared[me, c], 1, op="add", count=count_of(s, row), engine=engine,
        )  # fmt: skip


@tsn.macro
def send_all(s, engine, given, item, mem, call, me, thread):
    """Take pieces that no other block has taken, one by one, and put each when it is there. By all threads of a block.

    Args:
        given: int32 [1] of shared memory. item: int32 [1] of a thread.
    """
    item[0] = 0
    while item[0] < s.items:
        T.sync_threads()
        if thread == 0:
            given[0] = T.atomic_add(mem.sent[call % 2], 1, return_prev=True)
        T.sync_threads()
        item[0] = given[0]
        if item[0] < s.items:
            _send(s, N.wait_block, N.put_signal_block, engine, item[0], mem, call, me)


@tsn.macro
def send_all_by_warps(s, item, mem, call, me, thread):
    """As `send_all`, each warp a piece of its own, by loads and stores.

    For few blocks: from a piece's last store to the next one's first, its signal and the look for the next take about as long
    as the copy of 512 KiB by a block; other warps copy meanwhile. A single piece takes longer.
    """
    item[0] = 0
    while item[0] < s.items:
        if thread % 32 == 0:
            item[0] = T.atomic_add(mem.sent[call % 2], 1, return_prev=True)
        item[0] = T.shfl_sync(item[0], 0)
        if item[0] < s.items:
            _send(s, N.wait_warp, N.put_signal_warp, "ldst", item[0], mem, call, me)
    T.sync_threads()
