"""Matrix product and reduce-scatter at once: rows leave for their owner while the next owner's are computed.

Every PE has some columns of the left matrix and the rows of the right one that go with them, so that its product is one
of the summands of the result; each PE owns some rows of the sum. The products for the other owners come first, and a few
blocks push each of them while the next one is computed. The product of the own rows comes last: its tiles add what has
arrived from the peers, chunk by chunk, and write the sum.
"""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.fused.all_gather_matmul import SPECIALISED, matmul_arriving
from tilescale_net.kernels.fused.matmul import DEFAULT, FusedMatmul, Sides, Tiling, check_extents, dtype_name


@tsn.jit(name="matmul_reduce_scatter_push")
def push_summand(n_pes, rows, n, dtype, chunk, threads=512, blocks=8, engine="auto"):
    """Kernel `(summands, partial, calls, ready, arrived, hop)`: puts a summand to the PE `hop` places behind this one.

    Args:
        n_pes, rows, n, dtype: `partial` is [rows, n], `summands` (symmetric) [2, n_pes, rows, n]; the target gets it as
            `summands[call % 2, my_pe]`.
        chunk: rows between two signals.
        threads, blocks, engine: see `tilescale_net.language.put_block`.

    `calls`, `ready` and `arrived` as in `all_gather_matmul.push_rows`.
    """
    chunks = -(-rows // chunk)

    @T.prim_func
    def main(
        ctx: N.Context(),
        summands: T.Tensor((2, n_pes, rows, n), dtype),
        partial: T.Tensor((rows, n), dtype),
        calls: T.Tensor((1,), "int64"),
        ready: T.Tensor((n_pes,), "uint64"),
        arrived: T.Tensor((n_pes, chunks), "uint64"),
        hop: T.int32,
    ):
        with T.Kernel(blocks, threads=threads) as block:
            me = N.my_pe()
            call = calls[0]
            pe = (me + hop) % n_pes
            if T.get_thread_binding() == 0:
                if block == 0:
                    # The PE that sends to this one at the same distance may begin.
                    N.signal(ready[me], T.cast(call, "uint64"), (me - hop + n_pes) % n_pes)
                # This half of `summands` was last read two calls ago: a PE that has begun the last call is done with it.
                N.wait(ready[pe], "ge", call - 1)
            T.sync_threads()
            for turn in T.serial(-(-chunks // blocks)):
                c = turn * blocks + block
                if c < chunks:
                    N.put_signal_block(
                        summands[call % 2, me, c * chunk, 0], partial[c * chunk, 0], pe, arrived[me, c],
                        T.cast(call, "uint64"), count=T.cast(T.min(chunk, rows - c * chunk), "int64") * n,
                        engine=engine,
                    )  # fmt: skip
            T.sync_threads()
            if T.get_thread_binding() == 0:
                N.quiet(pe)

    return main


@tsn.jit(name="matmul_reduce_scatter", pass_configs=SPECIALISED)
def matmul_reducing(
    n_pes, rows, n, k, dtype, out_dtype, transposed=False, tile=(128, 256, 64), stages=3, threads=256, panel=10,
    staged=False,
):  # fmt: skip
    """Kernel `(out, x, w, summands, calls, arrived)`: `out = x @ w +` the summands of the other PEs.

    Args:
        n_pes, rows, n, k: of `out` [rows, n], `x` [rows, k], `w`, and `summands` [2, n_pes, rows, n] of `push_summand`,
            whose `chunk` is the tile's rows.
        dtype, out_dtype: of `x`, `w` and the summands, and of `out`.
        transposed, tile, stages, threads, panel, staged: as in `all_gather_matmul.matmul_arriving`.

    Sums are made in float32, the own product first, then the summands in the order of the PEs behind this one.
    """
    bm, bn, bk = tile
    tiles = -(-rows // bm)

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((rows, n), out_dtype),
        x: T.Tensor((rows, k), dtype),
        w: T.Tensor((n, k) if transposed else (k, n), dtype),
        summands: T.Tensor((2, n_pes, rows, n), dtype),
        calls: T.Tensor((1,), "int64"),
        arrived: T.Tensor((n_pes, tiles), "uint64"),
    ):
        with T.Kernel(T.ceildiv(n, bn), tiles, threads=threads) as (bx, by):
            left = T.alloc_shared((bm, bk), dtype)
            right = T.alloc_shared((bn, bk) if transposed else (bk, bn), dtype)
            total = T.alloc_fragment((bm, bn), "float32")
            result = T.alloc_shared((bm, bn), out_dtype)
            T.use_swizzle(panel)
            half = T.cast(calls[0] % 2, "int32")
            T.clear(total)
            for i in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                T.copy(x[by * bm, i * bk], left)
                if transposed:
                    T.copy(w[bx * bn, i * bk], right)
                else:
                    T.copy(w[i * bk, bx * bn], right)
                T.gemm(left, right, total, transpose_B=transposed)
            for hop in T.serial(1, n_pes):
                pe = (N.my_pe() + hop) % n_pes
                # By each thread that multiplies: on sm_90 there are others in the block, which do not come here.
                N.wait(arrived[pe, by], "ge", calls[0], proxy="async")
                for i, j in T.Parallel(bm, bn):
                    if by * bm + i < rows and bx * bn + j < n:
                        total[i, j] += T.cast(summands[half, pe, by * bm + i, bx * bn + j], "float32")
            if staged:
                T.copy(total, result)
                T.copy(result, out[by * bm, bx * bn])
            else:
                T.copy(total, out[by * bm, bx * bn])

    return main


class MatmulReduceScatter(FusedMatmul):
    """The sum of all ranks' `x @ w`, of which every rank gets its rows; constructed and called by all ranks.

    Args:
        rows: of the result, on every rank; `x` has n_pes times as many.
        k: columns of `x` and rows of `w`, on every rank.
        n: columns of `w`.
        dtype: of `x`, `w` and the summands that travel, torch.bfloat16 or torch.float16.
        out_dtype: of the result; default `dtype`. Sums are made in float32.
        tiling: geometry of the products, see `all_gather_matmul.matmul_arriving`.
        threads, blocks, engine: of the kernel that pushes summands, see `push_summand`.
        group: whose ranks these are; see `tilescale_net.world`.

    Takes 3 * n_pes * rows * n elements of the symmetric heap.

    Raises:
        TypeError, ValueError: a dtype, an extent or a launch geometry that does not fit, by name.
        RankMismatch: ranks that want different ones.
        HeapError: no room for the summands.
    """

    def __init__(
        self, rows: int, k: int, n: int, *, dtype: torch.dtype = torch.bfloat16, out_dtype: torch.dtype | None = None,
        tiling: Tiling = DEFAULT, threads: int = 512, blocks: int = 8, engine: str = "auto", group: "tsn.Group" = None,
    ):  # fmt: skip
        check_extents("MatmulReduceScatter", dtype, rows=rows, k=k, n=n)
        shapes = f"rows={rows}, k={k}, n={n}, engine={engine}"
        super().__init__("MatmulReduceScatter", shapes, dtype, out_dtype, tiling, threads, blocks, group)
        self.rows, self.k, self.n, self._engine = rows, k, n, engine
        memory = self.allocate({
            "summands": ((2, self.n_pes, rows, n), dtype),
            "partial": ((self.n_pes, rows, n), dtype),
            "ready": ((self.n_pes,), torch.uint64),
            "arrived": ((self.n_pes, -(-rows // tiling.tile[0])), torch.uint64),
        })  # fmt: skip
        self._summands, self._partial = memory["summands"], memory["partial"]
        self._ready, self._arrived = memory["ready"], memory["arrived"]
        self._sides = Sides(self.device, (-1,))

    def __call__(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's rows of the sum of all ranks' `x @ w`; asynchronous on the current stream.

        Args:
            x: [n_pes * rows, k], contiguous; rows of PE 0 first.
            w: [k, n], contiguous, or the transpose of a contiguous tensor.
            out: [rows, n], contiguous; default a new tensor.

        Returns:
            `out`. The order of additions is fixed, so that results are equal bit by bit from run to run.

        Raises:
            TypeError, ValueError: an argument that does not fit, by name; nothing was sent.
        """
        self._begin()
        self._rows(x, (self.n_pes * self.rows, self.k))
        held, transposed = self._weight(w, self.k, self.n)
        out = self._result(out, (self.rows, self.n), ("x", x), ("w", held))
        self._calls.add_(1)
        dtype, rows = dtype_name(self.dtype), x.view(self.n_pes, self.rows, self.k)
        geometry = vars(self.tiling)
        product = matmul_arriving(1, self.rows, self.n, self.k, dtype, dtype, transposed, **geometry, peers=False)
        sizes = (self.n_pes, self.rows, self.n, dtype, self.tiling.tile[0], self.threads, self.blocks, self._engine)
        for hop in range(1, self.n_pes):
            pe = (self.rank + hop) % self.n_pes
            one = self._partial[pe].view(1, self.rows, self.n), rows[pe].view(1, 1, self.rows, self.k)
            product(*one, held, self._calls, self._arrived[:1])
            self._sides.fork()
            with self._sides[0]:
                push_summand(*sizes)(self._summands, self._partial[pe], self._calls, self._ready, self._arrived, hop)
        types = dtype, dtype_name(self.out_dtype)
        last = matmul_reducing(self.n_pes, self.rows, self.n, self.k, *types, transposed, **geometry)
        last(out, rows[self.rank], held, self._summands, self._calls, self._arrived)
        self._sides.join()
        return out
