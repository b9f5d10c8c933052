"""Rows that cross the network once per node: against plain PyTorch, bit by bit, and byte by byte."""

import random
import time

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe.support import FP8, choose, make_inputs, run_round, without_kernels
from tests.kernels.moe.test_host_cost import CACHED_PLANS, CALLS, count, hold
from tests.kernels.moe.test_misuse import raises
from tests.kernels.moe.test_rounds import LATENCY, NODES, SHAPE, rejected, rounds, weights_at_combine
from tests.kernels.support import assert_close
from tests.variants import nightly, variants
from tilescale_net.kernels.collective import Nodes, sizes_of
from tilescale_net.kernels.moe import AllToAll, Tuning
from tilescale_net.kernels.moe.buffers import symmetric_buffers
from tilescale_net.kernels.moe.layout import Forwarders, HeaderLayout, MessageLayout
from tilescale_net.runtime import heap


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


def rows_that_cross(choices: list[torch.Tensor], of: Nodes, once: bool) -> int:
    """Rows that go to other nodes, once for each node, or for each rank there."""
    rows = 0
    for source, idx in enumerate(choices):
        hosts = torch.where(idx >= 0, idx // 2, -1)
        for node in set(range(len(of.sizes))) - {of.node_of(source)}:
            there = [(hosts == rank).any(1) for rank in range(of.first(node), of.end(node))]
            rows += int(torch.stack(there).any(0).sum() if once else torch.stack(there).sum())
    return rows


@variants(
    0,
    "options, nodes",
    [(dict(alignment=2), "2"), (LATENCY, "2"), (dict(alignment=2), "1+3"), nightly(LATENCY, "1+3")],
    ids=["throughput", "latency", "throughput, uneven", "latency, uneven"],
)
@ranks.on(4, timeout=280)
def test_bytes_on_the_network(options, nodes, seed):
    """Bytes on the network follow from the routing; both ways give the same rows, and the same sums but for rounding."""
    choices, mine, x = masked_choices(seed)
    latency, found, of = options == LATENCY, {}, Nodes(tsn.world().topology.sizes)
    for once in (True, False):
        op = AllToAll(**SHAPE, **options, tuning=Tuning(once_per_node=once))
        # The plan of throughput mode crosses the network, too.
        again = dict(topk_idx=mine) if latency else dict(handle=op.dispatch(x, mine).handle)
        before = bytes_put()
        received = op.dispatch(x, **again)
        between = bytes_put()
        sums = op.combine(received.x, received.handle, weighted=False)
        rows, sent = rows_that_cross(choices, of, once), 128
        pairs = sum(size * (4 - size) for size in of.sizes)  # of ranks in different nodes
        headers = pairs * 4 * HeaderLayout(2, once).words if latency else 0
        if latency:
            sent = 4 * MessageLayout(32, 0, 3, once).words
        assert between - before == rows * sent + headers, (seed, once, rows)
        assert bytes_put() - between == rows * 128, (seed, once, rows)
        counts = received.counts.tolist()
        if latency:
            parts = [received.x[e, :n] for e, n in enumerate(counts)]
        else:
            parts = [received.x[b : b + n] for b, n in zip(received.offsets.tolist(), counts)]
        found[once] = torch.cat(parts).clone(), sums, rows
        op.free()
    assert torch.equal(found[True][0], found[False][0]) and found[True][2] < found[False][2]
    assert_close(found[True][1], found[False][1])


@pytest.mark.parametrize("layout", ["expert", nightly("rank")])
@ranks.on(4, VIRTUAL_NODES="2", timeout=280)
def test_values_and_rejected_calls(layout, seed):
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


@pytest.mark.sample(0)
@ranks.on(4, VIRTUAL_NODES="2", timeout=280)
def test_weights_rejected_calls_and_bits_in_latency_mode(seed):
    """Weights at combine, bias, calls that one rank rejects; bits do not change from call to call."""
    weights_at_combine(seed, SHAPE, LATENCY, ("random", "masked"))
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


def without_a_forwarder(seed: int, gone: int, options: dict, halves: tuple[bool, ...], shape: dict = SHAPE) -> None:
    """A forwarder is left out: the others of its node serve its sources, too; rounds in halves or whole."""
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
        label = f"seed {seed}, without {gone}, turn {turn}"
        run_round(op, everyone, pace, label, active=active, halves=in_halves)
    new = AllToAll(**shape, **options)
    run_round(new, everyone, pace, f"seed {seed}, new, without {gone}", active=active)
    new.free()
    op.free()


@variants(
    0, "options, halves", [(dict(alignment=2), (False, False)), (LATENCY, (False, True))], ids=["throughput", "latency"]
)
@ranks.on(4, VIRTUAL_NODES="2", timeout=280)
def test_a_forwarder_is_left_out(options, halves, seed):
    # Rank 0 keeps the job's store.
    without_a_forwarder(seed, random.Random(seed).choice((0, 3)), options, halves)


# Forwarders for more sources than one; a rank that is a node; three nodes of two sizes; a rank that is left out, of the
# larger node, of the smaller.
UNEVEN = [(4, "1+3", 3), (3, "2+1", 1), (8, "3+5", 6), (8, "3+5", 1), (5, "2+1+2", 0)]


def of_uneven_nodes(seed: int, options: dict, how: dict, kinds: tuple, gone: int) -> None:
    shape, live = dict(SHAPE, num_experts=2 * tsn.size()), tsn.world().heap._allocator.live
    before = sum(live.values())
    with without_kernels():
        op = AllToAll(**shape, **options)
    assert op.sums_over == tsn.world().topology.sizes
    assert sum(live.values()) - before == AllToAll.heap_bytes(**shape, **options)
    op.free()
    rounds(seed, shape, options, how, kinds)
    without_a_forwarder(seed, gone, options, (False, bool(how.get("halves"))), shape)


@variants(
    0,
    "size, nodes, gone, case",
    [
        (*UNEVEN[0], "nodes"),
        (*UNEVEN[1], "nodes, latency"),
        *(nightly(*row, case) for row in UNEVEN for case in NODES),
    ],
)
@ranks.on(TSN_SIM_RACES="1", TSN_CHAOS="seed=1,reorder=0.5,split=0.3", timeout=280)
def test_nodes_of_different_sizes(size, nodes, gone, case, seed):
    options, how, kinds = NODES[case]
    of_uneven_nodes(seed, options, how, kinds, gone)


@pytest.mark.nightly
@ranks.on(4, VIRTUAL_NODES="2", timeout=280)
def test_the_host(seed):
    """Calls cost it as little as in one node, and plans are used again."""
    count(dict(alignment=2), CALLS["throughput"][1], SHAPE)
    hold(seed, dict(alignment=2), SHAPE, 2 * CACHED_PLANS)


@variants(
    1,
    "cases",
    [
        [dict(), dict(layout="rank", dtype=FP8, quantize_combine="always"), dict(zero_copy=False)],
        [LATENCY, dict(LATENCY, dtype=FP8, quantize_combine="always")],
    ],
    ids=["throughput", "latency"],
)
@ranks.on(4, VIRTUAL_NODES="2")
def test_heap_bytes(cases):
    with without_kernels():
        for options in cases:
            memory = tsn.world().heap._allocator
            before = sum(memory.live.values())
            op = AllToAll(**SHAPE, **options)
            assert sum(memory.live.values()) - before == AllToAll.heap_bytes(**SHAPE, **options), options
            op.free()
            assert sum(memory.live.values()) == before
        # A forwarder that serves two sources from the start has room for them at once.
        active, options = (True, True, True, False), cases[0]
        op = AllToAll(**SHAPE, **options, active=active)
        specs = symmetric_buffers(op.config, op.tuning, 2, True, [active])
        assert sum(memory.live.values()) - before == heap.footprint(sizes_of(specs))
        assert options == LATENCY or heap.footprint(sizes_of(specs)) > AllToAll.heap_bytes(**SHAPE)
        op.free()


def test_forwarders():
    everybody = Forwarders((True,) * 12, 3)
    assert everybody.slots == 2
    assert everybody.served(1) == {4: [0, 8], 5: [1, 9], 6: [2, 10], 7: [3, 11]}
    some = Forwarders((True,) * 5 + (False,) * 2 + (True,) * 5, 3)
    assert some.served(1) == {4: [0, 2, 8, 10], 7: [1, 3, 9, 11]} and some.slots == 4
    assert Forwarders((True,) * 4 + (False,) * 8, 3).slots == 1
    uneven = Forwarders((True,) * 8, (3, 5))
    assert uneven.served(0) == {0: [3, 6], 1: [4, 7], 2: [5]} and uneven.slots == 2
    assert uneven.served(1) == {3: [0], 4: [1], 5: [2], 6: [], 7: []}
    assert Forwarders((True, False) + (True,) * 6, (3, 5)).served(0) == {0: [3, 5, 7], 2: [4, 6]}
    for mask in (everybody, some):
        words = [mask.words(rank, 4) for rank in range(12)]
        for node in range(3):
            for forwarder, sources in mask.served(node).items():
                for slot, source in enumerate(sources):
                    assert words[source][node] == forwarder and words[source][3 + node] == slot
                    assert words[forwarder][6 + slot] == source


@pytest.mark.nightly
@ranks.on(4, VIRTUAL_NODES="2", timeout=120)
def test_who_is_waited_for(seed):
    """A rank that comes late is waited for: by its own node and, for what it forwards, by the other one's."""
    op, rank, late = AllToAll(**SHAPE, **LATENCY), tsn.rank(), 3
    mine = make_inputs((seed, rank), op.config, 12, "random")
    inputs = mine.x.to(op.device), mine.topk_idx.to(op.device), mine.weights.to(op.device)
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
                received = op.dispatch_recv(op.dispatch_send(*inputs, waited=waited[0]))
            tsn.world().synchronize()
    assert torch.equal(out, op.combine(received.x, received.handle))
    if rank != late and op.device.type == "cpu":
        assert waited[:2, late].gt(5e7).all(), waited
        assert waited[:2, late].gt(waited[:2, rank]).all(), waited
    op.free()
