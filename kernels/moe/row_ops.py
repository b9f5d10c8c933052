"""Row operations of the MoE kernels: copy one row, sum several, quantise; each by one warp.

A row is `units` vectors of 16 bytes; lane l of the warp handles vectors l, l + 32, … . Loads of several vectors are in
flight before the first is used: `batch` of them, chosen by `batch_of`. The last functions do the same in plain PyTorch;
the kernels must match them bitwise.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.collective import EXPLICIT_SYNC, dtype_name
from tilescale_net.kernels.moe.layout import NodeSizes, nodes_of

FP8 = "float8_e4m3fn"
FP8_MAX = 448.0
GROUP = 128  # elements that share a scale
SMALLEST_AMAX = 1e-4  # keeps the scale of a group of zeros finite


def int_vars(count: int) -> tuple[Any, ...]:
    """Allocate int32 variables of a kernel."""
    return tuple(T.alloc_var("int32") for _ in range(count))


def float_vars(count: int) -> tuple[Any, ...]:
    """Allocate float32 variables of a kernel."""
    return tuple(T.alloc_var("float32") for _ in range(count))


def local_vectors(count: int, size: int, dtype: str) -> tuple[Any, ...]:
    """Allocate tensors of `size` elements in registers."""
    return tuple(T.alloc_local((size,), dtype) for _ in range(count))


def shared_ints(count: int, *shape: int) -> tuple[Any, ...]:
    """Allocate int32 tensors in shared memory."""
    return tuple(T.alloc_shared(shape, "int32") for _ in range(count))


def batch_of(units: int, limit: int) -> int:
    """Vectors per lane and batch: the row in the fewest equal batches within `limit`."""
    per_lane = -(-units // 32)
    return -(-per_lane // -(-per_lane // limit))


def groups_of(hidden: int) -> int:
    """Scales per row of FP8 numbers."""
    return -(-hidden // GROUP)


@dataclass(frozen=True)
class SumSizes:
    """Compile-time sizes of a combine: `ranks` rows of `hidden` elements of `dtype` per token, at most."""

    ranks: int
    top_k: int
    max_tokens: int
    hidden: int
    dtype: str

    @property
    def width(self) -> int:
        """Elements in 16 bytes."""
        return 4 if self.dtype == "float32" else 8

    @property
    def units(self) -> int:
        """Vectors of 16 bytes in a row."""
        return self.hidden // self.width

    @property
    def groups(self) -> int:
        """Scales of a row that is sent as FP8."""
        return groups_of(self.hidden)

    @property
    def sum_group(self) -> int:
        """Rows that a summing warp reads at once."""
        return min(self.ranks, 4)


class Rows(NamedTuple):
    """Rows [any, words or elements of a row], and their scales [any, scales of a row], if any."""

    rows: Any
    scales: Any

    def at(self, pe: Any, scaled: bool) -> "Rows":
        """The same memory of a mapped rank. `scaled`: whether rows have scales."""
        return Rows(N.remote(self.rows, pe), N.remote(self.scales, pe) if scaled else self.scales)


class Result(NamedTuple):
    """Outputs and biases of a combine. `out`, `bias_0`, `bias_1`: [rows, hidden] of the result's dtype. `values`: float32
    [rows, top_k], values that return per choice."""

    out: Any
    bias_0: Any
    bias_1: Any
    values: Any = None


class Work(NamedTuple):
    """Registers of a warp that sums.

    Attributes:
        loaded: [rows per group * vectors * width] of the rows' dtype. acc: float32 [vectors * width].
        from_row: int32 [rows per group], source rows; -1: none.
        slot_of: int32 [a word per 32 ranks or origins], see `combine.find_rows`.
        ones: float32 [rows per group], weights of unweighted rows.
    """

    loaded: Any
    acc: Any
    from_row: Any
    slot_of: Any = None
    ones: Any = None


@tsn.macro
def load_batch(loaded, src, row, first, lane, units, width, batch, at=0):
    """loaded[at …] = a lane's vectors of the batch that begins at vector `first`; zeros beyond the row."""
    for u in T.unroll(batch):
        if first + u * 32 + lane < units:
            for v in T.vectorized(width):
                loaded[at + u * width + v] = src[row, (first + u * 32 + lane) * width + v]
        else:
            for v in T.vectorized(width):
                loaded[at + u * width + v] = T.cast(0, loaded.dtype)


