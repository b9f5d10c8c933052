"""Tuning of dispatch and combine of `kernels.moe.AllToAll`: blocks, how many of them send, and threads."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

import tilescale_net as tsn
from tilescale_net.kernels.moe import AllToAll, Tuning
from tilescale_net.kernels.moe.config import FP8_DTYPE, TUNED, Config, configure, key_of
from tilescale_net.runtime import tuned
from tilescale_net.runtime.tuned import Choice
from tilescale_net.tuning.search import Call, Found, Measure, check_most, lockstep


def candidates(config: Config, world, most: int) -> list[Choice]:
    """What is tried, at most so many: first the default, then its neighbours, one field after the other."""
    usual: Any = Tuning().resolved(config, world.device)  # all fields are numbers then
    blocks = [usual.blocks * n // 4 for n in (4, 3, 5, 6, 2)] if config.mode == "throughput" else [usual.blocks]
    senders = (0, -2, 2, -4, 4) if config.mode == "throughput" else (0,)
    threads = (usual.threads, usual.threads // 2, usual.threads * 2)
    found: dict[tuple, Choice] = {}
    wanted: dict[str, Any]
    for wanted in [
        *(dict(blocks=b) for b in blocks),
        *(dict(dispatch_senders=usual.dispatch_senders + d) for d in senders),
        *(dict(combine_senders=usual.combine_senders + d) for d in senders),
        *(dict(threads=t) for t in threads),
    ]:
        try:
            made = Tuning(**wanted).resolved(config, world.device)
        except ValueError:
            continue
        choice = {name: value for name, value in asdict(made).items() if name in TUNED}
        found.setdefault(tuple(choice.values()), choice)
    return [*found.values()][:most]


def moe(
    num_experts: int, max_tokens: int, hidden: int, top_k: int, dtype: torch.dtype = torch.bfloat16,
    mode: str = "throughput", *, group: tsn.Group = None, most: int = 12, measure: Measure | None = None, **options: Any,
) -> Found:  # fmt: skip
    """Find the geometry of an `AllToAll` for a dispatch and a combine of `max_tokens` tokens, and keep it; collective.

    Objects that are made afterwards without a `tuning` take it, in this process and in later ones of the same place (GPU,
    ranks, nodes, version of the package) where rank 0 finds it on its disk.

    Args:
        num_experts, max_tokens, hidden, top_k, dtype, mode, options: as for `AllToAll`; the choice serves up to the next power of
            two of tokens, and objects of equal sizes, dtypes, mode and layout.
        most: how many candidates are tried.
        measure: see `search.lockstep`.

    Raises:
        TypeError, ValueError, HeapError: as `AllToAll`.
        RankMismatch: ranks that ask for something else.
    """
    check_most(most)
    world = tsn.world(group)
    shape = (num_experts, max_tokens, hidden, top_k, dtype, mode)
    config = configure(world.size, *shape, **options)

    def make(choice: Choice) -> tuple[Call, Call]:
        op = AllToAll(*shape, **options, tuning=Tuning(**choice), warm_up=False, group=world)
        float32: dict[str, Any] = dict(dtype=torch.float32, device=op.device)  # not a user's default
        x = torch.randn((max_tokens, hidden), **float32).to(config.combine_dtype)
        idx = torch.rand((max_tokens, num_experts), **float32).topk(top_k, 1)[1]
        weights = torch.rand((max_tokens, top_k), **float32)
        rows: Any = x
        if dtype == FP8_DTYPE and not config.can_quantise:
            scales = torch.ones((max_tokens, config.scale_words), **float32)
            rows = (x.to(FP8_DTYPE), scales)
        y = torch.zeros(op.dispatch(rows, idx, weights).x.shape, dtype=config.combine_dtype, device=op.device)
        return lambda: op.combine(y, op.dispatch(rows, idx, weights).handle), op.free

    key = key_of(config)
    found = lockstep(world, key, candidates(config, world, most), make, measure)
    assert found.best.us is not None
    tuned.keep(world, "tilescale_net.tuning", key, found.best.choice, found.best.us)
    return found
