"""The memory model end to end: with the right primitive nothing is ever missing; without it the simulator shows it."""

import pytest

import tilescale_net.runtime.settings as settings
from tests.integration.order import (
    meet,
    pass_message,
    where,
    write_and_send,
    write_source_again,
    write_through_view,
)
from tests.integration.pool import pool_fixture

pool = pool_fixture(2)
three = pool_fixture(3)
SEEDS = range(12)
# On a GPU a race that the simulator shows at once may not show for years.
on_simulator = pytest.mark.skipif(settings.device_kind() == "cuda", reason="the simulator makes races visible")


@pytest.mark.parametrize("visibility", ["eager", "late", "random"])
@pytest.mark.parametrize("order", ["fence", "fence one", "quiet", "put_signal"])
@pytest.mark.sample(6)
def test_data_comes_before_its_signal(pool, order, visibility):
    for seed in SEEDS:
        assert pool(pass_message, order, True, seed, visibility) == [0, 0], seed


def test_data_comes_before_its_signal_in_a_ring(three):
    for seed in SEEDS:
        for order in ("fence", "put_signal"):
            assert three(pass_message, order, True, seed) == [0, 0, 0], (order, seed)


def test_primitives_of_a_whole_scope_order_what_it_put(pool):
    for order in ("signal", "signal_block", "signal_warp", "fence_block", "quiet_block"):
        for seed in SEEDS:
            assert pool(pass_message, order, True, seed) == [0, 0], (order, seed)


@on_simulator
@pytest.mark.parametrize("visibility", ["late", "random"])
def test_a_missing_fence_shows(pool, visibility):
    assert any(sum(pool(pass_message, "nothing", True, seed, visibility)) for seed in SEEDS)


@on_simulator
@pytest.mark.parametrize("visibility", ["late", "random"])
@pytest.mark.parametrize("order", ["fence", "put_signal"])
def test_a_missing_wait_shows(pool, order, visibility):
    assert any(sum(pool(pass_message, order, False, seed, visibility)) for seed in SEEDS)


@pytest.mark.parametrize("how", ["quiet", "quiet_block", "flush"])
def test_source_may_be_written_after(pool, how):
    for seed in SEEDS:
        for visibility in ("eager", "late", "random"):
            assert pool(write_source_again, how, seed, visibility) == [0, 0], (seed, visibility)


@on_simulator
@pytest.mark.parametrize("visibility", ["late", "random"])
def test_source_written_too_early_shows(pool, visibility):
    assert any(sum(pool(write_source_again, "nothing", seed, visibility)) for seed in SEEDS)
    assert not any(sum(pool(write_source_again, "nothing", seed, "eager")) for seed in SEEDS[:3])


# Each is a kernel of its own: every second one in every run, each engine with each order.
@pytest.mark.parametrize(
    "engine, threads, order, crowd",
    [
        pytest.param(*way, order, crowd, marks=pytest.mark.nightly if (i + k + crowd) % 2 else [])
        for i, way in enumerate([("ldst", 128), ("bulk", 128), ("bulk", 1024)])
        for k, order in enumerate(["put_signal", "other warp"])
        for crowd in (False, True)
    ],
)
@pytest.mark.sample(2)
def test_what_was_just_written_is_sent(pool, engine, threads, order, crowd):
    turns, blocks = (1000, 60) if settings.device_kind() == "cuda" else (3, 1)
    assert pool(write_and_send, engine, threads, turns, order, blocks if crowd else 0) == [0, 0]


@pytest.mark.parametrize("kind", ["all", "node"])
def test_barrier_after_quiet(three, kind):
    for seed in SEEDS:
        assert three(meet, kind, True, seed) == [0, 0, 0], seed


@on_simulator
@pytest.mark.parametrize("visibility", ["late", "random"])
def test_barrier_without_quiet_shows(three, visibility):
    assert any(sum(three(meet, "all", False, seed, visibility)) for seed in SEEDS)


@pytest.mark.parametrize("kind", ["parallel", "copy", "st"])
def test_views_of_remote_memory(pool, kind):
    for seed in SEEDS:
        pool(write_through_view, kind, seed)


def test_places(three):
    for rank, (numbers, direct) in enumerate(three(where)):
        assert numbers == [rank, 3, rank, 3] and direct == [1, 1, 1, -1, -1, -1, -1, -1]
