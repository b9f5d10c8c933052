"""Tasks that idle ranks take from the queues of others by compare-and-swap; results go back to the owner. One node."""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests.kernels.examples.support import check

TASKS, WIDTH = 6, 64


@tsn.jit
def stealing():
    """Kernel `(tasks, head, ready, work, results, done, call)`: tasks of each rank, all of them squared by anyone."""

    @T.prim_func
    def main(
        ctx: N.Context(), tasks: T.Tensor((TASKS, WIDTH), "int32"), head: T.Tensor((1,), "int32"),
        ready: T.Tensor((T.dynamic("n"),), "uint64"), work: T.Tensor((WIDTH,), "int32"),
        results: T.Tensor((TASKS, WIDTH), "int32"), done: T.Tensor((1,), "uint64"), call: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=WIDTH):
            tx, me, n = T.get_thread_binding(), N.my_pe(), N.n_pes()
            taken = T.alloc_shared((1,), "int32")
            going = T.alloc_local((1,), "int32")
            for t in T.serial(TASKS):
                tasks[t, tx] = tasks[t, tx] + call
            T.sync_threads()
            if tx < n:
                N.signal(ready[me], call, tx)
            for i in T.serial(n):
                pe = (me + 1 + i) % n  # a rank's own queue comes last
                N.wait_block(ready[pe], "ge", call)
                going[0] = 1
                while going[0] != 0:
                    if tx == 0:
                        found = N.ld(N.remote(head, pe)[0], sem="relaxed", scope="sys")
                        if found == TASKS:
                            taken[0] = TASKS
                        elif N.atomic_cas(head[0], found, found + 1, pe) == found:
                            taken[0] = found
                        else:
                            taken[0] = -1  # another one was faster
                    T.sync_threads()
                    task = taken[0]
                    if task == TASKS:
                        going[0] = 0
                    if task >= 0 and task < TASKS:
                        N.get_block(work, tasks[task, 0:WIDTH], pe)
                        N.put_value(results[task, tx], work[tx] * work[tx], pe)
                        T.sync_threads()
                        if tx == 0:
                            N.fence(pe)
                            N.signal(done[0], 1, pe, op="add")
                    T.sync_threads()
            N.wait_block(done[0], "ge", call * TASKS)
            tasks[1, tx] = results[0, tx]

    return main


def small_run(seed):
    n, me = tsn.size(), tsn.rank()
    kernel = stealing()
    tasks, results = tsn.empty((TASKS, WIDTH), torch.int32), tsn.empty((TASKS, WIDTH), torch.int32)
    head, ready, done = tsn.zeros((1,), torch.int32), tsn.zeros((n,), torch.uint64), tsn.zeros((1,), torch.uint64)
    for call in (1, 2):
        numbers = torch.arange(TASKS * WIDTH, dtype=torch.int32).reshape(TASKS, WIDTH) % 97 + me
        tasks.copy_(numbers)
        head.zero_()
        tsn.barrier()
        kernel(tasks, head, ready, torch.zeros(WIDTH, dtype=torch.int32), results, done, call)
        numbers += call
        check(results, numbers * numbers)
        tsn.barrier()
