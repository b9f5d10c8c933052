"""Low-latency calls with enable_shrink: a rank dies with traffic in flight, another is masked; the others go on."""

import os
import random
import signal
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tilescale_net as tsn
from tests import ranks
from tests.variants import nightly
from tilescale_net import deep_ep
from tilescale_net.deep_ep import high_throughput, low_latency
from tilescale_net.runtime import settings

# Shares its kernels with tests/kernels/moe/test_failures.py, but for the kernel of weights.
RANKS, EXPERTS, MOST, HIDDEN, TOP_K = 3, 6, 5, 32, 3


def _choices(seed: int) -> list[torch.Tensor]:
    """Experts of each rank's tokens."""
    g = torch.Generator().manual_seed(seed)
    return [torch.rand((MOST - r, EXPERTS), generator=g).topk(TOP_K, 1)[1] for r in range(RANKS)]


def _step(
    buffer, rank: int, seed: int, hooks: bool, masked: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Dispatch, experts that multiply by their number, combine: x, the sums, and the rows per expert. `masked`: a rank that is
    masked while the combine is in flight."""
    device, topk_idx = tsn.device(), _choices(seed)[rank]
    x = torch.full((len(topk_idx), HIDDEN), float(rank + 1), dtype=torch.bfloat16, device=device)
    arguments = x, topk_idx.to(device), MOST, EXPERTS
    rows, counts, handle, _, hook = buffer.low_latency_dispatch(*arguments, use_fp8=False, return_recv_hook=hooks)
    hook() if hooks else None
    local = EXPERTS // RANKS
    y = rows * torch.arange(rank * local, (rank + 1) * local, device=device)[:, None, None].to(rows.dtype)
    weights = torch.ones((len(topk_idx), TOP_K), device=device)
    out, _, hook = buffer.low_latency_combine(y, topk_idx.to(device), weights, handle, return_recv_hook=hooks)
    if masked is not None:
        buffer.low_latency_update_mask_buffer(masked, True)
    hook() if hooks and rank != masked else None
    return x, out, counts


def _check(buffer, rank: int, seed: int, active: list[bool], hooks: bool, masked: int | None = None) -> None:
    """A step is right: choices of experts on ranks that are masked do not count, but for one masked while it is in flight."""
    x, out, counts = _step(buffer, rank, seed, hooks, masked)
    choices, local = _choices(seed), EXPERTS // RANKS
    here = [sum(int((c == e).sum()) for c, there in zip(choices, active) if there) for e in range(EXPERTS)]
    assert counts.tolist() == here[rank * local : (rank + 1) * local], (seed, counts)
    alive = torch.tensor(active)[choices[rank] // local]
    wanted = x.cpu() * torch.where(alive, choices[rank], 0).sum(1, keepdim=True).to(x.dtype)
    assert rank == masked or torch.equal(out.cpu(), wanted), (seed, active)


def _program(seed: int) -> None:
    # Two of one group: calls in flight in one of them are void when the other notices the loss.
    made = [deep_ep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, enable_shrink=True) for _ in range(2)]
    buffer = made[0]
    rank, status = tsn.rank(), torch.full((RANKS,), 7, dtype=torch.int32, device=tsn.device())
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * RANKS
    active, turn = [True] * RANKS, 0
    _check(buffer, rank, seed, active, False)
    if rank == 2:
        threading.Timer(random.Random(seed).random() * 0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while not status.any():
        turn += 1
        x, out, counts = _step(made[turn // 2 % 2], rank, seed + turn, turn % 2 == 0)
        assert not out.isnan().any() and (counts >= 0).all()
        buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0, 0, 1]
    active[2] = False
    # Ranks may have noticed a step apart: those behind come after with steps that give nothing.
    last = max(tsn.world().control.gather("turn", turn))
    while turn < last:
        turn += 1
        _, out, counts = _step(made[turn // 2 % 2], rank, seed + turn, False)
        assert not out.any() and not counts.any()
    for turn in range(last + 1, last + 4):
        _check(made[turn // 2 % 2], rank, seed + turn, active, turn % 2 == 0)
    with mock.patch.object(settings.log, "warning") as warning:
        for _ in range(2):  # a requested mask is taken back; lost ranks stay masked
            buffer.low_latency_update_mask_buffer(1 - rank, True)
            buffer.low_latency_clean_mask_buffer()
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [0, 0, 1]
    assert warning.call_count == 1 and "ranks [2] cannot come back" in warning.call_args.args[1]
    _check(buffer, rank, seed, active, False)
    with pytest.raises(tsn.TileScaleError, match="cannot come back"):
        buffer.low_latency_update_mask_buffer(2, False)
    tsn.barrier()
    _check(buffer, rank, seed, active, True, masked=1)
    if rank == 1:  # lives on, and makes no more calls
        with pytest.raises(tsn.TileScaleError, match="left out"):
            tsn.zeros((4,))
        return
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0, 1, 1]
    active[1] = False
    _check(buffer, rank, seed, active, False)
    for one in made:
        one.destroy()


@pytest.mark.parametrize("nodes", [1, nightly(RANKS)])
def test_a_rank_is_lost(nodes):
    seed = random.randrange(1 << 20)
    env = {"TSN_TIMEOUT": "60", "VIRTUAL_NODES": str(nodes)}
    outcomes = ranks.launch(RANKS, _program, seed, env=env, timeout=240)
    assert outcomes[2].exitcode == -signal.SIGKILL, outcomes[2]
    assert outcomes[0].ok and outcomes[1].ok, (seed, outcomes[0].error, outcomes[1].error)


def test_a_dispatch_that_ranks_were_lost_in_has_a_whole_handle():
    sizes = 4, 5, 128, 2, torch.bfloat16
    received = low_latency._nothing(2, 3, sizes, torch.device("cpu"))
    assert len(received.handle.plan.arguments) == 8 and not received.counts.any()


def test_counts_of_a_mask_where_a_rank_is_lost():
    """The remaining ranks add up their counts as a collective of all ranks would."""
    everyone = torch.arange(3 * EXPERTS, dtype=torch.int32).view(3, EXPERTS)
    told = []
    control = SimpleNamespace(members=[0, 2], gather=lambda call, mine: told.append(mine) or [others, mine])
    others = everyone[0].view(3, 2).tolist()
    objects = SimpleNamespace(world=SimpleNamespace(control=control, size=3, rank=2))
    found = high_throughput._counts(objects, None, everyone[2], False, 4)
    wanted = (everyone[0] + everyone[2])[4:].tolist()
    assert found == [-(-n // 4) * 4 for n in wanted] and told == [everyone[2].view(3, 2).tolist()]
