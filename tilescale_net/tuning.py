"""Explicit tuning of calls on this machine, in lockstep on all ranks, stored on disk (`runtime/tuned.py`).

    from tilescale_net import tuning

    print(tuning.product("matmul_all_reduce", 4096, 7168, 8192).text())
    print(tuning.moe(256, 4096, 7168, 8).text())

or `python -m tilescale_net tune`. Without it, calls use measurements on H100s and H200s (`kernels.fused.choice`,
`kernels.moe.config`, which also check the contents of files). No call ever searches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import tilescale_net as tsn
from tilescale_net.errors import HeapError, KernelError
from tilescale_net.kernels.fused import choice as fused_choice
from tilescale_net.kernels.fused.choice import (
    GEOMETRIES,
    SIMULATED,
    GemmProblem,
    Point,
    as_choice,
    fits,
    of_dtype,
    options_as_choice,
    options_of,
    usual_options,
)
from tilescale_net.kernels.fused.gemm import SCALED
from tilescale_net.kernels.moe import AllToAll, Tuning
from tilescale_net.kernels.moe.config import FP8_DTYPE, TUNED, Config, configure, key_of
from tilescale_net.ops import fused, group_objects
from tilescale_net.runtime import settings, tuned
from tilescale_net.runtime.tuned import Choice

__all__ = ["Found", "Trial", "moe", "product"]

# -- candidates one after the other, in lockstep: all ranks run the same one, and choose the same ---------------------


# Smallest gain for which another candidate replaces the first one, the default.
GAIN = 0.02
# Errors that only disqualify a candidate.
UNFIT = (HeapError, KernelError, ValueError)
WARM_UP, CALLS, SAMPLES = 3, 10, 5

Call = Callable[[], object]
# `(candidate, call) -> us`, the time of a call.
Measure = Callable[[Choice, Call], float]


@dataclass(frozen=True)
class Trial:
    """A candidate and its time.

    Attributes:
        choice: the candidate's values, by field.
        us: time of a call on the slowest rank; None if it failed.
        why: the reason why it failed.
    """

    choice: Choice
    us: float | None
    why: str = ""


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        key: of the calls to which it applies.
        trials: in order; the first is the choice without a search.
        best: the fastest trial.
    """

    key: str
    trials: tuple[Trial, ...]
    best: Trial

    def text(self) -> str:
        """For people."""
        lines = [f"{self.key}:"]
        for trial in self.trials:
            took = trial.why if trial.us is None else f"{trial.us:.1f} us"
            lines.append(f"{'->' if trial is self.best else '  '} {took:>12}  {trial.choice}")
        return "\n".join(lines)


def check_most(most: int) -> None:
    """Raise ValueError unless `most` is a number of candidates."""
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f"tuning: most is {most!r}; it must be 1 or more")


def lockstep(
    world, key: str, candidates: Sequence[Choice], make: Callable[[Choice], tuple[Call, Call]], measure: Measure | None = None
) -> Found:  # fmt: skip
    """Try all candidates; collective. Rank 0 logs each before it is tried.

    Args:
        make: returns a call and a function that frees it; collective. Raises one of UNFIT for invalid candidates.
        measure: of a call; collective. Default: device time on a GPU, the wall clock, which means nothing, in the simulator.

    Raises:
        RankMismatch: ranks that want other candidates.
        ValueError: none could be made.
    """
    world.control.agree("tilescale_net.tuning", f"{key}, candidates {list(candidates)}")
    begin, trials = time.monotonic(), []
    for number, choice in enumerate(candidates, 1):
        if world.rank == 0:
            seconds = time.monotonic() - begin
            settings.log.warning("%s: candidate %d of %d, after %.0f s", key, number, len(candidates), seconds)
        trials.append(_try(world, choice, make, measure or (lambda choice, call: device_us(world, call))))
    made = [trial for trial in trials if trial.us is not None]
    if not made:
        raise ValueError(f"tuning: {key}: no candidate could be made: {'; '.join(t.why for t in trials)}")
    best = min(made, key=lambda trial: trial.us or 0.0)
    first = trials[0]
    if first.us is not None and best.us is not None and best.us > (1 - GAIN) * first.us:
        best = first
    return Found(key, tuple(trials), best)


