"""Kernels whose blocks meet one another, and the blocks of other PEs."""

import os
import random

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N

THREADS = 64


@tsn.jit
def rounds_of_a_grid(blocks, scope="all"):
    """Kernel `(local, mine, board, wrong, rounds)`: in each round blocks look at what the next block of this PE wrote, and
    at what the next block of the next PE put here. `wrong` counts, by block and thread, what was not as in that round.

    Args:
        scope: "all" or "node": which PEs meet.
    """
    n = T.dynamic("n")
    barrier = N.barrier_all if scope == "all" else N.barrier_node

    @T.prim_func
    def main(
        ctx: N.Context(),
        local: T.Tensor((blocks, THREADS), "int32"),
        mine: T.Tensor((blocks, THREADS), "int32"),
        board: T.Tensor((n, blocks, THREADS), "int32"),
        wrong: T.Tensor((blocks, THREADS), "int32"),
        rounds: T.int32,
    ):
        with T.Kernel(blocks, threads=THREADS) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            size = N.n_pes() if scope == "all" else N.n_node_pes()
            first = 0 if scope == "all" else me - N.node_pe()
            after = (block + 1) % blocks
            neighbour = first + (me - first + 1) % size
            for i in T.serial(rounds):
                local[block, thread] = i * 100 + block
                mine[block, thread] = (i * 100 + block) * 10 + me
                N.barrier_grid()
                if local[after, (thread + 1) % THREADS] != i * 100 + after:
                    wrong[block, thread] += 1
                for p in T.serial(size):
                    N.put_block(board[me, block, 0], mine[block, 0], first + p, count=THREADS)
                N.quiet_block()
                barrier(scope="grid")
                if board[neighbour, after, thread] != (i * 100 + after) * 10 + neighbour:
                    wrong[block, thread] += 1
                barrier(scope="grid")  # no block writes the next round while others still look

    return main


@tsn.jit
def misused(how, blocks):
    """Kernel `(x)`: barriers in wrong use.

    Args:
        how: "all blocks": a barrier of one block per PE by all of them; "not all": a grid's barrier by all but one;
            "grid": rightly, by a grid that may be too large.
    """

    @T.prim_func
    def main(ctx: N.Context(), x: T.Tensor((1,), "int32")):
        with T.Kernel(blocks, threads=THREADS) as block:
            if how == "all blocks":
                N.barrier_all()
            if how == "not all":
                if block > 0:
                    N.barrier_grid()
            if how == "grid":
                N.barrier_all(scope="grid")

    return main


def meet_in_grids(blocks: int, rounds: int, scope: str, seeds: list[int]) -> int:
    """Wrong elements on this rank."""
    tensors = [tsn.zeros(shape, torch.int32) for shape in ((blocks, THREADS), (tsn.size(), blocks, THREADS))]
    local, wrong = (torch.zeros((blocks, THREADS), dtype=torch.int32, device=tsn.device()) for _ in range(2))
    for seed in seeds:
        os.environ["TSN_SIM_SEED"] = str(random.Random(f"{seed} {tsn.rank()}").randrange(1 << 30))
        rounds_of_a_grid(blocks, scope)(local, *tensors, wrong, rounds)
    tsn.barrier()
    count = int(wrong.sum())
    for tensor in tensors:
        tsn.free(tensor)
    return count


def misuse(how: str, blocks: int) -> None:
    misused(how, blocks)(torch.zeros(1, dtype=torch.int32, device=tsn.device()))
    tsn.synchronize()
    tsn.world().check()
