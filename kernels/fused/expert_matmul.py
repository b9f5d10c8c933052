"""Expert GEMMs of a mixture-of-experts layer, overlapped with dispatch and combine.

After a dispatch, a tile of the expert-major rows is multiplied when its rows have arrived, in the order of the experts, in
which a dispatch that counts tiles sends them. Before a combine, the GEMM goes from the last expert to the first and signals
finished tiles; the combine sends a token's row when the GEMM of its first expert is done. Each GEMM is one persistent kernel
beside the few blocks of the dispatch or the combine.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.runtime.profiling import named

from ..collective import dtype_name, wait_until_resident
from ..moe.all_to_all import AllToAll
from ..moe.handle import Dispatched, Handle, Pending
from ..moe.layout import PlanOffsets, align4
from ..moe.row_ops import groups_of, int_vars
from ..moe.tiles import Tiles
from . import gemm
from . import scaled_gemm as scaled
from .gemm import DEFAULT, SCALED, FusedMatmul, Tiling, check_extents, check_scales
from .scaled_gemm import ScaledTiling, scaled_matmul

# ---------------------------------------------------------------------------------------------------------------------
# Building blocks of `matmul_experts`: the tile scheduler, and signals of tiles that have no rows.
#
# Arguments: `shape`, see `gemm.Shape`; `at` and `totals`, see `kernels.moe.layout.PlanOffsets`.


class Order(NamedTuple):
    """State of the tile scheduler of a call.

    Attributes:
        tickets: int32 [2], number of tiles taken, by the parity of the call. parity: int32.
        begins: int32 [experts + 1], shared memory, see `count_tiles`.
        totals: int32, see `kernels.moe.layout.PlanOffsets`.
        leaves: int32, whether this block stops after `before_leaving` tiles are taken.
        before_leaving: int32.
    """

    tickets: Any
    parity: Any
    begins: Any
    totals: Any
    leaves: Any = None
    before_leaving: Any = None


@tsn.macro
def count_tiles(shape, at, totals, heights, begins, thread):
    """begins[e] = rows of tiles of the experts before expert e. Called by all threads of a block.

    Args:
        heights: int32 [experts], scratch: rows of tiles per expert.
    """
    n = T.alloc_var("int32")
    for i in T.serial(-(-at.local_experts // gemm.THREADS)):
        e = i * gemm.THREADS + thread
        if e < at.local_experts:
            # A rejected dispatch has counts, but no room for their rows.
            n = T.min(totals[at.counts + e], totals[at.offsets + e + 1] - totals[at.offsets + e])
            heights[e] = (n + shape.tile[0] - 1) // shape.tile[0]
    T.sync_threads()
    for i in T.serial(-(-(at.local_experts + 1) // gemm.THREADS)):
        end = i * gemm.THREADS + thread
        if end <= at.local_experts:
            n = 0
            for e in T.serial(end):
                n = n + heights[e]
            begins[end] = n
    T.sync_threads()


@tsn.macro
def next_tile(shape, at, backwards, order, b):
    """b.tile = (expert, row, column, whether only the first warpgroup has rows) of the next tile; also queue it for the
    multiplying warps. Expert -1: no tile is left.

    Called by the copying warp. Order: experts, then columns, then rows; with `backwards`, in reverse.
    """
    expert, inside, height = int_vars(3)
    T.barrier_wait(b.queue_empty[b.turn[0] % 2], ((b.turn[0] // 2) & 1) ^ 1)
    for i in T.unroll(4):
        b.tile[i] = -1
    if b.thread == 0:
        inside = order.begins[at.local_experts] * shape.tiles_n
        if backwards:
            # Blocks leave before they take a ticket, so every ticket is a tile that is multiplied.
            if (
                order.leaves == 0
                or T.atomic_add(order.tickets[order.parity], 0, return_prev=True) < order.before_leaving
            ):
                inside = T.atomic_add(order.tickets[order.parity], 1, return_prev=True)
        else:
            inside = T.atomic_add(order.tickets[order.parity], 1, return_prev=True)
        if inside < order.begins[at.local_experts] * shape.tiles_n:
            if backwards:
                inside = order.begins[at.local_experts] * shape.tiles_n - 1 - inside
            expert = 0
            while inside >= order.begins[expert + 1] * shape.tiles_n:
                expert = expert + 1
            inside = inside - order.begins[expert] * shape.tiles_n
            height = order.begins[expert + 1] - order.begins[expert]
            b.tile[0] = expert
            b.tile[1] = order.totals[at.offsets + expert] + inside % height * shape.tile[0]
            b.tile[2] = inside // height * shape.tile[1]
            left = order.totals[at.counts + expert] - inside % height * shape.tile[0]
            b.tile[3] = T.if_then_else(left <= shape.half, 1, 0)
        for i in T.unroll(4):
            b.queue[b.turn[0] % 2 * 4 + i] = b.tile[i]
    for i in T.unroll(4):
        b.tile[i] = T.shfl_sync(b.tile[i], 0)
    T.barrier_arrive(b.queue_full[b.turn[0] % 2])
    b.turn[0] = b.turn[0] + 1


@tsn.macro
def add_missing_rows(shape, at, totals, finished, tiles, thread):
    """Announce tiles without rows, which no GEMM of this call announces. Called by a block."""
    begin, end, used = int_vars(3)
    for i in T.serial(-(-tiles // gemm.THREADS)):
        t = i * gemm.THREADS + thread
        if t < tiles:
            used = 0
            for e in T.serial(at.local_experts):
                begin = totals[at.offsets + e]
                end = T.min(begin + totals[at.counts + e], totals[at.offsets + e + 1])
                if t * shape.tile[0] >= begin and t * shape.tile[0] < end:
                    used = 1
            if used == 0:
                N.signal(finished[0, t], shape.tiles_n * gemm.WARPS, N.my_pe(), op="add")


@tsn.jit(name="expert_matmul")
def matmul_experts(
    ranks, experts, capacity, n, k, dtype, out_dtype, transposed=False, tile=(128, 256, 64), stages=4, panel=8, columns=128, workers=132,
    waits=False, tells=False, scaled=False,
):  # fmt: skip
    """Kernel `(out, x, w, totals, calls, tickets, arrivals, arrived, finished)`, with `tells` also `(…, started, leaving,
    share)`, with `scaled` also `(…, x_scales, w_scales)`: `out` = the rows of each expert times its matrix.

    Args:
        ranks, experts: number of ranks, and of experts of this PE.
        capacity, n, k: extents of `x` [capacity, k], `w` and `out` [1, capacity, n].
        dtype, out_dtype: dtype of `x` and `w`, and of `out`; accumulation is in float32.
        transposed: `w` is [experts, n, k] instead of [experts, k, n].
        tile, stages, columns, workers: see `gemm.Shape`; `panel` is ignored.
        waits: wait for each tile of `x`, until its word of `arrived` has reached `arrivals[0]` times the rows of a tile.
        tells: compute the last tile first, and announce finished tiles: words of `finished` grow by 8 per column tile.
        scaled: multiply sums by `x_scales` [capacity] of their row, which arrive with the rows, and `w_scales` [experts, n]
            of their column, both float32.

    `totals` (int32, see `kernels.moe.layout.PlanOffsets`) holds the rows of each expert, which begin at a tile. `out` is
    undefined behind an expert's last row, up to the end of the tile.
    `calls` (int64 [1]) holds the number of this call, 1 or more; `tickets` (int32 [2], zero before the first call) belongs
    to this kernel. `arrivals` (int64 [1]), `arrived` and `finished` (uint64 [1, tiles + 1], symmetric): see `Tiles`.
    `started` (uint64 [1], symmetric) grows by 1 when the first block has begun. `leaving` (int32) blocks end when `share` /
    256 (int32) of the tiles are taken, and leave their SMs to the combine.
    """
    shape = gemm.Shape(1, capacity, n, k, tile, stages, panel, columns, workers, transposed)
    (bm, bn, bk), tiles, at = tile, -(-capacity // tile[0]), PlanOffsets(ranks, experts)

    @T.macro
    def copy_left(x, b, half, first, depth, stage):
        if half * b.tile[3] == 0:
            gemm.copy(x[first : first + shape.half, depth : depth + bk], b.left[stage, half, :, :], b, stage)

    @T.macro
    def copy_right(w, b, depth, stage):
        if transposed:
            gemm.copy(
                w[b.tile[0], b.tile[2] : b.tile[2] + bn, depth : depth + bk], b.right[stage, :, :], b, stage
            )  # fmt: skip
        else:
            gemm.copy(
                w[b.tile[0], depth : depth + bk, b.tile[2] : b.tile[2] + bn], b.right[stage, :, :], b, stage
            )  # fmt: skip

    @T.macro
    def finish(group, total, b, out, finished, scales):
        if total is not None:
            if scaled:
                gemm.get_row_scales(capacity, shape, group, scales.tile, lambda r: scales.x[r], b.tile[1])
                gemm.scale(shape, group, total, scales.tile, lambda c: scales.w[b.tile[0], c], b.tile[2])
            gemm.store(shape, group, total, b.result[0], out, 0, b.tile[1], b.tile[2])
        if tells:
            gemm.announce(finished, 0, b.tile[1] // bm, b.thread)

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((1, capacity, n), out_dtype),
        x: T.Tensor((capacity, k), dtype),
        w: T.Tensor((experts, n, k) if transposed else (experts, k, n), dtype),
        totals: T.Tensor((at.words,), "int32"),
        calls: T.Tensor((1,), "int64"),
        tickets: T.Tensor((2,), "int32"),
        arrivals: T.Tensor((1,), "int64"),
        arrived: T.Tensor((1, tiles + 1), "uint64"),
        finished: T.Tensor((1, tiles + 1), "uint64"),
        started: T.Tensor((1,), "uint64") if tells else None,
        leaving: T.int32 if tells else None,
        share: T.int32 if tells else None,
        x_scales: T.Tensor((capacity,), "float32") if scaled else None,
        w_scales: T.Tensor((experts, n), "float32") if scaled else None,
    ):
        with T.Kernel(workers, threads=gemm.THREADS) as block:
            b = gemm.Block(*gemm.block_memory(shape, dtype, (out_dtype,), 4))
            heights, begins = T.alloc_shared((experts,), "int32"), T.alloc_shared((experts + 1,), "int32")
            thread, parity = b.thread, T.cast(calls[0] % 2, "int32")
            tile_scales = T.alloc_shared((2, shape.half + bn), "float32") if scaled else None
            scales = gemm.Scales(tile_scales, x_scales, w_scales)
            is_tile = lambda: b.tile[0] >= 0  # noqa: E731
            end = lambda group, total: finish(group, total, b, out, finished, scales)  # noqa: E731
            gemm.begin(b)
            count_tiles(shape, at, totals, heights, begins, thread)
            if block == 0:
                if thread == 0:
                    tickets[1 - parity] = 0
                if tells:
                    if thread == 0:
                        N.signal(started[0], 1, N.my_pe(), op="add")
                    add_missing_rows(shape, at, totals, finished, tiles, thread)
            leaves = T.if_then_else(block < leaving, 1, 0) if tells else 0
            before_leaving = begins[experts] * shape.tiles_n * share // 256 if tells else 0
            order = Order(tickets, parity, begins, totals, leaves, before_leaving)
            if thread < 128:
                T.dec_max_nreg(40)
                if thread < 32:
                    if tells and not waits:
                        # True at once: TMA reads local data of earlier kernels.
                        N.wait_warp(arrived[0, tiles], "ge", 0, proxy="async")
                    next_tile(shape, at, tells, order, b)
                    while b.tile[0] >= 0:
                        if waits:
                            N.wait_warp(arrived[0, b.tile[1] // bm], "ge", arrivals[0] * bm, proxy="async")
                        gemm.copy_tile(
                            shape, b, lambda: b.tile[1],
                            lambda half, first, depth, stage: copy_left(x, b, half, first, depth, stage),
                            lambda depth, stage: copy_right(w, b, depth, stage),
                        )  # fmt: skip
                        next_tile(shape, at, tells, order, b)
            elif thread < 256:
                gemm.multiply_tiles(shape, 0, b, is_tile, lambda: None, end)
            else:
                gemm.multiply_tiles(shape, 1, b, is_tile, lambda: None, end, lambda: b.tile[3] == 1)

    return main


# Share of the tiles after which a combine begins. A token's row is sent when the last of its local experts is done, so few
# rows are ready earlier.
LATE = 0.5


class ExpertMatmul(FusedMatmul):
    """The rows of each local expert times its matrix, overlapped with dispatches and combines of one AllToAll.

    All ranks construct it with the same arguments.

    Args:
        moe: the AllToAll, constructed with `tile_rows`.
        k, n: rows and columns of each expert's matrix.
        dtype: dtype of rows, matrices and results: torch.bfloat16 or torch.float16; or torch.float8_e4m3fn with a scale for
            each row (an AllToAll with `scale_words=1`) and for each column of each expert, see `FusedMatmul`, and results
            in torch.bfloat16. Accumulation is in float32.
        tiling: geometry of the GEMM; its tiles must have `tile_rows` rows. `panel` is ignored.

    Raises:
        TypeError, ValueError: a wrong dtype, extent or geometry, by name.
        RankMismatch: ranks pass different arguments.
    """

    NAME = "ExpertMatmul"

    def __init__(self, moe: AllToAll, k: int, n: int, *, dtype: torch.dtype = torch.bfloat16, tiling: Tiling = DEFAULT):
        if not isinstance(moe, AllToAll):
            raise TypeError(f"{self.NAME}: moe is {moe!r}; it must be an AllToAll")
        check_extents(self.NAME, dtype, k=k, n=n)
        config = moe.config
        if not isinstance(tiling, Tiling) or config.tile_rows != tiling.tile[0]:
            raise ValueError(
                f"{self.NAME}: {tiling} and an AllToAll with tile_rows {config.tile_rows} do not go together; make it with "
                "tile_rows and alignment of the tile's rows"
            )
        super().__init__(self.NAME, f"k={k}, n={n}", dtype, None, tiling, gemm.THREADS, moe.blocks, moe.world)
        self._moe, self.k, self.n, self._capacity = moe, k, n, config.capacity
        words, self._started = self.allocate(
            {"finished": ((config.tiles + 1,), torch.uint64), "started": ((1,), torch.uint64)}
        ).values()
        with torch.inference_mode(False):
            self._tickets = torch.zeros(2, dtype=torch.int32, device=self.device)
            calls = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._finished = Tiles(tiling.tile[0], words, calls, -(-n // tiling.tile[1]) * gemm.WARPS, moe.blocks)
        self._loaded: set[tuple[bool, bool]] = set()

    def kernels(
        self, w: torch.Tensor, ways: Sequence[str] = ("alone", "arriving", "combined")
    ) -> list[Callable[[], object]]:
        """Callables that compile one kernel each for matrices like `w`, for `tilescale_net.compiler.jit.compile_together`.

        Without this, the first call of each kernel compiles it.

        Args:
            w: as in a call.
            ways: "alone" for `__call__`, and names of methods.
        """
        _, transposed = self._matrices(w)
        options: dict[str, dict[str, bool]] = {"alone": {}, "arriving": dict(waits=True), "combined": dict(tells=True)}
        return [functools.partial(self._kernel, transposed, **options[way]) for way in ways]

    @named("tilescale_net.ExpertMatmul")
    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, handle: Handle, out: torch.Tensor | None = None, *,
        x_scales: torch.Tensor | None = None, w_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The GEMMs after all rows have arrived.

        Args:
            x: [capacity, k], expert-major, as in the result of a dispatch.
            w: [local experts, k, n], contiguous, or the last two axes of a contiguous tensor transposed.
            handle: the handle of the dispatch.
            out: [capacity, n]; default a new tensor.
            x_scales, w_scales: for torch.float8_e4m3fn: float32 [capacity] or [capacity, 1], and [local experts, n].

        Returns:
            `out`, undefined outside of the experts' rows.

        Raises:
            TypeError, ValueError: a wrong argument, by name.
        """
        self._begin()
        self._rows(x, (self._capacity, self.k))
        weight, transposed = self._matrices(w)
        scales = self._all_scales(x_scales, w_scales)
        out = self._result(out, (self._capacity, self.n), ("x", x), ("w", weight))
        self._launch(out, x, weight, transposed, scales, self._totals(handle))
        return out

    @named("tilescale_net.ExpertMatmul.arriving")
    def arriving(
        self, pending: Pending, w: torch.Tensor, out: torch.Tensor | None = None, *,
        w_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The GEMMs of a dispatch in flight: each tile is computed when its rows have arrived.

        Args:
            pending: the result of `dispatch_send`, not yet received; pass it to `dispatch_recv` afterwards.
            w, out, w_scales: as in `__call__`.

        Returns and raises as `__call__`. ValueError for a dispatch of another object, or a received one.
        """
        self._begin()
        result = pending.result if isinstance(pending, Pending) else None
        if not isinstance(result, Dispatched):
            raise TypeError(f"{self.name}: pending is {pending!r}; it must be the result of dispatch_send")
        self._rows(result.x, (self._capacity, self.k))
        weight, transposed = self._matrices(w)
        scales = self._all_scales(result.scales, w_scales)
        out = self._result(out, (self._capacity, self.n), ("pending.result.x", result.x), ("w", weight))
        self._load(out, result.x, weight, transposed, scales, arrived=self._finished)
        tiles = self._moe.alongside(pending)
        self._launch(out, result.x, weight, transposed, scales, self._totals(pending.handle), arrived=tiles)
        return out

    @named("tilescale_net.ExpertMatmul.combined")
    def combined(
        self, x: torch.Tensor, w: torch.Tensor, handle: Handle, *, x_scales: torch.Tensor | None = None,
        w_scales: torch.Tensor | None = None, products: torch.Tensor | None = None, late: float = LATE, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """`AllToAll.combine` of the results of the GEMMs; each row is sent when its GEMMs are done.

        Args:
            x, w, handle, x_scales, w_scales: as in `__call__`; `n` is `hidden` of the AllToAll.
            products: [capacity, n], memory for the results of the GEMMs; default a new tensor.
            late: share of the tiles after which the GEMM leaves SMs to the combine, which then begins; 0: the combine has
                its SMs from the start, and waits for its first rows. The first call with other options ignores it, because
                it loads the combine's kernel.
            options: options of `AllToAll.combine_send`, such as `weights`, `out`, and `blocks`, which take an SM each;
                default `blocks_beside_gemm` of the AllToAll.

        Returns:
            [tokens, hidden], as `AllToAll.combine`.

        Errors as for `__call__` and `AllToAll.combine`. Unless the combine rejects the call, nothing was sent, and the
        other ranks wait for this rank.
        """
        self._begin()
        config = self._moe.config
        if self.n != config.hidden or self.out_dtype != config.combine_dtype:
            raise ValueError(
                f"{self.name}: products have {self.n} columns of {self.out_dtype}; the AllToAll combines rows of {config.hidden} "
                f"of {config.combine_dtype}"
            )
        self._rows(x, (self._capacity, self.k))
        weight, transposed = self._matrices(w)
        scales = self._all_scales(x_scales, w_scales)
        y = self._result(products, (self._capacity, self.n), ("x", x), ("w", weight))
        if not isinstance(late, (int, float)) or not 0 <= late < 1:
            raise ValueError(f"{self.name}: late is {late!r}; it must be a share of the tiles, from 0 to less than 1")
        self._load(y, x, weight, transposed, scales, tells=True)
        tiles, proxy = self._finished, self._world.proxy
        if proxy is not None and proxy.holds_up_launches:
            late = 0  # a launch returns when its kernel has ended, so the combine cannot wait for the GEMM behind it
        if late:
            tiles = dataclasses.replace(tiles, started=self._started)
        options["blocks"] = options.get("blocks") or self._moe.blocks_beside_gemm
        self._finished.next_call()
        try:
            pending = self._moe.combine_send(y, handle, tiles=tiles, **options)
        except Exception:
            self._finished.calls.sub_(1)  # no combine waits for this call
            raise
        self._moe.alongside(pending)
        leaving = options["blocks"] if late else 0
        self._launch(
            y, x, weight, transposed, scales, self._totals(handle), tells=True, leaving=leaving, share=int(256 * late)
        )
        return self._moe.combine_recv(pending)

    def _matrices(self, w) -> tuple[torch.Tensor, bool]:
        return self._weight(w, self._moe.config.local_experts, self.k, self.n)

    def _all_scales(self, x_scales, w_scales) -> tuple[torch.Tensor, ...]:
        """The kernels' last arguments: scales of FP8 operands, else none. Raises TypeError or ValueError, by name."""
        columns = self._moe.config.local_experts, self.n
        hint = " (scales of 128 elements are not supported; an AllToAll with scale_words=1 has one for each row)"
        check_scales(self.name, self.dtype, x_scales, w_scales, self._capacity, *columns, hint=hint)
        if not self.scaled:
            return ()
        self._check("x_scales", x_scales, torch.float32)
        self._check("w_scales", w_scales, torch.float32)
        return x_scales.view(-1), w_scales.view(columns)

    def _totals(self, handle: Handle) -> torch.Tensor:
        if not isinstance(handle, Handle):
            raise TypeError(f"{self.name}: handle must be the handle of a dispatch, not {type(handle).__name__}")
        if handle.signature != self._moe.config.signature:
            raise ValueError(f"{self.name}: the handle is of an AllToAll of another configuration")
        return handle.plan.totals

    def _load(self, out, x, weight, transposed: bool, scales, **options: Any) -> None:
        """Launch the GEMM once without rows before it runs beside communication. A kernel's first launch loads it, for
        which the driver waits until running kernels have ended, while the combine's kernel would wait for the GEMM.
        """
        key = transposed, "tells" in options
        if self.device.type != "cuda" or key in self._loaded:
            return
        config = self._moe.config
        words = PlanOffsets(config.ranks, config.local_experts).words
        no_rows = torch.zeros(words, dtype=torch.int32, device=self.device)
        self._launch(out, x, weight, transposed, scales, no_rows, **options)
        wait_until_resident()(self._calls, self._finished.words[-1:], 0, 0)
        torch.cuda.synchronize(self.device)
        self._finished.reset()
        self._started.view(torch.uint8).zero_()
        self._loaded.add(key)

    @property
    def _workers(self) -> int:
        return self.tiling.workers(self.device, 1, self._capacity, self.n)

    def _kernel(self, transposed: bool, waits: bool = False, tells: bool = False) -> Any:
        config = self._moe.config
        return matmul_experts(
            config.ranks, config.local_experts, self._capacity, self.n, self.k, dtype_name(self.dtype),
            dtype_name(self.out_dtype), transposed, **vars(self.tiling), workers=self._workers, waits=waits, tells=tells,
            scaled=self.scaled,
        )  # fmt: skip

    def _launch(
        self, out, x, weight, transposed: bool, scales, totals, arrived: Tiles | None = None, tells: bool = False,
        leaving: int = 0, share: int = 0,
    ) -> None:  # fmt: skip
        finished = self._finished
        self._calls.add_(1)
        kernel = self._kernel(transposed, arrived is not None, tells)
        awaited = arrived or finished
        kernel(
            out.view(1, self._capacity, self.n), x, weight, totals, self._calls, self._tickets, awaited.calls,
            awaited.words.view(1, -1), finished.words.view(1, -1),
            *((self._started, min(leaving, self._workers - 1), share) if tells else ()), *scales,
        )  # fmt: skip


class ScaledExpertMatmul(ExpertMatmul):
    """As ExpertMatmul, for float8_e4m3fn with block scales: one per 128 elements of a row, one per 128 x 128 of a matrix.

    All ranks construct it with the same arguments. `x_scales` of a call is float32 [capacity, blocks of k], optionally
    padded to a multiple of 4; `w_scales` is [local experts, blocks of n, blocks of k], from `scaled_gemm.quantise_weights`
    of [experts, n, k]; `w` [local experts, k, n] is the transpose, in its last two axes, of a contiguous tensor.

    Args:
        moe: the AllToAll, constructed with `tile_rows`; `arriving` of float8_e4m3fn needs k = `hidden`, a multiple of 512.
        k, n: rows and columns of each expert's matrix.
        tiling: geometry of the GEMM; its tiles must have `tile_rows` rows.

    Raises:
        TypeError, ValueError: a wrong extent or geometry, by name.
        RankMismatch: ranks pass different arguments.
    """

    NAME = "ScaledExpertMatmul"

    def __init__(self, moe: AllToAll, k: int, n: int, *, tiling: ScaledTiling = scaled.DEFAULT):
        if not isinstance(tiling, ScaledTiling) or tiling.cluster > 1:
            raise ValueError(f"{self.NAME}: tiling is {tiling!r}; it must be a ScaledTiling with cluster 1")
        plain = Tiling(tiling.tile, tiling.stages, tiling.panel, tiling.columns)
        super().__init__(moe, k, n, dtype=SCALED, tiling=plain)
        self._geometry = tiling

    def _kernel(self, transposed: bool, waits: bool = False, tells: bool = False) -> Any:
        config, tiling, dtype = self._moe.config, self._geometry, dtype_name(self.out_dtype)
        sizes = config.local_experts, self.n, self.k, dtype
        if not waits and not tells:
            return scaled.kernel_of(*sizes, "block", tiling, self.device)
        return scaled.scaled_gemm(
            *sizes, **vars(tiling), workers=self._workers, tiles=config.tiles, waits=waits
        )  # fmt: skip

    def _all_scales(self, x_scales, w_scales) -> tuple[torch.Tensor, ...]:
        blocks, config = groups_of(self.k), self._moe.config
        shapes: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
            "x_scales": (x_scales, [(self._capacity, blocks), (self._capacity, align4(blocks))]),
            "w_scales": (w_scales, [(config.local_experts, groups_of(self.n), blocks)]),
        }
        for name, (tensor, allowed) in shapes.items():
            self._check(name, tensor, torch.float32)
            if tuple(tensor.shape) not in allowed:
                raise ValueError(f"{self.name}: {name} has shape {list(tensor.shape)}; it must be {list(allowed[0])}")
        return x_scales, w_scales

    def _launch(
        self, out, x, weight, transposed: bool, scales, totals, arrived: Tiles | None = None, tells: bool = False,
        leaving: int = 0, share: int = 0,
    ) -> None:  # fmt: skip
        config, tiling, (x_scales, w_scales) = self._moe.config, self._geometry, scales
        at, local = PlanOffsets(config.ranks, config.local_experts), config.local_experts
        counts, offsets = totals[at.counts : at.counts + local], totals[at.offsets : at.offsets + local + 1]
        if arrived is None and not tells:
            scaled_matmul(
                x, weight, x_scales, w_scales, out=out, counts=counts, offsets=offsets, out_dtype=self.out_dtype, tiling=tiling,
            )  # fmt: skip
            return
        if x_scales.shape[1] % scaled.SCALES_AT_ONCE:
            raise ValueError(
                f"{self.name}: x_scales has {x_scales.shape[1]} columns; beside communication they must be a multiple of 4, "
                "because they are read in place"
            )
        self._calls.add_(1)
        kernel = self._kernel(transposed, arrived is not None, tells)
        signals = (
            (self._finished.words.view(1, -1), self._started, min(leaving, self._workers - 1), share)
            if arrived is None
            else (arrived.calls, arrived.words)
        )
        kernel(out, x, weight, x_scales, w_scales, counts, offsets, self._calls, self._tickets, *signals)
