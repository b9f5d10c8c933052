"""Barriers of whole grids: of one PE, of all, of a node; used again and again, and wrongly."""

import pytest

import tilescale_net.runtime.settings as settings
from tests import ranks
from tests.integration.grids import meet_in_grids, misuse
from tests.integration.pool import pool_fixture

one = pool_fixture(1)
two = pool_fixture(2)
nodes = pool_fixture(4, env={"VIRTUAL_NODES": "2", "TSN_CHAOS": "on"})


@pytest.mark.parametrize("blocks", [1, 7])
@pytest.mark.sample(1)
def test_one_pe(one, blocks):
    assert one(meet_in_grids, blocks, 4, "all", [0, 1, 2]) == [0]


@pytest.mark.parametrize("blocks", [1, 5])
def test_two_pes(two, blocks):
    assert two(meet_in_grids, blocks, 4, "all", [0, 1, 2]) == [0, 0]


@pytest.mark.parametrize("scope", ["all", "node"])
def test_nodes(nodes, scope):
    assert nodes(meet_in_grids, 3, 3, scope, [0, 1]) == [0] * 4


@pytest.mark.skipif(settings.device_kind() == "cuda", reason="a GPU does not see blocks that share a barrier")
def test_a_barrier_of_one_block_by_all():
    kind, text, _ = ranks.launch(1, misuse, "all blocks", 8, env={"TSN_TIMEOUT": "5"})[0].error
    assert kind == "KernelError" and "barrier in block" in text and "met another one that was under way" in text, text


@pytest.mark.parametrize("how, come", [("not all", "3 of 4 have come"), ("grid", "32 of 40 have come")])
def test_blocks_that_never_come(how, come):
    if how == "grid" and settings.device_kind() == "cuda":
        pytest.skip("the simulator can be made small")
    env = {"TSN_TIMEOUT": "1", "TSN_SIM_SMS": "1"}
    kind, text, _ = ranks.launch(1, misuse, how, 4 if how == "not all" else 40, env=env)[0].error
    assert kind == "WaitTimeout" and f"for all blocks of the launch; {come}" in text, (kind, text)
