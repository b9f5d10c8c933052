"""05: debugging a missing wait with the simulator.

The kernel below works nearly always, which is the worst that a kernel can do: the receiver reads `y` without waiting
for the signal. On a GPU the data are mostly there by then. The simulator runs the same generated CUDA code and looks for
trouble: it runs threads in a random order, fills fresh memory with NaN, and lets remote writes arrive as late, and in as
odd an order, as the memory model allows. Under some seed the bug shows.

How to hunt one:
1. Run the kernel in the simulator (TSN_DEVICE=simulator, where there is a GPU) under many seeds: TSN_SIM_SEED=0, 1, 2, …
2. TSN_SIM_VISIBILITY=late delays every remote write; `eager` delays none. What fails only with `late` misses a wait, a
   fence or a quiet; what fails with `eager` too is wrong in another way.
3. NaN in a result is memory that nobody had written yet: look for the wait before the first read of that tensor.

Which seeds fail differs from run to run, since each rank is a process; the first one that fails on each rank, with the
wrong element, goes to stderr.
"""

import os
import sys

os.environ["TSN_DEVICE"] = "simulator"  # also on a machine with GPUs

import tilelang.language as T
import torch
import torch.distributed as dist

import tilescale_net as tsn
import tilescale_net.language as N

SEEDS = 20


@tsn.jit
def send_and_add(n, wait, threads=64):
    @T.prim_func
    def main(
        ctx: N.Context(),
        x: T.Tensor((n,), "float32"),
        y: T.Tensor((n,), "float32"),
        total: T.Tensor((n,), "float32"),
        flag: T.Tensor((1,), "uint64"),
        turn: T.int64,
    ):
        with T.Kernel(1, threads=threads):
            N.put_signal_block(y, x, (N.my_pe() + 1) % N.n_pes(), flag[0], turn)
            if wait:
                N.wait_block(flag[0], "ge", turn)
            for i in T.Parallel(n):
                total[i] = x[i] + y[i]

    return main


def wrong_schedules(wait: bool) -> int:
    """In how many of SEEDS schedules some rank computed a wrong total."""
    n, rank, size = 1000, tsn.rank(), tsn.size()
    x, flag = tsn.zeros(n), tsn.zeros(1, torch.uint64)
    total = torch.zeros(n)
    kernel = send_and_add(n, wait)
    wrong, told = 0, False
    for seed in range(SEEDS):
        os.environ["TSN_SIM_SEED"] = str(seed)
        y = tsn.empty(n)  # NaN until somebody writes it
        x.fill_(seed + rank)
        tsn.barrier()
        kernel(x, y, total, flag, seed + 1)
        expected = 2.0 * seed + rank + (rank - 1) % size
        at = (total != expected).nonzero()
        if len(at) and not told:
            told, i = True, at[0].item()
            sys.stderr.write(f"rank {rank}, seed {seed}: total[{i}] is {total[i].item()}, not {expected}\n")
        mine = torch.tensor([int(len(at) > 0)])
        dist.all_reduce(mine)
        wrong += int(mine.item() > 0)
        tsn.barrier()
        tsn.free(y)
    return wrong


def main():
    tsn.init()
    without, waiting = wrong_schedules(wait=False), wrong_schedules(wait=True)
    print(f"without the wait: {'wrong totals under some of' if without else 'right under all'} {SEEDS} seeds")
    print(f"with the wait: {f'wrong totals under {waiting} of' if waiting else 'right under all'} {SEEDS} seeds")
    tsn.finalize()


if __name__ == "__main__":
    main()
