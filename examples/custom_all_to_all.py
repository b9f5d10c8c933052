"""An all-to-all of your own: every rank puts a row of blocks to every other, with the primitives alone.

A block of the kernel serves one peer: it puts the peer's part and a signal behind it, then waits for the peer's own. The
signal holds the number of the call, so nothing is reset between calls.
"""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N


@tsn.jit
def all_to_all(n_pes: int, count: int, threads: int = 64):
    """Kernel `(out, x, arrived, call)`: `out[p]` is what PE p has in its `x[my_pe]`."""

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((n_pes, count), "float32"),  # symmetric
        x: T.Tensor((n_pes, count), "float32"),  # symmetric, so that it can cross nodes
        arrived: T.Tensor((n_pes,), "uint64"),  # symmetric
        call: T.int32,
    ):
        with T.Kernel(n_pes, threads=threads) as pe:
            me = N.my_pe()
            N.put_signal_block(out[me, 0], x[pe, 0], pe, arrived[me], call, count=count)
            N.wait_block(arrived[pe], "ge", call)
            N.quiet_block(pe)  # x may be overwritten after the kernel

    return main


def main() -> None:
    tsn.init()
    rank, size, count = tsn.rank(), tsn.size(), 1000
    x, out = tsn.empty((size, count)), tsn.empty((size, count))
    arrived = tsn.zeros(size, torch.uint64)
    kernel = all_to_all(size, count)
    for call in (1, 2, 3):
        x.copy_((call * 100 + rank * 10 + torch.arange(size, device=x.device))[:, None].expand_as(x))
        tsn.barrier()  # nobody reads the results of the call before any more
        kernel(out, x, arrived, call)
        wanted = call * 100 + 10 * torch.arange(size, device=x.device) + rank
        assert torch.equal(out, wanted[:, None].expand_as(out).to(out.dtype)), f"call {call}"
    print(f"rank {rank}: three calls of {size} parts of {count} elements")
    tsn.finalize()


if __name__ == "__main__":
    main()
