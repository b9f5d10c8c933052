"""Ranks that die or fall silent with traffic in flight: the others go on, in the same processes and with the same objects."""

import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import tilescale_net as tsn
from tests import hosts, ranks
from tests.kernels.moe.support import make_inputs, run_round
from tests.kernels.moe.test_rounds import SMALL
from tilescale_net import ops
from tilescale_net.kernels.all_gather import AllGather
from tilescale_net.kernels.moe import AllToAll

RANKS, TURNS = 4, 2
TWO_NODES = {"VIRTUAL_NODES": "2"}
# The kernels are those of test_rounds.py.
OPTIONS = [(dict(alignment=4), dict()), (dict(mode="latency", dtype=torch.float32), dict(halves=True))]


def _traffic(op, inputs, halves: bool) -> None:
    """A call in flight, and one after the other."""
    device = tsn.device()
    arguments = [t.to(device) for t in (inputs.x, inputs.topk_idx, inputs.weights)]
    received = op.dispatch_recv(op.dispatch_send(*arguments)) if halves else op.dispatch(*arguments)
    y = received.x.to(op.config.combine_dtype)
    op.combine_recv(op.combine_send(y, received.handle)) if halves else op.combine(y, received.handle)


def _until_lost(layers, everyone, how: signal.Signals, after: float | None) -> list[int]:
    """Calls until one fails; how far each rank has come."""
    if after is not None:
        threading.Timer(after, os.kill, (os.getpid(), how)).start()
    step = 0
    try:
        while True:
            for op, (_, kind), inputs in zip(layers, OPTIONS, everyone):
                _traffic(op, inputs[tsn.rank()], bool(kind))
                tsn.synchronize()
                step += 1
    except tsn.TileScaleError as err:
        assert isinstance(err, tsn.PeerLost | tsn.WaitTimeout), err
        with pytest.raises(type(err)):  # everything fails until they have agreed
            tsn.barrier()
    done = tsn.shrink(step, timeout=60)  # nobody is late on purpose
    assert max(done.steps) - min(done.steps) <= len(layers) and len(done.steps) == len(done.ranks), done
    return done.ranks


def _lose(seed: int, losses: list[tuple[signal.Signals, int]]) -> None:
    pace, shared = random.Random(f"{seed} {tsn.rank()}"), random.Random(seed)
    layers = [AllToAll(**SMALL, **options) for options, _ in OPTIONS]
    everyone = [[make_inputs((seed, r), op.config, 7, "random") for r in range(RANKS)] for op in layers]
    kept = tsn.zeros((5,)).fill_(tsn.rank())
    active = [True] * RANKS
    for how, gone in losses:
        after: float | None = 0.4 * shared.random()
        while gone in (left := _until_lost(layers, everyone, how, after if tsn.rank() == gone else None)):
            for op in layers:  # a machine so busy that all were late, and nobody is lost
                op.set_active()
        active[gone] = False
        assert left == [r for r in range(RANKS) if active[r]]
        received = None
        for op, (_, kind) in zip(layers, OPTIONS):
            with pytest.raises(tsn.TileScaleError, match="call set_active"):
                op.dispatch(None, None)
            op.set_active()
            assert not op.in_flight and list(op.active_mask) == active
            for turn in range(TURNS):
                inputs = [make_inputs((seed, turn, r), op.config, 5 - r, "random") for r in range(RANKS)]
                received = run_round(op, inputs, pace, f"seed {seed}, turn {turn}", active=active, **kind)
        assert torch.equal(kept.cpu(), torch.full((5,), float(tsn.rank())))
        # What the host does together is done by those that are left.
        new = AllToAll(**SMALL, **OPTIONS[0][0])
        run_round(new, everyone[0], pace, f"seed {seed}, new object", active=active)
        new.free()
        tsn.free(tsn.zeros((100,)))
        tsn.barrier()
        assert received is not None
    with pytest.raises(tsn.TileScaleError, match="works with all of them only"):
        AllGather(threads=32)
    _collectives_among([r for r in range(RANKS) if active[r]])
    for op in layers:
        op.free()
    tsn.free(kept)


