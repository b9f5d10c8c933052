"""Merge of partial attention outputs for decode context parallelism: every rank has attended to its part of the KV cache.

A rank's output of a head is a mean under the softmax of its own scores, so outputs are weighted by exp(lse): of rank p by
w_p = exp(lse_p - max lse), divided by the sum of the weights (Rabe and Staats, arXiv:2112.05682; the split of FlashDecoding).
Outputs and lse are sent as vectors that are their own flags, see `N.put_vector`, in one trip: each PE sends a part of the
heads to the PE that merges it, or all rows to all. In two trips the merged parts go to all PEs.

Calls alternate between two halves of the memory, as in all_reduce_push.py.
"""

import functools
from collections.abc import Callable

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.runtime.profiling import named

from .algorithms import BufferSpecs
from .all_gather import AllGather
from .all_to_all import AllToAll
from .collective import (
    EXPLICIT_SYNC,
    STATUS_WORDS,
    Collective,
    all_agree,
    call_word,
    count_call,
    dtype_name,
    is_aligned,
    is_integer,
    report_other_call,
)
from .launches import Launch
from .sums import VECTOR_BYTES, vector_of

# Threads of a block that exchange lse; the other threads move rows, and polls would delay them.
LSE_THREADS = 32
# float32 words of the vector that carries a lse: the lse, and the tag of the call, an integer below 2**24.
LSE, TAG, LSE_WORDS = 0, 1, 4


