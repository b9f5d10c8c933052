"""The same examples between two nodes that only talk through the proxy and the fabric, in order and misbehaving."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import ranks
from tests.integration.pool import pool_fixture
from tests.integration.test_atomics import atomic, put_each
from tests.integration.test_copies import CAPACITY, SLACK, WAYS, example
from tests.integration.test_order import meet, pass_message, write_source_again, write_through_view
from tests.integration.test_signals import COMPARISONS, HOLDS, STEPS, count, wait_for
from tests.variants import variants

CHAOS = "seed=11,reorder=0.5,split=0.6,delay_us=300,eagain=0.2,imm_bits=20"
orderly = pool_fixture(2, env={"VIRTUAL_NODES": "2"})
chaotic = pool_fixture(2, env={"VIRTUAL_NODES": "2", "TSN_CHAOS": CHAOS})
mixed = pool_fixture(4, env={"VIRTUAL_NODES": "2"})
SEEDS = range(6)
CONFIGURATION = (torch.bfloat16, 64, "auto", 1, None)


@pytest.fixture(params=["orderly", "chaotic"])
def pool(request):
    return request.getfixturevalue(request.param)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    way=st.sampled_from(WAYS),
    first_dst=st.integers(0, SLACK),
    first_src=st.integers(0, SLACK),
    count=st.one_of(st.integers(0, 300), st.integers(0, CAPACITY - SLACK)),
    seed=st.integers(0, 1 << 30),
)
@pytest.mark.sample(1)
def test_any_copy(pool, way, first_dst, first_src, count, seed):
    pool(example, CONFIGURATION, [(way, first_dst, first_src, count, seed)], "random")


def test_mapped_peers_and_others_in_one_kernel(mixed):
    pace = random.Random()
    cases = [(pace.choice(WAYS), pace.randrange(9), pace.randrange(9), pace.randrange(3000), i) for i in range(20)]
    mixed(example, CONFIGURATION, cases, "random")


@variants(3, "order", ["fence", "fence one", "quiet", "put_signal"])
def test_data_comes_before_its_signal(pool, order):
    for seed in SEEDS:
        assert pool(pass_message, order, True, seed) == [0, 0], seed


def test_a_missing_fence_shows_under_chaos(chaotic):
    assert any(sum(chaotic(pass_message, "nothing", True, seed)) for seed in range(30))


def test_primitives_of_a_whole_scope_order_its_puts(pool):
    for order in ("signal", "signal_block", "signal_warp", "fence_block", "quiet_block"):
        for seed in SEEDS:
            assert pool(pass_message, order, True, seed) == [0, 0], (order, seed)


@pytest.mark.parametrize("how", ["quiet", "quiet_block", "flush"])
def test_source_may_be_written_after(pool, how):
    for seed in SEEDS:
        assert pool(write_source_again, how, seed) == [0, 0], seed


def test_source_written_too_early_shows_under_chaos(chaotic):
    assert any(sum(chaotic(write_source_again, "nothing", seed)) for seed in range(30))


def test_barrier_after_quiet(pool):
    for seed in SEEDS:
        assert pool(meet, "all", True, seed) == [0, 0], seed


# The others in test_signals.py, where these are not.
@pytest.mark.parametrize("compare", COMPARISONS[1::2])
def test_every_wait(pool, compare):
    first, wanted, values = STEPS[compare]
    _, (seen, left) = pool(wait_for, "block", compare, first, wanted, values, "set", 0.0, 1)
    assert left == values[-1] and all(HOLDS[compare](s, wanted) for s in seen)


def test_sums_of_signals(pool):
    values = [random.randrange(1 << 63) for _ in range(20)]
    _, (seen, left) = pool(wait_for, "block", "eq", 5, (5 + sum(values)) % (1 << 64), values, "add", 0.0, 1)
    assert left == (5 + sum(values)) % (1 << 64)


@pytest.mark.parametrize("how", ["quiet", "fence"])
@pytest.mark.parametrize("kind, n", [("chaotic", 2), ("mixed", 4)])
def test_ordered_adds_are_in_the_word(request, kind, n, how):
    pool = request.getfixturevalue(kind)
    for seed in SEEDS:
        assert pool(count, how, seed) == [[0, 0, 0]] * n, seed


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "int64"])
def test_put_value(pool, dtype):
    pool(put_each, dtype, 64, random.randrange(1 << 30))


def _atomic():
    atomic("int32", "add", 0, [[1] * 64] * 2, 0)


def _view():
    write_through_view("st", 0)


@pytest.mark.parametrize("fn, words", [(_atomic, ["atomic", "PE 0"]), (_view, ["remote", "not direct", "N.is_direct"])])
def test_operations_that_need_mapped_memory(fn, words):
    outcomes = ranks.launch(2, fn, env={"VIRTUAL_NODES": "2", "TSN_TIMEOUT": "5"})
    errors = [o.error for o in outcomes]
    assert all(errors), outcomes
    said = [text for name, text, _ in errors if name != "PeerLost"]
    assert said and all(any(word in text for text in said) for word in words), errors
