"""Barriers of whole grids: of one PE, of all, of a node; used again and again, and wrongly."""

import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
import tilescale_net.runtime.settings as settings
from tests import ranks
from tests.integration.pool import pool_fixture
from tests.kernels.support import schedule
from tests.variants import variants

THREADS = 64


@tsn.jit
def rounds_of_a_grid(blocks, scope="all"):
    """Kernel `(local, mine, board, wrong, rounds)`: in each round blocks look at the data that the next block of this PE wrote, and
    at the data that the next block of the next PE put here. `wrong` counts wrong values by block and thread.

    Args:
        scope: "all" or "node": which PEs meet.
    """
    n = T.dynamic("n")
    barrier = N.barrier_all if scope == "all" else N.barrier_node

    @T.prim_func
    def main(
        ctx: N.Context(), local: T.Tensor((blocks, THREADS), "int32"), mine: T.Tensor((blocks, THREADS), "int32"),
        board: T.Tensor((n, blocks, THREADS), "int32"), wrong: T.Tensor((blocks, THREADS), "int32"), rounds: T.int32,
    ):  # fmt: skip
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
        schedule(seed)
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


# -- tests ----------------------------------------------------------------------------------------------------------

one = pool_fixture(1)
two = pool_fixture(2)
nodes = pool_fixture(4, env={"VIRTUAL_NODES": "2", "TSN_CHAOS": "on"})


@variants(1, "blocks", [1, 7])
def test_one_pe(one, blocks):
    assert one(meet_in_grids, blocks, 4, "all", [0, 1, 2]) == [0]


@pytest.mark.parametrize("blocks", [1, 5])
def test_two_pes(two, blocks):
    assert two(meet_in_grids, blocks, 4, "all", [0, 1, 2]) == [0, 0]


@pytest.mark.parametrize("scope", ["all", "node"])
def test_nodes(nodes, scope):
    assert nodes(meet_in_grids, 3, 3, scope, [0, 1]) == [0] * 4


@pytest.mark.skipif(settings.device_kind() == "cuda", reason="a GPU does not see blocks that share a barrier")
@ranks.fails("KernelError", "barrier in block", "met another one in flight", size=1, TSN_TIMEOUT="5")
def test_a_barrier_of_one_block_by_all():
    misuse("all blocks", 8)


@pytest.mark.parametrize("how, come", [("not all", "3 of 4 have come"), ("grid", "32 of 40 have come")])
def test_blocks_that_never_come(how, come):
    if how == "grid" and settings.device_kind() == "cuda":
        pytest.skip("the simulator can be made small")
    env = {"TSN_TIMEOUT": "1", "TSN_SIM_SMS": "1"}
    kind, text, _ = ranks.launch(1, misuse, how, 4 if how == "not all" else 40, env=env)[0].error
    assert kind == "WaitTimeout" and f"for all blocks of the launch; {come}" in text, (kind, text)
