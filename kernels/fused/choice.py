"""Choice between fused and unfused GEMMs: the fastest way at the nearest measured shape.

There are three ways: fused kernels; copy engines that move the rows of an all-gather while cuBLAS multiplies; and the GEMM
and the collective one after the other ("unfused"). Points come from `measured.json` beside this file, and from measurements
of `tilescale_net.tuning` on this machine. A call without a near point is not fused.
"""

import functools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tilescale_net.runtime import tuned

from .gemm import DEFAULT, SCALED, SUPPORTED_DTYPES, Tiling, device_obstacle
from .matmul_reduce_scatter import check_ring

MEASURED = Path(__file__).with_name("measured.json")
WAYS = ("fused", "copy_engines", "unfused")  # the table also has torch's times, for comparison
# Least gain over the unfused way.
GAIN = 0.02
# Largest ratio between k * n of a call and of a point.
REACH = 4
# Geometry in the simulator, which runs threads in turn.
SIMULATED = Tiling(tile=(32, 32, 32), stages=2, panel=2, columns=16)


@dataclass(frozen=True)
class GemmProblem:
    """A call of a GEMM with its communication.

    Attributes:
        kind: "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", or the kind of `experts_problem`.
        ranks: size of the group.
        rows, k: extents of `x` on a rank. n: columns of `w`.
        dtype: dtype of both.
    """

    kind: str
    ranks: int
    rows: int
    k: int
    n: int
    dtype: torch.dtype

    @property
    def m(self) -> int:
        """Rows of a rank's GEMM."""
        return self.rows * self.ranks if self.kind == "all_gather_matmul" else self.rows

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def fits(problem: GemmProblem) -> str | None:
    """The reason why the fused kernels cannot take a call; None if they can."""
    if problem.dtype not in SUPPORTED_DTYPES:
        return f"dtype {problem.dtype} is not one of {', '.join(map(str, SUPPORTED_DTYPES))}"
    for name in ("rows", "k", "n"):
        value = getattr(problem, name)
        if value < 1:
            return f"{name} is {value}"
        if name != "rows" and value * problem.dtype.itemsize % 16:
            return f"{name} is {value}; it must be a multiple of {16 // problem.dtype.itemsize}"
    if problem.kind != "all_gather_matmul" and problem.rows % problem.ranks:
        return f"rows is {problem.rows}; it must be a multiple of {problem.ranks} ranks"
    return None


