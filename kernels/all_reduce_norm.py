"""All-reduce with what follows it in a transformer's layer: bias, residual and RMSNorm, in the same kernel.

Rows travel as in all_reduce_push.py, in one shot or two, and are normalised by the block that has summed or received them,
whose threads keep them in registers. Where PEs are on other nodes, AllReduce sums and the same kernel does the rest.
Results have the same bits every way, and a row's do not depend on the other rows.
"""

import math

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.runtime.profiling import named

from .algorithms import BufferSpecs
from .all_reduce import AllReduce
from .all_reduce_push import AGREEING, DTYPES, add_rows, meet_blocks
from .collective import (
    EXACT_SUMS,
    EXPLICIT_SYNC,
    STATUS_WORDS,
    Collective,
    all_agree,
    count_call,
    dtype_name,
    is_aligned,
)
from .sums import VECTOR_BYTES, vector_of

# Vectors of summed rows that a thread keeps while it normalises them.
MOST_VECTORS = 4


@tsn.macro
def load_vector(row, u, elements, at, dtype):
    """row[u] = the vector that begins at element `at`."""
    for v in T.vectorized(vector_of(dtype)):
        row[u, v] = elements[at + v]


@tsn.macro
def add_vector(sums, rows, u, dtype):
    """sums (float32) += rows[u]."""
    for v in T.unroll(vector_of(dtype)):
        sums[v] += T.cast(rows[u, v], "float32")