@tsn.macro
def store_batch(dst, row, loaded, first, lane, units, width, batch):
    """Store a lane's vectors of a batch."""
    for u in T.unroll(batch):
        if first + u * 32 + lane < units:
            for v in T.vectorized(width):
                dst[row, (first + u * 32 + lane) * width + v] = loaded[u * width + v]


@tsn.macro
def copy_words(dst, dst_row, src, src_row, words, lane, offset=0):
    """Copy a short row of any number of 4-byte words from column `offset` of the source."""
    for i in T.serial((words + 31) // 32):
        if i * 32 + lane < words:
            dst[dst_row, i * 32 + lane] = src[src_row, offset + i * 32 + lane]


@tsn.macro
def copy_scales(dst, dst_row, src, src_row, words, lane, offset, rows, by_column):
    """As `copy_words`; with `by_column`, the target is transposed in groups of `rows` rows, one row per word."""
    if by_column:
        for i in T.serial((words + 31) // 32):
            if i * 32 + lane < words:
                dst[dst_row // rows * words + i * 32 + lane, dst_row % rows] = src[src_row, offset + i * 32 + lane]
    else:
        copy_words(dst, dst_row, src, src_row, words, lane, offset)


@tsn.macro
def copy_row(dst, dst_row, src, src_row, words, lane, limit):
    """Copy a row of 4-byte words; their number is a multiple of 4."""
    batch = batch_of(words // 4, limit)
    loaded = T.alloc_local((batch * 4,), "int32")
    for b in T.serial((words // 4 + 32 * batch - 1) // (32 * batch)):
        load_batch(loaded, src, src_row, b * 32 * batch, lane, words // 4, 4, batch)
        store_batch(dst, dst_row, loaded, b * 32 * batch, lane, words // 4, 4, batch)


@tsn.macro
def clear(acc, count):
    for i in T.unroll(count):
        acc[i] = T.float32(0)


@tsn.macro
def add_scaled(acc, loaded, weight, count, at=0):
    """acc += weight * loaded[at …], in float32."""
    for i in T.unroll(count):
        acc[i] = acc[i] + weight * T.cast(loaded[at + i], "float32")


@tsn.macro
def store_rounded(dst, row, acc, first, lane, units, width, batch, dtype):
    """Round a batch of sums and store it."""
    for u in T.unroll(batch):
        if first + u * 32 + lane < units:
            for v in T.vectorized(width):
                dst[row, (first + u * 32 + lane) * width + v] = T.cast(acc[u * width + v], dtype)


@tsn.macro
def store_quantised(dst, scales, row, acc, first, lane, units, width, batch, offset=0):
    """Store a batch as FP8 with one float32 scale per 128 elements, i.e. per 128 / width lanes. Called by all lanes of the
    warp; vectors beyond the row must be zero. Scales begin at column `offset`."""
    lanes = GROUP // width
    for u in T.unroll(batch):
        amax = T.alloc_var("float32", T.float32(SMALLEST_AMAX))
        for v in T.unroll(width):
            amax = T.max(amax, T.abs(acc[u * width + v]))
        for step in T.unroll(5):
            if (1 << step) < lanes:
                amax = T.max(amax, T.shfl_xor(amax, 1 << step))
        if first + u * 32 + lane < units:
            factor = T.float32(FP8_MAX) / amax
            for v in T.vectorized(width):
                dst[row, (first + u * 32 + lane) * width + v] = T.cast(acc[u * width + v] * factor, FP8)
            if lane % lanes == 0:
                scales[row, offset + (first + u * 32 + lane) // lanes] = amax / T.float32(FP8_MAX)


@tsn.macro
def store_sums(s, dst, row, acc, first, lane, end, batch):
    """Store a batch of sums in a row of `dst` (`Rows`), quantised or rounded."""
    if s.quantised:
        store_quantised(dst.rows, dst.scales, row, acc, first, lane, end, s.width, batch)
    else:
        store_rounded(dst.rows, row, acc, first, lane, end, s.width, batch, s.dtype)


@tsn.macro
def add_dequantised(acc, loaded, scales, row, first, lane, units, width, batch, at=0):
    """acc += loaded[at …] times the scale of its block, in float32."""
    wide = T.alloc_local((width,), "float32")
    for u in T.unroll(batch):
        if first + u * 32 + lane < units:
            scale = T.alloc_var("float32", scales[row, (first + u * 32 + lane) * width // GROUP])
            for v in T.vectorized(width):  # converted in pairs
                wide[v] = T.cast(loaded[at + u * width + v], "float32")
            for v in T.unroll(width):
                acc[u * width + v] = acc[u * width + v] + scale * wide[v]


@tsn.macro
def add_rows(acc, loaded, row, weight, src, first, lane, units, width, batch, group):
    """acc += weight[g] * src[row[g]] for each g < group with row[g] >= 0; all loads are in flight before the first sum."""
    for g in T.unroll(group):
        if row[g] >= 0:
            load_batch(loaded, src, row[g], first, lane, units, width, batch, g * batch * width)
    for g in T.unroll(group):
        if row[g] >= 0:
            add_scaled(acc, loaded, weight[g], batch * width, g * batch * width)


@tsn.macro
def add_slots(s, work, scales, exists, first, lane, end, batch, group):
    """acc += the rows in work.loaded, in order, scaled if quantised. `exists(row)`: whether a row of `work.from_row`
    exists."""
    width = s.width
    for g in T.unroll(group):
        if exists(work.from_row[g]):
            if s.quantised:
                add_dequantised(
                    work.acc, work.loaded, scales, work.from_row[g], first, lane, end, width, batch, g * batch * width
                )
            else:
                add_scaled(work.acc, work.loaded, T.float32(1), batch * width, g * batch * width)


@tsn.macro
def _add_bias(s, acc, bias, token: T.Ref, first, lane, end):
    loaded = T.alloc_local((s.sum_batch * s.width,), s.dtype)
    load_batch(loaded, bias, token, first, lane, end, s.width, s.sum_batch)
    add_scaled(acc, loaded, T.float32(1), s.sum_batch * s.width)


@tsn.macro
def add_biases(s, acc, result, token: T.Ref, first, lane, end):
    """Add a token's rows of the caller's biases to a batch of sums."""
    if s.biases > 0:
        _add_bias(s, acc, result.bias_0, token, first, lane, end)
    if s.biases > 1:
        _add_bias(s, acc, result.bias_1, token, first, lane, end)


def rows_of_expert(counts, offsets, expert):
    """Number of rows of an expert. A rejected dispatch has counts, but no room for their rows."""
    return T.min(counts[expert], offsets[expert + 1] - offsets[expert])


@tsn.macro
def find_expert(expert: T.Ref, end_of: T.Ref, row, counts, offsets, experts):
    """expert = the expert of `row`, which increases from call to call; end_of = the end of its rows, where padding begins, or
    0 behind the last expert."""
    while T.And(expert < experts, row >= offsets[T.min(expert + 1, experts)]):
        expert = expert + 1
    end_of = 0
    if expert < experts:
        end_of = offsets[expert] + counts[expert]


@tsn.jit(name="zero_padding_rows", pass_configs=EXPLICIT_SYNC)
def zero_padding_rows(width, copied, threads=256, blocks=528):
    """Kernel `(out, rows, counts, offsets)`: `out` = `rows` with zeros in padding, see `zero_padding`.

    Args:
        width: 4-byte words per vector; `out` and `rows` are int32 [capacity, units, width].
        copied: if False, only write padding, and do not read `rows`.
        threads, blocks: launch geometry.

    `counts`: int32 [experts]. `offsets`: int32 [experts + 1]. A warp processes a row.
    """
    capacity, units, experts, ends = (T.dynamic(name) for name in ("capacity", "units", "experts", "ends"))
    batch, warps = 4, threads // 32

    @T.prim_func
    def main(
        out: T.Tensor((capacity, units, width), "int32"),
        rows: T.Tensor((capacity, units, width), "int32"),
        counts: T.Tensor((experts,), "int32"),
        offsets: T.Tensor((ends,), "int32"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            loaded = T.alloc_local((batch * width,), "int32")
            expert, end_of = int_vars(2)
            expert = 0
            for turn in T.serial(T.ceildiv(capacity, blocks * warps)):
                row = (turn * blocks + block) * warps + thread // 32
                if row < capacity:
                    find_expert(expert, end_of, row, counts, offsets, experts)
                    if T.Or(T.bool(copied), row >= end_of):
                        for b in T.serial(T.ceildiv(units, 32 * batch)):
                            for u in T.unroll(batch):
                                unit = (b * batch + u) * 32 + lane
                                for v in T.vectorized(width):
                                    loaded[u * width + v] = 0
                                if T.And(unit < units, row < end_of):
                                    for v in T.vectorized(width):
                                        loaded[u * width + v] = rows[row, unit, v]
                            for u in T.unroll(batch):
                                unit = (b * batch + u) * 32 + lane
                                if unit < units:
                                    for v in T.vectorized(width):
                                        out[row, unit, v] = loaded[u * width + v]

    return main


@functools.lru_cache(256)
def all_rows(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and offsets of a single expert with all rows."""
    with torch.inference_mode(False):
        counts, offsets = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([rows], [0, rows]))
        return counts, offsets


def launch_geometry(device: torch.device) -> dict[str, int]:
    """Launch geometry of the simulator; empty (the kernel's default) on a GPU."""
    return {} if device.type == "cuda" else dict(blocks=2, threads=64)


def zero_padding(
    rows: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor | None = None, *, copied: bool = False
) -> torch.Tensor:
    """Zero padding, the rows of no expert, so that no GEMM with it gives NaN; in place, or in a copy.

    Args:
        rows: [capacity, columns], contiguous; a row has a multiple of 4 bytes.
        counts: int32 [experts], rows of each expert.
        offsets: int32 [experts + 1], first row of each expert; default: a single expert, from row 0.
        copied: leave `rows` unchanged, which takes one pass over the experts' rows. In place, only padding is written.

    Returns:
        `rows`, or the copy.
    """
    out = torch.empty_like(rows) if copied else rows
    if rows.numel():
        words = [t.view(torch.uint8).view(torch.int32) for t in (out, rows)]
        width = 4 if words[0].shape[1] % 4 == 0 else 1
        kernel = zero_padding_rows(width, copied, **launch_geometry(rows.device))
        offsets = all_rows(rows.shape[0], rows.device)[1] if offsets is None else offsets
        kernel(*(t.view(rows.shape[0], -1, width) for t in words), counts, offsets)
    return out


@tsn.jit(name="weighted_rows", pass_configs=EXPLICIT_SYNC)
def weighted_rows(dtype, dotted, threads=256, blocks=528):
    """Kernel `(out, dots, rows, y, weights, counts, offsets)`: see `weight_rows`.

    Args:
        dtype: dtype of `out`, `rows` and `y` [capacity, units, elements in 16 bytes].
        dotted: if False, `y` and `dots` are unused.
        threads, blocks: launch geometry.
    """
    capacity, units, experts, ends = (T.dynamic(name) for name in ("capacity", "units", "experts", "ends"))
    width, batch, warps = 4 if dtype == "float32" else 8, 2, threads // 32

    @T.prim_func
    def main(
        out: T.Tensor((capacity, units, width), dtype),
        dots: T.Tensor((capacity,), "float32"),
        rows: T.Tensor((capacity, units, width), dtype),
        y: T.Tensor((capacity, units, width), dtype),
        weights: T.Tensor((capacity,), "float32"),
        counts: T.Tensor((experts,), "int32"),
        offsets: T.Tensor((ends,), "int32"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            loaded, others = T.alloc_local((batch * width,), dtype), T.alloc_local((batch * width,), dtype)
            expert, end_of = int_vars(2)
            weight, total = T.alloc_var("float32"), T.alloc_var("float32")
            expert = 0
            for turn in T.serial(T.ceildiv(capacity, blocks * warps)):
                row = (turn * blocks + block) * warps + thread // 32
                if row < capacity:
                    find_expert(expert, end_of, row, counts, offsets, experts)
                    weight = T.float32(0)
                    if row < end_of:
                        weight = weights[row]
                    total = T.float32(0)
                    for b in T.serial(T.ceildiv(units, 32 * batch)):
                        for u in T.unroll(batch):
                            unit = (b * batch + u) * 32 + lane
                            for v in T.vectorized(width):
                                loaded[u * width + v] = T.cast(0, dtype)
                            for v in T.vectorized(width):
                                others[u * width + v] = T.cast(0, dtype)
                            if T.And(unit < units, row < end_of):
                                for v in T.vectorized(width):
                                    loaded[u * width + v] = rows[row, unit, v]
                                if dotted:
                                    for v in T.vectorized(width):
                                        others[u * width + v] = y[row, unit, v]
                        for u in T.unroll(batch):
                            unit = (b * batch + u) * 32 + lane
                            if dotted:
                                for v in T.unroll(width):
                                    total += T.cast(loaded[u * width + v], "float32") * T.cast(
                                        others[u * width + v], "float32"
                                    )
                            if unit < units:
                                for v in T.vectorized(width):
                                    out[row, unit, v] = T.cast(T.cast(loaded[u * width + v], "float32") * weight, dtype)
                    if dotted:
                        for step in T.unroll(5):
                            total = total + T.shfl_xor(total, 1 << step)
                        if lane == 0:
                            dots[row] = total

    return main


def weight_rows(
    rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor, y: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Experts' rows times their weights, and the gradients of the weights, in one kernel; zeros in padding.

    Args:
        rows: [capacity, columns], contiguous; a row has a multiple of 16 bytes.
        weights: float32 [capacity].
        counts, offsets: see `zero_padding`.
        y: the rows that were multiplied by the weights, if `rows` are gradients of the sums; same shape.

    Returns:
        rows times weights, and float32 [capacity], the dot products of the rows of `rows` and `y`; empty without `y`.
    """
    out = torch.empty_like(rows)
    dots = torch.empty(rows.shape[0] if y is not None else 0, dtype=torch.float32, device=rows.device)
    if rows.numel():
        width = 16 // rows.element_size()
        kernel = weighted_rows(dtype_name(rows.dtype), y is not None, **launch_geometry(rows.device))
        out_, rows_, y_ = (t.view(rows.shape[0], -1, width) for t in (out, rows, rows if y is None else y))
        kernel(out_, weights if y is None else dots, rows_, y_, weights, counts, offsets)
    return out, dots


def sum_of_ranks(
    parts: list[torch.Tensor], rank: int, dtype: torch.dtype, quantised: bool = False, nodes: NodeSizes = 1
) -> torch.Tensor:
    """Reference result of a combine on `rank`. `parts`: [tokens, hidden] float32 of each rank. `nodes`: see `nodes_of`, if
    other nodes sum first; else 1."""

    def sent(rows: torch.Tensor) -> torch.Tensor:
        return dequantise(*quantise(rows)) if quantised else rows.to(dtype).float()

    of = nodes_of(len(parts), nodes)
    result = torch.zeros_like(parts[0])
    for node in range(len(of.sizes)):
        members = parts[of.first(node) : of.end(node)]
        if node == of.node_of(rank):
            for part in members:
                result += sent(part)
        else:
            total = torch.zeros_like(result)
            for part in members:
                total += part.to(dtype).float()
            result += sent(total)
    return result.to(dtype)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to float8_e4m3fn with a float32 scale per 128 elements: x is about q * scale."""
    rows, hidden = x.shape
    groups = -(-hidden // GROUP)
    padded = torch.nn.functional.pad(x.float(), (0, groups * GROUP - hidden)).view(rows, groups, GROUP)
    amax = padded.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_AMAX)
    # A tensor, because torch on GPUs multiplies by the reciprocal of a Python number, which rounds twice.
    largest = torch.full_like(amax, FP8_MAX)
    q = (padded * (largest / amax)).to(torch.float8_e4m3fn).view(rows, groups * GROUP)[:, :hidden]
    return q.contiguous(), (amax / largest).squeeze(-1)


def dequantise(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Inverse of `quantise`, in float32."""
    return q.float() * scales.repeat_interleave(GROUP, -1)[:, : q.shape[-1]]
