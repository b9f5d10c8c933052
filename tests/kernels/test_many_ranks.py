"""Kernels on 16 and 32 ranks in four virtual nodes, through a fabric that misbehaves, with small shapes."""

import functools
import random

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels import (
    test_all_gather,
    test_all_reduce,
    test_all_reduce_norm,
    test_all_to_all,
    test_attention_merge,
    test_broadcast,
    test_reduce_scatter,
    test_send_recv,
)
from tests.kernels.fused import (
    test_all_gather_matmul,
    test_expert_matmul,
    test_matmul_all_reduce,
    test_matmul_reduce_scatter,
)
from tests.kernels.moe.support import FP8
from tests.kernels.moe.test_once_per_node import without_a_forwarder
from tests.kernels.moe.test_rounds import rounds, weights_at_combine

GEOMETRY = dict(threads=32, blocks=1)
MOE = dict(num_experts=32, max_tokens=5, hidden=64, top_k=4)


def _collectives(seed: int) -> None:
    test_all_gather._gather(seed, [((37,), torch.float32, 4, 0)], GEOMETRY)
    test_all_to_all._equal(seed, [(3, (5,), torch.bfloat16, 2, 0)], GEOMETRY)
    test_all_to_all._uneven(seed, 2, GEOMETRY, (9,), torch.uint8, False)
    test_reduce_scatter._reduce(seed, [((501,), torch.bfloat16, 2, 0)], dict(**GEOMETRY, chunk_bytes=2048))


def _sums_and_roots(seed: int) -> None:
    sums = [((501,), torch.bfloat16, 0, 0, True), ((7,), torch.bfloat16, 0, None, False)]
    test_all_reduce._reduce(seed, sums, dict(**GEOMETRY, staging_bytes=4096))
    test_all_reduce_norm._layers(seed, torch.bfloat16, 96, calls=4)
    test_attention_merge.merges(seed, False, False, calls=2)
    test_broadcast._broadcast(seed, cases=2)
    test_broadcast._transposed(seed, cases=4, largest=1)


def _messages(seed: int) -> None:
    """Within a node, and with the same rank of another one."""
    for apart in (1, tsn.size() // 2):
        test_send_recv._messages(seed, apart, cases=3)


def _products(seed: int) -> None:
    """Rows of which there are fewer than a tile has, on each rank."""
    plain = (torch.bfloat16, False, 2, 2)
    test_all_gather_matmul._products(seed, 5, 16, 40, *plain)
    test_all_gather_matmul._products(seed, 5, 32, 16, FP8, True, 1, 2)
    test_matmul_reduce_scatter._sums(seed, 5, 16, 40, *plain)
    test_matmul_all_reduce._sums(seed, 5 * tsn.size(), 16, 40, *plain[1:])


def _products_of_experts(seed: int) -> None:
    shape = test_expert_matmul.MOE | dict(num_experts=32, max_tokens=4)
    test_expert_matmul.layers(seed, dict(tuning=test_expert_matmul.TUNING), False, ("random", "one expert"), shape)


def _throughput(seed: int) -> None:
    rounds(seed, MOE, dict(), dict(again=True), ("random", "masked"))
    rounds(seed, MOE, dict(dtype=FP8), dict(halves=True), ("random",))


def _by_rank(seed: int) -> None:
    rounds(
        seed, MOE, dict(layout="rank", dtype=FP8, quantize_combine="always"), dict(halves=True), ("random", "masked")
    )


def _latency(seed: int) -> None:
    rounds(seed, MOE, dict(mode="latency"), dict(halves=True), ("random", "masked"))
    rounds(seed, MOE, dict(mode="latency", dtype=FP8), dict(), ("random",))
    weights_at_combine(seed, MOE, dict(mode="latency"))


def _without_a_rank(mode: str, seed: int) -> None:
    gone = random.Random(seed).randrange(tsn.size())
    without_a_forwarder(seed, gone, dict(mode=mode), (False, True), MOE)


JOBS = {
    "collectives": _collectives,
    "sums and roots": _sums_and_roots,
    "messages": _messages,
    "products": _products,
    "products of experts": _products_of_experts,
    "throughput": _throughput,
    "by rank": _by_rank,
    "latency": _latency,
    "throughput without a rank": functools.partial(_without_a_rank, "throughput"),
    "latency without a rank": functools.partial(_without_a_rank, "latency"),
}


@pytest.mark.nightly
@pytest.mark.timeout(1000)  # 32 ranks share two processors
@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("job", JOBS)
@ranks.on(VIRTUAL_NODES="4", TSN_CHAOS="on", TSN_TIMEOUT="300", heap="8M", timeout=900)
def test_four_nodes(size, job, seed):
    JOBS[job](seed)
