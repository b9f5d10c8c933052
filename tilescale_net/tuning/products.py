"""Tuning of products with their communication: tiles, blocks that send, and how they copy; or one after the other."""

from __future__ import annotations

from typing import Any

import torch

import tilescale_net as tsn
from tilescale_net.kernels.fused.all_gather_matmul import PipelinedAllGatherMatmul
from tilescale_net.kernels.fused.choice import (
    GEOMETRIES,
    SIMULATED,
    Chosen,
    GemmProblem,
    as_choice,
    blocks_for,
    expected_us,
    fits,
    key_of,
    of_choice,
    prefers_fused,
    tiling_for,
)
from tilescale_net.kernels.fused.choice import of_dtype as tiling_of_dtype
from tilescale_net.kernels.fused.gemm import SCALED, Tiling
from tilescale_net.ops import fused, group_objects
from tilescale_net.runtime import tuned
from tilescale_net.runtime.tuned import Choice
from tilescale_net.tuning.search import Call, Found, Measure, lockstep

KINDS = tuple(fused.CLASSES)
BLOCKS = {"all_gather_matmul": (8, 4, 16), "matmul_reduce_scatter": (4, 2, 8), "matmul_all_reduce": (4, 2, 8)}
# "auto" gathers rows by bulk copies; sums leave by loads and stores unless they are to leave by bulk copies.
ENGINES = {
    "all_gather_matmul": ("auto", "ldst"), "matmul_reduce_scatter": ("auto", "bulk"), "matmul_all_reduce": ("auto", "bulk"),
}  # fmt: skip


def candidates(product: GemmProblem, device: torch.device, most: int, is_mapped: bool = True) -> list[Choice]:
    """What is tried, at most so many: first what a call takes without a search, then what the model expects most of."""
    on_gpu = device.type == "cuda"
    count = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 132
    known = tiling_for(device, product)
    tilings = [tiling_of_dtype(t, product) for t, _ in GEOMETRIES] if on_gpu else [known, _smaller(known)]
    numbers = BLOCKS[product.kind] if on_gpu else (4, 2)
    options: dict[str, Any] = {"blocks": numbers[0]} | blocks_for(device, product)
    one_after_the_other, usual = Chosen(False), Chosen(True, known, **options)
    by_engines = [Chosen(False, pipelined=True)] if on_gpu and is_mapped and product.kind == "all_gather_matmul" else []
    first = usual if prefers_fused(product, device, is_mapped) else one_after_the_other
    every = [
        Chosen(True, t, b, e) for t in tilings for b in numbers for e in ENGINES[product.kind] if on_gpu or e == "auto"
    ]
    places = {c: i for i, c in enumerate(every)}

    def expected(c: Chosen) -> tuple[float, int]:
        return (expected_us(product, count, c.tiling, c.blocks)[0] if on_gpu else 0.0), places[c]

    ordered = dict.fromkeys([first, usual, one_after_the_other, *by_engines, *sorted(every, key=expected)])
    return [as_choice(c) for c in ordered][:most]


def _smaller(tiling: Tiling) -> Tiling:
    return Tiling(tiling.tile, tiling.stages, 1, tiling.columns) if tiling == SIMULATED else SIMULATED


def product(
    kind: str, rows: int, k: int, n: int, *, dtype: torch.dtype = torch.bfloat16, group: tsn.Group = None, most: int = 16,
    measure: Measure | None = None,
) -> Found:  # fmt: skip
    """Find out how `tilescale_net.ops.KIND` takes calls like these, and keep it; collective, between other calls.

    `ops` takes what was found from the next call on, in this process and in later ones of the same place (GPU, ranks,
    nodes, version of the package) where rank 0 finds it on its disk.

    Args:
        kind: "all_gather_matmul", "matmul_reduce_scatter" or "matmul_all_reduce".
        rows, k, n: of `x` [rows, k] and `w` [k, n] on a rank; the choice serves up to the next power of two of rows.
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
    if kind not in KINDS:
        raise ValueError(f"tuning: kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f"tuning: most is {most!r}; it must be 1 or more")
    world = tsn.world(group)
    wanted = GemmProblem(kind, world.size, rows, k, n, dtype)
    if obstacle := fits(wanted):
        raise ValueError(f"tuning: {kind}: {obstacle}")
    arguments, own = _operands(wanted, world)
    objects = group_objects.of(group_objects.name_of(world))

    def make(choice: Choice) -> tuple[Call, Call]:
        how = of_choice(choice, wanted)
        if how.pipelined:
            pipelined = PipelinedAllGatherMatmul(rows, k, n, dtype=dtype, group=world)
            return lambda: pipelined(*arguments, **own), pipelined.free
        if not how.fused:
            return lambda: getattr(tsn.ops, kind)(*arguments, world, fused=False, **own), lambda: None
        height = rows // world.size if kind == "matmul_reduce_scatter" else rows
        options = {**objects.geometry, "dtype": dtype, **how.options}
        maker: Any = fused.CLASSES[kind]
        op = maker(height, k, n, **options, group=world)
        there = _where_they_travel(world, arguments, own) if kind == "all_gather_matmul" else (arguments, own)
        return lambda: op(*there[0], **there[1]), op.free

    key = key_of(wanted)
    found = lockstep(
        world, key, candidates(wanted, world.device, most, not objects.needs_symmetric_source), make, measure
    )
    assert found.best.us is not None
    tuned.keep(world, "tilescale_net.tuning", key, found.best.choice, found.best.us)
    return found


def _operands(wanted: GemmProblem, world) -> tuple[tuple, dict[str, torch.Tensor]]:
    """`x` and `w` of normal random numbers, and their scales by name."""
    with torch.inference_mode(False):
        float32 = dict(dtype=torch.float32, device=world.device)  # not a user's default
        x = torch.randn((wanted.rows, wanted.k), **float32)
        w = torch.randn((wanted.n, wanted.k), **float32)
        if wanted.dtype != SCALED:
            return (x.to(wanted.dtype), w.to(wanted.dtype).t().contiguous()), {}
        ones = (torch.ones(extent, **float32) for extent in (wanted.rows, wanted.n))
        return (x.to(SCALED), w.to(SCALED).t()), dict(zip(("x_scales", "w_scales"), ones))


def _where_they_travel(world, arguments: tuple, own: dict) -> tuple[tuple, dict]:
    """The same, in symmetric memory where some ranks are on other nodes."""
    objects = group_objects.of(group_objects.name_of(world))
    if not objects.needs_symmetric_source:
        return arguments, own
    x, w = arguments
    scales = own.get("x_scales")
    parts = [(tuple(x.shape), x.dtype), *([] if scales is None else [((len(scales),), torch.float32)])]
    there, *more = objects.symmetric(*parts)
    there.copy_(x)
    return (there, w), own | ({} if scales is None else {"x_scales": more[0].copy_(scales)})
