"""The common parts of fused GEMMs: shapes and dtypes, the geometry of tiles, and streams beside the caller's."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.compiler.jit import compile_together

from ..collective import Collective
from ..launches import Form, Launch

# ---------------------------------------------------------------------------------------------------------------------
# Steps of a persistent matrix product, which kernels put together: which tile is next, who copies, who multiplies.
#
# A block has three warpgroups. One warp of the first takes the next tile from a counter and copies its operands by TMA into
# a ring of `stages`; the other two multiply half of the tile's rows each, and their results leave through shared memory
# while the ring fills for the next tile. Tiles are taken, not dealt out: a block that starts late, because a kernel that
# communicates had its SM, takes fewer.


THREADS = 384
MULTIPLIERS = 256  # of them
WARPS = MULTIPLIERS // 32


@dataclass(frozen=True)
class Shape:
    """Extents of a product and of its tiles, known when its kernel is compiled.

    Attributes:
        parts: products of `rows` rows each, one after the other.
        rows, n, k: of a product.
        tile: rows, columns and depth of a tile; the rows are twice those of a warpgroup.
        stages: of the ring of operands.
        panel: rows of tiles that are processed together, for the L2 cache.
        columns: columns stored at a time; they divide the tile's.
        workers: blocks.
        transposed: the right operand is [n, k].
    """

    parts: int
    rows: int
    n: int
    k: int
    tile: tuple[int, int, int]
    stages: int
    panel: int
    columns: int
    workers: int
    transposed: bool

    @property
    def tiles_m(self) -> int:
        return -(-self.rows // self.tile[0])

    @property
    def tiles_n(self) -> int:
        return -(-self.n // self.tile[1])

    @property
    def total(self) -> int:
        """Tiles of all parts."""
        return self.parts * self.tiles_m * self.tiles_n

    @property
    def half(self) -> int:
        """Rows of a warpgroup."""
        return self.tile[0] // 2

    @property
    def right(self) -> tuple[int, int]:
        """Shape of a tile of the right operand."""
        _, bn, bk = self.tile
        return (bn, bk) if self.transposed else (bk, bn)


class Place(NamedTuple):
    """Where the tile is that a block works on; int32 [1] each, registers of a thread.

    Attributes:
        part: the number of the part, see `Shape`; in a reduce-scatter, how many places behind this PE the owner of the rows is.
        row, column: the first of the tile in the part.
        pe: the PE that has the rows, in an all-gather.
    """

    part: Any
    row: Any
    column: Any
    pe: Any = None


class Scales(NamedTuple):
    """Scales of 8-bit operands, float32.

    Attributes:
        tile: [2, rows of a warpgroup + columns of a tile], shared memory.
        x: of rows of the left operand. w: of columns of the right one.
        gathered: [2, n_pes, rows], of rows of other PEs, where such are gathered.
    """

    tile: Any
    x: Any
    w: Any
    gathered: Any = None


class Block(NamedTuple):
    """Memory of a block: shared by its warps, and registers of each thread (int32).

    Attributes:
        left, right: the ring of operands, [stages, 2, rows of a warpgroup, depth] and [stages, *Shape.right]. Summands come
            through that of the right ones as well.
        result: [2, rows of a warpgroup, columns] of each dtype that leaves, tiles on their way to memory.
        sums: of a tile, fragments of the two warpgroups.
        full, empty: barriers of the ring's stages.
        chosen, given, taken: the next two tiles, and their barriers.
        step: of the ring. turn: tiles so far. tile: the current one, as many words as describe it.
        thread: of the block.
    """

    left: Any
    right: Any
    result: Any
    sums: Any
    full: Any
    empty: Any
    chosen: Any
    given: Any
    taken: Any
    step: Any
    turn: Any
    tile: Any
    thread: Any


@tsn.macro
def block_memory(shape, dtype, out_dtypes, words=1):
    """Memory of a block of a kernel that multiplies: the fields of `Block`.

    A macro, so that buffers have names: those without one have one alignment in shared memory, the largest of any.

    Args:
        out_dtypes: of what leaves, one or two. words: that describe a tile.
    """
    left = T.alloc_shared((shape.stages, 2, shape.half, shape.tile[2]), dtype)
    right = T.alloc_shared((shape.stages, *shape.right), dtype)
    result = T.alloc_shared((2, shape.half, shape.columns), out_dtypes[0])
    upper = T.alloc_fragment((shape.half, shape.tile[1]), "float32")
    lower = T.alloc_fragment((shape.half, shape.tile[1]), "float32")
    full = T.alloc_barrier([32] * shape.stages)
    empty = T.alloc_barrier([WARPS] * shape.stages)
    chosen = T.alloc_shared((2 * words,), "int32")
    given = T.alloc_barrier([32] * 2)
    taken = T.alloc_barrier([WARPS] * 2)
    step = T.alloc_local((1,), "int32")
    turn = T.alloc_local((1,), "int32")
    tile = T.alloc_local((words,), "int32")
    others = [T.alloc_shared((2, shape.half, shape.columns), other) for other in out_dtypes[1:]]
    return (
        left, right, (result, *others), (upper, lower), full, empty, chosen, given, taken, step, turn, tile,
        T.get_thread_binding(),
    )  # fmt: skip


@tsn.macro
def begin(b):
    """By all threads of a block."""
    b.step[0] = 0
    b.turn[0] = 0


@tsn.macro
def place(shape, tile, at):
    """at = the place of the number `tile`: panels of rows, in each of them columns, in each of them rows."""
    inside = tile % (shape.tiles_m * shape.tiles_n)
    first = inside // (shape.panel * shape.tiles_n) * shape.panel
    height = T.min(shape.panel, shape.tiles_m - first)
    rest = inside - first * shape.tiles_n
    at.part[0] = tile // (shape.tiles_m * shape.tiles_n)
    at.row[0] = (first + rest % height) * shape.tile[0]
    at.column[0] = rest // height * shape.tile[1]


@tsn.macro
def next_tile(shape, tickets, call, b):
    """b.tile = the next tile of this call, which the warps that multiply get too; `shape.total` or more: no more.

    By the copying warp. A call takes one ticket for each tile, and one in vain for each block, so that the counter
    `tickets` (uint64 [1]) goes on from call to call.
    """
    T.barrier_wait(b.taken[b.turn[0] % 2], ((b.turn[0] // 2) & 1) ^ 1)
    b.tile[0] = 0
    if b.thread == 0:
        ticket = T.atomic_add(tickets[0], T.uint64(1), return_prev=True)
        b.tile[0] = T.cast(T.cast(ticket, "int64") - (call - 1) * (shape.total + shape.workers), "int32")
        b.chosen[b.turn[0] % 2] = b.tile[0]
    b.tile[0] = T.shfl_sync(b.tile[0], 0)
    T.barrier_arrive(b.given[b.turn[0] % 2])
    b.turn[0] = b.turn[0] + 1


@tsn.macro
def get_tile(b):
    """b.tile = the next tile. By the warps that multiply."""
    T.barrier_wait(b.given[b.turn[0] % 2], (b.turn[0] // 2) & 1)
    words = b.tile.shape[0]
    for i in T.unroll(words):
        b.tile[i] = b.chosen[b.turn[0] % 2 * words + i]
    T.sync_warp()
    if b.thread % 32 == 0:
        T.barrier_arrive(b.taken[b.turn[0] % 2])
    b.turn[0] = b.turn[0] + 1


@tsn.macro
def copy(source, target, b, stage):
    """Begin to copy a part of a tile to a stage of the ring. By the copying warp."""
    T.tma_copy(source, target, barrier=b.full[stage], leader_scope_threads=32)


@tsn.macro
def copy_tile(shape, b, row, copy_left, copy_right):
    """Copy the operands of a tile, step by step of its depth. By the copying warp.

    Args:
        row(): the first of the tile. copy_left(half, first, depth, stage), copy_right(depth, stage): begin to copy the rows
            of a warpgroup from row `first` on, and the right operand; from column or row `depth` on.
    """
    bk = shape.tile[2]
    for i in T.serial(T.ceildiv(shape.k, bk)):
        stage = b.step[0] % shape.stages
        T.barrier_wait(b.empty[stage], ((b.step[0] // shape.stages) & 1) ^ 1)
        for half in T.unroll(2):
            first = row() + half * shape.half
            copy_left(half, first, i * bk, stage)
        copy_right(i * bk, stage)
        T.barrier_arrive(b.full[stage])
        b.step[0] = b.step[0] + 1


@tsn.macro
def copy_right(shape, w, b, depth, column, stage):
    """Begin to copy a tile of the right operand. By the copying warp."""
    _, bn, bk = shape.tile
    if shape.transposed:
        copy(w[column : column + bn, depth : depth + bk], b.right[stage, :, :], b, stage)
    else:
        copy(w[depth : depth + bk, column : column + bn], b.right[stage, :, :], b, stage)


@tsn.macro
def wait_for_all(arrived, chunk, n_pes, call, thread):
    """Wait until arrived[p, chunk] of every other PE p has reached `call`, by a warp; its TMA copies may read what they sent.

    A lane waits for a PE, since a look at a flag takes as long as a step of tensor cores.
    """
    for first in T.serial(-(-n_pes // 32)):
        pe = first * 32 + thread
        if pe < n_pes and pe != N.my_pe():
            N.wait(arrived[pe, chunk], "ge", call, proxy="async")
    T.sync_warp()


@tsn.macro
def copy_summand(shape, wide, summands, half, pe, b, stage, row, column):
    """Begin to copy a warpgroup's rows of a tile of summands[half, pe] [rows, n] to where a tile of the right operand would be.

    By the copying warp. `wide`: elements of the right operand that a summand takes the place of; `summands` is [rows, wide *
    n] of its dtype. The rows of a warpgroup may not be more than the summands that the depth of a tile has room for.
    """
    _, bn, bk = shape.tile
    if shape.transposed:
        for c in T.unroll(bn * wide // bk):
            first = column * wide + c * bk
            copy(
                summands[half, pe, row : row + shape.half, first : first + bk],
                b.right[stage, c * shape.half : (c + 1) * shape.half, :], b, stage,
            )  # fmt: skip
    else:
        copy(
            summands[half, pe, row : row + shape.half, column : column + bn],
            b.right[stage, 0 : shape.half, :], b, stage,
        )  # fmt: skip


def byte(value):
    """The byte of an element of 8 bits, as uint16."""
    return T.cast(T.reinterpret(value, "uint8"), "uint16")


@tsn.macro
def add_summand(shape, wide, dtype, mine, total, b):
    """total += what `copy_summand` has copied, of `dtype`, where that is `mine`. By a warpgroup that multiplies."""
    stages, bk = shape.stages, shape.tile[2] // wide
    s = b.step[0] % stages
    T.barrier_wait(b.full[s], (b.step[0] // stages) & 1)
    if mine:
        for i, j in T.Parallel(shape.half, shape.tile[1]):
            if wide == 2:
                # Byte by byte: the ring is laid out for operands of a byte.
                total[i, j] += T.cast(
                    T.reinterpret(
                        byte(b.right[s, j // bk * shape.half + i, j % bk * 2])
                        | byte(b.right[s, j // bk * shape.half + i, j % bk * 2 + 1]) << T.uint16(8),
                        dtype,
                    ),
                    "float32",
                )
            elif shape.transposed:
                total[i, j] += T.cast(b.right[s, j // bk * shape.half + i, j % bk], "float32")
            else:
                total[i, j] += T.cast(b.right[s, i, j], "float32")
    T.sync_warp()
    if b.thread % 32 == 0:
        T.barrier_arrive(b.empty[s])
    b.step[0] = b.step[0] + 1


@tsn.macro
def multiply(shape, group, total, b):
    """total = the product of warpgroup `group`'s rows of a tile; one step of tensor cores is always in flight."""
    stages, depth = shape.stages, -(-shape.k // shape.tile[2])
    for i in T.serial(depth):
        T.barrier_wait(b.full[b.step[0] % stages], (b.step[0] // stages) & 1)
        T.wgmma_gemm(
            b.left[b.step[0] % stages, group, :, :], b.right[b.step[0] % stages, :, :], total, transpose_B=shape.transposed,
            policy=T.GemmWarpPolicy.FullRow, clear_accum=i == 0,
        )  # fmt: skip
        T.wait_wgmma(1)
        if i > 0:
            if b.thread % 32 == 0:
                T.barrier_arrive(b.empty[(b.step[0] + stages - 1) % stages])
        b.step[0] = b.step[0] + 1
    T.wait_wgmma(0)
    if b.thread % 32 == 0:
        T.barrier_arrive(b.empty[(b.step[0] + stages - 1) % stages])
    T.warpgroup_fence_operand(total, num_regs=shape.half * shape.tile[1] // 128)


@tsn.macro
def skip(shape, b):
    """Release the operands of a tile in which this warpgroup has no rows: the other one has the tensor cores to itself."""
    for i in T.serial(-(-shape.k // shape.tile[2])):
        T.barrier_wait(b.full[b.step[0] % shape.stages], (b.step[0] // shape.stages) & 1)
        T.sync_warp()  # a lane that waited later might miss this phase of the barrier
        if b.thread % 32 == 0:
            T.barrier_arrive(b.empty[b.step[0] % shape.stages])
        b.step[0] = b.step[0] + 1


@tsn.macro
def multiply_tiles(shape, group, b, is_tile, find, finish, skips=None):
    """Multiply tiles until there are none left. By warpgroup `group` of the two that multiply.

    Args:
        is_tile(): whether `b.tile` is one. find(): where it is. finish(group, total): what becomes of its sums; None: there
            are none. skips(): whether this warpgroup has no rows in it; default: it always has some.
    """
    T.inc_max_nreg(232)
    get_tile(b)
    while is_tile():
        find()
        if skips is None:
            multiply(shape, group, b.sums[group], b)
            finish(group, b.sums[group])
        elif skips():
            skip(shape, b)
            finish(group, None)
        else:
            multiply(shape, group, b.sums[group], b)
            finish(group, b.sums[group])
        get_tile(b)
    T.tma_store_wait(0)


@tsn.macro
def get_row_scales(rows, shape, group, scales, of_row, row):
    """scales[group, 0 : half] = of_row(each row of warpgroup `group`), of which there are `rows`. By it."""
    for i in T.Parallel(shape.half):
        # Rows and columns outside of the product get some scale: they are never stored.
        scales[group, i] = of_row(T.min(row + group * shape.half + i, rows - 1))


@tsn.macro
def scale(shape, group, total, scales, of_column, column):
    """total[i, j] *= scales[group, i] * of_column(column of j). By warpgroup `group`.

    All pass through shared memory, since each thread needs those of a quarter of the columns.
    """
    for j in T.Parallel(shape.tile[1]):
        scales[group, shape.half + j] = of_column(T.min(column + j, shape.n - 1))
    for i, j in T.Parallel(shape.half, shape.tile[1]):
        total[i, j] = total[i, j] * scales[group, i] * scales[group, shape.half + j]


@tsn.macro
def store(shape, group, total, result, out, part, row, column):
    """out[part, …] = the sums of warpgroup `group`; they are on their way when this returns, see `T.tma_store_wait`."""
    columns = shape.columns
    for h in T.unroll(shape.tile[1] // columns):
        T.tma_store_wait(0)
        T.copy(total[:, h * columns : (h + 1) * columns], result[group, :, :])
        T.fence_proxy_async()
        T.tma_copy(
            result[group, :, :],
            out[
                part, row + group * shape.half : row + (group + 1) * shape.half,
                column + h * columns : column + (h + 1) * columns,
            ],
        )  # fmt: skip


DTYPES = (torch.bfloat16, torch.float16)
SCALED = torch.float8_e4m3fn  # with a scale for each row of `x` and each column of `w`
SUPPORTED_DTYPES = (*DTYPES, SCALED)


@dataclass(frozen=True)
class Tiling:
    """Geometry of a GEMM, see `Shape`.

    Args:
        tile: rows, columns and depth of a tile.
        stages: of the ring of operands in shared memory.
        panel: rows of tiles that are processed together, for the L2 cache.
        columns: columns stored at a time; they divide the tile's.
    """

    tile: tuple[int, int, int] = (128, 256, 64)
    stages: int = 4
    panel: int = 8
    columns: int = 128

    def __post_init__(self) -> None:
        numbers = (*self.tile, self.stages, self.panel, self.columns) if isinstance(self.tile, tuple) else ()
        if len(numbers) != 6 or any(isinstance(v, bool) or not isinstance(v, int) or v < 1 for v in numbers):
            raise ValueError(f"{self}: tile must be three positive integers, the others one each")
        rows, columns, depth = self.tile
        if rows % 32 or depth % 16 or columns % self.columns or self.columns % 8:
            raise ValueError(
                f"{self}: a tile must have a multiple of 32 rows and a depth that is a multiple of 16; columns, a multiple of "
                "8, must divide those of the tile"
            )

    def workers(self, device: torch.device, parts: int, rows: int, n: int, less: int = 0) -> int:
        """Blocks of a product of `parts` times `rows` rows and `n` columns: one an SM but for `less` of them."""
        tiles = parts * -(-rows // self.tile[0]) * -(-n // self.tile[1])
        if device.type != "cuda":
            return min(tiles, SIMULATED_WORKERS)
        return max(1, min(tiles, torch.cuda.get_device_properties(device).multi_processor_count - less))


DEFAULT = Tiling()
SIMULATED_WORKERS = 3


class SideStreams:
    """Streams that work beside the caller's, which waits for them at the end; in the simulator, one after the other.

    The caller's is the current one of `device`, which need not be the device that is current in this thread.
    """

    def __init__(self, device: torch.device, priorities: tuple[int, ...]):
        self._device, self._forked, on_gpu = device, False, device.type == "cuda"
        self._streams = [torch.cuda.Stream(device, priority=p) for p in priorities] if on_gpu else []
        # Made once: a wait is for what an event held when it was made.
        self._fork = torch.cuda.Event() if on_gpu else None
        self._joins = [torch.cuda.Event() for _ in self._streams]

    def fork(self) -> None:
        """The streams go on from where the caller's is now."""
        self._forked = True
        if self._fork is not None:
            self._fork.record(torch.cuda.current_stream(self._device))
            for stream in self._streams:
                stream.wait_event(self._fork)

    def __getitem__(self, i: int):
        """A context in which work goes to stream `i`."""
        return torch.cuda.stream(self._streams[i]) if self._streams else contextlib.nullcontext()

    def mark(self) -> torch.cuda.Event | None:
        """Where the current stream is now, for `wait`; None in the simulator."""
        return torch.cuda.current_stream(self._device).record_event() if self._streams else None

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """The current stream goes on when another one has come to the mark."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)

    def join(self) -> None:
        """The caller's stream goes on when these are done; nothing to wait for unless they were forked."""
        forked, self._forked = self._forked, False
        if forked and self._streams:
            here = torch.cuda.current_stream(self._device)
            for stream, event in zip(self._streams, self._joins):
                event.record(stream)
                here.wait_event(event)


def device_obstacle(device: torch.device) -> str | None:
    """Why the fused kernels do not run on a device; None where they do."""
    if device.type != "cuda" or (capability := torch.cuda.get_device_capability(device))[0] == 9:
        return None
    return (
        f"fused kernels are written for GPUs of compute capability 9.0 (H100, H200), and {device} is of "
        f"{capability[0]}.{capability[1]}; take the operators of tilescale_net.ops with fused=None, which then compute and "
        "communicate one after the other"
    )


# Shared memory of a block of compute capability 9.0, bytes (CUDA C++ Programming Guide 13.0, table of technical
# specifications); barriers take a few bytes of it.
MOST_SHARED = 227 * 1024


def check_tensor_cores(name: str, tiling: Tiling, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Refuse tiles that GPUs cannot multiply: each of two warpgroups takes rows of a tile by 64. ValueError."""
    rows, columns, depth = tiling.tile
    if rows % 128 or columns % 16:
        raise ValueError(
            f"{name}: {tiling}: a tile on a GPU must have a multiple of 128 rows and of 16 columns, as tensor cores take them"
        )
    operands = tiling.stages * (rows + columns) * depth * dtype.itemsize
    result = rows * tiling.columns * out_dtype.itemsize
    if operands + result >= MOST_SHARED:
        raise ValueError(
            f"{name}: {tiling}: {operands} bytes for operands of {dtype} and {result} for results exceed the {MOST_SHARED} "
            "bytes of shared memory of a block; use fewer stages, less depth or fewer columns"
        )


class DistributedMatmul(Collective):
    """Base of GEMMs `x @ w` of fixed shapes, whose operands are distributed over ranks.

    With torch.float8_e4m3fn, float32 sums are multiplied by the scales of their row of `x` and column of `w` at the end of
    a tile, as in torch._scaled_mm with row scales; `out_dtype` is torch.bfloat16 (default) or torch.float16, also for
    travelling summands, and `w` the transpose of a contiguous tensor. The tensor cores of Hopper keep about 14 bits of such
    sums' mantissas, and add up all steps of a tile's depth without promotion to exact registers (the fast accumulation of
    torch._scaled_mm): long sums are less exact than in bfloat16.

    Attributes:
        memory: the symmetric buffers by name, for measurements of a call without its peers.
    """

    memory: dict[str, torch.Tensor]
    k: int
    n: int

    def __init__(
        self, name: str, configuration: str, dtype: torch.dtype, out_dtype: torch.dtype | None, threads: int, blocks: int,
        group: "tsn.Group",
    ):  # fmt: skip
        self.out_dtype = result_dtype(name, dtype, out_dtype)
        self.dtype, self.scaled = dtype, dtype == SCALED
        configuration = f"{configuration}, dtype={dtype}, out_dtype={self.out_dtype}"
        super().__init__(name, configuration, threads, blocks, group)
        self._compiled: set[bool] = set()  # for which layouts of `w`
        # int64: torch's operators do not know uint64 on GPUs.
        with torch.inference_mode(False):
            self._calls = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._no_scales = torch.zeros(1, dtype=torch.float32, device=self.device)

    def _compile(self, transposed: bool, *kernels: Callable[[], object]) -> None:
        """Compile the kernels of a first call at the same time.

        Args:
            transposed: as `_weight` has it. kernels: each compiles one.
        """
        if transposed not in self._compiled:
            place = self._world.topology
            compile_together(kernels, self.device, place.local_rank, place.node_size)
            self._compiled.add(transposed)

    def _arguments(
        self, x, w, out, x_scales, w_scales, rows: int, rows_of_result: int, travel: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, bool, tuple[torch.Tensor, torch.Tensor]]:
        """A call's result, weight as `_weight` gives it, and scales as `_scales` does; all arguments are checked.

        Args:
            rows: of `x`. travel: `x` and its scales must lie in symmetric memory.
        """
        self._begin()
        self._rows(x, (rows, self.k), symmetric=travel)
        held, transposed = self._weight(w, self.k, self.n)
        scales = self._scales(x_scales, w_scales, rows, self.n, travel=travel)
        out = self._result(out, (rows_of_result, self.n), ("x", x), ("w", held), *self._apart(scales))
        self._call_track.note("x of shape {} and w of shape {}", x.shape, w.shape)
        return out, held, transposed, scales

    def _weight(self, w, *shape: int) -> tuple[torch.Tensor, bool]:
        """`w` [..., k, n] as a contiguous tensor, and whether that is [..., n, k]. TypeError or ValueError for what does not fit."""
        transposed = isinstance(w, torch.Tensor) and w.dim() == len(shape) and not w.is_contiguous()
        held = w.transpose(-1, -2) if transposed else w
        self._check("w", held, self.dtype)
        if tuple(w.shape) != shape:
            raise ValueError(f"{self.name}: w has shape {list(w.shape)}; it must be {list(shape)}")
        check_columns(self.name, w if w.dim() == 2 else w[0])
        return held, transposed

    def _scales(self, x_scales, w_scales, rows: int, n: int, travel: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales as [rows] and [n], or what kernels of other dtypes take in their place. TypeError or ValueError.

        Args:
            travel: those of `x` must lie in symmetric memory.
        """
        check_scales(self.name, self.dtype, x_scales, w_scales, rows, n)
        if not self.scaled:
            return self._no_scales, self._no_scales
        self._check("x_scales", x_scales, torch.float32, symmetric=travel)
        self._check("w_scales", w_scales, torch.float32)
        return x_scales.view(-1), w_scales.view(-1)

    def _apart(self, scales) -> tuple[tuple[str, torch.Tensor], ...]:
        """What `_scales` gave, for `_result`."""
        return tuple(zip(("x_scales", "w_scales"), scales)) if self.scaled else ()

    def _result(self, out, shape: tuple[int, ...], *apart) -> torch.Tensor:
        """`out`, checked, or a new tensor."""
        if out is None:
            return torch.empty(shape, dtype=self.out_dtype, device=self.device)
        self._check("out", out, self.out_dtype)
        if tuple(out.shape) != shape:
            raise ValueError(f"{self.name}: out has shape {list(out.shape)}; it must be {list(shape)}")
        for name, tensor in apart:
            self._check_apart("out", out, name, tensor)
        return out

    def _rows(self, x, shape: tuple[int, int], symmetric: bool = False) -> None:
        self._check("x", x, self.dtype, symmetric=symmetric)
        if tuple(x.shape) != shape:
            raise ValueError(f"{self.name}: x has shape {list(x.shape)}; it must be {list(shape)}")


class FusedMatmul(DistributedMatmul):
    """Base of GEMMs whose kernels compute tiles of a `Tiling` and communicate meanwhile."""

    def __init__(
        self, name: str, configuration: str, dtype: torch.dtype, out_dtype: torch.dtype | None, tiling: Tiling,
        threads: int, blocks: int, group: "tsn.Group",
    ):  # fmt: skip
        if obstacle := device_obstacle(tsn.world(group).device):
            raise tsn.ConfigurationError(f"{name}: {obstacle}")
        out_dtype = result_dtype(name, dtype, out_dtype)
        if not isinstance(tiling, Tiling):
            raise TypeError(f"{name}: tiling is {tiling!r}; it must be a Tiling")
        if dtype == SCALED and tiling.tile[2] % 32:
            raise ValueError(f"{name}: {tiling}: a tile of {dtype} must have a depth that is a multiple of 32")
        if tsn.world(group).device.type == "cuda":
            check_tensor_cores(name, tiling, dtype, out_dtype)
        self.tiling = tiling
        super().__init__(name, f"{configuration}, {tiling}", dtype, out_dtype, threads, blocks, group)
        self._carried = self.out_dtype if self.scaled else dtype  # of summands


class PreparedMatmul(FusedMatmul):
    """Base of those whose kernels get the same buffers in every call, so that a call launches what an earlier one prepared."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._prepared: dict[bool, dict[str, Callable[..., None]]] = {}

    def kernels(self, transposed: bool) -> dict[str, functools.partial[Any]]:
        """The kernels of a call by name, their factories with all arguments. `transposed`: `w` is [n, k]."""
        raise NotImplementedError

    def _arguments_of(self, name: str) -> tuple[dict[str, object], dict[str, Form | None]]:
        """Of kernel `name`: arguments that are the same in every call; and the others in the order of a call, with the shape as
        which the kernel takes each, None for its own.
        """
        raise NotImplementedError

    def _launches_of(self, transposed: bool) -> dict[str, Callable[..., None]]:
        """The launches of a call's kernels by name."""
        found = self._prepared.get(transposed)
        if found is None:
            with torch.inference_mode(False):
                kernels = self.kernels(transposed)
                self._compile(transposed, *kernels.values())
                made = {name: self._launch_of(name, kernel()) for name, kernel in kernels.items()}
            found = self._prepared[transposed] = {name: launch.quick() for name, launch in made.items()}
        return found

    def _launch_of(self, name: str, kernel: Any, **others: torch.Tensor) -> Launch:
        """`others`: arguments instead of those of every call."""
        fixed, given = self._arguments_of(name)
        fixed = {argument: value for argument, value in fixed.items() if argument not in given}
        forms = {argument: form for argument, form in given.items() if form is not None}
        return Launch(kernel, fixed | others, [*given], self._world, forms=forms)


def result_dtype(name: str, dtype: torch.dtype, out_dtype: torch.dtype | None) -> torch.dtype:
    """`out_dtype` or its default. TypeError for a dtype that products or results do not have."""
    if dtype not in SUPPORTED_DTYPES:
        raise TypeError(f"{name}: dtype {dtype} is not one of {', '.join(map(str, SUPPORTED_DTYPES))}")
    if dtype == SCALED and out_dtype not in (None, *DTYPES):
        raise TypeError(f"{name}: out_dtype {out_dtype} is not one of {', '.join(map(str, DTYPES))}")
    return out_dtype or (torch.bfloat16 if dtype == SCALED else dtype)


def torch_gemm(x: torch.Tensor, w: torch.Tensor, x_scales=None, w_scales=None, out: torch.Tensor | None = None):
    """The product `x @ w` by torch alone, in `out` if that is given; of 8 bits with scales, as bfloat16 or as `out`."""
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):  # the dtypes are chosen
            return torch_gemm(x, w, x_scales, w_scales, out)
    if x.dtype != SCALED:
        return torch.mm(x, w, out=out)
    dtype = torch.bfloat16 if out is None else out.dtype
    of_rows, of_columns = x_scales.view(-1, 1), w_scales.view(1, -1)
    if x.device.type == "cuda":
        where = {} if out is None else {"out": out}
        return torch._scaled_mm(x, w, of_rows, of_columns, out_dtype=dtype, use_fast_accum=True, **where)
    product = (x.float() @ w.float() * of_rows * of_columns).to(dtype)
    return product if out is None else out.copy_(product)


def check_columns(name: str, w: torch.Tensor) -> None:
    """Raise ValueError for a `w` [k, n] that tensor cores do not take: of 8 bits, its columns must be contiguous."""
    if w.dtype == SCALED and not w.t().is_contiguous():
        raise ValueError(
            f"{name}: w of {w.dtype} has strides {list(w.stride())}, but tensor cores take contiguous columns of it; pass the "
            "transpose of a contiguous [n, k]: w.t().contiguous().t()"
        )


def check_scales(name: str, dtype: torch.dtype, x_scales, w_scales, rows: int, *columns: int, hint: str = "") -> None:
    """Raise TypeError or ValueError unless there are scales as a GEMM of `dtype` takes them: of `rows` rows and of `columns`,
    (n,) or (experts, n). `hint` ends the message about a shape.
    """
    if dtype != SCALED and x_scales is None and w_scales is None:
        return
    other = (1, *columns) if len(columns) == 1 else (*columns, 1)
    given = {"x_scales": (x_scales, (rows,), (rows, 1)), "w_scales": (w_scales, columns, other)}
    for what, (scales, shape, other) in given.items():
        if dtype != SCALED:
            if scales is not None:
                raise TypeError(f"{name}: {what} goes with {SCALED}; x and w are {dtype}")
        elif not isinstance(scales, torch.Tensor):
            raise TypeError(f"{name}: {what} is {scales!r}; {SCALED} takes a float32 tensor {list(shape)}")
        elif scales.dtype != torch.float32:
            raise TypeError(f"{name}: {what} has dtype {scales.dtype}; it must be torch.float32")
        elif tuple(scales.shape) not in (shape, other):
            wanted = f"{list(shape)} or {list(other)}"
            raise ValueError(f"{name}: {what} has shape {list(scales.shape)}; it must be {wanted}{hint}")


def check_extents(name: str, dtype: torch.dtype, **extents: int) -> None:
    """Raise TypeError or ValueError unless `dtype` is a torch.dtype, every extent is a positive integer, and rows of
    `k` and `n` elements are multiples of 16 bytes, which TMA asks for.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: dtype is {dtype!r}; it must be a torch.dtype")
    for what, value in extents.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: {what} is {value!r}; it must be a positive integer")
        if what != "rows" and value * dtype.itemsize % 16:
            raise ValueError(f"{name}: {what} is {value}; it must be a multiple of {16 // dtype.itemsize} for {dtype}")


# ---------------------------------------------------------------------------------------------------------------------
# Steps of the blocks that send while the others multiply: which piece is next, and where it goes.
#
# A product announces each row of tiles when all of its tiles are in memory. Pieces of such rows are taken one at a time, in
# the order in which they are computed, by the blocks that are free: those beside the product, and in an all-reduce all blocks of
# the GPU when the product is done.


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
