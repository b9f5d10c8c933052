"""Steps of the blocks that send while the others multiply: which piece is next, and where it goes.

A product announces each row of tiles when all of its tiles are in memory. Pieces of such rows are taken one at a time, in
the order in which they are computed, by whoever is free: the blocks beside the product, and in an all-reduce all blocks of
the GPU when the product is done.
"""

from dataclasses import dataclass

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.fused.product import WARPS


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


@tsn.macro
def begin_call(ready, sent, call, me, n_pes, block, thread):
    """Tell all PEs that this one has begun the call, and wait until they have begun the one before.

    By all blocks that send. The half of a buffer that this call writes was last read two calls ago: whoever has begun the
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

    The thread that has begun them waits for their end, and its warp says so; all others are counted like it.
    """
    T.tma_store_wait(0, read=False)
    T.sync_warp()
    if thread % 32 == 0:
        N.signal(done[line, tiles], 1, N.my_pe(), op="add", fence=True)


def count_of(s: Sent, row):
    """Elements of the piece that begins at `row`; none where that is behind the last row."""
    return T.cast(T.max(T.min(s.piece, s.rows - row), 0), "int64") * s.n


@tsn.macro
def _send(s, wait, put_signal, engine, item, partial, summands, part, sums, done, arrived, shared, call, me):
    """Send piece `item` when it is there, by the scope of `wait` and `put_signal`; other arguments as in `send_all`."""
    kind = item % (s.of_slice * (1 + s.shares)) // s.of_slice
    inside = item % s.of_slice
    first = item // (s.of_slice * (1 + s.shares)) * s.slice_tiles
    if kind == 0:
        hop = inside // (s.slice_tiles * s.pieces)
        c = first + inside // s.pieces % s.slice_tiles
        row = c * s.height + inside % s.pieces * s.piece
        pe = (me + 1 + hop) % s.n_pes
        wait(done[hop, c], "ge", call * s.adds)
        put_signal(
            summands[call % 2, me, T.min(row, s.rows - 1), 0], partial[pe, T.min(row, s.rows - 1), 0], pe,
            arrived[me, c], 1, op="add", count=count_of(s, row), engine=engine,
        )  # fmt: skip
    elif s.shares:
        hop = inside % (s.n_pes - 1)
        c = first + inside // (s.n_pes - 1) // s.pieces
        row = c * s.height + inside // (s.n_pes - 1) % s.pieces * s.piece
        wait(done[s.n_pes - 1, c], "ge", call * s.adds)
        put_signal(
            sums[call % 2, me, T.min(row, s.rows - 1), 0], part[0, T.min(row, s.rows - 1), 0], (me + 1 + hop) % s.n_pes,
            shared[me, c], 1, op="add", count=count_of(s, row), engine=engine,
        )  # fmt: skip


@tsn.macro
def send_all(s, engine, given, item, sent, partial, summands, part, sums, done, arrived, shared, call, me, thread):
    """Take pieces that nobody has taken, one by one, and put each when it is there. By all threads of a block.

    Args:
        given: int32 [1] of shared memory. item: int32 [1] of a thread.
        sent: int32 [2], by the parity of the call: pieces that are taken.
        partial [n_pes, rows, n], part [rows, n]: parts of the product for other PEs, and the own sums.
        summands, sums [2, n_pes, rows, n]: where they go, in halves by the parity of the call; `sums` and `part` where
            they are shared.
        done [n_pes, tiles]: how often warps have announced a row of tiles: of the part of the PE h places behind this one
            in line h - 1, of the own in the last.
        arrived, shared [n_pes, tiles]: pieces that have come from each PE.
    """
    item[0] = 0
    while item[0] < s.items:
        T.sync_threads()
        if thread == 0:
            given[0] = T.atomic_add(sent[call % 2], 1, return_prev=True)
        T.sync_threads()
        item[0] = given[0]
        if item[0] < s.items:
            to = partial, summands, part, sums, done, arrived, shared
            _send(s, N.wait_block, N.put_signal_block, engine, item[0], *to, call, me)


@tsn.macro
def send_all_by_warps(s, item, sent, partial, summands, part, sums, done, arrived, shared, call, me, thread):
    """As `send_all`, each warp a piece of its own, by loads and stores.

    Few blocks send as fast as their multiprocessors can only so: the time from a piece's last store to the next one's first
    is as long as its copy, and other warps copy meanwhile.
    """
    item[0] = 0
    while item[0] < s.items:
        if thread % 32 == 0:
            item[0] = T.atomic_add(sent[call % 2], 1, return_prev=True)
        item[0] = T.shfl_sync(item[0], 0)
        if item[0] < s.items:
            to = partial, summands, part, sums, done, arrived, shared
            _send(s, N.wait_warp, N.put_signal_warp, "ldst", item[0], *to, call, me)
    T.sync_threads()
