"""Halos of a matrix on a ring: a column of float64 to either side, into halves by turns, without credits."""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests.kernels.examples.support import check, same_on_all

ROWS, COLUMNS, STEPS = 8, 8, 4


@tsn.jit
def halo():
    """Kernel `(m, arrived, call)`: in each step every element becomes the sum of itself and both neighbours in its row."""

    @T.prim_func
    def main(
        ctx: N.Context(),
        m: T.Tensor((2, ROWS, COLUMNS + 2), "float64"),
        arrived: T.Tensor((2,), "uint64"),
        call: T.int32,
    ):
        with T.Kernel(1, threads=ROWS * COLUMNS):
            tx, me, n = T.get_thread_binding(), N.my_pe(), N.n_pes()
            row, column = tx // COLUMNS, tx % COLUMNS + 1
            right, left = (me + 1) % n, (me + n - 1) % n
            for s in T.serial(STEPS):
                half, count = s % 2, call * STEPS + s + 1
                N.put_signal_block(m[half, 0:ROWS, 0], m[half, 0:ROWS, COLUMNS], right, arrived[0], count)
                N.put_signal_block(m[half, 0:ROWS, COLUMNS + 1], m[half, 0:ROWS, 1], left, arrived[1], count)
                N.wait_block(arrived[0], "ge", count)
                N.wait_block(arrived[1], "ge", count)
                m[1 - half, row, column] = m[half, row, column - 1] + m[half, row, column] + m[half, row, column + 1]
                T.sync_threads()
            N.quiet_block()

    return main


def small_run(seed):
    n, me = tsn.size(), tsn.rank()
    random, kernel = same_on_all(seed), halo()
    m, arrived = tsn.zeros((2, ROWS, COLUMNS + 2), torch.float64), tsn.zeros((2,), torch.uint64)
    for call in range(2):
        whole = torch.randint(9, (ROWS, n * COLUMNS), generator=random).double()
        m[0, :, 1:-1] = whole[:, me * COLUMNS : (me + 1) * COLUMNS]
        tsn.barrier()
        kernel(m, arrived, call)
        for _ in range(STEPS):
            whole = whole.roll(1, 1) + whole + whole.roll(-1, 1)
        check(m[0, :, 1:-1], whole[:, me * COLUMNS : (me + 1) * COLUMNS])
        tsn.barrier()
