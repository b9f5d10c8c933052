"""All-gather overlapped with a GEMM: tiles are computed in the order in which their rows arrive.

Every PE has some rows of the left matrix and some columns of the right one, and multiplies all rows by its columns. The
GEMM begins with the local rows. Meanwhile a few blocks push them to the other PEs, with a signal per chunk; a tile of a
peer's rows waits for that signal.
"""

import contextlib
import functools
from typing import Any

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.runtime.cuda_memory import CudaMemory
from tilescale_net.runtime.profiling import named

from ..collective import as_bytes, dtype_name, wait_until_resident
from ..launches import Form
from . import gemm
from .gemm import DEFAULT, SCALED, DistributedMatmul, PreparedMatmul, SideStreams, Tiling, check_extents, torch_gemm


@tsn.jit(name="all_gather_matmul_push")
def push_rows(n_pes, rows, k, dtype, chunk, threads=512, blocks=8, engine="auto", scaled=False):
    """Kernel `(gathered, x, calls, ready, arrived, begun, gathered_scales, x_scales)`: puts `x` into
    `gathered[call % 2, my_pe]` of every other PE.

    Args:
        n_pes, rows, k, dtype: `x` is [rows, k], `gathered` (symmetric) [2, n_pes, rows, k].
        chunk: rows per signal.
        threads, blocks, engine: see `tilescale_net.language.put_block`.
        scaled: also put `x_scales` (float32 [rows]) to `gathered_scales` (symmetric, [2, n_pes, rows]), before the rows,
            with its own signal behind those of the chunks. Otherwise both are [1] and unused.

    `calls` (int64 [1]) holds the number of this call, 1 or more. `ready` [n_pes], `arrived` [n_pes, chunks + scaled] and
    `begun` [1], to which each block adds 1 when it begins, are signals (uint64, symmetric), zero before the first call and
    never reset.
    """
    chunks = -(-rows // chunk)

    @T.prim_func
    def main(
        ctx: N.Context(),
        gathered: T.Tensor((2, n_pes, rows, k), dtype),
        x: T.Tensor((rows, k), dtype),
        calls: T.Tensor((1,), "int64"),
        ready: T.Tensor((n_pes,), "uint64"),
        arrived: T.Tensor((n_pes, chunks + scaled), "uint64"),
        begun: T.Tensor((1,), "uint64"),
        gathered_scales: T.Tensor((2, n_pes, rows) if scaled else (1,), "float32"),
        x_scales: T.Tensor((rows,) if scaled else (1,), "float32"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            call = calls[0]
            if thread == 0:
                N.signal(begun[0], 1, me, op="add")
            # This half of `gathered` was last read two calls ago: a PE that has begun the previous call no longer reads it.
            if thread < n_pes and thread != me:
                if block == 0:
                    N.signal(ready[me], T.cast(call, "uint64"), thread)
                N.wait(ready[thread], "ge", call - 1)
            T.sync_threads()
            for hop in T.serial(1, n_pes):
                pe = (me - hop + n_pes) % n_pes  # the next destination
                if scaled:
                    if block == 0:
                        N.put_signal_block(
                            gathered_scales[call % 2, me, 0], x_scales[0], pe, arrived[me, chunks],
                            T.cast(call, "uint64"), count=rows, engine=engine,
                        )  # fmt: skip
                # The trip count is the same for all blocks: TVM runs a loop whose count may be 0 at least once.
                for turn in T.serial(-(-chunks // blocks)):
                    c = turn * blocks + block
                    if c < chunks:
                        N.put_signal_block(
                            gathered[call % 2, me, c * chunk, 0], x[c * chunk, 0], pe, arrived[me, c],
                            T.cast(call, "uint64"), count=T.cast(T.min(chunk, rows - c * chunk), "int64") * k,
                            engine=engine,
                        )  # fmt: skip
            T.sync_threads()
            if thread < n_pes and thread != me:
                N.quiet(thread)

    return main


@tsn.jit(name="all_gather_matmul")
def matmul_arriving(
    n_pes, rows, n, k, dtype, out_dtype, transposed=False, tile=(128, 256, 64), stages=4, panel=8, columns=128, workers=132,
    peers=True, scaled=False,
):  # fmt: skip
    """Kernel `(out, x, gathered, w, calls, arrived, tickets, x_scales, gathered_scales, w_scales)`: `out[p]` = `x` of PE p
    times `w`, for all PEs or for this PE alone.

    Args:
        n_pes, rows, n, k: extents of `out` [n_pes, rows, n], `x` [rows, k], `gathered` [2, n_pes, rows, k] and `w`.
        dtype, out_dtype: dtype of `x` and `w`, and of `out`; accumulation is in float32.
        transposed: `w` is [n, k] instead of [k, n].
        tile, stages, panel, columns, workers: see `gemm.Shape`.
        peers: the rows of the other PEs are in `gathered` of `push_rows`, whose `chunk` is the tile's rows. Otherwise
            `out[0] = x @ w`, and `gathered` [1, 1, rows, k] and `arrived` are unused.
        scaled: multiply sums by the float32 scales of their row, `x_scales` [rows] or `gathered_scales` [2, n_pes, rows] of
            `push_rows`, and of their column, `w_scales` [n]. Otherwise these three are [1] and unused; without `peers`, so
            is `gathered_scales`.

    `tickets` (uint64 [1], symmetric, zero before the first call) belongs to this kernel.
    """
    shape = gemm.Shape(n_pes if peers else 1, rows, n, k, tile, stages, panel, columns, workers, transposed)
    bm, bn, bk = tile
    gathers_scales = scaled and peers

    @T.macro
    def copy_left(x, gathered, call, at, b, half, first, depth, stage):
        if at.part[0] == 0:
            gemm.copy(x[first : first + shape.half, depth : depth + bk], b.left[stage, half, :, :], b, stage)
        elif peers:
            gemm.copy(
                gathered[call % 2, at.pe[0], first : first + shape.half, depth : depth + bk],
                b.left[stage, half, :, :], b, stage,
            )  # fmt: skip

    @T.macro
    def finish(group, total, result, out, at, call, scales):
        at.pe[0] = (N.my_pe() + at.part[0]) % n_pes if peers else 0
        if scaled:
            if at.part[0] == 0:
                gemm.get_row_scales(rows, shape, group, scales.tile, lambda r: scales.x[r], at.row[0])
            elif peers:
                gemm.get_row_scales(
                    rows, shape, group, scales.tile, lambda r: scales.gathered[call % 2, at.pe[0], r], at.row[0]
                )
            gemm.scale(shape, group, total, scales.tile, lambda c: scales.w[c], at.column[0])
        gemm.store(shape, group, total, result, out, at.pe[0], at.row[0], at.column[0])

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((shape.parts, rows, n), out_dtype),
        x: T.Tensor((rows, k), dtype),
        gathered: T.Tensor((2, n_pes, rows, k) if peers else (1, 1, rows, k), dtype),
        w: T.Tensor((n, k) if transposed else (k, n), dtype),
        calls: T.Tensor((1,), "int64"),
        arrived: T.Tensor((n_pes, shape.tiles_m + gathers_scales), "uint64"),
        tickets: T.Tensor((1,), "uint64"),
        x_scales: T.Tensor((rows,) if scaled else (1,), "float32"),
        gathered_scales: T.Tensor((2, n_pes, rows) if gathers_scales else (1,), "float32"),
        w_scales: T.Tensor((n,) if scaled else (1,), "float32"),
    ):
        with T.Kernel(workers, threads=gemm.THREADS):
            b = gemm.Block(*gemm.block_memory(shape, dtype, (out_dtype,)))
            part, pe, row, column = (T.alloc_local((1,), "int32") for _ in range(4))
            tile_scales = T.alloc_shared((2, shape.half + bn) if scaled else (2, 1), "float32")
            scales = gemm.Scales(tile_scales, x_scales, w_scales, gathered_scales)
            at, call = gemm.Position(part, row, column, pe), calls[0]
            is_tile = lambda: b.tile[0] < shape.total  # noqa: E731
            find = lambda: gemm.locate(shape, b.tile[0], at)  # noqa: E731
            end = lambda group, total: finish(group, total, b.result[0], out, at, call, scales)  # noqa: E731
            gemm.begin(b)
            if b.thread < 128:
                T.dec_max_nreg(40)
                if b.thread < 32:
                    gemm.next_tile(shape, tickets, call, b)
                    while b.tile[0] < shape.total:
                        find()
                        pe[0] = (N.my_pe() + part[0]) % n_pes
                        if peers:
                            if part[0] > 0:
                                if scaled:
                                    # The multiplying warps read the scales after the first barrier of the ring.
                                    N.wait_warp(arrived[pe[0], shape.tiles_m], "ge", call, proxy="async")
                                N.wait_warp(arrived[pe[0], row[0] // bm], "ge", call, proxy="async")
                        gemm.copy_tile(
                            shape, b, lambda: row[0],
                            lambda half, first, depth, s: copy_left(x, gathered, call, at, b, half, first, depth, s),
                            lambda depth, s: gemm.copy_right(shape, w, b, depth, column[0], s),
                        )  # fmt: skip
                        gemm.next_tile(shape, tickets, call, b)
            elif b.thread < 256:
                gemm.multiply_tiles(shape, 0, b, is_tile, find, end)
            else:
                gemm.multiply_tiles(shape, 1, b, is_tile, find, end)

    return main


class AllGatherMatmul(PreparedMatmul):
    """`cat(x of all ranks) @ w`, with a different `w` on every rank; constructed and called by all ranks.

    Args:
        rows: rows of `x` on every rank.
        k: columns of `x` and rows of `w`.
        n: columns of `w` on every rank.
        dtype: dtype of `x` and `w`: torch.bfloat16 or torch.float16; or torch.float8_e4m3fn, with a scale for each row of
            `x` and column of `w`, see `FusedMatmul`.
        out_dtype: dtype of the result; default `dtype`. Accumulation is in float32.
        tiling: geometry of the GEMM, see `Tiling`.
        threads, blocks: launch geometry of the kernel that pushes rows, see `Collective`. Each block takes an SM until the
            rows are sent.
        engine: copy engine of that kernel, see `put_block`.
        group: the ranks; see `tilescale_net.world`.

    Takes 2 * n_pes * rows * k elements of the symmetric heap, and 2 * n_pes * rows scales.

    Raises:
        TypeError, ValueError: a wrong dtype, extent or launch geometry, by name.
        RankMismatch: ranks pass different arguments.
        HeapError: no room for the gathered rows.
    """

    def __init__(
        self, rows: int, k: int, n: int, *, dtype: torch.dtype = torch.bfloat16, out_dtype: torch.dtype | None = None,
        tiling: Tiling = DEFAULT, threads: int = 512, blocks: int = 8, engine: str = "auto", group: "tsn.Group" = None,
    ):  # fmt: skip
        check_extents("AllGatherMatmul", dtype, rows=rows, k=k, n=n)
        shapes = f"rows={rows}, k={k}, n={n}, engine={engine}"
        super().__init__("AllGatherMatmul", shapes, dtype, out_dtype, tiling, threads, blocks, group)
        self.rows, self.k, self.n, self._engine = rows, k, n, engine
        chunks = -(-rows // tiling.tile[0])
        self.memory = memory = self.allocate({
            "gathered": ((2, self.n_pes, rows, k), dtype),
            "ready": ((self.n_pes,), torch.uint64),
            "arrived": ((self.n_pes, chunks + self.scaled), torch.uint64),
            "begun": ((1,), torch.uint64),
            "tickets": ((1,), torch.uint64),
            **({"scales": ((2, self.n_pes, rows), torch.float32)} if self.scaled else {}),
        })  # fmt: skip
        self._gathered_scales = memory.get("scales", self._no_scales)
        self._sides = SideStreams(self.device, (-1,))

    @named("tilescale_net.AllGatherMatmul")
    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None = None, *,
        x_scales: torch.Tensor | None = None, w_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """All ranks' rows times this rank's `w`; asynchronous on the current stream.

        Args:
            x: [rows, k], contiguous. Symmetric if some PEs are on other nodes.
            w: [k, n], contiguous, or the transpose of a contiguous tensor.
            out: [n_pes * rows, n], contiguous; default a new tensor.
            x_scales: for torch.float8_e4m3fn: float32 [rows] or [rows, 1], contiguous, scales of the rows, sent with them.
                Symmetric if `x` is.
            w_scales: for torch.float8_e4m3fn: float32 [n] or [1, n], contiguous, scales of the columns.

        Returns:
            `out`, rows of PE 0 first. Later work on the stream may overwrite `x`.

        Raises:
            TypeError, ValueError, HeapError: a wrong argument, by name; nothing was sent.
        """
        out, weight, transposed, scales = self._arguments(
            x, w, out, x_scales, w_scales, self.rows, self.n_pes * self.rows, self.needs_symmetric_source
        )
        launch = self._launches_of(transposed)
        self._calls.add_(1)
        if self.n_pes > 1:
            self._sides.fork()
            with self._sides[0]:
                launch["push"](x, scales[0])
            # The GEMM takes all free SMs, so the kernel that pushes rows must be resident before.
            launch["gate"]()
        launch["gemm"](out, x, weight, *scales)
        self._sides.join()
        return out

    def kernels(self, transposed: bool) -> dict[str, functools.partial[Any]]:
        dtypes = dtype_name(self.dtype), dtype_name(self.out_dtype)
        workers = self.tiling.workers(self.device, self.n_pes, self.rows, self.n)
        kernels = {
            "gemm": functools.partial(
                matmul_arriving, self.n_pes, self.rows, self.n, self.k, *dtypes, transposed, **vars(self.tiling),
                workers=workers, scaled=self.scaled,
            )
        }  # fmt: skip
        if self.n_pes > 1:
            shape = self.n_pes, self.rows, self.k, dtypes[0], self.tiling.tile[0]
            geometry = self.threads, self.blocks, self._engine
            kernels["push"] = functools.partial(push_rows, *shape, *geometry, self.scaled)
            kernels["gate"] = functools.partial(wait_until_resident)
        return kernels

    def _arguments_of(self, name: str) -> tuple[dict[str, object], dict[str, Form | None]]:
        constant = self.memory | {
            "calls": self._calls, "gathered_scales": self._gathered_scales, "growth": self.blocks, "begins": self.blocks,
        }  # fmt: skip
        if name == "push":
            return constant, {"x": None, "x_scales": None}
        if name == "gate":
            return constant, {}
        parts = (self.n_pes, self.rows, self.n), None
        return constant, {"out": parts, "x": None, "w": None, "x_scales": None, "w_scales": None}


# ---------------------------------------------------------------------------------------------------------------------
# Pipelined all-gather and GEMM: copy engines move rows, cuBLAS multiplies the rows of one PE at a time.
#
# The copy engines send rows to one peer after the other while cuBLAS multiplies the rows that have arrived; a signal tells
# when a peer's rows are complete. Communication takes no SM, so GEMMs run at the rate of cuBLAS. In return, each PE's rows
# are a separate GEMM, which starts when all of them have arrived.
#
# PyTorch 2.11 has a similar pipeline, `_pipelined_all_gather_and_consume` in
# torch/distributed/_symmetric_memory/__init__.py, which pulls the rows after a barrier; here each peer pushes and signals.


PUSHES, OTHER_GEMMS = 0, 1  # side streams


@tsn.jit(name="all_gather_matmul_begin")
def barrier_peers(n_pes, threads):
    """Kernel `(calls, begun)`: counts the call, and ends when every PE has begun it and so has read the data of the previous
    call.

    Args of the kernel:
        calls: int64 [1], number of calls so far. begun: uint64 [n_pes], symmetric; each PE sets its own word.
    """

    @T.prim_func
    def main(ctx: N.Context(), calls: T.Tensor((1,), "int64"), begun: T.Tensor((n_pes,), "uint64")):
        with T.Kernel(1, threads=threads):
            thread = T.get_thread_binding()
            me = N.my_pe()
            call = T.alloc_var("int64", calls[0] + T.int64(1))
            if thread < n_pes:
                N.signal(begun[me], T.cast(call, "uint64"), thread)
                N.wait(begun[thread], "ge", call)
            T.sync_threads()
            if thread == 0:
                calls[0] = call

    return main


@tsn.jit(name="all_gather_matmul_await")
def await_rows(n_pes):
    """Kernel `(calls, arrived, pe)`: ends when the rows of `pe` of call `calls[0]` have arrived.

    Args of the kernel: arrived: uint64 [n_pes], symmetric. pe: int32.
    """

    @T.prim_func
    def main(
        ctx: N.Context(), calls: T.Tensor((1,), "int64"), arrived: T.Tensor((n_pes,), "uint64"), pe: T.int32
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            if T.get_thread_binding() == 0:
                N.wait(arrived[pe], "ge", calls[0])

    return main


@tsn.jit(name="all_gather_matmul_put")
def put_to_peers(n_pes, nbytes, threads, signals=True):
    """Kernel `(gathered, x, calls, arrived)`: puts `x` to row `my_pe` of `gathered` on every other PE, with a signal unless
    `signals` is False.

    For PEs that copy engines cannot reach: on other nodes, and in the simulator.

    Args of the kernel:
        gathered: uint8 [n_pes, nbytes], symmetric. x: uint8 [nbytes]. calls: int64 [1].
        arrived: uint64 [n_pes], symmetric: the last call whose data have arrived from each PE.
    """

    @T.prim_func
    def main(
        ctx: N.Context(),
        gathered: T.Tensor((n_pes, nbytes), "uint8"),
        x: T.Tensor((nbytes,), "uint8"),
        calls: T.Tensor((1,), "int64"),
        arrived: T.Tensor((n_pes,), "uint64"),
    ):
        with T.Kernel(1, threads=threads):
            me = N.my_pe()
            for hop in T.serial(1, n_pes):
                pe = (me - hop + n_pes) % n_pes  # the next destination
                if signals:
                    N.put_signal_block(gathered[me, :], x, pe, arrived[me], T.cast(calls[0], "uint64"))
                else:
                    N.put_block(gathered[me, :], x, pe)
            N.quiet_block()

    return main


class PipelinedAllGatherMatmul(DistributedMatmul):
    """`cat(x of all ranks) @ w`, with a different `w` on every rank; constructed and called by all ranks.

    Args:
        rows, k, n, dtype, out_dtype: as for `AllGatherMatmul`; `out_dtype` other than `dtype` is for torch.float8_e4m3fn.
        threads: threads of the one-block kernels for the barrier and, between nodes, for puts.
        group: the ranks; see `tilescale_net.world`.

    Takes n_pes * rows * k elements of the symmetric heap, and n_pes * rows scales.

    Raises:
        TypeError, ValueError, RankMismatch, HeapError: as `AllGatherMatmul`.
    """

    def __init__(
        self, rows: int, k: int, n: int, *, dtype: torch.dtype = torch.bfloat16, out_dtype: torch.dtype | None = None,
        threads: int = 512, group: "tsn.Group" = None,
    ):  # fmt: skip
        name = "PipelinedAllGatherMatmul"
        check_extents(name, dtype, rows=rows, k=k, n=n)
        if dtype != SCALED and out_dtype not in (None, dtype):
            raise TypeError(f"{name}: out_dtype is {out_dtype}; torch's GEMM of {dtype} gives {dtype}")
        super().__init__(name, f"rows={rows}, k={k}, n={n}", dtype, out_dtype, threads, 1, group)
        self.rows, self.k, self.n = rows, k, n
        signals = ((self.n_pes,), torch.uint64)
        self.memory = self.allocate({
            "gathered": ((self.n_pes, rows, k), dtype), "begun": signals, "arrived": signals,
            **({"scales": ((self.n_pes, rows), torch.float32)} if self.scaled else {}),
        })  # fmt: skip
        self._sides = SideStreams(self.device, (-1, 0))

    @named("tilescale_net.PipelinedAllGatherMatmul")
    @torch.no_grad()  # torch.mm with `out` raises for tensors that need a gradient; the operators define their own gradients
    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None = None, *,
        x_scales: torch.Tensor | None = None, w_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """All ranks' rows times this rank's `w`; asynchronous on the current stream; arguments as in
        `AllGatherMatmul.__call__`."""
        out, _, _, scales = self._arguments(
            x, w, out, x_scales, w_scales, self.rows, self.n_pes * self.rows, self.needs_symmetric_source
        )
        parts, me = out.view(self.n_pes, self.rows, self.n), self.rank
        if self.n_pes > 1:
            self._sides.fork()
            with self._sides[PUSHES]:
                # A peer that has begun this call no longer reads data of the previous one.
                barrier_peers(self.n_pes, self.threads)(self._calls, self.memory["begun"])
                sent = self._push(x, scales[0])
        torch_gemm(x, w, *scales, parts[me])
        for hop in range(1, self.n_pes):
            pe = (me + hop) % self.n_pes
            # Two streams alternate: a GEMM fills the SMs that the last tiles of the previous GEMM leave idle.
            with self._sides[OTHER_GEMMS] if hop % 2 else contextlib.nullcontext():
                # The peers' data arrive about when this PE's sends are done; an earlier wait would occupy an SM.
                self._sides.wait(sent[hop - 1])
                await_rows(self.n_pes)(self._calls, self.memory["arrived"], pe)
                row_scales = self.memory["scales"][pe] if self.scaled else None
                torch_gemm(self.memory["gathered"][pe], w, row_scales, scales[1], parts[pe])
        self._sides.join()
        return out

    def _push(self, x: torch.Tensor, x_scales: torch.Tensor) -> list:
        """Send this rank's scales, if any, its rows and the number of the call to all others; an event per destination."""
        if self.device.type == "cuda" and not self.needs_symmetric_source:
            events = []
            for hop in range(1, self.n_pes):
                pe = (self.rank - hop) % self.n_pes
                if self.scaled:
                    self._copy(self.memory["scales"][self.rank], x_scales, pe)
                self._copy(self.memory["gathered"][self.rank], x, pe)
                # A copy, because a kernel that signals would need an SM, and the GEMM has taken all.
                self._copy(self.memory["arrived"][self.rank : self.rank + 1], self._calls, pe)
                events.append(self._sides.mark())
            return events
        if self.scaled:
            self._put("scales", x_scales, signals=False)
        self._put("gathered", x, signals=True)
        return (self.n_pes - 1) * [self._sides.mark()]

    def _copy(self, target: torch.Tensor, data: torch.Tensor, pe: int) -> None:
        """Copy to symmetric memory of a peer. Copies of one stream run in order."""
        memory = self._world.memory
        assert isinstance(memory, CudaMemory)
        memory.copy_to_peer(self._world.peer_base[pe], target, data)

    def _put(self, buffer: str, data: torch.Tensor, signals: bool) -> None:
        put = put_to_peers(self.n_pes, data.nbytes, self.threads, signals)
        gathered = as_bytes(self.memory[buffer], self.n_pes, data.nbytes)
        put(gathered, as_bytes(data, data.nbytes), self._calls, self.memory["arrived"])