def _collectives_among(left: list[int]) -> None:
    """The remaining ranks make a new world beside the one that has lost ranks."""
    group = dist.new_group(left, use_local_synchronization=True)
    world = tsn.init("8M", group=group)
    mine = torch.tensor([float(tsn.rank())] * 3, device=tsn.device())
    wanted = torch.tensor(left, dtype=torch.float32).repeat_interleave(3)
    assert torch.equal(ops.all_gather(mine, group=group).cpu(), wanted)
    tsn.finalize(world)


def _check(losses, **env) -> None:
    seed = random.randrange(1 << 30)
    outcomes = ranks.launch(RANKS, _lose, seed, losses, env={"TSN_TIMEOUT": "8", **env}, timeout=250)
    gone = [rank for _, rank in losses]
    for outcome in outcomes:
        if outcome.rank in gone:  # also one that was only stopped
            assert outcome.exitcode == -signal.SIGKILL, outcome
        else:
            assert outcome.ok, (seed, outcome.error)


@pytest.mark.sample(0)
def test_two_ranks_are_lost():
    """One dies, then another is stopped."""
    _check([(signal.SIGKILL, 2), (signal.SIGSTOP, 1)])


@pytest.mark.sample(0)
def test_a_node_is_lost_rank_by_rank():
    """One of its two ranks, which is a forwarder of the other node's, then the last one."""
    _check([(signal.SIGKILL, 2), (signal.SIGSTOP, 3)], **TWO_NODES)


def _on_hosts(seed: int, begun: str) -> None:
    """The last of three hosts, with one rank each, is lost; it cannot say so, and nobody sees its processes."""
    pace, rank = random.Random(f"{seed} {tsn.rank()}"), tsn.rank()
    op = AllToAll(num_experts=6, max_tokens=5, hidden=32, top_k=3, mode="latency")
    assert tsn.world().topology.nodes == 3 and not tsn.world().topology.single_host
    everyone = [make_inputs((seed, r), op.config, 5 - r, "random") for r in range(3)]
    with pytest.raises((tsn.PeerLost, tsn.WaitTimeout, tsn.FabricError)):
        while True:
            _traffic(op, everyone[rank], False)
            tsn.synchronize()
            open(f"{begun}.{rank}", "a").close()
    if rank == 2:
        os._exit(5)
    assert tsn.shrink(timeout=60).ranks == [0, 1]
    op.set_active()
    for turn in range(3):
        run_round(op, everyone, pace, f"seed {seed}, turn {turn}", active=[True, True, False])
    tsn.free(tsn.zeros((50 << 20,), torch.uint8))  # the heap grows
    tsn.barrier()
    op.free()


@pytest.mark.nightly
@pytest.mark.skipif(not hosts.possible(), reason="lacks root: hosts are network namespaces")
@pytest.mark.parametrize("fault", ["kill", "cable"])
def test_a_host_is_lost(fault, tmp_path):
    begun = str(tmp_path / "begun")

    def lose(procs) -> None:
        while not all(os.path.exists(f"{begun}.{r}") for r in range(3)) and procs[0].is_alive():
            time.sleep(0.05)
        os.kill(procs[2].pid, signal.SIGKILL) if fault == "kill" else network.pull_cable(2)

    with hosts.Hosts(3) as network:
        env = {"TSN_TIMEOUT": "20", "TSN_HEARTBEAT_TIMEOUT": "8", **network.environment}
        thread = threading.Thread(target=lambda: None)

        def on_start(procs) -> None:
            nonlocal thread
            thread = threading.Thread(target=lose, args=(procs,), daemon=True)
            thread.start()

        seed = random.randrange(1 << 20)
        outcomes = ranks.launch(3, _on_hosts, seed, begun, env=env, heap="8M", timeout=200, on_start=on_start)
        thread.join(60)
    assert outcomes[0].ok and outcomes[1].ok, (seed, outcomes[0].error, outcomes[1].error)
    assert outcomes[2].exitcode == (-signal.SIGKILL if fault == "kill" else 5)


@pytest.mark.nightly
@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("turn", range(20))
def test_ranks_are_lost_at_any_moment(turn, nodes):
    order = random.sample([1, 2, 3], 2)
    _check([(random.choice([signal.SIGKILL, signal.SIGSTOP]), rank) for rank in order], VIRTUAL_NODES=str(nodes))
