"""The allocator under random use, and the heap after a loss."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilescale_net as tsn
from tests import ranks
from tilescale_net.errors import HeapError
from tilescale_net.kernels.all_reduce import AllReduce
from tilescale_net.kernels.moe import AllToAll, Arena
from tilescale_net.runtime.heap import ALIGNMENT, GAP, Allocator

END = 1 << 16


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9000)), max_size=80))
def test_blocks_never_overlap_and_all_memory_returns(actions):
    heap = Allocator(0, END)
    live: dict[int, int] = {}
    for allocate, n in actions:
        if allocate:
            offset = heap.allocate(n)
            if offset is None:
                assert heap.largest_hole < (n + GAP + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
                continue
            assert offset % ALIGNMENT == 0 and 0 <= offset and offset + n + GAP <= END
            for other, size in live.items():
                assert offset + n + GAP <= other or other + size + GAP <= offset
            live[offset] = n
        elif live:
            offset = sorted(live)[n % len(live)]
            del live[offset]
            heap.release(offset)
    for offset in list(live):
        heap.release(offset)
    assert heap.allocate(END - GAP) == 0, "freed neighbours must become one hole"


@ranks.on()
def test_tensors_that_shrink_restored_can_be_freed():
    a, before = tsn.empty(16, torch.float32), tsn.empty(16, torch.float32)
    tsn.free(before)
    heap = tsn.world().heap
    live = heap.live
    tsn.free(a)
    heap.restore(live)  # as shrink does where a loss came before the others had freed it
    tsn.free(a)

    after = [tsn.empty(16, torch.float32) for _ in range(2)]  # where both were
    assert {t.data_ptr() for t in after} == {a.data_ptr(), before.data_ptr()}
    for freed in (a, before):
        with pytest.raises(HeapError, match="freed already"):
            tsn.free(freed)
    for live in after:
        tsn.free(live)


class _Elsewhere(Exception):
    """Ends what rank 1 makes."""


def _end_at(world, count: int) -> None:
    """Let rank 1 meet an exception where its heap has given away block `count`."""

    def on_allocate(*args):
        nonlocal count
        earlier(*args)
        count -= 1
        if count == 0:
            raise _Elsewhere

    earlier, world.memory.on_allocate = world.memory.on_allocate, on_allocate


def _compile(op, everything: bool) -> None:
    """Rank 1 meets an exception where ranks compile, and then meet."""
    if op.rank == 1:
        raise _Elsewhere
    op.world.control.gather("AllToAll: kernels compiled", "")


@ranks.on(TSN_DEVICE="simulator")
def test_ranks_that_do_not_agree_keep_nothing():
    """Rank 1 leaves a construction by an exception, and meets rank 0 in another call."""
    world, found = tsn.world(), []
    kept, gives, AllToAll._compile = tsn.zeros(3), world.memory.on_allocate, _compile
    tsn.free(kept)
    for make, count in (
        (lambda: tsn.zeros(100), 1),
        (lambda: AllReduce(threads=64, blocks=2), 4),
        (lambda: Arena(1000), 2),
        (lambda: AllToAll(4, 4, 64, 2), 3),
        (lambda: AllToAll(4, 4, 64, 2), 0),
    ):
        before = world.heap.live
        if tsn.rank() == 1:
            _end_at(world, count)
            with pytest.raises(_Elsewhere):
                make()
            world.memory.on_allocate = gives
            make = tsn.barrier
        with pytest.raises(tsn.RankMismatch, match="barrier"):
            make()
        assert world.heap.live == before
    assert world.heap.offset_of(tsn.zeros(3)) == kept.data_ptr() - world.heap.base


@ranks.fails("RankMismatch", "initialised at heap offset")
def test_heaps_that_differ_are_noticed():
    if tsn.rank() == 0:
        tsn.world().heap._allocator.allocate(1)
    tsn.zeros(4)
