"""The choice of a GEMM's way with its communication: the fastest at the nearest measured shape.

There are three: the fused kernels; copy engines that bring the rows of an all-gather while cuBLAS multiplies; the GEMM and
the collective one after the other ("unfused"). Points come from `measured.json` beside this file, and from measurements of
`tilescale_net.tuning` on this machine. A call without a point is not fused.
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
WAYS = ("fused", "copy_engines", "unfused")  # the table has torch's beside them, for comparison
# A way is taken instead of the unfused one where it gains so much.
GAIN = 0.02
# By how much k * n of a call may differ from those of a point.
REACH = 4
# Geometry of the simulator, which runs threads in turn.
SIMULATED = Tiling(tile=(32, 32, 32), stages=2, panel=2, columns=16)


@dataclass(frozen=True)
class GemmProblem:
    """A call of a GEMM with its communication.

    Attributes:
        kind: "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", or that of `experts_problem`.
        ranks: of the group.
        rows, k: of `x` on a rank. n: columns of `w`.
        dtype: of both.
    """

    kind: str
    ranks: int
    rows: int
    k: int
    n: int
    dtype: torch.dtype

    @property
    def m(self) -> int:
        """Rows of the GEMM that a rank computes."""
        return self.rows * self.ranks if self.kind == "all_gather_matmul" else self.rows

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def fits(problem: GemmProblem) -> str | None:
    """Why the fused kernels cannot take a call; None where they can."""
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
    """What calls of one shape took.

    Attributes:
        m, k, n: of the GEMM of a rank.
        us: by each way that was measured.
        fused: options of the fused call, where they are not the usual ones.
        gpu: on which this was measured; "": this machine's.
    """

    m: int
    k: int
    n: int
    us: dict[str, float]
    fused: dict[str, Any] = field(default_factory=dict)
    gpu: str = ""

    @property
    def best(self) -> str:
        """The fastest way; "unfused" unless another one gains 2 %."""
        fastest = min(self.us, key=self.us.__getitem__)
        unfused = self.us.get("unfused", math.inf)
        return fastest if self.us[fastest] <= (1 - GAIN) * unfused else "unfused"


@functools.cache
def measured(kind: str, ranks: int, dtype_name: str, gpu: str) -> tuple[Point, ...]:
    """The points of `measured.json` for calls on `gpu` (as torch names it), those of another GPU last."""
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
    """The point nearest to a call by the ratios of m and of k * n; of equally near ones that of fewer rows, then the first.

    None where all are too far: a point speaks for half of its rows and more, and k * n within a factor of REACH. With fewer
    rows there is less to hide communication behind.
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
    """Of a point in the table of this machine."""
    return f"{_prefix(problem)}m={problem.m} k={problem.k} n={problem.n}"


def _prefix(problem: GemmProblem) -> str:
    return f"{problem.kind} {problem.dtype_name} "


def as_choice(point: Point) -> tuned.Choice:
    """A point as it is kept."""
    kept: tuned.Choice = {"m": point.m, "k": point.k, "n": point.n, "us": dict(point.us)}
    return kept | ({"fused": options_as_choice(point.fused)} if point.fused else {})


def options_as_choice(options: dict[str, Any]) -> tuned.Choice:
    """Options of a fused call as they are kept and shown."""
    tiling = options["tiling"]
    return vars(tiling) | {"tile": list(tiling.tile), "blocks": options["blocks"], "engine": options["engine"]}


def options_of(choice: tuned.Choice, problem: GemmProblem) -> dict[str, Any]:
    """Options of a fused call that were kept. Raises TypeError or ValueError for what makes no sense."""
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
    """The point that was kept. Raises TypeError or ValueError for what makes no sense for such calls."""
    m, k, n = shape = [choice.get(name, 0) for name in ("m", "k", "n")]
    us, fused = choice.get("us"), choice.get("fused")
    if not all(isinstance(value, int) and value > 0 for value in shape) or not isinstance(us, dict) or not us:
        raise ValueError(f"{choice} is no point of a GEMM")
    for way, took in us.items():
        of_kind = way in WAYS and (way != "copy_engines" or problem.kind == "all_gather_matmul")
        if not of_kind or isinstance(took, bool) or not isinstance(took, int | float) or not took > 0:
            raise ValueError(f"{way!r}: {took!r} is no time of a way of {problem.kind}")
    options: Any = options_of(fused, problem) if fused is not None else {}
    return Point(m, k, n, us, options)


