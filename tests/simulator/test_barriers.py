"""Kernels whose warps have roles: mbarriers, TMA copies and T.ws as reference semantics, and refused constructs."""

import contextlib
import math
import time

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.simulator import specialised
from tilescale_net.errors import DataRace
from tilescale_net.runtime import simulator

WRONG_PARITY = r"32 at T.barrier_wait \(specialised.py:\d+\), 32 ended.*or a wait has the wrong parity"
M, N, K = 72, 40, 104  # which tiles do not divide; more steps than stages


def _product(kernel, seeds=2) -> None:
    a, b = (torch.randint(-4, 5, (rows, K)).bfloat16() for rows in (M, N))
    c = torch.empty(M, N, dtype=torch.bfloat16)
    for seed in range(seeds):
        with simulator.schedule(seed):
            kernel(a, b, c.fill_(math.nan))
        assert torch.equal(c, (a.float() @ b.float().T).bfloat16()), seed


def test_warps_that_copy_and_warps_that_multiply():
    _product(tsn.compile(specialised.matmul(M, N, K, "bfloat16"), name="branches"))


@pytest.fixture
def impatient(monkeypatch):
    """Polls that never end are a deadlock after a few seconds."""
    monkeypatch.setenv("TSN_SIM_STALL", "4")


def test_roles_by_ws(impatient):
    """tilelang puts a __syncthreads between two T.ws that share memory, on GPUs too, unless that is switched off."""
    kernel = specialised.by_ws(M, N, K, "bfloat16")
    _product(tsn.compile(kernel, name="roles", pass_configs={"tl.disable_thread_storage_sync": True}))
    with pytest.raises(tsn.SimulatorDeadlock, match="128 of 256 threads at __syncthreads, 128 at T.barrier_wait"):
        _product(tsn.compile(kernel, name="roles_apart"))


def test_a_stage_that_nobody_frees():
    kernel = tsn.compile(specialised.matmul(M, N, K, "bfloat16", frees=False), name="unfreed")
    with pytest.raises(tsn.SimulatorDeadlock, match=r"128 at T.barrier_wait \(specialised.py:\d+\)"):
        _product(kernel)


def test_a_wait_with_the_wrong_parity_is_reported_at_once():
    """Not when TSN_SIM_STALL and twice TSN_TIMEOUT have passed: nobody but the block arrives."""
    begin = time.monotonic()
    for seed in range(4):
        with simulator.schedule(seed), pytest.raises(tsn.SimulatorDeadlock, match=WRONG_PARITY):
            tsn.compile(specialised.waits_for_a_second_phase())(torch.empty(32, dtype=torch.int32))
    assert time.monotonic() - begin < 60


@ranks.on(1)
def test_warps_that_stand_still_behind_a_wait_are_not_stuck():
    """Nor those that wait for them at an mbarrier, or have not looked since it was their turn again."""
    x, flag = torch.empty(32, dtype=torch.int32), tsn.zeros((1,), torch.uint64)
    kernel = tsn.compile(specialised.hands_over_after_a_signal())
    for seed in range(40):
        with simulator.schedule(seed):
            kernel(x, flag, seed + 1)


def test_a_wait_that_is_missing_shows():
    found = []
    for waits in (True, False):
        kernel = tsn.compile(specialised.reads_without_waiting(waits), name=f"reads_{waits}".lower())
        wrong = 0
        for seed in range(8):
            x = torch.empty(32, dtype=torch.int32)
            with simulator.schedule(seed):
                kernel(x)
            wrong += x.tolist() != list(reversed(range(32)))
        found.append(wrong)
    assert found[0] == 0 < found[1]


def test_an_arrival_alone_orders_nothing_behind_it():
    """It releases, and does not acquire: even the last thread to arrive has to wait."""
    x = torch.empty(32, dtype=torch.int32)
    for waits in (True, False):
        kernel = tsn.compile(specialised.reads_behind_its_own_arrival(waits), name=f"arrival_{waits}".lower())
        for seed in range(3):
            wrong = contextlib.nullcontext() if waits else pytest.raises(DataRace, match="a load of line")
            with simulator.schedule(seed, races=True), wrong:
                kernel(x, torch.zeros(1, dtype=torch.int32))


def test_other_copies_and_constructs_that_are_refused():
    for name in specialised.BODIES:
        if name == "all that it can":
            continue
        with pytest.raises(tsn.SimulatorUnsupported, match=f"cannot run {name}"):
            tsn.compile(specialised.with_body(name))
    x, y = torch.randn(128, 64), torch.zeros(128, 64)
    tsn.compile(specialised.with_body("all that it can"))(x, y)
    assert torch.equal(y, 2 * x)
