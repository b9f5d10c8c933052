"""02: all-gather. Every rank sends its part to all others; one kernel, several blocks, no barrier between calls.

- Each block moves its own slice and has its own signal words: blocks never wait for one another.
- A call may overwrite the output of a peer only after the peer has read it. The peer sends the signal `ready` at the
  beginning of its own call: all earlier work of its stream has ended by then.
- Device memory holds the number of the call, which is the value of all signals. Nothing is reset between calls, and a
  CUDA graph can replay the launch, because no argument changes.
- `put_block` orders nothing. `fence` orders the puts of the block before the signals that follow.
- `quiet` ends a call: the source may be overwritten afterwards, even if a network was still reading it.

kernels/all_gather.py does the same for any dtype and size, and checks its arguments.
"""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N


@tsn.jit
def all_gather(n, n_pes, blocks=4, threads=128):
    share = -(-n // blocks)

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((n_pes, n), "float32"),
        x: T.Tensor((n,), "float32"),
        calls: T.Tensor((blocks,), "uint64"),  # calls so far, one counter per block
        ready: T.Tensor((n_pes, blocks), "uint64"),
        arrived: T.Tensor((n_pes, blocks), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            call = calls[block] + T.uint64(1)
            first = block * share
            # Thread p serves PE p: allow it to write, wait for its permission.
            if thread < n_pes:
                N.signal(ready[me, block], call, thread)
                N.wait(ready[thread, block], "ge", call)
            T.sync_threads()
            for hop in T.serial(n_pes):
                N.put_block(out[me, first], x[first], (me + hop) % n_pes, count=T.min(share, n - first))
            T.sync_threads()
            if thread < n_pes:
                N.signal(arrived[me, block], call, thread, fence=True)  # after all puts of this block
                N.wait(arrived[thread, block], "ge", call)
                N.quiet(thread)
            T.sync_threads()
            if thread == 0:
                calls[block] = call

    return main


def main():
    tsn.init()
    rank, size, n, blocks = tsn.rank(), tsn.size(), 10_000, 4
    out, x = tsn.zeros((size, n)), tsn.zeros(n)
    calls = torch.zeros(blocks, dtype=torch.uint64, device=tsn.device())
    ready, arrived = (tsn.zeros((size, blocks), torch.uint64) for _ in range(2))
    kernel = all_gather(n, size, blocks)
    for call in range(3):
        x.fill_(100 * call + rank)
        kernel(out, x, calls, ready, arrived)  # no barrier before or after
        print(f"call {call}: rank {rank} has {[row[0].item() for row in out]}")
        expected = 100.0 * call + torch.arange(size, device=tsn.device())[:, None]
        assert torch.equal(out, expected.expand(size, n))
    tsn.finalize()


if __name__ == "__main__":
    main()
