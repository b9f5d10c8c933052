"""Inputs that every rank can make for every other, adversarial choices, and one round of dispatch and combine, checked."""

import random
import unittest.mock
from dataclasses import dataclass

import torch

from tests.kernels.moe import reference
from tests.kernels.support import assert_same, unsettle
from tilescale_net.kernels.moe import AllToAll

FP8 = torch.float8_e4m3fn
ROUTES = ("random", "masked", "one expert", "one rank", "none", "twice", "last rank")


def choose(kind: str, pace: random.Random, tokens: int, top_k: int, experts: int, ranks: int) -> torch.Tensor:
    """[tokens, top_k] choices of one of ROUTES."""
    local = experts // ranks
    rows = []
    for _ in range(tokens):
        row = pace.sample(range(experts), min(top_k, experts)) + [-1] * max(0, top_k - experts)
        if kind == "one expert":
            row = [experts // 2] + [-1] * (top_k - 1)
        elif kind == "one rank":  # several experts of one rank: one row, several copies
            row = (pace.sample(range(local), min(top_k, local)) + [-1] * top_k)[:top_k]
        elif kind == "last rank":
            row = [experts - 1 - i if i < local else -1 for i in range(top_k)]
        elif kind == "none":
            row = [-1] * top_k
        elif kind == "twice":
            row[-1] = row[0]
        elif kind == "masked":
            row = [e if pace.random() < 0.6 else -1 for e in row]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int64).view(tokens, top_k)


@dataclass
class Inputs:
    """One rank's inputs; `rows` arrive: `x`, or its FP8 form with `scales`."""

    x: torch.Tensor
    rows: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor
    weights: torch.Tensor


def make_inputs(key, config, tokens: int, kind: str) -> Inputs:
    """Inputs that depend on the key only. Weights are multiples of 1/16, so that products are exact in float32."""
    pace = random.Random(repr(key))
    g = torch.Generator().manual_seed(pace.getrandbits(60))
    dtype = config.combine_dtype
    x = (torch.randn((tokens, config.hidden), generator=g) * 3).to(dtype)
    idx = choose(kind, pace, tokens, config.top_k, config.num_experts, config.ranks)
    weights = torch.randint(1, 32, (tokens, config.top_k), generator=g) / 16
    rows, scales = reference.quantise(x) if config.dtype == FP8 else (x, None)
    return Inputs(x, rows, scales, idx, weights)


