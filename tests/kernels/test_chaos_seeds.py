"""Every kernel between two nodes on networks that misbehave: in a few ways, and nightly in TSN_CHAOS_SEEDS ways."""

import os
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
    test_broadcast,
    test_p2p,
    test_reduce_scatter,
    test_send_recv,
)
from tests.kernels.fused import (
    test_all_gather_matmul,
    test_expert_matmul,
    test_matmul_all_reduce,
    test_matmul_reduce_scatter,
)
from tests.kernels.moe.test_rounds import rounds
from tests.kernels.small_runs import GEOMETRY, MOE
from tilescale_net.kernels.moe import Tuning
from tilescale_net.runtime import settings

FEW = 3
SEEDS = settings.CHAOS_SEEDS.get()
AT_ONCE = 24  # seeds of one test, whose ranks build each kernel once
TUNING = Tuning(blocks=2, threads=64, combine_threads=64, chunk=2)  # as in small_runs: the same kernels


def chaos_of(seed: int) -> str:
    """A network: what it does, and how badly, depends on the seed."""
    pace = random.Random(seed)
    faults = {
        "reorder": f"{pace.uniform(0.1, 0.9):.2f}",
        "split": f"{pace.uniform(0.1, 0.9):.2f}",
        "eagain": f"{pace.uniform(0.05, 0.5):.2f}",
        "delay_us": str(pace.choice((50, 200, 400))),
        "imm_bits": str(pace.choice((8, 16, 20, 32))),
        "depth": str(pace.choice((4, 16, 64))),
        "max_write": str(pace.choice((256, 1000, 4096))),
    }
    chosen = pace.sample(sorted(faults), pace.randrange(2, len(faults) + 1))
    return ",".join([f"seed={seed}", *(f"{name}={faults[name]}" for name in chosen)])


def sums_and_roots(seed: int) -> None:
    test_all_reduce._reduce(seed, [((501,), torch.bfloat16, 0, 0, True)], dict(**GEOMETRY, staging_bytes=4096))
    test_all_reduce_norm._layers(seed, torch.bfloat16, 96, calls=3)
    test_broadcast._broadcast(seed, cases=2)
    test_broadcast._transposed(seed, cases=4, largest=2)
    test_send_recv._messages(seed, cases=3)


def products(seed: int) -> None:
    """Of the shapes that tests/kernels/fused has between nodes, and so by the same kernels."""
    test_all_gather_matmul._products(seed, 72, 48, 40, torch.bfloat16, True, 1, 2)
    test_matmul_reduce_scatter._sums(seed, 72, 48, 40, torch.bfloat16, True, 1, 2)
    test_matmul_all_reduce._sums(seed, 144, 48, 40, True, 1, 2)


def products_of_experts(seed: int) -> None:
    """As in tests/kernels/fused/test_combine_behind_a_product.py, and so by the same kernels."""
    test_expert_matmul.layers(seed, dict(tuning=test_expert_matmul.TUNING), False, ("random",))


def parts_and_rows(seed: int) -> None:
    for direction, way in (("push", dict(threads=64, blocks=4, partition="interleaved", chunk=1024)), ("pull", dict())):
        test_p2p._copies(direction, way, [(seed % 5000, 2, 1, 3)], seed)
    test_all_gather._gather(seed, [((700,), torch.float32, 4, 12)], GEOMETRY)
    test_all_to_all._equal(seed, [(30, (5,), torch.bfloat16, 2, 0)], GEOMETRY)
    test_all_to_all._uneven(seed, 3, GEOMETRY, (129,), torch.uint8, False)
    test_reduce_scatter._reduce(seed, [((1001,), torch.bfloat16, 2, 0)], dict(**GEOMETRY, chunk_bytes=512))
    rounds(seed, MOE, dict(alignment=2, tuning=TUNING), dict(), ("random", "masked"))
    rounds(seed, MOE, dict(layout="rank", tuning=TUNING), dict(), ("random",))
    rounds(seed, MOE, dict(mode="latency", tuning=TUNING), dict(), ("random", "masked"))


# One small run of each kernel, every byte compared.
KERNELS = {
    "parts and rows": parts_and_rows,
    "sums and roots": sums_and_roots,
    "products": products,
    "products of experts": products_of_experts,
}


def _seeds(kernels: str, first: int, count: int) -> None:
    for seed in range(first, first + count):
        os.environ["TSN_CHAOS"] = chaos_of(seed)
        os.environ["TSN_SIM_VISIBILITY"] = ("late", "random")[seed % 2]
        tsn.init("16M")
        try:
            KERNELS[kernels](seed)
        except Exception as error:
            raise AssertionError(f"on the network {chaos_of(seed)}: {error}") from error
        tsn.finalize()


def _run(kernels: str, count: int) -> None:
    args = kernels, random.randrange(1 << 20), count
    ranks.run(2, _seeds, *args, init=False, env={"VIRTUAL_NODES": "2"}, timeout=280)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.sample(0)
def test_every_kernel_on_some_networks(kernels):
    _run(kernels, FEW)


@pytest.mark.nightly
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("batch", range(-(-SEEDS // AT_ONCE)))
def test_every_kernel_on_many_networks(batch, kernels):
    _run(kernels, min(AT_ONCE, SEEDS - batch * AT_ONCE))
