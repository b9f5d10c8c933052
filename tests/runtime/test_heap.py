"""The allocator under random use, and the heap after a loss."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilescale_net as tsn
from tests import ranks
from tilescale_net.errors import HeapError
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


def _free_anew():
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


def test_what_shrink_has_restored_can_be_freed():
    ranks.run(2, _free_anew)
