"""Words that count the arrived or stored rows of each tile of expert-major rows, during a dispatch or a GEMM.

A tile is `tile_rows` rows, and has a word that grows by the same number in every call: the counting kernel adds the
missing rows of a partial tile. Nothing is reset between calls, and a wait needs only the call number. The word behind
those of the tiles counts the blocks that have begun.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.collective import wait_until_resident
from tilescale_net.kernels.moe.row_ops import int_vars


@dataclass(frozen=True)
class Tiles:
    """The words of tiles, and the values to wait for.

    Attributes:
        rows: of a tile.
        words: uint64 [tiles + 1], symmetric: one for each tile, which peers do not write, and one for the blocks.
        calls: int64 [1]: number of this call, from 1; grows on the stream of the caller.
        growth: of the word of a tile in a call; the tile is complete when the word has reached `calls[0] * growth`.
        begins: growth of the word of the blocks.
        started: uint64 [1], symmetric, or None: grows by 1 per call when the kernel that fills the tiles has begun; a
            combine waits for it before it takes SMs, which the kernel then leaves.
    """

    rows: int
    words: torch.Tensor
    calls: torch.Tensor
    growth: int
    begins: int
    started: torch.Tensor | None = None

    @property
    def count(self) -> int:
        return len(self.words) - 1

    def next_call(self) -> None:
        """Number the next call, on the current stream."""
        self.calls.add_(1)

    def leave_multiprocessors(self) -> None:
        """Later kernels on the current stream start when this call's blocks have their SMs."""
        wait_until_resident()(self.calls, self.words[self.count :], self.begins, self.begins)

    def await_start(self) -> None:
        """Later kernels on the current stream start when the kernel that fills the tiles has begun."""
        assert self.started is not None
        wait_until_resident()(self.calls, self.started, 1, 1)

    def reset(self) -> None:
        """Reset; all kernels have ended."""
        self.calls.zero_()
        self.words.view(torch.uint8).zero_()


class Awaited(NamedTuple):
    """A kernel's view of `Tiles`. `words`: uint64 [tiles + 1]. calls: int64 [1]. growth: int32. rows: of a tile."""

    words: Any
    calls: Any
    growth: Any
    rows: int


@tsn.macro
def signal_started(words, tiles, blocks, me: T.Ref, thread):
    """Count `blocks` blocks that have begun, and publish this thread's writes. By a block."""
    if thread == 0:
        N.signal(words[tiles], blocks, me, op="add", fence=True)


@tsn.macro
def add_missing_rows(words, totals, at, tile_rows, tiles, me: T.Ref, thread, threads):
    """Add to the word of each tile the rows that it lacks in this call. By a block. `totals`: of the plan. at:
    `PlanOffsets`, its offsets."""
    first, begin, end, short = int_vars(4)
    for i in T.serial((tiles + threads - 1) // threads):
        if i * threads + thread < tiles:
            first = (i * threads + thread) * tile_rows
            short = tile_rows
            for e in T.serial(at.local_experts):
                begin = totals[at.offsets + e]
                # A rejected dispatch has counts, and no room for their rows.
                end = T.min(begin + totals[at.counts + e], totals[at.offsets + e + 1])
                short = short - T.max(0, T.min(first + tile_rows, end) - T.max(first, begin))
            if short > 0:
                N.signal(words[i * threads + thread], T.cast(short, "uint64"), me, op="add")


@tsn.macro
def count_rows(words, records, source: T.Ref, first, count: T.Ref, top_k, tile_rows, me: T.Ref, lane):
    """Count rows `first` … of `source`, which this warp has waited for and copied to their experts."""
    row = T.alloc_var("int32")
    T.sync_warp()
    for i in T.serial((count * top_k + 31) // 32):
        if i * 32 + lane < count * top_k:
            row = records[source, first + (i * 32 + lane) // top_k, (i * 32 + lane) % top_k]
            if row >= 0:
                N.signal(words[row // tile_rows], 1, me, op="add", fence=True)


@tsn.macro
def await_rows(tiles, records, source: T.Ref, first, count: T.Ref, top_k, row: T.Ref, lane):
    """Wait for the tiles of all experts' rows of rows `first` … of `source`. By a warp. `tiles`: the Awaited. row:
    int32, to work with."""
    for i in T.serial((count * top_k + 31) // 32):
        if i * 32 + lane < count * top_k:
            row = records[source, first + (i * 32 + lane) // top_k, (i * 32 + lane) % top_k]
            if row >= 0:
                N.wait(tiles.words[row // tiles.rows], "ge", tiles.calls[0] * tiles.growth)
    T.sync_warp()
