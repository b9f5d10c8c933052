"""All-reduce with what follows it in a transformer's layer: bias, residual and RMSNorm, in the same kernel.

Few rows are summed as in all_reduce_one_shot.py, a block a row at a time, whose values stay in registers until they are
normalised. Many rows are summed by AllReduce, and the same kernel does the rest. Results have the same bits either way.
"""

import math

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.runtime.profiling import named

from .all_reduce import AllReduce
from .all_reduce_one_shot import one_shot_up_to
from .collective import (
    EXACT_SUMS,
    EXPLICIT_SYNC,
    STATUS_WORDS,
    Collective,
    agree_by_blocks,
    all_agree,
    dtype_name,
    is_aligned,
)
from .sums import VECTOR_BYTES, pack, vector_of


@tsn.macro
def mean_of_squares(result, values, slots, thread, threads, count, hidden):
    """result[0] = the mean of the squares of a row that the block's threads hold, `count` values each; in a fixed order."""
    total = T.alloc_var("float32")
    total = T.float32(0)
    for v in T.unroll(count):
        total += values[v] * values[v]
    for step in T.unroll(5):
        total += T.shfl_xor(total, 16 >> step)
    if thread % 32 == 0:
        slots[thread // 32] = total
    T.sync_threads()
    result[0] = T.float32(0)
    for warp in T.unroll(threads // 32):
        result[0] += slots[warp]
    result[0] = result[0] / T.float32(hidden)
    T.sync_threads()


@tsn.jit(name="all_reduce_norm", pass_configs=EXPLICIT_SYNC, compile_flags=[EXACT_SUMS])
def all_reduce_norm(n_pes, dtype, hidden, capacity, reduces, threads=512, blocks=64):
    """Kernel `(out, x, residual, bias, weight, eps, resumes, biased, tag, status, inbox, arrived, calls)` on rows of `hidden`
    elements.

    The sum over all PEs of `x` is rounded; bias and residual are added to it in float32, and the result, rounded, is the
    new residual. `out` is that, divided by the root of the mean of its squares and `eps`, times `weight`, rounded once.

    Args:
        n_pes: number of PEs, at most `threads`; all of them mapped.
        dtype: of `out`, `x`, `residual` [rows, hidden], `bias`, `weight` [hidden]; a row is a multiple of 16 bytes.
        capacity: rows that a call has at most.
        reduces: False: `x` is a sum already.
        threads, blocks: launch geometry; all blocks must be able to run at once.

    `resumes` and `biased` state, at run time, whether there are `residual` and `bias`; missing ones are left alone.
    `inbox` [2 * capacity * hidden / vector, vector], `tag`, `status`, `arrived` and `calls` as in
    `all_reduce_one_shot`.
    """
    rows = T.dynamic("rows", "int64")
    vector = vector_of(dtype)
    width = hidden // vector  # vectors of a row
    held = -(-width // threads)  # of them by a thread

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((rows, hidden), dtype),
        x: T.Tensor((rows * hidden,), dtype),
        residual: T.Tensor((T.dynamic("residual_rows", "int64"), hidden), dtype),
        bias: T.Tensor((hidden,), dtype),
        weight: T.Tensor((hidden,), dtype),
        eps: T.float32,
        resumes: T.int32,
        biased: T.int32,
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        inbox: T.Tensor((2 * capacity * width, vector), dtype),
        arrived: T.Tensor((n_pes, blocks), "uint64"),
        calls: T.Tensor((blocks,), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            slots = T.alloc_shared((threads // 32,), "float32")
            agrees = T.alloc_shared((n_pes,), "int32")
            mean = T.alloc_local((1,), "float32")
            part = T.alloc_local((n_pes, held, vector), dtype)
            values = T.alloc_local((held * vector,), "float32")
            row_part = T.alloc_local((vector,), dtype)
            call = T.alloc_var("uint64")
            call = calls[block] + T.uint64(1)
            half = T.cast(call % T.uint64(2), "int64") * (capacity * width)
            share = T.ceildiv(rows, T.int64(blocks))
            first = T.alloc_var("int64")
            first = T.min(share * block, rows)
            end = T.alloc_var("int64")
            end = T.min(first + share, rows)
            if first < end:
                if reduces:
                    pack(inbox, half, x, first * width, end * width, thread, threads, rows * hidden, dtype, True)
                    T.sync_threads()
                    agree_by_blocks(agrees, arrived, block, call, tag, status, thread, me, n_pes, runs_ahead=True)
                    agreed = T.alloc_var("int32")
                    all_agree(agreed, agrees, n_pes)
                    end = T.if_then_else(agreed != 0, end, first)
                for step in T.serial(end - first):
                    row = first + step
                    if reduces:
                        views = [N.remote(inbox, p) for p in range(n_pes)]
                        for p, view in enumerate(views):
                            for h in T.unroll(held):
                                if h * threads + thread < width:
                                    for v in T.vectorized(vector):
                                        part[p, h, v] = view[half + row * width + h * threads + thread, v]
                    else:
                        for h in T.unroll(held):
                            if h * threads + thread < width:
                                for v in T.vectorized(vector):
                                    part[0, h, v] = x[(row * width + h * threads + thread) * vector + v]
                    for i in T.unroll(held * vector):
                        values[i] = T.float32(0)
                    for h in T.unroll(held):
                        if h * threads + thread < width:
                            for p in T.unroll(n_pes if reduces else 1):
                                for v in T.unroll(vector):
                                    values[h * vector + v] += T.cast(part[p, h, v], "float32")
                            for v in T.unroll(vector):
                                values[h * vector + v] = T.cast(T.cast(values[h * vector + v], dtype), "float32")
                            if biased != 0:
                                for v in T.vectorized(vector):
                                    row_part[v] = bias[(h * threads + thread) * vector + v]
                                for v in T.unroll(vector):
                                    values[h * vector + v] += T.cast(row_part[v], "float32")
                            if resumes != 0:
                                for v in T.vectorized(vector):
                                    row_part[v] = residual[row, (h * threads + thread) * vector + v]
                                for v in T.unroll(vector):
                                    values[h * vector + v] += T.cast(row_part[v], "float32")
                            for v in T.unroll(vector):
                                row_part[v] = T.cast(values[h * vector + v], dtype)
                                values[h * vector + v] = T.cast(row_part[v], "float32")
                            if resumes != 0:
                                for v in T.vectorized(vector):
                                    residual[row, (h * threads + thread) * vector + v] = row_part[v]
                    mean_of_squares(mean, values, slots, thread, threads, held * vector, hidden)
                    scale = T.alloc_var("float32")
                    scale = T.float32(1) / T.sqrt(mean[0] + eps)
                    for h in T.unroll(held):
                        if h * threads + thread < width:
                            for v in T.vectorized(vector):
                                row_part[v] = weight[(h * threads + thread) * vector + v]
                            for v in T.unroll(vector):
                                row_part[v] = T.cast(
                                    values[h * vector + v] * scale * T.cast(row_part[v], "float32"), dtype
                                )
                            for v in T.vectorized(vector):
                                out[row, (h * threads + thread) * vector + v] = row_part[v]
            T.sync_threads()
            if reduces:
                if thread == 0:
                    calls[block] = call

    return main


class AllReduceNorm(Collective):
    """All-reduce, bias, residual and RMSNorm in one call; constructed and called by all ranks.

    Args:
        hidden: elements of a row; a row is a multiple of 16 bytes, and at most 64 KiB.
        threads, blocks: see `Collective`.
        group: whose ranks these are; see `tilescale_net.world`.

    Attributes:
        fused_bytes: bytes up to which one kernel does all; equal on all ranks, at most `largest_fused`.

    Raises:
        ValueError: a launch geometry or a size that the kernels or the GPU cannot run.
        RankMismatch: ranks that want different ones.
        HeapError: no room for the staging memory.
    """

    DTYPES = (torch.float16, torch.bfloat16, torch.float32)
    LARGEST_ROW = 64 * 1024

    def __init__(self, hidden: int, *, threads: int = 512, blocks: int = 64, group: "tsn.Group" = None) -> None:
        if isinstance(hidden, bool) or not isinstance(hidden, int) or hidden < 1:
            raise ValueError(f"AllReduceNorm: hidden is {hidden!r}; it must be a positive number of elements")
        super().__init__("AllReduceNorm", f"hidden={hidden}", threads, blocks, group)
        self.hidden = hidden
        self.largest_fused = max(self.LARGEST_ROW, one_shot_up_to(self.n_pes))
        self.fused_bytes = self.largest_fused
        self._inbox = self._symmetric(2 * self.largest_fused, torch.uint8)
        self._arrived, self._calls = self._signals(self.n_pes, blocks), self.counters(blocks)
        self._all_reduce = AllReduce(threads=threads, blocks=blocks, group=self._world).tracked_by(self._call_track)

    @named("tilescale_net.AllReduceNorm")
    def __call__(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-6,
    ) -> torch.Tensor:
        """`out` becomes the RMSNorm of the sum over all PEs of `x`, plus bias and residual; asynchronous on the stream.

        Args:
            out, x: contiguous [..., hidden] of one of `DTYPES`, beginning at multiples of 16 bytes; may be the same tensor.
            weight: of the norm, [hidden].
            residual: [..., hidden]; added to the rounded sum, and replaced by the result, which is what is normalised.
            bias: [hidden]; added to the rounded sum first. All PEs pass the same.
            eps: added to the mean of the squares.

        Returns:
            `out`. Sums have the bits of `AllReduce`; bias, residual and norm are computed in float32.

        Raises:
            TypeError, ValueError: an argument that does not fit, by name; nothing was sent.
            RankMismatch: ranks that pass different ones. Raised at once where they are new, else by the next call or `check`.
        """
        self._begin()
        self._check("out", out)
        self._check_rows("out", out, None, (*out.shape[:-1], self.hidden))
        self._check_rows("x", x, out.dtype, out.shape)
        self._check_rows("weight", weight, out.dtype, (self.hidden,))
        for name, tensor, shape in (("residual", residual, out.shape), ("bias", bias, (self.hidden,))):
            if tensor is not None:
                self._check_rows(name, tensor, out.dtype, shape)
        if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < math.inf:
            raise ValueError(f"{self.name}: eps is {eps!r}; it must be a finite number of 0 or more")
        if x.data_ptr() != out.data_ptr():
            self._check_apart("out", out, "x", x)
        if residual is not None:
            self._check_apart("residual", residual, "out", out)
            self._check_apart("residual", residual, "x", x)
        given = [name for name, tensor in (("bias", bias), ("residual", residual)) if tensor is not None]
        tag = self._agree(
            "out of shape {} and {}, with {}, eps {}", out.shape, out.dtype, ", ".join(given) or "neither", eps
        )
        if out.numel() == 0:
            return out
        fused = out.nbytes <= self.fused_bytes and not self._needs_symmetric_source and self.n_pes > 1
        if not fused:
            self._all_reduce(out, x)
        capacity = self.largest_fused // (self.hidden * out.element_size())
        kernel = all_reduce_norm(
            self.n_pes, dtype_name(out.dtype), self.hidden, capacity, fused, self.threads, self.blocks
        )
        rows = out.view(-1, self.hidden)
        vector = VECTOR_BYTES // out.element_size()
        words = capacity * self.hidden
        arguments = (
            rows,
            (x if fused else out).view(-1),
            rows if residual is None else residual.view(-1, self.hidden),
            weight if bias is None else bias,
            weight,
            float(eps),
            int(residual is not None),
            int(bias is not None),
            tag,
            self.status_record,
            self._inbox.view(out.dtype)[: 2 * words].view(-1, vector),
            self._arrived,
            self._calls,
        )
        self._launch_checked(lambda: kernel(*arguments))
        return out

    def _check_rows(self, name: str, tensor, dtype, shape) -> None:
        self._check(name, tensor, dtype)
        if tensor.dtype not in self.DTYPES:
            raise TypeError(f"{self.name}: dtype {tensor.dtype} is not one of {', '.join(str(d) for d in self.DTYPES)}")
        if tensor.dim() == 0 or tensor.shape != torch.Size(shape):
            raise ValueError(f"{self.name}: {name} has shape {list(tensor.shape)}; it must be {list(shape)}")
        row = self.hidden * tensor.element_size()
        if row % VECTOR_BYTES or row > self.LARGEST_ROW:
            raise ValueError(
                f"{self.name}: a row of {self.hidden} elements of {tensor.dtype} has {row} bytes; it must be a multiple of "
                f"{VECTOR_BYTES}, and at most {self.LARGEST_ROW}"
            )
        if not is_aligned(VECTOR_BYTES, tensor):
            raise ValueError(f"{self.name}: {name} must begin at a multiple of {VECTOR_BYTES} bytes")

    def free(self) -> None:
        """Give the symmetric memory back. Collective; the object cannot be called afterwards."""
        self._check_alive()
        self._all_reduce.free()
        super().free()
