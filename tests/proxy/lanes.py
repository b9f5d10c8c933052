"""A kernel whose lanes send to several PEs of another node at once, and its expected results."""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests.shorthand import i32, jitted, u64

THREADS, ROUNDS, PES = 96, 6, 4


@jitted
def scatter(
    ctx: N.Context(), out: i32(PES, THREADS, ROUNDS, 5), x: i32(THREADS, ROUNDS, 5), values: i32(PES, THREADS, ROUNDS),
    arrived: u64(PES),
):  # fmt: skip
    """Kernel `(out, x, values, arrived)` for 4 PEs on 2 nodes: thread t sends to PE t % 2 of the other node.

    `out` [PES, THREADS, ROUNDS, 5] and `values` [PES, THREADS, ROUNDS] get what thread t of PE p sent in each round;
    `arrived` [PES] counts the signals of PE p.
    """
    with T.Kernel(1, threads=THREADS):
        thread = T.get_thread_binding()
        me = N.my_pe()
        to = (me // 2 * 2 + 2) % PES + thread % 2
        for i in T.serial(ROUNDS):
            N.put_thread(out[me, thread, i, 0], x[thread, i, 0], to, count=5)
            N.put_value(values[me, thread, i], me * 1000000 + thread * 1000 + i, to)
            # Some lanes only: the others must not be waited for.
            if thread % 3 == i % 3:
                N.fence(to)
                N.signal(arrived[me], T.uint64(1), to, op="add")
        N.fence(to)
        N.signal(arrived[me], T.uint64(1000), to, op="add")
        if thread < PES and thread // 2 != me // 2:
            N.wait(arrived[thread], "eq", T.uint64(THREADS // 2 * (ROUNDS // 3 + 1000)))
        T.sync_threads()
        N.quiet()


def run_scatter(seed: int):
    """Runs it on this rank and checks its results."""
    torch.manual_seed(seed + tsn.rank())
    me, kernel = tsn.rank(), scatter()
    out = tsn.zeros((PES, THREADS, ROUNDS, 5), dtype=torch.int32)
    x = tsn.empty((THREADS, ROUNDS, 5), dtype=torch.int32)
    values = tsn.zeros((PES, THREADS, ROUNDS), dtype=torch.int32)
    arrived = tsn.zeros((PES,), dtype=torch.uint64)
    t, i, k = torch.meshgrid(torch.arange(THREADS), torch.arange(ROUNDS), torch.arange(5), indexing="ij")
    x.copy_((me * 100000 + t * 1000 + i * 10 + k).to(torch.int32))
    tsn.barrier()
    kernel(out, x, values, arrived)
    tsn.barrier()
    for p in range(PES):
        mine = (t[..., 0] % 2 == me % 2) & (p // 2 != me // 2)
        expected = (p * 100000 + t * 1000 + i * 10 + k) * mine[..., None]
        assert torch.equal(out[p].cpu(), expected.to(torch.int32)), f"puts of PE {p} at PE {me}"
        expected = (p * 1000000 + t[..., 0] * 1000 + i[..., 0]) * mine
        assert torch.equal(values[p].cpu(), expected.to(torch.int32)), f"values of PE {p} at PE {me}"
    return tsn.world().proxy.stats()


COUNT = 6000


@jitted
def relay(ctx: N.Context(), out: i32(ROUNDS, COUNT), x: i32(ROUNDS, COUNT), seen: i32(ROUNDS, COUNT), arrived: u64(1)):
    """Kernel `(out, x, seen, arrived)` for 2 PEs: each round sends `x[i]` and reads what came as soon as its signal does.

    `out` [ROUNDS, COUNT] symmetric, `x` and `seen` [ROUNDS, COUNT] local, `arrived` [1] symmetric.
    """
    with T.Kernel(1, threads=THREADS):
        to = 1 - N.my_pe()
        for i in T.serial(ROUNDS):
            N.put_signal_block(out[i, 0], x[i, 0], to, arrived[0], T.Cast("uint64", i + 1), count=COUNT)
            N.wait_block(arrived[0], "ge", T.Cast("uint64", i + 1))
            for j in T.Parallel(COUNT):
                seen[i, j] = out[i, j]
        T.sync_threads()
        N.quiet()


def run_relay():
    """Runs it on this rank; returns how many elements were read before they had arrived."""
    me, kernel = tsn.rank(), relay()
    numbers = torch.arange(ROUNDS * COUNT, dtype=torch.int32).view(ROUNDS, COUNT) + 1
    out = tsn.zeros((ROUNDS, COUNT), dtype=torch.int32)
    x = tsn.empty((ROUNDS, COUNT), dtype=torch.int32)
    seen = tsn.zeros((ROUNDS, COUNT), dtype=torch.int32)
    arrived = tsn.zeros((1,), dtype=torch.uint64)
    x.copy_(numbers * (me + 1))
    tsn.barrier()
    kernel(out, x, seen, arrived)
    tsn.barrier()
    return int((seen.cpu() != numbers * (2 - me)).sum())
