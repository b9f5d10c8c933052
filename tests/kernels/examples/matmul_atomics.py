"""A product whose parts all ranks add up in the memory of the owner of each tile, by remote atomics. One node."""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests.kernels.examples.support import check, same_on_all

ROWS, COLUMNS, DEPTH = 8, 8, 4  # of a tile, and of the part of the depth that a rank has


@tsn.jit
def matmul_atomics(n):
    """Kernel `(a, b, sums, out, added, taken, call)`: rank r gets rows r * ROWS to (r + 1) * ROWS of the product."""

    @T.prim_func
    def main(
        ctx: N.Context(), a: T.Tensor((n * ROWS, DEPTH), "float32"), b: T.Tensor((DEPTH, COLUMNS), "float32"),
        sums: T.Tensor((2, ROWS, COLUMNS), "float32"), out: T.Tensor((ROWS, COLUMNS), "float32"),
        added: T.Tensor((1,), "uint64"), taken: T.Tensor((n,), "uint64"), call: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=ROWS * COLUMNS):
            tx, me = T.get_thread_binding(), N.my_pe()
            row, column, half = tx // COLUMNS, tx % COLUMNS, call % 2
            part = T.alloc_local((1,), "float32")
            for i in T.serial(n):
                pe = (me + i) % n
                part[0] = 0.0
                for k in T.serial(DEPTH):
                    part[0] += a[pe * ROWS + row, k] * b[k, column]
                N.wait_block(taken[pe], "ge", call - 1)  # the half is zero again
                N.atomic_add(sums[half, row, column], part[0], pe)
                T.sync_threads()
                if tx == 0:
                    N.fence(pe)
                    N.signal(added[0], 1, pe, op="add")
            N.wait_block(added[0], "ge", call * n)
            out[row, column] = sums[half, row, column]
            sums[half, row, column] = 0.0
            T.sync_threads()
            if tx < n:
                N.signal(taken[me], call + 1, tx)

    return main


def small_run(seed):
    n, me = tsn.size(), tsn.rank()
    random, kernel = same_on_all(seed), matmul_atomics(n)
    sums, added, taken = tsn.zeros((2, ROWS, COLUMNS)), tsn.zeros((1,), torch.uint64), tsn.zeros((n,), torch.uint64)
    for call in (1, 2, 3):
        a = torch.randint(9, (n, n * ROWS, DEPTH), generator=random).float()
        b = torch.randint(9, (n, DEPTH, COLUMNS), generator=random).float()
        out = torch.zeros((ROWS, COLUMNS))
        kernel(a[me], b[me], sums, out, added, taken, call)
        check(out, (a @ b).sum(0)[me * ROWS : (me + 1) * ROWS])
    tsn.barrier()
