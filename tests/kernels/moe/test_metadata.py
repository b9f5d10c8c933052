"""Values that travel with rows and back: metadata, weights, bias, masks, short inputs, handles used again."""

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe import reference
from tests.kernels.moe.support import make_inputs
from tests.variants import nightly, variants
from tilescale_net.kernels.moe import AllToAll, metadata

SHAPE = dict(num_experts=6, max_tokens=5, hidden=32, top_k=3)  # as test_states.py has it, which saves compiling


def _everyone(op, seed: int, kind: str):
    return [make_inputs((seed, kind, r), op.config, 5 - 2 * r, kind) for r in range(tsn.size())]


def _dispatch(op, everyone):
    mine = everyone[op.rank]
    return op.dispatch(*(t.to(op.device) for t in (mine.x, mine.topk_idx, mine.weights)))


def _check_metadata(op, everyone, received) -> None:
    c = op.config
    routing = reference.route([e.topk_idx for e in everyone], c.num_experts, op.rank)
    found = metadata(received.handle)
    for e, rows in enumerate(routing.order):
        counts = [sum(source == r for source, _, _ in rows) for r in range(c.ranks)]
        assert found.source_counts[e].tolist() == counts
        if c.mode == "latency":
            assert list(zip(found.source_rank[e].tolist(), found.source_token[e].tolist()))[: len(rows)] == [
                (source, token) for source, token, _ in rows
            ]
            assert found.source_token[e, len(rows) :].eq(-1).all()
    if c.mode == "latency":
        return
    tokens = [(r, t) for r in range(c.ranks) for t in routing.tokens[r]]
    n = len(tokens)
    assert list(zip(found.source_rank.tolist(), found.source_token.tolist()))[:n] == tokens
    idx = torch.stack([everyone[r].topk_idx[t] for r, t in tokens]) if n else torch.zeros((0, c.top_k)).long()
    weights = torch.stack([everyone[r].weights[t] for r, t in tokens]) if n else torch.zeros((0, c.top_k))
    here = (idx >= 0) & (idx // c.local_experts == op.rank)
    assert torch.equal(found.topk_idx[:n].cpu(), torch.where(here, idx % c.local_experts, -1))
    assert torch.equal(found.topk_weights[:n].cpu(), torch.where(here, weights, 0.0))
    assert found.topk_idx[n:].eq(-1).all() and found.topk_weights[n:].eq(0).all()
    assert found.source_rank[n:].eq(-1).all() and found.source_token[n:].eq(-1).all()


def _by_rank(op, everyone) -> None:
    """Rows exactly as many as received; numbers of choices and biases go back; the handle is used again and again."""
    c, mine, device = op.config, everyone[op.rank], op.device
    received = _dispatch(op, everyone)
    _check_metadata(op, everyone, received)
    rows = received.handle.rows("rank")
    assert rows == int(received.num_rows)
    y = received.x[:rows].clone()
    plain = op.combine(received.x, received.handle)
    sent = mine.topk_idx.div(c.local_experts, rounding_mode="floor")
    hosts = torch.stack([(sent == r).any(1) for r in range(c.ranks)], 1)
    assert torch.equal(plain.cpu(), (mine.x.float() * hosts.sum(1, keepdim=True)).to(c.combine_dtype))
    values = torch.arange(rows * c.top_k, dtype=torch.float32, device=device).view(rows, c.top_k) + 100 * op.rank
    bias = [torch.full_like(plain, number) for number in (0.5, 3.0)]
    for biases in ((), bias[:1], bias):
        out, back = op.combine_values(y, values, received.handle, bias=biases)
        more = sum((b.float().cpu() for b in biases), torch.zeros(()))
        total = mine.x.float() * hosts.sum(1, keepdim=True) + more
        assert torch.equal(out.cpu(), total.to(c.combine_dtype))
        assert torch.equal(op.combine(y, received.handle, bias=biases), out)
    expected = torch.zeros(mine.topk_idx.shape)
    for r in range(c.ranks):
        tokens = reference.route([e.topk_idx for e in everyone], c.num_experts, r).tokens
        first = sum(map(len, tokens[: op.rank]))
        for i, token in enumerate(tokens[op.rank]):
            expected[token] += torch.arange(c.top_k) + (first + i) * c.top_k + 100 * r
    assert torch.equal(back.cpu(), expected)
    by_mask = op.dispatch(mine.x.to(device), mask=hosts.to(device))
    assert by_mask.handle.rows("rank") == rows and torch.equal(by_mask.x[:rows], y)
    assert torch.equal(op.combine(y, by_mask.handle), plain)
    halves = op.dispatch_recv(op.dispatch_send(mine.x.to(device), mask=hosts.to(device)))
    assert halves.handle.rows("rank") == rows and torch.equal(halves.x[:rows], y)
    if any((e.topk_idx >= 0).any() and (e.topk_idx < c.local_experts)[e.topk_idx >= 0].any() for e in everyone):
        with pytest.raises(ValueError, match="this rank has received" if op.rank == 0 else "wrong y"):
            op.combine(y[: rows - 1] if op.rank == 0 else y, received.handle)
            op.check()


def _by_expert(op, everyone) -> None:
    received = _dispatch(op, everyone)
    _check_metadata(op, everyone, received)
    plain = op.combine(received.x, received.handle)
    rows = received.handle.rows("expert")
    bias = torch.ones_like(plain)
    assert torch.equal(op.combine(received.x[:rows].clone(), received.handle), plain)
    exact = op.combine(received.x.clone(), received.handle, bias=[bias, -bias])
    assert torch.equal(exact, plain)
    x = everyone[op.rank].x.to(op.device)
    with pytest.raises(ValueError, match="mask"):
        op.dispatch(x, mask=torch.ones((len(x), tsn.size()), dtype=torch.bool, device=op.device))


def _latency(op, everyone) -> None:
    """Weights at combine are as good as weights at dispatch."""
    mine, device = everyone[op.rank], op.device
    received = _dispatch(op, everyone)
    _check_metadata(op, everyone, received)
    wanted = op.combine(received.x, received.handle)
    plain = op.dispatch(mine.x.to(device), mine.topk_idx.to(device))
    weights = mine.weights.to(device)
    # Counts are added up by the kernel, also where it is another one, and from memory that begins anywhere.
    totals = torch.zeros(op.config.local_experts + 1, dtype=torch.int32, device=device)[1:]
    for blocks in (None, 1):
        counted = op.dispatch(mine.x.to(device), mine.topk_idx.to(device), totals=totals, blocks=blocks)
    assert op.adds_to(totals) and torch.equal(totals, 2 * counted.counts)
    for turn in range(3):
        assert torch.equal(op.combine(received.x, plain.handle, weights=weights), wanted)
        pending = op.combine_send(received.x, plain.handle, weights=weights * 2)
        assert torch.equal(op.combine_recv(pending), wanted * 2)
    bias = torch.ones_like(wanted)
    assert torch.equal(op.combine(received.x, received.handle, bias=[bias, -bias]), wanted)
    pending = op.combine_send(received.x, received.handle, bias=[3 * bias])
    chosen = (mine.topk_idx >= 0).any(1).to(device)
    assert torch.equal(op.combine_recv(pending)[~chosen], 3 * bias[~chosen])
    with pytest.raises(ValueError, match="rank 1"):
        op.combine(received.x, plain.handle, weights=weights[:, :1] if op.rank == 1 else weights)
        op.check()
    assert torch.equal(op.combine(received.x, plain.handle, weights=weights), wanted)


CASES = {
    "rank": (dict(layout="rank"), _by_rank),
    "expert": (dict(alignment=4), _by_expert),
    "latency": (dict(mode="latency"), _latency),
}


NIGHTLY = nightly("latency", 1)  # the same on two nodes is in every run


@variants(0, "case, nodes", [*((c, 1) for c in CASES if c != "latency"), NIGHTLY, ("latency", 2)])
@ranks.on(timeout=280)
def test_metadata(case, nodes, seed):
    options, test = CASES[case]
    op = AllToAll(**SHAPE, **options, warm_up=False)
    for kind in ("random", "masked", "one rank", "none"):
        test(op, _everyone(op, seed, kind))
    op.free()