def _try(world, choice: Choice, make, measure: Measure) -> Trial:
    made, why = None, ""
    try:
        made = make(choice)
    except UNFIT as err:
        why = str(err) or type(err).__name__
    reasons = world.control.gather("tilescale_net.tuning: candidate", why)
    if any(reasons):
        if made is not None:
            made[1]()
        return Trial(choice, None, next(filter(None, reasons)))
    assert made is not None
    call, free = made
    call()  # compiles
    world.barrier()
    slowest = max(world.control.gather("tilescale_net.tuning: time", float(measure(choice, call))))
    free()
    return Trial(choice, slowest)


def device_us(world, call: Call) -> float:
    """Median time of a call; every rank makes equally many."""
    on_gpu = world.device_kind == "cuda"
    for _ in range(WARM_UP if on_gpu else 0):
        call()
    samples = []
    for _ in range(SAMPLES if on_gpu else 1):
        world.barrier()
        if not on_gpu:
            begin = time.perf_counter()
            call()
            samples.append((time.perf_counter() - begin) * 1e6)
            continue
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        for _ in range(CALLS):
            call()
        after.record()
        world.synchronize()
        samples.append(before.elapsed_time(after) * 1e3 / CALLS)
    return statistics.median(samples)


# -- dispatch and combine of `kernels.moe.AllToAll`: blocks, senders among them, and threads ------------------------


def moe_candidates(config: Config, world, most: int) -> list[Choice]:
    """Candidates, up to a limit: first the default, then its neighbours, one field after the other."""
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

    Later objects without a `tuning` use it, in this process and in later ones with the same GPU, ranks, nodes and version of
    the package if rank 0 finds it on its disk.

    Args:
        num_experts, max_tokens, hidden, top_k, dtype, mode, options: as for `AllToAll`; the choice serves up to the next power of
            two of tokens, and objects of equal sizes, dtypes, mode and layout.
        most: the largest number of candidates.
        measure: see `lockstep`.

    Raises:
        TypeError, ValueError, HeapError: as `AllToAll`.
        RankMismatch: ranks request different searches.
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
    found = lockstep(world, key, moe_candidates(config, world, most), make, measure)
    assert found.best.us is not None
    tuned.keep(world, "tilescale_net.tuning", key, found.best.choice, found.best.us)
    return found


# -- GEMMs with their communication: every way, and tiles, blocks that send and copies of the fused one ----------------


# Candidates beside the usual one: half and twice the blocks, and the other engine. "auto" gathers rows by bulk copies;
# sums leave by loads and stores unless "bulk" is given.
OTHER_ENGINE = {"all_gather_matmul": "ldst", "matmul_reduce_scatter": "bulk", "matmul_all_reduce": "bulk"}


