"""Common parts of the fused GEMMs: shapes, dtypes, tile geometry, and side streams."""

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

from ..collective import Collective, is_integer
from ..launches import Form, Launch

# ---------------------------------------------------------------------------------------------------------------------
# Building blocks of a persistent GEMM kernel: tile scheduling, TMA copies, and tensor core steps.
#
# A block has three warpgroups. One warp of the first takes the next tile from a counter and copies its operands by TMA into
# a ring of `stages`. Each of the other two multiplies half of the tile's rows; results leave through shared memory while
# the ring fills for the next tile. Tiles are scheduled dynamically, because a block that starts late (its SM ran a
# communication kernel) must take fewer.


THREADS = 384
MULTIPLIERS = 256  # threads of the two warpgroups that multiply
WARPS = MULTIPLIERS // 32


@dataclass(frozen=True)
class Shape:
    """Compile-time extents of a GEMM and its tiles.

    Attributes:
        parts: number of GEMMs of `rows` rows each, computed one after the other.
        rows, n, k: extents of one GEMM.
        tile: rows, columns and depth of a tile; each warpgroup has half of the rows.
        stages: depth of the operand ring.
        panel: rows of tiles that are processed together, for L2 reuse.
        columns: columns per store; a divisor of the tile's columns.
        workers: number of blocks.
        transposed: whether the right operand is [n, k].
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
        """Shape of the right operand's tile."""
        _, bn, bk = self.tile
        return (bn, bk) if self.transposed else (bk, bn)


class Position(NamedTuple):
    """Position of a block's current tile; int32 [1] registers.

    Attributes:
        part: index of the part, see `Shape`; in a reduce-scatter, distance from this PE to the owner of the rows.
        row, column: first row and column of the tile within the part.
        pe: all-gather only: the PE that owns the rows.
    """

    part: Any
    row: Any
    column: Any
    pe: Any = None


class Scales(NamedTuple):
    """float32 scales of FP8 operands.

    Attributes:
        tile: [2, rows of a warpgroup + columns of a tile], shared memory.
        x, w: row scales of the left operand, column scales of the right operand.
        gathered: [2, n_pes, rows], all-gather only: row scales of the other PEs.
    """

    tile: Any
    x: Any
    w: Any
    gathered: Any = None


class Block(NamedTuple):
    """Shared memory and per-thread int32 registers of a block.

    Attributes:
        left, right: operand rings, [stages, 2, rows of a warpgroup, depth] and [stages, *Shape.right]. The ring `right`
            also receives summands.
        result: [2, rows of a warpgroup, columns] per output dtype, staging for stores.
        sums: accumulator fragments of the two warpgroups.
        full, empty: barriers of the ring's stages.
        queue, queue_full, queue_empty: the next two tiles and their barriers.
        step: ring step. turn: number of tiles so far. tile: words that describe the current tile.
        thread: thread index in the block.
    """

    left: Any
    right: Any
    result: Any
    sums: Any
    full: Any
    empty: Any
    queue: Any
    queue_full: Any
    queue_empty: Any
    step: Any
    turn: Any
    tile: Any
    thread: Any


@tsn.macro
def block_memory(shape, dtype, out_dtypes, words=1):
    """Allocate the fields of `Block`.

    A macro, because tilelang aligns unnamed buffers in shared memory to the largest alignment of all.

    Args:
        out_dtypes: one or two output dtypes. words: number of words that describe a tile.
    """
    left = T.alloc_shared((shape.stages, 2, shape.half, shape.tile[2]), dtype)
    right = T.alloc_shared((shape.stages, *shape.right), dtype)
    result = T.alloc_shared((2, shape.half, shape.columns), out_dtypes[0])
    upper = T.alloc_fragment((shape.half, shape.tile[1]), "float32")
    lower = T.alloc_fragment((shape.half, shape.tile[1]), "float32")
    full = T.alloc_barrier([32] * shape.stages)
    empty = T.alloc_barrier([WARPS] * shape.stages)
    queue = T.alloc_shared((2 * words,), "int32")
    queue_full = T.alloc_barrier([32] * 2)
    queue_empty = T.alloc_barrier([WARPS] * 2)
    step = T.alloc_local((1,), "int32")
    turn = T.alloc_local((1,), "int32")
    tile = T.alloc_local((words,), "int32")
    more = [T.alloc_shared((2, shape.half, shape.columns), dtype) for dtype in out_dtypes[1:]]
    return (
        left, right, (result, *more), (upper, lower), full, empty, queue, queue_full, queue_empty, step, turn, tile,
        T.get_thread_binding(),
    )  # fmt: skip


