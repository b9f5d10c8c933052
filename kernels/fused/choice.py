"""Which way a product with its communication takes: one fused call, or torch.mm and a collective one after the other.

A model of both ways decides, not a list of shapes: a product takes as long as the multiprocessor with the most tiles, and
what is pushed meanwhile as long as its bytes need. Its constants were measured apart from one another (see below). The
product has been measured alone, and whole calls on one GPU with peers that are always ahead (docs/results/products.md);
until they have been measured on several GPUs, a call there takes them with `fused=True` only.

With the widths of a layer (all-gather: k 8192, n 14336 per rank; the others: k 7168 per rank, n 8192; bfloat16) the model
takes the fused call from these numbers of rows on:

| ranks | all_gather_matmul | matmul_reduce_scatter | matmul_all_reduce |
| --: | --: | --: | --: |
| 2 | 512 | 1024 | 4096 |
| 4 | 512 | 2048 | 2048 |
| 8 | 1024 | 4096 | 4096 |
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tilescale_net.kernels.fused.matmul import DEFAULT, SCALED, TAKEN, Tiling

# Geometry of the simulator, which runs threads in turn.
SIMULATED = Tiling(tile=(32, 32, 32), stages=2, panel=2, columns=16)


@dataclass(frozen=True)
class Product:
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


def fits(product: Product) -> str | None:
    """Why the fused kernels cannot take a call; None where they can."""
    if product.dtype not in TAKEN:
        return f"dtype {product.dtype} is not one of {', '.join(map(str, TAKEN))}"
    for name in ("rows", "k", "n"):
        value = getattr(product, name)
        if value < 1:
            return f"{name} is {value}"
        if name != "rows" and value * product.dtype.itemsize % 16:
            return f"{name} is {value}; it must be a multiple of {16 // product.dtype.itemsize}"
    if product.kind != "all_gather_matmul" and product.rows % product.ranks:
        return f"rows is {product.rows}; it must be a multiple of {product.ranks} ranks"
    return None


# Measured on NVIDIA H200s joined by NVLink, in CUDA graphs; times in us, bytes and flops per us. Collectives and pushes on
# two GPUs (docs/results/collectives.md, copies.md); products on one, with random data, M from 512 to 16384, N 14336 and
# 28672, K 8192: cuBLAS reaches 670 to 763 TFLOP/s, and ours takes 0.99 to 1.03 times as long (docs/results/products.md).
FLOPS = 700e6 / 132  # of a multiprocessor, in a product of random data
LAUNCH = 5.0  # a kernel that waits for another one's flag, and its gate
PUSH = 330e3  # bytes that a few blocks push while the others multiply
# A collective alone: until it has begun and ended, and the bytes that pass a rank.
COLLECTIVES = {
    "all_gather_matmul": (8.0, 230e3),
    "matmul_reduce_scatter": (7.0, 280e3),
    "matmul_all_reduce": (5.0, 310e3),
}
# Whether whole fused calls, as they are now, have been measured on several GPUs, and the model found right.
MEASURED = False
# The product's time next to cuBLAS's, and how much faster than the sequence a fused call must be expected to be.
PRODUCT, MARGIN = 1.02, 1.03


def expected_us(product: Product, multiprocessors: int = 132, tiling: Tiling = DEFAULT) -> tuple[float, float]:
    """Time of the fused call, and of cuBLAS and the collective one after the other, by a model of both.

    A multiprocessor computes a tile at a time, so a product takes as long as the multiprocessor with the most tiles.
    """
    p, (bm, bn, _) = product, tiling.tile
    tile = 2 * bm * bn * p.k / FLOPS

    def waves(rows: int, of: int = multiprocessors) -> int:
        return -(-(-(-rows // bm) * -(-p.n // bn)) // of)

    part = p.m // p.ranks
    columns = p.k if p.kind == "all_gather_matmul" else p.n
    moved = (p.ranks - 1) * part * columns * p.dtype.itemsize
    begin, rate = COLLECTIVES[p.kind]
    passes = 2 if p.kind == "matmul_all_reduce" else 1
    sequence = waves(p.m) * tile + begin + passes * moved / rate
    if p.kind == "all_gather_matmul":
        # The rows of the peers come while the own ones are computed; the last to come are computed last.
        tiles = p.ranks * -(-part // bm) * -(-p.n // bn)
        return max(-(-tiles // multiprocessors) * tile * PRODUCT, moved / PUSH + tile) + 2 * LAUNCH, sequence
    fused = (p.ranks - 1) * (max(waves(part) * tile * PRODUCT, moved / (p.ranks - 1) / PUSH) + LAUNCH)
    if p.kind == "matmul_reduce_scatter":
        return fused + waves(part) * tile * PRODUCT + LAUNCH, sequence
    # A few blocks less compute the own rows; the last of them to be finished are pushed, and copied by the others.
    last = waves(part, multiprocessors - 8) * tile * PRODUCT
    return fused + max(last, moved / PUSH) + 3 * LAUNCH + moved / max(part // bm, 1) / PUSH, sequence


def is_taken(product: Product, device: torch.device) -> bool:
    """Whether a call that `fits` and does not say how it is made is fused: where that has been measured to be faster.

    On a GPU other than sm_90, whose tensor cores and copies the fused kernels are written for, it never is; in the
    simulator, where times mean nothing, always.
    """
    if device.type != "cuda":
        return True
    if not MEASURED or torch.cuda.get_device_capability(device)[0] != 9 or product.ranks == 1:
        return False
    return is_fused_faster(product, torch.cuda.get_device_properties(device).multi_processor_count)


def is_fused_faster(product: Product, multiprocessors: int = 132) -> bool:
    """What the model says of sm_90."""
    fused, sequence = expected_us(product, multiprocessors)
    return fused * MARGIN < sequence


# Geometries of products, and how long a tile takes next to one of the first; measured, see docs/results/products.md.
GEOMETRIES = (
    (DEFAULT, 1.0),
    (Tiling(tile=(128, 192, 64), stages=5, columns=64), 0.76),
    (Tiling(tile=(128, 128, 64), stages=6, columns=64), 0.55),
)


def tiling_for(device: torch.device, product: Product) -> Tiling:
    """Geometry of a product."""
    if device.type != "cuda":
        return SIMULATED
    return best_tiling(product, torch.cuda.get_device_properties(device).multi_processor_count)


def best_tiling(product: Product, multiprocessors: int = 132) -> Tiling:
    """The geometry with which the multiprocessor with the most tiles is done first; a later one only where it gains 3 %."""
    is_gather = product.kind == "all_gather_matmul"
    parts, rows = (product.ranks, product.rows) if is_gather else (1, product.rows // product.ranks)

    def time(geometry: tuple[Tiling, float]) -> float:
        (bm, bn, _), cost = geometry[0].tile, geometry[1]
        return -(-parts * -(-rows // bm) * -(-product.n // bn) // multiprocessors) * cost

    best = min(GEOMETRIES, key=time)
    return _of_dtype(best[0] if time(best) * 1.03 < time(GEOMETRIES[0]) else DEFAULT, product)


def _of_dtype(tiling: Tiling, product: Product) -> Tiling:
    """The geometry for the dtype: a byte an element makes tiles twice as deep, whose scales, and summands in a ring of
    their own, take shared memory from what leaves at once and from the ring of operands. Not measured.
    """
    if product.dtype != SCALED:
        return tiling
    rows, columns, depth = tiling.tile
    stages = tiling.stages - (product.kind != "all_gather_matmul")
    return replace(tiling, tile=(rows, columns, 2 * depth), stages=stages, columns=min(tiling.columns, 64))
