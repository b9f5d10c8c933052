"""Which way a product with its communication takes: one fused call, or torch.mm and a collective one after the other.

An all-gather has a third way, in which copy engines bring the rows while cuBLAS multiplies (`is_pipelined`).

A model of both ways decides, not a list of shapes: a product takes as long as the SM with the most tiles, and
what is pushed meanwhile as long as its bytes need. Its constants were measured apart from one another (see below). Whole
calls between two GPUs have been measured (docs/results/products.md; MEASURED below), and each that the model takes was
faster than torch's ways; the others are taken with `fused=True` only.

With the widths of a layer (all-gather: k 8192, n 14336 per rank; the others: k 7168 per rank, n 8192) the model takes the
fused call from these numbers of rows on:

| dtype | ranks | all_gather_matmul | matmul_reduce_scatter | matmul_all_reduce |
| --- | --: | --: | --: | --: |
| bfloat16 | 2 | 1024 | 1024 | 2048 |
| bfloat16 | 4 | 512 | 2048 | 4096 |
| bfloat16 | 8 | 1024 | 2048 | 8192 |
| float8_e4m3fn | 2 | none up to 16384 | 2048 | 16384 |
| float8_e4m3fn | 4 | none up to 16384 | 4096 | 4096 |
| float8_e4m3fn | 8 | none up to 16384 | 4096 | 8192 |

The pipelined all-gather and product has been measured between two GPUs, with 8 bits, and is taken there.
"""

import math
from dataclasses import dataclass, replace

import torch

from tilescale_net.runtime import tuned

from .gemm import DEFAULT, SCALED, SUPPORTED_DTYPES, Tiling, device_obstacle
from .matmul_reduce_scatter import check_ring

# Geometry of the simulator, which runs threads in turn.
SIMULATED = Tiling(tile=(32, 32, 32), stages=2, panel=2, columns=16)


