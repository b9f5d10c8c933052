"""The collective kernels across nodes: the same compiled kernels, through the proxy and the fabric, which may misbehave."""

import hashlib
import random

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels import test_all_gather, test_all_to_all, test_reduce_scatter

GATHER = [((1,), torch.uint8, 0, 0), ((1000,), torch.float32, 4, 12), ((40_000,), torch.bfloat16, 0, 2)]
EQUAL = [(3, (5,), torch.bfloat16, 2, 0), (1000, (9,), torch.float32, 4, 4)]
REDUCE = [((5001,), torch.bfloat16, 2, 0)]
GEOMETRY = dict(threads=32, blocks=2)


def _everything(seed: int) -> None:
    test_all_gather._gather(seed, GATHER, GEOMETRY)
    test_all_to_all._equal(seed, EQUAL, GEOMETRY)
    test_all_to_all._uneven(seed, 5, GEOMETRY, (129,), torch.uint8, False)
    test_reduce_scatter._reduce(seed, REDUCE, dict(**GEOMETRY, chunk_bytes=2048))


@pytest.mark.parametrize("size, nodes", [(2, 2), (4, 2)])
@pytest.mark.sample(1)
def test_nodes(size, nodes):
    ranks.run(size, _everything, random.randrange(1 << 30), env={"VIRTUAL_NODES": str(nodes)}, timeout=200)


@pytest.mark.parametrize(
    "chaos",
    [
        "reorder=0.3,split=0.5,eagain=0.2,imm_bits=16",
        "reorder=0.7,split=0.8,delay_us=300,depth=4,max_write=1000",
    ],
)
def test_networks_that_misbehave(chaos):
    seed = random.randrange(1 << 20)
    env = {"VIRTUAL_NODES": "2", "TSN_CHAOS": f"seed={seed},{chaos}", "TSN_SIM_VISIBILITY": "late"}
    ranks.run(2, _everything, seed, env=env, timeout=200)


def test_staged_slots_fit_a_narrow_network():
    """Where data are staged, a slot leaves in one write, however little the network takes at a time."""
    env = {"VIRTUAL_NODES": "2", "TSN_PROXY_STAGING": "1", "TSN_CHAOS": "seed=3,reorder=0.5,depth=4,max_write=256"}
    ranks.run(2, test_all_gather._gather, 3, GATHER, GEOMETRY, env=env, timeout=200)


def _sources() -> dict[str, str]:
    from tilescale_net.kernels.all_gather import all_gather
    from tilescale_net.kernels.all_to_all import all_to_all, all_to_all_uneven
    from tilescale_net.kernels.reduce_scatter import reduce_scatter

    made = {
        f.__name__: f(2, **extra, **GEOMETRY)
        for f, extra in (
            (all_gather, {}),
            (all_to_all, {}),
            (all_to_all_uneven, {}),
            (reduce_scatter, {"dtype": "bfloat16"}),
        )
    }
    assert tsn.world().topology.nodes in (1, 2)
    return {name: hashlib.sha256(kernel.source.encode()).hexdigest() for name, kernel in made.items()}


def test_one_source_for_all_paths():
    direct = ranks.run(2, _sources)
    proxied = ranks.run(2, _sources, env={"VIRTUAL_NODES": "2"})
    assert direct == proxied and direct[0] == direct[1] and len(direct[0]) == 4


def _source_outside_the_heap():
    from tilescale_net.kernels.all_gather import AllGather

    out, x = tsn.zeros((2, 8), torch.float32), torch.zeros(8, device=tsn.device())
    AllGather(threads=32, blocks=1)(out, x)


def test_sources_must_be_symmetric_across_nodes():
    for outcome in ranks.launch(2, _source_outside_the_heap, env={"VIRTUAL_NODES": "2"}):
        assert outcome.error is not None and outcome.error[0] == "HeapError", outcome
        assert "x of shape [8]" in outcome.error[1] and "symmetric" in outcome.error[1]
    ranks.run(2, _source_outside_the_heap)
