"""Candidates one after the other, on all ranks at once: no rank ever runs another one than the others, or chooses otherwise."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tilescale_net.errors import HeapError, KernelError
from tilescale_net.runtime import settings
from tilescale_net.runtime.tuned import Choice

# The first candidate, which is taken without a search, stays unless another one gains so much.
GAIN = 0.02
# What a candidate may fail with: it is left out then.
UNFIT = (HeapError, KernelError, ValueError)
WARM_UP, CALLS, SAMPLES = 3, 10, 5

Call = Callable[[], object]
# `(candidate, call) -> us` of a call.
Measure = Callable[[Choice, Call], float]


@dataclass(frozen=True)
class Trial:
    """A candidate and what it took.

    Attributes:
        choice: what was tried, by field.
        us: of a call, on the slowest rank; None where it could not be made.
        why: it could not be made.
    """

    choice: Choice
    us: float | None
    why: str = ""


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        key: of the calls for which it is good.
        trials: in the order in which they were made; the first is what is taken without a search.
        best: of them.
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
        make: gives a call and what frees it; collective. Raises one of UNFIT for what cannot be.
        measure: of a call; collective. Default: device time on a GPU, the wall clock in the simulator, where it means nothing.

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
    """Median time of a call; every rank makes as many."""
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