@tsn.macro
def begin(b):
    """Reset the counters of `b`. Called by all threads of a block."""
    b.step[0] = 0
    b.turn[0] = 0


@tsn.macro
def locate(shape, tile, at):
    """at = the position of tile number `tile`. Order: panels of rows, then columns, then rows within the panel."""
    inside = tile % (shape.tiles_m * shape.tiles_n)
    first = inside // (shape.panel * shape.tiles_n) * shape.panel
    height = T.min(shape.panel, shape.tiles_m - first)
    rest = inside - first * shape.tiles_n
    at.part[0] = tile // (shape.tiles_m * shape.tiles_n)
    at.row[0] = (first + rest % height) * shape.tile[0]
    at.column[0] = rest // height * shape.tile[1]


@tsn.macro
def next_tile(shape, tickets, call, b):
    """b.tile = the next tile of this call; also queue it for the multiplying warps. `shape.total` or more: no tile is left.

    Called by the copying warp. Each call takes one ticket per tile and one more per block, so the counter `tickets`
    (uint64 [1]) is never reset.
    """
    T.barrier_wait(b.queue_empty[b.turn[0] % 2], ((b.turn[0] // 2) & 1) ^ 1)
    b.tile[0] = 0
    if b.thread == 0:
        ticket = T.atomic_add(tickets[0], T.uint64(1), return_prev=True)
        b.tile[0] = T.cast(T.cast(ticket, "int64") - (call - 1) * (shape.total + shape.workers), "int32")
        b.queue[b.turn[0] % 2] = b.tile[0]
    b.tile[0] = T.shfl_sync(b.tile[0], 0)
    T.barrier_arrive(b.queue_full[b.turn[0] % 2])
    b.turn[0] = b.turn[0] + 1


@tsn.macro
def get_tile(b):
    """b.tile = the next queued tile. Called by the multiplying warps."""
    T.barrier_wait(b.queue_full[b.turn[0] % 2], (b.turn[0] // 2) & 1)
    words = b.tile.shape[0]
    for i in T.unroll(words):
        b.tile[i] = b.queue[b.turn[0] % 2 * words + i]
    T.sync_warp()
    if b.thread % 32 == 0:
        T.barrier_arrive(b.queue_empty[b.turn[0] % 2])
    b.turn[0] = b.turn[0] + 1


@tsn.macro
def copy(source, target, b, stage):
    """Start to copy a part of a tile to a ring stage. Called by the copying warp."""
    T.tma_copy(source, target, barrier=b.full[stage], leader_scope_threads=32)


@tsn.macro
def copy_tile(shape, b, row, copy_left, copy_right):
    """Copy the operands of a tile, one ring stage per step of its depth. Called by the copying warp.

    Args:
        row(): first row of the tile.
        copy_left(half, first, depth, stage): start to copy a warpgroup's rows from row `first` and column `depth`.
        copy_right(depth, stage): start to copy the right operand from `depth`.
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
    """Start to copy a tile of the right operand. Called by the copying warp."""
    _, bn, bk = shape.tile
    if shape.transposed:
        copy(w[column : column + bn, depth : depth + bk], b.right[stage, :, :], b, stage)
    else:
        copy(w[depth : depth + bk, column : column + bn], b.right[stage, :, :], b, stage)


@tsn.macro
def wait_for_all(arrived, chunk, n_pes, call, thread):
    """Wait until arrived[p, chunk] >= `call` for every other PE p; then TMA copies of the warp may read their data.

    Called by a warp. Each lane waits for one PE, because one poll of a flag takes as long as a tensor core step.
    """
    for first in T.serial(-(-n_pes // 32)):
        pe = first * 32 + thread
        if pe < n_pes and pe != N.my_pe():
            N.wait(arrived[pe, chunk], "ge", call, proxy="async")
    T.sync_warp()


@tsn.macro
def copy_summand(shape, wide, summands, half, pe, b, stage, row, column):
    """Start to copy a warpgroup's rows of a tile of summands[half, pe] [rows, n] to the ring of the right operand.

    Called by the copying warp. A summand takes as many bytes as `wide` elements of the right operand, so `summands` is
    viewed as [rows, wide * n] of that dtype. A warpgroup may not have more rows than summands fit into the tile's depth.
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
    """The bits of an FP8 element, as uint16."""
    return T.cast(T.reinterpret(value, "uint8"), "uint16")


@tsn.macro
def add_summand(shape, wide, dtype, mine, total, b):
    """total += the summands (of `dtype`) that `copy_summand` has copied, if `mine`. Called by a multiplying warpgroup."""
    stages, bk = shape.stages, shape.tile[2] // wide
    s = b.step[0] % stages
    T.barrier_wait(b.full[s], (b.step[0] // stages) & 1)
    if mine:
        for i, j in T.Parallel(shape.half, shape.tile[1]):
            if wide == 2:
                # Byte by byte, because the ring has the layout of FP8 operands.
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
    """total = the GEMM of warpgroup `group`'s rows of a tile; one tensor core step is always in flight."""
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
    """Release the operands of a tile in which this warpgroup has no rows; the other one has the tensor cores to itself."""
    for i in T.serial(-(-shape.k // shape.tile[2])):
        T.barrier_wait(b.full[b.step[0] % shape.stages], (b.step[0] // shape.stages) & 1)
        T.sync_warp()  # otherwise a late lane could miss this phase of the barrier
        if b.thread % 32 == 0:
            T.barrier_arrive(b.empty[b.step[0] % shape.stages])
        b.step[0] = b.step[0] + 1


@tsn.macro
def multiply_tiles(shape, group, b, is_tile, find, finish, skips=None):
    """Multiply tiles until none is left. Called by multiplying warpgroup `group`.

    Args:
        is_tile(): whether `b.tile` is a tile. find(): compute its position. finish(group, total): store its sums; `total`
            is None for a skipped tile. skips(): whether this warpgroup has no rows in the tile; default: never.
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
def get_row_scales(rows, shape, group, scales, row_scale, row):
    """scales[group, 0 : half] = row_scale(r) of each row of warpgroup `group`; r < `rows`. Called by that warpgroup."""
    for i in T.Parallel(shape.half):
        # Rows and columns outside of the result get an arbitrary scale; they are never stored.
        scales[group, i] = row_scale(T.min(row + group * shape.half + i, rows - 1))


@tsn.macro
def scale(shape, group, total, scales, column_scale, column):
    """total[i, j] *= scales[group, i] * column_scale(column + j). Called by warpgroup `group`.

    Column scales pass through shared memory, because each thread needs a quarter of them.
    """
    for j in T.Parallel(shape.tile[1]):
        scales[group, shape.half + j] = column_scale(T.min(column + j, shape.n - 1))
    for i, j in T.Parallel(shape.half, shape.tile[1]):
        total[i, j] = total[i, j] * scales[group, i] * scales[group, shape.half + j]


@tsn.macro
def store(shape, group, total, result, out, part, row, column):
    """out[part, …] = the sums of warpgroup `group`; the stores are still in flight afterwards, see `T.tma_store_wait`."""
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
SCALED = torch.float8_e4m3fn  # needs a scale per row of `x` and per column of `w`
SUPPORTED_DTYPES = (*DTYPES, SCALED)


@dataclass(frozen=True)
class Tiling:
    """Geometry of a GEMM, see `Shape`.

    Args:
        tile: rows, columns and depth of a tile.
        stages: depth of the operand ring in shared memory.
        panel: rows of tiles that are processed together, for L2 reuse.
        columns: columns per store; a divisor of the tile's columns.
    """

    tile: tuple[int, int, int] = (128, 256, 64)
    stages: int = 4
    panel: int = 8
    columns: int = 128

    def __post_init__(self) -> None:
        numbers = (*self.tile, self.stages, self.panel, self.columns) if isinstance(self.tile, tuple) else ()
        if len(numbers) != 6 or not all(map(is_integer, numbers)):
            raise ValueError(f"{self}: tile must be three positive integers, the others one each")
        rows, columns, depth = self.tile
        if rows % 32 or depth % 16 or columns % self.columns or self.columns % 8:
            raise ValueError(
                f"{self}: a tile must have a multiple of 32 rows and a depth that is a multiple of 16; columns, a multiple of "
                "8, must divide those of the tile"
            )

    def workers(self, device: torch.device, parts: int, rows: int, n: int, less: int = 0) -> int:
        """Number of blocks for a GEMM of `parts` times `rows` rows and `n` columns: one per SM, except `less` SMs."""
        tiles = parts * -(-rows // self.tile[0]) * -(-n // self.tile[1])
        if device.type != "cuda":
            return min(tiles, SIMULATED_WORKERS)
        return max(1, min(tiles, torch.cuda.get_device_properties(device).multi_processor_count - less))


DEFAULT = Tiling()
SIMULATED_WORKERS = 3


class SideStreams:
    """Streams that run beside the caller's stream, which joins them at the end; the simulator runs them in order.

    The caller's stream is the current stream of `device`, even if another device is current in this thread.
    """

    def __init__(self, device: torch.device, priorities: tuple[int, ...]):
        self._device, self._forked, on_gpu = device, False, device.type == "cuda"
        self._streams = [torch.cuda.Stream(device, priority=p) for p in priorities] if on_gpu else []
        # One event can serve all calls: a stream waits for the record that precedes the wait.
        self._fork = torch.cuda.Event() if on_gpu else None
        self._joins = [torch.cuda.Event() for _ in self._streams]

    def fork(self) -> None:
        """Let the side streams wait for the work that the caller's stream has so far."""
        self._forked = True
        if self._fork is not None:
            self._fork.record(torch.cuda.current_stream(self._device))
            for stream in self._streams:
                stream.wait_event(self._fork)

    def __getitem__(self, i: int):
        """A context that makes side stream `i` current."""
        return torch.cuda.stream(self._streams[i]) if self._streams else contextlib.nullcontext()

    def mark(self) -> torch.cuda.Event | None:
        """Record an event on the current stream, for `wait`; None in the simulator."""
        return torch.cuda.current_stream(self._device).record_event() if self._streams else None

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the current stream wait for an event of `mark`."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def join(self) -> None:
        """Let the caller's stream wait for the side streams, if they were forked."""
        forked, self._forked = self._forked, False
        if forked and self._streams:
            here = torch.cuda.current_stream(self._device)
            for stream, event in zip(self._streams, self._joins):
                event.record(stream)
                here.wait_event(event)


def device_obstacle(device: torch.device) -> str | None:
    """The reason why the fused kernels do not run on a device; None if they do."""
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
    """Raise ValueError for tiles that GPUs cannot multiply: each of the two warpgroups takes 64 rows at a time."""
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
    a tile, as in torch._scaled_mm with row scales; `out_dtype`, also that of summands sent to peers, is torch.bfloat16
    (default) or torch.float16; `w` must be the transpose of a contiguous tensor. The tensor cores of Hopper keep about 14
    mantissa bits of FP8 sums and accumulate the whole depth without promotion to float32 registers (fast accumulation in
    torch._scaled_mm), so long sums are less exact than in bfloat16.

    Attributes:
        memory: symmetric buffers by name, for measurements of a call without its peers.
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
        self._compiled: set[bool] = set()  # layouts of `w` with compiled kernels
        # int64: torch's operators do not know uint64 on GPUs.
        with torch.inference_mode(False):
            self._calls = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._no_scales = torch.zeros(1, dtype=torch.float32, device=self.device)

    def _compile(self, transposed: bool, *kernels: Callable[[], object]) -> None:
        """Compile the kernels of a first call in parallel.

        Args:
            transposed: see `_weight`. kernels: callables that compile one kernel each.
        """
        if transposed not in self._compiled:
            topology = self._world.topology
            compile_together(kernels, self.device, topology.local_rank, topology.node_size)
            self._compiled.add(transposed)

    def _arguments(
        self, x, w, out, x_scales, w_scales, rows: int, result_rows: int, symmetric: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, bool, tuple[torch.Tensor, torch.Tensor]]:
        """Check the arguments of a call; return (result, *`_weight`, `_scales`).

        Args:
            rows: rows of `x`. symmetric: whether `x` and its scales must be in symmetric memory.
        """
        self._begin()
        self._rows(x, (rows, self.k), symmetric=symmetric)
        weight, transposed = self._weight(w, self.k, self.n)
        scales = self._scales(x_scales, w_scales, rows, self.n, symmetric=symmetric)
        named_scales = zip(("x_scales", "w_scales"), scales) if self.scaled else ()
        out = self._result(out, (result_rows, self.n), ("x", x), ("w", weight), *named_scales)
        self._call_track.note("x of shape {} and w of shape {}", x.shape, w.shape)
        return out, weight, transposed, scales

    def _weight(self, w, *shape: int) -> tuple[torch.Tensor, bool]:
        """`w` [..., k, n] as a contiguous tensor, and whether it is [..., n, k]. Raises TypeError or ValueError."""
        transposed = isinstance(w, torch.Tensor) and w.dim() == len(shape) and not w.is_contiguous()
        weight = w.transpose(-1, -2) if transposed else w
        self._check("w", weight, self.dtype)
        if tuple(w.shape) != shape:
            raise ValueError(f"{self.name}: w has shape {list(w.shape)}; it must be {list(shape)}")
        check_columns(self.name, w if w.dim() == 2 else w[0])
        return weight, transposed

    def _scales(
        self, x_scales, w_scales, rows: int, n: int, symmetric: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales as [rows] and [n], or placeholders for kernels of other dtypes. Raises TypeError or ValueError.

        Args:
            symmetric: whether the scales of `x` must be in symmetric memory.
        """
        check_scales(self.name, self.dtype, x_scales, w_scales, rows, n)
        if not self.scaled:
            return self._no_scales, self._no_scales
        self._check("x_scales", x_scales, torch.float32, symmetric=symmetric)
        self._check("w_scales", w_scales, torch.float32)
        return x_scales.view(-1), w_scales.view(-1)

    def _result(self, out, shape: tuple[int, ...], *inputs: tuple[str, torch.Tensor]) -> torch.Tensor:
        """`out`, which must not overlap the named inputs, or a new tensor."""
        if out is None:
            return torch.empty(shape, dtype=self.out_dtype, device=self.device)
        self._check("out", out, self.out_dtype)
        if tuple(out.shape) != shape:
            raise ValueError(f"{self.name}: out has shape {list(out.shape)}; it must be {list(shape)}")
        for name, tensor in inputs:
            self._check_apart("out", out, name, tensor)
        return out

    def _rows(self, x, shape: tuple[int, int], symmetric: bool = False) -> None:
        self._check("x", x, self.dtype, symmetric=symmetric)
        if tuple(x.shape) != shape:
            raise ValueError(f"{self.name}: x has shape {list(x.shape)}; it must be {list(shape)}")


class FusedMatmul(DistributedMatmul):
    """Base of GEMMs whose kernels overlap tiles of a `Tiling` with communication."""

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
        self._carried = self.out_dtype if self.scaled else dtype  # dtype of summands


class PreparedMatmul(FusedMatmul):
    """Base of fused GEMMs whose kernels take the same buffers in every call, so their launches are prepared once."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._prepared: dict[bool, dict[str, Callable[..., None]]] = {}

    def kernels(self, transposed: bool) -> dict[str, functools.partial[Any]]:
        """Kernel factories of a call by name, with all arguments bound. `transposed`: whether `w` is [n, k]."""
        raise NotImplementedError

    def _arguments_of(self, name: str) -> tuple[dict[str, object], dict[str, Form | None]]:
        """(constant arguments of kernel `name`, the other arguments in the order of a call with the shape that the kernel
        takes, None: unchanged).
        """
        raise NotImplementedError

    def _launches_of(self, transposed: bool) -> dict[str, Callable[..., None]]:
        """Prepared launches of a call's kernels by name."""
        if transposed not in self._prepared:
            with torch.inference_mode(False):
                kernels = self.kernels(transposed)
                self._compile(transposed, *kernels.values())
                launches = {name: self._launch_of(name, kernel()) for name, kernel in kernels.items()}
            self._prepared[transposed] = {name: launch.quick() for name, launch in launches.items()}
        return self._prepared[transposed]

    def _launch_of(self, name: str, kernel: Any, **overrides: torch.Tensor) -> Launch:
        """`overrides`: replace constant arguments."""
        constant, varying = self._arguments_of(name)
        constant = {argument: value for argument, value in constant.items() if argument not in varying}
        forms = {argument: form for argument, form in varying.items() if form is not None}
        return Launch(kernel, constant | overrides, [*varying], self._world, forms=forms)


def result_dtype(name: str, dtype: torch.dtype, out_dtype: torch.dtype | None) -> torch.dtype:
    """`out_dtype` or its default. Raises TypeError for an unsupported dtype."""
    if dtype not in SUPPORTED_DTYPES:
        raise TypeError(f"{name}: dtype {dtype} is not one of {', '.join(map(str, SUPPORTED_DTYPES))}")
    if dtype == SCALED and out_dtype not in (None, *DTYPES):
        raise TypeError(f"{name}: out_dtype {out_dtype} is not one of {', '.join(map(str, DTYPES))}")
    return out_dtype or (torch.bfloat16 if dtype == SCALED else dtype)


def torch_gemm(x: torch.Tensor, w: torch.Tensor, x_scales=None, w_scales=None, out: torch.Tensor | None = None):
    """`x @ w` by torch, into `out` if not None; FP8 operands with scales give bfloat16 or the dtype of `out`."""
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):  # the caller has chosen the dtypes
            return torch_gemm(x, w, x_scales, w_scales, out)
    if x.dtype != SCALED:
        return torch.mm(x, w, out=out)
    dtype = torch.bfloat16 if out is None else out.dtype
    row_scales, column_scales = x_scales.view(-1, 1), w_scales.view(1, -1)
    if x.device.type == "cuda":
        options = {} if out is None else {"out": out}
        return torch._scaled_mm(x, w, row_scales, column_scales, out_dtype=dtype, use_fast_accum=True, **options)
    product = (x.float() @ w.float() * row_scales * column_scales).to(dtype)
    return product if out is None else out.copy_(product)


def check_columns(name: str, w: torch.Tensor) -> None:
    """Raise ValueError for an FP8 `w` [k, n] without contiguous columns, which tensor cores need."""
    if w.dtype == SCALED and not w.t().is_contiguous():
        raise ValueError(
            f"{name}: w of {w.dtype} has strides {list(w.stride())}, but tensor cores take contiguous columns of it; pass the "
            "transpose of a contiguous [n, k]: w.t().contiguous().t()"
        )


def check_scales(name: str, dtype: torch.dtype, x_scales, w_scales, rows: int, *columns: int, hint: str = "") -> None:
    """Raise TypeError or ValueError unless the scales fit a GEMM of `dtype` with `rows` rows and `columns`, (n,) or
    (experts, n). `hint`: end of the message about a wrong shape.
    """
    if dtype != SCALED and x_scales is None and w_scales is None:
        return
    other = (1, *columns) if len(columns) == 1 else (*columns, 1)
    arguments = {"x_scales": (x_scales, (rows,), (rows, 1)), "w_scales": (w_scales, columns, other)}
    for argument, (scales, shape, other) in arguments.items():
        if dtype != SCALED:
            if scales is not None:
                raise TypeError(f"{name}: {argument} goes with {SCALED}; x and w are {dtype}")
        elif not isinstance(scales, torch.Tensor):
            raise TypeError(f"{name}: {argument} is {scales!r}; {SCALED} takes a float32 tensor {list(shape)}")
        elif scales.dtype != torch.float32:
            raise TypeError(f"{name}: {argument} has dtype {scales.dtype}; it must be torch.float32")
        elif tuple(scales.shape) not in (shape, other):
            expected = f"{list(shape)} or {list(other)}"
            raise ValueError(f"{name}: {argument} has shape {list(scales.shape)}; it must be {expected}{hint}")


def check_extents(name: str, dtype: torch.dtype, **extents: int) -> None:
    """Raise TypeError or ValueError unless `dtype` is a torch.dtype, every extent is a positive integer, and rows of
    `k` and `n` elements are multiples of 16 bytes, as TMA requires.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: dtype is {dtype!r}; it must be a torch.dtype")
    for extent, value in extents.items():
        if not is_integer(value):
            raise ValueError(f"{name}: {extent} is {value!r}; it must be a positive integer")
        if extent != "rows" and value * dtype.itemsize % 16:
            raise ValueError(
                f"{name}: {extent} is {value}; it must be a multiple of {16 // dtype.itemsize} for {dtype}"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Building blocks of kernels that send results while other blocks multiply.
#
# The GEMM announces each row of tiles when all of its tiles are in memory. Free blocks take pieces of such rows one at a
# time, in the order in which they are computed: the blocks beside the GEMM, and in an all-reduce all blocks of the GPU when
# the GEMM is done.


@dataclass(frozen=True)
class SendShape:
    """Compile-time extents of the data that a rank sends in a call.

    Attributes:
        n_pes, rows, n: number of PEs, rows per PE, columns.
        height, across: matrix rows and tiles of a row of tiles.
        slices: rows are computed in slices; each slice computes the parts of the other PEs before its own part.
        pieces: pieces per row of tiles.
        shares: whether the PE also sends its sums to all other PEs (all-reduce).
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
        """Rows of tiles per PE."""
        return -(-self.rows // self.height)

    @property
    def slice_tiles(self) -> int:
        return self.tiles // self.slices

    @property
    def piece(self) -> int:
        """Matrix rows of a piece."""
        return self.height // self.pieces

    @property
    def slice_pieces(self) -> int:
        """Pieces per slice that go to their owners; with `shares`, as many pieces of sums."""
        return (self.n_pes - 1) * self.slice_tiles * self.pieces

    @property
    def items(self) -> int:
        return self.slices * self.slice_pieces * (1 + self.shares)

    @property
    def increment(self) -> int:
        """Increment of each counter of `done` per call."""
        return self.across * WARPS


class SendBuffers(NamedTuple):
    """Source and destination buffers, and counters.

    Attributes:
        partial: [n_pes, rows, n], this PE's partial results for the other PEs.
        summands: [2, n_pes, rows, n], symmetric, same dtype: their destination, double-buffered by the parity of the call.
        part, sums: [1, rows, n] and [2, n_pes, rows, n], symmetric: source and destination of shared sums.
        done: uint64 [n_pes, tiles]: announcements by warps per row of tiles; row h - 1 is for PE me + h, the last row is
            this PE's own.
        arrived, shared: uint64 [n_pes, tiles], symmetric: number of pieces received from each PE.
        sent: int32 [2], by the parity of the call: number of pieces taken.
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
    """Signal to all PEs that this PE has begun the call, and wait until they have begun the previous call.

    Called by all blocks that send. The buffer half that this call writes was last read two calls ago: a PE that has begun
    the previous call no longer reads it. Also resets the tickets of the next call.
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
    """Count a warp's part of a tile as in memory. Called by the multiplying warps after they have issued its stores.

    The thread that has issued the stores waits until they complete; every warp adds 1.
    """
    T.tma_store_wait(0, read=False)
    T.sync_warp()
    if thread % 32 == 0:
        N.signal(done[line, tiles], 1, N.my_pe(), op="add", fence=True)


def piece_elements(s: SendShape, row):
    """Number of elements of the piece that begins at `row`; 0 beyond the last row."""
    return T.cast(T.max(T.min(s.piece, s.rows - row), 0), "int64") * s.n


@tsn.macro
def _send(s, wait, put_signal, engine, item, mem, call, me):
    """Send piece `item` when it is ready, in the scope of `wait` and `put_signal`; arguments as in `send_all`."""
    kind = item % (s.slice_pieces * (1 + s.shares)) // s.slice_pieces
    inside = item % s.slice_pieces
    first = item // (s.slice_pieces * (1 + s.shares)) * s.slice_tiles
    if kind == 0:
        hop = inside // (s.slice_tiles * s.pieces)
        c = first + inside // s.pieces % s.slice_tiles
        row = c * s.height + inside % s.pieces * s.piece
        pe = (me + 1 + hop) % s.n_pes
        wait(mem.done[hop, c], "ge", call * s.increment)
        put_signal(
            mem.summands[call % 2, me, T.min(row, s.rows - 1), 0], mem.partial[pe, T.min(row, s.rows - 1), 0], pe,
            mem.arrived[me, c], 1, op="add", count=piece_elements(s, row), engine=engine,
        )  # fmt: skip
    elif s.shares:
        hop = inside % (s.n_pes - 1)
        c = first + inside // (s.n_pes - 1) // s.pieces
        row = c * s.height + inside // (s.n_pes - 1) % s.pieces * s.piece
        wait(mem.done[s.n_pes - 1, c], "ge", call * s.increment)
        put_signal(
            mem.sums[call % 2, me, T.min(row, s.rows - 1), 0], mem.part[0, T.min(row, s.rows - 1), 0], (me + 1 + hop) % s.n_pes,
            mem.shared[me, c], 1, op="add", count=piece_elements(s, row), engine=engine,
        )  # fmt: skip


@tsn.macro
def send_all(s, engine, ticket, item, mem, call, me, thread):
    """Take pieces one by one and put each when it is ready. Called by all threads of a block.

    Args:
        ticket: int32 [1], shared memory. item: int32 [1], per thread.
    """
    item[0] = 0
    while item[0] < s.items:
        T.sync_threads()
        if thread == 0:
            ticket[0] = T.atomic_add(mem.sent[call % 2], 1, return_prev=True)
        T.sync_threads()
        item[0] = ticket[0]
        if item[0] < s.items:
            _send(s, N.wait_block, N.put_signal_block, engine, item[0], mem, call, me)


@tsn.macro
def send_all_by_warps(s, item, mem, call, me, thread):
    """As `send_all`, but each warp sends its own pieces by loads and stores.

    For few blocks: between two pieces, the signal and the next ticket take about as long as a block's copy of 512 KiB, and
    other warps copy meanwhile. A single piece takes longer.
    """
    item[0] = 0
    while item[0] < s.items:
        if thread % 32 == 0:
            item[0] = T.atomic_add(mem.sent[call % 2], 1, return_prev=True)
        item[0] = T.shfl_sync(item[0], 0)
        if item[0] < s.items:
            _send(s, N.wait_warp, N.put_signal_warp, "ldst", item[0], mem, call, me)
    T.sync_threads()
