"""Hosts that run different numbers of ranks, and hosts that are split into nodes: who shares a node, and all is right."""

import random

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe.test_rounds import rounds
from tilescale_net.errors import ConfigurationError
from tilescale_net.kernels.all_reduce import AllReduce
from tilescale_net.runtime import placement

OF_JOBS = [("aab", (1, 3)), ("aaaabb", (2, 3)), ("aaaaaabb", (2, 4)), ("aabb", (2, 2))]
OF_GROUPS = [
    ("aaaa", (4, 1)),
    ("aabb", (2, 2)),
    ("abab", (1, 4)),
    ("aab", (1, 3)),
    ("aaabbb", (3, 2)),
    ("aabbbb", (2, 3)),
]


@pytest.mark.parametrize(
    "of_job, hosts, sizes", [(True, *row) for row in OF_JOBS] + [(False, *row) for row in OF_GROUPS]
)
def test_topology(of_job, hosts, sizes):
    for rank in range(len(hosts)):
        if of_job:
            found = placement.job_topology(rank, len(hosts), list(hosts))
        else:
            found = placement.group_topology(rank, len(hosts), list(hosts), [0] * len(hosts))
        assert (found.node_size, found.nodes) == sizes and found.single_host == (len(set(hosts)) == 1)
        assert found.local_rank == hosts[:rank].count(hosts[rank])
        assert rank in found.node_members and len({hosts[pe] for pe in found.node_members}) == 1
        assert sum(found.sizes) == len(hosts) and len(found.node_members) in found.sizes
        assert [pe for pe in range(len(hosts)) if found.is_direct(pe)] == list(found.node_members)
        if "".join(sorted(hosts)) == hosts:
            assert found.sizes == tuple(map(hosts.count, sorted(set(hosts))))  # a node is a host


def test_virtual_nodes_of_uneven_hosts(monkeypatch):
    monkeypatch.setenv("VIRTUAL_NODES", "2")
    assert placement.job_topology(0, 6, list("aaaabb")).node_size == 1
    with pytest.raises(ConfigurationError, match="does not divide the 3 ranks"):
        placement.job_topology(0, 5, list("aaabb"))
    monkeypatch.setenv("VIRTUAL_NODES", "1+2")
    found = [placement.job_topology(rank, 3, list("aaa")) for rank in range(3)]
    assert [(list(each.node_members), each.sizes, each.nodes) for each in found] == [
        ([0], (1, 2), 3), ([1, 2], (1, 2), 3), ([1, 2], (1, 2), 3)
    ]  # fmt: skip
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for rank, node in enumerate((0, 1, 1)):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert placement.virtual_node(rank, 3) == node
    for wrong, said in (
        ("1+3", "are 4 ranks, which are not the 3 ranks"),
        ("3+", "not a whole number"),
        ("0+3", "below"),
    ):
        monkeypatch.setenv("VIRTUAL_NODES", wrong)
        with pytest.raises(ConfigurationError, match=f"VIRTUAL_NODES.*{said}"):
            placement.job_topology(0, 3, list("aaa"))


def test_hosts_in_turn_are_refused():
    with pytest.raises(ConfigurationError, match=r"consecutive ranks.*block distribution"):
        placement.job_topology(0, 4, list("abab"))


def _everything(hosts: str, seed: int) -> tuple[int, int]:
    import os

    name = hosts[int(os.environ["RANK"])]
    placement.host_identity = lambda: name
    tsn.init()
    shape = dict(num_experts=6, max_tokens=20, hidden=64, top_k=3)
    rounds(seed, shape, dict(mode="latency"), dict(), ("random", "masked"))
    rounds(seed, shape, dict(alignment=2), dict(again=True), ("random",))
    x, reduce = tsn.zeros(1024, torch.float32), AllReduce(threads=64, blocks=2)
    x.fill_(tsn.rank() + 1)
    reduce(x)
    assert x.tolist() == [tsn.size() * (tsn.size() + 1) / 2] * 1024
    found = tsn.world().topology.node_size, tsn.world().topology.nodes
    reduce.free()
    tsn.finalize()
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("hosts, sizes", [("aab", (1, 3)), ("aaaabb", (2, 3))])
def test_layers_and_collectives(hosts, sizes):
    env = {"TSN_FABRIC_INTERFACE": "lo"}  # the only one that these hosts, which are one, have in common
    seed = random.randrange(1 << 20)
    outcomes = ranks.launch(len(hosts), _everything, hosts, seed, init=False, env=env, timeout=280)
    assert [o.value if o.ok else o.error for o in outcomes] == [sizes] * len(hosts)