def product_candidates(problem: GemmProblem, device: torch.device, most: int, is_mapped: bool = True) -> list[Choice]:
    """Candidates, up to `most`: the GEMM and the collective one after the other, the usual fused call, copy
    engines, then fused calls by the number of options that differ from the usual."""
    on_gpu = device.type == "cuda"
    usual: dict[str, Any] = {"blocks": 4, "engine": "auto"} | usual_options(problem, device)
    tilings = [of_dtype(t, problem) for t, _ in GEOMETRIES] if on_gpu else [replace(SIMULATED, panel=1)]
    options: dict[str, list[Any]] = {
        "tiling": tilings,
        "blocks": [usual["blocks"] // 2, 2 * usual["blocks"]] if on_gpu else [2],
        "engine": [OTHER_ENGINE[problem.kind]] if on_gpu else [],
    }
    every = [usual]
    for name, values in options.items():
        every += [one | {name: value} for one in every for value in values if value != usual[name]]
    every.sort(key=lambda one: sum(one[name] != usual[name] for name in options))
    first, *others = ({"way": "fused", **options_as_choice(one)} for one in every)
    by_engines = [{"way": "copy_engines"}] if on_gpu and is_mapped and problem.kind == "all_gather_matmul" else []
    return [{"way": "unfused"}, first, *by_engines, *others][:most]


def product(
    kind: str, rows: int, k: int, n: int, *, dtype: torch.dtype = torch.bfloat16, group: tsn.Group = None, most: int = 16,
    measure: Measure | None = None,
) -> Found:  # fmt: skip
    """Measure the ways of such calls of `tilescale_net.ops.KIND`, and keep the times; collective, between other calls.

    `ops` uses the times from the next call on, in this process and in later ones with the same GPU, ranks, nodes and version
    of the package if rank 0 finds them on its disk.

    Args:
        kind: "all_gather_matmul", "matmul_reduce_scatter" or "matmul_all_reduce".
        rows, k, n: of `x` [rows, k] and `w` [k, n] on a rank; calls of other shapes use the nearest one's way.
        dtype: of both.
        group: see `tilescale_net.world`.
        most: the largest number of candidates.
        measure: see `lockstep`.

    Returns:
        Found: all trials, and the best.

    Raises:
        ValueError: the fused kernels do not support the call.
        HeapError: no room for the operands.
        RankMismatch: ranks request different searches.
    """
    if kind not in fused.CLASSES:
        raise ValueError(f"tuning: kind is {kind!r}; it must be one of {', '.join(fused.CLASSES)}")
    check_most(most)
    world = tsn.world(group)
    wanted = GemmProblem(kind, world.size, rows, k, n, dtype)
    if obstacle := fits(wanted):
        raise ValueError(f"tuning: {kind}: {obstacle}")
    arguments, own = _operands(wanted, world)
    objects = group_objects.of(group_objects.name_of(world))

    def make(choice: Choice) -> tuple[Call, Call]:
        way, options = _split(choice)
        if way == "unfused":
            return lambda: getattr(tsn.ops, kind)(*arguments, world, fused=False, **own), lambda: None
        op = fused.make(objects, wanted, way, options_of(options, wanted) if options else {})
        x, w, scales = *arguments, own
        if kind == "all_gather_matmul":
            x, w, scales = fused.travelling(objects, x, w, scales)
        return lambda: op(x, w, **scales), op.free

    key = fused_choice.key_of(wanted)
    tried = product_candidates(wanted, world.device, most, not objects.needs_symmetric_source)
    found = lockstep(world, key, tried, make, measure)
    assert found.best.us is not None
    # Of each way the fastest trial.
    best = {_split(t.choice)[0]: t for t in sorted(found.trials, key=lambda t: -(t.us or 0)) if t.us is not None}
    options = _split(best["fused"].choice)[1] if "fused" in best else {}
    us = {way: trial.us for way, trial in best.items() if trial.us is not None}
    point = Point(wanted.m, k, n, us, options_of(options, wanted) if options else {})
    tuned.keep(world, "tilescale_net.tuning", key, as_choice(point), found.best.us)
    objects.known_gemms.clear()
    return found


def _split(choice: Choice) -> tuple[str, Choice]:
    """The way of a candidate, and its options."""
    return choice["way"], {name: value for name, value in choice.items() if name != "way"}


def _operands(wanted: GemmProblem, world) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]:
    """`x` and `w` of normal random numbers, and their scales by name."""
    with torch.inference_mode(False):
        float32 = dict(dtype=torch.float32, device=world.device)  # not a user's default
        x = torch.randn((wanted.rows, wanted.k), **float32)
        w = torch.randn((wanted.n, wanted.k), **float32)
        if wanted.dtype != SCALED:
            return (x.to(wanted.dtype), w.to(wanted.dtype).t().contiguous()), {}
        ones = (torch.ones(extent, **float32) for extent in (wanted.rows, wanted.n))
        return (x.to(SCALED), w.to(SCALED).t()), dict(zip(("x_scales", "w_scales"), ones))
