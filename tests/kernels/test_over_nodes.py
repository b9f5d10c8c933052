"""Collectives over nodes of several PEs: what crosses the network, and that it does so once per node."""

import os
import time

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels import test_all_gather, test_all_reduce, test_broadcast, test_reduce_scatter
from tests.kernels.test_reduce_scatter import values
from tests.variants import nightly, variants
from tilescale_net.cli.model import sent
from tilescale_net.kernels.all_gather import AllGather, node_all_gather
from tilescale_net.kernels.all_reduce import AllReduce
from tilescale_net.kernels.broadcast import Broadcast
from tilescale_net.kernels.collective import Nodes
from tilescale_net.kernels.reduce_scatter import ReduceScatter

GEOMETRY, CHAOS = dict(threads=64, blocks=2), "seed=1,reorder=0.5,split=0.3"


@variants(0, "size, nodes, visibility", [(4, 2, "late"), nightly(6, 3, "random")])
@ranks.on(TSN_SIM_RACES="1", TSN_CHAOS=CHAOS, timeout=280)
def test_pieces(size, nodes, visibility, seed):
    """Many pieces a block, in place and not, through few slots; tensors that cannot be summed where they lie as well."""
    gather = [((40_000,), torch.uint8, 0, 4), ((7,), torch.bfloat16, 2, 0), ((9_001,), torch.float32, 0, 0)]
    test_all_gather._gather(seed, gather, dict(**GEOMETRY, chunk_bytes=2048), 3)
    reduce = [((17_000,), torch.bfloat16, 0, 0), ((501,), torch.bfloat16, 2, 0), ((1_000,), torch.int32, 0, 0)]
    options = dict(**GEOMETRY, chunk_bytes=1024, slots=2)
    test_reduce_scatter._reduce(seed, reduce, options, 3)


def test_three_nodes_compile():
    """A remainder of a division that no shift replaces, in a loop: an expression that stands twice and binds a name."""
    node_all_gather(n_pes=6, node_size=2, chunk_bytes=1 << 18, threads=64, blocks=2, in_place=True, least_bytes=1 << 15)


def _bytes_of(call) -> int:
    """Payload that all ranks give to the network in a call."""

    def so_far() -> int:
        tsn.synchronize()
        tsn.barrier()
        return sum(tsn.world().control.gather("bytes", tsn.stats()["bytes_put"]))

    call()  # buffers and kernels are made
    before = so_far()
    call()
    return so_far() - before


