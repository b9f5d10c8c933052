"""Broadcast along a binary tree in chunks: staged in two slots, of which the older one is flushed before it is used again."""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests.kernels.examples.support import check, same_on_all

CHUNK, CHUNKS = 64, 5


@tsn.jit
def tree():
    """Kernel `(x, staging, y, arrived, call)`: x of rank 0 in y of all."""

    @T.prim_func
    def main(
        ctx: N.Context(), x: T.Tensor((CHUNKS, CHUNK), "float64"), staging: T.Tensor((2, CHUNK), "float64"),
        y: T.Tensor((CHUNKS, CHUNK), "float64"), arrived: T.Tensor((1,), "uint64"),
        total: T.Tensor((CHUNK,), "float64"), call: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=CHUNK):
            tx, me, n = T.get_thread_binding(), N.my_pe(), N.n_pes()
            tickets = T.alloc_local((2,), "uint64")
            total[tx] = T.float64(0)
            for c in T.serial(CHUNKS):
                slot, count = c % 2, call * CHUNKS + c + 1
                if me > 0:
                    N.wait_block(arrived[0], "ge", count)
                if c >= 2:
                    if tx == 0:
                        N.flush_wait(tickets[slot])
                    T.sync_threads()
                if me == 0:
                    staging[slot, tx] = x[c, tx]
                    total[tx] += x[c, tx]
                else:
                    staging[slot, tx] = y[c, tx]
                    total[tx] += y[c, tx]
                for child in T.serial(2):
                    if 2 * me + 1 + child < n:
                        N.put_block(y[c, 0:CHUNK], staging[slot, 0:CHUNK], 2 * me + 1 + child)
                        N.signal_block(arrived[0], count, 2 * me + 1 + child)
                T.sync_threads()
                if tx == 0:
                    tickets[slot] = N.flush_async()
            N.quiet_block()

    return main


def small_run(seed):
    random, kernel, dtype = same_on_all(seed), tree(), torch.float64
    staging, y = tsn.empty((2, CHUNK), dtype), tsn.empty((CHUNKS, CHUNK), dtype)
    arrived = tsn.zeros((1,), torch.uint64)
    for call in range(2):
        x, total = torch.randint(99, (CHUNKS, CHUNK), generator=random).to(dtype), torch.zeros(CHUNK, dtype=dtype)
        kernel(x, staging, y, arrived, total, call)
        check(total, x.sum(0))
        tsn.barrier()  # all have read y
