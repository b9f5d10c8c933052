"""All-gather and matrix product at once: tiles are computed in the order in which their rows arrive.

Every PE has some rows of the left matrix and some columns of the right one; each wants the product of all rows with its
columns. The product begins with the rows at hand. Meanwhile a few blocks push them to the other PEs, a signal per chunk;
a tile whose rows come from a peer waits for their signal, and then is an ordinary tile of an ordinary tilelang kernel.
"""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.fused.matmul import DEFAULT, FusedMatmul, Sides, Tiling, check_extents, dtype_name

# tilelang splits the blocks of a product into warps that copy by TMA and warps that multiply (on sm_90).
SPECIALISED = {"tl.disable_warp_specialized": False}


@tsn.jit(name="all_gather_matmul_push")
def push_rows(n_pes, rows, k, dtype, chunk, threads=512, blocks=8, engine="auto"):
    """Kernel `(gathered, x, calls, ready, arrived)`: puts `x` into `gathered[call % 2, my_pe]` of every other PE.

    Args:
        n_pes, rows, k, dtype: `x` is [rows, k], `gathered` (symmetric) [2, n_pes, rows, k].
        chunk: rows between two signals.
        threads, blocks, engine: see `tilescale_net.language.put_block`.

    `calls` (int64 [1]) holds the number of this call, 1 or more. `ready` [n_pes] and `arrived` [n_pes, chunks] are
    signals (uint64, symmetric), zero before the first call and then left alone.
    """
    chunks = -(-rows // chunk)

    @T.prim_func
    def main(
        ctx: N.Context(),
        gathered: T.Tensor((2, n_pes, rows, k), dtype),
        x: T.Tensor((rows, k), dtype),
        calls: T.Tensor((1,), "int64"),
        ready: T.Tensor((n_pes,), "uint64"),
        arrived: T.Tensor((n_pes, chunks), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            call = calls[0]
            # This half of `gathered` was last read two calls ago: whoever has begun the last call is done with it.
            if thread < n_pes and thread != me:
                if block == 0:
                    N.signal(ready[me], T.cast(call, "uint64"), thread)
                N.wait(ready[thread], "ge", call - 1)
            T.sync_threads()
            for hop in T.serial(1, n_pes):
                pe = (me - hop + n_pes) % n_pes  # for which these rows are next
                # Not a loop of as many turns as this block has chunks: TVM takes one that may have none for one turn.
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


@tsn.jit(name="all_gather_matmul", pass_configs=SPECIALISED)
def matmul_arriving(
    n_pes, rows, n, k, dtype, out_dtype, transposed=False, tile=(128, 256, 64), stages=3, threads=256, panel=10,
    staged=False, peers=True,
):  # fmt: skip
    """Kernel `(out, x, w, calls, arrived)`: `out[p] = x[p] @ w` for the PEs p other than this one, or for this one.

    Args:
        n_pes, rows, n, k: of `out` [n_pes, rows, n], `x` and `w`.
        dtype, out_dtype: of `x` and `w`, and of `out`; sums are made in float32.
        transposed: `w` is [n, k]; else [k, n].
        tile: rows, columns and depth of a tile.
        stages, threads: of tilelang's pipeline.
        panel: rows of tiles that are walked together, for the sake of the L2 cache.
        staged: results leave through shared memory, by TMA.
        peers: `x` is `gathered` [2, n_pes, rows, k] of `push_rows`, whose `chunk` is the tile's rows; the tiles of all
            peers. Else `x` is [1, 1, rows, k]: those of this PE, which wait for nothing.
    """
    bm, bn, bk = tile
    tiles = -(-rows // bm)
    halves, parts, turns = (2, n_pes, n_pes - 1) if peers else (1, 1, 1)

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((n_pes, rows, n), out_dtype),
        x: T.Tensor((halves, parts, rows, k), dtype),
        w: T.Tensor((n, k) if transposed else (k, n), dtype),
        calls: T.Tensor((1,), "int64"),
        arrived: T.Tensor((n_pes, tiles), "uint64"),
    ):
        with T.Kernel(T.ceildiv(n, bn), tiles * turns, threads=threads) as (bx, by):
            left = T.alloc_shared((bm, bk), dtype)
            right = T.alloc_shared((bn, bk) if transposed else (bk, bn), dtype)
            total = T.alloc_fragment((bm, bn), "float32")
            result = T.alloc_shared((bm, bn), out_dtype)
            T.use_swizzle(panel)
            row = by % tiles * bm
            pe = (N.my_pe() + by // tiles + (1 if peers else 0)) % n_pes
            half = T.cast(calls[0] % 2, "int32") if peers else 0
            if peers:
                N.wait_block(arrived[pe, by % tiles], "ge", calls[0], proxy="async")
            T.clear(total)
            for i in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                T.copy(x[half, pe if peers else 0, row, i * bk], left)
                if transposed:
                    T.copy(w[bx * bn, i * bk], right)
                else:
                    T.copy(w[i * bk, bx * bn], right)
                T.gemm(left, right, total, transpose_B=transposed)
            if staged:
                T.copy(total, result)
                T.copy(result, out[pe, row, bx * bn])
            else:
                T.copy(total, out[pe, row, bx * bn])

    return main


class AllGatherMatmul(FusedMatmul):
    """`cat(x of all ranks) @ w`, where every rank has its own `w`; constructed and called by all ranks.

    Args:
        rows: of `x`, on every rank.
        k: columns of `x` and rows of `w`.
        n: columns of `w`, on every rank.
        dtype: of `x` and `w`, torch.bfloat16 or torch.float16.
        out_dtype: of the result; default `dtype`. Sums are made in float32.
        tiling: geometry of the product, see `matmul_arriving`.
        threads, blocks, engine: of the kernel that pushes rows, see `push_rows`. Its blocks take the place of as many
            multiprocessors until the rows are sent.
        group: whose ranks these are; see `tilescale_net.world`.

    Takes 2 * n_pes * rows * k elements of the symmetric heap.

    Raises:
        TypeError, ValueError: a dtype, an extent or a launch geometry that does not fit, by name.
        RankMismatch: ranks that want different ones.
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
        memory = self.allocate({
            "gathered": ((2, self.n_pes, rows, k), dtype),
            "ready": ((self.n_pes,), torch.uint64),
            "arrived": ((self.n_pes, chunks), torch.uint64),
        })  # fmt: skip
        self._gathered, self._ready, self._arrived = memory["gathered"], memory["ready"], memory["arrived"]
        self._sides = Sides(self.device, (-1, 0))

    def __call__(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The product of all ranks' rows with this rank's `w`; asynchronous on the current stream.

        Args:
            x: [rows, k], contiguous. Symmetric where some PEs are on other nodes.
            w: [k, n], contiguous, or the transpose of a contiguous tensor.
            out: [n_pes * rows, n], contiguous; default a new tensor.

        Returns:
            `out`: rows of PE 0 first. Later work on the stream may write `x` again.

        Raises:
            TypeError, ValueError, HeapError: an argument that does not fit, by name; nothing was sent.
        """
        self._begin()
        self._rows(x, (self.rows, self.k), symmetric=self._sources_travel)
        held, transposed = self._weight(w, self.k, self.n)
        out = self._result(out, (self.n_pes * self.rows, self.n), ("x", x), ("w", held))
        self._calls.add_(1)
        self._sides.fork()
        if self.n_pes > 1:
            with self._sides[0]:
                self._push()(self._gathered, x, self._calls, self._ready, self._arrived)
        parts = out.view(self.n_pes, self.rows, self.n)
        self._product(transposed, False)(parts, x.view(1, 1, *x.shape), held, self._calls, self._arrived)
        if self.n_pes > 1:
            with self._sides[1]:  # begins where the tiles of the own rows leave room
                self._product(transposed, True)(parts, self._gathered, held, self._calls, self._arrived)
        self._sides.join()
        return out

    def _push(self):
        shape = (self.n_pes, self.rows, self.k, dtype_name(self.dtype), self.tiling.tile[0])
        return push_rows(*shape, self.threads, self.blocks, self._engine)

    def _product(self, transposed: bool, peers: bool):
        dtypes = dtype_name(self.dtype), dtype_name(self.out_dtype)
        sizes = self.n_pes, self.rows, self.n, self.k
        return matmul_arriving(*sizes, *dtypes, transposed, **vars(self.tiling), peers=peers)
