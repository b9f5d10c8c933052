"""A rank dies, the others go on without it, and a process that is new to the job takes its place in a world of its own."""

import os
import random
import signal

import pytest
import torch
import torch.distributed as dist

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe.support import make_inputs, run_round
from tests.variants import variants
from tilescale_net import ops
from tilescale_net.kernels.moe import AllToAll

# Shares its kernels with tests/kernels/moe/test_failures.py.
SHAPE = dict(num_experts=6, max_tokens=5, hidden=32, top_k=3)
RANKS, LOST = 3, 1


def _use(layer: AllToAll, seed: int, group, active=None) -> None:
    everyone = [make_inputs((seed, r), layer.config, 5 - r, "random") for r in range(RANKS)]
    run_round(layer, everyone, random.Random(f"{seed} {tsn.rank()}"), f"seed {seed}", active=active)
    if active is None:
        mine = torch.tensor([tsn.rank()] * 4, dtype=torch.int32, device=tsn.device())
        wanted = torch.arange(RANKS, dtype=torch.int32).repeat_interleave(4)
        assert torch.equal(ops.all_gather(mine, group=group).cpu(), wanted)


def _life(process: int, port: int, seed: int) -> tuple[int, ...]:
    """The program of processes 0 to 2, and of process 3, which replaces the lost one under its number."""
    assert not dist.is_initialized()
    store, mine = (dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False) for _ in range(2))
    rank = LOST if process == RANKS else process
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
    if process < RANKS:
        first = tsn.init("8M", group=tsn.StoreGroup(dist.PrefixStore("first", store), rank, RANKS))
        layer = AllToAll(**SHAPE, mode="latency")
        _use(layer, seed, first)
        if process == LOST:  # when the others have all that it had to send
            mine.wait([f"used/{r}" for r in range(RANKS) if r != LOST])
            os.kill(os.getpid(), signal.SIGKILL)
        mine.set(f"used/{process}", "1")
        with pytest.raises(tsn.PeerLost):
            tsn.barrier()
        assert tsn.shrink().ranks == [r for r in range(RANKS) if r != LOST]
        layer.set_active()
        _use(layer, seed + 1, first, [r != LOST for r in range(RANKS)])  # without, until a replacement has come
        mine.set(f"ready/{process}", "1")
    mine.wait([f"ready/{r}" for r in range(RANKS) if r != LOST])
    group = tsn.StoreGroup(dist.PrefixStore("second", store), rank, RANKS)
    second = tsn.init("8M", group=group)
    if process < RANKS:
        assert tsn.world(first) is first and tsn.world(group) is second
        layer.free()
        tsn.finalize(first)
    assert tsn.world() is second and second.rank == rank
    again = AllToAll(**SHAPE, mode="latency")
    for turn in range(2):
        _use(again, seed + 2 + turn, (group, second)[turn])
    kept = tsn.zeros((7,)).fill_(rank)
    offsets = second.control.gather("offsets", second.heap.offset_of(kept))
    assert len(set(offsets)) == 1
    again.free()
    tsn.finalize()
    return tuple(second.job_ranks)


def _start(port: int, seed: int) -> tuple[int, ...]:
    return _life(int(os.environ["RANK"]), port, seed)


@variants(1, "nodes", [1, 3])
def test_a_new_process_takes_the_place_of_a_dead_one(nodes):
    """With nodes of one rank each, and on one node."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    env = {"VIRTUAL_NODES": str(nodes), "TSN_TIMEOUT": "30"}
    outcomes = ranks.launch(RANKS + 1, _start, store.port, random.randrange(1 << 20), env=env, init=False, timeout=120)
    assert outcomes[LOST].exitcode == -signal.SIGKILL
    for o in outcomes:
        assert o.rank == LOST or o.ok and o.value == (0, 1, 2), o.error


def _wrong(port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    for arguments, error in (
        (("a store", 0, 1), TypeError), ((store, 2, 2), ValueError), ((store, -1, 2), ValueError), ((store, 0, 0), ValueError),
        ((store, True, 2), TypeError), ((store, 0, 2, 2), ValueError), ((store, 0, 2.0), TypeError),
    ):  # fmt: skip
        with pytest.raises(error, match="StoreGroup"):
            tsn.StoreGroup(*arguments)
    alone = tsn.StoreGroup(dist.PrefixStore("alone", store), 0, 1)
    with pytest.raises(tsn.TileScaleError, match="not initialised"):
        tsn.world(alone)
    for _ in range(2):  # after finalize it may be met again
        world = tsn.init("4M", group=alone)
        assert tsn.world(alone.group_name) is world and tsn.size(alone) == 1
        with pytest.raises(tsn.TileScaleError, match="initialised already"):
            tsn.init(group=alone)
        tsn.finalize(alone)
    os.environ["TSN_TIMEOUT"] = "1"
    with pytest.raises(tsn.PeerLost, match="rank 1 \\(has not called tilescale_net.init\\)"):
        tsn.init(group=tsn.StoreGroup(dist.PrefixStore("nobody comes", store), 0, 2))


def test_misuse():
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ranks.run(1, _wrong, store.port, init=False)
