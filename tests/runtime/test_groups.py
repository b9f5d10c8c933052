"""Worlds of groups: any ranks of a job, several in one process, one that fails or ends while others go on."""

import datetime
import inspect
import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe.support import make_inputs, run_round
from tests.kernels.moe.test_rounds import CASES
from tests.variants import variants
from tilescale_net.kernels import moe
from tilescale_net.kernels.all_gather import AllGather, all_gather
from tilescale_net.kernels.all_to_all import AllToAll
from tilescale_net.kernels.reduce_scatter import ReduceScatter
from tilescale_net.runtime import groups
from tilescale_net.runtime.simulator import SimulatorMemory

QUICK = {"TSN_TIMEOUT": "20", "TSN_HEARTBEAT_TIMEOUT": "5"}


def _join() -> int:
    """A program of torch.distributed without this package; the rank in the job."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    return dist.get_rank()


def in_order(members: list[int]):
    """A group whose ranks lie as listed, which torch sorts by default; older ones always sort."""
    unsorted = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
    return dist.new_group(list(members), **unsorted)


def gather(world, op: AllGather, turn: int = 0) -> None:
    """Every member gives its rank in the job."""
    out = tsn.zeros((world.size, 8), torch.int32, group=world)
    x = tsn.empty(8, torch.int32, group=world)
    with torch.inference_mode(False):
        x.fill_(100 * turn + world.job_ranks[world.rank])
    op(out, x)
    world.synchronize()
    assert out[:, 3].tolist() == [100 * turn + member for member in world.job_ranks]
    tsn.free(x)
    tsn.free(out)


def route(world, seed: int, case: str = "latency, fp8 with scales") -> None:
    """A round of dispatch and combine on two ranks whose every bit is checked; test_rounds.py has the same kernels."""
    size, shape, options, how = CASES[case]
    assert world.size == size
    op = moe.AllToAll(**shape, **options, group=world)
    everyone = [make_inputs((seed, *world.job_ranks, r), op.config, 3 + r, "random") for r in range(size)]
    run_round(op, everyone, random.Random(seed), f"{case}, ranks {world.job_ranks}", **how)
    op.free()


def _launch_of(op: AllGather, world) -> tuple:
    """The kernel of an all-gather and its arguments."""
    kernel = all_gather(op.n_pes, in_place=False, **op._options)
    flat = [tsn.zeros((world.size, 32), torch.uint8, group=world), tsn.zeros(32, torch.uint8, group=world)]
    return kernel, [*flat, 0, op._agreement.status, op._calls, op._ready, op._arrived]


@ranks.on(4, init=False, timeout=240)
def test_worlds_that_overlap(seed):
    me = _join()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(tsn.ConfigurationError, match=r"2 dimensions is no group; give one of its dimensions dp, tp"):
        tsn.init(group=mesh)
    for wrong, words in ((7, "is a int; give a ProcessGroup"), ("nonesuch", "has the name 'nonesuch'")):
        with pytest.raises(tsn.ConfigurationError, match=words):
            tsn.init(group=wrong)
    others = [dist.new_group(members) for members in ([0, 1], [2, 3])][1 - me // 2]
    with pytest.raises(tsn.ConfigurationError, match="not in the group"):
        tsn.init(group=others)
    tp = tsn.init("16M", group=mesh["tp"])
    dp = tsn.init("12M", group=mesh.get_group("dp").group_name)
    assert tsn.world(mesh["dp"]) is dp and tsn.world(mesh.get_group("tp")) is tp and tsn.size(dp) == 2
    assert tp.job_ranks == (me // 2 * 2, me // 2 * 2 + 1) and dp.job_ranks == (me % 2, me % 2 + 2)
    with pytest.raises(tsn.TileScaleError, match=r"in 2 worlds, of ranks .* and of ranks .*; say with group="):
        tsn.zeros(4)

    gathers = {world: AllGather(blocks=2, group=world) for world in (tp, dp)}
    for turn in range(3):
        for world, op in gathers.items():
            gather(world, op, turn)
    with pytest.raises(tsn.HeapError, match="out of shape .* is not in the symmetric heap"):
        gathers[tp](tsn.zeros((2, 1 << 18), group=dp), torch.zeros(1 << 18))
    kernel, arguments = _launch_of(gathers[tp], tp)
    arguments[0] = tsn.zeros(arguments[0].shape, torch.uint8, group=dp)
    with pytest.raises(
        tsn.KernelError, match="kernel all_gather: its tensors are in the symmetric heaps of two worlds"
    ):
        kernel(*arguments)
    ordinary = [torch.zeros_like(a) if isinstance(a, torch.Tensor) else a for a in arguments]
    with pytest.raises(tsn.KernelError, match="kernel all_gather: this process is in 2 worlds"):
        kernel(*ordinary)

    everyone = tsn.init("16M")  # the default from here on, beside any others
    assert tsn.world() is everyone is tsn.world(dist.group.WORLD) and tsn.rank() == me
    assert everyone.job_ranks == (0, 1, 2, 3)
    exchange, reduce = AllToAll(blocks=2), ReduceScatter(blocks=2, chunk_bytes=1024, group=dp)
    x, out = tsn.zeros((4, 4), torch.int32), tsn.zeros((4, 4), torch.int32)
    x.copy_(torch.arange(4)[:, None] + 10 * me)
    parts, part = tsn.zeros((2, 64), group=dp), tsn.zeros(64, group=dp)
    parts.fill_(me + 1)
    assert exchange(out, x)[:, 0].tolist() == [10 * r + me for r in range(4)]
    assert reduce(part, parts).tolist() == [sum(r + 1 for r in dp.job_ranks)] * 64
    for world in (dp, tp):
        route(world, seed)

    tsn.finalize(mesh["tp"])
    assert tp.closed and not gathers[tp].alive
    with pytest.raises(tsn.TileScaleError, match="not initialised for the group of ranks"):
        tsn.zeros(4, group=mesh["tp"])
    with pytest.raises(tsn.TileScaleError, match="has ended with finalize"):
        tsn.zeros(4, group=tp)
    gather(dp, gathers[dp], 5)
    assert exchange(out, x)[:, 0].tolist() == [10 * r + me for r in range(4)]
    tp = tsn.init("4M", group=mesh["tp"])
    gather(tp, AllGather(blocks=1, group=tp), 6)
    tsn.finalize()  # all of them
    for world in (tp, dp, everyone):
        assert world.closed
    dist.destroy_process_group()


@ranks.on(3, init=False, timeout=240)
def test_defaults_of_the_user():
    """Torch's defaults, set by the user, change nothing."""
    me = _join()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    with torch.inference_mode():
        world = tsn.init("16M", group=in_order([1, 0, 2]))
        assert tsn.zeros(3).dtype == torch.float32 and world.job_ranks[world.rank] == me
        op = AllGather(blocks=2)
        gather(world, op)
        y = tsn.empty(16)
    torch.set_default_device("cpu")
    y.fill_(1)  # memory made under inference mode is ordinary memory
    tsn.finalize()