@tsn.macro
def exchange_lses(
    lses, agrees, inbox, lse, half, first, rows, call: T.Ref, tag, status, lane, me, n_pes, heads, own, group
):
    """lses[j, p] = PE p's lse of row first + j of this PE's part; agrees[p] = whether PE p makes the same call. Called by
    LSE_THREADS threads.

    Args:
        lses: shared float32 [group, n_pes]. agrees: shared int32 [n_pes].
        inbox: symmetric float32 [2, trips, n_pes, rows, LSE_WORDS]; half: its half for this call.
        lse: [batch, heads] of this PE. own: number of heads per part; with `heads`, every PE merges all.
    """
    mine, theirs = T.alloc_local((LSE_WORDS,), "float32"), T.alloc_local((LSE_WORDS,), "float32")
    T.clear(mine)
    mine[TAG] = T.cast(tag, "float32")
    for turn in T.serial(-(-group * n_pes // LSE_THREADS)):
        index = turn * LSE_THREADS + lane
        j = index // n_pes
        pe = (me + index + 1) % n_pes
        r = first + j
        if j < group and r < rows:
            mine[LSE] = lse[r // own, (pe * own if own < heads else 0) + r % own]
            N.put_vector(inbox[half, 0, me, r, 0:LSE_WORDS], mine, pe)
    for turn in T.serial(-(-group * n_pes // LSE_THREADS)):
        index = turn * LSE_THREADS + lane
        j = index // n_pes
        pe = index % n_pes
        r = first + j
        if j < group and r < rows:
            N.take_vectors(theirs, inbox[half, 0, pe, r, 0:LSE_WORDS])
            lses[j, pe] = theirs[LSE]
            if j == 0:
                other = T.alloc_var("int32", T.cast(theirs[TAG], "int32"))
                agrees[pe] = T.cast(other == tag, "int32")
                if other != tag:
                    report_other_call(status, pe, call, tag, call_word(call, other))


@tsn.macro
def load_lses(lses, agrees, inbox, first, rows, at, lane, n_pes, group):
    """As `exchange_lses`, for lses that have arrived: PE p's are the words behind vector `at` of inbox[0, 0, p]."""
    for turn in T.serial(-(-group * n_pes // LSE_THREADS)):
        index = turn * LSE_THREADS + lane
        j = index // n_pes
        pe = index % n_pes
        r = first + j
        if j < group and r < rows:
            lses[j, pe] = inbox[0, 0, pe, at + r // LSE_WORDS, r % LSE_WORDS]
            if j == 0:
                agrees[pe] = 1


@tsn.macro
def weigh(weights, merged: T.Ref, lses, j, n_pes, base_2):
    """weights[p] = the weight of PE p's row j, 0 for a row without keys; merged = the row's lse. `weights`: local float32
    [n_pes]. `lses`: shared [group, n_pes]."""
    low = -T.infinity("float32")
    top, total = T.alloc_var("float32"), T.alloc_var("float32")
    top = low
    for p in T.unroll(n_pes):
        weights[p] = lses[j, p]
        # No keys: attention kernels write -inf, +inf or NaN, for which the comparison is false.
        weights[p] = T.if_then_else(weights[p] < T.infinity("float32"), weights[p], low)
        top = T.max(top, weights[p])
    merged = top
    if top > low:
        total = T.float32(0)
        for p in T.unroll(n_pes):
            weights[p] = T.exp2(weights[p] - top) if base_2 else T.exp(weights[p] - top)
            total += weights[p]
        for p in T.unroll(n_pes):
            weights[p] = weights[p] / total
        merged = top + (T.log2(total) if base_2 else T.log(total))
    else:
        for p in T.unroll(n_pes):
            weights[p] = T.float32(0)


@tsn.jit(name="attention_merge", pass_configs=EXPLICIT_SYNC)
def attention_merge(n_pes, dtype, heads, dim, all_heads=False, shots=1, base_2=False, threads=288, max_blocks=64):
    """Kernel `(out, out_lse, x, lse, tag, status, inbox, lse_inbox, calls)`: rows of `dim` elements, one of each head.

    Args:
        n_pes: number of PEs, all of them mapped.
        dtype: dtype of `out` and `x`: float32, float16 or bfloat16. A row is a multiple of 16 bytes.
        heads: heads of `x` [batch, heads, vectors, vector] and `lse` (float32 [batch, heads]), a multiple of `n_pes` unless
            every PE merges all in one step.
        dim: elements of a row.
        all_heads: `out` and `out_lse` have all heads, and may be `x` and `lse`; otherwise PE p has the p-th part of the heads.
        shots: trips over the links: 1, or 2 with `all_heads`, where each PE merges a part and sends it to all; 0: `inbox` has
            the rows of all PEs, each followed by its lse.
        base_2: lse are logarithms to base 2 instead of natural logarithms.
        threads, max_blocks: launch geometry; all blocks must be able to run at once.

    `inbox` [2, trips, n_pes, capacity, vector] and `lse_inbox` (float32 [2, trips, n_pes, lse_capacity, LSE_WORDS]), with 2
    trips if `all_heads` and else 1, are symmetric, zero before the first call and never reset. With `shots` 0 the inboxes
    are two views of the same memory [1, 1, n_pes, capacity, 16 bytes]. `tag`, `status` and `calls` [max_blocks]: see
    `collective.call_word`.
    """
    batch = T.dynamic("batch", "int64")
    capacity, lse_capacity = T.dynamic("capacity", "int64"), T.dynamic("lse_capacity", "int64")
    vector = vector_of(dtype)
    width, workers = dim // vector, threads - LSE_THREADS
    parts = n_pes if shots == 2 or not all_heads else 1
    own, sent = heads // parts, (parts if shots else 1)
    out_heads = heads if all_heads else own
    group = max(1, workers // width)  # rows that a block merges at once
    per_thread = -(-group * width // workers)  # vectors of these rows per thread
    halves, trips = (2, 2 if all_heads else 1) if shots else (1, 1)

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((batch, out_heads, width, vector), dtype),
        out_lse: T.Tensor((batch, out_heads), "float32"),
        x: T.Tensor((batch, heads, width, vector), dtype),
        lse: T.Tensor((batch, heads), "float32"),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        inbox: T.Tensor((halves, trips, n_pes, capacity, vector), dtype),
        lse_inbox: T.Tensor((halves, trips, n_pes, lse_capacity, LSE_WORDS), "float32"),
        calls: T.Tensor((max_blocks,), "uint64"),
    ):
        with T.Kernel(T.min(T.ceildiv(batch * own, T.int64(group)), T.int64(max_blocks)), threads=threads) as block:
            me = N.my_pe()
            thread = T.get_thread_binding()
            lses = T.alloc_shared((group, n_pes), "float32")
            agrees = T.alloc_shared((n_pes,), "int32")
            loaded = T.alloc_local((per_thread * sent, vector), dtype)
            got = T.alloc_local((per_thread * n_pes, vector), dtype)
            merged = T.alloc_local((per_thread, vector), dtype)
            sums = T.alloc_local((vector,), "float32")
            weights = T.alloc_local((n_pes,), "float32")
            whole = T.alloc_local((per_thread, LSE_WORDS), "float32")
            theirs = T.alloc_local((n_pes, LSE_WORDS), "float32")
            T.clear(whole)
            agreed = T.alloc_var("int32")
            row_lse = T.alloc_var("float32")
            call = T.alloc_var("uint64", calls[block] + T.uint64(1))
            half = T.cast(call % T.uint64(2), "int32")
            rows = T.alloc_var("int64", batch * own)
            for turn in T.serial(T.ceildiv(rows - block * group, T.int64(max_blocks * group))):
                first = (block + turn * T.int64(max_blocks)) * group
                if thread >= workers:
                    if shots > 0:
                        exchange_lses(
                            lses, agrees, lse_inbox, lse, half, first, rows, call, tag, status, thread - workers, me, n_pes,
                            heads, own, group,
                        )  # fmt: skip
                    else:
                        load_lses(lses, agrees, lse_inbox, first, rows, rows * width, thread - workers, n_pes, group)
                else:
                    if shots > 0:
                        for u in T.unroll(per_thread):
                            i = u * workers + thread
                            r = first + i // width
                            if i < group * width and r < rows:
                                for hop in T.unroll(sent):
                                    of = (me + hop + 1) % n_pes * own if sent > 1 else 0
                                    for v in T.vectorized(vector):
                                        loaded[u * sent + hop, v] = x[r // own, of + r % own, i % width, v]
                        for u in T.unroll(per_thread):
                            i = u * workers + thread
                            r = first + i // width
                            if i < group * width and r < rows:
                                N.put_vectors(
                                    inbox[half, 0, me, r * width + i % width, 0:vector],
                                    loaded[u * sent : u * sent + sent, 0:vector], n_pes, (me + 1) % n_pes,
                                )  # fmt: skip
                    for u in T.unroll(per_thread):
                        i = u * workers + thread
                        r = first + i // width
                        if i < group * width and r < rows:
                            if shots > 0:
                                N.take_vectors(
                                    got[u * n_pes : u * n_pes + n_pes, 0:vector],
                                    inbox[half, 0, 0:n_pes, r * width + i % width, 0:vector],
                                )
                            else:
                                for p in T.unroll(n_pes):
                                    for v in T.vectorized(vector):
                                        got[u * n_pes + p, v] = inbox[0, 0, p, r * width + i % width, v]
                T.sync_threads()
                all_agree(agreed, agrees, n_pes)
                for u in T.unroll(per_thread):
                    i = u * workers + thread
                    r = first + i // width
                    if thread < workers and i < group * width and r < rows:
                        weigh(weights, row_lse, lses, i // width, n_pes, base_2)
                        T.clear(sums)
                        for p in T.unroll(n_pes):
                            # Skip rows without keys, whose contents are undefined.
                            if weights[p] > T.float32(0):
                                for v in T.unroll(vector):
                                    sums[v] += weights[p] * T.cast(got[u * n_pes + p, v], "float32")
                        for v in T.unroll(vector):
                            merged[u, v] = T.cast(sums[v], dtype)
                        whole[u, LSE] = row_lse
                        if shots == 2:
                            N.put_vectors(
                                inbox[half, 1, me, r * width + i % width, 0:vector], merged[u, 0:vector], n_pes,
                                (me + 1) % n_pes,
                            )  # fmt: skip
                            if i % width == 0:
                                N.put_vectors(
                                    lse_inbox[half, 1, me, r, 0:LSE_WORDS], whole[u, 0:LSE_WORDS], n_pes,
                                    (me + 1) % n_pes,
                                )  # fmt: skip
                        elif agreed != 0:
                            for v in T.vectorized(vector):
                                out[r // own, r % own, i % width, v] = merged[u, v]
                            if i % width == 0:
                                out_lse[r // own, r % own] = row_lse
                if shots == 2:
                    for u in T.unroll(per_thread):
                        i = u * workers + thread
                        r = first + i // width
                        if thread < workers and i < group * width and r < rows:
                            N.take_vectors(
                                got[u * n_pes : u * n_pes + n_pes, 0:vector],
                                inbox[half, 1, 0:n_pes, r * width + i % width, 0:vector],
                            )
                            if i % width == 0:
                                N.take_vectors(theirs, lse_inbox[half, 1, 0:n_pes, r, 0:LSE_WORDS])
                            if agreed != 0:
                                for p in T.unroll(n_pes):
                                    for v in T.vectorized(vector):
                                        out[r // own, p * own + r % own, i % width, v] = got[u * n_pes + p, v]
                                    if i % width == 0:
                                        out_lse[r // own, p * own + r % own] = theirs[p, LSE]
                T.sync_threads()
            if shots > 0:
                used = T.min(T.ceildiv(rows, T.int64(group)), T.int64(max_blocks))
                count_call(calls, block, call, used, thread, threads, max_blocks)

    return main


class AttentionMerge(Collective):
    """Merge of all ranks' partial attention outputs; constructed and called by all ranks.

    It replaces vLLM's `cp_lse_ag_out_rs` (`cp_lse_ag_out_ar` with `all_heads`), and its all-to-all of outputs and lse.

    Args:
        all_heads: every rank gets all heads; otherwise rank p gets the p-th part of the heads.
        base_2: lse are logarithms to base 2, as in FlashInfer, instead of natural logarithms, as in FlashAttention.
        call_bytes: bytes of `x` per kernel; larger tensors take several kernels. The heap holds twice as many, with
            `all_heads` four times as many, and a quarter of that for the lse.
        threads: see `Collective`.
        blocks: see `Collective`; None: one per SM, at most 128.
        group: the ranks; see `tilescale_net.world`.

    Raises:
        ValueError: a launch geometry or a size that the kernels or the GPU cannot run.
        RankMismatch: ranks pass different arguments.
        HeapError: no room for the memory.
    """

    DTYPES = (torch.bfloat16, torch.float16, torch.float32)
    LARGEST_ROW = 8 * 1024  # bytes, two vectors per thread

    def __init__(
        self, *, all_heads: bool = False, base_2: bool = False, call_bytes: int = 4 << 20,
        threads: int = 256 + LSE_THREADS, blocks: int | None = None, group: "tsn.Group" = None,
    ) -> None:  # fmt: skip
        name = "AttentionMerge"
        if not is_integer(call_bytes):
            raise ValueError(f"{name}: call_bytes is {call_bytes!r}; it must be a positive number of bytes")
        if threads == LSE_THREADS:
            raise ValueError(f"{name}: threads is {threads!r}; it must be {2 * LSE_THREADS} or more")
        if blocks is None:
            device = tsn.world(group).device
            on_gpu = device.type == "cuda"
            blocks = min(128, torch.cuda.get_device_properties(device).multi_processor_count) if on_gpu else 8
        shown = f"all_heads={all_heads}, base_2={base_2}, call_bytes={call_bytes}"
        super().__init__(name, shown, threads, blocks, group)
        self._all_heads, self._base_2 = bool(all_heads), bool(base_2)
        # Vectors and rows per part.
        self._capacity = -(-call_bytes // (VECTOR_BYTES * self.n_pes))
        self._lse_capacity = -(-self._capacity // 4)
        self._one_shot_bytes = min(self._capacity * VECTOR_BYTES, (1 << 20) // self.n_pes)
        self._gather: AllGather | None = None
        self._exchange: AllToAll | None = None
        specs: BufferSpecs
        if self.needs_symmetric_source:
            # Rows and lse to a PE (all_heads: to all PEs), and from all.
            room = self._capacity + self._lse_capacity
            parts = 1 if all_heads else self.n_pes
            specs = {
                "outbox": ((parts * room * VECTOR_BYTES,), torch.uint8),
                "inbox": ((self.n_pes * room * VECTOR_BYTES,), torch.uint8),
            }
            if all_heads:
                self._gather = self._use(AllGather(threads=threads, blocks=blocks, group=self._world))
            else:
                self._exchange = self._use(AllToAll(threads=threads, blocks=blocks, group=self._world))
        else:
            shots = 2 if all_heads else 1
            specs = {
                "inbox": ((2, shots, self.n_pes, self._capacity, VECTOR_BYTES), torch.uint8),
                "lse_inbox": ((2, shots, self.n_pes, self._lse_capacity, LSE_WORDS), torch.float32),
            }
        self._memory = self.allocate(specs)
        self._calls = self.counters(blocks)

    @named("tilescale_net.AttentionMerge")
    def __call__(
        self, out: torch.Tensor, out_lse: torch.Tensor, x: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`out` becomes the attention to the KV cache of all PEs; asynchronous on the current stream.

        Args:
            out: contiguous [batch, heads / n_pes, dim], with all_heads [batch, heads, dim], of one of `DTYPES`; begins at a
                multiple of 16 bytes. With all_heads it may be `x`.
            out_lse: lse of `out`, float32 [batch, heads of out]. With all_heads it may be `lse`.
            x: this rank's output for its part of the KV cache, [batch, heads, dim], of out's dtype; a row of `dim` is a
                multiple of 16 bytes, and at most 8 KiB. Rows without keys may have any contents.
            lse: logarithm of the sum of the exponentials of the part's scores, float32 [batch, heads]; -inf, +inf or NaN for
                a part without keys.

        Returns:
            `out` and `out_lse`. Sums are in float32, in the order of the PEs, and rounded once; a row's bits do not depend
            on other rows, and are equal on all PEs. If no rank has keys, rows are 0 and their lse -inf.

        Raises:
            TypeError, ValueError: a wrong argument, by name; nothing was sent.
            RankMismatch: ranks pass different shapes or dtypes. Raised at once for new arguments, else by the next call or
                `check`.
        """
        self._begin()
        rows_key, lse_key = self._key(out, x), self._key(out_lse, lse)
        key = None if rows_key is None or lse_key is None else (rows_key, lse_key)
        if self._made_again(key, out, out_lse, x, lse):
            return out, out_lse
        self._check_arguments(out, out_lse, x, lse)
        noted = "x of shape {} and {}", x.shape, x.dtype
        tag = self._agree(*noted)
        if x.numel() == 0:
            return out, out_lse
        shots, tokens = self._shots_and_tokens(x)
        if tokens < x.shape[0] or shots == 0:
            for first in range(0, x.shape[0], tokens):
                piece = slice(first, first + tokens)
                self._launch(shots, tag, out[piece], out_lse[piece], x[piece], lse[piece])
        else:
            again = self._launch(shots, tag, out, out_lse, x, lse)
            if key is not None:
                self._again[key] = noted, again
        return out, out_lse

    def _check_arguments(self, out, out_lse, x, lse) -> None:
        self._check("x", x)
        self._check_dtype(x, self.DTYPES)
        if x.dim() != 3:
            raise ValueError(f"{self.name}: x has shape {list(x.shape)}; it must be [batch, heads, dim]")
        batch, heads, dim = x.shape
        if not self._all_heads and heads % self.n_pes:
            raise ValueError(
                f"{self.name}: x has {heads} heads, which are no multiple of the {self.n_pes} PEs that merge a part of them each; "
                "give all_heads=True to merge all on each"
            )
        row = dim * x.element_size()
        if row % VECTOR_BYTES or row > self.LARGEST_ROW:
            raise ValueError(
                f"{self.name}: x has rows of {dim} elements of {x.dtype}, {row} bytes; they must be a multiple of {VECTOR_BYTES}, "
                f"and at most {self.LARGEST_ROW}"
            )
        own = heads if self._all_heads else heads // self.n_pes
        for name, tensor, dtype, shape in (
            ("lse", lse, torch.float32, (batch, heads)),
            ("out", out, x.dtype, (batch, own, dim)),
            ("out_lse", out_lse, torch.float32, (batch, own)),
        ):
            self._check(name, tensor, dtype)
            if tensor.shape != torch.Size(shape):
                raise ValueError(
                    f"{self.name}: {name} has shape {list(tensor.shape)}; for x of shape {list(x.shape)} it must be {list(shape)}"
                )
        for name, tensor in (("out", out), ("x", x)):
            if not is_aligned(VECTOR_BYTES, tensor):
                raise ValueError(f"{self.name}: {name} must begin at a multiple of {VECTOR_BYTES} bytes")
        for name, result in (("out", out), ("out_lse", out_lse)):
            for source_name, source in (("x", x), ("lse", lse)):
                in_place = result.data_ptr() == source.data_ptr() and result.shape == source.shape
                if not (self._all_heads and in_place):
                    self._check_apart(name, result, source_name, source)
        self._check_apart("out", out, "out_lse", out_lse)
        if x.numel() and self._shots_and_tokens(x)[1] == 0:
            raise ValueError(
                f"{self.name}: one entry of the batch has {heads * row} bytes, for which the memory of this object is too small; "
                f"construct it with call_bytes={heads * max(row, 64) * self.n_pes} or more"
            )

    def _shots_and_tokens(self, x: torch.Tensor) -> tuple[int, int]:
        """Trips over the links, and batch entries per kernel."""
        heads, vectors = x.shape[1], x.shape[2] * x.element_size() // VECTOR_BYTES
        shots = 0 if self.needs_symmetric_source else 1
        if self._all_heads and shots and x.nbytes > self._one_shot_bytes and heads % self.n_pes == 0:
            shots = 2
        rows = heads if self._all_heads and shots < 2 else heads // self.n_pes
        return shots, min(self._capacity // (rows * vectors), self._lse_capacity // rows)

    def _launch(self, shots: int, tag: int, out, out_lse, x, lse) -> Callable[..., None]:
        """One kernel."""
        _, heads, dim = x.shape
        vector = VECTOR_BYTES // x.element_size()

        def make() -> Launch:
            options = self._all_heads, shots, self._base_2, self.threads, self.blocks
            kernel = attention_merge(self.n_pes, dtype_name(x.dtype), heads, dim, *options)
            constants = {"status": self.status_record, "calls": self._calls}
            if shots:
                constants |= {"inbox": self._memory["inbox"].view(x.dtype), "lse_inbox": self._memory["lse_inbox"]}
            parameters = (*(() if shots else ("inbox", "lse_inbox")), "tag", "out", "out_lse", "x", "lse")
            forms = {
                name: ((-1, count, dim // vector, vector), None)
                for name, count in (("out", out.shape[1]), ("x", heads))
            }
            return Launch(kernel, constants, parameters, self._world, forms=forms)

        inboxes = () if shots else self._exchanged(x, lse)
        launch = functools.partial(self.prepared((x.dtype, heads, dim, shots), make), *inboxes, tag)
        self._launch_checked(launch, out, out_lse, x, lse)
        return launch

    def _exchanged(self, x: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Two views of the memory with the arrived rows and lse of all PEs."""
        batch, heads, dim = x.shape
        parts = 1 if self._all_heads else self.n_pes
        rows = batch * heads // parts
        row_bytes = rows * dim * x.element_size()
        size = row_bytes + -(-rows * 4 // VECTOR_BYTES) * VECTOR_BYTES
        outbox = self._memory["outbox"][: parts * size].view(parts, size)
        inbox = self._memory["inbox"][: self.n_pes * size].view(self.n_pes, size)
        for first, tensor in ((0, x), (row_bytes, lse)):
            by_part = tensor.view(batch, parts, heads // parts, -1).transpose(0, 1)
            target = outbox.view(tensor.dtype)[:, first // tensor.element_size() :][:, : by_part[0].numel()]
            target.view(by_part.shape).copy_(by_part)
        if self._gather is not None:
            self._gather(inbox, outbox[0])
        else:
            assert self._exchange is not None
            self._exchange(inbox, outbox)
        return tuple(
            inbox.view(dtype).view(1, 1, self.n_pes, size // VECTOR_BYTES, -1) for dtype in (x.dtype, torch.float32)
        )