def expert(number: int, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Output of expert `number` for rows; exactly repeatable."""
    return (rows.float() * ((number * 7 % 13 - 6) / 4)).to(dtype)


def _check_received(received, c, everyone: list[Inputs], routing, wanted: list, label: str) -> list:
    """Compare what dispatch gave with the reference; the places of each expert's rows.

    Args:
        wanted: rows of each expert.
    """
    assert received.counts.tolist() == [len(w) for w in wanted], label
    places = _places(received, c, [len(w) for w in wanted])
    flat = received.x.reshape(-1, c.hidden)
    for e, place in enumerate(places):
        assert_same(flat[place].cpu(), wanted[e], f"{label}: rows of expert {e}")
    if c.dtype == FP8:
        assert received.scales.stride()[-2:] == ((1, flat.shape[0]) if c.column_scales else (c.scale_words, 1)), label
        scales = received.scales.reshape(-1, received.scales.shape[-1])
        for e, rows in enumerate(reference.expert_rows(routing, [e.scales for e in everyone])):
            assert_same(scales[places[e]].cpu(), rows, f"{label}: scales of expert {e}")
    if c.mode == "throughput":
        weights = [torch.tensor([everyone[s].weights[t, k] for s, t, k in rows]) for rows in routing.order]
        for e, values in enumerate(weights):
            begin = int(received.offsets[e])
            assert begin % c.alignment == 0
            assert_same(
                received.row_weight[begin : begin + len(values)].cpu(), values, f"{label}: weights of expert {e}"
            )
    return places


def run_round(op, everyone: list[Inputs], pace: random.Random, label: str, active=None, **how) -> None:
    """Dispatch, experts, combine on this rank; every result is compared with the reference, bit by bit.

    Args:
        how: `index` (dtype of topk_idx), `halves`, `quantise_inside` (latency mode, FP8), `handle` (an earlier dispatch's).
    """
    c, rank = op.config, op.rank
    device, mine = op.device, everyone[rank]
    choices = [e.topk_idx for e in everyone]
    if active is not None:
        local = c.local_experts
        gone = [r for r in range(c.ranks) if not active[r]]
        choices = [
            torch.where(torch.isin(i.div(local, rounding_mode="floor"), torch.tensor(gone)), -1, i) for i in choices
        ]
    routing = reference.route(choices, c.num_experts, rank, active)
    wanted = reference.expert_rows(routing, [e.rows for e in everyone])
    x = mine.x if how.get("quantise_inside") else mine.rows if mine.scales is None else (mine.rows, mine.scales)
    x = tuple(t.to(device, copy=True) for t in x) if isinstance(x, tuple) else x.to(device, copy=True)
    arguments = (x, mine.topk_idx.to(device, how.get("index", torch.int64)), mine.weights.to(device))

    unsettle(pace)
    if how.get("handle"):
        received = op.dispatch(x, handle=how["handle"])
    elif how.get("halves"):
        pending = op.dispatch_send(*arguments)
        unsettle(pace)
        received = op.dispatch_recv(pending)
    else:
        received = op.dispatch(*arguments)
    op.check()
    for tensor in x if isinstance(x, tuple) else (x,):
        tensor.view(torch.uint8).fill_(0xFF)  # the call is done with it
    places = _check_received(received, c, everyone, routing, wanted, label)
    outputs = [_outputs(c, h, choices, everyone, active) for h in range(c.ranks)]
    weighted = sum(len(e.x) for e in everyone) % 3 != 0  # the same on all ranks
    y = torch.full(received.x.shape, float("nan"), dtype=c.combine_dtype, device=device)
    flat = y.view(-1, c.hidden)
    if c.layout == "rank":  # the caller sums over experts: here each row comes back as it went
        flat[: int(received.num_rows)] = _plain(received.x, received.scales, c)[: int(received.num_rows)]
        expected = _sum_of_ranks(c, mine, choices[rank], rank, op.sums_over)
    else:
        for e, place in enumerate(places):
            flat[place] = outputs[rank][e].to(device)
        expected = reference.combine(
            outputs, choices, [e.weights for e in everyone], c.num_experts, rank, c.combine_dtype, c.quantize_combine,
            active, weighted, op.sums_over,
        )  # fmt: skip
    unsettle(pace)
    if how.get("halves"):
        pending = op.combine_send(y, received.handle, weighted=weighted)
        unsettle(pace)
        out = op.combine_recv(pending)
    else:
        out = op.combine(y, received.handle, weighted=weighted)
    op.check()
    y.fill_(float("nan"))
    assert_same(out.cpu(), expected, f"{label}: sums")
    return received


def check_compiled_ahead(op) -> set:
    """Kernels of the calls so far, which `warm_up` compiles in the constructor: no call waits for a compiler."""
    mode, ahead = op._mode, set()
    used = set(mode._launches)
    mode._launch = lambda make, *which: ahead.add((make.__name__, *which))
    try:
        for compiled in mode.variants(True):
            compiled()
    finally:
        del mode._launch
    assert used <= ahead, used - ahead
    return used


def without_kernels():
    """AllToAlls made inside compile nothing ahead: for tests that make many and call none."""
    return unittest.mock.patch.object(AllToAll, "_compile", lambda self, everything: None)


def _places(received, c, counts: list[int]) -> list[torch.Tensor]:
    """For each local expert the indices of its rows among the rows of `received.x`."""
    result = []
    for e, n in enumerate(counts):
        begin = e * received.x.shape[1] if c.mode == "latency" else int(received.offsets[e])
        index = torch.arange(begin, begin + n, device=received.x.device)
        result.append(received.row_index[index].long() if c.layout == "rank" else index)
    return result


def _plain(rows: torch.Tensor, scales: torch.Tensor | None, c) -> torch.Tensor:
    return rows if scales is None else reference.dequantise(rows, scales).to(c.combine_dtype)


def _outputs(c, host: int, choices, everyone, active) -> list[torch.Tensor]:
    """Outputs of the experts of a rank."""
    routing = reference.route(choices, c.num_experts, host, active)
    rows = reference.expert_rows(routing, [_plain(e.rows, e.scales, c) for e in everyone])
    return [expert(host * c.local_experts + e, r, c.combine_dtype) for e, r in enumerate(rows)]


def _sum_of_ranks(c, mine: Inputs, choices: torch.Tensor, rank: int, nodes: int | tuple[int, ...]) -> torch.Tensor:
    rows, parts = _plain(mine.rows, mine.scales, c).float(), []
    for host in range(c.ranks):
        here = (choices.div(c.local_experts, rounding_mode="floor") == host).any(1)
        parts.append(torch.where(here[:, None], rows, 0.0))
    return reference.sum_of_ranks(parts, rank, c.combine_dtype, c.quantize_combine, nodes)
