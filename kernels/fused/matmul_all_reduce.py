"""Matrix product and all-reduce at once: sums of rows leave their owner for all others while the next are computed.

The first half is `matmul_reduce_scatter`: every PE adds up the rows that it owns. Its product of the own rows says after
each tile that it is done; as soon as all tiles of some rows are, a few blocks push these sums to the other PEs, who copy
them to the result. So each row is added up and rounded once, and all PEs get the same bits.
"""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.collective import BufferSpecs, dtype_name
from tilescale_net.kernels.fused.matmul import DEFAULT, Tiling
from tilescale_net.kernels.fused.matmul_reduce_scatter import MatmulReduceScatter
from tilescale_net.kernels.fused.product import MULTIPLIERS


@tsn.jit(name="matmul_all_reduce_push")
def push_sums(n_pes, rows, n, dtype, chunk, adds, threads=512, blocks=8, engine="auto"):
    """Kernel `(sums, part, calls, done, shared)`: puts `part` into `sums[call % 2, my_pe]` of every other PE.

    Args:
        n_pes, rows, n, dtype: `part` is [rows, n], `sums` (symmetric) [2, n_pes, rows, n].
        chunk: rows between two signals.
        adds: by how much `done[c]` grows in a call until the rows of chunk c are in `part`.
        threads, blocks, engine: see `tilescale_net.language.put_block`.

    `calls` (int64 [1]) holds the number of this call, 1 or more. `done` [chunks] and `shared` [n_pes, chunks] are signals
    (uint64, symmetric), zero before the first call and then left alone. That the other PEs are done with this half of
    `sums` is known to whoever launches this: it follows `push_summand` to each of them on the stream.
    """
    chunks = -(-rows // chunk)

    @T.prim_func
    def main(
        ctx: N.Context(),
        sums: T.Tensor((2, n_pes, rows, n), dtype),
        part: T.Tensor((rows, n), dtype),
        calls: T.Tensor((1,), "int64"),
        done: T.Tensor((chunks,), "uint64"),
        shared: T.Tensor((n_pes, chunks), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            call = calls[0]
            for turn in T.serial(-(-chunks // blocks)):
                c = turn * blocks + block
                if c < chunks:
                    N.wait_block(done[c], "ge", call * adds, proxy="async")
                    for hop in T.serial(1, n_pes):
                        N.put_signal_block(
                            sums[call % 2, me, c * chunk, 0], part[c * chunk, 0], (me + hop) % n_pes, shared[me, c],
                            T.cast(call, "uint64"), count=T.cast(T.min(chunk, rows - c * chunk), "int64") * n,
                            engine=engine,
                        )  # fmt: skip
            T.sync_threads()
            if thread < n_pes and thread != me:
                N.quiet(thread)

    return main


@tsn.jit(name="matmul_all_reduce_collect")
def collect_sums(n_pes, rows, n, dtype, chunk, threads=512, blocks=64):
    """Kernel `(out, sums, calls, shared)`: copies `sums[call % 2, p]` to `out[p]` for the other PEs p, as they arrive.

    Args:
        n_pes, rows, n, dtype: `out` is [n_pes, rows, n], `sums` (symmetric) [2, n_pes, rows, n].
        chunk: rows between two signals of `push_sums`.

    `calls` and `shared` as in `push_sums`.
    """
    chunks = -(-rows // chunk)

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((n_pes, rows, n), dtype),
        sums: T.Tensor((2, n_pes, rows, n), dtype),
        calls: T.Tensor((1,), "int64"),
        shared: T.Tensor((n_pes, chunks), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            me = N.my_pe()
            call = calls[0]
            for turn in T.serial(-(-chunks * (n_pes - 1) // blocks)):
                item = turn * blocks + block
                if item < chunks * (n_pes - 1):
                    # In the order in which they come: a chunk of everybody, then the next one.
                    pe = (me + 1 + item % (n_pes - 1)) % n_pes
                    c = item // (n_pes - 1)
                    N.wait_block(shared[pe, c], "ge", call)
                    N.get_block(
                        out[pe, c * chunk, 0], sums[call % 2, pe, c * chunk, 0], me,
                        count=T.cast(T.min(chunk, rows - c * chunk), "int64") * n, engine="ldst",
                    )  # fmt: skip

    return main


class MatmulAllReduce(MatmulReduceScatter):
    """The sum of all ranks' `x @ w`, which every rank gets; constructed and called by all ranks.

    Args:
        rows: of `x` and of the result, on every rank; a multiple of the number of ranks.
        k: columns of `x` and rows of `w`, on every rank.
        n: columns of `w`.
        dtype, out_dtype, tiling, threads, blocks, engine, group: as in `MatmulReduceScatter`.

    Takes 3 * rows * n elements of the symmetric heap for summands and 2 * rows * n, or 2 * rows * n + rows / n_pes * n
    where some PEs are on other nodes, for sums.

    Raises:
        TypeError, ValueError: a dtype, an extent or a launch geometry that does not fit, by name.
        RankMismatch: ranks that want different ones.
        HeapError: no room for summands and sums.
    """

    NAME = "MatmulAllReduce"

    def __init__(
        self, rows: int, k: int, n: int, *, dtype: torch.dtype = torch.bfloat16, out_dtype: torch.dtype | None = None,
        tiling: Tiling = DEFAULT, threads: int = 512, blocks: int = 8, engine: str = "auto", group: "tsn.Group" = None,
    ):  # fmt: skip
        n_pes = tsn.world(group).size
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1 or rows % n_pes:
            raise ValueError(f"{self.NAME}: rows is {rows!r}; it must be a positive multiple of the {n_pes} ranks")
        options = dict(dtype=dtype, out_dtype=out_dtype, tiling=tiling, threads=threads, blocks=blocks, engine=engine)
        super().__init__(rows // n_pes, k, n, **options, group=group)

    def _more_memory(self) -> BufferSpecs:
        more = {
            "sums": ((2, self.n_pes, self.rows, self.n), self.out_dtype),
            "shared": ((self.n_pes, -(-self.rows // self.tiling.tile[0])), torch.uint64),
        }
        return more | ({"part": ((self.rows, self.n), self.out_dtype)} if self._sources_travel else {})

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
            TypeError, ValueError: an argument that does not fit, by name; nothing was sent.
        """
        self._begin()
        everyone = self.n_pes * self.rows
        self._rows(x, (everyone, self.k))
        held, transposed = self._weight(w, self.k, self.n)
        scales = self._scales(x_scales, w_scales, everyone, self.n)
        out = self._result(out, (everyone, self.n), ("x", x), ("w", held), *self._apart(scales))
        parts, memory = out.view(self.n_pes, self.rows, self.n), self._memory
        mine = parts[self.rank]
        part = memory["part"] if self._sources_travel else mine
        self._sum(part, x, held, transposed, scales, announced=True)
        if self.n_pes > 1:
            shape = self.n_pes, self.rows, self.n, dtype_name(self.out_dtype), self.tiling.tile[0]
            adds = MULTIPLIERS * -(-self.n // self.tiling.tile[1])
            push = push_sums(*shape, adds, self.threads, self.blocks, self._engine)
            with self._sides[0]:  # behind the pushes of summands, beside the last product
                push(memory["sums"], part, self._calls, memory["done"], memory["shared"])
            collect_sums(*shape, self.threads, self._copying_blocks)(
                parts, memory["sums"], self._calls, memory["shared"]
            )
        if part is not mine:
            mine.copy_(part)
        self._sides.join()
        return out

    @property
    def _copying_blocks(self) -> int:
        return min(64, self._block_limit) if self.device.type == "cuda" else self.blocks
