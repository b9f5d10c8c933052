"""Latency mode where rows cross the network once per node: against plain PyTorch, bit by bit, and byte by byte."""

import random
import time

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe import mutants
from tests.kernels.moe.support import FP8, make_inputs, without_kernels
from tests.kernels.moe.test_once_per_node import (
    TWO_NODES,
    bytes_put,
    masked_choices,
    rows_that_cross,
    without_a_gateway,
)
from tests.kernels.moe.test_rounds import rejected, rounds, weights_at_combine
from tests.kernels.support import assert_close
from tilescale_net.kernels.collective import sizes_of
from tilescale_net.kernels.moe import AllToAll, Tuning
from tilescale_net.kernels.moe.buffers import symmetric_buffers
from tilescale_net.kernels.moe.layout import HeaderLayout, MessageLayout
from tilescale_net.runtime import heap

SHAPE = dict(num_experts=8, max_tokens=20, hidden=64, top_k=3)
LATENCY = dict(mode="latency")
KINDS = ("random", "masked", "one rank", "twice", "none")

MUTANTS = {
    "latency gateway without wait for messages": mutants.MoeMutant(
        "latency_dispatch",
        'N.wait_warp(mem.came[row], "ge", now.call)',
        mutants.LATENCY,
        2,
    ),
    "latency gateway without wait for sums": mutants.MoeMutant(
        "latency_combine",
        'N.wait(mem.summed[row * at.size + place, part], "ge", now.call)',
        mutants.LATENCY,
        2,
    ),
}

CASES = {
    "bfloat16": (dict(), dict(), KINDS),
    "fp8": (dict(dtype=FP8, quantize_combine=True), dict(quantise_inside=True, halves=True), ("random", "masked")),
    "fp8 with scales": (dict(dtype=FP8), dict(halves=True, index=torch.int32), KINDS),
}


@pytest.mark.parametrize("case", ["bfloat16", "fp8", pytest.param("fp8 with scales", marks=pytest.mark.nightly)])
@pytest.mark.sample(1)
def test_rounds(case):
    options, how, kinds = CASES[case]
    ranks.run(4, rounds, random.randrange(1 << 30), SHAPE, LATENCY | options, how, kinds, env=TWO_NODES, timeout=280)


def _bytes(seed: int) -> None:
    """What crosses the network is what the routing says; both ways give the same rows, and the same sums but for rounding."""
    choices, mine, x = masked_choices(seed)
    found = {}
    for once in (True, False):
        size = 2 if once else 1  # ranks that share what crosses
        op = AllToAll(**SHAPE, **LATENCY, tuning=Tuning(once_per_node=once))
        before = bytes_put()
        received = op.dispatch(x, mine)
        between = bytes_put()
        sums = op.combine(received.x, received.handle, weighted=False)
        rows = rows_that_cross(choices, size)
        headers = 8 * 4 * HeaderLayout(2, once).words  # from each rank to two others
        assert between - before == rows * 4 * MessageLayout(32, 0, 3, once).words + headers, (seed, once, rows)
        assert bytes_put() - between == rows * 128, (seed, once, rows)
        counts = received.counts.tolist()
        found[once] = [received.x[e, :n].clone() for e, n in enumerate(counts)], sums, rows
        op.free()
    assert all(torch.equal(a, b) for a, b in zip(found[True][0], found[False][0])) and found[True][2] < found[False][2]
    assert_close(found[True][1], found[False][1])


@pytest.mark.sample(0)
def test_bytes_on_the_network():
    ranks.run(4, _bytes, random.randrange(1 << 20), env=TWO_NODES, timeout=280)


