"""Several objects in one arena, of which one runs at a time: every result is right, whoever runs after whom."""

import random
from unittest import mock

import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe.support import make_inputs, run_round, without_kernels
from tests.kernels.moe.test_misuse import SHAPE, raises
from tests.variants import nightly, variants
from tilescale_net.kernels.moe import AllToAll, Arena
from tilescale_net.runtime.context import SYSTEM_BYTES
from tilescale_net.runtime.launch_args import StreamOrder

OPTIONS = [dict(), dict(mode="latency"), dict(alignment=2)]  # as test_misuse.py has them, which saves compiling


def _by_turns(seed: int, turns: int, halves: bool) -> None:
    others = dict(tsn.world().heap._allocator.live)
    arena = Arena(max(AllToAll.arena_bytes(**SHAPE, **options) for options in OPTIONS))
    before = sum(tsn.world().heap._allocator.live.values())
    made = []
    for options in OPTIONS:
        made.append(AllToAll(**SHAPE, **options, arena=arena))
        now = sum(tsn.world().heap._allocator.live.values())
        assert now - before == AllToAll.heap_bytes(**SHAPE, **options, in_arena=True), options
        before = now
    shared, pace = random.Random(seed), random.Random(f"{seed} {tsn.rank()}")
    for turn in range(turns):
        op = shared.choice(made)
        everyone = [make_inputs((seed, turn, r), op.config, shared.randrange(5), "random") for r in range(tsn.size())]
        run_round(op, everyone, pace, f"seed {seed}, turn {turn}, {op.config.mode}", halves=halves and turn % 3 == 0)
    first, second, _ = made
    everyone = [make_inputs((seed, r), first.config, 3, "random") for r in range(tsn.size())]
    mine = [t.to(tsn.device()) for t in (everyone[tsn.rank()].x, everyone[tsn.rank()].topk_idx)]
    pending = first.dispatch_send(*mine)
    with raises(ValueError, "has sent a dispatch that is not received"):
        second.dispatch(*mine)
    # A half that another stream receives reads memory that the next call of another object writes.
    with mock.patch.object(StreamOrder, "follow", autospec=True) as follow:
        first.dispatch_recv(pending)
    assert [call.args[0] for call in follow.call_args_list] == [arena.order]
    run_round(second, everyone, pace, "after a half")
    with raises(tsn.TileScaleError, "still is in this arena"):
        arena.free()
    for op in made:
        op.free()
    arena.free()
    left = {at: n for at, n in tsn.world().heap._allocator.live.items() if others.get(at) != n}
    assert not any(n > SYSTEM_BYTES for n in left.values())
    _wrongly()


@variants(0, "nodes, races", [(1, 0), *(nightly(n, 1) for n in (1, 2))])
@ranks.on()
def test_objects_by_turns(nodes, races, seed):
    _by_turns(seed, 10, not races)


def _wrongly() -> None:
    arena = Arena(AllToAll.arena_bytes(**SHAPE))
    live = sum(tsn.world().heap._allocator.live.values())
    with raises(tsn.HeapError, "bytes of the arena"):
        AllToAll(**dict(SHAPE, hidden=1024), arena=arena)
    with raises(ValueError, "neither grow nor another group"):
        AllToAll(**SHAPE, arena=arena, grow=True)
    with raises(ValueError, "nbytes is True"):
        Arena(True)
    with raises(tsn.RankMismatch, "arena=None"), without_kernels():
        AllToAll(**SHAPE, arena=arena if tsn.rank() else None)
    assert sum(tsn.world().heap._allocator.live.values()) == live
    with torch.inference_mode(), without_kernels():
        AllToAll(**SHAPE, arena=arena).free()
    arena.free()
    with raises(tsn.HeapError, "has been freed"):
        AllToAll(**SHAPE, arena=arena)


def test_most_of_an_object_lies_in_the_arena():
    sizes = dict(num_experts=256, max_tokens=4096, hidden=7168, top_k=8, capacity=40960, ranks=64)
    for nodes in (1, 8):
        own = AllToAll.heap_bytes(**sizes, nodes=nodes, in_arena=True)
        shared = AllToAll.arena_bytes(**sizes, nodes=nodes)
        assert own < 4 << 20 and own + shared == AllToAll.heap_bytes(**sizes, nodes=nodes)
