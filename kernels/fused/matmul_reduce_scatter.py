"""A GEMM overlapped with its reduce-scatter: rows travel to their owner while the next owner's rows are computed.

Every PE has some columns of the left matrix and the corresponding rows of the right one: its product is one of the summands
of the result, and each PE owns some rows of the sum. One persistent GEMM computes the parts of all owners, its own last;
meanwhile a few blocks put finished rows to their owners. The tiles of the PE's own rows add the peers' summands.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.runtime.profiling import named

from ..collective import BufferSpecs, dtype_name
from ..launches import Form
from . import gemm
from .gemm import DEFAULT, SCALED, PreparedMatmul, SideStreams, Tiling, check_extents


@tsn.jit(name="matmul_reduce_scatter_send")
def send_parts(
    n_pes, rows, n, dtype, out_dtype, height, across, slices, pieces, shares, threads=512, blocks=4, engine="auto"
):  # fmt: skip
    """Kernel `(part, partial, summands, sums, calls, ready, arrived, shared, sent, done)`: puts the rows that
    `matmul_reducing` of this call announces to the other PEs.

    Args:
        n_pes, rows, n, height, across, slices, pieces, shares: see `gemm.SendShape`.
        dtype, out_dtype: dtype of `partial` [n_pes, rows, n] and `summands` [2, n_pes, rows, n]; and of `part` [1, rows, n]
            and `sums`, see `matmul_reducing`.
        threads, blocks: launch geometry.
        engine: "auto" or "ldst": each warp sends its own pieces; "bulk": blocks send, see
            `tilescale_net.language.put_block`.

    `calls`, `ready` and the others as in `matmul_reducing`.
    """
    s = gemm.SendShape(n_pes, rows, n, height, across, slices, pieces, shares)

    @T.prim_func
    def main(
        ctx: N.Context(),
        part: T.Tensor((1, rows, n), out_dtype),
        partial: T.Tensor((n_pes, rows, n), dtype),
        summands: T.Tensor((2, n_pes, rows, n), dtype),
        sums: T.Tensor((2, n_pes, rows, n) if shares else (1, 1, 1, 1), out_dtype),
        calls: T.Tensor((1,), "int64"),
        ready: T.Tensor((n_pes,), "uint64"),
        arrived: T.Tensor((n_pes, s.tiles), "uint64"),
        shared: T.Tensor((n_pes, s.tiles), "uint64"),
        sent: T.Tensor((2,), "int32"),
        done: T.Tensor((n_pes, s.tiles), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            ticket, item = T.alloc_shared((1,), "int32"), T.alloc_local((1,), "int32")
            thread, call, me = T.get_thread_binding(), calls[0], N.my_pe()
            gemm.begin_call(ready, sent, call, me, n_pes, block, thread)
            mem = gemm.SendBuffers(partial, summands, part, sums, done, arrived, shared, sent)
            if engine == "bulk":
                gemm.send_all(s, engine, ticket, item, mem, call, me, thread)
            else:
                gemm.send_all_by_warps(s, item, mem, call, me, thread)
            if thread < n_pes and thread != me:
                N.quiet(thread)

    return main


@tsn.jit(name="matmul_reduce_scatter")
def matmul_reducing(
    n_pes, rows, n, k, dtype, out_dtype, transposed=False, tile=(128, 256, 64), stages=4, panel=8, columns=128, workers=132,
    senders=0, slices=1, pieces=4, shares=False, scaled=False,
):  # fmt: skip
    """Kernel `(out, x, w, partial, summands, sums, calls, ready, arrived, shared, tickets, sent, done, x_scales,
    w_scales)`: `out` = the rows of this PE of the sum of all PEs' `x @ w`.

    Args:
        n_pes, rows, n, k: extents of `out` [1, rows, n], `x` [n_pes, rows, k], `w`, `partial` [n_pes, rows, n] and
            `summands` [2, n_pes, rows, n], the destination of the PEs' puts.
        dtype, out_dtype: dtype of `x`, `w`, `partial` and `summands`, and of `out`; `scaled`: of `x` and `w`, and of all others.
        transposed, tile, stages, panel, columns, workers: as in `all_gather_matmul.matmul_arriving`.
        senders: number of blocks that send, in the simulator, which runs kernels one after the other. On a GPU, `send_parts`
            sends beside this kernel: a kernel that calls puts cannot reallocate registers between its warpgroups.
        slices, pieces, shares: see `gemm.SendShape`. With `shares`, `out` goes to `sums` [2, n_pes, rows, n] of the others.
        scaled: multiply `x @ w` by `x_scales` [n_pes, rows] and `w_scales` [n] (float32); a further parameter is a view of
            `summands` as `dtype`, [2, n_pes, rows, 2 * n]. Otherwise both are [1, 1] and [1] and unused.

    `calls` (int64 [1]) holds the number of this call, 1 or more. Symmetric uint64 signals, zero before the first call and
    never reset: `ready` [n_pes], `arrived`, `shared` and `done` [n_pes, tiles], `tickets` [1]; likewise `sent` (int32 [2]).
    Sums are in float32, first this PE's product, then the summands in the order of the PEs behind this one.
    """
    s = gemm.SendShape(n_pes, rows, n, tile[0], -(-n // tile[1]), slices, pieces, shares)
    part_rows = rows if slices == 1 else s.slice_tiles * tile[0]
    shape = gemm.Shape(slices * n_pes, part_rows, n, k, tile, stages, panel, columns, workers, transposed)
    (bm, bn, bk), carried = tile, out_dtype if scaled else dtype
    # Summands arrive through the operand ring: one step for each PE and warpgroup.
    wide = 2 if scaled else 1

    @T.macro
    def locate(b, at):
        """at = the position of b.tile; at.part = distance to the owner, n_pes for this PE, which is the last of a slice."""
        gemm.locate(shape, b.tile[0], at)
        at.row[0] = at.row[0] + at.part[0] // n_pes * part_rows
        at.part[0] = at.part[0] % n_pes + 1

    @T.macro
    def finish(group, total, b, out, partial, done, at, scales):
        pe = (N.my_pe() + at.part[0]) % n_pes
        if scaled:
            gemm.get_row_scales(rows, shape, group, scales.tile, lambda r: scales.x[pe, r], at.row[0])
            gemm.scale(shape, group, total, scales.tile, lambda c: scales.w[c], at.column[0])
        if at.part[0] == n_pes:
            for _hop in T.serial(1, n_pes):
                for half in T.unroll(2):
                    gemm.add_summand(shape, wide, carried, half == group, total, b)
            gemm.store(shape, group, total, b.result[0], out, 0, at.row[0], at.column[0])
            if shares:
                gemm.announce(done, n_pes - 1, at.row[0] // bm, b.thread)
        else:
            gemm.store(shape, group, total, b.result[-1], partial, pe, at.row[0], at.column[0])
            gemm.announce(done, at.part[0] - 1, at.row[0] // bm, b.thread)

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((1, rows, n), out_dtype),
        x: T.Tensor((n_pes, rows, k), dtype),
        w: T.Tensor((n, k) if transposed else (k, n), dtype),
        partial: T.Tensor((n_pes, rows, n), carried),
        summands: T.Tensor((2, n_pes, rows, n), carried),
        sums: T.Tensor((2, n_pes, rows, n) if shares else (1, 1, 1, 1), out_dtype),
        calls: T.Tensor((1,), "int64"),
        ready: T.Tensor((n_pes,), "uint64"),
        arrived: T.Tensor((n_pes, s.tiles), "uint64"),
        shared: T.Tensor((n_pes, s.tiles), "uint64"),
        tickets: T.Tensor((1,), "uint64"),
        sent: T.Tensor((2,), "int32"),
        done: T.Tensor((n_pes, s.tiles), "uint64"),
        x_scales: T.Tensor((n_pes, rows) if scaled else (1, 1), "float32"),
        w_scales: T.Tensor((n,) if scaled else (1,), "float32"),
        seen_summands: T.Tensor((2, n_pes, rows, 2 * n), dtype) if scaled else None,
    ):
        with T.Kernel(senders + workers, threads=gemm.THREADS) as block:
            b = gemm.Block(*gemm.block_memory(shape, dtype, tuple(dict.fromkeys((out_dtype, carried)))))
            hop, row, column = (T.alloc_local((1,), "int32") for _ in range(3))
            tile_scales = T.alloc_shared((2, shape.half + bn) if scaled else (2, 1), "float32")
            at, scales = gemm.Position(hop, row, column), gemm.Scales(tile_scales, x_scales, w_scales)
            thread, call, me = b.thread, calls[0], N.my_pe()
            is_tile = lambda: b.tile[0] < shape.total  # noqa: E731
            find = lambda: locate(b, at)  # noqa: E731
            end = lambda group, total: finish(group, total, b, out, partial, done, at, scales)  # noqa: E731
            gemm.begin(b)
            if senders > 0 and block < senders:
                gemm.begin_call(ready, sent, call, me, n_pes, block, thread)
                mem = gemm.SendBuffers(partial, summands, out, sums, done, arrived, shared, sent)
                gemm.send_all_by_warps(s, b.tile, mem, call, me, thread)
                if thread < n_pes and thread != me:
                    N.quiet(thread)
            elif thread < 128:
                T.dec_max_nreg(40)
                if thread < 32:
                    gemm.next_tile(shape, tickets, call, b)
                    while b.tile[0] < shape.total:
                        find()
                        pe = (me + hop[0]) % n_pes
                        gemm.copy_tile(
                            shape, b, lambda: row[0],
                            lambda half, first, depth, stage: gemm.copy(
                                x[pe, first : first + shape.half, depth : depth + bk], b.left[stage, half, :, :], b, stage
                            ),
                            lambda depth, stage: gemm.copy_right(shape, w, b, depth, column[0], stage),
                        )  # fmt: skip
                        if hop[0] == n_pes:
                            gemm.wait_for_all(arrived, row[0] // bm, n_pes, call * pieces, thread)
                            for other in T.serial(1, n_pes):
                                for half in T.unroll(2):
                                    slot = b.step[0] % stages
                                    T.barrier_wait(b.empty[slot], ((b.step[0] // stages) & 1) ^ 1)
                                    gemm.copy_summand(
                                        shape, wide, seen_summands if scaled else summands, call % 2, (me + other) % n_pes,
                                        b, slot, row[0] + half * shape.half, column[0],
                                    )  # fmt: skip
                                    T.barrier_arrive(b.full[slot])
                                    b.step[0] = b.step[0] + 1
                        gemm.next_tile(shape, tickets, call, b)
            elif thread < 256:
                gemm.multiply_tiles(shape, 0, b, is_tile, find, end)
            else:
                gemm.multiply_tiles(shape, 1, b, is_tile, find, end)

    return main


def check_ring(name: str, tiling: Tiling, dtype: torch.dtype) -> None:
    """Raise ValueError if summands do not fit the operand ring, see `gemm.copy_summand`."""
    (rows, columns, depth), wide = tiling.tile, 2 if dtype == SCALED else 1
    if rows * wide > 2 * depth or columns * wide % depth:
        raise ValueError(
            f"{name}: {tiling}: summands pass through the operand ring, so a tile's rows must be at most twice the "
            f"summands in its depth ({depth // wide}), which must divide its columns"
        )


class MatmulReduceScatter(PreparedMatmul):
    """Each rank's rows of the sum of all ranks' `x @ w`; constructed and called by all ranks.

    Args:
        rows: rows of the result on every rank; `x` has n_pes times as many.
        k: columns of `x` and rows of `w` on every rank.
        n: columns of `w`.
        dtype: dtype of `x`, `w` and the summands that are sent: torch.bfloat16 or torch.float16; or torch.float8_e4m3fn,
            with a scale for each row of `x` and column of `w`, see `FusedMatmul`.
        out_dtype: dtype of the result; default `dtype`. Accumulation is in float32.
        tiling: geometry of the GEMM, see `Tiling`.
        threads, blocks: launch geometry of the kernel that sends, see `Collective`. Each block takes an SM.
        engine: copy engine of that kernel: "auto" or "ldst": warps send; "bulk": blocks send, see `put_block`.
        group: the ranks; see `tilescale_net.world`.

    Takes 3 * n_pes * rows * n elements of the symmetric heap.

    Raises:
        TypeError, ValueError, RankMismatch, HeapError: as `AllGatherMatmul`.
    """

    NAME = "MatmulReduceScatter"

    def __init__(
        self, rows: int, k: int, n: int, *, dtype: torch.dtype = torch.bfloat16, out_dtype: torch.dtype | None = None,
        tiling: Tiling = DEFAULT, threads: int = 512, blocks: int = 4, engine: str = "auto", group: "tsn.Group" = None,
    ):  # fmt: skip
        check_extents(self.NAME, dtype, rows=rows, k=k, n=n)
        shapes = f"rows={rows}, k={k}, n={n}, engine={engine}"
        super().__init__(self.NAME, shapes, dtype, out_dtype, tiling, threads, blocks, group)
        check_ring(self.NAME, tiling, dtype)
        self.rows, self.k, self.n, self._engine = rows, k, n, engine
        self._tiles = -(-rows // tiling.tile[0])
        memory = self.allocate({
            "summands": ((2, self.n_pes, rows, n), self._carried),
            "partial": ((self.n_pes, rows, n), self._carried),
            "ready": ((self.n_pes,), torch.uint64),
            "arrived": ((self.n_pes, self._tiles), torch.uint64),
            "shared": ((self.n_pes, self._tiles), torch.uint64),
            "done": ((self.n_pes, self._tiles), torch.uint64),
            "tickets": ((1,), torch.uint64),
            "sums": ((1, 1, 1, 1), self.out_dtype),
            **self._more_memory(),
        })  # fmt: skip
        self.memory = memory
        with torch.inference_mode(False):
            self._sent = torch.zeros(2, dtype=torch.int32, device=self.device)
        self._sides = SideStreams(self.device, (-1,))

    def _more_memory(self) -> BufferSpecs:
        """Additional symmetric memory of a subclass."""
        return {}

    @named("tilescale_net.MatmulReduceScatter")
    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None = None, *,
        x_scales: torch.Tensor | None = None, w_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """This rank's rows of the sum of all ranks' `x @ w`; asynchronous on the current stream.

        Args:
            x: [n_pes * rows, k], contiguous; rows of PE 0 first.
            w: [k, n], contiguous, or the transpose of a contiguous tensor.
            out: [rows, n], contiguous; default a new tensor.
            x_scales, w_scales: for torch.float8_e4m3fn: float32 [n_pes * rows] or [n_pes * rows, 1], and [n] or [1, n],
                contiguous, scales of the rows and columns of this rank's product.

        Returns:
            `out`. The order of additions is fixed, so results are bitwise reproducible.

        Raises:
            TypeError, ValueError: a wrong argument, by name; nothing was sent.
        """
        all_rows = self.n_pes * self.rows
        out, weight, transposed, scales = self._arguments(x, w, out, x_scales, w_scales, all_rows, self.rows)
        self._sum(out, x, weight, transposed, scales)
        self._sides.join()
        return out

    def _sum(self, out, x, weight, transposed: bool, scales, *everyone: torch.Tensor) -> None:
        """Launch the kernels. `everyone`: the result of an all-reduce, of which `out` is this rank's part."""
        launch = self._prepared.get(transposed)
        if launch is None:
            launch = self._launches_of(transposed)
            if self.device.type == "cuda" and self.n_pes > 1:
                # A kernel's first launch loads it, for which the driver waits until running kernels have ended, but the
                # kernels of a call wait for one another. So all run once as call 0, with all tiles and pieces taken.
                zero = torch.zeros(1, dtype=torch.int64, device=self.device)
                all_sent = torch.full((2,), 1 << 30, dtype=torch.int32, device=self.device)
                tickets = torch.zeros(1, dtype=torch.uint64, device=self.device)
                state = {"calls": zero, "tickets": tickets, "sent": all_sent}
                loads = {
                    name: self._launch_of(name, make(), **state) for name, make in self.kernels(transposed).items()
                }
                self._launch(loads, out, x, weight, scales, *everyone)
                self._sides.join()
                torch.cuda.synchronize(self.device)
        self._calls.add_(1)
        self._launch(launch, out, x, weight, scales, *everyone)

    def _launch(
        self, launch: Mapping[str, Callable[..., None]], out, x, weight, scales, *everyone: torch.Tensor
    ) -> None:
        if "send" in launch:
            self._sides.fork()
            with self._sides[0]:
                launch["send"](out)
        launch["gemm"](out, x, weight, *scales)
        if everyone and self.n_pes > 1:
            launch["end"](*everyone, out)

    def kernels(self, transposed: bool) -> dict[str, functools.partial[Any]]:
        simulated, dtypes = self.device.type != "cuda", (dtype_name(self.dtype), dtype_name(self.out_dtype))
        gemm = functools.partial(
            matmul_reducing, self.n_pes, self.rows, self.n, self.k, *dtypes, transposed, **vars(self.tiling),
            workers=self._workers, senders=self.blocks if simulated and self.n_pes > 1 else 0, slices=self._slices,
            pieces=self._pieces, shares=self._shares, scaled=self.scaled,
        )  # fmt: skip
        if self.n_pes == 1 or simulated:
            return {"gemm": gemm}
        geometry = self.threads, self.blocks, self._engine
        return {"gemm": gemm, "send": functools.partial(send_parts, *self._send_arguments(), self._shares, *geometry)}

    def _arguments_of(self, name: str) -> tuple[dict[str, object], dict[str, Form | None]]:
        constant: dict[str, object] = {**self.memory, "calls": self._calls, "sent": self._sent}
        if self.scaled:
            constant["seen_summands"] = self.memory["summands"].view(self.dtype)
        part, rows = ((1, self.rows, self.n), None), ((self.n_pes, self.rows, self.k), None)
        if name == "send":
            return constant, {"part": part}
        scales = ((self.n_pes, -1) if self.scaled else (1, 1)), None
        return constant, {"out": part, "x": rows, "w": None, "x_scales": scales, "w_scales": None}

    def _send_arguments(self) -> tuple:
        """The first arguments of the kernels that send."""
        dtypes = dtype_name(self._carried), dtype_name(self.out_dtype)
        height, across = self.tiling.tile[0], -(-self.n // self.tiling.tile[1])
        return self.n_pes, self.rows, self.n, *dtypes, height, across, self._slices, self._pieces

    @property
    def _shares(self) -> bool:
        """Whether every rank receives all sums."""
        return False

    @property
    def _slices(self) -> int:
        return 1

    @property
    def _workers(self) -> int:
        senders = self.blocks if self.n_pes > 1 else 0
        return self.tiling.workers(self.device, self.n_pes, self.rows, self.n, senders)

    @property
    def _pieces(self) -> int:
        """Pieces per row of tiles: enough for all warps or blocks that send."""
        return min(4, self.tiling.tile[0] // 8) if self._engine == "bulk" else self.tiling.tile[0] // self._piece

    @property
    def _piece(self) -> int:
        """Rows per piece of a warp."""
        return 8
