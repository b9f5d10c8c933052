"""Calls on fewer blocks than an object has, which differ from rank to rank and from call to call: the same bits."""

from types import SimpleNamespace

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe.support import make_inputs
from tests.kernels.moe.test_misuse import SHAPE, raises
from tests.kernels.support import assert_same
from tests.variants import nightly, variants
from tilescale_net.kernels.moe import AllToAll
from tilescale_net.kernels.moe.config import most_tokens
from tilescale_net.kernels.moe.routing import BLOCK_SHARED, PlanConfig, bytes_of_choice, fixed_bytes


@variants(
    0,
    "size, nodes, options, least",
    [
        (2, 1, {}, 2),
        nightly(2, 1, dict(layout="rank"), 2),
        nightly(2, 1, dict(mode="latency"), 1),
        nightly(4, 2, {}, 2),
    ],
)
@ranks.on(timeout=180)
def test_blocks_of_a_call(size, nodes, options, least):
    op, rank, device = AllToAll(**SHAPE, **options), tsn.rank(), tsn.device()
    for turn in range(4):
        mine = make_inputs((turn, rank), op.config, 4, "random")
        inputs = mine.x.to(device), mine.topk_idx.to(device), mine.weights.to(device)
        few = dict(blocks=least) if (rank + turn) % 2 else {}
        received = op.dispatch(*inputs)
        wanted = op.combine(received.x, received.handle)
        rows, counts = received.x.clone(), received.counts.clone()
        if turn == 2:  # a refused call counts for all blocks
            many = op.blocks + 1
            with raises(ValueError, f"blocks is {many}; .* from" if rank == 1 else "rank 1 .* wrong blocks"):
                op.dispatch(*inputs, **(dict(blocks=many) if rank == 1 else few))
                op.check()
        if turn == 3:
            received = op.dispatch_recv(op.dispatch_send(*inputs, **few))
            found = op.combine_recv(op.combine_send(received.x, received.handle, **few))
        else:
            received = op.dispatch(*inputs, **few)
            found = op.combine(received.x, received.handle, **few)
        assert torch.equal(received.counts, counts)
        if op.config.mode == "throughput":
            n = int(received.offsets[-1])
            assert_same(received.x[:n].cpu(), rows[:n].cpu(), f"turn {turn}")
        assert_same(found.cpu(), wanted.cpu(), f"turn {turn}: sums")
    for wrong in (0, True, 2.0, least - 1):
        with raises(ValueError, "blocks"):
            op.combine(received.x, received.handle, blocks=wrong)
    op.free()


@pytest.mark.parametrize(
    "experts, n_pes, top_k, ordered", [(256, 2, 8, False), (256, 8, 8, True), (1024, 64, 6, True), (8, 2, 1, False)]
)
def test_plan_of_the_most_tokens_fits(experts, n_pes, top_k, ordered):
    """Counts of warps take what the choices leave of a block's shared memory, and those of one part are always there."""
    config = SimpleNamespace(num_experts=experts, ranks=n_pes, top_k=top_k, tile_rows=128 if ordered else None)
    for blocks in (2, 24):
        most = most_tokens(config, blocks)
        for tokens in (blocks, most // 2, most):
            s = PlanConfig(n_pes, experts, top_k, tokens, 1, 1, blocks, 512, "int64", 0, 0, ordered)
            counted = 4 * s.width * (s.parts + 1)
            used = fixed_bytes(experts, n_pes, ordered) + bytes_of_choice(ordered) * s.cells + counted
            assert used <= BLOCK_SHARED and (s.parts == 16 or used + 4 * s.width > BLOCK_SHARED), (tokens, s.parts)