@tsn.jit(name="all_reduce_norm", pass_configs=EXPLICIT_SYNC, compile_flags=[EXACT_SUMS])
def all_reduce_norm(n_pes, dtype, hidden, capacity, shots, threads=512, max_blocks=64):
    """Kernel `(out, x, residual, bias, weight, eps, resumes, biased, tag, status, inbox, tags, calls)` on rows of `hidden`
    elements.

    The sum over all PEs of `x` is rounded; bias and residual are added to it in float32, and the result, rounded, is the
    new residual. `out` is that, divided by the root of the mean of its squares and `eps`, times `weight`, rounded once.

    Args:
        n_pes: number of PEs, at most `threads`; all of them mapped.
        dtype: of `out`, `x`, `residual` [rows * hidden], `bias`, `weight` [hidden]; a row is a multiple of 16 bytes.
        capacity: rows of a part that a call has at most.
        shots: as in `all_reduce_push`, a part being whole rows; 0: `x` is a sum already.
        threads, max_blocks: launch geometry; as many blocks run as a part has rows, at most `max_blocks`, all of them at
            once.

    `resumes` and `biased` state, at run time, whether there are `residual` and `bias`; missing ones are left alone.
    `inbox` [2, shots, n_pes, capacity * hidden / vector, vector], `tag`, `status`, `tags` and `calls` as in
    `all_reduce_push`; without shots they are left alone.
    """
    count = T.dynamic("count", "int64")
    vector = vector_of(dtype)
    width = hidden // vector  # vectors of a row
    workers = threads - AGREEING if shots else threads
    held = -(-width // workers)  # of them by a thread
    parts = n_pes if shots == 2 else 1
    # Rows, one of each of so many parts, that a block normalises at once.
    group = next(g for g in range(parts, 0, -1) if parts % g == 0 and (g * held <= MOST_VECTORS or g == 1))

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((count,), dtype),
        x: T.Tensor((count,), dtype),
        residual: T.Tensor((T.dynamic("residual_count", "int64"),), dtype),
        bias: T.Tensor((hidden,), dtype),
        weight: T.Tensor((hidden,), dtype),
        eps: T.float32,
        resumes: T.int32,
        biased: T.int32,
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        inbox: T.Tensor((2, max(shots, 1), n_pes, capacity * width, vector), dtype),
        tags: T.Tensor((2, n_pes, max_blocks, vector), dtype),
        calls: T.Tensor((max_blocks,), "uint64"),
    ):
        with T.Kernel(T.min(T.ceildiv(count, T.int64(parts * hidden)), T.int64(max_blocks)), threads=threads) as block:
            me = N.my_pe()
            thread = T.get_thread_binding()
            slots = T.alloc_shared((group, threads // 32), "float32")
            agrees = T.alloc_shared((n_pes,), "int32")
            got = T.alloc_local((n_pes, vector), dtype)
            own = T.alloc_local((held, vector), dtype)
            row = T.alloc_local((held, group, vector), dtype)
            sums = T.alloc_local((vector,), "float32")
            squares = T.alloc_local((group,), "float32")
            factors = T.alloc_local((held, vector), dtype)
            before = T.alloc_local((held, vector), dtype)
            agreed = T.alloc_var("int32")
            agreed = 1
            T.clear(got)
            call = T.alloc_var("uint64")
            call = calls[block] + T.uint64(1)
            half = T.cast(call % T.uint64(2), "int32")
            rows = T.alloc_var("int64")
            rows = count // T.int64(hidden)
            part = T.alloc_var("int64")
            part = T.ceildiv(rows, T.int64(parts))
            # A thread beyond the workers has no vector.
            lane = T.alloc_var("int32")
            lane = T.if_then_else(thread < workers, thread, width)
            if shots > 0:
                if thread >= workers:
                    meet_blocks(agrees, tags, half, block, call, tag, status, thread - workers, me, n_pes, dtype)
            for turn in T.serial(T.ceildiv(part - block, T.int64(max_blocks))):
                r = block + turn * T.int64(max_blocks)
                # Rows go to the PEs that add them up.
                for h in T.unroll(held):
                    i = h * workers + lane
                    if i < width:
                        if shots < 2:
                            load_vector(own, h, x, r * hidden + i * vector, dtype)
                        if shots == 2:
                            for hop in T.unroll(n_pes):
                                of = (me + hop + 1) % n_pes * part + r
                                if of < rows:
                                    load_vector(got, hop, x, of * hidden + i * vector, dtype)
                        if shots > 0:
                            for hop in T.unroll(n_pes):
                                pe = (me + hop + 1) % n_pes
                                N.put_vector(
                                    inbox[half, 0, me, r * width + i, 0:vector],
                                    got[hop, 0:vector] if shots == 2 else own[h, 0:vector],
                                    pe,
                                )
                if shots < 2 and resumes != 0:
                    for h in T.unroll(held):
                        i = h * workers + lane
                        if i < width:
                            load_vector(before, h, residual, r * hidden + i * vector, dtype)
                # One is added up here, and goes to all.
                if shots > 0:
                    for h in T.unroll(held):
                        i = h * workers + lane
                        if i < width:
                            N.take_vectors(got, inbox[half, 0, 0:n_pes, r * width + i, 0:vector])
                            add_rows(own, h, got, 0, n_pes, dtype)
                            if shots == 2:
                                for hop in T.unroll(n_pes):
                                    N.put_vector(
                                        inbox[half, 1, me, r * width + i, 0:vector],
                                        own[h, 0:vector],
                                        (me + hop + 1) % n_pes,
                                    )
                    if turn == 0:
                        T.sync_threads()
                        all_agree(agreed, agrees, n_pes)
                # Rows, of some parts at once, get bias, residual and norm.
                for step in T.unroll(parts // group):
                    for g in T.unroll(group):
                        squares[g] = T.float32(0)
                    for h in T.unroll(held):
                        i = h * workers + lane
                        if i < width:
                            if shots == 2:
                                N.take_vectors(
                                    row[h, 0:group, 0:vector],
                                    inbox[half, 1, step * group : step * group + group, r * width + i, 0:vector],
                                )
                            else:
                                for v in T.unroll(vector):
                                    row[h, 0, v] = own[h, v]
                            for g in T.unroll(group):
                                of = (step * group + g) * part + r
                                if of < rows:
                                    for v in T.unroll(vector):
                                        sums[v] = T.cast(row[h, g, v], "float32")
                                    if biased != 0:
                                        load_vector(factors, h, bias, i * vector, dtype)
                                        add_vector(sums, factors, h, dtype)
                                    if resumes != 0:
                                        if shots == 2:
                                            load_vector(before, h, residual, of * hidden + i * vector, dtype)
                                        add_vector(sums, before, h, dtype)
                                    for v in T.unroll(vector):
                                        row[h, g, v] = T.cast(sums[v], dtype)
                                    if resumes != 0 and agreed != 0:
                                        for v in T.vectorized(vector):
                                            residual[of * hidden + i * vector + v] = row[h, g, v]
                                    for v in T.unroll(vector):
                                        sums[v] = T.cast(row[h, g, v], "float32")
                                        squares[g] += sums[v] * sums[v]
                    for h in T.unroll(held):
                        i = h * workers + lane
                        if i < width:
                            load_vector(factors, h, weight, i * vector, dtype)
                    for g in T.unroll(group):
                        for lanes in T.unroll(5):
                            squares[g] += T.shfl_xor(squares[g], 16 >> lanes)
                        if thread % 32 == 0:
                            slots[g, thread // 32] = squares[g]
                    T.sync_threads()
                    for g in T.unroll(group):
                        squares[g] = T.float32(0)
                        for warp in T.unroll(threads // 32):
                            squares[g] += slots[g, warp]
                        squares[g] = T.float32(1) / T.sqrt(squares[g] / T.float32(hidden) + eps)
                    T.sync_threads()
                    for h in T.unroll(held):
                        i = h * workers + lane
                        if i < width:
                            for g in T.unroll(group):
                                of = (step * group + g) * part + r
                                if of < rows and agreed != 0:
                                    for v in T.unroll(vector):
                                        sums[v] = T.cast(row[h, g, v], "float32") * squares[g]
                                        sums[v] = sums[v] * T.cast(factors[h, v], "float32")
                                    for v in T.unroll(vector):
                                        row[h, g, v] = T.cast(sums[v], dtype)
                                    for v in T.vectorized(vector):
                                        out[of * hidden + i * vector + v] = row[h, g, v]
            if shots > 0:
                count_call(calls, block, call, part, thread, threads, max_blocks)

    return main


class AllReduceNorm(Collective):
    """All-reduce, bias, residual and RMSNorm in one call; constructed and called by all ranks.

    Args:
        hidden: elements of a row; a row is a multiple of 16 bytes, and at most 64 KiB.
        threads, blocks: of the `AllReduce` that sums where PEs are on other nodes; other kernels take theirs from `hidden`.
        group: whose ranks these are; see `tilescale_net.world`.

    Attributes:
        shots: 1 or 2 steps over the links, of kernels for PEs that are all mapped; None: by the size.

    Raises:
        ValueError: a launch geometry or a size that the kernels or the GPU cannot run.
        RankMismatch: ranks that want different ones.
        HeapError: no room for the staging memory.
    """

    DTYPES = DTYPES
    LARGEST_ROW = 64 * 1024
    # Bytes that one kernel takes in two shots; larger tensors take several.
    LARGEST_CALL = 8 << 20

    def __init__(self, hidden: int, *, threads: int = 512, blocks: int = 64, group: "tsn.Group" = None) -> None:
        if isinstance(hidden, bool) or not isinstance(hidden, int) or hidden < 1:
            raise ValueError(f"AllReduceNorm: hidden is {hidden!r}; it must be a positive number of elements")
        super().__init__("AllReduceNorm", f"hidden={hidden}", threads, blocks, group)
        self.hidden = hidden
        self.shots: int | None = None
        self._warm: set[torch.dtype] = set()
        self._all_reduce: AllReduce | None = None
        self._max_blocks = self.block_limit
        # Bytes up to which one shot is faster, measured on two and on four H100; a row at least.
        self._one_shot_bytes = max(self.LARGEST_ROW, (4 << 20) if self.n_pes == 2 else (5 << 20) // self.n_pes)
        if self._needs_symmetric_source:
            self._all_reduce = AllReduce(threads=threads, blocks=blocks, group=self._world).tracked_by(self._call_track)
        capacity = {1: self._one_shot_bytes, 2: -(-self.LARGEST_CALL // self.n_pes) + self.LARGEST_ROW}
        if self._all_reduce is not None or self.n_pes == 1:
            capacity |= {1: 0, 2: 0}
        # Whole rows of any dtype, so that the halves are the same for all.
        widest = hidden * max(dtype.itemsize for dtype in self.DTYPES)
        specs: BufferSpecs = {
            f"inbox{n}": ((2, n, self.n_pes, -(-size // widest) * widest), torch.uint8)
            for n, size in capacity.items()
            if size
        }
        specs |= {"tags": ((2, self.n_pes, self._max_blocks, VECTOR_BYTES), torch.uint8)}
        self._memory = self.allocate(specs)
        self._calls = self.counters(self._max_blocks)

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
        x = x.view(-1)
        if self._all_reduce is not None:
            x = self._all_reduce(out, x.view(out.shape)).view(-1)
        flat = out.view(-1)
        shots, rows = self._shots_and_rows(out)
        for first in range(0, flat.numel(), rows * self.hidden):
            piece = slice(first, first + rows * self.hidden)
            before = None if residual is None else residual.view(-1)[piece]
            self._launch(shots, flat[piece], x[piece], weight, before, bias, float(eps), tag)
        return out

    def warm_up(self, dtype: torch.dtype) -> None:
        """Make the kernels for rows of a dtype, whatever their number: later calls may be captured into a CUDA graph.

        Collective where it is the first one for the dtype; does nothing while a graph is captured.

        Args:
            dtype: one of `DTYPES`.
        """
        on_gpu = self._world.device.type == "cuda"
        if dtype in self._warm or (on_gpu and torch.cuda.is_current_stream_capturing()):
            return
        self._warm.add(dtype)
        x, residual, weight = (torch.zeros(self.hidden, dtype=dtype, device=self._world.device) for _ in range(3))
        forced = self.shots
        try:
            for shots in (1, 2):
                self.shots = shots
                self(x, x, weight, residual=residual)
        finally:
            self.shots = forced

    def _shots_and_rows(self, out: torch.Tensor) -> tuple[int, int]:
        """Steps over the links, and rows that one kernel takes."""
        row = self.hidden * out.element_size()
        if self.n_pes == 1 or self._all_reduce is not None:
            return 0, out.numel() // self.hidden
        if (self.shots or (1 if out.nbytes <= self._one_shot_bytes else 2)) == 1:
            return 1, self._one_shot_bytes // row
        return 2, self._memory["inbox2"].shape[3] // row * self.n_pes

    def _launch(
        self,
        shots: int,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        tag: int,
    ) -> None:
        """One kernel, for whole rows."""
        vector = VECTOR_BYTES // out.element_size()
        width = self.hidden // vector
        # As few vectors a thread as possible, and as few threads then.
        most = 1024 - (AGREEING if shots else 0)
        threads = -(-width // -(-width // most) // 32) * 32 + (AGREEING if shots else 0)
        if shots:
            memory = self._memory[f"inbox{shots}"]
            capacity = memory.shape[3] // (width * VECTOR_BYTES)
            inbox = memory.view(-1).view(out.dtype)
        else:
            capacity, inbox = 0, x[:0]
        kernel = all_reduce_norm(
            self.n_pes, dtype_name(out.dtype), self.hidden, capacity, shots, threads, self._max_blocks
        )
        arguments = (
            out,
            x,
            out if residual is None else residual,
            weight if bias is None else bias,
            weight,
            eps,
            int(residual is not None),
            int(bias is not None),
            tag,
            self.status_record,
            inbox.view(2, max(shots, 1), self.n_pes, capacity * width, vector),
            self._memory["tags"].view(out.dtype),
            self._calls,
        )
        self._launch_checked(lambda: kernel(*arguments))

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
        if self._all_reduce is not None:
            self._all_reduce.free()
        super().free()
