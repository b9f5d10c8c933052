"""Symmetric memory of an AllToAll: how much, whose, and that outputs are the same on all ranks."""

import gc
import weakref

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe.support import check_compiled_ahead, without_kernels
from tests.kernels.moe.test_misuse import SHAPE, raises
from tests.variants import variants
from tilescale_net import ops
from tilescale_net.kernels.all_gather import AllGather
from tilescale_net.kernels.moe import AllToAll, Tuning
from tilescale_net.runtime import worlds
from tilescale_net.runtime.context import SYSTEM_BYTES

FP8 = torch.float8_e4m3fn
MIB = 1 << 20
CONFIGURATIONS = [
    dict(),
    dict(layout="rank", quantize_combine="always"),
    dict(dtype=FP8, zero_copy=False, alignment=16),
    dict(mode="latency"),
    dict(mode="latency", dtype=FP8, quantize_combine="always"),
]


def _live() -> int:
    return sum(tsn.world().heap._allocator.live.values())


@variants(1, "nodes", [1, 2])
@ranks.on(heap="16M", TSN_HEAP_LIMIT="0")
def test_heap_bytes(nodes):
    for options in CONFIGURATIONS:
        before = _live()
        with without_kernels():
            made = AllToAll(**SHAPE, **options)
        assert _live() - before == AllToAll.heap_bytes(**SHAPE, **options), options
        made.free()
        assert _live() == before
    # An object that does not fit takes nothing, and says what would be enough.
    with raises(tsn.HeapError, "TSN_HEAP_SIZE=") as caught:
        AllToAll(**dict(SHAPE, hidden=1 << 16, max_tokens=64))
    assert _live() == before
    enough = AllToAll.heap_bytes(**dict(SHAPE, hidden=1 << 16, max_tokens=64)) + SYSTEM_BYTES
    assert f"TSN_HEAP_SIZE={-(-enough // (2 * MIB)) * 2 * MIB} " in str(caught.value)


def test_heap_bytes_before_init():
    sizes = dict(num_experts=256, max_tokens=4096, hidden=7168, top_k=8)
    row = 7168 * 2
    more = AllToAll.heap_bytes(**sizes, ranks=4) - AllToAll.heap_bytes(**sizes, ranks=4, capacity=32768)
    assert more == (4 * 4096 * 8 - 32768) * row
    assert AllToAll.heap_bytes(**sizes, ranks=4, nodes=2) > AllToAll.heap_bytes(**sizes, ranks=4)
    assert AllToAll.heap_bytes(**dict(sizes, max_tokens=1 << 60), ranks=4) > 1 << 60
    assert AllToAll.heap_bytes(**sizes, ranks=4, nodes=(2, 2)) == AllToAll.heap_bytes(**sizes, ranks=4, nodes=2)
    assert AllToAll.heap_bytes(**sizes, ranks=4, nodes=(1, 3)) > AllToAll.heap_bytes(**sizes, ranks=4, nodes=2)
    for wrong in (
        dict(ranks=0), dict(ranks="4"), dict(ranks=4, nodes=0), dict(ranks=4, nodes=5), dict(ranks=4, nodes=(1, 2))
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"AllToAll: {list(wrong)[-1]} is"):
            AllToAll.heap_bytes(**sizes, **wrong)