def _more(seed: int) -> None:
    """Weights at combine, bias, calls that one rank rejects; bits do not change from call to call."""
    weights_at_combine(seed, SHAPE, LATENCY, dict(), ("random", "masked"))
    rejected(seed, SHAPE, LATENCY)
    op, device = AllToAll(**SHAPE, **LATENCY), tsn.device()
    mine = make_inputs((seed, tsn.rank()), op.config, 5 + tsn.rank(), "random")
    received = op.dispatch(mine.x.to(device), mine.topk_idx.to(device), mine.weights.to(device))
    sums = op.combine(received.x, received.handle)
    bias = torch.ones_like(sums)
    assert_close(op.combine(received.x, received.handle, bias=[bias]), sums + bias, rtol=0.05, atol=0.05)
    for _ in range(20):
        again = op.dispatch(mine.x.to(device), mine.topk_idx.to(device), mine.weights.to(device))
        assert torch.equal(op.combine(again.x, again.handle), sums), seed
    op.free()


@pytest.mark.sample(0)
def test_weights_rejected_calls_and_bits():
    ranks.run(4, _more, random.randrange(1 << 20), env=TWO_NODES, timeout=280)


@pytest.mark.sample(0)
def test_a_gateway_is_left_out():
    # Rank 0 keeps the job's store, so that its proxy answers until the others have ended.
    halves = (False, True)
    ranks.run(4, without_a_gateway, random.randrange(1 << 20), 0, LATENCY, halves, env=TWO_NODES, timeout=280)


def _sizes() -> None:
    with without_kernels():
        for options in (dict(), dict(dtype=FP8, quantize_combine=True)):
            memory = tsn.world().heap._allocator
            before = sum(memory.live.values())
            op = AllToAll(**SHAPE, **LATENCY, **options)
            assert sum(memory.live.values()) - before == AllToAll.heap_bytes(**SHAPE, **LATENCY, **options), options
            op.free()
            assert sum(memory.live.values()) == before
        active = (True, True, True, False)
        op = AllToAll(**SHAPE, **LATENCY, active=active)
        specs = symmetric_buffers(op.config, op.tuning, 2, True, [active])
        assert sum(memory.live.values()) - before == heap.footprint(sizes_of(specs))
        op.free()


def test_heap_bytes():
    ranks.run(4, _sizes, env=TWO_NODES)


def _waiting(seed: int) -> None:
    """A rank that comes late is waited for: by its own node and, for what it passes on, by the other one's."""
    op, rank, late = AllToAll(**SHAPE, **LATENCY), tsn.rank(), 3
    mine = make_inputs((seed, rank), op.config, 12, "random")
    given = mine.x.to(op.device), mine.topk_idx.to(op.device), mine.weights.to(op.device)
    waited = torch.zeros((4, 4), dtype=torch.int64, device=op.device)
    for turn in range(2):  # the first one compiles
        waited.zero_()
        for half in range(2):
            tsn.barrier()
            if rank == late and turn:
                time.sleep(0.5)
            if half:
                out = op.combine(received.x, received.handle, waited=waited[1])  # noqa: F821 (of the half before)
            else:
                received = op.dispatch_recv(op.dispatch_send(*given, waited=waited[0]))
            tsn.world().synchronize()
    assert torch.equal(out, op.combine(received.x, received.handle))
    if rank != late and op.device.type == "cpu":
        assert waited[:2, late].gt(5e7).all(), waited
        assert waited[:2, late].gt(waited[:2, rank]).all(), waited
    op.free()


@pytest.mark.nightly
def test_who_is_waited_for():
    ranks.run(4, _waiting, random.randrange(1 << 20), env=TWO_NODES, timeout=120)


@pytest.mark.nightly
@pytest.mark.parametrize("nodes", ["4", "2"])
def test_eight_ranks_on_a_network_that_misbehaves(nodes):
    seed, shape = random.randrange(1 << 20), dict(num_experts=16, max_tokens=9, hidden=64, top_k=5)
    env = {
        "VIRTUAL_NODES": nodes,
        "TSN_CHAOS": f"seed={seed},reorder=0.3,split=0.2,eagain=0.1",
        "TSN_SIM_VISIBILITY": "late",
    }
    ranks.run(
        8, rounds, seed, shape, LATENCY, dict(halves=True), ("random", "masked", "one rank"), env=env, timeout=280
    )
