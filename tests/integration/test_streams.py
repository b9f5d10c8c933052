"""Streams with credits and puts from shared memory, on one node and on two that only talk through the fabric."""

import pytest

from tests import ranks
from tests.integration.pool import pool_fixture
from tests.integration.streams import put_tiles, stream

near = pool_fixture(2)
far = pool_fixture(2, env={"VIRTUAL_NODES": "2", "TSN_CHAOS": "on"})


@pytest.mark.parametrize("scope, slots", [("block", 1), ("block", 3), ("warp", 2)])
def test_streams(near, scope, slots):
    for seed in range(3):
        assert near(stream, scope, slots, 2, 7, seed) == [0, 0], seed


def test_streams_between_nodes(far):
    assert far(stream, "block", 3, 2, 9, 1) == [0, 0]
    assert far(stream, "warp", 2, 2, 9, 2) == [0, 0]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_tiles(near, dtype):
    near(put_tiles, dtype, 5, 12)


def test_tiles_do_not_travel():
    """Both ranks put; whichever is second to fail may hear of the first one before it gets that far."""
    errors = [r.error for r in ranks.launch(2, put_tiles, "float32", 5, 1, env={"VIRTUAL_NODES": "2"})]
    assert "KernelError" in [kind for kind, _, _ in errors], errors
    assert all("put in block 0 towards PE" in text and "failed: not direct" in text for _, text, _ in errors), errors