def _lose_some(lost: int) -> str:
    """Rank `lost` dies in the midst of its group's work; groups without it go on, also in a process that was with it."""
    me = _join()
    worlds = []
    for members in ([0, 1], [2, 3], [1, 3]):
        group = dist.new_group(members)
        if me in members:
            worlds.append(tsn.init("8M", group=group))
    ops = {world: AllGather(blocks=1, group=world) for world in worlds}
    for world, op in ops.items():
        gather(world, op)
    dist.barrier()
    if me == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    said = []
    for world, op in ops.items():
        if lost in world.job_ranks:
            with pytest.raises(tsn.PeerLost) as caught:
                for _ in range(1000):
                    world.barrier()
                    time.sleep(0.01)
            said.append(str(caught.value))
            with pytest.raises(tsn.PeerLost):
                tsn.finalize(world)
    for turn in range(20):
        for world, op in ops.items():
            if not world.closed:
                gather(world, op, turn)
                time.sleep(0.05)
    begin = time.monotonic()
    tsn.finalize()
    assert time.monotonic() - begin < 10
    return " | ".join(said)


@variants(1, "lost", [0, 2])
def test_failures_stay_within_the_group(lost):
    """Also where the job's store was with the rank that dies."""
    outcomes = ranks.launch(4, _lose_some, lost, env=QUICK, init=False, timeout=120)
    assert outcomes[lost].error[0] == "Died"
    for o in outcomes:
        if o.rank != lost:
            assert o.ok, o.error
    partner = outcomes[lost ^ 1].value
    assert "(process ended without a report) is gone" in partner and "rank 0 " in partner, partner
    assert f"ranks of the group of the job's ranks {min(lost, lost ^ 1)}, {max(lost, lost ^ 1)}" in partner, partner


