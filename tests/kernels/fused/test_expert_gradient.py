"""Gradients of experts' matrices against torch: whole numbers, whose sums are exact in any order."""

import random

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.fused.test_all_gather_matmul import whole_numbers
from tests.kernels.support import assert_same
from tilescale_net.kernels.fused import expert_gradient as of
from tilescale_net.kernels.fused.expert_gradient import gradient_of_experts

TILING = of.DEFAULT if ranks.gpus() else of.SIMULATED
DEPTH = TILING.tile[2]


def _layout(rows):
    """counts and offsets of experts with so many rows, each in the next multiple of the depth and one more gap."""
    room = [-(-n // DEPTH) * DEPTH + (DEPTH if i % 2 else 0) for i, n in enumerate(rows)]
    offsets = [sum(room[:e]) for e in range(len(rows) + 1)]
    return torch.tensor(rows, dtype=torch.int32), torch.tensor(offsets, dtype=torch.int32)


def of_random_experts(seed, dtype):
    """Experts without rows, with so few that their operand stays in shared memory, and with more; tiles beyond the edges."""
    pace, device = random.Random(seed), tsn.device()
    most = TILING.slots * DEPTH
    rows = [0, 1, most, most + 1, pace.randrange(3 * most), 0]
    pace.shuffle(rows)
    m, n = (8 * pace.randrange(1, 3 * side // 8) for side in TILING.tile[:2])
    counts, offsets = _layout(rows)
    left, right = (whole_numbers((int(offsets[-1]), side), dtype, seed, side) for side in (m, n))
    wanted = torch.zeros((len(rows), m, n), dtype=dtype)
    belongs = torch.zeros(int(offsets[-1]), dtype=torch.bool)
    for e, (first, count) in enumerate(zip(offsets.tolist(), rows)):
        belongs[first : first + count] = True
        own = slice(first, first + count)
        wanted[e] = (left[own].float().t() @ right[own].float() + 0).to(dtype)  # no negative zeros
    left[~belongs], right[~belongs] = 0, 0
    found = gradient_of_experts(*(t.to(device) for t in (left, right, counts, offsets)))
    assert_same(found.cpu(), wanted, f"seed {seed}, rows {rows}, m {m}, n {n}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.sample(1)
def test_equals_torch(dtype):
    ranks.run(1, of_random_experts, random.randrange(1 << 30), dtype)


@ranks.on(1)
def test_wrong_arguments():
    device = tsn.device()
    left, right = (torch.zeros((2 * DEPTH, n), dtype=torch.bfloat16, device=device) for n in (16, 24))
    counts, offsets = (t.to(device) for t in _layout([3, DEPTH]))
    for error, words, arguments in (
        (TypeError, "left is of torch.float32.*bfloat16", (left.float(), right.float(), counts, offsets)),
        (TypeError, "right is of torch.float16.*it must be of torch.bfloat16", (left, right.half(), counts, offsets)),
        (TypeError, "counts is of torch.int64", (left, right, counts.long(), offsets)),
        (ValueError, "right has strides.*contiguous", (left, right.t().contiguous().t(), counts, offsets)),
        (ValueError, "as many rows", (left, right[1:].contiguous(), counts, offsets)),
        (ValueError, r"offsets is \[2\]; it must be \[3\]", (left, right, counts, offsets[:2].contiguous())),
        (ValueError, "n is 20; it must be a multiple of 8", (left, right[:, :20].contiguous(), counts, offsets)),
    ):
        with pytest.raises(error, match=words):
            gradient_of_experts(*arguments)
    empty = gradient_of_experts(left[:0], right[:0], torch.zeros_like(counts), torch.zeros_like(offsets))
    assert empty.shape == (2, 16, 24) and not empty.any()