# -- points -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """Measured times of calls of one shape.

    Attributes:
        m, k, n: extents of a rank's GEMM.
        us: time in us by way.
        fused: options of the fused call, unless default.
        gpu: the measured GPU; "": this machine's.
    """

    m: int
    k: int
    n: int
    us: dict[str, float]
    fused: dict[str, Any] = field(default_factory=dict)
    gpu: str = ""

    @property
    def best(self) -> str:
        """The fastest way; "unfused" unless another way gains 2 %."""
        fastest = min(self.us, key=self.us.__getitem__)
        unfused = self.us.get("unfused", math.inf)
        return fastest if self.us[fastest] <= (1 - GAIN) * unfused else "unfused"


@functools.cache
def measured(kind: str, ranks: int, dtype_name: str, gpu: str) -> tuple[Point, ...]:
    """The points of `measured.json` for calls on `gpu` (torch's name), points of other GPUs last."""
    table = json.loads(MEASURED.read_text())
    if gpu not in table["gpus"]:
        return ()
    ways = table["columns"][1:]
    points = [
        Point(row[0], g["k"], g["n"], {w: us for w, us in zip(ways, row[1:]) if us and w in WAYS}, gpu=g["gpu"])
        for g in table["groups"]
        if (g["operator"], g["ranks"], g["dtype"]) == (kind, ranks, dtype_name)
        for row in g["points"]
    ]
    return tuple(sorted(points, key=lambda point: point.gpu != gpu))


def nearest(points: Iterable[Point], problem: GemmProblem) -> Point | None:
    """The point nearest to a call by the ratios of m and of k * n; among equals, the one with fewer rows, then the first.

    A point applies to calls with at least half of its rows, which leave less to hide communication behind, and k * n within
    a factor of REACH. None if no point applies.
    """

    def distance(point: Point) -> tuple[float, int]:
        widths = abs(math.log2(problem.k * problem.n / (point.k * point.n)))
        return abs(math.log2(problem.m / point.m)) + widths, point.m

    size = problem.k * problem.n
    near = (p for p in points if 2 * problem.m >= p.m and size <= REACH * p.k * p.n and p.k * p.n <= REACH * size)
    return min(near, key=distance, default=None)


# -- points of this machine, see `tilescale_net.tuning` ---------------------------------------------------------------

ENGINES = ("auto", "ldst", "bulk")


def key_of(problem: GemmProblem) -> str:
    """Key of a point in the table of this machine."""
    return f"{_prefix(problem)}m={problem.m} k={problem.k} n={problem.n}"


def _prefix(problem: GemmProblem) -> str:
    return f"{problem.kind} {problem.dtype_name} "


def as_choice(point: Point) -> tuned.Choice:
    """A point as the table stores it."""
    choice: tuned.Choice = {"m": point.m, "k": point.k, "n": point.n, "us": dict(point.us)}
    return choice | ({"fused": options_as_choice(point.fused)} if point.fused else {})


def options_as_choice(options: dict[str, Any]) -> tuned.Choice:
    """Options of a fused call as the table stores them."""
    tiling = options["tiling"]
    return vars(tiling) | {"tile": list(tiling.tile), "blocks": options["blocks"], "engine": options["engine"]}


def options_of(choice: tuned.Choice, problem: GemmProblem) -> dict[str, Any]:
    """Inverse of `options_as_choice`. Raises TypeError or ValueError for invalid options."""
    if not isinstance(choice, dict):
        raise ValueError(f"{choice!r} are no options of a fused call")
    rest = dict(choice)
    tile, blocks, engine = (rest.pop(name, None) for name in ("tile", "blocks", "engine"))
    if not isinstance(tile, list) or engine not in ENGINES:
        raise ValueError(f"{choice} are no options of a fused call")
    if isinstance(blocks, bool) or not isinstance(blocks, int) or not 1 <= blocks <= 64:
        raise ValueError(f"blocks is {blocks!r}; it must be between 1 and 64")
    tiling = Tiling(tuple(tile), **rest)
    if problem.kind != "all_gather_matmul":
        check_ring(problem.kind, tiling, problem.dtype)
    return {"tiling": tiling, "blocks": blocks, "engine": engine}


def of_choice(choice: tuned.Choice, problem: GemmProblem) -> Point:
    """Inverse of `as_choice`. Raises TypeError or ValueError for a point that is invalid for such calls."""
    m, k, n = shape = [choice.get(name, 0) for name in ("m", "k", "n")]
    us, fused = choice.get("us"), choice.get("fused")
    if not all(isinstance(value, int) and value > 0 for value in shape) or not isinstance(us, dict) or not us:
        raise ValueError(f"{choice} is no point of a GEMM")
    for way, took in us.items():
        is_valid = way in WAYS and (way != "copy_engines" or problem.kind == "all_gather_matmul")
        if not is_valid or isinstance(took, bool) or not isinstance(took, int | float) or not took > 0:
            raise ValueError(f"{way!r}: {took!r} is no time of a way of {problem.kind}")
    options: Any = options_of(fused, problem) if fused is not None else {}
    return Point(m, k, n, us, options)


def of_machine(problem: GemmProblem, world) -> list[Point]:
    """Points of calls like this one that were measured on this machine. Collective the first time in a world."""
    found, table = [], tuned.of(world, "fused GEMMs")
    for key, choice in [*table.items()]:
        if key.startswith(_prefix(problem)):
            try:
                found.append(of_choice(choice, problem))
            except (TypeError, ValueError) as err:  # on all ranks alike
                tuned.ignore(world, key, err)
    return found


# -- the decision -----------------------------------------------------------------------------------------------------


def choose(
    problem: GemmProblem, world, is_mapped: bool = True, of_this_machine: bool = True
) -> tuple[str, dict[str, Any]]:
    """The way (one of WAYS) of a call that `fits` and does not select one, and the options of its fused call.

    Collective the first time in a world, unless `of_this_machine` is False: then only shipped points count, as while torch
    traces. In the simulator, calls without a point are fused. Shipped points are for GPUs that map each other's memory
    (`is_mapped`).
    """
    device, points = world.device, of_machine(problem, world) if of_this_machine else []
    if device.type == "cuda" and is_mapped:
        gpu = torch.cuda.get_device_name(device)
        points += measured(problem.kind, problem.ranks, problem.dtype_name, gpu)
    point, options = nearest(points, problem), usual_options(problem, device)
    if point is None:
        return ("unfused" if device.type == "cuda" else "fused"), options
    if point.best == "fused" and device_obstacle(device):
        return "unfused", options
    same_layer = (point.k, point.n) == (problem.k, problem.n)
    return point.best, options | (point.fused if same_layer else {})


def experts_problem(ranks: int, tokens: int, top_k: int, hidden: int, inner: int, dtype: torch.dtype) -> GemmProblem:
    """A layer's experts as a problem of the table: the first GEMM, with evenly distributed rows.

    Args:
        tokens: tokens of a rank. inner: columns of an expert's gate.
    """
    # The number of choices per token determines how much can be hidden and how late rows arrive.
    return GemmProblem(f"moe_experts, top {top_k}", ranks, tokens * top_k, hidden, 2 * inner, dtype)


def are_experts_fused(problem: GemmProblem, device: torch.device) -> bool:
    """Whether expert GEMMs overlap with dispatch and combine by default.

    Always in the simulator; on GPUs, if this was faster at the nearest point of `measured.json`. Between two H100s it was
    slower: a token with 8 choices has 4 on each, so nearly all rows are late (docs/results/moe.md).
    """
    if device.type != "cuda":
        return True
    gpu = torch.cuda.get_device_name(device)
    point = nearest(measured(problem.kind, problem.ranks, problem.dtype_name, gpu), problem)
    return point is not None and point.best == "fused" and device_obstacle(device) is None


# -- geometry of a fused call -----------------------------------------------------------------------------------------

# Geometries with the time per tile relative to the first; measured, see docs/results/products.md.
GEOMETRIES = (
    (DEFAULT, 1.0),
    (Tiling(tile=(128, 192, 64), stages=5, columns=64), 0.76),
    (Tiling(tile=(128, 128, 64), stages=6, columns=64), 0.55),
)


def usual_options(problem: GemmProblem, device: torch.device) -> dict[str, Any]:
    """Default options of a fused call, for its class."""
    if device.type != "cuda":
        return {"tiling": SIMULATED}
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return {"tiling": best_tiling(problem, num_sms), "blocks": senders(problem)}


def senders(problem: GemmProblem) -> int:
    """Number of blocks that send beside a GEMM. More of them leave fewer to multiply, often with one more tile each.

    An FP8 reduce-scatter is too fast for four from three ranks on (one GPU's share of four, docs/results/products.md).
    """
    if problem.kind == "all_gather_matmul":
        return 8
    return 8 if problem.kind == "matmul_reduce_scatter" and problem.dtype == SCALED and problem.ranks > 2 else 4


def best_tiling(problem: GemmProblem, num_sms: int = 132) -> Tiling:
    """The geometry that minimises the time of the SM with the most tiles; not the first one only if it gains 3 %."""
    is_gather = problem.kind == "all_gather_matmul"
    rows = problem.rows if is_gather else problem.rows // problem.ranks
    workers = num_sms - (0 if is_gather or problem.ranks == 1 else 4)

    def time(geometry: tuple[Tiling, float]) -> float:
        (bm, bn, _), cost = geometry[0].tile, geometry[1]
        return -(-problem.ranks * -(-rows // bm) * -(-problem.n // bn) // workers) * cost

    best = min(GEOMETRIES, key=time)
    tiling = of_dtype(best[0] if time(best) * 1.03 < time(GEOMETRIES[0]) else DEFAULT, problem)
    if problem.kind == "matmul_reduce_scatter" and -(-rows // tiling.tile[0]) <= 2 * tiling.panel:
        # All rows of a panel are done at once: with few rows, half are sent while the other half is computed.
        return replace(tiling, panel=tiling.panel // 2)
    return tiling


def of_dtype(tiling: Tiling, problem: GemmProblem) -> Tiling:
    """The geometry for the dtype: FP8 tiles are twice as deep, and their scales leave less shared memory for stores."""
    if problem.dtype != SCALED:
        return tiling
    rows, columns, depth = tiling.tile
    return replace(tiling, tile=(rows, columns, 2 * depth), columns=min(tiling.columns, 64))