@pytest.mark.sample(0)
@ranks.on(4, VIRTUAL_NODES="2", timeout=280)
def test_bytes_on_the_network():
    """Once per node, and once per rank."""
    n, part = tsn.size(), 40_960  # more than the bytes up to which data go once per rank
    x, out = tsn.zeros(part, torch.uint8), tsn.zeros((n, part), torch.uint8)
    parts, total = tsn.zeros((n, part // 2), torch.bfloat16), tsn.zeros(part // 2, torch.bfloat16)
    whole = tsn.zeros(n * part // 2, torch.bfloat16)
    found = {}
    for once in (True, False):
        algorithm = "auto" if once else "push"
        gather, spread = (make(**GEOMETRY, once_per_node=once) for make in (AllGather, Broadcast))
        scatter = ReduceScatter(**GEOMETRY, algorithm=algorithm)
        reduce = AllReduce(**GEOMETRY, once_per_node=once, algorithm="two_shot")
        calls = {
            "all-gather": lambda: gather(out, x),
            "reduce-scatter": lambda: scatter(total, parts),
            "all-reduce": lambda: reduce(whole),
            "broadcast": lambda: spread(out, 1),
        }
        for name, call in calls.items():
            found[name] = (*found.get(name, ()), _bytes_of(call))
        for op in (gather, spread, scatter, reduce):
            op.free()
    everything = n * part  # of all ranks of two nodes of two
    assert found == {
        "all-gather": (everything, 2 * everything),
        "reduce-scatter": (everything, 2 * everything),
        "all-reduce": (2 * everything, 4 * everything),
        "broadcast": (everything, 2 * everything),
    }, found
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        of_rank = [sent(name, everything, 2, 2, way)[1] for way in ("once per node", "once per rank")]
        assert found[name.replace("_", "-")] == (4 * of_rank[0], 4 * of_rank[1])


# Of some PEs: none is named, one alone, more nodes than two, a node that lost a GPU.
UNEVEN = [(5, "2+3"), (3, "2+1"), (6, "1+2+3")]


def test_nodes_of_any_size():
    """In whole numbers, and as kernels compute it."""
    for sizes in [(2, 3), (3, 5), (1, 2, 3), (8, 7, 8), (4, 4), (1,)]:
        of, pes = Nodes(sizes), [(node, i) for node, size in enumerate(sizes) for i in range(size)]
        served = {}
        for pe, (node, i) in enumerate(pes):
            assert (of.node_of(pe), of.index_of(pe), of.first(node), of.size(node)) == (node, i, pe - i, sizes[node])
            assert bool(of.is_last(pe)) == (i == sizes[node] - 1)
            for other in set(range(len(sizes))) - {node}:
                forwarder = of.forwarder(other, i)
                assert pes[forwarder][0] == other and pes[forwarder][1] == i % sizes[other]
                served.setdefault((forwarder, node), []).append(pe)
        assert max(map(len, served.values()), default=1) <= of.turns


@variants(0, "size, nodes", [UNEVEN[0], *(nightly(*row) for row in UNEVEN[1:])])
@ranks.on(TSN_SIM_RACES="1", TSN_CHAOS=CHAOS, timeout=280)
def test_nodes_of_different_sizes(size, nodes, seed):
    geometry = dict(**GEOMETRY, chunk_bytes=2048)
    gather = [((20_000,), torch.uint8, 0, 4), ((7,), torch.bfloat16, 2, 0)]
    test_all_gather._gather(seed, gather, dict(geometry, algorithm="puts"))
    reduce, odd = [((9_000,), torch.bfloat16, 0, 0), ((40,), torch.int32, 0, 0)], [((501,), torch.bfloat16, 2, 0)]
    test_reduce_scatter._reduce(seed, reduce, dict(geometry, slots=2, algorithm="pull"))
    test_reduce_scatter._reduce(seed, odd, dict(geometry, slots=2, algorithm="push"))
    test_reduce_scatter._reduce(seed, odd, geometry)
    sums = [((1000,), torch.bfloat16, 0, 0, True), ((3001,), torch.bfloat16, 0, 0, True)]
    test_all_reduce._reduce(seed, sums, dict(GEOMETRY, staging_bytes=4096))
    test_broadcast._broadcast(seed, 4)


@pytest.mark.sample(0)
@ranks.on(5, VIRTUAL_NODES="3+2")
def test_bytes_of_nodes_of_different_sizes():
    """Once per other node, as between equal ones."""
    n, part = tsn.size(), 40_960
    x, out = tsn.zeros(part, torch.uint8), tsn.zeros((n, part), torch.uint8)
    parts, total = tsn.zeros((n, part // 2), torch.bfloat16), tsn.zeros(part // 2, torch.bfloat16)
    gather, spread, scatter = AllGather(**GEOMETRY), Broadcast(**GEOMETRY), ReduceScatter(**GEOMETRY)
    for call in (lambda: gather(out, x), lambda: scatter(total, parts), lambda: spread(out, 1)):
        assert _bytes_of(call) == n * part


@variants(1, "algorithm", ["push", "pull"])
@ranks.fails("PeerLost", rank=0, timeout=100)
def test_a_lost_peer_is_not_taken_for_one_that_makes_another_call(algorithm):
    """Rank 1 ends during a call of rank 0."""
    n, rank = tsn.size(), tsn.rank()
    x, out = tsn.zeros((n, 8), torch.int32), tsn.zeros(8, torch.int32)
    op = ReduceScatter(threads=32, blocks=1, algorithm=algorithm)
    for _ in range(2):
        op(out, x)
    tsn.synchronize()
    if rank == 1:
        time.sleep(0.3)
        os._exit(7)
    op(out, x)
    op.check()


@pytest.mark.sample(0)
@ranks.on(4, VIRTUAL_NODES="2", timeout=200)
def test_ranks_that_differ_are_named():
    """Rank 3 gives another place: all ranks report it, and nothing moves."""
    rank, n = tsn.rank(), tsn.size()
    xs = [tsn.zeros((n, 8), torch.int32) for _ in range(2)]
    out = tsn.zeros(8, torch.int32)
    op = ReduceScatter(threads=32, blocks=1, chunk_bytes=512)
    for x in xs:
        x.copy_(values((n, 8), torch.int32, "mismatch", rank))
        op(out, x)
    right = out.tolist()
    out.zero_()
    tsn.barrier()
    other = "rank 3" if rank != 3 else "rank [012]"
    with pytest.raises(tsn.RankMismatch, match=rf"(?s)(?=.*rank {rank} was called with)(?=.*{other})"):
        op(out, xs[rank == 3])
    assert any(right) and not out.any()
