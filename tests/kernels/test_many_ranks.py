"""Kernels on 16 and 32 ranks in four virtual nodes, through a fabric that misbehaves, with small shapes."""

import random

import pytest
import torch

from tests import ranks
from tests.kernels import (
    test_all_gather,
    test_all_reduce,
    test_all_reduce_norm,
    test_all_to_all,
    test_broadcast,
    test_reduce_scatter,
)
from tests.kernels.moe.test_rounds import rounds

GEOMETRY = dict(threads=32, blocks=1)
MOE = dict(num_experts=32, max_tokens=5, hidden=64, top_k=4)


def _collectives(seed: int) -> None:
    test_all_gather._gather(seed, [((37,), torch.float32, 4, 0)], GEOMETRY)
    test_all_to_all._equal(seed, [(3, (5,), torch.bfloat16, 2, 0)], GEOMETRY)
    test_all_to_all._uneven(seed, 2, GEOMETRY, (9,), torch.uint8, False)
    test_reduce_scatter._reduce(seed, [((501,), torch.bfloat16, 2, 0)], dict(**GEOMETRY, chunk_bytes=2048))


def _sums_and_roots(seed: int) -> None:
    options = dict(**GEOMETRY, staging_bytes=4096)
    test_all_reduce._reduce(
        seed, [((501,), torch.bfloat16, 0, 0, True), ((7,), torch.bfloat16, 0, None, False)], options
    )
    test_all_reduce_norm._layers(seed, torch.bfloat16, 96, calls=4)
    test_broadcast._broadcast(seed, cases=2)


def _mixture(seed: int, modes: tuple[str, ...]) -> None:
    for mode in modes:
        rounds(seed, MOE, dict(mode=mode), dict(again=mode == "throughput"), ("random", "masked"))


@pytest.mark.nightly
@pytest.mark.timeout(1000)  # 32 ranks share two processors
@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize(
    "job",
    [(_collectives,), (_sums_and_roots,), (_mixture, ("throughput",)), (_mixture, ("latency",))],
    ids=["collectives", "sums and roots", "throughput", "latency"],
)
def test_four_nodes(size, job):
    seed = random.randrange(1 << 20)
    env = {"VIRTUAL_NODES": "4", "TSN_CHAOS": "on", "TSN_TIMEOUT": "300"}
    ranks.run(size, job[0], seed, *job[1:], env=env, heap="8M", timeout=900)
