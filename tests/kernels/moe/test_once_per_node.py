"""Throughput mode where rows cross the network once per node: against plain PyTorch, bit by bit, and byte by byte."""

import random

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe import mutants
from tests.kernels.moe.support import FP8, ROUTES, choose, make_inputs, run_round, without_kernels
from tests.kernels.moe.test_host_cost import CALLS, KEPT, count, hold
from tests.kernels.moe.test_misuse import raises
from tests.kernels.moe.test_rounds import rounds
from tests.kernels.support import assert_close
from tilescale_net.kernels.collective import sizes_of
from tilescale_net.kernels.moe import AllToAll, Tuning
from tilescale_net.kernels.moe.buffers import symmetric_buffers
from tilescale_net.kernels.moe.layout import Gateways
from tilescale_net.runtime import heap

SHAPE = dict(num_experts=8, max_tokens=20, hidden=64, top_k=3)
KINDS = ("random", "masked", "one rank")
TWO_NODES = {"VIRTUAL_NODES": "2"}

SM_90 = {
    "routing.plan_nodes": [
        dict(ranks=32, experts=256, nodes=4, slots=3, max_tokens=4096, blocks=24, threads=512)
    ],
}  # fmt: skip

MUTANTS = {
    "gateway without wait for rows": mutants.MoeMutant(
        "dispatch",
        'N.wait_warp(mem.came[chunk.k, slot], "ge", call)',
        mutants.RANK,
        2,
    ),
    "gateway without wait for sums": mutants.MoeMutant(
        "combine",
        'N.wait(mem.summed[k * at.size + g * 32 + lane, place // s.chunk], "ge", call)',
        mutants.RANK,
        2,
    ),
    "gateway sums without fence": mutants.MoeMutant(
        "combine",
        mutants.unfenced("N.signal_warp(arrived[forwarder, c], call, peer)"),
        mutants.RANK,
        2,
    ),
    "rows for a gateway without quiet": mutants.MoeMutant("combine", "N.quiet(me)", mutants.RANK, 2),
    "gateway without what sources said": mutants.MoeMutant(
        "routing", 'N.wait_block(told[b], "ge", call)', mutants.RANK, 2
    ),
}

CASES = {
    "expert": (dict(alignment=2), dict(again=True), ROUTES),
    "rank": (dict(layout="rank", dtype=FP8, quantize_combine=True), dict(again=True, halves=True), KINDS),
    "elsewhere": (
        dict(zero_copy=False, dtype=FP8, column_scales=True, quantize_combine=True),
        dict(halves=True, index=torch.int32),
        KINDS,
    ),
}


@pytest.mark.parametrize("case", ["expert", "rank", pytest.param("elsewhere", marks=pytest.mark.nightly)])
@pytest.mark.sample(0)
def test_rounds(case):
    options, how, kinds = CASES[case]
    ranks.run(4, rounds, random.randrange(1 << 30), SHAPE, options, how, kinds, env=TWO_NODES, timeout=280)


def bytes_put() -> int:
    """Payload that all ranks have given to the network so far."""
    tsn.barrier()
    return sum(tsn.world().control.gather("bytes", tsn.stats()["bytes_put"]))


