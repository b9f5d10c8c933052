"""A heap that is full grows where it is, on all ranks or on none."""

import os
import random
import resource
import signal
import time

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe.support import make_inputs, run_round, without_kernels
from tests.runtime.test_groups import gather
from tests.variants import nightly, variants
from tilescale_net.kernels.all_gather import AllGather
from tilescale_net.kernels.moe import AllToAll
from tilescale_net.runtime import heap

MIB = 1 << 20
# Shares its kernels with tests/kernels/moe/test_failures.py and test_rounds.py.
SHAPE = dict(num_experts=6, max_tokens=5, hidden=32, top_k=3)


@variants(1, "nodes", [1, 3])
@ranks.on(3, heap="4M")
def test_it_grows(nodes, seed):
    heap.STEP = 2 * MIB
    world, rank = tsn.world(), tsn.rank()
    place = world.heap.base, list(world.peer_base), world.context_tensor.data_ptr()
    op, layer = AllGather(blocks=2), AllToAll(**SHAPE, mode="latency")
    everyone = [make_inputs((seed, r), layer.config, 5 - r, "random") for r in range(tsn.size())]
    kept = tsn.empty((1 * MIB,), torch.uint8).fill_(rank + 1)
    pace, sizes = random.Random(seed), [world.heap.size]
    assert sizes == [4 * MIB]
    for turn in range(3):
        more = tsn.zeros((sizes[-1] // 4 + 1000,), torch.float32)  # more than there is
        assert (
            world.control.gather("offset", world.heap.offset_of(more)).count(world.heap.offset_of(more)) == tsn.size()
        )
        assert not more.any()
        more.fill_(turn)
        sizes.append(world.heap.size)
        assert sizes[-1] >= sizes[-2] + min(heap.STEP, more.nbytes)
        assert (world.heap.base, list(world.peer_base), world.context_tensor.data_ptr()) == place
        gather(world, op, turn)  # in memory behind it
        another = AllGather(blocks=2)
        gather(world, another, turn)
        another.free()
        run_round(layer, everyone, pace, f"seed {seed}, turn {turn}")
        assert bool((kept == rank + 1).all()) and bool((more == turn).all())
        tsn.free(more)
    before = world.heap.size
    tsn.free(tsn.zeros((before // 2,), torch.uint8))  # what has grown is used again
    assert world.heap.size == before
    layer.free()
    tsn.barrier()


@pytest.mark.parametrize("nodes", [1, 2])
@ranks.on(heap="8M", TSN_HEAP_LIMIT="256M")
def test_all_ranks_or_none(nodes):
    world, kept = tsn.world(), tsn.zeros((MIB,)).fill_(7.0)
    size = world.heap.size
    if world.device.type == "cuda" and world.topology.nodes > 1:  # a NIC's registrations stay as they are
        assert world.heap.limit == size
        with pytest.raises(tsn.HeapError, match=r"exhausted.*set TSN_HEAP_SIZE=\d+"):
            tsn.empty((20 * MIB,), torch.uint8)
        return
    with pytest.raises(tsn.HeapError, match=r"exhausted.*TSN_HEAP_SIZE=\d+ .*TSN_HEAP_LIMIT=268435456 at most"):
        tsn.empty((300 * MIB,), torch.uint8)
    own = world.memory.grow
    if tsn.rank() == 1:
        world.memory.grow = lambda size: (_ for _ in ()).throw(OSError(12, "Cannot allocate memory"))
    for _ in range(2):
        with pytest.raises(tsn.HeapError, match="because rank 1 has no memory for it.*Cannot allocate.*TSN_HEAP_SIZE"):
            tsn.empty((20 * MIB,), torch.uint8)
        assert world.heap.size == world.memory.size == size
        assert world.device.type == "cuda" or os.fstat(world.memory._fd).st_size == size
    with without_kernels(), pytest.raises(tsn.HeapError, match="rank 1"):
        AllToAll(**dict(SHAPE, hidden=1 << 19))
    world.memory.grow = own
    assert tsn.zeros((20 * MIB,), torch.uint8).sum() == 0 and bool((kept == 7.0).all())
    with without_kernels():  # all of its buffers at once, and nothing where they are too many
        before = world.heap.size
        with pytest.raises(tsn.HeapError, match="TSN_HEAP_SIZE"):
            AllToAll(**dict(SHAPE, hidden=1 << 22))
        assert world.heap.size == before
        layer = AllToAll(**dict(SHAPE, hidden=1 << 20))
        assert world.heap.size > before and layer.world is world
        layer.free()


def _lost_while_it_grows(turn: int) -> None:
    """Rank 2 dies when some have grown and others not; no rank has what was requested, or (turn 1) rank 0 has."""
    world, rank = tsn.world(), tsn.rank()
    kept, size = tsn.zeros((MIB,)).fill_(rank), world.heap.size
    agree = world.heap._agree

    def too_late(call, *arguments, **spoken):
        if arguments[0].startswith("initialised"):
            os.kill(os.getpid(), signal.SIGKILL)
        agree(call, *arguments, **spoken)

    def slow(size: int) -> None:
        while world.control.reason_of() is None:
            time.sleep(0.01)
        raise tsn.PeerLost("in the middle")

    if rank == 2 and turn:
        world.heap._agree = too_late
    elif rank == 2:
        world.memory.grow = lambda size: os.kill(os.getpid(), signal.SIGKILL)
    elif rank == 1 and not turn:
        own, world.memory.grow = world.memory.grow, slow
    with pytest.raises(tsn.PeerLost):
        tsn.empty((20 * MIB,), torch.uint8)
    if rank == 1 and not turn:
        world.memory.grow = own
    assert tsn.shrink().ranks == [0, 1]
    assert (world.heap.size == size) is (turn == 0)
    more = tsn.zeros((30 * MIB,), torch.uint8)
    assert len({*world.control.gather("offsets", world.heap.offset_of(more))}) == 1
    assert bool((kept == rank).all()) and not more.any()
    tsn.free(more)
    tsn.barrier()


@pytest.mark.parametrize("turn, nodes", [(0, 3), nightly(0, 1), (1, 1)])
def test_a_rank_is_lost_while_it_grows(turn, nodes):
    env = {"VIRTUAL_NODES": str(nodes), "TSN_TIMEOUT": "20"}
    outcomes = ranks.launch(3, _lost_while_it_grows, turn, env=env, heap="8M")
    assert outcomes[2].exitcode == -signal.SIGKILL
    assert outcomes[0].ok and outcomes[1].ok, (outcomes[0].error, outcomes[1].error)


@ranks.on(init=False)
def test_a_rank_without_addresses():
    if os.environ["RANK"] == "1":  # which has no addresses for more than its heap
        now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + (8 << 30), resource.RLIM_INFINITY))
    world = tsn.init("8M")
    assert world.heap.limit == world.heap.size
    with pytest.raises(tsn.HeapError, match="TSN_HEAP_SIZE"):
        tsn.empty((20 * MIB,), torch.uint8)
    tsn.finalize()


def _beyond() -> None:
    tsn.world().memory.bytes_tensor(0, tsn.world().heap.size + 4096)[-1] = 1


def test_memory_beyond_the_heap_cannot_be_touched():
    (outcome,) = ranks.launch(1, _beyond, heap="4M")
    if ranks.gpus():
        assert outcome.error[0] == "AcceleratorError", outcome
    else:
        assert outcome.exitcode == -signal.SIGBUS, outcome
