"""A GEMM overlapped with its all-reduce: owners send sums of rows to all others while the next rows are computed.

The first half is `matmul_reduce_scatter`: every PE sums the rows that it owns, here in slices; each slice computes the parts
of the other PEs, then its own. When all tiles of some rows are done, a few blocks push these sums to the other PEs, which
copy them to the result. When the GEMM is done, all blocks push the rest, the last slice. Each row is summed and rounded
once, so all PEs get the same bits.
"""

import functools
from typing import Any

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.runtime.profiling import named

from ..collective import BufferSpecs, is_integer
from ..launches import Form
from . import gemm
from .gemm import DEFAULT, Tiling
from .matmul_reduce_scatter import MatmulReduceScatter


def slices_of(tiles: int, across: int, workers: int) -> int:
    """Number of slices of an all-reduce's rows: the largest with a tile for each multiplying block.

    Args:
        tiles: rows of tiles that a rank owns. across: tiles per row of tiles.
    """
    return max(s for s in range(1, tiles + 1) if tiles % s == 0 and (s == 1 or tiles // s * across >= workers))


@tsn.jit(name="matmul_all_reduce_end")
def send_and_collect(
    n_pes, rows, n, carried, dtype, height, across, slices, pieces, threads=512, blocks=132
):  # fmt: skip
    """Kernel `(out, part, partial, summands, sums, calls, arrived, shared, sent, done)`: puts the remaining pieces of
    `matmul_reducing`, and copies `sums[call % 2, p]` to `out[p]` for the other PEs p, as they arrive.

    Args:
        n_pes, rows, n, carried, dtype, height, across, slices, pieces: see `gemm.SendShape`; `out` [n_pes, rows, n], `part`
            [1, rows, n] and `sums` have `dtype`, `partial` and `summands` have dtype `carried`.

    `calls`, `shared` and the others as in `matmul_reducing`.
    """
    s = gemm.SendShape(n_pes, rows, n, height, across, slices, pieces, shares=True)
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
            ticket, item = T.alloc_shared((1,), "int32"), T.alloc_local((1,), "int32")
            thread, call, me = T.get_thread_binding(), calls[0], N.my_pe()
            mem = gemm.SendBuffers(partial, summands, part, sums, done, arrived, shared, sent)
            gemm.send_all(s, "ldst", ticket, item, mem, call, me, thread)
            for turn in T.serial(-(-copies * pieces // blocks)):
                copy = turn * blocks + block
                if copy < copies * pieces:
                    # In the order of arrival: some rows of every PE, then the next rows.
                    pe = (me + 1 + copy // pieces % (n_pes - 1)) % n_pes
                    c = copy // pieces // (n_pes - 1)
                    row = T.min(c * height + copy % pieces * s.piece, rows - 1)
                    N.wait_block(shared[pe, c], "ge", call * pieces)
                    N.get_block(
                        out[pe, row, 0], sums[call % 2, pe, row, 0], me,
                        count=gemm.piece_elements(s, c * height + copy % pieces * s.piece), engine="ldst",
                    )  # fmt: skip
            if thread < n_pes and thread != me:
                N.quiet(thread)

    return main


class MatmulAllReduce(MatmulReduceScatter):
    """The sum of all ranks' `x @ w`, on every rank; constructed and called by all ranks.

    Args:
        rows: rows of `x` and of the result on every rank; a multiple of the number of ranks.
        k: columns of `x` and rows of `w` on every rank.
        n: columns of `w`.
        dtype, out_dtype, tiling, threads, blocks, engine, group: as in `MatmulReduceScatter`.

    Takes 3 * rows * n elements of the symmetric heap for summands and 2 * rows * n, or 2 * rows * n + rows / n_pes * n if
    some PEs are on other nodes, for sums.

    Raises:
        TypeError, ValueError, RankMismatch, HeapError: as `AllGatherMatmul`.
    """

    NAME = "MatmulAllReduce"

    def __init__(
        self, rows: int, k: int, n: int, *, dtype: torch.dtype = torch.bfloat16, out_dtype: torch.dtype | None = None,
        tiling: Tiling = DEFAULT, threads: int = 512, blocks: int = 4, engine: str = "auto", group: "tsn.Group" = None,
    ):  # fmt: skip
        n_pes = tsn.world(group).size
        if not is_integer(rows, 1, n_pes):
            raise ValueError(f"{self.NAME}: rows is {rows!r}; it must be a positive multiple of the {n_pes} ranks")
        super().__init__(
            rows // n_pes, k, n, dtype=dtype, out_dtype=out_dtype, tiling=tiling, threads=threads, blocks=blocks, engine=engine,
            group=group,
        )  # fmt: skip

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
        all_rows = self.n_pes * self.rows
        out, weight, transposed, scales = self._arguments(x, w, out, x_scales, w_scales, all_rows, all_rows)
        parts, memory = out.view(self.n_pes, self.rows, self.n), self.memory
        mine = parts[self.rank]
        part = memory["part"] if self.needs_symmetric_source else mine
        self._sum(part, x, weight, transposed, scales, parts)
        if part is not mine:
            mine.copy_(part)
        self._sides.join()
        return out

    def kernels(self, transposed: bool) -> dict[str, functools.partial[Any]]:
        kernels = super().kernels(transposed)
        if self._shares:
            kernels["end"] = functools.partial(
                send_and_collect, *self._send_arguments(), self.threads, self._ending_blocks
            )
        return kernels

    def _arguments_of(self, name: str) -> tuple[dict[str, object], dict[str, Form | None]]:
        constant, varying = super()._arguments_of(name)
        return constant, ({"out": None, "part": ((1, self.rows, self.n), None)} if name == "end" else varying)

    @property
    def _shares(self) -> bool:
        return self.n_pes > 1

    @property
    def _slices(self) -> int:
        """Number of slices; the sums of the last one are exposed."""
        return slices_of(self._tiles, -(-self.n // self.tiling.tile[1]), self._workers)

    @property
    def _piece(self) -> int:
        """Fewer rows than in a reduce-scatter, because PEs that wait for the last sums wait for whole pieces."""
        return 4

    @property
    def _ending_blocks(self) -> int:
        return self.block_limit if self.device.type == "cuda" else self.blocks