def masked_choices(seed: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Choices of experts of all four ranks, this rank's own, and its rows."""
    tokens, pace = SHAPE["max_tokens"], random.Random(seed)
    choices = [choose("masked", pace, tokens, 3, 8, 4) for _ in range(4)]
    x = torch.randn((tokens, 64), generator=torch.Generator().manual_seed(seed + tsn.rank()))
    return choices, choices[tsn.rank()].to(tsn.device()), x.to(tsn.device(), torch.bfloat16)


def rows_that_cross(choices: list[torch.Tensor], size: int) -> int:
    """Rows that go to the other node, once for each `size` ranks there."""
    rows = 0
    for source, idx in enumerate(choices):
        hosts = torch.where(idx >= 0, idx // (2 * size), -1)
        for other in range(4 // size):
            if other * size // 2 != source // 2:
                rows += int((hosts == other).any(1).sum())
    return rows


def _bytes(seed: int) -> None:
    """What crosses the network is what the routing says, and both ways give the same rows."""
    choices, mine, x = masked_choices(seed)
    device, found = tsn.device(), {}
    for size, once in ((2, True), (1, False)):  # ranks that share what crosses
        op = AllToAll(**SHAPE, alignment=2, tuning=Tuning(once_per_node=once))
        first = op.dispatch(x, mine)
        before = bytes_put()
        received = op.dispatch(x, handle=first.handle)
        between = bytes_put()
        sums = op.combine(received.x, received.handle, weighted=False)
        rows = rows_that_cross(choices, size)
        assert between - before == rows * 128, (seed, once, rows)
        assert bytes_put() - between == rows * 128, (seed, once, rows)
        places = torch.cat(
            [torch.arange(b, b + n) for b, n in zip(received.offsets.tolist(), received.counts.tolist())]
        )
        found[once] = received.x[places.to(device)].clone(), sums, rows
        op.free()
    assert torch.equal(found[True][0], found[False][0]) and found[True][2] < found[False][2]
    assert_close(found[True][1], found[False][1])


@pytest.mark.sample(0)
def test_bytes_on_the_network():
    ranks.run(4, _bytes, random.randrange(1 << 20), env=TWO_NODES, timeout=280)


def _values(seed: int, layout: str) -> None:
    """Numbers of rows come back to their choices, bias is added; a rejected call ends everywhere."""
    device, rank = tsn.device(), tsn.rank()
    pace = random.Random(seed + rank)
    op = AllToAll(**SHAPE, layout=layout, **({} if layout == "rank" else {"alignment": 2}))
    everyone = [make_inputs((seed, r), op.config, 5 + r, "random") for r in range(4)]
    mine = everyone[rank]
    x, idx, weights = mine.x.to(device), mine.topk_idx.to(device), mine.weights.to(device)
    received = op.dispatch(x, idx, weights)
    if layout == "expert":
        sums, values = op.combine_values(received.x, received.row_weight.nan_to_num(0.0), received.handle)
        assert torch.equal(values, weights)
        bias = torch.ones_like(x)
        with_bias = op.combine(received.x, received.handle, weighted=False, bias=[bias])
        assert_close(with_bias, sums + bias, rtol=0.05, atol=0.05)
    wrong = {
        "combine": lambda: op.combine(received.x.float(), received.handle),
        "known": lambda: op.dispatch(x[:1], handle=received.handle),
        "new": lambda: op.dispatch(x.float(), idx, weights),
    }
    right = {
        "combine": lambda: op.combine(received.x, received.handle),
        "known": lambda: op.dispatch(x, handle=received.handle),
        "new": lambda: op.dispatch(x, idx, weights),
    }
    for call in wrong:
        with raises((TypeError, ValueError), "rank 1"):
            (wrong if rank == 1 else right)[call]()
            op.check()
        run_round(op, everyone, pace, f"seed {seed}, after a rejected call")
    op.free()


@pytest.mark.parametrize("layout", ["expert", pytest.param("rank", marks=pytest.mark.nightly)])
def test_values_and_rejected_calls(layout):
    ranks.run(4, _values, random.randrange(1 << 20), layout, env=TWO_NODES, timeout=280)


def without_a_gateway(seed: int, gone: int, options: dict, halves: tuple[bool, ...], shape: dict = SHAPE) -> None:
    """A gateway is left out: the others of its node serve its sources, too; rounds in halves or whole."""
    op, pace = AllToAll(**shape, **options), random.Random(seed)
    tokens = [op.config.max_tokens // 2 + r % 4 for r in range(tsn.size())]
    everyone = [make_inputs((seed, r), op.config, n, "random") for r, n in enumerate(tokens)]
    run_round(op, everyone, pace, f"seed {seed}, all")
    active = [r != gone for r in range(tsn.size())]
    op.set_active(active)
    if tsn.rank() == gone:
        op.free()
        return
    for turn, in_halves in enumerate(halves):
        what = f"seed {seed}, without {gone}, turn {turn}"
        run_round(op, everyone, pace, what, active=active, halves=in_halves)
    new = AllToAll(**shape, **options)
    run_round(new, everyone, pace, f"seed {seed}, new, without {gone}", active=active)
    new.free()
    op.free()


@pytest.mark.sample(0)
def test_a_gateway_is_left_out():
    seed, gone, halves = random.randrange(1 << 20), random.choice((0, 3)), (False, False)
    ranks.run(4, without_a_gateway, seed, gone, dict(alignment=2), halves, env=TWO_NODES, timeout=280)


def _host(seed: int) -> None:
    count(dict(alignment=2), CALLS["throughput"][1], SHAPE)
    hold(seed, dict(alignment=2), SHAPE, 2 * KEPT)


@pytest.mark.nightly
def test_the_host():
    """Calls cost it as little as in one node, and plans are used again."""
    ranks.run(4, _host, random.randrange(1 << 30), env=TWO_NODES, timeout=280)


def _sizes() -> None:
    with without_kernels():
        _compare_sizes()


def _compare_sizes() -> None:
    for options in (dict(), dict(layout="rank", dtype=FP8, quantize_combine=True), dict(zero_copy=False)):
        memory = tsn.world().heap._allocator
        before = sum(memory.live.values())
        op = AllToAll(**SHAPE, **options)
        assert sum(memory.live.values()) - before == AllToAll.heap_bytes(**SHAPE, **options), options
        op.free()
        assert sum(memory.live.values()) == before
    # A gateway that serves two sources from the start has room for them at once.
    active = (True, True, True, False)
    op = AllToAll(**SHAPE, active=active)
    specs = symmetric_buffers(op.config, op.tuning, 2, True, [active])
    assert sum(memory.live.values()) - before == heap.footprint(sizes_of(specs)) > AllToAll.heap_bytes(**SHAPE)
    op.free()


@pytest.mark.sample(0)
def test_heap_bytes():
    ranks.run(4, _sizes, env=TWO_NODES)


def test_gateways():
    everybody = Gateways((True,) * 12, 3)
    assert everybody.slots == 2
    assert everybody.served(1) == {4: [0, 8], 5: [1, 9], 6: [2, 10], 7: [3, 11]}
    some = Gateways((True,) * 5 + (False,) * 2 + (True,) * 5, 3)
    assert some.served(1) == {4: [0, 2, 8, 10], 7: [1, 3, 9, 11]} and some.slots == 4
    assert Gateways((True,) * 4 + (False,) * 8, 3).slots == 1
    for mask in (everybody, some):
        words = [mask.words(rank, 4) for rank in range(12)]
        for node in range(3):
            for gateway, sources in mask.served(node).items():
                for slot, source in enumerate(sources):
                    assert words[source][node] == gateway and words[source][3 + node] == slot
                    assert words[gateway][6 + slot] == source
