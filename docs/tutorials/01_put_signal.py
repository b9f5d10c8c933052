"""01: put and signal. Each rank sends a tensor to its right neighbour and waits for the tensor of its left neighbour.

- Symmetric tensors (`tsn.zeros`, `tsn.empty`) have the same offset in every rank's heap. A primitive names a tensor of
  another rank by the local one: `put_signal_block(y, x, right, …)` copies my `x` into the `y` of rank `right`.
- The signal is a 64-bit word beside the data. It changes after the data have arrived, on any network.
- The receiver waits for its own word. Only the wait guarantees that `y` has arrived; the end of the sender's kernel does
  not.
- Signals are not reset: the second round waits for 2. The neighbour must have read `y` before the next round overwrites
  it; here the host's barrier ensures that.
"""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N


@tsn.jit
def shift(n, threads=128):
    @T.prim_func
    def main(
        ctx: N.Context(),
        x: T.Tensor((n,), "float32"),
        y: T.Tensor((n,), "float32"),
        flag: T.Tensor((1,), "uint64"),
        turn: T.int64,
    ):
        with T.Kernel(1, threads=threads):
            right = (N.my_pe() + 1) % N.n_pes()
            N.put_signal_block(y, x, right, flag[0], turn)
            N.wait_block(flag[0], "ge", turn)
            for i in T.Parallel(n):  # the block may use what it waited for
                y[i] = y[i] * 2.0

    return main


def main():
    tsn.init()
    rank, size, n = tsn.rank(), tsn.size(), 100_000
    x, y = tsn.zeros(n), tsn.zeros(n)
    flag = tsn.zeros(1, torch.uint64)
    kernel = shift(n)  # compiled once, for the GPU or for the simulator
    left = (rank - 1) % size
    for turn in (1, 2):
        x.fill_(10 * turn + rank)
        tsn.barrier()
        kernel(x, y, flag, turn)
        tsn.barrier()
        assert bool((y == 2 * (10 * turn + left)).all())
        print(f"turn {turn}: rank {rank} got {(10 * turn + left)} from rank {left} and doubled it: {y[0].item():g}")
    tsn.finalize()


if __name__ == "__main__":
    main()
