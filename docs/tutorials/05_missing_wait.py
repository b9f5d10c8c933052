"""05: a missing wait, found by the race detector.

The kernel below is nearly always right, which makes the bug hard to find: the receiver reads `y` without waiting for the
signal, and on a GPU the data have usually arrived by then. A test of the results would need many runs and luck. The
simulator's race detector (TSN_SIM_RACES=1) does not compare results: it tracks the order of the accesses of all ranks
and reports any two that nothing orders, in every schedule, even if every byte is right.

How to read the report, which this program prints:
1. Two accesses of the same bytes, each with its line, rank, block and thread. The schedule decides which one comes
   first in the report: the later access found the earlier one.
2. The tensor, by its constructor, and its offset in the heap.
3. The missing order. The report cannot know which access should come first, so it may name two remedies: the reader
   waits before it reads, or the writer waits until the reader has read the earlier data. Here `y` is new in every turn,
   so the reader must wait.

Then the fixed kernel runs under several schedules without a report.
"""

import os
import sys

os.environ["TSN_DEVICE"] = "simulator"  # also on a machine with GPUs
os.environ["TSN_SIM_RACES"] = "1"

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.errors import TileScaleError

SEEDS = 5


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


def totals(wait: bool) -> None:
    """Every rank adds its left neighbour's values to its own, under SEEDS schedules."""
    n, rank, size = 1000, tsn.rank(), tsn.size()
    x, flag = tsn.zeros(n), tsn.zeros(1, torch.uint64)
    total = torch.zeros(n)
    kernel = send_and_add(n, wait)
    for seed in range(SEEDS):
        os.environ["TSN_SIM_SEED"] = str(seed)
        y = tsn.empty(n)  # NaN until it is written
        x.fill_(seed + rank)
        tsn.barrier()
        kernel(x, y, total, flag, seed + 1)
        tsn.barrier()
        assert torch.equal(total, torch.full((n,), 2.0 * seed + rank + (rank - 1) % size))


def report(wait: bool) -> str:
    """The error that ends the job: the report of a race, from this rank or from the rank that found it; else ""."""
    tsn.init()
    try:
        totals(wait)
    except TileScaleError as error:
        found = f"{type(error).__name__}: {error}"
    else:
        tsn.finalize()
        return ""
    try:
        tsn.finalize()  # frees all memory, and raises the reason why the job has ended
    except TileScaleError:
        pass
    return found


def main():
    for wait in (False, True):
        found = report(wait)
        print(found, file=sys.stderr)
        # A rank that has not found the race gets the report of the other.
        is_race = "DataRace" in found or "nothing orders the two" in found
        what = "a race" if is_race else found or f"no race in {SEEDS} schedules, and right totals"
        print(f"{'with' if wait else 'without'} the wait: {what}")


if __name__ == "__main__":
    main()
