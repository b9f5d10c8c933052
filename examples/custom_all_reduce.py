"""An algorithm of your own for `AllReduce`: every PE puts its data to all others and adds up what has arrived.

The row at the end says which memory it needs and how many bytes a launch takes. `AllReduce` checks arguments, agrees with
the other ranks, cuts larger tensors into pieces and launches; `algorithm="push"` takes it by name.
"""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.all_reduce import Algorithm, AllReduce, Call, register_algorithm

BYTES = 64 * 1024  # of a launch


@tsn.jit
def push(n_pes: int, dtype: str, capacity: int, threads: int, blocks: int):
    """Kernel `(out, x, inbox, arrived, calls)`: block b adds up slice b of all PEs; `out` may be `x`."""
    count = T.dynamic("count", "int64")

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((count,), dtype),
        x: T.Tensor((count,), dtype),
        inbox: T.Tensor((2, n_pes, capacity), dtype),
        arrived: T.Tensor((n_pes, blocks), "uint64"),
        calls: T.Tensor((blocks,), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            call = T.alloc_var("uint64")
            call = calls[block] + T.uint64(1)
            # Calls take the halves of the inbox in turn: a PE in call i + 2 has seen call i + 1 of all PEs.
            half = T.cast(call % T.uint64(2), "int32")
            share = T.ceildiv(count, T.int64(blocks))
            first = share * block
            size = T.max(T.min(share, count - first), T.int64(0))
            # Step 1: put this PE's slice to all PEs, itself too, with a signal behind it.
            for hop in T.serial(n_pes):
                pe = (me + hop) % n_pes
                if size > 0:
                    N.put_block(inbox[half, me, first], x[first], pe, count=size)
                N.signal_block(arrived[me, block], call, pe)
            # Step 2: wait for all of them and add up, in the order of the PEs.
            for pe in T.serial(n_pes):
                N.wait_block(arrived[pe, block], "ge", call)
            for turn in T.serial(T.ceildiv(size, T.int64(threads))):
                i = turn * threads + thread
                if i < size:
                    total = T.alloc_var("float32")
                    total = T.float32(0)
                    for pe in T.serial(n_pes):
                        total += T.cast(inbox[half, pe, first + i], "float32")
                    out[first + i] = T.cast(total, dtype)
            T.sync_threads()
            if thread == 0:
                calls[block] = call
                for pe in T.serial(n_pes):
                    N.quiet(pe)

    return main


def launch(op: AllReduce, memory: dict[str, torch.Tensor], call: Call) -> None:
    inbox, dtype = memory["inbox"].view(call.out.dtype), str(call.out.dtype).removeprefix("torch.")
    kernel = push(op.n_pes, dtype, inbox.shape[2], op.threads, op.blocks)
    kernel(call.out, call.x, inbox, memory["arrived"], memory["calls"])


PUSH = Algorithm(
    "push",
    launch,
    capacity=lambda op: BYTES,
    buffers=lambda op: {"inbox": ((2, op.n_pes, BYTES), torch.uint8), "arrived": ((op.n_pes, op.blocks), torch.uint64)},
    counters=lambda op: {"calls": op.blocks},
)


def main() -> None:
    register_algorithm(PUSH)
    tsn.init()
    rank, size, device = tsn.rank(), tsn.size(), tsn.device()
    reduce = AllReduce(algorithm="push", threads=64, blocks=4)
    for count in (1, 1000, 50_001):  # the last in four pieces
        x = torch.arange(count, device=device, dtype=torch.float32) % 97 + rank
        out = reduce(torch.empty_like(x), x)
        assert torch.equal(out, size * (torch.arange(count, device=device) % 97) + size * (size - 1) / 2), count
    reduce.free()
    print(f"rank {rank}: sums of {size} ranks are right")
    tsn.finalize()


if __name__ == "__main__":
    main()
