"""A GEMM overlapped with its all-reduce: owners send sums of rows to all others while the next are computed.

The first half is `matmul_reduce_scatter`: every PE adds up the rows that it owns, here slice by slice: the parts of a slice
for the other PEs, then its own. When all tiles of some rows are done, a few blocks push these sums to the other PEs, who
copy them to the result. At the end of the GEMM all blocks push the rest, the last slice. Each row is added up and rounded
once, and all PEs get the same bits.
"""

import functools
from typing import Any

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.runtime.profiling import named

from ..collective import BufferSpecs
from ..launches import Form
from . import gemm
from .gemm import DEFAULT, Tiling
from .matmul_reduce_scatter import MatmulReduceScatter


def slices_of(tiles: int, across: int, workers: int) -> int:
    """Slices of an all-reduce's rows: as many as have a tile for each block that multiplies, so that none waits.

    Args:
        tiles: rows of tiles that a rank owns. across: tiles of one.
    """
    return max(s for s in range(1, tiles + 1) if tiles % s == 0 and (s == 1 or tiles // s * across >= workers))


@tsn.jit(name="matmul_all_reduce_end")
def send_and_collect(
    n_pes, rows, n, carried, dtype, height, across, slices, pieces, threads=512, blocks=132
):  # fmt: skip
    """Kernel `(out, part, partial, summands, sums, calls, arrived, shared, sent, done)`: puts what `matmul_reducing` has left
    to put, and copies `sums[call % 2, p]` to `out[p]` for the other PEs p, as they arrive.

    Args:
        n_pes, rows, n, carried, dtype, height, across, slices, pieces: see `gemm.Sent`; `out` is [n_pes, rows, n], `part`
            [1, rows, n], of `dtype` as `sums`; `partial` and `summands` are of `carried`.

    `calls`, `shared` and the others as in `matmul_reducing`.
    """
    s = gemm.Sent(n_pes, rows, n, height, across, slices, pieces, shares=True)
    copies = s.tiles * (n_pes - 1)

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((n_pes, rows, n), dtype),
        part: T.Tensor((1, rows, n), dtype),
        partial: T.Tensor((n_pes, rows, n), carried),
        summands: T.Tensor((2, n_pes, rows, n), carried),
        sums: T.Tensor((2, n_pes, rows, n), dtype),
        calls: T.Tensor((1,), "int64"),
        arrived: T.Tensor((n_pes, s.tiles), "uint64"),
        shared: T.Tensor((n_pes, s.tiles), "uint64"),
        sent: T.Tensor((2,), "int32"),
        done: T.Tensor((n_pes, s.tiles), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            given, item = T.alloc_shared((1,), "int32"), T.alloc_local((1,), "int32")
            thread, call, me = T.get_thread_binding(), calls[0], N.my_pe()
            mem = gemm.Memory(partial, summands, part, sums, done, arrived, shared, sent)
            gemm.send_all(s, "ldst", given, item, mem, call, me, thread)
            for turn in T.serial(-(-copies * pieces // blocks)):
                copy = turn * blocks + block
                if copy < copies * pieces:
                    # In the order in which they come: some rows of every PE, then the next ones.
                    pe = (me + 1 + copy // pieces % (n_pes - 1)) % n_pes
                    c = copy // pieces // (n_pes - 1)
                    row = T.min(c * height + copy % pieces * s.piece, rows - 1)
                    N.wait_block(shared[pe, c], "ge", call * pieces)
                    N.get_block(
                        out[pe, row, 0], sums[call % 2, pe, row, 0], me,
                        count=gemm.count_of(s, c * height + copy % pieces * s.piece), engine="ldst",
                    )  # fmt: skip
            if thread < n_pes and thread != me:
                N.quiet(thread)

    return main


class MatmulAllReduce(MatmulReduceScatter):
    """The sum of all ranks' `x @ w`, on every rank; constructed and called by all ranks.

    Args:
        rows: of `x` and of the result, on every rank; a multiple of the number of ranks.
        k: columns of `x` and rows of `w`, on every rank.
        n: columns of `w`.
        dtype, out_dtype, tiling, threads, blocks, engine, group: as in `MatmulReduceScatter`.

    Takes 3 * rows * n elements of the symmetric heap for summands and 2 * rows * n, or 2 * rows * n + rows / n_pes * n if
    some PEs are on other nodes, for sums.

    Raises:
        TypeError, ValueError: a wrong dtype, extent or launch geometry, by name.
        RankMismatch: ranks pass different arguments.
        HeapError: no room for summands and sums.
    """

    NAME = "MatmulAllReduce"

    def __init__(
        self, rows: int, k: int, n: int, *, dtype: torch.dtype = torch.bfloat16, out_dtype: torch.dtype | None = None,
        tiling: Tiling = DEFAULT, threads: int = 512, blocks: int = 4, engine: str = "auto", group: "tsn.Group" = None,
    ):  # fmt: skip
        n_pes = tsn.world(group).size
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1 or rows % n_pes:
            raise ValueError(f"{self.NAME}: rows is {rows!r}; it must be a positive multiple of the {n_pes} ranks")
        options: dict[str, Any] = dict(
            dtype=dtype, out_dtype=out_dtype, tiling=tiling, threads=threads, blocks=blocks, engine=engine
        )
        super().__init__(rows // n_pes, k, n, **options, group=group)

    def _more_memory(self) -> BufferSpecs:
        more = {"sums": ((2, self.n_pes, self.rows, self.n), self.out_dtype)}
        return more | ({"part": ((self.rows, self.n), self.out_dtype)} if self.needs_symmetric_source else {})

    @named("tilescale_net.MatmulAllReduce")
    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None = None, *,
        x_scales: torch.Tensor | None = None, w_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The sum of all ranks' `x @ w`; asynchronous on the current stream.

        Args:
            x: [rows, k], contiguous.
            w: [k, n], contiguous, or the transpose of a contiguous tensor.
            out: [rows, n], contiguous; default a new tensor.
            x_scales, w_scales: as in `MatmulReduceScatter`, float32 [rows] and [n].

        Returns:
            `out`, with the same bits on all ranks and from run to run.

        Raises:
            TypeError, ValueError: a wrong argument, by name; nothing was sent.
        """
        everyone = self.n_pes * self.rows
        out, held, transposed, scales = self._arguments(x, w, out, x_scales, w_scales, everyone, everyone)
        parts, memory = out.view(self.n_pes, self.rows, self.n), self.memory
        mine = parts[self.rank]
        part = memory["part"] if self.needs_symmetric_source else mine
        self._sum(part, x, held, transposed, scales, parts)
        if part is not mine:
            mine.copy_(part)
        self._sides.join()
        return out

    def kernels(self, transposed: bool) -> dict[str, functools.partial[Any]]:
        kernels = super().kernels(transposed)
        if self._shares:
            kernels["end"] = functools.partial(send_and_collect, *self._sent_of(), self.threads, self._ending_blocks)
        return kernels

    def _arguments_of(self, name: str) -> tuple[dict[str, object], dict[str, Form | None]]:
        fixed, given = super()._arguments_of(name)
        return fixed, ({"out": None, "part": ((1, self.rows, self.n), None)} if name == "end" else given)

    @property
    def _shares(self) -> bool:
        return self.n_pes > 1

    @property
    def _slices(self) -> int:
        """Of which the last one's sums are late."""
        return slices_of(self._tiles, -(-self.n // self.tiling.tile[1]), self._workers)

    @property
    def _piece(self) -> int:
        """Fewer than in a reduce-scatter: those who wait for the last sums wait for whole pieces."""
        return 4

    @property
    def _ending_blocks(self) -> int:
        return self.block_limit if self.device.type == "cuda" else self.blocks