def of_machine(problem: GemmProblem, world) -> list[Point]:
    """What was measured on this machine of calls like this one. Collective the first time in a world."""
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
    """The way of a call that `fits` and does not say how it is made, one of WAYS, and the options of its fused call.

    Collective the first time in a world, unless `of_this_machine` is False: then only shipped points are looked at, as while
    torch traces. In the simulator, where times mean nothing, calls of which nothing was measured are fused. Shipped points
    are of GPUs that map one another's memory (`is_mapped`).
    """
    device, points = world.device, of_machine(problem, world) if of_this_machine else []
    if device.type == "cuda" and is_mapped:
        gpu = torch.cuda.get_device_name(device)
        points += measured(problem.kind, problem.ranks, problem.dtype_name, gpu)
    point, usual = nearest(points, problem), usual_options(problem, device)
    if point is None:
        return ("unfused" if device.type == "cuda" else "fused"), usual
    if point.best == "fused" and device_obstacle(device):
        return "unfused", usual
    of_layer = (point.k, point.n) == (problem.k, problem.n)
    return point.best, usual | (point.fused if of_layer else {})


def experts_problem(ranks: int, tokens: int, top_k: int, hidden: int, inner: int, dtype: torch.dtype) -> GemmProblem:
    """A layer's experts, as the table has them: the rows of an even spread, and the first GEMM.

    Args:
        tokens: of a rank. inner: columns of an expert's gate.
    """
    # How much there is to hide, and how late rows come, depends on the choices of a token.
    return GemmProblem(f"moe_experts, top {top_k}", ranks, tokens * top_k, hidden, 2 * inner, dtype)


def are_experts_fused(problem: GemmProblem, device: torch.device) -> bool:
    """Whether GEMMs of experts overlap with dispatch and combine where the call does not say.

    In the simulator always; on GPUs where the nearest point of `measured.json` was faster so. Between two H100s it was not:
    a token of 8 choices has 4 on each, so that nearly all rows are late (docs/results/moe.md).
    """
    if device.type != "cuda":
        return True
    gpu = torch.cuda.get_device_name(device)
    point = nearest(measured(problem.kind, problem.ranks, problem.dtype_name, gpu), problem)
    return point is not None and point.best == "fused" and device_obstacle(device) is None


# -- geometry of a fused call -----------------------------------------------------------------------------------------

# Geometries, and how long a tile takes next to one of the first; measured, see docs/results/products.md.
GEOMETRIES = (
    (DEFAULT, 1.0),
    (Tiling(tile=(128, 192, 64), stages=5, columns=64), 0.76),
    (Tiling(tile=(128, 128, 64), stages=6, columns=64), 0.55),
)


def usual_options(problem: GemmProblem, device: torch.device) -> dict[str, Any]:
    """Geometry of a fused call of which none was measured on this machine, for its class."""
    if device.type != "cuda":
        return {"tiling": SIMULATED}
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return {"tiling": best_tiling(problem, num_sms), "blocks": senders(problem)}


def senders(problem: GemmProblem) -> int:
    """Blocks that send beside a GEMM. More of them leave fewer to multiply, and often one tile more to each.

    A reduce-scatter of 8 bits is too fast for four from three ranks on (one GPU's share of four, docs/results/products.md).
    """
    if problem.kind == "all_gather_matmul":
        return 8
    return 8 if problem.kind == "matmul_reduce_scatter" and problem.dtype == SCALED and problem.ranks > 2 else 4


def best_tiling(problem: GemmProblem, num_sms: int = 132) -> Tiling:
    """The geometry with which the SM with the most tiles is done first; a later one only where it gains 3 %."""
    is_gather = problem.kind == "all_gather_matmul"
    rows = problem.rows if is_gather else problem.rows // problem.ranks
    workers = num_sms - (0 if is_gather or problem.ranks == 1 else 4)

    def time(geometry: tuple[Tiling, float]) -> float:
        (bm, bn, _), cost = geometry[0].tile, geometry[1]
        return -(-problem.ranks * -(-rows // bm) * -(-problem.n // bn) // workers) * cost

    best = min(GEOMETRIES, key=time)
    tiling = of_dtype(best[0] if time(best) * 1.03 < time(GEOMETRIES[0]) else DEFAULT, problem)
    if problem.kind == "matmul_reduce_scatter" and -(-rows // tiling.tile[0]) <= 2 * tiling.panel:
        # Rows that are walked together are done together: of few, half are sent while the others are computed.
        return replace(tiling, panel=tiling.panel // 2)
    return tiling


def of_dtype(tiling: Tiling, problem: GemmProblem) -> Tiling:
    """The geometry for the dtype: a byte an element makes tiles twice as deep, whose scales take shared memory from what
    leaves at once.
    """
    if problem.dtype != SCALED:
        return tiling
    rows, columns, depth = tiling.tile
    return replace(tiling, tile=(rows, columns, 2 * depth), columns=min(tiling.columns, 64))