@pytest.mark.parametrize(
    "options", [{}, dict(layout="rank"), dict(layout="rank", quantize_combine="always"), dict(dtype=FP8)]
)
def test_memory_does_not_grow_with_ranks(options):
    """With capacity; but for some words per rank and token, which tell where rows go."""
    sizes = dict(num_experts=256, max_tokens=4096, hidden=7168, top_k=8, capacity=5 * 4096 * 8 // 4, **options)
    sizes["tuning"] = Tuning(once_per_node=False)
    output = sizes["capacity"] * 7168 * options.get("dtype", torch.bfloat16).itemsize
    beyond = {n: AllToAll.heap_bytes(**sizes, ranks=n, nodes=n // 8) - output for n in (16, 32, 64)}
    assert beyond[64] < 1.5 * 1024 * MIB
    words = 24 + 1  # of a record, and a signal for four tokens and each call
    assert beyond[64] - beyond[32] < 2 * 32 * 4096 * words * 4
    assert AllToAll.heap_bytes(**sizes, ranks=64) < beyond[64] + output


def test_memory_of_forwarders():
    """Rows that cross once per node: forwarders have room for one row of a token of each rank that they serve."""
    sizes = dict(num_experts=256, max_tokens=4096, hidden=7168, top_k=8, capacity=5 * 4096 * 8 // 4)
    rows = 4096 * 7168 * 2
    beyond = {n: AllToAll.heap_bytes(**sizes, ranks=8 * n, nodes=n) - sizes["capacity"] * 7168 * 2 for n in (2, 4, 8)}
    for nodes, found in beyond.items():
        kept = sizes["capacity"] / 4096 + 8  # for forwarders here; what comes back, from as many as a token can choose
        assert 0 < found - (kept + nodes - 1) * rows < 0.02 * 1024 * MIB * nodes, (nodes, found)
    assert beyond[8] < 1.5 * 1024 * MIB
    assert abs(beyond[8] / 1024 / MIB - 1.41) < 0.01  # as CHANGELOG.md and docs/cluster.md say


@pytest.mark.parametrize(
    ("gib", "ranks_", "capacity", "options"),
    [
        (1.74, 64, 65536, {}),
        (2.62, 64, 131072, {}),
        (1.90, 128, 40960, {}),
        (1.96, 64, 40960, dict(layout="rank", zero_copy=False)),
        (1.36, 64, 65536, dict(tuning=Tuning(once_per_node=False))),
        (2.23, 64, 131072, dict(tuning=Tuning(once_per_node=False))),
        (8.55, 64, None, dict(layout="rank", top_k=64)),
    ],
)
def test_memory_beyond_the_output(gib, ranks_, capacity, options):
    """As docs/cluster.md says."""
    sizes = dict(num_experts=256, max_tokens=4096, hidden=7168, top_k=8) | options
    output = 2 * 7168 * capacity if capacity and options.get("zero_copy", True) else 0
    found = AllToAll.heap_bytes(**sizes, capacity=capacity, ranks=ranks_, nodes=ranks_ // 8) - output
    assert abs(found / 1024 / MIB - gib) < 0.01


@pytest.mark.sample(0)
@ranks.on(heap="16M", TSN_HEAP_LIMIT="0", timeout=200)
def test_a_heap_that_grows():
    """An object that the heap has no room for brings another, and takes it away."""
    filler = tsn.empty((tsn.world().heap.size - SYSTEM_BYTES - 4096,), torch.uint8)
    with raises(tsn.HeapError, "TSN_HEAP_SIZE="):
        AllToAll(**SHAPE)
    with raises(tsn.RankMismatch, "top_k=1"):
        AllToAll(**dict(SHAPE, top_k=1 + tsn.rank()), grow=True)
    with raises(ValueError, "blocks is 1000"):
        AllToAll(**SHAPE, grow=True, tuning=Tuning(blocks=1000))
    assert worlds.alive() == [tsn.world()]
    x = torch.ones((3, SHAPE["hidden"]), dtype=torch.bfloat16, device=tsn.device())
    idx = torch.tensor([[0, 1], [2, 3], [1, 2]], device=tsn.device())
    for _ in range(2):
        op = AllToAll(**SHAPE, grow=True)
        assert op.world is not tsn.world() and tsn.world(op.world) is op.world
        received = op.dispatch(x, idx)
        assert torch.equal(op.combine(received.x, received.handle), 2 * x)
        made = op.world
        op.free()
        assert made.closed and worlds.alive() == [tsn.world()]
    layer = ops.moe_layer(**SHAPE, grow=True)
    weights = torch.ones((3, 2), device=tsn.device())
    received = ops.moe_dispatch(layer, x, idx, weights)
    assert layer.world is not tsn.world() and torch.equal(ops.moe_combine(layer, received.x, received), 2 * x)
    layer.free()
    tsn.free(filler)
    with without_kernels():
        op = AllToAll(**SHAPE, grow=True)
    assert op.world is tsn.world()
    op.free()


@pytest.mark.sample(0)
@ranks.on(timeout=240)
def test_outputs():
    """Ranks give different outputs: noticed in every call, also where both were used before."""
    with torch.inference_mode():  # as servers do; the objects are used outside
        op = AllToAll(**SHAPE)
        first, second = op.empty_output(), op.empty_output()
    device, rank = tsn.device(), tsn.rank()
    x = torch.ones((3, 32), dtype=torch.bfloat16, device=device)
    idx = torch.tensor([[0, 1], [2, 3], [1, 2]], device=device)
    for out in (first, second, None):
        received = op.dispatch(x, idx, out=out)
        assert out is None or received.x is out
        assert torch.equal(op.combine(received.x, received.handle, weighted=False), 2 * x)
    for mine, theirs in ((first, second), (second, None), (None, first)):
        for known in (False, True):
            received = op.dispatch(x, idx)
            with raises(ValueError, f"rank {1 - rank} passed another out"):
                chosen = dict(out=mine if rank == 0 else theirs)
                op.dispatch(x, handle=received.handle, **chosen) if known else op.dispatch(x, idx, **chosen)
                op.check()
            received = op.dispatch(x, idx, out=first)
            assert torch.equal(op.combine(received.x, received.handle, weighted=False), 2 * x)
    # Micro-batches may begin at any token, whatever the number of choices.
    odd = AllToAll(6, 5, 32, 3)  # as test_states.py has it, which saves compiling
    idx = torch.tensor([[3, 3, 3], [0, 1, 2], [1, 2, 3]], device=device)
    weights = torch.ones((3, 3), device=device)
    for kind in (torch.int64, torch.int32):
        received = odd.dispatch(x[1:], idx.to(kind)[1:], weights[1:])
        assert torch.equal(odd.combine(received.x, received.handle), 3 * x[1:])
    with torch.inference_mode():
        received = odd.dispatch(x, idx, weights)
    odd.set_active([True, True])
    assert torch.equal(odd.combine(received.x, received.handle), 3 * x)
    _ordinary_outputs(x, idx, weights)
    assert check_compiled_ahead(op) and check_compiled_ahead(odd)
    first.fill_(0)
    op.active.fill_(1)


def _ordinary_outputs(x, idx, weights) -> None:
    """Outputs in the memory of the caller, or new ones: later calls do not touch them. The kernels are those of test_states.py."""
    for layout, often in (("expert", 3), ("rank", 0)):
        op = AllToAll(6, 5, 32, 3, layout=layout, zero_copy=False)
        own = op.empty_output()
        first = op.dispatch(x, idx, weights, out=own)
        second = op.dispatch_recv(op.dispatch_send(2 * x, idx, weights))
        third = op.dispatch(3 * x, handle=first.handle)
        assert first.x is own and len({t.x.data_ptr() for t in (first, second, third)}) == 3
        for factor, received in enumerate((first, second, third), 1):
            sums = op.combine(received.x, received.handle, weighted=False)
            hosts = (
                often
                if layout == "expert"
                else (idx.div(3, rounding_mode="floor")).sort(1)[0].diff().ne(0).sum(1, True) + 1
            )
            assert torch.equal(sums, factor * x * hosts), (layout, factor)
        with raises(ValueError, "x has 6 tokens" if tsn.rank() else "rank 1"):
            op.dispatch(x if tsn.rank() == 0 else torch.cat([x, x]), idx)
            op.check()
        assert check_compiled_ahead(op)
        op.free()


def _kept() -> tuple[int, ...]:
    """Resources that freed objects must not keep: mappings of this process, and entries of the world."""
    world = tsn.world()
    alive = sum(not tensor.expired() for tensor in world.heap._freed)
    mappings = sum(1 for _ in open("/proc/self/maps"))
    return mappings, len(world.calls._tracks), len(world.heap.live), alive, len(world.records._unused)


@variants(1, "nodes", [1, 2])
@ranks.on(timeout=200)
def test_objects_that_are_freed_leave_nothing(nodes):
    """The last of many costs what the first did."""
    x = torch.ones((3, SHAPE["hidden"]), dtype=torch.bfloat16, device=tsn.device())
    idx = torch.tensor([[0, 1], [2, 3], [1, 2]], device=tsn.device())
    gathered = tsn.empty((tsn.size(), 4), torch.float32)

    def use(number: int) -> list[weakref.ref]:
        op = AllToAll(**SHAPE, mode=("throughput", "latency")[number % 2])
        received = op.dispatch(x, idx)
        assert torch.equal(op.combine(received.x, received.handle), 2 * x)
        gather = AllGather(threads=64, blocks=2)
        gather(gathered, gathered[tsn.rank()])
        gather.free()
        op.free()
        return [weakref.ref(op), weakref.ref(gather)]

    for number in range(4):
        use(number)
    gc.collect()
    before = _kept()
    gc.disable()  # objects that are freed need no collection of cycles
    made = [died for number in range(50) for died in use(number)]
    gc.enable()
    assert not any(died() for died in made)
    assert len(tsn.world().heap._freed) <= 32
    after = _kept()
    # A hundred objects: each would leave one mapping or more.
    assert after[1:] == before[1:] and after[0] <= before[0] + 10, (before, after)
