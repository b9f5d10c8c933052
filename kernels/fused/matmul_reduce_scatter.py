"""Matrix product and reduce-scatter at once: rows leave for their owner while the next owner's are computed.

Every PE has some columns of the left matrix and the rows of the right one that go with them, so that its product is one
of the summands of the result; each PE owns some rows of the sum. The products for the other owners come first, and a few
blocks push each of them while the next one is computed. The product of the own rows comes last: its tiles add what has
arrived from the peers, chunk by chunk, and write the sum.
"""

import dataclasses

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.collective import BufferSpecs, dtype_name
from tilescale_net.kernels.fused import product
from tilescale_net.kernels.fused.all_gather_matmul import matmul_arriving
from tilescale_net.kernels.fused.matmul import DEFAULT, FusedMatmul, Sides, Tiling, check_extents, gate


@tsn.jit(name="matmul_reduce_scatter_push")
def push_summand(n_pes, rows, n, dtype, chunk, threads=512, blocks=8, engine="auto"):
    """Kernel `(summands, partial, calls, ready, arrived, begun, hop)`: puts a summand to the PE `hop` places behind this one.

    Args:
        n_pes, rows, n, dtype: `partial` is [rows, n], `summands` (symmetric) [2, n_pes, rows, n]; the target gets it as
            `summands[call % 2, my_pe]`.
        chunk: rows between two signals.
        threads, blocks, engine: see `tilescale_net.language.put_block`.

    `calls`, `ready`, `arrived` and `begun` as in `all_gather_matmul.push_rows`.
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
        begun: T.Tensor((1,), "uint64"),
        hop: T.int32,
    ):
        with T.Kernel(blocks, threads=threads) as block:
            me = N.my_pe()
            call = calls[0]
            pe = (me + hop) % n_pes
            if T.get_thread_binding() == 0:
                N.signal(begun[0], 1, me, op="add")
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


@tsn.jit(name="matmul_reduce_scatter")
def matmul_reducing(
    n_pes, rows, n, k, dtype, out_dtype, transposed=False, tile=(128, 256, 64), stages=4, panel=8, columns=128, workers=132,
    announced=False, scaled=False,
):  # fmt: skip
    """Kernel `(out, x, w, summands, calls, arrived, tickets, done, x_scales, w_scales)`: `out = x @ w +` the summands of
    the other PEs.

    Args:
        n_pes, rows, n, k: of `out` [rows, n], `x` [rows, k], `w`, and `summands` [2, n_pes, rows, n] of `push_summand`,
            whose `chunk` is the tile's rows.
        dtype, out_dtype: of `x`, `w` and the summands, and of `out`; `scaled`: of `x` and `w`, and of `out` and summands.
        transposed, tile, stages, panel, columns, workers: as in `all_gather_matmul.matmul_arriving`.
        announced: each thread that multiplies adds 1 to `done[i]` of this PE when its part of a tile of the i-th rows of
            tiles is in `out`.
        scaled: `x @ w` is multiplied by `x_scales` [rows] and `w_scales` [n] before summands are added. Else both (float32)
            are [1], and left alone.

    `tickets` (uint64 [1]) and `done` (uint64 [rows of tiles]) are symmetric, zero before the first call, and count on from
    call to call. Sums are made in float32, the own product first, then the summands in the order of the PEs behind this
    one.
    """
    shape = product.Shape(1, rows, n, k, tile, stages, panel, columns, workers, transposed)
    bm, bn, bk = tile
    # The summands come through the ring of operands: a step of it for each PE and warpgroup. Where operands have another
    # dtype, through a ring of one tile of their own.
    through = dataclasses.replace(shape, stages=1, transposed=False) if scaled else shape

    @T.macro
    def finish(group, total, ring, result, out, done, step, row, column, thread, scales, x_scales, w_scales):
        if scaled:
            product.get_row_scales(shape, group, scales, lambda r: x_scales[r], row[0])
            product.scale(shape, group, total, scales, w_scales, column[0])
        for _hop in T.serial(1, n_pes):
            for half in T.unroll(2):
                product.add_summand(through, half == group, ring[0], total, ring[1], ring[2], step, thread)
        product.store(shape, group, total, result, out, 0, row[0], column[0])
        if announced:
            T.tma_store_wait(0, read=False)
            N.signal(done[row[0] // bm], 1, N.my_pe(), op="add", fence=True)

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((1, rows, n), out_dtype),
        x: T.Tensor((rows, k), dtype),
        w: T.Tensor((n, k) if transposed else (k, n), dtype),
        summands: T.Tensor((2, n_pes, rows, n), out_dtype if scaled else dtype),
        calls: T.Tensor((1,), "int64"),
        arrived: T.Tensor((n_pes, shape.tiles_m), "uint64"),
        tickets: T.Tensor((1,), "uint64"),
        done: T.Tensor((shape.tiles_m,), "uint64"),
        x_scales: T.Tensor((rows,) if scaled else (1,), "float32"),
        w_scales: T.Tensor((n,) if scaled else (1,), "float32"),
    ):
        with T.Kernel(workers, threads=product.THREADS):
            left = T.alloc_shared((stages, 2, shape.half, bk), dtype)
            right = T.alloc_shared((stages, *shape.right), dtype)
            result = T.alloc_shared((2, shape.half, columns), out_dtype)
            upper, lower = T.alloc_fragment((shape.half, bn), "float32"), T.alloc_fragment((shape.half, bn), "float32")
            full, empty = T.alloc_barrier([32] * stages), T.alloc_barrier([product.WARPS] * stages)
            chosen = T.alloc_shared((2,), "int32")
            given, taken = T.alloc_barrier([32] * 2), T.alloc_barrier([product.WARPS] * 2)
            scales = T.alloc_shared((2, shape.half + bn) if scaled else (2, 1), "float32")
            ring = right, full, empty
            if scaled:
                ring = (
                    T.alloc_shared((1, shape.half, bn), out_dtype),
                    *(T.alloc_barrier([c]) for c in (32, product.WARPS)),
                )
            step, turn, tile, part, row, column = (T.alloc_local((1,), "int32") for _ in range(6))
            added = T.alloc_local((1,), "int32") if scaled else step
            thread, call = T.get_thread_binding(), calls[0]
            step[0] = 0
            added[0] = 0
            turn[0] = 0
            if thread < 128:
                T.dec_max_nreg(40)
                if thread < 32:
                    product.next_tile(shape, tickets, call, chosen, given, taken, tile, turn, thread)
                    while tile[0] < shape.total:
                        product.place(shape, tile[0], part, row, column)
                        for i in T.serial(T.ceildiv(k, bk)):
                            s = step[0] % stages
                            T.barrier_wait(empty[s], ((step[0] // stages) & 1) ^ 1)
                            for half in T.unroll(2):
                                first = row[0] + half * shape.half
                                product.copy_left(
                                    x[first : first + shape.half, i * bk : i * bk + bk], left, s, half, full
                                )
                            product.copy_right(shape, w, right, s, full, i * bk, column[0])
                            T.barrier_arrive(full[s])
                            step[0] = step[0] + 1
                        product.wait_for_all(arrived, row[0] // bm, n_pes, call, thread)
                        for hop in T.serial(1, n_pes):
                            pe = (N.my_pe() + hop) % n_pes
                            for half in T.unroll(2):
                                slot = added[0] % through.stages
                                T.barrier_wait(ring[2][slot], ((added[0] // through.stages) & 1) ^ 1)
                                product.copy_summand(
                                    through, summands, call % 2, pe, ring[0], slot, ring[1], row[0] + half * shape.half, column[0]
                                )  # fmt: skip
                                T.barrier_arrive(ring[1][slot])
                                added[0] = added[0] + 1
                        product.next_tile(shape, tickets, call, chosen, given, taken, tile, turn, thread)
            elif thread < 256:
                T.inc_max_nreg(232)
                product.get_tile(chosen, given, taken, tile, turn, thread)
                while tile[0] < shape.total:
                    product.place(shape, tile[0], part, row, column)
                    product.multiply(shape, 0, left, right, upper, full, empty, step, thread)
                    finish(0, upper, ring, result, out, done, added, row, column, thread, scales, x_scales, w_scales)
                    product.get_tile(chosen, given, taken, tile, turn, thread)
                T.tma_store_wait(0)
            else:
                T.inc_max_nreg(232)
                product.get_tile(chosen, given, taken, tile, turn, thread)
                while tile[0] < shape.total:
                    product.place(shape, tile[0], part, row, column)
                    product.multiply(shape, 1, left, right, lower, full, empty, step, thread)
                    finish(1, lower, ring, result, out, done, added, row, column, thread, scales, x_scales, w_scales)
                    product.get_tile(chosen, given, taken, tile, turn, thread)
                T.tma_store_wait(0)

    return main


def check_ring(name: str, tiling: Tiling) -> None:
    """Raise ValueError for a geometry whose ring has no room for summands, see `product.copy_summand`."""
    rows, columns, depth = tiling.tile
    if rows > 2 * depth or columns % depth:
        raise ValueError(
            f"{name}: {tiling}: summands come through the ring of operands, so a tile's rows may not be more than twice its "
            "depth, which must divide its columns"
        )


class MatmulReduceScatter(FusedMatmul):
    """The sum of all ranks' `x @ w`, of which every rank gets its rows; constructed and called by all ranks.

    Args:
        rows: of the result, on every rank; `x` has n_pes times as many.
        k: columns of `x` and rows of `w`, on every rank.
        n: columns of `w`.
        dtype: of `x`, `w` and the summands that travel, torch.bfloat16 or torch.float16; or torch.float8_e4m3fn, with a
            scale for each row of `x` and column of `w`, see `FusedMatmul`.
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

    NAME = "MatmulReduceScatter"

    def __init__(
        self, rows: int, k: int, n: int, *, dtype: torch.dtype = torch.bfloat16, out_dtype: torch.dtype | None = None,
        tiling: Tiling = DEFAULT, threads: int = 512, blocks: int = 8, engine: str = "auto", group: "tsn.Group" = None,
    ):  # fmt: skip
        check_extents(self.NAME, dtype, rows=rows, k=k, n=n)
        shapes = f"rows={rows}, k={k}, n={n}, engine={engine}"
        super().__init__(self.NAME, shapes, dtype, out_dtype, tiling, threads, blocks, group)
        if not self.scaled:
            check_ring(self.NAME, tiling)
        self.rows, self.k, self.n, self._engine = rows, k, n, engine
        memory = self.allocate({
            "summands": ((2, self.n_pes, rows, n), self._carried),
            "partial": ((self.n_pes, rows, n), self._carried),
            "ready": ((self.n_pes,), torch.uint64),
            "arrived": ((self.n_pes, -(-rows // tiling.tile[0])), torch.uint64),
            "begun": ((1,), torch.uint64),
            "tickets": ((self.n_pes, 1), torch.uint64),
            "done": ((-(-rows // tiling.tile[0]),), torch.uint64),
            **self._more_memory(),
        })  # fmt: skip
        self._memory, self._summands, self._partial = memory, memory["summands"], memory["partial"]
        self._ready, self._arrived = memory["ready"], memory["arrived"]
        self._sides = Sides(self.device, (-1,))

    def _more_memory(self) -> BufferSpecs:
        """Symmetric memory that a class made of this one takes besides."""
        return {}

    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None = None, *,
        x_scales: torch.Tensor | None = None, w_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """This rank's rows of the sum of all ranks' `x @ w`; asynchronous on the current stream.

        Args:
            x: [n_pes * rows, k], contiguous; rows of PE 0 first.
            w: [k, n], contiguous, or the transpose of a contiguous tensor.
            out: [rows, n], contiguous; default a new tensor.
            x_scales, w_scales: for torch.float8_e4m3fn: float32 [n_pes * rows] or [n_pes * rows, 1], and [n] or [1, n],
                contiguous, by which rows and columns of this rank's product are multiplied.

        Returns:
            `out`. The order of additions is fixed, so that results are equal bit by bit from run to run.

        Raises:
            TypeError, ValueError: an argument that does not fit, by name; nothing was sent.
        """
        self._begin()
        self._rows(x, (self.n_pes * self.rows, self.k))
        held, transposed = self._weight(w, self.k, self.n)
        scales = self._scales(x_scales, w_scales, self.n_pes * self.rows, self.n)
        out = self._result(out, (self.rows, self.n), ("x", x), ("w", held), *self._apart(scales))
        self._sum(out, x, held, transposed, scales)
        self._sides.join()
        return out

    def _sum(self, out, x, held, transposed: bool, scales, announced: bool = False) -> None:
        """Launch the products and the pushes of summands; `announced`: further blocks push what the last product announces."""
        self._calls.add_(1)
        row_scales = scales[0].view(self.n_pes, -1) if self.scaled else scales[0].expand(self.n_pes, 1)
        dtype, carried, rows, memory = (
            dtype_name(self.dtype), dtype_name(self._carried), x.view(self.n_pes, self.rows, self.k), self._memory
        )  # fmt: skip
        geometry, sizes = dict(vars(self.tiling)), (self.n_pes, self.rows, self.n, self.k)
        workers = self.tiling.workers(self.device, 1, self.rows, self.n)
        partial_product = matmul_arriving(
            1, *sizes[1:], dtype, carried, transposed, **geometry, workers=workers, peers=False, scaled=self.scaled
        )
        pushed = (self.n_pes, self.rows, self.n, carried, self.tiling.tile[0], self.threads, self.blocks, self._engine)
        for hop in range(1, self.n_pes):
            pe = (self.rank + hop) % self.n_pes
            partial = memory["partial"][pe]
            unused = rows[pe].view(1, 1, self.rows, self.k), self._arrived[:1]
            partial_product(
                partial.unsqueeze(0), rows[pe], unused[0], held, self._calls, unused[1], memory["tickets"][hop],
                row_scales[pe], self._no_scales, scales[1],
            )  # fmt: skip
            self._sides.fork()
            with self._sides[0]:
                push = push_summand(*pushed)
                push(self._summands, partial, self._calls, self._ready, self._arrived, memory["begun"], hop)
            gate()(self._calls, memory["begun"], (self.n_pes - 1) * self.blocks, hop * self.blocks)
        less = self.blocks if announced and self.n_pes > 1 else 0
        geometry |= {"workers": self.tiling.workers(self.device, 1, self.rows, self.n, less)}
        ends = dict(announced=announced, scaled=self.scaled)
        last = matmul_reducing(*sizes, dtype, dtype_name(self.out_dtype), transposed, **geometry, **ends)
        signals = self._arrived, memory["tickets"][0], memory["done"]
        last_scales = row_scales[self.rank], scales[1]
        last(out.unsqueeze(0), rows[self.rank], held, self._summands, self._calls, *signals, *last_scales)