@dataclass(frozen=True)
class GemmProblem:
    """A call of a fused product.

    Attributes:
        kind: "all_gather_matmul", "matmul_reduce_scatter" or "matmul_all_reduce".
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
        """Rows of the product that a rank computes."""
        return self.rows * self.ranks if self.kind == "all_gather_matmul" else self.rows


def fits(product: GemmProblem) -> str | None:
    """Why the fused kernels cannot take a call; None where they can."""
    if product.dtype not in SUPPORTED_DTYPES:
        return f"dtype {product.dtype} is not one of {', '.join(map(str, SUPPORTED_DTYPES))}"
    for name in ("rows", "k", "n"):
        value = getattr(product, name)
        if value < 1:
            return f"{name} is {value}"
        if name != "rows" and value * product.dtype.itemsize % 16:
            return f"{name} is {value}; it must be a multiple of {16 // product.dtype.itemsize}"
    if product.kind != "all_gather_matmul" and product.rows % product.ranks:
        return f"rows is {product.rows}; it must be a multiple of {product.ranks} ranks"
    return None


# Measured on NVIDIA H100s and H200s, in CUDA graphs; times in us, bytes and flops per us. Collectives, pushes and calls of
# bfloat16 on two GPUs (docs/results/collectives.md, copies.md, products.md); products on one, with random data: what cuBLAS
# reaches at once on all SMs, and how much longer ours takes, with summands of 8 bits to scale and add too.
FLOPS = {torch.bfloat16: 700e6, torch.float16: 700e6, SCALED: 1340e6}
PRODUCT = {torch.bfloat16: 1.02, torch.float16: 1.02, SCALED: 1.08}
SCALED_SUMS = 1.15
LAUNCH = 5.0  # a kernel that waits for another one's flag, and its gate
PUSH = 330e3  # bytes that 8 blocks push while the others multiply
SENDERS = 4  # blocks beside a product whose result travels
# Bytes that one of them pushes, between two GPUs; beside a product of 8 bits, on one GPU's own memory.
SENT = {torch.bfloat16: 27e3, torch.float16: 27e3, SCALED: 28e3}
COPY_ENGINE = 390e3  # bytes that a copy engine moves to a peer (docs/results/copies.md)
AWAITED = 3.0  # a kernel that waits for a signal that is there
LAUNCHES = (
    60.0  # us of the host for a pipelined call of two ranks: a dozen launches, copies and events of 4 to 6 us each
)
PIPELINED = 1.03  # how much longer products of each PE's rows take than one of all rows
REST = 360e3  # bytes that all blocks push when the product is done
# A collective alone, between tensors of symmetric memory as the operators give it: until it has begun and ended, and the
# bytes that pass a rank.
COLLECTIVES = {
    "all_gather_matmul": (8.0, 335e3),
    "matmul_reduce_scatter": (7.0, 316e3),
    "matmul_all_reduce": (7.0, 324e3),
}
# Calls, numbers of ranks and dtypes of which whole fused calls have been measured, and the model found right.
MEASURED = {
    ("all_gather_matmul", 2, torch.bfloat16),
    ("matmul_reduce_scatter", 2, torch.bfloat16),
    ("matmul_all_reduce", 2, torch.bfloat16),
    ("all_gather_matmul", 2, SCALED),
    ("matmul_reduce_scatter", 2, SCALED),
}
# Numbers of ranks and dtypes of which the pipelined all-gather and product has been measured, and the model found right.
MEASURED_PIPELINED: set[tuple[int, torch.dtype]] = {(2, SCALED)}
MARGIN = 1.03  # how much faster than the sequence a fused call must be expected to be


def expected_us(
    product: GemmProblem, num_sms: int = 132, tiling: Tiling | None = None, blocks: int | None = None
) -> tuple[float, float]:
    """Time of the fused call, and of cuBLAS and the collective one after the other, by a model of both.

    An SM computes a tile at a time, so a product takes as long as the SM with the most tiles; but
    for cuBLAS with 8 bits, which cuts tiles where they would not come out even.

    Args:
        tiling: of the fused call, one of GEOMETRIES; default that of `best_tiling`.
        blocks: that send beside a product whose result travels; default those of `senders`.
    """
    p = product
    cost = _costs(p).get((tiling or best_tiling(p, num_sms)).tile, 1.0)
    tile, sequence = _tile_us(p, num_sms), _cublas_us(p, p.m, num_sms)
    part = p.m // p.ranks
    carried = p.dtype.itemsize if p.kind == "all_gather_matmul" or p.dtype != SCALED else 2
    moved = (p.ranks - 1) * part * (p.k if p.kind == "all_gather_matmul" else p.n) * carried
    begin, rate = COLLECTIVES[p.kind]
    sequence += begin + moved / rate
    if p.kind == "matmul_all_reduce":
        sequence += moved / rate
    is_summed = p.dtype == SCALED and p.kind != "all_gather_matmul"
    tile *= cost * (SCALED_SUMS if is_summed else PRODUCT[p.dtype])
    (bm, bn, _) = (tiling or best_tiling(p, num_sms)).tile
    across = -(-p.n // bn)
    tiles = p.ranks * -(-part // bm) * across
    if p.kind == "all_gather_matmul":
        # The rows of the peers come while the own ones are computed; the last to come are computed last.
        return max(-(-tiles // num_sms) * tile, moved / PUSH + tile) + 2 * LAUNCH, sequence
    blocks = blocks or senders(p, num_sms)
    workers, sent = num_sms - blocks, blocks * SENT[p.dtype]
    fused = -(-tiles // workers) * tile
    arrives = moved / max(p.ranks - 1, 1) / sent
    own = tiles // p.ranks // workers
    if p.kind == "matmul_reduce_scatter" and -(-part // bm) <= (tiling or best_tiling(p, num_sms)).panel:
        # Rows that are walked together are done together: none is sent before all are, and all own tiles wait for them.
        others = -(-(tiles - tiles // p.ranks) // workers)
        fused = max(fused, (others + max(own - 1, 0)) * tile + arrives)
    elif p.kind == "matmul_reduce_scatter":
        # The own tiles come last, and wait for what the others have computed last for this rank, from its first tile on.
        fused = max(fused, fused - (2 * own - 1) * tile + arrives)
    else:
        # The own tiles come last, and wait for what was computed last for this rank.
        fused += max(0, arrives - own * tile)
    if p.kind == "matmul_reduce_scatter":
        return max(fused, tile + moved / sent) + 2 * LAUNCH, sequence
    # Sums of the last slice, about a tile of each SM, are pushed when the product is done, and what is late.
    last = min(num_sms, -(-part // bm) * across) * bm * bn * (p.ranks - 1) * carried
    return fused + max(last, 2 * moved - sent * (fused - tile)) / REST + 3 * LAUNCH, sequence


def expected_pipelined_us(product: GemmProblem, num_sms: int = 132) -> float:
    """Time of `PipelinedAllGatherMatmul`, by the same model: cuBLAS, which has the rows of each hop when a copy engine has
    brought them; SMs that one PE's rows leave idle work on those of the next."""
    copy = product.rows * product.k * product.dtype.itemsize / COPY_ENGINE
    rows = (product.rows * (product.ranks - hop) for hop in range(product.ranks))
    end = max(hop * copy + PIPELINED * _cublas_us(product, m, num_sms) for hop, m in enumerate(rows))
    return LAUNCH + end + (AWAITED if product.ranks > 1 else 0)


