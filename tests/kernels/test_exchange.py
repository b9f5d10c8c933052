"""All-gather and all-to-all by stores: what they do is what they do by puts, also where some ranks choose the one."""

import random

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels import test_all_gather, test_all_to_all
from tests.kernels.support import Guarded, assert_same, random_tensor
from tilescale_net.kernels.all_gather import AllGather

GATHER = [((8,), torch.int32, 0, 0), ((40_000,), torch.bfloat16, 0, 16), ((1000,), torch.float32, 4, 0)]
EQUAL = [(4, (4,), torch.float32, 0, 0), (3000, (9,), torch.float32, 0, 0), (5, (3,), torch.bfloat16, 0, 0)]


def _both(seed):
    rank, n = tsn.rank(), tsn.size()
    options = dict(threads=64, blocks=3, stores_from=1 << 40 if rank == 2 else 16)
    test_all_gather._gather(seed, GATHER, options)
    test_all_to_all._equal(seed, EQUAL, options)
    op, out = AllGather(**options), Guarded((n, 5000), torch.float32)
    for call in range(3):  # in place
        data = torch.stack([random_tensor((5000,), torch.float32, seed, call, p) for p in range(n)])
        out.tensor[rank].copy_(data[rank])
        op(out.tensor, out.tensor[rank])
        tsn.synchronize()
        assert_same(out.tensor, data, f"seed {seed}, call {call}")
        tsn.barrier()
    out.check()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.sample(1)
def test_stores(size):
    ranks.run(size, _both, random.randrange(1 << 30), env={"TSN_SIM_VISIBILITY": "random"}, timeout=400)
