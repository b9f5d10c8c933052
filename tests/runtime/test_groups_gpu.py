"""Worlds of groups that nccl made, beside nccl's own traffic."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tilescale_net as tsn
from tests import ranks
from tests.runtime.test_groups import gather, in_order, route
from tilescale_net.kernels.all_gather import AllGather

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(ranks.gpus() < 2, reason="needs two GPUs; nccl makes no groups without"),
]


@pytest.mark.parametrize("backend, bound", [("nccl", True), ("nccl", False), ("cpu:gloo,cuda:nccl", True)])
@ranks.on(init=False, timeout=240)
def test_groups_of_nccl(backend, bound, seed):
    """Collectives of nccl on one stream, ours of two worlds with the ranks in both orders on another."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if bound:
        dist.init_process_group(backend, device_id=device)
    else:
        torch.cuda.set_device(device)
        dist.init_process_group(backend)
    me = dist.get_rank()
    backwards = in_order([1, 0])
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("ep",))
    worlds = [tsn.init("64M", group=mesh["ep"]), tsn.init("64M", group=[backwards, backwards.group_name][me])]
    assert [w.rank for w in worlds] == [dist.get_rank(mesh.get_group()), dist.get_rank(backwards)]
    assert all(w.device == device for w in worlds)
    ours, x = torch.cuda.Stream(), torch.full((1 << 20,), float(me + 1), device=device)
    gathers = {w: AllGather(blocks=2, group=w) for w in worlds}
    for turn in range(4):
        y = x.clone()
        work = dist.all_reduce(y, async_op=True)
        with torch.cuda.stream(ours):
            for w, op in gathers.items():
                gather(w, op, turn)
        work.wait()
        assert torch.equal(y, torch.full_like(y, 3.0))
    for w in worlds:
        route(w, seed, "expert-major elsewhere")
        route(w, seed)
    tsn.finalize(worlds[0])
    gather(worlds[1], gathers[worlds[1]], 9)
    tsn.finalize()
    y = x.clone()
    dist.all_reduce(y)
    assert y[0].item() == 3.0
    dist.destroy_process_group()