def _without_room_on_one() -> str:
    """Rank 1 fails at once where heaps are mapped, rank 0 begins later."""
    me = _join()
    whole = SimulatorMemory.map_peer

    def map_peer(self, *args):
        if me == 1:
            raise tsn.HeapError("no room here")
        time.sleep(1)
        return whole(self, *args)

    SimulatorMemory.map_peer = map_peer
    with pytest.raises(tsn.TileScaleError) as caught:
        tsn.init("8M", group=dist.group.WORLD)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_rank_that_cannot_map_keeps_its_heap_until_all_have_tried():
    """Or the others name heaps that are gone, as PeerUnreachable, instead of the reason."""
    said = [
        o.value
        for o in ranks.launch(2, _without_room_on_one, env=QUICK | {"TSN_DEVICE": "simulator"}, init=False, timeout=60)
    ]
    assert "no room here" in said[0] and not said[0].startswith("PeerUnreachable"), said
    assert said[1].startswith("HeapError"), said


def _groups_of(me: int) -> list:
    known = dist.distributed_c10d._world.pg_map
    return [g for g in known if g is not dist.group.WORLD and me in groups.ranks(g)]


@ranks.on(4, VIRTUAL_NODES="2", init=False, timeout=240)
def test_groups_across_nodes(seed):
    me = _join()
    for members in ([0, 2], [1, 3], [0, 1, 2]):
        group = dist.new_group(members)
        if me in members:
            world = tsn.init("12M", group=group)
            assert world.topology.nodes == world.size and world.proxy is not None, world.topology
    mine = [tsn.world(group) for group in _groups_of(me)]
    ops = [AllGather(blocks=2, group=world) for world in mine]
    for turn in range(2):
        for world, op in zip(mine, ops):
            gather(world, op, turn)
    for world in mine:
        if world.size == 2:
            route(world, seed)
    tsn.finalize()


@variants(1, "nodes", [1, 3])
@ranks.on(3, init=False, timeout=240)
def test_walk(nodes, seed):
    """Worlds begin, work, fail to begin twice and end in an order that all ranks draw from one seed."""
    me, rng = _join(), random.Random(seed)
    members = [(0, 1), (1, 2), (2, 0), (0, 1, 2), (2, 1, 0), (1,)]
    made = [in_order(m) for m in members]
    members = [groups.ranks(group) for group in made]
    alive: dict[int, tuple] = {}
    for turn in range(24):
        chosen = rng.randrange(len(members))
        step = rng.choice(["begin", "work", "work", "end", "all end" if turn % 8 == 7 else "begin"])
        if step == "all end":
            tsn.finalize()
            alive.clear()
        if me not in members[chosen]:
            continue
        chosen = members.index(members[chosen])  # where torch has sorted, two of them are one
        if step == "begin" and chosen not in alive:
            world = tsn.init("2M", group=made[chosen])
            assert world.job_ranks == members[chosen]
            alive[chosen] = world, AllGather(blocks=1, group=world)
        elif step == "begin":
            with pytest.raises(tsn.TileScaleError, match="is initialised already"):
                tsn.init(group=made[chosen])
        elif chosen not in alive:
            with pytest.raises(tsn.TileScaleError, match="not initialised"):
                tsn.zeros(4, group=made[chosen])
        elif step == "work":
            gather(*alive[chosen], turn)
        elif step == "end":
            world, op = alive.pop(chosen)
            tsn.finalize(world)
            assert world.closed and not op.alive
    tsn.finalize()
    dist.barrier()  # rank 0 keeps the store, which others may still use to end a group
    dist.destroy_process_group()
