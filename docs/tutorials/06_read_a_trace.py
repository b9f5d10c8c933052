"""06: reading a trace. Why is a step slow, and which rank do all others wait for?

With TSN_TRACE=FILE, a job writes one timeline of all its ranks at `finalize`. Open the file in https://ui.perfetto.dev:
a process is a rank; its tracks are host calls, kernels, the threads that lead the calls of a block, and the proxy. An
arrow leads from each signal to the wait that saw it. Follow the arrows backwards to find the critical path.

Below, two nodes exchange halos in four steps. Rank 1 prepares its data slowly, which no profile of rank 0 shows: rank 0
spends the time in `N.wait_block`. In the timeline the arrow into that wait begins late in rank 1, below the range "load
the data" of `tsn.range`. Without a browser, `python -m tilescale_net trace FILE` prints which rank waited for which;
the end of this program does the same with the functions behind it.
"""

import os
import time

os.environ.setdefault("TSN_TRACE", "trace.json")
os.environ["TSN_DEVICE"] = "simulator"  # on machines with GPUs too, so that every run has the same output

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.trace import timeline

STEPS, SLOW_RANK = 4, 1


@tsn.jit
def exchange(n, threads=64):
    @T.prim_func
    def main(
        ctx: N.Context(),
        mine: T.Tensor((n,), "float32"),
        theirs: T.Tensor((n,), "float32"),
        arrived: T.Tensor((1,), "uint64"),
        step: T.int64,
    ):
        with T.Kernel(1, threads=threads):
            N.put_signal_block(theirs, mine, (N.my_pe() + 1) % N.n_pes(), arrived[0], step)
            N.wait_block(arrived[0], "ge", step)

    return main


def main():
    tsn.init()
    rank = tsn.rank()
    mine, theirs, arrived = tsn.zeros(1000), tsn.zeros(1000), tsn.zeros(1, torch.uint64)
    kernel = exchange(1000)
    tsn.barrier()
    for step in range(1, STEPS + 1):
        with tsn.range("load the data"):
            time.sleep(0.3 if rank == SLOW_RANK else 0.0)
        kernel(mine, theirs, arrived, step)
        tsn.barrier()
    tsn.finalize()
    if rank == 0:
        report(os.environ["TSN_TRACE"])


def report(path):
    found = timeline.load(path)
    waited = timeline.waiting(found)
    (rank, sender), _ = max(waited.items(), key=lambda entry: entry[1])
    print(f"rank {rank} has waited most, for rank {sender}")
    waits = [event for event in found["traceEvents"] if event["name"] == f"waiting for rank {sender}"]
    line = max(waits, key=lambda event: event["dur"])["args"]["line"]
    with open(__file__) as file:
        print(f"there: {file.readlines()[int(line.rpartition(':')[2]) - 1].strip()}")
    arrows = sum(event["ph"] == "s" for event in found["traceEvents"])
    print(f"arrows from signals to waits: {arrows}")


if __name__ == "__main__":
    main()
