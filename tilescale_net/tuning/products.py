"""Tuning of GEMMs with their communication: every way, and tiles, blocks that send and copies of the fused one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import tilescale_net as tsn
from tilescale_net.kernels.fused.choice import (
    GEOMETRIES,
    SIMULATED,
    GemmProblem,
    Point,
    as_choice,
    fits,
    key_of,
    of_dtype,
    options_as_choice,
    options_of,
    usual_options,
)
from tilescale_net.kernels.fused.gemm import SCALED
from tilescale_net.ops import fused, group_objects
from tilescale_net.runtime import tuned
from tilescale_net.runtime.tuned import Choice
from tilescale_net.tuning.search import Call, Found, Measure, check_most, lockstep

# What is tried beside the usual: half and twice the blocks, and the other engine. "auto" gathers rows by bulk copies; sums
# leave by loads and stores unless they are to leave by bulk copies.
OTHER_ENGINE = {"all_gather_matmul": "ldst", "matmul_reduce_scatter": "bulk", "matmul_all_reduce": "bulk"}


def candidates(problem: GemmProblem, device: torch.device, most: int, is_mapped: bool = True) -> list[Choice]:
    """What is tried, at most so many: the GEMM and the collective one after the other, the usual fused call, copy
    engines, then fused calls by how many of their options differ from the usual."""
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
    """Measure the ways in which `tilescale_net.ops.KIND` can take calls like these, and keep them; collective, between other
    calls.

    `ops` looks at what was measured from the next call on, in this process and in later ones of the same place (GPU, ranks,
    nodes, version of the package) where rank 0 finds it on its disk.

    Args:
        kind: "all_gather_matmul", "matmul_reduce_scatter" or "matmul_all_reduce".
        rows, k, n: of `x` [rows, k] and `w` [k, n] on a rank; calls of other shapes take the way of the nearest one.
        dtype: of both.
        group: see `tilescale_net.world`.
        most: how many candidates are tried.
        measure: see `search.lockstep`.

    Returns:
        Found: all trials, and the best.

    Raises:
        ValueError: a call that the fused kernels do not take.
        HeapError: no room for the operands.
        RankMismatch: ranks that ask for something else.
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

    key = key_of(wanted)
    tried = candidates(wanted, world.device, most, not objects.needs_symmetric_source)
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
