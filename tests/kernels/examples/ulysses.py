"""Rows by rank become heads by rank and, when they have been changed there, rows again: boxes whose rows lie apart."""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests.kernels.examples.support import check, same_on_all

ROWS, DIM = 6, 5  # of a rank, and of a head


@tsn.jit
def ulysses(n):
    """Kernel `(x, heads, changed, out, arrived, back, call)` of n ranks, each with one head."""

    @T.prim_func
    def main(
        ctx: N.Context(), x: T.Tensor((ROWS, n, DIM), "bfloat16"), heads: T.Tensor((n * ROWS, DIM), "bfloat16"),
        changed: T.Tensor((n * ROWS, DIM), "bfloat16"), out: T.Tensor((ROWS, n, DIM), "bfloat16"),
        arrived: T.Tensor((n,), "uint64"), back: T.Tensor((1,), "uint64"), call: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=64):
            tx, me = T.get_thread_binding(), N.my_pe()
            for i in T.serial(n):
                pe = (me + i) % n
                N.put_signal_block(
                    heads[me * ROWS : (me + 1) * ROWS, 0:DIM], x[0:ROWS, pe, 0:DIM], pe, arrived[me], call
                )
            for pe in T.serial(n):
                N.wait_block(arrived[pe], "ge", call)
            for i in T.serial(T.ceildiv(n * ROWS * DIM, 64)):
                at = i * 64 + tx
                if at < n * ROWS * DIM:
                    changed[at // DIM, at % DIM] = heads[at // DIM, at % DIM] + T.bfloat16(1)
            T.sync_threads()
            if tx >= 32:  # one warp is enough
                for pe in T.serial(n):
                    N.put_signal_warp(
                        out[0:ROWS, me, 0:DIM], changed[pe * ROWS : (pe + 1) * ROWS, 0:DIM], pe, back[0], 1, op="add"
                    )
            N.wait_block(back[0], "ge", call * n)

    return main


def small_run(seed):
    n, me = tsn.size(), tsn.rank()
    random, kernel, dtype = same_on_all(seed), ulysses(n), torch.bfloat16
    x, out = tsn.empty((ROWS, n, DIM), dtype), tsn.empty((ROWS, n, DIM), dtype)
    heads, changed = tsn.empty((n * ROWS, DIM), dtype), tsn.empty((n * ROWS, DIM), dtype)
    arrived, back = tsn.zeros((n,), torch.uint64), tsn.zeros((1,), torch.uint64)
    for call in (1, 2):
        sent = torch.randint(100, (n, ROWS, n, DIM), generator=random).to(dtype)
        x.copy_(sent[me])
        kernel(x, heads, changed, out, arrived, back, call)
        check(out, sent[me] + 1)
    tsn.barrier()
