"""Throughput mode where rows cross the network once per node: against plain PyTorch, bit by bit."""

import random

import pytest
import torch

from tests import ranks
from tests.kernels.moe.support import FP8, ROUTES
from tests.kernels.moe.test_rounds import rounds

SHAPE = dict(num_experts=8, max_tokens=20, hidden=64, top_k=3)
KINDS = ("random", "masked", "one rank")

CASES = {
    "expert": (dict(alignment=2), dict(again=True), ROUTES),
    "rank": (dict(layout="rank", dtype=FP8, quantize_combine=True), dict(again=True, halves=True), KINDS),
    "elsewhere": (dict(zero_copy=False, dtype=FP8, quantize_combine=True), dict(halves=True, index=torch.int32), KINDS),
}


@pytest.mark.parametrize("case", CASES)
def test_rounds(case):
    options, how, kinds = CASES[case]
    seed, env = random.randrange(1 << 30), {"VIRTUAL_NODES": "2"}
    ranks.run(4, rounds, seed, SHAPE, options, how, kinds, env=env, timeout=280)