def _tile_us(product: GemmProblem, num_sms: int) -> float:
    """Time of a tile of the first geometry, on one SM, at the rate of cuBLAS."""
    rows, columns, _ = DEFAULT.tile
    return 2 * rows * columns * product.k / (FLOPS[product.dtype] / num_sms)


def _cublas_us(product: GemmProblem, m: int, num_sms: int) -> float:
    """Time of `m` rows of a product by cuBLAS."""
    rows, columns, _ = DEFAULT.tile
    waves = -(-m // rows) * -(-product.n // columns) / num_sms
    return (waves if product.dtype == SCALED else math.ceil(waves)) * _tile_us(product, num_sms)


def slices_of(tiles: int, across: int, workers: int) -> int:
    """Slices of an all-reduce's rows: as many as have a tile for each block that multiplies, so that none waits.

    Args:
        tiles: rows of tiles that a rank owns. across: tiles of one.
    """
    return max(s for s in range(1, tiles + 1) if tiles % s == 0 and (s == 1 or tiles // s * across >= workers))


def senders(product: GemmProblem, num_sms: int = 132) -> int:
    """Blocks that send beside a product whose result travels.

    More of them leave fewer to multiply, and often one tile more to each. A product of 8 bits with reduce-scatter can be too
    fast for them; an all-reduce sends what is late by all SMs when the product is done.
    """
    if product.kind != "matmul_reduce_scatter" or product.dtype != SCALED:
        return SENDERS
    return min((SENDERS, 2 * SENDERS), key=lambda blocks: expected_us(product, num_sms, blocks=blocks)[0])


def blocks_for(device: torch.device, product: GemmProblem) -> dict[str, int]:
    """`blocks` of a fused call where they are not those of its class, as an argument."""
    if device.type != "cuda" or product.kind == "all_gather_matmul":
        return {}
    return {"blocks": senders(product, torch.cuda.get_device_properties(device).multi_processor_count)}


def prefers_fused(product: GemmProblem, device: torch.device, is_mapped: bool = True) -> bool:
    """Whether a call that `fits` and does not say how it is made is fused: where that has been measured to be faster.

    On a GPU other than sm_90, whose tensor cores and copies the fused kernels are written for, it never is, nor where some
    ranks are on other nodes (`is_mapped` False); in the simulator, where times mean nothing, always.
    """
    if device.type != "cuda":
        return True
    if not is_mapped or (product.kind, product.ranks, product.dtype) not in MEASURED or device_obstacle(device):
        return False
    return is_fused_faster(product, torch.cuda.get_device_properties(device).multi_processor_count)


def is_pipelined(product: GemmProblem, device: torch.device, is_mapped: bool = True) -> bool:
    """Whether an all-gather and product that overlap are made by copy engines and cuBLAS, and not by the fused kernels.

    Where that has been measured, and is expected to be faster than both other ways, also when it is launched and not replayed
    from a CUDA graph; never in the simulator, nor between nodes.
    """
    if device.type != "cuda" or not is_mapped or product.kind != "all_gather_matmul":
        return False
    if (product.ranks, product.dtype) not in MEASURED_PIPELINED:
        return False
    count = torch.cuda.get_device_properties(device).multi_processor_count
    fused, sequence = expected_us(product, count)
    pipelined = max(expected_pipelined_us(product, count), LAUNCHES)
    return pipelined < min(sequence / MARGIN, sequence if device_obstacle(device) else fused)


def are_experts_fused(device: torch.device) -> bool:
    """Whether products of experts overlap with dispatch and combine where the call does not say.

    In the simulator always; on GPUs nowhere yet. Between two H100s a token of 8 choices has 4 on each, so that nearly all
    rows are late: 8192 tokens took 1.29, 1.04 and 0.98 of one after the other with 8, 16 and 24 blocks beside a dispatch,
    1.02, 1.19 and 1.39 beside a combine (docs/results/moe.md).
    """
    return device.type != "cuda"


def is_fused_faster(product: GemmProblem, num_sms: int = 132) -> bool:
    """What the model says of sm_90.

    A product that SMs do not fill once hides nothing behind itself, and one whose rows for all owners are a
    single slice sends all of its sums at the end.
    """
    rows, columns, _ = DEFAULT.tile
    if product.kind == "matmul_all_reduce":
        (bm, bn, _), part = best_tiling(product, num_sms).tile, product.rows // product.ranks
        if slices_of(-(-part // bm), -(-product.n // bn), num_sms - SENDERS) == 1:
            return False
    if product.kind != "all_gather_matmul" and product.m * product.n < (num_sms - SENDERS) * rows * columns:
        return False
    fused, sequence = expected_us(product, num_sms)
    return fused * MARGIN < sequence


# Geometries of products, and how long a tile takes next to one of the first; measured, see docs/results/products.md.
GEOMETRIES = (
    (DEFAULT, 1.0),
    (Tiling(tile=(128, 192, 64), stages=5, columns=64), 0.76),
    (Tiling(tile=(128, 128, 64), stages=6, columns=64), 0.55),
)


def tiling_for(device: torch.device, product: GemmProblem) -> Tiling:
    """Geometry of a product."""
    if device.type != "cuda":
        return SIMULATED
    return best_tiling(product, torch.cuda.get_device_properties(device).multi_processor_count)


def best_tiling(product: GemmProblem, num_sms: int = 132) -> Tiling:
    """The geometry with which the SM with the most tiles is done first; a later one only where it gains 3 %."""
    is_gather = product.kind == "all_gather_matmul"
    rows = product.rows if is_gather else product.rows // product.ranks
    workers = num_sms - (0 if is_gather or product.ranks == 1 else SENDERS)

    def time(geometry: tuple[Tiling, float]) -> float:
        (bm, bn, _), cost = geometry[0].tile, geometry[1]
        return -(-product.ranks * -(-rows // bm) * -(-product.n // bn) // workers) * cost

    best = min(GEOMETRIES, key=time)
    tiling = of_dtype(best[0] if time(best) * 1.03 < time(GEOMETRIES[0]) else DEFAULT, product)
    if product.kind == "matmul_reduce_scatter" and -(-rows // tiling.tile[0]) <= 2 * tiling.panel:
        # Rows that are walked together are done together: of few, half are sent while the others are computed.
        return replace(tiling, panel=tiling.panel // 2)
    return tiling


def _costs(product: GemmProblem) -> dict[tuple[int, int, int], float]:
    """How long a tile of each geometry takes, next to one of the first."""
    return {of_dtype(tiling, product).tile: cost for tiling, cost in GEOMETRIES}


def of_dtype(tiling: Tiling, product: GemmProblem) -> Tiling:
    """The geometry for the dtype: a byte an element makes tiles twice as deep, whose scales take shared memory from what
    leaves at once.
    """
    if product.dtype != SCALED:
        return tiling
    rows, columns, depth = tiling.tile
    return replace(tiling, tile=(rows, columns, 2 * depth), columns=min(tiling.columns, 64))


# ---------------------------------------------------------------------------------------------------------------------
# What was tuned for a product: which way a call takes, and the geometry of the fused one; see `tilescale_net.tuning`.


ENGINES = ("auto", "ldst", "bulk")
_FIELDS = ("tile", "stages", "panel", "columns")


@dataclass(frozen=True)
class Chosen:
    """How a call is made.

    Attributes:
        fused: by the fused kernels; else the product and the collective one after the other,
        pipelined: or an all-gather by copy engines beside cuBLAS.
        tiling, blocks, engine: of the fused call.
    """

    fused: bool
    tiling: Tiling = Tiling()
    blocks: int = 1
    engine: str = "auto"
    pipelined: bool = False

    @property
    def options(self) -> dict[str, object]:
        """For the constructor of the product's class."""
        return {"tiling": self.tiling, "blocks": self.blocks, "engine": self.engine}


def key_of(product: GemmProblem) -> str:
    """Of calls that one choice serves: up to the next power of two of rows."""
    p = product
    return f"{p.kind} {str(p.dtype).removeprefix('torch.')} k={p.k} n={p.n} rows<={tuned.up_to(p.rows)}"


def as_choice(chosen: Chosen) -> tuned.Choice:
    """As it is kept."""
    if not chosen.fused:
        return {"fused": False, "pipelined": True} if chosen.pipelined else {"fused": False}
    t = chosen.tiling
    return {
        "fused": True, "tile": list(t.tile), "stages": t.stages, "panel": t.panel, "columns": t.columns,
        "blocks": chosen.blocks, "engine": chosen.engine,
    }  # fmt: skip


def of_choice(choice: tuned.Choice, product: GemmProblem) -> Chosen:
    """What was kept. Raises ValueError for what makes no sense for the product."""
    fused = choice.get("fused")
    if fused is False:
        pipelined = choice.get("pipelined", False)
        if not isinstance(pipelined, bool) or (pipelined and product.kind != "all_gather_matmul"):
            raise ValueError(f"{choice} is no choice for a product")
        return Chosen(False, pipelined=pipelined)
    tile, blocks, engine = choice.get("tile"), choice.get("blocks"), choice.get("engine")
    if fused is not True or not isinstance(tile, list) or engine not in ENGINES:
        raise ValueError(f"{choice} is no choice for a product")
    if isinstance(blocks, bool) or not isinstance(blocks, int) or not 1 <= blocks <= 64:
        raise ValueError(f"blocks is {blocks!r}; it must be between 1 and 64")
    tiling = Tiling(tuple(tile), *(choice.get(name) for name in _FIELDS[1:]))  # type: ignore[arg-type]
    if product.kind != "all_gather_matmul":
        check_ring(product.kind, tiling, product.dtype)
    return Chosen(True, tiling, blocks, engine)


def chosen(product: GemmProblem, world) -> Chosen | None:
    """What was tuned for a call, or None. Collective the first time in a world."""
    key = key_of(product)
    choice = tuned.of(world, "fused products").get(key)
    if choice is None:
        return None
    try:
        return of_choice(choice, product)
    except (TypeError, ValueError) as err:  # on all ranks alike
        tuned.ignore(world, key, err)
        return None
