"""Counts of values over all ranks: atomics in the memory of PEs of the node, signals that add for the others."""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests.kernels.examples.support import check, same_on_all

VALUES, BINS, BLOCKS = 128, 4, 2  # values of a rank, and bins


@tsn.jit
def histogram(n):
    """Kernel `(values, near, far, told, out, calls)`: bin b of all is counted by rank b % n."""

    @T.prim_func
    def main(
        ctx: N.Context(), values: T.Tensor((VALUES,), "int32"), near: T.Tensor((BINS,), "uint64"),
        far: T.Tensor((n, BINS), "uint64"), told: T.Tensor((n,), "uint64"), out: T.Tensor((BINS,), "int64"),
        call: T.int32,
    ):  # fmt: skip
        with T.Kernel(BLOCKS, threads=32) as block:
            tx, me = T.get_thread_binding(), N.my_pe()
            counts = T.alloc_shared((BINS,), "int32")
            if tx < BINS:
                counts[tx] = 0
            T.sync_threads()
            for i in T.serial(VALUES // 32 // BLOCKS):
                T.atomic_add(counts[values[(i * BLOCKS + block) * 32 + tx]], 1)
            T.sync_threads()
            if tx < BINS:
                if N.is_direct(tx % n):
                    N.atomic_add(near[tx], T.cast(counts[tx], "uint64"), tx % n)
                else:
                    # Its upper half counts the blocks that have added.
                    N.signal(
                        far[me, tx], (T.uint64(1) << T.uint64(32)) + T.cast(counts[tx], "uint64"), tx % n, op="add"
                    )
            N.barrier_grid()
            if block == 0:
                if tx < n:
                    N.signal(told[me], call, tx, fence=True)
                for pe in T.serial(n):
                    N.wait_block(told[pe], "ge", call)
                if tx < BINS:
                    if tx % n == me:
                        out[tx] = T.cast(near[tx], "int64")
                        for pe in T.serial(n):
                            if not N.is_direct(pe):
                                seen = N.wait(far[pe, tx], "ge", T.int64(call * BLOCKS) << T.int64(32))
                                out[tx] += T.cast(seen & T.uint64(0xFFFFFFFF), "int64")

    return main


def small_run(seed):
    n, me = tsn.size(), tsn.rank()
    random, kernel = same_on_all(seed), histogram(n)
    near = tsn.zeros((BINS,), torch.uint64)
    far = tsn.zeros((n, BINS), torch.uint64)
    told = tsn.zeros((n,), torch.uint64)
    expected = torch.zeros(BINS, dtype=torch.int64)
    for call in (1, 2):
        values = torch.randint(BINS, (n, VALUES), generator=random, dtype=torch.int32)
        out = torch.zeros(BINS, dtype=torch.int64)
        kernel(values[me], near, far, told, out, call)
        expected += values.reshape(-1).bincount(minlength=BINS)
        mine = torch.arange(BINS) % n == me
        check(out[mine], expected[mine])
        tsn.barrier()
