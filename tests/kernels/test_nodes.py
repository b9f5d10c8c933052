"""The collective kernels on one node and across nodes: the same compiled kernels, also where ranks choose others."""

import hashlib

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels import test_all_gather, test_all_to_all, test_reduce_scatter
from tests.kernels.support import rejected
from tests.variants import variants
from tilescale_net.kernels.all_gather import AllGather, all_gather
from tilescale_net.kernels.all_to_all import all_to_all, all_to_all_uneven
from tilescale_net.kernels.reduce_scatter import reduce_scatter

GATHER = [((1,), torch.uint8, 0, 0), ((1000,), torch.float32, 4, 12), ((40_000,), torch.bfloat16, 0, 2)]
EQUAL = [(3, (5,), torch.bfloat16, 2, 0), (1000, (9,), torch.float32, 4, 4)]
GEOMETRY = dict(threads=32, blocks=2)


@variants(1, "size, nodes", [(2, 2), (4, 2)])
@ranks.on(timeout=200)
def test_nodes(size, nodes, seed):
    test_all_gather._gather(seed, GATHER, GEOMETRY)
    test_all_to_all._equal(seed, EQUAL, GEOMETRY)
    test_all_to_all._uneven(seed, 5, GEOMETRY, (129,), torch.uint8, False)
    test_reduce_scatter._reduce(seed, [((5001,), torch.bfloat16, 2, 0)], dict(**GEOMETRY, chunk_bytes=2048))


@variants(1, "size", [2, 3])
@ranks.on(TSN_SIM_VISIBILITY="random", timeout=400)
def test_stores(size, seed):
    """Stores have the effect of puts, also where a rank chooses puts."""
    options = dict(threads=64, blocks=3, stores_from=1 << 40 if tsn.rank() == 2 else 16)
    gather = [((8,), torch.int32, 0, 0), ((40_000,), torch.bfloat16, 0, 16), ((1000,), torch.float32, 4, 0)]
    equal = [(4, (4,), torch.float32, 0, 0), (3000, (9,), torch.float32, 0, 0), (5, (3,), torch.bfloat16, 0, 0)]
    test_all_gather._gather(seed, gather, options)
    test_all_to_all._equal(seed, equal, options)


def test_staged_slots_fit_a_narrow_network():
    """Where data are staged, a slot leaves in one write, however little the network takes at a time."""
    env = {"VIRTUAL_NODES": "2", "TSN_PROXY_STAGING": "1", "TSN_CHAOS": "seed=3,reorder=0.5,depth=4,max_write=256"}
    ranks.run(2, test_all_gather._gather, 3, GATHER, GEOMETRY, env=env, timeout=200)


def _sources() -> dict[str, str]:
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


@pytest.mark.parametrize("nodes", [1, 2])
@ranks.on()
def test_sources_must_be_symmetric_across_nodes(nodes):
    out = tsn.zeros((2, 8), torch.float32)
    x = torch.zeros(8, device=tsn.device())
    gather = AllGather(threads=32, blocks=1)
    if nodes == 1:
        gather(out, x)
    else:
        rejected((lambda: gather(out, x), tsn.HeapError, "x of shape [8]", "symmetric"))
