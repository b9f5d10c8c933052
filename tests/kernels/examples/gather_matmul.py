"""All-gather and product: a warp waits for the rows of a rank and brings them to shared memory, the others multiply."""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests.kernels.examples.support import same_on_all

ROWS, DEPTH, COLUMNS, STAGES = 64, 32, 32, 2


@tsn.jit
def gather_matmul(n):
    """Kernel `(x, rows, b, c, arrived, read, call)`: `c = all ranks' x @ b.T`."""

    @T.prim_func
    def main(
        ctx: N.Context(), x: T.Tensor((ROWS, DEPTH), "bfloat16"), rows: T.Tensor((n * ROWS, DEPTH), "bfloat16"),
        b: T.Tensor((COLUMNS, DEPTH), "bfloat16"), c: T.Tensor((n * ROWS, COLUMNS), "float32"),
        arrived: T.Tensor((n,), "uint64"), read: T.Tensor((1,), "uint64"), call: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=256):
            tx, me = T.get_thread_binding(), N.my_pe()
            left = T.alloc_shared((STAGES, ROWS, DEPTH), "bfloat16")
            right = T.alloc_shared((COLUMNS, DEPTH), "bfloat16")
            acc = T.alloc_fragment((ROWS, COLUMNS), "float32")
            full, empty = T.alloc_barrier([32] * STAGES), T.alloc_barrier([128] * STAGES)
            T.copy(b, right)
            N.wait_block(read[0], "ge", (call - 1) * n)  # all have read the rows of the call before
            for i in T.serial(n):
                N.put_signal_block(rows[me * ROWS : (me + 1) * ROWS, 0:DEPTH], x, (me + i) % n, arrived[me], call)
            if tx < 128:
                if tx < 32:
                    for i in T.serial(n):
                        pe, s = (me + i) % n, i % STAGES
                        T.barrier_wait(empty[s], i // STAGES % 2 ^ 1)
                        N.wait_warp(arrived[pe], "ge", call, proxy="async")
                        T.tma_copy(
                            rows[pe * ROWS : (pe + 1) * ROWS, 0:DEPTH], left[s, :, :], barrier=full[s],
                            leader_scope_threads=32,
                        )  # fmt: skip
                        T.barrier_arrive(full[s])
            else:
                for i in T.serial(n):
                    pe, s = (me + i) % n, i % STAGES
                    T.barrier_wait(full[s], i // STAGES % 2)
                    T.wgmma_gemm(left[s, :, :], right, acc, transpose_B=True, clear_accum=True)
                    T.wait_wgmma(0)
                    T.barrier_arrive(empty[s])
                    T.copy(acc, c[pe * ROWS : (pe + 1) * ROWS, 0:COLUMNS])
            T.sync_threads()
            if tx < n:
                N.signal(read[0], 1, tx, op="add")
            N.quiet_block()

    return main


def small_run(seed):
    n, me, dtype = tsn.size(), tsn.rank(), torch.bfloat16
    random, kernel = same_on_all(seed), gather_matmul(n)
    x, rows = tsn.empty((ROWS, DEPTH), dtype), tsn.empty((n * ROWS, DEPTH), dtype)
    arrived, read = tsn.zeros((n,), torch.uint64), tsn.zeros((1,), torch.uint64)
    for call in (1, 2):
        sent = torch.rand((n * ROWS, DEPTH), generator=random).to(dtype)
        b, c = torch.rand((COLUMNS, DEPTH), generator=random).to(dtype), torch.zeros((n * ROWS, COLUMNS))
        x.copy_(sent[me * ROWS : (me + 1) * ROWS])
        kernel(x, rows, b, c, arrived, read, call)
        assert torch.allclose(c, sent.float() @ b.float().T, atol=1e-3)
    tsn.barrier()
